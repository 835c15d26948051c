"""Kernels kept on disk are compiled again after any kernel file has changed."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mmtrain.planner.search.kernels import anneal, compiler

CALLER = "from kernel_callee import add\nfrom mmtrain.planner.search.kernels.compiler import entry\n"
CALLEE = "from mmtrain.planner.search.kernels.compiler import inner\n"


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two kernel files, one of which calls the other, imported as by a new process: increment -> the caller."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def load(increment: int) -> ModuleType:
        (tmp_path / "kernel_callee.py").write_text(f"{CALLEE}@inner\ndef add(x):\n    return x + {increment}\n")
        (tmp_path / "kernel_caller.py").write_text(f"{CALLER}@entry\ndef run(x):\n    return add(x)\n")
        monkeypatch.setattr(compiler, "_DIGEST", compiler.sources_digest(tmp_path))
        for name in ("kernel_callee", "kernel_caller"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return importlib.import_module("kernel_caller")

    yield load
    for name in ("kernel_callee", "kernel_caller"):
        sys.modules.pop(name, None)


def test_a_change_in_a_called_file_leads_to_a_recompile(load) -> None:
    assert load(1).run(1.0) == 2.0
    kept = load(1)
    assert kept.run(1.0) == 2.0
    assert sum(kept.run.stats.cache_hits.values()) == 1
    changed = load(2)
    assert changed.run(1.0) == 3.0
    assert not changed.run.stats.cache_hits


TOGETHER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from kernel_caller import run
print("ready", flush=True)
sys.stdin.readline()
assert run(1.0) == 2.0
print(sum(run.stats.cache_hits.values()), flush=True)
"""


def test_of_processes_that_start_together_one_compiles(load, tmp_path: Path) -> None:
    load(1)
    command = [sys.executable, "-B", "-c", TOGETHER, str(tmp_path)]
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    ranks = [
        subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    for rank in ranks:
        assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
    assert sorted(rank.communicate()[0] for rank in ranks) == ["0\n", "1\n", "1\n"]


def test_the_kernels_carry_the_digest_of_all_their_files() -> None:
    assert anneal.run._cache._cache_file._source_stamp == compiler.sources_digest()
    names = {file.stem for file in Path(compiler.__file__).parent.glob("*.py")}
    assert {"arrays", "decode", "memory", "anneal"} <= names
