"""Tiny whole LLaVA models as transformers saves them, and the jobs that take their parts out of them."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmtrain.config.model import EncoderConfig, LanguageConfig, ModelConfig, ProjectorConfig
from mmtrain.modality.metadata import MicrobatchMeta
from mmtrain.models.batch import IGNORE_INDEX, Microbatch

IMAGE_TOKEN, VOCAB = 96, 98
"""Text has only tokens below."""

_TEXT = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
_VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
_CLIP = {**_VISION, "model_type": "clip_vision_model"}
LLAVAS: dict[str, dict[str, Any]] = {
    "clip, llama": {
        "vision_config": _CLIP,
        "text_config": {**_TEXT, "model_type": "llama"},
    },  # LLaVA's own defaults: the features of layer -2, without the class token
    "clip, llama, full": {
        "vision_config": _CLIP,
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_feature_layer": 2,
        "vision_feature_select_strategy": "full",
        "projector_hidden_act": "relu",
    },
    "siglip, qwen2": {
        "vision_config": {**_VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
        "text_config": {**_TEXT, "model_type": "qwen2", "tie_word_embeddings": True},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
}
SPELLINGS = {
    "fresh": {},
    "old": {"vision_tower.": "vision_tower.vision_model."},
    "in memory": {
        "language_model.model.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    },
}
"""Changes of the names that a new model is saved with."""


def save_llava(name: str, folder: Path, spelling: str = "fresh") -> Any:
    """The model, which is saved in the folder. Args: name: of `LLAVAS`. spelling: of `SPELLINGS`."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(3)
    theirs = LlavaForConditionalGeneration(LlavaConfig(**LLAVAS[name], image_token_index=IMAGE_TOKEN))
    with torch.no_grad():  # no weight is so small or so uniform that an error could hide behind it
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    theirs.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for old, new in SPELLINGS[spelling].items():
        assert any(key.startswith(old) for key in tensors) or "lm_head" in old  # which is not stored if it is tied
        tensors = {new + k.removeprefix(old) if k.startswith(old) else k: tensor for k, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return theirs.train()


def job_model(folder: Path, **trainable: Any) -> ModelConfig:
    """The model of a job that starts from the folder. Args: trainable: section -> whether it trains."""
    source: dict[str, Any] = {"pretrained": str(folder)}
    encoder, projector, language = (
        source | {"trainable": trainable.get(name, True)} for name in ("encoder", "projector", "language")
    )
    return ModelConfig(
        encoder=EncoderConfig(**encoder),
        projector=ProjectorConfig(kind="llava", **projector),
        language=LanguageConfig(**language),
    )


def our_name(name: str) -> str:
    """The name of a parameter of the whole class in our chunks."""
    for theirs, ours in (
        ("model.vision_tower.", "vision."),
        ("model.multi_modal_projector.", "projector."),
        ("model.language_model.", "language.model."),
        ("lm_head.", "language.lm_head."),
    ):
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    raise AssertionError(name)


def their_loss(theirs: nn.Module, tensors: Microbatch, counts: MicrobatchMeta) -> Tensor:
    """Cross-entropy summed over the labels of a microbatch, by one call of the whole class for each document."""
    ids = tensors.input_ids.index_fill(0, tensors.image_slots, IMAGE_TOKEN)
    pixels = iter(tensors.pixel_values)
    losses = []
    lengths = list(counts.lengths)
    documents = zip(counts.documents, ids.split(lengths), tensors.labels.split(lengths), strict=True)
    for document, own_ids, labels in documents:
        images = [next(pixels) for _ in document.images]
        logits = theirs(input_ids=own_ids[None], pixel_values=torch.cat(images) if images else None).logits[0]
        losses.append(nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE_INDEX))
    return torch.stack(losses).sum()
