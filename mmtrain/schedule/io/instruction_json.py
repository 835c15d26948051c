"""The instructions of a planning problem in its JSON form."""

import re
from typing import Any

from mmtrain.errors import PlanError
from mmtrain.schedule.action import Kind
from mmtrain.schedule.graph import InstructionNode
from mmtrain.schedule.io.strict_json import fields, integer, items, number, string
from mmtrain.schedule.items import Result

MOST_LETTERS = 64
"""The most letters of a kind that a file names."""


def to_json(given: InstructionNode) -> dict[str, Any]:
    """One instruction; `read` is the inverse."""
    table = {
        "kind": given.kind.value,
        "stage": given.stage,
        "work": given.work,
        "after": list(map(_result_to_json, given.after)),
        "before": list(map(_result_to_json, given.before)),
        "seconds": given.seconds,
        "growth_bytes": given.growth_bytes,
    }
    return {key: value for key, value in table.items() if value or key in ("kind", "stage", "work")}


def read(table: Any, where: str) -> InstructionNode:
    """The instruction of a table; its kind is registered. Raises: PlanError: a rule of the format is broken."""
    fields(table, where, ("kind", "stage", "work"), optional=("after", "before", "seconds", "growth_bytes"))
    amounts = {key: number(table[key], f"{where}.{key}") for key in ("seconds", "growth_bytes") if key in table}
    return InstructionNode(
        kind=_kind(table["kind"], f"{where}.kind"),
        stage=integer(table["stage"], f"{where}.stage"),
        work=integer(table["work"], f"{where}.work"),
        after=_read_results(table.get("after", []), f"{where}.after"),
        before=_read_results(table.get("before", []), f"{where}.before"),
        **amounts,
    )


def _kind(value: Any, where: str) -> Kind:
    name = string(value, where)
    if len(name) > MOST_LETTERS or not re.fullmatch(r"[A-Z]+(_[A-Z]+)*", name):
        raise PlanError(f"{where} = {name[:MOST_LETTERS]!r}; it is a word of at most {MOST_LETTERS} capital letters")
    return Kind.register(name)


def _result_to_json(result: Result) -> list[Any]:
    kind, stage, work = result
    return [kind.value, stage, work]


def _read_results(value: Any, where: str) -> tuple[Result, ...]:
    return tuple(_read_result(one, f"{where}[{i}]") for i, one in enumerate(items(value, where)))


def _read_result(value: Any, where: str) -> Result:
    row = items(value, where)
    if len(row) != 3:
        raise PlanError(f"{where} has {len(row)} entries; write kind, stage and work")
    return _kind(row[0], f"{where}[0]"), integer(row[1], f"{where}[1]"), integer(row[2], f"{where}[2]")
