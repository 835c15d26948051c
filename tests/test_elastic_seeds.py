"""Nodes of elastic jobs are killed, told to end, and stopped at random; each job is bit for bit one that was stopped,
saved and resumed where it changed."""

import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.elastic_faults import Fault
from tests.elastic_jobs import JOB, SILENT_S, check_like_resumed, run_elastic, state_of
from tests.jobs import write_config

pytestmark = pytest.mark.ranks

SEEDS, BLOCK = range(80), 8
DAILY = (4,)
MIXED = [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP]
FIRST = ["action"] * 4 + ["reduction", "reduced", "saving"]
"""Places of the first fault of a job; others are in what follows from it, too."""
PLACES = [*FIRST, "asking", "meeting", "held", "placed", "taken up"]


@dataclass(frozen=True)
class Case:
    """One job, and what happens to whom when."""

    nodes: int
    options: tuple[str, ...]
    faults: tuple[Fault, ...]
    max_restarts: int


def case_of(seed: int, numbers: Sequence[int] = (signal.SIGKILL,)) -> Case:
    """The job of a seed, one node of which gets a signal, or two."""
    draw = random.Random(seed)
    nodes, first = draw.choice((2, 3, 4)), draw.choice((2, 3, 4))
    least = draw.choice((1, 1, 2)) if nodes > 2 else 1
    faults: list[Fault] = []
    for slot in draw.sample(range(nodes), min(draw.choice((1, 2, 2, 2)), nodes - least)):
        place = draw.choice(PLACES if faults else FIRST)
        step = draw.choice((first, first, 2, 3, 4, 5)) if faults else first
        action = draw.randint(1, 6) if place == "action" else 0
        faults.append(Fault(slot, step, place, action=action, number=draw.choice(numbers)))
    options = [f"elastic.min_nodes={least}", "elastic.max_failures=0", 'elastic.below="go_on"']
    options.append(f"checkpoint.interval={draw.choice((2, 100))}")
    return Case(nodes, tuple(options), tuple(faults), draw.choice((0, 0, 1)))


def wake(launcher: Any, folder: Path) -> None:
    """Lets stopped processes go on some time after the others have noticed it."""
    since: dict[int, float] = {}
    while True:
        for pid in [pid for pids in launcher.pids.values() for pid in pids]:
            if state_of(pid) != "T":
                since.pop(pid, None)
            elif time.monotonic() > since.setdefault(pid, time.monotonic()) + 1.5 * SILENT_S:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        time.sleep(0.1)


def check(folder: Path, charts: Path, seed: int, case: Case, steps: int = 6) -> None:
    path, job = write_config(folder / f"seed-{seed}", charts), [*JOB, f"training.steps={steps}"]
    own = [*job, *(option for option in case.options if option.startswith("checkpoint"))]
    run = run_elastic(path, [*job, *case.options], case.nodes, case.faults, max_restarts=case.max_restarts, act=wake)
    print(seed, case, [(event["kind"], event["step"], event["pipelines"]) for event in run.events])
    assert list(run.folder.glob("fault-0-*")), "the first fault did not happen"
    check_like_resumed(run, path, own)


@pytest.mark.parametrize("seed", DAILY)
def test_a_seed(tmp_path: Path, charts: Path, seed: int) -> None:
    check(tmp_path, charts, seed, case_of(seed))


@pytest.mark.nightly
@pytest.mark.parametrize("first", SEEDS[::BLOCK])
def test_seeds(tmp_path: Path, charts: Path, first: int) -> None:
    for seed in range(first, first + BLOCK):
        check(tmp_path, charts, seed, case_of(seed))


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 24, BLOCK))
def test_seeds_of_several_signals(tmp_path: Path, charts: Path, first: int) -> None:
    for seed in range(first, first + BLOCK):
        check(tmp_path, charts, seed, case_of(seed, MIXED), steps=12)


def test_there_are_a_hundred_kills() -> None:
    assert sum(len(case_of(seed).faults) for seed in SEEDS) >= 100
