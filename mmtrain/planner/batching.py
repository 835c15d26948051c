"""The works of one iteration: which pictures, tokens and clips run together, from the metadata alone.

Source: DIP, arXiv:2504.14145, section 4: N pictures of a microbatch become ceil(N / B) sub-microbatches.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NoReturn

from mmtrain.data.bitfield import LanguageMask, two_way_spans
from mmtrain.data.metadata import ClipMeta, ImageMeta, IterationMeta
from mmtrain.errors import DataError
from mmtrain.models.spec import (
    ZERO_WORK,
    ModelSpec,
    ModuleSpec,
    Rates,
    WorkSize,
    clips_work,
    documents_work,
    frames_work,
    images_work,
)
from mmtrain.planner.balance import split_evenly
from mmtrain.schedule.graph import Work

Grid = tuple[int, int, int]
"""Patches (time, height, width) of a picture."""

VISION = "vision"
LANGUAGE = "language"
DIT = "dit"
VAE = "vae"


@dataclass(frozen=True, kw_only=True)
class Batching:
    """The works of one iteration, with what each of them processes."""

    modules: tuple[str, ...]
    """Names that `Work.module` indexes."""
    works: tuple[Work, ...]
    images_of: tuple[tuple[ImageMeta, ...], ...]
    """[work] -> the pictures of a vision work, in the order of their tokens; empty for a language work."""
    size_of: tuple[WorkSize, ...]
    """[work] -> rows, attended pairs and output rows."""
    clips_of: tuple[tuple[ClipMeta, ...], ...] = ()
    """[work] -> the clips whose prompts or latents a work of a text-to-video job processes; empty for other jobs."""


def make_batching(
    meta: IterationMeta, spec: ModelSpec, sub_microbatch_size: int = 0, attention_mask: LanguageMask = "causal"
) -> Batching:
    """The works of an iteration: for each microbatch its vision works, then the language work `after` them.

    A microbatch with N pictures has ceil(N / sub_microbatch_size) vision works of consecutive pictures, the largest
    with as few FLOPs as possible; a text-only microbatch has none.

    Of a text-to-video model the works of a microbatch are those of the VAE, if it has one, of the text encoder, and of
    the DiT. A DiT work has consecutive clips, and a text work of its own, with their prompts; and a VAE work with their
    frames.

    Args:
        spec: the model; its modules are `vision` and `language`, `language` alone, or `language` and `dit`,
            perhaps with `vae`.
        sub_microbatch_size: pictures in one vision work, or clips in one DiT work; 0: all of the microbatch.
        attention_mask: of the language model; it decides how many pairs are attended.
    Raises: DataError: a microbatch has no token, pictures for a model without a vision encoder, or a picture
        that the model cannot merge or that lies outside of its document; clips for another model, or none.
    """
    modules = tuple(module.name for module in spec.modules)
    if DIT in modules:
        return _clip_batching(meta, spec, sub_microbatch_size)
    weigh = _picture_weight(spec.module(VISION)) if VISION in modules else None
    works: list[Work] = []
    images_of: list[tuple[ImageMeta, ...]] = []
    sizes: list[WorkSize] = []
    for index, microbatch in enumerate(meta.microbatches):
        if microbatch.clips:
            raise DataError(
                f"microbatch {index} has {len(microbatch.clips)} clips, the first {microbatch.clips[0].name}, but the "
                "model has no diffusion transformer; add [model.dit]"
            )
        if not microbatch.num_tokens:
            raise DataError(f"microbatch {index} has no token; every microbatch needs a document")
        if microbatch.images and VISION not in modules:
            raise DataError(
                f"microbatch {index} has {len(microbatch.images)} pictures, the first "
                f"{microbatch.images[0].name}, but the model has no vision encoder; add [model.encoder]"
            )
        first = len(works)
        for sub, images in enumerate(_split_images(microbatch.images, sub_microbatch_size, weigh)):
            works.append(Work(module=modules.index(VISION), microbatch=index, sub_microbatch=sub))
            images_of.append(images)
            sizes.append(images_work(spec.module(VISION), [image.grid for image in images]))
        after = tuple(range(first, len(works)))
        works.append(Work(module=modules.index(LANGUAGE), microbatch=index, sub_microbatch=0, after=after))
        images_of.append(())
        spans = [span for document in microbatch.documents for span in two_way_spans(document, attention_mask)]
        two_way = [high - low for low, high in spans]
        sizes.append(documents_work(microbatch.lengths, microbatch.num_targets, two_way))
    return Batching(modules=modules, works=tuple(works), images_of=tuple(images_of), size_of=tuple(sizes))


def _clip_batching(meta: IterationMeta, spec: ModelSpec, sub_microbatch_size: int) -> Batching:
    modules = tuple(module.name for module in spec.modules)
    weigh = _clip_weight(spec.module(DIT))
    works: list[Work] = []
    clips_of: list[tuple[ClipMeta, ...]] = []
    sizes: list[WorkSize] = []
    for index, microbatch in enumerate(meta.microbatches):
        clips = microbatch.clips
        if not clips or microbatch.documents:
            raise DataError(
                f"microbatch {index} has {len(clips)} clips and {len(microbatch.documents)} documents; a microbatch of "
                "a text-to-video model has at least one clip, and clips alone"
            )
        parts = -(-len(clips) // sub_microbatch_size) if sub_microbatch_size else 1
        weights = [weigh(clip.num_tokens, clip.num_text_tokens) for clip in clips]
        groups = [clips[low:high] for low, high in split_evenly(weights, parts)]
        first = len(works)
        for place, module in enumerate(spec.modules):
            for sub, group in enumerate(groups):
                feeds = range(first + sub, first + place * len(groups), len(groups)) if module.name == DIT else ()
                works.append(Work(module=place, microbatch=index, sub_microbatch=sub, after=tuple(feeds)))
                sizes.append(_clips_size(module, group))
                clips_of.append(group)
    return Batching(
        modules=modules,
        works=tuple(works),
        images_of=((),) * len(works),
        size_of=tuple(sizes),
        clips_of=tuple(clips_of),
    )


def _clips_size(module: ModuleSpec, clips: Sequence[ClipMeta]) -> WorkSize:
    """What some clips ask of a module of a text-to-video model."""
    if module.name == VAE:
        return frames_work(module, [clip.bucket for clip in clips])
    return _work_of(module.name, clips)


def _prompts_work(clips: Sequence[ClipMeta]) -> WorkSize:
    """What the prompts of some clips ask of the text encoder, whose every row leaves."""
    lengths = [clip.num_text_tokens for clip in clips]
    return documents_work(lengths, sum(lengths))


def _latents_work(clips: Sequence[ClipMeta]) -> WorkSize:
    tokens, texts = [clip.num_tokens for clip in clips], [clip.num_text_tokens for clip in clips]
    return clips_work(tokens, texts, sum(clip.num_targets for clip in clips))


def _clip_weight(module: ModuleSpec) -> Callable[[int, int], float]:
    """What a clip of so many latent and text tokens asks of a DiT: FLOPs of the forward."""
    rates = sum((layer.matmul_flops + layer.attention_flops for layer in module.layers), Rates())
    return cache(lambda tokens, texts: rates(clips_work([tokens], [texts], tokens)))


def _split_images(
    images: tuple[ImageMeta, ...], size: int, weigh: Callable[[Grid], float] | None
) -> list[tuple[ImageMeta, ...]]:
    if not images or weigh is None:
        return []
    parts = -(-len(images) // size) if size else 1
    bounds = split_evenly([weigh(image.grid) for image in images], parts)
    return [images[low:high] for low, high in bounds]


def _picture_weight(module: ModuleSpec) -> Callable[[Grid], float]:
    """What a picture of some grid asks of a vision module: FLOPs of the forward; those of the backward go with them."""
    rates = sum((layer.matmul_flops + layer.attention_flops for layer in module.layers), Rates())
    return cache(lambda grid: rates(images_work(module, [grid])))


def _refuse(
    index: int, item: str, module: str, wanted: Sequence[ImageMeta | ClipMeta], found: Sequence[ImageMeta | ClipMeta]
) -> NoReturn:
    """Says what differs between the pictures (or clips) of a microbatch and those of its works for a module."""
    wanted_times, found_times = Counter(wanted), Counter(found)
    for one in (*wanted, *found):
        if wanted_times[one] != found_times[one]:
            raise DataError(
                f"microbatch {index}: {one.name} stands {wanted_times[one]} times in the batch, but in "
                f"{found_times[one]} places of its {module} works; each {item} must be used exactly once"
            )
    expected, one = next((a, b) for a, b in zip(wanted, found, strict=True) if a != b)
    raise DataError(f"microbatch {index}: {one.name} stands where {expected.name} belongs; keep their order")


def check_conservation(meta: IterationMeta, batching: Batching) -> None:
    """Refuses works that lose, double or reorder a picture or clip, or change the number of tokens or targets.

    Raises: DataError: with the microbatch and the picture or the counts.
    """
    if DIT in batching.modules:
        _check_clips(meta, batching)
        return
    of_microbatch: dict[int, list[int]] = {}
    for w, work in enumerate(batching.works):
        of_microbatch.setdefault(work.microbatch, []).append(w)
    for index, microbatch in enumerate(meta.microbatches):
        numbers = of_microbatch.get(index, [])
        images = [image for w in numbers for image in batching.images_of[w]]
        if list(microbatch.images) != images:
            _refuse(index, "picture", VISION, microbatch.images, images)
        language = [w for w in numbers if batching.modules[batching.works[w].module] == LANGUAGE]
        vision = [w for w in numbers if batching.modules[batching.works[w].module] == VISION]
        counts = (
            ("tokens", microbatch.num_tokens, sum(batching.size_of[w].rows for w in language)),
            ("targets", microbatch.num_targets, sum(batching.size_of[w].outputs for w in language)),
            (
                "image tokens",
                sum(image.num_tokens for image in microbatch.images),
                sum(batching.size_of[w].outputs for w in vision),
            ),
        )
        for what, expected_count, count in counts:
            if expected_count != count:
                raise DataError(
                    f"microbatch {index} has {expected_count} {what}, but its works process {count}; each "
                    "must be processed exactly once"
                )
        fed = {other for w in language for other in batching.works[w].after}
        for w in vision:
            if w not in fed:
                raise DataError(
                    f"microbatch {index}: the vision work of {batching.images_of[w][0].name} feeds no "
                    "language work; name it in `after`"
                )
    _check_microbatches(meta, batching)


def _check_clips(meta: IterationMeta, batching: Batching) -> None:
    """Every clip is in one DiT work, in order, whose `after` is one text work with just its prompts; with a VAE, one of
    its works with just its frames comes before that.
    """
    _check_microbatches(meta, batching)
    feeding = [module for module in batching.modules if module != DIT]
    of_microbatch: dict[tuple[int, str], list[int]] = {}
    for w, work in enumerate(batching.works):
        of_microbatch.setdefault((work.microbatch, batching.modules[work.module]), []).append(w)
    fed: Counter[int] = Counter(other for work in batching.works for other in work.after)
    for index, microbatch in enumerate(meta.microbatches):
        for module in batching.modules:
            numbers = of_microbatch.get((index, module), [])
            found = [clip for w in numbers for clip in batching.clips_of[w]]
            if list(microbatch.clips) != found:
                _refuse(index, "clip", _WORKS[module], microbatch.clips, found)
            counted = sum((batching.size_of[w] for w in numbers), ZERO_WORK)
            if module == VAE:  # how many frames become a latent one is its own affair
                counted = WorkSize(rows=0, pairs=0, outputs=counted.outputs)
            wanted = sum((_work_of(module, (clip,)) for clip in microbatch.clips), ZERO_WORK)
            if wanted != counted:
                raise DataError(
                    f"microbatch {index}: its clips are {wanted} for the {_WORKS[module]} works, but these process "
                    f"{counted}; each token must be processed exactly once"
                )
        for w in of_microbatch.get((index, DIT), []):
            after = batching.works[w].after
            found_modules = [batching.modules[batching.works[other].module] for other in after]
            alone = all(fed[o] == 1 and batching.clips_of[o] == batching.clips_of[w] for o in after)
            if found_modules != feeding or not alone:
                owed = " and ".join(f"one {_WORKS[module]} work" for module in feeding)
                raise DataError(
                    f"microbatch {index}: the DiT work of {batching.clips_of[w][0].name} comes after works {after}; it "
                    f"comes after {owed}, of the same clips, that feeds no other"
                )


_WORKS = {VAE: "VAE", LANGUAGE: "text", DIT: "DiT"}
"""How errors call the works of a text-to-video model's modules."""


def _work_of(module: str, clips: Sequence[ClipMeta]) -> WorkSize:
    if module == VAE:
        return WorkSize(rows=0, pairs=0, outputs=sum(math.prod(clip.bucket) for clip in clips))
    return _prompts_work(clips) if module == LANGUAGE else _latents_work(clips)


def _check_microbatches(meta: IterationMeta, batching: Batching) -> None:
    strangers = [work for work in batching.works if not 0 <= work.microbatch < len(meta.microbatches)]
    if strangers:
        raise DataError(
            f"a work belongs to microbatch {strangers[0].microbatch}, but the batch has "
            f"{len(meta.microbatches)} of them; drop it"
        )
