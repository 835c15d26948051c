from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mmtrain.data.batch import Batch, check_batch
from mmtrain.data.loader import Loader
from mmtrain.data.metadata import IterationMeta
from mmtrain.errors import DataError
from tests.data.samples import make_config, write_jsonl


@pytest.fixture
def step(tmp_path: Path) -> tuple[Batch, IterationMeta]:
    config = make_config(write_jsonl(tmp_path), global_batch_size=1, seq_len=80, shuffle=False)
    batch, meta, _ = next(iter(Loader(config)))
    assert len(meta.microbatches[0].images) == 3
    return batch, meta


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
