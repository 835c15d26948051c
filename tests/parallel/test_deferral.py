"""Documents whose images are encoded with the microbatch before train as one process does."""

import dataclasses

import pytest

from mmtrain.config.sections import ActivationCheckpointConfig
from mmtrain.config.topology import JobLayout
from tests.lora import with_lora
from tests.parallel.parity import Case, check, layouts, run_layout, selection, short, small, with_mask
from tests.parallel.test_deepstack import deepstack
from tests.parallel.test_parity import TOLERANCE
from tests.parallel.test_split_backward import fill_adapters_by_name
from tests.ranks import run_ranks
from tests.reference import model_config

pytestmark = pytest.mark.ranks

OPEN = (0, 0)
PAIRS = [
    [["ii", 0, "i"], ["<i", "<ii", "i"], [0], ["<ii"], ["i", 0]],
    [[0, 0], ["<i", 0, "i"], ["iii"], ["<i", "i"], [0]],
]
"""Pairs of microbatches with both kinds of images, with deferred ones alone, and before text; a microbatch alone."""
PAIRS_ON_ONE = [PAIRS[0], [["i"], [0, 0], [0], ["ii"], ["i"]]]
SOUND = [[["ia", "a"], ["<ai", "<i", "i"], [0], ["<a", "i"]], [["i"], ["<a", 0], ["aa"], ["<iai", "a"]]]
SOUND_ALONE = [[["a", 0], ["<a", "<aa", "a"], [0], ["<a"]], [["a"], ["<a", 0], ["aa"], ["<aaa"]]]
RUNS = (("1F1B", 1), ("interleave", 0), ("ZB-H1", 2), ("searched", 1), ("Interleaved1F1B", 1), ("GPipe", 0))
RECOMPUTE = ActivationCheckpointConfig(mode="full")

CASES = {
    "trainable, tied": Case(model=model_config(tied=True), images=PAIRS, runs=RUNS),
    "frozen encoder": Case(
        model=model_config(frozen=("encoder", "projector")), images=PAIRS_ON_ONE, runs=(*RUNS[:2], RUNS[3])
    ),
    "frozen language": Case(
        model=model_config("siglip_vision_model", "llama", frozen=("language",)), images=PAIRS, runs=RUNS[2:4]
    ),
    "adapters": Case(
        model=with_lora(model_config()), images=PAIRS, runs=RUNS[:2], prepare=fill_adapters_by_name
    ),
    "recomputation": Case(model=model_config(), images=PAIRS, recompute=RECOMPUTE, runs=RUNS[2:4]),
    "inner features": Case(model=with_mask(deepstack(4), "modality"), images=PAIRS_ON_ONE, runs=RUNS[:2]),
    "sound": Case(model=model_config(others={"audio": "whisper_encoder"}), images=SOUND, runs=RUNS[1:3]),
    "sounds of packed rows": Case(
        model=model_config(None, others={"audio": "qwen2_audio_encoder"}), images=SOUND_ALONE, runs=RUNS[1:3]
    ),
    "blocks": Case(model=model_config(), images=PAIRS, braids=2),
    "memory options": Case(model=model_config(), images=PAIRS, memories=2),
    "split at a distance": Case(model=model_config(), images=PAIRS, runs=(("1F1B", 1, 2),)),
}  # fmt: skip
OF_CP = {
    "patches": Case(
        model=model_config("qwen2_5_vl_vision", "llama", projector="native"), images=PAIRS, share_patches=True,
        runs=RUNS[:2],
    ),
}  # fmt: skip
OF_TP = {"images over tp": Case(model=model_config(), images=PAIRS, data_encoder=True, runs=RUNS[:2])}


def placed(model, *, vision: int = 0, language: int = 0):
    """The model with numbers of ranks of its modules."""
    sections = {name: dataclasses.replace(x, ranks=vision) for name, x in model.encoders.items()}
    language_section = dataclasses.replace(model.language, ranks=language)
    return dataclasses.replace(model.with_modules(sections), language=language_section)


PLACED_RUNS = (("1F1B", 1), ("ZB-H1", 1), ("interleave", 1), ("searched", 2))
PLACED = {
    "more ranks of vision": Case(
        model=placed(model_config(segments=OPEN, tied=True), vision=2), images=PAIRS, placed="parallel",
        runs=PLACED_RUNS,
    ),
    "more ranks of language": Case(
        model=placed(model_config(segments=OPEN, tied=True), vision=1), images=PAIRS, placed="parallel",
        runs=PLACED_RUNS,
    ),
    "one chain": Case(model=model_config(segments=OPEN), images=PAIRS, partition="mixed-parameters", runs=RUNS[:4]),
}  # fmt: skip
V = {
    "one v": Case(
        model=model_config(segments=OPEN, tied=True), images=PAIRS, partition="mixed-latency",
        runs=(("ZBV", 1), ("DualPipeV", 1), ("STP", 1), ("V-min", 1)),
    ),
    "two vs": Case(model=model_config(segments=(2, 2)), images=PAIRS, placement="v", runs=(("ZBV", 1), ("V-half", 1))),
}  # fmt: skip

TABLE = {
    JobLayout.grid(): CASES,
    JobLayout.grid(pp=2): CASES | V,
    JobLayout.grid(pp=4): {name: CASES[name] for name in ("trainable, tied", "frozen encoder", "sound", "blocks")} | V,
    JobLayout.grid(pp=2, tp=2): CASES | OF_TP,
    JobLayout.grid(pp=2, cp=2): CASES | OF_CP,
    JobLayout.grid(pp=2, dp_shard=2): CASES,
    JobLayout.grid(pp=3): PLACED,
    JobLayout.grid(pp=3, dp_shard=2): PLACED,
}
DAILY = {
    JobLayout.grid(pp=2): ("trainable, tied", "frozen encoder", "inner features", "one v"),
    JobLayout.grid(pp=4): ("sound", "blocks"),
    JobLayout.grid(pp=2, tp=2): ("adapters", "images over tp"),
    JobLayout.grid(pp=2, cp=2): ("patches", "recomputation"),
    JobLayout.grid(pp=2, dp_shard=2): ("frozen language", "sounds of packed rows"),
    JobLayout.grid(pp=3): ("more ranks of vision", "more ranks of language"),
}


def smaller(case, pp):
    """The case with few blocks, unless features of inner ones travel, and few microbatches."""
    return short(case, pp) if case is CASES["inner features"] else small(case, pp)


@layouts(selection({shape: {name: TABLE[shape][name] for name in names} for shape, names in DAILY.items()}, smaller))
def test_pairs_of_degrees_cases_and_runs(shape, cases):
    check(run_ranks(run_layout, shape.world_size, shape, cases), TOLERANCE)


@pytest.mark.nightly
@layouts(TABLE)
def test_every_layout(shape, cases):
    check(run_ranks(run_layout, shape.world_size, shape, cases, timeout=900), TOLERANCE)
