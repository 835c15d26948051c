"""FlexPipe's types of schedules as candidates of a job of one module: ranked on a problem, and written as recipes."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from mmtrain.errors import PlanError
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.recipe.flexpipe_types import flexpipe_types
from mmtrain.schedule.recipe.grid import RecipeGrid
from mmtrain.schedule.recipe.language import Recipe
from mmtrain.schedule.recipe.schedule_files import text_of


def best_recipes(folder: Path, num_ranks: int, problem_of: Callable[[Path], PlanningProblem | None]) -> Iterator[Path]:
    """The file of the fastest recipe of each placement, written into a folder.

    Args: problem_of: the planning problem of a job under the recipe of a file; None: it has none.
    """
    placements: dict[object, list[tuple[str, Recipe]]] = {}
    for name, recipe in flexpipe_types(num_ranks):
        if len(recipe.placements) == 1:  # a job has one copy of the model
            within = replace(recipe, memory=True, clock="seconds", idea=f"FlexPipe's type {name}")
            placements.setdefault(recipe.placement, []).append((name, within))
    for types in placements.values():
        problem = problem_of(_written(folder, *types[0]))
        if problem is None:
            continue
        grid = RecipeGrid(problem, compiled=False)
        try:
            scores = {name: grid.score(recipe) for name, recipe in types}
        except PlanError:  # one microbatch alone exceeds the memory limit, whatever the recipe
            continue
        ran = [(scores[name].makespan_s, name, recipe) for name, recipe in types if not scores[name].stuck]
        if ran:
            _, name, recipe = min(ran, key=lambda one: one[:2])
            yield _written(folder, name, recipe)


def _written(folder: Path, name: str, recipe: Recipe) -> Path:
    path = folder / f"{'_'.join(name.replace(',', '').replace('-', ' ').split())}.py"
    path.write_text(text_of(recipe))
    return path
