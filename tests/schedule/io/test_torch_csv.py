import pytest

from mmtrain.errors import PlanError
from mmtrain.schedule.io.torch_csv import read_plan, read_program, write_plan, write_program
from mmtrain.schedule.library.one_f_one_b import one_f_one_b
from mmtrain.schedule.library.zero_bubble import zb_h1
from mmtrain.schedule.passes.lower import lower
from tests.schedule.problems import chain, two_modules


def test_a_plan_is_written_step_by_step() -> None:
    assert write_plan(one_f_one_b(chain(2, 2))) == "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n"


def test_a_program_is_written_without_its_waits() -> None:
    problem = chain(2, 1)
    program = lower(zb_h1(problem), problem, sharded=True)
    text = write_program(program)
    assert text == (
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0I0,0W0,0REDUCE_GRAD,0RESHARD\n"
        "1UNSHARD,1RECV_F0,1F0,1I0,1SEND_B0,1W0,1REDUCE_GRAD,1RESHARD\n"
    )
    assert read_program(text).actions == program.actions


def test_overlapped_pairs_are_braids() -> None:
    words = "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n"
    assert str(read_plan(words)) == "0F0.0 0F1.0&0B0.0 0B1.0"
    assert write_plan(read_plan(words)) == words


def test_without_any_backward_there_is_none() -> None:
    assert not read_plan("0F0,0F1\n1F0,1F1\n").graph.has_any_backward


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0G0\n", "row 0, column 1: '0G0' is not an action; write for example 2F0, 3SEND_F1 or 1UNSHARD"),
        ("0F\n", "row 0, column 0: '0F' is not an action"),
        ("0UNSHARD3\n", "row 0, column 0: '0UNSHARD3' is not an action"),
        ("0F0\n0B0\n", "row 1: stage 0 has an action here (B), but others in row 0; a stage lives on one rank"),
        ("0F0,2F0\n", "stage 1 has no action, but stage 2 has; number them from 0 without gaps"),
        ("0F0,0B0\n\n1F0,1B0\n", "row 1 has no action; every rank holds a stage"),
        ("00F0\n", "row 0, column 0: '00F0' is not an action"),
        ("0F\u0660\n", "row 0, column 0: '0F\u0660' is not an action"),
        (f"0F{'1' * 5000}\n", "row 0, column 0: '0F11111111111111111111111111111111111111...' is not an action"),
        ("0F0" * 50000, "not a CSV text: field larger than field limit"),
        ("", "the CSV text has no action; it needs a row for each rank"),
        ("0F0,0B0,0F1\n", "rank 0: the backward of 0F1.0 must be B, or I and W, but the plan has none; make it one"),
        ("0F0,0F2\n", "microbatch 1 has no action, but microbatch 2 has; number them from 0 without gaps"),
        ("0F0,1F0\n0F1\n", "row 1: stage 0 has an action here (F), but others in row 0"),
        ("0F0,1F0,0F1\n", "rank 0: 1F1.0 is missing; add it"),
        ("0B0,0F0\n", "deadlock: rank 0, step 0: 0B0.0 waits for 0F0.0"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        read_plan(text)
    assert str(caught.value).startswith(message)


def test_empty_lines_at_the_end_are_no_ranks() -> None:
    assert read_plan("0F0,0B0\n\n\n").graph.num_ranks == 1


def test_transfers_that_are_missing_are_found() -> None:
    with pytest.raises(PlanError, match=r"0WAIT_B0\.0<1 waits for no receive"):
        read_program("0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0\n")


def test_transfers_on_one_rank_are_refused() -> None:
    with pytest.raises(PlanError, match="0SEND_F0: stage 1 is not on another rank; remove the transfer"):
        read_program("0F0,0SEND_F0,1F0\n")


def test_what_torch_cannot_say_is_refused() -> None:
    problem = two_modules(2, [1, 0])
    plan = one_f_one_b(problem)
    message = "this iteration has 3 works in vision and language; use JSON"
    with pytest.raises(PlanError, match=message):
        write_plan(plan)
    with pytest.raises(PlanError, match=message):
        write_program(lower(plan, problem, sharded=False))
