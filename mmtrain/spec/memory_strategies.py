"""What the blocks of a stage do with their activations between forward and backward, as a value. Pure.

Text: `keep`, or runs in the order of the blocks: `2 offload, 3 recompute, 1 keep`. It is the name of a plan's memory
option, and all that the runtime needs to know of it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import groupby

from mmtrain.errors import PlanError


class BlockMemory(StrEnum):
    """What one block does with its activations. None of them changes a bit of any gradient."""

    KEEP = "keep"
    """Autograd keeps what it needs."""
    SELECTIVE = "selective"
    """Keeps the block's input and the results of some operations; the backward computes the rest again."""
    RECOMPUTE = "recompute"
    """Keeps the block's input; the backward computes the rest again."""
    OFFLOAD = "offload"
    """What autograd keeps waits in host memory, and comes back before the backward."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What each block of a stage does, for one work; equal text means equal behaviour."""

    blocks: tuple[BlockMemory, ...]

    def __str__(self) -> str:
        """The text; one word where all blocks do the same."""
        runs = [(how, len(list(group))) for how, group in groupby(self.blocks)]
        if len(runs) <= 1:
            return str(runs[0][0]) if runs else str(BlockMemory.KEEP)
        return ", ".join(f"{count} {how}" for how, count in runs)

    @classmethod
    def parse(cls, text: str, num_blocks: int) -> "StageMemory":
        """What a text says of a stage with so many blocks.

        Raises: PlanError: it is not exactly what `str` writes of such a stage.
        """
        try:
            return _parse(text, num_blocks)
        except ValueError:
            raise PlanError(
                f"memory option {text!r} of a stage with {num_blocks} blocks: write one of "
                f"{', '.join(BlockMemory)} for all of them, or how many do what, in their order and {num_blocks} in "
                'all, as "2 offload, 1 keep"'
            ) from None

    @classmethod
    def uniform(cls, how: BlockMemory, num_blocks: int) -> "StageMemory":
        """All blocks do the same."""
        return cls((how,) * num_blocks)


@lru_cache(maxsize=1 << 12)
def _parse(text: str, num_blocks: int) -> StageMemory:
    if text in list(BlockMemory):
        return StageMemory.uniform(BlockMemory(text), num_blocks)
    blocks: list[BlockMemory] = []
    for part in text.split(", "):
        match = re.fullmatch(r"([1-9]\d*) ([a-z]+)", part)
        if not match:
            raise ValueError(part)
        blocks += [BlockMemory(match[2])] * int(match[1])
    found = StageMemory(tuple(blocks))
    if len(blocks) != num_blocks or str(found) != text:
        raise ValueError(text)
    return found


def strategies_of(names: Iterable[str]) -> tuple[BlockMemory, ...]:
    """The strategies of a config, in the order in which a stage's blocks take them: offloaded blocks come first, since
    their backward comes last and leaves the most time to bring them back; then recomputed ones."""
    wanted = set(names)
    order = (BlockMemory.OFFLOAD, BlockMemory.RECOMPUTE, BlockMemory.SELECTIVE, BlockMemory.KEEP)
    return tuple(how for how in order if how.value in wanted)
