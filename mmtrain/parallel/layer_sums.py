"""Sums of gradients over the ranks that hold a layer: one in each pipeline, and those with a copy of a tied matrix.

Pipelines may cut the model differently, so a layer's holders are found by the names of parameters, which do not depend
on the cut. Parameters with equal holders in a row travel as one message. All ranks walk the sums in one order,
the last layer first: pipelines that walked the layers of one group in different orders would add the gradients of
different layers without an error.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from mmtrain.errors import PlanError
from mmtrain.parallel.collectives import equal_over
from mmtrain.parallel.grads import fill_missing_grads, local_part
from mmtrain.parallel.mesh import Mesh
from mmtrain.spec.spec import VocabularyRows

MOST_ELEMENTS = 1 << 25
"""The most elements of a message: 128 MiB of float32."""


class _HeldParameter(NamedTuple):
    """What a rank says of a parameter that trains."""

    name: str
    """A tied copy has that of its original; rows of a larger matrix have theirs in it."""
    stage: int
    shape: tuple[int, ...]
    """The shape of this rank's shard."""
    elements: int
    """The elements of a shard, on average: equal at all positions in a stage."""


@dataclass(frozen=True, slots=True)
class _GradientMessage:
    """Parameters with equal holders."""

    names: tuple[str, ...]
    holders: tuple[tuple[int, tuple[int, ...]], ...]
    """Positions in the column, each with its stages that have the parameters."""

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions in the column of those that have them."""
        return tuple(position for position, _ in self.holders)


@dataclass(eq=False, slots=True)
class _Sum:
    """A message on this rank."""

    copies: tuple[tuple[nn.Parameter, ...], ...]
    """[parameter of the message] -> its copies on this rank."""
    stages: frozenset[int]
    """The stages of this rank that have them."""
    group: dist.ProcessGroup | None
    """The group of their holders; None: only this rank."""
    flat: Tensor | None = None
    work: dist.Work | None = None

    def start(self, dtype: torch.dtype) -> None:
        """Begins to add up the gradients. Args: dtype: of the message."""
        fill_missing_grads(parameter for copies in self.copies for parameter in copies)
        self.flat = torch.cat([_added(copies).flatten() for copies in self.copies])
        if self.group is None:
            return
        self.flat = self.flat.to(dtype)
        if self.flat.numel():  # equal on all holders, which have the same shard
            self.work = dist.all_reduce(self.flat, group=self.group, async_op=True)

    def finish(self) -> None:
        """Waits for the sum, and puts it into all copies."""
        assert self.flat is not None
        if self.work is not None:
            self.work.wait()
        rest = self.flat
        for copies in self.copies:
            grads = [_grad(parameter) for parameter in copies]
            total, rest = rest.tensor_split([grads[0].numel()])
            for grad in grads:
                grad.copy_(total.view_as(grad))
        self.flat = self.work = None


@dataclass(eq=False)
class LayerSums:
    """This rank's part in the sums of a step, in their order."""

    sums: Sequence[_Sum] = ()
    dtype: torch.dtype = torch.float32
    """The dtype of the messages."""
    _reduced: set[int] = field(default_factory=set)
    _started: int = 0

    @classmethod
    def of(
        cls, stages: Mapping[int, nn.Module], aliases: Mapping[str, str], mesh: Mesh, dtype: torch.dtype
    ) -> "LayerSums":
        """The sums of a job's layers. Collective over the job.

        Args:
            stages: index -> chunk, of this rank.
            aliases: name of a tied copy -> name of its original.
            dtype: of the messages.
        Raises: PlanError: ranks disagree about the layers.
        """
        if len(mesh.column) == 1 and not aliases:
            return cls()
        named: dict[tuple[str, int], list[nn.Parameter]] = {}
        table: list[_HeldParameter] = []
        seen: set[nn.Parameter] = set()  # two stages may have one chunk
        for index, chunk in stages.items():
            rows: Mapping[str, VocabularyRows] = getattr(chunk, "stored_rows", {})
            for name, parameter in chunk.named_parameters():
                if parameter.requires_grad and parameter not in seen:
                    seen.add(parameter)
                    shards = parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1
                    shape, elements = tuple(local_part(parameter).shape), parameter.numel() // shards
                    whose = f"[{rows[name].first}:{rows[name].last}]" if name in rows else ""
                    own = _HeldParameter(aliases.get(name, name) + whose, index, shape, elements)
                    table.append(own)
                    named.setdefault((own.name, own.stage), []).append(parameter)
        messages = _messages(_tables(table, mesh), mesh)
        _check_equal(messages, mesh)
        groups = _groups(messages, mesh)
        position, sums = mesh.column.index(mesh.rank), list[_Sum]()
        for message in messages:
            if position in message.positions:
                own_stages = dict(message.holders)[position]
                copies = [
                    tuple(p for stage in own_stages for p in named.get((name, stage), ())) for name in message.names
                ]
                sums.append(_Sum(tuple(copies), frozenset(own_stages), groups.get(message.positions)))
        return cls(sums, dtype)

    def stage_reduced(self, stage: int) -> None:
        """Says that the gradients of a stage of this rank are those of all its shards; starts what can start."""
        self._reduced.add(stage)
        while self._started < len(self.sums) and self.sums[self._started].stages <= self._reduced:
            self._start_next()

    def finish(self) -> None:
        """Completes all sums of a step."""
        while self._started < len(self.sums):
            self._start_next()
        for one in self.sums:
            one.finish()
        self._started = 0
        self._reduced.clear()

    def _start_next(self) -> None:
        self.sums[self._started].start(self.dtype)
        self._started += 1


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return local_part(parameter.grad)


def _added(copies: Sequence[nn.Parameter]) -> Tensor:
    """The sum of the gradients of this rank's copies."""
    total = _grad(copies[0])
    for parameter in copies[1:]:
        total = total + _grad(parameter)
    return total


def _tables(table: list[_HeldParameter], mesh: Mesh) -> list[list[_HeldParameter]]:
    """[position in the column] -> what that rank holds. Collective over the column."""
    tables: list[Any] = [table] * len(mesh.column)
    if mesh.column_group is not None:
        dist.all_gather_object(tables, table, group=mesh.column_group)
    return tables


def _messages(tables: Sequence[Sequence[_HeldParameter]], mesh: Mesh) -> list[_GradientMessage]:
    """The messages of the job in the order in which all ranks walk them.

    Args: tables: [position in the column] -> its parameters, in forward order.
    Raises: PlanError: pipelines have different parameters, or other shards of them.
    """
    pipelines = [mesh.layout.coordinates(rank).pipeline for rank in mesh.column]
    holders: dict[str, dict[int, list[_HeldParameter]]] = {}
    for position, held in enumerate(tables):
        for one in held:
            holders.setdefault(one.name, {}).setdefault(position, []).append(one)
    first = sorted(
        (one.stage, order, one.name)
        for position, held in enumerate(tables)
        if pipelines[position] == 0
        for order, one in enumerate(held)
    )
    forward = list(dict.fromkeys(name for _, _, name in first))
    for name, positions in holders.items():
        shapes = {one.shape for held in positions.values() for one in held}
        if name not in forward or {pipelines[position] for position in positions} != set(pipelines) or len(shapes) > 1:
            raise PlanError(
                f"pipelines do not hold equal shards of {name}: {sorted(shapes)} on ranks "
                f"{[mesh.column[at] for at in positions]}; all need one version of mmtrain and equal configs"
            )
    messages: list[_GradientMessage] = []
    for key, names in groupby(reversed(forward), lambda name: _holders_of(holders[name])):
        alone = len(key) == 1 and len(key[0][1]) == 1
        for part in [] if alone else _parts(list(names), holders):
            messages.append(_GradientMessage(part, key))
    return messages


def _holders_of(held: Mapping[int, Sequence[_HeldParameter]]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    return tuple((position, tuple(sorted({one.stage for one in own}))) for position, own in sorted(held.items()))


def _parts(
    names: Sequence[str], holders: Mapping[str, Mapping[int, Sequence[_HeldParameter]]]
) -> list[tuple[str, ...]]:
    """Names in a row, in as few messages as their sizes allow."""
    parts: list[list[str]] = [[]]
    size = 0
    for name in names:
        elements = next(iter(holders[name].values()))[0].elements
        if parts[-1] and size + elements > MOST_ELEMENTS:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += elements
    return [tuple(part) for part in parts]


def _check_equal(messages: Sequence[_GradientMessage], mesh: Mesh) -> None:
    """Checks that all ranks walk the same sums in the same order. Collective over the job.

    Raises: PlanError: they do not.
    """
    digest = int(hashlib.sha256(repr(messages).encode()).hexdigest()[:15], 16)
    if not equal_over(None, digest):
        raise PlanError(
            "ranks disagree about the layers whose gradients they add up; all machines need one version of mmtrain and "
            "equal configs"
        )


def _groups(messages: Sequence[_GradientMessage], mesh: Mesh) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Positions -> the group of this rank's column. Collective over the job: every rank makes every group."""
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for positions in dict.fromkeys(message.positions for message in messages if len(message.positions) > 1):
        for column in mesh.layout.groups("pipeline", "pp"):
            group = dist.new_group([column[position] for position in positions])
            if column == mesh.column:
                groups[positions] = group
    return groups
