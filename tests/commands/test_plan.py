import json
from pathlib import Path

import pytest

from mmtrain.commands.cli import main
from tests.planner.search.test_search import mixed
from tests.schedule.problems import two_modules


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    path = tmp_path / "problem.json.gz"
    mixed().write(path)
    return path


def test_a_plan_is_written_and_right(problem: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    assert main(["plan", str(problem), "--out", str(out), "--budget-evaluations", "200", "--threads", "2"]) == 0
    words = capsys.readouterr().out
    assert "improved: best of 200 plans tried, budget of evaluations used up" in words
    assert "over the lower bound" in words and "over that with memory limits" in words
    assert "200 evaluations in" in words
    assert main(["check", str(problem), str(out)]) == 0
    table = json.loads(out.read_text())
    assert (table["evaluations"], table["seed"]) == (200, 0)
    assert table["search_s"] > 0


def test_equal_budgets_and_seeds_write_equal_plans(problem: Path, tmp_path: Path) -> None:
    found = []
    for threads in ("1", "2"):
        out = tmp_path / f"{threads}.json"
        words = ["--budget-evaluations", "1200", "--seed", "3", "--threads", threads]
        assert main(["plan", str(problem), "--out", str(out), *words]) == 0
        table = json.loads(out.read_text())
        del table["search_s"]
        found.append(table)
    assert found[0] == found[1]


@pytest.mark.parametrize("strategy", ["mcts", "first"])
def test_other_strategies(problem: Path, strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(problem), "--budget-evaluations", "50", "--strategy", strategy, "--no-split"]) == 0
    assert "makespan" in capsys.readouterr().out


def test_no_plan_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "problem.json"
    two_modules(2, [1], memory_limit_bytes=[1.0, 9.0]).write(path)
    assert main(["plan", str(path), "--budget-evaluations", "5"]) == 1
    assert f"{path}: no plan: rank 0: microbatch 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--budget-s", "0"], "plan: --budget-s 0.0; it must be above 0"),
        (["--budget-evaluations", "-2"], "plan: --budget-evaluations -2; it must be above 0"),
        (["--threads", "0"], "plan: --threads 0 --seed 0; the first is from 1 to 1024, the second at least 0"),
        (["--out", "plan.txt"], "plan.txt: the name must end in .json or .json.gz"),
        (["--out", "no/such/plan.json"], "plan: --out no/such/plan.json is a folder, or in none"),
    ],
)
def test_bad_words(problem: Path, words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(problem), *words]) == 2
    assert error in capsys.readouterr().err


def test_a_plan_does_not_replace_its_problem(problem: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = problem.read_bytes()
    assert main(["plan", str(problem), "--budget-evaluations", "5", "--out", str(problem)]) == 2
    assert "is the problem itself" in capsys.readouterr().err
    assert problem.read_bytes() == before


def test_a_fault_in_the_file_is_named_with_its_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "problem.json"
    table = json.loads(two_modules(2, [1]).to_json())
    table["works"][1]["after"] = [9]
    path.write_text(json.dumps(table))
    assert main(["plan", str(path)]) == 2
    assert "works[1].after" in capsys.readouterr().err
