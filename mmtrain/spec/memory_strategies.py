"""The memory strategies of the blocks of a stage between forward and backward, as a value. Pure.

Its text is `keep`, or runs in the order of the blocks: `2 offload, 3 recompute, 1 keep`. The text is the name of a
plan's memory option; the runtime reads the strategies from it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import groupby

from mmtrain.errors import PlanError


class BlockMemory(StrEnum):
    """The memory strategy of one block's activations. All strategies give bitwise equal gradients."""

    KEEP = "keep"
    """Autograd keeps what it needs."""
    SELECTIVE = "selective"
    """Keeps the block's input and the results of some operations; the backward recomputes the other activations."""
    RECOMPUTE = "recompute"
    """Keeps the block's input; the backward recomputes the other activations."""
    OFFLOAD = "offload"
    """The tensors that autograd keeps are moved to host memory, and copied back before the backward."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The memory strategy of each block of a stage, for one work; equal text means equal behaviour."""

    blocks: tuple[BlockMemory, ...]

    def __str__(self) -> str:
        """The text; one word if all blocks have the same strategy."""
        runs = [(how, len(list(group))) for how, group in groupby(self.blocks)]
        if len(runs) <= 1:
            return str(runs[0][0]) if runs else str(BlockMemory.KEEP)
        return ", ".join(f"{count} {how}" for how, count in runs)

    @classmethod
    def parse(cls, text: str, num_blocks: int) -> "StageMemory":
        """The strategies that a text describes. Args: num_blocks: blocks of the stage.

        Raises: PlanError: the text is not exactly the one that `str` gives for a stage with `num_blocks` blocks.
        """
        try:
            return _parse(text, num_blocks)
        except ValueError:
            raise PlanError(
                f"memory option {text!r} of a stage with {num_blocks} blocks: write one of "
                f"{', '.join(BlockMemory)} for all of them, or runs of blocks in their order, {num_blocks} in total, "
                'as "2 offload, 1 keep"'
            ) from None

    @classmethod
    def uniform(cls, how: BlockMemory, num_blocks: int) -> "StageMemory":
        """The same strategy for all blocks."""
        return cls((how,) * num_blocks)


@lru_cache(maxsize=1 << 12)
def _parse(text: str, num_blocks: int) -> StageMemory:
    if text in list(BlockMemory):
        return StageMemory.uniform(BlockMemory(text), num_blocks)
    blocks: list[BlockMemory] = []
    for run in text.split(", "):
        match = re.fullmatch(r"([1-9]\d*) ([a-z]+)", run)
        if not match:
            raise ValueError(run)
        blocks += [BlockMemory(match[2])] * int(match[1])
    memory = StageMemory(tuple(blocks))
    if len(blocks) != num_blocks or str(memory) != text:
        raise ValueError(text)
    return memory


def strategies_of(names: Iterable[str]) -> tuple[BlockMemory, ...]:
    """The strategies of a config, in the order in which a stage's blocks take them.

    Offloaded blocks come first: their backward comes last, which leaves the most time to copy them back. Recomputed
    blocks follow.
    """
    chosen = set(names)
    order = (BlockMemory.OFFLOAD, BlockMemory.RECOMPUTE, BlockMemory.SELECTIVE, BlockMemory.KEEP)
    return tuple(how for how in order if how.value in chosen)
