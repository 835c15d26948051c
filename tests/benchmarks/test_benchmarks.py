"""Benchmarks fit the package; `test_page_commands.py` runs them."""

import ast
import importlib
import re
from pathlib import Path

import pytest

from mmtrain.config.config import Config
from tests.config.test_config import keys

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


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_benchmark_overrides_keys_that_exist(path):
    known = set(keys(Config))
    sections = {key.partition(".")[0] for key in known}
    texts = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
    found = (re.match(r"(?:--)?(([a-z_]+)[a-z_.]*)=", text) for text in texts if isinstance(text, str))
    named = {match[1] for match in found if match and match[2] in sections}
    assert named <= known | {key for key in named if ".config." in key}
