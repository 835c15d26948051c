"""The names of the schedules, for configs, which load neither the schedules nor the files that define one."""

import re
from typing import Literal, get_args

from mmtrain.errors import ConfigError, nearest, shown

ScheduleName = Literal[
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "ZB-H1",
    "ZB-H2",
    "ZB-AutoSchedule",
    "InterleavedZeroBubble",
    "ZBV",
    "V-half",
    "V-min",
    "DualPipeV",
    "STP",
    "STP-lean",
    "Optimus",
    "interleave",
]
"""The names of schedules in the order of lists; `catalogue.CATALOGUE` has their functions."""

MEMORY_BOUNDED_SCHEDULES: tuple[ScheduleName, ...] = ("ZB-AutoSchedule", "interleave")
"""Schedules whose plans keep the memory limits of a problem; the others bound their memory by their own rule."""

EAGER_SCHEDULES: tuple[ScheduleName, ...] = ("1F1B", "Interleaved1F1B", "ZB-H1", "ZB-H2", "InterleavedZeroBubble")
"""Schedules with a rule for the number of forwards in flight, which planner.search.eager_forwards raises."""

_FILE = re.compile(r"(?P<path>.+\.(?:py|csv))(?::(?P<function>[^:/\\]*))?", re.DOTALL)


def file_of(name: str, where: str = "schedule") -> tuple[str, str] | None:
    """Path and function of the file that a schedule's name stands for; None: it is no file. The file is not opened.

    Args: where: what has the name, for errors.
    Raises: ConfigError: an address in place of a path, or a function that is no name.
    """
    match = _FILE.fullmatch(name)
    if match is None:
        return None
    if "://" in name:
        raise ConfigError(
            f"{where} {shown(name)} is an address; a recipe is a program, so it is run from local files only"
        )
    function = match["function"]
    if function is not None and (match["path"].endswith(".csv") or not function.isidentifier()):
        raise ConfigError(f"{where} {shown(name)}: write the path of a recipe, or PATH:FUNCTION (docs/recipes.md)")
    return match["path"], function or ""


def is_recipe(name: str) -> bool:
    """Whether a name is that of a program, which runs wherever the schedule is needed."""
    file = file_of(name)
    return file is not None and not file[0].endswith(".csv")


def check_name(name: str, also: tuple[str, ...] = (), where: str = "schedule") -> None:
    """Checks that a name is that of a schedule, or of a file. Args: also: further names. where: as of `file_of`.

    Raises: ConfigError: it is neither; with the nearest name.
    """
    known = (*get_args(ScheduleName), *also)
    if name not in known and file_of(name, where) is None:
        near = nearest(name, known)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        raise ConfigError(
            f"{where} {shown(name)} does not exist; choose one of {', '.join(known)}, or the path of a recipe (.py, "
            f"docs/recipes.md) or of torch's orders (.csv){hint}"
        )
