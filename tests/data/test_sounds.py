"""Files of sound, resampling and spectrograms, against soundfile and transformers' feature extractor."""

import io
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import WhisperFeatureExtractor
from transformers.audio_utils import mel_filter_bank

from mmtrain.data.media import RawImage, RawSound, raw_sound
from mmtrain.data.sounds import heard, mel_filters, open_sound, spectrograms
from mmtrain.errors import DataError
from mmtrain.modality.sounds import SoundRules
from tests.data.sound_files import chunk, form, noise, riff, tone, wav

WHISPER = SoundRules(mel_bins=80, window_rows=1500, merge=2)
SHORT = SoundRules(mel_bins=80, window_rows=100, merge=2)


def sound_of(data: bytes) -> RawSound:
    return RawSound(file=RawImage(data=data))


def opened(data: bytes) -> Any:
    return open_sound(sound_of(data), 2**30)


# ---------------------------------------------------------------------------------------- spectrograms


@pytest.mark.parametrize("mel_bins", [80, 128])
def test_mel_filters_are_those_of_the_extractor(mel_bins: int) -> None:
    theirs = mel_filter_bank(201, mel_bins, 0.0, 8000.0, 16_000, norm="slaney", mel_scale="slaney")
    np.testing.assert_allclose(mel_filters(mel_bins, 16_000), theirs.T, atol=1e-9)


@pytest.mark.parametrize(
    ("mel_bins", "seconds", "length"),
    [(80, 30, 1.3), (128, 30, 30.0), (80, 2, 2.0), (128, 1, 0.3), (80, 2, 0.001), (80, 2, 5.1)],
)
def test_spectrograms_are_those_of_the_extractor(mel_bins: int, seconds: int, length: float) -> None:
    """Equal but for rounding: no difference was measured, of values between -1 and 2."""
    rules = SoundRules(mel_bins=mel_bins, window_rows=50 * seconds, merge=2)
    samples = (tone(500, length) + 0.2 * noise(round(16_000 * length))).astype(np.float32)
    extractor = WhisperFeatureExtractor(feature_size=mel_bins, chunk_length=seconds)
    ours = spectrograms(samples, rules)
    size = seconds * 16_000
    assert len(ours) == -(-len(samples) // size)
    for number, window in enumerate(ours):
        piece = samples[number * size : (number + 1) * size]
        theirs = extractor(piece, sampling_rate=16_000, return_tensors="pt")["input_features"]
        assert window.dtype == torch.float32
        torch.testing.assert_close(window, theirs, rtol=0, atol=1e-5)


def test_silence_has_a_spectrogram() -> None:
    (window,) = spectrograms(np.zeros(100, np.float32), SHORT)
    assert window.shape == (1, 80, 200)
    assert torch.equal(window, torch.full_like(window, -1.5))


# ------------------------------------------------------------------------------------------ resampling


@pytest.mark.parametrize("rate", [8000, 11_025, 22_050, 44_100, 48_000])
def test_a_tone_is_the_same_at_every_rate(rate: int) -> None:
    """Away from the ends the largest error that was measured is 8e-4, of a tone of amplitude 0.5."""
    source = tone(440, 0.5, rate)
    resampled = heard(opened(wav(source, rate)), WHISPER)
    assert len(resampled) == WHISPER.resampled(len(source), rate)
    inner = slice(1000, 7000)
    np.testing.assert_allclose(resampled[inner], tone(440, 0.5)[inner], atol=1.5e-3)


def test_what_the_encoder_cannot_hear_is_removed() -> None:
    resampled = heard(opened(wav(tone(11_000, 0.5, 48_000), 48_000)), WHISPER)
    assert np.abs(resampled[1000:7000]).max() < 1e-3


def test_the_length_follows_from_the_header() -> None:
    for rate in (7350, 16_000, 44_100, 44_101):
        for num_samples in (1, 7, 1000):
            sound = opened(wav(noise(num_samples), rate))
            assert len(heard(sound, WHISPER)) == WHISPER.resampled(sound.num_samples, sound.rate)


# -------------------------------------------------------------------------------------------- WAV files

SUBTYPES = ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE"]


@pytest.mark.parametrize("subtype", SUBTYPES)
@pytest.mark.parametrize("container", ["WAV", "WAVEX", "RF64"])
@pytest.mark.parametrize("channels", [1, 2, 6])
def test_every_form_of_wav(subtype: str, container: str, channels: int) -> None:
    file = io.BytesIO()
    soundfile.write(file, noise(101 * channels).reshape(101, channels), 22_050, subtype, format=container)
    data = file.getvalue()
    theirs, rate = soundfile.read(io.BytesIO(data), dtype="float64", always_2d=True)
    sound = opened(data)
    assert (sound.num_samples, sound.rate) == (101, rate)
    np.testing.assert_allclose(sound.decode(), theirs.mean(axis=1), atol=1e-7)


def test_chunks_that_are_not_known_are_skipped() -> None:
    samples = tone()
    plain, content = wav(samples), np.rint(samples * 32767).astype("<i2").tobytes()
    odd = riff(chunk(b"LIST", b"odd"), form(), chunk(b"fact", b"1234"), chunk(b"data", content), chunk(b"id3 ", b"x"))
    np.testing.assert_array_equal(opened(odd).decode(), opened(plain).decode())


@pytest.mark.parametrize("size", [0xFFFF_FFFF, 0x7FFF_FFFF, 0x7FFF_F024])
def test_a_program_that_did_not_know_the_size(size: int) -> None:
    """As ffmpeg and sox write to a pipe."""
    samples = np.rint(tone() * 32767).astype("<i2").tobytes()
    streamed = riff(form(), chunk(b"data", samples, size))
    assert opened(streamed).num_samples == len(samples) // 2
    np.testing.assert_array_equal(opened(streamed).decode(), opened(wav(tone())).decode())


def test_a_part_of_a_sample_at_the_end_is_left_out() -> None:
    assert opened(riff(form(channels=2), chunk(b"data", bytes(4 * 5 + 3)))).num_samples == 5


def test_a_small_file_of_many_samples_is_not_decoded() -> None:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(100_000), 16_000, format="FLAC")
    data = file.getvalue()
    assert len(data) < 10_000
    assert open_sound(sound_of(data), 400_000).num_samples == 100_000
    with pytest.raises(DataError, match=r"^its samples need 400000 bytes of memory, more than data\.max_media_bytes"):
        open_sound(sound_of(data), 399_999)


BAD = {
    "empty": (b"", "it is empty; leave it out"),
    "no sample": (riff(form(), chunk(b"data", b"")), "it has no sample; leave it out"),
    "truncated": (wav(tone())[:-1000], "its samples have 6400 bytes, but 5400 are there; it is truncated"),
    "cut in its format": (wav(tone())[:30], "its header has no chunk `data` within its 30 bytes"),
    "cut before it": (wav(tone())[:18], "its header has no chunk `fmt ` within its 18 bytes; it is truncated, copy it"),
    "no data": (riff(form(), chunk(b"LIST", b"abc")), "no chunk `data` within its .* bytes; it is truncated"),
    "no format": (riff(chunk(b"LIST", b"abc")), "no chunk `fmt `"),
    "data first": (riff(chunk(b"data", bytes(10)), form()), "its data begin before its format"),
    "a short format": (riff(chunk(b"fmt ", bytes(14)), chunk(b"data", bytes(10))), "has 14 bytes, at least 16 are n"),
    "a rate of zero": (riff(form(rate=0), chunk(b"data", bytes(10))), "it has 0 samples a second; 1000 to 384000"),
    "a huge rate": (riff(form(rate=2**32 - 1), chunk(b"data", bytes(10))), "it has 4294967295 samples a second"),
    "no channel": (riff(form(channels=0, block=2), chunk(b"data", bytes(10))), "it has 0 channels; 1 to 256"),
    "no width": (riff(form(block=0), chunk(b"data", bytes(10))), "says 16 bits a sample and 0 bytes for the 1 of one"),
    "no bits": (riff(form(bits=0, block=2), chunk(b"data", bytes(10))), "says 0 bits a sample and 2 bytes"),
    "wide": (riff(form(bits=64), chunk(b"data", bytes(80))), "says 64 bits a sample and 8 bytes"),
    "a narrow float": (riff(form(codec=3), chunk(b"data", bytes(10))), "says 16 bits a sample and 2 bytes"),
    "a codec": (riff(form(codec=0x1234), chunk(b"data", bytes(10))), r"its codec is unknown \(4660\), and soundfile"),
    "no sound": (b"nothing at all", "it is no WAV file, and soundfile cannot read it: "),
    "another RIFF": (b"RIFF1234AVI LIST", "it is no WAV file, and soundfile cannot read it: "),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_one_line(name: str) -> None:
    data, message = BAD[name]
    with pytest.raises(DataError, match=message) as error:
        opened(data)
    assert "\n" not in str(error.value)


def test_samples_that_are_no_numbers_are_refused() -> None:
    values = np.array([0.5, np.nan, 0.1], "<f4").tobytes()
    sound = opened(riff(form(codec=3, bits=32), chunk(b"data", values)))
    with pytest.raises(DataError, match="its sample 1 is no finite number"):
        sound.decode()


HEADER = riff(form(), chunk(b"LIST", b"abc"), chunk(b"data", np.rint(tone() * 32767).astype("<i2").tobytes()))


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)), max_size=8),
    st.integers(0, len(HEADER)),
)
@example([(20, 0xFE), (21, 0xFF)], len(HEADER))
def test_no_header_does_more_than_raise_a_data_error(changes: list[tuple[int, int]], length: int) -> None:
    data = bytearray(HEADER)
    for at, value in changes:
        data[at] = value
    try:
        sound = opened(bytes(data[:length]))
        samples = sound.decode()
    except DataError:
        return
    assert len(samples) == sound.num_samples > 0
    assert len(samples) <= length


@given(st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_no_format_does_more_than_raise_a_data_error(codec: int, channels: int, rate: int, size: int) -> None:
    fields = struct.pack("<HHIIHH", codec, channels, rate, rate, codec, channels)
    try:
        opened(riff(chunk(b"fmt ", fields), chunk(b"data", bytes(100), size))).decode()
    except DataError:
        return


# ------------------------------------------------------------------------------------------ other values


@pytest.mark.parametrize("container", ["FLAC", "OGG", "MP3"])
def test_other_files_are_read_by_soundfile(container: str) -> None:
    file = io.BytesIO()
    soundfile.write(file, tone(440, 1.0, 22_050), 22_050, format=container)
    theirs, rate = soundfile.read(io.BytesIO(file.getvalue()), dtype="float32")
    sound = opened(file.getvalue())
    assert (sound.num_samples, sound.rate) == (len(theirs), rate)
    np.testing.assert_array_equal(sound.decode(), theirs)


def test_without_soundfile_its_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(DataError, match=r"it is no WAV file; install mmtrain\[audio\], whose package soundfile reads"):
        opened(b"fLaC and so on")
    with pytest.raises(DataError, match=r"its codec is mu-law \(7\); install mmtrain\[audio\]"):
        opened(riff(form(codec=7, bits=8), chunk(b"data", bytes(10))))
    assert opened(wav(tone())).num_samples == 3200


def test_arrays_and_files_are_the_same_sound(tmp_path: Path) -> None:
    samples = np.rint(noise(64) * 32767) / 32768
    (tmp_path / "a.wav").write_bytes(wav(samples * 32768 / 32767))
    values = [
        {"array": samples.tolist(), "sampling_rate": 16_000},
        {"array": np.stack([samples, samples]), "sampling_rate": 16_000, "path": None},
        {"array": np.stack([samples, samples], 1).tolist(), "sampling_rate": 16_000.0},  # as soundfile reads it
        {"bytes": (tmp_path / "a.wav").read_bytes(), "path": "elsewhere.wav"},
        {"bytes": None, "path": "a.wav"},
        "a.wav",
        (tmp_path / "a.wav").read_bytes(),
    ]
    for value in values:
        sound = open_sound(raw_sound(value, "audio 0", str(tmp_path)), 10**6)
        np.testing.assert_allclose(heard(sound, WHISPER), samples, atol=1e-7)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"array": [0.0]}, "audio 0: `sampling_rate` = None; write the samples a second"),
        ({"array": [0.0], "sampling_rate": 0}, "audio 0: `sampling_rate` = 0; write"),
        ({"array": [0.0], "sampling_rate": 22050.5}, "audio 0: `sampling_rate` = 22050.5; write"),
        ({"array": [10**400], "sampling_rate": 8000}, "audio 0: its `array` has another form; write a list"),
        ({"array": ["a"], "sampling_rate": 8000}, "audio 0: its `array` has another form; write a list"),
        ({"array": [[[0.0]]], "sampling_rate": 8000}, "audio 0: its `array` has another form"),
        (7, "audio 0: a int; it must be a path, a data: URL, or bytes"),
        ({}, "audio 0: it has neither bytes nor a path"),
    ],
)
def test_values_that_are_no_sound_are_refused(value: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        raw_sound(value, "audio 0", "")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        ((tone() * 32767).astype(int).tolist(), "its samples reach 16383, but they are from -1 to 1; divide integers"),
        ([[0.5, 0.1, 0.2], [0.1, float("nan"), 0.0]], "its sample 1 is no finite number; write it again"),
    ],
)
def test_an_array_of_other_numbers_is_refused_before_it_is_packed(array: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_sound(raw_sound({"array": array, "sampling_rate": 16_000}, "audio 0", ""), 10**6)


def test_a_file_of_floats_may_be_loud_but_no_integers() -> None:
    def floats(values: np.ndarray) -> np.ndarray:
        return opened(riff(form(codec=3, bits=32), chunk(b"data", values.astype("<f4").tobytes()))).decode()

    np.testing.assert_array_equal(floats(6 * tone()), (6 * tone()).astype("<f4"))
    with pytest.raises(DataError, match=r"its samples reach 16383\.5, but they are from -1 to 1"):
        floats(32767 * tone())


def test_an_empty_array_has_no_sample() -> None:
    with pytest.raises(DataError, match="it has no sample; leave it out"):
        open_sound(raw_sound({"array": [], "sampling_rate": 8000}, "audio 0", ""), 1)


def test_a_file_that_is_too_large_is_not_read() -> None:
    with pytest.raises(DataError, match=r"more than data\.max_media_bytes = 100; raise that limit"):
        open_sound(sound_of(wav(tone())), 100)
