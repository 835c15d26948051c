"""The messages of a copy plan, in rounds in which each rank sends at most one and receives at most one."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mmtrain.checkpoint.copy_plan import ITEM_BYTES, BoxCopy, Shard, cut


class BoxMessage(NamedTuple):
    """Boxes that travel together, one after the other without padding; those with large elements come first, so that
    each begins at a multiple of its element."""

    sender: int
    receiver: int
    shards: tuple[Shard, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of all boxes."""
        return sum(shard.num_bytes for shard in self.shards)


class Round(NamedTuple):
    """What one rank does at the same time."""

    send: BoxMessage | None
    receive: BoxMessage | None


def rounds_of(rank: int, copies: Sequence[BoxCopy], most_bytes: int) -> list[Round]:
    """The rounds of one rank, in order; a rank that follows them waits for no rank that waits for it.

    Args: copies: of all ranks. most_bytes: of a message.
    """
    busy: tuple[dict[int, int], dict[int, int]] = {}, {}
    """The rounds in which a rank sends, and those in which it receives, as bits: rank -> rounds."""
    own: dict[int, Round] = {}
    for message in _alternating(copies, most_bytes):
        taken = busy[0].get(message.sender, 0) | busy[1].get(message.receiver, 0)
        free = ~taken & (taken + 1)  # the lowest bit that is not set
        for table, end in zip(busy, (message.sender, message.receiver), strict=True):
            table[end] = table.get(end, 0) | free
        if rank in (message.sender, message.receiver):
            number = free.bit_length()
            before = own.get(number, Round(None, None))
            mine = before._replace(send=message) if rank == message.sender else before._replace(receive=message)
            own[number] = mine
    return [own[number] for number in sorted(own)]


def _alternating(copies: Sequence[BoxCopy], most_bytes: int) -> Iterable[BoxMessage]:
    """The messages of all pairs: the first ones, then the second ones, and so on."""
    pairs: dict[tuple[int, int], list[Shard]] = {}
    for copy in sorted(copies):
        pairs.setdefault((copy.sender, copy.receiver), []).append(copy.shard)
    queues = [_messages(*pair, shards, most_bytes) for pair, shards in pairs.items()]
    for number in range(max(map(len, queues), default=0)):
        yield from (queue[number] for queue in queues if number < len(queue))


def _messages(sender: int, receiver: int, shards: Sequence[Shard], most_bytes: int) -> list[BoxMessage]:
    """The messages of a pair of ranks."""
    messages: list[list[Shard]] = []
    room = 0
    waiting = sorted(shards, key=lambda shard: -ITEM_BYTES[shard.dtype])[::-1]
    while waiting:
        shard = waiting.pop()
        if not messages or room < ITEM_BYTES[shard.dtype]:
            messages.append([])
            room = most_bytes
        if shard.num_bytes > room:
            first, rest = cut(shard, room // ITEM_BYTES[shard.dtype])
            waiting += [*reversed(rest), *reversed(first)]
            continue
        messages[-1].append(shard)
        room -= shard.num_bytes
    return [BoxMessage(sender, receiver, tuple(part)) for part in messages]
