"""`mmtrain doctor`: looks at everything that a job will open, before any GPU hour."""

import argparse
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mmtrain.config import config
from mmtrain.config.config import Config
from mmtrain.errors import ConfigError, for_terminal
from mmtrain.launch.launched import Launched, local_world_size, meeting_point, whole_number

if TYPE_CHECKING:
    from mmtrain.spec.spec import ModelSpec

_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED_BYTES = 2**28
"""The least shared memory for each data worker, which passes batches through it: docker gives 64 MiB unless told
otherwise."""
_PORT = 29500
"""The port at which torchrun's processes meet unless told otherwise."""


class Finding(NamedTuple):
    """A line of the report."""

    is_good: bool
    """Whether all is well; False: a warning, which does not stop `mmtrain train`."""
    text: str


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "doctor",
        help="look at all that a job opens before it trains",
        usage="mmtrain doctor [-h] --config CONFIG [--samples N] [--section.key=value ...]",
        description="Checks all that `mmtrain config` checks, and opens what a job opens: names and shapes of stored "
        "weights, tokenizer and chat template (token by token against transformers' processor of the same folder), "
        "the data, of which it makes the first step and counts tokens, disk, shared memory, ports and the launcher's "
        "variables. Started by torchrun on several ranks, it also measures each pair of them. What `train` would "
        "refuse ends it with one line and exit status 2; a line with `warn` does not.",
    )
    parser.add_argument("--config", required=True, help="TOML file; a bare name is looked up in configs/")
    parser.add_argument(
        "--samples", type=int, metavar="N", help="samples to look at, of each split and source (default 2000)"
    )
    parser.set_defaults(run=_doctor, takes_overrides=True, overrides=[])


def _doctor(args: argparse.Namespace) -> int:
    if args.samples is not None and args.samples < 1:
        raise ConfigError(f"doctor: --samples {args.samples}; it must be at least 1")
    launched = Launched.from_environment()
    from mmtrain.parallel.mesh import on_own_device

    job = on_own_device(config.load(args.config, args.overrides))
    if launched.world_size == 1:
        _report(_looked_at(job, args.samples))
        return 0
    job.parallelism.layout.check_world_size(launched.world_size)
    job.parallelism.layout.check_nodes(local_world_size(launched.world_size))
    meeting_point()
    from mmtrain.parallel.job_group import JobGroup
    from mmtrain.parallel.mesh import pick_device
    from mmtrain.parallel.pair_speeds import measure_pairs
    from mmtrain.planner.job_schedule import job_schedule

    device = pick_device(job.comm)
    group = JobGroup(job, device)
    try:
        with group.joined(job_schedule(job), lambda function: f"in {function}"):
            if launched.rank == 0:
                _report(_looked_at(job, args.samples))
            elif launched.local_rank == 0:
                list(_of_machine(job))
            measured = measure_pairs(device)
            if launched.rank == 0:
                _report(Finding(True, f"ranks: {line}") for line in measured.lines())
    finally:
        group.leave()
    return 0


def _report(findings: Iterator[Finding]) -> None:
    for finding in findings:
        print(for_terminal(f"{'ok  ' if finding.is_good else 'warn'}  {finding.text}"), flush=True)


def _looked_at(job: Config, most: int | None) -> Iterator[Finding]:
    """Looks at one part of the job after the other. Raises: MMTrainError: what `train` refuses."""
    from mmtrain.commands.job_checks import check_job

    summary = check_job(job)
    yield Finding(True, f"config: the model can be built, cut and divided{'; ' * bool(summary)}{summary}")
    yield from _of_launcher(job)
    yield _weights(job)
    if not (job.model.reads_clips or job.model.reads_pairs):
        yield from _tokens(job)
    yield from _data(job, most)
    yield from _of_machine(job)


def _weights(job: Config) -> Finding:
    from mmtrain.models.pretrained import check_pretrained
    from mmtrain.spec.builders import model_spec

    spec = model_spec(job.model)
    stored = check_pretrained(job.model, spec)
    of = f"{stored} tensors are stored with the names and shapes that the model has" if stored else "random"
    return Finding(True, f"weights: {of}; {spec.num_params:,} parameters")


def _tokens(job: Config) -> Iterator[Finding]:
    """Tokenizer and chat template."""
    from mmtrain.data.chat_templates import prompt_notes
    from mmtrain.data.processor_check import compare_processors
    from mmtrain.data.tokenizer import job_tokenizer

    tokenizer = job_tokenizer(job)
    yield Finding(True, f"tokenizer: {len(tokenizer):,} entries")
    for note in prompt_notes(tokenizer):
        yield Finding(False, f"template: {note}")
    compared = compare_processors(job)
    if compared.is_equal:
        text = f"{compared.num_tokens} tokens of a drawn conversation are those of transformers' {compared.theirs}"
        yield Finding(True, f"template: {text}")
    elif compared.theirs:
        text = f"transformers' {compared.theirs} of the same folder makes other tokens of a drawn conversation"
        yield Finding(False, f"template: {text}, {compared.difference}")
    else:
        yield Finding(True, f"template: not compared, {compared.difference}")


def _data(job: Config, most: int | None) -> Iterator[Finding]:
    """The first step of each split as `train` makes it, and statistics."""
    from mmtrain.data.statistics import MOST_SAMPLES, statistics

    splits = [job.data.split, *([job.data.validation_split] if job.validation.enable else [])]
    for split in splits:
        _make_step(job, split)
        if job.model.reads_clips:
            yield Finding(True, f"data, {split}: the first step can be made")
            continue
        found = statistics(job, split, most or MOST_SAMPLES)
        _refuse_samples(job, split, most or MOST_SAMPLES)
        for line in found.lines(job.training.seq_len):
            yield Finding(not (found.unreadable and line.startswith("cannot")), f"data, {split}: {line}")


def _make_step(job: Config, split: str) -> None:
    """Makes the first step of a split, content included. Raises: MMTrainError: as `train` does."""
    from mmtrain.data.loader import Loader

    first = split == job.data.split
    with Loader(
        job, split=split, num_steps=1, num_workers=0, may_be_short=not first or bool(job.training.epochs)
    ) as of:
        for _ in of:
            pass


def _refuse_samples(job: Config, split: str, most: int) -> None:
    """Refuses the samples that `train` would refuse when it comes to them. Raises: DataError: of the first one."""
    if split != job.data.split or (job.data.on_error, job.data.too_long) == ("skip", "skip"):
        return
    from mmtrain.data.statistics import spread
    from mmtrain.data.step_maker import StepMaker

    maker = StepMaker(job, split=split, shuffle=False, dp_rank=0, dp_degree=1)
    for number in spread(maker.num_samples, most):
        if maker.size_of(number) is None:
            return
        maker.forget()


def _of_launcher(job: Config) -> Iterator[Finding]:
    """Variables of the launcher, and the port where ranks would meet."""
    threads = whole_number("OMP_NUM_THREADS")
    launched, world = Launched.from_environment(), job.parallelism.layout.world_size
    if launched.world_size > 1:
        host, port = meeting_point()
        yield Finding(True, f"launcher: rank {launched.rank} of {launched.world_size}, which meet at {host}:{port}")
    else:
        yield Finding(True, f"launcher: none; the job has {world} ranks, of {threads or 1} threads each")
        if world > 1 and not _is_free(_PORT):
            text = f"port {_PORT}, where torchrun lets ranks meet, is taken here; give torchrun another --master-port"
            yield Finding(False, f"ports: {text}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    here = local_world_size(world)
    if here > cores:
        yield Finding(False, f"cores: {here} ranks on {cores} cores of this machine take turns")


def _of_machine(job: Config) -> Iterator[Finding]:
    """Disk and shared memory of this machine."""
    from mmtrain.spec.builders import model_spec

    host = socket.gethostname()
    if job.checkpoint.enable:
        folder = Path(job.job.dump_folder).absolute()
        exists = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
        free, one = shutil.disk_usage(exists).free, checkpoint_bytes(job, model_spec(job.model))
        needed = one * (job.checkpoint.keep_latest_k + 1)
        text = f"disk: {free / 2**30:,.1f} GiB free at {exists} ({host}); a checkpoint takes {one / 2**30:,.2f} GiB"
        more = f", and {job.checkpoint.keep_latest_k + 1} may be there at a time" if needed > free else ""
        yield Finding(needed <= free, text + more)
    if job.data.num_workers and _SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(_SHARED_MEMORY).free
        enough = free >= _LEAST_SHARED_BYTES * job.data.num_workers
        text = f"shared memory: {free / 2**20:,.0f} MiB free in {_SHARED_MEMORY} ({host})"
        yield Finding(enough, text if enough else f"{text}, which data workers fill; docker takes --shm-size=8g")


def checkpoint_bytes(job: Config, spec: "ModelSpec") -> int:
    """Bytes of one checkpoint, as [checkpoint] counts them."""
    return 4 * spec.num_params + spec.num_trained_params * (8 + 4 * bool(job.optimizer.ema_decay))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
