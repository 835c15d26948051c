"""python benchmarks/emulate.py [--jobs vlm_s,t2v_s] [--ranks 4] [--batches 2] [--repetitions 5]

Measured against simulated makespans where devices are emulated: the runtime, its processes and its transfers are real,
and a stage's compute is a sleep of the seconds that the planning problem gives (`benchmarks/emulation.py`).
Batches are drawn, costs are those of simulated H800s with tensor parallelism 4. All seconds of a batch are scaled by
one factor, so that the median action takes `--unit-ms`, and its messages so that the largest has `--message-kib`.

What the runtime adds to actions and messages on this machine is measured first, with as many ranks as cores
(`overheads.py`), and is part of the simulated seconds.

All plans take turns on one set of ranks, repetition by repetition, so that what the machine does besides hits all
alike. First each runs once in virtual time, whose timeline must be the simulated one, and once to warm up. Printed for
each batch and schedule: compute actions, simulated and measured milliseconds (mean and standard deviation over the
repetitions), their ratio, and microseconds of excess. `inside`, `between` and `behind` are medians over actions: inside
of an action (the stage's bookkeeping, autograd, a sleep that ends late), between two actions of a rank, and behind a
message (from its planned arrival to the start of the action that waits for it). `path` is the excess of the makespan
over the number of actions on the longest chain of causes, mean. Last, whether schedules come in the simulated order.

Run it on a machine that does nothing else: where ranks wait for a core, that counts as the runtime's time.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import combinations
from typing import get_args

import torch
from emulation import EmulatedClock, EmulatedRuntime, HostClock, VirtualClock
from overheads import measure

from mmtrain.config import config as config_module
from mmtrain.config.config import Config
from mmtrain.config.sections import CommConfig
from mmtrain.config.topology import JobLayout
from mmtrain.costs.overheads import NO_OVERHEADS, Overheads, charged
from mmtrain.local.ranks import run_on_ranks
from mmtrain.modality.typical import TypicalSizes
from mmtrain.parallel.mesh import build_mesh
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.joint import search_iteration
from mmtrain.planner.make_plan import make_plan
from mmtrain.planner.result import PlanResult
from mmtrain.planner.search.search import search
from mmtrain.planner.search.search_options import SearchOptions
from mmtrain.planner.search_settings import PLANNED, search_options
from mmtrain.schedule.action import RESULT_OF
from mmtrain.schedule.items import Result
from mmtrain.schedule.library.names import ScheduleName
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import P2P, Option, PlanningProblem
from mmtrain.schedule.simulate import simulate
from mmtrain.schedule.timeline import Row, Timeline
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.study import with_schedule
from mmtrain.simulator.typical_iterations import usual_workload
from mmtrain.simulator.workloads import draw

REGROUPED = "regrouped"
"""Stands among the names of schedules for searched plans of samples that the search has grouped
(`planner.search.regroup`)."""
SCHEDULES = ("GPipe", "1F1B", "ZB-H1", "interleave", PLANNED, REGROUPED)
SAME = 0.01
"""Schedules whose simulated makespans differ by less have no order."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan of one batch."""

    batch: str
    schedule: str
    problem: PlanningProblem
    """With the seconds that stages spend."""
    plan: Plan
    message_scale: float
    overheads: Overheads = NO_OVERHEADS
    """What the runtime adds on this machine."""

    @cached_property
    def expected(self) -> Timeline:
        """The simulated timeline on the host's clock."""
        return simulate(charged(self.problem, self.overheads), self.plan)


@dataclass(frozen=True, kw_only=True)
class Excess:
    """Seconds of one repetition beyond the simulated ones."""

    inside_s: list[float]
    between_s: list[float]
    behind_s: list[float]
    path: int
    """Actions on the longest chain of causes."""


# -------------------------------------------------------------------------------------------------- cases


def make_cases(args: argparse.Namespace, overheads: Overheads) -> list[Case]:
    cases = []
    for name in args.jobs.split(","):
        for iteration in range(args.batches):
            found = {}
            for schedule in args.schedules.split(","):
                problem, result = planned(job(name, args), schedule, iteration)
                if not result.has_plan:
                    print(f"{name} batch {iteration}, {schedule}: no plan: {result.message}")
                else:
                    found[schedule] = problem, result.plan
            sizes = args.unit_ms / 1e3, args.message_kib * 1024.0
            cases += scaled_cases(f"{name} {iteration}", found, *sizes, overheads)
    return [planned_again(case, 1000) if case.schedule in (PLANNED, REGROUPED) else case for case in cases]


def planned_again(case: Case, evaluations: int) -> Case:
    """The case with a plan whose search knew the overheads."""
    result = search(charged(case.problem, case.overheads), SearchOptions(budget_evaluations=evaluations))
    return replace(case, plan=Plan(case.problem.graph, result.plan.orders, result.plan.options))


def job(name: str, args: argparse.Namespace) -> Config:
    return config_module.load(
        f"{name}.toml",
        [
            f"training.global_batch_size={args.microbatches}",
            f"parallelism.pipeline_parallel_degree={args.ranks}",
            f'planner.hardware="h800x{4 * args.ranks}"',
        ],
    )


def planned(config: Config, name: str, iteration: int) -> tuple[PlanningProblem, PlanResult]:
    """One drawn batch and its plan by a named schedule, or by the search."""
    searches = name in (PLANNED, REGROUPED)
    section = config.planner.with_search(regroup=name == REGROUPED, budget_evaluations=4000)
    config = replace(config, planner=section)
    if not searches:
        schedule = next(known for known in get_args(ScheduleName) if known == name)
        config = with_schedule(config, schedule)[0]
    planner = IterationPlanner(make_job(config))
    meta = draw(usual_workload(config), TypicalSizes.of(config), seed=0, iteration=iteration)
    prepared = planner.prepare(meta, searched=searches)
    if searches:
        options = search_options(config.planner, seed=0, threads=1)
        prepared, result = search_iteration(planner, prepared, options, search)
        return prepared.problem, result
    return prepared.problem, make_plan(prepared.problem, name)


def unit_factor(plans: dict[str, tuple[PlanningProblem, Plan]], unit_s: float) -> float:
    """By which seconds are scaled, so that the median action takes a unit."""
    seconds = [row.end_s - row.start_s for pair in plans.values() for row in simulate(*pair).rows]
    return unit_s / statistics.median(seconds)


def scaled_cases(
    batch: str,
    plans: dict[str, tuple[PlanningProblem, Plan]],
    unit_s: float,
    message_bytes: float,
    overheads: Overheads,
    factor: float = 0.0,
) -> list[Case]:
    """The plans of one batch, with seconds and bytes times one factor each, but not the overheads."""
    factor = factor or unit_factor(plans, unit_s)
    largest = max(max(row) for problem, _ in plans.values() for row in problem.output_bytes)
    return [
        Case(
            batch=batch,
            schedule=name,
            problem=slower(problem, factor),
            plan=plan,
            message_scale=message_bytes / largest if largest else 1.0,
            overheads=overheads,
        )
        for name, (problem, plan) in plans.items()
    ]


def slower(problem: PlanningProblem, factor: float) -> PlanningProblem:
    """The problem with all of its seconds times a factor."""
    seconds = [field.name for field in fields(Option) if field.name.endswith("_s")]
    costs = tuple(
        tuple(replace(option, **{name: factor * getattr(option, name) for name in seconds}) for option in options)
        for options in problem.costs
    )
    p2p = P2P(latency_s=problem.p2p.latency_s * factor, bytes_per_s=problem.p2p.bytes_per_s / factor)
    return replace(problem, costs=costs, p2p=p2p)


# ------------------------------------------------------------------------------------------------ ranks


def execute(device: torch.device, cases: list[Case], repetitions: int) -> tuple[float, list[list[Timeline]]]:
    """Seconds of CPU time of this rank in virtual time, and [run][case] -> the executed timeline: in virtual time, to
    warm up, and each repetition."""
    mesh = build_mesh(JobLayout.grid(pp=cases[0].problem.graph.num_ranks), torch.device("cpu"))

    def run(case: Case, clock: EmulatedClock) -> Timeline:
        runtime = EmulatedRuntime(case.problem, mesh, clock, message_scale=case.message_scale)
        return runtime.timeline(runtime.run(case.plan))

    run(cases[0], VirtualClock())
    start = time.process_time()
    found = [[run(case, VirtualClock()) for case in cases]]
    cpu_s = time.process_time() - start
    for _ in range(1 + repetitions):
        found.append([run(case, HostClock()) for case in cases])
    return cpu_s, found


# ----------------------------------------------------------------------------------------------- figures


def excess(case: Case, timeline: Timeline) -> Excess:
    """What each action took beyond the plan, and the length of the longest chain of causes, as measured."""
    graph, problem = case.plan.graph, case.problem
    results: dict[Result, Row] = {}
    for row in timeline.rows:
        for part in row.action.parts:
            results[RESULT_OF[part.kind], part.stage, graph.work_of(part)] = row
    inside, between, behind = [], [], []
    causes: dict[Row, Row | None] = {}
    for rank in range(graph.num_ranks):
        before: Row | None = None
        for row in timeline.of_rank(rank):
            cost = problem.entry_cost(row.action, graph.work_of(row.action), case.plan.options)
            inside.append(row.end_s - row.start_s - cost.seconds)
            ready, cause, message = (before.end_s, before, False) if before else (0.0, None, False)
            for result, edge in (
                need for part in row.action.parts for need in graph.needs(part.kind, part.stage, graph.work_of(part))
            ):
                arrival = results[result].end_s + (problem.transfer_s(edge) if edge else 0.0)
                if arrival > ready:
                    ready, cause, message = arrival, results[result], results[result].rank != rank
            (behind if message else between).append(row.start_s - ready)
            causes[row] = cause
            before = row
    path, last = 0, max(timeline.rows, key=lambda row: row.end_s)
    step: Row | None = last
    while step is not None:
        path, step = path + 1, causes[step]
    return Excess(inside_s=inside, between_s=between, behind_s=behind, path=path)


def report(cases: list[Case], cpu_s: float, executed: list[list[Timeline]]) -> None:
    """Args: cpu_s: of all ranks, in virtual time."""
    virtual, _, *measured = executed
    spent = [simulate(case.problem, case.plan) for case in cases]
    equal = sum(a.rows == b.rows for a, b in zip(virtual, spent, strict=True))
    difference = max(abs(a.end_s - b.end_s) for a, b in zip(virtual, spent, strict=True))
    simulated = [case.expected for case in cases]
    cpu_us = 1e6 * cpu_s / sum(len(timeline.rows) for timeline in simulated)
    print(
        f"virtual time: {equal} of {len(cases)} timelines equal to the simulated ones to the bit, makespans differ by "
        f"{difference:.1e} s at most\n"
        f"CPU time: {cpu_us:.0f} us a compute action, with its messages, and lowering of the plan\n"
    )
    print(
        f"{'batch':10s} {'schedule':22s} {'actions':>7s} {'simulated':>9s} {'measured ms':>16s} {'ratio':>15s} "
        f"{'inside':>7s} {'between':>7s} {'behind':>7s} {'path':>6s} us"
    )
    ratios = []
    for i, case in enumerate(cases):
        ends = [timelines[i].end_s for timelines in measured]
        found = [excess(case, timelines[i]) for timelines in measured]
        mine = [end / simulated[i].end_s for end in ends]
        ratios += mine
        parts = [1e6 * statistics.median(s for e in found for s in getattr(e, part)) for part in PARTS]
        late = [(end - simulated[i].end_s) / e.path for end, e in zip(ends, found, strict=True)]
        print(
            f"{case.batch:10s} {case.schedule:22s} {len(simulated[i].rows):7d} {1e3 * simulated[i].end_s:9.1f} "
            f"{1e3 * statistics.fmean(ends):9.1f} +-{1e3 * statistics.pstdev(ends):5.1f} "
            f"{statistics.fmean(mine):7.4f} +-{statistics.pstdev(mine):6.4f} "
            + " ".join(f"{part:7.0f}" for part in parts)
            + f" {1e6 * statistics.fmean(late):6.0f}"
        )
    print(
        f"\nmeasured / simulated: mean {statistics.fmean(ratios):.4f}, sd {statistics.pstdev(ratios):.4f}, "
        f"largest {max(ratios):.4f}, over {len(ratios)} runs"
    )
    means = [statistics.fmean(timelines[i].end_s for timelines in measured) for i in range(len(cases))]
    print_order(cases, [timeline.end_s for timeline in simulated], means)


PARTS = ("inside_s", "between_s", "behind_s")


def print_order(cases: Sequence[Case], simulated_s: Sequence[float], measured_s: Sequence[float]) -> None:
    """Args: simulated_s, measured_s: makespans of the cases."""
    kept, wrong = 0, []
    for i, j in combinations(range(len(cases)), 2):
        a, b = simulated_s[i], simulated_s[j]
        if cases[i].batch != cases[j].batch or abs(a - b) < SAME * min(a, b):
            continue
        if (a < b) == (measured_s[i] < measured_s[j]):
            kept += 1
        else:
            wrong.append(
                f"{cases[i].batch}: {cases[i].schedule} / {cases[j].schedule} simulated {a / b:.3f}, measured "
                f"{measured_s[i] / measured_s[j]:.3f}"
            )
    print(
        f"order: of {kept + len(wrong)} pairs of schedules of one batch whose simulated makespans differ by {SAME:.0%} "
        f"or more, {kept} come in the simulated order",
        *wrong,
        sep="\n  ",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default="vlm_s,t2v_s", help="configs")
    parser.add_argument("--ranks", type=int, default=4, help="pipeline ranks: processes of this machine")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--batches", type=int, default=2, help="drawn iterations of each job")
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--unit-ms", type=float, default=25.0, help="median action")
    parser.add_argument("--message-kib", type=float, default=256.0, help="largest message")
    parser.add_argument("--free", action="store_true", help="do not count overheads, as if the runtime took no time")
    args = parser.parse_args()
    overheads = NO_OVERHEADS if args.free else measure()
    print(", ".join(f"{name} {1e6 * seconds:.0f} us" for name, seconds in asdict(overheads).items()), flush=True)
    cases = make_cases(args, overheads)
    seconds = (1 + args.repetitions) * sum(simulate(case.problem, case.plan).end_s for case in cases)
    print(f"{args.ranks} ranks, {len(cases)} plans, about {seconds:.0f} s", flush=True)
    answers = run_on_ranks(execute, args.ranks, cases, args.repetitions, comm=CommConfig())
    report(cases, sum(cpu_s for cpu_s, _ in answers), answers[0][1])


if __name__ == "__main__":
    main()
