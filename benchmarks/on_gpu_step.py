"""python benchmarks/on_gpu_step.py [--size medium]

Whole training steps of mmtrain at one rank on one CUDA device, in bfloat16, with each kernel of attention, and with
compiled blocks: seconds, kernels, times that the host waits for the device and the lines of code where it does, and MiB
at the peak beside the activations that the plan has. Batches are those of `one_gpu.py`. Without a CUDA device it trains
on the CPU, in float32 and without these counts, which tries the program.
"""

import argparse
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from itertools import cycle, islice
from typing import NamedTuple

import torch
from one_gpu import SIZES, batches, job
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from mmtrain.config.compile import CompileConfig
from mmtrain.config.config import Config
from mmtrain.local.driven_steps import timed_steps
from mmtrain.local.ranks import run_on_ranks
from mmtrain.training.trainer import Trainer

WARM, TIMED = 4, 4
MIB = 2.0**20


class Measured(NamedTuple):
    """Steps of one job."""

    seconds: float
    kernels: int
    waits: Counter[str]
    """Line of code -> times in a step."""
    peak_bytes: float
    planned_bytes: float


@contextmanager
def waits_warn() -> Iterator[None]:
    """Inside, the host warns where it waits for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def train(device: torch.device, config: Config, size: str) -> Measured:
    """Some steps that warm up, some that are timed, and one each whose kernels and waits are counted."""
    on_gpu = device.type == "cuda"
    given = islice(cycle(batches(config, SIZES[size])), WARM + TIMED + 2)
    with closing(timed_steps(Trainer(config), device, given)) as steps:
        for _ in range(WARM):
            next(steps)
        timed = [next(steps) for _ in range(TIMED)]
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as recorded:
            next(steps)
        with warnings.catch_warnings(record=True) as found, waits_warn() if on_gpu else nullcontext():
            warnings.simplefilter("always")
            next(steps)
    waits = [w for w in found if "synchroniz" in str(w.message)]
    return Measured(
        seconds=min(step.end_s - step.start_s for step in timed),
        kernels=sum(event.device_type == DeviceType.CUDA for event in recorded.events()),
        waits=Counter(f"{os.path.relpath(w.filename)}:{w.lineno}" for w in waits),
        peak_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else 0,
        planned_bytes=max(step.plan.result.timeline.peak_bytes[0] for step in timed),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--size", choices=SIZES, default="medium" if cuda else "tiny")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name() if cuda else 'CPU'}, torch {torch.__version__}, size {args.size}")
    print(
        f"{'attention':16}" + "".join(f"{name:>10}" for name in ("s a step", "kernels", "waits", "peak MiB", "planned"))
    )
    rows = [("auto", False), ("auto", True), *([("sdpa", False), ("flex", False)] if cuda else [])]
    for backend, compiled in rows:
        with tempfile.TemporaryDirectory(prefix="mmtrain-on-gpu-") as folder:
            config = job(SIZES[args.size], folder, bfloat16=cuda)
            training = replace(config.training, attention_backend=backend)
            config = replace(config, training=training, compile=CompileConfig(enable=compiled))
            (found,) = run_on_ranks(train, 1, config, args.size, comm=config.comm)
        name = f"{backend}, compiled" if compiled else backend
        print(
            f"{name:16}{found.seconds:10.4f}{found.kernels:10d}{found.waits.total():10d}"
            f"{found.peak_bytes / MIB:10.0f}{found.planned_bytes / MIB:10.0f}"
        )
        for line, times in found.waits.most_common():
            print(f"{'':16}{times:6d} x {line}", flush=True)


if __name__ == "__main__":
    main()
