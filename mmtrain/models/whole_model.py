"""A whole vision-language model as transformers' own class computes it: the truth of a layout, outside of our code."""

import copy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from transformers.initialization import no_init_weights

from mmtrain.config.model import ModelConfig
from mmtrain.modality.metadata import DocumentMeta, MicrobatchMeta
from mmtrain.modality.positions import token_positions
from mmtrain.models.adapters import VISION_ADAPTERS, parameters_on_meta
from mmtrain.models.batch import IGNORE_INDEX, Microbatch
from mmtrain.models.chunk import LanguageOutput
from mmtrain.models.fused_qkv import from_head_major, is_fused
from mmtrain.models.loss import cross_entropy_sum
from mmtrain.models.reference import ReferenceModel
from mmtrain.models.trainable import adapter_names, is_adapter, plain_name
from mmtrain.spec.families import ENCODERS, LANGUAGES, encoder_config, language_config
from mmtrain.spec.spec import ModelSpec

_NAMES = {"vision.": "model.visual.", "language.model.": "model.language_model.", "language.lm_head.": "lm_head."}
"""How names begin here -> in the class of the whole model."""


def whole_family(model: ModelConfig) -> str:
    """The `model_type` of the whole model that the parts make together; empty: transformers has no such class."""
    if model.encoder is None or model.projector.kind != "native" or model.language.attention_mask != "causal":
        return ""
    encoder, language = encoder_config(model.encoder), language_config(model.language)
    shared = set(ENCODERS[encoder["model_type"]].parents) & set(LANGUAGES[language["model_type"]].parents)
    return shared.pop() if shared else ""


class WholeModel(ReferenceModel):
    """The weights of the one-process model in transformers' class, which is called once for each document.

    Gradients reach these weights, adapters included.
    """

    def __init__(self, model: ModelConfig, spec: ModelSpec, *, seed: int) -> None:
        super().__init__(model, spec, seed=seed)
        from transformers import AutoConfig, AutoModelForImageTextToText

        assert model.encoder is not None
        parts = (encoder_config(model.encoder), language_config(model.language))
        vision, text = (copy.deepcopy({k: v for k, v in part.items() if v is not None}) for part in parts)
        config = AutoConfig.for_model(
            whole_family(model), vision_config=vision, text_config=text, tie_word_embeddings=text["tie_word_embeddings"]
        )
        with parameters_on_meta(), no_init_weights():
            self.theirs = AutoModelForImageTextToText.from_config(config)
        self._fused = VISION_ADAPTERS[vision["model_type"]].fused_qkv, config.vision_config.num_heads
        self._scale = model.lora.alpha / model.lora.rank

    def microbatch(self, tensors: Microbatch, counts: MicrobatchMeta, want_predictions: bool = False) -> LanguageOutput:
        """The output of one microbatch, document by document."""
        weights, pixels = self._their_weights(), iter(tensors.pixel_values)
        of_documents = tensors.input_ids.split(counts.lengths), tensors.labels.split(counts.lengths)
        logits = [
            self._logits(weights, document, ids, [next(pixels) for _ in document.images])[labels != IGNORE_INDEX]
            for document, ids, labels in zip(counts.documents, *of_documents, strict=True)
        ]
        labels = tensors.labels[tensors.labels != IGNORE_INDEX]
        return LanguageOutput(*cross_entropy_sum(torch.cat(logits), labels, want_predictions))

    def _their_weights(self) -> dict[str, Tensor]:
        """Their name -> value, on the graph of our weights: without adapters, and with their order of rows."""
        ours: dict[str, Tensor] = dict(self.weights())
        found = {}
        for name, weight in ours.items():
            if is_adapter(name):
                continue
            plain = plain_name(name)
            down, up = adapter_names(name)
            if down in ours:
                weight = weight + self._scale * ours[up] @ ours[down]
            if is_fused(plain, self._fused[0]):
                weight = from_head_major(weight, self._fused[1])
            begin = next(begin for begin in _NAMES if plain.startswith(begin))
            found[_NAMES[begin] + plain.removeprefix(begin)] = weight
        return {"lm_head.weight": found["model.language_model.embed_tokens.weight"]} | found  # the first if tied

    def _logits(self, weights: dict[str, Tensor], document: DocumentMeta, ids: Tensor, pixels: list[Tensor]) -> Tensor:
        """[T, vocabulary] of one document."""
        types = torch.zeros_like(ids)
        for image in document.images:
            types[image.start : image.start + image.num_tokens] = 1
        # The class finds image tokens by their id, which no other token of the document may have.
        text = set(ids[types == 0].tolist())
        self.theirs.config.image_token_id = next(token for token in range(len(text) + 1) if token not in text)
        inputs: dict[str, Any] = {"use_cache": False}
        if pixels:
            grids = torch.tensor([image.grid for image in document.images])
            inputs |= {"pixel_values": torch.cat(pixels), "image_grid_thw": grids, "mm_token_type_ids": types[None]}
        if any(one.start + one.num_tokens == other.start for one, other in pairwise(document.images)):
            # It takes them for one image and fails, unless it is given the positions.
            inputs["position_ids"] = torch.from_numpy(token_positions([document], 3))[:, None]
        inputs["input_ids"] = ids.masked_fill(types == 1, self.theirs.config.image_token_id)[None]
        logits: Tensor = functional_call(self.theirs, weights, (), inputs).logits[0]
        return logits
