"""Sampling, sizes and patches of videos in conversations, against transformers' own video processors."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmtrain.config.data import DataConfig, TokenizerConfig
from mmtrain.config.model import EncoderConfig, LanguageConfig, ModelConfig, ProjectorConfig
from mmtrain.data.pixels import pixel_rules, video_values
from mmtrain.errors import ConfigError
from mmtrain.modality.small_data import small_data
from mmtrain.modality.videos import VIDEO_ENCODERS, VideoRules, video_rules
from tests.video_processor import video_processor_class

SIZES = {"video_min_pixels": 4 * 28 * 28, "video_max_pixels": 16 * 28 * 28}
THREE = "qwen3_vl_vision"
AREA = {"video_min_pixels": 8 * 32**2, "video_max_pixels": 96 * 32**2}
"""Limits of Qwen3-VL's videos, of all frames together."""


def model(encoder: str = "qwen2_vl_vision", **more: Any) -> ModelConfig:
    return ModelConfig(
        encoder=EncoderConfig(config={"model_type": encoder, **more}),
        projector=ProjectorConfig(),
        language=LanguageConfig(config={"model_type": "qwen2"}),
    )


def rules(encoder: str = "qwen2_vl_vision", **data: Any) -> VideoRules:
    found = video_rules(model(encoder), DataConfig(source="x", **SIZES | data))
    assert found is not None
    return found


def values_of(frames: list[Image.Image], ours: VideoRules, family: str = "qwen2_vl") -> torch.Tensor:
    """The pixels of frames that are all read."""
    size = ours.resized(len(frames), frames[0].height, frames[0].width)
    return video_values(frames, size, ours.patches, pixel_rules(family))


def array(num_frames: int, height: int = 60, width: int = 90, seed: int = 0) -> np.ndarray:
    """Frames that differ, smooth enough for resizing."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (num_frames, 4, 5, 3), dtype=np.uint8)
    images = [Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC) for frame in coarse]
    return np.stack([np.asarray(image) for image in images])


@pytest.mark.parametrize(
    ("family", "encoder", "limits"), [("qwen2_vl", "qwen2_vl_vision", SIZES), ("qwen3_vl", THREE, AREA)]
)
@pytest.mark.parametrize(
    ("num_frames", "height", "width", "fps"),
    [
        (9, 50, 61, 8.0),
        (30, 61, 200, 30.0),
        (7, 28, 28, 1.0),
        (5, 300, 40, 2.0),
        (3, 84, 112, 24.0),
        (40, 90, 56, 12.5),
        (2, 20, 700, 3.0),
        (61, 240, 320, 6.0),
    ],
)
def test_patches_grids_and_indices_are_those_of_transformers(
    monkeypatch, family, encoder, limits, num_frames, height, width, fps
):
    frames = array(num_frames, height, width)
    size = {"shortest_edge": limits["video_min_pixels"], "longest_edge": limits["video_max_pixels"]}
    theirs = video_processor_class(monkeypatch, family)
    expected = theirs(size=size, fps=2.0, do_sample_frames=True, cap_pixels_per_frame=False)(
        videos=[frames],
        video_metadata=[{"total_num_frames": num_frames, "fps": fps}],
        return_metadata=True,
        return_tensors="pt",
    )
    ours = rules(encoder, **limits)
    count = ours.num_sampled(num_frames, fps)
    indices = ours.indices(num_frames, count)
    metadata = expected["video_metadata"][0]
    assert indices == list(map(int, metadata.frames_indices))
    assert ours.seconds(num_frames, fps, count) == 2 / metadata.sampled_fps
    assert [list(ours.grid(count, height, width))] == expected["video_grid_thw"].tolist()
    values = values_of([Image.fromarray(frames[i]) for i in indices], ours, family)
    torch.testing.assert_close(values, expected["pixel_values_videos"], rtol=0, atol=2e-6)


def test_an_odd_last_frame_fills_its_patch_as_in_transformers(monkeypatch):
    frames = array(5, 56, 84)
    size = {"shortest_edge": SIZES["video_min_pixels"], "longest_edge": SIZES["video_max_pixels"]}
    theirs = video_processor_class(monkeypatch)(size=size, cap_pixels_per_frame=False)
    expected = theirs(videos=[frames], return_tensors="pt")
    values = values_of(list(map(Image.fromarray, frames)), rules())
    assert [list(rules().grid(5, 56, 84))] == expected["video_grid_thw"].tolist() == [[3, 4, 6]]
    torch.testing.assert_close(values, expected["pixel_values_videos"], rtol=0, atol=2e-6)


@given(st.integers(1, 2000), st.floats(0.1, 240), st.floats(0.1, 60), st.integers(1, 20), st.integers(0, 800))
def test_sampled_frames_are_within_the_limits_and_the_video(num_frames, fps, wanted, least, more):
    ours = rules(video_fps=wanted, video_min_frames=least, video_max_frames=max(2, least + more))
    count = ours.num_sampled(num_frames, fps)
    indices = ours.indices(num_frames, count)
    assert 1 <= count <= min(num_frames, ours.max_frames)
    assert count % 2 == 0 or num_frames == 1
    assert count >= min(ours.min_frames, num_frames) - 1
    assert len(indices) == count and indices[0] == 0 and indices[-1] < num_frames
    assert all(a < b for a, b in pairwise(indices))


@given(
    st.integers(2, 3000),
    st.integers(10, 2000),
    st.floats(1, 19),
    st.booleans(),
    st.floats(0.5, 120),
    st.floats(0.1, 30),
    st.integers(1, 900),
)
def test_sizes_and_times_of_qwen3_vl(num_frames, height, ratio, tall, fps, wanted, most):
    """Against the functions of the classes, which need no frames; default limits."""
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    height, width = (int(height * ratio), height) if tall else (height, int(height * ratio))
    ours = rules(THREE, video_min_pixels=0, video_max_pixels=0, video_fps=wanted, video_max_frames=max(4, most))
    count = ours.num_sampled(num_frames, fps)
    indices = ours.indices(num_frames, count)
    assert len(indices) == count <= min(num_frames, ours.max_frames) and indices[0] == 0
    assert all(a < b for a, b in pairwise(indices)) and (count == 1 or indices[-1] == num_frames - 1)
    assert ours.resized(count, height, width) == smart_resize(
        max(count, 2), height, width, 2, 32, 128 * 32 * 32, 768 * 32 * 32
    )
    times = Qwen3VLProcessor._calculate_timestamps(None, list(indices), fps, 2)
    assert ours.captions(num_frames, fps, count) == tuple(f"<{time:.1f} seconds>" for time in times)


def test_default_limits_are_those_of_the_class_of_the_family(monkeypatch):
    for family, kind in (("qwen2_vl", "qwen2_vl_vision"), ("qwen3_vl", THREE)):
        theirs = video_processor_class(monkeypatch, family)
        ours = rules(kind, video_min_pixels=0, video_max_pixels=0)
        limits = {"shortest_edge": ours.min_pixels, "longest_edge": ours.max_pixels}
        assert (limits, ours.processor) == (dict(theirs.size), theirs.__name__)
        assert (ours.min_frames, ours.max_frames) == (theirs.min_frames, theirs.max_frames)


def test_positions_of_a_second_are_those_of_the_family():
    assert rules("qwen2_vl_vision").time_step(0.7) == 1
    assert rules("qwen2_5_vl_vision").time_step(0.75) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"video_fps": 0.0}, "data.video_fps = 0.0; it must be from 0.001 to 1000"),
        ({"video_max_frames": 3}, "data.video_max_frames = 3 is below data.video_min_frames = 4; raise it"),
        ({"video_max_frames": 1, "video_min_frames": 1}, "data.video_max_frames = 1; it must be at least 2: one patch"),
        ({"video_min_pixels": 10**6}, "data.video_max_pixels = 602112 is below data.video_min_pixels = 1000000"),
        (
            {"video_min_pixels": 9, "video_max_pixels": 99},
            "data.video_max_pixels = 99; it must be at least 784: one tok",
        ),
    ],
)
def test_limits_of_videos_that_cannot_hold(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        video_rules(model(), DataConfig(source="x", **options))


def test_limits_of_videos_that_no_one_reads() -> None:
    with pytest.raises(
        ConfigError, match=r"^data.video_fps = 1.0 has no effect: only the encoders qwen2_vl_vision, qwen2_5"
    ):
        video_rules(model("siglip_vision_model"), DataConfig(source="x", video_fps=1.0))
    with pytest.raises(ConfigError, match='image_token and video_token are both "<a>"; give each its own'):
        TokenizerConfig(image_token="<a>", video_token="<a>")


@pytest.mark.parametrize("encoder", VIDEO_ENCODERS)
def test_the_small_job_has_small_videos(encoder: str) -> None:
    section = small_data(DataConfig(source="x"), model(encoder))
    assert (section.video_max_frames, section.video_min_frames) == (4, 4)
    found = video_rules(model(encoder), section)
    assert found is not None
    assert 8 <= found.patches.num_tokens(found.grid(found.num_sampled(10**4, 30.0), 1080, 1920)) <= 16
