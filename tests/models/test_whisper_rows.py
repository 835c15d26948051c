"""Whisper on the rows of sounds alone, packed, against its class with an attention mask over these rows."""

import dataclasses
import itertools

import pytest
import torch
from transformers import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from mmtrain.config.model import EncoderConfig, LanguageConfig, ModelConfig, ProjectorConfig
from mmtrain.errors import ConfigError
from mmtrain.modality.sounds import PackedSoundRules, sound_rules
from mmtrain.models.build import build_chunk
from mmtrain.models.initialise import init_weights
from mmtrain.models.projector import merge_neighbours
from mmtrain.models.spectrogram import row_patches
from mmtrain.spec.builders import model_spec
from mmtrain.spec.spec import images_work
from tests.models.test_chunk import TOLERANCE, assert_equal_gradients
from tests.reference import ENCODERS, LANGUAGES
from tests.sounds import AUDIO, spectrograms

CONFIG = AUDIO | {"model_type": "whisper_encoder"}
SECONDS = (0.31, 1.0, 0.06, 0.655)
MERGE = 5


def model(**section) -> ModelConfig:
    projector = ProjectorConfig(spatial_merge=MERGE)
    section = {"kind": "audio", "config": CONFIG, "sound_rows": "sound", **section}
    ear = EncoderConfig(projector=projector, **section)
    return ModelConfig(modules={"audio": ear}, language=LanguageConfig(config=LANGUAGES["qwen2"]))


@pytest.mark.parametrize("cuts", [(), (1, 3), (4, 5)], ids=str)
def test_features_and_gradients_are_those_of_the_class_with_a_mask(cuts):
    """Rows behind the last token of a sound are attended, but make none."""
    mel, lengths = spectrograms(SECONDS)
    rows = [(length - 1) // 2 + 1 for length in lengths]
    assert [r % MERGE for r in rows] == [1, 0, 3, 3] and min(rows) < MERGE, "the third makes no token"
    del rows[2]
    mel = mel[[0, 1, 3]]
    spec = model_spec(model())
    layers = range(len(spec.module("audio").layers) + 1)
    chunks = []
    for piece in itertools.pairwise([0, *cuts, layers[-1]]):
        chunks.append(build_chunk(model(), spec, "audio", piece, device="cpu"))
        init_weights(chunks[-1], 3)
    theirs = WhisperEncoder(WhisperConfig(**{k: v for k, v in CONFIG.items() if k != "model_type"})).train()
    state = {n.removeprefix("audio."): p for c in chunks for n, p in c.state_dict().items() if n.startswith("audio.")}
    theirs.load_state_dict(state)
    hidden = torch.arange(50) >= torch.tensor(rows)[:, None]
    mask = torch.zeros(len(rows), 1, 1, 50).masked_fill(hidden[:, None, None], torch.finfo(mel.dtype).min)
    for layer in theirs.layers:  # the encoder's own forward gives its layers no mask
        layer.register_forward_pre_hook(lambda module, args: (args[0], mask))
    found = theirs(mel).last_hidden_state
    expected = torch.cat([f[: r // MERGE * MERGE] for f, r in zip(found, rows, strict=True)])
    grids = tuple((1, 1, r) for r in rows)
    projector = chunks[-1].projector
    whole = tuple((1, 1, r // MERGE * MERGE) for r in rows)
    merged = merge_neighbours(projector.norm(expected), whole, MERGE, row_major=True)
    expected = projector.fc2(projector.act(projector.fc1(merged)))

    x = torch.cat([row_patches(*pair) for pair in zip(mel, rows, strict=True)])
    for chunk in chunks:
        x = chunk(x, grids=grids)
        assert x.shape == chunk.output_shape(images_work(chunk.module_spec, grids))
    torch.testing.assert_close(x, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    of_projector = {n: p.grad.clone() for n, p in projector.named_parameters()}
    projector.zero_grad()
    (x * weight).sum().backward()
    ours = {n: p.grad for c in chunks for n, p in c.named_parameters() if p.grad is not None}
    wanted = {f"audio.{n}": p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    wanted |= {f"audio_projector.{n}": grad for n, grad in of_projector.items()}
    assert_equal_gradients(ours, wanted, tolerance=5e-6)


def test_rules_count_the_rows_of_sound():
    rules = sound_rules(model(), "audio")
    assert rules == PackedSoundRules(mel_bins=16, window_rows=50, merge=MERGE)
    assert [rules.num_tokens(rules.num_rows(n)) for n in (4960, 16000)] == [3, 10]
    assert not sound_rules(model(sound_rows="window"), "audio").packs_rows


@pytest.mark.parametrize(
    ("config", "kind", "why"),
    [("qwen2_audio_encoder", "audio", "runs no other rows"), ("vit", "images", "hears nothing")],
)
def test_the_key_is_refused_where_it_has_no_effect(config, kind, why):
    made = model(kind=kind, config=ENCODERS[config])
    ear = dataclasses.replace(made.modules["audio"], projector=ProjectorConfig(spatial_merge=1))
    with pytest.raises(ConfigError, match=rf'model.modules.audio.sound_rows = "sound" has no effect: .* {why}; remove'):
        model_spec(dataclasses.replace(made, modules={"audio": ear}))
