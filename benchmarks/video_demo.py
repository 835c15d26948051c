"""python benchmarks/video_demo.py [--parts seeds,shuffled] [--one-process]

Does the job of `make train-video` learn, and what does each part of it bring? Trains `configs/debug_square.toml` on
the easy level of moving shapes, and judges samples by their pixels: 24 of the noise that `mmtrain sample --judge`
draws, and 96 of other noise. The data set is read from the working directory, as `make train-video` leaves it there.

Parts: `seeds`, three seeds of weights, order and noise of training, each sampled with guidance and without, and with
the weights of the last step in place of their averages; `shuffled`, the captions of training clips dealt anew, so that
they say nothing; `patches`, square patches in place of whole rows; `shift`, without the shift towards noise; `rate`,
half and a quarter of the learning rate. Printed for each run: CPU seconds of all its processes, minutes, samples that
are right in background, colour, direction and all, and the validation losses with true and with shuffled captions.
Chance is 1 in 12.

Any --section.key=value is passed on to all runs. With --one-process a run has one process and no planner, which has the
same losses up to rounding; two such runs fit next to each other on two cores.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as parquet

from mmtrain.config import config
from mmtrain.errors import ConfigError

CONFIG = "debug_square.toml"
JUDGED = {"24": (), "96 others": ("--num-samples=8", "--seed=1")}
"""Name of a set of samples -> options of `mmtrain sample` that draw it."""


@dataclass(frozen=True)
class Run:
    """One training of the job."""

    name: str
    overrides: tuple[str, ...] = ()
    samples: tuple[tuple[str, ...], ...] = ((),)
    """Options of `mmtrain sample`, of each time that its model is judged."""


SQUARE = {"patch_size": [4, 3, 3]}
"""Of `patches`: about as many tokens of about as many numbers."""
SAMPLED = ((), ("--guidance=1",), ("--guidance=3",), ("--weights=trained",))


def runs(parts: Sequence[str], data: Path, folder: Path) -> Iterator[Run]:
    """The runs of some parts. Args: data: folder of the data set. folder: for others."""
    job = config.load(CONFIG)
    assert job.model.dit is not None
    rate, dit = job.optimizer.lr, dict(job.model.dit.config)
    if "seeds" in parts:
        yield from (Run(f"seed {seed}", (f"--debug.seed={seed}",), SAMPLED) for seed in range(3))
    if "shuffled" in parts:
        yield Run("shuffled captions", (f"--data.source={shuffled(data, folder / 'shuffled_data')}",))
    if "patches" in parts:
        patched = "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in (dit | SQUARE).items()) + "}"
        yield Run("square patches", (f"--model.dit.config={patched}",))
    if "shift" in parts:
        yield Run("shift 1", ("--diffusion.shift=1.0",))
    if "rate" in parts:
        yield from (Run(f"rate {rate / divisor:g}", (f"--optimizer.lr={rate / divisor}",)) for divisor in (2, 4))


def shuffled(data: Path, folder: Path) -> Path:
    """A copy of a data set whose training clips have each other's captions."""
    shutil.copytree(data, folder)
    for file in sorted((folder / "data").glob("train-*.parquet")):
        table = parquet.read_table(file)
        captions = table.column("caption").to_pylist()
        random.Random(0).shuffle(captions)
        index = table.column_names.index("caption")
        parquet.write_table(table.set_column(index, table.schema.field(index), [captions]), file)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="seeds,shuffled,patches,shift,rate", help="separated by commas")
    parser.add_argument("--one-process", action="store_true", help="train without a pipeline and without the planner")
    parser.add_argument("--out", type=Path, help="folder to keep the runs in (default: a temporary one)")
    args, overrides = parser.parse_known_args()
    if args.one_process:
        overrides = ["--parallelism.pipeline_parallel_degree=1", "--planner.enable=false", *overrides]
    job = config.load(CONFIG, overrides)
    data = Path(job.data.source)
    if not data.is_dir():
        raise ConfigError(f"{data} does not exist; make it with `make squares`, or name it with --data.source")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.out or Path(temporary)
        folder.mkdir(exist_ok=True)
        print(f"{job.training.steps} steps of {CONFIG}; samples right in background / colour / direction / all")
        for run in runs(args.parts.split(","), data, folder):
            train(run, folder, overrides)


def train(run: Run, folder: Path, overrides: Sequence[str]) -> None:
    """Trains, judges and prints a run."""
    out = folder / run.name.replace(" ", "_")
    before, start = os.times(), time.perf_counter()
    mmtrain("train", "--config", CONFIG, f"--job.dump_folder={out}", *overrides, *run.overrides)
    after, seconds = os.times(), time.perf_counter() - start
    cpu_s = sum(after[2:4]) - sum(before[2:4])
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "validation_loss" in line][-1]
    losses = f"{last['validation_loss']:.4f}, shuffled {last['shuffled_captions_loss']:.4f}"
    print(f"{run.name}: {cpu_s:.0f} s of CPU time in {seconds / 60:.1f} min; validation loss {losses}")
    for number, how in enumerate(run.samples):
        of_sets = []
        for name, options in JUDGED.items():
            sheet = out / f"judged_{number}_{name.partition(' ')[0]}"
            mmtrain("sample", str(out), "--judge", "--out", str(sheet), *how, *options)
            verdict = json.loads((sheet / "samples.json").read_text())["verdict"]
            right = " / ".join(str(verdict[key]) for key in ("background", "colour", "direction", "right"))
            of_sets.append(f"{right} of {name}")
        print(f"  {' '.join(how) or 'as the job samples':20} {',  '.join(of_sets)}", flush=True)


def mmtrain(*arguments: str) -> None:
    """Runs the program, with its output on stderr."""
    command = [sys.executable, "-m", "mmtrain.commands.cli", *arguments]
    print(re.sub(r"^\S+ -m mmtrain.commands.cli", "mmtrain", " ".join(command)), file=sys.stderr, flush=True)
    subprocess.run(command, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    main()
