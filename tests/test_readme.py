"""The README's commands work as printed (trainings are shortened, the data set is a small one)."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.guides import Command, make_source_tree, run, run_anew, small_trainings

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
LINES = [line.partition("  #")[0].strip() for block in BLOCKS for line in block.splitlines()]
COMMANDS = [line for line in LINES if line.startswith(("mmtrain ", "torchrun --nproc-per-node 2 "))]

EXPORT = "mmtrain export outputs/debug_qwen2_vl outputs/charts_model"
"""What `make train` ends with."""


@pytest.fixture
def checkout(tmp_path, charts, shapes):
    """A folder that looks like a checkout in which `make data shapes` has run."""
    make_source_tree(tmp_path, charts, shapes)
    return tmp_path


def test_there_are_commands_to_test():
    assert len(COMMANDS) >= 6


@pytest.mark.ranks
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_works(checkout, command):
    """`mmtrain` in this process, which has torch imported; `make nightly` starts each as a reader does."""
    follow(command, checkout, run)


@pytest.mark.nightly
@pytest.mark.ranks
@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("mmtrain ")])
def test_a_command_works_in_a_process_of_its_own(checkout, command):
    follow(command, checkout, run_anew)


def follow(command, checkout, run):
    """Runs a command, and looks at what it made."""
    words = shlex.split(command)
    reads = {"export", "finetune", "report", "generate"}
    if reads & set(words):  # what `make train` leaves
        charts, shapes = ((checkout / "data" / name).resolve() for name in ("charts", "shapes"))
        shutil.copytree(small_trainings(charts, shapes), checkout / "outputs")
    if "charts" in words:
        words[words.index("data/charts")] = "data/made-now"
        words[words.index("--num-samples") + 1] = "60"
    if "--limit" in words:
        words[words.index("--limit") + 1] = "2"
    finetuned = "outputs/finetuned/model"
    if words[1] == "finetune" or finetuned in words:
        run(Command(tuple(shlex.split(EXPORT))), checkout)
    if finetuned in words:  # an exported folder like that of `make train`
        words[words.index(finetuned)] = "outputs/charts_model"
    printed = run(Command(tuple(words)), checkout)
    if {"train", "train.py"} & set(words):
        assert len(list(checkout.glob("outputs/*/metrics.jsonl"))) == 1
    elif words[1] == "finetune":
        assert (checkout / "outputs/finetuned/model/config.json").is_file()
    else:
        assert printed.strip() or (checkout / words[-1]).is_file()


def test_make_targets_that_the_readme_names_exist():
    targets = {line.split()[1] for line in LINES if line.startswith("make ")}
    assert "train" in targets
    makefile = (ROOT / "Makefile").read_text()
    assert EXPORT in COMMANDS and makefile.partition("\ntrain:")[2].split("\n\n")[0].endswith(f"$(BIN)/{EXPORT}")
    assert all(f"\n{target}:" in makefile for target in targets)
