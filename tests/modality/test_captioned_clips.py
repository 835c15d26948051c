import statistics
from itertools import pairwise

import pytest

from mmtrain.modality.captioned_clips import MOST_CLIPS, MOST_S, video_captions


def test_clips_are_grouped_up_to_8_and_16_seconds() -> None:
    groups = video_captions(400, seed=0, iteration=0)
    assert len(groups) == 400
    for group in groups:
        assert 1 <= len(group) <= MOST_CLIPS
        assert sum(clip.duration_s for clip in group) <= MOST_S
        assert all(clip.num_frames >= 1 and clip.caption_tokens >= 1 for clip in group)
    # Greedy: what opens a microbatch did not fit into the one before.
    for group, following in pairwise(groups):
        together = sum(clip.num_frames for clip in group) + following[0].num_frames
        assert len(group) == MOST_CLIPS or together > 16 * MOST_S
    samples = [clip.sample for group in groups for clip in group]
    assert samples == list(range(len(samples)))


def test_durations_are_those_of_the_sources_cut_to_16_seconds() -> None:
    clips = [clip for group in video_captions(3000, seed=1, iteration=0) for clip in group]
    durations = [clip.duration_s for clip in clips]
    assert max(durations) == MOST_S
    # Half with mean 4.9 s, half with mean 11.7 s before the cut, which leaves 9.1 s of these.
    assert statistics.fmean(durations) == pytest.approx((4.9 + 9.1) / 2, rel=0.05)
    assert statistics.fmean(clip.caption_tokens for clip in clips) == pytest.approx((23.3 + 100) / 2, rel=0.05)


def test_equal_keys_draw_equal_clips() -> None:
    one = video_captions(5, seed=1, iteration=2, replica=3)
    assert one == video_captions(5, seed=1, iteration=2, replica=3)
    assert one != video_captions(5, seed=1, iteration=3, replica=3)
