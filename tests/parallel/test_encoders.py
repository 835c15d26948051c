"""Models with several encoders train as one process does, on every axis and wherever the encoders are."""

import dataclasses

import pytest

from mmtrain.config.topology import JobLayout
from tests.parallel.parity import Case, check, layouts, run_layout, small, with_mask
from tests.parallel.test_parity import TOLERANCE
from tests.ranks import run_ranks
from tests.reference import model_config

pytestmark = pytest.mark.ranks

OPEN = (0, 0)
MIXED = [[["iai", "a"], [0, "i"], ["aa"], ["ai", 0]], [["a"], [0], ["ia", "i"], [0, "ai"]]]
"""Microbatches with both, with one, or with no kind; text between them."""
PICTURES = [[["i"], [0], ["ii", "i"], [0]], [[0], ["i"], [0], ["i"]]]
"""No sound in the whole batch."""
SOUND_ON_ONE = [[["a"], ["ai"], [0], ["i"]], [["i"], [0], ["ii"], [0]]]
MAPS = [[["im", "m"], ["a"], [0], ["mai", 0]], [["a"], ["mi"], [0], ["m"]]]


def with_ears(**options):
    return model_config(others={"audio": "whisper_encoder"}, **options)


def without_images(model):
    return dataclasses.replace(model, encoder=None)


CASES = {
    "images and sound": Case(model=with_ears(tied=True), images=MIXED),
    "frozen encoder": Case(model=with_ears(frozen=("encoder", "projector")), images=SOUND_ON_ONE),
    "frozen sound": Case(model=with_mask(with_ears(frozen=("audio",)), "modality"), images=MIXED),
    "frozen language": Case(model=with_ears(language="llama", frozen=("language",)), images=SOUND_ON_ONE),
    "no sound": Case(model=with_ears(), images=PICTURES),
    "sound alone": Case(model=without_images(with_ears()), images=[[["a"], [0], ["aa", "a"]], [["a"], [0], [0]]]),
    "three encoders": Case(
        model=with_mask(
            model_config("qwen2_5_vl_vision", projector="native", others={"maps": "vit", "audio": "whisper_encoder"}),
            "modality",
        ),
        images=MAPS,
    ),
}
PLACED = {
    "parallel": Case(model=with_ears(segments=OPEN), images=MIXED, placed="parallel"),
    "colocated": Case(model=with_ears(segments=OPEN, frozen=("encoder",)), images=MIXED, placed="colocated"),
    "chain": Case(model=with_ears(segments=OPEN), images=SOUND_ON_ONE, partition="mixed-parameters"),
}
SHAPES = [
    JobLayout.grid(),
    JobLayout.grid(pp=2),
    JobLayout.grid(tp=2),
    JobLayout.grid(cp=2),
    JobLayout.grid(dp_shard=2),
    JobLayout.grid(pp=2, tp=2),
    JobLayout.grid(pp=2, cp=2),
    JobLayout.grid(pp=2, dp_shard=2),
    JobLayout.grid(cp=2, tp=2),
    JobLayout.grid(pp=2, cp=2, tp=2),
    JobLayout.grid(pp=2, dp_shard=2, cp=2),
]
OVER_TP = {"images over tp": Case(model=with_ears(), images=MIXED, data_encoder=True)}
TABLE = {shape: CASES | (OVER_TP if shape.tp > 1 else {}) for shape in SHAPES}
PLACED_SHAPES = [
    JobLayout.grid(pp=3),
    JobLayout.grid(pp=4),
    JobLayout.grid(pp=3, dp_shard=2),
    JobLayout.grid(pp=3, tp=2),
    JobLayout.grid(pp=4, cp=2),
]
PLACED_TABLE = dict.fromkeys(PLACED_SHAPES, PLACED)
DAILY = {shape: {name: small(case, shape.pp) for name, case in cases.items()} for shape, cases in {
    JobLayout.grid(): {name: CASES[name] for name in ("three encoders", "sound alone")},
    JobLayout.grid(pp=2): {name: CASES[name] for name in ("images and sound", "frozen sound", "no sound")},
    JobLayout.grid(cp=2, tp=2): {"three encoders": CASES["three encoders"], "frozen encoder": CASES["frozen encoder"]},
    JobLayout.grid(dp_shard=2): {name: CASES[name] for name in ("frozen language",)},
    JobLayout.grid(pp=3): {"parallel": PLACED["parallel"], "colocated": PLACED["colocated"]},
}.items()}  # fmt: skip


@layouts(DAILY)
def test_pairs_of_degrees_cases_and_runs(shape, cases):
    check(run_ranks(run_layout, shape.world_size, shape, cases), TOLERANCE)


@pytest.mark.nightly
@layouts(TABLE | PLACED_TABLE)
def test_every_layout(shape, cases):
    check(run_ranks(run_layout, shape.world_size, shape, cases, timeout=900), TOLERANCE)
