import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.data.metadata import IterationMeta
from mmtrain.models.spec import Division
from mmtrain.planner.batching import VISION, make_batching
from mmtrain.planner.layout import IterationLayout, Plane, longest_first, pad_places
from tests.planner.specs import microbatch, vlm

PICTURES = [(4, 4), (2, 8), (6, 2), (2, 2), (8, 8)]


def layout(plane: Plane, sub_microbatch_size: int = 0, extra_rows: int = 0) -> IterationLayout:
    spec = vlm()
    vision = dataclasses.replace(spec.module(VISION), extra_rows=extra_rows)
    meta = IterationMeta(
        microbatches=(
            microbatch(0, PICTURES, text_tokens=30),
            microbatch(2, [], text_tokens=40),
        )
    )
    return IterationLayout(plane, make_batching(meta, spec, sub_microbatch_size), meta, vision)


planes = st.builds(
    Plane,
    cp=st.sampled_from([1, 2, 3]),
    tp=st.sampled_from([1, 2, 4]),
    split=st.sampled_from(["causal", "balanced"]),
    block_size=st.just(4),
    share_patches=st.booleans(),
    data_encoder=st.booleans(),
)


@given(plane=planes, size=st.sampled_from([0, 1, 2]))
def test_every_token_and_feature_is_somewhere_once_and_shapes_count_the_padding(plane: Plane, size: int) -> None:
    if plane.cp == 1:
        plane = dataclasses.replace(plane, share_patches=False)
    found = layout(plane, size)
    for index, counts in enumerate(found._meta.microbatches):
        tokens = np.concatenate(found.tokens(index))
        assert sorted(tokens) == list(range(counts.num_tokens))
    features: list[int] = []
    for work, images in enumerate(found.batching.images_of):
        for c in range(plane.cp):
            for t in range(plane.tp):
                rows = found.local_size(work, c, t)
                if images:
                    places = found.feature_places(work, c, t)
                    assert len(places) == rows.outputs
                    features += [p for p in places if p >= 0]
                else:
                    microbatch_places = found.places(found.batching.works[work].microbatch, c)
                    assert len(microbatch_places) == rows.rows * plane.tp
    assert sorted(features) == list(range(sum(h * w // 4 for h, w in PICTURES)))


def test_pictures_go_whole_to_the_lightest_rank() -> None:
    found = layout(Plane(cp=2))
    work = next(w for w, images in enumerate(found.batching.images_of) if images)
    own = [found.vision_part(work, c, 0) for c in range(2)]
    assert [part.images for part in own] == [(4,), (0, 1, 2, 3)]
    assert [part.size.rows for part in own] == [64, 48]


def test_a_class_token_is_a_row_of_its_picture() -> None:
    found = layout(Plane(cp=2), extra_rows=1)
    assert [found.vision_part(0, c, 0).size.rows for c in range(2)] == [65, 52]


def test_tensor_ranks_with_whole_encoders_divide_the_pictures() -> None:
    found = layout(Plane(tp=2, data_encoder=True))
    assert {i for t in range(2) for i in found.vision_part(0, 0, t).images} == set(range(5))
    divided = layout(Plane(tp=2))
    assert all(divided.vision_part(0, 0, t).images == (0, 1, 2, 3, 4) for t in range(2))


def test_patches_are_divided_in_whole_merge_squares() -> None:
    found = layout(Plane(cp=3, share_patches=True))
    bounds = [found.vision_part(0, c, 0).rows for c in range(3)]
    assert bounds == [(0, 36), (36, 72), (72, 112)]


@pytest.mark.parametrize(
    ("plane", "vision", "language"),
    [
        (Plane(), Division(), Division()),
        (Plane(tp=4), Division(tp=4), Division(tp=4)),
        (Plane(cp=2), Division(groups=2), Division(groups=2, key_groups=2)),
        (Plane(cp=2, tp=4), Division(tp=4, groups=2), Division(tp=4, groups=2, key_groups=2)),
        (Plane(cp=2, share_patches=True), *2 * [Division(groups=2, key_groups=2)]),
        (Plane(tp=4, data_encoder=True), Division(groups=4), Division(tp=4)),
        (
            Plane(cp=2, tp=4, share_patches=True, data_encoder=True),
            Division(groups=8, key_groups=2),
            Division(tp=4, groups=2, key_groups=2),
        ),
    ],
)
def test_how_ranks_divide_each_module(plane: Plane, vision: Division, language: Division) -> None:
    spec = vlm()
    assert plane.division(spec.module("vision")) == vision
    assert plane.division(spec.module("language")) == language
    assert plane.division(dataclasses.replace(spec.module("vision"), is_whole=True)) == Division()


@pytest.mark.parametrize(
    ("plane", "fullest"),
    [
        (Plane(tp=4), 1.0),
        (Plane(cp=2), 64 * 2 / 112),
        (Plane(cp=2, share_patches=True), 1.0),
        (Plane(cp=4), 64 * 4 / 112),
        (Plane(cp=2, tp=2, data_encoder=True), 64 * 4 / 112),
        (Plane(cp=2, tp=2, data_encoder=True, share_patches=True), 64 * 2 / 112),
    ],
)
def test_the_rank_with_most_patches(plane: Plane, fullest: float) -> None:
    images = layout(plane).batching.images_of[0]
    assert sum(image.num_patches for image in images) == 112
    assert plane.fullest_part(images) == fullest
    assert plane.fullest_part(()) == 1.0


def test_a_rank_may_have_no_picture() -> None:
    found = layout(Plane(cp=2), sub_microbatch_size=1)
    sizes = [found.local_size(0, c, 0) for c in range(2)]
    assert sizes[0].rows > 0
    assert sizes[1].rows == sizes[1].outputs == 0


@given(weights=st.lists(st.integers(1, 100), max_size=20), parts=st.integers(1, 6))
def test_longest_first_is_a_partition_within_its_bound(weights: list[int], parts: int) -> None:
    own = longest_first(weights, parts)
    assert sorted(i for items in own for i in items) == list(range(len(weights)))
    heaviest = max((sum(weights[i] for i in items) for items in own), default=0)
    assert heaviest <= sum(weights) / parts + max(weights, default=0)


@pytest.mark.parametrize(("count", "degree", "length"), [(5, 2, 6), (4, 2, 4), (0, 4, 0), (1, 4, 4)])
def test_padding(count: int, degree: int, length: int) -> None:
    places = pad_places(np.arange(count), degree)
    assert list(places) == [*range(count), *[-1] * (length - count)]
