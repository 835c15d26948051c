"""What all ranks hold and want, told as JSON."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mmtrain.checkpoint.copy_plan import ITEM_BYTES, Shard
from mmtrain.errors import TrainingError, one_line

MOMENTS = "optimizer."
"""How the names of moments begin."""


@dataclass(frozen=True, slots=True)
class ShardTables:
    """Equal on all ranks of a group."""

    held: tuple[tuple[Shard, ...], ...]
    """[rank] -> its shards; empty without state."""
    wanted: tuple[tuple[Shard, ...], ...]
    """[rank] -> those of its position in the new layout; empty outside of it."""

    @property
    def have_moments(self) -> bool:
        """Whether some rank has moments; before the first step none has."""
        return any(shard.name.startswith(MOMENTS) for shards in set(self.held) for shard in shards)


def gather_tables(held: Collection[Shard], wanted: Collection[Shard], group: dist.ProcessGroup) -> ShardTables:
    """The tables of all ranks. Collective over the group, on its CPU backend.

    Moments are wanted only if some rank holds any.
    Raises: TrainingError: a table cannot be read.
    """
    rows = {"held": [list(shard) for shard in held], "wanted": [list(shard) for shard in wanted]}
    text = json.dumps(rows, separators=(",", ":")).encode()
    sizes = _all_gather(torch.tensor([len(text)]), group)
    padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = [
        other[: int(size)].numpy().tobytes() for other, size in zip(_all_gather(padded, group), sizes, strict=True)
    ]
    known: dict[bytes, tuple[tuple[Shard, ...], tuple[Shard, ...]]] = {}  # replicas tell the same
    for rank, other in enumerate(texts):
        if other not in known:
            known[other] = parse_table(other, rank)
    tables = ShardTables(tuple(known[other][0] for other in texts), tuple(known[other][1] for other in texts))
    if tables.have_moments:
        return tables
    kept = {own: tuple(s for s in own if not s.name.startswith(MOMENTS)) for own in set(tables.wanted)}
    return ShardTables(tables.held, tuple(kept[own] for own in tables.wanted))


def parse_table(text: bytes, rank: int) -> tuple[tuple[Shard, ...], tuple[Shard, ...]]:
    """What a rank holds and wants. Raises: TrainingError: it is not a table of shards."""
    try:
        table = json.loads(text)
        if not isinstance(table, dict) or table.keys() != {"held", "wanted"}:
            raise ValueError("it must have the keys held and wanted alone")
        held, wanted = (tuple(_shard(row) for row in _list(table[key])) for key in ("held", "wanted"))
    except ValueError as error:
        raise TrainingError(
            f"move: rank {rank} sent a table of shards that cannot be read: {one_line(error, 200)}; all ranks need one "
            "version of mmtrain"
        ) from None
    return held, wanted


def _shard(row: Any) -> Shard:
    match row:
        case [str(name), list(offsets), list(lengths), str(dtype)] if len(offsets) == len(lengths):
            if dtype in ITEM_BYTES and all(type(n) is int and n >= 0 for n in (*offsets, *lengths)):
                return Shard(name, tuple(offsets), tuple(lengths), dtype)
    raise ValueError(f"a shard is [name, offsets, lengths, dtype], not {row}")


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"shards come in a list, not {value}")
    return value


def _all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    outputs = [torch.empty_like(tensor) for _ in range(group.size())]
    group.allgather([outputs], [tensor]).wait()
    return outputs
