"""Sounds, WAV files and models that hear, which tests are made of."""

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np

from mmtrain.config.config import Config
from mmtrain.config.data import TokenizerConfig
from mmtrain.config.model import EncoderConfig, ProjectorConfig
from mmtrain.data.tokenizer import load_tokenizer


def tone(hertz: float = 440.0, seconds: float = 0.2, rate: int = 16_000, loudness: float = 0.5) -> np.ndarray:
    """[samples] float64."""
    return loudness * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def noise(num_samples: int, seed: int = 0) -> np.ndarray:
    """[samples] float64 between -1 and 1."""
    return np.random.default_rng(seed).uniform(-1, 1, num_samples)


def chunk(name: bytes, content: bytes, size: int | None = None) -> bytes:
    """A chunk of a WAV file, filled to an even length. Args: size: that the header says, if it lies."""
    filled = content + b"\0" * (len(content) % 2)
    return name + struct.pack("<I", len(content) if size is None else size) + filled


def form(codec: int = 1, channels: int = 1, rate: int = 16_000, bits: int = 16, block: int | None = None) -> bytes:
    """The chunk `fmt `."""
    block = channels * bits // 8 if block is None else block
    return chunk(b"fmt ", struct.pack("<HHIIHH", codec, channels, rate, rate * block % 2**32, block, bits))


def riff(*chunks: bytes) -> bytes:
    """A WAV file of chunks."""
    content = b"WAVE" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(content)) + content


def wav(samples: np.ndarray, rate: int = 16_000) -> bytes:
    """A WAV file of 16 bits, of [samples] or [samples, channels]."""
    values = np.rint(samples * 32767).astype("<i2")
    channels = 1 if values.ndim == 1 else values.shape[1]
    return riff(form(channels=channels, rate=rate), chunk(b"data", values.tobytes()))


WHISPER = {"model_type": "whisper_encoder", "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2}
WHISPER |= {"encoder_ffn_dim": 32, "num_mel_bins": 80, "max_source_positions": 50}
"""Windows of one second, of 25 tokens."""
VIT = {"model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VIT |= {"intermediate_size": 32, "image_size": 32, "patch_size": 8}
"""Images of 4 tokens."""


def save_hearing_tokenizer(folder: Path) -> None:
    """Writes the default tokenizer with the tokens of the encoders `audio` and `maps`: 450 entries."""
    tokenizer = load_tokenizer(TokenizerConfig())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<audio>", "<maps>"]})
    tokenizer.save_pretrained(folder)


def hearing(config: Config, folder: Path, *, vision: bool = True) -> Config:
    """The job with the further encoders `audio` and `maps`, and a tokenizer with tokens for them in `folder`."""
    save_hearing_tokenizer(folder / "tokenizer")
    projector = ProjectorConfig(spatial_merge=2)
    modules = {
        "audio": EncoderConfig(kind="audio", config=dict(WHISPER), projector=projector),
        "maps": EncoderConfig(kind="images", config=dict(VIT), projector=projector),
    }
    model = replace(config.model, modules=modules, encoder=config.model.encoder if vision else None)
    return replace(config, model=model, tokenizer=TokenizerConfig(path=str(folder / "tokenizer")))
