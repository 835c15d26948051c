"""python benchmarks/overheads.py [--ranks 2] [--repetitions 6] [--out FILE]

What the runtime adds on this machine to the compute of actions: seconds of a dispatch of each kind, of a message at
both ends, and of waking up for one (`mmtrain/costs/overheads.py`). Stages are emulated: they sleep, and everything
else is real. As many ranks as cores, since more of them would also wait for a core.

Plans of several schedules take turns. What an action takes beyond its sleep is its inside; the rest follows from the
pauses between two actions, by the numbers of messages that are sent, posted and taken in them. `--out` writes a
hardware profile's section `[overheads]`.
"""

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from emulation import EmulatedRuntime, HostClock

from mmtrain.config.sections import CommConfig
from mmtrain.config.topology import JobLayout
from mmtrain.costs.overheads import Overheads, charged
from mmtrain.local.ranks import run_on_ranks
from mmtrain.parallel.mesh import build_mesh
from mmtrain.planner.make_plan import make_plan
from mmtrain.schedule.chain import plain_chain
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.passes.lower import Program, lower
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import Option, PlanningProblem
from mmtrain.simulator.profiling.pauses import Rows, overheads_between, overheads_inside, pauses

SCHEDULES = ("GPipe", "1F1B", "ZB-H1", "Interleaved1F1B")
MICROBATCHES = 8
SECONDS = (0.010, 0.011, 0.008)
"""Of F, I and W on a rank."""
TRANSFER_S = 0.002

Case = tuple[PlanningProblem, Plan, Program]


def measure(ranks: int = 2, repetitions: int = 6) -> Overheads:
    """The overheads of this machine."""
    return run_on_ranks(_measure, ranks, cases(ranks), repetitions, comm=CommConfig())[0]


def cases(ranks: int) -> list[Case]:
    prepared = []
    for name in SCHEDULES:
        problem = plain_chain(ranks, MICROBATCHES, CATALOGUE[name], seconds=SECONDS, transfer_s=TRANSFER_S)
        plan = make_plan(problem, name).plan
        assert plan is not None
        prepared.append((problem, plan, lower(plan, problem, sharded=False)))
    return prepared


def _measure(device: torch.device, cases: Sequence[Case], repetitions: int) -> Overheads:
    mesh = build_mesh(JobLayout.grid(pp=cases[0][0].graph.num_ranks), torch.device("cpu"))
    runtimes = [EmulatedRuntime(problem, mesh, HostClock()) for problem, _, _ in cases]
    inside, between = [], []
    for repetition, (runtime, case) in itertools.product(range(1 + repetitions), zip(runtimes, cases, strict=True)):
        problem, plan, program = case
        timeline = runtime.timeline(runtime.run(plan, program))
        if not repetition:  # warms up
            continue
        for row in timeline.rows:
            option = plan.option(problem, row.action.stage, plan.graph.work_of(row.action))
            inside.append((row.action.kind, row.end_s - row.start_s - option.duration_s(row.action.kind)))
        rows: list[Rows] = [[row[1:] for row in timeline.of_rank(rank)] for rank in range(problem.graph.num_ranks)]
        between += pauses(program, rows, problem.transfer_s)
    return overheads_inside(inside) + overheads_between(between)


def scaled(overheads: Overheads, factor: float) -> Overheads:
    return Overheads(**{name: factor * seconds for name, seconds in asdict(overheads).items()})


def uncharged(problem: PlanningProblem, overheads: Overheads) -> PlanningProblem:
    """The problem that `charged` made this one of: what it adds once more is what it has added."""
    paid = charged(problem, overheads)
    costs: list[tuple[Option, ...]] = [()] * len(paid.costs)
    for row, paid_row in zip(problem.cost_index, paid.cost_index, strict=True):
        for index, paid_index in zip(row, paid_row, strict=True):
            pairs = zip(problem.costs[index], paid.costs[paid_index], strict=True)
            costs[paid_index] = tuple(_less(option, more) for option, more in pairs)
    latency_s = max(0.0, 2 * problem.p2p.latency_s - paid.p2p.latency_s)
    return replace(paid, costs=tuple(costs), p2p=replace(problem.p2p, latency_s=latency_s))


def _less(option: Option, more: Option) -> Option:
    seconds = ("forward_s", "backward_input_s", "backward_weight_s", "split_s")
    return replace(option, **{name: max(0.0, 2 * getattr(option, name) - getattr(more, name)) for name in seconds})


def hardware_text(overheads: Overheads) -> str:
    """The section of a hardware profile."""
    return "[overheads]\n" + "".join(f"{name} = {seconds!r}\n" for name, seconds in asdict(overheads).items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes of this machine, at most as many as cores")
    parser.add_argument("--repetitions", type=int, default=6)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    text = hardware_text(measure(args.ranks, args.repetitions))
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
