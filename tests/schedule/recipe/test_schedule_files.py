"""Schedules from files: recipes and torch's CSV, and what is wrong with them in one sentence."""

import hashlib
from dataclasses import replace

import pytest

from mmtrain.commands import cli
from mmtrain.config import config
from mmtrain.errors import ConfigError, MMTrainError, PlanError, RecipeError
from mmtrain.planner.make_plan import make_plan
from mmtrain.schedule.chain import plain_chain
from mmtrain.schedule.io.torch_csv import write_plan
from mmtrain.schedule.library.breadth_first import gpipe
from mmtrain.schedule.library.catalogue import CATALOGUE, Schedule
from mmtrain.schedule.plan import check
from mmtrain.schedule.recipe import Rule
from mmtrain.schedule.recipe.flexpipe_types import flexpipe_types
from mmtrain.schedule.recipe.schedule_files import schedule_of, text_of
from mmtrain.schedule.simulate import simulate
from tests.schedule.problems import two_modules

HEAD = "from mmtrain.schedule.recipe import Placement, Recipe, Rule, Traversal\n"
FAULTS = {
    "no Python": ("def schedule(P:\n", r"recipe.py:1: not a Python file: "),
    "an import": ("import nothing_like_it\n", r"recipe.py:1: ModuleNotFoundError: No module named 'nothing_like_it'"),
    "another name": ("def plan(P):\n    return 1\n", r"there is no function 'schedule'; define .* \(plan\)"),
    "an error": ("def schedule(P):\n    return P / 0\n", r"recipe.py:2: ZeroDivisionError: division by zero"),
    "an exit": ("import sys\nsys.exit(3)\n", r"recipe.py:2: SystemExit: 3"),
    "no recipe": ("def schedule(P):\n    return 'forward'\n", r"schedule\(4\) returned 'forward'; return a Recipe"),
    "a word": ("def schedule(P):\n    return Recipe(first='fwd')\n", r"recipe.py:3: Recipe.first = 'fwd'; choose"),
    "a near word": ("def schedule(P):\n    return Recipe(forward='bredth')\n", r"did you mean 'breadth'\?"),
    "a key": ("def schedule(P):\n    return Recipe(inflight=3)\n", r"recipe.py:3: TypeError: .*'inflight'"),
    "a limit": ("def schedule(P):\n    return Recipe(in_flight=0)\n", r"Recipe.in_flight = 0; it must be a whole"),
    "units": ("def schedule(P):\n    return Recipe(units=2)\n", r"Recipe.units = 2; give two numbers"),
    "oldest every": ("def schedule(P):\n    return Recipe(forward=Traversal('oldest', 2))\n", r"every goes with"),
    "wait": ("def schedule(P):\n    return Recipe(forward=Traversal('depth', wait=True))\n", r"nothing to wait for"),
    "placement": ("def schedule(P):\n    return Recipe(placement='ring')\n", r"Recipe.placement = 'ring'; choose"),
    "chunks": ("def schedule(P):\n    return Recipe(placement=Placement('v', chunks=3))\n", r"it has 2 on each rank"),
    "ranks": ("def schedule(P):\n    return Recipe(placement=Placement(ranks=[0, 4]))\n", r"with 4 pipeline ranks"),
    "ranks twice": ("def schedule(P):\n    return Recipe(placement=Placement(ranks=[0, 0]))\n", r"names a rank twice"),
    "a rule": ("def schedule(P):\n    return Recipe(overrides={0: 3})\n", r"map a module or a rank"),
    "a check": ("def schedule(P):\n    return Recipe(check=3)\n", r"Recipe.check = 3; it must be a function"),
    "impure overrides": (
        "import itertools\nn = itertools.count(1)\ndef schedule(P):\n"
        "    return Recipe(overrides={0: Rule(in_flight=next(n))})\n",
        r"is impure",
    ),
    "impure capture": (
        "import itertools\nn = itertools.count(1)\ndef schedule(P):\n"
        "    k = next(n)\n    return Recipe(in_flight=lambda rank: k)\n",
        r"is impure",
    ),
    "None": ("def schedule(P):\n    return Recipe(first=None)\n", r"Recipe.first = None; leave it out"),
    "a flag": ("def schedule(P):\n    return Recipe(memory='no')\n", r"Recipe.memory = 'no'; it must be True or False"),
    "a huge limit": ("def schedule(P):\n    return Recipe(in_flight=10**400)\n", r"it must be a whole number"),
    "nested limits": ("def schedule(P):\n    return Recipe(in_flight=[[[1]]])\n", r"in_flight = \[1\]; it must be"),
    "ranks as text": ("def schedule(P):\n    return Recipe(placement=Placement(ranks='01'))\n", r"give a list of pipe"),
    "many chunks": (
        "def schedule(P):\n    return Recipe(placement=Placement('circular', 10**9))\n",
        r"it must be at most",
    ),
    "a flag as key": (
        "def schedule(P):\n    return Recipe(overrides={True: Rule()})\n",
        r"map a module or a rank to a Rule",
    ),
    "a module": ("def schedule(P):\n    return Recipe(placement={1: 'v'})\n", r"write a word or a Placement"),
    "a capture without a value": (
        "def schedule(P):\n    def f(rank):\n        return g(rank)\n    recipe = Recipe(in_flight=f)\n"
        "    return recipe\n    g = f\n",
        r"recipe.py: ValueError: Cell is empty",
    ),
    "arguments": ("def schedule():\n    return Recipe()\n", r"recipe.py: TypeError: schedule\(\) takes 0 positional"),
    "deep": ("x = " + "-" * 100000 + "1\n", r"recipe.py(:1)?: not a Python file: "),
    "impure": ("n = [0]\ndef schedule(P):\n    n[0] += 1\n    return Recipe(in_flight=n[0])\n", r"is impure"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_file_is_one_sentence_with_its_line(tmp_path, fault):
    text, message = FAULTS[fault]
    path = tmp_path / "recipe.py"
    path.write_text((HEAD if "Recipe(" in text else "") + text)
    with pytest.raises(ConfigError, match=message) as error:
        schedule_of(str(path), 4)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.py", r"schedule 'none.py': none.py cannot be read: No such file or directory"),
        ("https://example.org/recipe.py", r"is an address; a recipe is a program, so it is run from local files only"),
        ("recipe.py:a b", r"write the path of a recipe, or PATH:FUNCTION"),
        ("orders.csv:schedule", r"write the path of a recipe, or PATH:FUNCTION"),
        ("1F1", r"does not exist; choose one of .* the path of a recipe .* did you mean \"1F1B\"\?"),
    ],
)
def test_a_wrong_name_is_one_sentence(name, message):
    with pytest.raises(ConfigError, match=message):
        schedule_of(name, 4)


def test_the_digest_is_that_of_the_file(tmp_path):
    path = tmp_path / "recipe.py"
    path.write_bytes((HEAD + "def schedule(P):\n    return Recipe()\n").replace("\n", "\r\n").encode())
    assert schedule_of(str(path), 2).digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_kind_of_file_follows_from_the_name():
    kinds = [Schedule(idea="", make=gpipe, name=name).suffix for name in ("a:b/c.py", "c.py:f", "c.csv", "GPipe")]
    assert kinds == [".py", ".py", ".csv", ""]


def test_pure_callables_and_dataclasses_are_taken(tmp_path):
    path = tmp_path / "recipe.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom functools import partial\n"
        + HEAD
        + """
@dataclass
class Least:
    most: int
    def __call__(self, rank):
        return self.most
def f(most, rank):
    return most
def schedule(P):
    return Recipe(in_flight=partial(f, 2), overrides={0: Rule(in_flight=Least(3))})
"""
    )
    assert schedule_of(str(path), 4).make(plain_chain(4, 8, schedule_of(str(path), 4))).orders


def test_separation_keeps_the_limits_of_a_recipe_and_its_mistakes_are_no_question_of_memory(tmp_path):
    path = tmp_path / "recipe.py"
    path.write_text(HEAD + "def schedule(P):\n    return Recipe(in_flight=[P - r for r in range(P)])\n")
    schedule = schedule_of(str(path), 4)
    problem = plain_chain(4, 12, schedule)
    assert simulate(problem, schedule.separated().make(problem)).peak_bytes == (4.0, 3.0, 2.0, 1.0)
    path.write_text(HEAD + "def schedule(P):\n    return Recipe(memory=True, in_flight=[1])\n")
    with pytest.raises(RecipeError, match=r"recipe.py: Recipe.in_flight has 1 entries for 4 pipeline ranks"):
        make_plan(problem, schedule_of(str(path), 4))


def test_placements_of_chains_and_what_jobs_are_told(tmp_path):
    path = tmp_path / "recipe.py"
    path.write_text(
        HEAD + "def schedule(P):\n    return Recipe(placement='v')\n"
        "def some(P):\n    return Recipe(placement=Placement('circular', chunks=3, ranks=[1, 0]))\n"
        "def by_module(P):\n    return Recipe(placement={'vision': 'circular', 'language': 'v'})\n"
    )
    v, some, by_module = (schedule_of(f"{path}{name}", 3) for name in ("", ":some", ":by_module"))
    assert v.chain_ranks == (0, 1, 2, 2, 1, 0) and v.placement == "v" and not v.refusal
    assert some.chain_ranks == (1, 0, 1, 0, 1, 0) and "Placement.ranks" in some.refusal
    assert by_module.chain_ranks == v.chain_ranks  # a chain's module is called language
    with pytest.raises(PlanError, match="the schedule's file places its chunks; leave"):
        plain_chain(3, 4, v, num_segments=2)
    assert by_module.segments == {"vision": 2, "language": 2} and "places all alike" in by_module.refusal
    problem = plain_chain(3, 4, some)
    check(some.make(problem), problem)


def test_the_orders_of_a_csv_are_those_of_the_chain_it_was_written_for(tmp_path):
    problem = plain_chain(4, 8, CATALOGUE["Interleaved1F1B"], num_segments=2)
    plan = CATALOGUE["Interleaved1F1B"].make(problem)
    path = tmp_path / "orders.csv"
    path.write_text(write_plan(plan))
    schedule = schedule_of(str(path), 4)
    assert schedule.make(plain_chain(4, 8, schedule)) == plan
    with pytest.raises(MMTrainError, match="is for 8 microbatches; this iteration has 4 works"):
        schedule.make(plain_chain(4, 4, schedule))
    with pytest.raises(MMTrainError, match=r"this iteration has vision on \[0, 1\] and language on \[0, 1\]"):
        schedule.make(two_modules(2, [1]))
    with pytest.raises(ConfigError, match="has 4 rows, one a rank, but there are 2 pipeline ranks"):
        schedule_of(str(path), 2)


@pytest.mark.parametrize("name", ["orders.csv", "recipe.py"])
def test_a_byte_order_mark_of_a_spreadsheet_or_an_editor_is_no_part_of_a_schedule(tmp_path, name):
    path, marked = tmp_path / name, tmp_path / f"marked_{name}"
    orders = write_plan(CATALOGUE["1F1B"].make(plain_chain(2, 3, CATALOGUE["1F1B"])))
    path.write_text(orders if path.suffix == ".csv" else f"{HEAD}def schedule(P):\n    return Recipe()\n")
    marked.write_text(path.read_text(), encoding="utf-8-sig")
    plain, other = (schedule_of(str(file), 2) for file in (path, marked))
    assert other.make(plain_chain(2, 3, other)).orders == plain.make(plain_chain(2, 3, plain)).orders


def test_the_text_of_a_recipe_defines_an_equal_one():
    for P in (2, 5):
        for name, recipe in flexpipe_types(P):
            given: dict = {}
            exec(text_of(replace(recipe, memory=True, idea=name, overrides={1: Rule(units=(2, 1))})), given)
            assert given["schedule"](P) == replace(recipe, memory=True, idea=name, overrides={1: Rule(units=(2, 1))})


def test_commands_take_files(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.py").write_text(
        "from mmtrain.schedule.recipe import Recipe\ndef schedule(P):\n    return Recipe(idea='mine', in_flight=P)\n"
    )
    assert cli.main(["schedule", "list", "recipe.py"]) == 0
    assert capsys.readouterr().out == "recipe.py              mine\n"
    assert cli.main(["schedule", "show", "recipe.py", "--pp", "2", "--format", "csv", "--out", "orders.csv"]) == 0
    assert cli.main(["schedule", "compare", "recipe.py", "orders.csv", "--pp", "2"]) == 0
    first, second = capsys.readouterr().out.splitlines()[1:3]
    assert first.split()[1:] == second.split()[1:]
    for words in (
        ["show", "none.py"],
        ["compare", "none.py"],
        ["compare", "none.csv", "1F1B"],
        ["list", "none.py"],
        ["compare", "recipe.py:no"],
    ):
        assert cli.main(["schedule", *words]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and error.startswith("error: ")


def test_loading_a_config_reads_no_file():
    job = config.load("debug_vlm.toml", ["--parallelism.pipeline_parallel_schedule=none.py"])
    assert job.parallelism.pipeline_parallel_schedule == "none.py"
