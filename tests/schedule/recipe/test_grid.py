"""A grid of recipes says of each what the simulator says of its plan."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.errors import PlanError
from mmtrain.schedule.action import Kind
from mmtrain.schedule.graph import InstructionNode, ModuleStages, Work
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.recipe import Recipe, Traversal
from mmtrain.schedule.recipe.bound_recipe import Bound
from mmtrain.schedule.recipe.grid import RecipeGrid
from mmtrain.schedule.recipe.kernel_state import Arrays
from mmtrain.schedule.recipe.policy import plan_of
from mmtrain.schedule.recipe.shared import Shared
from mmtrain.schedule.simulate import simulate
from tests.schedule.problems import NO_P2P, chain, option, problems
from tests.schedule.recipe.recipes import recipes

PROBLEMS = st.one_of(problems(), problems(limits=True), problems(v=True), problems(limits=True, joined=True))


def compare(grid: RecipeGrid, problem: PlanningProblem, recipe: Recipe) -> None:
    """Both ways, to the bit."""
    try:
        plan = plan_of(recipe, problem)
    except PlanError as error:
        if recipe.separate_gradients:
            with pytest.raises(PlanError, match="stuck"):
                grid.score(recipe)
        else:
            score = grid.score(recipe)
            assert f"stuck after {score.num_started} of {score.num_actions} actions" in str(error)
        return
    score, timeline = grid.score(recipe), simulate(problem, plan)
    assert not score.stuck and score.num_actions == sum(map(len, plan.orders))
    assert score.makespan_s == timeline.makespan_s
    assert score.span_s == timeline.span_s
    assert score.busy_s == timeline.busy_s
    assert score.bubble == timeline.bubble
    assert score.peak_bytes == timeline.peak_bytes
    assert grid.plan(recipe) == plan


@given(problem=PROBLEMS, batch=st.lists(recipes(), min_size=1, max_size=3))
def test_a_score_is_what_the_simulator_says_of_the_plan(problem, batch):
    grid = RecipeGrid(problem, compiled=False)
    for recipe in (*batch, batch[0]):  # a recipe changes nothing that the next one reads
        compare(grid, problem, recipe)


def test_recipes_that_differ_in_one_word_have_scores_of_their_own():
    problem = chain(4, 8, memory_limit_bytes=[3.0] * 4)
    grid, recipe = RecipeGrid(problem, compiled=False), Recipe(in_flight=2, split_backward=True)
    changes = ({}, {"until": "I"}, {"split_backward": False}, {"memory": True}, {"in_flight": 1}, {"clock": "lockstep"})
    for change in changes:
        compare(grid, problem, replace(recipe, **change))
    assert len({grid.score(replace(recipe, **change)).makespan_s for change in changes[:2]}) == 2


def test_an_action_waits_for_the_latest_of_its_inputs():
    """Two encoders of 5 s and 1 s on ranks of their own, which start together, before a language model."""
    problem = PlanningProblem.build(
        num_ranks=3,
        modules=[
            ModuleStages(name=name, stages=(stage,)) for stage, name in enumerate(("vision", "audio", "language"))
        ],
        stage_rank=[0, 1, 2],
        works=[
            Work(module=0, microbatch=0, sub_microbatch=0),
            Work(module=1, microbatch=0, sub_microbatch=0),
            Work(module=2, microbatch=0, sub_microbatch=0, after=(0, 1)),
        ],
        costs=[[option(5.0)], [option(1.0)], [option(1.0)]],
        cost_index=[[0], [1], [2]],
        output_bytes=[[0.0]] * 3,
        p2p=NO_P2P,
    )
    grid = RecipeGrid(problem, compiled=False)
    compare(grid, problem, Recipe(clock="lockstep"))
    assert grid.score(Recipe(clock="lockstep")).makespan_s == 5 + 1 + 2 + 2


@pytest.mark.nightly
@given(problem=PROBLEMS, recipe=recipes())
def test_a_compiled_score_is_what_the_simulator_says_of_the_plan(problem, recipe):
    compare(RecipeGrid(problem), problem, recipe)


@given(problem=PROBLEMS, recipe=recipes())
def test_all_states_have_the_same_types(problem, recipe):
    """numba compiles the kernel once, not again for another type."""
    shared = Shared(problem)
    types = [
        {name: (array.dtype, array.flags.c_contiguous, array.ndim) for name, array in made._asdict().items()}
        for bound in (Bound(recipe, shared), Bound(Recipe(), shared))
        for made in (Arrays(shared).state(bound), Arrays(shared).costs(bound.settled))
    ]
    assert types[0] == types[2] and types[1] == types[3]
    assert {kind for of in types for kind in of.values()} == {(np.dtype(t), True, 1) for t in ("int64", "float64")}


def test_a_stuck_recipe_is_reported_and_its_plan_says_why():
    recipe = Recipe(forward=Traversal("breadth", every=3, wait=True), in_flight=2)
    grid = RecipeGrid(chain(2, 4, num_segments=2), compiled=False)
    score = grid.score(recipe)
    assert score.stuck and 0 < score.num_started < score.num_actions == 32
    with pytest.raises(PlanError, match=f"stuck after {score.num_started} of 32 actions: rank 0 could start"):
        grid.plan(recipe)


def test_recipes_with_functions_and_instructions_have_scores():
    sync = Kind.register("SYNC")
    instruction = InstructionNode(
        kind=sync, stage=1, work=0, after=((Kind.F, 1, 0),), before=((Kind.B, 1, 0),), seconds=1, growth_bytes=2
    )
    problem = chain(2, 3)
    problem = replace(problem, graph=replace(problem.graph, instructions=(instruction,)))
    grid = RecipeGrid(problem, compiled=False)
    for recipe in (
        Recipe(),
        Recipe(check=lambda moment, action: moment.last is None or {moment.last.kind, action.kind} != {Kind.F}),
        Recipe(step=lambda moment: moment.ready[-1]),
    ):
        compare(grid, problem, recipe)
