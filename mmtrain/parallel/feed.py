"""The arguments of each chunk's forward in one step, taken from the batch, its metadata and this rank's part of it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmtrain.data.batch import IGNORE_INDEX, Batch, Microbatch
from mmtrain.data.metadata import IterationMeta
from mmtrain.models.attention.context import AttentionContext, Backend, attention_context
from mmtrain.parallel.context import KeyValueGather, RowExchange
from mmtrain.parallel.mesh import Mesh
from mmtrain.planner.batching import VISION
from mmtrain.planner.layout import IterationLayout, pad_places
from mmtrain.planner.partition import Partition

Places = npt.NDArray[np.int64]


class StepFeed:
    """(stage, work) -> (args, kwargs) for `PipelineScheduleRuntime.step`.

    Only what a stage needs must be there: pixels and token ids for the modules' first stages, labels for the last
    language stage; lengths and grids come from the metadata.
    """

    def __init__(
        self,
        partition: Partition,
        layout: IterationLayout,
        meta: IterationMeta,
        mesh: Mesh,
        *,
        batch: Batch | None,
        labels: Sequence[Tensor] | None,
        attention_backend: Backend = "auto",
        want_predictions: bool = False,
    ) -> None:
        self._partition = partition
        self._layout = layout
        self._batching = layout.batching
        self._plane = layout.plane
        self._meta = meta
        self._mesh = mesh
        self._device = mesh.device
        self._batch = batch
        self._labels = labels
        self._backend: Backend = attention_backend
        self._want_predictions = want_predictions
        self._ranks = [(c, t) for c in range(self._plane.cp) for t in range(self._plane.tp)]
        self._first_image: dict[int, int] = {}
        """vision work -> place of its first picture in its microbatch."""
        taken: dict[int, int] = {}
        for work, images in enumerate(self._batching.images_of):
            microbatch = self._batching.works[work].microbatch
            self._first_image[work] = taken.get(microbatch, 0)
            taken[microbatch] = self._first_image[work] + len(images)
        self._language_cache: dict[int, tuple[AttentionContext, Tensor]] = {}
        self._gathers: dict[int, KeyValueGather] = {}

    def __call__(self, stage: int, work: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        place = self._partition.stages[stage]
        if place.module == VISION:
            return self._vision(place.first, work)
        return self._language(place.first, place.last, work)

    # ------------------------------------------------------------------------------------------ vision

    def _vision(self, first: bool, work: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        part = self._layout.vision_part(work, self._mesh.place.cp, self._mesh.place.tp)
        images = self._batching.images_of[work]
        grids = tuple(images[i].grid for i in part.images)
        kwargs: dict[str, Any] = {"grids": grids, "backend": self._backend}
        if part.rows is not None and part.images:
            kwargs |= {"part": part.rows, "gather": self._patch_gather(work)}
        args: tuple[Any, ...] = ()
        if first:
            microbatch = self._microbatch(work)
            start = self._first_image[work]
            pixels = [microbatch.pixel_values[start + i] for i in part.images]
            x = torch.cat(pixels) if pixels else torch.empty(0)
            if part.rows is not None and pixels:
                x = x[torch.from_numpy(self._layout.pixel_rows(work, self._mesh.place.cp, self._mesh.place.tp))]
            args = (self._to_device(x),)
        return args, kwargs

    def _patch_gather(self, work: int) -> KeyValueGather:
        """Keys of all cp ranks that hold patches of the same pictures."""
        if work not in self._gathers:
            held = [self._layout.patch_places(work, c, self._mesh.place.tp) for c in range(self._plane.cp)]
            total = 1 + max(int(places.max()) for places in held)
            self._gathers[work] = self._key_value_gather(held, self._plane.encoder_tp, total)
        return self._gathers[work]

    # ---------------------------------------------------------------------------------------- language

    def _language(self, first: bool, last: bool, work: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        index = self._batching.works[work].microbatch
        places = self._layout.places(index, self._mesh.place.cp)
        if index not in self._language_cache:
            self._language_cache[index] = self._attention(index, places), self._position_ids(index, places)
        attention, position_ids = self._language_cache[index]
        kwargs: dict[str, Any] = {"attention": attention, "position_ids": position_ids}
        args: tuple[Any, ...] = ()
        if first:
            microbatch = self._microbatch(work)
            args = (self._take(microbatch.input_ids, places, 0),)
            if len(microbatch.image_slots):
                kwargs |= self._slots(work, places, microbatch.image_slots.numpy())
        if last:
            assert self._labels is not None
            kwargs["labels"] = self._take(self._labels[index], places, IGNORE_INDEX)
            kwargs["want_predictions"] = self._want_predictions
        return args, kwargs

    def _attention(self, microbatch: int, places: Places) -> AttentionContext:
        gather = None
        if self._plane.cp > 1:
            held = list(self._layout.tokens(microbatch))
            gather = self._key_value_gather(held, self._plane.tp, self._meta.microbatches[microbatch].num_tokens)
        return attention_context(self._layout.bits(microbatch), rows=places, gather=gather, backend=self._backend)

    def _position_ids(self, microbatch: int, places: Places) -> Tensor:
        """Positions restart with each document; padding has 0."""
        lengths = self._meta.microbatches[microbatch].lengths
        return self._take(torch.cat([torch.arange(n) for n in lengths]), places, 0)

    def _slots(self, work: int, places: Places, image_slots: Places) -> dict[str, Any]:
        """Which of this rank's rows are image tokens, and the exchange that brings their features."""
        if self._plane.size == 1:
            return {"slots": self._to_device(torch.from_numpy(image_slots))}
        share = len(places) // self._plane.tp
        mine = places[self._mesh.place.tp * share : (self._mesh.place.tp + 1) * share]
        feature = np.full(1 + int(max(image_slots.max(), mine.max())), -1, dtype=np.int64)
        feature[image_slots] = np.arange(len(image_slots))
        wanted = np.where(mine >= 0, feature[np.maximum(mine, 0)], -1)
        slots = np.flatnonzero(wanted >= 0)
        held = [
            np.concatenate([self._layout.feature_places(other, c, t) for other in self._batching.works[work].after])
            for c, t in self._ranks
        ]
        assert self._mesh.plane_group is not None
        exchange = RowExchange(self._mesh.plane_group, held, wanted[slots], self._device)
        return {"slots": self._to_device(torch.from_numpy(slots)), "exchange": exchange}

    # ----------------------------------------------------------------------------------------- helpers

    def _key_value_gather(self, held: Sequence[Places], degree: int, total: int) -> KeyValueGather:
        """Args: held: places of each cp rank. degree: a rank pads its rows to a multiple of it."""
        assert self._mesh.cp_group is not None
        padded = [pad_places(places, degree) for places in held]
        return KeyValueGather(RowExchange(self._mesh.cp_group, padded, np.arange(total), self._device))

    def _microbatch(self, work: int) -> Microbatch:
        assert self._batch is not None, "a rank where a module begins has what the module reads of the batch"
        return self._batch.microbatches[self._batching.works[work].microbatch]

    def _take(self, values: Tensor, places: Places, padding: int) -> Tensor:
        """values at the places, with `padding` for the places -1."""
        index = torch.from_numpy(places)
        taken = values[index.clamp(min=0)].masked_fill(index < 0, padding)
        return self._to_device(taken)

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)
