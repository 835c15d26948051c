"""The state of a running job moves to another layout: what a rank has stays, the rest travels as raw tensors.

    held = HeldShards.of(named)                          # of the old layout, whose process groups may end then
    placement = Placement.build(..., local=held.lend())  # takes over what it can, the rest has undefined values
    move(held, named_of_placement, group)                # all ranks that hold or want something

Nothing is written into a tensor of `held`, so a move that fails can be tried again, to another layout. What was taken
over shares its memory with the new layout, whose first step changes it in place: drop `held` before.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.checkpoint.copy_plan import Shard, copy_plan
from mmtrain.checkpoint.messages import BoxMessage, Round, rounds_of
from mmtrain.checkpoint.shard_tables import gather_tables
from mmtrain.checkpoint.state import NamedTensors
from mmtrain.checkpoint.tensor_boxes import shard_of
from mmtrain.parallel.fill import LocalPart
from mmtrain.parallel.torch_private import raw_part

MESSAGE_BYTES = 1 << 24
"""The most bytes of a message. 540 MiB took 0.19 to 0.3 s over loopback in messages of 16 MiB, 0.8 s in messages of
256 KiB; larger ones won nothing."""


@dataclass(frozen=True, slots=True)
class HeldShards:
    """What one rank has of the state of a job: live tensors, which outlive the layout that they come from."""

    shards: Mapping[Shard, Tensor]

    @classmethod
    def of(cls, named: NamedTensors) -> "HeldShards":
        """The shards of a layout, also in the middle of a step that failed. Needs no process group."""
        return cls({shard: tensors[0] for shard, tensors in _shards(named).items()})

    @classmethod
    def empty(cls) -> "HeldShards":
        """The shards of a rank without state: a newcomer, or one that was outside of the layout."""
        return cls({})

    def lend(self) -> LocalPart:
        """A function that gives a placement each shard that it asks for, once. What trains there then shares its
        memory."""
        given: set[Shard] = set()

        def local(name: str, like: Tensor, dtype: torch.dtype, first: int) -> Tensor | None:
            shard = shard_of(name, like, dtype, first)
            if shard in given or shard not in self.shards:
                return None
            given.add(shard)
            return self.shards[shard]

        return local


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The bytes of a move."""

    sent: int
    """The bytes that this rank sent."""
    received: int
    """The bytes that this rank received."""
    total: int
    """The bytes that all ranks sent: what was missing."""


def move(
    held: HeldShards, named: NamedTensors | None, group: dist.ProcessGroup, *, message_bytes: int = MESSAGE_BYTES
) -> Moved:
    """Fills the tensors of a new layout from what all ranks hold. Collective over the group, on its CPU backend.

    Returns when this rank has sent and received all; others may still wait for each other. If no rank has moments (the
    job has not made a step), the new layout has none either.

    Args:
        held: of this rank. Its tensors are not written.
        named: of the new layout; None: this rank is not in it.
        group: also one that was never registered with torch.
        message_bytes: most of a message, of which a rank has two in memory.
    Raises:
        NoHolderError: something wanted is held by no rank; on all ranks, before anything is sent.
        TrainingError: a rank's table cannot be read.
    """
    wanted = _shards(named) if named is not None else {}
    tables = gather_tables(held.shards, wanted, group)
    if named is not None and not tables.have_moments:
        named.drop_moments()
    copies = copy_plan(tables.held, tables.wanted)
    rank = group.rank()
    sources = _by_tensor({shard: [tensor] for shard, tensor in held.shards.items()})
    targets = _by_tensor(wanted)
    with torch.no_grad():
        for shard, tensor in held.shards.items():
            _put(shard, tensor, targets)
        _exchange(rounds_of(rank, copies, message_bytes), sources, targets, group)
    sizes = [(copy.sender, copy.receiver, copy.shard.num_bytes) for copy in copies]
    return Moved(
        sent=sum(size for sender, _, size in sizes if sender == rank),
        received=sum(size for _, receiver, size in sizes if receiver == rank),
        total=sum(size for _, _, size in sizes),
    )


def _shards(named: NamedTensors) -> dict[Shard, list[Tensor]]:
    """Shard -> this rank's tensors of it: one, or the copies of a tied matrix, each once."""
    found: dict[Shard, list[Tensor]] = {}
    for name, tensor in named.tensors():
        part = raw_part(tensor)
        copies = found.setdefault(shard_of(name, tensor, part.dtype, named.first_row(name, tensor)), [])
        if all(part.data_ptr() != copy.data_ptr() for copy in copies):
            copies.append(part)
    return found


_Tensors = Mapping[tuple[str, str], list[tuple[Shard, Tensor]]]
"""What this rank has of each tensor (name, dtype)."""


def _by_tensor(shards: Mapping[Shard, list[Tensor]]) -> _Tensors:
    tensors: dict[tuple[str, str], list[tuple[Shard, Tensor]]] = {}
    for shard, copies in shards.items():
        tensors.setdefault((shard.name, shard.dtype), []).extend((shard, copy) for copy in copies)
    return tensors


def _put(shard: Shard, part: Tensor, targets: _Tensors) -> None:
    """Copies a part of a tensor to where it is wanted and not already."""
    for wanted, target in targets.get((shard.name, shard.dtype), ()):
        if (both := _common(shard, wanted)) and target.data_ptr() != part.data_ptr():
            target[both[1]].copy_(part[both[0]])


def _common(one: Shard, other: Shard) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """What two boxes of one tensor have in common, in the coordinates of each; None: nothing."""
    ends = [
        (max(a, b), min(a + m, b + n))
        for a, m, b, n in zip(one.offsets, one.lengths, other.offsets, other.lengths, strict=True)
    ]
    if any(low >= high for low, high in ends):
        return None
    at_one, at_other = (
        tuple(slice(low - first, high - first) for (low, high), first in zip(ends, box.offsets, strict=True))
        for box in (one, other)
    )
    return at_one, at_other


def _exchange(rounds: Sequence[Round], sources: _Tensors, targets: _Tensors, group: dist.ProcessGroup) -> None:
    """Sends and receives the messages of this rank, one of each at a time, through host memory."""
    sizes = [[message.num_bytes for message in pair if message] for pair in zip(*rounds, strict=True)] or [[], []]
    out, into = (torch.empty(max(own, default=0), dtype=torch.uint8) for own in sizes)
    for send, receive in rounds:
        works = []
        if receive:
            works.append(group.recv([into[: receive.num_bytes]], receive.sender, 0))
        if send:
            for shard, part in _parts(send, out):
                _fill(part, shard, sources)
            works.append(group.send([out[: send.num_bytes]], send.receiver, 0))
        for work in works:
            work.wait()
        if receive:
            for shard, part in _parts(receive, into):
                _put(shard, part, targets)


def _fill(part: Tensor, shard: Shard, sources: _Tensors) -> None:
    """Copies a box from the shard that contains it."""
    for held, source in sources[shard.name, shard.dtype]:
        both = _common(held, shard)
        if both and part[both[1]].numel() == part.numel():
            part.copy_(source[both[0]])
            return
    raise AssertionError(f"the plan lets this rank send {shard}, which it does not hold")


def _parts(message: BoxMessage, buffer: Tensor) -> Iterator[tuple[Shard, Tensor]]:
    """The boxes of a message, and where they are in its bytes."""
    end = 0
    for shard in message.shards:
        start, end = end, end + shard.num_bytes
        yield shard, buffer[start:end].view(getattr(torch, shard.dtype)).view(shard.lengths)
