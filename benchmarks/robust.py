"""python benchmarks/robust.py [--jobs vlm_s,t2v_s] [--ranks 4] [--batches 2] [--draws 6] [--deviation 0.05]

What a search gains by knowing overheads and noise, at equal evaluations. Searched plans of the same batches:

- `free`: actions and messages cost nothing in addition to their compute;
- `charged`: with the overheads of this machine (`overheads.py`);
- `robust`: with those and with noise, by the mean makespan over draws.

The seconds of all actions are then drawn, the same for all three, by other draws than the search has seen: simulated
(the mean over 200 draws, overheads included), and measured on emulated devices, which sleep the drawn seconds. Printed:
both, relative to `free`.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from emulate import Case, job, planned, scaled_cases
from emulation import EmulatedRuntime, HostClock
from overheads import measure

from mmtrain.config.sections import CommConfig
from mmtrain.config.topology import JobLayout
from mmtrain.costs.noise import EXACT, Noise
from mmtrain.costs.overheads import NO_OVERHEADS, Overheads, charged
from mmtrain.local.ranks import run_on_ranks
from mmtrain.parallel.mesh import build_mesh
from mmtrain.planner.search.search import search
from mmtrain.planner.search.search_options import SearchOptions
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import Option, PlanningProblem
from mmtrain.schedule.simulate import simulate

SIMULATED_DRAWS = 200
SHARED = 0.3
"""Part of the variance that a rank's actions share."""
SEED = 1 << 20
"""Of the draws; those of a search follow from its own, which are small."""

VARIANTS = ("free", "charged", "robust")


def drawn(problem: PlanningProblem, factors: np.ndarray) -> PlanningProblem:
    """The problem with drawn seconds. Args: factors: [nodes, 3] of F, I and W."""
    costs: list[tuple[Option, ...]] = []
    index = [[0] * len(row) for row in problem.cost_index]
    for (stage, work), (f, i, w) in zip(problem.graph.nodes(), factors.tolist(), strict=True):
        index[work][problem.graph.position[stage]] = len(costs)
        costs.append(tuple(option.scaled(f, i, w) for option in problem.options(stage, work)))
    return replace(problem, costs=tuple(costs), cost_index=tuple(map(tuple, index)))


def draws(problem: PlanningProblem, noise: Noise, number: int) -> np.ndarray:
    rank = np.array([problem.graph.stage_rank[stage] for stage, _ in problem.graph.nodes()])
    return noise.factors(rank, number, SEED)


def searched(case: Case, variant: str, overheads: Overheads, noise: Noise, evaluations: int) -> Case:
    known = NO_OVERHEADS if variant == "free" else overheads
    options = SearchOptions(budget_evaluations=evaluations, noise=noise if variant == "robust" else EXACT)
    result = search(charged(case.problem, known), options)
    plan = Plan(case.problem.graph, result.plan.orders, result.plan.options)
    return replace(case, schedule=variant, plan=plan)


def execute(device: torch.device, cases: Sequence[Case], factors: Sequence[np.ndarray]) -> list[list[float]]:
    """[case][draw] -> measured makespan. Args: factors: [case] -> [draws, nodes, 3]."""
    mesh = build_mesh(JobLayout.grid(pp=cases[0].problem.graph.num_ranks), torch.device("cpu"))
    measured_s: list[list[float]] = [[] for _ in cases]
    for draw in range(-1, len(factors[0])):
        for case, of_case, seconds in zip(cases, factors, measured_s, strict=True):
            problem = drawn(case.problem, of_case[max(0, draw)])
            runtime = EmulatedRuntime(problem, mesh, HostClock(), message_scale=case.message_scale)
            makespan_s = runtime.timeline(runtime.run(case.plan)).end_s
            if draw >= 0:  # the first one warms up
                seconds.append(makespan_s)
    return measured_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default="vlm_s,t2v_s")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--draws", type=int, default=6, help="measured ones")
    parser.add_argument("--deviation", type=float, default=0.05)
    parser.add_argument("--evaluations", type=int, default=1000)
    parser.add_argument("--unit-ms", type=float, default=25.0)
    parser.add_argument("--message-kib", type=float, default=256.0)
    args = parser.parse_args()
    overheads = measure()
    noise = replace(Noise.uniform(args.deviation), shared=SHARED)
    cases: list[Case] = []
    for name in args.jobs.split(","):
        for batch in range(args.batches):
            problem, result = planned(job(name, args), "planned", batch)
            sizes = args.unit_ms / 1e3, args.message_kib * 1024.0
            (base,) = scaled_cases(f"{name} {batch}", {"": (problem, result.plan)}, *sizes, overheads)
            cases += [searched(base, variant, overheads, noise, args.evaluations) for variant in VARIANTS]
    simulated = []
    for case in cases:
        with_overheads = charged(case.problem, overheads)
        makespans = [
            simulate(drawn(with_overheads, factors), case.plan).makespan_s
            for factors in draws(case.problem, noise, SIMULATED_DRAWS)
        ]
        simulated.append(statistics.fmean(makespans))
    factors = [draws(case.problem, noise, args.draws) for case in cases]
    measured = run_on_ranks(execute, args.ranks, cases, factors, comm=CommConfig())[0]
    head = f"{'simulated ms':>12s} {'/ free':>7s} {'measured ms':>12s} {'/ free':>7s}"
    print(f"{'batch':10s} {'search':8s} {'actions':>7s} {head}")
    for i, case in enumerate(cases):
        base_index = i - i % len(VARIANTS)
        ratio = statistics.fmean(a / b for a, b in zip(measured[i], measured[base_index], strict=True))
        print(
            f"{case.batch:10s} {case.schedule:8s} {sum(map(len, case.plan.orders)):7d} {1e3 * simulated[i]:12.1f} "
            f"{simulated[i] / simulated[base_index]:7.4f} {1e3 * statistics.fmean(measured[i]):12.1f} {ratio:7.4f}"
        )


if __name__ == "__main__":
    main()
