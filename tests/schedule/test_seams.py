"""What the IR can say beyond the named schedules: braids, instructions, edges between inner stages, sparse modules."""

from dataclasses import replace

import pytest

from mmtrain.errors import PlanError
from mmtrain.planner.judge import judge
from mmtrain.planner.plan_json import plan_from_json, plan_to_json
from mmtrain.planner.result import PlanResult
from mmtrain.schedule.action import BRAID, KINDS, Action, Kind
from mmtrain.schedule.graph import Edge, InstructionNode, Link, ModuleStages, Work
from mmtrain.schedule.io.torch_csv import read_plan, write_plan
from mmtrain.schedule.io.wire import from_bytes, to_bytes
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.passes.lower import lower
from mmtrain.schedule.passes.release import transfers
from mmtrain.schedule.plan import Plan, check, held_bytes
from mmtrain.schedule.problem import P2P, PlanningProblem
from mmtrain.schedule.simulate import simulate
from mmtrain.schedule.transport import check_transport
from mmtrain.schedule.view.draw import svg, text
from tests.schedule.problems import chain, halves

COST = halves(1.0, 1.0, 1.0)


def linked(**link: object) -> PlanningProblem:
    """Encoder stages 0, 1 and language stages 2, 3 on two ranks; the first of one feeds the last of the other."""
    works: list[Work] = []
    for m in range(3):
        works.append(Work(module=0, microbatch=m, sub_microbatch=0))
        inner = Link(work=2 * m, source=0, target=1, **link)  # type: ignore[arg-type]
        works.append(Work(module=1, microbatch=m, sub_microbatch=0, after=(2 * m,), links=(inner,)))
    return PlanningProblem.build(
        num_ranks=2,
        modules=[ModuleStages(name="encoder", stages=(0, 1)), ModuleStages(name="language", stages=(2, 3))],
        stage_rank=[0, 1, 0, 1],
        works=works,
        costs=[[COST]],
        cost_index=[[0, 0]] * len(works),
        output_bytes=[[1e9, 0.0]] * len(works),
        p2p=P2P(latency_s=0.0, bytes_per_s=1e9),
    )


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_schedule_keeps_edges_between_inner_stages(name: str) -> None:
    problem = linked(size_bytes=3e9)
    plan = CATALOGUE[name].make(problem)
    check(plan, problem)
    starts = {row.action: row.start_s for row in simulate(problem, plan).rows}
    ends = {row.action: row.end_s for row in simulate(problem, plan).rows}
    for m in range(3):
        assert starts[Action(Kind.F, 3, m, 0)] >= ends[Action(Kind.F, 0, m, 0)] + 3.0
        back = Action(Kind.I if (0, 2 * m) in plan.split else Kind.B, 0, m, 0)
        source = Action(Kind.I if (3, 2 * m + 1) in plan.split else Kind.B, 3, m, 0)
        assert starts[back] >= ends[source] + 3.0
    program = lower(plan, problem, sharded=True)
    check_transport(program)
    assert str(program).count("0SEND_F0.0>3") == str(program).count("3SEND_B0.0>0") == 1
    edge = Edge(0, 3, 0, 1, True, 3e9)
    moved = [found for rank in range(2) for found in transfers(program, rank).values() if found[0] == edge]
    assert [forward for _, forward in moved].count(True) == [forward for _, forward in moved].count(False) == 3


def test_an_inner_edge_may_bring_no_gradient_and_have_the_size_of_what_the_stage_sends_on() -> None:
    problem = linked(grad=False)
    plan = CATALOGUE["1F1B"].make(problem)
    program = str(lower(plan, problem, sharded=False))
    assert "0SEND_F0.0>3" in program and "3SEND_B0.0>0" not in program
    (edge,) = (e for e in problem.graph.inputs(3, 1) if e.work == 0)
    assert (edge.grad, problem.transfer_s(edge)) == (False, 1.0)
    assert PlanningProblem.from_json(problem.to_json()) == problem
    assert PlanningProblem.from_json(linked(size_bytes=2.0).to_json()) == linked(size_bytes=2.0)


@pytest.mark.parametrize(
    ("link", "message"),
    [
        (Link(work=1, source=0, target=0), r"works\[1\]\.links\[0\]\.work = 1; name another work"),
        (Link(work=9, source=0, target=0), r"works\[1\]\.links\[0\]\.work = 9"),
        (Link(work=0, source=2, target=0), r"links\[0\]\.source = 2 is outside of 0 \.\. 1"),
        (Link(work=0, source=0, target=2), r"links\[0\]\.target = 2 is outside of 0 \.\. 1"),
        (Link(work=0, source=1, target=0), r"joins the same two stages"),
        (Link(work=0, source=0, target=1, size_bytes=-1.0), r"links\[0\]\.size_bytes = -1"),
    ],
)
def test_a_wrong_link_is_refused(link: Link, message: str) -> None:
    problem = linked()
    works = list(problem.graph.works)
    works[1] = Work(module=1, microbatch=0, sub_microbatch=0, after=(0,), links=(link,))
    with pytest.raises(PlanError, match=message):
        type(problem.graph)(
            num_ranks=2,
            modules=problem.graph.modules,
            stage_rank=problem.graph.stage_rank,
            works=tuple(works),
            backward=problem.graph.backward,
        )


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_module_may_live_on_some_of_the_ranks(name: str) -> None:
    works: list[Work] = []
    for m in range(4):
        works.append(Work(module=0, microbatch=m, sub_microbatch=0))
        works.append(Work(module=1, microbatch=m, sub_microbatch=0, after=(2 * m,)))
    problem = PlanningProblem.build(
        num_ranks=4,
        modules=[ModuleStages(name="encoder", stages=(0,)), ModuleStages(name="language", stages=(1, 2))],
        stage_rank=[1, 2, 3],
        works=works,
        costs=[[COST]],
        cost_index=[[0], [0, 0]] * 4,
        output_bytes=[[0.0], [0.0, 0.0]] * 4,
        p2p=P2P(latency_s=0.0, bytes_per_s=1e9),
    )
    plan = CATALOGUE[name].make(problem)
    check(plan, problem)
    check_transport(lower(plan, problem, sharded=True))
    assert plan.orders[0] == () and simulate(problem, plan).peak_bytes[0] == 0.0


def test_a_braid_is_one_entry_with_the_needs_bytes_and_results_of_its_parts() -> None:
    problem = chain(1, 2, cost=COST)
    braided = "0F0.0 0F1.0&0B0.0 0B1.0"
    plan = Plan.parse(problem.graph, braided)
    assert str(plan) == braided and plan.orders[0][1].kind is BRAID
    assert [str(part) for part in plan.orders[0][1].parts] == ["0F1.0", "0B0.0"]
    check(plan, problem)
    assert held_bytes(plan, problem) == (((1, 1), (2, 1), (1, 0)),)
    rows = simulate(problem, plan).rows
    assert [(str(r.action), r.start_s, r.end_s) for r in rows] == [
        ("0F0.0", 0, 1),
        ("0F1.0&0B0.0", 1, 4),
        ("0B1.0", 4, 6),
    ]
    units = replace(COST, forward_s=1.5, forward_exchange_s=0.5, backward_exchange_s=0.25, contention=0.0)
    timed = chain(1, 2, cost=units)
    assert simulate(timed, plan).busy_s == (1.5 + 2.75 + 1.75,)  # all three block exchanges, and that of the last B
    assert "&" in text(simulate(timed, plan)) and "B0.0 language s0" in svg(simulate(timed, plan))
    assert PlanningProblem.from_json(timed.to_json()) == timed
    assert from_bytes(problem.graph, to_bytes(plan)) == plan
    assert read_plan(write_plan(plan)).orders == plan.orders
    result = PlanResult(problem=timed, status="first", message="", plan_or_none=plan)
    assert plan_from_json(timed, plan_to_json(result)) == plan
    assert judge(timed, plan_to_json(result)).makespan_s == 6.0


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        ("0F0.0 0F1.0&0B0.0", "the backward of 0F1.0 must be B, or I and W, but the plan has none"),
        ("0F0.0 0F1.0&0B0.0 0F1.0 0B1.0", "step 2: 0F1.0 is already step 1 of this rank"),
        ("0F0.0 0F1.0&0B1.0 0B0.0", "step 1: 0F1.0&0B1.0 braids one work with itself(.|\\n)*>>0F1.0&0B1.0<<"),
        ("0F0.0&0F1.0 0B0.0 0B1.0", "rank 0, step 0: 0F0.0&0F1.0 is no braid of a forward and then one B, I or W"),
        ("0F0.0 0B0.0&0F1.0 0B1.0", "rank 0, step 1: 0B0.0&0F1.0 is no braid of a forward and then one B, I or W"),
    ],
)
def test_the_parts_of_a_braid_are_checked(orders: str, message: str) -> None:
    problem = chain(1, 2, cost=COST)
    with pytest.raises(PlanError, match=message):
        check(Plan.parse(problem.graph, orders), problem)


def test_a_cycle_of_braids_through_another_rank_is_named() -> None:
    problem = chain(2, 2, cost=COST)
    plan = Plan.parse(problem.graph, "0F0.0 0F1.0&0B0.0 0B1.0\n1F0.0 1F1.0&1B0.0 1B1.0")
    with pytest.raises(PlanError, match=r"deadlock: rank 0, step 1: 0F1.0&0B0.0 waits for 1B0.0(.|\n)*>>1F1.0&1B0.0<<"):
        check(plan, problem)


def test_transfers_of_a_braid_are_those_of_its_parts() -> None:
    problem = chain(2, 2, cost=COST)
    plan = Plan.parse(problem.graph, "0F0.0 0F1.0 0B0.0 0B1.0\n1F0.0 1F1.0&1B0.0 1B1.0")
    check(plan, problem)
    program = lower(plan, problem, sharded=False)
    check_transport(program)
    assert "1WAIT_F1.0<0 1F1.0&1B0.0 1SEND_B0.0>0" in str(program)
    assert program == type(program).parse(problem.graph, str(program))


@pytest.mark.parametrize("words", ["0F0.0&", "0F0.0&0SEND_F0.0>1", "0BRAID0.0", "0F0.0&0F1.0&x"])
def test_what_is_no_braid_is_refused(words: str) -> None:
    with pytest.raises(PlanError):
        Action.parse(words)


SYNC = Kind.register("SYNC")


def synchronised() -> PlanningProblem:
    """The backward of microbatch 0 waits for an instruction that follows the forward of microbatch 1."""
    plain = chain(1, 2, cost=COST)
    sync = InstructionNode(
        kind=SYNC,
        stage=0,
        work=1,
        after=((Kind.F, 0, 1),),
        before=((Kind.B, 0, 0),),
        seconds=0.5,
        growth_bytes=-0.25,
    )
    return PlanningProblem.build(
        num_ranks=1,
        modules=plain.graph.modules,
        stage_rank=[0],
        works=plain.graph.works,
        costs=plain.costs,
        cost_index=plain.cost_index,
        output_bytes=plain.output_bytes,
        p2p=plain.p2p,
        instructions=[sync],
    )


def test_a_registered_kind_is_checked_timed_counted_and_lowered() -> None:
    problem = synchronised()
    assert Kind("SYNC") is SYNC is Kind.register("SYNC") and SYNC not in KINDS
    plan = Plan.parse(problem.graph, "0F0.0 0F1.0 0SYNC1.0 0B0.0 0B1.0")
    check(plan, problem)
    rows = [(str(r.action), r.start_s, r.end_s) for r in simulate(problem, plan).rows]
    assert rows[2:4] == [("0SYNC1.0", 2, 2.5), ("0B0.0", 2.5, 4.5)]
    assert held_bytes(plan, problem)[0][2] == (2, 1.75)
    program = lower(plan, problem, sharded=False)
    check_transport(program)
    assert str(program) == str(plan)


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        ("0F0.0 0F1.0 0B0.0 0B1.0", "0SYNC1.0 is missing; add it"),
        ("0F0.0 0F1.0 0B0.0 0SYNC1.0 0B1.0", "0B0.0 waits for 0SYNC1.0"),
        ("0F0.0 0SYNC1.0 0F1.0 0B0.0 0B1.0", "0SYNC1.0 waits for 0F1.0"),
        ("0F0.0 0F1.0 0SYNC1.0 0SYNC1.0 0B0.0 0B1.0", "0SYNC1.0 is already step 2 of this rank; keep one"),
        ("0F0.0 0F1.0 0SYNC1.0 0SYNC0.0 0B0.0 0B1.0", "is an instruction that the iteration does not have"),
    ],
)
def test_an_instruction_out_of_order_is_refused(orders: str, message: str) -> None:
    problem = synchronised()
    with pytest.raises(PlanError, match=message):
        check(Plan.parse(problem.graph, orders), problem)


def test_kinds_have_names_of_capital_letters() -> None:
    for name in ("sync", "S1", "", "A B"):
        with pytest.raises(PlanError, match="capital letters"):
            Kind.register(name)
    with pytest.raises(ValueError, match="NOTHING"):
        Kind("NOTHING")
    with pytest.raises(PlanError, match="is a kind of every plan"):
        graph = chain(1, 1).graph
        type(graph)(
            num_ranks=1,
            modules=graph.modules,
            stage_rank=(0,),
            works=graph.works,
            backward=graph.backward,
            instructions=(InstructionNode(kind=Kind.F, stage=0, work=0),),
        )
