"""Batches that tell the costs of layers apart: what `mmtrain profile` measures a job's layers on. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from math import isqrt

from mmtrain.config.config import Config
from mmtrain.modality.buckets import latent_channels, most_frames, video_geometry
from mmtrain.modality.metadata import ClipMeta, DocumentMeta, ImageMeta, IterationMeta, MicrobatchMeta
from mmtrain.modality.typical import CLIP_SIDE, PIXELS_PER_LATENT
from mmtrain.spec.shapes import vision_shape

LEAST_IMAGE_TEXT = 4
"""Tokens of text next to the images of a document."""

LEAST_CAPTION = 4
"""Tokens of the shortest captions of clips."""

Bucket = tuple[int, int, int]
"""Frames, height and width of the latents of a clip."""


def probing_iteration(config: Config) -> IterationMeta:
    """One microbatch for each size that layers are measured at, none above training.seq_len tokens.

    With an encoder: images of three sizes (or the encoder's one), as many as fit in growing numbers, with little
    or much text beside them, in one document or one each. Then text alone in one or four documents. So rows, attended
    pairs, image tokens and labels change apart from each other. Of a text-to-video job: see `_clips_iteration`.
    """
    if config.model.dit is not None:
        return _clips_iteration(config)
    limit = config.training.seq_len
    found: list[MicrobatchMeta] = []
    for grid, tokens in _images(config):
        for number in _numbers(limit, tokens + LEAST_IMAGE_TEXT):
            together, much = len(found) % 2 == 1, len(found) % 3 == 1
            text = limit - number * tokens if much else number * LEAST_IMAGE_TEXT
            found.append(_microbatch(len(found), grid, tokens, number, text, 1 if together else number))
    for parts, documents in ((8, 1), (4, 1), (2, 1), (1, 1), (2, 4), (1, 4)):
        length = max(documents * 2, limit // parts)
        found.append(_microbatch(len(found), (1, 1, 1), 0, 0, length, documents))
    return IterationMeta(microbatches=tuple(found))


def work_curve(config: Config) -> IterationMeta:
    """Microbatches of 1, 2, 3, ... images (or clips) of one size, the second largest of the probes, and little text.

    They tell how many images a vision work, or clips a DiT work, needs to run well. None without either.
    """
    if config.model.dit is not None:
        buckets = _buckets(config)
        bucket = buckets[min(1, len(buckets) - 1)]
        numbers = _some(_most_clips(config, bucket))
        text = min(config.training.seq_len, LEAST_CAPTION)
        return IterationMeta(microbatches=tuple(_clips(config, i, [bucket] * n, text) for i, n in enumerate(numbers)))
    images = _images(config)
    if not images:
        return IterationMeta(microbatches=())
    grid, tokens = images[min(1, len(images) - 1)]
    most = max(_numbers(config.training.seq_len, tokens + 1))
    made = [_microbatch(i, grid, tokens, n, n, n) for i, n in enumerate(_some(most))]
    return IterationMeta(microbatches=tuple(made))


def _some(most: int) -> list[int]:
    """Numbers up to the largest one, ever further apart."""
    return sorted({number for number in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, most) if number <= most})


def _images(config: Config) -> list[tuple[tuple[int, int, int], int]]:
    """(patches, tokens) of the images to measure with, the largest first: at most a quarter of a microbatch each."""
    if config.model.encoder is None:
        return []
    shape = vision_shape(config.model)
    if shape.fixed_grid is not None:
        t, h, w = shape.fixed_grid
        return [(shape.fixed_grid, t * h * w // shape.patches_per_token)]
    most = config.training.seq_len // 4
    if config.data.max_pixels:
        most = min(most, config.data.max_pixels // (shape.patch_size * shape.merge) ** 2)
    side = max(1, isqrt(most))
    sides = sorted({side, max(1, 3 * side // 4), max(1, side // 2)}, reverse=True)
    return [((1, s * shape.merge, s * shape.merge), s * s) for s in sides]


def _numbers(limit: int, tokens: int) -> list[int]:
    """1, 2, 4, ... and the most of `tokens` each that fit; 1 if none does."""
    return _doubled(max(1, limit // tokens))


def _doubled(most: int) -> list[int]:
    """1, 2, 4, ... and the largest one."""
    return sorted({min(2**k, most) for k in range(most.bit_length() + 1)})


def _microbatch(
    index: int, grid: tuple[int, int, int], tokens: int, number: int, text: int, documents: int
) -> MicrobatchMeta:
    """So many images at the start of documents, and text shared by these; 1/8, 1/2 or all of the text is labelled."""
    share = (8, 2, 1)[index % 3]
    made = []
    for d in range(documents):
        first, last = d * number // documents, (d + 1) * number // documents
        words = (d + 1) * text // documents - d * text // documents
        targets = max(1, words // share)
        length = (last - first) * tokens + words
        images = tuple(
            ImageMeta(sample=index * 1000 + d, index=i, grid=grid, num_tokens=tokens, start=i * tokens)
            for i in range(last - first)
        )
        made.append(
            DocumentMeta(
                sample=index * 1000 + d,
                num_tokens=length,
                num_targets=targets,
                images=images,
                answers=(targets,),
                prefix=length - targets,
            )
        )
    return MicrobatchMeta(documents=tuple(made))


# ------------------------------------------------------------------------------------------------ clips


def _clips_iteration(config: Config) -> IterationMeta:
    """One microbatch for each size that the layers of a text encoder and a DiT are measured at.

    A clip of the longest, a middle and the shortest bucket, each with a caption of all tokens that one may have, of a
    fourth, and of few; as many as a microbatch holds in growing numbers; and clips of all three together. So latent
    tokens, pairs of self- and of cross-attention, text tokens and clips change apart from each other.
    """
    limit = config.training.seq_len
    texts = sorted({limit, -(-limit // 4), min(limit, LEAST_CAPTION)}, reverse=True)
    buckets = _buckets(config)
    made = [([bucket], text) for bucket in buckets for text in texts]
    for size, bucket in enumerate(buckets):
        for place, number in enumerate(_doubled(_most_clips(config, bucket))[1:]):
            made.append(([bucket] * number, texts[(size + place) % len(texts)]))
    together = buckets
    while len(together) > config.data.max_clips or sum(frames for frames, *_ in together) > most_frames(config.data):
        together = together[1:]
    if len(together) > 1:
        made.append((together, texts[-1]))
    return IterationMeta(microbatches=tuple(_clips(config, i, *row) for i, row in enumerate(made)))


def _buckets(config: Config) -> list[Bucket]:
    """The buckets to measure with, the longest first: of three lengths, or as many as there are.

    Latents come in sizes that the config does not say; those of usual clips stand for them.
    """
    assert config.model.dit is not None
    data = config.data
    if latent_channels(config.model.dit) != 3 and config.model.vae is None:
        data = replace(data, video_area=min(data.video_area, (CLIP_SIDE // PIXELS_PER_LATENT) ** 2))
    geometry = video_geometry(config.model.dit, data, config.model.vae)
    lengths, sizes = geometry.frames, geometry.sizes
    chosen = dict.fromkeys((lengths[0], lengths[len(lengths) // 2], lengths[-1]))
    return [(frames, *sizes[i % len(sizes)]) for i, frames in enumerate(chosen)]


def _most_clips(config: Config, bucket: Bucket) -> int:
    """Clips of a bucket that a microbatch holds."""
    return max(1, min(config.data.max_clips, most_frames(config.data) // bucket[0]))


def _clips(config: Config, index: int, buckets: Sequence[Bucket], text: int) -> MicrobatchMeta:
    """Clips with captions of so many tokens each."""
    assert config.model.dit is not None
    geometry = video_geometry(config.model.dit, config.data, config.model.vae)
    clips = tuple(
        ClipMeta(
            sample=index * 1000 + i,
            frames=frames,
            height=height,
            width=width,
            num_tokens=geometry.num_tokens((frames, height, width)),
            num_text_tokens=text,
        )
        for i, (frames, height, width) in enumerate(geometry.latents(*bucket) for bucket in buckets)
    )
    return MicrobatchMeta(clips=clips)
