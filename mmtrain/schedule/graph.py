"""The works of one iteration and how they depend on each other: a graph instead of a chain.

A *work* is one sub-microbatch through one module. It passes through the module's chain of stages;
`after` links it to the works whose last stage feeds its first stage (images into the language
model). An absent modality is an absent work.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from mmtrain.errors import PlanError
from mmtrain.schedule.action import BACKWARD, Action, Kind

Result = tuple[Kind, int, int]
"""What a compute action leaves behind: (F, B or W; stage, work). Both B and I give the result B, the
gradient of the stage's input."""

Need = tuple[Result, "Edge | None"]
"""A result that an action waits for, and the edge that brings it; no edge inside of one stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleStages:
    """One module and its stages in forward order."""

    name: str
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One sub-microbatch of one microbatch through one module."""

    module: int
    """Index into `WorkGraph.modules`."""
    microbatch: int
    sub_microbatch: int
    after: tuple[int, ...] = ()
    """Indices of the works whose last stage feeds this work's first stage."""


@dataclass(frozen=True, slots=True)
class Edge:
    """One activation that goes from a stage to the next, and whose gradient may come back."""

    source: int
    """Stage that makes the activation."""
    target: int
    """Stage that consumes it."""
    work: int
    """Work that makes it: names the transfer in both directions."""
    target_work: int
    """Work that consumes it; differs from `work` at the border of two modules."""
    grad: bool
    """Whether the gradient comes back over this edge."""


@dataclass(frozen=True, kw_only=True)
class WorkGraph:
    """Modules, the rank of each stage, and the works of one iteration.

    `backward[w][k]` tells whether the k-th stage of work w has a backward; false for a frozen stage
    with nothing trainable before it, and everywhere in a forward-only iteration.
    """

    num_ranks: int
    modules: tuple[ModuleStages, ...]
    stage_rank: tuple[int, ...]
    works: tuple[Work, ...]
    backward: tuple[tuple[bool, ...], ...]

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise PlanError(f"num_ranks = {self.num_ranks}; a plan needs at least one rank")
        self._check_stages()
        self._check_works()

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
            key = (work.module, work.microbatch, work.sub_microbatch)
            if key in keys:
                raise PlanError(
                    f"works[{index}] repeats module, microbatch and sub_microbatch of works[{keys[key]}]; "
                    "number the sub-microbatches of one microbatch from 0"
                )
            keys[key] = index
        if len(self.work_order) < len(self.works):
            circle = sorted(set(range(len(self.works))) - set(self.work_order))
            raise PlanError(f"works[{circle[0]}].after: the works {circle} wait for each other in a cycle; cut it")

    @cached_property
    def work_order(self) -> tuple[int, ...]:
        """The works, each after those that it names in `after`; else in the order of the list."""
        waiting = [len(work.after) for work in self.works]
        ready = [index for index, count in enumerate(waiting) if not count]
        heapq.heapify(ready)
        order: list[int] = []
        while ready:
            order.append(heapq.heappop(ready))
            for consumer in self.consumers[order[-1]]:
                waiting[consumer] -= 1
                if not waiting[consumer]:
                    heapq.heappush(ready, consumer)
        return tuple(order)

    @cached_property
    def place(self) -> dict[int, tuple[int, int]]:
        """stage -> (module, position in the module's chain)."""
        return {s: (m, k) for m, module in enumerate(self.modules) for k, s in enumerate(module.stages)}

    @cached_property
    def work_index(self) -> dict[tuple[int, int, int], int]:
        """(module, microbatch, sub_microbatch) -> work."""
        return {(w.module, w.microbatch, w.sub_microbatch): i for i, w in enumerate(self.works)}

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """For each work, the works that name it in `after`."""
        lists: list[list[int]] = [[] for _ in self.works]
        for index, work in enumerate(self.works):
            for other in work.after:
                lists[other].append(index)
        return tuple(tuple(found) for found in lists)

    def stages(self, work: int) -> tuple[int, ...]:
        """The stages that a work passes through, in forward order."""
        return self.modules[self.works[work].module].stages

    def has_backward(self, stage: int, work: int) -> bool:
        """Whether (stage, work) has a backward action."""
        return self.backward[work][self.place[stage][1]]

    def work_of(self, action: Action) -> int:
        """The work that an action names.

        Raises: PlanError: the stage or the work does not exist in this iteration.
        """
        if action.stage not in self.place:
            raise PlanError(f"action {action}: stage {action.stage} does not exist")
        module = self.place[action.stage][0]
        sender = action.stage
        if action.kind in (Kind.RECV_F, Kind.WAIT_F, Kind.SEND_B):
            sender = action.peer  # the producing stage may belong to another module
            if sender not in self.place:
                raise PlanError(f"action {action}: stage {sender} does not exist")
            module = self.place[sender][0]
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
        found: dict[tuple[int, int], tuple[Edge, ...]] = {}
        for index, work in enumerate(self.works):
            chain = self.stages(index)
            for k, stage in enumerate(chain):
                sources = [(chain[k - 1], index)] if k else [(self.stages(w)[-1], w) for w in work.after]
                found[stage, index] = tuple(
                    Edge(s, stage, w, index, self.has_backward(stage, index) and self.has_backward(s, w))
                    for s, w in sources
                )
        return found

    @cached_property
    def _outputs(self) -> dict[tuple[int, int], tuple[Edge, ...]]:
        lists: dict[tuple[int, int], list[Edge]] = {}
        for edges in self._inputs.values():
            for edge in edges:
                lists.setdefault((edge.source, edge.work), []).append(edge)
        return {key: tuple(edges) for key, edges in lists.items()}

    def inputs(self, stage: int, work: int) -> tuple[Edge, ...]:
        """Edges into (stage, work): one inside of a chain, one for each work in `after` at its start."""
        return self._inputs[stage, work]

    def outputs(self, stage: int, work: int) -> tuple[Edge, ...]:
        """Edges out of (stage, work)."""
        return self._outputs.get((stage, work), ())

    def is_local(self, edge: Edge) -> bool:
        """Whether both ends of an edge are on one rank, so that nothing is sent."""
        return self.stage_rank[edge.source] == self.stage_rank[edge.target]

    def nodes(self) -> Iterator[tuple[int, int]]:
        """All (stage, work), each after those that feed it."""
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
        """The results that must be there before a compute action starts."""
        if kind is Kind.F:
            return tuple(((Kind.F, e.source, e.work), e) for e in self.inputs(stage, work))
        if kind is Kind.W:
            return (((Kind.B, stage, work), None),)
        assert kind in BACKWARD
        behind = [((Kind.B, e.target, e.target_work), e) for e in self.outputs(stage, work) if e.grad]
        return (((Kind.F, stage, work), None), *behind)
