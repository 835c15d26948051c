"""[data], [tokenizer] and [diffusion]: what samples are, and what is made of them."""

import re
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Literal

from mmtrain.config.bounds import MOST_FLOAT, at_least, at_most, not_empty
from mmtrain.config.sections import MOST_WORKERS
from mmtrain.config.toml_sections import FilePath, shown
from mmtrain.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionConfig:
    """[diffusion]: what a text-to-video model learns to predict, from what."""

    prediction: Literal["flow", "epsilon", "v"] = "flow"
    """flow: of x = (1 - t) data + t noise the velocity, noise - data (rectified flow, arXiv:2209.03003). epsilon, v: of
    x = a data + s noise, cosine schedule (arXiv:2102.09672), the noise, or a noise - s data (arXiv:2202.00512)."""
    timestep_sampling: Literal["uniform", "logit_normal"] = "logit_normal"
    """How t in (0, 1) is drawn for each clip; logit_normal: the logistic function of a normal number
    (arXiv:2403.03206)."""
    logit_mean: float = 0.0
    """Mean of that normal number; above 0: more noise."""
    logit_std: float = 1.0
    """The standard deviation of the logit of t."""
    shift: float = 1.0
    """Shift s: t becomes s t / (1 + (s - 1) t), in training and sampling; above 1: more noise, for many tokens a clip.
    flow alone."""
    caption_dropout: float = 0.1
    """Part of the clips whose caption is hidden, so that sampling can be guided (arXiv:2207.12598)."""

    def __post_init__(self) -> None:
        at_least("diffusion", self, caption_dropout=0.0)
        if not abs(self.logit_mean) <= 100:
            raise ConfigError(f"diffusion.logit_mean = {self.logit_mean}; it must be from -100 to 100")
        for name, most in (("logit_std", 10.0), ("shift", 1000.0)):
            if not 0 < getattr(self, name) <= most:
                raise ConfigError(f"diffusion.{name} = {getattr(self, name)}; it must be above 0 and at most {most:g}")
        for name, default in (("logit_mean", 0.0), ("logit_std", 1.0)):
            if self.timestep_sampling == "uniform" and getattr(self, name) != default:
                value = getattr(self, name)
                raise ConfigError(
                    f'diffusion.{name} = {value} has no effect with timestep_sampling = "uniform"; remove it'
                )
        if self.caption_dropout >= 1:
            raise ConfigError(
                f"diffusion.caption_dropout = {self.caption_dropout}; it must be below 1, or no caption is ever read"
            )
        if self.shift != 1 and self.prediction != "flow":
            raise ConfigError(
                f'diffusion.shift = {self.shift} has no effect with prediction = "{self.prediction}", whose schedule '
                "is fixed; remove it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """[tokenizer]"""

    path: FilePath = ""
    """Hugging Face id or local folder of a tokenizer; empty: the small one that ships with mmtrain, for charts or, with
    [model.dit], for captions, with a token in addition for each further encoder."""
    image_token: str = "<|image_pad|>"
    """The token that stands for one image feature; it must be in the vocabulary."""
    video_token: str = "<|video_pad|>"
    """The token that stands for one feature of a video; conversations with videos need it in the vocabulary."""
    chat_template: FilePath = ""
    """File with a chat template (Jinja, or JSON with the key chat_template) in place of the tokenizer's own; empty: the
    one that transformers' processor of the tokenizer's folder takes, else ChatML."""

    def __post_init__(self) -> None:
        not_empty("tokenizer", self, "image_token", "video_token")
        if self.image_token == self.video_token:
            raise ConfigError(
                f"tokenizer.image_token and video_token are both {shown(self.image_token)}; give each its own token"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    """[[data.sources]]: one of several sources whose samples are mixed, in place of data.source."""

    source: FilePath
    """The source, written as data.source is."""
    weight: float
    """Share of the samples that are of this source, relative to the weights of the others; above 0."""
    name: str = ""
    """The name in logs and metrics; empty: the last part of `source`, or its split if that is a list of data sets."""
    split: str = ""
    """Split to train on; empty: data.split."""

    def __post_init__(self) -> None:
        not_empty("data.sources", self, "source")
        if not 0 < self.weight <= MOST_FLOAT:
            raise ConfigError(
                f"data.sources: {shown(self.source)} has weight = {self.weight}; it must be above 0 and at most "
                f"{MOST_FLOAT:g}, so remove the source if none of its samples is wanted"
            )
        if not _SOURCE_NAME.fullmatch(self.label):
            raise ConfigError(
                f"data.sources: {shown(self.source)} is named {shown(self.label)} in metrics; set its name to letters, "
                "digits, '.', '_' and '-'"
            )

    @property
    def label(self) -> str:
        """The name of the source, given or not."""
        path = PurePath(self.source)
        return self.name or (self.split if path.name == "dataset_info.json" else "") or path.name


_SOURCE_NAME = re.compile(r"[\w.-]{1,100}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """[data]: where samples come from and what happens to bad ones."""

    source: FilePath = ""
    """Hugging Face dataset id, a folder, or a .parquet, .jsonl or .json file: conversations in one of the forms of
    docs/data.md; with [model.dit] clips. A dataset_info.json of LLaMA-Factory: split names one of its entries."""
    sources: list[SourceConfig] = field(default_factory=list)
    """Several sources instead, each a table [[data.sources]]."""
    split: str = "train"
    """Split to train on."""
    validation_split: str = "validation"
    """Split to validate on."""
    validation_part: float = 0.0
    """Validate on this part of the samples of data.split instead, which are then not trained on: 0.1 takes every tenth
    sample of each source, in its order. 0: the validation split is one of the source."""
    streaming: bool = False
    """Read without an index; needs shuffle = false, since a shuffle buffer cannot be resumed exactly."""
    shuffle: bool = True
    """A new deterministic order each epoch."""
    on_error: Literal["raise", "skip"] = "raise"
    """A sample that cannot be read (corrupt image, images and tokens that disagree): stop, or drop it and count it."""
    too_long: Literal["raise", "skip", "truncate"] = "raise"
    """A sample (or caption) of more than training.seq_len tokens: stop, drop and count it, or cut its end (text-only
    samples and captions). With [model.contrast] captions are always cut, as by the tower's class."""
    num_workers: int = 1
    """Background processes that prepare batches; 0: in the training process."""
    prefetch: int = 2
    """Batches kept ready by each worker."""
    image_processor: FilePath = ""
    """Hugging Face id or folder of an image processor (preprocessor_config.json, or inside of processor_config.json);
    empty: that of model.pretrained, if the encoder is its and it has one, else the encoder's default class."""
    min_pixels: int = 0
    """Smallest image area after resizing (native-resolution encoders); 0: the processor's value."""
    max_pixels: int = 0
    """Largest image area after resizing (native-resolution encoders); 0: the processor's value."""
    max_media_bytes: int = 2**30
    """Largest encoded image, sound or file of latents, bytes, and largest array or decoded sound in one; a larger one
    is a bad sample."""
    max_text_bytes: int = 2**22
    """Most text of a sample (of a clip its caption), bytes; one with more is not tokenized, which would take some 200
    times as much memory, but treated as too long: skipped, or the job stops."""
    max_decoded_pixels: int = 2**26
    """Largest image or frame before resizing, in pixels; a larger one is a bad sample. Decoding takes about 8 bytes a
    pixel. At most 178956970, where Pillow stops; it warns from half of that on."""
    blank_images: bool = False
    """Replace the content of every image and video by grey: a control that shows what they are worth."""
    blank_audio: bool = False
    """Replace every sound by silence of its length: a control that shows what they are worth."""
    video_fps: float = 2.0
    """Frames a second that videos of conversations are sampled to."""
    video_min_frames: int = 4
    """Fewest frames that are sampled of a video, as far as it has them."""
    video_max_frames: int = 768
    """Most frames that are sampled of a video, evenly over its whole length."""
    video_min_pixels: int = 0
    """Smallest area after resizing, pixels: of each frame of a video, or of all its sampled frames together, by
    family. 0: that of the video processor of model.pretrained, else that of the family's class, 100352 or 131072."""
    video_max_pixels: int = 0
    """Largest such area, pixels. 0: that of the video processor, else of the class, 602112 or 786432."""
    fps: float = 16.0
    """Frames a second that clips are sampled to; of latents, frames a second that they are."""
    source_fps: float = 0.0
    """Frames a second of records without `fps` (and of videos whose file does not say); 0: as data.fps says, or in
    conversations data.video_fps, so that their frames are taken as they are."""
    max_seconds: float = 16.0
    """Longest clip; what is longer is cut at its end."""
    max_total_seconds: float = 16.0
    """All clips of one microbatch together."""
    max_clips: int = 8
    """Clips of one microbatch."""
    max_pairs: int = 64
    """Pairs of an image and its caption in one microbatch, with [model.contrast]."""
    video_area: int = 65536
    """Pixels of one frame, about: frames are resized to sizes of this area, multiples of the DiT's patch."""
    video_aspects: list[str] = field(default_factory=lambda: ["1:1", "4:3", "3:4", "16:9", "9:16"])
    """Width to height of these sizes; a clip goes to the nearest one, cropped at its middle."""
    video_frames: list[int] = field(default_factory=list)
    """Numbers of frames that clips are cut to, multiples of the DiT's patch; a clip goes to the longest one that it
    fills. Empty: the longest clip, and 3/4, 1/2, 3/8, 1/4, 3/16, ... of it."""

    def __post_init__(self) -> None:
        if not self.source and not self.sources:
            raise ConfigError(
                "data.source: is empty; name a dataset id, folder or file, or several as tables [[data.sources]]"
            )
        self._check_sources()
        not_empty("data", self, "split", "validation_split")
        at_most("data", self, num_workers=MOST_WORKERS, prefetch=1024)
        at_least("data", self, num_workers=0, prefetch=1, min_pixels=0, max_pixels=0)
        at_least("data", self, max_clips=1, max_pairs=1, video_area=1, max_decoded_pixels=1, max_text_bytes=1)
        if self.max_media_bytes < 1:
            raise ConfigError(f"data.max_media_bytes = {self.max_media_bytes}; it must be at least 1")
        rates = (("fps", 0.001, 1000.0), ("video_fps", 0.001, 1000.0), ("max_seconds", 0.001, 86400.0))
        for name, least, most in rates:
            if not least <= getattr(self, name) <= most:
                raise ConfigError(f"data.{name} = {getattr(self, name)}; it must be from {least} to {most:g}")
        if self.source_fps and not 0.001 <= self.source_fps <= 1000:
            raise ConfigError(
                f"data.source_fps = {self.source_fps}; it must be from 0.001 to 1000, or 0 for the rate of sampling"
            )
        at_most("data", self, max_total_seconds=1e6)
        if self.max_decoded_pixels > 178_956_970:
            raise ConfigError(f"data.max_decoded_pixels = {self.max_decoded_pixels}; it must be at most 178956970")
        if self.max_seconds > self.max_total_seconds:
            raise ConfigError(
                f"data.max_seconds = {self.max_seconds} is above data.max_total_seconds = {self.max_total_seconds}: "
                "such a clip fits into no microbatch; lower the first or raise the second"
            )
        if not self.video_aspects:
            raise ConfigError('data.video_aspects is empty; write ["1:1"] for squares alone')
        for aspect in self.video_aspects:
            sides = aspect.split(":")
            if len(sides) != 2 or not all(side.isdecimal() and len(side) <= 4 and int(side) for side in sides):
                raise ConfigError(
                    f"data.video_aspects names {shown(aspect)}; write width:height in whole numbers of at most four "
                    'digits, as "16:9"'
                )
        if any(count < 1 for count in self.video_frames):
            raise ConfigError(f"data.video_frames = {shown(self.video_frames)}; a number of frames is at least 1")
        if self.streaming and self.shuffle:
            raise ConfigError(
                "data.streaming = true with data.shuffle = true: a streaming shuffle buffer is refilled on "
                "resume and would lose and repeat samples; set data.shuffle = false or data.streaming = false"
            )
        at_least("data", self, video_min_frames=1, video_min_pixels=0, video_max_pixels=0)
        self._check_validation_part()
        bounds = [("video_max_frames", "video_min_frames")]
        for upper, lower in [*bounds, *([("max_pixels", "min_pixels")] if self.max_pixels else [])]:
            if getattr(self, upper) < getattr(self, lower):
                raise ConfigError(
                    f"data.{upper} = {getattr(self, upper)} is below data.{lower} = {getattr(self, lower)}; raise it"
                )

    def _check_validation_part(self) -> None:
        at_least("data", self, validation_part=0.0)
        if self.validation_part >= 1:
            raise ConfigError(
                f"data.validation_part = {self.validation_part}; it must be below 1, or no sample is left to train on"
            )
        if self.validation_part and self.streaming:
            raise ConfigError(
                f"data.validation_part = {self.validation_part} with data.streaming = true: a stream has no number of "
                "samples to divide; set streaming = false, or validation_part = 0 and name a validation split"
            )
        if self.validation_part and self.split == self.validation_split:
            raise ConfigError(
                f"data.validation_part = {self.validation_part}, but data.split and data.validation_split are both "
                f"{shown(self.split)}, so nothing tells the two parts apart; give validation_split another name"
            )

    def _check_sources(self) -> None:
        if self.source and self.sources:
            raise ConfigError(
                f'data.source = {shown(self.source)} and data.sources are both set; keep one, and write source = "" '
                "if the first is that of a base file"
            )
        names = [source.label for source in self.sources]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise ConfigError(
                    f"data.sources: two are named {shown(name)}; give each a name of its own, as metrics are by name"
                )

    @property
    def description(self) -> str:
        """The source, or the names of all sources with the part that each has of the samples."""
        total = sum(source.weight for source in self.sources)
        parts = (f"{source.label} ({100 * source.weight / total:.3g}%)" for source in self.sources)
        return self.source or " + ".join(parts)
