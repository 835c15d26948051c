"""python benchmarks/host_memory.py [--rounds 3] [--steps 8]

What it is worth on a CPU that a process keeps the memory of freed tensors (`mmtrain/observe/host_memory.py`): page
faults and seconds of a step with it and without it, for the configurations of `accuracy.py` at one pipeline rank.

Each round starts one process with it and one without, in turns; steps are real ones of the trainer, after one that
warms up. Medians over all rounds: page faults, milliseconds of the kernel's and of all processor time of a step; and
how much more of the last there is without.
"""

import argparse
import os
import resource
import tempfile
from itertools import repeat

import numpy as np
import torch
from accuracy import CASES, Case, iteration, job

from mmtrain.data.noise_batches import noise_batch
from mmtrain.local.driven_steps import timed_steps
from mmtrain.local.ranks import run_on_ranks
from mmtrain.training.trainer import Trainer

DECLINED = "MALLOC_PERTURB_"
"""With any variable of glibc's allocator set, freed memory is not kept; this one at 0 changes nothing else."""


def run_steps(device: torch.device, cases: list[Case], folder: str, steps: int) -> list[list[tuple[float, ...]]]:
    """For each case and step: page faults, seconds of the kernel's and of all processor time."""
    found = []
    for case in cases:
        config, meta = job(case, folder=f"{folder}/{os.getpid()}"), iteration(case)
        timed = timed_steps(Trainer(config), device, repeat((noise_batch(config.model, meta, 0), meta)))
        next(timed)
        taken = []
        for _ in range(steps):
            before = usage()
            next(timed)
            taken.append(tuple(after - b for after, b in zip(usage(), before, strict=True)))
        timed.close()
        found.append(taken)
    return found


def usage() -> tuple[float, ...]:
    """Page faults, seconds of the kernel's and of all processor time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_minflt, used.ru_stime, used.ru_stime + used.ru_utime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of each configuration in each round")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]:
        del os.environ[name]  # with one of them nothing would be kept
    cases = [case for case in CASES if case.pp == 1]
    found: dict[bool, list[list[tuple[float, ...]]]] = {kept: [[] for _ in cases] for kept in (True, False)}
    with tempfile.TemporaryDirectory(prefix="mmtrain-host-memory-") as folder:
        for _ in range(args.rounds):
            for kept, all_steps in found.items():
                if kept:
                    os.environ.pop(DECLINED, None)
                else:
                    os.environ[DECLINED] = "0"
                [rank] = run_on_ranks(run_steps, 1, cases, folder, args.steps, comm=job(cases[0]).comm)
                for steps, more in zip(all_steps, rank, strict=True):
                    steps += more
    print(f"{'':34s} {'freed memory kept':>34s} {'given back':>34s}")
    columns = f"{'faults':>10s} {'kernel ms':>11s} {'all ms':>11s}"
    print(f"{'configuration':34s} {columns} {columns}     more")
    for i, case in enumerate(cases):
        medians = {kept: np.median(all_steps[i], axis=0) for kept, all_steps in found.items()}
        words = " ".join(
            f"{faults:10.0f} {1e3 * kernel:11.1f} {1e3 * seconds:11.1f}" for faults, kernel, seconds in medians.values()
        )
        print(f"{case.name:34s} {words} {100 * (medians[False][2] / medians[True][2] - 1):+7.1f} %")


if __name__ == "__main__":
    main()
