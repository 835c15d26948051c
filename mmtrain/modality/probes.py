"""Batches that need no data: those on which `mmtrain profile` measures a job's layers, of sizes that separate their
costs, and those of mixed content with which `mmtrain check-parity` compares. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product
from math import isqrt
from random import Random

from mmtrain.config.config import Config
from mmtrain.modality.buckets import latent_channels, most_frames, video_geometry
from mmtrain.modality.metadata import ClipMeta, DocumentMeta, ImageMeta, IterationMeta, MicrobatchMeta
from mmtrain.modality.typical import CLIP_SIDE, PIXELS_PER_LATENT
from mmtrain.spec.model_shapes import language_shape
from mmtrain.spec.vision_shapes import vision_shape

LEAST_IMAGE_TEXT = 4
"""Tokens of text next to the images of a document."""

LEAST_CAPTION = 4
"""Tokens of the shortest captions of clips."""

_NOTHING = ImageMeta(sample=0, index=0, grid=(1, 1, 1), num_tokens=0)

Bucket = tuple[int, int, int]
"""Frames, height and width of the latents of a clip."""


def probing_iteration(config: Config) -> IterationMeta:
    """One microbatch for each size at which layers are measured, of at most training.seq_len tokens.

    Of each encoder: images of three sizes (or the encoder's one), in increasing numbers until they do not fit, with
    little or much text, in one document or one for each image. Then text without images in one or four documents. So
    rows, attended pairs, image tokens and labels vary independently. For text-to-video jobs see `_clips_iteration`, for
    two towers `_pairs_iteration`.
    """
    if config.model.dit is not None:
        return _clips_iteration(config)
    if config.model.reads_pairs:
        return _pairs_iteration(config)
    limit = config.training.seq_len
    microbatches: list[MicrobatchMeta] = []
    for item in (item for name in config.model.encoders for item in _items(config, name)):
        for number in _numbers(limit, item.num_tokens + LEAST_IMAGE_TEXT):
            one_document, long_text = len(microbatches) % 2 == 1, len(microbatches) % 3 == 1
            text = limit - number * item.num_tokens if long_text else number * LEAST_IMAGE_TEXT
            microbatches.append(_microbatch(len(microbatches), item, number, text, 1 if one_document else number))
    for divisor, documents in ((8, 1), (4, 1), (2, 1), (1, 1), (2, 4), (1, 4)):
        length = max(documents * 2, limit // divisor)
        microbatches.append(_microbatch(len(microbatches), _NOTHING, 0, length, documents))
    return IterationMeta(microbatches=tuple(microbatches))


def work_curve(config: Config) -> IterationMeta:
    """Microbatches of 1, 2, 3, ... images (or clips) of one size, the second largest of the probes, and little text.

    They measure the efficiency of a work of [model.encoder] by its number of images, or of a DiT work by its number of
    clips. There are none for a model without either.
    """
    if config.model.dit is not None:
        buckets = _buckets(config)
        bucket = buckets[min(1, len(buckets) - 1)]
        numbers = _increasing(_most_clips(config, bucket))
        text = min(config.training.seq_len, LEAST_CAPTION)
        return IterationMeta(microbatches=tuple(_clips(config, i, [bucket] * n, text) for i, n in enumerate(numbers)))
    if config.model.encoder is None:
        return IterationMeta(microbatches=())
    if config.model.reads_pairs:
        length = _caption_lengths(config)[-1]
        microbatches = [_pairs(config, i, n, length) for i, n in enumerate(_increasing(config.data.max_pairs))]
        return IterationMeta(microbatches=tuple(microbatches))
    *_, image = _items(config, "vision")[:2]
    largest = max(_numbers(config.training.seq_len, image.num_tokens + 1))
    microbatches = [_microbatch(i, image, n, n, n) for i, n in enumerate(_increasing(largest))]
    return IterationMeta(microbatches=tuple(microbatches))


def mixed_iteration(config: Config, seed: int) -> IterationMeta:
    """One replica's microbatches of a job with encoders: the first has items of all encoders, the others of fewer, or
    none, in another order with each seed. Text stands between the items of a document, whose last tokens are labelled.
    """
    random, names = Random(seed), list(config.model.encoders)
    subsets = [subset for size in range(len(names) + 1) for subset in combinations(names, size)]
    order = [subsets.pop(), *random.sample(subsets, len(subsets))]
    number = config.training.global_batch_size // config.parallelism.layout.dp
    microbatches = []
    for index in range(number):
        documents: list[DocumentMeta] = []
        room = config.training.seq_len
        while room > 0 and len(documents) < 4:
            items = [random.choice(_items(config, name)) for name in order[index % len(order)] * random.randint(1, 2)]
            sample = index * 1000 + len(documents)
            documents.append(_mixed_document(random, sample, random.sample(items, len(items)), room))
            room -= documents[-1].num_tokens
        microbatches.append(MicrobatchMeta(documents=tuple(documents)))
    return IterationMeta(microbatches=tuple(microbatches))


def _mixed_document(random: Random, sample: int, items: Sequence[ImageMeta], room: int) -> DocumentMeta:
    """A document of at most `room` tokens; items that do not fit are left out."""
    images: list[ImageMeta] = []
    length = 0
    for item in items:
        start = length + random.randint(1, 9)
        if start + item.num_tokens + 3 <= room:
            images.append(replace(item, sample=sample, index=len(images), start=start))
            length = start + item.num_tokens
    length += min(room - length, random.randint(3, 12))
    targets = min(2, length)
    return DocumentMeta(
        sample=sample,
        num_tokens=length,
        num_targets=targets,
        images=tuple(images),
        answers=(targets,),
        prefix=length - targets,
    )


def _increasing(largest: int) -> list[int]:
    """Increasing numbers up to the largest one, with increasing distances."""
    return sorted({number for number in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, largest) if number <= largest})


def _items(config: Config, module: str) -> list[ImageMeta]:
    """The images of the probes of an encoder, the largest first: at most a quarter of a microbatch each."""
    shape = vision_shape(config.model, module)
    if not shape.any_size:
        grid, tokens, unit = shape.full_grid, shape.full_tokens, shape.patches_per_token
        if shape.packed:  # sounds of three lengths
            tokens = max(4, min(tokens, config.training.seq_len // 4))
            counts = [tokens, 3 * tokens // 4, tokens // 2]
            return [replace(_NOTHING, module=module, grid=(1, 1, n * unit), num_tokens=n) for n in counts]
        return [replace(_NOTHING, module=module, grid=grid, num_tokens=tokens)]
    max_tokens = config.training.seq_len // 4
    if config.data.max_pixels:
        max_tokens = min(max_tokens, config.data.max_pixels // (shape.patch_size * shape.merge) ** 2)
    largest_side = max(1, isqrt(max_tokens))
    all_sides = sorted({largest_side, max(1, 3 * largest_side // 4), max(1, largest_side // 2)}, reverse=True)
    merge = shape.merge
    return [replace(_NOTHING, module=module, grid=(1, s * merge, s * merge), num_tokens=s * s) for s in all_sides]


def _numbers(limit: int, tokens: int) -> list[int]:
    """1, 2, 4, ... and the largest number of images with `tokens` tokens that fits; 1 if none fits."""
    return _doubled(max(1, limit // tokens))


def _doubled(largest: int) -> list[int]:
    """1, 2, 4, ... and the largest one."""
    return sorted({min(2**k, largest) for k in range(largest.bit_length() + 1)})


def _microbatch(index: int, image: ImageMeta, number: int, text: int, documents: int) -> MicrobatchMeta:
    """A microbatch of `number` images and `text` text tokens, divided over documents; 1/8, 1/2 or all of the text is
    labelled."""
    tokens = image.num_tokens
    label_divisor = (8, 2, 1)[index % 3]
    made_documents = []
    for d in range(documents):
        first_image, end_image = d * number // documents, (d + 1) * number // documents
        num_text = (d + 1) * text // documents - d * text // documents
        targets = max(1, num_text // label_divisor)
        length = (end_image - first_image) * tokens + num_text
        images = tuple(
            replace(image, sample=index * 1000 + d, index=i, start=i * tokens) for i in range(end_image - first_image)
        )
        made_documents.append(
            DocumentMeta(
                sample=index * 1000 + d,
                num_tokens=length,
                num_targets=targets,
                images=images,
                answers=(targets,),
                prefix=length - targets,
            )
        )
    return MicrobatchMeta(documents=tuple(made_documents))


# ------------------------------------------------------------------------------------------------ pairs


def _pairs_iteration(config: Config) -> IterationMeta:
    """One microbatch for each size at which the layers of two towers are measured: 1, 2, 4, ... pairs up to
    data.max_pairs, with captions of each length."""
    sizes = product(_doubled(config.data.max_pairs), _caption_lengths(config))
    return IterationMeta(microbatches=tuple(_pairs(config, i, *size) for i, size in enumerate(sizes)))


def _caption_lengths(config: Config) -> list[int]:
    """The most tokens of a caption, a quarter of that, and few; of a tower whose captions are padded, one length."""
    shape = language_shape(config.model)
    most = min(config.training.seq_len, shape.max_positions)
    return [most] if shape.padded else sorted({most, -(-most // 4), min(most, LEAST_CAPTION)}, reverse=True)


def _pairs(config: Config, index: int, number: int, length: int) -> MicrobatchMeta:
    """A microbatch of pairs. Args: length: tokens of each caption."""
    (module,) = config.model.encoders
    image = replace(_NOTHING, module=module, grid=vision_shape(config.model, module).full_grid)
    samples = range(index * 1000, index * 1000 + number)
    return MicrobatchMeta(
        documents=tuple(
            DocumentMeta(sample=sample, num_tokens=length, num_targets=1, images=(replace(image, sample=sample),))
            for sample in samples
        )
    )


# ------------------------------------------------------------------------------------------------ clips


def _clips_iteration(config: Config) -> IterationMeta:
    """One microbatch for each size at which the layers of a text encoder and a DiT are measured.

    One clip of the longest, a middle and the shortest bucket, each with a caption of the largest number of tokens, of a
    quarter of it, and of few; several clips, in increasing numbers up to a full microbatch; and clips of all three
    buckets together. So latent tokens, pairs of self- and of cross-attention, text tokens and clips vary independently.
    """
    limit = config.training.seq_len
    texts = sorted({limit, -(-limit // 4), min(limit, LEAST_CAPTION)}, reverse=True)
    buckets = _buckets(config)
    probes = [([bucket], text) for bucket in buckets for text in texts]
    for size, bucket in enumerate(buckets):
        for index, number in enumerate(_doubled(_most_clips(config, bucket))[1:]):
            probes.append(([bucket] * number, texts[(size + index) % len(texts)]))
    together = buckets
    while len(together) > config.data.max_clips or sum(frames for frames, *_ in together) > most_frames(config.data):
        together = together[1:]
    if len(together) > 1:
        probes.append((together, texts[-1]))
    return IterationMeta(microbatches=tuple(_clips(config, i, *row) for i, row in enumerate(probes)))


def _buckets(config: Config) -> list[Bucket]:
    """The buckets of the probes, the longest first: of three lengths, or fewer if there are fewer.

    The config does not contain the sizes of given latents; those of typical clips replace them.
    """
    assert config.model.dit is not None
    section = config.data
    if latent_channels(config.model.dit) != 3 and config.model.vae is None:
        section = replace(section, video_area=min(section.video_area, (CLIP_SIDE // PIXELS_PER_LATENT) ** 2))
    geometry = video_geometry(config.model.dit, section, config.model.vae)
    lengths, sizes = geometry.frames, geometry.sizes
    chosen = dict.fromkeys((lengths[0], lengths[len(lengths) // 2], lengths[-1]))
    return [(frames, *sizes[i % len(sizes)]) for i, frames in enumerate(chosen)]


def _most_clips(config: Config, bucket: Bucket) -> int:
    """Largest number of clips of a bucket in a microbatch."""
    return max(1, min(config.data.max_clips, most_frames(config.data) // bucket[0]))


def _clips(config: Config, index: int, buckets: Sequence[Bucket], text: int) -> MicrobatchMeta:
    """A microbatch of clips with captions of `text` tokens each."""
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
