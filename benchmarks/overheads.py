"""python benchmarks/overheads.py [--ranks 2] [--repetitions 6] [--out FILE]

What the runtime adds on this machine to the compute of actions: seconds of a dispatch of each kind, of a message at
both ends, and of waking up for one (`mmtrain/schedule/overheads.py`). Stages are emulated: they sleep, and everything
else is real. As many ranks as cores, since more of them would also wait for a core.

Plans of several schedules take turns. What an action takes beyond its sleep is its inside; the rest follows from the
pauses between two actions, by the numbers of messages that are sent, posted and taken in them. `--out` writes a
hardware profile's section `[overheads]`.
"""

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from emulation import EmulatedRuntime, HostClock

from mmtrain.commands.local_ranks import run_on_ranks
from mmtrain.config.sections import CommConfig
from mmtrain.config.topology import MeshShape
from mmtrain.parallel.mesh import build_mesh
from mmtrain.planner.plan import make_plan
from mmtrain.planner.profile.pauses import Rows, overheads_between, overheads_inside, pauses
from mmtrain.schedule.chain import plain_chain
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.overheads import Overheads
from mmtrain.schedule.passes.lower import Program, lower
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem

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
    mesh = build_mesh(MeshShape(pp=cases[0][0].graph.num_ranks), torch.device("cpu"))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes of this machine, at most as many as cores")
    parser.add_argument("--repetitions", type=int, default=6)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    overheads = asdict(measure(args.ranks, args.repetitions))
    text = "[overheads]\n" + "".join(f"{name} = {seconds:.3g}\n" for name, seconds in overheads.items())
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
