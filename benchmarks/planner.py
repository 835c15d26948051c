"""python benchmarks/planner.py [SECTION ...] [--models vlm_s,vlm_m,vlm_l,t2v_l] [--effort 1.0]

What the planner's search does and how well, on problems of VLM-S, M and L with 64 microbatches, memory options and
limits (see planner_problems.py): "reference" ones, or of our cost model. Sections, all unless named:

speed      evaluations a second on one thread and on two: interleaving alone, and the whole objective; how many of them
           are moves that are known to change nothing
gap        how far plans are above the lower bound after 1 and 5 seconds on two threads, whole and split backwards
seeds      the same after 1 second, and after a number of evaluations, over six seeds
memory     milliseconds of the memory choice of one rank, and how far it is above its bound
start      seconds of import, of the first search in a process with and without numba's cache
strategies gap of the strategies at equal evaluations, two seeds
progress   the best plan by the number of evaluations, of each strategy (DIP, figure 11)
ablation   iteration time of baselines and with each part of the planner switched on (DIP, table 5)
scaling    seconds to within 1 % of the best plan found, by microbatches (DIP, figure 12)

`progress` is about VLM-L, `scaling` about VLM-S. --effort: part of all seconds, evaluations and seeds that is spent;
figures mean nothing below 1.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from blind_chains import BLIND
from planner_problems import problem, reference

from mmtrain.planner.bound import lower_bound_s
from mmtrain.planner.make_plan import make_plan
from mmtrain.planner.memory_bound import memory_bound_s
from mmtrain.planner.search.evaluate import anneal, choose, evaluate, fit_memory, start_chain
from mmtrain.planner.search.instance import Searched
from mmtrain.planner.search.kernels.arrays import NEEDS_B, Chain
from mmtrain.planner.search.orders import by_component, component_orders
from mmtrain.planner.search.search import search, warm
from mmtrain.planner.search.search_options import CHAINS, SearchOptions
from mmtrain.planner.search.search_run import ITERATIONS
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.plan import Plan, check
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.simulate import simulate

MODELS = ("vlm_s", "vlm_m", "vlm_l")
"""Those with a reference problem."""


class Sizes(NamedTuple):
    """What is measured, and with how much effort."""

    models: tuple[str, ...]
    effort: float

    @property
    def referenced(self) -> list[str]:
        """The models with a reference problem."""
        return [name for name in self.models if name in MODELS]

    def of(self, count: int) -> int:
        """A count at this effort."""
        return max(1, round(self.effort * count))


def makespan(found: object) -> float:
    timeline = found.timeline  # type: ignore[attr-defined]
    return float(timeline.makespan_s) if timeline else float("nan")


# ---------------------------------------------------------------------------------------------- speed


def speed(sizes: Sizes) -> None:
    seconds, moves = 1.5 * sizes.effort, sizes.of(1000)
    head = f"{'model':8s} {'actions':>8s} {'objective':>17s} {'1 thread':>9s} {'2 threads':>10s} {'ns an action':>13s}"
    print(f"{head} {'not decoded':>12s}")
    for name in sizes.referenced:
        searched = Searched.of(reference(name))
        actions = len(searched.nodes) + int((searched.arrays.node[:, NEEDS_B] > 0).sum())
        for whole, split in ((False, False), (False, True), (True, False), (True, True)):
            given = searched
            if not whole:  # nothing to choose
                arrays = searched.arrays._replace(limit=np.full_like(searched.arrays.limit, np.inf))
                given = replace(searched, arrays=arrays)
            rates = [_rate(given, split=split, threads=n, seconds=seconds) for n in (1, 2)]
            words = ("whole" if whole else "interleave") + (", split" if split else "")
            row = f"{name:8s} {actions:8d} {words:>17s} {rates[0]:9.0f} {rates[1]:10.0f}"
            print(
                f"{row} {1e9 / rates[0] / actions:13.0f} {_left_out(given, split=split, moves=moves):12.0%}", flush=True
            )


def _chain(searched: Searched, *, split: bool, seed: int) -> Chain:
    order = by_component(searched, component_orders(searched)[0])
    return start_chain(searched, order, searched.decoder(0.5, 0.25, 0.5, False, split), 1e9, seed)


def _left_out(searched: Searched, *, split: bool, moves: int) -> float:
    """The part of a chain's moves that are taken without decoding them: the order changes, its records stay."""
    w, chain, found = searched.workspace(), _chain(searched, split=split, seed=1), 0
    for _ in range(moves):
        before, here = chain.at.copy(), int(chain.current[0])
        anneal(searched, w, chain, 1, (1e-3, 1e-3), ITERATIONS, can_split=split, can_braid=False, reorder=True)
        found += int(chain.current[0]) == here and bool((chain.at != before).any())
    return found / moves


def _rate(searched: Searched, *, split: bool, threads: int, seconds: float) -> float:
    """Evaluations a second of an annealing chain on each thread."""

    def work(seed: int) -> int:
        w = searched.workspace()
        chain = _chain(searched, split=split, seed=seed)
        done, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            anneal(searched, w, chain, 20, (1e-3, 1e-3), ITERATIONS, can_split=split, can_braid=False, reorder=True)
            done += 20
        return done

    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        done = sum(pool.map(work, range(1, threads + 1)))
        return done / (time.perf_counter() - start)


# ---------------------------------------------------------------------------------------------- gap


def gap(sizes: Sizes) -> None:
    print(
        f"{'problem':24s} {'backwards':>9s} {'first':>8s} {'1 s':>8s} {'5 s':>8s} {'5 s, memory':>12s}   "
        "% above the lower bound of its kind, the last above that which counts memory"
    )
    named = [(f"{name}, reference", reference(name)) for name in sizes.referenced]
    named += [(f"{name}, our cost model", problem(name)) for name in sizes.models]
    for label, given in named:
        for split in (False, True):
            bound = lower_bound_s(given, split=split)
            found = [makespan(make_plan(given, "interleave"))]
            for seconds in (1.0, 5.0):
                options = SearchOptions(budget_evaluations=0, budget_s=sizes.effort * seconds, threads=2, split=split)
                found.append(makespan(search(given, options)))
            row = " ".join(f"{100 * (value / bound - 1):8.2f}" for value in found)
            row += f" {100 * (found[-1] / memory_bound_s(given, split=split) - 1):12.2f}"
            print(f"{label:24s} {'split' if split else 'whole':>9s} {row}", flush=True)


def seeds(sizes: Sizes) -> None:
    print("% above the lower bound of its kind: mean and worst of 6 seeds")
    second = sizes.effort
    for name in sizes.referenced:
        given, evaluations = reference(name), sizes.of({"vlm_s": 6_500, "vlm_m": 17_500, "vlm_l": 4_000}[name])
        row = [
            ("whole, 1 s", SearchOptions(budget_evaluations=0, budget_s=second, threads=2, split=False)),
            ("split, 1 s", SearchOptions(budget_evaluations=0, budget_s=second, threads=2)),
            (f"split, {evaluations:,} evaluations", SearchOptions(budget_evaluations=evaluations, threads=2)),
        ]
        for label, options in row:
            bound = lower_bound_s(given, split=options.split)
            found = [
                100 * (makespan(search(given, replace(options, seed=seed))) / bound - 1) for seed in range(sizes.of(6))
            ]
            print(f"{name}, {label:28s} {np.mean(found):5.2f} {max(found):5.2f}", flush=True)


# ---------------------------------------------------------------------------------------------- memory


def memory(sizes: Sizes) -> None:
    print(f"{'model':8s} {'works a rank':>12s} {'iterations':>11s} {'ms a rank':>10s} {'% above its bound':>18s}")
    times = sizes.of(20)
    for name in sizes.referenced:
        searched = Searched.of(reference(name))
        w, ranks = searched.workspace(), searched.arrays.limit.size
        order = by_component(searched, component_orders(searched)[0])
        evaluate(searched, w, order, searched.decoder(0.5, 0.25, 0.5, False, False), 1)
        for iterations in (20, 50, 200):
            start = time.perf_counter()
            for _ in range(times):
                gap = choose(searched, w, iterations)
            taken, works = (time.perf_counter() - start) / times / ranks, len(searched.nodes) // ranks
            print(f"{name:8s} {works:12d} {iterations:11d} {1e3 * taken:10.2f} {100 * gap:18.3f}")


# ---------------------------------------------------------------------------------------------- start


def start(sizes: Sizes) -> None:
    code = (
        "import time; t = time.perf_counter()\nfrom mmtrain.planner.search.search import warm\n"
        "a = time.perf_counter() - t\nwarm(); print(a, time.perf_counter() - t - a)"
    )
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "NUMBA_CACHE_DIR": folder}
        for words in ("without a cache", "with it"):
            done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
            first, second = map(float, done.stdout.split())
            print(f"{words:16s} import {first:.2f} s, first search {second:.2f} s")


# ---------------------------------------------------------------------------------------------- strategies


def strategies(sizes: Sizes) -> None:
    budgets = [sizes.of(count) for count in (100, 400, 1600)]
    print(f"% above the lower bound of whole backwards, mean of 2 seeds, by evaluations {budgets}")
    for name in sizes.referenced:
        given = reference(name)
        for strategy in CHAINS:
            row = []
            for budget in budgets:
                options = SearchOptions(budget_evaluations=budget, threads=2, strategy=strategy, split=False)
                found = [makespan(search(given, replace(options, seed=seed))) for seed in (0, 1)]
                row.append(100 * (float(np.mean(found)) / lower_bound_s(given, split=False) - 1))
            print(f"{name:8s} {strategy:8s} " + " ".join(f"{value:7.2f}" for value in row))


def progress(sizes: Sizes) -> None:
    given = reference("vlm_l")
    bound = lower_bound_s(given)
    budgets = [sizes.of(count) for count in (10, 30, 100, 300, 1000, 3000)]
    print(f"vlm_l, 64 microbatches: % above the lower bound by evaluations {budgets}")
    for strategy in CHAINS:
        found = [search(given, SearchOptions(budget_evaluations=b, threads=2, strategy=strategy)) for b in budgets]
        print(f"{strategy:8s} " + " ".join(f"{100 * (makespan(result) / bound - 1):7.2f}" for result in found))


# ---------------------------------------------------------------------------------------------- ablation


def ablation(sizes: Sizes) -> None:
    print("seconds of the pipeline of one iteration, and relative to all of it; 64 microbatches")
    budget = SearchOptions(budget_evaluations=sizes.of(2000), threads=2)
    for name in sizes.referenced:
        modular = problem(name)
        rows: list[tuple[str, float]] = []
        for partition in ("mixed-parameters", "mixed-latency"):
            for passes in (1, 2, 4):
                given = problem(name, segments=(0, passes), partition=partition)
                schedule = "1F1B" if passes == 1 else "Interleaved1F1B"
                rows.append((f"{partition}, {schedule}, v = {passes}", _static(given, schedule)))
        static = ("1F1B", "ZB-H1", "Optimus", "interleave")
        rows += [(f"segments, {schedule}", _static(modular, schedule)) for schedule in static]
        base = replace(budget, split=False, memory=False, reorder=False)
        rows += [
            ("interleaving, one memory option", makespan(search(modular, base))),
            ("+ order", makespan(search(modular, replace(base, reorder=True)))),
            ("+ memory options", makespan(search(modular, replace(base, reorder=True, memory=True)))),
            ("+ split backwards", makespan(search(modular, budget))),
        ]
        best = rows[-1][1]
        for label, seconds in rows:
            print(f"{name:8s} {label:40s} {seconds:8.3f} {seconds / best:7.3f}", flush=True)


def _static(given: PlanningProblem, schedule: str) -> float:
    """The makespan of a named schedule with the best memory options for its orders; nan: none fits, or no such one."""
    free = replace(given, memory_limit_bytes=(None,) * given.graph.num_ranks)
    if CATALOGUE[schedule].least_passes > len(given.graph.stage_rank) // given.graph.num_ranks:
        return float("nan")
    made = make_plan(free, schedule).plan
    assert made is not None
    fitted = fit_memory(given, Plan(given.graph, made.orders))
    if fitted is None:
        return float("nan")
    check(fitted, given)
    return simulate(given, fitted).makespan_s


# ---------------------------------------------------------------------------------------------- scaling


def scaling(sizes: Sizes) -> None:
    print("vlm_s: evaluations and seconds after which a plan is within 1 % of the best one of 4000 evaluations")
    for microbatches in (8, 16, 32, 64, 128, 256):
        given = problem("vlm_s", microbatches)
        budgets = [sizes.of(count) for count in (1, 30, 60, 120, 250, 500, 1000, 2000, 4000)]
        found, taken = [], []
        for budget in budgets:
            begin = time.perf_counter()
            found.append(makespan(search(given, SearchOptions(budget_evaluations=budget, threads=2))))
            taken.append(time.perf_counter() - begin)
        near = next(i for i, value in enumerate(found) if value <= 1.01 * min(found))
        assert all(later <= earlier * 1.02 for earlier, later in pairwise(found))
        print(f"{microbatches:4d} microbatches: {budgets[near]:5d} evaluations, {taken[near]:6.2f} s")


SECTIONS: dict[str, Callable[[Sizes], None]] = {
    "speed": speed,
    "gap": gap,
    "seeds": seeds,
    "memory": memory,
    "start": start,
    "strategies": strategies,
    "progress": progress,
    "ablation": ablation,
    "scaling": scaling,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", metavar="SECTION", nargs="*", choices=(*SECTIONS, []), help="default: all")
    parser.add_argument("--models", default=",".join((*MODELS, "t2v_l")))
    parser.add_argument("--effort", type=float, default=1.0)
    given = parser.parse_args()
    sizes = Sizes(tuple(given.models.split(",")), given.effort)
    warm()
    CHAINS.update(BLIND)
    for name in given.sections or SECTIONS:
        print(f"## {name}")
        SECTIONS[name](sizes)
        print(flush=True)


if __name__ == "__main__":
    main()
