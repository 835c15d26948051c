"""Text in, text out."""

import pytest

from mmtrain.errors import PlanError
from mmtrain.schedule.action import Kind
from mmtrain.schedule.graph import ModuleStages, Work
from mmtrain.schedule.passes.lower import Program, lower
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem
from tests.schedule.problems import NO_P2P, chain, option, two_modules


def lowered(problem: PlanningProblem, plan: str, *, sharded: bool = False) -> list[str]:
    return str(lower(Plan.parse(problem.graph, plan), problem, sharded=sharded)).split("\n")


def test_chain() -> None:
    problem = chain(2, 2)
    assert lowered(problem, "0F0.0 0F1.0 0B0.0 0B1.0\n1F0.0 1B0.0 1F1.0 1B1.0") == [
        "0F0.0 0SEND_F0.0>1 0F1.0 0SEND_F1.0>1 0RECV_B0.0<1 0WAIT_B0.0<1 0B0.0 0RECV_B1.0<1 0WAIT_B1.0<1 0B1.0",
        "1RECV_F0.0<0 1WAIT_F0.0<0 1F0.0 1RECV_F1.0<0 1B0.0 1SEND_B0.0>0 1WAIT_F1.0<0 1F1.0 1B1.0 1SEND_B1.0>0",
    ]


def test_edges_inside_of_a_rank_have_no_transfer() -> None:
    problem = two_modules(1, [1])
    assert lowered(problem, "0F0.0 1F0.0 1B0.0 0B0.0") == ["0F0.0 1F0.0 1B0.0 0B0.0"]


def test_several_sub_microbatches_are_sent_one_by_one_and_their_gradients_come_back() -> None:
    problem = two_modules(2, [2])
    assert lowered(problem, "0F0.0 0F0.1 2F0.0 2B0.0 0B0.0 0B0.1\n1F0.0 1F0.1 3F0.0 3B0.0 1B0.0 1B0.1") == [
        "0F0.0 0SEND_F0.0>1 0F0.1 0SEND_F0.1>1 "
        "2RECV_F0.0<1 2RECV_F0.1<1 2WAIT_F0.0<1 2WAIT_F0.1<1 2F0.0 2SEND_F0.0>3 "
        "2RECV_B0.0<3 2WAIT_B0.0<3 2B0.0 2SEND_B0.0>1 2SEND_B0.1>1 "
        "0RECV_B0.0<1 0WAIT_B0.0<1 0B0.0 0RECV_B0.1<1 0WAIT_B0.1<1 0B0.1",
        "1RECV_F0.0<0 1WAIT_F0.0<0 1F0.0 1RECV_F0.1<0 1SEND_F0.0>2 1WAIT_F0.1<0 1F0.1 1SEND_F0.1>2 "
        "3RECV_F0.0<2 3WAIT_F0.0<2 3F0.0 3B0.0 3SEND_B0.0>2 "
        "1RECV_B0.0<2 1RECV_B0.1<2 1WAIT_B0.0<2 1B0.0 1SEND_B0.0>0 1WAIT_B0.1<2 1B0.1 1SEND_B0.1>0",
    ]


def test_frozen_module_gets_no_gradient() -> None:
    problem = two_modules(2, [1], vision=option(backward_s=0.0))
    assert lowered(problem, "0F0.0 2F0.0 2B0.0\n1F0.0 3F0.0 3B0.0") == [
        "0F0.0 0SEND_F0.0>1 2RECV_F0.0<1 2WAIT_F0.0<1 2F0.0 2SEND_F0.0>3 2RECV_B0.0<3 2WAIT_B0.0<3 2B0.0",
        "1RECV_F0.0<0 1WAIT_F0.0<0 1F0.0 1SEND_F0.0>2 3RECV_F0.0<2 3WAIT_F0.0<2 3F0.0 3B0.0 3SEND_B0.0>2",
    ]


def test_split_backward_sends_after_its_input_half() -> None:
    problem = chain(2, 1)
    assert lowered(problem, "0F0.0 0I0.0 0W0.0\n1F0.0 1I0.0 1W0.0") == [
        "0F0.0 0SEND_F0.0>1 0RECV_B0.0<1 0WAIT_B0.0<1 0I0.0 0W0.0",
        "1RECV_F0.0<0 1WAIT_F0.0<0 1F0.0 1I0.0 1SEND_B0.0>0 1W0.0",
    ]


def test_sharded_stages_are_gathered_first_reduced_and_freed_last_even_without_work() -> None:
    problem = two_modules(1, [0])
    assert lowered(problem, "1F0.0 1B0.0", sharded=True) == [
        "0UNSHARD 1UNSHARD 1F0.0 1B0.0 0REDUCE 1REDUCE 0RESHARD 1RESHARD"
    ]


def test_regathered_stages_are_only_reduced() -> None:
    problem = two_modules(1, [0])
    plan = Plan.parse(problem.graph, "1F0.0 1B0.0")
    program = lower(plan, problem, sharded=True, regathered=[1])
    assert str(program) == "0UNSHARD 1F0.0 1B0.0 0REDUCE 1REDUCE 0RESHARD"


def test_forward_only_program_reduces_nothing() -> None:
    problem = chain(1, 1, cost=option(backward_s=0.0))
    assert lowered(problem, "0F0.0", sharded=True) == ["0UNSHARD 0F0.0 0RESHARD"]


def test_actions_without_duration_keep_causes_before_effects() -> None:
    problem = chain(3, 2, cost=option(forward_s=0.0, backward_s=1e-9))
    program = lower(
        Plan.parse(problem.graph, "\n".join(f"{r}F0.0 {r}F1.0 {r}B0.0 {r}B1.0" for r in range(3))),
        problem,
        sharded=False,
    )
    for actions in program.actions:
        for index, action in enumerate(actions):
            if action.kind is Kind.SEND_F:
                assert f"{action.stage}F{action.microbatch}.0" in map(str, actions[:index])


def test_program_text_round_trips_and_its_hash_is_stable() -> None:
    problem = chain(2, 1)
    plan = "0F0.0 0B0.0\n1F0.0 1B0.0"
    program = lower(Plan.parse(problem.graph, plan), problem, sharded=True)
    assert Program.parse(problem.graph, str(program)) == program
    assert program.hash == 5854052616537296548
    assert Program.parse(problem.graph, str(program).replace("0REDUCE", "0RESHARD")).hash != program.hash
    assert -(2**63) <= program.hash < 2**63


def test_incomplete_plan_is_not_lowered() -> None:
    problem = chain(2, 1)
    with pytest.raises(PlanError, match="must be B, or I and W"):
        lowered(problem, "0F0.0\n1F0.0 1B0.0")


def test_two_transfers_of_one_name_are_refused() -> None:
    problem = PlanningProblem.build(
        num_ranks=1,
        modules=[ModuleStages(name="text", stages=(0,)), ModuleStages(name="video", stages=(1,))],
        stage_rank=[0, 0],
        works=[
            Work(module=0, microbatch=0, sub_microbatch=0),
            Work(module=1, microbatch=0, sub_microbatch=0, after=(0,)),
            Work(module=1, microbatch=0, sub_microbatch=1, after=(0,)),
        ],
        costs=[[option()]],
        cost_index=[[0]] * 3,
        output_bytes=[[0.0]] * 3,
        p2p=NO_P2P,
    )
    with pytest.raises(PlanError, match="work 0 feeds works 1 and 2 through the same stages"):
        lowered(problem, "0F0.0 1F0.0 1F0.1 1B0.0 1B0.1 0B0.0")
