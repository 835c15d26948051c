"""The arguments of each chunk's forward in one step, taken from the batch and its metadata."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmtrain.data.batch import Batch
from mmtrain.data.metadata import IterationMeta
from mmtrain.planner.batching import Batching
from mmtrain.planner.partition import Partition


class StepFeed:
    """(stage, work) -> (args, kwargs) for `PipelineScheduleRuntime.step`.

    Only what a stage needs must be there: pixels and token ids for first stages (the replica's
    leader), labels for the last language stage; lengths and grids come from the metadata.
    """

    def __init__(
        self,
        partition: Partition,
        batching: Batching,
        meta: IterationMeta,
        device: torch.device,
        *,
        batch: Batch | None,
        labels: Sequence[Tensor] | None,
        want_predictions: bool = False,
    ) -> None:
        self._partition = partition
        self._batching = batching
        self._meta = meta
        self._device = device
        self._batch = batch
        self._labels = labels
        self._want_predictions = want_predictions
        self._first_image: dict[int, int] = {}
        """vision work -> place of its first picture in its microbatch."""
        taken: dict[int, int] = {}
        for work, images in enumerate(batching.images_of):
            microbatch = batching.works[work].microbatch
            self._first_image[work] = taken.get(microbatch, 0)
            taken[microbatch] = self._first_image[work] + len(images)
        self._positions: dict[int, Tensor] = {}

    def __call__(self, stage: int, work: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        place = self._partition.stages[stage]
        if place.module == "vision":
            return self._vision(place.first, work)
        return self._language(place.first, place.last, work)

    def _vision(self, first: bool, work: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        images = self._batching.images_of[work]
        args: tuple[Any, ...] = ()
        if first:
            assert self._batch is not None, "the first vision stage is on the leader, which has the batch"
            microbatch = self._batch.microbatches[self._batching.works[work].microbatch]
            start = self._first_image[work]
            pixels = microbatch.pixel_values[start : start + len(images)]
            args = (self._to_device(torch.cat(pixels)),)
        return args, {"grids": tuple(image.grid for image in images)}

    def _language(self, first: bool, last: bool, work: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        index = self._batching.works[work].microbatch
        lengths = self._meta.microbatches[index].lengths
        kwargs: dict[str, Any] = {"lengths": lengths, "position_ids": self._position_ids(index)}
        args: tuple[Any, ...] = ()
        if first:
            assert self._batch is not None, "the first language stage is on the leader, which has the batch"
            microbatch = self._batch.microbatches[index]
            args = (self._to_device(microbatch.input_ids),)
            if len(microbatch.image_slots):
                kwargs["slots"] = self._to_device(microbatch.image_slots)
        if last:
            assert self._labels is not None
            kwargs["labels"] = self._to_device(self._labels[index])
            kwargs["want_predictions"] = self._want_predictions
        return args, kwargs

    def _position_ids(self, microbatch: int) -> Tensor:
        """[T] int64: positions restart with each document."""
        found = self._positions.get(microbatch)
        if found is None:
            lengths = self._meta.microbatches[microbatch].lengths
            found = self._to_device(torch.cat([torch.arange(n) for n in lengths]))
            self._positions[microbatch] = found
        return found

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)
