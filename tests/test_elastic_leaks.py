"""Many changes of an elastic job leave nothing behind in the processes that stay."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmtrain.config import config
from mmtrain.observe.observer import Observer, RunningStep
from tests.elastic_jobs import ANY_NUMBER, JOB, after_step, run_elastic, wait_until
from tests.jobs import write_config

pytestmark = pytest.mark.ranks


class Counts(Observer):
    """Writes what this process has at the beginning of each step."""

    def __init__(self, path: Path) -> None:
        self._path, self._nodes = path, 0

    def layout_begins(self, config: Any, job: Any, mesh: Any, step: int) -> None:
        self._nodes = mesh.layout.world_size

    def before_step(self, step: RunningStep) -> None:
        from mmtrain.parallel.leave import connections
        from mmtrain.parallel.torch_private import process_groups

        line = {
            "step": step.step,
            "nodes": self._nodes,
            "threads": len(os.listdir("/proc/self/task")),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "sockets": len(connections()),
            "groups": len(process_groups()),
            "bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    @staticmethod
    def of(line: dict[str, int]) -> dict[str, int]:
        """Those of a line that do not grow with the steps."""
        return {name: line[name] for name in ("threads", "descriptors", "sockets", "groups")}


def counted(member: Any, path: Path, overrides: list[str], faults: Any) -> None:
    """One rank of a node."""
    from mmtrain.training.elastic_job import ElasticJob

    ElasticJob(config.load(path, overrides), member, observers=[Counts(path.parent / f"{member.name}.jsonl")]).run()


def come_and_go(times: int, first: int) -> Callable[[Any, Path], None]:
    """Node 1 and its successors leave, and others join, in turn, after the first steps; then all are told to end."""

    def events(folder: Path) -> int:
        return (folder / "run" / "metrics.jsonl").read_text().count('"event"')

    def tell(launcher: Any, names: list[str]) -> None:
        for name in names:
            for pid in launcher.pids.get(name, []):
                os.kill(pid, signal.SIGTERM)

    def act(launcher: Any, folder: Path) -> None:
        after_step(folder, first)
        for _ in range(times):
            for change in (lambda: tell(launcher, sorted(launcher.pids)[1:]), launcher.add):
                before = events(folder)
                change()
                wait_until(lambda before=before: events(folder) > before, "the next change")
        after_step(folder, int(json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"]) + 2)
        tell(launcher, sorted(launcher.pids))

    return act


@pytest.mark.parametrize(("changes", "steps"), [(6, 5), pytest.param(50, 50, marks=pytest.mark.nightly)])
def test_changes_leave_nothing_behind(tmp_path: Path, charts: Path, changes: int, steps: int) -> None:
    path = write_config(tmp_path, charts)
    options = [*JOB, *ANY_NUMBER, "elastic.leave_wait_s=0.0", "training.steps=100000"]
    run = run_elastic(path, options, 2, act=come_and_go(changes // 2, steps), fn=counted, timeout=550)
    assert len(run.events) == changes + 1 and len(run.ended) == changes // 2 + 2
    lines = [json.loads(line) for line in (tmp_path / "node-000-000.jsonl").read_text().splitlines()]
    firsts = [event["step"] + 1 for event in run.events]  # in which what was before is still ending
    of_two = [line for line in lines if line["nodes"] == 2 and line["step"] not in firsts]
    before, after = (Counts.of(line) for line in (of_two[0], of_two[-1]))
    assert all(after[name] <= before[name] for name in before), (before, after)
    if changes > steps // 2:
        _check_memory(lines, steps)


def _check_memory(lines: list[dict[str, int]], steps: int) -> None:
    """Changes, and the steps between them, took no more memory than as many steps as there are changes."""
    at = {line["step"]: line["bytes"] for line in lines}
    warm = steps // 5
    alone, changing = at[steps] - at[warm], at[max(at)] - at[steps]
    assert changing <= alone * (max(at) - steps) / (steps - warm) + 2**24
