"""python benchmarks/partition.py [ITERATIONS]

What the ways to cut modules (`planner.partition`) come to on the VLM jobs of DIP, simulated on their clusters: mean
seconds of an iteration over batches that the search has not seen (workload `mix`, 4 iterations of 64 microbatches
unless told otherwise), the ratio to DIP's rule under the same schedule, and the seconds that cutting took on one core.
Mixed chains are cut once and, as for Megatron's interleaved schedule, twice a rank. All but the last column is
deterministic.
"""

import statistics
import sys
import time
from pathlib import Path

from mmtrain.config import config
from mmtrain.config.config import Config
from mmtrain.modality.typical import Bins
from mmtrain.planner.forecast.machine import Machine
from mmtrain.planner.forecast.whole_iteration import IterationSimulator
from mmtrain.planner.forecast.workloads import draw
from mmtrain.planner.iteration import IterationPlanner

ROOT = Path(__file__).resolve().parent.parent
JOBS = {"vlm_s": "h800x16", "vlm_m": "h800x32", "vlm_l": "h800x64"}
WAYS = {
    "dip": ("dip", 0),
    "search": ("search", 0),
    "mixed-parameters": ("mixed-parameters", 1),
    "mixed-parameters x 2": ("mixed-parameters", 2),
    "mixed-latency": ("mixed-latency", 1),
    "mixed-latency x 2": ("mixed-latency", 2),
}
"""Name -> (planner.partition, model.language.num_segments)."""
SEED = 1
"""Of the workload; the search draws with seed 0."""


def job_of(name: str, schedule: str, how: str, passes: int) -> Config:
    """A job with all segments, and the images of a vision work, left open."""
    return config.load(
        ROOT / "configs" / f"{name}.toml",
        [
            f"planner.hardware={JOBS[name]}",
            f"planner.partition={how}",
            "planner.enable=false",  # schedules are simulated as they are, so the search of segments has to do the same
            f"parallelism.pipeline_parallel_schedule={schedule}",
            f"model.language.num_segments={passes}",
            "model.encoder.num_segments=0",
            "model.encoder.sub_microbatch_size=0",
        ],
    )


def main() -> None:
    num_iterations = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    for name in JOBS:
        print(f"{name} on {JOBS[name]}")
        print(f"  {'schedule':12s} {'partition':21s} {'segments':>9s} {'iteration s':>12s} {'to dip':>7s} {'s':>7s}")
        for schedule in ("1F1B", "interleave"):
            reference = 0.0
            for label, (how, passes) in WAYS.items():
                job = job_of(name, schedule, how, passes)
                start = time.process_time()
                planner = IterationPlanner.of(job)
                cut_s = time.process_time() - start
                simulator = IterationSimulator.of(job, Machine.of(job).network)
                bins = Bins.of(job)
                metas = [draw("mix", bins, seed=SEED, iteration=i) for i in range(num_iterations)]
                seconds = statistics.fmean(simulator.simulate([meta])[0].iteration_s for meta in metas)
                reference = reference or seconds
                print(
                    f"  {schedule:12s} {label:21s} {planner.partition!s:>9s} {seconds:12.3f} "
                    f"{seconds / reference:7.3f} {cut_s:7.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
