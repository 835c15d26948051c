"""Metadata of iterations, drawn from distributions instead of data. Pure and deterministic.

A workload draws samples (images and text tokens, or video clips with captions), packs them greedily into
microbatches, and returns an `IterationMeta` like the loader's. docs/simulator.md lists the published and the assumed
moments of the distributions.

Sources: DIP, arXiv:2504.14145, sections 2.2, 7.1 and 7.2; OBELICS, arXiv:2306.16527; ScienceQA, arXiv:2209.09513.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mmtrain.errors import ConfigError, nearest
from mmtrain.modality.captioned_clips import video_captions
from mmtrain.modality.metadata import DocumentMeta, ImageMeta, IterationMeta, MicrobatchMeta
from mmtrain.modality.typical import TypicalSizes

Counts = npt.NDArray[np.int64]

VIDEO_CAPTIONS = "video_captions"
"""Name of the workload of text-to-video models."""

_AT_ONCE = 256
"""Samples drawn together; the values do not depend on how many of them are used."""


class SampleColumns(NamedTuple):
    """Samples of a source, as columns of shape [samples]."""

    images: Counts
    """Number of images."""
    text: Counts
    """Number of text tokens; at least 1."""
    prompt: Counts
    """Number of leading text tokens without a label; less than `text`."""


SampleSource = Callable[[np.random.Generator, int], SampleColumns]
"""A function (generator, number of samples) -> samples."""


# ---------------------------------------------------------------------------------------------- sources


def image_text_pairs(rng: np.random.Generator, count: int) -> SampleColumns:
    """Samples of one image and a short caption, as in LAION-2B: 16.4 text tokens for each image on average.

    Source: DIP, arXiv:2504.14145, section 2.2.
    """
    text = _log_normal(rng, count, mean=16.4, sigma=0.5)
    return SampleColumns(np.ones(count, np.int64), text, np.zeros(count, np.int64))


def interleaved(rng: np.random.Generator, count: int) -> SampleColumns:
    """Web documents with images between paragraphs, as in OBELICS: 2.5 images and 815 text tokens on average.

    Source: OBELICS, arXiv:2306.16527.
    """
    images = rng.geometric(1 / 2.5, count).astype(np.int64)
    return SampleColumns(images, _log_normal(rng, count, mean=815, sigma=1.0), np.zeros(count, np.int64))


def science_qa(rng: np.random.Generator, count: int) -> SampleColumns:
    """Questions with answer and explanation, as in ScienceQA: an image in 48.7 % of them, a text context in 48.2 %,
    both in 30.8 %, a lecture in 83.9 % and an explanation in 90.5 %.

    Source: ScienceQA, arXiv:2209.09513.
    """
    image, context, lecture, explanation = (rng.random(count) for _ in range(4))
    images = image < 0.487
    contexts = context < np.where(images, 0.308 / 0.487, (0.482 - 0.308) / (1 - 0.487))
    prompt = _log_normal(rng, count, mean=40, sigma=0.4)
    for is_present, mean in ((contexts, 50), (lecture < 0.839, 165)):
        prompt += np.where(is_present, _log_normal(rng, count, mean=mean, sigma=0.5), 0)
    answer = 2 + np.where(explanation < 0.905, _log_normal(rng, count, mean=60, sigma=0.5), 0)
    return SampleColumns(images.astype(np.int64), prompt + answer, prompt)


def mix(rng: np.random.Generator, count: int) -> SampleColumns:
    """Samples of the three sources above, each chosen at random with equal probability."""
    which = rng.integers(3, size=count)
    drawn = [source(rng, count) for source in (image_text_pairs, interleaved, science_qa)]
    return SampleColumns(*(np.choose(which, columns) for columns in zip(*drawn, strict=True)))


def _log_normal(rng: np.random.Generator, count: int, *, mean: float, sigma: float) -> Counts:
    """[count] log-normal integers of at least 1. Args: mean: approximate. sigma: of the logarithm."""
    values = rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)
    return np.maximum(1, np.rint(values)).astype(np.int64)


# ------------------------------------------------------------------------------------------ workloads


Workload = Callable[[np.random.Generator, TypicalSizes, int], Iterator[list[tuple[int, int, int]]]]
"""A function (generator, bins, iteration) -> endless microbatches, each a list of (images, text, prompt)."""


def packed(source: SampleSource) -> Workload:
    """The workload that packs the samples of a source in their order.

    A sample that does not fit ends the microbatch and starts the next one. Images and text that exceed an empty
    microbatch are cut off the end of a sample.
    """

    def microbatches(
        rng: np.random.Generator, bins: TypicalSizes, iteration: int
    ) -> Iterator[list[tuple[int, int, int]]]:
        microbatch: list[tuple[int, int, int]] = []
        room = bins.seq_len
        while True:
            samples = source(rng, _AT_ONCE)
            images = np.minimum(samples.images, bins.most_images)
            text = np.minimum(samples.text, bins.seq_len - images * bins.image_tokens)
            prompt = np.minimum(samples.prompt, text - 1)
            lengths = images * bins.image_tokens + text
            rows = zip(images.tolist(), text.tolist(), prompt.tolist(), strict=True)
            for row, length in zip(rows, lengths.tolist(), strict=True):
                if length > room:
                    yield microbatch
                    microbatch, room = [], bins.seq_len
                microbatch.append(row)
                room -= length

    return microbatches


RISE_AND_FALL_PERIOD = 20
"""Iterations from one rise of the number of images to the next (DIP, figure 8b: two rises in 40 iterations)."""


def image_bounds(iteration: int) -> tuple[int, int]:
    """Smallest and largest number of images in a microbatch of `rise_and_fall`. Args: iteration: counted from 0.

    In the first five iterations of a period the lower bound rises from 0 to 16 and the upper bound stays at 32; in the
    other fifteen both fall to 0. Source: DIP, arXiv:2504.14145, figure 8b.
    """
    step = iteration % RISE_AND_FALL_PERIOD
    if step < 5:
        return 4 * step, 32
    remaining = (RISE_AND_FALL_PERIOD - 1 - step) / 15
    return round(16 * remaining), round(32 * remaining)


def rise_and_fall(rng: np.random.Generator, bins: TypicalSizes, iteration: int) -> Iterator[list[tuple[int, int, int]]]:
    """Full microbatches of interleaved documents whose number of images stays within `image_bounds`.

    The number has a normal distribution with mean 16 and deviation 9, truncated at the bounds: 22 on average at the
    peak, as in DIP, figure 8b. If 32 images do not fit, the bounds are scaled down.
    """
    scale = min(1.0, bins.most_images / 32)
    low, high = (math.floor(scale * bound) for bound in image_bounds(iteration))
    counts = np.arange(low, high + 1)
    weights = np.exp(-0.5 * ((counts - 16 * scale) / (9 * scale)) ** 2) if scale else np.ones(1)
    while True:
        for images in rng.choice(counts, size=_AT_ONCE, p=weights / weights.sum()).tolist():
            yield _interleaved_microbatch(rng, bins, images)


def _interleaved_microbatch(rng: np.random.Generator, bins: TypicalSizes, images: int) -> list[tuple[int, int, int]]:
    """Documents (images, text, prompt) that together fill a microbatch and have `images` images."""
    text = bins.seq_len - images * bins.image_tokens
    samples = interleaved(rng, 1 + max(images, bins.seq_len // 815))
    owned = np.diff(np.minimum(np.cumsum(samples.images), images), prepend=0) if images else samples.images * 0
    num_documents = max(1, np.count_nonzero(owned) if images else round(text / 815))
    owned, weights = owned[: min(num_documents, text)], samples.text[: min(num_documents, text)]
    owned[-1] += images - owned.sum()
    # Every document has one token of text; the remaining tokens are in proportion to the drawn lengths.
    ends = np.rint(np.cumsum(weights) / weights.sum() * (text - len(weights))).astype(np.int64)
    return [(n, 1 + extra, 0) for n, extra in zip(owned.tolist(), np.diff(ends, prepend=0).tolist(), strict=True)]


def pretraining(rng: np.random.Generator, bins: TypicalSizes, iteration: int) -> Iterator[list[tuple[int, int, int]]]:
    """Full microbatches of text whose every token has a label: web documents in a row, cut where a microbatch ends.

    Their lengths are those of `interleaved`, without its images.
    """
    remaining: list[int] = []
    while True:
        microbatch: list[tuple[int, int, int]] = []
        room = bins.seq_len
        while room:
            remaining = remaining or interleaved(rng, _AT_ONCE).text.tolist()
            text = min(remaining[-1], room)
            microbatch.append((0, text, 0))
            room -= text
            remaining[-1:] = [remaining[-1] - text] if remaining[-1] > text else []
        yield microbatch


PAIRS = "image_text_pairs"
"""Name of the workload of two towers, too."""

WORKLOADS: dict[str, Workload] = {
    PAIRS: packed(image_text_pairs),
    "interleaved": packed(interleaved),
    "science_qa": packed(science_qa),
    "mix": packed(mix),
    "rise_and_fall": rise_and_fall,
    "pretraining": pretraining,
}
"""Name -> workload of vision-language and language models."""


def draw(name: str, bins: TypicalSizes, *, seed: int, iteration: int, replica: int = 0) -> IterationMeta:
    """The metadata of one iteration of a workload on one model replica; deterministic.

    Args: seed, iteration, replica: keys of the random stream, so that each iteration can be drawn by itself.
    Raises: ConfigError: there is no workload of that name, or it is for another kind of model.
    """
    names = (*WORKLOADS, VIDEO_CAPTIONS)
    if name not in names:
        near = nearest(name, names)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"workload {name!r} does not exist{hint}; choose one of {', '.join(names)}")
    if (name == VIDEO_CAPTIONS) != (bins.clip is not None):
        choices = f"choose {VIDEO_CAPTIONS!r}" if bins.clip else f"choose one of {', '.join(WORKLOADS)}"
        reads = "reads prompts and video clips" if bins.clip else "reads no video clips"
        raise ConfigError(f"workload {name!r} does not go with a model that {reads}; {choices}")
    if bins.pairs and name != PAIRS:
        raise ConfigError(f"workload {name!r} does not go with two towers, which read pairs; choose {PAIRS!r}")
    if bins.clip is not None:
        groups = video_captions(bins.num_microbatches, seed=seed, iteration=iteration, replica=replica)
        shape, max_tokens = bins.clip, bins.seq_len
        clips = [tuple(shape.clip(drawn, max_tokens) for drawn in group) for group in groups]
        return IterationMeta(microbatches=tuple(MicrobatchMeta(clips=group) for group in clips))
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, iteration, replica))))
    if bins.pairs:
        return _drawn_pairs(rng, bins)
    endless = WORKLOADS[name](rng, bins, iteration)
    sample, microbatches = 0, []
    for _ in range(bins.num_microbatches):
        rows = next(endless)
        documents = tuple(_document(bins, sample + i, *row) for i, row in enumerate(rows))
        sample += len(rows)
        microbatches.append(MicrobatchMeta(documents=documents))
    return IterationMeta(microbatches=tuple(microbatches))


def _drawn_pairs(rng: np.random.Generator, bins: TypicalSizes) -> IterationMeta:
    """Full microbatches of pairs with the captions of `image_text_pairs`."""
    assert bins.grid is not None
    count = bins.num_microbatches * bins.pairs
    lengths = (
        np.full(count, bins.seq_len) if bins.padded else np.minimum(image_text_pairs(rng, count).text, bins.seq_len)
    )
    documents = [
        DocumentMeta(
            sample=sample,
            num_tokens=length,
            num_targets=1,
            images=(ImageMeta(sample=sample, index=0, grid=bins.grid, num_tokens=0),),
        )
        for sample, length in enumerate(lengths.tolist())
    ]
    starts = range(0, count, bins.pairs)
    return IterationMeta(
        microbatches=tuple(MicrobatchMeta(documents=tuple(documents[start : start + bins.pairs])) for start in starts)
    )


def _document(bins: TypicalSizes, sample: int, num_images: int, text: int, prompt: int) -> DocumentMeta:
    """A document with an image, and an item of each further encoder, before each of equal parts of its text."""
    size, items = bins.image_tokens, []
    own = size - sum(tokens for _, _, tokens in bins.with_image)
    for i in range(num_images):
        start = i * size + i * text // num_images
        if bins.grid is not None:
            items.append(ImageMeta(sample=sample, index=i, grid=bins.grid, num_tokens=own, start=start))
        start += own
        for name, grid, tokens in bins.with_image:
            items.append(ImageMeta(sample=sample, index=i, module=name, grid=grid, num_tokens=tokens, start=start))
            start += tokens
    images = tuple(items)
    # The first label is that of the first text token after the prompt and the images before it.
    leading_images = sum(i * text // num_images <= prompt for i in range(num_images))
    return DocumentMeta(
        sample=sample,
        num_tokens=num_images * size + text,
        num_targets=text - prompt,
        images=images,
        answers=(text - prompt,),
        prefix=leading_images * size + prompt,
    )
