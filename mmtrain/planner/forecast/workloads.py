"""Metadata of iterations drawn from distributions: what a job would read, without any data. Pure and deterministic.

A workload draws samples (images and text tokens, or video clips with captions), packs them greedily into
microbatches, and gives the `IterationMeta` that the loader would give. Which moments are published and which are
assumed is in docs/workloads.md.

Sources: DIP, arXiv:2504.14145, sections 2.2, 7.1 and 7.2; OBELICS, arXiv:2306.16527; ScienceQA, arXiv:2209.09513.
"""

import difflib
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mmtrain.errors import ConfigError
from mmtrain.modality.captioned_clips import video_captions
from mmtrain.modality.metadata import DocumentMeta, ImageMeta, IterationMeta, MicrobatchMeta
from mmtrain.modality.typical import Bins

Counts = npt.NDArray[np.int64]

VIDEO_CAPTIONS = "video_captions"
"""Name of the workload of text-to-video models."""

_AT_ONCE = 256
"""Samples drawn together; the values do not depend on how many of them are used."""


class Samples(NamedTuple):
    """Samples of a source, column by column."""

    images: Counts
    text: Counts
    """Tokens that are not images'; at least 1."""
    prompt: Counts
    """Of these, tokens without a label, in front; fewer than all."""


Source = Callable[[np.random.Generator, int], Samples]
"""(generator, number of samples) -> samples."""


# ---------------------------------------------------------------------------------------------- sources


def image_text_pairs(rng: np.random.Generator, count: int) -> Samples:
    """One image and a short caption each, as in LAION-2B: 16.4 text tokens an image on average."""
    text = _log_normal(rng, count, mean=16.4, sigma=0.5)
    return Samples(np.ones(count, np.int64), text, np.zeros(count, np.int64))


def interleaved(rng: np.random.Generator, count: int) -> Samples:
    """Web documents with images between paragraphs, as in OBELICS: 2.5 images and 815 text tokens on average."""
    images = rng.geometric(1 / 2.5, count).astype(np.int64)
    return Samples(images, _log_normal(rng, count, mean=815, sigma=1.0), np.zeros(count, np.int64))


def science_qa(rng: np.random.Generator, count: int) -> Samples:
    """Questions with answer and explanation, as in ScienceQA: an image in 48.7 % of them, a text context in 48.2 %,
    both in 30.8 %, a lecture in 83.9 % and an explanation in 90.5 %."""
    image, context, lecture, explanation = (rng.random(count) for _ in range(4))
    images = image < 0.487
    contexts = context < np.where(images, 0.308 / 0.487, (0.482 - 0.308) / (1 - 0.487))
    prompt = _log_normal(rng, count, mean=40, sigma=0.4)
    for there, mean in ((contexts, 50), (lecture < 0.839, 165)):
        prompt += np.where(there, _log_normal(rng, count, mean=mean, sigma=0.5), 0)
    answer = 2 + np.where(explanation < 0.905, _log_normal(rng, count, mean=60, sigma=0.5), 0)
    return Samples(images.astype(np.int64), prompt + answer, prompt)


def mix(rng: np.random.Generator, count: int) -> Samples:
    """Samples of the three sources above in equal numbers, at random."""
    which = rng.integers(3, size=count)
    drawn = [source(rng, count) for source in (image_text_pairs, interleaved, science_qa)]
    return Samples(*(np.choose(which, columns) for columns in zip(*drawn, strict=True)))


def _log_normal(rng: np.random.Generator, count: int, *, mean: float, sigma: float) -> Counts:
    """Whole numbers of at least 1 with about that mean; sigma: of the logarithm."""
    values = rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)
    return np.maximum(1, np.rint(values)).astype(np.int64)


# ------------------------------------------------------------------------------------------ workloads


Workload = Callable[[np.random.Generator, Bins, int], Iterator[list[tuple[int, int, int]]]]
"""(generator, bins, iteration) -> microbatches without end, each a list of (images, text, prompt)."""


def packed(source: Source) -> Workload:
    """The workload that packs samples of a source in the order in which they come.

    A sample that does not fit closes the microbatch and opens the next one. Images and text beyond what an empty
    microbatch holds are cut off the end of a sample.
    """

    def microbatches(rng: np.random.Generator, bins: Bins, iteration: int) -> Iterator[list[tuple[int, int, int]]]:
        taken: list[tuple[int, int, int]] = []
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
                    yield taken
                    taken, room = [], bins.seq_len
                taken.append(row)
                room -= length

    return microbatches


RISE_AND_FALL_PERIOD = 20
"""Iterations from one rise of the number of images to the next (DIP, figure 8b: two of them in 40 iterations)."""


def image_bounds(iteration: int) -> tuple[int, int]:
    """Least and most images of a microbatch of `rise_and_fall`, for iterations counted from 0.

    In the first five iterations of a period the lower bound rises from 0 to 16 and the upper one stays at 32; in the
    other fifteen both fall to 0.
    """
    step = iteration % RISE_AND_FALL_PERIOD
    if step < 5:
        return 4 * step, 32
    left = (RISE_AND_FALL_PERIOD - 1 - step) / 15
    return round(16 * left), round(32 * left)


def rise_and_fall(rng: np.random.Generator, bins: Bins, iteration: int) -> Iterator[list[tuple[int, int, int]]]:
    """Full microbatches of interleaved documents whose number of images stays within `image_bounds`.

    The number is normal around 16 with a deviation of 9, cut at the bounds: 22 on average at the peak, as in DIP,
    figure 8b. Where 32 images do not fit, bounds shrink in proportion.
    """
    scale = min(1.0, bins.most_images / 32)
    low, high = (math.floor(scale * bound) for bound in image_bounds(iteration))
    counts = np.arange(low, high + 1)
    weights = np.exp(-0.5 * ((counts - 16 * scale) / (9 * scale)) ** 2) if scale else np.ones(1)
    while True:
        for images in rng.choice(counts, size=_AT_ONCE, p=weights / weights.sum()).tolist():
            yield _interleaved_microbatch(rng, bins, images)


def _interleaved_microbatch(rng: np.random.Generator, bins: Bins, images: int) -> list[tuple[int, int, int]]:
    """Documents with so many images in all that fill a microbatch."""
    text = bins.seq_len - images * bins.image_tokens
    samples = interleaved(rng, 1 + max(images, bins.seq_len // 815))
    owned = np.diff(np.minimum(np.cumsum(samples.images), images), prepend=0) if images else samples.images * 0
    kept = max(1, np.count_nonzero(owned) if images else round(text / 815))
    owned, weights = owned[: min(kept, text)], samples.text[: min(kept, text)]
    owned[-1] += images - owned.sum()
    # Every document has a token of text; the rest in proportion to what was drawn.
    ends = np.rint(np.cumsum(weights) / weights.sum() * (text - len(weights))).astype(np.int64)
    return [(n, 1 + more, 0) for n, more in zip(owned.tolist(), np.diff(ends, prepend=0).tolist(), strict=True)]


WORKLOADS: dict[str, Workload] = {
    "image_text_pairs": packed(image_text_pairs),
    "interleaved": packed(interleaved),
    "science_qa": packed(science_qa),
    "mix": packed(mix),
    "rise_and_fall": rise_and_fall,
}
"""Those that vision-language and language models read, by name."""


def draw(name: str, bins: Bins, *, seed: int, iteration: int, replica: int = 0) -> IterationMeta:
    """The metadata of one iteration of a workload on one model replica: the same for the same arguments.

    Args: seed, iteration, replica: key the random stream, so that any iteration can be drawn without those before it.
    Raises: ConfigError: there is no workload of that name, or it is of another kind of model.
    """
    known = (*WORKLOADS, VIDEO_CAPTIONS)
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"workload {name!r} does not exist{hint}; choose one of {', '.join(known)}")
    if (name == VIDEO_CAPTIONS) != (bins.clip is not None):
        needs = f"choose {VIDEO_CAPTIONS!r}" if bins.clip else f"choose one of {', '.join(WORKLOADS)}"
        reads = "reads prompts and video clips" if bins.clip else "reads no video clips"
        raise ConfigError(f"workload {name!r} does not go with a model that {reads}; {needs}")
    if bins.clip is not None:
        groups = video_captions(bins.num_microbatches, seed=seed, iteration=iteration, replica=replica)
        shape, most = bins.clip, bins.seq_len
        clips = [tuple(shape.clip(drawn, most) for drawn in group) for group in groups]
        return IterationMeta(microbatches=tuple(MicrobatchMeta(clips=group) for group in clips))
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, iteration, replica))))
    endless = WORKLOADS[name](rng, bins, iteration)
    sample, microbatches = 0, []
    for _ in range(bins.num_microbatches):
        rows = next(endless)
        documents = tuple(_document(bins, sample + i, *row) for i, row in enumerate(rows))
        sample += len(rows)
        microbatches.append(MicrobatchMeta(documents=documents))
    return IterationMeta(microbatches=tuple(microbatches))


def _document(bins: Bins, sample: int, num_images: int, text: int, prompt: int) -> DocumentMeta:
    """A document whose images stand before equal parts of its text."""
    size, grid = bins.image_tokens, bins.grid
    places = [i * size + i * text // num_images for i in range(num_images)]
    images = tuple(
        ImageMeta(sample=sample, index=i, grid=grid, num_tokens=size, start=place)
        for i, place in enumerate(places)
        if grid is not None
    )
    # The first label is that of the first text token behind the prompt and the images that stand before it.
    before = sum(i * text // num_images <= prompt for i in range(num_images))
    return DocumentMeta(
        sample=sample,
        num_tokens=num_images * size + text,
        num_targets=text - prompt,
        images=images,
        answers=(text - prompt,),
        prefix=before * size + prompt,
    )
