"""An elastic job without a failure against the ordinary job at the same layout, where both run and take turns."""

import multiprocessing
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_counts import Arrival, Counts, Turn, train_elastic, train_ordinary
from elastic_runs import COMMON, ELASTIC, depths, fixed, fork_ranks

from mmtrain.config import config
from mmtrain.local.nodes import NodeJob, run_on_nodes
from mmtrain.local.ranks import run_on_ranks

JOBS = ("elastic", "ordinary")
TURN_STEPS = 20
WARM_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The turns of both jobs, which were started once."""

    pipelines: tuple[int, ...]
    beat_s: float
    """Between two beats of the ring."""
    turns: dict[str, list[tuple[float, list[Arrival]]]]
    """Job -> [turn] -> its seconds, and [rank] -> what it has done at its end; the first one is the start."""


def turns_of_both(data: str, folder: Path, nodes: int, count: int) -> Taken:
    """Starts both jobs, on processes that are forked where everything is imported. Args: count: pairs of turns."""
    folder.mkdir()
    common = [*COMMON, data, "data.num_workers=0", "checkpoint.enable=false"]
    common.append(f"training.steps={WARM_STEPS + TURN_STEPS * count + 1}")
    elastic = [*common, *ELASTIC, 'elastic.below="go_on"']
    job, path = config.load("debug_vlm.toml", elastic), Path("debug_vlm.toml")
    pipelines, context = depths(job, nodes), multiprocessing.get_context("forkserver")
    turns = {
        name: Turn(go=context.Semaphore(0), arrived=context.SimpleQueue(), warm=WARM_STEPS, block=TURN_STEPS)
        for name in JOBS
    }
    fork_ranks(folder / "printed.txt", folder / "pids")

    def run_elastic() -> None:
        words = [*elastic, f"job.dump_folder={str(folder / 'elastic')!r}"]
        of_nodes = NodeJob(
            fn=train_elastic,
            args=(path, words, turns["elastic"]),
            nodes=nodes,
            ranks=1,
            digest="benchmark=1",
            silent_s=job.elastic.silent_s,
        )
        run_on_nodes(of_nodes)

    def run_ordinary() -> None:
        words = [*common, fixed(pipelines), f"job.dump_folder={str(folder / 'ordinary')!r}"]
        run_on_ranks(train_ordinary, nodes, path, words, turns["ordinary"], comm=job.comm)

    threads = [threading.Thread(target=run, daemon=True) for run in (run_elastic, run_ordinary)]
    for thread in threads:
        thread.start()
    found = _taken(turns, threads, nodes, count)
    for turn in turns.values():
        for _ in range(nodes):
            turn.go.release()
    for thread in threads:
        thread.join()
    return Taken(pipelines=pipelines, beat_s=job.elastic.beat_s, turns=found)


def _taken(
    turns: Mapping[str, Turn], threads: Sequence[threading.Thread], ranks: int, count: int
) -> dict[str, list[tuple[float, list[Arrival]]]]:
    """Lets jobs take turns, the order of each pair the reverse of the one before.

    Args: threads: of the jobs. Raises: RuntimeError: one has ended.
    """

    def arrival(turn: Turn) -> Arrival:
        while turn.arrived.empty():
            time.sleep(0.001)
            if not all(thread.is_alive() for thread in threads):
                raise RuntimeError("a job has ended")
        return turn.arrived.get()

    def arrivals(turn: Turn) -> list[Arrival]:
        return sorted((arrival(turn) for _ in range(ranks)), key=lambda one: one.rank)

    found = {name: [(0.0, arrivals(turn))] for name, turn in turns.items()}
    for pair in range(count):
        for name in list(turns)[:: 1 if pair % 2 == 0 else -1]:
            start_s = time.monotonic()
            for _ in range(ranks):
                turns[name].go.release()
            ended = arrivals(turns[name])
            found[name].append((max(one.time_s for one in ended) - start_s, ended))
    return found


def report_calls(taken: Taken) -> None:
    """Prints calls and bytes of each rank."""
    print(
        f"\n{list(taken.pipelines)}, a step of each rank, elastic and ordinary; the ring beats every {taken.beat_s:g} s"
    )
    print("rank  calls of the step  bytes sent on TCP    further calls of the elastic job")
    for rank, (ours, theirs) in enumerate(zip(*(_rows_of(taken.turns[name]) for name in JOBS), strict=True)):
        own, other = (_by_main_thread(one.calls) for one in (ours, theirs))
        further = ", ".join(
            f"{name} of {thread} every {ours.seconds / count:.1f} s, {count / ours.steps:.3f} a step"
            for (thread, name), count in sorted((ours.calls - own).items())
        )
        calls = f"{own.total() / ours.steps:8.2f} {other.total() / theirs.steps:8.2f}"
        bytes_sent = f"{ours.sent_bytes / ours.steps:9.0f} {theirs.sent_bytes / theirs.steps:9.0f}"
        print(f"{rank:4}  {calls}{'' if own == other else ' NOT THE SAME'} {bytes_sent}  {further}")
        print("      " + ", ".join(f"{name} {count / ours.steps:.2f}" for (_, name), count in sorted(own.items())))


def report_seconds(starts: Sequence[Taken]) -> None:
    """Prints ratios of seconds. Turns of one start have more in common than jobs differ, so errors are of starts."""
    print("\nelastic over ordinary, of each start, and their mean with its standard error")
    parts: dict[str, Callable[[tuple[float, list[Arrival]]], float]] = {
        "seconds": lambda turn: turn[0],
        "CPU seconds": lambda turn: sum(one.cpu_s for one in turn[1]),
        "main threads": lambda turn: sum(one.main_s for one in turn[1]),
    }
    for name, part in parts.items():
        spent = [[sum(map(part, start.turns[job][1:])) for job in JOBS] for start in starts]
        ratios = [ours / theirs for ours, theirs in spent]
        steps = TURN_STEPS * (len(starts[0].turns[JOBS[0]]) - 1)
        own, other = (1e3 * statistics.median(pair[index] for pair in spent) / steps for index in (0, 1))
        error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
        print(f"{name:13}", *(f"{ratio:.3f}" for ratio in ratios), end="   ")
        print(f"mean {statistics.fmean(ratios):.3f} +- {error:.3f}; medians of a step {own:.0f} and {other:.0f} ms")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one rank did in all turns."""

    steps: int
    seconds: float
    """Also those in which it waited for its turn."""
    calls: Counts
    sent_bytes: int


def _rows_of(turns: Sequence[tuple[float, Sequence[Arrival]]]) -> Iterator[Row]:
    """[rank] -> its row."""
    for first, last in zip(turns[0][1], turns[-1][1], strict=True):
        yield Row(
            steps=TURN_STEPS * (len(turns) - 1),
            seconds=last.time_s - first.time_s,
            calls=last.calls - first.calls,
            sent_bytes=last.sent_bytes - first.sent_bytes,
        )


def _by_main_thread(calls: Counts) -> Counts:
    """The calls of steps."""
    return Counter({key: count for key, count in calls.items() if key[0] == threading.main_thread().name})
