"""Jobs that are killed at random moments, saves among them, and go on: every loss is that of a job never killed."""

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import layout, metrics, train, write_config
from tests.ranks import run_ranks

pytestmark = pytest.mark.nightly

KILLS = 10
"""Of one seed."""


def timed(rank: int, path: Path, overrides: list[str]) -> float:
    """Seconds of the loop of a job that is not killed."""
    from mmtrain.training.trainer import Trainer

    loop, found = Trainer._loop, []

    def _loop(self: Trainer, *args: Any) -> bool:
        start = time.monotonic()
        goes_on = loop(self, *args)
        found.append(time.monotonic() - start)
        return goes_on

    Trainer._loop = _loop
    train(rank, path, overrides)
    return found[0]


def killed(rank: int, path: Path, overrides: list[str], victims: list[int], phase: str, seconds: float) -> None:
    """The victims are killed some time after a phase has begun: `set_up` or `_loop` of the trainer."""
    from mmtrain.training.trainer import Trainer

    def kill() -> None:
        time.sleep(seconds)
        (path.parent / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    original = getattr(Trainer, phase)

    def begun(self: Trainer, *args: Any, **options: Any) -> Any:
        if rank in victims:
            threading.Thread(target=kill, daemon=True).start()
        return original(self, *args, **options)

    setattr(Trainer, phase, begun)
    train(rank, path, overrides)


def survives(path: Path, overrides: list[str], draw: random.Random, seconds: float) -> bool:
    """Whether the job comes to its end before it is killed. Args: seconds: of its whole loop."""
    victims, phase = draw.choice([[0], [1], [0, 1]]), draw.choice(["set_up", "_loop", "_loop", "_loop"])
    marker = path.parent / "killed"
    marker.unlink(missing_ok=True)
    try:
        run_ranks(killed, 2, path, overrides, victims, phase, draw.uniform(0, 0.6 * seconds))
    except AssertionError:
        if not marker.exists():
            raise
        return False
    return True


@pytest.mark.parametrize("seed", range(5))
def test_random_kills_change_no_loss(tmp_path: Path, charts: Path, seed: int) -> None:
    draw = random.Random(seed)
    mode = "async" if seed % 2 else "disabled"
    extra = [
        *layout(pp=2), "training.steps=12", "checkpoint.enable=true", "checkpoint.interval=1",
        f"checkpoint.async_mode={mode}", "checkpoint.keep_latest_k=2",
    ]  # fmt: skip
    whole = write_config(tmp_path / "whole", charts)
    seconds = max(run_ranks(timed, 2, whole, extra))
    kills = during_saves = jobs = 0
    while kills < KILLS:
        jobs += 1
        path = write_config(tmp_path / f"job-{jobs}", charts)
        while not survives(path, extra, draw, seconds):
            kills += 1
            during_saves += bool(list(path.parent.glob("run/checkpoint/*.tmp")))
        for key in ("loss", "grad_norm"):
            assert metrics(path.parent, key) == metrics(whole.parent, key), (jobs, key)
    print(f"seed {seed}: {kills} kills, {during_saves} of them during a save, in {jobs} jobs of 12 steps; {mode}")
