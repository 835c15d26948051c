"""Ranks that are stopped at random moments: every job ends soon after its timeout, and its last line names the rank.

pytest -m nightly tests/faults/test_stopped_ranks.py
"""

import random
import re
import signal
import time
from pathlib import Path

import pytest

from tests.jobs import layout, write_config
from tests.launched import MMTRAIN, Job, kill

pytestmark = [pytest.mark.nightly, pytest.mark.ranks]

TIMEOUT_S = 60
"""Enough for a machine that does much else: a rank that is only slow must not be taken for one that is stopped."""
ENDS_S = 30.0
"""After the timeout: ranks ask each other (6 s), and the launcher gives them time to end (3 s)."""
START_S = 180.0
"""Before the first step ranks wait 120 s for each other."""

LAYOUTS = {
    "pp 2": layout(pp=2),
    "pp 2 x shard 2": layout(pp=2, shard=2),
    "replicate 2": layout(replicate=2),
    "tensor 2": layout(tp=2),
    "context 2 x tensor 2": layout(cp=2, tp=2),
    "pp 4": layout(pp=4),
}
SAVES = {
    "no checkpoints": [],
    "in each step": ["checkpoint.interval=1"],
    "async": ["checkpoint.interval=1", "checkpoint.async_mode=async"],
}


@pytest.mark.parametrize("seed", range(24))
def test_a_stopped_rank_ends_the_job_and_is_named(tmp_path: Path, charts: Path, seed: int) -> None:
    rng = random.Random(seed)
    degrees = list(LAYOUTS.values())[seed % len(LAYOUTS)]
    words = [*degrees, *rng.choice(list(SAVES.values())), f"planner.enable={rng.choice(['true', 'false'])}"]
    words += [f"comm.timeout_seconds={TIMEOUT_S}", "planner.search.patience_s=2", "training.steps=100000"]
    words += ["checkpoint.enable=true", "checkpoint.keep_latest_k=2", f"data.num_workers={rng.randrange(2)}"]
    # The first two: while it starts, before and after the processes have torch.
    moment = rng.choice(("mesh: ", "step:    1", "step:    3"))
    early = {0: 0.0, 1: 3.0}.get(seed)
    patient = early is not None or moment == "mesh: "
    with Job(tmp_path, *MMTRAIN, "--config", str(write_config(tmp_path, charts)), *(f"--{w}" for w in words)) as job:
        if early is None:
            job.wait_for(moment, timeout=600)
        else:
            while len(job.ranks()) < 2:
                assert job.process.poll() is None, job.output
        time.sleep(rng.uniform(0.0, 1.0) if early is None else early)
        ranks = job.ranks()
        stopped = rng.randrange(len(ranks))
        kill(ranks[stopped], signal.SIGSTOP)
        start = time.monotonic()
        status = job.end(600)
        took = time.monotonic() - start
    last = job.output.splitlines()[-1]
    print(f"seed {seed}: {took:.1f} s, {last}")
    assert status == 2, job.output
    assert took < ENDS_S + (START_S if patient else TIMEOUT_S), last
    who = rf"rank {stopped} \(process {ranks[stopped]} on .*\)"
    # A rank that gave up waiting closes its connections; another one may be the first to say so.
    assert re.fullmatch(rf"error: rank \d+ (waited|lost a connection) .*; {who} does not .*", last) or (
        re.fullmatch(rf"error: rank \d+ waited .* for the job to start, but .* these did not come: {stopped};.*", last)
    )
    assert "Traceback" not in job.output
