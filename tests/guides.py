"""The guides under docs/ as scripts: their files are written, their commands run, in the order of the page."""

import io
import re
import shlex
import subprocess
import sys
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from mmtrain.commands import cli
from mmtrain.data.toy.shapes import make_easy_shapes
from mmtrain.launch.processes import end_with_parent
from tests.ranks import warm_ranks
from tests.store import stored_folder

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

SHORT = (
    "--training.steps=2",
    "--lr_scheduler.warmup_steps=1",
    "--validation.enable=false",
    "--validation.generate=0",
    "--validation.samples=0",
)
"""What every training of a guide gets in addition."""
NO_WORKERS = ("--data.num_workers=0",)
"""And what those get that run here: each worker's process would import torch again."""
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""A fenced block: its language and its lines."""
_NAMED = re.compile(r"`([\w./-]+\.(?:py|toml|json|yaml|sbatch))`[^`.\n]*:\n\n$")
"""What stands in front of a block that is a whole file."""
_SETTING = re.compile(r"`([a-z_]+\.[a-z_.]+) = ([^`]+)`")


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page that are written in a language."""
    return [body for found, body in BLOCK.findall(page.read_text()) if found == language]


@dataclass(frozen=True)
class File:
    """A file that a page shows in full, with its name in front."""

    name: str
    text: str


@dataclass(frozen=True)
class Command:
    """One command of a page's shell blocks, its lines joined and without its comment."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.words)


def advised(page: str) -> list[tuple[str, tuple[str, ...]]]:
    """The settings of each sentence of a page, as overrides, with the config file that the page showed last."""
    found, job = [], ""
    for part in re.split(r"(?=```)|(?<=[.:])\s", (DOCS / page).read_text()):
        if named := re.search(r"`([\w./-]+\.toml)`:$", part):
            job = named[1]
        settings = tuple(f"{key}={value}" for key, value in _SETTING.findall(part))
        if job and settings:
            found.append((job, settings))
    return found


def steps(page: str) -> list[File | Command]:
    """The files and commands of a page, from the top to the bottom."""
    found: list[File | Command] = []
    text = (DOCS / page).read_text()
    for match in BLOCK.finditer(text):
        language, body = match.groups()
        if named := _NAMED.search(text[: match.start()]):
            found.append(File(named[1], body))
        elif language in ("bash", "sh"):
            words = (tuple(shlex.split(line, comments=True)) for line in body.replace("\\\n", " ").splitlines())
            found += [Command(command) for command in words if command]
    return found


def run(command: Command, folder: Path) -> str:
    """What a command prints that runs in a folder; trainings are shortened. `mmtrain` runs in this process.

    Raises: AssertionError: its exit status is not 0.
    """
    program, *words = _short(command, NO_WORKERS)
    if program != "mmtrain":
        return run_anew(command, folder)
    printed = io.StringIO()
    with chdir(folder), warm_ranks(), redirect_stdout(printed):
        assert cli.main(words) == 0, command
    return printed.getvalue()


def run_anew(command: Command, folder: Path) -> str:
    """The same in processes of its own, as a reader starts it."""
    program, *words = _short(command)
    start = {"mmtrain": ["-m", "mmtrain.commands.cli"], "torchrun": ["-m", "torch.distributed.run"], "python": []}
    done = subprocess.run(
        [sys.executable, *start[program], *words],
        cwd=folder,
        capture_output=True,
        text=True,
        preexec_fn=end_with_parent,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def _short(command: Command, more: tuple[str, ...] = ()) -> tuple[str, ...]:
    kinds = {"train": SHORT, "train.py": SHORT, "finetune": ("--validation.generate_tokens=2",)}
    short = next((kinds[word] for word in command.words if word in kinds), None)
    return command.words if short is None else (*command.words, *short, *more)


MADE_BEFORE = ("debug_qwen2_vl", "debug_t2v", "debug_square")
"""Jobs whose runs pages export and sample from; each is trained once for all of them."""


def make_source_tree(folder: Path, charts: Path, shapes: Path) -> None:
    """Makes a folder look like the source tree after its data sets were drawn."""
    for name in ("configs", "train.py"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "data").mkdir()
    (folder / "data" / "charts").symlink_to(charts)
    (folder / "data" / "shapes").symlink_to(shapes)
    (folder / "data" / "squares").symlink_to(stored_squares())


def stored_squares() -> Path:
    """A small data set of the easy level of moving shapes, to be read."""
    return stored_folder("squares", lambda folder: make_easy_shapes(folder / "squares", 600, 0)) / "squares"


def small_trainings(charts: Path, shapes: Path) -> Path:
    """The folder `outputs` after the small trainings, made once in a run of the tests: to be read or copied."""

    def train(folder: Path) -> None:
        make_source_tree(folder, charts, shapes)
        for job in MADE_BEFORE:
            run(Command(("mmtrain", "train", "--config", f"{job}.toml")), folder)

    return stored_folder("small trainings", train) / "outputs"
