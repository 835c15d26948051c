"""python benchmarks/planning.py [--repetitions 15]

What planning one iteration costs on one core: milliseconds of CPU time for the works and costs, the checked and
simulated plan, the lowering and the transport check, for 4 pipeline ranks x 16 microbatches of the model
of debug_vlm.toml. Prints minimum, median and maximum over the repetitions.
"""

import argparse
import dataclasses
import statistics
import time
from pathlib import Path

from mmtrain.config import config
from mmtrain.modality.metadata import DocumentMeta, ImageMeta, IterationMeta, MicrobatchMeta
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.make_plan import make_plan
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.passes.lower import lower
from mmtrain.schedule.transport import check_transport
from mmtrain.simulator.make_job import make_job


def batch() -> IterationMeta:
    """16 microbatches of 256 tokens with 0 to 6 images of 8 x 8 patches."""
    microbatches = []
    for m in range(16):
        images = tuple(ImageMeta(sample=m, index=i, grid=(1, 8, 8), num_tokens=16, start=16 * i) for i in range(m % 7))
        document = DocumentMeta(sample=m, num_tokens=256, num_targets=20, images=images)
        microbatches.append(MicrobatchMeta(documents=(document,)))
    return IterationMeta(microbatches=tuple(microbatches))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15)
    repetitions = parser.parse_args().repetitions
    root = Path(__file__).resolve().parent.parent
    job = config.load(root / "configs" / "debug_vlm.toml", ["parallelism.pipeline_parallel_degree=4"])
    meta = batch()
    for schedule in ("1F1B", "interleave"):
        planner = IterationPlanner(dataclasses.replace(make_job(job), schedule=CATALOGUE[schedule]))
        figures: dict[str, list[float]] = {}
        for _ in range(repetitions + 1):
            times = [time.process_time()]
            _, problem = planner.problem(meta)
            times.append(time.process_time())
            plan = make_plan(problem, schedule).plan
            times.append(time.process_time())
            program = lower(plan, problem, sharded=False)
            times.append(time.process_time())
            check_transport(program)
            times.append(time.process_time())
            for i, name in enumerate(("works and costs", "make_plan", "lower", "check_transport")):
                figures.setdefault(name, []).append(1e3 * (times[i + 1] - times[i]))
        print(f"{schedule}: {sum(map(len, program.actions))} lowered actions")
        for name, values in figures.items():
            kept = values[1:]  # the first repetition warms up
            print(f"  {name:16s} ms: min {min(kept):.1f}  median {statistics.median(kept):.1f}  max {max(kept):.1f}")


if __name__ == "__main__":
    main()
