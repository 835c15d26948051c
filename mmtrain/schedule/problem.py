"""The planning problem: a work graph with costs, options, transfers and memory limits, and its JSON form.

All times are seconds, all sizes bytes. The JSON form is version 1 of mmtrain's planning format. Unknown keys, wrong
types, indices and numbers out of range (`mmtrain.schedule.number_ranges`), cycles and empty lists of ranks are errors
that name the dotted path.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path
from reprlib import repr as show
from typing import Any, NamedTuple

from mmtrain.errors import PlanError
from mmtrain.schedule.action import BRAID, COMPUTE, Action, Kind
from mmtrain.schedule.graph import Edge, InstructionNode, Link, ModuleStages, Work, WorkGraph
from mmtrain.schedule.io import instruction_json
from mmtrain.schedule.io.strict_json import (
    fields,
    integer,
    integers,
    items,
    loads,
    number,
    read_text,
    string,
    write_text,
)
from mmtrain.schedule.number_ranges import BYTES, BYTES_PER_S, OPTIONS, RANKS, SECONDS, STAGES, VISITS, WORKS_BY_RANKS
from mmtrain.schedule.option import Load
from mmtrain.schedule.option import Option as Option

VERSION = 1
"""Version of the JSON form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class P2P:
    """Cost of a transfer between two ranks: latency_s + bytes / bytes_per_s."""

    latency_s: float
    bytes_per_s: float


class EntryCost(NamedTuple):
    """Cost of an entry of an order."""

    seconds: float
    needed_bytes: float
    """The bytes that it needs while it runs, in addition to what was held before it."""
    growth_bytes: float
    """What it allocates, less what it frees."""
    exposed_s: float = 0.0
    """The seconds that it takes longer than its compute: exchanges that nothing hides, and contention."""
    copying_s: float = 0.0
    """The seconds that copies to and from host memory take longer than all that."""


CostKey = tuple[Kind, int, int]
"""Kind of an action, index of its option list in `PlanningProblem.costs`, index of the option."""


@dataclass(frozen=True, kw_only=True)
class PlanningProblem:
    """One iteration to be planned. Make one with `build`, which derives the graph's backward flags from the options."""

    graph: WorkGraph
    memory_limit_bytes: tuple[float | None, ...]
    """Limit of the activations on each rank; None: no limit."""
    p2p: P2P
    costs: tuple[tuple[Option, ...], ...]
    """Option lists, the fastest option of each first."""
    cost_index: tuple[tuple[int, ...], ...]
    """[work][k] -> option list of the k-th stage of the work's module."""
    output_bytes: tuple[tuple[float, ...], ...]
    """[work][k] -> size of the output of the k-th stage; its gradient has the same size."""

    def __post_init__(self) -> None:
        graph = self.graph
        if len(self.memory_limit_bytes) != graph.num_ranks:
            raise PlanError(
                f"memory_limit_bytes has {len(self.memory_limit_bytes)} entries for "
                f"num_ranks = {graph.num_ranks}; give one a rank"
            )
        for rank, limit in enumerate(self.memory_limit_bytes):
            if limit is not None:
                BYTES.check(f"memory_limit_bytes[{rank}]", limit)
        SECONDS.check("p2p.latency_s", self.p2p.latency_s)
        BYTES_PER_S.check("p2p.bytes_per_s", self.p2p.bytes_per_s)
        _check_options(self.costs)
        _check_rows("costs", self.cost_index, graph.modules, graph.works)
        _check_rows("output_bytes", self.output_bytes, graph.modules, graph.works)
        rate = self.p2p.bytes_per_s
        most = min(BYTES.most, SECONDS.most * rate)
        for work, row in enumerate(self.output_bytes):
            for k, amount in enumerate(row):
                if not 0 <= amount <= most:
                    _refuse_output(f"works[{work}].output_bytes[{k}]", amount, rate)
            for i, link in enumerate(graph.works[work].links):
                if link.size_bytes is not None and not 0 <= link.size_bytes <= most:
                    _refuse_output(f"works[{work}].links[{i}].size_bytes", link.size_bytes, rate)
        for i, given in enumerate(graph.instructions):
            SECONDS.check(f"instructions[{i}].seconds", given.seconds)
            BYTES.check(f"instructions[{i}].growth_bytes", abs(given.growth_bytes))
        flags = [options[0].has_backward for options in self.costs]
        if graph.backward != _backward_flags(flags, self.cost_index):
            raise PlanError("the graph's backward flags differ from those of the options; use PlanningProblem.build")

    @classmethod
    def build(
        cls,
        *,
        num_ranks: int,
        modules: Iterable[ModuleStages],
        stage_rank: Sequence[int],
        works: Iterable[Work],
        costs: Iterable[Sequence[Option]],
        cost_index: Iterable[Sequence[int]],
        output_bytes: Iterable[Sequence[float]],
        p2p: P2P,
        memory_limit_bytes: Sequence[float | None] | None = None,
        instructions: Iterable[InstructionNode] = (),
    ) -> "PlanningProblem":
        """The problem whose graph takes its backward flags from the options.

        Args: memory_limit_bytes: one entry a rank; None: no limit on any rank.
        Raises: PlanError: the first broken rule, with the dotted path.
        """
        table = tuple(tuple(options) for options in costs)
        index = tuple(tuple(row) for row in cost_index)
        chains, listed = tuple(modules), tuple(works)
        check_sizes(num_ranks, chains, listed)
        _check_options(table)
        _check_rows("costs", index, chains, listed)
        graph = WorkGraph(
            num_ranks=num_ranks,
            modules=chains,
            stage_rank=tuple(stage_rank),
            works=listed,
            backward=_backward_flags([options[0].has_backward for options in table], index),
            instructions=tuple(instructions),
        )
        limits = (None,) * num_ranks if memory_limit_bytes is None else tuple(memory_limit_bytes)
        outputs = tuple(tuple(row) for row in output_bytes)
        return cls(
            graph=graph,
            memory_limit_bytes=limits,
            p2p=p2p,
            costs=table,
            cost_index=index,
            output_bytes=outputs,
        )

    @cached_property
    def held_limit_bytes(self) -> tuple[float | None, ...]:
        """Limit of the held activations on each rank: the memory limit less the largest `restored_bytes`; None: no
        limit.

        Schedules that admit actions by held bytes keep this limit; their plans then keep `memory_limit_bytes`.
        """
        most = [0.0] * self.graph.num_ranks
        largest = [max(option.restored_bytes for option in options) for options in self.costs]
        for work, row in enumerate(self.cost_index):
            for stage, index in zip(self.graph.stages(work), row, strict=True):
                rank = self.graph.stage_rank[stage]
                most[rank] = max(most[rank], largest[index])
        limits = zip(self.memory_limit_bytes, most, strict=True)
        return tuple(None if limit is None else max(0.0, limit - more) for limit, more in limits)

    def options(self, stage: int, work: int) -> tuple[Option, ...]:
        """The option list of (stage, work)."""
        return self.costs[self._list_of(stage, work)]

    def transfer_s(self, edge: Edge) -> float:
        """Seconds from the end of an edge's producer to its arrival (either direction); 0 on one rank."""
        if self.graph.is_local(edge):
            return 0.0
        return self.message_s[self.graph.items.first[edge.work] + self.graph.position[edge.source]]

    @cached_property
    def message_s(self) -> list[float]:
        """[message of the graph's items] -> seconds of its transfer, in either direction.

        The messages of one result, a copy for each rank that reads it, leave one after the other, and each counts as
        there when the last one is; so do the gradients that come back for it.
        """
        items = self.graph.items
        sizes = [*(amount for row in self.output_bytes for amount in row), *items.link_bytes]
        sender = [*range(items.num_nodes), *items.link_source]
        sent_bytes = [0.0] * items.num_nodes
        for message, _ in items.copies:
            sent_bytes[sender[message]] += sizes[message]
        return [self.p2p.latency_s + sent_bytes[node] / self.p2p.bytes_per_s for node in sender]

    def entry_cost(self, entry: Action, work: int, chosen: Mapping[tuple[int, int], int]) -> EntryCost:
        """The cost of one entry of an order. Args: work: of its first part. chosen: option of each (stage, work)."""
        if entry.kind in COMPUTE:
            key: tuple[CostKey, ...] = (self._cost_key(entry, work, chosen),)
        elif entry.kind is BRAID:
            key = tuple(self._cost_key(part, self.graph.work_of(part), chosen) for part in entry.parts)
        else:
            given = self.graph.instruction[entry.kind, entry.stage, work]
            return EntryCost(given.seconds, max(0.0, given.growth_bytes), given.growth_bytes)
        cost = self._costs_of.get(key)
        if cost is None:
            cost = self._costs_of[key] = self._cost(key)
        return cost

    def _cost_key(self, action: Action, work: int, chosen: Mapping[tuple[int, int], int]) -> CostKey:
        index = chosen.get((action.stage, work), 0) if chosen else 0
        return action.kind, self._list_of(action.stage, work), index

    @cached_property
    def _costs_of(self) -> dict[tuple[CostKey, ...], EntryCost]:
        """The cost of an entry by its parts: a cache."""
        return {}

    def _cost(self, key: tuple[CostKey, ...]) -> EntryCost:
        options = [(kind, self.costs[listed][index]) for kind, listed, index in key]
        load = reduce(Load.together, (option.load(kind) for kind, option in options))
        return EntryCost(
            load.seconds,
            sum(option.needed_bytes(kind) for kind, option in options),
            sum(option.growth_bytes(kind) for kind, option in options),
            load.without_copies_s - load.compute_s,
            load.seconds - load.without_copies_s,
        )

    @cached_property
    def runs_units(self) -> bool:
        """Whether layers run as units, so that blocks hide exchanges."""
        return any(option.contention < 1 for options in self.costs for option in options)

    def _list_of(self, stage: int, work: int) -> int:
        return self.cost_index[work][self.graph.position[stage]]

    # ------------------------------------------------------------------------------------- as JSON

    def to_json(self) -> str:
        """The problem as JSON text of version 1, one line a work; `from_json` is the inverse."""
        graph = self.graph
        head: dict[str, Any] = {
            "version": VERSION,
            "num_ranks": graph.num_ranks,
            "memory_limit_bytes": list(self.memory_limit_bytes),
            "p2p": {"latency_s": self.p2p.latency_s, "bytes_per_s": self.p2p.bytes_per_s},
            "modules": [{"name": m.name, "stages": list(m.stages)} for m in graph.modules],
            "stage_rank": list(graph.stage_rank),
        }
        costs = [[_option_to_json(o) for o in options] for options in self.costs]
        works = [
            {
                "module": graph.modules[w.module].name,
                "microbatch": w.microbatch,
                "sub_microbatch": w.sub_microbatch,
                "after": list(w.after),
                **({"links": [_link_to_json(link) for link in w.links]} if w.links else {}),
                "costs": list(self.cost_index[i]),
                "output_bytes": list(self.output_bytes[i]),
            }
            for i, w in enumerate(graph.works)
        ]
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        lists: list[tuple[str, list[Any]]] = [("costs", costs), ("works", works)]
        if graph.instructions:
            lists.append(("instructions", list(map(instruction_json.to_json, graph.instructions))))
        for key, rows in lists:
            body = ",\n".join("  " + json.dumps(row) for row in rows)
            lines.append(f' "{key}": [\n{body}\n ]' if rows else f' "{key}": []')
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, source: str | Mapping[str, Any]) -> "PlanningProblem":
        """The problem of a JSON text or of its dictionary.

        Raises: PlanError: the text is not JSON, or breaks a rule of the format; with the dotted path.
        """
        return _read_problem(loads(source) if isinstance(source, str) else source)

    @classmethod
    def read(cls, path: str | Path) -> "PlanningProblem":
        """The problem of a .json or .json.gz file.

        Raises: PlanError: no such file, another ending, or a fault in its content.
        """
        text = read_text(path)
        try:
            return cls.from_json(text)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error

    def write(self, path: str | Path) -> None:
        """Writes the JSON form to a .json or .json.gz file; equal problems give equal bytes."""
        write_text(path, self.to_json())


# --------------------------------------------------------------------------------------------- checking


def check_sizes(num_ranks: int, modules: Sequence[ModuleStages], works: Sequence[Work]) -> None:
    """Checks the sizes of a problem. Raises: PlanError: with the number and its maximum."""
    RANKS.check("num_ranks", num_ranks)
    depth = [len(module.stages) for module in modules]
    STAGES.check("modules: number of stages", sum(depth))
    visits = sum(depth[work.module] for work in works if 0 <= work.module < len(depth))
    VISITS.check("works: number of stages that they pass through", visits)
    WORKS_BY_RANKS.check("works: their number times num_ranks", len(works) * num_ranks)


def _refuse_output(where: str, amount: float, rate: float) -> None:
    BYTES.check(where, amount)
    SECONDS.check(f"{where} = {amount:g}: its transfer at p2p.bytes_per_s = {rate:g}", amount / rate)


def _check_options(costs: tuple[tuple[Option, ...], ...]) -> None:
    seconds = ("forward_s", "backward_input_s", "backward_weight_s", "split_s", "host_s")
    sizes = ("activation_bytes", "restored_bytes", "weight_bytes")
    for i, options in enumerate(costs):
        if not options:
            raise PlanError(f"costs[{i}] is empty; a stage needs at least one option")
        if len(options) not in OPTIONS:
            raise PlanError(f"costs[{i}] has {len(options)} options; {OPTIONS.rule}")
        for j, option in enumerate(options):
            for names, allowed in ((seconds, SECONDS), (sizes, BYTES)):
                for name in names:
                    value = getattr(option, name)
                    if value is not None and not 0 <= value <= allowed.most:
                        allowed.check(f"costs[{i}][{j}].{name}", value)
            _check_exchanges(f"costs[{i}][{j}]", option)
            if option.has_backward != options[0].has_backward:
                raise PlanError(
                    f"costs[{i}][{j}]: option {option.name!r} {'has a' if option.has_backward else 'has no'} "
                    f"backward, unlike option {options[0].name!r}; all options of one list agree on that"
                )


def _check_exchanges(where: str, option: Option) -> None:
    for part, whole in (("forward_exchange_s", "forward_s"), ("backward_exchange_s", "backward_input_s")):
        if not 0 <= getattr(option, part) <= getattr(option, whole):
            raise PlanError(
                f"{where}.{part} = {getattr(option, part)}; it is a part of {whole} = {getattr(option, whole)}"
            )
    if not 0 <= option.contention <= 1:
        raise PlanError(f"{where}.contention = {option.contention}; it must be between 0 and 1")


def _check_rows(
    name: str, rows: Sequence[Sequence[object]], modules: Sequence[ModuleStages], works: Sequence[Work]
) -> None:
    if len(rows) != len(works):
        raise PlanError(f"{name} has {len(rows)} rows for {len(works)} works; give one a work")
    for i, (row, work) in enumerate(zip(rows, works, strict=True)):
        if not 0 <= work.module < len(modules):
            raise PlanError(f"works[{i}].module = {work.module} does not exist")
        module = modules[work.module]
        if len(row) != len(module.stages):
            raise PlanError(
                f"works[{i}].{name} has {len(row)} entries, but its module {module.name!r} has "
                f"{len(module.stages)} stages; give one a stage"
            )


def _backward_flags(
    has_backward: Sequence[bool], cost_index: tuple[tuple[int, ...], ...]
) -> tuple[tuple[bool, ...], ...]:
    """[work][k] -> whether it has a backward. Args: has_backward: of each option list."""
    for work, row in enumerate(cost_index):
        for k, index in enumerate(row):
            if not 0 <= index < len(has_backward):
                raise PlanError(f"works[{work}].costs[{k}] = {index} is outside of 0 .. {len(has_backward) - 1}")
    return tuple(tuple(has_backward[index] for index in row) for row in cost_index)


# ---------------------------------------------------------------------------------------------- reading


def _option_to_json(option: Option) -> dict[str, Any]:
    values = {f.name: (getattr(option, f.name), f.default) for f in dataclasses.fields(option)}
    return {name: value for name, (value, default) in values.items() if value != default}


def _link_to_json(link: Link) -> dict[str, Any]:
    table: dict[str, Any] = {"work": link.work, "source": link.source, "target": link.target, "grad": link.grad}
    return table if link.size_bytes is None else {**table, "size_bytes": link.size_bytes}


def _read_link(table: Any, where: str) -> Link:
    fields(table, where, ("work", "source", "target"), optional=("grad", "size_bytes"))
    if not isinstance(table.get("grad", True), bool):
        raise PlanError(f"{where}.grad = {table['grad']!r}; it must be true or false")
    return Link(
        work=integer(table["work"], f"{where}.work"),
        source=integer(table["source"], f"{where}.source"),
        target=integer(table["target"], f"{where}.target"),
        grad=table.get("grad", True),
        size_bytes=number(table["size_bytes"], f"{where}.size_bytes") if "size_bytes" in table else None,
    )


def _read_problem(table: Any) -> PlanningProblem:
    keys = ("version", "num_ranks", "memory_limit_bytes", "p2p", "modules", "stage_rank", "costs", "works")
    fields(table, "", keys, optional=("instructions",))
    if integer(table["version"], "version") != VERSION:
        raise PlanError(f"version = {table['version']}; this program reads version {VERSION}")
    num_ranks = integer(table["num_ranks"], "num_ranks")
    limits = [
        None if value is None else number(value, f"memory_limit_bytes[{i}]")
        for i, value in enumerate(items(table["memory_limit_bytes"], "memory_limit_bytes"))
    ]
    fields(table["p2p"], "p2p", ("latency_s", "bytes_per_s"))
    p2p = P2P(**{key: number(value, f"p2p.{key}") for key, value in table["p2p"].items()})
    modules = [_read_module(value, f"modules[{i}]") for i, value in enumerate(items(table["modules"], "modules"))]
    names = {module.name: i for i, module in enumerate(modules)}
    if len(names) < len(modules):
        raise PlanError("modules: two modules have the same name; works name their module, so names must differ")
    costs = [
        [_read_option(o, f"costs[{i}][{j}]") for j, o in enumerate(items(options, f"costs[{i}]"))]
        for i, options in enumerate(items(table["costs"], "costs"))
    ]
    works, index, outputs = [], [], []
    for i, value in enumerate(items(table["works"], "works")):
        work, cost_row, output_row = _read_work(value, f"works[{i}]", names)
        works.append(work)
        index.append(cost_row)
        outputs.append(output_row)
    return PlanningProblem.build(
        num_ranks=num_ranks,
        modules=modules,
        stage_rank=integers(table["stage_rank"], "stage_rank"),
        works=works,
        costs=costs,
        cost_index=index,
        output_bytes=outputs,
        p2p=p2p,
        memory_limit_bytes=limits,
        instructions=[
            instruction_json.read(value, f"instructions[{i}]")
            for i, value in enumerate(items(table.get("instructions", []), "instructions"))
        ],
    )


def _read_module(table: Any, where: str) -> ModuleStages:
    fields(table, where, ("name", "stages"))
    return ModuleStages(
        name=string(table["name"], f"{where}.name"),
        stages=tuple(integers(table["stages"], f"{where}.stages")),
    )


def _read_option(table: Any, where: str) -> Option:
    amounts = ("forward_s", "backward_input_s", "backward_weight_s", "activation_bytes")
    more = ("weight_bytes", "restored_bytes", "split_s", "forward_exchange_s", "backward_exchange_s")
    known = (*amounts, *more, "host_s", "contention")
    fields(table, where, ("name", *amounts), optional=known)
    values = {key: number(table[key], f"{where}.{key}") for key in known if key in table}
    return Option(name=string(table["name"], f"{where}.name"), **values)


def _read_work(table: Any, where: str, names: Mapping[str, int]) -> tuple[Work, list[int], list[float]]:
    keys = ("module", "microbatch", "sub_microbatch", "after", "costs", "output_bytes")
    fields(table, where, keys, optional=("links",))
    module = string(table["module"], f"{where}.module")
    if module not in names:
        raise PlanError(f"{where}.module = {show(module)} does not exist; modules are {', '.join(names) or 'absent'}")
    work = Work(
        module=names[module],
        microbatch=integer(table["microbatch"], f"{where}.microbatch"),
        sub_microbatch=integer(table["sub_microbatch"], f"{where}.sub_microbatch"),
        after=tuple(integers(table["after"], f"{where}.after")),
        links=tuple(
            _read_link(value, f"{where}.links[{i}]")
            for i, value in enumerate(items(table.get("links", []), f"{where}.links"))
        ),
    )
    output = [
        number(value, f"{where}.output_bytes[{k}]")
        for k, value in enumerate(items(table["output_bytes"], f"{where}.output_bytes"))
    ]
    return work, integers(table["costs"], f"{where}.costs"), output
