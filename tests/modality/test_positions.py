"""Positions on three axes against `get_rope_index` of transformers, one call a document."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.config.data import DataConfig
from mmtrain.config.model import EncoderConfig, LanguageConfig, ModelConfig, ProjectorConfig
from mmtrain.modality.metadata import DocumentMeta, ImageMeta
from mmtrain.modality.positions import token_positions
from mmtrain.modality.videos import video_rules

TEXT, IMAGE, VIDEO = range(3)
MERGE = 2
TOKENS_PER_SECOND = 3

sizes = st.integers(1, 5)
spans = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from([IMAGE, VIDEO]), st.tuples(sizes, sizes, sizes)), max_size=4
)
"""Text tokens, what follows them, and its tokens (time, height, width)."""


def document(
    texts_and_images, last: int, *, first: bool = False, seconds=(1.0,), tokens_per_second: float = 1.0
) -> tuple[DocumentMeta, list[int]]:
    """A document with its token types.

    Args: last: text tokens at the end. first: begin without text. seconds: of a patch in time of each video, in turn.
    """
    images, types = [], []
    for index, (text, kind, (t, h, w)) in enumerate(texts_and_images):
        types += [TEXT] * (0 if first and not index else text)
        grid, count = (t, MERGE * h, MERGE * w), t * h * w
        timing = {}
        if kind == VIDEO:
            length = seconds[index % len(seconds)]
            timing = {"seconds": length, "time_step": tokens_per_second * length}
        images.append(ImageMeta(sample=0, index=index, grid=grid, num_tokens=count, start=len(types), **timing))
        types += [kind] * count
    types += [TEXT] * last
    return DocumentMeta(sample=0, num_tokens=len(types), num_targets=0, images=tuple(images)), types


@functools.cache
def theirs(family: str, tokens_per_second: int = TOKENS_PER_SECOND):
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel, Qwen2VLConfig, Qwen2VLModel, Qwen3VLConfig, Qwen3VLModel

    text = {
        "vocab_size": 8,
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    text |= {"num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 1, "spatial_merge_size": MERGE}
    with torch.device("meta"):
        if family == "qwen2_vl":
            return Qwen2VLModel(Qwen2VLConfig(text_config=text, vision_config=vision | {"embed_dim": 16}))
        vision |= {"intermediate_size": 8, "out_hidden_size": 16}
        if family == "qwen3_vl":
            vision |= {"num_position_embeddings": 4, "deepstack_visual_indexes": [0]}
            return Qwen3VLModel(Qwen3VLConfig(text_config=text | {"head_dim": 16}, vision_config=vision))
        vision |= {"tokens_per_second": tokens_per_second}
        return Qwen2_5_VLModel(Qwen2_5_VLConfig(text_config=text, vision_config=vision))


def rope_index(family: str, meta: DocumentMeta, types: list[int], grids: dict | None = None) -> np.ndarray:
    items = {kind: [i for i in meta.images if types[i.start] == kind] for kind in (IMAGE, VIDEO)}
    kinds = grids or {kind: [i.grid for i in found] for kind, found in items.items()}
    tensors = {kind: torch.tensor(found) if found else None for kind, found in kinds.items()}
    seconds = [i.seconds for i in items[VIDEO]]
    timing = {"second_per_grid_ts": torch.tensor(seconds)} if family == "qwen2_5_vl" else {}
    ids = torch.zeros(1, len(types), dtype=torch.int64)
    positions, _ = theirs(family).get_rope_index(ids, torch.tensor([types]), tensors[IMAGE], tensors[VIDEO], **timing)
    return positions[:, 0].numpy()


@given(st.lists(st.tuples(spans, sizes, st.booleans()), min_size=1, max_size=3))
def test_equal_to_qwen2_vl_for_packed_documents(packed):
    documents = [document(spans, last, first=first) for spans, last, first in packed]
    expected = [rope_index("qwen2_vl", meta, types) for meta, types in documents]
    found = token_positions([meta for meta, _ in documents], 3)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, np.concatenate(expected, axis=1))


@given(spans, sizes)
def test_equal_to_qwen3_vl_whose_videos_are_frames_with_text_between_them(given_spans, last):
    """Each frame is an item of its own here; the class divides the grid of a video into them."""
    still = [(text, kind, (t if kind == VIDEO else 1, h, w)) for text, kind, (t, h, w) in given_spans]
    frames = [(text + i % 3, kind, (1, h, w)) for text, kind, (t, h, w) in still for i in range(t)]
    meta, types = document(frames, last)
    grids = {kind: [(t, MERGE * h, MERGE * w) for _, k, (t, h, w) in still if k == kind] for kind in (IMAGE, VIDEO)}
    np.testing.assert_array_equal(token_positions([meta], 3), rope_index("qwen3_vl", meta, types, grids=grids))


@given(spans, st.lists(st.sampled_from([0.25, 0.7, 1.0, 1 / 3, 2.0]), min_size=1, max_size=3))
def test_equal_to_qwen2_5_vl_with_the_seconds_between_frames(given_spans, seconds):
    still = [(text, kind, (1, h, w) if kind == IMAGE else (t, h, w)) for text, kind, (t, h, w) in given_spans]
    meta, types = document(still, 2, seconds=seconds, tokens_per_second=TOKENS_PER_SECOND)
    np.testing.assert_array_equal(token_positions([meta], 3), rope_index("qwen2_5_vl", meta, types))


@pytest.mark.parametrize("tokens_per_second", [2, 25])
@pytest.mark.parametrize("fps", [23.976, 24.0, 30.0])
def test_times_of_long_videos_are_rounded_as_by_qwen2_5_vl(fps, tokens_per_second):
    """Of many lengths and numbers of frames; with 25 positions a second, 50 of 58 frames need the second rounding."""
    config = {"model_type": "qwen2_5_vl_vision", "tokens_per_second": tokens_per_second}
    model = ModelConfig(
        encoder=EncoderConfig(config=config),
        projector=ProjectorConfig(),
        language=LanguageConfig(config={"model_type": "qwen2"}),
    )
    rules = video_rules(model, DataConfig(source="x"))
    lengths = [rules.seconds(num, fps, count) for num in range(50, 250, 2) for count in (50, 100) if count <= num]
    meta, types = document([(1, VIDEO, (50, 1, 1))] * len(lengths), 1, seconds=lengths)
    images = tuple(replace(image, time_step=rules.time_step(image.seconds)) for image in meta.images)
    videos = torch.tensor([image.grid for image in images])
    positions, _ = theirs("qwen2_5_vl", tokens_per_second).get_rope_index(
        torch.zeros(1, len(types), dtype=torch.int64), torch.tensor([types]), None, videos,
        second_per_grid_ts=torch.tensor(lengths),
    )  # fmt: skip
    np.testing.assert_array_equal(token_positions([replace(meta, images=images)], 3), positions[:, 0].numpy())


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_images_first_last_and_alone(family):
    for spans, last, first in [
        ([(1, IMAGE, (1, 2, 3))], 0, True),
        ([(2, IMAGE, (1, 4, 1)), (1, IMAGE, (1, 1, 1))], 0, False),
        ([(1, IMAGE, (2, 2, 1)), (3, IMAGE, (1, 1, 5))], 4, True),
        ([], 7, False),
    ]:
        meta, types = document(spans, last, first=first)
        np.testing.assert_array_equal(token_positions([meta], 3), rope_index(family, meta, types))


def test_images_without_text_between_them_follow_each_other():
    """transformers cannot tell these two apart, and refuses them."""
    images = (
        ImageMeta(sample=0, index=0, grid=(1, 4, 2), num_tokens=2, start=1),
        ImageMeta(sample=0, index=1, grid=(1, 2, 4), num_tokens=2, start=3),
    )
    meta = DocumentMeta(sample=0, num_tokens=6, num_targets=0, images=images)
    assert token_positions([meta], 3).tolist() == [[0, 1, 1, 3, 3, 5], [0, 1, 2, 3, 3, 5], [0, 1, 1, 3, 4, 5]]


def test_one_axis_counts_the_tokens_of_each_document():
    lengths = (3, 1, 4)
    documents = [document([(n - 1, IMAGE, (1, 1, 1))], 0)[0] for n in lengths if n > 1]
    assert token_positions(documents).tolist() == [0, 1, 2, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("grid", "num_tokens", "expected"),
    [((1, 4, 6), 6, (1, 2, 3)), ((3, 4, 4), 48, (3, 4, 4)), ((1, 1, 12), 4, (1, 1, 4)), ((2, 6, 9), 12, (2, 2, 3))],
)
def test_tokens_of_an_image(grid, num_tokens, expected):
    assert ImageMeta(sample=0, index=0, grid=grid, num_tokens=num_tokens).token_grid == expected
