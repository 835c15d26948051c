import pytest

from mmtrain.errors import PlanError
from mmtrain.schedule.passes.lower import Program, lower
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.transport import MODELS, check_transport
from tests.schedule.problems import chain

CHAIN = chain(2, 2)
GOOD = str(lower(Plan.parse(CHAIN.graph, "0F0.0 0F1.0 0B0.0 0B1.0\n1F0.0 1B0.0 1F1.0 1B1.0"), CHAIN, sharded=True))


def program(*changes: tuple[str, str]) -> Program:
    text = GOOD
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return Program.parse(CHAIN.graph, text)


def test_lowered_program_passes() -> None:
    check_transport(program())


@pytest.mark.parametrize("model", MODELS)
def test_swapped_receives_are_a_mismatch_under_every_transport(model: str) -> None:
    swapped = program(("1RECV_F0.0<0 1WAIT_F0.0<0 1F0.0 1RECV_F1.0<0", "1RECV_F1.0<0 1RECV_F0.0<0 1WAIT_F0.0<0 1F0.0"))
    with pytest.raises(PlanError, match=rf"mismatch under {model} .*rank 0, step 2: 0SEND_F0.0>1 .*rank 1, step 1"):
        check_transport(swapped, [model])


def test_late_receive_is_harmless_where_directions_have_queues_of_their_own() -> None:
    late = program(("1RECV_F1.0<0 1B0.0 1SEND_B0.0>0 1WAIT_F1.0<0", "1B0.0 1SEND_B0.0>0 1RECV_F1.0<0 1WAIT_F1.0<0"))
    check_transport(late, ["gloo"])
    for model in ("paired", "eager"):
        with pytest.raises(PlanError, match=rf"deadlock under {model} transport: rank 0, step 6: 0WAIT_B0.0<1"):
            check_transport(late, [model])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1WAIT_F0.0<0 ", "", r"rank 1, step 2: 1F0.0 needs 1WAIT_F0.0<0 before it"),
        ("1RECV_F1.0<0 ", "", r"rank 1, step \d+: 1WAIT_F1.0<0 waits for no receive"),
        (
            "0F0.0 0SEND_F0.0>1",
            "0SEND_F0.0>1 0F0.0",
            r"rank 0, step 1: 0SEND_F0.0>1 sends a result that was not computed",
        ),
        ("1B0.0 1SEND_B0.0>0", "1SEND_B0.0>0 1B0.0", r"1SEND_B0.0>0 sends a result that was not computed"),
        ("1F0.0 1RECV_F1.0<0 1B0.0", "1B0.0 1RECV_F1.0<0 1F0.0", r"1B0.0 needs 1F0.0 before it"),
        ("0F1.0 ", "0F1.0 0F1.0 ", r"0F1.0 occurs twice"),
        ("0F1.0 ", "0F1.0 1F1.0 ", r"1F1.0 belongs on rank 1"),
        ("1SEND_B1.0>0 ", "", r"deadlock under gloo transport: rank 0, step \d+: 0WAIT_B1.0<1"),
        (" 0SEND_F1.0>1", "", r"deadlock under gloo transport: rank 0"),
    ],
)
def test_faults_are_found(old: str, new: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_transport(program((old, new)))


def test_transfer_inside_of_a_rank_is_refused() -> None:
    alone = chain(1, 1, num_segments=2)
    with pytest.raises(PlanError, match="is a transfer within one rank"):
        check_transport(Program.parse(alone.graph, "0F0.0 0SEND_F0.0>1"))


def test_message_that_nobody_takes_is_a_deadlock() -> None:
    with pytest.raises(PlanError, match=r"deadlock under gloo transport: rank 0, step 1: 0SEND_F0.0>1"):
        check_transport(Program.parse(CHAIN.graph, "0F0.0 0SEND_F0.0>1\n0UNSHARD"), ["gloo"])
