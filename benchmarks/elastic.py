"""python benchmarks/elastic.py [--parts recover,bytes,overhead] [--nodes 4] [--steps 3] [--pairs 3] [--starts 8]

What the loss of a node costs an elastic job of `debug_vlm.toml`, on nodes of one process each of this machine.

recover   seconds from a kill inside of a step to the end of that step, which the job finishes on the nodes that are
          left; against an ordinary job with the same layouts and a checkpoint of each step, that ends and is started
          again, by the command (cold), and where everything is imported already (warm). Ratios are of one round each,
          whose order changes from round to round.
bytes     the bytes that nodes sent to each other, for several losses, against those that were missing: by the tensors
          of a checkpoint and the partitions, the least over all ways to place the nodes
overhead  calls of process groups, bytes sent, seconds and CPU seconds of a step without a failure, against those of
          the ordinary job at the same layout. Both jobs run, and take turns of 20 steps, the order of each pair the
          reverse of the one before. Where a process happens to be in memory changes its speed by some per cent, so
          both are started several times.

Run it on a machine that does nothing else.
"""

import argparse
import itertools
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from elastic_bytes import least_missing, tensor_bytes, wanted
from elastic_overhead import report_calls, report_seconds, turns_of_both
from elastic_runs import COMMON, ELASTIC, Job, MissedError, Recovery, depths, fixed, recovered, restarted, start_server

from mmtrain.config import config
from mmtrain.data.toy.charts import make_charts
from mmtrain.launch.processes import environment

Ranks = tuple[int, ...]

LOSSES: tuple[tuple[int, int, int, Ranks], ...] = (
    (4, 2, 12, (3,)),
    (4, 2, 12, (0,)),
    (5, 2, 12, (4,)),
    (5, 2, 12, (1,)),
    (5, 2, 12, (0, 4)),
    (5, 1, 12, (0,)),
    (4, 1, 4, (1,)),
    (6, 2, 4, (2,)),
)
"""Nodes, elastic.min_nodes, microbatches, and the ranks that are killed."""


# --------------------------------------------------------------------------------------------------- recover


def recover(data: str, folder: Path, args: argparse.Namespace) -> None:
    """Prints the seconds of all three ways, and the ratios."""
    for workers in map(int, args.workers.split(",")):
        _recover([*COMMON, data, f"data.num_workers={workers}"], folder / f"recover-{workers}", args)


def _recover(common: Sequence[str], folder: Path, args: argparse.Namespace) -> None:
    job = config.load("debug_vlm.toml", [*common, *ELASTIC])
    old = depths(job, args.nodes)
    new = depths(job, args.nodes - 1, old)
    print(f"\n{list(old)} -> {list(new)}, data.num_workers = {job.data.num_workers}: seconds", flush=True)

    def elastic(run: Path) -> Recovery:
        with Job([*common, *ELASTIC], run, warm=False, elastic=args.nodes) as running:
            found = recovered(running, args.nodes, [args.nodes - 1], args.steps)
        assert tuple(found.event["pipelines"]) == new, (found.event, new)
        return found

    def ordinary(run: Path, *, warm: bool) -> Recovery:
        def again() -> Job:
            return Job([*common, fixed(new)], run, warm=warm)

        with Job([*common, fixed(old)], run, warm=True) as running:
            return restarted(running, args.nodes - 1, args.steps, again)

    ways: dict[str, Callable[[Path], Recovery]] = {
        "elastic": elastic,
        "warm": lambda run: ordinary(run, warm=True),
        "cold": lambda run: ordinary(run, warm=False),
    }
    found: dict[str, list[Recovery]] = {way: [] for way in ways}
    for pair in range(args.pairs):
        for way in list(ways)[:: 1 if pair % 2 == 0 else -1]:
            one = _tried(ways[way], folder / f"{pair}-{way}")
            found[way].append(one)
            print(f"{way:8} {one.total_s:7.2f}  {_parts(one.parts)}; waits for data {one.data_s:.2f}", flush=True)
    _report(found)


def _tried(way: Callable[[Path], Recovery], run: Path) -> Recovery:
    """A recovery whose kill was inside of a step."""
    for attempt in itertools.count():
        try:
            return way(run.with_name(f"{run.name}-{attempt}"))
        except MissedError as error:
            print(f"once more: {error}", flush=True)
            if attempt == 4:
                raise
    raise AssertionError


def center(values: Sequence[float]) -> str:
    """Median and standard error of the mean."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{statistics.median(values):7.3f} +-{error:6.3f}"


def _parts(parts: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items())


def _report(found: Mapping[str, Sequence[Recovery]]) -> None:
    """Prints medians, and ratios round by round."""
    print("medians:")
    for way, runs in found.items():
        parts = {name: statistics.median(one.parts[name] for one in runs) for name in runs[0].parts}
        total = statistics.median(one.total_s for one in runs)
        print(f"{way:8} {total:7.2f}  {_parts(parts)}; waits for data {statistics.median(r.data_s for r in runs):.2f}")
    ours = found["elastic"]
    others = {
        "cold restart over elastic": [one.total_s for one in found["cold"]],
        "warm restart over elastic": [one.total_s for one in found["warm"]],
        "the same, once it has ended": [one.total_s - one.parts["end"] for one in found["warm"]],
    }
    for name, seconds in others.items():
        print(f"{name:28} {center([two / one.total_s for one, two in zip(ours, seconds, strict=True)])}", flush=True)


# ----------------------------------------------------------------------------------------------------- bytes


def compare_bytes(data: str, folder: Path, args: argparse.Namespace) -> None:
    """Prints copied and missing bytes of each loss."""
    print("\nlayouts                     killed    copied   missing     state")
    for index, (nodes, least, microbatches, killed) in enumerate(LOSSES):
        overrides = [*COMMON, data, "data.num_workers=0", *ELASTIC, f"elastic.min_nodes={least}"]
        overrides.append(f"training.global_batch_size={microbatches}")
        job = config.load("debug_vlm.toml", overrides)

        def lost(run: Path, overrides: list[str] = overrides, nodes: int = nodes, killed: Ranks = killed) -> Recovery:
            with Job(overrides, run, warm=True, elastic=nodes) as running:
                return recovered(running, nodes, killed, args.steps)

        found = _tried(lost, folder / f"bytes-{index}")
        event, old = found.event, depths(job, nodes)
        new = tuple(event["pipelines"])
        sizes = tensor_bytes(found.folder / "checkpoint" / f"step-{event['step']}")
        before = wanted(job, old)
        held = [before[rank] for rank in range(nodes) if rank not in killed]
        missing = least_missing(held, wanted(job, new), sizes)
        same = "" if event["bytes"] == missing else "  DIFFERENT"
        numbers = f"{event['bytes']:9,d} {missing:9,d} {sum(sizes.values()):9,d}"
        print(f"{f'{list(old)} -> {list(new)}':27} {','.join(map(str, killed)):6} {numbers}{same}", flush=True)


# -------------------------------------------------------------------------------------------------- overhead


def overhead(data: str, folder: Path, args: argparse.Namespace) -> None:
    """Prints what steps of both jobs send, and the ratios of their seconds."""
    starts = [turns_of_both(data, folder / f"overhead-{start}", args.nodes, args.turns) for start in range(args.starts)]
    report_calls(starts[0])
    report_seconds(starts)


PARTS = {"recover": recover, "bytes": compare_bytes, "overhead": overhead}


def main() -> None:
    """Runs the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), metavar="PART,...")
    parser.add_argument("--nodes", type=int, default=4, help="of recover and overhead")
    parser.add_argument("--steps", type=int, default=3, help="before a kill, at least")
    parser.add_argument("--pairs", type=int, default=3, help="rounds of recover")
    parser.add_argument("--starts", type=int, default=8, help="of both jobs of overhead")
    parser.add_argument("--turns", type=int, default=2, help="pairs of turns of each start")
    parser.add_argument("--workers", default="0,1", metavar="N,...", help="data.num_workers of recover")
    args = parser.parse_args()
    print("load average:", *(f"{load:.1f}" for load in os.getloadavg()))
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with environment(threads), tempfile.TemporaryDirectory() as name:
        start_server()
        folder = Path(name)
        make_charts(folder / "charts", 400, 7)
        for part in args.parts.split(","):
            PARTS[part](f"data.source={str(folder / 'charts')!r}", folder, args)
    print("load average:", *(f"{load:.1f}" for load in os.getloadavg()))


if __name__ == "__main__":
    main()
