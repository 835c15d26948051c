"""2,000 random faults in files of planning problems and plans: each file is accepted or refused with one line."""

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmtrain.planner.make_plan import make_plan
from mmtrain.planner.plan_json import plan_to_json
from mmtrain.schedule.graph import Link
from mmtrain.schedule.problem import PlanningProblem
from tests.faults.mutations import NUMBERS, OTHERS, TEXTS, damaged, mutated, report, run_all
from tests.planner.search.test_search import mixed
from tests.schedule.problems import chain, option, two_modules


def linked() -> PlanningProblem:
    """Vision works that also feed the second stage of the language model."""
    base = two_modules(2, [1, 2], memory_limit_bytes=[40.0, 40.0])
    works = [
        replace(work, links=tuple(Link(work=other, source=0, target=1, size_bytes=3.0) for other in work.after))
        for work in base.graph.works
    ]
    return replace(base, graph=replace(base.graph, works=tuple(works)))


NUM_PROBLEMS, NUM_PLANS = 1000, 1000
POOL: list[Any] = [*NUMBERS, *TEXTS, *OTHERS, None, "\ud800", "vision", "keep", "F", "infeasible"]
PROBLEMS = [
    two_modules(2, [1, 0, 2], language=option(3.0, 5.0)),
    two_modules(2, [2, 1], memory_limit_bytes=[6.0, 7.0]),
    chain(3, 4, num_segments=2, memory_limit_bytes=[9.0, None, 9.0]),
    mixed(2, limit=20.0),
    linked(),
]


def text_of(table: Any, rng: random.Random) -> bytes:
    """A file of JSON; of ten one has a key twice, or is damaged."""
    text = json.dumps(table)
    kind = rng.randrange(20)
    if kind == 0:
        return damaged(text.encode(), rng)
    if kind == 1 and text.startswith("{"):
        text = '{"version": 1, ' + text[1:]
    return text.encode("utf-8", "surrogatepass")


def write(path: Path, data: bytes, rng: random.Random) -> Path:
    """Of five files one is packed, and some of these are damaged."""
    if rng.randrange(5):
        path.write_bytes(data)
        return path
    packed = gzip.compress(data, mtime=0)
    packed_path = path.with_suffix(".json.gz")
    packed_path.write_bytes(damaged(packed, rng) if rng.randrange(3) == 0 else packed)
    return packed_path


@pytest.mark.nightly
def test_problems(tmp_path: Path) -> None:
    rng = random.Random(0)
    tables = [json.loads(problem.to_json()) for problem in PROBLEMS]
    commands = []
    for number in range(NUM_PROBLEMS):
        data = text_of(mutated(rng.choice(tables), rng, POOL), rng)
        path, out = str(write(tmp_path / f"{number}.json", data, rng)), f"{tmp_path}/plan_{number}.json"
        commands.append(["plan", path, "--budget-evaluations", "12", "--out", out])
        commands.append(["schedule", "compare", "1F1B", "ZB-AutoSchedule", "interleave", "--problem", path])
        commands.append(["check", path, out])
    outcomes = run_all(commands, tmp_path)
    faults = [(outcome, outcome.fault) for outcome in outcomes if outcome.fault]
    for plan, _, check in zip(outcomes[::3], outcomes[1::3], outcomes[2::3], strict=True):
        # What is planned is right, or says truly that there is no plan.
        if plan.status in (0, 1) and check.status != 0:
            faults.append((check, f"the plan is not right: {check.out}"))
        if plan.status == 0 and ("inf" in plan.out.split() or "nan" in plan.out.split()):
            faults.append((plan, f"not a number: {plan.out}"))
    print(report(outcomes, faults))
    assert not faults, report(outcomes, faults)
    assert sum(plan.status == 0 for plan in outcomes[::3]) > NUM_PROBLEMS / 20


@pytest.mark.nightly
def test_plans(tmp_path: Path) -> None:
    rng = random.Random(1)
    pairs = []
    for number, problem in enumerate(PROBLEMS):
        problem.write(tmp_path / f"problem_{number}.json")
        for schedule in ("interleave", "ZB-AutoSchedule"):
            pairs.append((f"{tmp_path}/problem_{number}.json", plan_to_json(make_plan(problem, schedule))))
    commands = []
    for number in range(NUM_PLANS):
        problem_path, text = rng.choice(pairs)
        data = text_of(mutated(json.loads(text), rng, POOL), rng)
        path = str(write(tmp_path / f"{number}.json", data, rng))
        commands.append(["check", problem_path, path])
        commands.append(["schedule", "show", path, "--problem", problem_path, "--format", "program"])
    outcomes = run_all(commands, tmp_path)
    faults = [(outcome, outcome.fault) for outcome in outcomes if outcome.fault]
    for check, show in zip(outcomes[::2], outcomes[1::2], strict=True):
        if check.status == 0 and "no plan" not in check.out and show.status != 0:
            faults.append((show, f"{check.out} but {show.err}"))
    print(report(outcomes, faults))
    assert not faults, report(outcomes, faults)
