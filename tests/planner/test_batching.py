from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from mmtrain.errors import DataError
from mmtrain.modality.bitfield import LanguageMask, language_bits, visible_keys
from mmtrain.modality.metadata import IterationMeta, MicrobatchMeta
from mmtrain.planner.batching import Batching, check_conservation, make_batching
from mmtrain.schedule.graph import Work
from mmtrain.spec.spec import ModelSpec
from mmtrain.spec.work_size import Rates, WorkSize
from tests.data.masks import KINDS, microbatches
from tests.planner.specs import META, microbatch, vlm


def test_images_of_a_microbatch_form_sub_microbatches_of_equal_patches() -> None:
    batching = make_batching(META, vlm(), 2)
    assert batching.modules == ("vision", "language")
    assert batching.works == (
        Work(module=0, microbatch=0, sub_microbatch=0),
        Work(module=0, microbatch=0, sub_microbatch=1),
        Work(module=1, microbatch=0, sub_microbatch=0, after=(0, 1)),
        Work(module=1, microbatch=1, sub_microbatch=0),
        Work(module=0, microbatch=2, sub_microbatch=0),
        Work(module=1, microbatch=2, sub_microbatch=0, after=(4,)),
    )
    assert [[i.index for i in item.units] for item in batching.items if item.work.module == 0] == [[0, 1], [2], [0]]
    assert batching.sizes[0] == WorkSize(rows=20, pairs=16 * 16 + 4 * 4, outputs=5)
    assert batching.sizes[2] == WorkSize(rows=23, pairs=23 * 24 // 2, outputs=5)
    check_conservation(META, batching)


@pytest.mark.parametrize(("size", "counts"), [(0, [1, 0, 1]), (1, [3, 0, 1]), (2, [2, 0, 1]), (9, [1, 0, 1])])
def test_number_of_sub_microbatches(size: int, counts: list[int]) -> None:
    batching = make_batching(META, vlm(), size)
    assert [sum(w.module == 0 and w.microbatch == m for w in batching.works) for m in range(3)] == counts
    check_conservation(META, batching)


def test_works_of_a_microbatch_have_equal_flops() -> None:
    plain = vlm()
    vision = plain.module("vision")
    attending = tuple(replace(layer, attention_flops=Rates(pair=1.0)) for layer in vision.layers)
    spec = ModelSpec(modules=(replace(vision, layers=attending), plain.module("language")))
    meta = IterationMeta(microbatches=(microbatch(1, [(4, 4), *[(2, 4)] * 4]),))
    # Patches: 16 8 | 8 8 8. FLOPs of a layer, patches and their squares: 272 | 72 72 72 72.
    for model, counts in ((plain, [2, 3]), (spec, [1, 4])):
        batching = make_batching(meta, model, 3)
        assert [len(item.units) for item in batching.items if item.work.module == 0] == counts
        check_conservation(meta, batching)


def test_video_attends_within_a_time_step() -> None:
    clip = microbatch(1, [(2, 2)])
    image = replace(clip.images[0], grid=(3, 2, 2), num_tokens=3)
    document = replace(clip.documents[0], images=(image,))
    batching = make_batching(IterationMeta(microbatches=(MicrobatchMeta(documents=(document,)),)), vlm())
    assert batching.sizes[0] == WorkSize(rows=12, pairs=3 * 16, outputs=3)


def test_text_model_has_language_works_alone() -> None:
    text = ModelSpec(modules=(replace(vlm().module("language"), after=()),))
    batching = make_batching(IterationMeta(microbatches=(microbatch(1, []),)), text)
    assert batching.works == (Work(module=0, microbatch=0, sub_microbatch=0),)
    with pytest.raises(DataError, match=r"microbatch 0 has 3 images, the first image 0 of sample 3"):
        make_batching(META, text)


def test_empty_microbatch_is_refused() -> None:
    with pytest.raises(DataError, match="microbatch 0 has no document"):
        make_batching(IterationMeta(microbatches=(MicrobatchMeta(documents=()),)), vlm())


def with_items(batching: Batching, changes: dict[int, dict[str, Any]]) -> Batching:
    """The batching with fields of some of its works replaced."""
    items = (replace(item, **changes.get(number, {})) for number, item in enumerate(batching.items))
    return replace(batching, items=tuple(items))


def with_images(batching: Batching, work: int, places: list[tuple[int, int]]) -> Batching:
    """The batching with the images of one work replaced; a place is (microbatch, index)."""
    images = tuple(META.microbatches[m].images[i] for m, i in places)
    return with_items(batching, {work: {"units": images}})


@pytest.mark.parametrize(
    ("work", "places", "message"),
    [
        (1, [], "image 2 of sample 3 occurs 1 times in the batch, but 0 times"),
        (1, [(0, 2), (0, 2)], "image 2 of sample 3 occurs 1 times in the batch, but 2 times"),
        (1, [(0, 1)], "image 1 of sample 3 occurs 1 times in the batch, but 2 times"),
        (1, [(0, 2), (2, 0)], "microbatch 0: image 0 of sample 7 occurs 0 times"),
        (0, [(0, 1), (0, 0)], "image 1 of sample 3 is at the position of image 0 of sample 3"),
        (3, [(0, 0)], "microbatch 1: the document of sample 5 occurs 1 times in the batch, but 0 times"),
    ],
)
def test_lost_doubled_and_moved_images_are_named(work: int, places: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_conservation(META, with_images(make_batching(META, vlm(), 2), work, places))


@pytest.mark.parametrize(
    ("work", "change", "message"),
    [
        (2, {"rows": 22}, "microbatch 0 has 23 tokens, but its language works process 22"),
        (2, {"outputs": 4}, "microbatch 0 has 5 targets, but its language works process 4"),
        (1, {"outputs": 7}, r"microbatch 0 has \d+ image features, but its vision works process \d+"),
    ],
)
def test_lost_tokens_are_counted(work: int, change: dict[str, int], message: str) -> None:
    batching = make_batching(META, vlm(), 2)
    size = replace(batching.sizes[work], **change)
    with pytest.raises(DataError, match=message):
        check_conservation(META, with_items(batching, {work: {"size": size}}))


def test_images_that_feed_nothing_and_strange_works_are_refused() -> None:
    batching = make_batching(META, vlm(), 2)
    cut = replace(batching.works[2], after=(0,))
    with pytest.raises(DataError, match=r"comes after works \(0,\), but .* and the vision work of image 2 of sample 3"):
        check_conservation(META, with_items(batching, {2: {"work": cut}}))
    fewer = IterationMeta(microbatches=META.microbatches[:2])
    with pytest.raises(DataError, match="a work belongs to microbatch 2, but the batch has 2"):
        check_conservation(fewer, batching)


@pytest.mark.parametrize("kind", KINDS)
@given(packed=microbatches())
def test_pairs_of_a_language_work_are_those_of_its_mask(kind: LanguageMask, packed: MicrobatchMeta) -> None:
    spec = replace(vlm(), modules=(replace(vlm().modules[0], merge=1), vlm().modules[1]))
    batching = make_batching(IterationMeta(microbatches=(packed,)), spec, attention_mask=kind)
    assert batching.sizes[-1].pairs == visible_keys(language_bits(packed, kind)).number.sum()
