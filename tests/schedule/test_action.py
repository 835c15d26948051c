import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.errors import PlanError
from mmtrain.schedule.action import KINDS, SENDS, STAGE_WIDE, TRANSFERS, Action, Kind

TEXTS = ["3F5.1", "0B0.0", "12I3.0", "12W3.0", "3SEND_F5.1>4", "4RECV_F5.1<3", "4WAIT_F5.1<3", "4SEND_B5.1>3"]
TEXTS += ["3RECV_B5.1<4", "3WAIT_B5.1<4", "3UNSHARD", "3RESHARD", "3REDUCE"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_read_and_written_back(text: str) -> None:
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize("kind", KINDS)
@given(numbers=st.tuples(*[st.integers(0, 999)] * 4))
def test_every_action_has_a_text(kind: Kind, numbers: tuple[int, int, int, int]) -> None:
    stage, microbatch, sub, peer = numbers
    if kind in STAGE_WIDE:
        action = Action(kind, stage)
    else:
        action = Action(kind, stage, microbatch, sub, peer if kind in TRANSFERS else -1)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text",
    [
        *("", "F0.0", "1F0", "1F0.0garbage", "1F0.0 ", "1F0.0\n", "1G0.0", "01F0.0", "1F0.0>2", "-1F0.0"),
        *("1F-1.0", "1SEND_F0.0", "1SEND_F0.0<2", "1RECV_F0.0>2", "1UNSHARD0.0", "1REDUCE>2"),
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="is not an action"):
        Action.parse(text)


def test_kinds_that_send_are_transfers() -> None:
    assert SENDS < TRANSFERS
    assert not STAGE_WIDE & TRANSFERS
