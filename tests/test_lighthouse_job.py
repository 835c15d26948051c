"""An elastic job as on several machines: a torchrun for each node, and a real lighthouse."""

import json
import time
from pathlib import Path

import pytest

from tests.launched import Job, kill
from tests.lighthouse import free_port, started

pytestmark = pytest.mark.nightly

TORCHRUN = ("-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "1", "--max-restarts", "2")
STEPS = 40


def options(folder: Path, lighthouse: str) -> list[str]:
    """Of a job that trains a small language model for some seconds."""
    question = {"role": "user", "content": "two and two"}
    rows = [{"messages": [question, {"role": "assistant", "content": str(number)}]} for number in range(100)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "parallelism.pipeline_parallel_degree": 1,
        "training.steps": STEPS,
        "training.seq_len": 64,
        "data.num_workers": 0,
        "data.source": f"{folder}/train.jsonl",
        "job.dump_folder": f"{folder}/run",
        "elastic.enable": True,
        "elastic.silent_s": 10.0,
        "elastic.lighthouse": lighthouse,
    }
    return [
        "train.py",
        "--config",
        "debug_text.toml",
        *(f"--{key}={json.dumps(value)}" for key, value in values.items()),
    ]


def lines(folder: Path) -> list[dict]:
    path = folder / "run/metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + 240
    while not any(line.get("step") == step and "loss" in line for line in lines(folder)):
        assert time.monotonic() < deadline, [path.read_text()[-2000:] for path in folder.glob("*/output")]
        time.sleep(0.05)


def test_a_node_that_torchrun_starts_again_joins_the_others(tmp_path):
    with started(late_s=3.0) as lighthouse:
        words = options(tmp_path, lighthouse.address)
        jobs = []
        try:
            for index in range(3):
                (tmp_path / f"node{index}").mkdir()
                port = ("--master-port", str(free_port()))
                jobs.append(Job(tmp_path / f"node{index}", *TORCHRUN, *port, *words))
            wait_for_step(tmp_path, 3)
            (lost,) = jobs[1].ranks()
            kill(lost)
            assert [job.end(300) for job in jobs] == [0, 0, 0], [job.output[-2000:] for job in jobs]
        finally:
            for job in jobs:
                job.__exit__()
    found = lines(tmp_path)
    kinds = [line["kind"] for line in found if line.get("event") == "membership"]
    assert "lost" in kinds
    assert kinds[0] == "started"
    steps = {line["step"] for line in found if "loss" in line}
    assert steps == set(range(1, STEPS + 1))
