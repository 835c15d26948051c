"""The size of a sound in frames, encoder rows and tokens. Pure arithmetic on numbers of samples; no sound is read."""

from dataclasses import dataclass
from typing import ClassVar

from mmtrain.config.model import ModelConfig
from mmtrain.errors import ConfigError
from mmtrain.families.catalogue import ENCODERS
from mmtrain.spec.vision_shapes import vision_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundRules:
    """The rule that turns a sound into windows, and a window into frames of a spectrogram, rows and tokens.

    A sound that is longer than a window is cut into windows, of which the last one may be shorter. An encoder that
    packs no rows runs full windows alone: silence fills the last one, and becomes rows and tokens like sound.
    """

    extractor: ClassVar[str] = "WhisperFeatureExtractor"
    """The class of transformers that makes the same spectrogram of a window."""
    packs_rows: ClassVar[bool] = False
    """Whether the encoder runs the rows of sound alone, each on what it reads of the spectrogram."""

    mel_bins: int
    """Frequencies of the spectrogram."""
    window_rows: int
    """Rows of the encoder in a full window."""
    merge: int
    """Neighbouring rows that become one token."""
    rate: int = 16_000
    """Samples a second that the encoder hears; other sounds are resampled."""
    hop: int = 160
    """Samples from one frame of the spectrogram to the next."""
    frames_per_row: int = 2
    """Frames of the spectrogram that the encoder's convolutions join to one row."""

    @property
    def window_samples(self) -> int:
        """Samples of a full window."""
        return self.window_rows * self.frames_per_row * self.hop

    def resampled(self, num_samples: int, rate: int) -> int:
        """Number of samples at the encoder's rate. Args: num_samples, rate: of the sound; samples, and samples a
        second."""
        return -(-num_samples * self.rate // rate)

    def windows(self, num_samples: int) -> tuple[int, ...]:
        """Samples of each window of a sound, without silence. Args: num_samples: at the encoder's rate."""
        full, rest = divmod(num_samples, self.window_samples)
        return (self.window_samples,) * full + ((rest,) if rest else ())

    def num_frames(self, num_samples: int) -> int:
        """Frames of the spectrogram of a window, with those of silence. Args: num_samples: of the window, without
        silence."""
        return self.window_rows * self.frames_per_row

    def num_rows(self, num_samples: int) -> int:
        """Rows of the encoder for a window. Args: num_samples: as of `num_frames`."""
        return self.num_frames(num_samples) // self.frames_per_row

    def num_tokens(self, num_rows: int) -> int:
        """Tokens of a window of some rows."""
        return num_rows // self.merge

    def seconds(self, num_samples: int) -> float:
        """Length of a window without silence, seconds. Args: num_samples: as of `num_frames`."""
        return num_samples / self.rate


class PackedSoundRules(SoundRules):
    """The rules of packed rows: silence after the end of a sound makes no row and no token.

    A class that hears one window alone cuts a sound behind it; here the next one follows. Of samples behind the last
    window that are too few for a token nothing is heard.
    """

    packs_rows = True

    def windows(self, num_samples: int) -> tuple[int, ...]:
        """The windows of `SoundRules.windows` that make a token."""
        windows = super().windows(num_samples)
        return tuple(samples for samples in windows if self.num_tokens(self.num_rows(samples)))

    def num_rows(self, num_samples: int) -> int:
        """The rows of the frames that begin before the end of the sound."""
        return -(-num_samples // (self.hop * self.frames_per_row))


def sound_rules(model: ModelConfig, module: str) -> SoundRules:
    """The rules of an encoder of sound. Raises: ConfigError: its sizes do not fit together, or it reads images."""
    shape = vision_shape(model, module)
    if not shape.one_row:
        known = ", ".join(name for name, encoder in ENCODERS.items() if encoder.images is None)
        raise ConfigError(f"model.modules.{module}: model_type = {shape.model_type!r} hears nothing; known are {known}")
    rules = PackedSoundRules if shape.packed else SoundRules
    return rules(mel_bins=shape.mel_bins, window_rows=shape.max_rows, merge=shape.patches_per_token)
