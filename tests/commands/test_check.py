import json

import pytest

from mmtrain.commands.cli import main
from mmtrain.planner.make_plan import make_plan
from mmtrain.planner.plan_json import plan_to_json
from tests.schedule.problems import two_modules


@pytest.fixture
def files(tmp_path):
    problem, plan = tmp_path / "problem.json", tmp_path / "plan.json"
    two_modules(2, [1, 0, 2]).write(problem)
    plan.write_text(plan_to_json(make_plan(two_modules(2, [1, 0, 2]), "interleave")))
    return problem, plan


def test_a_right_plan_ends_with_0(files, capsys) -> None:
    assert main(["check", *map(str, files)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{files[1]}: right: makespan ")
    assert "over the lower bound" in out and "over that with memory limits" in out


def test_a_wrong_plan_ends_with_1_and_one_sentence(files, capsys) -> None:
    table = json.loads(files[1].read_text())
    table["orders"][0].reverse()
    files[1].write_text(json.dumps(table))
    assert main(["check", *map(str, files)]) == 1
    captured = capsys.readouterr()
    assert captured.err == ""
    assert len(captured.out.splitlines()) == 1
    assert f"{files[1]}: wrong: deadlock: rank 0, step 0" in captured.out


def test_a_plan_that_is_no_json_is_wrong_too(files, capsys) -> None:
    files[1].write_text("{")
    assert main(["check", *map(str, files)]) == 1
    assert "wrong: not valid JSON" in capsys.readouterr().out


def test_a_problem_without_a_plan(files, capsys, tmp_path) -> None:
    problem = two_modules(2, [1], memory_limit_bytes=[1.0, 9.0])
    problem.write(files[0])
    files[1].write_text(plan_to_json(make_plan(problem, "interleave")))
    assert main(["check", *map(str, files)]) == 0
    assert "not proven, but no schedule found another: there is no plan" in capsys.readouterr().out
    problem = two_modules(2, [1], memory_limit_bytes=[0.5, 9.0])  # not even one stage fits
    problem.write(files[0])
    files[1].write_text(plan_to_json(make_plan(problem, "interleave")))
    assert main(["check", *map(str, files)]) == 0
    assert "right: the problem has no plan" in capsys.readouterr().out


def test_a_faulty_problem_is_no_judgement(files, capsys) -> None:
    files[0].write_text("{}")
    assert main(["check", *map(str, files)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
