"""Sheets and moving images of clips."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageSequence

from mmtrain.data.clip_images import enlarged, save_gif, sheet


def frames(count: int, height: int = 2, width: int = 3) -> np.ndarray:
    """[count, height, width, 3] uint8, all different."""
    return np.random.default_rng(0).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def test_each_pixel_becomes_a_square() -> None:
    clip = frames(2)
    for image, frame in zip(enlarged(clip, 3), clip, strict=True):
        assert np.array_equal(np.asarray(image), frame.repeat(3, 0).repeat(3, 1))


def test_a_sheet_holds_every_image_of_rows_of_different_sizes() -> None:
    clips = [frames(4, 20, 30), frames(2, 40, 10)]
    page = np.asarray(sheet([("one", enlarged(clips[0], 1)), ("two", enlarged(clips[1], 1))]))
    for clip in clips:
        for frame in clip:
            windows = np.lib.stride_tricks.sliding_window_view(page, frame.shape)[:, :, 0]
            assert (windows == frame).all((2, 3, 4)).sum() == 1


@pytest.mark.parametrize(("caption", "lines"), [("short", 1), ("", 1), ("word " * 40, 4), ("w" * 200, 4), ("a\nb", 1)])
def test_a_long_caption_has_several_lines(caption: str, lines: int) -> None:
    one = sheet([("x", enlarged(frames(2, 30, 30), 1))])
    page = sheet([(caption, enlarged(frames(2, 30, 30), 1))])
    assert page.height - one.height == 14 * (lines - 1)
    assert page.width <= 60 * 7 + 8


def test_a_caption_may_have_any_letters() -> None:
    sheet([("ein größerer Kreis, 赤い丸 🙂", enlarged(frames(1), 4))])


@pytest.mark.parametrize("fps", [7.0, 8.0, 16.0, 24.0, 50.0])
@pytest.mark.parametrize("count", [1, 5, 48])
def test_a_moving_image_lasts_as_long_as_it_should(tmp_path: Path, fps: float, count: int) -> None:
    save_gif(tmp_path / "p.gif", enlarged(frames(count), 4), fps)
    with Image.open(tmp_path / "p.gif") as moving:
        durations = [frame.info["duration"] for frame in ImageSequence.Iterator(moving)]
    assert len(durations) == count
    assert sum(durations) == pytest.approx(1000 * count / fps, abs=5.1)
    assert max(durations) - min(durations) <= 10
