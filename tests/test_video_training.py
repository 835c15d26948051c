"""Whole text-to-video jobs: equal loss curves on every layout, exact resume, and what captions are worth."""

import contextlib
import io

import pytest

from mmtrain.errors import ConfigError
from tests.jobs import die_at, layout, metrics, train, write_video_config
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

CURVE_TOLERANCE = 1e-5
"""Relative difference of losses between layouts. Measured: at most 2e-7."""


@pytest.fixture
def job(tmp_path, shapes):
    return write_video_config(tmp_path, shapes)


@pytest.mark.nightly
def test_all_layouts_have_one_loss_curve_and_count_every_token_once(tmp_path, shapes):
    validating = ["validation.enable=true", "validation.freq=6", "validation.steps=2"]
    validating += ["validation.shuffled_captions=true"]
    planning = ["planner.enable=true", "planner.search.budget_evaluations=50", "planner.device.flops_per_s=1e10"]
    paths = {}
    for name, world, extra in (
        ("one", 1, layout()),
        ("mixed", 2, [*layout(pp=2), *planning, "planner.partition=mixed-parameters", "model.dit.num_segments=0"]),
        ("tp2", 2, layout(tp=2)),
        ("pp2-shard2", 4, [*layout(pp=2, shard=2), "parallelism.pipeline_parallel_schedule=1F1B"]),
    ):
        paths[name] = write_video_config(tmp_path / name, shapes)
        run_ranks(train, world, paths[name], [*extra, *validating])
    reference = metrics(tmp_path / "one")
    assert sorted(reference) == list(range(1, 7))
    for name in paths:
        assert metrics(tmp_path / name) == pytest.approx(reference, rel=CURVE_TOLERANCE), name
        for key in ("validation_loss", "shuffled_captions_loss"):
            found, wanted = metrics(tmp_path / name, key), metrics(tmp_path / "one", key)
            assert sorted(wanted) == [0, 6]
            shuffled = key != "validation_loss" and "shard" in name  # captions change places inside of a replica
            assert found == pytest.approx(wanted, rel=0.01 if shuffled else CURVE_TOLERANCE), name
        for key in ("tokens", "clips", "frames", "video_tokens"):
            assert metrics(tmp_path / name, key) == metrics(tmp_path / "one", key), name
    losses = metrics(tmp_path / "one", "validation_loss")
    assert losses[6] < 0.9 * losses[0]
    assert metrics(tmp_path / "one", "shuffled_captions_loss") != losses


def test_clips_that_the_planner_groups_anew_give_the_same_curve(tmp_path, shapes):
    fewer = ["training.global_batch_size=2", "training.steps=3"]
    planning = ["planner.enable=true", "planner.search.regroup=true", "planner.search.budget_evaluations=2600"]
    planning += ["planner.device.flops_per_s=1e10", "planner.device.p2p_latency_s=0"]
    one, two = (write_video_config(tmp_path / name, shapes) for name in ("one", "two"))
    run_ranks(train, 1, one, [*layout(), *fewer])
    run_ranks(train, 2, two, [*layout(pp=2), *fewer, *planning])
    assert 3 in metrics(tmp_path / "two", "plan_microbatches").values()
    for key in ("loss", "grad_norm"):
        assert metrics(tmp_path / "two", key) == pytest.approx(metrics(tmp_path / "one", key), rel=CURVE_TOLERANCE)


def printed(rank, path, overrides):
    """What a rank of a job prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        train(rank, path, overrides)
    return out.getvalue()


def killed_at(rank, path, overrides, step):
    """Every rank is killed without warning in the middle of a step."""
    die_at(step)
    train(rank, path, overrides)


def test_a_killed_job_continues_exactly_with_a_frozen_text_encoder(tmp_path, shapes):
    extra = [*layout(pp=2), "checkpoint.enable=true", "checkpoint.interval=2", "model.language.trainable=false"]
    extra += ["diffusion.prediction=v", "diffusion.timestep_sampling=uniform", "training.steps=4"]
    whole = write_video_config(tmp_path / "whole", shapes)
    run_ranks(train, 2, whole, extra)
    broken = write_video_config(tmp_path / "broken", shapes)
    with pytest.raises(AssertionError, match="died"):
        run_ranks(killed_at, 2, broken, extra, 3)
    log, other = run_ranks(printed, 2, broken, extra)
    assert metrics(broken.parent) == metrics(whole.parent)
    assert sorted(metrics(whole.parent)) == [1, 2, 3, 4]
    seen = int(sum(metrics(whole.parent, "clips").values()))
    assert f"the DiT has learned from {seen} clips since its random weights" in log.splitlines()[-1]
    assert other == ""


def failing(rank, path, overrides):
    from mmtrain.config import config
    from mmtrain.training.trainer import Trainer

    with pytest.raises(ConfigError) as caught:
        Trainer(config.load(path, overrides))
    return str(caught.value)


def test_what_cannot_be_denoised_is_refused_before_anything_starts(job):
    text = job.read_text()
    job.write_text(text.replace("out_channels = 3", "out_channels = 4"))
    (message,) = run_ranks(failing, 1, job, [])
    assert "out_channels = 4, but in_channels = 3" in message
