"""The README's commands work as printed (trainings are shortened, the data set is a small one)."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
LINES = [line.partition("  #")[0].strip() for block in BLOCKS for line in block.splitlines()]
COMMANDS = [line for line in LINES if line.startswith(("mmtrain ", "torchrun --nproc-per-node 2 "))]


@pytest.fixture
def checkout(tmp_path, charts, shapes):
    """A folder that looks like a checkout in which `make data shapes` has run."""
    for name in ("configs", "train.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "charts").symlink_to(charts)
    (tmp_path / "data" / "shapes").symlink_to(shapes)
    return tmp_path


def test_there_are_commands_to_test():
    assert len(COMMANDS) >= 6


@pytest.mark.ranks
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_works(checkout, command):
    words = shlex.split(command)
    short = ["--training.steps=2", "--lr_scheduler.warmup_steps=1", "--validation.enable=false"]
    if "export" in words or "report" in words:  # of the job that `make train` runs
        run(["torchrun", "--nproc-per-node", "2", "train.py", "--config", "debug_vlm.toml", *short], checkout)
    if "sample" in words:  # of the job that `make train-video` runs
        run(["mmtrain", "train", "--config", "debug_t2v.toml", *short], checkout)
    if "charts" in words:
        words[words.index("data/charts")] = "data/made-now"
        words[words.index("--num-samples") + 1] = "60"
    elif "train" in words or "train.py" in words:
        words += short
    if words[1] == "plan":  # of the file that the line before wrote
        run(COMMANDS[COMMANDS.index(command) - 1].split(), checkout)
        assert "best of" in run(words, checkout)
        return
    assert run(words, checkout).strip() or (checkout / words[-1]).is_file()


def run(words, folder):
    start = {"mmtrain": ["-m", "mmtrain.cli"], "torchrun": ["-m", "torch.distributed.run"]}[words[0]]
    done = subprocess.run([sys.executable, *start, *words[1:]], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_make_targets_that_the_readme_names_exist():
    targets = {line.split()[1] for line in LINES if line.startswith("make ")}
    assert targets == {"train", "train-video", "test", "nightly", "mutants", "check"}
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\n{target}:" in makefile for target in targets)
