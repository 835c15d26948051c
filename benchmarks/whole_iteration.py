"""python benchmarks/whole_iteration.py

What simulating one whole iteration costs on one core: milliseconds of CPU time, median over different iterations of
the workload `mix`, after one that warms up. `works and costs`: from the metadata to the planning problem; `order`:
making the schedule's plan; `check`: proving it; `timeline`: simulating it; `whole`: an iteration by
`IterationSimulator`, all of these and what surrounds the pipeline.
"""

import argparse
import dataclasses
import statistics
import time

from mmtrain.config import config
from mmtrain.costs.machine import Machine
from mmtrain.modality.typical import TypicalSizes
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.plan import check
from mmtrain.schedule.simulate import simulate
from mmtrain.simulator.whole_iteration import IterationSimulator
from mmtrain.simulator.workloads import draw

REPETITIONS = 9
JOBS = (("vlm_s", "h800x16"), ("vlm_l", "h800x64"), ("vlm_xl_16k", "h100x16384"))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, cluster in JOBS:
        job = config.load(f"{name}.toml", [f"planner.hardware={cluster}"])
        network = Machine.of(job).network
        bins = TypicalSizes.of(job)
        batches = [draw("mix", bins, seed=0, iteration=i) for i in range(REPETITIONS + 1)]
        for schedule in ("1F1B", "interleave"):
            parallelism = dataclasses.replace(job.parallelism, pipeline_parallel_schedule=schedule)
            simulator = IterationSimulator.of(dataclasses.replace(job, parallelism=parallelism), network)
            figures: dict[str, list[float]] = {}
            for meta in batches:
                times = [time.process_time()]
                _, problem = IterationPlanner(simulator.jobs[0]).problem(meta)
                times.append(time.process_time())
                plan = CATALOGUE[schedule].make(problem)
                times.append(time.process_time())
                check(plan, problem)
                times.append(time.process_time())
                simulate(problem, plan)
                times.append(time.process_time())
                simulator.simulate([meta])
                times.append(time.process_time())
                for i, part in enumerate(("works and costs", "order", "check", "timeline", "whole")):
                    figures.setdefault(part, []).append(1e3 * (times[i + 1] - times[i]))
            actions = sum(map(len, plan.orders))
            shown = "  ".join(f"{part} {statistics.median(v[1:]):.1f}" for part, v in figures.items())
            print(f"{name:10s} {schedule:10s} {actions} actions, ms: {shown}  (first whole {figures['whole'][0]:.1f})")


if __name__ == "__main__":
    main()
