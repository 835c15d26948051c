import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.errors import PlanError
from mmtrain.schedule.action import RESULT_OF, Action
from mmtrain.schedule.graph import ModuleStages, Work
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import P2P, Option, PlanningProblem
from mmtrain.schedule.simulate import simulate
from mmtrain.schedule.timeline import Timeline
from tests.schedule.problems import NO_P2P, chain, option, problems, two_modules


def gpipe(num_ranks: int, num_microbatches: int) -> str:
    """All forwards, then all backwards."""
    return "\n".join(
        " ".join(f"{r}{kind}{m}.0" for kind in "FB" for m in range(num_microbatches)) for r in range(num_ranks)
    )


@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 3), (4, 8)])
def test_gpipe_has_its_closed_form(p: int, m: int) -> None:
    problem = chain(p, m, cost=option(forward_s=1.0, backward_s=2.0, activation_bytes=7.0))
    timeline = simulate(problem, Plan.parse(problem.graph, gpipe(p, m)))
    assert timeline.makespan_s == (p - 1 + m) * 3.0
    assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert timeline.peak_bytes == (7.0 * m,) * p
    assert timeline.busy_s == (3.0 * m,) * p
    assert timeline.span_s == tuple((p - 1 + m) * 3.0 - 1.0 * r - 2.0 * r for r in range(p))


def test_transfers_take_latency_and_bandwidth_but_no_rank() -> None:
    problem = chain(2, 1, num_segments=2, p2p=P2P(latency_s=0.25, bytes_per_s=4.0), cost=option(1.0, 0.0))
    outputs = [[2.0, 4.0, 0.0, 8.0]]
    problem = type(problem).build(
        num_ranks=2,
        modules=problem.graph.modules,
        stage_rank=[0, 1, 1, 0],  # stage 1 to stage 2 stays on its rank
        works=problem.graph.works,
        costs=problem.costs,
        cost_index=problem.cost_index,
        output_bytes=outputs,
        p2p=problem.p2p,
    )
    timeline = simulate(problem, Plan.parse(problem.graph, "0F0.0 3F0.0\n1F0.0 2F0.0"))
    assert {str(r.action): (r.start_s, r.end_s) for r in timeline.rows} == {
        "0F0.0": (0.0, 1.0),
        "1F0.0": (1.75, 2.75),
        "2F0.0": (2.75, 3.75),
        "3F0.0": (4.0, 5.0),
    }


def test_split_backward_lets_the_input_gradient_go_early() -> None:
    cost = Option(name="a", forward_s=1, backward_input_s=2, backward_weight_s=4, activation_bytes=3, weight_bytes=1)
    problem = chain(2, 1, cost=cost)
    timeline = simulate(problem, Plan.parse(problem.graph, "0F0.0 0B0.0\n1F0.0 1I0.0 1W0.0"))
    assert {str(r.action): (r.start_s, r.end_s) for r in timeline.rows} == {
        "0F0.0": (0, 1),
        "1F0.0": (1, 2),
        "1I0.0": (2, 4),
        "1W0.0": (4, 8),
        "0B0.0": (4, 10),
    }
    assert timeline.memory[1] == ((0.0, 0.0), (1, 3), (2, 3), (4, 1), (8, 0))


def test_a_forward_waits_for_the_last_arrival_of_several_and_not_for_that_of_the_last_work() -> None:
    problem = two_modules(2, [2])  # the language model's work needs vision works 0.0 and 0.1
    plan = Plan.parse(
        problem.graph,
        "0F0.1 0F0.0 2F0.0 2B0.0 0B0.0 0B0.1\n1F0.1 1F0.0 3F0.0 3B0.0 1B0.0 1B0.1",
    )
    starts = {str(row.action): row.start_s for row in simulate(problem, plan).rows}
    assert (starts["1F0.1"], starts["1F0.0"], starts["2F0.0"]) == (1.0, 2.0, 3.0)


def test_a_backward_waits_for_the_last_gradient_of_several_and_not_for_that_of_the_last_work() -> None:
    vision = Work(module=0, microbatch=0, sub_microbatch=0)
    language = [Work(module=1, microbatch=0, sub_microbatch=i, after=(0,)) for i in range(2)]
    problem = PlanningProblem.build(
        num_ranks=2,
        modules=[ModuleStages(name="vision", stages=(0, 1)), ModuleStages(name="language", stages=(2, 3))],
        stage_rank=[0, 1, 0, 1],
        works=[vision, *language],
        costs=[[option()]],
        cost_index=[[0, 0]] * 3,
        output_bytes=[[0.0, 0.0]] * 3,
        p2p=NO_P2P,
    )
    plan = Plan.parse(
        problem.graph,
        "0F0.0 2F0.0 2F0.1 2B0.1 2B0.0 0B0.0\n1F0.0 3F0.0 3F0.1 3B0.1 3B0.0 1B0.0",
    )
    times = {str(row.action): (row.start_s, row.end_s) for row in simulate(problem, plan).rows}
    assert (times["2B0.1"], times["2B0.0"], times["1B0.0"]) == ((7.0, 9.0), (9.0, 11.0), (11.0, 13.0))


def test_deadlock_is_an_error() -> None:
    problem = chain(2, 1)
    with pytest.raises(PlanError, match=r"deadlock: rank 0, step 0: 0B0.0 waits for 0F0.0, which is step 1"):
        simulate(problem, Plan.parse(problem.graph, "0B0.0 0F0.0\n1F0.0 1B0.0"))


def test_chosen_options_decide_the_time() -> None:
    options = [
        Option(name=n, forward_s=f, backward_input_s=1, backward_weight_s=0, activation_bytes=0)
        for n, f in (("keep", 1.0), ("recompute", 5.0))
    ]
    problem = chain(1, 1)
    problem = type(problem).build(
        num_ranks=1,
        modules=problem.graph.modules,
        stage_rank=[0],
        works=problem.graph.works,
        costs=[options],
        cost_index=[[0]],
        output_bytes=[[0.0]],
        p2p=problem.p2p,
    )
    assert simulate(problem, Plan.parse(problem.graph, "0F0.0 0B0.0", {(0, 0): 1})).makespan_s == 6.0


def test_measured_rows_make_the_same_type() -> None:
    graph = chain(2, 1).graph
    rows = [
        (1, Action.parse("1F0.0"), 12.0, 14.0),
        (0, Action.parse("0F0.0"), 10.0, 12.0),
        (0, Action.parse("0SEND_F0.0>1"), 12.0, 13.0),
    ]
    timeline = Timeline.from_rows(graph, rows)
    assert [str(row.action) for row in timeline.rows] == ["0F0.0", "1F0.0"]
    assert timeline.makespan_s == 4.0
    assert timeline.bubble == 0.5
    assert timeline.peak_bytes == ()


def test_empty_timeline_has_no_bubble() -> None:
    timeline = Timeline.from_rows(chain(2, 1).graph, [])
    assert (timeline.makespan_s, timeline.bubble) == (0.0, 0.0)
    assert timeline.span_s == (0.0, 0.0)


@given(problem=problems(), name=st.sampled_from(["1F1B", "GPipe", "interleave", "ZB-H1", "Optimus"]))
def test_every_action_starts_when_its_rank_and_the_needs_of_the_graph_let_it(
    problem: PlanningProblem, name: str
) -> None:
    plan = CATALOGUE[name].make(problem)
    times = {row.action: (row.start_s, row.end_s) for row in simulate(problem, plan).rows}
    end: dict[tuple[object, int, int], float] = {}
    free = [0.0] * problem.graph.num_ranks
    steps = [zip(order, works, strict=True) for order, works in zip(plan.orders, plan.works, strict=True)]
    for rank in plan.run().ranks:
        action, work = next(steps[rank])
        needs = problem.graph.needs(action.kind, action.stage, work)
        arrivals = [end[result] + (problem.transfer_s(edge) if edge else 0.0) for result, edge in needs]
        start = max(free[rank], *arrivals, 0.0)
        stop = start + plan.option(problem, action.stage, work).duration_s(action.kind)
        assert times.pop(action) == (start, stop)
        end[RESULT_OF[action.kind], action.stage, work] = free[rank] = stop
    assert not times
