"""python benchmarks/partition.py [PART] [--iterations N] [--jobs NAME,...] [KEY=VALUE ...]

What the ways to cut modules come to, simulated on batches that the search of a partition has not seen. All but seconds
of the processor is deterministic.

ways      `planner.partition` on the VLM jobs of DIP under two schedules: mean seconds of an iteration (workload `mix`,
          64 microbatches), the ratio to DIP's rule under the same schedule, and the seconds that cutting took on one
          core. Mixed chains are cut once and, as for Megatron's interleaved schedule, twice a rank
choices   every cut of a job, planned with the job's full budget, against the search's own estimates: how much longer
          iterations of the chosen cut are than those of the best one and of the best one of separated modules, rank
          correlation of the first and of the second look with the full budget over all cuts, and the seconds of the
          search on one core
variants  the same for the debug jobs with other numbers of ranks, microbatches and layers
seconds   of a fresh process, for all configs with their segments left open: CPU seconds of the imports, CPU and wall
          seconds of the search, and the chosen cut
mixtures  the chain that is best on `mix`, relative to the separated modules that are best on `mix`, on other workloads
"""

import argparse
import contextlib
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

from mmtrain.config import config
from mmtrain.config.config import Config
from mmtrain.config.model import section_of
from mmtrain.costs.machine import Machine
from mmtrain.errors import ConfigError
from mmtrain.modality.metadata import IterationMeta
from mmtrain.modality.typical import TypicalSizes
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.make_plan import JobMethod, make_plan
from mmtrain.planner.search_settings import search_seed
from mmtrain.simulator.cuts import MOST_SEGMENTS
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.typical_iterations import MOST_MICROBATCHES, TypicalIterations, usual_workload
from mmtrain.simulator.whole_iteration import IterationSimulator
from mmtrain.simulator.workloads import draw

ROOT = Path(__file__).resolve().parent.parent
JOBS = {"vlm_s": "h800x16", "vlm_m": "h800x32", "vlm_l": "h800x64"}
SHORT = ("debug_vlm", "debug_4d", "debug_lora", "debug_siglip_llama", "debug_t2v", "debug_text")
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
MIXTURES = ("image_text_pairs", "interleaved", "science_qa")
CHOICES = {**JOBS, "t2v_s": "h800x16", "t2v_l": "h800x64", **dict.fromkeys(SHORT, "")}
"""Job -> cluster; empty: costs are FLOPs."""


def job_of(name: str, schedule: str, how: str, passes: int) -> Config:
    """A job with all segments, and the images of a vision work, left open; no memory limit, as 1F1B keeps none."""
    return config.load(
        ROOT / "configs" / f"{name}.toml",
        [
            f"planner.hardware={JOBS[name]}",
            f"planner.partition={how}",
            "planner.memory_limit=",
            "planner.enable=false",  # schedules are simulated as they are, so the search of segments has to do the same
            f"parallelism.pipeline_parallel_schedule={schedule}",
            f"model.language.num_segments={passes}",
            "model.encoder.num_segments=0",
            "model.encoder.sub_microbatch_size=0",
        ],
    )


VARIANTS = [(2, 4, 3, 2), (2, 8, 3, 2), (2, 16, 6, 4), (4, 8, 10, 6), (4, 16, 12, 12), (4, 4, 14, 6), (2, 4, 8, 8)]
VARIANTS += [(4, 32, 16, 8), (8, 16, 30, 14)]
"""(pipeline ranks, microbatches, blocks of the language model, blocks of the other module)."""
DEPTH = {"debug_vlm": "depth", "debug_t2v": "num_layers", "debug_siglip_llama": "num_hidden_layers"}


def open_job(name: str, *keys: str) -> Config:
    """A job as configured, with all segments left open. Args: name: of a config, or config/variant."""
    name, _, variant = name.partition("/")
    path = ROOT / "configs" / f"{name}.toml"
    modules = config.load(path).model.cut_modules
    cluster = [f"planner.hardware={CHOICES[name]}"] if CHOICES[name] else []
    if variant:
        ranks, microbatches, *depths = map(int, variant.split("x"))
        cluster += [
            f"parallelism.pipeline_parallel_degree={ranks}",
            f"training.global_batch_size={microbatches}",
            *(
                f"{section_of(module)}.config={inline({**dict(modules[module].config), key: depth})}"
                for module, key, depth in zip(
                    ("language", *(module for module in modules if module != "language")),
                    ("num_hidden_layers", DEPTH[name]),
                    depths,
                    strict=True,
                )
            ),
        ]
    return config.load(path, [*cluster, *(f"{section_of(module)}.num_segments=0" for module in modules), *keys])


def inline(table: Mapping[str, object]) -> str:
    """A table in one line of TOML."""
    return "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in table.items()) + "}"


def cuts(name: str, keys: Sequence[str] = ()) -> Iterator[IterationPlanner]:
    """The planners of a job, one for each cut that the search may choose."""
    sections = [section_of(module) for module in open_job(name, *keys).model.cut_modules]
    ways = [
        [f"{section}.num_segments={count}" for section, count in zip(sections, counts, strict=True)]
        for counts in product(range(1, MOST_SEGMENTS + 1), repeat=len(sections))
    ]
    if len(sections) > 1:
        ways += [
            ["planner.partition=mixed-latency", f"model.language.num_segments={passes}"]
            for passes in range(1, MOST_SEGMENTS + 1)
        ]
    for way in ways:
        with contextlib.suppress(ConfigError):  # too few layers, or the limit leaves no room for activations
            yield IterationPlanner(make_job(open_job(name, *keys, *way)))


def planned_s(planner: IterationPlanner, metas: Sequence[IterationMeta]) -> float:
    """Mean seconds of iterations with the job's full budget; infinite: one has no plan."""
    seconds = []
    for step, meta in enumerate(metas):
        _, problem = planner.problem(meta, searched=True)
        method = JobMethod.searching(planner.job.schedule, planner.job.section, seed=search_seed(0, step))
        seconds.append(make_plan(problem, method).makespan_s)
    return statistics.fmean(seconds)


def ranks_of(values: Sequence[float]) -> list[int]:
    """[index] -> number of values that are smaller."""
    return [sum(other < value for other in values) for value in values]


def choices(names: Sequence[str], num_iterations: int, keys: Sequence[str]) -> None:
    """Prints how good the chosen cuts are."""
    print(
        f"{'job':29s} {'chosen':>9s} {'best':>9s} {'over it %':>9s} {'separated %':>11s} {'all %':>6s} "
        f"{'rho 1':>6s} {'rho 2':>6s} {'s':>6s}"
    )
    excess = []
    for name in names:
        job = open_job(name, *keys)
        metas = [
            draw(usual_workload(job), TypicalSizes.typical(job), seed=SEED, iteration=i) for i in range(num_iterations)
        ]
        planners = list(cuts(name, keys))
        seconds = {str(planner.job.partition): planned_s(planner, metas) for planner in planners}
        start = time.process_time()
        chosen = make_job(job)
        search_s = time.process_time() - start
        correlations = []
        for is_quick in (True, False):
            most = 2 * chosen.partition.num_ranks if is_quick else MOST_MICROBATCHES
            typical = TypicalIterations.draw(
                job, chosen.spec, chosen.costs, chosen.sub_microbatch_size, most_microbatches=most, is_quick=is_quick
            )
            judged = [typical.seconds(planner.job.partition) for planner in planners]
            correlations.append(statistics.correlation(ranks_of(judged), ranks_of(list(seconds.values()))))
        best = min(seconds, key=seconds.__getitem__)
        longest = max(value for value in seconds.values() if value < math.inf)
        best_separated = min(value for cut, value in seconds.items() if "chain" not in cut)
        own = seconds[str(chosen.partition)]
        over = [100 * (a / b - 1) for a, b in ((own, seconds[best]), (own, best_separated), (longest, seconds[best]))]
        excess.append(over)
        print(
            f"{name:29s} {chosen.partition!s:>9s} {best:>9s} {over[0]:9.2f} {over[1]:11.2f} {over[2]:6.1f} "
            f"{correlations[0]:6.2f} {correlations[1]:6.2f} {search_s:6.2f}",
            flush=True,
        )
        ordered = sorted(seconds, key=seconds.__getitem__)
        print("  ", ", ".join(f"{cut}: {100 * (seconds[cut] / seconds[best] - 1):.1f}" for cut in ordered), flush=True)
    means = [statistics.fmean(over[i] for over in excess) for i in range(2)]
    print(
        f"mean over the best {means[0]:.2f} %, over the best separated {means[1]:.2f} %, "
        f"at most {max(over[1] for over in excess):.2f} %"
    )


FRESH = """
import sys, time
from benchmarks import partition
from mmtrain.simulator.make_job import make_job
job = partition.open_job(sys.argv[1], *sys.argv[2:])
imported_s, wall_s = time.process_time(), time.perf_counter()
made = make_job(job)
search_s, wall_s = time.process_time() - imported_s, time.perf_counter() - wall_s
print(f"{imported_s:9.2f} {search_s:9.2f} {wall_s:7.2f}  {made.partition}")
"""


def seconds_of_processes(names: Sequence[str], keys: Sequence[str]) -> None:
    """Prints what a search takes in a process of its own; the first one may have to compile the kernels."""
    print(f"{'job':19s} {'imports s':>9s} {'search s':>9s} {'wall s':>7s}  chosen")
    for name in names:
        words = [sys.executable, "-c", FRESH, name, *keys]
        answer = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
        print(f"{name:19s} {answer.stdout.rstrip()}", flush=True)


def mixtures(names: Sequence[str], num_iterations: int) -> None:
    """Prints what chains lose on mixtures for which they were not cut."""
    print(f"{'job':8s} {'separated':>9s} {'chain':>9s} " + " ".join(f"{m:>17s}" for m in ("mix", *MIXTURES)))
    losses = []
    for name in names:
        job = open_job(name)
        planners = {str(planner.job.partition): planner for planner in cuts(name)}

        def drawn(mixture: str, job: Config = job) -> list[IterationMeta]:
            return [draw(mixture, TypicalSizes.typical(job), seed=SEED, iteration=i) for i in range(num_iterations)]

        usual = {cut: planned_s(planner, drawn("mix")) for cut, planner in planners.items()}
        separated, chain = (
            min((cut for cut in usual if ("chain" in cut) == is_chain), key=usual.__getitem__)
            for is_chain in (False, True)
        )
        ratios = [usual[chain] / usual[separated]]
        for mixture in MIXTURES:
            metas = drawn(mixture)
            ratios.append(planned_s(planners[chain], metas) / planned_s(planners[separated], metas))
        losses += [ratio - ratios[0] for ratio in ratios[1:]]
        print(f"{name:8s} {separated:>9s} {chain:>9s} " + " ".join(f"{ratio:17.3f}" for ratio in ratios), flush=True)
    print(f"a chain loses {100 * statistics.fmean(losses):.1f} % on another mixture in the mean")


def ways(names: Sequence[str], num_iterations: int) -> None:
    """Prints what the ways to cut modules come to."""
    for name in names:
        print(f"{name} on {JOBS[name]}")
        print(f"  {'schedule':12s} {'partition':21s} {'segments':>9s} {'iteration s':>12s} {'to dip':>7s} {'s':>7s}")
        for schedule in ("1F1B", "interleave"):
            reference = 0.0
            for label, (how, passes) in WAYS.items():
                job = job_of(name, schedule, how, passes)
                start = time.process_time()
                made = make_job(job)
                cut_s = time.process_time() - start
                simulator = IterationSimulator.of(job, Machine.of(job).network)
                bins = TypicalSizes.of(job)
                metas = [draw("mix", bins, seed=SEED, iteration=i) for i in range(num_iterations)]
                seconds = statistics.fmean(simulator.simulate([meta])[0].iteration_s for meta in metas)
                reference = reference or seconds
                print(
                    f"  {schedule:12s} {label:21s} {made.partition!s:>9s} {seconds:12.3f} "
                    f"{seconds / reference:7.3f} {cut_s:7.2f}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument(
        "part", choices=("ways", "choices", "variants", "seconds", "mixtures"), nargs="?", default="ways"
    )
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--jobs", default="")
    given, keys = parser.parse_known_args()
    names = [name for name in given.jobs.split(",") if name]
    variants = [f"{name}/{'x'.join(map(str, variant))}" for name in DEPTH for variant in VARIANTS]
    if given.part in ("choices", "variants"):
        choices(names or (list(CHOICES) if given.part == "choices" else variants), given.iterations, keys)
    elif given.part == "seconds":
        seconds_of_processes(names or list(CHOICES), keys)
    else:
        {"ways": ways, "mixtures": mixtures}[given.part](names or list(JOBS), given.iterations)


if __name__ == "__main__":
    main()
