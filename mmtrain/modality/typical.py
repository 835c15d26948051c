"""Typical images, clips and works of a job, which represent its data before they are read. Pure."""

import math
from dataclasses import dataclass, replace

from mmtrain.config.config import Config
from mmtrain.errors import ConfigError
from mmtrain.modality.captioned_clips import FRAMES_PER_S, MOST_S, CaptionedClip
from mmtrain.modality.geometry import ImageGeometry, model_geometry
from mmtrain.modality.metadata import ClipMeta
from mmtrain.spec.model_shapes import DitShape, dit_shape, language_shape
from mmtrain.spec.spec import ModelSpec, ModuleSpec, clips_work, documents_work, frames_work, images_work
from mmtrain.spec.vision_shapes import vision_shape
from mmtrain.spec.work_size import WorkSize

IMAGE_SIDE = 728
"""Pixels along a side of every image (DIP, section 7.1)."""

CLIP_SIDE = 256
"""Pixels along a side of every video clip by default (MovieGen's first stage, arXiv:2410.13720)."""
FRAMES_PER_LATENT = 4
"""Frames after the first one that a VAE encodes to one latent frame, like Wan's (arXiv:2503.20314)."""
PIXELS_PER_LATENT = 8
"""Pixels along a side that a VAE encodes to one latent position, like Wan's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipShape:
    """The latents of square clips, as a DiT reads them."""

    side: int
    """Latent positions along a side."""
    patch: tuple[int, int, int]

    @classmethod
    def of(cls, shape: DitShape, pixels: int) -> "ClipShape":
        """The latents of clips, cut to whole patches. Args: pixels: pixels along a side of a clip.

        Raises: ConfigError: they have no patch along an axis, or more patches than the DiT has positions.
        """
        largest_patch = max(shape.patch[1:])
        side = pixels // PIXELS_PER_LATENT // largest_patch * largest_patch
        clip_shape = cls(side=side, patch=shape.patch)
        longest = clip_shape.latent_frames(round(MOST_S * FRAMES_PER_S))
        grid = (longest // shape.patch[0], side // shape.patch[1], side // shape.patch[2])
        if min(grid) < 1 or max(grid) > shape.max_positions:
            raise ConfigError(
                f"clips of {pixels} x {pixels} pixels and {MOST_S:g} s have {list(grid)} patches along their axes"
                f", but the DiT takes 1 to {shape.max_positions} (model.dit: rope_max_seq_len); choose another size "
                "(--image-side) or raise it"
            )
        return clip_shape

    def latent_frames(self, frames: int) -> int:
        """Number of latent frames of a clip, rounded up to whole patches. Args: frames: frames of pixels."""
        num_frames, patch = 1 + (frames - 1) // FRAMES_PER_LATENT, self.patch[0]
        return -(-num_frames // patch) * patch

    def clip(self, drawn: CaptionedClip, most_text: int) -> ClipMeta:
        """The metadata of a drawn clip. Args: most_text: tokens to which its caption is cut."""
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
class TypicalSizes:
    """The sizes for a workload: microbatches of one step on one model replica, and tokens of an image or clip."""

    num_microbatches: int
    seq_len: int
    """Tokens of one microbatch, image tokens included."""
    grid: tuple[int, int, int] | None
    """Patches (time, height, width) of every image; None: there is no vision encoder."""
    image_tokens: int = 0
    """Number of tokens of an image, and of what comes with it; 0: samples keep their text alone."""
    with_image: tuple[tuple[str, tuple[int, int, int], int], ...] = ()
    """The encoder, grid and tokens of what comes with each image, an item of each further encoder."""
    clip: ClipShape | None = None
    """Latents of every clip; None: the model makes no video. With clips, seq_len limits the tokens of a caption, not
    those of a microbatch."""
    pairs: int = 0
    """Pairs of an image and a caption in every microbatch, of two towers; 0: the model has others. With pairs, seq_len
    limits the tokens of a caption."""
    padded: bool = False
    """Whether the captions of pairs are padded to seq_len tokens."""

    @classmethod
    def of(cls, config: Config, image_side: int = 0) -> "TypicalSizes":
        """The bins of one replica of a job, for square images or clips.

        Args: image_side: pixels along a side; 0: `IMAGE_SIDE`, for clips `CLIP_SIDE`. Images are then resized by the
            encoder's rule, within `data.min_pixels` and `data.max_pixels` (else the family's limits); encoders of one
            size use their own size.
        Raises: ConfigError: an image with one token of text does not fit into training.seq_len, or the encoder does
            not read images.
        """
        bins, seq_len = cls._without_images(config), config.training.seq_len
        if config.model.dit is not None:
            return replace(bins, clip=ClipShape.of(dit_shape(config.model), image_side or CLIP_SIDE))
        if config.model.reads_pairs:
            shape = language_shape(config.model)
            most = min(seq_len, shape.max_positions)
            patches = vision_shape(config.model).full_grid
            return replace(bins, grid=patches, seq_len=most, pairs=config.data.max_pairs, padded=shape.padded)
        if not config.model.encoders:
            return bins
        image_side = image_side or IMAGE_SIDE
        grid, tokens = _image(config, image_side)
        others = _further(config, image_side)
        what = f"an image of {image_side} x {image_side} pixels" + "".join(f" with {name}" for name, _, _ in others)
        tokens += sum(number for _, _, number in others)
        if tokens >= seq_len:
            raise ConfigError(
                f"{what} makes {tokens} tokens, which with text do not fit into training.seq_len = {seq_len}; choose "
                "smaller images (--image-side) or raise seq_len"
            )
        return replace(bins, grid=grid, image_tokens=tokens, with_image=others)

    @classmethod
    def typical(cls, config: Config) -> "TypicalSizes":
        """The bins of one replica of a job with images or clips of typical size.

        Images have the side of `typical_side`; there are no images if not even one fits with a token of text. Clips
        have the side `CLIP_SIDE`.

        Raises: ConfigError: the encoder does not read images.
        """
        if config.model.reads_clips or config.model.reads_pairs or not config.model.encoders:
            return cls.of(config)
        side = typical_side(config)
        fits = _tokens(config, side) < config.training.seq_len
        return cls.of(config, side) if fits else cls._without_images(config)

    @classmethod
    def _without_images(cls, config: Config) -> "TypicalSizes":
        training = config.training
        num_microbatches = training.global_batch_size // config.parallelism.layout.dp
        return cls(num_microbatches=num_microbatches, seq_len=training.seq_len, grid=None)

    @property
    def most_images(self) -> int:
        """Largest number of images that fit into one microbatch with a token of text."""
        if self.pairs:
            return self.pairs
        return (self.seq_len - 1) // self.image_tokens if self.image_tokens else 0

    def work(self, module: ModuleSpec, number: int) -> WorkSize | None:
        """The size of a work of `number` images; None: they do not fit into a microbatch, or there are no images."""
        if self.grid is None or number > max(1, self.most_images):
            return None
        return images_work(module, [self.grid] * number)


def typical_side(config: Config) -> int:
    """Pixels along a side of typical images: `IMAGE_SIDE`, halved until four of them fit into a microbatch. Of clips
    `CLIP_SIDE`. Raises: ConfigError: the encoder does not read images."""
    side = IMAGE_SIDE
    if config.model.dit is not None:
        return CLIP_SIDE
    while _tokens(config, side) * 4 > config.training.seq_len and side > 1:
        side //= 2
    return side


def _tokens(config: Config, side: int) -> int:
    """Tokens of an image, and of what comes with it. Args: side: pixels along a side."""
    return _image(config, side)[1] + sum(number for _, _, number in _further(config, side))


def _geometry(config: Config) -> ImageGeometry:
    return model_geometry(config.model, min_pixels=config.data.min_pixels, max_pixels=config.data.max_pixels)


def _image(config: Config, side: int) -> tuple[tuple[int, int, int] | None, int]:
    """Patches and tokens of an image of the vision encoder, if there is one."""
    if config.model.encoder is None:
        return None, 0
    geometry = _geometry(config)
    grid = geometry.grid(side, side)
    return grid, geometry.num_tokens(grid)


def _further(config: Config, side: int) -> tuple[tuple[str, tuple[int, int, int], int], ...]:
    """The name, patches and tokens of an item of each further encoder: an image of that side, or a full window of
    sound."""
    items = []
    for name in config.model.modules:
        shape = vision_shape(config.model, name)
        if not shape.any_size:
            items.append((name, shape.full_grid, shape.full_tokens))
        else:
            across = max(1, side // (shape.patch_size * shape.merge))
            items.append((name, (1, across * shape.merge, across * shape.merge), across * across))
    return tuple(items)


_PAIRS = 16
"""Pairs of a typical microbatch of two towers."""


def _pairs_sizes(spec: ModelSpec, seq_len: int) -> dict[str, WorkSize]:
    """The reference sizes of two towers: pairs whose captions have half of the tokens that they may have."""
    length = max(1, seq_len // 2)
    sizes = {
        "images": images_work(spec.modules[0], [(1, 16, 16)] * _PAIRS),
        "texts": documents_work([length] * _PAIRS, _PAIRS),
        "pairs": WorkSize(rows=2 * _PAIRS, pairs=_PAIRS**2, outputs=_PAIRS),
    }
    return {module.name: sizes[module.consumes] for module in spec.modules}


def reference_sizes(spec: ModelSpec, seq_len: int) -> dict[str, WorkSize]:
    """Module -> a typical work, for which a separated partition is balanced; half of the tokens are image tokens.

    A microbatch has four documents, labels for a quarter of its tokens, and images of 16 x 16 patches. For a
    text-to-video model it has two clips of 8 s and 256 x 256 pixels with prompts of 64 tokens, see `CLIP_SIDE`; for two
    towers pairs of such images and captions.

    Args: seq_len: tokens of a microbatch.
    """
    if any(module.name == "dit" for module in spec.modules):
        prompts = [min(64, seq_len)] * 2
        sizes = {
            "language": documents_work(prompts, sum(prompts)),
            "dit": clips_work([8192] * 2, prompts, 2 * 8192),
        }
        vae = [module for module in spec.modules if module.name == "vae"]
        return sizes | {module.name: frames_work(module, [(32, 32, 32)] * 2) for module in vae}
    if spec.reads_pairs:
        return _pairs_sizes(spec, seq_len)
    text = WorkSize(rows=seq_len, pairs=max(1, seq_len * seq_len // 8), outputs=max(1, seq_len // 4))
    sizes = {module.name: text for module in spec.text_modules}
    encoders = [module for module in spec.modules if module.name not in sizes]
    for module in encoders:
        outputs = max(1, seq_len // 2 // len(encoders))
        rows = outputs * module.patches_per_token
        window_pairs = rows * min(rows, 256, (module.window * module.merge) ** 2)
        size = WorkSize(rows=rows, pairs=rows * min(rows, 256), outputs=outputs, window_pairs=window_pairs)
        sizes[module.name] = size
    return sizes
