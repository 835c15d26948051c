"""Recipes for tests: those of the tutorial, and random ones."""

from pathlib import Path

from hypothesis import strategies as st

from mmtrain.schedule.library.catalogue import Schedule
from mmtrain.schedule.recipe import Recipe, Rule, Traversal
from mmtrain.schedule.recipe.schedule_files import schedule_of
from tests.guides import File, steps

TUTORIAL = {step.name: step.text for step in steps("recipes.md") if isinstance(step, File)}
"""The files of docs/recipes.md."""


def tutorial(folder: Path, name: str, num_ranks: int) -> Schedule:
    """The schedule of one of the tutorial's files. Args: name: FILE.py[:FUNCTION]."""
    file = name.partition(":")[0]
    (folder / file).write_text(TUTORIAL[file])
    return schedule_of(f"{folder}/{name}", num_ranks)


def _traversals() -> st.SearchStrategy[str | Traversal]:
    stepped = st.builds(Traversal, st.sampled_from(["breadth", "depth"]), st.integers(1, 5), st.booleans())
    return st.one_of(st.sampled_from(["breadth", "depth", "oldest"]), stepped)


def recipes() -> st.SearchStrategy[Recipe]:
    """Random recipes without functions, for random problems, which have a module m0."""
    units = st.tuples(st.integers(1, 3), st.integers(1, 3))
    first = st.sampled_from(["backward", "forward", "alternate"])
    limit = st.one_of(st.none(), st.integers(1, 4))
    of_rank = st.builds(Rule, first=st.one_of(st.none(), first), in_flight=limit, until=st.sampled_from("BIW"))
    of_module = st.builds(Rule, in_flight=limit, split_backward=st.booleans())
    return st.builds(
        Recipe,
        first=first,
        units=units,
        forward=_traversals(),
        backward=_traversals(),
        in_flight=limit,
        until=st.sampled_from("BIW"),
        split_backward=st.booleans(),
        memory=st.booleans(),
        separate_gradients=st.booleans(),
        overrides=st.fixed_dictionaries({}, optional={0: of_rank, "m0": of_module}),
        clock=st.sampled_from(["seconds", "lockstep"]),
    )
