"""python benchmarks/joint.py [compare|parts] [--models vlm_s,vlm_m,vlm_l,t2v_s,t2v_l] [--iterations 4]
[--evaluations 8000] [--microbatches 64] [--switched PARTS] [--store FILE]

What it is worth to choose the groups of samples together with their order (`planner.search.regroup`): whole
iterations on one replica, memory options chosen within 90 % of the devices, plans searched by one thread.

compare    simulated seconds of the pipeline and seconds of CPU: the sequence (groups by rule, then the order) with a
           budget of evaluations, the joint search with the same budget, and the sequence with as many evaluations as
           take the CPU time of the joint search. In the end the geometric mean, the best and the worst ratio of the
           joint search to the sequence of the same time, and to that of the same budget
parts      all 2^7 combinations of parts switched on and off, on two replicas of which the slower one counts: seconds
           relative to all of them together. Then for each model what each part is worth next to all others (all without
           it, over all), alone (none, over it alone), and in the mean over all orders in which parts can be added (the
           Shapley value: the product over all parts is none over all); and how far parts replace each other (mean over
           all combinations of the others; below 1: both together are worth less than the product of their worths).
           Parts: assignment `balanced` over replicas and microbatches (no clips), sub-microbatches, the search of the
           order, split backwards, memory options, joint groups, blocks. `--store FILE` keeps seconds, so that the next
           call goes on
"""

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations as combinations_of
from itertools import product
from pathlib import Path
from statistics import fmean, geometric_mean

from mmtrain.config import config
from mmtrain.config.config import Config
from mmtrain.modality.metadata import IterationMeta
from mmtrain.modality.typical import TypicalSizes
from mmtrain.planner.assignment.step_assigner import StepAssigner
from mmtrain.planner.iteration import Iteration, IterationPlanner
from mmtrain.planner.joint import search_iteration
from mmtrain.planner.result import PlanResult
from mmtrain.planner.search.search import search, warm
from mmtrain.planner.search_settings import search_options, search_seed
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.typical_iterations import usual_workload
from mmtrain.simulator.workloads import draw

CLUSTERS = {"vlm_s": "h800x16", "vlm_m": "h800x32", "vlm_l": "h800x64", "t2v_s": "h800x16", "t2v_l": "h800x64"}
APART = 7
"""Iterations of a workload between two that are planned."""
Figures = tuple[float, float]
"""Simulated seconds of a plan, and CPU seconds in which it was found."""
KEYS = {
    "assignment": None,
    "sub-microbatches": "planner.search.sub_microbatch",
    "order": "planner.search.reorder",
    "split": "planner.search.split_backward",
    "memory": "planner.search.memory",
    "groups": "planner.search.regroup",
    "blocks": "planner.search.braid",
}
"""Part -> its switch in the config."""
REPLICAS = 2
NOTABLE = 0.01
Switches = tuple[bool, ...]
"""[part] -> whether it is on."""


@dataclass(frozen=True)
class Model:
    """One of the jobs."""

    name: str
    microbatches: int
    evaluations: int = 1
    overrides: tuple[str, ...] = ()

    @property
    def job(self) -> Config:
        """With memory options."""
        words = [
            f'planner.hardware="{CLUSTERS[self.name]}"',
            'activation_checkpoint.mode="none"',
            f"planner.search.budget_evaluations={self.evaluations}",
            f"training.global_batch_size={self.microbatches}",
            *self.overrides,
        ]
        return config.load(f"{self.name}.toml", words)

    def plan(self, meta: IterationMeta, number: int) -> tuple[Iteration, PlanResult, float]:
        """An iteration, its plan, and the seconds of CPU of its search and of making its problem."""
        planner, section = IterationPlanner(make_job(self.job)), self.job.planner
        options = search_options(section, seed=search_seed(0, number), threads=1)
        iteration = planner.prepare(meta, searched=True)
        start = time.process_time()
        planner.problem(meta, searched=True)
        found, result = search_iteration(planner, iteration, options, search)
        return found, result, time.process_time() - start


@cache
def drawn(name: str, microbatches: int, number: int, replica: int = 0) -> IterationMeta:
    job = Model(name, microbatches).job
    return draw(usual_workload(job), TypicalSizes.of(job), seed=0, iteration=APART * number, replica=replica)


@cache
def balanced(name: str, microbatches: int, number: int) -> list[IterationMeta]:
    """[replica] -> its batch, the same samples in other microbatches."""
    job = Model(name, microbatches, overrides=('assignment.policy="balanced"',)).job
    assigner = StepAssigner.of(job, [make_job(job)])
    assert assigner is not None
    return assigner.reassigned([drawn(name, microbatches, number, replica) for replica in range(REPLICAS)])


def compare(names: Sequence[str], iterations: int, evaluations: int, microbatches: int) -> None:
    print(f"{'model':6s} {'it':>3s} {'sequence':>17s} {'joint':>17s} {'sequence, same CPU':>26s}   ratios, groups")
    ratios: dict[str, list[tuple[float, float]]] = {}
    for name, number in product(names, range(iterations)):
        meta = drawn(name, microbatches, number)

        def sequence(budget: int, name: str = name, meta: IterationMeta = meta, number: int = number) -> Figures:
            _, result, cpu_s = Model(name, microbatches, budget, (_groups(False),)).plan(meta, number)
            return result.makespan_s, cpu_s

        found, result, joint_cpu_s = Model(name, microbatches, evaluations, (_groups(True),)).plan(meta, number)
        joint_s, given = result.makespan_s, sequence(evaluations)
        longer, budget = given, evaluations
        for _ in range(2):  # some of the time does not depend on the budget
            budget = max(evaluations, round(budget * joint_cpu_s / longer[1]))
            longer = sequence(budget)
        ratios.setdefault(name, []).append((joint_s / longer[0], joint_s / given[0]))
        figures = " ".join(
            f"{seconds:9.3f} ({cpu_s:5.1f})" for seconds, cpu_s in (given, (joint_s, joint_cpu_s), longer)
        )
        grouping = found.grouping
        words = "as given" if grouping is None else (
            f"{len(found.grouped_meta.microbatches)} microbatches, works of {grouping.sub_microbatch_size}"
        )  # fmt: skip
        print(
            f"{name:6s} {number:3d} {figures} {budget:8d}   {joint_s / given[0]:.4f} {joint_s / longer[0]:.4f} {words}",
            flush=True,
        )
    for name, found_ratios in [*ratios.items(), ("all", [pair for own in ratios.values() for pair in own])]:
        for label, of in zip(("same CPU time", "same budget"), zip(*found_ratios, strict=True), strict=True):
            print(
                f"{name:6s} joint over sequence, {label:13s}: {geometric_mean(of):.4f}, {min(of):.4f} .. {max(of):.4f}"
            )


def _groups(joint: bool) -> str:
    return f"{KEYS['groups']}={str(joint).lower()}"


def parts(
    names: Sequence[str], iterations: int, evaluations: int, microbatches: int, switched: Sequence[str], store: str
) -> None:
    everything, seconds = (True,) * len(KEYS), _read(store)
    combinations = list(product(*((True, False) if part in switched else (True,) for part in KEYS)))
    logs: dict[str, dict[Switches, float]] = {name: {} for name in names}
    for name, switches in product(names, combinations):
        assigns = switches[0] and not name.startswith("t2v")
        bits = "".join(str(int(on)) for on in (assigns, *switches[1:]))
        key = f"{name} {iterations} {evaluations} {microbatches} {bits}"
        if key not in seconds:
            seconds[key] = _seconds(name, switches, assigns, iterations, evaluations, microbatches)
            if store:
                Path(store).write_text(json.dumps(seconds, indent=0))
        logs[name][switches] = math.log(seconds[key])
    head = " ".join(f"{part[:10]:>10s}" for part in KEYS)
    print(f"{head} {'all models':>10s} " + " ".join(f"{name:>7s}" for name in names))
    for switches in combinations:
        shown = " ".join(f"{'on' if on else '-':>10s}" for on in switches)
        print(shown + _row([of[switches] - of[everything] for of in logs.values()]))
    indices = [index for index, part in enumerate(KEYS) if part in switched]
    for title, worth in (("next to all others", _next_to_others), ("alone", _alone), ("Shapley value", _shapley)):
        print(f"{title}:")
        for index in indices:
            print(f"{list(KEYS)[index]:32s}" + _row([worth(of, index) for of in logs.values()]))
    print("pairs of which both together are worth more or less than the product of both:")
    for one, other in combinations_of(indices, 2):
        together = [_together(of, one, other) for of in logs.values()]
        if max(map(abs, together)) > NOTABLE:
            pair = f"{list(KEYS)[one]}, {list(KEYS)[other]}"
            print(f"{pair:32s}" + _row(together))


def _seconds(
    name: str, switches: Switches, assigns: bool, iterations: int, evaluations: int, microbatches: int
) -> float:
    """Seconds of the slower replica, geometric mean over iterations."""
    words = [f"{key}={str(on).lower()}" for key, on in zip(KEYS.values(), switches, strict=True) if key]
    model, slowest = Model(name, microbatches, evaluations, tuple(words)), list[float]()
    for number in range(iterations):
        given = [drawn(name, microbatches, number, replica) for replica in range(REPLICAS)]
        if assigns:
            given = balanced(name, microbatches, number)
        slowest.append(max(model.plan(meta, number)[1].makespan_s for meta in given))
    return geometric_mean(slowest)


def _read(store: str) -> dict[str, float]:
    return json.loads(Path(store).read_text()) if store and Path(store).exists() else {}


def _row(logs: Sequence[float]) -> str:
    """Ratios: of all models, and of each."""
    return f" {math.exp(fmean(logs)):10.4f} " + " ".join(f"{math.exp(one):7.4f}" for one in logs)


def _next_to_others(of: Mapping[Switches, float], part: int) -> float:
    everything = max(of)
    return of[_switched(everything, part)] - of[everything]


def _alone(of: Mapping[Switches, float], part: int) -> float:
    nothing = min(of)
    return of[nothing] - of[_switched(nothing, part)]


def _shapley(of: Mapping[Switches, float], part: int) -> float:
    switched = sum(one != other for one, other in zip(max(of), min(of), strict=True))
    total = 0.0
    for switches, without in of.items():
        if not switches[part]:
            before = sum(switches) - sum(min(of))
            share = math.factorial(before) * math.factorial(switched - 1 - before) / math.factorial(switched)
            total += share * (without - of[_switched(switches, part)])
    return total


def _together(of: Mapping[Switches, float], one: int, other: int) -> float:
    """How much more two parts are worth than each by itself, mean over all combinations of the others."""
    found = []
    for switches, neither in of.items():
        if not switches[one] and not switches[other]:
            first, second = _switched(switches, one), _switched(switches, other)
            found.append(of[first] + of[second] - neither - of[_switched(first, other)])
    return fmean(found)


def _switched(switches: Switches, part: int) -> Switches:
    """The same, but one part."""
    return (*switches[:part], not switches[part], *switches[part + 1 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", nargs="?", choices=("compare", "parts"), default="compare")
    parser.add_argument("--models", default=",".join(CLUSTERS))
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--evaluations", type=int, default=8000)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--switched", default=",".join(KEYS), help="parts that are switched; others are on")
    parser.add_argument("--store", default="", help="file of seconds, of which only missing ones are searched")
    asked = parser.parse_args()
    warm()
    names = asked.models.split(",")
    if asked.section == "compare":
        compare(names, asked.iterations, asked.evaluations, asked.microbatches)
    else:
        switched = asked.switched.split(",")
        parts(names, asked.iterations, asked.evaluations, asked.microbatches, switched, asked.store)


if __name__ == "__main__":
    main()
