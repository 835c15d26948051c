"""python benchmarks/compiled.py [CONFIG ...] [--steps 8] [--rounds 2]

What `compile.enable` does to a step: each job trains at one rank on batches of noise in the sizes of its usual
workload, with blocks that are compiled and with blocks that are not, in turns, each in a process of its own. Printed:
how far the first loss differs, the CPU time by which the first steps take longer, the graphs that were compiled in them
and afterwards, and the CPU time of later steps (of forwards, backwards and the optimizer), compiled over not: the
quickest step of each batch, the mean over batches. Debug configs are tiny, so that much of a step is the host's work
between kernels.
"""

import argparse
import os
import tempfile
import time
from contextlib import closing
from itertools import cycle, islice
from typing import NamedTuple

import torch
from torch._dynamo.utils import counters

from mmtrain.config import config as config_module
from mmtrain.config.config import Config
from mmtrain.data.noise_batches import noise_batch
from mmtrain.local.driven_steps import timed_steps
from mmtrain.local.ranks import run_on_ranks
from mmtrain.modality.metadata import IterationMeta
from mmtrain.modality.typical import TypicalSizes
from mmtrain.models.batch import Batch
from mmtrain.simulator.typical_iterations import usual_workload
from mmtrain.simulator.workloads import draw
from mmtrain.training.trainer import Trainer

CONFIGS = ("debug_text", "debug_vlm", "debug_qwen2_vl", "debug_siglip_llama", "debug_lora")
BATCHES = 4


class Measured(NamedTuple):
    """One job."""

    loss: float
    warm_s: float
    """Of the first pass over the batches."""
    seconds: list[float]
    """Of the quickest later step of each batch."""
    graphs: tuple[int, int]
    """Compiled in the first pass, and after it."""


def train(device: torch.device, config: Config, given: list[tuple[Batch, IterationMeta]], steps: int) -> Measured:
    """Trains on each batch once, and then in turns."""
    seconds: list[float] = []
    loss, first = 0.0, 0
    endless = islice(cycle(given), len(given) + steps)
    with closing(timed_steps(Trainer(config), device, endless, clock=time.thread_time)) as made:
        for number, step in enumerate(made):
            seconds.append(step.end_s - step.start_s)
            loss = loss or sum(float(x) for x in step.outcome.losses.values())
            if number == len(given) - 1:
                first = counters["stats"]["unique_graphs"]
    later = seconds[len(given) :]
    return Measured(
        loss=loss,
        warm_s=sum(seconds[: len(given)]),
        seconds=[min(later[i :: len(given)]) for i in range(min(len(given), len(later)))],
        graphs=(first, counters["stats"]["unique_graphs"] - first),
    )


def job(name: str, folder: str, *, compiled: bool) -> Config:
    """A config at one rank, in its schedule's order."""
    return config_module.load(
        f"{name}.toml",
        [
            *("parallelism.pipeline_parallel_degree=1", "parallelism.data_parallel_shard_degree=1"),
            *("planner.enable=false", "validation.enable=false", "validation.generate=0", "checkpoint.enable=false"),
            *("metrics.enable_tensorboard=false", "metrics.progress_bar=false", f'job.dump_folder="{folder}"'),
            f"compile.enable={str(compiled).lower()}",
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", default=CONFIGS, metavar="CONFIG", help=f"default: {' '.join(CONFIGS)}")
    parser.add_argument("--steps", type=int, default=8, help="after one step on each batch")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"torch {torch.__version__}, {BATCHES} batches")
    columns = ("loss differs", "compiling s", "graphs", "later", "ms plain", "ms compiled", "ratio")
    print(f"{'job':20}" + "".join(f"{name:>13}" for name in columns))
    for name in args.configs:
        found: dict[bool, list[Measured]] = {False: [], True: []}
        for compiled in (False, True) * args.rounds:
            with tempfile.TemporaryDirectory(prefix="mmtrain-compiled-") as folder:
                config = job(name, folder, compiled=compiled)
                bins = TypicalSizes.typical(config)
                metas = [draw(usual_workload(config), bins, seed=0, iteration=i) for i in range(BATCHES)]
                given = [(noise_batch(config.model, meta, seed), meta) for seed, meta in enumerate(metas)]
                found[compiled] += run_on_ranks(train, 1, config, given, max(BATCHES, args.steps), comm=config.comm)
        (plain, *_), (ours, *_) = found[False], found[True]
        ms = [sum(map(min, zip(*(one.seconds for one in found[how]), strict=True))) * 1e3 for how in (False, True)]
        print(
            f"{name:20}{abs(ours.loss / plain.loss - 1):13.1e}{ours.warm_s - plain.warm_s:13.1f}{ours.graphs[0]:13d}"
            f"{max(one.graphs[1] for one in found[True]):13d}{ms[0] / BATCHES:13.1f}{ms[1] / BATCHES:13.1f}"
            f"{ms[1] / ms[0]:13.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
