"""`mmtrain check-parity`: whether a job's layout computes what one process computes."""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from mmtrain.config import config
from mmtrain.errors import ConfigError, for_terminal


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "check-parity",
        help="compare a layout with one process",
        usage="mmtrain check-parity [-h] --config CONFIG [options] [--section.key=value ...]",
        description="Whether a job's layout computes what one process computes. Makes the model and the batch of a "
        "config small, runs a step of the layout on processes of this machine (CPU), and compares loss, gradient norm "
        "and every gradient with the one-process model. Exit status 0: they agree; 1: they do not; 2: bad config or "
        "data. Any --section.key=value overrides the file.",
    )
    parser.add_argument("--config", required=True, help="TOML file; a bare name is looked up in configs/")
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="batches to compare (default 1)")
    parser.add_argument(
        "--tolerance", type=float, metavar="T", help="relative (default 1e-4; 0.03 of all gradients with bfloat16)"
    )
    parser.add_argument("--seq-len", type=int, metavar="T", help="tokens of a small microbatch (default 512)")
    parser.add_argument(
        "--synthetic",
        action="store_true",
        help="drawn charts, text or clips instead of the config's data; noise with further encoders",
    )
    parser.set_defaults(run=_check_parity, takes_overrides=True, overrides=[])


def _check_parity(args: argparse.Namespace) -> int:
    from mmtrain.simulator.shrink import SEQ_LEN, shrink

    seq_len = SEQ_LEN if args.seq_len is None else args.seq_len
    for name, value, least in (("--steps", args.steps, 1), ("--seq-len", seq_len, 2)):
        if value < least:
            raise ConfigError(f"check-parity: {name} {value}; it is at least {least}")
    if args.tolerance is not None and not args.tolerance > 0:
        raise ConfigError(f"check-parity: --tolerance {args.tolerance}; it is above 0")
    small = shrink(config.load(args.config, args.overrides), seq_len=seq_len)
    from mmtrain.local.parity import check_parity, describe, report, synthetic_data

    with tempfile.TemporaryDirectory(prefix="mmtrain-parity-") as folder:
        job = small.config
        noise = args.synthetic and bool(job.model.modules)
        if args.synthetic and not noise:
            job = replace(job, data=synthetic_data(job, Path(folder)))
        print(describe(job))
        data = "noise" if noise else "synthetic" if args.synthetic else job.data.description
        print(for_terminal(f"data    {data}"), flush=True)
        for note in small.notes:
            print(f"changed {note}", flush=True)
        parity = check_parity(job, num_steps=args.steps, tolerance=args.tolerance, noise=noise, say=_progress)
    print(report(parity))
    return 1 if parity.problems else 0


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
