import statistics
from dataclasses import replace
from itertools import pairwise

import pytest

from mmtrain import config
from mmtrain.config import DataConfig, DitConfig
from mmtrain.data.buckets import video_geometry
from mmtrain.errors import ConfigError
from mmtrain.planner.clips import ClipBins
from mmtrain.planner.workloads import Bins, draw


def paper(num_microbatches: int, **data: object) -> ClipBins:
    """The numbers of DIP: 16 frames a second, clips of up to 16 s, 8 clips and 16 s in a microbatch."""
    section = DataConfig(source="x", **data)  # type: ignore[arg-type]
    geometry = video_geometry(DitConfig(config={"patch_size": [1, 2, 2]}), section)
    return ClipBins(num_microbatches=num_microbatches, seq_len=256, geometry=geometry, most_frames=256, most_clips=8)


def test_clips_are_grouped_up_to_8_and_16_seconds() -> None:
    bins = paper(400)
    meta = draw("video_captions", bins, seed=0, iteration=0)
    assert len(meta.microbatches) == 400
    for microbatch in meta.microbatches:
        assert microbatch.documents == ()
        assert 1 <= len(microbatch.clips) <= 8
        assert microbatch.num_frames <= 256
        for clip in microbatch.clips:
            assert clip.frames in bins.geometry.frames
            assert (clip.height, clip.width) in bins.geometry.sizes
            assert clip.num_tokens == clip.frames * clip.height * clip.width // 4
            assert 1 <= clip.num_text_tokens <= 256
    # Greedy: what opens a microbatch did not fit into the one before.
    for one, following in pairwise(meta.microbatches):
        assert len(one.clips) == 8 or one.num_frames + following.clips[0].frames > 256
    samples = [clip.sample for microbatch in meta.microbatches for clip in microbatch.clips]
    assert samples == list(range(len(samples)))
    assert meta.num_clips == len(samples)
    assert {(clip.height, clip.width) for m in meta.microbatches for clip in m.clips} == set(bins.geometry.sizes)


def test_durations_are_those_of_the_sources_cut_to_16_seconds() -> None:
    every = list(range(1, 257))  # a bucket for each number of frames, so that none is cut to another one
    meta = draw("video_captions", paper(3000, video_frames=every), seed=1, iteration=0)
    clips = [clip for microbatch in meta.microbatches for clip in microbatch.clips]
    assert max(clip.frames for clip in clips) == 256
    # Half with mean 4.9 s, half with mean 11.7 s before the cut, which leaves 9.1 s of these.
    assert statistics.fmean(clip.frames / 16 for clip in clips) == pytest.approx((4.9 + 9.1) / 2, rel=0.05)
    assert statistics.fmean(clip.num_text_tokens for clip in clips) == pytest.approx((23.3 + 100) / 2, rel=0.05)


def test_equal_keys_draw_equal_clips() -> None:
    one = draw("video_captions", paper(5), seed=1, iteration=2, replica=3)
    assert one == draw("video_captions", paper(5), seed=1, iteration=2, replica=3)
    assert one != draw("video_captions", paper(5), seed=1, iteration=3, replica=3)


def test_bins_are_those_of_a_job() -> None:
    job = config.load("debug_text.toml")
    with pytest.raises(ConfigError, match=r"needs a text-to-video job, and this one has no \[model.dit\]"):
        ClipBins.of(job)
    video = replace(job, model=replace(job.model, dit=DitConfig(config={"patch_size": [2, 2, 2]})))
    video = replace(video, data=DataConfig(source="x", fps=8.0, max_total_seconds=20.0, max_clips=3))
    bins = ClipBins.of(video)
    assert (bins.num_microbatches, bins.seq_len) == (job.training.global_batch_size, job.training.seq_len)
    assert (bins.most_frames, bins.most_clips, bins.geometry.frames[0]) == (160, 3, 128)


def test_each_kind_of_model_has_its_own_workloads() -> None:
    with pytest.raises(ConfigError, match=r"'mix' does not exist for a text-to-video model; choose one of video"):
        draw("mix", paper(1), seed=0, iteration=0)
    with pytest.raises(ConfigError, match=r"'video_captions' does not exist; choose one of image_text_pairs"):
        draw("video_captions", Bins(num_microbatches=1, seq_len=99, grid=None), seed=0, iteration=0)
