"""python benchmarks/optima.py solve [CASE ...] [--seconds 600]
python benchmarks/optima.py compare [CASE ...] [--seconds 10]

Small planning problems in which memory is short, cut down from those of planner_problems.py, and how near the search
comes to the best plans known of them. Backwards are whole.

solve      plans by the constraint solver CP-SAT (`pip install -e '.[solver]'`): start of each action, option of each
           stage and work; ranks run one action at a time, activations take room from their forward's start to their
           backward's end. What it finds is checked, simulated and stored, with whether it is proved to be the best,
           in problems/optima.json.gz; it starts from a stored plan, and a shorter stored plan stays.
compare    how far the search is above the stored makespans, with as many evaluations as take `--seconds`, and three
           seeds.

Seconds are of CPU time, which other processes of the machine hardly change.

A case is model, ranks, segments of both modules, microbatches, part of the limit in proportion to the ranks, and the
seed that draws its microbatches from the model's 64; 0: all are their mean.
"""

import argparse
import gzip
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from planner_problems import problem

from mmtrain.planner.memory_bound import memory_bound_s
from mmtrain.planner.search.search import search, warm
from mmtrain.planner.search.search_options import SearchOptions
from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.graph import ModuleStages, Work
from mmtrain.schedule.plan import Plan, check
from mmtrain.schedule.problem import Option, PlanningProblem
from mmtrain.schedule.simulate import simulate

STORED = Path(__file__).parent / "problems" / "optima.json.gz"
KEPT_OPTIONS = (0, 4, 8)
"""Of the nine options of a stage and work."""
TIMED = 4000
"""Evaluations that are timed, to know how many take a budget in seconds."""
STEP_S, STEP_BYTES = 1e-4, 2**20
"""Units of the solver; seconds and bytes are rounded up, limits down."""


@dataclass(frozen=True)
class Case:
    """One small problem."""

    model: str
    ranks: int
    segments: tuple[int, int]
    microbatches: int
    part: float = 1.0
    seed: int = 0

    @property
    def name(self) -> str:
        """As on the command line."""
        passes = "+".join(map(str, self.segments))
        return f"{self.model}-{self.ranks}-{passes}-{self.microbatches}-{self.part:g}-{self.seed}"

    def problem(self) -> PlanningProblem:
        """The problem: each stage costs as much as one of the large problem."""
        large = problem(self.model, segments=self.segments)
        graph, rng = large.graph, random.Random(self.seed)
        drawn = rng.sample(range(64), self.microbatches) if self.seed else [None] * self.microbatches
        works: list[Work] = []
        lists: list[list[Option]] = []
        outputs: list[float] = []
        for microbatch, source in enumerate(drawn):
            first = len(works)
            for module in range(len(graph.modules)):
                among = [w for w, work in enumerate(graph.works) if work.module == module]
                of = [w for w in among if graph.works[w].microbatch == source] if source is not None else among
                count = len(of) if source is not None else max(1, round(len(among) / 64))
                after = tuple(range(first, len(works))) if module else ()
                for number in range(count):
                    chosen = [of[number]] if source is not None else of
                    stages = [(graph.modules[module].stages[1], w) for w in chosen]
                    lists.append([_mean([large.options(*node)[o] for node in stages]) for o in KEPT_OPTIONS])
                    sizes = [large.output_bytes[w][1] for w in chosen]
                    outputs.append(statistics.fmean(sizes))
                    works.append(Work(module=module, microbatch=microbatch, sub_microbatch=number, after=after))
        depth = [segments * self.ranks for segments in self.segments]
        limits = [limit for limit in large.memory_limit_bytes if limit is not None]
        return PlanningProblem.build(
            num_ranks=self.ranks,
            modules=[
                ModuleStages(name=module.name, stages=tuple(range(sum(depth[:m]), sum(depth[: m + 1]))))
                for m, module in enumerate(graph.modules)
            ],
            stage_rank=[*range(self.ranks)] * sum(self.segments),
            works=works,
            costs=lists,
            cost_index=[[i] * depth[work.module] for i, work in enumerate(works)],
            output_bytes=[[size] * depth[work.module] for size, work in zip(outputs, works, strict=True)],
            p2p=large.p2p,
            memory_limit_bytes=[self.part * statistics.fmean(limits) * self.ranks / graph.num_ranks] * self.ranks,
        )


CASES = (
    Case("vlm_l", 2, (1, 1), 3),
    Case("vlm_l", 3, (1, 1), 3),
    Case("vlm_l", 2, (1, 1), 4, seed=1),
    Case("vlm_s", 2, (2, 1), 3),
    Case("vlm_s", 2, (1, 1), 4, 0.6),
    Case("t2v_l", 2, (1, 2), 3, seed=1),
    Case("vlm_m", 2, (1, 1), 4),
    Case("vlm_m", 2, (2, 1), 3, seed=2),
    Case("vlm_l", 2, (2, 1), 3, seed=2),
    Case("vlm_s", 3, (1, 1), 4, seed=3),
    Case("t2v_l", 2, (1, 1), 4),
    Case("vlm_l", 2, (1, 1), 5, seed=4),
    # Solved after the search was written, and looked at once.
    Case("vlm_l", 2, (1, 1), 4, seed=11),
    Case("vlm_l", 3, (1, 1), 3, seed=12),
    Case("vlm_m", 2, (1, 1), 5, 0.8, seed=13),
    Case("vlm_m", 3, (1, 1), 3, 0.8, seed=14),
    Case("vlm_s", 2, (2, 1), 3, seed=15),
    Case("vlm_s", 3, (1, 1), 3, 0.8, seed=16),
    Case("t2v_l", 2, (1, 2), 4, seed=17),
    Case("t2v_l", 3, (1, 1), 4, 0.8, seed=18),
    Case("vlm_l", 2, (2, 1), 3, 0.8, seed=19),
    Case("vlm_m", 2, (2, 1), 3, 0.8, seed=20),
    Case("vlm_s", 2, (1, 1), 5, 0.8, seed=21),
    Case("t2v_l", 2, (1, 1), 5, 0.6, seed=22),
)


def _mean(options: Sequence[Option]) -> Option:
    """An option of mean seconds and bytes."""
    fields = ("forward_s", "backward_input_s", "backward_weight_s", "activation_bytes")
    means = {field: statistics.fmean(getattr(option, field) for option in options) for field in fields}
    return replace(options[0], forward_exchange_s=0.0, backward_exchange_s=0.0, contention=1.0, split_s=0.0, **means)


# ---------------------------------------------------------------------------------------------- the solver


def solve(given: PlanningProblem, hint: Plan, seconds: float) -> tuple[Plan, bool, float]:
    """(the solver's plan, or the hint; whether it is proved to be the best; its bound in seconds, up to its units).

    Args: hint: a plan, from which the solver starts. seconds: of CPU time, by one worker.
    """
    from ortools.sat.python import cp_model

    graph, hinted = given.graph, simulate(_rounded(given), hint)
    starts = {row.action: round(row.start_s / STEP_S) for row in hinted.rows}
    horizon = round(hinted.makespan_s / STEP_S)
    model: Any = cp_model.CpModel()
    start: dict[tuple[int, int, Kind], Any] = {}
    end: dict[tuple[int, int, Kind], Any] = {}
    chosen: dict[tuple[int, int], list[Any]] = {}
    busy: list[list[Any]] = [[] for _ in range(graph.num_ranks)]
    held: list[list[tuple[Any, int]]] = [[] for _ in range(graph.num_ranks)]
    for stage, work in graph.nodes():
        rank, options = graph.stage_rank[stage], given.options(stage, work)
        picks = [model.NewBoolVar("") for _ in options]
        model.AddExactlyOne(picks)
        chosen[stage, work] = picks
        for number, pick in enumerate(picks):
            model.AddHint(pick, int(number == hint.options.get((stage, work), 0)))
        for kind in (Kind.F, Kind.B) if graph.has_backward(stage, work) else (Kind.F,):
            start[stage, work, kind] = model.NewIntVar(0, horizon, "")
            end[stage, work, kind] = model.NewIntVar(0, horizon, "")
            taken = [math.ceil(option.duration_s(kind) / STEP_S) for option in options]
            length = model.NewIntVar(min(taken), max(taken), "")
            begin, took = starts[graph.action(kind, stage, work)], taken[hint.options.get((stage, work), 0)]
            hints = (start[stage, work, kind], begin), (end[stage, work, kind], begin + took), (length, took)
            for variable, value in hints:
                model.AddHint(variable, value)
            model.Add(length == sum(pick * amount for pick, amount in zip(picks, taken, strict=True)))
            busy[rank].append(model.NewIntervalVar(start[stage, work, kind], length, end[stage, work, kind], ""))
        if not graph.has_backward(stage, work):
            continue
        model.Add(start[stage, work, Kind.B] >= end[stage, work, Kind.F])
        span = model.NewIntVar(0, horizon, "")
        model.Add(span == end[stage, work, Kind.B] - start[stage, work, Kind.F])
        backward, option = graph.action(Kind.B, stage, work), options[hint.options.get((stage, work), 0)]
        last = starts[backward] + math.ceil(option.duration_s(Kind.B) / STEP_S)
        model.AddHint(span, last - starts[graph.action(Kind.F, stage, work)])
        for pick, option in zip(picks, options, strict=True):
            first, last = start[stage, work, Kind.F], end[stage, work, Kind.B]
            whole = model.NewOptionalIntervalVar(first, span, last, pick, "")
            held[rank].append((whole, math.ceil(option.activation_bytes / STEP_BYTES)))
    for stage, work in graph.nodes():
        for edge in graph.inputs(stage, work):
            lag, source = math.ceil(given.transfer_s(edge) / STEP_S), (edge.source, edge.work)
            model.Add(start[stage, work, Kind.F] >= end[*source, Kind.F] + lag)
            if edge.grad and (stage, work, Kind.B) in start and (*source, Kind.B) in start:
                model.Add(start[*source, Kind.B] >= end[stage, work, Kind.B] + lag)
    for rank, limit in enumerate(given.held_limit_bytes):
        model.AddNoOverlap(busy[rank])
        if limit is not None:
            intervals, demands = zip(*held[rank], strict=True)
            model.AddCumulative(intervals, demands, math.floor(limit / STEP_BYTES))
    for one, other in _alike(given):
        model.Add(start[graph.stages(one)[0], one, Kind.F] <= start[graph.stages(other)[0], other, Kind.F])
    makespan = model.NewIntVar(0, horizon, "")
    model.AddHint(makespan, horizon)
    model.AddMaxEquality(makespan, list(end.values()))
    model.Minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.interleave_search = True
    with ThreadPoolExecutor(1) as pool:
        last_s, solving = time.process_time() + seconds, pool.submit(solver.Solve, model)
        while wait([solving], timeout=0.5).not_done:
            if time.process_time() > last_s:
                solver.stop_search()
    status = solving.result()
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return hint, False, solver.BestObjectiveBound() * STEP_S
    orders: list[tuple[Action, ...]] = []
    for rank in range(graph.num_ranks):
        keys = sorted((k for k in start if graph.stage_rank[k[0]] == rank), key=lambda k: solver.Value(start[k]))
        orders.append(tuple(graph.action(kind, stage, work) for stage, work, kind in keys))
    taken_of = {node: next(i for i, pick in enumerate(picks) if solver.Value(pick)) for node, picks in chosen.items()}
    plan = Plan(graph, tuple(orders), {node: option for node, option in taken_of.items() if option})
    check(plan, given)
    return plan, status == cp_model.OPTIMAL, solver.BestObjectiveBound() * STEP_S


def _rounded(given: PlanningProblem) -> PlanningProblem:
    """The problem with the solver's seconds."""

    def up(seconds: float) -> float:
        return math.ceil(seconds / STEP_S) * STEP_S

    costs = [
        [
            replace(
                option,
                forward_s=up(option.duration_s(Kind.F)),
                backward_input_s=up(option.duration_s(Kind.B)),
                backward_weight_s=0.0,
            )
            for option in options
        ]
        for options in given.costs
    ]
    lag_s = up(
        given.p2p.latency_s + max(amount for row in given.output_bytes for amount in row) / given.p2p.bytes_per_s
    )
    outputs = tuple(tuple(0.0 for _ in row) for row in given.output_bytes)
    return replace(
        given,
        costs=tuple(map(tuple, costs)),
        p2p=replace(given.p2p, latency_s=lag_s),
        output_bytes=outputs,
    )


def _alike(given: PlanningProblem) -> list[tuple[int, int]]:
    """Neighbours among works that could be exchanged: equal ones of a microbatch, and first ones of equal
    microbatches."""
    works, of_work = given.graph.works, [[given.costs[i] for i in row] for row in given.cost_index]
    pairs = [
        (w, w + 1)
        for w in range(len(works) - 1)
        if works[w].module == works[w + 1].module
        and works[w].microbatch == works[w + 1].microbatch
        and of_work[w] == of_work[w + 1]
    ]
    members = [[w for w, work in enumerate(works) if work.microbatch == m] for m in range(works[-1].microbatch + 1)]
    for one, other in pairwise(members):
        if [of_work[w] for w in one] == [of_work[w] for w in other]:
            pairs.append((one[0], other[0]))
    return pairs


# ---------------------------------------------------------------------------------------------- commands


def read() -> dict[str, dict[str, Any]]:
    """Name of a case -> its problem, makespan_s, plan and whether it is proved."""
    return json.loads(gzip.decompress(STORED.read_bytes())) if STORED.exists() else {}


def stored_plan(given: PlanningProblem, row: dict[str, Any]) -> Plan:
    """The plan of a stored case."""
    return Plan.parse(given.graph, row["plan"], {(stage, work): option for stage, work, option in row["options"]})


def solve_all(cases: Sequence[Case], seconds: float) -> None:
    for case in cases:
        given, stored = case.problem(), read()
        if case.name in stored:
            hint = stored_plan(given, stored[case.name])
        else:
            hint = search(given, SearchOptions(budget_evaluations=2000, split=False, reorder=False)).plan
        plan, proved, bound_s = solve(given, hint, seconds)
        makespan_s = simulate(given, plan).makespan_s
        options = [[*node, option] for node, option in sorted(plan.options.items())]
        row = {"problem": json.loads(given.to_json()), "makespan_s": makespan_s, "proved": proved}
        row.update(plan=str(plan), options=options)
        if case.name not in stored or makespan_s < stored[case.name]["makespan_s"] or proved:
            stored[case.name] = row
            # Without a time, so that equal content is an equal file.
            STORED.write_bytes(gzip.compress(json.dumps(stored, sort_keys=True).encode(), mtime=0))
        words = "best" if proved else f"not proved, bound {bound_s:.4f} s"
        print(f"{case.name:24s} {makespan_s:.4f} s, {words}; {sum(1 for _ in given.graph.nodes())} nodes", flush=True)


def compare(cases: Sequence[Case], seconds: float) -> None:
    warm()
    print(
        f"{'case':24s} {'stored s':>9s} {'':9s} {'over the bound':>14s} {'evaluations':>11s}   the search over the "
        "stored plan, three seeds"
    )
    for case in cases:
        row = read()[case.name]
        given, best_s = PlanningProblem.from_json(row["problem"]), row["makespan_s"]
        options = SearchOptions(budget_evaluations=TIMED, split=False)
        start = time.process_time()
        search(given, options)
        evaluations = round(TIMED * seconds / (time.process_time() - start))
        options = replace(options, budget_evaluations=evaluations)
        found = [search(given, replace(options, seed=seed)).makespan_s / best_s - 1 for seed in range(3)]
        bound = best_s / memory_bound_s(given, split=False) - 1
        words = " ".join(f"{value:7.2%}" for value in found)
        proved = "proved" if row["proved"] else ""
        print(f"{case.name:24s} {best_s:9.4f} {proved:9s} {bound:14.1%} {evaluations:11d}   {words}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("solve", "compare"))
    parser.add_argument("cases", nargs="*", metavar="CASE", help="all unless named")
    parser.add_argument("--seconds", type=float, help="of CPU time, of each case; 600 to solve, 10 to compare")
    arguments = parser.parse_args()
    cases = [case for case in CASES if not arguments.cases or case.name in arguments.cases]
    if arguments.what == "solve":
        solve_all(cases, arguments.seconds or 600)
    else:
        compare(cases, arguments.seconds or 10)


if __name__ == "__main__":
    main()
