"""The CSV form of schedules in torch: one row a rank, one cell an action.

torch's pipelining has one chain of stages, each on one rank, with the same microbatches in every stage. A cell is
`<stage><kind><microbatch>`, as `2F0`, or empty where a rank waits. Files are *compute-only* (F, B, I, W) or *with
communication* (also SEND_F, RECV_F, SEND_B, RECV_B between neighbours in the chain, and UNSHARD, RESHARD, REDUCE_GRAD).
torch waits for a received input just before its use; a `Program` has an action for that wait.

Source: the format of `_load_csv` and `_dump_csv` of torch 2.13.
"""

import csv
import io
import re
from collections.abc import Iterable, Sequence

from mmtrain.errors import PlanError
from mmtrain.schedule.action import BRAID, COMPUTE, KINDS, STAGE_WIDE, TRANSFERS, WAITS, Action, Braid, Kind
from mmtrain.schedule.graph import ModuleStages, Work, WorkGraph
from mmtrain.schedule.passes.lower import Program, waits_before
from mmtrain.schedule.plan import Plan, check
from mmtrain.schedule.transport import check_transport

MODULE = "model"
"""Name of the module of a schedule from a file."""

_TO_TORCH = {Kind.REDUCE: "REDUCE_GRAD"}
_FROM_TORCH = {_TO_TORCH.get(kind, str(kind)): kind for kind in KINDS if kind not in WAITS}
_NUMBER = r"0|[1-9][0-9]{0,8}"
_CELL = re.compile(rf"({_NUMBER})({'|'.join(sorted(_FROM_TORCH, key=len, reverse=True))})({_NUMBER}|)")
_SHOWN = 40
"""Maximum number of characters of a faulty cell in its error."""
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")

Cell = tuple[Kind, int, int]
"""A kind, a stage and a microbatch, which is -1 for the stage-wide kinds."""
Cells = list[Cell]
"""One cell of the file: one action, or the parts of a braid."""


def write_plan(plan: Plan) -> str:
    """The compute-only CSV text of a plan. Empty cells put every action after its inputs, one column a step.

    Raises: PlanError: the plan is not one chain with one work a microbatch, or deadlocks.
    """
    _check_chain(plan.graph)
    rows = []
    for order, steps in zip(plan.orders, _columns(plan), strict=True):
        row = [""] * (steps[-1] + 1 if steps else 0)
        for action, step in zip(order, steps, strict=True):
            row[step] = _cell(action)
        rows.append(row)
    return _to_text(rows)


def write_program(program: Program) -> str:
    """The CSV text with communication of a program, without its waits, which torch does not write.

    Raises: PlanError: the program is not one chain with one work a microbatch.
    """
    _check_chain(program.graph)
    return _to_text([_cell(a) for a in actions if a.kind not in WAITS] for actions in program.actions)


def read_plan(text: str) -> Plan:
    """The checked plan of a CSV text: its compute actions, on the chain that they form.

    A pair that torch overlaps, `(0F1;3B0)OVERLAP_F_B`, is a braid.

    Raises: PlanError: a cell is no action, or the orders are no plan; with row and column or rank and step.
    """
    rows = _read(text)
    graph = _chain_of(rows)
    orders = tuple(tuple(_entry(cells) for cells in row if cells[0][0] in COMPUTE) for row in rows)
    plan = Plan(graph, orders)
    check(plan)
    return plan


def read_program(text: str) -> Program:
    """The program of a CSV text with communication; received inputs are waited for just before their use.

    Raises: PlanError: a cell is no action, the compute actions are no plan, or a transfer goes to no neighbour, is
        missing, or deadlocks.
    """
    rows = _read(text)
    graph = read_plan(text).graph
    program = Program(graph, tuple(tuple(_with_waits(graph, row)) for row in rows))
    check_transport(program)
    return program


def has_transfers(text: str) -> bool:
    """Whether a CSV text has communication. Raises: PlanError: a cell is no action."""
    return any(kind in TRANSFERS for row in _read(text) for cells in row for kind, _, _ in cells)


def _check_chain(graph: WorkGraph) -> None:
    numbers = [work.microbatch for work in graph.works]
    chain = len(graph.modules) == 1 and graph.modules[0].stages == tuple(range(len(graph.stage_rank)))
    if not chain or sorted(numbers) != list(range(len(numbers))) or any(w.after for w in graph.works):
        raise PlanError(
            "torch's CSV form has one chain of stages and the same microbatches in each, numbered from 0; this "
            f"iteration has {len(graph.works)} works in {' and '.join(module.name for module in graph.modules)}; use "
            "JSON"
        )


def _columns(plan: Plan) -> list[list[int]]:
    """[rank][step] -> column of an action: the earliest if each takes one column."""
    run = plan.run([[1.0] * len(order) for order in plan.orders])
    return [[round(start) for start in starts] for starts in run.starts]


def _cell(action: Action) -> str:
    if action.kind is BRAID:
        return f"({';'.join(map(_cell, action.parts))})OVERLAP_F_B"
    if action.kind not in KINDS:
        raise PlanError(f"{action}: torch's files have no instructions; write a plan without them")
    microbatch = "" if action.microbatch < 0 else action.microbatch
    return f"{action.stage}{_TO_TORCH.get(action.kind, str(action.kind))}{microbatch}"


def _to_text(rows: Iterable[Sequence[str]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def _read(text: str) -> list[list[Cells]]:
    try:
        lines = list(csv.reader(text.rstrip().splitlines()))
    except csv.Error as error:
        raise PlanError(f"not a CSV text: {error}") from error
    rows = [
        [cells for column, word in enumerate(row) if (cells := _parse(word.strip(), rank, column))]
        for rank, row in enumerate(lines)
    ]
    for rank, row in enumerate(rows):
        if not row:
            raise PlanError(f"row {rank} has no action; every rank holds a stage")
    return rows


def _parse(word: str, rank: int, column: int) -> Cells:
    if not word:
        return []
    if pair := _OVERLAPPED.fullmatch(word):
        return [cell for part in pair[1].split(";") for cell in _parse(part.strip(), rank, column)]
    match = _CELL.fullmatch(word)
    if match:
        kind = _FROM_TORCH[match[2]]
        if (match[3] == "") == (kind in STAGE_WIDE):
            return [(kind, int(match[1]), int(match[3] or -1))]
    shown = word if len(word) <= _SHOWN else f"{word[:_SHOWN]}..."
    raise PlanError(
        f"row {rank}, column {column}: {shown!r} is not an action; write for example 2F0, 3SEND_F1 or 1UNSHARD"
    )


def _entry(cells: Cells) -> Action:
    parts = [Action(kind, stage, microbatch, 0) for kind, stage, microbatch in cells]
    return Braid.of(*parts) if len(parts) > 1 else parts[0]


def _chain_of(read: Sequence[Sequence[Cells]]) -> WorkGraph:
    """The chain whose stages are on the ranks of their rows; without backwards if the rows have none."""
    rows = [[cell for cells in row for cell in cells] for row in read]
    holder: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for kind, stage, _ in row:
            if holder.setdefault(stage, rank) != rank:
                raise PlanError(
                    f"row {rank}: stage {stage} has an action here ({kind}), but others in row {holder[stage]}; "
                    "a stage lives on one rank"
                )
    if not holder:
        raise PlanError("the CSV text has no action; it needs a row for each rank")
    _check_numbers("stage", set(holder))
    numbers = {microbatch for row in rows for kind, _, microbatch in row if kind in COMPUTE}
    trains = any(kind in COMPUTE and kind is not Kind.F for row in rows for kind, _, _ in row)
    _check_numbers("microbatch", numbers)
    count = len(numbers)
    return WorkGraph(
        num_ranks=len(rows),
        modules=(ModuleStages(name=MODULE, stages=tuple(range(len(holder)))),),
        stage_rank=tuple(holder[stage] for stage in range(len(holder))),
        works=tuple(Work(module=0, microbatch=m, sub_microbatch=0) for m in range(count)),
        backward=((trains,) * len(holder),) * count,
    )


def _check_numbers(what: str, numbers: set[int]) -> None:
    for expected, number in enumerate(sorted(numbers)):
        if number != expected:
            raise PlanError(
                f"{what} {expected} has no action, but {what} {number} has; number them from 0 without gaps"
            )


def _with_waits(graph: WorkGraph, row: Sequence[Cells]) -> Iterable[Action]:
    for cells in row:
        kind, stage, microbatch = cells[0]
        if kind in STAGE_WIDE:
            yield Action(kind, stage)
        elif kind in COMPUTE:
            action = _entry(cells)
            yield from waits_before(graph, action)
            yield action
        else:
            peer = stage + 1 if kind in (Kind.SEND_F, Kind.RECV_B) else stage - 1
            if not 0 <= peer < len(graph.stage_rank) or graph.stage_rank[peer] == graph.stage_rank[stage]:
                raise PlanError(f"{stage}{kind}{microbatch}: stage {peer} is not on another rank; remove the transfer")
            yield Action(kind, stage, microbatch, 0, peer)
