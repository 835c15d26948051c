"""Parameters, FLOPs and kept bytes of two towers: the spec against the real modules."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmtrain.modality.bitfield import language_bits
from mmtrain.modality.submesh import language_mask
from mmtrain.models.attention.context import attention_context
from mmtrain.models.batch import labelled_tokens
from mmtrain.models.build import build_chunk
from mmtrain.models.initialise import init_weights
from mmtrain.spec.builders import model_spec
from mmtrain.spec.spec import images_work
from mmtrain.spec.work_size import WorkSize
from tests.models.towers import PATCHES, make_pairs, two_towers
from tests.spec.test_builders import kept_bytes

TOWERS = [(kind, module) for kind in ("clip", "siglip") for module in ("vision", "language")]
COUNT = 5


def inputs(model, spec, module, layer, dtype):
    """Input of one layer (with a gradient if it is an activation), keyword arguments and size of the work."""
    batch, meta = make_pairs(model, [COUNT], seed=1)
    (tensors,), (counts,) = batch.microbatches, meta.microbatches
    if module == "vision":
        grids = (PATCHES,) * COUNT
        kwargs, size = {"grids": grids}, images_work(spec.module("vision"), grids)
        first = torch.cat(tensors.pixel_values).to(dtype)
    else:
        lengths = [document.num_tokens for document in counts.documents]
        kwargs = {
            "attention": attention_context(language_bits(counts, language_mask(model))),
            "position_ids": torch.cat([torch.arange(n) for n in lengths]),
            "labelled": torch.from_numpy(labelled_tokens([tensors.labels])[0]),
        }
        # The counter also counts the pairs that a causal mask leaves out.
        size = WorkSize(rows=sum(lengths), pairs=sum(n * n for n in lengths), outputs=COUNT)
        first = tensors.input_ids
    width = spec.module(module).layers[0].output_width
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size.rows, width, generator=generator, dtype=dtype).requires_grad_() if layer else first
    return x, kwargs, size


@pytest.mark.parametrize(("kind", "module"), TOWERS)
def test_layers_have_the_parameters_that_the_spec_says(kind, module):
    model = two_towers(kind)
    spec = model_spec(model)
    for index, layer in enumerate(spec.module(module).layers):
        chunk = build_chunk(model, spec, module, (index, index + 1))
        assert sum(p.numel() for p in chunk.parameters()) == layer.num_params, layer.name


@pytest.mark.parametrize("leaving", [True, False], ids=["grad leaves", "first trainable"])
@pytest.mark.parametrize(("kind", "module"), TOWERS)
def test_layers_have_the_flops_that_torch_counts(kind, module, leaving):
    model = two_towers(kind)
    spec = model_spec(model)
    for index, layer in enumerate(spec.module(module).layers):
        chunk = build_chunk(model, spec, module, (index, index + 1), device="cpu")
        init_weights(chunk, 0)
        x, kwargs, size = inputs(model, spec, module, index, torch.float32)
        x = x if leaving else x.detach()
        expected = layer.flops(size, input_grad=x.requires_grad)
        with sdpa_kernel(SDPBackend.MATH):
            with FlopCounterMode(display=False) as forward:
                out = chunk(x, **kwargs)
            with FlopCounterMode(display=False) as backward:
                out.sum().backward()
        assert out.shape == chunk.output_shape(size)
        assert forward.get_total_flops() == pytest.approx(expected.forward), layer.name
        assert backward.get_total_flops() == pytest.approx(expected.backward_input + expected.backward_weight), (
            layer.name
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "module"), TOWERS)
def test_layers_keep_the_bytes_that_the_spec_says(kind, module, dtype):
    model = two_towers(kind)
    spec = model_spec(model, dtype_bytes=dtype.itemsize)
    for index, layer in enumerate(spec.module(module).layers):
        x, kwargs, size = inputs(model, spec, module, index, dtype)
        chunk = build_chunk(model, spec, module, (index, index + 1), device="cpu", dtype=dtype)
        init_weights(chunk, 0)
        assert kept_bytes(chunk, x, kwargs) == pytest.approx(layer.activation_bytes(size), rel=0.01), layer.name
