"""How runs end that are not to train: a rank that hangs, and nothing to do."""

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mmtrain.config import config
from mmtrain.training.trainer import Trainer
from tests.jobs import layout, train, write_config
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks


def timeouts(rank: int, path: Path, overrides: list[str]) -> dict[str, timedelta]:
    """Description of each process group of a set-up trainer -> how long its collectives wait."""
    trainer = Trainer(config.load(path, overrides))
    trainer.set_up(torch.device("cpu"), resumes=True)
    trainer.tear_down()
    groups = list(dist.distributed_c10d._world.pg_map)
    backends = [(group, group._get_backend(torch.device("cpu"))) for group in groups if group is not dist.group.WORLD]
    return {
        f"{group.group_desc} {group.group_name}": backend.options._timeout
        for group, backend in backends
        if backend.name() == "gloo"
    }


def test_every_group_waits_as_long_as_the_config_says(tmp_path, charts):
    path = write_config(tmp_path, charts)
    extra = ["parallelism.encoder_tensor_parallel=data", "checkpoint.enable=true", "checkpoint.async_mode=async"]
    for found in run_ranks(timeouts, 4, path, [*layout(pp=2, tp=2), *extra, "comm.timeout_seconds=77"]):
        assert len(found) >= 5  # pipeline, tied embedding, tensor, the encoder's, the checkpoint's
        assert {name: timeout for name, timeout in found.items() if timeout != timedelta(seconds=77)} == {}


def stopped(rank: int, path: Path, overrides: list[str]) -> None:
    original = Trainer.backward

    def backward(self, step, item, plan):
        if step == 2 and rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(self, step, item, plan)

    Trainer.backward = backward
    train(rank, path, overrides)


def test_a_rank_that_is_stopped_is_named_with_the_action_that_waited_for_it(tmp_path, charts):
    path = write_config(tmp_path, charts)
    message = (
        r"RankLostError: rank 0 waited 8 s \(comm.timeout_seconds\) at step 2, in 2F\d.0, for the output of stage 1 "
        r"from pp rank 1; rank 1 \(process \d+ on .*\) does not answer: it is stopped, dead or busy"
    )
    with pytest.raises(AssertionError, match=message):
        run_ranks(stopped, 2, path, [*layout(pp=2), "comm.timeout_seconds=8"], leave_together=False)


def test_a_run_with_nothing_to_do_writes_nothing(tmp_path, charts):
    path, run = write_config(tmp_path, charts), tmp_path / "run"
    extra = ["checkpoint.enable=true", "metrics.enable_tensorboard=true"]
    run_ranks(train, 1, path, [*extra, "training.steps=3"])
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in run.rglob("*") if file.is_file()}
    run_ranks(train, 1, path, [*extra, "training.steps=2"])
    after = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in run.rglob("*") if file.is_file()}
    assert after == before
