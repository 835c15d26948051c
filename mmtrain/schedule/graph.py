"""The works of one iteration and their dependencies: a graph instead of a chain.

A *work* is one sub-microbatch through one module. It passes through the module's chain of stages. `after` names the
works whose last stage feeds its first stage (images into the language model); `links` connect any stage of another work
to any of its own (inner features of an encoder). An absent modality is an absent work.
"""

import heapq
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from mmtrain.errors import PlanError
from mmtrain.schedule.action import BRAID, KINDS, NEEDS, RESULT_OF, Action, Kind
from mmtrain.schedule.items import Input, Items, Local, Result

NodeT = TypeVar("NodeT")

Need = tuple[Result, "Edge | None"]
"""A result that an action waits for, and the edge that carries it; None within one stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleStages:
    """One module and its stages in forward order."""

    name: str
    stages: tuple[int, ...]

    @property
    def label(self) -> str:
        """The name of the module in drawings and metrics, where `head.0` and `head.1` are one module: without the
        number."""
        name, _, number = self.name.rpartition(".")
        return name if name and number.isdecimal() else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One activation that a work takes from a stage of another work."""

    work: int
    """The producing work."""
    source: int
    """Position of the producing stage in that work's chain."""
    target: int
    """Position of the consuming stage in the chain of the work that has this link."""
    grad: bool = True
    """Whether its gradient comes back, if both stages have a backward."""
    size_bytes: float | None = None
    """Size of the activation and of its gradient; None: the output of the source stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionNode:
    """One action of a registered kind: what it waits for, and what waits for it, all on its stage's rank.

    It is local to that rank. Its kind is registered by whoever makes it (`Kind.register`), in a job by a recipe, whose
    function of that kind the runtime calls.
    """

    kind: Kind
    stage: int
    work: int
    after: tuple[Result, ...] = ()
    before: tuple[Result, ...] = ()
    seconds: float = 0.0
    growth_bytes: float = 0.0
    """Bytes that it allocates, less those that it frees."""

    @property
    def key(self) -> Result:
        """The result of the instruction."""
        return self.kind, self.stage, self.work


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One sub-microbatch of one microbatch through one module."""

    module: int
    """Index into `WorkGraph.modules`."""
    microbatch: int
    sub_microbatch: int
    after: tuple[int, ...] = ()
    """Indices of the works whose last stage feeds this work's first stage."""
    links: tuple[Link, ...] = ()
    """Further inputs of any of its stages."""


@dataclass(frozen=True, slots=True)
class Edge:
    """One activation that goes from a stage to another, and whose gradient may come back."""

    source: int
    """The producing stage."""
    target: int
    """The consuming stage."""
    work: int
    """The producing work, which names the transfer in both directions."""
    target_work: int
    """The consuming work; another one than `work` between two modules."""
    grad: bool
    """Whether the gradient comes back over this edge."""
    size_bytes: float | None = None
    """Size of the activation and of its gradient; None: the output of the source stage."""


def linear_extension(before: Mapping[NodeT, Collection[NodeT]], key: Callable[[NodeT], Any]) -> list[NodeT]:
    """The nodes in the order of their keys, but each after its predecessors; without those of a cycle.

    Args: before: node -> its predecessors.
    """
    waiting = {node: len(others) for node, others in before.items()}
    after: dict[NodeT, list[NodeT]] = {}
    for node, others in before.items():
        for other in others:
            after.setdefault(other, []).append(node)
    ready = [(key(node), node) for node, count in waiting.items() if not count]
    heapq.heapify(ready)
    order: list[NodeT] = []
    while ready:
        order.append(heapq.heappop(ready)[1])
        for other in after.get(order[-1], ()):
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, (key(other), other))
    return order


@dataclass(frozen=True, kw_only=True)
class WorkGraph:
    """Modules, the rank of each stage, and the works of one iteration.

    `backward[w][k]`: whether the k-th stage of work w has a backward; false for a frozen stage with nothing trainable
    before it, and for all stages of a forward-only iteration.
    """

    num_ranks: int
    modules: tuple[ModuleStages, ...]
    stage_rank: tuple[int, ...]
    works: tuple[Work, ...]
    backward: tuple[tuple[bool, ...], ...]
    instructions: tuple[InstructionNode, ...] = ()

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise PlanError(f"num_ranks = {self.num_ranks}; a plan needs at least one rank")
        self._check_stages()
        self._check_works()
        if self.instructions:
            self._check_instructions()

    def _check_stages(self) -> None:
        seen: dict[int, str] = {}
        for m, module in enumerate(self.modules):
            if not module.stages:
                raise PlanError(f"modules[{m}].stages: module {module.name!r} has no stage; give it at least one")
            for k, stage in enumerate(module.stages):
                where = f"modules[{m}].stages[{k}] = {stage}"
                if not 0 <= stage < len(self.stage_rank):
                    raise PlanError(f"{where}: stage_rank has {len(self.stage_rank)} entries; use 0 .. one less")
                if stage in seen:
                    raise PlanError(f"{where}: the stage also belongs to module {seen[stage]!r}; use it once")
                seen[stage] = module.name
        for stage, rank in enumerate(self.stage_rank):
            if not 0 <= rank < self.num_ranks:
                raise PlanError(f"stage_rank[{stage}] = {rank} is outside of 0 .. {self.num_ranks - 1}")
            if stage not in seen:
                raise PlanError(f"stage_rank[{stage}]: the stage belongs to no module; name it in one or drop it")

    def _check_works(self) -> None:
        if len(self.backward) != len(self.works):
            raise PlanError(f"backward has {len(self.backward)} rows for {len(self.works)} works")
        keys: dict[tuple[int, int, int], int] = {}
        for index, work in enumerate(self.works):
            if not 0 <= work.module < len(self.modules):
                raise PlanError(f"works[{index}].module = {work.module} does not exist")
            for field in ("microbatch", "sub_microbatch"):
                if getattr(work, field) < 0:
                    raise PlanError(f"works[{index}].{field} = {getattr(work, field)}; it must be at least 0")
            if len(self.backward[index]) != len(self.modules[work.module].stages):
                raise PlanError(f"backward[{index}] needs one flag for each stage of its module")
            seen: set[int] = set()
            for i, other in enumerate(work.after):
                if not 0 <= other < len(self.works):
                    raise PlanError(f"works[{index}].after[{i}] = {other} is outside of 0 .. {len(self.works) - 1}")
                if other in seen:
                    raise PlanError(f"works[{index}].after[{i}] = {other} is named twice; name it once")
                seen.add(other)
            if work.links:
                self._check_links(index)
            key = (work.module, work.microbatch, work.sub_microbatch)
            if key in keys:
                raise PlanError(
                    f"works[{index}] repeats module, microbatch and sub_microbatch of works[{keys[key]}]; "
                    "number the sub-microbatches of one microbatch from 0"
                )
            keys[key] = index
        if len(self.work_order) < len(self.works):
            cycle = sorted(set(range(len(self.works))) - set(self.work_order))
            raise PlanError(f"works[{cycle[0]}].after: the works {cycle} wait for each other in a cycle; cut it")

    def _check_links(self, index: int) -> None:
        work = self.works[index]
        ends = {(other, -1, 0) for other in work.after}
        for i, link in enumerate(work.links):
            where = f"works[{index}].links[{i}]"
            if not 0 <= link.work < len(self.works) or link.work == index:
                raise PlanError(f"{where}.work = {link.work}; name another work, 0 .. {len(self.works) - 1}")
            source = self.modules[self.works[link.work].module].stages
            for field, count in (("source", len(source)), ("target", len(self.modules[work.module].stages))):
                if not 0 <= getattr(link, field) < count:
                    raise PlanError(f"{where}.{field} = {getattr(link, field)} is outside of 0 .. {count - 1}")
            if link.size_bytes is not None and not 0 <= link.size_bytes < math.inf:
                raise PlanError(f"{where}.size_bytes = {link.size_bytes}; it must be finite and at least 0")
            end = (link.work, -1 if link.source == len(source) - 1 else link.source, link.target)
            if end in ends:
                raise PlanError(f"{where} joins the same two stages as another link or `after`; name it once")
            ends.add(end)

    def _check_instructions(self) -> None:
        results: set[Result] = {(Kind.F, *node) for node in self.nodes()}
        results |= {(kind, *node) for kind in (Kind.B, Kind.W) for node in self.nodes() if self.has_backward(*node)}
        for index, given in enumerate(self.instructions):
            where = f"instructions[{index}] = {given.kind} of stage {given.stage}, work {given.work}"
            if given.kind in (*KINDS, BRAID):
                raise PlanError(f"{where}: {given.kind} is a kind of every plan; register another one")
            if (Kind.F, given.stage, given.work) not in results:
                raise PlanError(f"{where}: the work does not pass through this stage")
            if given.key in results:
                raise PlanError(f"{where}: the stage has this instruction twice for the work; register another kind")
            rank = self.stage_rank[given.stage]
            for result in (*given.after, *given.before):
                if result not in results or self.stage_rank[result[1]] != rank:
                    raise PlanError(f"{where}: {result} is not an earlier result on rank {rank}, which holds its stage")
            results.add(given.key)
        if blocked := self.items.in_cycles():
            given = next(one for one in self.instructions if self.items.item(*one.key) in blocked)
            raise PlanError(
                f"instructions: {self.action(*given.key)} waits for something that waits for "
                "it in a circle; change its after or before"
            )

    @cached_property
    def instruction(self) -> dict[Result, InstructionNode]:
        """The instructions by (kind, stage, work)."""
        return {given.key: given for given in self.instructions}

    @cached_property
    def items(self) -> Items:
        """The numbered results and their dependencies."""
        return Items(
            num_ranks=self.num_ranks,
            stage_rank=self.stage_rank,
            position=self.position,
            chains=[self.stages(work) for work in range(len(self.works))],
            backward=self.backward,
            inputs=[
                [Input(link.work, link.source, link.target, link.grad, link.size_bytes) for link in links]
                for links in self.links
            ],
            instructions={
                key: Local(self.stage_rank[given.stage], given.after, given.before)
                for key, given in self.instruction.items()
            },
        )

    @cached_property
    def links(self) -> tuple[tuple[Link, ...], ...]:
        """[work] -> all inputs from other works: `after`, then `links`."""
        depth = [len(self.modules[work.module].stages) for work in self.works]
        return tuple(
            (*(Link(work=other, source=depth[other] - 1, target=0) for other in work.after), *work.links)
            for work in self.works
        )

    def sources(self, work: int) -> tuple[int, ...]:
        """The works that feed a work, each once."""
        given = self.works[work]
        if not given.links:
            return given.after
        return tuple(dict.fromkeys((*given.after, *(link.work for link in given.links))))

    @cached_property
    def work_order(self) -> tuple[int, ...]:
        """The works in topological order, by index where the graph leaves a choice."""
        return tuple(linear_extension({work: self.sources(work) for work in range(len(self.works))}, lambda work: work))

    @cached_property
    def module_of(self) -> tuple[int, ...]:
        """[stage] -> its module."""
        module_of = {stage: m for m, module in enumerate(self.modules) for stage in module.stages}
        return tuple(module_of[stage] for stage in range(len(self.stage_rank)))

    @cached_property
    def position(self) -> tuple[int, ...]:
        """[stage] -> its position in its module's chain."""
        position = {stage: k for module in self.modules for k, stage in enumerate(module.stages)}
        return tuple(position[stage] for stage in range(len(self.stage_rank)))

    @cached_property
    def deferred(self) -> frozenset[int]:
        """The works that are computed with one microbatch and feed another one."""
        return frozenset(
            source
            for index, work in enumerate(self.works)
            for source in self.sources(index)
            if self.works[source].microbatch != work.microbatch
        )

    @cached_property
    def work_index(self) -> dict[tuple[int, int, int], int]:
        """The works by (module, microbatch, sub_microbatch)."""
        return {(w.module, w.microbatch, w.sub_microbatch): i for i, w in enumerate(self.works)}

    def stages(self, work: int) -> tuple[int, ...]:
        """The stages that a work passes through, in forward order."""
        return self.modules[self.works[work].module].stages

    def has_backward(self, stage: int, work: int) -> bool:
        """Whether (stage, work) has a backward action."""
        return self.backward[work][self.position[stage]]

    def work_of(self, action: Action) -> int:
        """The work that an action names.

        Raises: PlanError: the stage or the work does not exist in this iteration.
        """
        # The producing stage may belong to another module.
        producer = action.peer if action.kind in (Kind.RECV_F, Kind.WAIT_F, Kind.SEND_B) else action.stage
        for stage in (action.stage, producer):
            if not 0 <= stage < len(self.stage_rank):
                raise PlanError(f"action {action}: stage {stage} does not exist")
        module = self.module_of[producer]
        key = (module, action.microbatch, action.sub_microbatch)
        if key not in self.work_index:
            raise PlanError(
                f"action {action}: module {self.modules[module].name!r} has no sub-microbatch "
                f"{action.microbatch}.{action.sub_microbatch} in this iteration"
            )
        return self.work_index[key]

    def action(self, kind: Kind, stage: int, work: int, peer: int = -1) -> Action:
        """The action of a kind for (stage, work)."""
        w = self.works[work]
        return Action(kind, stage, w.microbatch, w.sub_microbatch, peer)

    @cached_property
    def _inputs(self) -> dict[tuple[int, int], tuple[Edge, ...]]:
        edges_into: dict[tuple[int, int], tuple[Edge, ...]] = {}
        for index in range(len(self.works)):
            chain, flags = self.stages(index), self.backward[index]
            entering: dict[int, list[Edge]] = {}
            for link in self.links[index]:
                source = self.stages(link.work)[link.source]
                grad = link.grad and flags[link.target] and self.backward[link.work][link.source]
                edge = Edge(source, chain[link.target], link.work, index, grad, link.size_bytes)
                entering.setdefault(link.target, []).append(edge)
            for k, stage in enumerate(chain):
                before = (Edge(chain[k - 1], stage, index, index, flags[k] and flags[k - 1]),) if k else ()
                edges_into[stage, index] = (*before, *entering.get(k, ()))
        return edges_into

    @cached_property
    def _outputs(self) -> dict[tuple[int, int], tuple[Edge, ...]]:
        lists: dict[tuple[int, int], list[Edge]] = {}
        for edges in self._inputs.values():
            for edge in edges:
                lists.setdefault((edge.source, edge.work), []).append(edge)
        return {key: tuple(edges) for key, edges in lists.items()}

    def inputs(self, stage: int, work: int) -> tuple[Edge, ...]:
        """Edges into (stage, work): that of the chain first, then those of other works."""
        return self._inputs[stage, work]

    def outputs(self, stage: int, work: int) -> tuple[Edge, ...]:
        """Edges out of (stage, work)."""
        return self._outputs.get((stage, work), ())

    def is_local(self, edge: Edge) -> bool:
        """Whether both ends of an edge are on one rank, so that nothing is sent."""
        return self.stage_rank[edge.source] == self.stage_rank[edge.target]

    def nodes(self) -> Iterator[tuple[int, int]]:
        """All (stage, work) in topological order."""
        for index in self.work_order:
            for stage in self.stages(index):
                yield stage, index

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, ascending; also those without work in this iteration."""
        return tuple(stage for stage, holder in enumerate(self.stage_rank) if holder == rank)

    @cached_property
    def has_any_backward(self) -> bool:
        """False for a forward-only iteration (validation)."""
        return any(any(row) for row in self.backward)

    def needs(self, kind: Kind, stage: int, work: int) -> tuple[Need, ...]:
        """The results that an action of a plan waits for, from the table `NEEDS` and the instructions."""
        given = self.instruction.get((kind, stage, work))
        if given:
            return tuple((result, None) for result in given.after)
        table, node = NEEDS[kind], (stage, work)
        needs: list[Need] = [((table.own, *node), None)] if table.own else []
        if table.sources:
            needs += [((table.sources, e.source, e.work), e) for e in self.inputs(*node)]
        if table.targets:
            needs += [((table.targets, e.target, e.target_work), e) for e in self.outputs(*node) if e.grad]
        if self.instructions:
            result = (RESULT_OF[kind], *node)
            needs += [(key, None) for key, given in self.instruction.items() if result in given.before]
        return tuple(needs)
