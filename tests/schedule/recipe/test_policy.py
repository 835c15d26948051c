"""Any recipe on any work graph: a checked plan or one sentence; limits, callbacks and overrides."""

import random
import time
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mmtrain.errors import PlanError
from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.engine import Engine
from mmtrain.schedule.graph import InstructionNode
from mmtrain.schedule.plan import Plan, check
from mmtrain.schedule.recipe import Recipe, Rule, Traversal, kernel
from mmtrain.schedule.recipe.bound_recipe import Bound
from mmtrain.schedule.recipe.kernel_state import Arrays
from mmtrain.schedule.recipe.policy import plan_of
from mmtrain.schedule.recipe.rank_policy import Ranks
from mmtrain.schedule.recipe.shared import Shared
from mmtrain.schedule.simulate import simulate
from tests.schedule.problems import chain, halves, problems, two_modules
from tests.schedule.recipe.recipes import recipes

LONGEST_S = 1.0
"""CPU time of one plan of a random problem; at most 0.43 s measured, most of it in a cold process."""


def text(plan: Plan, rank: int = 0) -> str:
    return str(plan).split("\n")[rank].replace(".0", "")


@given(problem=st.one_of(problems(), problems(limits=True), problems(forward_only=True)), recipe=recipes())
def test_a_checked_plan_or_one_sentence(problem, recipe):
    begin = time.process_time()
    try:
        plan = plan_of(recipe, problem)
    except PlanError as error:
        assert "the recipe gets stuck after" in str(error)
        assert any(isinstance(t, Traversal) and t.wait for t in (recipe.forward, recipe.backward)), error
    else:
        check(plan, problem if recipe.memory else None)
    assert time.process_time() - begin < LONGEST_S


@given(problem=problems(), recipe=recipes())
def test_the_times_of_a_run_are_those_of_the_simulator(problem, recipe):
    """A rank starts what it chose at once, so the simulator agrees to the bit; only what starts although no forward
    keeps the promise of the limits could have started before."""
    if recipe.clock == "lockstep" or not problem.graph.works:
        return
    bound = Bound(recipe, Shared(problem))
    engine = Engine(bound.items, bound.message_s)
    started = engine.run(Ranks(bound))
    if len(started) < bound.num_actions:
        return
    timeline = simulate(problem, bound.plan(started))
    ends = {row.action: row.end_s for row in timeline.rows}
    for item in started:
        end = ends[bound.action(item)]
        assert end <= engine.end[item] if bound.limits.pools else end == engine.end[item]


SPLITS = st.sampled_from([{}, {"split_backward": True}, {"separate_gradients": True}])


@given(problem=problems(), limit=st.integers(1, 4), split=SPLITS, until=st.sampled_from("BIW"))
def test_no_rank_exceeds_its_limit_by_more_than_one_microbatch_needs(problem, limit, split, until):
    plan = plan_of(Recipe(in_flight=limit, until=until, **split), problem)
    graph = problem.graph
    works = {(s, graph.works[w].microbatch): 0 for s, w in graph.nodes()}
    for stage, work in graph.nodes():
        works[stage, graph.works[work].microbatch] += 1
    for rank, order in enumerate(plan.orders):
        held, needs, most = 0.0, {}, 0.0
        for action, work in zip(order, plan.works[rank], strict=True):
            if not graph.has_backward(action.stage, work):
                continue
            share = 1 / works[action.stage, action.microbatch]
            ends = Kind.I if until == "I" else Kind.W
            if action.kind is Kind.F:
                held += share
                needs[action.microbatch] = needs.get(action.microbatch, 0.0) + share
            elif action.kind is Kind.B or action.kind is ends:
                held -= share
            most = max(most, held)
        if not any(w.after for w in graph.works):  # else connected microbatches may count together
            assert most <= max(limit, *needs.values(), 0.0) + 1e-6


def test_limits_of_stages_of_modules_and_by_function():
    problem = two_modules(2, [1, 1, 1, 1])
    by_stage = plan_of(Recipe(in_flight=[[1, 1], [1, 1]]), problem)
    assert simulate(problem, by_stage).peak_bytes == (2.0, 2.0)
    by_module = plan_of(Recipe(overrides={"vision": Rule(in_flight=[2, 1])}), problem)
    assert most_of(by_module, 0, 0) == 2 and most_of(by_module, 1, 1) == 1
    by_function = plan_of(Recipe(in_flight=lambda rank: rank.num_chunks * (rank.num_ranks - rank.rank)), problem)
    assert [most_of(by_function, rank, stage) for stage, rank in enumerate((0, 1, 0, 1))] == [4, 2, 2, 1]


def test_a_limit_of_a_rank_counts_for_each_module_and_grows_by_the_way_through_the_others():
    """Two ranks with a stage of each of two modules: each module has P = 2 pairs more. The language model gets no more
    microbatches than the last rank of the encoder lets through."""
    forwards_first = Recipe(first="forward", in_flight=[2, 1])
    plan = plan_of(forwards_first, two_modules(2, [1] * 9))
    assert [most_of(plan, rank, stage) for stage, rank in enumerate((0, 1, 0, 1))] == [4, 3, 3, 3]
    frozen = two_modules(2, [1] * 9, vision=halves(1, 0, 0))
    plan = plan_of(forwards_first, frozen)
    assert [most_of(plan, rank, 2 + rank) for rank in (0, 1)] == [2, 1]


def test_a_waiting_traversal_counts_microbatches_of_the_iteration():
    """Of groups of two microbatches all images, then both texts, whatever the number of images."""
    waiting = Traversal("breadth", every=2, wait=True)
    plan = plan_of(Recipe(first="forward", forward=waiting), two_modules(1, [1, 0, 2, 1, 0, 0]))
    forwards = " ".join(str(action) for action in plan.orders[0] if action.kind is Kind.F)
    assert forwards == "0F0.0 1F0.0 1F1.0 0F2.0 0F2.1 0F3.0 1F2.0 1F3.0 1F4.0 1F5.0"


def most_of(plan: Plan, rank: int, stage: int) -> int:
    """Most microbatches in flight on a stage."""
    held = most = 0
    for action in plan.orders[rank]:
        if action.stage == stage:
            held += {Kind.F: 1, Kind.I: 0}.get(action.kind, -1)
            most = max(most, held)
    return most


def test_units_and_overrides_of_ranks():
    problem = chain(2, 4)
    assert text(plan_of(Recipe(first="alternate", units=(2, 2)), problem), 1) == "1F0 1F1 1B0 1B1 1F2 1F3 1B2 1B3"
    changed = plan_of(Recipe(in_flight=1, overrides={0: Rule(in_flight=2)}), problem)
    assert text(changed, 0) == "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3"
    module = plan_of(Recipe(overrides={"language": Rule(first="forward", split_backward=True)}), problem)
    assert text(module, 1).startswith("1F0 1F1 1F2 1F3 1I0 1I1")


def test_a_check_and_a_step_function_choose():
    problem = chain(2, 3)
    alone = plan_of(Recipe(check=lambda m, a: a.kind is not Kind.F or len(m.started) % 2 == 0), problem)
    assert text(alone) == "0F0 0B0 0F1 0B1 0F2 0B2"
    newest = plan_of(Recipe(step=lambda moment: moment.ready[-1]), problem)
    check(newest, problem)
    assert newest == plan_of(Recipe(step=lambda moment: moment.ready[-1]), problem)


def test_all_ranks_decide_whenever_something_happens_as_functions_may_look_at_the_time():
    late = Recipe(check=lambda m, a: a.kind is not Kind.F or m.rank > 0 or not m.started or m.now >= 2)
    assert text(plan_of(late, chain(2, 2))) == "0F0 0F1 0B0 0B1"  # 1F0 ends at 2


def test_a_traversal_counts_anew_where_no_other_stage_can_run():
    """The first microbatch arrives at the second stage of rank 0 when the third one has just run there."""
    recipe = Recipe(first="forward", forward=Traversal("breadth", every=2))
    assert text(plan_of(recipe, chain(3, 6, num_segments=2))).startswith("0F0 0F1 0F2 0F3 3F0 3F1 0F4")


def test_a_recipe_plans_registered_instructions():
    problem = chain(2, 2)
    sync = Kind.register("SYNC")
    instruction = InstructionNode(
        kind=sync, stage=1, work=0, after=((Kind.F, 1, 0),), before=((Kind.B, 1, 0),), seconds=1
    )
    given = replace(problem, graph=replace(problem.graph, instructions=(instruction,)))
    plan = plan_of(Recipe(), given)
    check(plan, given)
    assert text(plan, 1).startswith("1F0 1SYNC0 1B0")


FAULTS = {
    "wrong length": ({"in_flight": [1, 1, 1]}, r"in_flight has 3 entries for 2 pipeline ranks; give one a rank"),
    "wrong length of stages": ({"in_flight": [[1], [1, 1]]}, r"has 2 entries for rank 1, which has 1 stages"),
    "a function returns 0": ({"in_flight": lambda rank: 0}, r"in_flight returned 0 for .* at least 1"),
    "a function raises": ({"in_flight": lambda rank: rank.no}, r"in_flight raises AttributeError \(.*\.py:\d+\)"),
    "a check raises": ({"check": lambda m, a: 1 / 0}, r"Recipe.check raises ZeroDivisionError \(.*\.py:\d+\)"),
    "a check returns no flag": ({"check": lambda m, a: None}, r"Recipe.check returned None for 0F0.0; return True"),
    "a check admits nothing": (
        {"check": lambda m, a: False},
        r"stuck after 0 of 8 actions: rank 0 could start 0F0.0, but Recipe.check admits nothing\n  rank 0: \(end\)",
    ),
    "a step returns another": ({"step": lambda m: Action(Kind.F, 9, 9, 9)}, r"Recipe.step returned .* rank 0, which"),
    "a step never starts": ({"step": lambda m: None}, r"could start 0F0.0, but Recipe.step returns None"),
    "a module": ({"overrides": {"vison": Rule()}}, r"names a module 'vison'; this model has language"),
    "a rank": ({"overrides": {2: Rule()}}, r"names a rank; use 0 .. 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_sentence(fault):
    fields, message = FAULTS[fault]
    with pytest.raises(PlanError, match=message):
        plan_of(Recipe(**fields), chain(2, 2))


def test_impure_functions_are_found():
    draw = random.Random(0)
    with pytest.raises(PlanError, match="are impure: two runs on one problem made different plans"):
        plan_of(Recipe(step=lambda moment: draw.choice(moment.ready)), chain(2, 8))
    counts = iter(range(1, 100))
    with pytest.raises(PlanError, match="in_flight is impure: it returned 1 and 2"):
        plan_of(Recipe(in_flight=lambda rank: next(counts)), chain(2, 4))


def test_a_waiting_traversal_that_gets_stuck_names_rank_stage_and_limit():
    recipe = Recipe(forward=Traversal("breadth", every=3, wait=True), in_flight=2)
    with pytest.raises(PlanError) as error:
        plan_of(recipe, chain(2, 4, num_segments=2))
    lines = str(error.value).splitlines()
    reason = (
        "rank 0 could start 2F0.0, but in_flight = 2 of rank 0 has no room; raise it, and its forward traversal waits"
    )
    assert reason in lines[0]
    assert lines[1].startswith("  rank 0: 0F0.0") and lines[2].startswith("  rank 1: ")


def test_a_waiting_traversal_is_blamed_before_limits():
    recipe = Recipe(in_flight=2, backward=Traversal("breadth", every=3, wait=True))
    with pytest.raises(PlanError, match=r"its backward traversal waits for stage \d; leave out wait"):
        plan_of(recipe, chain(2, 4, num_segments=2))


def test_a_rule_of_a_module_that_shares_a_rank_is_refused():
    with pytest.raises(PlanError, match=r"overrides\['vision'\].first = 'forward': rank 0 holds language and vision"):
        plan_of(Recipe(overrides={"vision": Rule(first="forward")}), two_modules(2, [1]))


@given(problem=problems(), recipe=recipes())
def test_separated_gradients_are_never_longer_and_keep_all_limits(problem, recipe):
    recipe = replace(recipe, separate_gradients=False, memory=False)
    try:
        plan = plan_of(recipe, problem)
    except PlanError:
        return
    separated = plan_of(replace(recipe, separate_gradients=True), problem)
    assert simulate(problem, separated).makespan_s <= simulate(problem, plan).makespan_s * (1 + 1e-9)


def test_separation_keeps_limits_of_stages():
    problem = chain(4, 8)
    limit = [[2], [2], [2], [1]]
    whole, separated = (plan_of(Recipe(in_flight=limit, separate_gradients=flag), problem) for flag in (False, True))
    assert [most_of(separated, rank, rank) for rank in range(4)] == [2, 2, 2, 1]
    before = simulate(problem, whole).makespan_s
    free = plan_of(Recipe(in_flight=limit, until="I", separate_gradients=True), problem)
    assert simulate(problem, free).makespan_s < before
    wide = plan_of(Recipe(in_flight=[[4]] * 4, separate_gradients=True), problem)
    assert simulate(problem, wide).makespan_s < before and most_of(wide, 3, 3) > 1


def test_what_does_not_fit_with_its_weight_gradients_stays_whole():
    wide = chain(2, 2, cost=halves(1, 1, 1, 1.0, weight_bytes=3.0), memory_limit_bytes=[1.0, 1.0])
    plan = plan_of(Recipe(memory=True, split_backward=True), wide)
    check(plan, wide)
    assert not plan.split


def test_a_frozen_module_stays_whole():
    problem = two_modules(2, [1, 1], vision=halves(1, 0, 0), language=halves(1, 1, 0))
    plan = plan_of(Recipe(split_backward=True, in_flight=1), problem)
    assert not plan.split


PROBLEMS = st.one_of(problems(), problems(limits=True), problems(v=True), problems(limits=True, joined=True))


@given(problem=PROBLEMS, recipe=recipes(), of_stages=st.booleans())
@example(problem=chain(2, 8, num_segments=2), recipe=Recipe(first="forward", in_flight=4), of_stages=False)
def test_the_kernel_starts_what_the_engine_starts(problem, recipe, of_stages):
    """As it is, not compiled: its numbers and arrays have the types that numba gives them."""
    shared = Shared(problem)
    if of_stages:
        recipe = replace(recipe, in_flight=[[1 + stage % 3 for stage in stages] for stages in shared.stages])
    bound = Bound(recipe, shared)
    state = Arrays(shared).state(bound)
    count = kernel.run(state)
    engine = Engine(bound.items, bound.message_s)
    started = engine.run(Ranks(bound))
    assert state.begun[:count].tolist() == started
    assert [state.ends[item] for item in started] == [engine.end[item] for item in started]


@pytest.mark.nightly
@given(problem=PROBLEMS, recipe=recipes())
def test_compiled_runs_make_equal_plans(problem, recipe):
    outcomes = []
    for compiled in (False, True):
        try:
            outcomes.append(plan_of(recipe, problem, compiled=compiled))
        except PlanError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]
