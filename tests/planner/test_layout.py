import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.config import config
from mmtrain.modality.catalogue import division_of
from mmtrain.modality.images import Images, ImagesLayout
from mmtrain.modality.metadata import IterationMeta
from mmtrain.modality.submesh import Submesh, pad_indices
from mmtrain.modality.token_split import longest_first
from mmtrain.planner.batching import make_batching
from mmtrain.planner.layout import IterationLayout
from mmtrain.spec.builders import model_spec
from mmtrain.spec.layer import Division
from mmtrain.spec.spec import ModelSpec
from mmtrain.spec.vocabulary import divided_vocabulary
from tests.planner.specs import microbatch, vlm

IMAGES = [(4, 4), (2, 8), (6, 2), (2, 2), (8, 8)]
META = IterationMeta(microbatches=(microbatch(0, IMAGES, text_tokens=30), microbatch(2, [], text_tokens=40)))


def layout(submesh: Submesh, sub_microbatch_size: int = 0, extra_rows: int = 0) -> IterationLayout:
    vision, language = vlm().modules
    spec = ModelSpec(modules=(dataclasses.replace(vision, extra_rows=extra_rows), language))
    return IterationLayout(submesh, make_batching(META, spec, sub_microbatch_size), META)


def of_images(found: IterationLayout) -> ImagesLayout:
    (layout,) = (layout for layout in found.of_module.values() if isinstance(layout, ImagesLayout))
    return layout


submeshes = st.builds(
    Submesh,
    cp=st.sampled_from([1, 2, 3]),
    tp=st.sampled_from([1, 2, 4]),
    split=st.sampled_from(["causal", "balanced"]),
    block_size=st.just(4),
    share_patches=st.booleans(),
    data_encoder=st.booleans(),
)


@given(submesh=submeshes, size=st.sampled_from([0, 1, 2]))
def test_every_token_and_feature_is_somewhere_once_and_shapes_count_the_padding(submesh: Submesh, size: int) -> None:
    if submesh.cp == 1:
        submesh = dataclasses.replace(submesh, share_patches=False)
    found = layout(submesh, size)
    vision = of_images(found)
    for index, counts in enumerate(META.microbatches):
        tokens = np.concatenate(found.documents.tokens(index))
        assert sorted(tokens) == list(range(counts.num_tokens))
    features: list[int] = []
    for work, item in enumerate(found.batching.items):
        for c in range(submesh.cp):
            for t in range(submesh.tp):
                rows = found.local_size(work, c, t)
                if item.work.module == 0:
                    places = vision.feature_indices(work, c, t)
                    assert len(places) == rows.outputs
                    features += [p for p in places if p >= 0]
                else:
                    microbatch_places = found.documents.places(item.work.microbatch, c)
                    assert len(microbatch_places) == rows.rows * submesh.tp
    assert sorted(features) == list(range(sum(h * w // 4 for h, w in IMAGES)))


@given(
    submesh=submeshes,
    labelled=st.tuples(st.sets(st.integers(0, 57), max_size=20), st.sets(st.integers(0, 39), max_size=9)),
)
def test_each_labelled_token_is_on_one_rank_where_its_row_is(submesh: Submesh, labelled: tuple[set[int], ...]) -> None:
    found = layout(dataclasses.replace(submesh, share_patches=False))
    known = found.with_labelled([np.array(sorted(own), dtype=np.int64) for own in labelled])
    for work, item in enumerate(known.batching.items):
        index = item.work.microbatch
        if item.work.module == 0:
            assert known.local_size(work, 0, 0) == found.local_size(work, 0, 0)
            continue
        of_ranks = [known.documents.labelled(index, c) for c in range(submesh.cp)]
        tokens = [known.documents.places(index, c)[own] for c, own in enumerate(of_ranks)]
        assert sorted(t for own in tokens for t in own) == sorted(labelled[index])
        if submesh.cp > 1:
            assert [known.local_size(work, c, 0).outputs for c in range(submesh.cp)] == [len(own) for own in of_ranks]
        else:
            assert found.local_size(work, 0, 0).outputs == item.size.outputs


def test_all_modules_that_read_documents_divide_their_tokens_once() -> None:
    divided = divided_vocabulary(model_spec(config.load("configs/debug_vlm.toml").model), 2)
    found = IterationLayout(Submesh(cp=2), make_batching(META, divided), META)
    reading = {name for name, own in found.of_module.items() if own is found.documents}
    assert reading == {"embed.0", "embed.1", "language", "head.0", "head.1", "loss"}
    known = found.with_labelled([np.arange(40, 45), np.arange(0)])
    works = [w for w in range(len(found.batching.items)) if found.batching.module_of(w) != "vision"]
    assert [sum(known.local_size(w, c, 0).outputs for c in (0, 1)) for w in works] == [*6 * [5], *6 * [0]]


def test_images_go_whole_to_the_lightest_rank() -> None:
    found = layout(Submesh(cp=2))
    own = [of_images(found).part(0, c, 0) for c in range(2)]
    assert [part.images for part in own] == [(4,), (0, 1, 2, 3)]
    assert [part.size.rows for part in own] == [64, 48]


def test_a_class_token_is_a_row_of_its_image() -> None:
    found = layout(Submesh(cp=2), extra_rows=1)
    assert [of_images(found).part(0, c, 0).size.rows for c in range(2)] == [65, 52]


def test_tensor_ranks_with_whole_encoders_divide_the_images() -> None:
    found = layout(Submesh(tp=2, data_encoder=True))
    assert {i for t in range(2) for i in of_images(found).part(0, 0, t).images} == set(range(5))
    divided = layout(Submesh(tp=2))
    assert all(of_images(divided).part(0, 0, t).images == (0, 1, 2, 3, 4) for t in range(2))


def test_patches_are_divided_in_whole_merge_squares() -> None:
    found = layout(Submesh(cp=3, share_patches=True))
    bounds = [of_images(found).part(0, c, 0).rows for c in range(3)]
    assert bounds == [(0, 36), (36, 72), (72, 112)]


@pytest.mark.parametrize(
    ("submesh", "vision", "language"),
    [
        (Submesh(), Division(), Division()),
        (Submesh(tp=4), Division(tp=4), Division(tp=4)),
        (Submesh(cp=2), Division(groups=2), Division(groups=2, key_groups=2)),
        (Submesh(cp=2, tp=4), Division(tp=4, groups=2), Division(tp=4, groups=2, key_groups=2)),
        (Submesh(cp=2, share_patches=True), *2 * [Division(groups=2, key_groups=2)]),
        (Submesh(tp=4, data_encoder=True), Division(groups=4), Division(tp=4)),
        (Submesh(tp=4, whole_rows=True), *2 * [Division(tp=4, whole_rows=True)]),
        (
            Submesh(cp=2, tp=4, share_patches=True, data_encoder=True),
            Division(groups=8, key_groups=2),
            Division(tp=4, groups=2, key_groups=2),
        ),
    ],
)
def test_how_ranks_divide_each_module(submesh: Submesh, vision: Division, language: Division) -> None:
    spec = vlm()
    assert division_of(submesh, spec.module("vision")) == vision
    assert division_of(submesh, spec.module("language")) == language
    assert division_of(submesh, dataclasses.replace(spec.module("vision"), consumes="frames")) == Division()


@pytest.mark.parametrize(
    ("submesh", "rows"),
    [
        (Submesh(tp=4), 112),
        (Submesh(cp=2), 64 * 2),
        (Submesh(cp=2, share_patches=True), 112),
        (Submesh(cp=4), 64 * 4),
        (Submesh(cp=2, tp=2, data_encoder=True), 64 * 4),
        (Submesh(cp=2, tp=2, data_encoder=True, share_patches=True), 64 * 2),
    ],
)
def test_works_are_priced_by_the_rank_with_most_patches(submesh: Submesh, rows: int) -> None:
    batching = layout(submesh).batching
    size, priced = batching.sizes[0], batching.priced_sizes(submesh)[0]
    assert size.rows == 112
    assert priced.rows == rows
    assert priced == size or priced.pairs == rows * 64  # the largest image is alone on its rank
    nothing = dataclasses.replace(batching.items[0], units=())
    assert Images().priced_size(submesh, vlm().module("vision"), nothing) == size


def test_a_rank_may_have_no_image() -> None:
    found = layout(Submesh(cp=2), sub_microbatch_size=1)
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
    places = pad_indices(np.arange(count), degree)
    assert list(places) == [*range(count), *[-1] * (length - count)]
