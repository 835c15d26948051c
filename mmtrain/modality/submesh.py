"""How the ranks of a pipeline stage (context x tensor parallel) divide its work."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmtrain.config.config import Config
from mmtrain.modality.bitfield import LanguageMask
from mmtrain.modality.token_split import SplitPolicy
from mmtrain.spec.rows import padded

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submesh:
    """How the ranks of a submesh divide the work of each module."""

    cp: int = 1
    tp: int = 1
    split: SplitPolicy = "balanced"
    block_size: int = 128
    share_patches: bool = False
    """cp ranks divide the patches of each image, not the images."""
    data_encoder: bool = False
    """tp ranks divide the images, not the encoder's layers."""
    attention_mask: LanguageMask = "causal"

    @classmethod
    def of(cls, config: Config) -> "Submesh":
        """The submesh of a job."""
        section = config.parallelism
        return cls(
            cp=section.context_parallel_degree,
            tp=section.tensor_parallel_degree,
            split=section.context_parallel_split,
            block_size=section.context_parallel_block_size,
            share_patches=section.encoder_context_parallel == "patches" and section.context_parallel_degree > 1,
            data_encoder=config.data_encoder,
            attention_mask=config.model.language.attention_mask,
        )

    @property
    def size(self) -> int:
        """Ranks of the submesh."""
        return self.cp * self.tp

    @property
    def encoder_tp(self) -> int:
        """Ranks that divide the layers of the encoder."""
        return 1 if self.data_encoder else self.tp

    @property
    def holders(self) -> list[tuple[int, int]]:
        """(cp rank, tp rank) of those that whole images are given to; of ranks that share patches the first."""
        return [
            (c, t)
            for c in range(1 if self.share_patches else self.cp)
            for t in range(self.tp if self.data_encoder else 1)
        ]


def pad_indices(places: Indices, degree: int) -> Indices:
    """The places with -1 behind them, so that `degree` divides their number."""
    missing = padded(len(places), degree) - len(places)
    return np.concatenate([places, np.full(missing, -1, dtype=np.int64)]) if missing else places


def longest_first(weights: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """Items of each part, ascending: heaviest first, each to the lightest part so far (LPT); a part may be empty.

    Source: Graham, Bounds on multiprocessing timing anomalies, 1969.
    """
    loads = [0] * parts
    taken: list[list[int]] = [[] for _ in range(parts)]
    for item in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        lightest = min(range(parts), key=lambda p: (loads[p], p))
        loads[lightest] += weights[item]
        taken[lightest].append(item)
    return [tuple(sorted(items)) for items in taken]
