from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.errors import ConfigError
from mmtrain.planner.partition.partition import StageSpec, mixed_partition, partition
from mmtrain.spec.spec import ModelSpec, ModuleSpec
from mmtrain.spec.work_size import WorkSize
from tests.planner.specs import layers, vlm

SIZES = {
    "vision": WorkSize(rows=100, pairs=0, outputs=25),
    "language": WorkSize(rows=100, pairs=0, outputs=10),
}


def test_chunks_of_each_module_go_round_the_ranks() -> None:
    found = partition(vlm(4, 5), 2, {"vision": 1, "language": 2}, SIZES)
    assert [(s.index, s.module, s.layers, s.pp_rank, s.segment, s.first, s.last) for s in found.stages] == [
        (0, "vision", (0, 2), 0, 0, True, False),
        (1, "vision", (2, 4), 1, 0, False, True),
        (2, "language", (0, 2), 0, 0, True, False),
        (3, "language", (2, 3), 1, 0, False, False),
        (4, "language", (3, 4), 0, 1, False, False),
        (5, "language", (4, 5), 1, 1, False, True),
    ]
    assert found.stage_rank == (0, 1, 0, 1, 0, 1)
    assert [(m.name, m.stages) for m in found.modules] == [("vision", (0, 1)), ("language", (2, 3, 4, 5))]
    assert [s.index for s in found.of_rank(1)] == [1, 3, 5]


def test_ranks_that_send_to_each_other() -> None:
    """Neighbours of each chain, a module's last and the next one's first rank, both ways; and no others."""
    spec = vlm(8, 8)
    one = partition(spec, 4, {"vision": 1, "language": 1}, SIZES).hops(spec)
    down = {(0, 1), (1, 2), (2, 3)}
    assert one == down | {(t, s) for s, t in down} | {(3, 0), (0, 3)}
    assert partition(spec, 1, {"vision": 2, "language": 2}, SIZES).hops(spec) == frozenset()
    v = partition(spec, 4, {}, SIZES, placement="v").hops(spec)
    assert v == down | {(t, s) for s, t in down}
    apart = {"vision": range(1), "language": range(1, 4)}
    ranks = partition(spec, 4, {"vision": 1, "language": 1}, SIZES, ranks=apart, placed="parallel").hops(spec)
    assert ranks == down | {(t, s) for s, t in down}


def test_v_goes_down_the_ranks_and_back_up() -> None:
    for segments in ({}, {"vision": 2, "language": 2}):
        found = partition(vlm(6, 6), 3, segments, SIZES, placement="v")
        assert found.stage_rank == (0, 1, 2, 2, 1, 0) * 2
        assert [s.index for s in found.of_rank(0)] == [0, 5, 6, 11]
        assert [s.segment for s in found.of_module("language")] == [0, 0, 0, 1, 1, 1]
        assert found.of_module("language")[-1].last


@pytest.mark.parametrize("segments", [{"vision": 1}, {"language": 3}])
def test_v_needs_two_chunks_a_rank(segments: dict[str, int]) -> None:
    (number,) = segments.values()
    with pytest.raises(ConfigError, match=rf"num_segments = {number}: a V-shaped schedule .* set num_segments to 2"):
        partition(vlm(12, 12), 2, segments, SIZES, placement="v")


def test_heavy_last_layer_is_alone() -> None:
    module = ModuleSpec(name="language", consumes="documents", layers=(*layers(4), *layers(1, flops=4.0)))
    found = partition(ModelSpec(modules=(module,)), 2, {"language": 1}, SIZES)
    assert [s.layers for s in found.stages] == [(0, 4), (4, 5)]


def test_ranks_are_level_over_all_rounds() -> None:
    # Cut alone, chunks have 2, 3, 4, 4, 4, 4, 4 and 3 layers with FLOPs: 6, 7, 8 and 7 on a rank.
    free = layers(1, flops=0.0)
    module = ModuleSpec(name="language", consumes="documents", layers=(*free, *layers(28), *free))
    found = partition(ModelSpec(modules=(module,)), 4, {"language": 2}, SIZES)
    counts = [[sum(1 <= i <= 28 for i in range(*s.layers)) for s in found.of_rank(rank)] for rank in range(4)]
    assert [sum(mine) for mine in counts] == [7, 7, 7, 7]
    assert max(map(max, counts)) == 4


def test_number_of_segments_by_rule_follows_the_modules_times() -> None:
    spec = ModelSpec(
        modules=(
            ModuleSpec(name="vision", layers=tuple(layers(4))),
            ModuleSpec(name="language", consumes="documents", layers=tuple(layers(12)), after=("vision",)),
        )
    )
    found = partition(spec, 2, {}, SIZES)
    assert {m.name: len(m.stages) for m in found.modules} == {"vision": 2, "language": 6}
    shallow = partition(spec, 4, {}, {**SIZES, "language": WorkSize(rows=1000, pairs=0, outputs=1)})
    assert {m.name: len(m.stages) for m in shallow.modules} == {"vision": 4, "language": 12}


def test_rule_bears_a_module_without_work() -> None:
    found = partition(vlm(), 2, {}, {**SIZES, "vision": WorkSize(rows=0, pairs=0, outputs=0)})
    assert len(found.of_module("vision")) == 2


def test_one_rank_holds_everything() -> None:
    assert partition(vlm(2, 3), 1, {"vision": 1, "language": 1}, SIZES).stages[1] == StageSpec(
        index=1, module="language", layers=(0, 3), pp_rank=0, segment=0, first=True, last=True
    )


@pytest.mark.parametrize("segments", [{"vision": 3, "language": 1}, {"vision": 0, "language": 3}])
def test_fewer_layers_than_chunks_is_refused(segments: dict[str, int]) -> None:
    name = "vision" if segments["vision"] else "language"
    section = {"vision": "model.encoder", "language": "model.language"}[name]
    with pytest.raises(ConfigError, match=rf"{section}\.num_segments: module '{name}' has 4 layers .* = 6 chunks"):
        partition(vlm(4, 4), 2, segments, SIZES)
    with pytest.raises(ConfigError, match="pipeline_parallel_degree = 5 x 1 segments = 5 chunks"):
        partition(vlm(4, 4), 5, {}, SIZES)


def places(found):
    return [(s.module, s.layers, s.pp_rank, s.segment) for s in found.stages]


def test_a_mixed_boundary_may_fall_between_ranks() -> None:
    found = mixed_partition(vlm(4, 4), 2, 1, {"vision": [1.0] * 4, "language": [1.0] * 4})
    assert places(found) == [("vision", (0, 4), 0, 0), ("language", (0, 4), 1, 0)]
    assert found.tie_ranks == (1, 1)
    assert [(m.name, m.stages) for m in found.modules] == [("vision", (0,)), ("language", (1,))]


def test_a_rank_may_hold_the_end_of_one_module_and_the_beginning_of_the_next() -> None:
    # 1 1 1 1 2 | 2 2 2: six on each
    found = mixed_partition(vlm(4, 4), 2, 1, {"vision": [1.0] * 4, "language": [2.0] * 4})
    assert places(found) == [("vision", (0, 4), 0, 0), ("language", (0, 1), 0, 0), ("language", (1, 4), 1, 0)]
    assert [(s.first, s.last) for s in found.stages] == [(True, True), (True, False), (False, True)]
    assert found.tie_ranks == (0, 1)


def test_a_mixed_chain_goes_round_the_ranks_as_often_as_asked() -> None:
    # 3 3 | 3 1 1 | 1 1 1 | 1 1 1 1: the largest sum is 6, and lengths are as equal as that allows
    found = mixed_partition(vlm(3, 9), 2, 2, {"vision": [3.0] * 3, "language": [1.0] * 9})
    assert places(found) == [
        ("vision", (0, 2), 0, 0),
        ("vision", (2, 3), 1, 0),
        ("language", (0, 2), 1, 0),
        ("language", (2, 5), 0, 1),
        ("language", (5, 9), 1, 1),
    ]
    assert found.stage_rank == (0, 1, 1, 0, 1)
    assert found.tie_ranks == (1, 1)


def test_a_mixed_chain_goes_down_the_ranks_and_back_up() -> None:
    found = mixed_partition(vlm(3, 9), 2, 2, {"vision": [3.0] * 3, "language": [1.0] * 9}, "v")
    assert places(found) == [
        ("vision", (0, 2), 0, 0),
        ("vision", (2, 3), 1, 0),
        ("language", (0, 2), 1, 0),
        ("language", (2, 5), 1, 1),
        ("language", (5, 9), 0, 1),
    ]
    assert found.tie_ranks == (1, 0)
    with pytest.raises(ConfigError, match=r"num_segments = 3: a V-shaped schedule"):
        mixed_partition(vlm(3, 9), 2, 3, {"vision": [3.0] * 3, "language": [1.0] * 9}, "v")


@given(weights=st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.5, 7.0]), min_size=6, max_size=10), data=st.data())
def test_no_other_mixed_cut_is_better(weights: list[float], data: st.DataObject) -> None:
    num_vision = data.draw(st.integers(1, len(weights) - 2))
    num_ranks, passes = data.draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (4, 1)]))
    spec = vlm(num_vision, len(weights) - num_vision)
    found = mixed_partition(spec, num_ranks, passes, {"vision": weights[:num_vision], "language": weights[num_vision:]})
    loads: dict[tuple[int, int], float] = {}
    at = 0
    for stage in found.stages:
        low, high = (place + (num_vision if stage.module == "language" else 0) for place in stage.layers)
        assert low == at
        at = high
        part = stage.segment, stage.pp_rank
        assert not loads or part >= max(loads)
        loads[part] = loads.get(part, 0.0) + sum(weights[low:high])
    assert at == len(weights)
    count = num_ranks * passes
    assert len(loads) == count
    cuts = combinations(range(1, len(weights)), count - 1)
    best = min(max(sum(weights[a:b]) for a, b in pairwise([0, *cut, len(weights)])) for cut in cuts)
    assert max(loads.values()) == best


def test_a_mixed_chain_needs_a_layer_for_each_chunk() -> None:
    with pytest.raises(
        ConfigError, match=r"degree = 3 x 2 passes .* = 6 chunks, but all modules together have 5 layers"
    ):
        mixed_partition(vlm(2, 3), 3, 2, {"vision": [1.0] * 2, "language": [1.0] * 3})
