"""The README's commands work as printed (trainings are shortened, the data set is a small one)."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guides import SHORT, make_source_tree, small_trainings

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
LINES = [line.partition("  #")[0].strip() for block in BLOCKS for line in block.splitlines()]
COMMANDS = [line for line in LINES if line.startswith(("mmtrain ", "torchrun --nproc-per-node 2 "))]


@pytest.fixture
def checkout(tmp_path, charts, shapes):
    """A folder that looks like a checkout in which `make data shapes` has run."""
    make_source_tree(tmp_path, charts, shapes)
    return tmp_path


def test_there_are_commands_to_test():
    assert len(COMMANDS) >= 6


@pytest.mark.ranks
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_works(checkout, command, charts, shapes):
    words = shlex.split(command)
    if {"export", "report", "sample"} & set(words):  # of the jobs that `make train` and `make train-video` run
        shutil.copytree(small_trainings(charts, shapes), checkout / "outputs")
    if "charts" in words:
        words[words.index("data/charts")] = "data/made-now"
        words[words.index("--num-samples") + 1] = "60"
    elif "train" in words or "train.py" in words:
        words += SHORT
    if words[1] == "plan":  # of the file that the line before wrote
        run(COMMANDS[COMMANDS.index(command) - 1].split(), checkout)
        assert "best of" in run(words, checkout)
        return
    assert run(words, checkout).strip() or (checkout / words[-1]).is_file()


def run(words, folder):
    start = {"mmtrain": ["-m", "mmtrain.commands.cli"], "torchrun": ["-m", "torch.distributed.run"]}[words[0]]
    done = subprocess.run([sys.executable, *start, *words[1:]], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_make_targets_that_the_readme_names_exist():
    targets = {line.split()[1] for line in LINES if line.startswith("make ")}
    assert targets == {"train", "train-video", "test", "nightly", "mutants", "check"}
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\n{target}:" in makefile for target in targets)
