"""`mmtrain finetune MODEL DATA`: from a stored model and data to a fine-tuned folder, by a TOML that it prints."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mmtrain.errors import ConfigError, for_terminal

if TYPE_CHECKING:
    from mmtrain.commands.finetune_table import Devices, FineTuning
    from mmtrain.config.config import Config

_TOML, _MODEL = "finetune.toml", "model"
"""Names in the run folder: of the job, and of the exported model."""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "finetune",
        help="fine-tune a stored model on your data",
        usage="mmtrain finetune [-h] MODEL DATA [--out DIR] [--lora] [--freeze PART] [--epochs N] [--dry-run] "
        "[--section.key=value ...]",
        description="Looks at a stored model and at your data, prints what it found and the TOML that it makes of it, "
        "trains, validates on samples that it holds out, answers some of their questions, and writes one folder that "
        "transformers reads: DIR/model. The TOML is DIR/finetune.toml; `mmtrain train --config` runs it as well, also "
        "on several machines. A run that was stopped goes on with the same command.",
        epilog="Any key of the TOML can be given by its dotted name, as --optimizer.lr=2e-5 or "
        "--data.max_pixels=401408; docs/config.md lists all of them.",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="folder or hub id of a whole vision-language model, or of a language model"
    )
    parser.add_argument(
        "data",
        metavar="DATA",
        help="conversations (docs/data.md): a .json, .jsonl or .parquet file, a folder, or a hub id",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="run folder (default: outputs/ and the names of both)")
    parser.add_argument(
        "--lora",
        action="store_true",
        help="train low-rank adapters of the language model alone, merged at the end",
    )
    parser.add_argument(
        "--freeze",
        action="append",
        default=[],
        metavar="PART",
        help="leave a part as it is: vision, projector, language or audio; again for more parts",
    )
    parser.add_argument("--epochs", type=float, metavar="N", help="passes over the training samples (default 3)")
    parser.add_argument("--dry-run", action="store_true", help="write and print the TOML, and train nothing")
    parser.set_defaults(run=_finetune, takes_overrides=True, overrides=[])


def _finetune(args: argparse.Namespace) -> int:
    if "WORLD_SIZE" in os.environ:
        raise ConfigError(
            "finetune: torchrun has started this process, but finetune starts the ranks of one machine itself; run "
            "`mmtrain finetune ... --dry-run` once, then torchrun with train.py --config DIR/finetune.toml"
        )
    if args.epochs is not None and not args.epochs > 0:
        raise ConfigError(f"finetune: --epochs {args.epochs:g}; it must be above 0")
    from mmtrain.commands.finetune_table import FineTuningRequest, prepared
    from mmtrain.commands.job_checks import check_job
    from mmtrain.launch.folder_owner import owned
    from mmtrain.local.ranks import train_on_ranks

    out = args.out or Path("outputs", f"{_name(args.model)}-{_name(args.data)}")
    if (out / _MODEL).exists():
        raise ConfigError(f"finetune: {out / _MODEL} is there already; give another --out, or remove it")
    wanted = FineTuningRequest(
        model=args.model,
        data=args.data,
        out=out,
        lora=args.lora,
        freeze=args.freeze,
        epochs=args.epochs,
        overrides=args.overrides,
    )
    devices = _devices()
    made = prepared(wanted, devices)
    for line in _found(made, devices):
        print(for_terminal(line))
    print(for_terminal(f"\n{made.toml}"), flush=True)
    check_job(made.config)
    folder = Path(made.config.job.dump_folder)
    _keep(folder, made.toml)
    if args.dry_run:
        print(for_terminal(f"not run: mmtrain train --config {folder / _TOML}"))
        return 0
    with owned(folder):  # refuses a folder that rank 0 could not use
        pass
    train_on_ranks(made.config)
    _export(made.config, folder)
    return 0


def _name(source: str) -> str:
    """The last part of a path or an id."""
    return Path(source).name.removesuffix(Path(source).suffix) or "data"


def _devices() -> "Devices":
    """The CUDA devices of this machine, or one process on its CPU."""
    import torch

    from mmtrain.commands.finetune_table import Devices
    from mmtrain.observe.step_memory import DeviceMemory

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device("cuda", 0) if count else torch.device("cpu")
    name = torch.cuda.get_device_name(0) if count else "CPU"
    memory = DeviceMemory.own(device, max(count, 1)).device_bytes
    return Devices(count=max(count, 1), memory_bytes=memory, name=name, is_cpu=not count)


def _found(made: "FineTuning", devices: "Devices") -> list[str]:
    """What to tell the user before the TOML."""
    from mmtrain.config.memory_amount import show_gib
    from mmtrain.data.chat_templates import prompt_notes
    from mmtrain.data.tokenizer import job_tokenizer

    job = made.config
    modules = ", ".join(
        f"{module.name} {module.num_params / 1e6:,.1f} M{'' if module.trainable else ' frozen'}"
        for module in made.spec.modules
    )
    lines = [
        f"model: {made.family}, {made.spec.num_params:,} parameters ({modules}), "
        f"of which {made.spec.num_trained_params:,} train"
    ]
    lines += [f"data: {line}" for line in made.found.lines(job.training.seq_len)]
    held_out = "a stream" if made.held_out is None else f"{made.held_out:,} samples"
    where = "of the same, not trained on" if job.data.validation_part else f"the split {job.data.validation_split}"
    lines.append(f"validation: {held_out}, {where}")
    tokenizer = job_tokenizer(job)
    lines.append(f"template: {' '.join(_shown_template(tokenizer).split())}")
    lines += [f"template: {note}" for note in prompt_notes(tokenizer)]
    state, activations = _memory(job)
    total, room = state + activations, devices.memory_bytes
    lines.append(
        f"memory: about {show_gib(total)} GiB of the {show_gib(room)} of each of {devices.count} {devices.name}: "
        f"{show_gib(state)} weights, gradients and moments, {show_gib(activations)} activations"
    )
    if total > room:
        more = "planner.memory_limit makes activations smaller; " if state < room else ""
        lines.append(f"memory: more than there is; {more}try --lora, --freeze vision or more devices")
    return lines


def _shown_template(tokenizer: object) -> str:
    """What the template makes of a question and its answer."""
    from mmtrain.data.tokenizer import content_form

    user, assistant = (content_form(tokenizer, role) for role in ("user", "assistant"))
    turns = [{"role": "user", "content": user("QUESTION")}, {"role": "assistant", "content": assistant("ANSWER")}]
    return str(tokenizer.apply_chat_template(turns, tokenize=False))  # type: ignore[attr-defined]


def _memory(job: "Config") -> tuple[float, float]:
    """Bytes of the most loaded rank without activations, and of activations in the first step, as they are planned."""
    from mmtrain.config.config import of_pipeline
    from mmtrain.data.loader import Loader
    from mmtrain.planner.iteration import IterationPlanner
    from mmtrain.planner.make_plan import make_plan
    from mmtrain.planner.memory.limit import MemoryRule
    from mmtrain.simulator.make_job import make_job

    made = make_job(of_pipeline(job, 0))
    budget = MemoryRule.of(job, device_bytes=1e18).budget(made.spec, made.partition)
    state = max(rank.fixed_bytes for rank in budget.ranks)
    layout = job.parallelism.layout
    with Loader(job, dp_degree=layout.dp, num_workers=0, num_steps=1, may_be_short=True) as loader:
        ((_, meta, _),) = loader
    result = make_plan(IterationPlanner(made).problem(meta, searched=False)[1], made.schedule)
    return state, max(result.timeline.peak_bytes) if result.has_plan else 0.0


def _keep(folder: Path, toml: str) -> None:
    """Writes the TOML into the run folder. Raises: ConfigError: the folder has another one."""
    path = folder / _TOML
    if path.exists() and path.read_text(encoding="utf-8") != toml:
        raise ConfigError(f"finetune: {path} is of another fine-tuning; give another --out, or remove that folder")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(toml, encoding="utf-8")


def _export(job: "Config", folder: Path) -> None:
    """Writes the best checkpoint as one folder, and says how to ask it."""
    from mmtrain.export.adapter_folders import ExportForm
    from mmtrain.export.folder import export

    best: Literal["best"] | None = "best" if job.checkpoint.keep_best and job.validation.enable else None
    lora = job.model.language.trainable == "lora"
    made = export(folder, folder / _MODEL, step=best, form=ExportForm(merge_adapters=lora))
    what = made.model or ", ".join(made.folders)
    print(f"{folder / _MODEL}: step {made.step}{' (the best)' * bool(best)} as {what}, {made.num_bytes / 1e6:.1f} MB")
    source = folder / _MODEL if made.model else folder
    image = " --image FILE" * bool(job.model.encoder)
    print(for_terminal(f'ask it: mmtrain generate {source}{image} --prompt "..."'))
