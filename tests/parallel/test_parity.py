"""Loss and every parameter's gradient of every layout equal the one-process model's."""

import itertools

import pytest

from mmtrain.config.topology import JobLayout
from tests.models.dits import t2v
from tests.parallel.parity import (
    NO_IMAGE,
    TEXT_ON_ONE,
    Case,
    check,
    identify,
    layouts,
    possible,
    run_layout,
    selection,
    shallow,
    small,
    with_mask,
)
from tests.ranks import run_ranks
from tests.reference import model_config

TOLERANCE = 3e-5
"""Largest difference of one gradient element, relative to its tensor's largest element. Measured: at most 1.3e-5."""

ALL_RUNS = (("1F1B", 0), ("1F1B", 1), ("interleave", 0), ("interleave", 1))
PIPELINES = [
    JobLayout.grid(),
    JobLayout.grid(pp=2),
    JobLayout.grid(pp=4),
    JobLayout.grid(dp_shard=2),
    JobLayout.grid(dp_replicate=2),
    JobLayout.grid(dp_replicate=2, dp_shard=2),
    JobLayout.grid(pp=2, dp_shard=2),
    JobLayout.grid(pp=2, dp_replicate=2),
]
PIPELINE_CASES = {
    "trainable": Case(model=model_config(), runs=ALL_RUNS),
    "tied": Case(model=model_config(tied=True, segments=(1, 1)), runs=ALL_RUNS),
    "no image on one replica": Case(model=model_config(), images=TEXT_ON_ONE, runs=ALL_RUNS),
    "no image at all": Case(model=model_config(), images=NO_IMAGE, runs=ALL_RUNS),
    "frozen encoder": Case(model=model_config(frozen=("encoder",)), images=TEXT_ON_ONE, runs=ALL_RUNS),
    "frozen encoder and projector": Case(model=model_config(frozen=("encoder", "projector")), runs=ALL_RUNS),
    "frozen language": Case(
        model=model_config("siglip_vision_model", "llama", frozen=("language",)), images=TEXT_ON_ONE, runs=ALL_RUNS
    ),
    "class token": Case(model=model_config("vit", "llama"), runs=ALL_RUNS),
    "native merger": Case(model=model_config(projector="native"), runs=ALL_RUNS),
    "text to video": Case(model=t2v(out_channels=4), runs=ALL_RUNS[1:3]),
    "text to video, frozen text encoder": Case(
        model=t2v(out_channels=4, frozen=("language",), text={"model_type": "llama"}), runs=ALL_RUNS[3:]
    ),
    "text to video, frozen DiT": Case(model=t2v(out_channels=4, frozen=("dit",)), runs=ALL_RUNS[:1]),
    "text model": Case(model=model_config(None, "llama", tied=True), images=NO_IMAGE, runs=ALL_RUNS[::2]),
}

DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
GRID = [
    JobLayout.grid(**dict(zip(DEGREES, degrees, strict=True)))
    for degrees in itertools.product((1, 2), repeat=5)
    if 1 < JobLayout.grid(**dict(zip(DEGREES, degrees, strict=True))).world_size <= 8
]
"""All products of degrees 1 and 2 up to 8 ranks."""
COVERING = [
    JobLayout.grid(cp=2),
    JobLayout.grid(tp=2),
    JobLayout.grid(cp=4),
    JobLayout.grid(tp=4),
    JobLayout.grid(pp=2, cp=2),
    JobLayout.grid(pp=2, tp=2),
    JobLayout.grid(cp=2, tp=2),
    JobLayout.grid(dp_shard=2, cp=2),
    JobLayout.grid(dp_shard=2, tp=2),
    JobLayout.grid(dp_replicate=2, cp=2),
    JobLayout.grid(dp_replicate=2, tp=2),
    JobLayout.grid(pp=2, cp=2, tp=2),
    JobLayout.grid(pp=2, dp_shard=2, tp=2),
    JobLayout.grid(pp=2, dp_shard=2, cp=2),
    JobLayout.grid(dp_shard=2, cp=2, tp=2),
    JobLayout.grid(dp_replicate=2, dp_shard=2, tp=2),
    JobLayout.grid(pp=4, tp=2),
]
"""With `PIPELINES`: every axis alone, every pair of axes, and threes."""


def submesh_cases(shape: JobLayout) -> dict[str, Case]:
    """Two encoders x two language models, frozen and not, with every way to divide a submesh."""
    key_heads = max(2, shape.tp)
    frozen_encoder = model_config("qwen2_vl_vision", "llama", frozen=("encoder",), key_heads=key_heads)
    cases = {
        "text to video": Case(
            model=t2v(out_channels=4, text={"num_key_value_heads": key_heads}, num_attention_heads=key_heads)
        ),
        "qwen vision, qwen2, tied": Case(model=model_config(tied=True, key_heads=key_heads), split="causal"),
        "siglip, llama, frozen language": Case(
            model=model_config("siglip_vision_model", "llama", frozen=("language",), key_heads=key_heads),
            images=TEXT_ON_ONE,
        ),
        "qwen vision, llama, frozen encoder": Case(
            model=with_mask(frozen_encoder, "prefix"),
            share_patches=True,
        ),
        "qwen2.5 vision, llama, native merger, patches": Case(
            model=with_mask(
                model_config("qwen2_5_vl_vision", "llama", projector="native", key_heads=min(4, 2 * key_heads)),
                "modality",
            ),
            share_patches=True,
            head_groups=2,
        ),
        "siglip, qwen2, images over tp": Case(
            model=with_mask(model_config("siglip_vision_model", "qwen2", key_heads=key_heads), "image_bidirectional"),
            data_encoder=True,
        ),
    }
    return possible(shape, cases if shape.pp > 2 else {name: shallow(case) for name, case in cases.items()})


PLANES = {shape: submesh_cases(shape) for shape in COVERING}
FOURS = {
    JobLayout.grid(cp=4): ("qwen vision, qwen2, tied", "qwen2.5 vision, llama, native merger, patches"),
    JobLayout.grid(tp=4): ("text to video", "siglip, qwen2, images over tp"),
    JobLayout.grid(pp=4, tp=2): ("qwen vision, llama, frozen encoder",),
}
"""Daily, degrees of 4 need not meet every case: degrees of 2 do."""
PAIRS = {shape: cases for shape, cases in PLANES.items() if shape not in FOURS}
DAILY = selection(dict.fromkeys(PIPELINES, PIPELINE_CASES), small) | selection(PAIRS, small)
DAILY |= {shape: {name: small(PLANES[shape][name], shape.pp) for name in names} for shape, names in FOURS.items()}


@pytest.mark.ranks
@layouts(DAILY)
def test_pairs_of_degrees_cases_and_runs(shape, cases):
    check(run_ranks(run_layout, shape.world_size, shape, cases), TOLERANCE)


def test_the_daily_layouts_have_every_pair_of_axes():
    for pair in itertools.combinations(DEGREES, 2):
        assert any(all(getattr(shape, axis) > 1 for axis in pair) for shape in DAILY), pair


@pytest.mark.ranks
@pytest.mark.nightly
@layouts(dict.fromkeys(PIPELINES, PIPELINE_CASES) | PLANES)
def test_pipelines_replicas_and_submeshes(shape, cases):
    check(run_ranks(run_layout, shape.world_size, shape, cases, timeout=900), TOLERANCE)


@pytest.mark.ranks
@pytest.mark.nightly
@pytest.mark.parametrize("shape", GRID, ids=identify)
def test_every_layout(shape):
    cases = possible(shape, PIPELINE_CASES) | submesh_cases(shape)
    check(run_ranks(run_layout, shape.world_size, shape, cases, timeout=900), TOLERANCE)
