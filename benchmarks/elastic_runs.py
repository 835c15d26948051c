"""Small training jobs as commands start them; they are watched from outside, and lose processes inside of a step.

A *cold* job is the command `mmtrain train`, whose processes import everything. A *warm* one is the same command in a
process that is forked where everything is imported, as are all processes that it starts.
"""

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mmtrain.checkpoint.files import complete_steps
from mmtrain.config.config import Config
from mmtrain.launch.processes import end_with_parent
from mmtrain.simulator.allocation.compositions import Composition
from mmtrain.simulator.allocation.node_layouts import ElasticLayouts

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 600.0
"""Nothing that is waited for takes longer."""
_LOOK_S = 0.002
"""Between two looks at a file."""

COMMON = (
    "training.steps=1000",
    "training.global_batch_size=12",
    "parallelism.pipeline_parallel_degree=1",
    "planner.enable=false",
    "validation.enable=false",
    "validation.generate=0",
    "metrics.enable_tensorboard=false",
    "metrics.trace_freq=0",
    "checkpoint.interval=1",
)
ELASTIC = ("elastic.enable=true", "elastic.max_failures=0", "elastic.min_nodes=2")
"""The smallest pipeline has two nodes, so that layers move."""

_context = multiprocessing.get_context("forkserver")
_IMPORTED = (
    "mmtrain.commands.cli",
    "mmtrain.training.trainer",
    "mmtrain.training.elastic_job",
    "datasets",
    "numba",
    "peft",
    "scipy.stats",
    "torch.utils.tensorboard",
    "torch.utils.serialization.config",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2_vl.modeling_qwen2_vl",
)
"""By the server of warm jobs: all that their processes import, some of it late."""


def depths(job: Config, nodes: int, before: Sequence[int] = ()) -> tuple[int, ...]:
    """The pipelines of an elastic job on some nodes."""
    found = ElasticLayouts(config=job, ranks_per_node=1).layout(nodes, before or None)
    assert isinstance(found, Composition), found
    return found.depths


def fixed(pipelines: Sequence[int]) -> str:
    """The override of an ordinary job at a layout."""
    return f"parallelism.pipelines={list(pipelines)}"


class MissedError(Exception):
    """The processes were not killed inside of a step."""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """A job that lost processes, and finished the step that they were lost in."""

    folder: Path
    """Of the run."""
    total_s: float
    """From the kill to the end of that step."""
    parts: dict[str, float]
    """What -> its seconds, in the order in which it happened."""
    data_s: float
    """Of the step, seconds of waiting for data."""
    event: dict[str, Any] = field(default_factory=dict)
    """Of an elastic job: its line of the change."""


def start_server() -> None:
    """Starts the server that warm jobs are forked from; returns when it has imported all."""
    _context.set_forkserver_preload(list(_IMPORTED))
    forkserver.ensure_running()
    process = _context.Process(target=os.getpid)
    process.start()
    process.join()


# ------------------------------------------------------------------------------------------------ starting


class Job:
    """A job that runs. Use it as a context, which ends it."""

    def __init__(self, overrides: Sequence[str], folder: Path, *, warm: bool, elastic: int = 0) -> None:
        """Args: folder: of the run, which may be there. elastic: number of nodes; 0: an ordinary job."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._pids = folder, folder / f"pids-{time.monotonic_ns()}"
        words = ["train", "--config", "debug_vlm.toml", *([f"--nodes={elastic}"] if elastic else [])]
        words += [f"--{text}" for text in overrides] + [f"--job.dump_folder={folder}"]
        self._log = folder / "printed.txt"
        self._command: subprocess.Popen[bytes] | None = None
        self._process: ForkServerProcess | None = None
        if warm:
            self._process = _context.Process(target=_launch, args=(words, self._log, self._pids, dict(os.environ)))
            self._process.start()
            return
        with self._log.open("ab") as log:
            self._command = subprocess.Popen(
                [sys.executable, "-m", "mmtrain.commands.cli", *words],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
                preexec_fn=end_with_parent,
            )

    @property
    def runs(self) -> bool:
        """Whether its launcher has not ended."""
        if self._command is not None:
            return self._command.poll() is None
        assert self._process is not None
        return self._process.is_alive()

    @property
    def ranks(self) -> list[int]:
        """Process ids in the order of ranks, also of those that have ended if the job is warm."""
        if self._command is None:
            return [int(text) for text in self._pids.read_text().split()] if self._pids.exists() else []
        pid = self._command.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return sorted(int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes())

    def wait(self) -> None:
        """Waits for the end of its launcher."""
        if self._command is not None:
            self._command.wait(LIMIT_S)
        if self._process is not None:
            self._process.join(LIMIT_S)

    def check_runs(self) -> None:
        """Raises: RuntimeError: it has ended, with what it printed."""
        if not self.runs:
            raise RuntimeError(f"the job has ended:\n{self._log.read_text()[-4000:]}")

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None and self.runs:  # its ranks are children of the server
            for pid in self.ranks:
                kill(pid)
            self._process.join(20)
            self._process.kill()
        if self._command is not None:
            self._command.kill()
        self.wait()


def kill(pid: int) -> None:
    """Kills a process, if it runs."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class _Rank(ForkServerProcess):
    """A process that is forked where everything is imported; its id is written into a file."""

    pids = Path()

    def start(self) -> None:
        super().start()
        with self.pids.open("a") as file:
            file.write(f"{self.pid}\n")


def _launch(words: Sequence[str], log: Path, pids: Path, variables: dict[str, str]) -> None:
    """The launcher of a warm job: the command, whose processes are forked."""
    from mmtrain.commands import cli

    _print_into(log)
    os.environ.update(variables)
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign] # a child would start its own one
    fork_ranks(log, pids)
    sys.exit(cli.main(words))


def fork_ranks(log: Path, pids: Path) -> None:
    """Ranks that this process starts from now on are warm. Args: log, pids: files of what they print, of their ids."""
    from mmtrain.local import nodes, ranks

    _Rank.pids = pids

    def process(target: Callable[..., None], args: tuple[Any, ...]) -> _Rank:
        return _Rank(target=_forked, args=(log, os.getcwd(), dict(os.environ), target, args))

    forking = SimpleNamespace(**vars(multiprocessing))
    forking.get_context = lambda method: SimpleNamespace(Process=process)
    for module in (nodes, ranks):
        module.multiprocessing = forking  # type: ignore[attr-defined]


def _print_into(log: Path) -> None:
    with log.open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)


def _forked(
    log: Path, folder: str, variables: dict[str, str], target: Callable[..., None], args: tuple[Any, ...]
) -> None:
    """A rank of a warm job."""
    _print_into(log)
    os.chdir(folder)
    os.environ.update(variables)
    index, _, *more = args
    target(index, os.getppid(), *more)  # the parent is the server


# ------------------------------------------------------------------------------------------------ watching


class Lines:
    """The lines of a run's metrics as they appear."""

    def __init__(self, job: Job) -> None:
        self.job, self._path, self._size = job, job.folder / "metrics.jsonl", 0

    def new(self) -> list[dict[str, Any]]:
        """Those since the last look."""
        if not self._path.exists() or self._path.stat().st_size == self._size:
            return []
        with self._path.open("rb") as file:
            file.seek(self._size)
            whole, end, _ = file.read().rpartition(b"\n")
        self._size += len(whole + end)
        return [json.loads(line) for line in whole.splitlines()]

    def waited(self) -> list[dict[str, Any]]:
        """The same after a short pause. Raises: RuntimeError: the job has ended."""
        time.sleep(_LOOK_S)
        if found := self.new():
            return found
        self.job.check_runs()
        return []

    def until(self, wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """Further lines up to a wanted one. Raises: RuntimeError: it does not come."""
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + LIMIT_S
        while not any(wanted(line) for line in found):
            found += self.waited()
            if time.monotonic() > deadline:
                raise RuntimeError(f"the job does not go on after {found[-1:]}")
        return found


def is_step(line: dict[str, Any]) -> bool:
    """Whether a line has the metrics of a step, and is none of an event or a validation."""
    return "step_time_s" in line


def kill_inside(job: Job, lines: Lines, ranks: Iterable[int], after: int) -> tuple[int, float]:
    """Kills processes in the middle of a step; returns the last step before it, and when that was (of `time.time`).

    Args: ranks: in the order of their start. after: at least so many steps, the last of them in a complete checkpoint.
    """
    step, half_s, due_s = 0, 0.0, math.inf
    while time.time() < due_s:
        for line in filter(is_step, lines.waited()):
            step, half_s, due_s = int(line["step"]), line["step_time_s"] / 2, math.inf
        if step >= after and due_s == math.inf and step in complete_steps(job.folder / "checkpoint"):
            due_s = time.time() + half_s  # the next step begins once the last one is saved
    pids = job.ranks
    now_s = time.time()
    for rank in ranks:
        kill(pids[rank])
    return step, now_s


# ------------------------------------------------------------------------------------------------- recovering


def recovered(job: Job, nodes: int, ranks: Sequence[int], after: int) -> Recovery:
    """An elastic job loses nodes of one rank each.

    Args: nodes: before. ranks, after: see `kill_inside`.
    Raises: MissedError: not all nodes were there from the beginning, or the kill was not inside of a step.
    """
    lines = Lines(job)
    (started,) = (line for line in lines.until(lambda line: "event" in line) if "event" in line)
    if started["nodes"] != nodes:  # else layout ranks are in the order of starts
        raise MissedError(f"the job begins with {started['nodes']} of {nodes} nodes")
    step, killed_s = kill_inside(job, lines, ranks, after)
    found = lines.until(lambda line: is_step(line) and line["step"] > step)
    now_s = time.time()
    events = [line for line in found if "event" in line]
    if len(events) != 1 or events[0]["step"] != step or events[0]["redone_steps"] != 1:
        raise MissedError(f"after step {step}: {events}")
    (event,) = events
    changing_s = sum(event["seconds"].values())
    return Recovery(
        folder=job.folder,
        total_s=now_s - killed_s,
        parts={"notice": event["time"] - changing_s - killed_s, **event["seconds"], "step": now_s - event["time"]},
        data_s=found[-1]["data_time_s"],
        event=event,
    )


def restarted(job: Job, rank: int, after: int, again: Callable[[], Job]) -> Recovery:
    """An ordinary job loses a rank, ends, and is started again. Args: again: starts it. Raises: MissedError."""
    lines = Lines(job)
    step, killed_s = kill_inside(job, lines, [rank], after)
    job.wait()
    ended_s = time.time()
    if any(map(is_step, lines.new())):
        raise MissedError(f"step {step + 1} was finished")
    with again() as lines.job:
        line = next(filter(is_step, lines.until(is_step)))
        now_s = time.time()
    if line["step"] != step + 1:
        raise MissedError(f"after step {step} step {line['step']} is the first one")
    return Recovery(
        folder=job.folder,
        total_s=now_s - killed_s,
        parts={"end": ended_s - killed_s, "start": now_s - ended_s - line["step_time_s"], "step": line["step_time_s"]},
        data_s=line["data_time_s"],
    )
