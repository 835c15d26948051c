"""Images for the chunks of a vision encoder."""

from typing import Any

import torch
from torch import Tensor

from mmtrain.modality.base import first_of
from mmtrain.modality.images import ImagesLayout
from mmtrain.models.batch import by_module
from mmtrain.parallel.feeds.inputs import Arguments, StepInputs
from mmtrain.parallel.row_exchange import KeyValueGather
from mmtrain.spec.spec import ModuleSpec


class ImagesFeed:
    """Pixels for the first stage, grids for all of them."""

    def __init__(self, inputs: StepInputs, module: ModuleSpec) -> None:
        layout = inputs.layout.of_module[module.name]
        assert isinstance(layout, ImagesLayout)
        self._inputs, self._layout, self._module = inputs, layout, module.name
        self._first = first_of(layout.works)
        self._gathers: dict[int, KeyValueGather] = {}

    def __call__(self, first: bool, last: bool, work: int) -> Arguments:
        cp_rank, tp_rank = self._inputs.mesh.place.cp, self._inputs.mesh.place.tp
        part = self._layout.part(work, cp_rank, tp_rank)
        item = self._layout.works[work]
        kwargs: dict[str, Any] = {
            "grids": tuple(item.units[i].grid for i in part.images),
            "attention": self._inputs.attention,
        }
        if part.rows is not None and part.images:
            kwargs |= {"part": part.rows, "gather": self._gather(work)}
        if not first:
            return (), kwargs
        own = self._own(item.owner)
        pixels = [own[self._first[work] + i] for i in part.images]
        x = torch.cat(pixels) if pixels else torch.empty(0)
        if part.rows is not None and pixels:
            x = x[torch.from_numpy(self._layout.pixel_rows(work, cp_rank, tp_rank))]
        return (self._inputs.to_device(x),), kwargs

    def _gather(self, work: int) -> KeyValueGather:
        """Keys of all cp ranks that hold patches of the same images."""
        if work not in self._gathers:
            submesh = self._layout.submesh
            rows_of_ranks = [self._layout.patch_indices(work, c, self._inputs.mesh.place.tp) for c in range(submesh.cp)]
            total = 1 + max(int(rows.max()) for rows in rows_of_ranks)
            self._gathers[work] = self._inputs.key_value_gather(rows_of_ranks, submesh.encoder_row_parts, total)
        return self._gathers[work]

    def _own(self, microbatch: int) -> list[Tensor]:
        """The pixels of the encoder's images of a microbatch."""
        batch = self._inputs.batch
        assert batch is not None, "a rank where a module begins has what the module reads of the batch"
        return by_module(batch.microbatches[microbatch], self._inputs.meta.microbatches[microbatch])[
            self._module
        ].pixels
