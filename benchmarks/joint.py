"""python benchmarks/joint.py [compare|parts] [--models vlm_s,vlm_m,vlm_l,t2v_s,t2v_l] [--iterations 4]
[--evaluations 8000] [--microbatches 64]

What it is worth to choose the groups of samples together with their order (`planner.search.regroup`): whole
iterations on one replica, memory options chosen within 90 % of the devices, plans searched by one thread.

compare    simulated seconds of the pipeline and seconds of CPU: the sequence (groups by rule, then the order) with a
           budget of evaluations, with twice as many, and the joint search with the same budget. In the end the
           geometric mean, the best and the worst ratio of the joint search to the longer sequence, and to the other one
parts      all combinations of parts switched on and off: seconds relative to all of them together, geometric mean over
           the models, then what each part is worth beside all others (all without it, over all) for each model. Parts:
           assignment `balanced` (no clips), sub-microbatches, the search of the order, split backwards, memory options,
           joint groups
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from statistics import geometric_mean

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
LONGER = 2
"""Times the budget with which the sequence takes at least as long as the joint search."""
KEYS = {
    "assignment": None,
    "sub-microbatches": "planner.search.sub_microbatch",
    "order": "planner.search.reorder",
    "split": "planner.search.split_backward",
    "memory": "planner.search.memory",
    "groups": "planner.search.regroup",
}
"""Part -> its switch in the config."""


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
def drawn(name: str, microbatches: int, number: int) -> IterationMeta:
    job = Model(name, microbatches).job
    return draw(usual_workload(job), TypicalSizes.of(job), seed=0, iteration=APART * number)


@cache
def balanced(name: str, microbatches: int, number: int) -> IterationMeta:
    """The same samples in other microbatches."""
    job = Model(name, microbatches, overrides=('assignment.policy="balanced"',)).job
    assigner = StepAssigner.of(job, [make_job(job)])
    assert assigner is not None
    return assigner.reassigned([drawn(name, microbatches, number)])[0]


def compare(names: Sequence[str], iterations: int, evaluations: int, microbatches: int) -> None:
    print(
        f"{'model':6s} {'it':>3s} {'sequence':>17s} {f'{LONGER} x budget':>17s} {'joint':>17s}   ratios to both, groups"
    )
    ratios: dict[str, list[tuple[float, float]]] = {}
    for name, number in product(names, range(iterations)):
        meta, row = drawn(name, microbatches, number), []
        for times, groups in ((1, "false"), (LONGER, "false"), (1, "true")):
            model = Model(name, microbatches, times * evaluations, (f"planner.search.regroup={groups}",))
            found, result, cpu_s = model.plan(meta, number)
            row.append((result.makespan_s, cpu_s))
        same, longer = (row[2][0] / row[i][0] for i in (0, 1))
        ratios.setdefault(name, []).append((longer, same))
        figures = " ".join(f"{seconds:9.3f} ({cpu_s:5.1f})" for seconds, cpu_s in row)
        grouping = found.grouping
        words = "as given" if grouping is None else (
            f"{len(found.grouped_meta.microbatches)} microbatches, works of {grouping.sub_microbatch_size}"
        )  # fmt: skip
        print(f"{name:6s} {number:3d} {figures}   {same:.4f} {longer:.4f} {words}", flush=True)
    for name, found_ratios in [*ratios.items(), ("all", [pair for own in ratios.values() for pair in own])]:
        for label, of in zip((f"{LONGER} x budget", "same budget"), zip(*found_ratios, strict=True), strict=True):
            print(
                f"{name:6s} joint over sequence, {label:12s}: {geometric_mean(of):.4f}, {min(of):.4f} .. {max(of):.4f}"
            )


def parts(names: Sequence[str], iterations: int, evaluations: int, microbatches: int, switched: Sequence[str]) -> None:
    seconds: dict[tuple[str, tuple[bool, ...]], float] = {}
    everything = (True,) * len(KEYS)
    combinations = list(product(*((True, False) if part in switched else (True,) for part in KEYS)))
    for name, switches in product(names, combinations):
        words = [f"{key}={str(on).lower()}" for key, on in zip(KEYS.values(), switches, strict=True) if key]
        model, assigns = (
            Model(name, microbatches, evaluations, tuple(words)),
            switches[0] and not name.startswith("t2v"),
        )
        if name.startswith("t2v") and not switches[0]:  # combinations with it come first
            seconds[name, switches] = seconds[name, (True, *switches[1:])]
            continue
        batch = balanced if assigns else drawn
        of = [model.plan(batch(name, microbatches, i), i)[1].makespan_s for i in range(iterations)]
        seconds[name, switches] = geometric_mean(of)
    head = " ".join(f"{part[:10]:>10s}" for part in KEYS)
    print(f"{head} {'all models':>10s} " + " ".join(f"{name:>7s}" for name in names))
    for switches in combinations:
        ratios = [seconds[name, switches] / seconds[name, everything] for name in names]
        shown = " ".join(f"{'on' if on else '-':>10s}" for on in switches)
        print(f"{shown} {geometric_mean(ratios):10.4f} " + " ".join(f"{ratio:7.4f}" for ratio in ratios))
    print("beside all others:")
    for index, part in enumerate(KEYS):
        if part not in switched:
            continue
        without = (*everything[:index], False, *everything[index + 1 :])
        ratios = [seconds[name, without] / seconds[name, everything] for name in names]
        print(f"{part:18s} {geometric_mean(ratios):7.4f}  " + " ".join(f"{ratio:7.4f}" for ratio in ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", nargs="?", choices=("compare", "parts"), default="compare")
    parser.add_argument("--models", default=",".join(CLUSTERS))
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--evaluations", type=int, default=8000)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--switched", default=",".join(KEYS), help="parts that are switched; others are on")
    asked = parser.parse_args()
    warm()
    names = asked.models.split(",")
    if asked.section == "compare":
        compare(names, asked.iterations, asked.evaluations, asked.microbatches)
    else:
        parts(names, asked.iterations, asked.evaluations, asked.microbatches, asked.switched.split(","))


if __name__ == "__main__":
    main()
