"""python benchmarks/on_gpu_ranks.py [--size medium] [--steps 3] [--seconds 480] [--only NAME ...]

Two ranks on one CUDA device (`comm.share_device`: gloo, messages through host memory) against one rank on it, and that,
for a tiny model, against one rank on the CPU: streams, device events, offloading and memory limits in small jobs on
batches of noise, without any data set. Each job trains the same steps in float32, so its losses must be those of the
first one. Prints for each the largest relative difference of a loss, the seconds of a step, the most loaded rank's peak
as the allocator has it and as the plan said of activations, and whether what was measured makes sense: actions in order
and inside of their step, less memory where a limit or offloading asks for it. Each axis comes first, then memory, clips
and the CPU; after `--seconds` no further job begins. Exit status 1 if a job ends with an error, differs or does not
begin.

Without a CUDA device all runs on the CPU, which tries the program and not the device.
"""

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, pairwise

import torch
from one_gpu import SIZES, batches, job

from mmtrain.config import config as config_module
from mmtrain.config.config import Config
from mmtrain.data.noise_batches import noise_batch
from mmtrain.local.driven_steps import TimedStep, timed_steps
from mmtrain.local.ranks import run_on_ranks
from mmtrain.modality.metadata import IterationMeta
from mmtrain.modality.typical import TypicalSizes
from mmtrain.models.batch import Batch
from mmtrain.simulator.typical_iterations import usual_workload
from mmtrain.simulator.workloads import draw
from mmtrain.training.trainer import Trainer

SAME = 1e-3
"""Relative difference of a loss after some steps in float32, on one kind of device or two."""
MIB = 2.0**20

Batches = list[tuple[Batch, IterationMeta]]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one rank saw."""

    losses: tuple[float, ...]
    """Of each step, this rank's share of the first replica's loss."""
    seconds: float
    """Of the last step."""
    peak_bytes: float
    """The allocator's; 0 on a CPU."""
    planned_bytes: float
    """Activations of this rank, as planned for the step with most."""
    num_actions: int
    problems: tuple[str, ...]
    """What is odd about the times of actions."""


def train(device: torch.device, config: Config, given: Batches, steps: int) -> Measured:
    """Runs some steps on this rank."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    trainer = Trainer(config)
    seen: list[TimedStep] = []
    losses, planned = [], 0.0
    for step in timed_steps(trainer, device, islice(cycle(given), steps)):
        place, seen = trainer.mesh.place, [*seen, step]
        counts = place.tp == 0 and trainer.mesh.dp_rank == 0
        losses.append(sum(float(loss) for loss in step.outcome.losses.values()) if counts else 0.0)
        planned = max(planned, step.plan.result.timeline.peak_bytes[place.pp])
    return Measured(
        losses=tuple(losses),
        seconds=seen[-1].end_s - seen[-1].start_s,
        peak_bytes=float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else 0.0,
        planned_bytes=planned,
        num_actions=len(seen[-1].outcome.rows),
        problems=tuple(problem for step in seen for problem in odd_times(step)),
    )


def odd_times(step: TimedStep) -> list[str]:
    """What cannot be true of the measured actions of one rank."""
    rows, (begin, end) = step.outcome.rows, step.outcome.span
    epsilon = 1e-4
    low, high = begin - epsilon, end + epsilon
    found = [f"{action} ends before it starts" for action, start, stop in rows if stop < start]
    found += [f"{b[0]} starts before {a[0]} ends" for a, b in pairwise(rows) if b[1] < a[2] - epsilon]
    found += [f"{a} is outside of its step" for a, start, stop in rows if start < low or stop > high]
    return found


@dataclass(frozen=True, kw_only=True)
class Case:
    """One job."""

    name: str
    ranks: int
    overrides: tuple[str, ...] = ()
    like: str = "one rank"
    """The job whose losses it must have."""
    less_than: str = ""
    """The job that must take more memory, on a device."""
    clips: bool = False
    """Of a text-to-video model."""
    size: str = ""
    """Of its model; empty: as the command says."""
    on_cpu: bool = False


PAIR = ("parallelism.pipeline_parallel_degree=2",)
PLANNED = (*PAIR, "planner.enable=true", "planner.search.budget_evaluations=200")
CASES = (
    Case(name="one rank", ranks=1),
    Case(name="pipeline, 1F1B", ranks=2, overrides=(*PAIR, 'parallelism.pipeline_parallel_schedule="1F1B"')),
    Case(name="FSDP2", ranks=2, overrides=("parallelism.data_parallel_shard_degree=2",)),
    Case(name="tensor parallel", ranks=2, overrides=("parallelism.tensor_parallel_degree=2",)),
    Case(name="context parallel", ranks=2, overrides=("parallelism.context_parallel_degree=2",)),
    Case(name="pipeline, planned", ranks=2, overrides=PLANNED),
    Case(
        name="offloading",
        ranks=2,
        overrides=(*PAIR, 'activation_checkpoint.mode="offload"'),
        less_than="pipeline, 1F1B",
    ),
    Case(
        name="half of the activations",
        ranks=2,
        overrides=(*PLANNED, 'planner.search.memory_strategies=["keep", "selective", "recompute", "offload"]'),
        less_than="pipeline, planned",
    ),
    Case(name="memory limit of 45 %", ranks=2, overrides=(*PLANNED, 'planner.memory_limit="45%"')),
    Case(
        name="pipeline, split backwards", ranks=2, overrides=(*PAIR, 'parallelism.pipeline_parallel_schedule="ZB-H1"')
    ),
    Case(name="full recomputation", ranks=2, overrides=(*PAIR, 'activation_checkpoint.mode="full"')),
    Case(name="pipeline, compiled", ranks=2, overrides=(*PAIR, "compile.enable=true")),
    Case(name="two pipelines", ranks=2, overrides=("parallelism.data_parallel_replicate_degree=2",)),
    Case(name="clips, one rank", ranks=1, clips=True, like="clips, one rank"),
    Case(name="clips, pipeline, planned", ranks=2, overrides=PLANNED, clips=True, like="clips, one rank"),
    Case(
        name="clips, tensor parallel",
        ranks=2,
        overrides=("parallelism.tensor_parallel_degree=2",),
        clips=True,
        like="clips, one rank",
    ),
    Case(name="tiny", ranks=1, size="tiny", like="tiny"),
    Case(name="tiny, on the CPU", ranks=1, size="tiny", like="tiny", on_cpu=True),
)


def config_of(case: Case, size: str, folder: str, extra: Sequence[str]) -> Config:
    """The case's job, with nothing that needs data or another package."""
    plain = [f'--job.dump_folder="{folder}"', "--validation.enable=false", "--checkpoint.enable=false"]
    plain += ["--metrics.enable_tensorboard=false", "--metrics.progress_bar=false", "--planner.enable=false"]
    plain += [
        "--parallelism.pipeline_parallel_degree=1",
        "--comm.share_device=true",
        "--planner.device.flops_per_s=1e13",
    ]
    own = [f"--{text}" for text in (*case.overrides, *extra)]
    if case.clips:
        return config_module.load("debug_t2v.toml", [*plain, *own])
    base = job(SIZES[size], folder, bfloat16=False)
    path = f"{folder}/base.toml"
    with open(path, "w") as file:
        file.write(config_module.dump(base))
    return config_module.load(path, [*plain, *own])


def batches_of(case: Case, config: Config, size: str) -> Batches:
    if not case.clips:
        return batches(config, SIZES[size])
    bins = TypicalSizes.typical(config)
    metas = [draw(usual_workload(config), bins, seed=0, iteration=i) for i in range(2)]
    return [(noise_batch(config.model, meta, seed), meta) for seed, meta in enumerate(metas)]


def run_case(case: Case, size: str, steps: int, found: dict[str, list[Measured]]) -> list[Measured]:
    """What each rank of a case measured, in a process of its own."""
    extra = []
    if case.name == "half of the activations" and "pipeline, planned" in found:
        most = max(rank.planned_bytes for rank in found["pipeline, planned"])
        extra = [f"planner.search.activation_memory_gib={0.5 * most / 2**30:.9f}"]
    with tempfile.TemporaryDirectory(prefix="mmtrain-on-gpu-") as folder:
        config = config_of(case, size, folder, extra)
        given = batches_of(case, config, size)
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if case.on_cpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
            given, config = given[:2], replace(config)
        try:
            return run_on_ranks(train, case.ranks, config, given, steps, comm=config.comm)
        finally:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            if hidden is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = hidden


def losses_of(ranks: Sequence[Measured]) -> list[float]:
    return [sum(rank.losses[step] for rank in ranks) for step in range(len(ranks[0].losses))]


def verdict(case: Case, found: dict[str, list[Measured]]) -> tuple[float, list[str]]:
    """The largest relative difference of a loss, and what is wrong."""
    ranks = found[case.name]
    wrong = [text for rank in ranks for text in rank.problems[:1]]
    difference = float("nan")
    if case.like in found:
        pairs = zip(losses_of(ranks), losses_of(found[case.like]), strict=False)
        difference = max(abs(ours / theirs - 1) for ours, theirs in pairs)
        wrong += [] if difference <= SAME else [f"losses differ from those of {case.like}"]
    if case.less_than in found and ranks[0].peak_bytes:
        mine, other = (max(rank.peak_bytes for rank in of) for of in (ranks, found[case.less_than]))
        wrong += [] if mine < other else [f"it takes no less memory than {case.less_than}"]
    return difference, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--size", choices=SIZES, default="medium" if cuda else "tiny")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=480)
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], metavar="NAME")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"{torch.cuda.get_device_name() if cuda else 'CPU'}, torch {torch.__version__}, size {args.size}")
    columns = f"{'ranks':>5s} {'loss differs':>12s} {'s a step':>9s} {'actions':>8s} {'peak MiB':>9s} {'planned':>9s}"
    print(f"{'job':28s} {columns}")
    found: dict[str, list[Measured]] = {}
    failed, begin = 0, time.monotonic()
    for case in CASES:
        if args.only and case.name not in args.only:
            continue
        if time.monotonic() - begin > args.seconds:
            failed += 1
            print(f"{case.name:28s} {case.ranks:5d} not begun: {args.seconds} s are over", flush=True)
            continue
        try:
            found[case.name] = ranks = run_case(case, case.size or args.size, args.steps, found)
        except Exception as error:  # the others may work
            failed += 1
            print(f"{case.name:28s} {case.ranks:5d} FAILED: {' '.join(str(error).split())[-300:]}", flush=True)
            traceback.print_exc(file=sys.stderr)
            continue
        difference, wrong = verdict(case, found)
        failed += bool(wrong)
        print(
            f"{case.name:28s} {case.ranks:5d} {difference:12.1e} {max(rank.seconds for rank in ranks):9.3f} "
            f"{sum(rank.num_actions for rank in ranks):8d} {max(rank.peak_bytes for rank in ranks) / MIB:9.0f} "
            f"{max(rank.planned_bytes for rank in ranks) / MIB:9.0f}  {'; '.join(wrong) or 'ok'}",
            flush=True,
        )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
