"""Compiled blocks: one graph for batches of any sizes, with the gradients of blocks that are not compiled.

What runs daily is traced, differentiated and cut into forward and backward as always, and then run operator by
operator; the nightly tests make kernels of it, for which a C++ compiler is needed.
"""

import dataclasses
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from mmtrain.config import config
from mmtrain.config.topology import JobLayout
from mmtrain.local.driven_steps import gradients
from mmtrain.modality.bitfield import language_bits
from mmtrain.modality.metadata import DocumentMeta, ImageMeta, MicrobatchMeta
from mmtrain.models.attention.context import attention_context
from mmtrain.models.build import build_chunk
from mmtrain.models.chunk import Chunk
from mmtrain.models.initialise import init_weights
from mmtrain.parallel import compile as compiling
from mmtrain.parallel.torch_private import compiled_for_any_size, why_no_compiler
from mmtrain.spec.builders import model_spec
from mmtrain.spec.spec import documents_work, images_work
from mmtrain.spec.vision_shapes import vision_shape
from mmtrain.training.trainer import Trainer
from tests.jobs import layout, write_config
from tests.lora import with_lora
from tests.models.attention.varlen import ANY, on_cpu
from tests.parallel.parity import Case, check, run_layout, small
from tests.parallel.test_parity import TOLERANCE
from tests.parallel.test_split_backward import fill_adapters_by_name
from tests.ranks import run_ranks
from tests.reference import ENCODERS, LANGUAGES, TRAINING, model_config, two_grids

WITHOUT_KERNELS = "aot_eager_decomp_partition"
DAILY = ("qwen2_5_vl_vision", "siglip_vision_model", "qwen3")
"""A family with windows, one of images of one size, a decoder."""

pytestmark = [  # torch's own
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
needs_compiler = pytest.mark.skipif(bool(why_no_compiler("cpu")), reason=why_no_compiler("cpu"))


def nightly_but(names, daily=DAILY):
    return [name if name in daily else pytest.param(name, marks=pytest.mark.nightly) for name in names]


@pytest.fixture
def traced(monkeypatch):
    """Blocks that are compiled are made no kernels of."""
    monkeypatch.setattr(compiling, "compiled_for_any_size", partial(compiled_for_any_size, backend=WITHOUT_KERNELS))
    yield from fresh()


@pytest.fixture
def fresh_compiler():
    yield from fresh()


def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def vision_calls(name):
    """Works of an encoder with one image, and with more of other sizes."""
    model = model_config(name)
    shape, module = vision_shape(model), model_spec(model).module("vision")
    one, other = two_grids(model)
    for grids in [(one,), (one, other, one), (other,) * 5, (one, one)]:
        size = images_work(module, grids)
        yield model, size, {"grids": grids}, torch.randn(int(size.rows), shape.width)


def language_calls(name, mask="causal"):
    """Works of a decoder with one document, and with more of other lengths."""
    model = model_config(None, name)
    for lengths in [(9,), (3, 14, 2), (5,) * 4, (1, 1, 30)]:
        documents = tuple(
            DocumentMeta(
                sample=i, num_tokens=n, num_targets=0, prefix=n // 2,
                images=(ImageMeta(sample=i, index=0, grid=(1, 1, 1), num_tokens=n // 2, start=0),) if n > 1 else (),
            )
            for i, n in enumerate(lengths)
        )  # fmt: skip
        bits = language_bits(MicrobatchMeta(documents=documents), mask)
        positions = torch.cat([torch.arange(n) for n in lengths])
        given = {"attention": attention_context(bits), "position_ids": positions}
        yield model, documents_work(list(lengths), 0), given, torch.randn(sum(lengths), 48)


def blocks_of(model, module, first=1) -> Chunk:
    """The blocks of a module in one chunk. Args: first: layer of it."""
    spec = model_spec(model)
    layers = spec.module(module).layers
    indices = [i for i, layer in enumerate(layers) if layer.is_block]
    chunk = build_chunk(model, spec, module, (first, indices[-1] + 1), device="cpu")
    init_weights(chunk, 0)
    return chunk


def outcome(chunk, x: Tensor, given) -> dict[str, Tensor]:
    """The output and every gradient, and the bytes that are kept for the backward besides parameters and inputs."""
    chunk.zero_grad()
    x = x.clone().requires_grad_()
    kept: dict[int, int] = {}
    known = {p.untyped_storage().data_ptr() for p in (*chunk.parameters(), *chunk.buffers())}

    def pack(saved: Tensor) -> Tensor:
        if saved.untyped_storage().data_ptr() not in known and saved.is_floating_point():  # masks are of all blocks
            kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        out = chunk(x, **given)
    generator = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=generator))
    found = {name: p.grad.clone() for name, p in chunk.named_parameters()}
    return {**found, "output": out.detach(), "input": x.grad, "kept": torch.tensor(float(sum(kept.values())))}


def check_calls(module, calls):
    """Compares each call with the chunk as it is not compiled, and the graphs after the first with those after all.

    Measured: gradients at most 2e-6 of the largest one.
    """
    plain = compiled = None
    graphs = []
    for model, size, given, x in calls:
        if plain is None or compiled is None:
            plain, compiled = blocks_of(model, module), blocks_of(model, module)
            compiling.compile_blocks(compiled)
            layers = [layer for layer in model_spec(model).module(module).layers if layer.is_block]
        theirs, ours = outcome(plain, x, given), outcome(compiled, x, given)
        scale = max(g.abs().max() for name, g in theirs.items() if name not in ("output", "kept"))
        for name, tensor in theirs.items():
            if name != "kept":
                assert (ours[name] - tensor).abs().max() <= 1e-5 * max(scale, tensor.abs().max()), name
        planned = sum(layer.activation_bytes(size) for layer in layers)
        assert ours["kept"] <= planned, (ours["kept"], theirs["kept"], planned)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1] * len(graphs)
    assert not counters["graph_break"]


@pytest.mark.parametrize("name", nightly_but(ENCODERS))
def test_all_blocks_of_an_encoder_are_one_graph_for_any_images(name, traced):
    check_calls("vision", vision_calls(name))


def test_the_block_behind_an_embedding_has_the_graph_of_the_others(traced):
    """It gets a view, whose strides are others where there is one image."""
    model = model_config("siglip_vision_model")
    chunk = blocks_of(model, "vision", first=0)
    compiling.compile_blocks(chunk)
    for count in (1, 3, 2):
        chunk(torch.randn(count, 3, 16, 16), grids=((1, 4, 4),) * count).sum().backward()
        assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name", nightly_but(LANGUAGES))
def test_all_blocks_of_a_decoder_are_one_graph_for_any_documents(name, traced):
    check_calls("language", language_calls(name))


@pytest.mark.parametrize("mask", nightly_but(["image_bidirectional", "prefix", "modality"], ["modality"]))
def test_masks_are_no_part_of_the_graph(mask, traced):
    check_calls("language", language_calls("qwen2", mask))


@pytest.mark.nightly
@needs_compiler
@pytest.mark.parametrize("name", [*ENCODERS, *LANGUAGES])
def test_kernels_give_the_gradients_of_blocks_that_are_not_compiled(name, fresh_compiler):
    check_calls(
        "vision" if name in ENCODERS else "language", (vision_calls if name in ENCODERS else language_calls)(name)
    )


def test_variable_length_attention_is_in_the_graph(traced):
    with on_cpu(ANY) as calls:
        check_calls("language", language_calls("qwen2"))
        assert calls
        torch._dynamo.reset()
        counters.clear()
        check_calls("vision", vision_calls("qwen2_5_vl_vision"))


def case(model, backend, **options):
    return Case(model=model, compiled=backend, memories=2, **options)


def cases(backend):
    bf16 = dataclasses.replace(TRAINING, mixed_precision_param="bfloat16")
    return {
        "tied": case(model_config(tied=True), backend),
        "frozen encoder": case(model_config("siglip_vision_model", "llama", frozen=("encoder",)), backend),
        "adapters": case(with_lora(model_config()), backend, prepare=fill_adapters_by_name),
        "bfloat16": case(model_config(), backend, training=bf16),
    }


def check_ranks(shape, cases, timeout=240):
    """Against one process without compiled blocks; keeping, recomputing and offloading give the same to the bit."""
    found = run_ranks(run_layout, shape.world_size, shape, cases, timeout=timeout)
    rounded = {name: case for name, case in cases.items() if case.training.mixed_precision_param == "bfloat16"}
    check([{key: errors for key, errors in ours.items() if key[0] not in rounded} for ours in found], TOLERANCE)
    for rank, ours in enumerate(found):
        for key, errors in ours.items():
            assert errors.unequal == (), (key, rank)
            assert errors.gradient < 0.05  # bfloat16: measured at most 0.02


@pytest.mark.ranks
def test_gradients_on_two_pipeline_ranks():
    check_ranks(JobLayout.grid(pp=2), {"tied": small(case(model_config(tied=True), WITHOUT_KERNELS), 2)})


@pytest.mark.nightly
@pytest.mark.ranks
@needs_compiler
@pytest.mark.parametrize(
    ("degrees", "names"),
    [
        ({"pp": 2}, ["tied", "frozen encoder"]),
        ({"dp_shard": 2}, ["tied", "adapters", "bfloat16"]),
        ({"cp": 2}, ["tied"]),  # attention between two graphs
    ],
    ids=str,
)
def test_gradients_of_layouts_with_kernels(degrees, names):
    shape, given = JobLayout.grid(**degrees), cases("inductor")
    check_ranks(shape, {name: small(given[name], shape.pp) for name in names}, timeout=900)


def graphs_and_losses(rank, path, overrides):
    """[step] -> (graphs compiled so far, breaks, loss) of a job's first batches."""
    found = []
    for _, result in gradients(Trainer(config.load(path, overrides)), torch.device("cpu"), 8):
        found.append((counters["stats"]["unique_graphs"], len(counters["graph_break"]), result.loss))
    return found


@pytest.mark.nightly
@pytest.mark.ranks
@needs_compiler
def test_a_job_of_mixed_batches_compiles_nothing_after_its_first_steps(tmp_path, charts):
    """Losses measured: 3e-8 apart."""
    path = write_config(tmp_path, charts)
    overrides = [*layout(pp=2), "planner.enable=true", "planner.search.split_backward=false"]
    plain = run_ranks(graphs_and_losses, 2, path, overrides, timeout=900)
    for theirs, ours in zip(
        plain, run_ranks(graphs_and_losses, 2, path, [*overrides, "compile.enable=true"], timeout=900), strict=True
    ):
        graphs, breaks, losses = zip(*ours, strict=True)
        assert 1 <= graphs[1] == graphs[-1] <= 4
        assert not any(breaks)
        assert losses == pytest.approx([loss for _, _, loss in theirs], rel=1e-6)
