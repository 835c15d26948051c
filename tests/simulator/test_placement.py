"""Modules on pipeline ranks of their own, or that encoders share."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import cornstarch
from mmtrain.config import config
from mmtrain.config.config import Config
from mmtrain.errors import ConfigError
from mmtrain.planner.job import Job
from mmtrain.planner.partition.partition import divide_ranks, rank_loads
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.typical_iterations import TypicalIterations

COSTS = st.lists(st.integers(1, 9).map(float), min_size=1, max_size=6)


def largest(costs: dict[str, list[float]], ranks: dict[str, int]) -> float:
    """The least possible load of the most loaded rank, by trying all cuts of modules on ranks of their own."""
    worst = 0.0
    for name, layers in costs.items():
        cuts = itertools.combinations(range(1, len(layers)), ranks[name] - 1)
        worst = max(
            worst, min(max(sum(layers[a:b]) for a, b in itertools.pairwise((0, *c, len(layers)))) for c in cuts)
        )
    return worst


@given(costs=st.lists(COSTS, min_size=2, max_size=3), num_ranks=st.integers(2, 6))
def test_numbers_of_ranks_equal_brute_force(costs: list[list[float]], num_ranks: int) -> None:
    named = {f"m{i}": layers for i, layers in enumerate(costs)}
    ones = dict.fromkeys(named, 1)
    found = divide_ranks(named, [[name] for name in named], ones, num_ranks, {})
    ways = [
        dict(zip(named, counts, strict=True))
        for counts in itertools.product(*(range(1, len(layers) + 1) for layers in costs))
        if sum(counts) == num_ranks
    ]
    if not ways:
        assert found is None
        return
    assert found is not None
    chosen = dict(zip(named, found, strict=True))
    assert sum(found) == num_ranks
    assert largest(named, chosen) == min(largest(named, way) for way in ways)
    for name, layers in named.items():
        assert max(rank_loads({name: layers}, ones, chosen[name])) == largest({name: layers}, chosen)


def test_given_numbers_are_kept() -> None:
    costs = {"a": [1.0] * 8, "b": [1.0] * 8}
    ones = {"a": 1, "b": 1}
    assert divide_ranks(costs, [["a"], ["b"]], ones, 4, {"a": 0, "b": 0}) == (2, 2)
    assert divide_ranks(costs, [["a"], ["b"]], ones, 4, {"a": 3, "b": 0}) == (3, 1)
    assert divide_ranks(costs, [["a"], ["b"]], ones, 4, {"a": 3, "b": 3}) is None
    assert divide_ranks(costs, [["a", "b"]], ones, 4, {"a": 4}) == (4,)


def test_modules_that_share_ranks_are_levelled_over_them() -> None:
    assert rank_loads({"a": [3.0, 1.0, 1.0], "b": [1.0, 1.0, 3.0]}, {"a": 1, "b": 1}, 2) == [5.0, 5.0]


def job(*overrides: str, name: str = "vlm_s.toml", pp: int = 4) -> Config:
    path = Path(__file__).parents[2] / "configs" / name
    degrees = (
        f"parallelism.pipeline_parallel_degree={pp}", "parallelism.tensor_parallel_degree=1",
        "parallelism.data_parallel_shard_degree=1", "training.global_batch_size=8", "planner.enable=false",
        "planner.memory_limit=", "parallelism.pipeline_parallel_schedule=1F1B",
        "model.encoder.num_segments=0", "model.language.num_segments=0",
    )  # fmt: skip
    return config.load(path, [*degrees, *overrides])


def ranks_of(made: Job) -> dict[str, list[int]]:
    return {m.name: [s.pp_rank for s in made.partition.of_module(m.name)] for m in made.spec.modules}


def test_each_module_has_ranks_of_its_own() -> None:
    made = make_job(job("planner.placement=parallel", "model.encoder.ranks=1"))
    assert ranks_of(made) == {"vision": [0], "language": [1, 2, 3]}
    assert made.partition.placed == "parallel"
    assert str(made.partition) == "1 on 1 + 1 on 3"
    assert "modules parallel, vision on 1 rank, language on 3 ranks" in made.partition_summary
    twice = make_job(job("planner.placement=colocated", "parallelism.pipeline_parallel_schedule=Interleaved1F1B"))
    for ranks in ranks_of(twice).values():
        first, count = ranks[0], len(set(ranks))
        assert ranks == [*range(first, first + count)] * 2


def test_a_frozen_encoder_gets_fewer_ranks() -> None:
    """Without a backward it computes a third; a trainable one of VLM-S is a part of it all."""
    keys = ("planner.placement=parallel", "planner.hardware=a40")
    trained, frozen = (
        len(ranks_of(make_job(job(*keys, *extra, pp=8)))["vision"])
        for extra in ((), ("model.encoder.trainable=false", "model.projector.trainable=false"))
    )
    assert frozen < trained


@pytest.mark.parametrize("schedule", ["1F1B", "interleave"])
def test_the_search_is_no_slower_than_any_placement(schedule: str) -> None:
    keys = ("planner.hardware=a40", f"parallelism.pipeline_parallel_schedule={schedule}")
    seconds = {}
    for how in ("spread", "parallel", "search"):
        made = make_job(chosen := job(*keys, f"planner.placement={how}"))
        typical = TypicalIterations.draw(chosen, made.spec, made.costs, made.sub_microbatch_size)
        seconds[how] = typical.seconds(made.partition)
    assert seconds["search"] <= min(seconds.values()) * 1.005  # of which a segment more has to save


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.encoder.ranks=2"], r'model\.encoder\.ranks = 2 has no effect with planner\.placement = "spread"'),
        (["planner.placement=search", "model.encoder.ranks=2"], r'no effect with planner\.placement = "search"'),
        (
            ["planner.placement=parallel", "model.encoder.ranks=4"],
            r"model\.encoder\.ranks = 4: parallelism\.pipeline_parallel_degree = 4 pipeline ranks cannot be divided "
            r"so; vision at least 1 .* language at least 1",
        ),
        (
            ["planner.placement=parallel", "planner.partition=dip"],
            r'planner\.partition = "dip", which puts every module',
        ),
        (
            ["planner.placement=parallel", "parallelism.pipeline_parallel_schedule=ZBV"],
            r'planner\.placement = "parallel" with parallelism\.pipeline_parallel_schedule = "ZBV"',
        ),
        (
            ["planner.placement=parallel", "parallelism.pipeline_parallel_degree=1"],
            r"pipeline_parallel_degree = 1: modules on ranks of their own need at least two",
        ),
    ],
)
def test_placements_that_cannot_be(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_job(job(*overrides))


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (3.0, 1.0), (1.0, 2.0)])
def test_the_gain_of_being_aware_with_fine_layers(a: float, b: float) -> None:
    """Both modules frozen and recomputed: an encoder has forwards alone, the language model three times as much.

    The most loaded rank, cut as if all layers trained over cut by what they take, is near 3 (a + b) / (a + 3 b).
    """
    fine, num_ranks = 240, 12
    ones = {"encoder": 1, "language": 1}
    forward = {"encoder": [a / fine] * fine, "language": [b / fine] * fine}
    seconds = {"encoder": forward["encoder"], "language": [3 * x for x in forward["language"]]}
    loads = {}
    for how, costs in (("aware", seconds), ("unaware", forward)):
        ranks = divide_ranks(costs, [["encoder"], ["language"]], ones, num_ranks, {})
        assert ranks is not None
        loads[how] = max(
            max(rank_loads({name: seconds[name]}, ones, n)) for name, n in zip(seconds, ranks, strict=True)
        )
    assert loads["unaware"] / loads["aware"] == pytest.approx(3 * (a + b) / (a + 3 * b), rel=0.05)


def test_frozen_models_of_cornstarch(tmp_path: Path) -> None:
    """Aware is never slower by more than 1 %, and the search no slower than any placement."""
    for name in ("SSS", "LLS", "MML"):
        found = cornstarch.compare(name, tmp_path, pp=6, evaluations=0)
        for placement in ("parallel", "colocated"):
            assert found[f"{placement} aware"] <= 1.01 * found[f"{placement} unaware"]
            assert found["search"] <= found[f"{placement} aware"]


def test_encoders_share_the_first_ranks(tmp_path: Path) -> None:
    """Of a job with two encoders, cut by drawn iterations that have items for both."""
    colocated = make_job(cornstarch.job("SSS", tmp_path, pp=6, overrides=["planner.placement=colocated"]))
    ranks = ranks_of(colocated)
    assert ranks["vision"] == ranks["audio"] == [*range(len(ranks["audio"]))]
    assert ranks["language"] == [*range(len(ranks["audio"]), 6)]
    assert "vision and audio on" in colocated.partition_summary
    parallel = ranks_of(
        make_job(
            cornstarch.job(
                "SSS", tmp_path, pp=6, overrides=["planner.placement=parallel", "model.modules.audio.ranks=2"]
            )
        )
    )
    assert len(parallel["audio"]) == 2
    assert sorted(itertools.chain(*parallel.values())) == [*range(6)]
    searched = make_job(cornstarch.job("SSS", tmp_path, pp=6, overrides=["planner.placement=search"]))
    assert "by search; simulated iterations of the best of" in searched.partition_summary
    with pytest.raises(ConfigError, match=r"model\.modules\.audio\.ranks = 7: .*audio at least 1 and at most"):
        keys = ["planner.placement=parallel", "model.modules.audio.ranks=7"]
        make_job(cornstarch.job("SSS", tmp_path, pp=6, overrides=keys))
