"""Overheads of actions and messages as part of a planning problem."""

from dataclasses import replace

import pytest

from mmtrain.costs.overheads import NO_OVERHEADS, Overheads, charged
from mmtrain.errors import PlanError
from mmtrain.planner.make_plan import make_plan
from mmtrain.schedule.action import Kind
from mmtrain.schedule.chain import plain_chain
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.simulate import simulate
from tests.schedule.problems import two_modules

COUNTED = Overheads(
    forward_s=1.0,
    backward_s=10.0,
    backward_input_s=8.0,
    backward_weight_s=5.0,
    send_s=100.0,
    receive_s=1000.0,
    message_s=0.5,
)


def test_without_overheads_a_problem_stays_itself():
    problem = two_modules(2, [1, 0])
    assert charged(problem, NO_OVERHEADS) is problem


def test_actions_pay_for_their_messages():
    """The middle of three ranks receives and sends both ways, the others one way."""
    problem = plain_chain(3, 1, CATALOGUE["1F1B"], seconds=(1.0, 1.0, 1.0))
    paid = charged(problem, COUNTED)
    first, middle, last = (paid.options(stage, 0)[0] for stage in range(3))
    plain = [problem.options(stage, 0)[0] for stage in range(3)]
    for option, free, forward, backward in (
        (first, plain[0], 101.0, 1010.0),
        (middle, plain[1], 1101.0, 1110.0),
        (last, plain[2], 1001.0, 110.0),
    ):
        assert option.duration_s(Kind.F) - free.duration_s(Kind.F) == pytest.approx(forward)
        assert option.duration_s(Kind.B) - free.duration_s(Kind.B) == pytest.approx(backward)
        assert option.duration_s(Kind.I) - free.duration_s(Kind.I) == pytest.approx(backward)
        assert option.duration_s(Kind.W) - free.duration_s(Kind.W) == pytest.approx(8.0 + 5.0 - 10.0)
    assert paid.p2p.latency_s == problem.p2p.latency_s + 0.5
    assert type(paid).from_json(paid.to_json()) == paid


def test_messages_within_a_rank_are_free():
    problem = two_modules(1, [2, 0])
    paid = charged(problem, COUNTED)
    for node in problem.graph.nodes():
        free, option = problem.options(*node)[0], paid.options(*node)[0]
        assert option.forward_s - free.forward_s == pytest.approx(1.0)


def test_a_stage_without_a_backward_pays_for_none():
    problem = plain_chain(2, 1, CATALOGUE["1F1B"])
    frozen = replace(problem.options(0, 0)[0], backward_input_s=0.0, backward_weight_s=0.0)
    graph = problem.graph
    half = PlanningProblem.build(
        num_ranks=2,
        modules=graph.modules,
        stage_rank=graph.stage_rank,
        works=graph.works,
        costs=[[frozen], problem.costs[problem.cost_index[0][1]]],
        cost_index=[[0, 1]],
        output_bytes=problem.output_bytes,
        p2p=problem.p2p,
    )
    paid = charged(half, COUNTED)
    assert paid.options(0, 0)[0] == replace(frozen, forward_s=frozen.forward_s + 101.0)
    assert paid.options(1, 0)[0].has_backward


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
def test_a_plan_of_the_problem_is_one_of_the_charged_problem_and_takes_as_much_longer(name):
    """Equal actions on one rank: the makespan grows by what all of them pay."""
    problem = plain_chain(1, 4, CATALOGUE[name])
    plan = make_plan(problem, name).plan
    assert plan is not None
    overheads = Overheads(forward_s=0.1, backward_s=0.3, backward_input_s=0.2, backward_weight_s=0.25)
    longer = simulate(charged(problem, overheads), Plan(problem.graph, plan.orders, plan.options))
    each = 0.4 if name == "1F1B" else 0.1 + 0.2 + 0.25
    assert longer.makespan_s - simulate(problem, plan).makespan_s == pytest.approx(4 * each)


def test_a_negative_overhead_is_refused():
    with pytest.raises(PlanError, match=r"overheads\.send_s = -1"):
        Overheads(send_s=-1.0)
