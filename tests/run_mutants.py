"""python tests/run_mutants.py [--only WORD] [--jobs N] [--list]

Applies each mutation of `tests/mutants.toml` to a scratch copy of the tree, runs the tests that must notice it, and
reports the survivors: a mutation whose tests pass is a rule that no test holds. Exit status 1 if any survives, or if
an entry no longer fits the code.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
COPIED = (
    "mmtrain",
    "tests",
    "configs",
    "docs",
    "benchmarks",
    "pyproject.toml",
    "README.md",
    "Makefile",
    "CHANGELOG.md",
)


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One line changed, and the tests of which at least one must fail then."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """As pytest takes them: files, or single tests."""

    def __str__(self) -> str:
        return f"{self.file}: {self.old.strip()}  ->  {self.new.strip()}"

    def fault(self) -> str:
        """What is wrong with the entry itself; empty if nothing is."""
        path = ROOT / self.file
        count = path.read_text().splitlines().count(self.old) if path.is_file() else 0
        if count != 1:
            return f"{self.file} has the line {count} times: {self.old!r}"
        missing = [test for test in self.tests if not (ROOT / test.partition("::")[0]).is_file()]
        return f"{self}: no such test: {missing}" if missing or not self.tests else ""


def read() -> list[Mutant]:
    """The mutants of the list. An entry of `tests` counts for all mutants of its group."""
    groups = tomllib.loads((ROOT / "tests/mutants.toml").read_text())["group"]
    return [
        Mutant(file=group["file"], old=old, new=new, tests=tuple(tests or group["tests"]))
        for group in groups
        for old, new, *tests in group["lines"]
    ]


def is_killed(mutant: Mutant, tree: Path) -> bool:
    """Whether a test fails in a copy of the tree with the mutation; the copy is as before afterwards."""
    path = tree / mutant.file
    text = path.read_text()
    path.write_text("\n".join(mutant.new if line == mutant.old else line for line in text.split("\n")))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "", *mutant.tests]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired:
        return True  # a loop that does not end is noticed, too
    finally:
        path.write_text(text)
    if done.returncode not in (0, 1, 2):
        raise RuntimeError(f"{mutant}: pytest says {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode != 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutants whose text has this word")
    parser.add_argument("--jobs", type=int, default=1, help="how many run side by side")
    parser.add_argument("--list", action="store_true", help="only check that the entries fit the code")
    given = parser.parse_args()
    mutants = [mutant for mutant in read() if given.only in str(mutant)]
    faults = [fault for mutant in mutants if (fault := mutant.fault())]
    print(*faults, f"{len(mutants)} mutants, {len(faults)} that do not fit the code", sep="\n", flush=True)
    if faults or given.list:
        return bool(faults)
    trees: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.jobs):
            tree = Path(folder, str(number))
            tree.mkdir()
            for name in COPIED:
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / name, tree / name)
            trees.put(tree)

        def run(mutant: Mutant) -> bool:
            tree = trees.get()
            try:
                killed = is_killed(mutant, tree)
            finally:
                trees.put(tree)
            print(f"{'killed  ' if killed else 'SURVIVED'} {mutant}", flush=True)
            return killed

        with ThreadPoolExecutor(given.jobs) as pool:
            killed = list(pool.map(run, mutants))
    print(f"{sum(killed)} of {len(killed)} killed")
    return not all(killed)


if __name__ == "__main__":
    sys.exit(main())
