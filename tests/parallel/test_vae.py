"""Text-to-video models whose latents a VAE makes inside of the pipeline: loss and every gradient of every layout."""

import pytest

from mmtrain.config.topology import JobLayout
from mmtrain.schedule.library.catalogue import CATALOGUE
from tests.models.dits import t2v
from tests.parallel.parity import Case, check, cut, identify, layouts, run_layout, selection, short
from tests.parallel.test_parity import TOLERANCE
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

RUNS = (("1F1B", 1), ("interleave", 0), ("interleave", 2, 2))
LONG = {"rope_max_seq_len": 64}
"""For clips of 16 s, by which a partition is chosen."""
CASES = {
    "images": Case(model=t2v(vae="kl"), runs=RUNS),
    "frames together": Case(model=t2v(vae="wan", patch_size=[2, 1, 2]), runs=RUNS),
    "frozen text encoder": Case(model=t2v(vae="wan", frozen=("language",)), runs=RUNS),
    "frozen DiT": Case(model=t2v(vae="kl", frozen=("dit",)), runs=RUNS[:2]),
    "mixed": Case(model=t2v(vae="wan", **LONG), partition="mixed-latency", runs=RUNS),
    "mixed, frozen text encoder": Case(
        model=t2v(vae="wan", frozen=("language",)), partition="mixed-parameters", runs=RUNS
    ),
    "drawn memory": Case(model=t2v(vae="wan"), runs=(("interleave", 1),), memories=2),
}
FEW = {name: CASES[name] for name in ("images", "frames together", "mixed")}
WIDE = {"num_attention_heads": 4, "attention_head_dim": 8, "text": {"num_key_value_heads": 4}}
DIVIDED = {
    "images": Case(model=t2v(vae="kl", **WIDE)),
    "frozen text encoder": Case(model=t2v(vae="wan", frozen=("language",), **WIDE)),
    "mixed": Case(model=t2v(vae="wan", **WIDE, **LONG), partition="mixed-latency"),
}


TABLE = {
    JobLayout.grid(): FEW,
    JobLayout.grid(pp=2): CASES,
    JobLayout.grid(pp=4): CASES,
    JobLayout.grid(pp=2, dp_shard=2): FEW,
}


@layouts(selection(TABLE, short))
def test_pairs_of_degrees_cases_and_runs(shape, cases):
    check(run_ranks(run_layout, shape.world_size, shape, cases), TOLERANCE)


@pytest.mark.nightly
@layouts(TABLE)
def test_every_layout(shape, cases):
    check(run_ranks(run_layout, shape.world_size, shape, cases, timeout=900), TOLERANCE)


@pytest.mark.parametrize("shape", [JobLayout.grid(pp=2, tp=2)], ids=identify)
def test_tensor_parallel_ranks_each_encode_everything(shape):
    check(run_ranks(run_layout, shape.world_size, shape, {n: short(c, 1) for n, c in DIVIDED.items()}), TOLERANCE)


def test_every_named_schedule():
    loop = tuple((name, 1) for name, schedule in CATALOGUE.items() if schedule.placement == "loop")
    down_and_up = tuple(
        (name, 1) for name, schedule in CATALOGUE.items() if schedule.placement == "v" and not schedule.refusal
    )
    cases = {
        "loop": Case(model=t2v(vae="kl", segments=(2, 2)), runs=loop),
        "v": Case(model=t2v(vae="kl"), runs=down_and_up, placement="v"),
    }
    shape = JobLayout.grid(pp=2)
    for case in cases.values():
        vae, *others = cut(case, shape).stages
        assert (vae.module, vae.pp_rank) == ("vae", 0)
        assert len(others) == 8
    check(run_ranks(run_layout, 2, shape, cases), TOLERANCE)


@pytest.mark.parametrize("pp", [2, 4])
def test_mixed_partitions_send_latents_and_captions_to_other_ranks(pp):
    parts = cut(CASES["mixed, frozen text encoder"], JobLayout.grid(pp=pp))
    assert [stage.pp_rank for stage in parts.of_module("vae")] == [0]
    assert parts.of_module("dit")[0].pp_rank > 0
    assert parts.tie_ranks[0] == 1
