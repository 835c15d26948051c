"""Whole models as somebody may publish them: tiny ones with their tokenizers, and files that were changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mmtrain.config.data import TokenizerConfig
from mmtrain.data.tokenizer import load_tokenizer
from tests import sounds
from tests.llava import LLAVAS
from tests.whole_models import VISION, tiny_text, whole_model

KINDS = ("qwen2_vl", "llava", "qwen2_audio")
CONFIG, TOKENIZER, TOKENS = "config.json", "tokenizer.json", "tokenizer_config.json"
IMAGES = "preprocessor_config.json"
_COLOURS = {"image_mean": [0.5, 0.4, 0.5], "image_std": [0.5, 0.5, 0.6], "do_rescale": True, "rescale_factor": 1 / 255}
_PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_vl": _COLOURS
    | {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    | {"min_pixels": 784, "max_pixels": 3136},
    "llava": _COLOURS | {"image_processor_type": "SiglipImageProcessor", "size": {"height": 16, "width": 16}},
}


def save_stranger(folder: Path, kind: str = "qwen2_vl") -> Path:
    """The folder, with a model that answers. Args: kind: of `KINDS`, or another Qwen-VL."""
    if kind == "qwen2_audio":
        sounds.save_whole(folder)
        return folder
    tokenizer = load_tokenizer(TokenizerConfig())
    image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    if kind == "llava":
        from transformers import LlavaConfig, LlavaForConditionalGeneration

        torch.manual_seed(3)
        parts = LLAVAS["siglip, qwen2"]
        text = parts["text_config"] | {"vocab_size": 512, "max_position_embeddings": 512}
        config = LlavaConfig(**parts | {"text_config": text}, image_token_index=image)
        LlavaForConditionalGeneration(config).save_pretrained(folder)
    else:
        text = tiny_text(kind, vocab_size=512, max_position_embeddings=512, num_hidden_layers=2)
        windows = {"window_size": 56} if "window_size" in VISION[kind] else {}
        deep = {"deepstack_visual_indexes": [0]} if "deepstack_visual_indexes" in VISION[kind] else {}
        model = whole_model(kind, text, VISION[kind] | {"patch_size": 14, "depth": 2} | windows | deep, tied=True)
        model.config.image_token_id, model.config.video_token_id = image, 511
        model.save_pretrained(folder)
    (folder / IMAGES).write_text(json.dumps(_PROCESSORS.get(kind, _PROCESSORS["qwen2_vl"])))
    tokenizer.save_pretrained(folder)
    return folder


def edited(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """What changes a file of JSON in a folder. Args: change: of its value, in place; what it returns is ignored."""

    def edit(folder: Path) -> None:
        value = json.loads((folder / name).read_text())
        change(value)
        (folder / name).write_text(json.dumps(value))

    return edit


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """What changes the weights in a folder. Args: change: of the tensors by name, in place."""

    def edit(folder: Path) -> None:
        tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return edit
