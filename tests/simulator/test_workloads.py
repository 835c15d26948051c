import statistics
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import cornstarch
from mmtrain.config import config
from mmtrain.errors import ConfigError
from mmtrain.modality.bitfield import language_bits, two_way_spans
from mmtrain.modality.captioned_clips import video_captions
from mmtrain.modality.metadata import IterationMeta
from mmtrain.modality.typical import TypicalSizes
from mmtrain.planner.batching import check_conservation, make_batching
from mmtrain.simulator.workloads import PAIRS, VIDEO_CAPTIONS, WORKLOADS, draw, image_bounds
from mmtrain.spec.builders import model_spec
from tests.models.towers import two_towers

PAPER = TypicalSizes(num_microbatches=64, seq_len=8192, grid=(1, 52, 52), image_tokens=169)


def images(meta: IterationMeta) -> list[int]:
    return [len(microbatch.images) for microbatch in meta.microbatches]


def test_an_image_of_the_paper_has_2704_patches_169_tokens_and_48_fit() -> None:
    bins = TypicalSizes.of(config.load("vlm_s.toml"))
    assert bins == PAPER
    assert bins.most_images == 48
    assert TypicalSizes.of(config.load("vlm_l.toml")).grid == (1, 52, 52)  # an encoder of any image size


@pytest.mark.parametrize(
    ("name", "overrides", "grid", "tokens"),
    [
        ("vlm_s.toml", [], (1, 52, 52), 169),
        ("vlm_s.toml", ["training.seq_len=512"], (1, 52, 52), 169),  # its encoder has images of one size
        ("vlm_s.toml", ["training.seq_len=169"], None, 0),  # no room for text
        ("debug_vlm.toml", [], (1, 12, 12), 36),  # 728, 364, 182 pixels: 676, 169, 36 tokens in 256
        ("debug_vlm.toml", ["training.seq_len=8"], (1, 4, 4), 4),  # the smallest that the encoder reads
        ("debug_text.toml", [], None, 0),
    ],
)
def test_typical_images_follow_from_the_config(name: str, overrides: list[str], grid, tokens: int) -> None:
    job = config.load(name, overrides)
    bins = TypicalSizes.typical(job)
    assert (bins.grid, bins.image_tokens) == (grid, tokens)
    assert (bins.num_microbatches, bins.seq_len) == (job.training.global_batch_size, job.training.seq_len)


@given(
    name=st.sampled_from(sorted(WORKLOADS)),
    bins=st.builds(
        TypicalSizes,
        num_microbatches=st.integers(1, 5),
        seq_len=st.integers(20, 3000),
        grid=st.just((1, 8, 8)),
        image_tokens=st.integers(1, 19),
    ),
    seed=st.integers(0, 99),
    iteration=st.integers(0, 45),
)
def test_microbatches_hold_what_fits_and_documents_add_up(
    name: str, bins: TypicalSizes, seed: int, iteration: int
) -> None:
    meta = draw(name, bins, seed=seed, iteration=iteration)
    assert len(meta.microbatches) == bins.num_microbatches
    seen = set()
    for microbatch in meta.microbatches:
        assert microbatch.documents
        assert microbatch.num_tokens <= bins.seq_len
        for document in microbatch.documents:
            text = document.num_tokens - len(document.images) * bins.image_tokens
            assert 1 <= document.num_targets <= text
            assert sum(document.answers) == document.num_targets
            assert 0 <= document.prefix <= document.num_tokens - document.num_targets
            ends = [0]
            for image in document.images:
                assert image.start >= ends[-1]
                ends.append(image.start + image.num_tokens)
                assert (image.sample, image.index) not in seen
                seen.add((image.sample, image.index))
            assert ends[-1] <= document.num_tokens
            assert len(two_way_spans(document, "image_bidirectional")) == len(document.images)


@pytest.mark.parametrize("name", WORKLOADS)
def test_equal_keys_draw_equal_metadata_and_others_do_not(name: str) -> None:
    one = draw(name, PAPER, seed=1, iteration=2, replica=3)
    assert one == draw(name, PAPER, seed=1, iteration=2, replica=3)
    others = [{"seed": 2}, {"iteration": 3}, {"replica": 4}]
    assert all(one != draw(name, PAPER, **{"seed": 1, "iteration": 2, "replica": 3, **other}) for other in others)


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_planner_takes_the_metadata_unchanged(name: str) -> None:
    spec = model_spec(config.load("vlm_s.toml").model)
    meta = draw(name, replace(PAPER, num_microbatches=4), seed=0, iteration=0)
    check_conservation(meta, make_batching(meta, spec, 12))


def documents(name: str, count: int = 40) -> tuple[float, float, float]:
    """Of a document of a workload: images, text tokens and labelled ones, on average."""
    found = [d for i in range(count) for m in draw(name, PAPER, seed=0, iteration=i).microbatches for d in m.documents]
    text = [d.num_tokens - 169 * len(d.images) for d in found]
    return (
        statistics.fmean(len(d.images) for d in found),
        statistics.fmean(text),
        statistics.fmean(d.num_targets for d in found),
    )


def test_image_text_pairs_have_the_published_moments() -> None:
    images, text, targets = documents("image_text_pairs", 5)
    assert images == 1
    assert text == targets == pytest.approx(16.4, rel=0.02)


def test_interleaved_documents_have_the_published_moments() -> None:
    images, text, targets = documents("interleaved")
    assert images == pytest.approx(2.5, rel=0.03)
    assert text == targets == pytest.approx(815, rel=0.05)  # the longest are cut


def test_science_questions_have_the_published_moments() -> None:
    images, text, targets = documents("science_qa", 5)
    assert images == pytest.approx(0.487, abs=0.01)
    assert targets == pytest.approx(2 + 0.905 * 60, rel=0.02)
    assert text == pytest.approx(40 + 0.482 * 50 + 0.839 * 165 + 2 + 0.905 * 60, rel=0.02)


def test_the_mix_takes_the_sources_in_equal_numbers() -> None:
    images, text, _ = documents("mix")
    one, other, third = (documents(name, 5) for name in ("image_text_pairs", "interleaved", "science_qa"))
    assert images == pytest.approx((one[0] + other[0] + third[0]) / 3, rel=0.05)
    assert text == pytest.approx((one[1] + other[1] + third[1]) / 3, rel=0.1)


def test_the_number_of_images_rises_and_falls_twice_in_40_iterations() -> None:
    bounds = [image_bounds(i) for i in range(40)]
    assert bounds[:5] == [(0, 32), (4, 32), (8, 32), (12, 32), (16, 32)]
    assert bounds[19] == (0, 0)
    assert bounds[20:] == bounds[:20]
    for (low, high), (next_low, next_high) in pairwise(bounds[4:20]):
        assert next_low <= low
        assert next_high < high
    drawn = [images(draw("rise_and_fall", PAPER, seed=0, iteration=i)) for i in range(40)]
    for (low, high), counts in zip(bounds, drawn, strict=True):
        assert low <= min(counts)
        assert max(counts) <= high
    means = [statistics.fmean(counts) for counts in drawn]
    assert means[4] == pytest.approx(22, abs=1.5)  # DIP, section 7.2
    assert means[0] == pytest.approx(16, abs=2)


def test_microbatches_of_rise_and_fall_are_full() -> None:
    meta = draw("rise_and_fall", PAPER, seed=3, iteration=2)
    assert {m.num_tokens for m in meta.microbatches} == {8192}


def test_microbatches_of_pretraining_are_full_and_all_tokens_are_labelled() -> None:
    meta = draw("pretraining", PAPER, seed=0, iteration=0)
    assert [m.num_tokens for m in meta.microbatches] == [PAPER.seq_len] * 64
    assert [sum(d.num_targets for d in m.documents) for m in meta.microbatches] == [PAPER.seq_len] * 64
    images, text, targets = documents("pretraining")
    # 815 tokens of `interleaved`; a document in 10 is cut in two, and the ends of the longest make more pieces.
    assert images == 0
    assert text == targets == pytest.approx(815 / (1 + 815 / PAPER.seq_len), rel=0.05)


def test_a_text_model_reads_the_text_of_the_samples() -> None:
    bins = TypicalSizes.of(config.load("debug_text.toml"))
    assert (bins.grid, bins.most_images) == (None, 0)
    for name in WORKLOADS:
        meta = draw(name, bins, seed=0, iteration=0)
        assert meta.num_images == 0
        assert meta.num_tokens > 0


def test_a_replica_reads_its_share_of_the_batch() -> None:
    assert TypicalSizes.of(config.load("vlm_xl_8k.toml")).num_microbatches == 32


def test_images_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"728 x 728 pixels makes 676 tokens.*training.seq_len = 256.*--image-side"):
        TypicalSizes.of(config.load("debug_vlm.toml"))
    assert TypicalSizes.of(config.load("debug_vlm.toml"), 112).image_tokens == 16


def test_an_unknown_workload_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"workload 'mixed' does not exist; did you mean 'mix'"):
        draw("mixed", PAPER, seed=0, iteration=0)


def test_clips_have_the_latents_of_their_videos() -> None:
    """A VAE as Wan's: 1 + (frames - 1) / 4 latent frames, 1 / 8 of each side; patches of 1 x 2 x 2."""
    job = config.load("t2v_s.toml", ["training.global_batch_size=200"])
    bins = TypicalSizes.of(job)
    assert (bins.num_microbatches, bins.grid) == (200, None)
    meta = draw(VIDEO_CAPTIONS, bins, seed=0, iteration=0)
    clips = [clip for m in meta.microbatches for clip in m.clips]
    drawn = [clip for group in video_captions(200, seed=0, iteration=0) for clip in group]
    assert [clip.frames for clip in clips] == [1 + (clip.num_frames - 1) // 4 for clip in drawn]
    assert max(clip.frames for clip in clips) == 64
    assert {(clip.height, clip.width) for clip in clips} == {(32, 32)}
    assert all(clip.num_tokens == clip.frames * 16 * 16 for clip in clips)
    assert [clip.num_text_tokens for clip in clips] == [clip.caption_tokens for clip in drawn]
    assert meta.num_clips == len(clips) > 200
    assert (meta.num_tokens, meta.num_images) == (0, 0)
    assert draw(VIDEO_CAPTIONS, bins, seed=0, iteration=0) == meta
    assert TypicalSizes.typical(job) == bins


def test_larger_clips_and_other_patches() -> None:
    patch = "model.dit.config={model_type='wan', text_dim=4096, patch_size=[2, 4, 4]}"
    bins = TypicalSizes.of(config.load("t2v_s.toml", [patch, "training.seq_len=20"]), 768)
    clips = [clip for m in draw(VIDEO_CAPTIONS, bins, seed=1, iteration=0).microbatches for clip in m.clips]
    assert {(clip.height, clip.width) for clip in clips} == {(96, 96)}
    assert all(clip.frames % 2 == 0 and clip.num_tokens == clip.frames // 2 * 24 * 24 for clip in clips)
    assert max(clip.num_text_tokens for clip in clips) == 20


def test_clips_go_with_text_to_video_models_alone() -> None:
    bins = TypicalSizes.of(config.load("t2v_s.toml"))
    with pytest.raises(ConfigError, match="does not go with a model that reads prompts and video clips; choose 'video"):
        draw("mix", bins, seed=0, iteration=0)
    with pytest.raises(ConfigError, match="does not go with a model that reads no video clips; choose one of image"):
        draw(VIDEO_CAPTIONS, PAPER, seed=0, iteration=0)
    with pytest.raises(ConfigError, match=r"have \[64, 2050, 2050\] patches .*, but the DiT takes 1 to 1024"):
        TypicalSizes.of(config.load("t2v_s.toml"), 32800)


def test_an_image_comes_with_an_item_of_each_further_encoder(tmp_path):
    """The batch is conserved in works of each encoder, and an item keeps its place before the text."""
    job = cornstarch.job("SSS", tmp_path, pp=6)
    bins = TypicalSizes.of(job)
    assert bins.with_image == (("audio", (1, 1, 1500), 750),)
    for name in WORKLOADS.keys() - {"pretraining"}:  # which has no images
        meta = draw(name, bins, seed=3, iteration=1)
        batching = make_batching(meta, model_spec(job.model), {"vision": 3, "audio": 2})
        check_conservation(meta, batching)
        items = [image for microbatch in meta.microbatches for image in microbatch.images]
        of_module = Counter(item.module for item in items)
        assert of_module["audio"] == of_module["vision"] > 0
        sizes = Counter(batching.module_of(w) for w in range(len(batching.works)))
        assert sizes["audio"] > sizes["vision"] > sizes["language"] > 0
        assert all(len(bits) == m.num_tokens for m in meta.microbatches for bits in [language_bits(m, "modality")])


@pytest.mark.parametrize(("kind", "seq_len", "most"), [("clip", 32, 12), ("clip", 8, 8), ("siglip", 32, 9)])
def test_pairs_fill_each_microbatch_with_captions_of_the_tower(kind: str, seq_len: int, most: int) -> None:
    """Those of SigLIP are all padded to its positions; longer ones of CLIP are cut."""
    model = two_towers(kind)
    job = replace(config.load("debug_clip.toml"), model=model)
    job = replace(job, training=replace(job.training, seq_len=seq_len), data=replace(job.data, max_pairs=20))
    meta = draw(PAIRS, TypicalSizes.of(job), seed=0, iteration=3)
    assert meta == draw(PAIRS, TypicalSizes.typical(job), seed=0, iteration=3)
    assert (meta != draw(PAIRS, TypicalSizes.of(job), seed=0, iteration=4)) == (kind == "clip")
    assert images(meta) == [20] * job.training.global_batch_size
    documents = [document for microbatch in meta.microbatches for document in microbatch.documents]
    assert all(d.num_targets == len(d.images) == 1 and d.images[0].grid == (1, 4, 4) for d in documents)
    lengths = {document.num_tokens for document in documents}
    assert max(lengths) == most and (len(lengths) == 1) == (kind == "siglip")
    check_conservation(meta, make_batching(meta, model_spec(model), 0))
