"""Whole steps of a text-to-video job: packing, exact resume, policies for bad clips."""

import functools
import multiprocessing
import operator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmtrain.config.config import Config
from mmtrain.data.loader import LoadedStep, Loader
from mmtrain.data.packing import LoaderState
from mmtrain.data.toy.shapes import make_shapes
from mmtrain.errors import ConfigError, DataError
from tests.data.samples import png
from tests.data.videos import make_video_config, save_latents, write_clip, write_videos


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shapes data set of 90 + 10 clips."""
    out = tmp_path_factory.mktemp("shapes") / "set"
    make_shapes(out, 100, seed=5)
    return out


def steps(config: Config, num: int, **options: Any) -> list[LoadedStep]:
    with Loader(config, num_steps=num, **options) as loader:
        return list(loader)


def assert_same(left: list[LoadedStep], right: list[LoadedStep]) -> None:
    assert len(left) == len(right)
    for (batch, meta, state), (other_batch, other_meta, other_state) in zip(left, right, strict=True):
        assert meta == other_meta
        assert state == other_state
        assert batch.microbatches == other_batch.microbatches == []
        for m, n in zip(batch.clips, other_batch.clips, strict=True):
            assert m.clip_names == n.clip_names
            for a, b in zip([m.text_ids, *m.latents], [n.text_ids, *n.latents], strict=True):
                assert a.dtype == b.dtype
                assert torch.equal(a, b)


def sample_sequence(found: list[LoadedStep]) -> list[list[list[int]]]:
    return [[[clip.sample for clip in m.clips] for m in meta.microbatches] for _, meta, _ in found]


def test_microbatches_of_clips(shapes: Path) -> None:
    found = steps(make_video_config(shapes, max_clips=3), 6)
    buckets = set()
    for batch, meta, _ in found:
        assert len(batch.clips) == len(meta.microbatches) == 2
        assert meta.num_skipped == meta.num_images == meta.num_tokens == 0
        assert meta.num_clips == sum(len(m.latents) for m in batch.clips)
        assert meta.num_targets == meta.num_video_tokens
        assert meta.num_video_tokens == sum(latents.numel() // 12 for m in batch.clips for latents in m.latents)
        assert meta.num_text_tokens == sum(len(m.text_ids) for m in batch.clips)
        assert meta.num_frames == sum(latents.shape[1] for m in batch.clips for latents in m.latents)
        for tensors, counts in zip(batch.clips, meta.microbatches, strict=True):
            assert counts.documents == ()
            assert 1 <= len(counts.clips) <= 3
            assert counts.num_frames <= 32
            assert [tuple(latents.shape) for latents in tensors.latents] == [(3, *c.bucket) for c in counts.clips]
            assert all(latents.dtype == torch.float32 for latents in tensors.latents)
            assert all(-1 <= latents.min() < latents.max() <= 1 for latents in tensors.latents)
            buckets |= set(counts.buckets)
            for places in counts.buckets.values():  # these can be one dense batch
                torch.stack([tensors.latents[place] for place in places])
            assert sorted(p for places in counts.buckets.values() for p in places) == list(range(len(counts.clips)))
    assert {bucket[0] for bucket in buckets} == {4, 8, 12, 16}
    assert {bucket[1:] for bucket in buckets} == {(24, 24), (20, 28), (28, 20)}


def test_captions_belong_to_their_clips(shapes: Path) -> None:
    from mmtrain.config.data import TokenizerConfig
    from mmtrain.data.tokenizer import load_tokenizer
    from mmtrain.data.toy.data_set import COLOURS
    from mmtrain.data.toy.shape_clips import SIZES
    from mmtrain.data.toy.shapes import shape_clips

    tokenizer = load_tokenizer(TokenizerConfig(), captions=True)
    made = list(shape_clips("train", 90, 5))
    for batch, meta, _ in steps(make_video_config(shapes), 4):
        for tensors, counts in zip(batch.clips, meta.microbatches, strict=True):
            texts = tensors.text_ids.split(list(counts.text_lengths))
            for ids, clip, latents in zip(texts, counts.clips, tensors.latents, strict=True):
                caption = made[clip.sample].caption
                assert tokenizer.decode(ids) == caption
                front = sorted(made[clip.sample].shapes, key=lambda shape: -SIZES[shape.size])[-1]  # nothing hides it
                colour = torch.tensor(COLOURS[front.colour]) / 127.5 - 1
                distance = (latents[:, 0] - colour[:, None, None]).abs().amax(0)
                assert distance.min() < 0.35, caption


def test_an_epoch_uses_each_clip_once(shapes: Path) -> None:
    used: list[int] = []
    for _, meta, state in Loader(make_video_config(shapes)):
        used += [clip.sample for m in meta.microbatches for clip in m.clips]
        if state.epoch == 1:
            break
    assert len(set(used[: 90 - state.cursor])) == 90 - state.cursor
    assert set(used) == set(range(90))
    assert len(used) == 90 + state.cursor


def test_any_number_of_workers_gives_the_same_steps(shapes: Path) -> None:
    config = make_video_config(shapes)
    expected = steps(config, 5)
    for num_workers in (1, 2):
        assert_same(steps(config, 5, num_workers=num_workers), expected)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("streaming", [False, True])
def test_resume_is_exact(shapes: Path, streaming: bool) -> None:
    config = make_video_config(shapes, streaming=streaming, shuffle=not streaming)
    whole = steps(config, 20)
    assert whole[-1][2].epoch >= 1
    for at in (0, 3, 12):
        again = LoaderState.from_dict(whole[at][2].to_dict())
        assert_same(steps(config, 19 - at, state=again), whole[at + 1 :])


def test_streaming_reads_the_same_as_the_source_in_order(shapes: Path) -> None:
    by_index = steps(make_video_config(shapes, shuffle=False), 5)
    assert_same(steps(make_video_config(shapes, shuffle=False, streaming=True), 5), by_index)


def test_the_global_sequence_does_not_depend_on_replicas_and_workers(shapes: Path) -> None:
    config = make_video_config(shapes, global_batch_size=4)
    alone = steps(config, 5)
    state = steps(config, 2)[-1][2]
    for degree, num_workers in ((2, 1), (4, 0)):
        options = {"dp_degree": degree, "state": state, "num_workers": num_workers}
        replicas = [steps(config, 3, dp_rank=rank, **options) for rank in range(degree)]
        for step, (batch, meta, after) in enumerate(alone[2:]):
            for g in range(4):
                other_batch, other_meta, other_after = replicas[g % degree][step]
                assert other_meta.microbatches[g // degree] == meta.microbatches[g]
                assert other_after == after
                for a, b in zip(other_batch.clips[g // degree].latents, batch.clips[g].latents, strict=True):
                    assert torch.equal(a, b)


def test_a_clip_that_a_step_holds_twice_has_two_names(tmp_path: Path) -> None:
    """Else both would get the same noise, and conservation could not tell them apart."""
    source = write_videos(tmp_path, 5)
    config = make_video_config(source, max_clips=2)
    twice = 0
    for seed in range(20):
        for _, meta, _ in steps(config, 4, state=LoaderState(seed=seed)):
            names = [(clip.sample, clip.index) for m in meta.microbatches for clip in m.clips]
            assert len(set(names)) == len(names)
            for sample, index in names:
                assert index == 0 or (sample, index - 1) in names
            twice += any(index for _, index in names)
    assert twice > 3
    # The numbers are those of the whole step, on every replica.
    for seed in range(20):
        whole = steps(config, 4, state=LoaderState(seed=seed))
        halves = [steps(config, 4, state=LoaderState(seed=seed), dp_rank=rank, dp_degree=2) for rank in range(2)]
        for step, (_, meta, _) in enumerate(whole):
            assert meta.microbatches == tuple(half[step][1].microbatches[0] for half in halves)


def test_latents_by_path(tmp_path: Path) -> None:
    rows = {}
    for index in range(12):
        values = save_latents(tmp_path / f"{'x' * index}.npy", (4, 4 + index % 3, 6, 4 + 2 * (index % 2)))
        rows[index] = {"frames": None, "latents": f"{'x' * index}.npy"}
    source = write_videos(tmp_path, 12, rows)
    config = make_video_config(source, dit={"in_channels": 4}, shuffle=False)
    found = steps(config, 1)[0]
    assert {clip.bucket for m in found[1].microbatches for clip in m.clips} == {
        (4, 6, 4), (4, 6, 6), (6, 6, 4), (6, 6, 6)
    }  # fmt: skip
    for tensors, counts in zip(found[0].clips, found[1].microbatches, strict=True):
        for clip, latents in zip(counts.clips, tensors.latents, strict=True):
            values = np.load(tmp_path / f"{'x' * clip.sample}.npy")
            assert np.array_equal(latents.numpy(), values[:, : clip.frames])


# ------------------------------------------------------------------------------------------ bad samples


def damaged(folder: Path, header: bool) -> Path:
    path = write_videos(folder, 12)
    (folder / "clip4" / "000.png").write_bytes(b"no picture" if header else png(24, 24)[:60])
    return path


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("header", [True, False])
def test_a_corrupt_clip_stops_with_its_name(tmp_path: Path, header: bool, num_workers: int) -> None:
    config = make_video_config(damaged(tmp_path, header), shuffle=False)
    reason = "are not an image" if header else "its content is corrupt"
    with pytest.raises(DataError, match=f"^sample 4: frame 0: .*{reason}") as failure:
        steps(config, 3, num_workers=num_workers)
    assert "\n" not in str(failure.value)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("header", [True, False])
def test_a_corrupt_clip_is_skipped_and_counted_once(tmp_path: Path, header: bool) -> None:
    config = make_video_config(damaged(tmp_path, header), shuffle=False, on_error="skip")
    found = steps(config, 3)
    skipped = [meta.num_skipped for _, meta, _ in found]
    assert skipped[0] == 1
    assert all(4 not in samples for step in sample_sequence(found) for samples in step)
    replicas = [steps(config, 3, dp_rank=rank, dp_degree=2) for rank in range(2)]
    assert [sum(r[step][1].num_skipped for r in replicas) for step in range(3)] == skipped
    if not header:  # found after planning: all others stay where they are
        write_clip(tmp_path / "whole")
        (tmp_path / "clip4" / "000.png").write_bytes((tmp_path / "whole" / "000.png").read_bytes())
        whole = steps(config, 3)
        without = [[[s for s in samples if s != 4] for samples in step] for step in sample_sequence(whole)]
        assert without == sample_sequence(found)
        assert [state for _, _, state in whole] == [state for _, _, state in found]


def test_an_emptied_microbatch_keeps_a_blank_clip_without_a_loss(tmp_path: Path) -> None:
    source = damaged(tmp_path, header=False)
    config = make_video_config(source, global_batch_size=1, shuffle=False, on_error="skip", max_clips=1)
    found = steps(config, 6)
    batch, meta, _ = found[4]
    (clip,) = meta.microbatches[0].clips
    assert (clip.sample, clip.blank, clip.num_targets, meta.num_targets) == (4, True, 0, 0)
    assert clip.num_tokens == meta.num_video_tokens > 0
    assert batch.clips[0].latents[0].shape == (3, *clip.bucket)
    assert not batch.clips[0].latents[0].any()
    assert [m.num_skipped for _, m, _ in found] == [0, 0, 0, 0, 1, 0]
    assert [m.num_targets > 0 for _, m, _ in found] == [True, True, True, True, False, True]


def test_a_caption_that_is_too_long_follows_the_policy(tmp_path: Path) -> None:
    source = write_videos(tmp_path, 12, {3: {"caption": "a red circle moves right " * 9}})
    options: dict[str, Any] = {"seq_len": 24, "shuffle": False}
    message = r"^sample 3: \d+ tokens of its caption do not fit training.seq_len = 24; set data.too_long"
    with pytest.raises(DataError, match=message):
        steps(make_video_config(source, **options), 1)
    skipped = steps(make_video_config(source, too_long="skip", **options), 1)
    assert skipped[0][1].num_skipped == 1
    assert 3 not in functools.reduce(operator.iadd, sample_sequence(skipped)[0], [])
    cut = steps(make_video_config(source, too_long="truncate", **options), 1)
    (clip,) = [clip for m in cut[0][1].microbatches for clip in m.clips if clip.sample == 3]
    assert clip.num_text_tokens == 24
    assert cut[0][1].num_skipped == 0


def test_a_row_that_is_no_clip_follows_the_policy(tmp_path: Path) -> None:
    source = write_videos(tmp_path, 12, {3: {"caption": None}, 5: {"frames": "absent"}})
    with pytest.raises(DataError, match=r"^sample 3 of .*train.jsonl \(train\): no `caption`"):
        steps(make_video_config(source, shuffle=False), 1)
    found = steps(make_video_config(source, shuffle=False, on_error="skip"), 1)
    assert found[0][1].num_skipped == 2


def test_a_tiny_source_is_refused_with_the_numbers(tmp_path: Path) -> None:
    source = write_videos(tmp_path, 3)
    with pytest.raises(
        DataError,
        match=r"3 usable ones have 24 frames and 3 clips and fill 1 of training.global_batch_size = 2 microbatches of "
        r"data.max_total_seconds = 4.0 s \(32 frames\) and data.max_clips = 8 clips; lower one of these or add",
    ):
        steps(make_video_config(source), 1)


# ------------------------------------------------------------------------------------------ set-up


def test_parts_that_do_not_fit_are_refused(shapes: Path, charts: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 416 entries, but the text encoder's vocab_size is 400"):
        Loader(make_video_config(shapes, vocab_size=400))
    with pytest.raises(ConfigError, match="no column `caption`; it has messages, images, grade"):
        Loader(make_video_config(charts))
    with pytest.raises(ConfigError, match=r"patch_size = \[1, 2\]"):
        Loader(make_video_config(shapes, dit={"patch_size": [1, 2]}))
    with pytest.raises(ConfigError, match=r"split 'test' cannot be opened"):
        Loader(make_video_config(shapes), split="test")
    with pytest.raises(DataError, match=r"no usable sample: 90 were left out; for example .* it has pixels, but"):
        steps(make_video_config(shapes, dit={"in_channels": 16}, on_error="skip"), 1)


def test_validation_has_its_own_clips(shapes: Path) -> None:
    config = make_video_config(shapes, global_batch_size=1, max_clips=4)
    found = steps(config, 2, split="validation")
    first = [sample for step in sample_sequence(found) for microbatch in step for sample in microbatch]
    assert first == list(range(len(first)))
    assert len(steps(config, 1, split="validation")[0][0].clips) == 1
