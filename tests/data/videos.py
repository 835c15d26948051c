"""Configs and sources of text-to-video jobs that the tests of this folder are made of."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmtrain.config.config import Config
from mmtrain.config.data import DataConfig
from mmtrain.config.model import DitConfig, LanguageConfig, ModelConfig
from mmtrain.config.sections import TrainingConfig


def make_video_config(
    source: Path | str,
    *,
    global_batch_size: int = 2,
    seq_len: int = 64,
    vocab_size: int = 416,
    dit: dict[str, Any] | None = None,
    **data: Any,
) -> Config:
    """A config of a model that is never built: pixels as latents, patches of 1 x 2 x 2, 8 frames a second."""
    language = {"model_type": "qwen2", "vocab_size": vocab_size, "hidden_size": 16, "num_attention_heads": 2}
    language["num_key_value_heads"] = 2
    section = {"num_workers": 0, "fps": 8.0, "max_seconds": 2.0, "max_total_seconds": 4.0, "video_area": 576, **data}
    return Config(
        model=ModelConfig(
            language=LanguageConfig(config=language),
            dit=DitConfig(
                config={"model_type": "wan", "text_dim": 16, "in_channels": 3, "patch_size": [1, 2, 2], **(dit or {})}
            ),
        ),
        data=DataConfig(source=str(source), **section),
        training=TrainingConfig(steps=1, seq_len=seq_len, global_batch_size=global_batch_size),
    )


def frame(level: int, height: int = 24, width: int = 24) -> Image.Image:
    """A frame whose grey tells which one it is, with a red left half."""
    image = Image.new("RGB", (width, height), (level, level, level))
    image.paste((255, 0, 0), (0, 0, width // 2, height))
    return image


def write_clip(folder: Path, num_frames: int = 8, height: int = 24, width: int = 24) -> Path:
    """A folder of numbered frames."""
    folder.mkdir(parents=True)
    for index in range(num_frames):
        frame(10 * index, height, width).save(folder / f"{index:03}.png")
    return folder


def write_videos(
    folder: Path, num: int = 12, rows: dict[int, dict[str, Any]] | None = None, name: str = "train"
) -> Path:
    """A jsonl file of `num` clips of 8 frames in folders; `rows` replaces columns of single samples."""
    lines = []
    for index in range(num):
        clip = folder / f"clip{index}"
        if not clip.exists():
            write_clip(clip)
        row = {"caption": f"a red circle moves right on {'grey ' * index}", "frames": clip.name, "fps": 8}
        lines.append(json.dumps({**row, **(rows or {}).get(index, {})}))
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def save_latents(path: Path, shape: tuple[int, ...] = (4, 8, 6, 10), dtype: Any = np.float32) -> np.ndarray:
    """The values of a .npy file that was written."""
    values = np.random.default_rng(len(path.name)).normal(size=shape).astype(dtype)
    np.save(path, values)
    return values
