"""The check of plans against an oracle that is written otherwise, over random mutations of valid plans."""

import dataclasses
import itertools
from collections import Counter

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mmtrain.errors import PlanError
from mmtrain.schedule.action import KINDS, Action, Kind
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.plan import Plan, check
from mmtrain.schedule.problem import PlanningProblem
from tests.examples import examples
from tests.schedule.problems import problems

MANY = settings(max_examples=examples(50), deadline=None, suppress_health_check=list(HealthCheck))


def accepts(plan: Plan, problem: PlanningProblem) -> bool:
    try:
        check(plan, problem)
    except PlanError as error:
        assert str(error)
        return False
    return True


@st.composite
def plans(draw: st.DrawFn, **options: bool) -> tuple[PlanningProblem, Plan]:
    problem = draw(problems(**options))
    names = [name for name, schedule in CATALOGUE.items() if schedule.keeps_memory_limits or not options.get("limits")]
    plan = CATALOGUE[draw(st.sampled_from(names))].make(problem)
    assert accepts(plan, problem)
    return problem, plan


def with_order(plan: Plan, rank: int, order: list[Action]) -> Plan:
    return dataclasses.replace(plan, orders=(*plan.orders[:rank], tuple(order), *plan.orders[rank + 1 :]))


def pick(draw: st.DrawFn, plan: Plan) -> tuple[int, int]:
    """(rank, step) of an action."""
    return draw(st.sampled_from([(r, i) for r, order in enumerate(plan.orders) for i in range(len(order))]))


@MANY
@given(data=st.data())
def test_a_lost_action_is_found(data: st.DataObject) -> None:
    problem, plan = data.draw(plans())
    rank, step = pick(data.draw, plan)
    order = list(plan.orders[rank])
    del order[step]
    assert not accepts(with_order(plan, rank, order), problem)


@MANY
@given(data=st.data())
def test_a_doubled_action_is_found(data: st.DataObject) -> None:
    problem, plan = data.draw(plans())
    rank, step = pick(data.draw, plan)
    target = data.draw(st.integers(0, len(plan.orders) - 1))
    order = list(plan.orders[target])
    order.insert(data.draw(st.integers(0, len(order))), plan.orders[rank][step])
    assert not accepts(with_order(plan, target, order), problem)


@MANY
@given(data=st.data())
def test_an_action_on_another_rank_is_found(data: st.DataObject) -> None:
    problem, plan = data.draw(plans())
    assume(len(plan.orders) > 1)
    rank, step = pick(data.draw, plan)
    target = data.draw(st.sampled_from([r for r in range(len(plan.orders)) if r != rank]))
    moved, order = list(plan.orders[rank]), list(plan.orders[target])
    order.insert(data.draw(st.integers(0, len(order))), moved.pop(step))
    assert not accepts(with_order(with_order(plan, rank, moved), target, order), problem)


@MANY
@given(data=st.data())
def test_another_kind_is_found(data: st.DataObject) -> None:
    problem, plan = data.draw(plans())
    rank, step = pick(data.draw, plan)
    order = list(plan.orders[rank])
    kinds = [kind for kind in KINDS if kind is not order[step].kind]
    order[step] = dataclasses.replace(order[step], kind=data.draw(st.sampled_from(kinds)))
    assert not accepts(with_order(plan, rank, order), problem)


@MANY
@given(data=st.data())
def test_a_stage_or_work_that_is_not_there_is_found(data: st.DataObject) -> None:
    problem, plan = data.draw(plans())
    rank, step = pick(data.draw, plan)
    order = list(plan.orders[rank])
    field = data.draw(st.sampled_from(["stage", "microbatch", "sub_microbatch"]))
    order[step] = dataclasses.replace(order[step], **{field: data.draw(st.integers(0, 9))})
    assume(order[step] != plan.orders[rank][step])
    assert not accepts(with_order(plan, rank, order), problem)


@MANY
@given(data=st.data())
def test_an_option_that_is_not_there_is_found(data: st.DataObject) -> None:
    problem, plan = data.draw(plans())
    stage, work = data.draw(st.sampled_from(list(problem.graph.nodes())))
    count = len(problem.options(stage, work))
    options = {**plan.options, (stage, work): data.draw(st.sampled_from([-1, count, count + 5]))}
    assert not accepts(dataclasses.replace(plan, options=options), problem)


@MANY
@given(data=st.data())
def test_an_order_of_too_few_ranks_is_found(data: st.DataObject) -> None:
    problem, plan = data.draw(plans())
    assert not accepts(dataclasses.replace(plan, orders=plan.orders[:-1]), problem)
    assert not accepts(dataclasses.replace(plan, orders=(*plan.orders, ())), problem)


@settings(MANY, max_examples=examples(200))
@given(data=st.data())
def test_reordered_plans_are_judged_as_the_oracle_does(data: st.DataObject) -> None:
    """A few actions of a rank move anywhere: most of the plans deadlock or break the limits, others are still right.

    The oracle knows no blocks; `test_braid.py` judges these.
    """
    problem, plan = data.draw(plans(limits=data.draw(st.booleans())))
    assume(all(len(action.parts) == 1 for order in plan.orders for action in order))
    for _ in range(data.draw(st.integers(1, 3))):
        rank, step = pick(data.draw, plan)
        order = list(plan.orders[rank])
        action = order.pop(step)
        order.insert(data.draw(st.integers(0, len(order))), action)
        plan = with_order(plan, rank, order)
    assert accepts(plan, problem) == oracle(plan, problem)


def oracle(plan: Plan, problem: PlanningProblem) -> bool:
    """Whether a plan of the right actions is free of circles and within memory, from the rules alone."""
    return _is_acyclic(plan, problem) and _fits(plan, problem)


def _is_acyclic(plan: Plan, problem: PlanningProblem) -> bool:
    """Removes actions without predecessors until none is left."""
    graph = problem.graph
    predecessors: dict[Action, set[Action]] = {action: set() for order in plan.orders for action in order}
    for order in plan.orders:
        for before, after in itertools.pairwise(order):
            predecessors[after].add(before)

    def name(kinds: str, stage: int, work: int) -> Action:
        (found,) = (a for k in kinds for a in [graph.action(Kind(k), stage, work)] if a in predecessors)
        return found

    for w, work in enumerate(graph.works):
        chain = graph.modules[work.module].stages
        for k, stage in enumerate(chain):
            forward = name("F", stage, w)
            sources = (
                [(chain[k - 1], w)] if k else [(graph.modules[graph.works[o].module].stages[-1], o) for o in work.after]
            )
            predecessors[forward] |= {name("F", *source) for source in sources}
            if not graph.backward[w][k]:
                continue
            backward = name("BI", stage, w)
            predecessors[backward].add(forward)
            for source_stage, source in sources:
                place = graph.modules[graph.works[source].module].stages.index(source_stage)
                if graph.backward[source][place]:
                    predecessors[name("BI", source_stage, source)].add(backward)
            if backward.kind is Kind.I:
                predecessors[name("W", stage, w)].add(backward)
    while True:
        free = {action for action, before in predecessors.items() if not before}
        if not free:
            return not predecessors
        predecessors = {a: before - free for a, before in predecessors.items() if a not in free}


def _fits(plan: Plan, problem: PlanningProblem) -> bool:
    """Adds up what is held, action by action."""
    for rank, order in enumerate(plan.orders):
        limit = problem.memory_limit_bytes[rank]
        held: Counter[tuple[int, int, int]] = Counter()
        for action in order:
            node = (action.stage, action.microbatch, action.sub_microbatch)
            work = plan.graph.work_of(action)
            option = problem.options(action.stage, work)[plan.options.get((action.stage, work), 0)]
            if action.kind is Kind.F:
                held[node] = option.activation_bytes  # type: ignore[assignment]  # bytes may be fractions
            elif action.kind is Kind.I and option.weight_bytes is not None:
                held[node] = option.weight_bytes  # type: ignore[assignment]
            if limit is not None and sum(held.values()) > limit * (1 + 1e-9):
                return False
            if action.kind in (Kind.B, Kind.W) or not plan.graph.has_backward(action.stage, work):
                del held[node]
    return True
