"""Parameters, FLOPs and kept bytes of the spec against the real modules."""

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmtrain.modality.bitfield import language_bits
from mmtrain.modality.metadata import DocumentMeta, MicrobatchMeta
from mmtrain.models.attention.context import attention_context
from mmtrain.models.batch import head_arguments
from mmtrain.models.build import build_chunk
from mmtrain.models.initialise import init_weights
from mmtrain.spec.builders import model_spec
from mmtrain.spec.spec import images_work
from mmtrain.spec.work_size import WorkSize
from tests.models.conftest import VISION_MODELS
from tests.models.dits import Clips, chunk, t2v

FAMILIES = [
    *VISION_MODELS,
    ("language", {"language": "qwen2"}),
    ("language", {"language": "qwen2", "language_config": {"tie_word_embeddings": True}}),
    ("language", {"language": "llama"}),
    ("language", {"language": "qwen3"}),
    ("language", {"language": "mistral"}),
    ("language", {"language": "qwen2_vl_text"}),
    ("language", {"language": "qwen3_vl_text"}),
    ("language", {"language": "llama", "language_config": {"attention_bias": False, "mlp_bias": False}}),
]
LENGTHS = (5, 11)


def inputs(model, spec, module, layer, dtype):
    """Input of one layer (with a gradient if it is an activation), keyword arguments and size of the work."""
    generator = torch.Generator().manual_seed(0)
    if module == "language":
        rows, labels = sum(LENGTHS), torch.full((sum(LENGTHS),), -100)
        labels[3:10] = torch.arange(7)
        positions = torch.cat([torch.arange(n) for n in LENGTHS])
        documents = [DocumentMeta(sample=i, num_tokens=n, num_targets=0, images=()) for i, n in enumerate(LENGTHS)]
        attention = attention_context(language_bits(MicrobatchMeta(documents=tuple(documents))))
        kwargs = {"attention": attention, "position_ids": positions, **head_arguments(labels)}
        # The counter also counts the pairs that a causal mask leaves out.
        size = WorkSize(rows=rows, pairs=sum(n * n for n in LENGTHS), outputs=7)
        first = torch.randint(0, 96, (rows,), generator=generator)
        width = 24
    else:
        shape = (2, 3, 32, 32)
        grids = ((1, 4, 4),) * 2
        if model.encoder.config["model_type"] == "qwen2_audio_encoder":
            shape, grids = (20, 50), ((1, 1, 12), (1, 1, 8))
        elif model.encoder.config["model_type"].startswith("qwen"):
            grids = ((1, 4, 4), (1, 4, 6))
            shape = (sum(t * h * w for t, h, w in grids), 96)
        elif model.encoder.config["model_type"] == "siglip2_vision_model":
            shape, grids = (40, 48), ((1, 4, 4), (1, 4, 6))
        elif model.encoder.config["model_type"] == "whisper":
            shape, grids = (2, 10, 24), ((1, 1, 12),) * 2
        kwargs = {"grids": grids}
        size = images_work(spec.module("vision"), grids)
        first = torch.randn(shape, generator=generator)
        width = 32
    layers = spec.module(module).layers
    arriving = size.outputs if layer and layers[layer - 1].output_rows == "outputs" else size.rows
    rows = arriving * (1 + spec.module(module).num_carried(layer - 1))
    x = first if layer == 0 else torch.randn(rows, width, generator=generator, dtype=dtype).requires_grad_()
    return x.to(dtype) if x.is_floating_point() and layer == 0 else x, kwargs, size


@pytest.mark.parametrize(("module", "choice"), FAMILIES)
def test_every_layer_has_the_parameters_and_outputs_that_the_spec_says(tiny, module, choice):
    model = tiny.model(**choice)
    spec = model_spec(model)
    layers = spec.module(module).layers
    for index, layer in enumerate(layers):
        chunk = build_chunk(model, spec, module, (index, index + 1), device="meta")
        assert all(p.is_meta for p in chunk.parameters())
        assert sum(p.numel() for p in chunk.parameters()) == layer.num_params, layer.name
    whole = build_chunk(model, spec, module, (0, len(layers)))
    numel = sum(p.numel() for p in whole.parameters())
    assert numel == spec.num_params - sum(m.num_params for m in spec.modules if m.name != module)


@pytest.mark.parametrize("leaving", [True, False], ids=["grad leaves", "first trainable"])
@pytest.mark.parametrize(("module", "choice"), FAMILIES)
def test_every_layer_has_the_flops_that_torch_counts(tiny, module, choice, leaving):
    model = tiny.model(**choice)
    spec = model_spec(model)
    for index, layer in enumerate(spec.module(module).layers):
        chunk = build_chunk(model, spec, module, (index, index + 1), device="cpu")
        init_weights(chunk, 0)
        x, kwargs, size = inputs(model, spec, module, index, torch.float32)
        x = x if leaving else x.detach()
        expected = layer.flops(size, input_grad=x.requires_grad)
        with sdpa_kernel(SDPBackend.MATH):  # the fused CPU kernel is not in torch's table of FLOPs
            with FlopCounterMode(display=False) as forward:
                out = chunk(x, **kwargs)
            with FlopCounterMode(display=False) as backward:
                (out[0] if isinstance(out, tuple) else out.sum()).backward()
        if not isinstance(out, tuple):
            assert out.shape == chunk.output_shape(size)
        assert forward.get_total_flops() == exactly(expected.forward), layer.name
        assert backward.get_total_flops() == exactly(expected.backward_input + expected.backward_weight), layer.name


def exactly(count: float):
    """The count, which may be rounded: where a class token is a feature, a patch is a fraction of one."""
    return pytest.approx(count, rel=1e-12)


def kept_bytes(chunk, x, kwargs) -> int:
    """Bytes of the distinct storages that autograd keeps, without those of parameters and buffers."""
    tensors = (t.to_local() if isinstance(t, DTensor) else t for t in (*chunk.parameters(), *chunk.buffers()))
    own = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # alive, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        chunk(x, **kwargs)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("module", "choice"),
    FAMILIES,
)
def test_every_layer_keeps_the_bytes_that_the_spec_says(tiny, module, choice, dtype):
    """Equal but for one scalar of the loss: at most 1 % of these tiny layers."""
    model = tiny.model(**choice)
    spec = model_spec(model, dtype_bytes=dtype.itemsize)
    layers = spec.module(module).layers
    for index, layer in enumerate(layers):
        is_block = "." in layer.name
        if is_block and index + 1 < len(layers) and "." not in layers[index + 1].name:
            continue
        x, kwargs, size = inputs(model, spec, module, index, dtype)

        def kept(count, index=index, x=x, kwargs=kwargs):
            chunk = build_chunk(model, spec, module, (index, index + count), device="cpu", dtype=dtype)
            init_weights(chunk, 0)
            return kept_bytes(chunk, x, kwargs)

        # Rotary cosines and sines are shared by the blocks of a chunk, so a block is the difference.
        measured = kept(2) - kept(1) if is_block else kept(1)
        # What travels with a chunk's input is held with it, as planning counts.
        carried = 0 if is_block else spec.module(module).num_carried(index - 1) * layers[index - 1].output_bytes(size)
        assert measured == pytest.approx(carried + layer.activation_bytes(size), rel=0.01), layer.name


# ------------------------------------------------------------------------------------- text to video

DITS = [{}, {"cross_attn_norm": False}, {"patch_size": [2, 1, 2], "ffn_dim": 24, "out_channels": 5}]


def dit_inputs(model, clips, layer, last, dtype):
    """Input of a layer of a DiT and its keyword arguments; both have a gradient where they are activations."""
    generator = torch.Generator().manual_seed(1)
    kwargs = dict(clips.common)
    if layer == 0:
        x = clips.latents
        states = torch.randn(sum(clips.text_lengths), 24, generator=generator, dtype=dtype)
        kwargs |= {"features": states.requires_grad_(), "timesteps": clips.timesteps}
    else:
        x = torch.randn(clips.size.rows + clips.size.texts + 7 * clips.size.clips, 32, generator=generator, dtype=dtype)
        x.requires_grad_()
    return x, kwargs | ({"targets": clips.targets} if last else {})


@pytest.mark.parametrize("change", DITS, ids=str)
def test_layers_of_a_text_to_video_model_have_their_parameters(change):
    model = t2v(**change)
    spec = model_spec(model)
    for module in spec.modules:
        for index, layer in enumerate(module.layers):
            made = build_chunk(model, spec, module.name, (index, index + 1))
            assert sum(p.numel() for p in made.parameters()) == layer.num_params, (module.name, layer.name)
    assert [layer.name for layer in spec.module("language").layers] == [
        "embed",
        *(f"layers.{i}" for i in range(3)),
        "norm",
    ]
    assert [layer.name for layer in spec.module("dit").layers] == ["embed", *(f"blocks.{i}" for i in range(3)), "head"]
    tied = model_spec(t2v(text={"tie_word_embeddings": True}))
    assert not tied.tied_embeddings  # there is no head
    assert tied.num_params == model_spec(t2v()).num_params


@pytest.mark.parametrize("frozen", [(), ("dit",)], ids=["trainable", "frozen"])
@pytest.mark.parametrize("leaving", [True, False], ids=["grad leaves", "first trainable"])
@pytest.mark.parametrize("change", DITS, ids=str)
def test_every_layer_of_a_dit_has_the_flops_that_torch_counts(change, leaving, frozen):
    model = t2v(**change, frozen=frozen)
    spec, clips = model_spec(model), Clips.draw(t2v(**change))
    layers = spec.module("dit").layers
    for index, layer in enumerate(layers):
        made = chunk(model, "dit", (index, index + 1))
        x, kwargs = dit_inputs(model, clips, index, index + 1 == len(layers), torch.float32)
        if not leaving:
            x, kwargs = (
                (x if index == 0 else x.detach()),
                kwargs | ({"features": kwargs["features"].detach()} if index == 0 else {}),
            )
        expected = layer.flops(clips.size, input_grad=leaving)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
            out = made(x, **kwargs)
        assert forward.get_total_flops() == expected.forward, layer.name
        if not leaving and frozen:
            assert not expected.backward_input and not expected.backward_weight
            continue
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as backward:
            (out.loss_sum if isinstance(out, tuple) else out.sum()).backward()
        assert backward.get_total_flops() == expected.backward_input + expected.backward_weight, layer.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", DITS, ids=str)
def test_every_layer_of_a_dit_keeps_the_bytes_that_the_spec_says(change, dtype):
    model = t2v(**change)
    spec, clips = model_spec(model, dtype_bytes=dtype.itemsize), Clips.draw(model)
    layers = spec.module("dit").layers

    def kept(low, high):
        x, kwargs = dit_inputs(model, clips, low, high == len(layers), dtype)
        return kept_bytes(chunk(model, "dit", (low, high), dtype=dtype), x, kwargs)

    # What comes in is held as one tensor by the first layer of a chunk, so that the others are differences.
    assert kept(0, 1) == layers[0].activation_bytes(clips.size)
    assert kept(1, 3) - kept(1, 2) == layers[2].activation_bytes(clips.size)
    # A sum of each clip's loss besides.
    assert kept(3, 5) - kept(3, 4) == pytest.approx(layers[4].activation_bytes(clips.size), abs=8 * clips.size.clips)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_norm_of_a_text_encoder_keeps_the_bytes_that_the_spec_says(dtype):
    model = t2v()
    spec, clips = model_spec(model, dtype_bytes=dtype.itemsize), Clips.draw(model)
    rows = sum(clips.text_lengths)
    documents = [
        DocumentMeta(sample=i, num_tokens=n, num_targets=0, images=()) for i, n in enumerate(clips.text_lengths)
    ]
    attention = attention_context(language_bits(MicrobatchMeta(documents=tuple(documents))))
    made = chunk(model, "language", (4, 5), dtype=dtype)
    x = torch.randn(rows, 24, dtype=dtype).requires_grad_()
    found = kept_bytes(made, x, {"attention": attention, "position_ids": torch.zeros(rows, dtype=torch.int64)})
    assert found == spec.module("language").layers[-1].activation_bytes(WorkSize(rows=rows, pairs=0, outputs=rows))
