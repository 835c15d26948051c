import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.config.data import DataConfig
from mmtrain.config.model import DitConfig, VaeConfig
from mmtrain.errors import ConfigError, DataError
from mmtrain.modality.buckets import clip_seed, crop, most_frames, video_geometry
from tests.models.dits import VAES


def geometry(patch=(1, 2, 2), **data):
    return video_geometry(
        DitConfig(config={"model_type": "wan", "patch_size": list(patch)}), DataConfig(source="x", **data)
    )


def test_frames_of_the_buckets():
    assert geometry().frames == (256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
    assert geometry((4, 2, 2), fps=8.0, max_seconds=4.6).frames == (36, 24, 16, 12, 8, 4)
    assert geometry(video_frames=[16, 240, 16, 64]).frames == (240, 64, 16)
    assert geometry((2, 1, 1), fps=1.0, max_seconds=2.5).frames == (2,)


@given(fps=st.floats(1, 60), seconds=st.floats(8, 16), patch=st.integers(1, 8))
def test_a_clip_loses_at_most_a_third_of_its_frames_and_a_patch(fps, seconds, patch):
    made = geometry((patch, 2, 2), fps=fps, max_seconds=seconds)
    assert all(count % patch == 0 for count in made.frames)
    assert made.frames[-1] == patch
    for n in range(patch, made.frames[0] + 1):
        assert n * 2 / 3 - patch < made.longest(n) <= n


def test_clips_that_outgrow_the_positions_of_the_dit_are_named():
    def made(most, channels=3, **data):
        values = {"model_type": "wan", "in_channels": channels, "rope_max_seq_len": most, "patch_size": [2, 2, 2]}
        return video_geometry(DitConfig(config=values), DataConfig(source="x", fps=4.0, max_seconds=4.0, **data))

    assert made(8, video_area=256, video_aspects=["1:1"]).num_tokens((16, 16, 16)) == 512
    with pytest.raises(ConfigError, match=r"data\.max_seconds .* 8 patches along their frames, .* = 7"):
        made(7, video_area=4)
    with pytest.raises(ConfigError, match=r"data\.video_area makes clips with 9 patches along their height"):
        made(8, video_area=18 * 18)
    latents = made(8, channels=16, video_area=18 * 18)  # whose size only the records know
    with pytest.raises(DataError, match="its latents have 9 patches along their rows"):
        latents.num_tokens((16, 18, 16))


def test_sizes_have_about_equal_areas_and_are_multiples_of_the_patch():
    sizes = geometry(video_area=320 * 320, patch=(1, 16, 16)).sizes
    assert sizes == ((320, 320), (272, 368), (368, 272), (240, 432), (432, 240))
    assert geometry(video_area=4, patch=(1, 2, 2)).sizes == ((2, 2), *geometry(video_area=4).sizes[1:])
    # Aspects that fall on one size are one bucket.
    assert geometry(video_area=64, patch=(1, 8, 8)).sizes == ((8, 8),)


def test_a_clip_goes_to_the_nearest_aspect():
    made = geometry(video_area=320 * 320, patch=(1, 16, 16))
    assert made.size(100, 100) == (320, 320)
    assert made.size(1080, 1920) == (240, 432)
    assert made.size(480, 640) == (272, 368)
    assert made.size(9000, 10) == (432, 240)
    two = geometry(video_aspects=["2:1", "1:2"], video_area=128, patch=(1, 2, 2))
    assert two.sizes == ((8, 16), (16, 8))
    assert two.size(30, 30) == (8, 16)  # as near to one as to the other: the first


@given(
    num=st.integers(1, 200),
    source_fps=st.sampled_from([8, 12.5, 16, 23.976, 24, 25, 29.97, 30, 60]),
    fps=st.sampled_from([4, 8, 16, 24]),
)
def test_sampled_frames_are_what_is_shown_at_their_moments(num, source_fps, fps):
    made = geometry(fps=float(fps))
    count = made.sampled(num, source_fps)
    places = made.places(num, source_fps, count)
    assert len(places) == count >= 1
    assert places == sorted(places)
    assert places[0] == 0
    assert places[-1] < num
    for j, place in enumerate(places):
        assert -1e-3 < j / fps * source_fps - place < 1 + 1e-3
    if source_fps == fps:
        assert places == list(range(num))


def test_sampling_by_hand():
    made = geometry(fps=8.0)
    assert made.places(8, 16, made.sampled(8, 16)) == [0, 2, 4, 6]
    assert made.places(3, 4, made.sampled(3, 4)) == [0, 0, 1, 1, 2, 2]
    assert made.sampled(1, 30) == 1


@given(height=st.integers(1, 500), width=st.integers(1, 500), size=st.tuples(st.integers(1, 90), st.integers(1, 90)))
def test_the_crop_is_the_largest_middle_of_the_right_aspect(height, width, size):
    left, top, right, bottom = crop(height, width, size)
    assert (right - left) / (bottom - top) == pytest.approx(size[1] / size[0])
    assert left + right == pytest.approx(width)
    assert top + bottom == pytest.approx(height)
    assert min(left, top) >= -1e-9
    assert min(left, top) == pytest.approx(0, abs=1e-9)


def test_tokens_of_a_bucket():
    made = geometry((2, 2, 4))
    assert made.num_tokens((8, 6, 8)) == 4 * 3 * 2
    for bucket, axis in (((7, 6, 8), "7 frames"), ((8, 5, 8), "5 rows"), ((8, 6, 10), "10 columns")):
        with pytest.raises(DataError, match=rf"{axis}, which is no multiple .*patch_size = \[2, 2, 4\]"):
            made.num_tokens(bucket)


def test_too_short_clips_are_refused():
    with pytest.raises(
        DataError, match=r"it has 7 frames at 16 a second, but the shortest bucket has 8; leave it out or"
    ):
        geometry(video_frames=[8, 16]).longest(7)


@pytest.mark.parametrize(
    ("dit", "data", "message"),
    [
        ({"patch_size": 2}, {}, r"patch_size = 2; write \[time, height, width\]"),
        ({"patch_size": [1, 2, 0]}, {}, r"patch_size = \[1, 2, 0\]"),
        ({"in_channels": 0}, {}, "in_channels = 0"),
        ({"patch_size": [8, 1, 1]}, {"fps": 2.0, "max_seconds": 3.0}, "are 6 frames, less than the 8 of one patch"),
        ({"patch_size": [4, 1, 1]}, {"video_frames": [8, 10]}, "names 10; it must be a multiple of the 4 frames"),
        ({}, {"video_frames": [257]}, r"names 257; .* at most data.max_seconds \* data.fps = 256"),
    ],
)
def test_buckets_that_cannot_be(dit, data, message):
    with pytest.raises(ConfigError, match=message):
        video_geometry(DitConfig(config={"model_type": "wan", **dit}), DataConfig(source="x", **data))


def test_capacity_of_a_microbatch():
    assert most_frames(DataConfig(source="x")) == 256
    assert most_frames(DataConfig(source="x", fps=29.97, max_total_seconds=20.0)) == 599
    assert most_frames(DataConfig(source="x", fps=0.1 + 0.2, max_total_seconds=20.0)) == 6


def test_seeds_of_clips_are_fixed_and_spread():
    # A number that must never change: it decides the noise of runs that are resumed.
    assert clip_seed(0, 0, 0) == 8662518681111019217
    keys = [(a, b, c, d) for a in range(3) for b in range(-5, 20) for c in range(30) for d in range(2)]
    seeds = [clip_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    bits = Counter(bit for seed in seeds for bit in range(63) if seed >> bit & 1)
    assert all(abs(bits[bit] / len(seeds) - 0.5) < 4 * math.sqrt(0.25 / len(seeds)) for bit in range(63))


def behind_vae(vae, patch=(1, 2, 2), **data):
    return video_geometry(
        DitConfig(config={"model_type": "wan", "patch_size": list(patch), "in_channels": 4}),
        DataConfig(source="x", **data),
        VaeConfig(config=VAES[vae]),
    )


def test_buckets_of_pixels_become_whole_patches_of_latents():
    joined = behind_vae("wan", (2, 2, 2), fps=8.0, max_seconds=4.0, video_area=96 * 96)
    assert joined.frames == (29, 21, 13, 5)
    assert joined.sizes == ((96, 96), (80, 112), (112, 80), (64, 128), (128, 64))
    assert [joined.latents(frames, 96, 80)[0] for frames in joined.frames] == [8, 6, 4, 2]
    single = behind_vae("kl", fps=8.0, max_seconds=1.0, video_area=16 * 16, video_aspects=["1:1"])
    assert (single.frames, single.sizes) == ((8, 6, 4, 3, 2, 1), ((16, 16),))
    assert single.latents(3, 16, 16) == (3, 8, 8)
    for made in (joined, single):
        for frames in made.frames:
            for size in made.sizes:
                latents = made.latents(frames, *size)
                assert made.pixels(latents) == (frames, *size)
                assert made.num_tokens(latents) > 0
    assert behind_vae("wan", video_frames=[1, 81]).frames == (81, 1)


@pytest.mark.parametrize(
    ("patch", "data", "message"),
    [
        ((1, 2, 2), {"video_frames": [80]}, r"names 80; it must be 1 \+ 4 k frames, which become 1 \+ k latent ones"),
        ((2, 2, 2), {"video_frames": [9]}, r"names 9; it must be .*, a multiple of the 2 frames of one patch"),
        ((3, 2, 2), {"fps": 8.0, "max_seconds": 1.0}, "are 8 frames, less than the 9 of one patch"),
    ],
)
def test_numbers_of_frames_that_a_vae_does_not_take(patch, data, message):
    with pytest.raises(ConfigError, match=message):
        behind_vae("wan", patch, **data)
