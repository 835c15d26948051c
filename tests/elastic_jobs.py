"""Elastic jobs for tests: nodes of real processes, which end where a test says."""

import json
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mmtrain.checkpoint.files import STATE, complete_steps
from mmtrain.config import config
from mmtrain.run_page.runs import read_run
from tests.elastic_faults import Fault, arm
from tests.jobs import SHALLOW
from tests.ranks import _start_warm, run_ranks
from tests.store import stored_folder

Curve = dict[int, tuple[float, float]]
"""step -> (loss, norm of the gradients)"""
Phases = Sequence[tuple[int, Sequence[int]]]
"""(step after which a layout begins, its depths)"""

SILENT_S = 4.0
ELASTIC = ["elastic.enable=true", f"elastic.silent_s={SILENT_S}", "elastic.leave_wait_s=1.0", "comm.timeout_seconds=60"]
SAVING = ["checkpoint.enable=true", "checkpoint.interval=100"]
JOB = [*SHALLOW, "training.global_batch_size=6", *SAVING]
"""Of six steps, the last of which is saved."""
ANY_NUMBER = ["elastic.min_nodes=1", "elastic.max_failures=0", 'elastic.below="go_on"']
"""Each number of nodes makes a job."""


@dataclass
class Run:
    """A job that has ended."""

    folder: Path
    ended: dict[str, list[Any]]
    """Of the nodes that ended well."""

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "run" / "metrics.jsonl").read_text().splitlines()]

    @property
    def events(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "event" in line]

    @property
    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events]

    @property
    def curve(self) -> Curve:
        return {int(line["step"]): (line["loss"], line["grad_norm"]) for line in read_run(self.folder / "run").steps}

    @property
    def validations(self) -> dict[int, float]:
        return {line["step"]: line["validation_loss"] for line in read_run(self.folder / "run").validations}

    @property
    def phases(self) -> list[tuple[int, list[int]]]:
        """(step after which a layout begins, its depths), without those whose steps were lost or done again."""
        found = [(event["step"], event["pipelines"]) for event in self.events]
        return [one for index, one in enumerate(found) if all(one[0] < later[0] for later in found[index + 1 :])]

    @property
    def saved(self) -> list[int]:
        return complete_steps(self.folder / "run" / "checkpoint")

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in sorted((self.folder / "run").glob("*.txt")))


def train_node(member: Any, path: Path, overrides: list[str], faults: Sequence[Fault]) -> dict[str, int]:
    """One rank of a node. Returns: how many of some things it has at its end."""
    from mmtrain.training.elastic_job import ElasticJob

    arm(member.name, member.local_rank, faults, path.parent)
    slot = member.name.split("-")[1]
    own = path.parent / f"node-{int(slot)}.toml"  # of a node with another config
    ElasticJob(config.load(own if own.exists() else path, overrides), member).run()
    return {"threads": threading.active_count()}


def run_elastic(
    path: Path,
    overrides: Sequence[str],
    nodes: int,
    faults: Sequence[Fault] = (),
    *,
    ranks: int = 1,
    max_restarts: int = 0,
    act: Callable[[Any, Path], None] | None = None,
    timeout: float = 150,
    fn: Callable[..., Any] = train_node,
) -> Run:
    """A job on nodes of this machine. Args: act: runs in a thread beside it, with the launcher."""
    from mmtrain.local import nodes as local_nodes

    job = local_nodes.NodeJob(
        fn=fn,
        args=(path, [*ELASTIC, *overrides], tuple(faults)),
        nodes=nodes,
        ranks=ranks,
        digest="test=1",
        silent_s=SILENT_S,
        max_restarts=max_restarts,
    )
    launcher = local_nodes.LocalNodes(job)
    late: list[bool] = []
    timer = threading.Timer(timeout, lambda: (late.append(True), launcher.end()))
    timer.daemon = True
    errors: list[BaseException] = []

    def acting() -> None:
        try:
            act(launcher, path.parent)
        except BaseException as error:
            errors.append(error)
            launcher.end()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_nodes.multiprocessing, "get_context", lambda method: SimpleNamespace(Process=_start_warm))
        timer.start()
        if act is not None:
            threading.Thread(target=acting, daemon=True).start()
        try:
            ended = launcher.run()
        except local_nodes.RankDiedError as error:
            raise AssertionError(f"{error}\n{error.text}") from error
        finally:
            timer.cancel()
    if errors:
        raise errors[0]
    assert not late, f"the job hung for {timeout} s"
    return Run(path.parent, ended)


def wait_until(found: Callable[[], Any], what: str, timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not found():
        assert time.monotonic() < deadline, f"{what} does not come"
        time.sleep(0.02)


def has_line(folder: Path, **wanted: Any) -> bool:
    """Whether metrics.jsonl has a line with these values."""
    path = folder / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return any(wanted.items() <= line.items() for line in found)


def after_step(folder: Path, step: int) -> None:
    """Waits until the metrics of a step are there."""
    path = folder / "run" / "metrics.jsonl"
    wait_until(lambda: path.exists() and f'"step": {step}, ' in path.read_text(), f"step {step}")


def state_of(pid: int) -> str:
    """Of a process: T where it is stopped; empty: it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


# ------------------------------------------------------------------------------------------ what it must equal


def train_until(rank: int, path: Path, overrides: list[str], until: int) -> None:
    """One rank of an ordinary job that is stopped, and saved, after a step."""
    from mmtrain.observe.observer import Observer, RunningStep
    from mmtrain.training.trainer import Trainer

    class Stop(Observer):
        def before_step(self, step: RunningStep) -> None:
            if step.step == until:
                trainer._stops.number = signal.SIGTERM

    trainer = Trainer(config.load(path, overrides), observers=[Stop()])
    trainer.run()


def stopped_and_resumed(
    path: Path, overrides: Sequence[str], phases: Phases, until: int, stage: int = 1
) -> tuple[Run, Curve]:
    """The last of ordinary jobs, and the curve of all: each ends at the beginning of the next phase, whose layout loads
    its checkpoint. Args: until: last step. stage: ranks of a stage."""
    text = path.read_text().replace(str(path.parent), "FOLDER")
    found: Curve = {}
    source: Path | None = None
    ends = [*(step for step, _ in phases[1:]), until]
    for index, ((step, depths), end) in enumerate(zip(phases, ends, strict=True)):

        def make(
            own: Path, source: Path | None = source, step: int = step, depths: Any = depths, end: Any = end
        ) -> None:
            (own / "job.toml").write_text(text.replace("FOLDER", str(own)))
            if source is not None and step:
                stored = Path("run") / "checkpoint" / f"step-{step}"
                shutil.copytree(source / stored, own / stored)
            options = [*overrides, "checkpoint.enable=true", f"parallelism.pipelines={list(depths)}"]
            run_ranks(train_until, sum(depths) * stage, own / "job.toml", options, end)

        source = stored_folder(repr((text, list(overrides), phases[: index + 1], end, stage)), make)
        found = {s: value for s, value in found.items() if s <= step} | Run(source, {}).curve
    assert source is not None
    return Run(source, {}), found


def stored_tensors(run: Run) -> dict[str, Any]:
    """Name -> value of all tensors of the newest checkpoint."""
    reader = dcp.FileSystemReader(run.folder / "run" / "checkpoint" / f"step-{run.saved[-1]}")
    table = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if hasattr(entry, "size")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is one process
        dcp.load(table, storage_reader=reader, no_dist=True)
    return table


def stored_numbers(run: Run) -> dict[str, Any]:
    """Step, position in the data, and counts of the newest checkpoint."""
    path = run.folder / "run" / "checkpoint" / f"step-{run.saved[-1]}" / STATE
    return {key: value for key, value in json.loads(path.read_text()).items() if key != "memory"}


def check_written_once(run: Run) -> None:
    """Each step has a line, and no generation wrote one twice; so have events."""
    steps = [(line["step"], line.get("generation")) for line in run.lines if "grad_norm" in line]
    events = [event["generation"] for event in run.events]
    assert len(steps) == len(set(steps)) and sorted({step for step, _ in steps}) == list(range(1, run.saved[-1] + 1))
    assert events == sorted(set(events))


def check_like_resumed(
    run: Run,
    path: Path,
    overrides: Sequence[str],
    stage: int = 1,
    phases: Phases | None = None,
    last: int | None = None,
) -> None:
    """A job that changed is, bit for bit, one that was stopped and resumed at its changes.

    Args: phases: None: those of its events. last: step that is compared; None: the newest checkpoint's.
    """
    check_written_once(run)
    theirs, curve = stopped_and_resumed(path, overrides, phases or run.phases, last or run.saved[-1], stage)
    assert list(run.curve.items()) == list(curve.items())
    assert stored_numbers(run) == stored_numbers(theirs)
    ours, other = stored_tensors(run), stored_tensors(theirs)
    assert ours.keys() == other.keys() and len(ours) > 10
    assert [name for name, value in ours.items() if not torch.equal(value, other[name])] == []
