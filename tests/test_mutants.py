"""The table of mutants fits the code as it is: `make mutants` runs it, nightly."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_each_mutant_changes_one_line_and_names_tests_that_exist() -> None:
    wrong = []
    for group in tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())["group"]:
        lines = (ROOT / group["file"]).read_text().splitlines()
        for old, new, *tests in group["lines"]:
            if lines.count(old) != 1 or old == new:
                wrong.append((group["file"], old))
            wrong += [(test, old) for test in (tests or group["tests"]) if not (ROOT / test.partition("::")[0]).exists()]
    assert wrong == []
