"""Overheads that a benchmark takes from a problem again."""

import pytest
from overheads import hardware_text, scaled, uncharged

from mmtrain.costs.operators.hardware import load_hardware
from mmtrain.costs.overheads import Overheads, charged
from mmtrain.schedule.action import COMPUTE
from tests.planner.search.test_search import mixed

OVERHEADS = Overheads(
    forward_s=0.3,
    backward_s=0.6,
    backward_input_s=0.3,
    backward_weight_s=0.35,
    send_s=0.2,
    receive_s=0.5,
    message_s=0.02,
)


def test_what_was_charged_is_taken_away_again():
    problem = mixed()
    paid = charged(problem, OVERHEADS)
    back = uncharged(paid, OVERHEADS)
    assert back.p2p.latency_s == pytest.approx(problem.p2p.latency_s)
    for node in problem.graph.nodes():
        for free, same, more in zip(problem.options(*node), back.options(*node), paid.options(*node), strict=True):
            for kind in COMPUTE:
                assert same.duration_s(kind) == pytest.approx(free.duration_s(kind))
            assert sum(map(more.duration_s, COMPUTE)) > sum(map(free.duration_s, COMPUTE))


def test_a_hardware_profile_has_them(tmp_path):
    path = tmp_path / "known.toml"
    path.write_text('extends = "h800"\n' + hardware_text(scaled(OVERHEADS, 0.5)))
    assert load_hardware(str(path)).overheads == scaled(OVERHEADS, 0.5)
    assert load_hardware("h800").overheads == Overheads()
