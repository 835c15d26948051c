"""What is learned of the seconds of actions, from timelines whose seconds are known."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from mmtrain.costs.learned import MOST_CHANGE, LearnedCosts, corrected, mean_error, step_seconds
from mmtrain.schedule.action import Kind
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.option import Option
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.simulate import simulate
from tests.schedule.problems import two_modules

TRUE = np.array([[[2.0, 3.0, 1.5], [1.0, 0.5, 4.0]], [[0.25, 1.0, 1.0], [5.0, 2.0, 0.75]]])
"""[module, pp_rank, part]"""


def example() -> PlanningProblem:
    vision = Option(name="v", forward_s=1.0, backward_input_s=2.0, backward_weight_s=1.5, activation_bytes=1.0)
    language = replace(vision, name="l", forward_s=3.0, backward_input_s=1.0)
    return two_modules(2, [1, 2, 0, 1], vision=vision, language=language)


def measured(problem: PlanningProblem, schedule: str, modelled: PlanningProblem, factors: np.ndarray) -> np.ndarray:
    """The seconds of a step on all ranks. Args: problem: says what actions take. modelled: what they were planned to
    take, with factors."""
    plan = CATALOGUE[schedule].make(modelled)
    rows = [(row.action, row.start_s, row.end_s) for row in simulate(problem, plan).rows]
    ranks = [[row for row in rows if problem.graph.stage_rank[row[0].stage] == rank] for rank in range(2)]
    return sum(step_seconds(plan, modelled, factors, of_rank) for of_rank in ranks)


def test_factors_scale_each_part_of_a_stage() -> None:
    problem = example()
    found = corrected(problem, TRUE)
    assert found.graph == problem.graph
    for stage, work in problem.graph.nodes():
        before, after = problem.options(stage, work)[0], found.options(stage, work)[0]
        factors = TRUE[problem.graph.works[work].module, problem.graph.stage_rank[stage]]
        seconds = [[option.duration_s(kind) for kind in (Kind.F, Kind.I, Kind.W)] for option in (before, after)]
        assert seconds[1] == pytest.approx(factors * seconds[0])
        assert after.duration_s(Kind.B) == pytest.approx(sum(seconds[1][1:]))


def test_split_backwards_teach_all_factors_at_once() -> None:
    problem = example()
    learned, jumps = LearnedCosts.of(problem.graph).after(
        1, measured(corrected(problem, TRUE), "ZB-AutoSchedule", problem, np.ones_like(TRUE))
    )
    assert not jumps  # of a first step anything is believed
    assert (learned.at(1) == 1).all() and (learned.at(2) == 1).all()  # their plans were begun before its end
    assert learned.at(3) == pytest.approx(TRUE)


def test_whole_backwards_teach_the_seconds_of_backwards() -> None:
    problem, truth = example(), corrected(example(), TRUE)
    learned = LearnedCosts.of(problem.graph)
    for step in range(1, 60):
        factors = learned.at(step)
        learned, _ = learned.after(step, measured(truth, "1F1B", corrected(problem, factors), factors))
    found = corrected(problem, learned.at(99))
    for stage, work in problem.graph.nodes():
        option, wanted = found.options(stage, work)[0], truth.options(stage, work)[0]
        for kind in (Kind.F, Kind.B):
            assert option.duration_s(kind) == pytest.approx(wanted.duration_s(kind), rel=1e-6)


def test_seconds_that_jump_are_believed_by_and_by() -> None:
    problem, factors = example(), np.ones_like(TRUE)
    learned, _ = LearnedCosts.of(problem.graph).after(1, measured(problem, "1F1B", problem, factors))
    slow = np.ones_like(TRUE)
    slow[1, 0] = 6.0
    seen = []
    for step in range(2, 20):
        learned, jumps = learned.after(step, measured(corrected(problem, slow), "1F1B", problem, factors))
        seen.append(learned.at(step + 2)[1, 0, 0])
        assert all(jump.module == "language" and jump.pp_rank == 0 for jump in jumps)
        assert bool(jumps) == (6.0 / learned.at(step + 1)[1, 0, 0] > MOST_CHANGE), step
    assert seen[0] == pytest.approx(MOST_CHANGE**0.3) and seen == sorted(seen)
    assert seen[-1] == pytest.approx(6.0, rel=0.02)
    assert learned.at(99)[0] == pytest.approx(1.0)


def test_errors_are_of_ratios() -> None:
    problem = example()
    seconds = measured(corrected(problem, 3 * TRUE), "ZB-AutoSchedule", problem, np.ones_like(TRUE))
    learned, unlearned = mean_error(seconds, TRUE)
    assert learned == pytest.approx(0.0, abs=1e-12) and unlearned > 0.3
    assert all(math.isnan(value) for value in mean_error(np.zeros_like(seconds), TRUE))


def test_a_resumed_run_goes_on_with_what_was_learned() -> None:
    problem = example()
    learned, seconds = LearnedCosts.of(problem.graph), measured(problem, "1F1B", problem, np.ones_like(TRUE))
    for step in (1, 2, 3):
        learned, _ = learned.after(step, seconds * np.array([1.0 + step, 1.0]))
    saved = json.loads(json.dumps(learned.to_dict()))
    resumed = LearnedCosts.of(problem.graph).resumed(saved)
    for step in (4, 5):  # the plan of step 4 was begun before step 3 had ended
        assert (resumed.at(step) == learned.at(step)).all()
    assert (resumed.at(4) != resumed.at(5)).any()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("modules", ["vision", "llm"], "modules"),
        ("num_ranks", 4, "pipeline ranks 4, this job 2"),
        ("history", [[3, [[1.0]]]], "factors of step 3"),
    ],
)
def test_what_another_job_learned_is_refused_by_name(key: str, value: object, words: str) -> None:
    problem = example()
    learned, _ = LearnedCosts.of(problem.graph).after(1, measured(problem, "1F1B", problem, np.ones_like(TRUE)))
    with pytest.raises(ValueError, match=words):
        learned.resumed({**learned.to_dict(), key: value})
