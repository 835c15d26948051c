"""python tests/run_mutants.py [--only WORD] [--jobs N] [--list]

Applies each mutation of `tests/mutants.toml` to a scratch copy of the tree, runs the tests that must notice it, and
reports the survivors: a mutation whose tests pass is a rule that no test holds. Exit status 1 if any survives, or if
an entry no longer fits the code.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import tomllib
import traceback
from dataclasses import dataclass
from pathlib import Path

import numpy  # noqa: F401  what most tests import, loaded once before the forks
import pytest
from hypothesis import Phase, settings

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

TIMEOUT_S = 600


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


def start(mutant: Mutant, tree: Path) -> int:
    """The process that runs the tests of a mutant in a copy of the tree; its exit status is pytest's."""
    path = tree / mutant.file
    path.write_text("\n".join(mutant.new if line == mutant.old else line for line in path.read_text().split("\n")))
    child = os.fork()
    if child:
        return child
    status = 3
    try:
        log = os.open(tree / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(tree)
        sys.path[:0] = [str(tree)]
        from tests import ranks

        ranks.start_server = lambda: None  # only tests with ranks need it, and they start it themselves
        signal.alarm(TIMEOUT_S)
        # A failure is enough; it need not be made small.
        settings.register_profile("mutants", deadline=None, phases=[Phase.explicit, Phase.generate])
        known = ["-W", "ignore::pytest.PytestAssertRewriteWarning", "--hypothesis-profile=mutants"]
        status = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-m", "", *known, *mutant.tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run(mutants: list[Mutant], jobs: int) -> list[Mutant]:
    """Those that survive, after one line a mutant."""
    sys.dont_write_bytecode = True  # two mutations of one second and size would share it
    survivors, waiting, running = [], mutants[::-1], {}
    with tempfile.TemporaryDirectory() as folder:
        trees = [_copy(Path(folder, str(number))) for number in range(jobs)]
        while waiting or running:
            while waiting and trees:
                mutant, tree = waiting.pop(), trees.pop()
                running[start(mutant, tree)] = mutant, tree
            child, status = os.wait()
            mutant, tree = running.pop(child)
            shutil.copy(ROOT / mutant.file, tree / mutant.file)
            trees.append(tree)
            code = os.waitstatus_to_exitcode(status)
            if code not in (0, 1, 2, -signal.SIGALRM):  # passed, failed, failed to import, did not end
                raise RuntimeError(f"{mutant}: pytest ended with {code}:\n{(tree / 'log').read_text()[-3000:]}")
            survivors += [] if code else [mutant]
            print(f"{'killed  ' if code else 'SURVIVED'} {mutant}", flush=True)
    return survivors


def _copy(tree: Path) -> Path:
    tree.mkdir()
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tree / name)
    return tree


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
    survivors = run(mutants, given.jobs)
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} killed")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
