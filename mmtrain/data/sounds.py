"""The log-mel spectrogram that an encoder hears, from the bytes of a sound.

WAV is read here; other formats by the package soundfile, if it is installed. The length follows from the header,
without decoding. A header is not trusted: sizes in it are compared with those of the file.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmtrain.data.media import MOST_CHANNELS, RawSound
from mmtrain.errors import DataError, one_line
from mmtrain.modality.sounds import SoundRules
from mmtrain.models.spectrogram import row_patches

N_FFT = 400
"""Samples of one Fourier transform: 25 ms."""
_MAX_HERTZ = 8000.0
"""Highest frequency of the mel filters."""
_DYNAMIC_RANGE = 8.0
"""Powers of ten below the loudest value of a window at which the spectrogram is cut off."""
LEAST_RATE, MOST_RATE = 1000, 384_000
"""Limits of a sound's samples a second."""

LOUDEST = 16.0
"""Largest sample of a sound of floats, whose full scale is 1: beyond are integers that were not divided."""

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_CODECS = {2: "ADPCM", 6: "A-law", 7: "mu-law", 17: "IMA ADPCM", 80: "MPEG", 85: "MP3"}
_UNKNOWN_SIZE = 0x7FFF_0000
"""Sizes of a data chunk from here on are of a program that did not know it yet: the samples end with the file."""

Decode = Callable[[], np.ndarray]


class Sound(NamedTuple):
    """A sound whose header is read."""

    num_samples: int
    """The number of samples of each channel."""
    rate: int
    """Samples a second."""
    decode: Decode
    """A function without arguments that gives the mean of the channels, [samples] float. Raises: DataError: the content
    is corrupt."""


def open_sound(raw: RawSound, max_bytes: int) -> Sound:
    """The sound of a record, up to its header.

    Args: max_bytes: largest file. Raises: DataError: it is no sound in a known format, is truncated, or has no sample.
    """
    if raw.samples is not None:
        samples = raw.samples
        _check_values(samples)
        sound = Sound(samples.shape[-1], raw.rate, lambda: samples)
    else:
        assert raw.file is not None
        with raw.file.open(max_bytes) as file:
            header = _wav_header(file)
            sound = _wav(raw, header, max_bytes) if isinstance(header, _Wav) else _other(raw, header, max_bytes)
    if not LEAST_RATE <= sound.rate <= MOST_RATE:
        raise DataError(f"it has {sound.rate} samples a second; {LEAST_RATE} to {MOST_RATE} are read: write its rate")
    if not sound.num_samples:
        raise DataError("it has no sample; leave it out")
    return sound._replace(decode=lambda: _checked(sound))


def _checked(sound: Sound) -> np.ndarray:
    samples = sound.decode()
    samples = samples if samples.ndim == 1 else samples.mean(axis=0)
    if len(samples) != sound.num_samples:
        raise DataError(f"it has {len(samples)} samples, but its header says {sound.num_samples}; write it again")
    _check_values(samples)
    return samples


def _check_values(samples: np.ndarray) -> None:
    """Checks that samples, [samples] or [channels, samples], are numbers around the range from -1 to 1."""
    if not np.isfinite(samples).all():
        index = int(np.argmin(np.isfinite(samples).reshape(-1, samples.shape[-1]).all(axis=0)))
        raise DataError(f"its sample {index} is no finite number; write it again")
    loudest = float(np.abs(samples).max(initial=0.0))
    if loudest > LOUDEST:
        raise DataError(
            f"its samples reach {loudest:g}, but they are from -1 to 1; divide integers of 16 bits by 32768, or write "
            "it as a file"
        )


# --------------------------------------------------------------------------------------------------- WAV


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wav:
    """The position of the samples of a WAV file, and their form."""

    start: int
    """The offset of the first sample, bytes."""
    num_samples: int
    rate: int
    channels: int
    width: int
    """Bytes of a sample."""
    floats: bool


def _wav_header(file: IO[bytes]) -> _Wav | str:
    """The header of a WAV file, or why it is none that is read here.

    Raises: DataError: it is damaged or truncated.
    """
    size = file.seek(0, 2)
    file.seek(0)
    head = file.read(12)
    if not head:
        raise DataError("it is empty; leave it out")
    if head[:4] not in (b"RIFF", b"RF64") or head[8:12] != b"WAVE":
        return "it is no WAV file"
    form: bytes | None = None
    long_size = _UNKNOWN_SIZE  # of RF64, whose chunks may be larger than four bytes can say
    at = 12
    while at + 8 <= size:
        file.seek(at)
        name, length = struct.unpack("<4sI", file.read(8))
        at += 8
        if name == b"fmt ":
            form = file.read(min(length, 40))
        elif name == b"ds64" and len(sizes := file.read(16)) == 16:
            long_size = struct.unpack("<QQ", sizes)[1]
        elif name == b"data":
            if form is None:
                raise DataError("its data begin before its format (`fmt `); write it again")
            return _form(form, at, long_size if length == 0xFFFF_FFFF else length, size - at)
        at += length + length % 2
    missing = "data" if form is not None else "fmt "
    raise DataError(f"its header has no chunk `{missing}` within its {size} bytes; it is truncated, copy it again")


def _form(form: bytes, start: int, length: int, remaining: int) -> _Wav | str:
    """Args: form: the chunk `fmt `. start, length: of the data, as the header says. remaining: bytes that there are."""
    if len(form) < 16:
        raise DataError(f"its chunk `fmt ` has {len(form)} bytes, at least 16 are needed; write it again")
    codec, channels, rate, _, block, bits = struct.unpack("<HHIIHH", form[:16])
    if codec == _EXTENSIBLE and len(form) >= 26:
        (codec,) = struct.unpack("<H", form[24:26])
    widths = {_PCM: (1, 2, 3, 4), _FLOAT: (4, 8)}
    if codec not in widths:
        return f"its codec is {_CODECS.get(codec, 'unknown')} ({codec})"
    if not 1 <= channels <= MOST_CHANNELS:
        raise DataError(f"it has {channels} channels; 1 to {MOST_CHANNELS} are read")
    width = block // channels
    if block % channels or width not in widths[codec] or not 1 <= bits <= 8 * width:
        raise DataError(
            f"its header says {bits} bits a sample and {block} bytes for the {channels} of one time; read are integers "
            "of 8, 16, 24 and 32 bits and floats of 32 and 64: write it so"
        )
    if _UNKNOWN_SIZE <= length < 2**32:
        length = remaining
    if length > remaining:
        raise DataError(f"its samples have {length} bytes, but {remaining} are there; it is truncated, copy it again")
    return _Wav(
        start=start,
        num_samples=length // block,
        rate=rate,
        channels=channels,
        width=width,
        floats=codec == _FLOAT,
    )


def _wav(raw: RawSound, header: _Wav, max_bytes: int) -> Sound:
    def decode() -> np.ndarray:
        assert raw.file is not None
        with raw.file.open(max_bytes) as file:
            file.seek(header.start)
            data = file.read(header.num_samples * header.channels * header.width)
        count = len(data) // (header.channels * header.width)
        data = data[: count * header.channels * header.width]
        return _values(data, header).reshape(count, header.channels).T

    return Sound(header.num_samples, header.rate, decode)


def _values(data: bytes, header: _Wav) -> np.ndarray:
    """The samples as floats; integers are divided by the largest power of two, so that they are from -1 to 1."""
    if header.floats:
        return np.frombuffer(data, f"<f{header.width}")
    if header.width == 1:  # without a sign
        return (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    if header.width == 3:
        padded = np.zeros((len(data) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        return padded.view("<i4")[:, 0] / np.float64(2**31)
    return np.frombuffer(data, f"<i{header.width}") / np.float64(2 ** (8 * header.width - 1))


def wav_bytes(samples: np.ndarray, rate: int) -> bytes:
    """A WAV file of one channel and 16 bits. Args: samples: [samples] floats from -1 to 1. rate: samples a second."""
    data: bytes = np.rint(samples * 32767).astype("<i2").tobytes()
    form = struct.pack("<HHIIHH", _PCM, 1, rate, 2 * rate, 2, 16)
    chunks = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(chunks)) + chunks


# --------------------------------------------------------------------------------------------- other files


def _other(raw: RawSound, why: str, max_bytes: int) -> Sound:
    """A sound that soundfile reads. Args: why: it is needed."""
    try:
        import soundfile
    except ImportError:
        raise DataError(
            f"{why}; install mmtrain[audio], whose package soundfile reads FLAC, Ogg, MP3 and more, or write it as WAV"
        ) from None

    def use(read: Callable[[IO[bytes]], Any]) -> Any:
        assert raw.file is not None
        with raw.file.open(max_bytes) as file:
            try:
                return read(file)
            except Exception as error:  # RuntimeError of libsndfile, TypeError, ...
                reason = getattr(error, "error_string", None) or one_line(error)
                raise DataError(f"{why}, and soundfile cannot read it: {reason.rstrip('.')}; write it as WAV") from None

    info = use(soundfile.info)
    if not 1 <= info.channels <= MOST_CHANNELS:
        raise DataError(f"it has {info.channels} channels; 1 to {MOST_CHANNELS} are read")
    num_bytes = info.frames * info.channels * np.dtype(np.float32).itemsize  # silence needs few bytes in a file
    if num_bytes > max_bytes:
        raise DataError(
            f"its samples need {num_bytes} bytes of memory, more than data.max_media_bytes = {max_bytes}; cut it, or "
            "raise that limit"
        )

    def decode() -> np.ndarray:
        values: np.ndarray = use(lambda file: soundfile.read(file, dtype="float32", always_2d=True)[0])
        return values.T

    return Sound(info.frames, info.samplerate, decode)


# -------------------------------------------------------------------------------------------- spectrograms


def heard(sound: Sound, rules: SoundRules) -> np.ndarray:
    """[samples] float32 of a sound at the encoder's rate, as many as `SoundRules.resampled` says.

    A polyphase filter without a shift in time, which removes what is above half of the lower rate: a Kaiser window
    (beta 5) over ten zero crossings on each side.
    Raises: DataError: its content is corrupt.
    Source: scipy.signal.resample_poly.
    """
    samples = sound.decode()
    if sound.rate != rules.rate:
        from scipy.signal import resample_poly

        common = math.gcd(rules.rate, sound.rate)
        samples = resample_poly(samples.astype(np.float64), rules.rate // common, sound.rate // common)
    return samples.astype(np.float32)


def spectrograms(samples: np.ndarray, rules: SoundRules) -> list[Tensor]:
    """The log-mel spectrogram [1, mel bins, frames] float32 of each window of a sound, its silence included; for an
    encoder that packs rows what each row reads of it, [rows, frames of a row x mel bins].

    Args: samples: [samples] float32 at the encoder's rate. Source: `SoundRules.extractor` of transformers
    5.23.
    """
    edges = np.cumsum([0, *rules.windows(len(samples))])
    windows = [samples[low:high] for low, high in pairwise(edges)]
    if rules.packs_rows:
        return [row_patches(_spectrogram(window, rules)[0], rules.num_rows(len(window))) for window in windows]
    return [_spectrogram(window, rules) for window in windows]


def _spectrogram(samples: np.ndarray, rules: SoundRules) -> Tensor:
    frames = rules.num_frames(len(samples))
    padded = torch.zeros(max(frames * rules.hop, N_FFT))
    padded[: len(samples)] = torch.from_numpy(samples)
    window = torch.hann_window(N_FFT)
    waves = torch.stft(padded, N_FFT, rules.hop, window=window, return_complex=True)[:, :frames]
    power_MF = torch.from_numpy(mel_filters(rules.mel_bins, rules.rate)) @ waves.abs().square()
    log_MF = power_MF.clamp(min=1e-10).log10()
    return ((log_MF.maximum(log_MF.max() - _DYNAMIC_RANGE) + 4) / 4)[None]


@cache
def mel_filters(mel_bins: int, rate: int) -> np.ndarray:
    """[mel bins, frequencies] float32: triangles of equal area, evenly spaced on Slaney's mel scale.

    Source: M. Slaney, Auditory Toolbox, Interval Research Corporation, technical report 1998-010.
    """
    hertz = np.linspace(0, rate // 2, N_FFT // 2 + 1)
    corners = _hertz(np.linspace(0, _MAX_MELS, mel_bins + 2))
    widths = np.diff(corners)
    slopes = corners[:, None] - hertz
    rising, falling = -slopes[:-2] / widths[:-1, None], slopes[2:] / widths[1:, None]
    triangles = np.maximum(0, np.minimum(rising, falling))
    areas: np.ndarray = triangles * (2 / (corners[2:] - corners[:-2]))[:, None]
    return areas.astype(np.float32)


_LINEAR_MELS, _LINEAR_HERTZ = 15.0, 1000.0
"""Below this frequency mels are proportional to it, above to its logarithm."""
_LOG_STEP = math.log(6.4) / 27
_MAX_MELS = _LINEAR_MELS + math.log(_MAX_HERTZ / _LINEAR_HERTZ) / _LOG_STEP


def _hertz(mels: np.ndarray) -> np.ndarray:
    above = _LINEAR_HERTZ * np.exp(_LOG_STEP * (mels - _LINEAR_MELS))
    hertz: np.ndarray = np.where(mels < _LINEAR_MELS, mels * _LINEAR_HERTZ / _LINEAR_MELS, above)
    return hertz
