"""Benchmarks fit the package; `test_page_commands.py` runs them."""

import ast
import importlib
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
