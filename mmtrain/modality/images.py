"""Images (and audio as images of one row), as a vision encoder consumes them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import ClassVar

import numpy as np

from mmtrain.modality.base import Modality, Units, Weigh, WorkItem, first_of, forward_rates
from mmtrain.modality.metadata import ImageMeta, IterationMeta, MicrobatchMeta
from mmtrain.modality.submesh import Indices, Submesh, pad_indices
from mmtrain.modality.token_split import longest_first
from mmtrain.spec.layer import Division
from mmtrain.spec.rows import part_of, share_of
from mmtrain.spec.spec import ModuleSpec, images_work
from mmtrain.spec.work_size import WorkSize


class Images(Modality):
    """The images (or sounds) of a microbatch's documents that one encoder reads."""

    parts = "patches"
    remedy = "the model has no encoder for it; add [model.encoder], or [model.modules.NAME] of a further encoder"
    counts: ClassVar[Mapping[str, str]] = {"image features": "outputs"}

    def __init__(self, module: str = "vision") -> None:
        """Args: module: name of the encoder; empty: all of them."""
        self._module = module
        self.works = module  # type: ignore[misc]  # of each encoder another one
        self.item = "image" if module in ("", "vision") else f"{module} item"  # type: ignore[misc]

    def units(self, microbatch: MicrobatchMeta) -> Units:
        """The encoder's images of a microbatch, in the order of their tokens."""
        return self._read(microbatch.images)

    def deferred(self, microbatch: MicrobatchMeta) -> Units:
        """The encoder's images of deferred documents."""
        return self._read(image for document in microbatch.deferred for image in document.images)

    def _read(self, images: Iterable[ImageMeta]) -> Units:
        return tuple(image for image in images if self._module in ("", image.module))

    def size(self, module: ModuleSpec, units: Sequence[ImageMeta]) -> WorkSize:
        """Patches, pairs of patches of one frame, and merged tokens."""
        return images_work(module, [image.grid for image in units])

    def weigh(self, module: ModuleSpec) -> Weigh:
        """The FLOPs of an image, from its grid of patches."""
        rates = forward_rates(module)
        of_grid = cache(lambda grid: rates(images_work(module, [grid])))
        return lambda image: of_grid(image.grid)

    def unit_counts(self, units: Sequence[ImageMeta]) -> dict[str, int]:
        """Rows that the encoder makes."""
        return {"image features": sum(image.num_features for image in units)}

    def division(self, submesh: Submesh, module: ModuleSpec) -> Division:
        """The division of layers over tp ranks (unless each has the encoder), and of images or patches over others."""
        tp = submesh.encoder_tp
        return Division(
            tp=tp,
            whole_rows=submesh.whole_rows,
            groups=submesh.size // tp,
            key_groups=submesh.cp if submesh.share_patches else 1,
        )

    def priced_size(self, submesh: Submesh, module: ModuleSpec, item: WorkItem) -> WorkSize:
        """The largest counts of a rank, times the ranks; the work's own counts if ranks divide each image."""
        holders = len(submesh.holders)
        if holders == 1 or not item.units:
            return item.size
        sizes = [
            self.size(module, [item.units[i] for i in indices])
            for indices in longest_first([image.num_patches for image in item.units], holders)
        ]
        return WorkSize(**{f.name: holders * max(getattr(size, f.name) for size in sizes) for f in fields(WorkSize)})

    def layout(
        self, submesh: Submesh, module: ModuleSpec, works: dict[int, WorkItem], meta: IterationMeta
    ) -> "ImagesLayout":
        """The division of whole images over the ranks, or of the patches of each image over cp ranks."""
        return ImagesLayout(submesh, module, works)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesPart:
    """One rank's part of a work."""

    images: tuple[int, ...]
    """Indices of its images among the images of the work."""
    rows: tuple[int, int] | None
    """[lo, hi) of the rows of these images, if cp ranks divide patches; None: all rows."""
    size: WorkSize
    """Rows and features of this part, without padding."""
    features: tuple[int, int] | None = None
    """[lo, hi) of their features, if cp ranks divide patches."""


class ImagesLayout:
    """The division of an encoder's works.

    Shape legend: V image features of a microbatch; Q = cp x tp ranks of the submesh.
    """

    def __init__(self, submesh: Submesh, module: ModuleSpec, works: dict[int, WorkItem]) -> None:
        self.submesh = submesh
        self._module = module
        self.works = works
        self._parts: dict[int, dict[tuple[int, int], ImagesPart]] = {}

    def local_size(self, work: int, cp_rank: int, tp_rank: int) -> WorkSize:
        """The size of one rank's rows and outputs between two stages, padding included."""
        size, degree = self.part(work, cp_rank, tp_rank).size, self.submesh.encoder_row_parts
        return WorkSize(rows=share_of(size.rows, degree), pairs=0, outputs=share_of(size.outputs, degree))

    def part(self, work: int, cp_rank: int, tp_rank: int) -> ImagesPart:
        """The part of a work that one rank computes."""
        if work not in self._parts:
            self._parts[work] = self._divide(self.works[work].units)
        return self._parts[work][cp_rank, tp_rank if self.submesh.data_encoder else 0]

    def _divide(self, images: Sequence[ImageMeta]) -> dict[tuple[int, int], ImagesPart]:
        submesh = self.submesh
        images_of_ranks = longest_first([image.num_patches for image in images], len(submesh.holders))
        parts = {}
        for (c, t), indices in zip(submesh.holders, images_of_ranks, strict=True):
            for cp_rank in range(submesh.cp) if submesh.share_patches else (c,):
                parts[cp_rank, t] = self._part_of([images[i] for i in indices], indices, cp_rank)
        return parts

    def _part_of(self, images: Sequence[ImageMeta], indices: tuple[int, ...], cp_rank: int) -> ImagesPart:
        extra = self._module.extra_rows
        features = sum(image.num_features for image in images)
        rows = sum(image.num_patches + extra * image.grid[0] for image in images)
        if not self.submesh.share_patches:
            return ImagesPart(images=indices, rows=None, size=WorkSize(rows=rows, pairs=0, outputs=features))
        low, high = part_of(features, cp_rank, self.submesh.cp)
        first, end = map(int, self._module.feature_rows([image.grid for image in images])[[low, high]])
        size = WorkSize(rows=end - first, pairs=0, outputs=high - low)
        return ImagesPart(images=indices, rows=(first, end), size=size, features=(low, high))

    def patch_indices(self, work: int, cp_rank: int, tp_rank: int) -> Indices:
        """[rows] int64: indices, in the order of the encoder's rows, of a rank's queries, if cp ranks divide patches.

        A rank without a patch has padding rows (-1), with which it takes part in collectives.
        """
        part = self.part(work, cp_rank, tp_rank)
        assert part.rows is not None
        low, high = part.rows
        return np.arange(low, high) if high > low else np.full(self._module.patches_per_token, -1, dtype=np.int64)

    def pixel_rows(self, work: int, cp_rank: int, tp_rank: int) -> Indices:
        """[rows] int64: indices of a rank's packed patches among those of its images, if cp ranks divide patches."""
        part = self.part(work, cp_rank, tp_rank)
        assert part.rows is not None
        return self._module.row_order(self._grids(work, part))[slice(*part.rows)]

    def feature_indices(self, work: int, cp_rank: int, tp_rank: int) -> Indices:
        """[outputs] int64: for each output row of one rank for a work, its feature of its owner; -1: padding."""
        part = self.part(work, cp_rank, tp_rank)
        images = self.works[work].units
        starts = np.cumsum([self._first_feature[work]] + [image.num_features for image in images])
        of_images = [np.arange(starts[i], starts[i] + images[i].num_features) for i in part.images]
        features = np.concatenate(of_images) if of_images else np.empty(0, dtype=np.int64)
        if part.features is not None:
            features = features[self._module.feature_order(self._grids(work, part))][slice(*part.features)]
        degree = self.submesh.encoder_row_parts
        padded_features = pad_indices(features, degree)
        num_local = len(padded_features) // degree
        return padded_features[tp_rank * num_local : (tp_rank + 1) * num_local] if degree > 1 else padded_features

    def _grids(self, work: int, part: ImagesPart) -> list[tuple[int, int, int]]:
        images = self.works[work].units
        return [images[i].grid for i in part.images]

    @cached_property
    def _first_feature(self) -> dict[int, int]:
        """The index of each work's first feature among those of its microbatch."""
        return first_of(self.works, lambda images: sum(image.num_features for image in images))
