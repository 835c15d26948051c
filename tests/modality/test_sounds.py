"""From the samples of a sound to windows, rows and tokens, and which encoder reads what a record has."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import cornstarch
from mmtrain.config.model import EncoderConfig, ModelConfig, ProjectorConfig
from mmtrain.errors import ConfigError
from mmtrain.modality.encoder_choice import check_readable, readers_of_kinds
from mmtrain.modality.sounds import SoundRules, sound_rules
from mmtrain.spec.vision_shapes import vision_shape
from tests.reference import ENCODERS, model_config

WHISPER = SoundRules(mel_bins=80, window_rows=1500, merge=2)


def encoder(kind: str, reads: str = "audio", **options) -> EncoderConfig:
    return EncoderConfig(config=ENCODERS[kind], kind=reads, projector=ProjectorConfig(spatial_merge=2), **options)


def with_modules(**modules: EncoderConfig) -> ModelConfig:
    return dataclasses.replace(model_config(), modules=modules)


def test_a_window_of_whisper_is_30_seconds():
    assert WHISPER.window_samples == 30 * 16_000
    assert WHISPER.windows(30 * 16_000) == (480_000,)
    assert WHISPER.windows(75 * 16_000) == (480_000, 480_000, 240_000)
    assert [WHISPER.num_rows(n) for n in (1, 240_000, 480_000)] == [1500] * 3  # silence fills the window
    assert WHISPER.num_tokens(1500) == 750
    assert WHISPER.seconds(240_000) == 15


@given(st.integers(1, 10**7), st.sampled_from([8000, 11_025, 16_000, 22_050, 44_100, 48_000, 96_001]))
def test_windows_hold_every_sample_once(num_samples, rate):
    resampled = WHISPER.resampled(num_samples, rate)
    assert resampled / 16_000 - 1 / 16_000 < num_samples / rate <= resampled / 16_000
    windows = WHISPER.windows(resampled)
    assert sum(windows) == resampled
    assert all(length == WHISPER.window_samples for length in windows[:-1])
    assert 0 < windows[-1] <= WHISPER.window_samples


def test_sizes_are_those_that_plans_count():
    model = with_modules(audio=encoder("whisper_encoder"))
    rules, shape = sound_rules(model, "audio"), vision_shape(model, "audio")
    assert (rules.mel_bins, rules.window_rows, rules.merge) == (10, 12, 2)
    assert (1, 1, rules.num_rows(1)) == shape.fixed_grid
    assert rules.num_tokens(rules.num_rows(1)) == shape.full_tokens == 6


def test_kinds_of_content_and_their_encoders():
    vision = {"image": "vision", "video": "vision"}
    assert readers_of_kinds(model_config()) == vision
    ears = encoder("whisper_encoder")
    speech_first = with_modules(speech=ears, maps=encoder("vit", "images"), music=ears)
    assert readers_of_kinds(speech_first) == {**vision, "audio": "speech", "maps": "maps", "music": "music"}
    check_readable(speech_first)
    alone = dataclasses.replace(with_modules(audio=ears), encoder=None)
    assert readers_of_kinds(alone) == {"audio": "audio"}


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"video": encoder("vit", "images")}, r"\[model.modules.video\]: records have 'video' for another encoder;"),
        ({"audio": encoder("vit", "images")}, r"\[model.modules.audio\]: records have 'audio' for another"),
        ({"speech": encoder("whisper_encoder"), "audio": encoder("whisper_encoder")}, "write .model.modules.audio"),
        ({"maps": encoder("whisper_encoder", "images")}, r'model.modules.maps.kind = "images", but .* reads spectro'),
    ],
)  # fmt: skip
def test_names_that_mean_something_else_are_refused(modules, message):
    with pytest.raises(ConfigError, match=message):
        check_readable(with_modules(**modules))


def test_a_model_of_the_paper_is_readable(tmp_path):
    check_readable(cornstarch.job("SSS", tmp_path, pp=1).model)
