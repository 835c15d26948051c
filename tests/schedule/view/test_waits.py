"""Idle time is charged completely, to what held it up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.planner.make_plan import make_plan
from mmtrain.schedule.graph import ModuleStages, Work
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import P2P, PlanningProblem
from mmtrain.schedule.simulate import simulate
from mmtrain.schedule.timeline import Timeline
from mmtrain.schedule.view.waits import Waits, waits
from tests.schedule.problems import chain, option, problems, two_modules


def waits_of(plan: Plan, timeline: Timeline) -> Waits:
    rows = [timeline.of_rank(rank) for rank in range(timeline.num_ranks)]
    starts, ends = ([np.array([row[i] for row in mine]) for mine in rows] for i in (2, 3))
    return waits(plan, starts, ends)


def pieces(plan: Plan, found: Waits) -> list[tuple[int, float, float, str]]:
    """(rank, start, end, action that was waited for) of each stretch."""
    names = [str(action) for order in plan.orders for action in order]
    columns = (found.rank.tolist(), found.start_s.tolist(), found.end_s.tolist(), found.action.tolist())
    return [(rank, start, end, names[row] if row >= 0 else "") for rank, start, end, row in zip(*columns, strict=True)]


def test_each_stretch_names_the_action_that_it_waited_for() -> None:
    # rank 0 |v0l1--l0--........L1======....L0======....V0==|   half a second a column
    # rank 1 |..v0..l1--L1======l0--L0======........V0==....|
    problem = two_modules(2, [1, 0], vision=option(1.0, 2.0), language=option(2.0, 4.0))
    plan = Plan.parse(problem.graph, "0F0.0 2F1.0 2F0.0 2B1.0 2B0.0 0B0.0\n1F0.0 3F1.0 3B1.0 3F0.0 3B0.0 1B0.0")
    found = waits_of(plan, simulate(problem, plan))
    assert pieces(plan, found) == [
        (0, 5.0, 9.0, "3B1.0"), (0, 13.0, 15.0, "3B0.0"), (0, 19.0, 21.0, "1B0.0"),
        (1, 0.0, 1.0, "0F0.0"), (1, 2.0, 3.0, "2F1.0"), (1, 15.0, 19.0, "2B0.0"), (1, 21.0, 23.0, "0B0.0"),
    ]  # fmt: skip
    assert found.module_s(2) == (5.0, 11.0)


def behind_vision(p2p: P2P) -> tuple[PlanningProblem, Plan]:
    """Vision on rank 0, language on ranks 1 and 2, one microbatch without backward."""
    slow, quick = option(3.0, 0.0), option(1.0, 0.0)
    problem = PlanningProblem.build(
        num_ranks=3,
        modules=[ModuleStages(name="vision", stages=(0,)), ModuleStages(name="language", stages=(1, 2))],
        stage_rank=[0, 1, 2],
        works=[
            Work(module=0, microbatch=0, sub_microbatch=0),
            Work(module=1, microbatch=0, sub_microbatch=0, after=(0,)),
        ],
        costs=[[slow], [quick]],
        cost_index=[[0], [1, 1]],
        output_bytes=[[0.0], [0.0, 0.0]],
        p2p=p2p,
    )
    return problem, Plan.parse(problem.graph, "0F0.0\n1F0.0\n2F0.0")


def test_a_wait_is_followed_back_to_what_held_up_the_awaited_action() -> None:
    problem, plan = behind_vision(P2P(latency_s=0.0, bytes_per_s=1.0))
    found = waits_of(plan, simulate(problem, plan))
    # The last rank needs the language model alone, which was idle itself until vision had ended.
    assert [piece for piece in pieces(plan, found) if piece[0] == 2] == [(2, 0.0, 3.0, "0F0.0"), (2, 3.0, 4.0, "1F0.0")]
    # Those that have ended wait for the last action, and before it for what held that up.
    assert [piece for piece in pieces(plan, found) if piece[0] == 0] == [(0, 3.0, 4.0, "1F0.0"), (0, 4.0, 5.0, "2F0.0")]
    assert found.module_s(2) == (3.0 + 3.0, 1.0 + 3.0)


def test_transfers_are_charged_to_no_module() -> None:
    problem, plan = behind_vision(P2P(latency_s=0.25, bytes_per_s=1.0))
    timeline = simulate(problem, plan)
    found = waits_of(plan, timeline)
    mine = [piece for piece in pieces(plan, found) if piece[0] == 2]
    assert mine == [(2, 0.0, 3.0, "0F0.0"), (2, 3.0, 3.25, ""), (2, 3.25, 4.25, "1F0.0"), (2, 4.25, 4.5, "")]
    idle = 3 * timeline.makespan_s - sum(timeline.busy_s)
    assert idle - sum(found.module_s(2)) == pytest.approx(3 * 2 * 0.25)


def test_a_rank_that_waits_for_nothing_starts_late_by_itself() -> None:
    problem = chain(1, 2, cost=option(1.0, 0.0))
    plan = Plan.parse(problem.graph, "0F0.0 0F1.0")
    found = waits(plan, [np.array([0.0, 1.5])], [np.array([1.0, 2.5])])
    assert pieces(plan, found) == [(0, 1.0, 1.5, "")]


def test_a_rank_without_work_waits_from_the_start() -> None:
    problem = chain(2, 1, cost=option(1.0, 0.0))
    plan = Plan(problem.graph, Plan.parse(problem.graph, "0F0.0\n1F0.0").orders)
    empty = Plan(plan.graph, (plan.orders[0], ()))
    found = waits(empty, [np.array([0.0]), np.array([])], [np.array([1.0]), np.array([])])
    assert pieces(empty, found) == [(1, 0.0, 1.0, "0F0.0")]
    nothing = Plan(plan.graph, ((), ()))
    assert waits(nothing, [np.array([])] * 2, [np.array([])] * 2).module_s(1) == (0.0,)


@given(problems(), st.integers(0, 1000))
def test_the_stretches_are_exactly_the_idle_time(problem: PlanningProblem, jitter: int) -> None:
    result = make_plan(problem, "interleave")
    timeline = result.timeline
    found = waits_of(result.plan, timeline)
    idle = timeline.num_ranks * timeline.makespan_s - sum(timeline.busy_s)
    assert float((found.end_s - found.start_s).sum()) == pytest.approx(idle, abs=1e-9)
    # Clocks that disagree a little, as measured ones do, change where it goes and never lose any of it.
    random = np.random.default_rng(jitter)
    starts, ends = [], []
    for rank in range(timeline.num_ranks):
        shift = random.uniform(-0.3, 0.3)
        starts.append(np.array([row.start_s for row in timeline.of_rank(rank)]) + shift)
        ends.append(np.array([row.end_s for row in timeline.of_rank(rank)]) + shift)
    moved = waits(result.plan, starts, ends)
    some = [rank for rank in range(timeline.num_ranks) if len(starts[rank])]
    span = max(ends[rank].max() for rank in some) - min(starts[rank].min() for rank in some)
    total = timeline.num_ranks * span - sum(timeline.busy_s)
    assert float((moved.end_s - moved.start_s).sum()) == pytest.approx(total, abs=1e-9)
    for rank in range(timeline.num_ranks):
        mine = moved.rank == rank
        assert (moved.start_s[mine][1:] >= moved.end_s[mine][:-1] - 1e-9).all(), "two stretches overlap"
