import re
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch

from mmtrain.data.loader import Loader
from mmtrain.errors import DataError
from mmtrain.modality.metadata import IterationMeta
from mmtrain.models.batch import Batch, check_batch, regrouped, with_other_captions, without_images
from mmtrain.planner.grouping import grouped
from mmtrain.spec.vae_shapes import latent_scale
from tests.data.samples import make_config, write_jsonl
from tests.data.videos import make_video_config, write_videos
from tests.models.dits import t2v
from tests.reference import make_clips


@pytest.fixture
def step(tmp_path: Path) -> tuple[Batch, IterationMeta]:
    config = make_config(write_jsonl(tmp_path), global_batch_size=1, seq_len=80, shuffle=False)
    batch, meta, _ = next(iter(Loader(config)))
    assert len(meta.microbatches[0].images) == 3
    return batch, meta


def tensors(batch: Batch) -> list[tuple[list[int], ...]]:
    """What is in each microbatch, to compare."""
    rows = [
        (
            m.input_ids.tolist(),
            m.labels.tolist(),
            m.image_slots.tolist(),
            m.image_names,
            [id(p) for p in m.pixel_values],
        )
        for m in batch.microbatches
    ]
    clips = [(m.text_ids.tolist(), m.clip_names, [id(one) for one in m.latents]) for m in batch.clips]
    return [*rows, *clips]


@pytest.mark.parametrize("of_clips", [False, True], ids=["documents", "clips"])
def test_samples_go_to_other_microbatches_and_back(step: tuple[Batch, IterationMeta], of_clips: bool) -> None:
    batch, meta = make_clips(t2v(), [2, 1], 3) if of_clips else step
    ends = list(accumulate((len(microbatch.samples) for microbatch in meta.microbatches), initial=0))
    alone = tuple((i,) for i in reversed(range(ends[-1])))
    apart, of_apart = regrouped(batch, meta, alone), grouped(meta, alone)
    check_batch(apart, of_apart)
    assert len(of_apart.microbatches) == ends[-1] > len(meta.microbatches)
    back = tuple(tuple(ends[-1] - 1 - i for i in range(*pair)) for pair in pairwise(ends))
    assert grouped(of_apart, back) == meta
    assert tensors(regrouped(apart, of_apart, back)) == tensors(batch)
    lean = without_images(batch)  # of a rank that only embeds tokens
    assert tensors(regrouped(lean, meta, alone)) == tensors(without_images(apart))


def drop_image(batch: Batch) -> None:
    del batch.microbatches[0].pixel_values[1], batch.microbatches[0].image_names[1]


def double_image(batch: Batch) -> None:
    m = batch.microbatches[0]
    m.pixel_values.append(m.pixel_values[0])
    m.image_names.append(m.image_names[0])


def swap_images(batch: Batch) -> None:
    names = batch.microbatches[0].image_names
    names[0], names[1] = names[1], names[0]


def drop_pixels(batch: Batch) -> None:
    del batch.microbatches[0].pixel_values[1]


def cut_pixels(batch: Batch) -> None:
    batch.microbatches[0].pixel_values[2] = batch.microbatches[0].pixel_values[2][:-1]


def drop_slot(batch: Batch) -> None:
    batch.microbatches[0].image_slots = batch.microbatches[0].image_slots[1:]


def add_slot(batch: Batch) -> None:
    slots = batch.microbatches[0].image_slots
    batch.microbatches[0].image_slots = torch.cat([slots, slots[-1:] + 1])


def move_run(batch: Batch) -> None:
    batch.microbatches[0].image_slots[:4] += 60  # into the next document


def drop_label(batch: Batch) -> None:
    labels = batch.microbatches[0].labels
    labels[labels.ne(-100).nonzero()[0]] = -100


def drop_token(batch: Batch) -> None:
    batch.microbatches[0].input_ids = batch.microbatches[0].input_ids[1:]


def drop_microbatch(batch: Batch) -> None:
    batch.microbatches.clear()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_image, "microbatch 0: image 0 of sample 1 is lost"),
        (double_image, "microbatch 0: image 0 of sample 0 is there once too often"),
        (swap_images, "in another order"),
        (drop_pixels, "2 pixel tensors for 3 images"),
        (cut_pixels, "image 0 of sample 2 has .* pixel rows"),
        (drop_slot, "image 0 of sample 0 needs 4 image tokens in one run"),
        (add_slot, "13 image tokens, but its images fill 12"),
        (move_run, "image 0 of sample 0 needs 4 image tokens in one run inside of its document"),
        (drop_label, "labelled positions, but the metadata names"),
        (drop_token, "input_ids has shape"),
        (drop_microbatch, "0 microbatches, but the metadata names 1"),
    ],
)
def test_damage_is_named(step: tuple[Batch, IterationMeta], damage: Callable[[Batch], None], message: str) -> None:
    batch, meta = step
    check_batch(batch, meta)
    damage(batch)
    with pytest.raises(DataError, match=message):
        check_batch(batch, meta)


@pytest.fixture
def clips(tmp_path: Path) -> tuple[Batch, IterationMeta]:
    config = make_video_config(write_videos(tmp_path), global_batch_size=1, shuffle=False)
    batch, meta, _ = next(iter(Loader(config)))
    assert len(meta.microbatches[0].clips) == 4
    return batch, meta


def drop_clip(batch: Batch) -> None:
    del batch.clips[0].latents[1], batch.clips[0].clip_names[1]


def double_clip(batch: Batch) -> None:
    batch.clips[0].latents.append(batch.clips[0].latents[0])
    batch.clips[0].clip_names.append(batch.clips[0].clip_names[0])


def swap_clips(batch: Batch) -> None:
    batch.clips[0].clip_names.reverse()


def drop_latents(batch: Batch) -> None:
    batch.clips[0].latents.pop()


def cut_latents(batch: Batch) -> None:
    batch.clips[0].latents[2] = batch.clips[0].latents[2][:, :-1]


def drop_word(batch: Batch) -> None:
    batch.clips[0].text_ids = batch.clips[0].text_ids[1:]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_clip, "microbatch 0: clip 0 of sample 1 is lost"),
        (double_clip, "microbatch 0: clip 0 of sample 0 is there once too often"),
        (swap_clips, "its clips are in another order than their captions"),
        (drop_latents, "3 latent tensors for 4 clips"),
        (cut_latents, r"the clip of sample 2 has latents of shape \(3, 7, 24, 24\); its bucket is \(8, 24, 24\)"),
        (drop_word, r"text_ids has shape .* but its captions have"),
        (lambda batch: batch.clips.clear(), "0 microbatches, but the metadata names 1"),
    ],
)
def test_damage_of_clips_is_named(
    clips: tuple[Batch, IterationMeta], damage: Callable[[Batch], None], message: str
) -> None:
    batch, meta = clips
    check_batch(batch, meta)
    damage(batch)
    with pytest.raises(DataError, match=message):
        check_batch(batch, meta)


def test_other_captions_are_those_of_the_next_clip(clips: tuple[Batch, IterationMeta]) -> None:
    batch, meta = clips
    changed, changed_meta = with_other_captions(batch, meta)
    check_batch(changed, changed_meta)
    lengths = meta.microbatches[0].text_lengths
    captions = batch.clips[0].text_ids.split(list(lengths))
    found = changed.clips[0].text_ids.split(list(changed_meta.microbatches[0].text_lengths))
    assert [text.tolist() for text in found] == [text.tolist() for text in (*captions[1:], captions[0])]
    assert changed.clips[0].latents == batch.clips[0].latents
    assert [c.bucket for c in changed_meta.microbatches[0].clips] == [c.bucket for c in meta.microbatches[0].clips]
    check_batch(batch, meta)


def test_a_rank_of_text_needs_no_latents(clips: tuple[Batch, IterationMeta]) -> None:
    batch, meta = clips
    (text,) = without_images(batch).clips
    assert text.latents == text.clip_names == []
    assert len(text.text_ids) == meta.num_text_tokens
    assert len(batch.clips[0].latents) == 4


def test_clips_of_a_job_with_a_vae_are_pixels() -> None:
    model = t2v(vae="wan")
    batch, meta = make_clips(model, [2, 1], 3)
    assert model.vae is not None
    scale = latent_scale(model.vae)
    check_batch(batch, meta, scale)
    clip = meta.microbatches[0].clips[1]
    with pytest.raises(DataError, match=r"microbatch 0: .* has latents of shape \(3, .*; its bucket is"):
        check_batch(batch, meta)
    batch.clips[0].latents[1] = batch.clips[0].latents[1][:, :-1]
    with pytest.raises(DataError, match=rf"microbatch 0: {re.escape(clip.name)} has pixels of shape .* are made of"):
        check_batch(batch, meta, scale)
