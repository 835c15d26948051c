"""Whole text-to-video jobs with a VAE: one loss curve on every layout, clips that are decoded, the commands."""

import json
import re

import pytest
from PIL import Image

from mmtrain.commands.cli import main
from tests.jobs import layout, metrics, train, write_vae_config
from tests.ranks import run_ranks, warm_ranks

STEPS = ["training.steps=3"]


@pytest.mark.ranks
def test_jobs_train_on_latents_and_their_clips_are_decoded(tmp_path, shapes, caplog, capsys):
    paths = {}
    more = ["validation.enable=true", "validation.freq=3", "validation.steps=1", "checkpoint.enable=true"]
    for name, world, extra in (
        ("one", 1, layout()),
        ("pp2", 2, [*layout(pp=2), "planner.enable=true", "planner.search.budget_evaluations=50"]),
    ):
        paths[name] = write_vae_config(tmp_path / name, shapes)
        run_ranks(train, world, paths[name], [*extra, *STEPS, *more])
    reference = metrics(tmp_path / "one")
    assert sorted(reference) == [1, 2, 3]
    for name in paths:
        assert metrics(tmp_path / name) == pytest.approx(reference, rel=1e-5), name
        for key in ("validation_loss", "tokens", "frames", "video_tokens"):
            assert metrics(tmp_path / name, key) == pytest.approx(metrics(tmp_path / "one", key), rel=1e-5), name
    words = ["--prompt", "a large red circle", "--num-steps", "2", "--device", "cpu"]
    out = tmp_path / "clips"
    assert main(["sample", str(tmp_path / "pp2" / "run"), "--out", str(out), *words, "--frames", "4"]) == 0
    assert "[model.vae] has random weights" in caplog.text
    record = json.loads((out / "samples.json").read_text())
    assert record["shape"] == [3, 4, 24, 24]
    with Image.open(out / record["clips"][0]["file"]) as clip:
        assert clip.size == (96, 96)
    for side, value, other in (("height", 20, 16), ("frames", 3, 4), ("width", 27, 24), ("width", 640, 256)):
        capsys.readouterr()
        wrong = [f"--{side}", str(value), "--out", str(tmp_path / "other")]
        assert main(["sample", str(tmp_path / "pp2" / "run"), *words, *wrong]) == 2
        message = capsys.readouterr().err
        assert f"--{side} {value}; the VAE makes it of whole patches" in message
        assert message.rstrip().endswith(f"such as {other}")


@pytest.mark.ranks
def test_check_parity_makes_the_vae_small(tmp_path, capsys):
    path = write_vae_config(tmp_path, tmp_path / "nowhere")
    keys = [*layout(pp=2), "parallelism.pipeline_parallel_schedule=ZB-H1"]
    with warm_ranks():
        assert main(["check-parity", "--config", str(path), "--synthetic", *(f"--{key}" for key in keys)]) == 0
    assert re.search(r"scaled down: .*vae autoencoder_kl, .* parameters in 1 layers", capsys.readouterr().out)
