"""The `mmtrain` command. Bad input ends with one line on standard error and exit status 2."""

import argparse
import json
import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from mmtrain import __version__
from mmtrain.commands import (
    allocate,
    check,
    check_parity,
    data,
    doctor,
    finetune,
    generate,
    plan,
    profile,
    report,
    sample,
    schedule,
    simulate,
    tune,
)
from mmtrain.commands.elastic_nodes import node_counts, train_node, train_on_nodes
from mmtrain.config import config
from mmtrain.errors import ConfigError, MMTrainError, for_terminal, nearest
from mmtrain.launch.device_allocator import set_allocator
from mmtrain.launch.folder_owner import owned
from mmtrain.launch.launched import Launched, local_world_size, meeting_point
from mmtrain.launch.processes import end_with_parent, environment, leave
from mmtrain.local.ranks import RankDiedError, Stopped, train_on_ranks

_OVERRIDE = re.compile(r"--[\w-]+\.[^\s=]+=")
"""The beginning of `--section.key=value`."""


class _Parser(argparse.ArgumentParser):
    """An argument parser that suggests the nearest name for an unknown command or choice."""

    def error(self, message: str) -> NoReturn:
        super().error(for_terminal(message))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = action.choices or ()
        if not choices or value in choices:
            return
        near = nearest(str(value), map(str, choices))
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(map(str, choices))}"
        if isinstance(choices, dict):
            raise argparse.ArgumentError(None, f"there is no command {value!r}; {hint}")
        raise argparse.ArgumentError(action, f"there is no choice {value!r}; {hint}")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `mmtrain` command. Returns the exit status."""
    parser: argparse.ArgumentParser = _Parser(
        prog="mmtrain",
        description="Trains large multimodal models on pipelines that are planned anew for every batch.",
    )
    parser.add_argument("--version", action="version", version=f"mmtrain {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    finetune.add(commands)
    _add_train(commands)
    doctor.add(commands)
    _add_export(commands)
    generate.add(commands)
    sample.add(commands)
    check_parity.add(commands)
    _add_config(commands)
    data.add(commands)
    schedule.add(commands)
    plan.add(commands)
    check.add(commands)
    profile.add(commands)
    simulate.add(commands)
    allocate.add(commands)
    tune.add(commands)
    report.add(commands)
    words = list(sys.argv[1:] if argv is None else argv)
    overrides = [word for word in words if _OVERRIDE.match(word)]  # argparse takes one with a space for a position
    args, rest = parser.parse_known_args([word for word in words if not _OVERRIDE.match(word)])
    rest += overrides
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    if rest:
        if not getattr(args, "takes_overrides", False):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        args.overrides = rest
    for name, value in vars(args).items():  # a shell leaves `~` in --out=~/plan.json
        setattr(args, name, [_at_home(item) for item in value] if isinstance(value, list) else _at_home(value))
    return _guarded(args.run, args)


def _at_home(value: Any) -> Any:
    """A path with `~` expanded; any other argument as it is."""
    return Path(os.path.expanduser(value)) if isinstance(value, Path) else value


def train_main(argv: Sequence[str] | None = None) -> int:
    """Entry point of train.py: one rank under torchrun, or the whole job of one rank. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="train.py",
        usage="train.py [-h] --config CONFIG [--section.key=value ...]",
        description="Runs one rank of a training job. Any --section.key=value, in TOML syntax, overrides the file.",
    )
    parser.add_argument("--config", required=True, help="TOML file; a bare name is looked up in configs/")
    args, overrides = parser.parse_known_args(argv)
    args.overrides = overrides
    return _guarded(_train_rank, args)


def _guarded(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """The exit status of a command; an error is one line on standard error."""
    # Each rank and each data worker would repeat what transformers warns of, such as special tokens out of range.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    set_allocator()
    try:
        return run(args)
    except MMTrainError as error:
        return _print_error(str(error), 2)
    except RankDiedError as error:
        if error.text:
            print(for_terminal(error.text), file=sys.stderr)
        return _print_error(str(error), error.exit_status)
    except Stopped as stop:
        return stop.exit_status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        named = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        return _print_error(named, 2)


def _print_error(text: str, status: int) -> int:
    """The status, after the text was printed. Of the processes that torchrun started here, one prints what all say."""
    text, report, first = for_terminal(text), os.environ.get("TORCHELASTIC_ERROR_FILE"), True
    if report is not None:
        with suppress(OSError):  # then each process says it
            first = _is_first(Path(report).parent.parent / f"said-{zlib.crc32(text.encode())}")
    if first:
        rank = os.environ.get("RANK")
        print(f"error{'' if rank is None else f' [rank {rank}]'}: {text}", file=sys.stderr, flush=True)
    if report is not None:
        # torchrun's last lines show what each process wrote; the earliest, in seconds, comes last as the root cause.
        message, time_s = text if first else "the error of another process", int(time.time()) - first
        summary = {"message": message, "extraInfo": {"timestamp": str(time_s)}}
        with suppress(OSError):
            Path(report).write_text(json.dumps({"message": summary}))
    return status


def _is_first(marker: Path) -> bool:
    """Whether no other process made this file before. Raises: OSError: it cannot be made."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


# ------------------------------------------------------------------------------------------------ train


def _add_train(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "train",
        help="train a model",
        usage="mmtrain train [-h] --config CONFIG [--nodes N] [options] [--section.key=value ...]",
        description="Trains the model of a TOML file. Starts all ranks of the job on this machine, unless a "
        "launcher (torchrun) already did. With --nodes: as an elastic job whose nodes are groups of processes of this "
        "machine, to try what a lost node does (docs/multi_node.md). Any --section.key=value overrides the file.",
    )
    parser.add_argument("--config", required=True, help="TOML file; a bare name is looked up in configs/")
    parser.add_argument("--nodes", type=int, metavar="N", help="nodes of an elastic job (elastic.enable)")
    parser.add_argument(
        "--nproc-per-node", type=int, metavar="M", help="with --nodes: ranks of a node (default: those of a stage)"
    )
    parser.add_argument(
        "--max-restarts", type=int, metavar="R", help="with --nodes: how often a lost node comes back (default 0)"
    )
    parser.set_defaults(run=_train, takes_overrides=True, overrides=[])


def _train(args: argparse.Namespace) -> int:
    """Checks the config, then runs this rank or launches all ranks."""
    if "WORLD_SIZE" in os.environ:
        for name in ("nodes", "nproc_per_node", "max_restarts"):
            if (value := getattr(args, name)) is not None:
                raise ConfigError(
                    f"train: --{name.replace('_', '-')} {value}, but torchrun has started this process, which is of "
                    "one node; leave the option out, or start mmtrain train --nodes without torchrun"
                )
        return _train_rank(args)
    from mmtrain.commands.job_checks import check_job
    from mmtrain.parallel.mesh import on_own_device

    job = on_own_device(config.load(args.config, args.overrides))
    nodes = node_counts(job, args.nodes, args.nproc_per_node, args.max_restarts)
    check_job(job)  # before any rank starts
    with owned(Path(job.job.dump_folder)):  # refuses a folder that rank 0 could not use
        pass
    if nodes is None:
        train_on_ranks(job)
    else:
        train_on_nodes(job, nodes)
    return 0


def _train_rank(args: argparse.Namespace) -> int:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    job, launched = config.load(args.config, args.overrides), Launched.from_environment()
    if job.elastic.enable:
        with environment({}):
            train_node(job)
        return 0
    job.parallelism.layout.check_world_size(launched.world_size)
    job.parallelism.layout.check_nodes(local_world_size(launched.world_size))
    if launched.world_size > 1:
        meeting_point()  # at once, not when the model is planned
    from mmtrain.commands.job_checks import check_inputs
    from mmtrain.training.trainer import Trainer

    if not launched.local_rank:
        check_inputs(job)
    with environment({}):
        Trainer(job).run()
    return 0


# ----------------------------------------------------------------------------------------------- export


def _add_export(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "export",
        help="write a checkpoint as Hugging Face folders",
        description="Writes a checkpoint as Hugging Face classes and this trainer read it: one folder of a whole "
        "vision-language model where transformers has a class for its parts; else, or with --parts, folders language, "
        "vision, projector, those of further encoders, dit with its scheduler, and adapters. With a README.md. Needs "
        "one process, and memory for the model, of parts for one at a time.",
    )
    parser.add_argument("source", type=Path, metavar="RUN", help="job.dump_folder of the job that trained")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make")
    parser.add_argument("--step", type=sample.checkpoint_step, metavar="N", help=sample.STEP)
    parser.add_argument("--weights", choices=("ema", "trained"), default="trained", help=sample.WEIGHTS + "trained)")
    parser.add_argument(
        "--merge-adapters", action="store_true", help="add low-rank adapters to the weights that they adapt"
    )
    parser.add_argument(
        "--parts", action="store_true", help="a folder for each module, also where they make a whole model"
    )
    parser.add_argument(
        "--adapters-only", action="store_true", help="write low-rank adapters without the weights that they adapt"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the numbers in the files"
    )
    parser.add_argument(
        "--push",
        metavar="ID",
        help="then upload the folder to the hub (HF_ENDPOINT, HF_TOKEN); a new repository is private",
    )
    parser.set_defaults(run=_export)


def _export(args: argparse.Namespace) -> int:
    import torch

    from mmtrain.export.adapter_folders import ExportForm
    from mmtrain.export.folder import export
    from mmtrain.export.push import check_push, push

    if args.push:
        check_push(args.push)
    made = export(
        args.source,
        args.out,
        step=args.step,
        weights=args.weights,
        form=ExportForm(
            merge_adapters=args.merge_adapters,
            adapters_only=args.adapters_only,
            dtype=getattr(torch, args.dtype),
        ),
        parts=args.parts,
    )
    what = ", ".join([made.model, *made.folders] if made.model else made.folders)
    averaged = ", averages of the weights," if args.weights == "ema" else ""
    print(f"{args.out}: step {made.step}{averaged} as {what}, {made.num_bytes / 1e6:.1f} MB")
    if args.push:
        print(f"{args.push}: {push(args.out, args.push, f'Step {made.step}')}")
    return 0


# ----------------------------------------------------------------------------------------------- config


def _add_config(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "config",
        help="print a config with all its defaults",
        usage="mmtrain config [-h] --config CONFIG [--section.key=value ...]",
        description="Prints a TOML file resolved: bases, overrides and defaults included. Then checks that its model, "
        "whose config.json may come from the hub, can be built, cut and divided as it says, and that local folders "
        "hold its weights and tokenizer. Runs no program: a recipe is not read. Any --section.key=value overrides the "
        "file.",
    )
    parser.add_argument("--config", required=True, help="TOML file; a bare name is looked up in configs/")
    parser.set_defaults(run=_config, takes_overrides=True, overrides=[])


def _config(args: argparse.Namespace) -> int:
    from mmtrain.commands.job_checks import check_job
    from mmtrain.costs.job_costs import on_hardware

    job = config.load(args.config, args.overrides)
    print(for_terminal(config.dump(job)), end="", flush=True)
    if summary := check_job(on_hardware(job), runs_recipes=False):
        print(f"\n# {summary}")
    return 0


if __name__ == "__main__":
    leave(main())
