"""Benchmarks are run by hand; here only that they still fit the package."""

import ast
import importlib
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).resolve().parent.parent / "benchmarks").glob("*.py"))


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
