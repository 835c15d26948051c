"""`mmtrain check-parity`: a right layout passes, a broken one fails, and the exit status says which."""

import dataclasses
import os
import re

import pytest
import torch
import torch.distributed as dist

from mmtrain.commands.cli import main
from mmtrain.config import config
from mmtrain.data.noise_batches import noise_batch
from mmtrain.local import parity
from mmtrain.local.parity import ParameterError, Parity, StepParity, report, synthetic_data
from mmtrain.modality.probes import mixed_iteration
from mmtrain.models.batch import check_batch
from mmtrain.planner.batching import check_conservation, make_batching
from mmtrain.simulator.shrink import shrink
from mmtrain.spec.builders import model_spec
from tests.jobs import layout, video_config, write_config, write_sound_config, write_video_config
from tests.ranks import warm_ranks

SAVE_GRADIENTS = parity._save_gradients

RIGHT = Parity(
    low_precision=False,
    tolerance=1e-4,
    steps=(StepParity(loss=2.0, wanted_loss=2.0, grad_norm=3.0, wanted_norm=3.0),),
    parameters=(
        ParameterError(name="language.lm_head.weight", error=9e-5, norm=1.0),
        ParameterError(name="language.model.norm.weight", error=1e-7, norm=0.5),
    ),
)


def with_step(**values):
    return dataclasses.replace(RIGHT, steps=(dataclasses.replace(RIGHT.steps[0], **values),))


def test_what_agrees_has_no_problems():
    assert RIGHT.problems == []
    assert report(RIGHT).endswith("PASS: relative tolerance 0.0001 (loss, norm, each gradient's largest difference)")


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (with_step(loss=2.001), "loss of step 1 differs by 5.00e-04"),
        (with_step(loss=float("nan")), "loss of step 1 differs by nan"),
        (with_step(grad_norm=3.3), "gradient norm of step 1 differs by 1.00e-01"),
        (dataclasses.replace(RIGHT, tolerance=1e-5), "1 of 2 gradients differ, at most by 9.00e-05"),
        (dataclasses.replace(RIGHT, missing=("a.weight",)), "gradient of a.weight is on one side alone"),
        (dataclasses.replace(RIGHT, crash="rank 1 died"), "rank 1 died"),
        (
            dataclasses.replace(RIGHT, parameters=(ParameterError(name="a", error=float("nan"), norm=1.0),)),
            "1 of 1 gradients differ, at most by nan",
        ),
        (dataclasses.replace(RIGHT, low_precision=True, total_error=0.1), "all gradients together differ by 1.00e-01"),
    ],
)
def test_whatever_does_not_agree_is_a_problem(found, problem):
    assert found.problems == [problem]
    assert report(found).splitlines()[-1].startswith(f"FAIL: {problem}")


def test_with_low_precision_the_gradients_together_decide():
    assert dataclasses.replace(RIGHT, low_precision=True, total_error=1e-5, tolerance=5e-5).problems == []


def check(path, *arguments):
    with warm_ranks():
        return main(["check-parity", "--config", str(path), *(f"--{word}" for word in arguments)])


@pytest.mark.ranks
@pytest.mark.parametrize("vocabulary", ["tensor", "pipeline"])
def test_a_right_layout_passes(tmp_path, charts, capsys, vocabulary):
    path = write_config(tmp_path, charts)
    degrees = [*layout(pp=2), f"parallelism.vocabulary_parallel={vocabulary}"]
    assert check(path, *degrees, "activation_checkpoint.mode=full", "steps=2") == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == ["layout: starts 2 processes"] + [
        f"one process: step {step} of 2 has run" for step in (1, 2)
    ]  # and those of rank 0, which is another process
    assert out.startswith("layout  pp 2: 2 processes")
    assert "step 2  gradient norm" in out
    assert "PASS: relative tolerance 0.0001" in out


def scale_one_gradient(device, *args):
    from mmtrain.parallel import batch_runner

    fill = batch_runner.fill_missing_grads

    def broken(parameters):
        fill(parameters)
        if dist.get_rank() == 1:
            next(p.grad for p in parameters if p.grad is not None).mul_(1.1)

    batch_runner.fill_missing_grads = broken
    SAVE_GRADIENTS(device, *args)


def raise_on_rank_1(device, *args):
    from mmtrain.parallel import batch_runner

    def broken(parameters):
        if dist.get_rank() == 1:
            raise RuntimeError("a bug of the layout")

    batch_runner.fill_missing_grads = broken
    SAVE_GRADIENTS(device, *args)


def die(device, *args):
    os._exit(7)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("rank_main", "message"),
    [
        (scale_one_gradient, "1 of 57 gradients differ"),
        pytest.param(raise_on_rank_1, "RuntimeError: a bug of the layout", marks=pytest.mark.nightly),
        (die, "died with exit status 7"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_layout_fails(tmp_path, charts, capsys, monkeypatch, rank_main, message):
    path = write_config(tmp_path, charts)
    monkeypatch.setattr(parity, "_save_gradients", rank_main)
    assert check(path, *layout(pp=2)) == 1
    out = capsys.readouterr().out
    assert "FAIL: " in out
    assert message in out
    assert "PASS" not in out


@pytest.mark.ranks
def test_data_that_cannot_be_read_are_named_and_synthetic_ones_take_their_place(tmp_path, capsys):
    path = write_config(tmp_path, tmp_path / "nowhere")
    assert check(path) == 2
    assert "data.source" in capsys.readouterr().err
    assert check(path, "synthetic", "training.mixed_precision_param=bfloat16") == 0
    out = capsys.readouterr().out
    assert "data    synthetic" in out
    assert "all gradients together" in out


@pytest.mark.ranks
def test_a_text_model_has_synthetic_text(tmp_path, capsys):
    path = tmp_path / "text.toml"
    path.write_text(
        '[model.language]\nconfig = { model_type = "llama", hidden_size = 64, intermediate_size = 128, '
        "num_hidden_layers = 2, num_attention_heads = 4, vocab_size = 448 }\n"
        '[data]\nsource = "nowhere"\n[training]\nsteps = 1\nseq_len = 128\nglobal_batch_size = 2\n'
    )
    assert check(path, "synthetic") == 0
    assert "job     scaled down: language llama" in capsys.readouterr().out


def scale_gradients_of_sound(device, *args):
    from mmtrain.training.trainer import Trainer

    backward = Trainer.backward

    def broken(self, *step):
        found = backward(self, *step)
        for name, parameter in (pair for chunk in self.model.chunks for pair in chunk.named_parameters()):
            if name.startswith("audio.") and parameter.grad is not None:
                parameter.grad.mul_(1.01)
        return found

    Trainer.backward = broken
    SAVE_GRADIENTS(device, *args)


@pytest.mark.ranks
def test_a_model_with_several_encoders_is_compared_on_noise_of_all(tmp_path, capsys, monkeypatch):
    path = write_sound_config(tmp_path, tmp_path / "nowhere")
    words = [*layout(pp=2), "activation_checkpoint.mode=full", "steps=2"]
    assert check(path, "synthetic", *words) == 0
    out = capsys.readouterr().out
    assert "data    noise" in out
    assert re.search(r"scaled down: vision qwen2_vl_vision, .*; audio whisper_encoder, .*; language qwen2, ", out)
    assert "PASS" in out
    monkeypatch.setattr(parity, "_save_gradients", scale_gradients_of_sound)
    assert check(path, "synthetic", *words[:-1]) == 1
    out = capsys.readouterr().out
    worst = re.findall(r"^ +[1-9]\S*e-0[1-3] +\S+  (\S+)$", out, re.M)
    assert worst and all(name.startswith("audio.") for name in worst)
    assert "FAIL: " in out


def test_noise_of_a_job_with_several_encoders_has_every_mixture(tmp_path):
    job = config.load(write_sound_config(tmp_path, tmp_path / "nowhere"), ["--training.global_batch_size=8"])
    metas = [mixed_iteration(job, seed) for seed in (1, 1, 2)]
    assert metas[0] == metas[1] != metas[2]
    spec = model_spec(job.model)
    for meta in metas:
        check_conservation(meta, make_batching(meta, spec))
        check_batch(noise_batch(job.model, meta, 1), meta)
        kinds = [{image.module for image in microbatch.images} for microbatch in meta.microbatches]
        assert kinds[0] == {"vision", "audio"}
        assert all(kinds.count(kind) == 2 for kind in ({"vision", "audio"}, {"vision"}, {"audio"}, set()))
        assert all(m.num_tokens <= job.training.seq_len for m in meta.microbatches)


@pytest.mark.ranks
def test_a_text_to_video_model_has_synthetic_clips(tmp_path, capsys):
    path = write_video_config(tmp_path, tmp_path / "nowhere")
    words = ["parallelism.pipeline_parallel_schedule=ZB-H1", "diffusion.caption_dropout=0.5"]
    assert check(path, "synthetic", *layout(pp=2), *words) == 0
    out = capsys.readouterr().out
    assert re.search(r"scaled down: language llama, .*; dit wan, .* microbatches of up to 4 clips", out)
    assert "dit.blocks.1" in out
    assert "PASS" in out


@pytest.mark.parametrize("channels", [3, 4])
def test_synthetic_clips_have_several_buckets_captions_and_contents(tmp_path, channels):
    from mmtrain.data.loader import Loader

    small = shrink(video_config(tmp_path, channels=channels)).config
    job = dataclasses.replace(small, data=synthetic_data(small, tmp_path))
    steps, again = (list(Loader(job, split="train", num_steps=4)) for _ in range(2))
    clips = [clip for _, meta, _ in steps for microbatch in meta.microbatches for clip in microbatch.clips]
    assert len({clip.bucket for clip in clips}) >= 5
    assert len({clip.frames for clip in clips}) >= 2
    assert len({clip.num_text_tokens for clip in clips}) >= 5
    latents, same = ([values for batch, *_ in of for m in batch.clips for values in m.latents] for of in (steps, again))
    assert all(values.shape == (channels, *clip.bucket) for values, clip in zip(latents, clips, strict=True))
    assert all(values.std() > 0.01 for values in latents)
    assert all(map(torch.equal, latents, same))


@pytest.mark.parametrize("word", ["steps=0", "seq-len=1", "tolerance=0", "training.seq_len=x"])
def test_bad_arguments_are_refused_before_any_process_starts(tmp_path, charts, capsys, word):
    assert check(write_config(tmp_path, charts), word) == 2
    assert word.partition("=")[0] in capsys.readouterr().err
