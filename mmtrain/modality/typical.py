"""Usual images, clips and works of a job: what stands for its data where nobody has seen them. Pure."""

import math
from dataclasses import dataclass, replace

from mmtrain.config.config import Config
from mmtrain.config.model import EncoderConfig
from mmtrain.errors import ConfigError
from mmtrain.modality.captioned_clips import FRAMES_PER_S, MOST_S, CaptionedClip
from mmtrain.modality.geometry import ImageGeometry, image_geometry
from mmtrain.modality.metadata import ClipMeta
from mmtrain.spec.families import encoder_config
from mmtrain.spec.shapes import DitShape, dit_shape
from mmtrain.spec.spec import ModelSpec, ModuleSpec, WorkSize, clips_work, documents_work, frames_work, images_work

IMAGE_SIDE = 728
"""Pixels along a side of every image (DIP, section 7.1)."""

CLIP_SIDE = 256
"""Pixels along a side of every video clip, if nothing else is asked for (MovieGen's first stage, arXiv:2410.13720)."""
FRAMES_PER_LATENT = 4
"""Frames behind the first one that a VAE joins to one latent frame, as Wan's does (arXiv:2503.20314)."""
PIXELS_PER_LATENT = 8
"""Pixels along a side that a VAE joins to one latent place, as Wan's does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipShape:
    """What a DiT reads of square clips."""

    side: int
    """Latent places along a side."""
    patch: tuple[int, int, int]

    @classmethod
    def of(cls, shape: DitShape, pixels: int) -> "ClipShape":
        """The latents of clips of so many pixels along a side, cut to whole patches.

        Raises: ConfigError: not one patch, or more than the DiT has positions for.
        """
        most = max(shape.patch[1:])
        side = pixels // PIXELS_PER_LATENT // most * most
        found = cls(side=side, patch=shape.patch)
        longest = found.latent_frames(round(MOST_S * FRAMES_PER_S))
        sides = (longest // shape.patch[0], side // shape.patch[1], side // shape.patch[2])
        if min(sides) < 1 or max(sides) > shape.max_positions:
            raise ConfigError(
                f"clips of {pixels} x {pixels} pixels and {MOST_S:g} s have {list(sides)} patches along their axes, "
                f"but the DiT takes 1 to {shape.max_positions} (model.dit: rope_max_seq_len); choose another size "
                "(--image-side) or raise it"
            )
        return found

    def latent_frames(self, frames: int) -> int:
        """Latent frames of a clip, whole patches of them."""
        made, patch = 1 + (frames - 1) // FRAMES_PER_LATENT, self.patch[0]
        return -(-made // patch) * patch

    def clip(self, drawn: CaptionedClip, most_text: int) -> ClipMeta:
        """The metadata of a drawn clip. Args: most_text: tokens that its caption is cut to."""
        frames = self.latent_frames(drawn.num_frames)
        return ClipMeta(
            sample=drawn.sample,
            frames=frames,
            height=self.side,
            width=self.side,
            num_tokens=frames * self.side * self.side // math.prod(self.patch),
            num_text_tokens=min(drawn.caption_tokens, most_text),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bins:
    """What a workload fills: the microbatches of one step on one model replica, and what an image or clip takes."""

    num_microbatches: int
    seq_len: int
    """Tokens of one microbatch, image tokens included."""
    grid: tuple[int, int, int] | None
    """Patches (time, height, width) of every image; None: the model reads no images; samples keep their text."""
    image_tokens: int = 0
    """Tokens that an image fills."""
    clip: ClipShape | None = None
    """Of every clip; None: the model makes no video. Microbatches of clips are not filled with tokens: seq_len bounds a
    caption."""

    @classmethod
    def of(cls, config: Config, image_side: int = 0) -> "Bins":
        """The bins of one replica of a job, for square images or clips.

        Args: image_side: pixels, 0: `IMAGE_SIDE`, of clips `CLIP_SIDE`. Of images before the encoder's own
            resizing, for which `data.min_pixels` and `data.max_pixels` (else Qwen2-VL's limits) hold; encoders of one
            size have their own.
        Raises: ConfigError: an image with one token of text does not fit into training.seq_len, or the encoder reads
            no images.
        """
        training, dp = config.training, config.parallelism.mesh_shape.dp
        bins = cls(num_microbatches=training.global_batch_size // dp, seq_len=training.seq_len, grid=None)
        if config.model.dit is not None:
            return replace(bins, clip=ClipShape.of(dit_shape(config.model), image_side or CLIP_SIDE))
        if config.model.encoder is None:
            return bins
        image_side = image_side or IMAGE_SIDE
        geometry = _geometry(config, config.model.encoder)
        grid = geometry.grid(image_side, image_side)
        tokens = geometry.num_tokens(grid)
        if tokens >= training.seq_len:
            raise ConfigError(
                f"an image of {image_side} x {image_side} pixels makes {tokens} tokens, which with text do not "
                f"fit into training.seq_len = {training.seq_len}; choose smaller images (--image-side) or "
                "raise seq_len"
            )
        return cls(num_microbatches=bins.num_microbatches, seq_len=bins.seq_len, grid=grid, image_tokens=tokens)

    @classmethod
    def typical(cls, config: Config) -> "Bins":
        """The bins of one replica of a job whose images nobody has seen: of `IMAGE_SIDE`, or half of it, and so on,
        until four of them fit into a microbatch; no images where not even one fits with a token of text. Clips are of
        `CLIP_SIDE`.

        Raises: ConfigError: the encoder reads no images.
        """
        training, dp = config.training, config.parallelism.mesh_shape.dp
        bins = cls(num_microbatches=training.global_batch_size // dp, seq_len=training.seq_len, grid=None)
        if config.model.dit is not None:
            return cls.of(config)
        if config.model.encoder is None:
            return bins
        geometry, side = _geometry(config, config.model.encoder), IMAGE_SIDE
        while geometry.num_tokens(geometry.grid(side, side)) * 4 > training.seq_len and side > 1:
            side //= 2
        grid = geometry.grid(side, side)
        tokens = geometry.num_tokens(grid)
        return replace(bins, grid=grid, image_tokens=tokens) if tokens < training.seq_len else bins

    @property
    def most_images(self) -> int:
        """Images that fit into one microbatch with a token of text."""
        return (self.seq_len - 1) // self.image_tokens if self.grid else 0

    def work(self, module: ModuleSpec, number: int) -> WorkSize | None:
        """A work of so many images; None: more than fit into a microbatch, or there are no images."""
        if self.grid is None or number > max(1, self.most_images):
            return None
        return images_work(module, [self.grid] * number)


def _geometry(config: Config, encoder: EncoderConfig) -> ImageGeometry:
    return image_geometry(
        encoder_config(encoder),
        spatial_merge=config.model.projector.spatial_merge,
        min_pixels=config.data.min_pixels,
        max_pixels=config.data.max_pixels,
    )


def reference_sizes(spec: ModelSpec, seq_len: int) -> dict[str, WorkSize]:
    """A typical work of each module, which a separated partition is balanced for: half of the tokens are images'.

    Four documents a microbatch, a quarter of the tokens labelled, images of 16 x 16 patches. Of a text-to-video
    model, two clips of 8 s and 256 x 256 pixels with prompts of 64 tokens, see `CLIP_SIDE`.
    """
    if any(module.name == "dit" for module in spec.modules):
        prompts = [min(64, seq_len)] * 2
        sizes = {
            "language": documents_work(prompts, sum(prompts)),
            "dit": clips_work([8192] * 2, prompts, 2 * 8192),
        }
        vae = [module for module in spec.modules if module.name == "vae"]
        return sizes | {module.name: frames_work(module, [(32, 32, 32)] * 2) for module in vae}
    sizes = {"language": WorkSize(rows=seq_len, pairs=max(1, seq_len * seq_len // 8), outputs=max(1, seq_len // 4))}
    if any(module.name == "vision" for module in spec.modules):
        vision = spec.module("vision")
        outputs = max(1, seq_len // 2)
        rows = outputs * vision.patches_per_token
        window_pairs = rows * min(rows, 256, (vision.window * vision.merge) ** 2)
        sizes["vision"] = WorkSize(rows=rows, pairs=rows * min(rows, 256), outputs=outputs, window_pairs=window_pairs)
    return sizes
