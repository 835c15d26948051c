"""How often the same nodes may fail in the same step."""

import pytest

from mmtrain.errors import RankLostError
from mmtrain.training import elastic_values
from mmtrain.training.elastic_values import MOST_FAILURES, Failures


def test_a_step_that_fails_again_and_again_on_the_same_nodes_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(elastic_values.time, "monotonic", lambda: now[0])
    failures = Failures(timeout_s=10.0)
    for _ in range(2 * MOST_FAILURES):  # others meet in vain while gloo keeps a rank
        now[0] += 1.0
        failures.add(("a", "b"), 3, "lost")
    for step, nodes in ((4, ("a", "b")), (4, ("a", "c"))):  # a step done, a node lost
        now[0] += 100.0
        failures.add(nodes, step, "lost")
    with pytest.raises(RankLostError, match=f"step 4 failed {MOST_FAILURES} times in a row though no node was lost"):
        for _ in range(MOST_FAILURES):
            now[0] += 10.0
            failures.add(("a", "c"), 4, "lost")
