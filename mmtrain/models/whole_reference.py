"""A whole model as transformers' own class computes it: the truth of a layout, outside of our code."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence

from mmtrain.config.model import ModelConfig
from mmtrain.modality.metadata import DocumentMeta, MicrobatchMeta
from mmtrain.modality.positions import token_positions
from mmtrain.models.adapters import vision_adapter
from mmtrain.models.batch import IGNORE_INDEX, Microbatch
from mmtrain.models.fused_qkv import from_head_major, is_fused
from mmtrain.models.loss import LossOutput
from mmtrain.models.reference import ReferenceModel
from mmtrain.models.trainable import adapter_names, is_adapter, merged_weight, plain_name
from mmtrain.models.unused import unused_weights
from mmtrain.models.whole import class_inputs, empty_whole, in_class, only_encoder, token_types, whole_config
from mmtrain.spec.module_sizes import whole_kind
from mmtrain.spec.spec import ModelSpec
from mmtrain.spec.vision_shapes import vision_shape


class WholeModel(ReferenceModel):
    """The weights of the one-process model in transformers' class, which is called once for each document, or group of
    pairs.

    Gradients reach these weights, adapters included.
    """

    def __init__(self, model: ModelConfig, spec: ModelSpec, *, seed: int) -> None:
        super().__init__(model, spec, seed=seed)
        self.theirs, self._kind = empty_whole(whole_config(model, {})), whole_kind(model)
        encoder = only_encoder(model)
        shape = vision_shape(model, encoder)
        self._fused = vision_adapter(shape.model_type).fused_qkv, shape.num_heads
        self._lora = model.lora
        unused = unused_weights(model, seed, encoder)
        self._unused = {in_class(self._kind, f"{encoder}.{name}"): tensor for name, tensor in unused.items()}
        self._sounds = hasattr(self.theirs.config, "audio_config")

    def microbatch(self, tensors: Microbatch, counts: MicrobatchMeta, want_predictions: bool = False) -> LossOutput:
        """The output of one microbatch, document by document."""
        weights, pixels = self._their_weights(), iter(tensors.pixel_values)
        of_documents = tensors.input_ids.split(counts.lengths), tensors.labels.split(counts.lengths)
        logits = [
            self._logits(weights, document, ids, [next(pixels) for _ in document.images])[labels != IGNORE_INDEX]
            for document, ids, labels in zip(counts.documents, *of_documents, strict=True)
        ]
        labels = tensors.labels[tensors.labels != IGNORE_INDEX]
        logits_LV = torch.cat(logits)
        return LossOutput(self.loss(logits_LV, labels), logits_LV.argmax(dim=-1) if want_predictions else None)

    def pairs(self, group: list[tuple[Microbatch, MicrobatchMeta]], want_predictions: bool = False) -> LossOutput:
        """The output for microbatches that have one loss, their captions padded behind."""
        captions = [
            ids
            for tensors, counts in group
            for ids, document in zip(tensors.input_ids.split(counts.lengths), counts.documents, strict=True)
            if document.num_targets
        ]
        if not captions:  # of blank microbatches alone
            return super().pairs(group, want_predictions)
        inputs: dict[str, Any] = {
            "input_ids": pad_sequence(captions, batch_first=True),
            "attention_mask": pad_sequence([torch.ones_like(ids) for ids in captions], batch_first=True),
            "pixel_values": torch.cat([pixels for tensors, _ in group for pixels in tensors.pixel_values]),
            "return_loss": True,
        }
        output = functional_call(self.theirs, self._their_weights(), (), inputs)
        embeddings = torch.stack([output.image_embeds, output.text_embeds]).detach()
        return LossOutput(output.loss * len(captions), embeddings if want_predictions else None)

    def _their_weights(self) -> dict[str, Tensor]:
        """The values of their weights by name, on the graph of our weights: without adapters, and with their order of
        rows."""
        ours: dict[str, Tensor] = dict(self.weights())
        found = {}
        for name, weight in ours.items():
            if is_adapter(name):
                continue
            plain = plain_name(name)
            names = adapter_names(name)
            if names.down in ours:
                weight = merged_weight(weight, ours, names, self._lora)
            if is_fused(plain, self._fused[0]):
                weight = from_head_major(weight, self._fused[1])
            found[in_class(self._kind, plain)] = weight
        if self.contrast is None:  # a head that is tied, unless it has its own weight
            found = {"lm_head.weight": found["model.language_model.embed_tokens.weight"]} | found
        return found | self._unused

    def _logits(self, weights: dict[str, Tensor], document: DocumentMeta, ids: Tensor, pixels: list[Tensor]) -> Tensor:
        """[T, vocabulary] of one document."""
        inputs: dict[str, Any] = {"use_cache": False} | class_inputs(document, pixels, self.theirs.config)
        types = token_types(document)
        # The class finds their tokens by ids, which no other token of the document may have.
        text = set(ids[types == 0].tolist())
        unused = (token for token in range(len(text) + 2) if token not in text)
        for kind, key in enumerate(("audio_token_id",) if self._sounds else ("image_token_id", "video_token_id"), 1):
            setattr(self.theirs.config, key, next(unused))
            ids = ids.masked_fill(types == kind, getattr(self.theirs.config, key))
        adjacent = any(one.start + one.num_tokens == other.start for one, other in pairwise(document.images))
        if adjacent and "mm_token_type_ids" in inputs:
            # It takes them for one image and fails, unless it is given the positions.
            inputs["position_ids"] = torch.from_numpy(token_positions([document], 3))[:, None]
        if self._sounds:  # it asks for a mask where each sound of a document has one token
            inputs["attention_mask"] = torch.ones_like(ids)[None]
        inputs["input_ids"] = ids[None]
        logits: Tensor = functional_call(self.theirs, weights, (), inputs).logits[0]
        return logits
