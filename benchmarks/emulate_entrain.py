"""python benchmarks/emulate_entrain.py [--setups h800,a40-1b] [--workloads mix,interleaved] [--steps 1] [--ranks 4]
[--replicas 2] [--microbatches 8] [--repetitions 3] [--rows TEXT;TEXT]

The rows of `benchmarks/entrain.py` (random microbatches, DistTrain, Entrain, ours) measured where devices are emulated,
next to their simulated seconds: processes, runtime and transfers are real, and a stage's compute is a sleep of the
modelled seconds. The replicas of a row, whose pipelines have nothing to do with each other, run one after the other on
one set of ranks; the slowest one counts, as in a step that ends with a reduction over replicas.

All seconds of a step are scaled by one factor, so that the median action takes `--unit-ms`, and messages so that the
largest has `--message-kib`. What the runtime adds on this machine is measured first and is part of the simulated
seconds. In virtual time each timeline must equal the simulated one to the bit.

Run it on a machine that does nothing else. With the defaults it takes about 22 minutes.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from emulate import Case, execute, print_order, scaled_cases
from entrain import Setup, Step, literal_ranks, plans, variants
from overheads import measure

from mmtrain.config.sections import CommConfig
from mmtrain.costs.overheads import NO_OVERHEADS, Overheads
from mmtrain.local.ranks import run_on_ranks
from mmtrain.planner.search.search import warm
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.simulate import simulate
from mmtrain.schedule.timeline import Timeline

ROWS = (
    "random microbatches, own;DistTrain;literal Entrain;Entrain's assignment, all microbatches, own;balanced, own;"
    "random microbatches, search;  + deferral, search;balanced, search;fewer microbatches, search"
)


def make_cases(args: argparse.Namespace, setup: Setup, workload: str, step: int, overheads: Overheads) -> list[Case]:
    """A case for each replica of each row, with the row as its schedule."""
    samples, found = Step.drawn(setup, workload, step), dict[str, tuple[PlanningProblem, Plan]]()
    for name, assigned, planner in variants(setup, literal_ranks(setup, workload), args.refinements):
        if not any(part in name for part in args.rows.split(";")):
            continue
        made = plans(planner(setup, samples), samples.metas(assigned(samples)), step)
        for replica, (problem, result) in enumerate(made):
            found[f"{name.strip()}\t{replica}"] = problem, result.plan
    sizes = args.unit_ms / 1e3, args.message_kib * 1024.0
    cases = scaled_cases(f"{setup.name}, {workload} {step}", found, *sizes, overheads)
    return [replace(case, schedule=case.schedule.partition("\t")[0]) for case in cases]


def report(cases: Sequence[Case], executed: Sequence[Sequence[Timeline]]) -> None:
    """Args: executed: [run][case], in virtual time, to warm up, and each repetition."""
    virtual, _, *measured = executed
    spent = [simulate(case.problem, case.plan) for case in cases]
    equal = sum(a.rows == b.rows for a, b in zip(virtual, spent, strict=True))
    print(f"virtual time: {equal} of {len(cases)} timelines equal to the simulated ones to the bit\n")
    rows: dict[tuple[str, str], list[int]] = {}
    for i, case in enumerate(cases):
        rows.setdefault((case.batch, case.schedule), []).append(i)
    simulated = [max(cases[i].expected.end_s for i in own) for own in rows.values()]
    ends = [[max(timelines[i].end_s for i in own) for timelines in measured] for own in rows.values()]
    ratios = [statistics.fmean(found) / of for found, of in zip(ends, simulated, strict=True)]
    print("| step | | simulated ms | measured ms | measured / simulated |\n|---|---|---|---|---|")
    for (batch, name), of, found, ratio in zip(rows, simulated, ends, ratios, strict=True):
        between = f"{1e3 * statistics.fmean(found):.1f} +-{1e3 * statistics.pstdev(found):.1f}"
        print(f"| {batch} | {name} | {1e3 * of:.1f} | {between} | {ratio:.4f} |")
    print(f"\nmeasured / simulated: mean {statistics.fmean(ratios):.4f}, largest {max(ratios):.4f}")
    print_order([cases[own[0]] for own in rows.values()], simulated, [statistics.fmean(found) for found in ends])


def main() -> None:
    args = arguments()
    warm()
    overheads = NO_OVERHEADS if args.free else measure()
    print(", ".join(f"{name} {1e6 * seconds:.0f} us" for name, seconds in asdict(overheads).items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        cases = []
        for name in args.setups.split(","):
            setup = Setup(
                name=name,
                folder=Path(folder),
                evaluations=args.evaluations,
                num_replicas=args.replicas,
                num_microbatches=args.microbatches,
                num_ranks=args.ranks,
            )
            for workload in args.workloads.split(","):
                for step in range(args.steps):
                    cases += make_cases(args, setup, workload, step, overheads)
    seconds = (1 + args.repetitions) * sum(case.expected.end_s for case in cases)
    print(f"{args.ranks} ranks, {len(cases)} pipelines, about {seconds:.0f} s", flush=True)
    answers = run_on_ranks(execute, args.ranks, cases, args.repetitions, comm=CommConfig())
    report(cases, answers[0][1])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setups", default="h800,a40-1b")
    parser.add_argument("--workloads", default="mix,interleaved")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=4, help="pipeline ranks: processes of this machine")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8, help="of a replica")
    parser.add_argument("--rows", default=ROWS, help="parts of the names of rows, separated by semicolons")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--evaluations", type=int, default=1000)
    parser.add_argument("--refinements", type=int, default=16)
    parser.add_argument("--unit-ms", type=float, default=25.0, help="median action")
    parser.add_argument("--message-kib", type=float, default=256.0, help="largest message")
    parser.add_argument("--free", action="store_true", help="do not count overheads, as if the runtime took no time")
    return parser.parse_args()


if __name__ == "__main__":
    main()
