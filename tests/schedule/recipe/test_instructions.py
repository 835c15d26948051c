"""Instructions of recipes: in which works they run, in which order, and what is wrong with them in one sentence."""

from dataclasses import replace

import pytest

from mmtrain.errors import ConfigError, RecipeError
from mmtrain.planner.make_plan import make_plan
from mmtrain.planner.search.search_options import SearchOptions
from mmtrain.schedule.action import Kind
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.passes.instruct import plan_without, without_instructions
from mmtrain.schedule.plan import check
from mmtrain.schedule.recipe import Instruction, Recipe, Rule
from mmtrain.schedule.recipe.instructions import in_order, planned
from mmtrain.schedule.recipe.policy import plan_of
from mmtrain.schedule.recipe.schedule_files import schedule_of
from tests.schedule.problems import chain, two_modules
from tests.schedule.recipe.recipes import tutorial


def nothing(stage, work):
    pass


def texts(graph, *instructions):
    """The instructions of an iteration: action < what it waits for > what waits for it."""
    text = {}
    for one in planned(instructions, graph):
        after, before = (" ".join(str(graph.action(*result)) for result in side) for side in (one.after, one.before))
        text[str(graph.action(*one.key))] = f"{after} > {before}"
    return text


def test_they_run_for_the_works_of_each_kth_microbatch_that_the_module_has():
    graph = two_modules(2, [2, 0, 1, 3]).graph
    assert texts(graph, Instruction("SEE", "vision", 1, nothing, every=2)) == {"1SEE2.0": "1F2.0 > "}
    assert list(texts(graph, Instruction("SEE", "vision", 0, nothing))) == [
        "0SEE0.0", "0SEE0.1", "0SEE2.0", "0SEE3.0", "0SEE3.1", "0SEE3.2",
    ]  # fmt: skip
    assert texts(graph, Instruction("SEE", "language", -1, nothing, "B", every=3)) == {"3SEE2.0": "3B2.0 > "}
    assert texts(graph, Instruction("SEE", "language", 0, nothing, every=5)) == {}


def test_they_wait_for_each_other_and_not_for_what_a_work_lacks():
    graph = chain(2, 2).graph
    instructions = [
        Instruction("LAST", "language", 0, nothing, ["F", "MIDDLE"], "B"),
        Instruction("MIDDLE", "language", 0, nothing, (), every=2),
        Instruction("EARLY", "language", 0, nothing, "F", ("MIDDLE", "LAST")),
    ]
    assert [one.name for one in in_order(instructions)] == ["EARLY", "MIDDLE", "LAST"]
    assert texts(graph, *instructions) == {
        "0EARLY0.0": "0F0.0 > ",
        "0EARLY1.0": "0F1.0 > ",
        "0MIDDLE1.0": "0EARLY1.0 > ",
        "0LAST0.0": "0F0.0 0EARLY0.0 > 0B0.0",
        "0LAST1.0": "0F1.0 0EARLY1.0 0MIDDLE1.0 > 0B1.0",
    }
    frozen = replace(graph, backward=((False, True), (True, True)))
    both = [Instruction("SEE", "language", 0, nothing, "F", "B"), Instruction("GRAD", "language", 0, nothing, "B")]
    assert texts(frozen, *both) == {"0SEE0.0": "0F0.0 > ", "0SEE1.0": "0F1.0 > 0B1.0", "0GRAD1.0": "0B1.0 > "}


SEES = (
    Instruction("SEE", "m0", 0, nothing, "F", "B", every=2, seconds=0.5),
    Instruction("GRAD", "m0", -1, nothing, ("B",), seconds=0.25),
)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"first": "alternate", "in_flight": 2, "split_backward": True},
        {"separate_gradients": True, "first": "alternate", "in_flight": 3},
        {"memory": True, "forward": "oldest", "backward": "oldest"},
        {"clock": "lockstep", "overrides": {0: Rule(first="forward")}},
        {"check": lambda moment, action: True},
        {"step": lambda moment: moment.ready[-1]},
    ],
)
def test_recipes_plan_them(fields):
    problem = chain(3, 6, num_segments=2)
    problem = replace(problem, graph=replace(problem.graph, modules=(replace(problem.graph.modules[0], name="m0"),)))
    problem = replace(problem, graph=replace(problem.graph, instructions=tuple(planned(SEES, problem.graph))))
    plan = plan_of(Recipe(instructions=SEES, **fields), problem)
    check(plan, problem)
    assert sum(action.kind in ("SEE", "GRAD") for order in plan.orders for action in order) == 3 + 6


def test_a_schedule_adds_them_to_the_problem_once_and_not_to_validation(tmp_path):
    schedule = tutorial(tmp_path, "watched.py", 2)
    problem = chain(2, 4)
    given = schedule.with_instructions(problem)
    assert [str(given.graph.action(*one.key)) for one in given.graph.instructions] == ["0WATCH1.0", "0WATCH3.0"]
    assert schedule.with_instructions(given) is given and without_instructions(given) == problem
    forward_only = replace(problem.costs[0][0], backward_input_s=0, backward_weight_s=0)
    graph = replace(problem.graph, backward=((False,) * 2,) * 4)
    validation = replace(problem, graph=graph, costs=((forward_only,),))
    assert schedule.with_instructions(validation) is validation
    result = make_plan(problem, schedule)
    assert result.problem == given and plan_without(result.plan, problem).graph == problem.graph
    check(make_plan(given, SearchOptions(budget_evaluations=5)).plan, given)


FAULTS = {
    "a built-in kind": (
        "'F', 'm', 0, print",
        r"Instruction\('F'\): F is a kind of action of every plan; choose another",
    ),
    "a transfer": ("'SEND_F', 'm', 0, print", r"SEND_F is a kind of action of every plan"),
    "a braid": ("'BRAID', 'm', 0, print", r"BRAID is a kind of action of every plan"),
    "small letters": ("'see', 'm', 0, print", r"kind 'see': the name of an instruction is a word of capital letters"),
    "no name": ("3, 'm', 0, print", r"Instruction.name = 3; it must be a text"),
    "no module": ("'SEE', '', 0, print", r"Instruction\('SEE'\).module = ''; name a module of the model"),
    "no chunk": ("'SEE', 'm', '0', print", r"Instruction\('SEE'\).chunk = '0'; it must be a whole number"),
    "no function": ("'SEE', 'm', 0, 'print'", r"Instruction\('SEE'\).function = 'print'; it must be a function"),
    "every": (
        "'SEE', 'm', 0, print, every=0",
        r"\('SEE'\).every = 0; it must be a whole number of at least 1",
    ),
    "seconds": ("'SEE', 'm', 0, print, seconds=-1", r"Instruction\('SEE'\).seconds = -1"),
    "no seconds": ("'SEE', 'm', 0, print, seconds='1'", r"Instruction\('SEE'\).seconds = '1'; it must be a number"),
    "after": (
        "'SEE', 'm', 0, print, after='W'",
        r"names 'W', which is neither F, B nor an instruction of chunk 0 of",
    ),
    "after a number": ("'SEE', 'm', 0, print, after=1", r"Instruction\('SEE'\).after = 1; write F, B or the name of"),
    "itself": ("'SEE', 'm', 0, print, after='SEE'", r"SEE of chunk 0 of 'm' wait for each other in a circle"),
    "a circle": ("'SEE', 'm', 0, print, after='B', before='F'", r"F, B, SEE of chunk 0 of 'm' wait for each other in"),
    "twice": (
        "'SEE', 'm', 0, print), Instruction('SEE', 'm', 0, print",
        r"Recipe.instructions: SEE is twice on chunk 0 of 'm'; rename one",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_sentence(tmp_path, fault):
    words, message = FAULTS[fault]
    path = tmp_path / "recipe.py"
    path.write_text(
        "from mmtrain.schedule.recipe import Instruction, Recipe\n\ndef schedule(P):\n"
        f"    return Recipe(instructions=[Instruction({words})])\n"
    )
    with pytest.raises(ConfigError, match=message) as caught:
        schedule_of(str(path), 2)
    assert str(caught.value).startswith(f"{path}:4: ") and "\n" not in str(caught.value)


def test_a_list_of_instructions_has_instructions():
    for given in ("SEE", [nothing], Instruction("SEE", "m", 0, nothing)):
        with pytest.raises(RecipeError, match=r"Recipe.instructions = .*; give a list of Instruction\(...\)"):
            Recipe(instructions=given)


def test_an_unknown_module_or_chunk_is_refused_when_it_is_planned():
    problem = chain(2, 2)

    def schedule(*words):
        return replace(CATALOGUE["1F1B"], instructions=(Instruction("SEE", *words, nothing),))

    with pytest.raises(RecipeError, match=r"Instruction\('SEE'\) names a module 'vision'; this model has language"):
        make_plan(problem, schedule("vision", 0))
    with pytest.raises(RecipeError, match=r"chunk = 2, but module 'language' is cut into 2 chunks; use -2 .. 1"):
        make_plan(problem, schedule("language", 2))
    with pytest.raises(RecipeError, match=r"chunk = -3, but"):
        make_plan(problem, schedule("language", -3))


def test_functions_may_hold_what_they_have_seen(tmp_path):
    """Two calls of a recipe's function must agree in all that plans depend on, which the state of a function is not."""
    path = tmp_path / "recipe.py"
    path.write_text(
        "import itertools\nfrom mmtrain.schedule.recipe import Instruction, Recipe\nnumbers = itertools.count()\n"
        "def schedule(P):\n    number = object()\n"
        "    return Recipe(instructions=[Instruction('SEE', 'language', 0, lambda stage, work: number)])\n"
        "def impure(P):\n    return Recipe(instructions=[Instruction('SEE', 'language', next(numbers), print)])\n"
    )
    assert schedule_of(str(path), 2).instructions[0].kind is Kind("SEE")
    with pytest.raises(ConfigError, match="impure"):
        schedule_of(f"{path}:impure", 2)
