"""Configs, images and jsonl sources that the tests of this folder are made of."""

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image

from mmtrain.config.config import Config
from mmtrain.config.data import DataConfig
from mmtrain.config.model import EncoderConfig, LanguageConfig, ModelConfig
from mmtrain.config.sections import TrainingConfig

QWEN = {"model_type": "qwen2_vl_vision", "depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 16}
SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 16, "num_hidden_layers": 1, "image_size": 56}
SIGLIP |= {"num_attention_heads": 2, "intermediate_size": 32, "patch_size": 14}


def make_config(
    source: Path | str,
    *,
    encoder: dict[str, Any] | None = QWEN,
    global_batch_size: int = 2,
    seq_len: int = 256,
    vocab_size: int = 448,
    **data: Any,
) -> Config:
    """A config of a model that is never built."""
    language = {"model_type": "qwen2", "vocab_size": vocab_size, "hidden_size": 16, "num_attention_heads": 2}
    return Config(
        model=ModelConfig(
            language=LanguageConfig(config=language),
            encoder=EncoderConfig(config=dict(encoder)) if encoder else None,
        ),
        data=DataConfig(source=str(source), **{"num_workers": 0, **data}),
        training=TrainingConfig(steps=1, seq_len=seq_len, global_batch_size=global_batch_size),
    )


def png(width: int = 60, height: int = 60, colour: str = "red") -> bytes:
    """An encoded image with some content."""
    image = Image.new("RGB", (width, height), colour)
    image.paste("white", (5, 5, width // 2, height // 2))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def write_jsonl(
    folder: Path, num: int = 12, rows: dict[int, dict[str, Any]] | None = None, name: str = "train"
) -> Path:
    """A jsonl file of `num` samples with one image each; `rows` replaces columns of single samples."""
    lines = []
    for index in range(num):
        image = folder / f"{index}.png"
        image.write_bytes(png(60 + index, 70))
        row = {
            "messages": [
                {"role": "user", "content": f"<image>What is picture {index}?"},
                {"role": "assistant", "content": "red"},
            ],
            "images": [image.name],
        }
        lines.append(json.dumps({**row, **(rows or {}).get(index, {})}))
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def text_row(num_words: int) -> dict[str, Any]:
    """Columns of a sample without images and with a long answer."""
    messages = [
        {"role": "user", "content": "Say red."},
        {"role": "assistant", "content": "red " * num_words + "end"},
    ]
    return {"messages": messages, "images": []}
