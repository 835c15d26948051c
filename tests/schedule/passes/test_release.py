"""Which messages of a program have arrived when."""

import pytest

from mmtrain.errors import PlanError
from mmtrain.schedule.action import SENDS
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.passes.lower import Program, lower
from mmtrain.schedule.passes.release import releases, transfers
from mmtrain.schedule.problem import PlanningProblem
from tests.schedule.problems import chain, two_modules


def test_a_reply_releases_what_its_sender_had_waited_for() -> None:
    program = Program.parse(
        chain(2, 2).graph,
        "0F0.0 0SEND_F0.0>1 0F1.0 0SEND_F1.0>1 0RECV_B0.0<1 0WAIT_B0.0<1 0B0.0 0RECV_B1.0<1 0WAIT_B1.0<1 0B1.0\n"
        "1RECV_F0.0<0 1WAIT_F0.0<0 1F0.0 1RECV_F1.0<0 1B0.0 1SEND_B0.0>0 1WAIT_F1.0<0 1F1.0 1B1.0 1SEND_B1.0>0",
    )
    released = {index: [(edge.work, forward) for edge, forward in done] for index, done in releases(program, 0).items()}
    assert released == {5: [(0, True)], 8: [(1, True)]}  # at each wait for a gradient, the activation that it answers
    assert releases(program, 1) == {}  # rank 0 sends nothing after it has waited for a gradient


@pytest.mark.parametrize("problem", [chain(4, 8), two_modules(2, [1, 0, 2])], ids=["chain", "two modules"])
def test_no_send_is_released_twice_or_before_it_is_sent(problem: PlanningProblem) -> None:
    program = lower(CATALOGUE["1F1B"].make(problem), problem, sharded=False)
    for rank, actions in enumerate(program.actions):
        moved = transfers(program, rank)
        sent = {transfer: index for index, transfer in moved.items() if actions[index].kind in SENDS}
        done = [(index, transfer) for index, found in releases(program, rank, moved).items() for transfer in found]
        assert len({transfer for _, transfer in done}) == len(done) > 0
        assert all(sent[transfer] < index for index, transfer in done)


def test_a_transfer_between_stages_without_an_edge_is_refused() -> None:
    program = Program.parse(chain(3, 1).graph, "0F0.0 0SEND_F0.0>2\n1F0.0\n2RECV_F0.0<0 2WAIT_F0.0<0 2F0.0")
    with pytest.raises(PlanError, match=r"0SEND_F0\.0>2: stage 0 makes nothing for stage 2"):
        transfers(program, 0)
