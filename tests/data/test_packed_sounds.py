"""Sounds for Qwen2-Audio, whose rows are those of the sound alone, against transformers' own processor."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.config.config import Config, TokenizerConfig
from mmtrain.data.conversation_records import kinds_of, record_kind
from mmtrain.data.conversations import make_processor
from mmtrain.data.loader import Loader
from mmtrain.data.sources import open_source
from mmtrain.errors import DataError
from mmtrain.modality.sounds import PackedSoundRules, sound_rules
from mmtrain.models.reference import ReferenceModel
from mmtrain.models.spectrogram import spectrogram_of
from mmtrain.spec.builders import model_spec
from tests.data.samples import make_config
from tests.data.sound_files import wav
from tests.models.test_chunk import assert_equal_gradients
from tests.sounds import (
    FRAMES,
    RATE,
    named,
    save_whole,
    their_gradients,
    truth,
    wave,
)

RULES = PackedSoundRules(mel_bins=128, window_rows=1500, merge=2)
SECONDS = {"short": 0.31, "odd": 0.655, "full": 1.0, "long": 2.3}
"""Of the sounds that records name; a window of the tiny model is one second."""


@given(st.integers(1, 480_000))
def test_rows_and_tokens_are_those_of_the_class(num_samples: int) -> None:
    frames = min(-(-num_samples // 160), 3000)
    rows = (frames - 1) // 2 + 1
    tokens = (rows - 2) // 2 + 1
    assert (RULES.num_rows(num_samples), RULES.num_tokens(rows)) == (rows, tokens)
    assert RULES.windows(num_samples) == ((num_samples,) if tokens else ())


def test_a_long_sound_goes_on_in_the_next_window() -> None:
    assert RULES.windows(75 * RATE) == (480_000, 480_000, 240_000)
    assert [RULES.num_tokens(RULES.num_rows(n)) for n in RULES.windows(75 * RATE)] == [750, 750, 375]
    assert RULES.windows(30 * RATE + 320) == (480_000,), "too few samples for a token"
    assert RULES.windows(30 * RATE + 321) == (480_000, 321)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Sounds, and a whole model as one is published."""
    for seed, (name, seconds) in enumerate(SECONDS.items()):
        (tmp_path / f"{name}.wav").write_bytes(wav(wave(seconds, seed)))
    save_whole(tmp_path / "whole")
    return tmp_path


def job(folder: Path, *rows: dict[str, Any], **options: Any) -> Config:
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make_config(folder, **{"global_batch_size": 1, "shuffle": False, **options})
    return dataclasses.replace(
        config, model=named(folder / "whole"), tokenizer=TokenizerConfig(path=str(folder / "whole"))
    )


def said(text: str, *names: str) -> dict[str, Any]:
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "a beep"}]
    return {"messages": turns, "audios": [f"{name}.wav" for name in names]}


def test_ids_and_features_are_those_of_the_processor(folder: Path) -> None:
    """Its features are padded windows; a row's patches say what it reads of them."""
    config = job(folder, said("<audio> and <audio>, then <audio>?", "short", "full", "odd"), seq_len=256)
    processor = make_processor(config)
    record = open_source(config.data, "train", record_kind(kinds_of(config.model)))[0]
    document = processor.document(record)
    theirs = transformers.Qwen2AudioProcessor(
        transformers.WhisperFeatureExtractor.from_pretrained(folder / "whole"), processor.tokenizer
    )
    marks = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    text = processor.tokenizer.apply_chat_template(
        [
            {"role": "user", "content": f"{marks} and {marks}, then {marks}?"},
            {"role": "assistant", "content": "a beep"},
        ],
        tokenize=False,
    )
    sounds = [np.rint(wave(SECONDS[n], list(SECONDS).index(n)) * 32767) / 32768 for n in ("short", "full", "odd")]
    expected = theirs(text=text, audio=sounds, sampling_rate=RATE, return_tensors="pt")
    assert document.input_ids.tolist() == expected["input_ids"][0].tolist()
    found, mask = processor.pixels(document), expected["feature_attention_mask"].sum(1)
    assert [len(patches) for patches in found] == ((mask - 1) // 2 + 1).tolist() == [16, 50, 33]
    for patches, wanted in zip(found, expected["input_features"], strict=True):
        read = min(2 * len(patches) + 1, FRAMES)
        torch.testing.assert_close(spectrogram_of(patches, FRAMES)[:, :read], wanted[:, :read], rtol=0, atol=1e-4)


def test_loss_and_gradients_of_a_batch_of_the_loader_are_those_of_the_class(folder: Path) -> None:
    rows = [said("<audio>?", "short"), said("<audio> or <audio>?", "odd", "long"), said("Hi"), said("<audio>", "full")]
    config = job(folder, *rows, seq_len=128, global_batch_size=2)
    assert sound_rules(config.model, "audio") == PackedSoundRules(mel_bins=16, window_rows=50, merge=2)
    with Loader(config, num_steps=1) as loader:
        batch, meta, _ = next(loader)
    sounds = [image for m in meta.microbatches for image in m.images]
    assert [image.grid[2] for image in sounds] == [16, 33, 50, 50, 15, 50], "long has three windows"
    heard = {}
    for tensors, counts in zip(batch.microbatches, meta.microbatches, strict=True):
        for image, patches in zip(counts.images, tensors.pixel_values, strict=True):
            assert torch.isfinite(patches).all() and image.key not in heard
            heard[image.key] = spectrogram_of(patches, FRAMES), 2 * image.num_patches
    theirs = transformers.Qwen2AudioForConditionalGeneration.from_pretrained(folder / "whole").train()
    theirs.model.audio_tower.embed_positions.requires_grad_(False)
    ours = ReferenceModel(config.model, model_spec(config.model), seed=0)
    expected, _ = truth(theirs, [(batch, meta)], heard)
    loss = ours.loss_sum(batch, meta)
    expected.backward()
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=2e-6, atol=0)
    found = {name: weight.grad for name, weight in ours.weights().items() if weight.grad is not None}
    assert_equal_gradients(found, their_gradients(theirs), tolerance=5e-6)


def test_a_sound_that_is_too_short_is_refused(folder: Path) -> None:
    (folder / "click.wav").write_bytes(wav(wave(0.02, 1)))
    with pytest.raises(DataError, match=r"audio 0 of sample 0 \(.*click.wav\): its 320 samples are too short for a to"):
        next(Loader(job(folder, said("<audio>?", "click"))))
