"""python benchmarks/accuracy.py

Simulated against measured iteration times of the debug VLM on this CPU. First `mmtrain profile` measures the layers,
alone and with two processes side by side. Then each configuration below trains for real, with the trainer's own loop on
batches of noise, one thread a rank, and the plan that it ran is simulated with the profile: its makespan and the end of
the step. No number of a run goes into the profile or the simulation. `planned`: the order is searched, 200 evaluations.

A step is timed from the moment all ranks are there to the moment the last one has updated its weights, on each rank by
itself; the longest time counts. All configurations take turns by the step. The median counts over the steps in which
other processes took less than 4 % of the machine (by /proc/stat) and a fixed piece of work, every 20 ms between two
actions, ran as fast as while the machine was profiled (its mean over the step within 8 %): a shared machine's speed
changes by tens of per cent. A rank's clock stands still during its own such work; where another one waits for it then,
that stays in (1 % at most). Configurations with too few such steps are run again in the next round; what has fewer than
three in the end counts its three least disturbed ones. Prints both, their relative error, the seconds that the busiest
rank spent in actions, how many steps count, what other processes took, and the seconds of the fixed piece of work
relative to the profile's; then the mean error and the order of the configurations with three such steps, and of all.
"at its speed" is the median, over all steps that other processes left alone, of the error if the simulated seconds are
multiplied by the speed of the fixed piece of work in the same step: what the machine did in that minute is left out.
"""

import argparse
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from mmtrain.config import config as config_module
from mmtrain.config.config import Config
from mmtrain.costs.profile.profile import Profile
from mmtrain.data.noise_batches import noise_batch
from mmtrain.local.driven_steps import timed_steps
from mmtrain.local.profiler import profile_job
from mmtrain.local.ranks import run_on_ranks
from mmtrain.modality.metadata import DocumentMeta, ImageMeta, IterationMeta, MicrobatchMeta
from mmtrain.observe.machine_speed import WatchedClock
from mmtrain.planner.iteration import IterationPlan
from mmtrain.planner.job import Job
from mmtrain.planner.search_settings import PLANNED
from mmtrain.simulator.profiling.measurements import trainable_params
from mmtrain.training.trainer import Trainer

SEQ_LEN = 512
QUIET = 0.04
"""Of the machine may be taken by other processes in a step that counts."""
LEAST_STEPS = 3
"""Steps that count in any case."""
LOOK_EVERY_S = 20e-3
"""From one look at the machine's speed to the next."""
SAME_SPEED = 0.08
"""Relative difference to the machine's speed in the profile of a step that counts."""
APART = 0.1
"""Part of the longer of two measured times by which they differ if their order is asked for."""
ENOUGH_STEPS = 8
"""Steps that count, after which a configuration is not run again."""


@dataclass(frozen=True)
class Case:
    pp: int
    schedule: str
    microbatches: int
    mix: str
    segments: tuple[int, int] = (1, 1)
    """Of vision and language."""
    sub_microbatch: int = 8

    @property
    def name(self) -> str:
        cut = "" if self.segments == (1, 1) else f" K={self.segments[0]},{self.segments[1]}"
        return f"pp {self.pp} {self.schedule}{cut}, {self.microbatches} x {self.mix}, B={self.sub_microbatch}"


MIXES = {
    # images of each document: (least, most) and sides in patches; text tokens of a document; share of text-only
    "charts": ((1, 2), (10, 16), (20, 60), 0.0),
    "text": ((0, 0), (0, 0), (40, 160), 1.0),
    "mixed": ((1, 3), (8, 16), (20, 80), 0.4),
    "small": ((2, 4), (6, 8), (10, 30), 0.0),
    "large": ((1, 1), (18, 22), (20, 100), 0.2),
}

CASES = (
    Case(1, "1F1B", 4, "charts"),
    Case(1, "1F1B", 8, "text"),
    Case(1, "GPipe", 4, "mixed"),
    Case(1, "interleave", 4, "small"),
    Case(1, "ZB-H1", 3, "charts"),
    Case(1, "1F1B", 3, "large", sub_microbatch=2),
    Case(2, "1F1B", 4, "charts"),
    Case(2, "1F1B", 8, "mixed"),
    Case(2, "1F1B", 8, "text"),
    Case(2, "1F1B", 2, "small"),
    Case(2, "GPipe", 6, "charts"),
    Case(2, "interleave", 8, "mixed"),
    Case(2, "interleave", 4, "large", sub_microbatch=2),
    Case(2, "interleave", 6, "charts", segments=(2, 2), sub_microbatch=4),
    Case(2, "Interleaved1F1B", 4, "mixed", segments=(1, 2)),
    Case(2, "ZB-H1", 6, "charts"),
    Case(2, "ZB-H1", 4, "text"),
    Case(2, "ZB-H1", 8, "mixed"),
    Case(2, PLANNED, 6, "charts"),
    Case(2, PLANNED, 8, "mixed", segments=(1, 2)),
    Case(2, PLANNED, 8, "text"),
    Case(2, PLANNED, 4, "large", sub_microbatch=2),
)


def microbatch(rng: random.Random, mix: str, first: int) -> MicrobatchMeta:
    """Documents of a mix, as many as fit."""
    (least, most), (low, high), (short, long), text_only = MIXES[mix]
    documents: list[DocumentMeta] = []
    left = SEQ_LEN
    plain = rng.random() < text_only
    while True:
        images, tokens = [], 0
        for i in range(0 if plain else rng.randint(least, most)):
            h, w = (2 * rng.randint(low // 2, high // 2) for _ in range(2))
            images.append(
                ImageMeta(sample=first + len(documents), index=i, grid=(1, h, w), num_tokens=h * w // 4, start=tokens)
            )
            tokens += h * w // 4
        length = tokens + rng.randint(short, long)
        if length > left and documents:
            return MicrobatchMeta(documents=tuple(documents))
        targets = max(1, (length - tokens) // 3)
        documents.append(
            DocumentMeta(
                sample=first + len(documents), num_tokens=length, num_targets=targets, images=tuple(images),
                answers=(targets,), prefix=length - targets,
            )
        )  # fmt: skip
        left -= length


def iteration(case: Case) -> IterationMeta:
    rng = random.Random(str(case))
    return IterationMeta(microbatches=tuple(microbatch(rng, case.mix, 100 * i) for i in range(case.microbatches)))


def job(case: Case, profile: str = "", folder: str = "unused") -> Config:
    planned = case.schedule == PLANNED
    return config_module.load(
        "debug_vlm.toml",
        [
            f"--training.seq_len={SEQ_LEN}",
            f"--training.global_batch_size={case.microbatches}",
            f"--parallelism.pipeline_parallel_degree={case.pp}",
            f'--parallelism.pipeline_parallel_schedule="{"interleave" if planned else case.schedule}"',
            f"--planner.enable={str(planned).lower()}",
            f"--model.encoder.num_segments={case.segments[0]}",
            f"--model.language.num_segments={case.segments[1]}",
            f"--model.encoder.sub_microbatch_size={case.sub_microbatch}",
            f'--planner.profile="{profile}"',
            f'--job.dump_folder="{folder}"',
            "--validation.enable=false",
            "--checkpoint.enable=false",
            "--metrics.enable_tensorboard=false",
            "--metrics.progress_bar=false",
        ],
    )


class Step(NamedTuple):
    """One step on one rank."""

    seconds: float
    """From the moment that all ranks are there."""
    busy_s: float
    """In actions."""
    own_s: float
    """Processor time of this process."""
    machine_s: float
    """Processor time of everything on the machine."""
    speed_s: float
    """Mean seconds of a fixed piece of work during the step."""
    simulated_s: float
    """What the simulator says of the step's plan."""
    simulated_busy_s: float
    """Of the busiest rank."""


def simulate(plan: IterationPlan, job: Job) -> tuple[float, float]:
    """Seconds of the iteration, and those that the busiest rank spends in actions. Plans of searches differ by step."""
    timeline = plan.result.timeline
    params = max(trainable_params(job.spec, job.partition, r) for r in range(job.partition.num_ranks))
    return timeline.makespan_s + job.costs.step_s(params), max(timeline.busy_s)


def machine_seconds() -> float:
    """Processor time that the whole machine has used, what its host took away included."""
    user, nice, system, _, _, irq, soft, steal, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def run_real(device: torch.device, cases: list[Case], profile: str, folder: str, steps: int) -> list[list[Step]]:
    """For each case its steps on this rank, after one that warms up. All cases take turns by the step, so that each
    meets the speeds which the machine has meanwhile."""
    jobs = []
    for case in cases:
        config, meta = job(case, profile, f"{folder}/{os.getpid()}"), iteration(case)
        trainer = Trainer(config)
        clock = WatchedClock(time.perf_counter, every_s=LOOK_EVERY_S)
        timed = timed_steps(trainer, device, repeat((noise_batch(config.model, meta, 0), meta)), clock=clock)
        next(timed)
        jobs.append((trainer, clock, timed))
    found: list[list[Step]] = [[] for _ in cases]
    for _ in range(steps):
        for steps_of_case, (trainer, clock, timed) in zip(found, jobs, strict=True):
            own, machine = time.process_time(), machine_seconds()
            step = next(timed)
            used = time.process_time() - own, machine_seconds() - machine
            busy = sum(end - start for _, start, end in step.outcome.rows)
            simulated = simulate(step.plan, trainer.job)
            speed_s = clock.speed_s(step.start_s, step.end_s)
            steps_of_case.append(Step(step.end_s - step.start_s, busy, *used, speed_s, *simulated))
    for _, _, timed in jobs:
        timed.close()
    return found


class Measured(NamedTuple):
    """One step on all ranks."""

    seconds: float
    busy_s: float
    """Of the busiest rank, in actions."""
    others: float
    """The part of the machine that other processes took."""
    speed: float
    """Of the machine while it was profiled, relative to the step: above 1 the step met a slower machine."""
    simulated_s: float
    simulated_busy_s: float

    @classmethod
    def of(cls, ranks: Sequence[Step], profiled_speed_s: float) -> "Measured":
        seconds = max(step.seconds for step in ranks)
        foreign = max(step.machine_s for step in ranks) - sum(step.own_s for step in ranks)
        others = max(0.0, foreign) / (seconds * (os.cpu_count() or 1))
        speed = max(step.speed_s for step in ranks) / profiled_speed_s
        busy_s = max(step.busy_s for step in ranks)
        return cls(seconds, busy_s, others, speed, ranks[0].simulated_s, ranks[0].simulated_busy_s)

    @property
    def error_at_its_speed(self) -> float:
        """Relative error of the simulated seconds times the speed."""
        return self.simulated_s * self.speed / self.seconds - 1

    @property
    def counts(self) -> bool:
        """Whether little else ran, and the machine was as fast as when it was profiled."""
        return self.others < QUIET and abs(self.speed - 1) < SAME_SPEED


def counted(steps: Sequence[Measured]) -> list[Measured]:
    """The steps that count; if there are few of them, those that were disturbed least."""
    ordered = sorted(steps, key=lambda step: (not step.counts, step.others + abs(step.speed - 1)))
    return [step for i, step in enumerate(ordered) if i < LEAST_STEPS or step.counts]


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's."""
    places = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(*places)[0, 1])


def wait_for_quiet(limit: float, seconds: float) -> None:
    """Waits until the load is below a limit, but not for ever."""
    end = time.monotonic() + seconds
    while os.getloadavg()[0] > limit and time.monotonic() < end:
        time.sleep(5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="of each configuration in each round")
    parser.add_argument("--rounds", type=int, default=12, help="over the configurations, at most")
    parser.add_argument("--profiles", type=Path, help="folder of pp1.json and pp2.json; absent ones are measured")
    parser.add_argument("--wait", type=float, default=0, help="seconds to wait for a load below 0.5 before each part")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="mmtrain-accuracy-") as name:
        folder = args.profiles or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        profiles = {pp: folder / f"pp{pp}.json" for pp in (1, 2)}
        for pp, path in profiles.items():
            if not path.is_file():
                wait_for_quiet(0.5, args.wait)
                profile_job(job(Case(pp, "1F1B", 4, "charts"))).write(path)
        steps: dict[Case, list[Measured]] = {case: [] for case in CASES}
        for _ in range(args.rounds):
            for pp in (1, 2):
                speed_s = float(Profile.read(profiles[pp]).machine["look_ms"]) / 1e3
                missing = [c for c in CASES if c.pp == pp and sum(step.counts for step in steps[c]) < ENOUGH_STEPS]
                if not missing:
                    continue
                wait_for_quiet(0.5, args.wait)
                config = job(missing[0])
                ranks = run_on_ranks(run_real, pp, missing, str(profiles[pp]), name, args.steps, comm=config.comm)
                for i, case in enumerate(missing):
                    together = zip(*(rank[i] for rank in ranks), strict=True)
                    steps[case] += [Measured.of(step, speed_s) for step in together]
        report(steps)
        for pp, path in profiles.items():
            machine = Profile.read(path).machine
            print(f"profile of pp {pp}: {', '.join(f'{key} {value}' for key, value in machine.items())}")


def report(steps: dict[Case, list[Measured]]) -> None:
    head = f"{'configuration':54s} {'measured':>11s} {'simulated':>11s} {'error':>8s} {'at its speed':>13s}"
    print(f"{head} | busiest rank | steps, others, speed")
    ours, theirs, adjusted = [], [], dict[Case, float]()
    for case, times in steps.items():
        seconds, busy, others, speed, found, load = np.median(counted(times), axis=0)
        ours.append(float(found))
        theirs.append(float(seconds))
        adjusted[case] = float(np.median([t.error_at_its_speed for t in times if t.others < QUIET] or [np.nan]))
        print(
            f"{case.name:54s} {1e3 * seconds:8.1f} ms {1e3 * found:8.1f} ms {100 * (found / seconds - 1):+6.1f} % "
            f"{100 * adjusted[case]:+11.1f} % | "
            f"{1e3 * busy:8.1f} {1e3 * load:8.1f} ms | {sum(step.counts for step in times):2d} of {len(times)}, "
            f"{100 * others:.0f} %, {speed:.2f}"
        )
    calm = [sum(step.counts for step in times) >= LEAST_STEPS for times in steps.values()]
    print(f"{sum(calm)} configurations with {LEAST_STEPS} or more steps that count: {_summary(ours, theirs, calm)}")
    print(f"all {len(ours)}: {_summary(ours, theirs, [True] * len(ours))}")
    for kind, searched in (("named schedules", False), ("searched plans", True)):
        errors = [100 * abs(adjusted[case]) for case in adjusted if (case.schedule == PLANNED) == searched]
        print(f"at its speed, {kind}: mean error {np.mean(errors):.1f} %, largest {max(errors):.1f} %")


def _summary(simulated: Sequence[float], measured: Sequence[float], counts: Sequence[bool]) -> str:
    pairs = [(a, b) for a, b, counted in zip(simulated, measured, counts, strict=True) if counted]
    if not pairs:
        return "-"
    errors = [100 * abs(a / b - 1) for a, b in pairs]
    places = rank_correlation(*(list(of) for of in zip(*pairs, strict=True)))
    apart = [(a, b) for a, b in combinations(pairs, 2) if abs(a[1] - b[1]) > APART * max(a[1], b[1])]
    right = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in apart)
    return (
        f"mean error {np.mean(errors):.1f} %, largest {max(errors):.1f} %, rank correlation {places:.4f}; of the pairs "
        f"{100 * APART:.0f} % apart, {right} of {len(apart)} in the measured order"
    )


if __name__ == "__main__":
    main()
