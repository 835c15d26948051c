"""Benchmarks are run by hand; here only that they still fit the package."""

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
APART = ("on_gpu_setup", "same_losses")
"""They make a machine ready, and start trees as commands."""
FILES = sorted(path for path in FOLDER.glob("*.py") if path.stem not in APART)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_a_benchmark_imports_is_there(path):
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("mmtrain"):
            module = importlib.import_module(node.module)
            for name in (alias.name for alias in node.names):
                if not hasattr(module, name):
                    importlib.import_module(f"{node.module}.{name}")  # a module of a package, or an error
                found.append(name)
    assert found, f"{path.name} measures nothing of mmtrain"


@pytest.mark.nightly
def test_assignments_run_on_emulated_devices_as_simulated():
    """With actions of 1 ms, which say nothing of real seconds."""
    sizes = "--setups h800 --workloads mix --microbatches 4 --ranks 2 --repetitions 1 --unit-ms 1 --evaluations 20"
    command = [sys.executable, str(FOLDER / "emulate_entrain.py"), *sizes.split(), "--refinements", "4", "--free"]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "virtual time: 20 of 20 timelines equal to the simulated ones to the bit" in done.stdout


@pytest.mark.nightly
def test_mmtrain_a_plain_loop_and_the_trainer_begin_with_the_same_loss():
    """The benchmark refuses other losses itself."""
    command = [sys.executable, str(FOLDER / "one_gpu.py"), "--size", "tiny", "--rounds", "1", "--steps", "1"]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    row = r"^(plain torch loop|Hugging Face Trainer|mmtrain) +[\d.]+ +\d+ +(?:[\d.]+%|-) "
    speeds = re.findall(row, done.stdout, re.MULTILINE)
    assert speeds == ["plain torch loop", "Hugging Face Trainer", "mmtrain"], done.stdout
