"""A job of a Qwen2-Audio by one folder, on sounds: it trains, resumes, and is read by its class."""

import json

import pytest
import torch
import transformers

from mmtrain.commands.cli import main
from mmtrain.export.folder import export
from mmtrain.models.spectrogram import spectrogram_of
from tests.data.sound_files import wav
from tests.jobs import layout, metrics, train
from tests.ranks import run_ranks
from tests.sounds import FRAMES, save_whole, truth, wave
from tests.test_whole_model_job import nth_batch

JOB = """
[job]
dump_folder = "{folder}/run"
[model]
pretrained = "{data}/whole"
[data]
source = "{data}"
num_workers = 0
[training]
steps = 3
seq_len = 96
global_batch_size = 2
[optimizer]
lr = 3e-3
[lr_scheduler]
warmup_steps = 2
[checkpoint]
enable = true
interval = 3
[metrics]
enable_tensorboard = false
[debug]
seed = 3
check_plans = true
"""
LENGTHS = (0.2, 0.31, 0.655, 1.0, 1.4, 0.05)
"""Seconds of its sounds."""


@pytest.fixture
def data(tmp_path):
    """Records with one sound, with two, and with none."""
    save_whole(tmp_path / "whole")
    for index, seconds in enumerate(LENGTHS):
        (tmp_path / f"{index}.wav").write_bytes(wav(wave(seconds, index)))
    rows = []
    for index in range(24):
        sounds = [f"{(index + k) % len(LENGTHS)}.wav" for k in range(index % 3)]
        question = "<audio>and ".join(["", *[""] * len(sounds)]) + "how long?"
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": f"{index} or so"}]
        rows.append({"messages": turns, "audios": sounds})
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def write(data, name):
    folder = data / name
    folder.mkdir()
    (folder / "job.toml").write_text(JOB.format(folder=folder, data=data))
    return folder / "job.toml"


@pytest.mark.ranks
def test_a_job_trains_and_its_class_goes_on_from_the_export(data):
    path = write(data, "two")
    run_ranks(train, 2, path, layout(pp=2))
    made = export(path.parent / "run", data / "out")
    assert made.model == "Qwen2AudioForConditionalGeneration"
    theirs, info = transformers.Qwen2AudioForConditionalGeneration.from_pretrained(
        data / "out", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    before = transformers.Qwen2AudioForConditionalGeneration.from_pretrained(data / "whole").state_dict()
    fixed = {name for name, tensor in theirs.state_dict().items() if torch.equal(tensor, before[name])}
    assert fixed == {"model.audio_tower.embed_positions.weight"}
    run_ranks(train, 1, path, [*layout(), "training.steps=4"])  # resumed on another layout
    ((batch, meta),) = run_ranks(nth_batch, 1, write(data, "fourth"), layout(), 4)
    assert {len(m.images) for m in meta.microbatches} - {0}
    pairs = [
        (image, patches)
        for tensors, counts in zip(batch.microbatches, meta.microbatches, strict=True)
        for image, patches in zip(counts.images, tensors.pixel_values, strict=True)
    ]
    heard = {image.key: (spectrogram_of(patches, FRAMES), 2 * image.num_patches) for image, patches in pairs}
    with torch.no_grad():
        loss, _ = truth(theirs, [(batch, meta)], heard)
    assert metrics(path.parent)[4] == pytest.approx(loss.item() / meta.num_targets, rel=1e-5)


@pytest.mark.ranks
@pytest.mark.nightly
@pytest.mark.parametrize("degrees", [{"pp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "cp": 2}, {"pp": 2, "shard": 2}], ids=str)
def test_every_layout_of_the_job_has_the_gradients_of_its_class(data, capsys, degrees):
    path = write(data, "parity")
    assert main(["check-parity", "--config", str(path), *(f"--{change}" for change in layout(**degrees))]) == 0
    printed = capsys.readouterr().out
    assert "truth   the class of transformers for the whole qwen2_audio, one call a document" in printed
    assert "\nPASS: " in printed
