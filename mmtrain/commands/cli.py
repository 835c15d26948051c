"""The `mmtrain` command. Bad input ends with one line on standard error and exit status 2."""

import argparse
import difflib
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
    generate,
    plan,
    profile,
    report,
    sample,
    schedule,
    simulate,
    tune,
)
from mmtrain.commands.local_ranks import RankDiedError, Stopped, train_on_ranks
from mmtrain.config import config
from mmtrain.config.model import ModelConfig
from mmtrain.errors import MMTrainError, for_terminal, shown
from mmtrain.launch.folder_owner import owned
from mmtrain.launch.launched import Launched, local_world_size, meeting_point
from mmtrain.launch.processes import check_temporary_folder, end_with_parent, environment, leave

_OVERRIDE = re.compile(r"--[\w-]+\.[^\s=]+=")
"""The beginning of `--section.key=value`."""


class _Parser(argparse.ArgumentParser):
    """An argument parser that suggests the nearest name for an unknown command."""

    def error(self, message: str) -> NoReturn:
        super().error(for_terminal(message))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action.choices, dict) and value not in action.choices:
            near = difflib.get_close_matches(value, action.choices, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(action.choices)}"
            raise argparse.ArgumentError(None, f"there is no command {value!r}; {hint}")
        super()._check_value(action, value)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `mmtrain` command. Returns the exit status."""
    parser: argparse.ArgumentParser = _Parser(
        prog="mmtrain",
        description="Trains large multimodal models on pipelines that are planned anew for every batch.",
    )
    parser.add_argument("--version", action="version", version=f"mmtrain {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_train(commands)
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
    try:
        return run(args)
    except MMTrainError as error:
        return _said(str(error), 2)
    except RankDiedError as error:
        if error.text:
            print(for_terminal(error.text), file=sys.stderr)
        return _said(str(error), error.exit_status)
    except Stopped as stop:
        return stop.exit_status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        named = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        return _said(named, 2)


def _said(text: str, status: int) -> int:
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
        usage="mmtrain train [-h] --config CONFIG [--section.key=value ...]",
        description="Trains the model of a TOML file. Starts all ranks of the job on this machine, unless a "
        "launcher (torchrun) already did. Any --section.key=value overrides the file.",
    )
    parser.add_argument("--config", required=True, help="TOML file; a bare name is looked up in configs/")
    parser.set_defaults(run=_train, takes_overrides=True, overrides=[])


def _train(args: argparse.Namespace) -> int:
    """Checks the config, then runs this rank or launches all ranks."""
    job = config.load(args.config, args.overrides)
    if "WORLD_SIZE" in os.environ:
        return _train_rank(args)
    from mmtrain.modality.buckets import check_video
    from mmtrain.modality.readers import check_readable
    from mmtrain.simulator.job import check_nodes, make_job
    from mmtrain.spec.job_files import check_files

    check_temporary_folder(job.data.num_workers)
    check_video(job)
    check_readable(job.model)
    check_nodes(job)
    # Refuses a model that cannot be built, cut or divided, before any rank starts.
    config.each_pipeline(job, make_job)
    check_files(job.model, job.tokenizer)
    _check_adapters(job.model)
    with owned(Path(job.job.dump_folder)):  # refuses a folder that rank 0 could not use
        pass
    train_on_ranks(job)
    return 0


def _check_adapters(model: ModelConfig) -> None:
    """Refuses adapters that the model cannot start from. Raises: ConfigError."""
    if model.lora.pretrained:
        from mmtrain.models.adapter_weights import stored_adapters

        stored_adapters(model)


def _train_rank(args: argparse.Namespace) -> int:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    job, launched = config.load(args.config, args.overrides), Launched.from_environment()
    job.parallelism.layout.check_world_size(launched.world_size)
    job.parallelism.layout.check_nodes(local_world_size(launched.world_size))
    if launched.world_size > 1:
        meeting_point()  # at once, not when the model is planned
    from mmtrain.trainer import Trainer

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
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint to take (default: the newest)")
    parser.add_argument(
        "--merge-adapters", action="store_true", help="add low-rank adapters to the weights that they adapt"
    )
    parser.add_argument(
        "--parts", action="store_true", help="a folder for each module, also where they make a whole model"
    )
    parser.set_defaults(run=_export)


def _export(args: argparse.Namespace) -> int:
    from mmtrain.commands.export import export

    made = export(args.source, args.out, step=args.step, merge_adapters=args.merge_adapters, parts=args.parts)
    what = ", ".join([made.model, *made.folders] if made.model else made.folders)
    print(f"{args.out}: step {made.step} as {what}, {made.num_bytes / 1e6:.1f} MB")
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
    from mmtrain.schedule.library.names import is_recipe
    from mmtrain.simulator.job import check_nodes, job_spec, make_job
    from mmtrain.spec.job_files import check_files

    job = config.load(args.config, args.overrides)
    print(for_terminal(config.dump(job)), end="", flush=True)
    check_nodes(job)
    schedule = job.parallelism.pipeline_parallel_schedule
    if is_recipe(schedule):
        job_spec(job)
        summary = f"{shown(schedule)} is a program, which is not run here: how it cuts the model is not checked"
    else:
        made = config.each_pipeline(job, make_job)  # refuses a model that cannot be built, cut or divided
        summary = "; ".join(dict.fromkeys(one.partition_summary for one in made if one.partition_summary))
    check_files(job.model, job.tokenizer)
    _check_adapters(job.model)
    if summary:
        print(f"\n# {summary}")
    return 0


if __name__ == "__main__":
    leave(main())
