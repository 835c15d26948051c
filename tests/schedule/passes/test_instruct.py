"""Problems with instructions under every schedule and the search, and in every form of problems and plans."""

import pickle
import random
from dataclasses import replace

import pytest

from mmtrain.errors import PlanError
from mmtrain.planner.bound import lower_bound_s
from mmtrain.planner.judge import judge
from mmtrain.planner.make_plan import make_plan
from mmtrain.planner.plan_json import plan_from_json, plan_to_json
from mmtrain.planner.search.search import search, shortest_s
from mmtrain.planner.search.search_options import SearchOptions
from mmtrain.schedule.action import Kind
from mmtrain.schedule.graph import InstructionNode
from mmtrain.schedule.io.wire import from_bytes, to_bytes
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.library.interleave import interleave
from mmtrain.schedule.library.one_f_one_b import one_f_one_b
from mmtrain.schedule.passes.instruct import instruct, plan_without, without_instructions
from mmtrain.schedule.passes.lower import lower
from mmtrain.schedule.passes.separate import separate_gradients
from mmtrain.schedule.plan import Plan, check
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.transport import check_transport
from mmtrain.schedule.view import draw
from tests.schedule.problems import chain, two_modules

SEE, SYNC = Kind.register("SEE"), Kind.register("SYNC")
F, B, W = Kind.F, Kind.B, Kind.W


def instructed(problem: PlanningProblem, *instructions: InstructionNode) -> PlanningProblem:
    return replace(problem, graph=replace(problem.graph, instructions=instructions))


def seen(problem: PlanningProblem, seed: int = 0) -> PlanningProblem:
    """The problem with an instruction at about a third of its nodes, some between forward and backward, some after the
    backward, and a second one after some."""
    draw_of, instructions = random.Random(seed), []
    for stage, work in problem.graph.nodes():
        backward = problem.graph.has_backward(stage, work)
        if draw_of.random() < 0.35:
            after, before = draw_of.choice([(F, None), (F, B), (B, None)] if backward else [(F, None)])
            first = InstructionNode(
                kind=SEE,
                stage=stage,
                work=work,
                after=((after, stage, work),),
                before=((before, stage, work),) if before else (),
                seconds=draw_of.choice([0.0, 0.5]),
            )
            instructions.append(first)
            if draw_of.random() < 0.5:
                instructions.append(
                    InstructionNode(kind=SYNC, stage=stage, work=work, after=(first.key,), seconds=0.25)
                )
    return instructed(problem, *instructions)


PROBLEMS = {
    "chain": seen(chain(4, 8)),
    "interleaved": seen(chain(2, 6, num_segments=2), 1),
    "v": seen(chain(4, 8, v=True), 2),
    "two modules": seen(two_modules(2, [2, 0, 1, 3, 1, 0]), 3),
    "limited": seen(two_modules(2, [1, 0, 2, 1], memory_limit_bytes=(6.0, 6.0)), 4),
}


@pytest.mark.parametrize("shape", PROBLEMS)
@pytest.mark.parametrize("name", CATALOGUE)
def test_every_schedule_runs_them_in_the_order_of_its_plan_without(name: str, shape: str) -> None:
    problem = PROBLEMS[shape]
    bare, schedule = without_instructions(problem), CATALOGUE[name]
    plan, without = schedule.make(problem), schedule.make(bare)
    check(plan, replace(problem, memory_limit_bytes=(None,) * problem.graph.num_ranks))
    assert plan_without(plan, bare) == without
    assert sum(a.kind in (SEE, SYNC) for order in plan.orders for a in order) == len(problem.graph.instructions) > 3
    program = lower(plan, problem, sharded=False)
    check_transport(program)
    for changed in (schedule.separated(), schedule.braided()):
        check(changed.make(problem), replace(problem, memory_limit_bytes=(None,) * problem.graph.num_ranks))


@pytest.mark.parametrize("shape", ["chain", "two modules", "limited"])
def test_the_search_adds_them_to_the_plan_that_it_finds(shape: str) -> None:
    problem, options = PROBLEMS[shape], SearchOptions(budget_evaluations=30)
    bare = without_instructions(problem)
    result, without = search(problem, options), search(bare, options)
    check(result.plan, problem)
    assert plan_without(result.plan, bare) == without.plan and result.makespan_s >= without.makespan_s
    assert shortest_s(problem, options) == shortest_s(bare, options) and lower_bound_s(problem) == lower_bound_s(bare)
    check(make_plan(problem, "interleave").plan, problem)


def test_they_stand_where_what_they_wait_for_has_ended() -> None:
    problem = instructed(
        chain(1, 2),
        InstructionNode(kind=SEE, stage=0, work=0),
        InstructionNode(kind=SEE, stage=0, work=1, after=((F, 0, 0), (F, 0, 1))),
        InstructionNode(kind=SYNC, stage=0, work=0, after=((SEE, 0, 1),), before=((B, 0, 1),)),
    )
    plan = CATALOGUE["GPipe"].make(problem)
    assert str(plan) == "0SEE0.0 0F0.0 0F1.0 0SEE1.0 0SYNC0.0 0B0.0 0B1.0"
    assert str(interleave(problem)) == "0SEE0.0 0F0.0 0B0.0 0F1.0 0SEE1.0 0SYNC0.0 0B1.0"


def test_an_order_that_contradicts_them_is_refused_in_one_sentence() -> None:
    after_both = InstructionNode(kind=SYNC, stage=0, work=1, after=((F, 0, 0), (F, 0, 1)), before=((B, 0, 0),))
    problem = instructed(chain(1, 2), after_both)
    assert "0F1.0 0SYNC1.0 0B0.0" in str(CATALOGUE["GPipe"].make(problem))
    with pytest.raises(PlanError) as caught:
        CATALOGUE["1F1B"].make(problem)
    assert str(caught.value) == (
        "rank 0: 0SYNC1.0 is an instruction after 0F1.0 and before 0B0.0, but the schedule runs 0B0.0 first; leave out "
        "`before`, or plan by a recipe"
    )
    result = search(problem, SearchOptions(budget_evaluations=3))
    assert not result.has_plan and "0SYNC1.0 is an instruction after" in result.message
    weights = instructed(chain(1, 1), InstructionNode(kind=SYNC, stage=0, work=0, after=((W, 0, 0),)))
    with pytest.raises(PlanError, match=r"after 0W0\.0, which the schedule does not run; where backwards are whole"):
        CATALOGUE["1F1B"].make(weights)
    with pytest.raises(PlanError, match="a table plans no instructions; plan the problem without, then add them"):
        one_f_one_b(problem)


def test_a_plan_without_instructions_stays_as_it_is() -> None:
    problem = chain(2, 3)
    plan = one_f_one_b(problem)
    assert instruct(plan, problem) is plan and without_instructions(problem) is problem
    assert plan_without(plan, problem) is plan


@pytest.mark.parametrize("shape", PROBLEMS)
def test_problems_and_plans_are_written_and_read_back(shape: str) -> None:
    problem = PROBLEMS[shape]
    text = problem.to_json()
    assert PlanningProblem.from_json(text) == problem and PlanningProblem.from_json(text).to_json() == text
    result = make_plan(replace(problem, memory_limit_bytes=(None,) * problem.graph.num_ranks), "ZB-H1")
    plan = separate_gradients(result.plan, result.problem)
    assert from_bytes(problem.graph, to_bytes(plan)) == plan == Plan.parse(problem.graph, str(plan))
    written = plan_to_json(result)
    assert plan_from_json(result.problem, written) == result.plan
    assert judge(result.problem, written).feasible


def test_what_a_file_says_of_them_is_checked() -> None:
    def refused(table: str) -> str:
        text = chain(1, 2).to_json().rstrip().removesuffix("}").rstrip() + f',\n "instructions": [{table}]\n}}\n'
        with pytest.raises(PlanError) as caught:
            PlanningProblem.from_json(text)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "instructions[0].kind is missing" in refused('{"stage": 0, "work": 0}')
    assert "instructions[0].at is unknown" in refused('{"kind": "SEE", "stage": 0, "work": 0, "at": 1}')
    assert "instructions[0].kind = 'see'; it is a word" in refused('{"kind": "see", "stage": 0, "work": 0}')
    assert "B is a kind of every plan" in refused('{"kind": "B", "stage": 0, "work": 0}')
    assert "does not pass through this stage" in refused('{"kind": "SEE", "stage": 0, "work": 2}')
    assert "instructions[0].seconds = -1" in refused('{"kind": "SEE", "stage": 0, "work": 0, "seconds": -1}')
    assert "is not an earlier result" in refused('{"kind": "SEE", "stage": 0, "work": 0, "after": [["F", 0, 7]]}')
    assert "after[0] has 2 entries" in refused('{"kind": "SEE", "stage": 0, "work": 0, "after": [["F", 0]]}')
    assert "twice for the work" in refused(", ".join(['{"kind": "SEE", "stage": 0, "work": 0}'] * 2))
    assert "0SEE1.0 waits for something that waits for it in a circle" in refused(
        '{"kind": "SEE", "stage": 0, "work": 1, "after": [["B", 0, 1]], "before": [["F", 0, 1]]}'
    )


def test_they_are_drawn_and_traced() -> None:
    problem = instructed(chain(1, 1), InstructionNode(kind=SEE, stage=0, work=0, after=((F, 0, 0),), seconds=1.0))
    timeline = make_plan(problem, "1F1B").timeline
    text = draw.text(timeline)
    assert "+0+++" in text and text.endswith(", + an instruction, . idle")
    assert ">language SEE<" in draw.svg(timeline) and draw.png(timeline, width=300)
    named = [event["name"] for event in draw.trace_events(timeline, graph=problem.graph)["traceEvents"]]
    assert "SEE0.0 language s0" in named
    assert "an instruction" not in draw.text(make_plan(chain(1, 1), "1F1B").timeline)


def test_schedules_travel_to_data_workers():
    for schedule in CATALOGUE.values():
        assert pickle.loads(pickle.dumps(schedule)).name == schedule.name
