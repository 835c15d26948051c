"""The plan of what each rank sends to which others when the state of a job moves to another layout: a pure function of
what each rank holds and wants.

What a rank holds itself is not copied. Each missing piece has one sender that holds it, and pieces are cut and dealt
so that the busiest sender's bytes are the least possible.
"""

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from mmtrain.checkpoint.least_load import Holders, least_load
from mmtrain.errors import NoHolderError

ITEM_BYTES = {
    **dict.fromkeys(("float64", "int64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
}
"""The bytes of an element of each dtype."""


class Shard(NamedTuple):
    """A box of a tensor of the whole model."""

    name: str
    """The name under which a checkpoint stores the tensor."""
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.lengths)

    @property
    def num_bytes(self) -> int:
        """The bytes of all elements."""
        return self.elements * ITEM_BYTES[self.dtype]


class BoxCopy(NamedTuple):
    """A box that one rank sends to another one."""

    sender: int
    receiver: int
    shard: Shard


Shards = Sequence[Collection[Shard]]
"""[rank] -> its shards."""


def copy_plan(held: Shards, wanted: Shards) -> tuple[BoxCopy, ...]:
    """The copies after which each rank has what it wants, in a fixed order; equal arguments give an equal plan.

    The busiest sender's bytes are the least possible, but for one element for each set of ranks that hold the same.

    Args: held: of a rank without state empty. wanted: of a rank outside of the layout empty.
    Raises: NoHolderError: a piece of a wanted shard has no holder.
    """
    pieces, lacking = _missing(held, wanted)
    if lacking:
        raise NoHolderError.of(lacking)
    unit = max((ITEM_BYTES[shard.dtype] for part in pieces.values() for _, shard in part), default=1)
    loads = least_load({h: sum(-(-shard.num_bytes // unit) for _, shard in part) for h, part in pieces.items()})
    copies = [copy for holders in sorted(pieces) for copy in _dealt(pieces[holders], loads[holders], unit)]
    return tuple(sorted(copies))


MissingBox = tuple[int, Shard]
"""A receiver and a box that it lacks."""


def _missing(held: Shards, wanted: Shards) -> tuple[dict[Holders, list[MissingBox]], list[str]]:
    """Holders -> the pieces that only they hold, for ranks that lack them; and the names of those without a holder."""
    grids = _grids(held)
    pieces: dict[Holders, list[MissingBox]] = {}
    lacking: set[str] = set()
    known: dict[Shard, list[tuple[Shard, Holders]]] = {}  # replicas want the same
    for receiver, shards in enumerate(wanted):
        for shard in _disjoint(shards):
            if shard not in known:
                grid = grids.get((shard.name, shard.dtype))
                known[shard] = [] if grid is None else list(grid.parts(shard))
                if sum(part.elements for part, _ in known[shard]) < shard.elements:
                    lacking.add(shard.name)
            for part, holders in known[shard]:
                if receiver not in holders:
                    pieces.setdefault(holders, []).append((receiver, part))
    return {holders: sorted(part) for holders, part in pieces.items()}, sorted(lacking)


def _disjoint(shards: Collection[Shard]) -> list[Shard]:
    """Boxes of the same elements, each once: copies of a tied matrix on one rank may be divided in different ways."""
    found: dict[tuple[str, str], list[Shard]] = {}
    for shard in dict.fromkeys(shards):
        boxes = found.setdefault((shard.name, shard.dtype), [])
        rest = [shard] if shard.elements else []
        for box in tuple(boxes):
            rest = [part for piece in rest for part in _outside(piece, box)]
        boxes += rest
    return [box for boxes in found.values() for box in boxes]


def _outside(box: Shard, other: Shard) -> list[Shard]:
    """The parts of a box that are not in another one: below it and above it, a dimension at a time."""
    parts, offsets, lengths = [], list(box.offsets), list(box.lengths)
    for dim, (first, length) in enumerate(zip(other.offsets, other.lengths, strict=True)):
        begin, end = offsets[dim], offsets[dim] + lengths[dim]
        low, high = max(begin, first), min(end, first + length)
        if low >= high:
            return [box]
        for start, stop in ((begin, low), (high, end)):
            if start < stop:
                offsets[dim], lengths[dim] = start, stop - start
                parts.append(box._replace(offsets=tuple(offsets), lengths=tuple(lengths)))
        offsets[dim], lengths[dim] = low, high - low
    return parts


class _Grid:
    """The held boxes of one tensor, cut into cells wherever one of them begins or ends."""

    def __init__(self, boxes: Mapping[Shard, list[int]]) -> None:
        """Args: boxes: held box -> the ranks that hold it."""
        dims = range(len(next(iter(boxes)).lengths))
        ends = [[(b.offsets[d], b.offsets[d] + b.lengths[d]) for b in boxes] for d in dims]
        self._cuts = [sorted({cut for pair in pairs for cut in pair}) for pairs in ends]
        holders: dict[tuple[int, ...], set[int]] = {}
        for box, ranks in boxes.items():
            for cell in product(*self._ranges(box)):
                holders.setdefault(cell, set()).update(ranks)
        self._holders = {cell: tuple(sorted(ranks)) for cell, ranks in holders.items()}

    def parts(self, wanted: Shard) -> Iterator[tuple[Shard, Holders]]:
        """The parts of a box that are held, and by whom."""
        for cell in product(*self._ranges(wanted)):
            if cell not in self._holders:
                continue
            offsets, lengths = [], []
            for cuts, index, first, length in zip(self._cuts, cell, wanted.offsets, wanted.lengths, strict=True):
                begin, end = max(cuts[index], first), min(cuts[index + 1], first + length)
                offsets.append(begin)
                lengths.append(end - begin)
            yield Shard(wanted.name, tuple(offsets), tuple(lengths), wanted.dtype), self._holders[cell]

    def _ranges(self, box: Shard) -> list[range]:
        """[dim] -> the cells that a box touches."""
        ranges = []
        for cuts, first, length in zip(self._cuts, box.offsets, box.lengths, strict=True):
            begin = max(bisect_right(cuts, first) - 1, 0)
            ranges.append(range(begin, min(bisect_left(cuts, first + length), len(cuts) - 1)))
        return ranges


def _grids(held: Shards) -> dict[tuple[str, str], _Grid]:
    """The held boxes of each (name, dtype)."""
    boxes: dict[tuple[str, str], dict[Shard, list[int]]] = {}
    for rank, shards in enumerate(held):
        for shard in dict.fromkeys(shards):
            if shard.elements:
                boxes.setdefault((shard.name, shard.dtype), {}).setdefault(shard, []).append(rank)
    return {key: _Grid(found) for key, found in boxes.items()}


def _dealt(pieces: Sequence[MissingBox], loads: Mapping[int, int], unit: int) -> Iterator[BoxCopy]:
    """The pieces of one set of holders, cut where a sender has sent its load.

    Args: loads: sender -> units. unit: bytes.
    """
    waiting = deque(pieces)
    senders = [sender for sender, load in sorted(loads.items()) if load]
    room = 0
    for sender in senders:
        room += loads[sender] * unit
        while waiting and (room > 0 or sender == senders[-1]):
            receiver, shard = waiting.popleft()
            if shard.num_bytes > room and sender != senders[-1]:
                elements = room // ITEM_BYTES[shard.dtype]
                if not elements:
                    waiting.appendleft((receiver, shard))
                    break
                first, rest = cut(shard, elements)
                waiting.extendleft((receiver, part) for part in (*reversed(rest), *reversed(first)))
                continue
            room -= shard.num_bytes
            yield BoxCopy(sender, receiver, shard)


def cut(shard: Shard, elements: int) -> tuple[list[Shard], list[Shard]]:
    """The first elements of a box in row-major order, and the others, each as boxes in that order.

    Args: elements: 0 .. all.
    """
    name, offsets, lengths, dtype = shard
    if elements in (0, shard.elements):
        return ([shard], []) if elements else ([], [shard])
    rows, inside = divmod(elements, math.prod(lengths[1:]))

    def block(first: int, last: int) -> list[Shard]:
        at = (offsets[0] + first, *offsets[1:])
        return [Shard(name, at, (last - first, *lengths[1:]), dtype)] if last > first else []

    first, rest = block(0, rows), block(rows + (inside > 0), lengths[0])
    if inside:
        at = (offsets[0] + rows,)
        low, high = cut(Shard(name, offsets[1:], lengths[1:], dtype), inside)
        first += [Shard(name, at + s.offsets, (1, *s.lengths), dtype) for s in low]
        rest = [Shard(name, at + s.offsets, (1, *s.lengths), dtype) for s in high] + rest
    return first, rest
