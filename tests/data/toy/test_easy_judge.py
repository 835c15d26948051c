"""The easy level of moving shapes, and its judge."""

from pathlib import Path

import numpy as np
import pytest

from mmtrain.commands.cli import main
from mmtrain.data.toy.easy_judge import PROMPTS, judge, see
from mmtrain.data.toy.shape_clips import EASY_FRAMES, EASY_SIDE, draw, easy_captions
from mmtrain.data.toy.shapes import is_easy, shape_clips


def test_the_judge_finds_all_of_each_drawn_clip():
    clips = list(shape_clips("train", 600, 0, "easy"))
    verdict = judge(map(draw, clips), [clip.caption for clip in clips])
    assert verdict.right == verdict.num_clips == 600
    assert {clip.caption for clip in clips} == set(PROMPTS) and len(PROMPTS) == 12


def test_another_caption_is_wrong_in_what_differs():
    (clip,) = shape_clips("train", 1, 0, "easy")
    seen, named = see(draw(clip)), easy_captions()[clip.caption]
    for caption, (colour, motion, background) in easy_captions().items():
        assert seen.agrees(caption) == (background == named[2], colour == named[0], motion == named[1])


def test_clips_without_a_square_that_goes_somewhere_are_wrong():
    (clip,) = shape_clips("train", 1, 0, "easy")
    frames, captions = draw(clip), [clip.caption] * 5
    noise = np.random.default_rng(0).integers(0, 256, frames.shape, dtype=np.uint8)
    still, down = np.stack([frames[0]] * 4), frames.transpose(0, 2, 1, 3)
    vanishing = frames.copy()
    vanishing[2] = frames[0, 0, 0] if clip.shapes[0].y > 0.5 else frames[0, -1, 0]
    verdict = judge([noise, still, down, vanishing, frames[::-1]], captions)
    assert verdict.right == 0
    assert [see(other).motion for other in (still, down, vanishing)] == ["", "", ""]
    assert verdict.colour == 3 and verdict.background >= 4
    assert "0 of 5 clips show what their prompts say" in verdict.text()


def test_positions_are_drawn_anew_and_noise_of_pixels_does_not_matter():
    clips = list(shape_clips("train", 300, 0, "easy"))
    held_out = list(shape_clips("validation", 300, 0, "easy"))
    places = [{(clip.shapes[0].x, clip.shapes[0].y) for clip in split} for split in (clips, held_out)]
    assert [len(split) for split in places] == [300, 300] and not places[0] & places[1]
    rng = np.random.default_rng(0)
    noisy = [np.clip(draw(clip) + rng.normal(0, 20, (4, 12, 12, 3)), 0, 255).astype(np.uint8) for clip in clips]
    assert judge(noisy, [clip.caption for clip in clips]).right == 300


def test_the_command_writes_the_level_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["data", "shapes", "--num-samples", "20"]
    assert main([*words, str(tmp_path / "easy"), "--level", "easy", "--preview", str(tmp_path / "p.png")]) == 0
    assert main([*words, str(tmp_path / "full")]) == 0
    assert is_easy(tmp_path / "easy") and not is_easy(tmp_path / "full") and not is_easy(tmp_path / "nowhere")
    assert "18 training and 2 validation clips with 80 frames" in capsys.readouterr().out
    assert f"{EASY_FRAMES} PNG images of {EASY_SIDE} x {EASY_SIDE} pixels" in (tmp_path / "easy/README.md").read_text()
