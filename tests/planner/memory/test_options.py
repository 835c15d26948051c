import math
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmtrain.config import config
from mmtrain.config.planner import DeviceConfig, PlannerConfig, SearchConfig
from mmtrain.config.sections import ActivationCheckpointConfig
from mmtrain.costs.cost_model import FlopsCosts, HostCopy
from mmtrain.errors import PlanError
from mmtrain.modality.metadata import IterationMeta, MicrobatchMeta
from mmtrain.modality.typical import TypicalSizes
from mmtrain.planner.batching import make_batching
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.make_problem import make_problem
from mmtrain.planner.memory.options import (
    CANDIDATES,
    BlockKind,
    BlockPrice,
    MemoryChoices,
    mixes,
    seconds,
    shape_class,
    stage_memory,
)
from mmtrain.planner.partition.partition import partition
from mmtrain.planner.search.search import search
from mmtrain.planner.search.search_options import SearchOptions
from mmtrain.schedule.action import Kind
from mmtrain.schedule.plan import check
from mmtrain.schedule.problem import Option, PlanningProblem
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.workloads import draw
from mmtrain.spec.memory_strategies import BlockMemory, StageMemory, strategies_of
from mmtrain.spec.work_size import WorkSize
from tests.examples import examples
from tests.planner.specs import META, microbatch, vlm

CONFIG = PlannerConfig(enable=True, device=DeviceConfig(flops_per_s=1e3, host_bytes_per_s=500.0))
ALL = strategies_of(("keep", "selective", "recompute", "offload"))
NOTHING = BlockPrice(forward_s=0.0, backward_s=0.0, kept_bytes=0.0)


def problem(
    memory: MemoryChoices, limits: list[float | None] | None = None, *, frozen: bool = False, **more: bool
) -> PlanningProblem:
    spec = vlm(frozen_vision=frozen)
    batching = make_batching(META, spec)
    sizes = dict(zip(("vision", "language"), batching.sizes, strict=False))
    parts = partition(spec, 2, {"vision": 1, "language": 1}, sizes)
    return make_problem(spec, parts, batching, FlopsCosts.of(CONFIG), CONFIG, memory=memory, limits=limits, **more)


def planned(*names: str) -> MemoryChoices:
    return MemoryChoices(strategies=strategies_of(names))


def test_text_of_a_stage_memory_round_trips_and_nothing_else_does() -> None:
    mixed = StageMemory((BlockMemory.OFFLOAD, BlockMemory.OFFLOAD, BlockMemory.KEEP))
    assert str(mixed) == "2 offload, 1 keep"
    assert StageMemory.parse("2 offload, 1 keep", 3) == mixed
    for how in BlockMemory:
        assert StageMemory.parse(str(StageMemory.uniform(how, 3)), 3) == StageMemory.uniform(how, 3)
    assert str(StageMemory(())) == "keep"
    for text in ("2 offload", "3 keep", "1 keep, 2 keep", "02 offload, 1 keep", "kept", "", "2 offload,1 keep"):
        with pytest.raises(PlanError, match="3 blocks"):
            StageMemory.parse(text, 3)


def prices(draw: st.DrawFn) -> tuple[BlockPrice, ...]:
    some = st.floats(0.01, 10)
    keep = BlockPrice(forward_s=draw(some), backward_s=draw(some), kept_bytes=draw(some) + 10)
    more = [
        BlockPrice(forward_s=keep.forward_s, backward_s=keep.backward_s + draw(some), kept_bytes=draw(some))
        for _ in range(draw(st.integers(0, 2)))
    ]
    moved = BlockPrice(forward_s=keep.forward_s, backward_s=keep.backward_s, kept_bytes=0.0, host_bytes=keep.kept_bytes)
    return (moved, *more, keep) if draw(st.booleans()) else (*more, keep)


@st.composite
def kinds(draw: st.DrawFn) -> tuple[BlockKind, ...]:
    number = draw(st.integers(1, 2))
    found = []
    one = prices(draw)
    for _ in range(number):
        found.append(BlockKind(count=draw(st.integers(1, 5)), prices=one))
        one = tuple(
            BlockPrice(**{name: 1.5 * getattr(p, name) for name in BlockPrice.__dataclass_fields__}) for p in one
        )
    return tuple(found)


@settings(max_examples=examples(60))
@given(kinds(), st.booleans(), st.floats(0.1, 100))
def test_mixes_are_the_best_of_their_buckets(of: tuple[BlockKind, ...], overlaps: bool, rate: float) -> None:
    host = HostCopy(bytes_per_s=rate, overlaps=overlaps)
    found = mixes(of, NOTHING, host)
    assert 1 <= len(found) <= CANDIDATES
    rows = [
        [row for row in product(*(range(kind.count + 1) for _ in kind.prices)) if sum(row) == kind.count] for kind in of
    ]
    table = {
        counts: sum(
            np.array(row) @ np.array([p.amounts for p in kind.prices]) for row, kind in zip(counts, of, strict=True)
        )
        for counts in product(*rows)
    }
    time = dict(zip(table, seconds(np.array(list(table.values())), host), strict=True))
    held = {counts: amounts[2] for counts, amounts in table.items()}
    assert math.isclose(time[found[0]], min(time.values()), rel_tol=1e-9)
    assert math.isclose(held[found[-1]], min(held.values()), rel_tol=1e-9, abs_tol=1e-9)
    for a, b in pairwise(found):
        assert time[a] <= time[b] and held[a] > held[b]
    worse = {
        c: any(time[d] <= time[c] and held[d] <= held[c] and (time[d], held[d]) != (time[c], held[c]) for d in table)
        for c in table
    }
    front = {(round(time[c], 9), round(held[c], 9)) for c in table if not worse[c]}
    # Two kinds are thinned before they are combined; a front that is small enough is offered as it is.
    if len(of) > 1 or len(front) <= CANDIDATES:
        return
    top, width = held[found[0]], (held[found[0]] - held[found[-1]]) / (CANDIDATES - 2)
    for counts in found[1:-1]:
        bucket = int((top - held[counts]) / width)
        rivals = [time[c] for c in table if held[c] < top * (1 - 1e-9) and int((top - held[c]) / width) == bucket]
        assert time[counts] <= min(rivals) * (1 + 1e-9)


def test_many_blocks_are_dealt_in_equal_parts() -> None:
    keep = BlockPrice(forward_s=1.0, backward_s=2.0, kept_bytes=10.0)
    again = BlockPrice(forward_s=1.0, backward_s=3.0, kept_bytes=1.0)
    found = mixes((BlockKind(count=100, prices=(again, keep)),), NOTHING, HostCopy(bytes_per_s=1.0))
    assert found[0] == ((0, 100),)
    assert found[-1] == ((100, 0),)
    assert all(sum(row) == 100 for (row,) in found)
    steps = np.diff([row[0] for (row,) in found])
    assert 0 < steps.min() <= steps.max() <= 2 * 100 / (CANDIDATES - 2), "one of each bucket"


def test_blocks_take_the_strategies_in_their_order() -> None:
    found = stage_memory(((1, 0, 0, 2), (0, 1, 0, 0)), ALL, [[0, 2, 3], [4]], 6)
    assert str(found) == "1 offload, 3 keep, 1 recompute, 1 keep"


@given(st.integers(0, 10**9), st.integers(0, 10**12))
def test_a_class_stands_for_sizes_that_are_about_as_large(rows: int, pairs: int) -> None:
    typical = shape_class(WorkSize(rows=rows, pairs=pairs, outputs=0))
    assert typical.outputs == 0
    for amount, other in ((rows, typical.rows), (pairs, typical.pairs)):
        assert (other == 0) == (amount == 0)
        assert abs(other - amount) <= 0.13 * amount + 0.5
    assert shape_class(typical) == typical


def test_without_a_limit_or_a_choice_there_is_one_option() -> None:
    choices = planned("keep", "recompute")
    assert all(len(options) == 1 for options in problem(choices).costs)
    assert {o.name for (o,) in problem(choices).costs} == {"keep"}
    assert all(len(options) == 1 for options in problem(MemoryChoices(), [1e9, 1e9]).costs)
    assert any(len(options) > 1 for options in problem(choices, [1e9, None]).costs)


def test_no_choice_where_the_config_decides_or_nothing_is_planned() -> None:
    full = ActivationCheckpointConfig(mode="full")
    assert MemoryChoices.planned(full, CONFIG).allowed == (BlockMemory.RECOMPUTE,)
    none = ActivationCheckpointConfig()
    assert MemoryChoices.planned(none, CONFIG).allowed == strategies_of(CONFIG.search.memory_strategies)
    for off in (PlannerConfig(), PlannerConfig(enable=True, search=SearchConfig(memory=False))):
        assert MemoryChoices.planned(none, off).allowed == (BlockMemory.KEEP,)


@pytest.mark.parametrize("mode", ["full", "selective", "offload"])
def test_an_option_of_one_strategy_is_what_the_config_says_for_all(mode: str) -> None:
    section = ActivationCheckpointConfig(mode=mode)  # type: ignore[arg-type]
    static = problem(MemoryChoices(section=section), [1e9, 1e9])
    chosen = problem(planned("keep", "selective", "recompute", "offload"), [1e9, 1e9])
    name = MemoryChoices(section=section).allowed[0].value
    for stage, work in static.graph.nodes():
        (one,) = static.options(stage, work)
        same = [option for option in chosen.options(stage, work) if option.name == one.name]
        assert same in ([one], [])  # [] where another mix is as lean and faster
        assert one.name in (name, "keep")


def test_amounts_of_a_mix_are_those_of_its_blocks() -> None:
    found = problem(planned("keep", "recompute", "offload"), [1e9, 1e9])
    keep, *more = found.options(0, 0)  # two layers of 52 rows: 4 bytes a row kept, 2 handed on, 1 FLOP
    assert keep.name == "keep"
    by_name = {option.name: option for option in more}
    layer_s = 52 / 1e3
    mixed = by_name["1 recompute, 1 keep"]
    assert mixed.activation_bytes == 52 * (2 + 4)
    assert mixed.restored_bytes == 52 * 2
    assert mixed.backward_input_s == pytest.approx(keep.backward_input_s + layer_s)
    moved = by_name["offload"]  # 52 x 4 x 2 bytes at 500 a second beside two forwards of 52 ms
    assert moved.activation_bytes == 0.0
    assert moved.restored_bytes == 3 * 52 * 4
    assert moved.host_s == moved.duration_s(Kind.F) == pytest.approx(2 * 52 * 4 / 500)
    assert moved.forward_s == keep.forward_s and not keep.host_s
    # The second stage's input waits for its gradient on the device.
    assert {o.name: o for o in found.options(1, 0)}["offload"].activation_bytes == 52 * 2
    assert all(option.weight_bytes == keep.weight_bytes for option in more)


def test_keeping_all_is_offered_even_where_offloading_is_free() -> None:
    free = replace(CONFIG, device=replace(CONFIG.device, host_bytes_per_s=1e12))
    spec, batching = vlm(), make_batching(META, vlm())
    sizes = dict(zip(("vision", "language"), batching.sizes, strict=False))
    parts = partition(spec, 2, {"vision": 1, "language": 1}, sizes)
    names = planned("keep", "recompute", "offload")
    found = make_problem(spec, parts, batching, FlopsCosts.of(free), free, memory=names, limits=[1e9, 1e9])
    assert [option.name for option in found.options(0, 0)] == ["keep", "offload"]


def test_where_all_can_be_kept_it_is() -> None:
    """Room for what recomputation would bring back must not cost a plan that recomputes nothing."""
    job = config.load("debug_vlm.toml", ["--training.global_batch_size=8"])
    meta = draw("mix", TypicalSizes.typical(job), seed=0, iteration=0)
    planner = IterationPlanner(replace(make_job(job), section=job.planner.with_search(split_backward=False)))
    free = planner.prepare(meta, searched=True).first
    for names in (("keep",), ("keep", "selective", "recompute"), ("keep", "recompute", "offload")):
        limited = IterationPlanner(replace(planner.job, memory=planned(*names)), free.timeline.peak_bytes)
        problem = limited.problem(meta, searched=True)[1]
        result = search(problem, SearchOptions(budget_evaluations=200))
        assert result.timeline.makespan_s <= free.timeline.makespan_s * (1 + 1e-9), names
        check(result.plan, problem)
        assert result.evaluations <= 210


def test_a_stage_without_a_backward_has_no_choice() -> None:
    found = problem(planned("keep", "recompute"), [1e9, 1e9], frozen=True)
    assert [len(found.options(stage, 0)) for stage in (0, 1)] == [1, 1]
    assert len(problem(planned("keep", "recompute"), [1e9, 1e9], forward_only=True).options(0, 0)) == 1


def test_what_a_backward_brings_back_is_left_room_for() -> None:
    found = problem(planned("keep", "recompute"), [1000.0, None])
    most = max(
        option.restored_bytes
        for stage, work in found.graph.nodes()
        if found.graph.stage_rank[stage] == 0
        for option in found.options(stage, work)
    )
    assert found.held_limit_bytes == (1000.0 - most, None)
    with pytest.raises(PlanError, match=r"pp_rank 0: .*B, over the memory limit of .* raise"):
        problem(planned("recompute"), [most, None])


def test_json_keeps_what_is_brought_back() -> None:
    found = problem(planned("keep", "recompute"), [1e4, 1e4])
    again = PlanningProblem.from_json(found.to_json())
    assert again == found
    options: set[Option] = {option for options in again.costs for option in options}
    assert any(option.restored_bytes for option in options)


def test_the_first_plan_of_any_schedule_fits_if_its_orders_can() -> None:
    base = ["planner.enable=true", "parallelism.pipeline_parallel_schedule=1F1B", "training.global_batch_size=8"]
    job = config.load("debug_vlm.toml", [f"--{key}" for key in base])
    meta = draw("mix", TypicalSizes.typical(job), seed=0, iteration=0)
    planner = IterationPlanner(make_job(job))
    free = planner.prepare(meta, searched=True).first
    limits = [0.8 * peak for peak in free.timeline.peak_bytes]
    limited = IterationPlanner(planner.job, limits)
    iteration = limited.prepare(meta, searched=True)
    found = iteration.first
    assert found.plan.orders == free.plan.orders
    assert "memory options chosen" in found.message
    assert all(peak <= limit for peak, limit in zip(found.timeline.peak_bytes, limits, strict=True))
    program = limited.finish(iteration, found).program
    assert program.memory and set(program.memory.values()) - {"keep"}
    assert program.hash != planner.finish(planner.prepare(meta, searched=True), free).program.hash
    # Without a choice the schedule's own plan is over the limit. Where the planner may not make the orders, it says so;
    # else the first plan is of a schedule that keeps limits, since a search that is late must not end a job.
    fixed = replace(limited.job, memory=limited.job.memory.fixed)
    bounded = IterationPlanner(fixed, limits).prepare(meta, searched=True).first
    assert bounded.message.startswith("the order of schedule interleave, since there is no other: ")
    assert all(peak <= limit for peak, limit in zip(bounded.timeline.peak_bytes, limits, strict=True))
    given = replace(fixed, section=fixed.section.with_search(interleave=False))
    assert IterationPlanner(given, limits).prepare(meta, searched=True).first.status == "infeasible"


@pytest.mark.parametrize("share", [0.75, 0.5])
def test_a_strategy_more_never_makes_a_limit_impossible(share: float) -> None:
    """Three offloaded blocks come back at once: here that is more than the limit, and more than recomputing needs."""
    job = config.load("debug_vlm.toml", ["--planner.enable=true"])
    meta = draw("mix", TypicalSizes.typical(job), seed=0, iteration=0)
    planner = IterationPlanner(make_job(job))
    free = planner.prepare(meta, searched=True).first
    limits = [share * max(free.timeline.peak_bytes)] * 2
    for more in ((), ("offload",)):
        job_with_more = replace(planner.job, memory=planned("keep", "selective", "recompute", *more))
        iteration = IterationPlanner(job_with_more, limits).prepare(meta, searched=True)
        assert iteration.first.has_plan
    assert all("offload" not in option.name for options in iteration.problem.costs for option in options)
    problem = IterationPlanner(job_with_more, [1e9] * 2).prepare(meta, searched=True).problem
    assert any("offload" in option.name for options in problem.costs for option in options)


def test_options_do_not_depend_on_which_size_of_a_class_came_first() -> None:
    spec, names = vlm(8, 8), planned("keep", "selective", "recompute")
    sizes = {"vision": WorkSize(rows=100, pairs=400, outputs=25), "language": WorkSize(rows=50, pairs=900, outputs=9)}
    parts = partition(spec, 2, {"vision": 1, "language": 1}, sizes)

    def options(metas: list[MicrobatchMeta]) -> dict[WorkSize, list[tuple[Option, ...]]]:
        batching = make_batching(IterationMeta(microbatches=tuple(metas)), spec)
        costs = FlopsCosts.of(CONFIG)
        found = make_problem(spec, parts, batching, costs, CONFIG, memory=names, limits=[1e9, 1e9])
        return {
            size: [found.options(stage, work) for stage in found.graph.stages(work)]
            for work, size in enumerate(batching.sizes)
        }

    one, other = microbatch(1, [(8, 8)]), microbatch(2, [(8, 8), (2, 2)], text_tokens=11)
    assert options([one, other]) == options([other, one])
