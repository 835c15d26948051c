"""python benchmarks/same_plans.py [--random N] [--evaluations N] [--out FILE]

One digest for each group of cases that a change of the schedule package must not change: the plans of all named
schedules on a grid of chains and on random work graphs, their simulated timelines (exact floats), what idle ranks
waited for, lowered programs and when sends are released, the text of each error, and fixed-seed searches on the
example problems. Run it on two commits (the second by PYTHONPATH) and compare the lines:

    python benchmarks/same_plans.py > after.txt
    PYTHONPATH=../before python benchmarks/same_plans.py > before.txt; diff before.txt after.txt

`--out` writes one line a case, so that the first case that differs can be found by diff.
"""

import argparse
import hashlib
import random
from collections.abc import Callable, Iterator
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from mmtrain.errors import PlanError
from mmtrain.planner.bound import lower_bound_s
from mmtrain.planner.search.search import search
from mmtrain.planner.search.search_options import SearchOptions
from mmtrain.schedule.chain import plain_chain
from mmtrain.schedule.graph import ModuleStages, Work
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.library.forward_only import forward_only
from mmtrain.schedule.passes.lower import check_edges, lower
from mmtrain.schedule.passes.release import releases
from mmtrain.schedule.passes.split import split_backwards
from mmtrain.schedule.plan import Plan, check, held_bytes
from mmtrain.schedule.problem import P2P, Option, PlanningProblem
from mmtrain.schedule.simulate import simulate
from mmtrain.schedule.transport import check_transport
from mmtrain.schedule.view.waits import waits

PROBLEMS = sorted((Path(__file__).parent / "problems").glob("*.json.gz"))


def random_problem(seed: int) -> PlanningProblem:
    """Up to two modules that feed a last one: absent modalities, frozen stages, odd placements, memory limits."""
    rng = random.Random(seed)
    num_ranks, num_modules = rng.randint(1, 8), rng.randint(1, 3)
    v = rng.random() < 0.3
    modules: list[ModuleStages] = []
    stage_rank: list[int] = []
    for m in range(num_modules):
        turns = [s % num_ranks for s in range((2 if v else rng.randint(1, 3)) * num_ranks)]
        if v:
            turns[num_ranks:] = turns[num_ranks - 1 :: -1]
        elif rng.random() < 0.2:
            rng.shuffle(turns)
        first = len(stage_rank)
        stage_rank += turns
        modules.append(ModuleStages(name=f"m{m}", stages=tuple(range(first, len(stage_rank)))))
    works: list[Work] = []
    for microbatch in range(rng.randint(1, 12)):
        first = len(works)
        for m in range(num_modules - 1):
            works += [Work(module=m, microbatch=microbatch, sub_microbatch=i) for i in range(rng.randint(0, 3))]
        after = tuple(range(first, len(works)))
        works.append(Work(module=num_modules - 1, microbatch=microbatch, sub_microbatch=0, after=after))
    costs, index = _random_costs(rng, modules, works, forward_only=rng.random() < 0.1)
    output = [[rng.choice([0.0, 1e8])] * len(row) for row in index]
    return PlanningProblem.build(
        num_ranks=num_ranks,
        modules=modules,
        stage_rank=stage_rank,
        works=works,
        costs=costs,
        cost_index=index,
        output_bytes=output,
        p2p=P2P(latency_s=rng.choice([0.0, 0.1]), bytes_per_s=1e9),
        memory_limit_bytes=_random_limits(rng, num_ranks, modules, stage_rank, works, costs, index),
    )


def _random_costs(
    rng: random.Random, modules: list[ModuleStages], works: list[Work], *, forward_only: bool
) -> tuple[list[list[Option]], list[list[int]]]:
    def seconds() -> float:
        return rng.choice([0.0, 0.5, 1.0, 1.25, 3.0, rng.random()])

    frozen = [rng.random() < 0.3 for _ in modules]
    costs: list[list[Option]] = []
    index: list[list[int]] = []
    leaves: list[bool] = []
    for work in works:
        depth = len(modules[work.module].stages)
        begin = depth if frozen[work.module] else rng.choice([0, 0, 0, depth - 1])
        grad = not forward_only and any(leaves[w] for w in work.after)
        row = []
        for k in range(depth):
            grad = grad or (not forward_only and k >= begin)
            row.append(len(costs))
            weight = seconds() if grad and not frozen[work.module] else 0.0
            held = rng.choice([None, None, 0.0, 0.5, 3.0]) if grad else None
            costs.append(
                [
                    Option(
                        name=name,
                        forward_s=seconds(),
                        backward_input_s=seconds() + 0.25 if grad else 0.0,
                        backward_weight_s=weight,
                        activation_bytes=rng.choice([0.0, 1.0, 2.0, 5.0]) * share,
                        weight_bytes=held,
                        restored_bytes=rng.choice([0.0, 0.0, 1.0]) if grad and name == "recompute" else 0.0,
                    )
                    for name, share in (("keep", 1.0), ("recompute", 0.5))[: rng.randint(1, 2)]
                ]
            )
        leaves.append(grad)
        index.append(row)
    return costs, index


def _random_limits(
    rng: random.Random,
    num_ranks: int,
    modules: list[ModuleStages],
    stage_rank: list[int],
    works: list[Work],
    costs: list[list[Option]],
    index: list[list[int]],
) -> list[float | None] | None:
    if rng.random() < 0.4:
        return None
    most = [0.0] * num_ranks
    for microbatch in {w.microbatch for w in works}:
        sums = [0.0] * num_ranks
        for work, row in zip(works, index, strict=True):
            for k, stage in enumerate(modules[work.module].stages):
                if work.microbatch == microbatch:
                    sums[stage_rank[stage]] += max(o.activation_bytes + o.restored_bytes for o in costs[row[k]])
        most = [max(a, b) for a, b in zip(most, sums, strict=True)]
    return [None if rng.random() < 0.1 else amount * rng.choice([0.7, 1.0, 1.3, 2.0]) for amount in most]


def facts(problem: PlanningProblem, make: Callable[[PlanningProblem], Plan]) -> Iterator[str]:
    """All that follows from a problem and a schedule, as text."""
    try:
        plan = make(problem)
    except PlanError as error:
        yield f"refused: {error}"
        return
    yield from plan_facts(problem, plan)


def plan_facts(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    yield str(plan)
    yield repr(sorted(plan.options.items()))
    try:
        check(plan, problem)
    except PlanError as error:
        yield f"over: {error}"
    timeline = simulate(problem, plan)
    yield repr([(r.rank, str(r.action), r.start_s, r.end_s) for r in timeline.rows])
    yield repr((timeline.stage_modules, timeline.memory, timeline.peak_bytes))
    yield repr(held_bytes(plan, problem))
    steps = [groupby(parts, key=itemgetter(0)) for parts in plan.parts]
    yield repr([(str(a), w) for rank in plan.run().ranks for _, a, w in next(steps[rank])[1]])
    rows = [timeline.of_rank(rank) for rank in range(plan.graph.num_ranks)]
    starts = [np.array([r.start_s for r in row]) for row in rows]
    ends = [np.array([r.end_s for r in row]) for row in rows]
    idle = waits(plan, starts, ends)
    yield repr([column.tolist() for column in (idle.rank, idle.start_s, idle.end_s, idle.action, idle.module)])
    try:
        check_edges(plan.graph)
    except PlanError as error:
        yield f"edges: {error}"
        return
    program = lower(plan, problem, sharded=True)
    check_transport(program)
    yield f"{program}\n{program.hash}"
    for rank in range(plan.graph.num_ranks):
        done = sorted(releases(program, rank).items())
        yield repr([(i, [(e.source, e.target, e.work, e.target_work, e.grad, f) for e, f in fs]) for i, fs in done])


def chains() -> Iterator[tuple[str, Iterator[str]]]:
    for name, schedule in CATALOGUE.items():
        for ranks in range(1, 9):
            for count in sorted({1, 2, 3, ranks, 2 * ranks, 2 * ranks + 1, 16}):
                for seconds in ((1.0, 1.0, 1.0), (1.0, 1.3, 0.7)):
                    for segments in (0, 3) if schedule.placement == "loop" and ranks in (2, 4) else (0,):
                        problem = plain_chain(
                            ranks, count, schedule, num_segments=segments, seconds=seconds, transfer_s=0.05
                        )
                        yield f"{name} {ranks} {count} {seconds} {segments}", facts(problem, schedule.make)


def graphs(count: int) -> Iterator[tuple[str, Iterator[str]]]:
    for seed in range(count):
        problem = random_problem(seed)
        if not problem.graph.has_any_backward:
            yield f"{seed} forward_only", facts(problem, forward_only)
            continue
        for name, schedule in CATALOGUE.items():
            yield f"{seed} {name}", facts(problem, schedule.make)
        for delay in (0, 3):

            def make(problem: PlanningProblem, delay: int = delay) -> Plan:
                return split_backwards(CATALOGUE["interleave"].make(problem), problem, delay)

            yield f"{seed} split {delay}", facts(problem, make)


def searches(count: int, evaluations: int) -> Iterator[tuple[str, Iterator[str]]]:
    def found(problem: PlanningProblem, options: SearchOptions) -> Iterator[str]:
        result = search(problem, options)
        yield f"{result.status} {result.message} {result.evaluations} {lower_bound_s(problem)!r}"
        if result.status != "infeasible":
            yield from plan_facts(problem, result.plan)

    for path in PROBLEMS:
        for strategy in ("anneal", "mcts"):
            options = SearchOptions(budget_evaluations=evaluations, seed=7, strategy=strategy)  # type: ignore[arg-type]
            yield f"{path.name} {strategy}", found(PlanningProblem.read(path), options)
    for seed in range(count // 10):
        yield f"random {seed}", found(random_problem(seed), SearchOptions(budget_evaluations=60, seed=seed))


def examples() -> Iterator[tuple[str, Iterator[str]]]:
    for path in PROBLEMS:
        problem = PlanningProblem.read(path)
        for name, schedule in CATALOGUE.items():
            yield f"{path.name} {name}", facts(problem, schedule.make)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, default=300, help="random work graphs")
    parser.add_argument("--evaluations", type=int, default=300, help="of each search")
    parser.add_argument("--groups", nargs="+", default=["chains", "graphs", "examples", "searches"])
    parser.add_argument("--every", type=int, default=1, help="only each n-th case of a group")
    parser.add_argument("--out", type=Path, help="file of one line a case")
    given = parser.parse_args()
    groups: dict[str, Iterator[tuple[str, Iterator[str]]]] = {
        "chains": chains(),
        "graphs": graphs(given.random),
        "examples": examples(),
        "searches": searches(given.random, given.evaluations),
    }
    out = given.out.open("w") if given.out else None
    for group in given.groups:
        whole: Any = hashlib.sha256()
        count = 0
        for label, texts in islice(groups[group], 0, None, given.every):
            digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
            line = f"{group} {label} {digest[:16]}"
            whole.update(line.encode())
            count += 1
            if out:
                print(line, file=out, flush=True)
        print(f"{group:9s} {count:6d} cases  {whole.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
