"""Schedules from files: a recipe, `PATH` or `PATH:FUNCTION`, or orders as CSV in the form of torch's pipelining.

A recipe's file is a program, which runs with the rights of whoever names it (SECURITY.md). It is read when the schedule
is first needed, never when a config is loaded.
"""

import dataclasses
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any

from mmtrain.errors import ConfigError, PlanError, RecipeError, one_line, shown
from mmtrain.schedule.action import BRAID, Action, Braid
from mmtrain.schedule.graph import WorkGraph
from mmtrain.schedule.io.torch_csv import read_plan
from mmtrain.schedule.library.catalogue import CATALOGUE, Schedule
from mmtrain.schedule.library.names import check_name, file_of
from mmtrain.schedule.number_ranges import RANKS
from mmtrain.schedule.passes.instruct import Instructed
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.recipe.instructions import Instruction
from mmtrain.schedule.recipe.language import Recipe
from mmtrain.schedule.recipe.policy import plan_of
from mmtrain.schedule.recipe.program import function_of, guarded, run_program

DEFAULT_FUNCTION = "schedule"
CHAIN = "language"
"""Name of the module of a plain chain."""
MOST_BYTES = 2**22
"""Largest file of a schedule."""


def schedule_of(name: str, num_ranks: int) -> Schedule:
    """The schedule of a name or of a file. Args: num_ranks: P, which a recipe's function gets.

    Raises:
        ConfigError: there is no such schedule or file, or the recipe fails; with its line.
        PlanError: too many ranks, or the CSV's cells are wrong.
    """
    check_name(name)
    RANKS.check("pipeline ranks", num_ranks)
    file = file_of(name)
    if file is None:
        return CATALOGUE[name]
    path = Path(file[0])
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"schedule {shown(name)}: {path} has over {MOST_BYTES:,} bytes; name a schedule's file")
        text = path.read_bytes().decode()  # line ends as they are: the digest is that of the file
    except OSError as error:
        raise ConfigError(f"schedule {shown(name)}: {path} cannot be read: {error.strerror}; name a file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"schedule {shown(name)}: {path} is no text in UTF-8; name a schedule's file") from None
    return (_of_csv if path.suffix == ".csv" else _of_recipe)(name, text, num_ranks)


# ------------------------------------------------------------------------------------------------ recipes


@lru_cache(maxsize=16)
def _of_recipe(name: str, text: str, num_ranks: int) -> Schedule:
    path, function = file_of(name) or (name, "")
    recipe = _run_file(path, function or DEFAULT_FUNCTION, text, num_ranks)
    placements = recipe.placements
    shapes = {recipe.placement_of(module).shape for module in placements}
    on_some = [module for module in placements if recipe.placement_of(module).ranks]
    refusal = ""
    if on_some:
        refusal = "names ranks (Placement.ranks), but a job has each module on all pipeline ranks, in their order"
    elif "v" in shapes and len(shapes) > 1:
        refusal = 'places some modules in a "v" and others not, where a job places all alike'
    try:
        chain_ranks = tuple(recipe.placement_of(CHAIN).stage_ranks(num_ranks))
    except PlanError as error:
        raise ConfigError(f"{path}: {error}") from None
    splits = [recipe.split_backward, recipe.separate_gradients, *(r.split_backward for r in recipe.overrides.values())]
    return Schedule(
        name=name,
        idea=one_line(recipe.idea) if recipe.idea else f"recipe of {path}",
        make=partial(_make, path, recipe),
        make_separated=partial(_make, path, dataclasses.replace(recipe, separate_gradients=True)),
        separates_gradients=recipe.separate_gradients,
        placement="v" if shapes == {"v"} else "loop",
        least_passes=1,
        splits_backward=any(splits),
        keeps_memory_limits=recipe.memory,
        plans_forward_only=True,
        segments={module: recipe.placement_of(module).passes for module in placements},
        chain_ranks=chain_ranks,
        instructions=tuple(recipe.instructions),
        refusal=refusal,
        text=text,
    )


def _make(path: str, recipe: Recipe, problem: PlanningProblem) -> Plan:
    try:
        return plan_of(recipe, problem)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from error


def _run_file(path: str, function: str, text: str, num_ranks: int) -> Recipe:
    """The recipe that a file's function returns."""
    make = function_of(path, run_program(path, text, "mmtrain_recipe"), function, "(P)")
    recipe, again = (guarded(path, lambda: make(num_ranks)) for _ in range(2))
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"{path}: {function}({num_ranks}) returned {shown(recipe)}; return a Recipe")
    if guarded(path, lambda: _form(recipe) != _form(again)):
        raise ConfigError(
            f"{path}: {function}({num_ranks}) is impure: two calls returned different recipes; let it use P alone"
        )
    return recipe


def _form(value: Any, depth: int = 4) -> Any:
    """What two equal recipes have alike: values, and the code and the captured values of functions."""
    if depth == 0:
        return type(value)
    inner = partial(_form, depth=depth - 1)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]
        if isinstance(value, Instruction):
            names.remove("function")  # it may hold what it has seen, and plans do not depend on it
        return [type(value), *(inner(getattr(value, name)) for name in names)]
    if isinstance(value, Mapping):
        return {key: inner(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [inner(entry) for entry in value]
    if isinstance(value, FunctionType):
        captured = [inner(cell.cell_contents) for cell in value.__closure__ or ()]
        return [value.__code__, inner(value.__defaults__), inner(value.__kwdefaults__), captured]
    if isinstance(value, partial):
        return [inner(value.func), inner(value.args), inner(value.keywords)]
    if callable(value) and not isinstance(value, type):
        return [type(value), inner(getattr(value, "__dict__", {}))]
    return value


def text_of(recipe: Recipe) -> str:
    """The text of a file that defines a recipe without functions; `schedule_of` reads an equal one, for any P."""
    words = [
        f"{f.name}={value!r}"
        for f in dataclasses.fields(recipe)
        if (value := getattr(recipe, f.name)) != f.default and not (f.name == "overrides" and not value)
    ]
    body = "".join(f"        {word},\n" for word in words)
    return (
        f"from mmtrain.schedule.recipe import Placement, Recipe, Rule, Traversal\n\n\ndef schedule(P):\n"
        f"    return Recipe(\n{body}    )\n"
    )


# --------------------------------------------------------------------------------------------------- CSV


@lru_cache(maxsize=16)
def _of_csv(name: str, text: str, num_ranks: int) -> Schedule:
    try:
        plan = read_plan(text.removeprefix("\ufeff"))  # of a spreadsheet
    except PlanError as error:
        raise PlanError(f"{name}: {error}") from error
    graph = plan.graph
    if graph.num_ranks != num_ranks:
        raise ConfigError(
            f"{name} has {graph.num_ranks} rows, one a rank, but there are {num_ranks} "
            "pipeline ranks; use as many ranks, or choose another schedule"
        )
    return Schedule(
        name=name,
        idea=f"the orders of {name}",
        make=Instructed(partial(_relabelled, name, plan)),
        least_passes=-(-len(graph.stage_rank) // graph.num_ranks),
        splits_backward=bool(plan.split),
        segments={"": -(-len(graph.stage_rank) // graph.num_ranks)},
        placement="v" if graph.stage_rank == (*range(num_ranks), *reversed(range(num_ranks))) else "loop",
        chain_ranks=graph.stage_rank,
        braids=any(entry.kind is BRAID for order in plan.orders for entry in order),
        text=text,
    )


def _relabelled(name: str, plan: Plan, problem: PlanningProblem) -> Plan:
    """The plan of a file for the problem's chain."""
    given, wanted = plan.graph, problem.graph
    chain = [stage for module in wanted.modules for stage in module.stages]
    if len(wanted.modules) > 1 or tuple(wanted.stage_rank[stage] for stage in chain) != given.stage_rank:
        raise PlanError(
            f"{name} is for one chain of {len(given.stage_rank)} stages on ranks {list(given.stage_rank)}; this "
            f"iteration has {_chains(wanted)}; choose another schedule, or cut the model so"
        )
    works = sorted(range(len(wanted.works)), key=lambda w: (wanted.works[w].microbatch, wanted.works[w].sub_microbatch))
    if len(works) != len(given.works):
        raise PlanError(
            f"{name} is for {len(given.works)} microbatches; this iteration has {len(works)} "
            "works; choose another schedule, or as many microbatches"
        )

    def entry(given: Action) -> Action:
        parts = [wanted.action(part.kind, chain[part.stage], works[part.microbatch]) for part in given.parts]
        return Braid.of(*parts) if given.kind is BRAID else parts[0]

    return Plan(wanted, tuple(tuple(map(entry, order)) for order in plan.orders))


def _chains(graph: WorkGraph) -> str:
    ranks = {m.name: [graph.stage_rank[stage] for stage in m.stages] for m in graph.modules}
    return " and ".join(f"{name} on {on}" for name, on in ranks.items())
