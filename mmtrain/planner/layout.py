"""What each rank of a pipeline stage's plane (context x tensor parallel) takes of a work. Pure.

Tokens of a microbatch are divided over the cp ranks, and each cp rank's rows again over its tp ranks
between two blocks. Pictures are divided whole over cp (or their patches are), and over tp where each tp rank
holds the whole encoder. Of clips, the tp ranks divide the rows of the prompts, and those of each clip. Every rank
computes the same layout from the metadata.

Shape legend: V image features of a microbatch; Q = cp x tp ranks of the plane.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mmtrain.config import Config
from mmtrain.data.bitfield import Bits, LanguageMask, language_bits
from mmtrain.data.metadata import ImageMeta, IterationMeta
from mmtrain.errors import PlanError
from mmtrain.models.rows import padded, part_of, share_of
from mmtrain.models.spec import Division, ModuleSpec, WorkSize
from mmtrain.models.windows import feature_order, row_order
from mmtrain.planner.batching import DIT, VAE, VISION, Batching
from mmtrain.planner.context import SplitPolicy, split_tokens

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """How the ranks of a plane divide the work of each module."""

    cp: int = 1
    tp: int = 1
    split: SplitPolicy = "balanced"
    block_size: int = 128
    share_patches: bool = False
    """cp ranks divide the patches of each picture, not the pictures."""
    data_encoder: bool = False
    """tp ranks divide the pictures, not the encoder's layers."""
    attention_mask: LanguageMask = "causal"

    @classmethod
    def of(cls, config: Config) -> "Plane":
        """The plane of a job."""
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
        """Ranks of the plane."""
        return self.cp * self.tp

    @property
    def encoder_tp(self) -> int:
        """Ranks that divide the layers of the encoder."""
        return 1 if self.data_encoder else self.tp

    def division(self, module: ModuleSpec) -> Division:
        """How the ranks divide a module."""
        if module.is_whole:
            return Division()
        if module.name == VISION:
            tp, key_groups = self.encoder_tp, self.cp if self.share_patches else 1
        else:
            tp, key_groups = self.tp, self.cp
        return Division(tp=tp, groups=self.size // tp, key_groups=key_groups)

    def fullest_part(self, images: Sequence[ImageMeta]) -> float:
        """Patches of the rank with most of a work's pictures, over an even share; 1 where ranks share each picture."""
        holders = len(self.holders)
        patches = [image.num_patches for image in images]
        if holders == 1 or not patches:
            return 1.0
        own = longest_first(patches, holders)
        return max(sum(patches[i] for i in mine) for mine in own) * holders / sum(patches)

    @property
    def holders(self) -> list[tuple[int, int]]:
        """(cp rank, tp rank) of those that whole pictures are given to; of ranks that share patches the first."""
        return [
            (c, t)
            for c in range(1 if self.share_patches else self.cp)
            for t in range(self.tp if self.data_encoder else 1)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionPart:
    """One rank's part of a vision work."""

    images: tuple[int, ...]
    """Its pictures, as places among the pictures of the work."""
    rows: tuple[int, int] | None
    """[lo, hi) of the rows of these pictures, where cp ranks divide patches; None: all."""
    size: WorkSize
    """Rows and features of this part, without padding."""


class IterationLayout:
    """The division of all works of one iteration."""

    def __init__(self, plane: Plane, batching: Batching, meta: IterationMeta, vision: ModuleSpec | None) -> None:
        self.plane = plane
        self.batching = batching
        self._meta = meta
        self._vision = vision
        self._tokens: dict[int, tuple[Places, ...]] = {}
        self._bits: dict[int, Bits] = {}
        self._parts: dict[int, dict[tuple[int, int], VisionPart]] = {}

    # ------------------------------------------------------------------------------------------ tokens

    def bits(self, microbatch: int) -> Bits:
        """[T] mask words of a microbatch of the language model."""
        if microbatch not in self._bits:
            counts = self._meta.microbatches[microbatch]
            self._bits[microbatch] = language_bits(counts, self.plane.attention_mask)
        return self._bits[microbatch]

    def tokens(self, microbatch: int) -> tuple[Places, ...]:
        """Places of the tokens of each cp rank, ascending, without padding."""
        if microbatch not in self._tokens:
            plane = self.plane
            if plane.cp == 1:
                split: tuple[Places, ...] = (np.arange(self._meta.microbatches[microbatch].num_tokens),)
            else:
                split = split_tokens(self.bits(microbatch), plane.cp, plane.split, plane.block_size)
            self._tokens[microbatch] = split
        return self._tokens[microbatch]

    def places(self, microbatch: int, cp_rank: int) -> Places:
        """Places of the tokens of a cp rank with -1 for its padding, a multiple of tp of them."""
        return pad_places(self.tokens(microbatch)[cp_rank], self.plane.tp)

    # ---------------------------------------------------------------------------------------- pictures

    def vision_part(self, work: int, cp_rank: int, tp_rank: int) -> VisionPart:
        """What one rank computes of a vision work."""
        if work not in self._parts:
            self._parts[work] = self._divide(self.batching.images_of[work])
        return self._parts[work][cp_rank, tp_rank if self.plane.data_encoder else 0]

    def _divide(self, images: Sequence[ImageMeta]) -> dict[tuple[int, int], VisionPart]:
        plane = self.plane
        own = longest_first([image.num_patches for image in images], len(plane.holders))
        parts = {}
        for (c, t), mine in zip(plane.holders, own, strict=True):
            for cp_rank in range(plane.cp) if plane.share_patches else (c,):
                parts[cp_rank, t] = self._part([images[i] for i in mine], mine, cp_rank)
        return parts

    def _part(self, images: Sequence[ImageMeta], places: tuple[int, ...], cp_rank: int) -> VisionPart:
        assert self._vision is not None
        extra = self._vision.extra_rows
        features = sum(image.num_tokens for image in images)
        rows = sum(image.num_patches + extra * image.grid[0] for image in images)
        if not self.plane.share_patches:
            return VisionPart(images=places, rows=None, size=WorkSize(rows=rows, pairs=0, outputs=features))
        low, high = part_of(features, cp_rank, self.plane.cp)
        unit = self._vision.merge**2
        size = WorkSize(rows=(high - low) * unit, pairs=0, outputs=high - low)
        return VisionPart(images=places, rows=(low * unit, high * unit), size=size)

    # ------------------------------------------------------------------------------------------ shapes

    def local_size(self, work: int, cp_rank: int, tp_rank: int) -> WorkSize:
        """Rows and outputs that one rank holds between two stages, padding included.

        Raises: PlanError: clips, which cp ranks do not divide yet.
        """
        entry = self.batching.works[work]
        if self.batching.clips_of:
            return self._clips_size(work)
        if self.batching.modules[entry.module] == VISION:
            size, degree = self.vision_part(work, cp_rank, tp_rank).size, self.plane.encoder_tp
            return WorkSize(rows=share_of(size.rows, degree), pairs=0, outputs=share_of(size.outputs, degree))
        count = len(self.tokens(entry.microbatch)[cp_rank])
        return WorkSize(rows=share_of(count, self.plane.tp), pairs=0, outputs=0)

    def _clips_size(self, work: int) -> WorkSize:
        plane, size = self.plane, self.batching.size_of[work]
        if plane.cp > 1:
            raise PlanError(
                f"a stage's plane has {plane.cp} context-parallel ranks, but these do not divide the works of a "
                "text-to-video model yet; set parallelism.context_parallel_degree = 1"
            )
        module = self.batching.modules[self.batching.works[work].module]
        if plane.tp == 1 or module == VAE:
            return size
        if module == DIT:  # clip by clip, with all of the texts
            rows = sum(share_of(clip.num_tokens, plane.tp) for clip in self.batching.clips_of[work])
            return WorkSize(rows=rows, pairs=0, outputs=0, texts=size.texts, clips=size.clips)
        return WorkSize(rows=share_of(size.rows, plane.tp), pairs=0, outputs=0)

    # ---------------------------------------------------------------------------------------- features

    def patch_places(self, work: int, cp_rank: int, tp_rank: int) -> Places:
        """Places, in the order of travel, of the patches that a rank attends from where cp ranks divide them.

        A rank without a patch has rows of padding, with which it takes part in collectives.
        """
        part = self.vision_part(work, cp_rank, tp_rank)
        assert part.rows is not None and self._vision is not None
        low, high = part.rows
        return np.arange(low, high) if high > low else np.full(self._vision.merge**2, -1, dtype=np.int64)

    def pixel_rows(self, work: int, cp_rank: int, tp_rank: int) -> Places:
        """Which packed patches of a rank's pictures it takes, where cp ranks divide patches."""
        part = self.vision_part(work, cp_rank, tp_rank)
        assert part.rows is not None and self._vision is not None
        return row_order(self._grids(work, part), self._vision.merge, self._vision.window)[slice(*part.rows)]

    def feature_places(self, work: int, cp_rank: int, tp_rank: int) -> Places:
        """Which features of a microbatch the output rows of one rank for a vision work are; -1 for padding."""
        part = self.vision_part(work, cp_rank, tp_rank)
        images = self.batching.images_of[work]
        starts = np.cumsum([self._first_feature[work]] + [image.num_tokens for image in images])
        mine = [np.arange(starts[i], starts[i] + images[i].num_tokens) for i in part.images]
        features = np.concatenate(mine) if mine else np.empty(0, dtype=np.int64)
        if part.rows is not None:
            assert self._vision is not None
            unit = self._vision.merge**2
            order = feature_order(self._grids(work, part), self._vision.merge, self._vision.window)
            features = features[order][part.rows[0] // unit : part.rows[1] // unit]
        degree = self.plane.encoder_tp
        whole = pad_places(features, degree)
        share = len(whole) // degree
        return whole[tp_rank * share : (tp_rank + 1) * share] if degree > 1 else whole

    def _grids(self, work: int, part: VisionPart) -> list[tuple[int, int, int]]:
        images = self.batching.images_of[work]
        return [images[i].grid for i in part.images]

    @cached_property
    def _first_feature(self) -> dict[int, int]:
        """vision work -> place of its first feature among those of its microbatch."""
        first: dict[int, int] = {}
        taken: dict[int, int] = {}
        for work, images in enumerate(self.batching.images_of):
            microbatch = self.batching.works[work].microbatch
            first[work] = taken.get(microbatch, 0)
            taken[microbatch] = first[work] + sum(image.num_tokens for image in images)
        return first


def pad_places(places: Places, degree: int) -> Places:
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
