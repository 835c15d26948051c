"""Packed documents for the chunks of a language model."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmtrain.modality.bitfield import language_bits
from mmtrain.modality.documents import DocumentsLayout, TextsLayout
from mmtrain.modality.images import ImagesLayout
from mmtrain.modality.metadata import MicrobatchMeta
from mmtrain.modality.positions import token_positions
from mmtrain.modality.submesh import Indices
from mmtrain.models.attention.context import AttentionContext, attention_context
from mmtrain.models.batch import IGNORE_INDEX, by_module, head_arguments, labelled_tokens
from mmtrain.models.chunk import FeatureRows
from mmtrain.parallel.feeds.inputs import Arguments, StepInputs
from mmtrain.parallel.row_exchange import RowExchange
from mmtrain.spec.spec import ModuleSpec


class TokenIdsFeed:
    """Token ids for a part of an embedding."""

    def __init__(self, inputs: StepInputs, module: ModuleSpec) -> None:
        layout = inputs.layout.of_module[module.name]
        assert isinstance(layout, DocumentsLayout)
        self._inputs, self._layout = inputs, layout

    def __call__(self, first: bool, last: bool, work: int) -> Arguments:
        inputs = self._inputs
        assert inputs.batch is not None, "a rank where a module begins has what the module reads of the batch"
        index = self._layout.works[work].work.microbatch
        rows = self._layout.places(index, inputs.mesh.place.cp)
        return (inputs.take(inputs.batch.microbatches[index].input_ids, rows, 0),), {}


class LabelsFeed:
    """Targets for a part of a head, and for the loss that joins all; what is wanted of them."""

    def __init__(self, inputs: StepInputs, module: ModuleSpec) -> None:
        layout = inputs.layout.of_module[module.name]
        assert isinstance(layout, DocumentsLayout)
        self._inputs, self._layout = inputs, layout
        self._wanted = {"want_predictions": inputs.want_predictions}
        if module.vocabulary is None:
            self._wanted["want_losses"] = inputs.want_losses

    def __call__(self, first: bool, last: bool, work: int) -> Arguments:
        index, cp_rank = self._layout.works[work].work.microbatch, self._inputs.mesh.place.cp
        places = self._layout.places(index, cp_rank)[self._layout.labelled(index, cp_rank)]
        return (), {"targets": self._inputs.take(self._inputs.labels[index], places, IGNORE_INDEX), **self._wanted}


class TextsFeed:
    """Token ids for the first stage of a tower of texts, their labelled positions for the last one, attention and
    positions for all."""

    def __init__(self, inputs: StepInputs, module: ModuleSpec) -> None:
        layout = inputs.layout.of_module[module.name]
        assert isinstance(layout, TextsLayout)
        self._inputs, self._layout, self._axes = inputs, layout, module.position_axes
        self._cache: dict[int, tuple[AttentionContext, Tensor]] = {}

    def __call__(self, first: bool, last: bool, work: int) -> Arguments:
        inputs, item = self._inputs, self._layout.works[work]
        if work not in self._cache:
            texts = MicrobatchMeta(documents=item.units)
            bits = language_bits(texts, self._layout.submesh.attention_mask)
            positions = inputs.to_device(torch.from_numpy(token_positions(item.units, self._axes)))
            self._cache[work] = attention_context(bits, choices=inputs.attention), positions
        attention, position_ids = self._cache[work]
        kwargs: dict[str, Any] = {"attention": attention, "position_ids": position_ids}
        args: tuple[Any, ...] = ()
        own, index = self._layout.tokens(work), item.work.microbatch
        if first:
            assert inputs.batch is not None, "a rank where a module begins has what the module reads of the batch"
            args = (inputs.to_device(inputs.batch.microbatches[index].input_ids[own]),)
        if last:
            labelled = labelled_tokens([inputs.labels[index][own]])[0]
            kwargs["labelled"] = inputs.to_device(torch.from_numpy(labelled))
        return args, kwargs


class PairsFeed:
    """What is wanted of the loss of pairs, whose inputs come from towers."""

    def __init__(self, inputs: StepInputs, module: ModuleSpec) -> None:
        self._wanted = {"want_predictions": inputs.want_predictions, "want_losses": inputs.want_losses}

    def __call__(self, first: bool, last: bool, work: int) -> Arguments:
        return (), self._wanted


class DocumentsFeed:
    """Token ids for the first stage, labels for the last one, attention and positions for all."""

    def __init__(self, inputs: StepInputs, module: ModuleSpec) -> None:
        layout = inputs.layout.of_module[module.name]
        assert isinstance(layout, DocumentsLayout)
        self._inputs, self._layout = inputs, layout
        self._axes = module.position_axes
        self._embeds = module.layers[0].name == "embed"
        self._chooses_rows = module.layers[-1].output_rows == "outputs"
        self._cache: dict[int, tuple[AttentionContext, Tensor]] = {}

    def __call__(self, first: bool, last: bool, work: int) -> Arguments:
        inputs = self._inputs
        index = self._layout.works[work].work.microbatch
        rows = self._layout.places(index, inputs.mesh.place.cp)
        if index not in self._cache:
            self._cache[index] = self._attention(index, rows), self._position_ids(index, rows)
        attention, position_ids = self._cache[index]
        kwargs: dict[str, Any] = {"attention": attention, "position_ids": position_ids}
        args: tuple[Any, ...] = ()
        if first:
            assert inputs.batch is not None, "a rank where a module begins has what the module reads of the batch"
            microbatch = inputs.batch.microbatches[index]
            args = (inputs.take(microbatch.input_ids, rows, 0),) if self._embeds else ()
            of_modules = by_module(microbatch, inputs.meta.microbatches[index])
            kwargs["fills"] = {
                name: self._fill(work, rows, name, of_modules[name].slots.numpy())
                for name in inputs.layout.of_module
                if name in of_modules
            }
        if last and self._chooses_rows:
            kwargs["labelled"] = inputs.to_device(torch.from_numpy(self._layout.labelled(index, inputs.mesh.place.cp)))
        elif last:  # found on the host: a device would make it wait
            of_head = head_arguments(inputs.at(inputs.labels[index], rows, IGNORE_INDEX))
            kwargs |= {name: inputs.to_device(tensor) for name, tensor in of_head.items()}
            kwargs |= {"want_predictions": inputs.want_predictions, "want_losses": inputs.want_losses}
        return args, kwargs

    def _attention(self, microbatch: int, rows: Indices) -> AttentionContext:
        gather = None
        submesh = self._layout.submesh
        if submesh.cp > 1:
            rows_of_ranks = list(self._layout.tokens(microbatch))
            total = self._inputs.meta.microbatches[microbatch].num_tokens
            gather = self._inputs.key_value_gather(rows_of_ranks, submesh.row_parts, total)
        return attention_context(
            self._layout.bits(microbatch), rows=rows, gather=gather, choices=self._inputs.attention
        )

    def _position_ids(self, microbatch: int, rows: Indices) -> Tensor:
        """The positions of this rank's tokens; padding has 0."""
        documents = self._inputs.meta.microbatches[microbatch].documents
        return self._inputs.take(torch.from_numpy(token_positions(documents, self._axes)), rows, 0)

    def _fill(self, work: int, rows: Indices, module: str, image_slots: Indices) -> FeatureRows:
        """Which of this rank's rows are tokens of an encoder, and the exchange that brings their features."""
        inputs, submesh = self._inputs, self._layout.submesh
        tp_rank, parts = inputs.mesh.place.tp, submesh.row_parts
        # Ranks that divide neither rows nor images have equal features.
        over_tp = parts > 1 or submesh.data_encoder
        if submesh.cp == 1 and not over_tp:
            return FeatureRows(inputs.to_device(torch.from_numpy(image_slots)))
        own_rows = np.split(rows, parts)[tp_rank % parts]
        feature = np.full(1 + int(max(image_slots.max(), own_rows.max())), -1, dtype=np.int64)
        feature[image_slots] = np.arange(len(image_slots))
        needed_features = np.where(own_rows >= 0, feature[np.maximum(own_rows, 0)], -1)
        slots = np.flatnonzero(needed_features >= 0)
        feeding = [other for other in self._layout.works[work].work.after if self._module_of(other) == module]
        features_of_ranks = [
            np.concatenate([self._features(other, c, t) for other in feeding])
            for c in range(submesh.cp)
            for t in (range(submesh.tp) if over_tp else (tp_rank,))
        ]
        group, copies = (inputs.mesh.submesh_group, submesh.tp // parts) if over_tp else (inputs.mesh.cp_group, 1)
        assert group is not None
        exchange = RowExchange(group, features_of_ranks, needed_features[slots], inputs.to_device, copies=copies)
        return FeatureRows(inputs.to_device(torch.from_numpy(slots)), exchange)

    def _module_of(self, work: int) -> str:
        return self._inputs.layout.batching.module_of(work)

    def _features(self, work: int, cp_rank: int, tp_rank: int) -> Indices:
        layout = self._inputs.layout.of_module[self._module_of(work)]
        assert isinstance(layout, ImagesLayout)
        return layout.feature_indices(work, cp_rank, tp_rank)
