"""The rows of an encoder's images on one rank: which it computes, what pads them, and what it hands on.

Context-parallel ranks compute a part of the rows each, and tensor-parallel ranks divide that part between two blocks
(`RowSharding`). The encoder calls these methods where rows enter, where they become fewer, and where they leave. On one
rank the part is the whole, and nothing is padded.

Shape legend: R rows of the part, padding included if it is empty; r this rank's share of them; D columns; V features.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from mmtrain.errors import DataError
from mmtrain.families.shapes import VisionShape
from mmtrain.families.windows import Indices
from mmtrain.models.adapters import RankRows
from mmtrain.models.attention.context import AttentionChoices, Gather, attention_context
from mmtrain.models.projector import Grid
from mmtrain.models.transfer import to_device
from mmtrain.spec.rows import RowSharding, padded, share_of


@dataclass(frozen=True, kw_only=True)
class VisionRows(RankRows):
    """The rows of a vision stage on this rank, and their division."""

    where: str
    """Module and layers, for errors."""
    edges: Indices
    """[V + 1] int64: the first row of each feature of all images, then the number of all rows."""
    lo: int
    hi: int
    """The part is the rows [lo, hi) of all images, in their order of travel."""
    travels: bool
    """Whether pixels come and features leave in the order of travel, instead of that of the images."""
    count: int
    """R. An empty part has padding for one token, with which it takes part in collectives."""
    sharding: RowSharding

    @classmethod
    def of(
        cls,
        shape: VisionShape,
        grids: tuple[Grid, ...],
        edges: Indices,
        part: tuple[int, int] | None,
        sharding: RowSharding,
        *,
        where: str,
        total: int,
        gather: Gather | None,
        attention: AttentionChoices,
    ) -> "VisionRows":
        """The rows of some images. Args: part, gather, attention: as of `VisionChunk.forward`. total: of all rows.

        Raises: DataError: the part is not one of whole features.
        """
        lo, hi = part or (0, total)
        if (lo, hi) != (0, total) and not (shape.packed and lo <= hi and np.isin((lo, hi), edges).all()):
            raise DataError(
                f"{where}: a part {lo}..{hi} of {total} rows was asked for; it must be whole features of "
                f"{shape.patches_per_token} rows, and all rows of an encoder of a fixed size"
            )
        count = hi - lo if lo < hi else shape.patches_per_token
        indices = np.full(padded(count, sharding.degree), -1, dtype=np.int64)
        indices[: hi - lo] = np.arange(lo, hi)
        return cls(
            shape=shape,
            grids=grids,
            indices=indices,
            attend=partial(attention_context, rows=indices, gather=gather, choices=attention),
            where=where,
            edges=edges,
            lo=lo,
            hi=hi,
            travels=part is not None,
            count=count,
            sharding=sharding,
        )

    @property
    def empty(self) -> bool:
        """Whether this rank has no row of any image, and computes padding alone."""
        return self.lo == self.hi

    # ------------------------------------------------------------------------------------------ entering

    def after_pooling(self) -> "VisionRows":
        """The rows of a stage that begins with one row for each feature."""
        num_features = int(((self.lo <= self.edges) & (self.edges < self.hi)).sum())
        return replace(self, count=1 if self.empty else num_features)

    def check(self, num_rows: int, *, pixels: bool) -> None:
        """Refuses another number of rows than must arrive. Args: pixels: they are those of images.

        Raises: DataError.
        """
        expected = 0 if self.empty else self.count
        if not pixels:
            expected = share_of(expected, self.sharding.degree)
        elif not self.shape.packed:
            expected = len(self.grids)
        if num_rows != expected:
            raise DataError(f"{self.where}: {num_rows} rows arrived, but {len(self.grids)} images have {expected}")

    def pixels(self, x: Tensor) -> Tensor:
        """Pixels as they arrived, in the order of travel; those of padding are 0."""
        if self.empty:
            return x.new_zeros(self.count, self.shape.patch_dim)
        if self.travels or not self.shape.window:
            return x
        return x.index_select(0, to_device(self.shape.row_order(self.grids), x.device))

    def arrived(self, x_rD: Tensor) -> Tensor:
        """[r, D] of the stage before; padding, which does not travel, is added again."""
        if not self.empty:
            return x_rD
        return nn.functional.pad(x_rD, (0, 0, 0, share_of(self.count, self.sharding.degree)))

    # ------------------------------------------------------------------------------------------- inside

    def shard(self, x_RD: Tensor) -> Tensor:
        """[R, D], equal on all tensor-parallel ranks -> [r, D]."""
        x_rD: Tensor = self.sharding.shard(x_RD)
        return x_rD

    def whole(self, x_rD: Tensor) -> Tensor:
        """[r, D] -> [R, D] on all tensor-parallel ranks."""
        x_RD: Tensor = self.sharding.gather(x_rD)[: self.count]
        return x_RD

    def with_tokens(self, x_RD: Tensor) -> Tensor:
        """The rows of sounds that become tokens: without those behind the last one of each sound."""
        unit, start, runs = self.shape.patches_per_token, 0, []
        for _, _, w in self.grids:
            end = start + w // unit * unit
            runs.append(x_RD[max(start, self.lo) - self.lo : max(self.lo, min(end, self.hi)) - self.lo])
            start += w
        return x_RD if self.empty or sum(map(len, runs)) == len(x_RD) else torch.cat(runs)

    def pooled(self, x_rD: Tensor) -> tuple[Tensor, "VisionRows"]:
        """This rank's share of the means of the rows of each feature, and the rows that these are."""
        means = self.with_tokens(self.whole(x_rD)).unflatten(0, (-1, self.shape.pool)).mean(1)
        return self.shard(means), replace(self, count=len(means))

    # ------------------------------------------------------------------------------------------- leaving

    def in_order(self, x_VL: Tensor) -> Tensor:
        """Features in the order in which they leave."""
        if self.travels or not self.shape.window:
            return x_VL
        back = np.argsort(self.shape.feature_order(self.grids))
        return x_VL.index_select(0, to_device(back, x_VL.device))

    def leaving(self, x: Tensor) -> Tensor:
        """What the next stage gets: no padding of an empty part."""
        return x[:0] if self.empty else x
