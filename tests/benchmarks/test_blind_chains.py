"""The strategies that only benchmarks have search as the others do."""

from dataclasses import replace

import pytest

from benchmarks.blind_chains import BLIND
from mmtrain.planner.plan_json import plan_to_json
from mmtrain.planner.search.search import search
from mmtrain.planner.search.search_options import CHAINS, SearchOptions
from tests.schedule.problems import two_modules


@pytest.mark.parametrize("strategy", BLIND)
def test_they_are_deterministic_and_no_worse_than_no_search(monkeypatch, strategy):
    monkeypatch.setitem(CHAINS, strategy, BLIND[strategy])
    problem = two_modules(4, [3, 0, 5, 1, 2, 0])
    options = SearchOptions(budget_evaluations=1600, strategy=strategy)
    one, two = (search(problem, replace(options, threads=threads)) for threads in (1, 2))
    assert plan_to_json(one) == plan_to_json(two)
    assert one.timeline.makespan_s <= search(problem, SearchOptions(strategy="first")).timeline.makespan_s
