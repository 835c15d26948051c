"""Nothing inside of a step's actions needs a value from the device, for which the host would wait, or copies pageable
memory to it.

On the meta device tensors have no values: `item`, `nonzero`, a boolean index or a copy to the host raises there, and
`no_waits` refuses copies of what is not pinned. Whole steps run as one rank of a group whose messages go nowhere. Not
covered: FSDP2, NCCL.
"""

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mmtrain.config.data import DiffusionConfig
from mmtrain.config.topology import JobLayout
from mmtrain.models.attention import varlen
from mmtrain.models.attention.varlen import LIMITS
from mmtrain.models.build import build_chunk
from mmtrain.models.diffusion import ClipNoise
from mmtrain.models.transfer import to_device, to_host
from mmtrain.parallel import local_model
from mmtrain.parallel.action_clock import ActionClock
from mmtrain.parallel.feed_ahead import Uploads
from mmtrain.parallel.local_model import build_local_model
from mmtrain.parallel.mesh import build_mesh
from mmtrain.parallel.runtime import PipelineScheduleRuntime
from mmtrain.parallel.weight_grads import WeightGrads
from mmtrain.spec.builders import model_spec
from mmtrain.spec.vocabulary import divided_vocabulary
from tests.guides import ROOT
from tests.lora import with_lora
from tests.models.attention.varlen import ANY
from tests.models.conftest import tiny_model
from tests.models.dits import t2v
from tests.models.towers import two_towers
from tests.parallel import parity
from tests.parallel.parity import NO_IMAGE, TEXT_ON_ONE, Case, identify, possible, shallow, short, with_mask
from tests.parallel.test_deepstack import deepstack
from tests.reference import in_chunks, make_batch, model_config
from tests.spec.test_builders import FAMILIES, inputs
from tests.waits import META, MetaCopies, no_waits


@pytest.mark.parametrize(
    ("backend", "adapters"), [("sdpa", False), ("varlen", False), ("varlen", True)], ids=["sdpa", "varlen", "LoRA"]
)
@pytest.mark.parametrize(("module", "choice"), FAMILIES)
def test_forward_and_backward_and_its_parts_wait_for_nothing(module, choice, backend, adapters, monkeypatch):
    """Of language models with a head that makes all logits, with predictions."""
    if backend == "varlen":  # what "auto" then chooses there
        monkeypatch.setitem(LIMITS, "meta", ANY)
    called = []
    attend = varlen.varlen_attn
    monkeypatch.setattr(varlen, "varlen_attn", lambda *args, **kwargs: called.append(1) or attend(*args, **kwargs))
    model = tiny_model(**choice)
    model = with_lora(model) if adapters else model
    spec = model_spec(model)
    chunk, x, kwargs = on_meta(model, spec, module, (0, len(spec.module(module).layers)))
    run_all(chunk, x, kwargs | ({"want_predictions": True, "want_losses": True} if module == "language" else {}))
    assert any(p.grad is not None for p in chunk.parameters())
    assert bool(called) == (backend == "varlen")


@pytest.mark.parametrize("parts", [0, 2])
def test_a_head_in_pieces_waits_for_nothing(parts):
    model = tiny_model()
    spec = model_spec(model)
    last = len(spec.text.layers) - 1
    if not parts:
        chunk, x, kwargs = on_meta(model, in_chunks(spec, model, 2), "language", (last, last + 1), first=last)
        assert chunk.loss_chunk_tokens == 2
        run_all(chunk, x, kwargs | {"want_predictions": True, "want_losses": True})
    else:
        _, x, kwargs = on_meta(model, spec, "language", (last, last + 1), first=last)
        divided = in_chunks(divided_vocabulary(spec, parts), model, 2)
        chunk = build_chunk(model, divided, "head.1", (0, 1), device="meta")
        assert chunk.loss_chunk_tokens == 2
        x = x.detach()[: len(kwargs["targets"])].requires_grad_()
        run_all(chunk, x, {"targets": kwargs["targets"], "want_predictions": True})
    assert all(p.grad is not None for p in chunk.parameters())


def on_meta(model, spec, module, layers, first=0):
    """A chunk, its input and its arguments without values. Args: first: layer of the input."""
    x, kwargs, _ = inputs(model, spec, module, first, torch.float32)
    kwargs = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    x = x.detach().to("meta").requires_grad_(x.is_floating_point())
    chunk = build_chunk(model, spec, module, layers, device="meta").to("meta")  # its buffers, too
    return chunk, x, kwargs


def run_all(chunk, x, kwargs):
    """Forward and backward, then forward, I and W."""

    def start():
        out = chunk(x, **kwargs)
        return out.sum() if isinstance(out, torch.Tensor) else out.loss_sum

    with no_waits():
        start().backward()
        grads = WeightGrads(chunk)
        with grads.deferred(0):
            loss = start()
        with grads.deferred(0):
            loss.backward()
        grads.run(0)


# ------------------------------------------------------------------------------------------- whole steps

SPLIT = (("1F1B", 1), ("1F1B", 1, 2))
"""With B, and with I and W."""
KEY_HEADS = {"key_heads": 4}
SOUNDS = [[["a", 1], [0], ["aa"], [1]], [["a"], [0], [0], [1]]]
"""Images of each document, a a sound."""
CASES = {
    "qwen2_vl, tied": Case(model=model_config(tied=True, **KEY_HEADS), runs=SPLIT),
    "qwen2_vl, patches": Case(model=model_config(**KEY_HEADS), runs=SPLIT, share_patches=True),
    "qwen2_5_vl, native merger": Case(
        model=with_mask(model_config("qwen2_5_vl_vision", "llama", projector="native", **KEY_HEADS), "modality"),
        runs=SPLIT, share_patches=True, head_groups=2,
    ),
    "qwen3_vl": Case(model=deepstack(4), runs=SPLIT),
    "siglip2": Case(model=model_config("siglip2_vision_model", "qwen3", **KEY_HEADS), runs=SPLIT),
    "clip": Case(model=model_config("clip_vision_model", "mistral", **KEY_HEADS), runs=SPLIT),
    "images and sound": Case(
        model=model_config(others={"audio": "whisper_encoder"}, **KEY_HEADS), runs=SPLIT, images=SOUNDS
    ),
    "images and packed sound": Case(
        model=model_config(others={"audio": "qwen2_audio_encoder"}, **KEY_HEADS), runs=SPLIT, images=SOUNDS
    ),
    "two towers": Case(model=two_towers("siglip", microbatches=2), runs=SPLIT),
    "siglip, images over tp": Case(
        model=with_mask(model_config("siglip_vision_model", "qwen2", **KEY_HEADS), "image_bidirectional"),
        runs=SPLIT, data_encoder=True,
    ),
    "siglip, frozen language": Case(
        model=model_config("siglip_vision_model", "llama", frozen=("language",), **KEY_HEADS), runs=SPLIT,
        images=TEXT_ON_ONE,
    ),
    "vit": Case(model=model_config("vit", "llama", **KEY_HEADS), runs=SPLIT, split="causal"),
    "LoRA": Case(model=with_lora(model_config(**KEY_HEADS)), runs=SPLIT),
    "text": Case(model=model_config(None, "qwen2", **KEY_HEADS), runs=SPLIT, images=NO_IMAGE),
    "text to video": Case(model=t2v(out_channels=4), runs=SPLIT),
    "text to video, VAE": Case(model=t2v(vae="wan"), runs=SPLIT),
}  # fmt: skip
LAYOUTS = [JobLayout.grid(**degrees) for degrees in ({}, {"tp": 2}, {"cp": 2}, {"cp": 2, "tp": 2}, {"pp": 2})]
DAILY = {
    "": ("qwen3_vl", "images and sound", "siglip2", "two towers", "text to video, VAE"),
    "tp": ("qwen2_vl, tied", "siglip, images over tp", "LoRA", "text to video"),
    "cp": ("qwen2_vl, patches", "images and packed sound"),
    "cp-tp": ("qwen2_5_vl, native merger", "vit"),
    "pp": ("text", "clip"),
}
"""Axes of a layout -> the cases that run on it daily: each of them once."""
STEPS = [
    pytest.param(
        shape, name, id=f"{identify(shape)} {name}",
        marks=() if name in DAILY["-".join(shape.divided)] else pytest.mark.nightly,
    )
    for shape in LAYOUTS for name in possible(shape, CASES)
    if shape.tp == 1 or name != "two towers"  # whose heads no table divides
]  # fmt: skip


@pytest.mark.parametrize(("shape", "name"), STEPS)
def test_a_step_of_a_rank_waits_for_nothing(shape, name, monkeypatch):
    case = short(CASES[name] if name == "qwen3_vl" else shallow(CASES[name], 2), 1)
    for rank in range(shape.pp):  # ranks of a submesh do alike
        with rank_of(shape, case, rank * shape.stage_size, monkeypatch) as run:
            for number, delay in enumerate(case.runs):
                with no_waits() as watched:
                    run(*delay[2:])
                assert watched.operators > 100 and watched.copied > 0, (rank, number)


@contextmanager
def rank_of(shape, case, rank, monkeypatch) -> Iterator:
    """Runs steps of one rank of a layout on the device without values."""
    monkeypatch.setattr(local_model, "_begin", lambda *args: None)
    monkeypatch.setattr(local_model, "uses_fsdp", lambda *args, **kwargs: False)  # it wants parameters with values
    monkeypatch.setattr(parity, "NOISE", ValuelessNoise(DiffusionConfig(), 7, 1, null_token=0))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=shape.world_size)
    try:
        submesh, parts = case.submesh(shape), parity.cut(case, shape)
        mesh = build_mesh(shape, torch.device("cpu"), data_encoder=submesh.data_encoder)
        mesh = dataclasses.replace(mesh, device=META)
        spec = case.spec(shape.pp, shape.tp)
        local = build_local_model(case.model, spec, parts, mesh, case.training, seed=5)
        for chunk in local.chunks:
            chunk.to(META)  # its buffers
        runtime = PipelineScheduleRuntime(local.stages)
        runtime._clock = ActionClock(torch.device("cpu"))
        planner = parity.make_planner(mesh, case, submesh, parts, spec, case.runs[0])
        batch = make_batch(case.model, case.images[0], seed=1)
        uploads = Uploads(META, MetaCopies())
        yield lambda *delay: parity.run_program(
            mesh, parts, planner, case.model, runtime, batch, *delay, uploads=uploads
        )
    finally:
        dist.destroy_process_group()


class ValuelessNoise(ClipNoise):
    """Of a device without a generator."""

    def _noise(self, clip, like):
        return torch.empty_like(like)


def test_copies_between_host_and_device_are_in_one_place():
    """Of what a training step runs: the commands are not, nor messages of ranks that share a device."""
    names = re.compile(r"\.cpu\(\)|\.item\(\)|\.nonzero\(|non_blocking=True|pin_memory=True")
    folders = ("models", "families", "parallel", "observe", "training")
    files = [path for folder in folders for path in sorted((ROOT / "mmtrain" / folder).rglob("*.py"))]
    found = {path.relative_to(ROOT / "mmtrain").as_posix() for path in files if names.search(path.read_text())}
    assert found == {"models/transfer.py", "parallel/offload.py", "parallel/stage.py"}


def test_what_comes_to_the_host_is_what_was_there():
    losses = {3: torch.tensor(1.5), 1: torch.tensor(2.5, dtype=torch.bfloat16)}
    others = torch.arange(4).view(2, 2), [torch.rand(3, dtype=torch.float64), torch.empty(0)], None
    found, (numbers, reals, nothing) = to_host((losses, others))
    assert found.keys() == losses.keys() and nothing is None
    for ours, theirs in zip([*found.values(), numbers, *reals], [*losses.values(), others[0], *others[1]], strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    assert to_host({}) == {}


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda x: x.sum().item(), AssertionError, "_local_scalar_dense.* needs values of the device"),
        (lambda x: x[x > 0], AssertionError, "index.* by a mask"),
        (lambda x: x[[0, 2]], AssertionError, "a list of indices is copied"),
        (lambda x: x.nonzero(), AssertionError, "nonzero.* needs values of the device"),
        (lambda x: x.cpu(), NotImplementedError, "Cannot copy out of meta tensor"),  # torch's own
        (lambda x: x.copy_(torch.ones(3)), AssertionError, r"copy_.* of pageable memory, \[3\]"),
        (lambda x: torch.ones(3).to(META), AssertionError, r"_to_copy.* of pageable memory, \[3\]"),
        (lambda x: torch.tensor([1.0], device=META), AssertionError, "tensor.* copies numbers to the device"),
        (lambda x: x.new_tensor([1.0]), AssertionError, "new_tensor.* copies numbers to the device"),
        (lambda x: torch.equal(x, x), AssertionError, "equal.* needs values of the device"),
    ],
)
def test_waits_are_seen(act, error, message):
    x = torch.empty(3, device=META)
    with pytest.raises(error, match=message), no_waits():
        act(x)
    with no_waits() as watched:
        to_device(torch.ones(3), META)
        x * torch.tensor(2.0)
    assert watched.copied == 1
