import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.errors import PlanError
from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.io.wire import from_bytes, to_bytes
from mmtrain.schedule.plan import Plan
from tests.schedule.problems import two_modules
from tests.searches import random_plan

PROBLEM = two_modules(2, [1, 0, 2])
GRAPH = PROBLEM.graph


@given(st.integers(0, 10**6), st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(1, 4))
def test_a_plan_comes_back(seed, images, ranks):
    problem = two_modules(ranks, images)
    rng = random.Random(seed)
    plan = random_plan(problem, rng)
    options = {node: rng.randint(0, 2) for node in problem.graph.nodes()}
    plan = Plan(plan.graph, plan.orders, options)
    data = to_bytes(plan)
    found = from_bytes(problem.graph, data)
    assert found.orders == plan.orders
    assert found.options == {node: option for node, option in options.items() if option}
    num_actions, chosen = sum(map(len, plan.orders)), len(found.options)
    assert len(data) == 4 * (2 + ranks + 3 * num_actions + 3 * chosen)


@pytest.mark.parametrize("size", [0, 1, 4, 8, 13, -4, -1])
def test_a_cut_message_is_no_plan(size):
    data = to_bytes(random_plan(PROBLEM, random.Random(0)))
    with pytest.raises(PlanError, match="are not a whole plan"):
        from_bytes(GRAPH, data[:size])
    with pytest.raises(PlanError, match="are not a whole plan"):
        from_bytes(GRAPH, data + b"\0\0\0\0")


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([2, 0, 1, 0, 4, 0, 0], "kind 4 of an action joins it with a next one"),
        ([2, 0, 1, 0, 8, 0, 0], "kind 8 of an action"),
        ([2, 0, 1, 0, 0, 0, 99], "work 99 of an action"),
        ([2, 0, 1, 0, 0, 99, 0], "does not pass through stage 99"),
        ([2, 0, 1, 0, 0, -1, 0], "does not pass through stage -1"),
        ([-1, 0], "not a whole plan"),
        ([2, -1, 0, 0], "not a whole plan"),
        ([2, 1, 1, -1, 0, 0, 0], "not a whole plan"),
    ],
)
def test_what_the_graph_does_not_have_is_refused(numbers, message):
    with pytest.raises(PlanError, match=message):
        from_bytes(GRAPH, array("i", numbers).tobytes())


def test_only_compute_and_works_of_the_graph_are_sent():
    with pytest.raises(PlanError, match="99"):
        to_bytes(Plan(GRAPH, ((Action(Kind.F, 0, 99, 0),), ())))
    transfer = GRAPH.action(Kind.SEND_F, 0, 0, 1)
    with pytest.raises(PlanError, match="is none of F, B, I and W"):
        to_bytes(Plan(GRAPH, ((transfer,), ())))
