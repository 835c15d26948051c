"""Weight gradients set aside where they hold up other ranks, as a pass over plans."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.errors import PlanError
from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.chain import plain_chain
from mmtrain.schedule.graph import InstructionNode
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.library.interleave import interleave
from mmtrain.schedule.library.one_f_one_b import alternate, joined, one_f_one_b
from mmtrain.schedule.library.weights import worth_splitting
from mmtrain.schedule.passes.separate import separate_gradients
from mmtrain.schedule.plan import Plan, check
from mmtrain.schedule.problem import P2P, PlanningProblem
from mmtrain.schedule.simulate import simulate
from tests.schedule.problems import chain, halves, problems, two_modules

GRID = [(p, m) for p in range(2, 9) for m in range(p, 4 * p + 1)]
DAILY = [(2, 2), (3, 5), (4, 7), (4, 16), (7, 10), (8, 8), (8, 15), (8, 32)]
NAMES = ["GPipe", "1F1B", "interleave", "Optimus", "ZB-H1", "ZB-AutoSchedule"]


@pytest.mark.parametrize(
    ("p", "m"), [*DAILY, *(pytest.param(*point, marks=pytest.mark.nightly) for point in GRID if point not in DAILY)]
)
def test_1f1b_with_twice_the_forwards_in_flight_becomes_as_good_as_zb_h2(p: int, m: int) -> None:
    problem = plain_chain(p, m, CATALOGUE["ZB-H2"])
    plan = Plan(problem.graph, alternate(problem.graph, ahead=2))
    h2 = simulate(problem, CATALOGUE["ZB-H2"].make(problem))
    for in_flight in (None, [2 * p - 1] * p):
        separated = separate_gradients(plan, problem, in_flight=in_flight)
        check(separated, problem)
        timeline = simulate(problem, separated)
        # ZB-H2 starts Ws too early where there are few microbatches.
        assert timeline.makespan_s <= h2.makespan_s if m < 2 * p - 1 else timeline.makespan_s == h2.makespan_s
        assert max(timeline.span_s) == max(h2.span_s)
        assert max(timeline.peak_bytes) <= max(h2.peak_bytes)


@pytest.mark.parametrize(("p", "m"), [(2, 5), (4, 4), (4, 11), (8, 24)])
def test_1f1b_becomes_as_good_as_zb_h1(p: int, m: int) -> None:
    problem = chain(p, m)
    plan = separate_gradients(one_f_one_b(problem), problem)
    ours, h1 = simulate(problem, plan), simulate(problem, CATALOGUE["ZB-H1"].make(problem))
    assert (ours.makespan_s, max(ours.span_s), max(ours.peak_bytes)) == (h1.makespan_s, max(h1.span_s), p)


def separated(problem: PlanningProblem, orders: str | None = None) -> str:
    """The text of the separated plan, of 1F1B or of given orders."""
    return str(separate_gradients(Plan.parse(problem.graph, orders) if orders else one_f_one_b(problem), problem))


def separated_makespan(problem: PlanningProblem, plan: Plan) -> float:
    return simulate(problem, separate_gradients(plan, problem)).makespan_s


def test_weight_gradients_that_hold_up_another_rank_run_where_their_own_rank_idles() -> None:
    # Rank 0 waits for both gradients of rank 1, which then idles at the end. Nobody waits for those of rank 0.
    assert separated(chain(2, 2)) == "0F0.0 0F1.0 0B0.0 0B1.0\n1F0.0 1I0.0 1F1.0 1I1.0 1W0.0 1W1.0"


def test_a_weight_gradient_runs_early_where_the_next_action_can_wait() -> None:
    problem = chain(3, 4)
    plan = one_f_one_b(problem)
    assert str(separate_gradients(plan, problem)).splitlines()[2] == (
        "2F0.0 2I0.0 2W0.0 2F1.0 2I1.0 2F2.0 2I2.0 2F3.0 2I3.0 2W1.0 2W2.0 2W3.0"
    )
    assert (simulate(problem, plan).makespan_s, separated_makespan(problem, plan)) == (18.0, 14.0)


def test_the_plan_itself_comes_back_where_nothing_waits_for_a_weight_gradient() -> None:
    problem = chain(1, 3)
    plan = one_f_one_b(problem)
    assert separate_gradients(plan, problem) is plan


@pytest.mark.parametrize(
    ("weight_s", "latency_s", "makespan_s"), [(3.0, 0.0, 11.0), (2.0, 1.0, 11.0), (2.0, 2.0, 13.0)]
)
def test_a_weight_gradient_longer_than_the_idle_time_runs_before_an_action_that_can_wait(
    weight_s: float, latency_s: float, makespan_s: float
) -> None:
    p2p = P2P(latency_s=latency_s, bytes_per_s=1e9)
    problem = chain(2, 2, cost=halves(1.0, 1.0, weight_s), p2p=p2p)
    # One more if only idle time were used, or if the time of transfers were not counted.
    assert separated_makespan(problem, one_f_one_b(problem)) == makespan_s


def test_weight_gradients_run_in_idle_time_alone_where_waiting_actions_turn_out_to_be_urgent() -> None:
    problem = two_modules(2, [1, 1], vision=halves(1.0, 1.0, 3.0), language=halves(2.0, 1.0, 1.0))
    # 22 if each W runs as soon as the bound of the first pass seems to allow it.
    assert separated_makespan(problem, interleave(problem)) == 20.0


def test_of_equal_makespans_the_shorter_span_is_taken() -> None:
    problem = chain(2, 3, cost=halves(2.0, 1.0, 1.0))
    timeline = simulate(problem, separate_gradients(one_f_one_b(problem), problem))
    assert (timeline.makespan_s, max(timeline.span_s)) == (14.0, 13.0)


def test_no_more_backwards_are_split_than_the_best_end_needs() -> None:
    # Memory delays that end by as much as all other weight gradients of rank 1 take.
    assert separated(chain(2, 2, memory_limit_bytes=[1, 1])) == "0F0.0 0F1.0 0B0.0 0B1.0\n1F0.0 1B0.0 1F1.0 1I1.0 1W1.0"


def test_a_weight_gradient_runs_earlier_where_a_limit_demands_it() -> None:
    orders = "0F0.0 0F1.0 0F2.0 0B0.0 0B1.0 0B2.0\n1F0.0 1B0.0 1F1.0 1B1.0 1F2.0 1B2.0"
    free = "1F0.0 1I0.0 1F1.0 1I1.0 1F2.0 1I2.0 1W0.0 1W1.0 1W2.0"
    full = "1F0.0 1B0.0 1F1.0 1B1.0 1F2.0 1I2.0 1W2.0"
    assert separated(chain(2, 3), orders).splitlines()[1] == free
    assert separated(chain(2, 3, memory_limit_bytes=[3, 1]), orders).splitlines()[1] == full
    problem = chain(2, 3)
    plan = Plan.parse(problem.graph, orders)
    assert str(separate_gradients(plan, problem, in_flight=[3, 1])).splitlines()[1] == full
    assert separate_gradients(plan, problem, in_flight=[3, 3]) == separate_gradients(plan, problem)


def test_works_of_one_microbatch_are_one_pair_in_flight() -> None:
    problem = two_modules(2, [2, 2, 2, 2])
    plan = one_f_one_b(problem)
    free = separate_gradients(plan, problem)
    assert most_in_flight(free) == [5, 5]
    assert separate_gradients(plan, problem, in_flight=[5, 5]) == free
    assert most_in_flight(separate_gradients(plan, problem, in_flight=[5, 3])) == [5, 3]


def test_a_backward_stays_whole_where_what_its_input_gradient_leaves_does_not_fit() -> None:
    cost = halves(1.0, 1.0, 1.0, activation_bytes=1.0, weight_bytes=3.0)
    assert "I" in separated(chain(2, 3, cost=cost))
    assert "I" not in separated(chain(2, 3, cost=cost, memory_limit_bytes=[None, 2.5]))


def test_an_input_gradient_that_is_on_no_way_to_another_rank_is_not_split_off() -> None:
    # A frozen language model passes gradients to the encoder, and has none for its own weights.
    problem = two_modules(2, [1, 0, 2], language=halves(1.0, 1.0, 0.0))
    plan = separate_gradients(one_f_one_b(problem), problem)
    check(plan, problem)
    assert {stage for stage, _ in plan.split} == {1}


def test_braids_and_the_plans_own_weight_gradients_stay_where_they_are() -> None:
    problem = chain(2, 3)
    rank_0 = "0F0.0 0F1.0 0F2.0 0I0.0 0B1.0 0W0.0 0B2.0"
    orders = f"{rank_0}\n1F0.0 1F1.0&1B0.0 1F2.0 1B1.0 1B2.0"
    assert separated(problem, orders) == f"{rank_0}\n1F0.0 1F1.0&1B0.0 1F2.0 1I1.0 1W1.0 1B2.0"


SYNC = Kind.register("SYNC")


def with_instruction(**needs: tuple[tuple[Kind, int, int], ...]) -> PlanningProblem:
    """Two ranks and two microbatches, with an instruction of half a second for microbatch 1 on rank 1."""
    plain = chain(2, 2)
    graph = plain.graph
    return PlanningProblem.build(
        num_ranks=2,
        modules=graph.modules,
        stage_rank=graph.stage_rank,
        works=graph.works,
        costs=plain.costs,
        cost_index=plain.cost_index,
        output_bytes=plain.output_bytes,
        p2p=plain.p2p,
        instructions=[InstructionNode(kind=SYNC, stage=1, work=1, seconds=0.5, growth_bytes=0.25, **needs)],
    )


def test_instructions_stay_where_they_are() -> None:
    problem = with_instruction(after=((Kind.F, 1, 1),), before=((Kind.B, 1, 0),))
    orders = "0F0.0 0F1.0 0B0.0 0B1.0\n1F0.0 1F1.0 1SYNC1.0 1B0.0 1B1.0"
    assert separated(problem, orders) == "0F0.0 0F1.0 0B0.0 0B1.0\n1F0.0 1F1.0 1SYNC1.0 1I0.0 1W0.0 1I1.0 1W1.0"


def test_a_backward_whose_weight_gradient_an_instruction_precedes_stays_whole() -> None:
    orders = "0F0.0 0F1.0 0B0.0 0B1.0\n1F0.0 1F1.0 1B0.0 1B1.0 1SYNC1.0"
    forward, weight = (Kind.F, 1, 1), (Kind.W, 1, 0)
    assert "1I0.0" in separated(with_instruction(after=(forward,)), orders)
    assert separated(with_instruction(after=(forward,), before=(weight,)), orders) == orders


def test_one_limit_in_flight_a_rank() -> None:
    problem = chain(2, 2)
    with pytest.raises(PlanError, match="in_flight has 3 entries for 2 ranks; give one a rank"):
        separate_gradients(one_f_one_b(problem), problem, in_flight=[1, 2, 3])


@given(data=st.data())
def test_a_separated_plan_is_never_longer_and_keeps_its_order_and_limits(data: st.DataObject) -> None:
    limits = data.draw(st.booleans())
    problem = data.draw(problems(limits=limits))
    try:
        plan = CATALOGUE[data.draw(st.sampled_from(NAMES))].make(problem)
    except PlanError:
        return  # one microbatch alone does not fit
    in_flight = data.draw(
        st.none() | st.lists(st.integers(0, 4), min_size=plan.graph.num_ranks, max_size=plan.graph.num_ranks)
    )
    separated = separate_gradients(plan, problem, in_flight=in_flight)
    check(separated)
    assert str(separate_gradients(plan, problem, in_flight=in_flight)) == str(separated)
    before, after = simulate(problem, plan), simulate(problem, separated)
    assert after.makespan_s <= before.makespan_s * (1 + 1e-9)
    assert after.busy_s == pytest.approx(before.busy_s)
    for limit, held, peak in zip(problem.memory_limit_bytes, before.peak_bytes, after.peak_bytes, strict=True):
        assert limit is None or peak <= max(limit, held) * (1 + 1e-9)
    for limit, held, peak in zip(
        in_flight or (), most_in_flight(plan), most_in_flight(separated), strict=bool(in_flight)
    ):
        assert peak <= max(limit, held)
    assert all(worth_splitting(plan.option(problem, *node)) for node in separated.split - plan.split)
    for rank, order in enumerate(plan.orders):
        new = {plan.graph.action(Kind.W, *node) for node in separated.split - plan.split}
        kept = [action for action in separated.orders[rank] if action not in new]
        assert [named(action) for action in kept] == [named(action) for action in order]


def named(action: Action) -> tuple[str, int, int, int]:
    kind = "backward" if action.kind in (Kind.B, Kind.I) else action.kind.value
    return kind, action.stage, action.microbatch, action.sub_microbatch


def most_in_flight(plan: Plan) -> list[int]:
    """[rank] -> maximum number of pairs between their first F and last B or W."""
    together = joined(plan.graph)
    most = []
    for parts in plan.parts:
        pairs = [(together.get(a.stage, a.stage), a.microbatch) for _, a, work in parts]
        ends = {p: i for i, (p, (_, a, _)) in enumerate(zip(pairs, parts, strict=True)) if a.kind in (Kind.B, Kind.W)}
        starts: dict[tuple[int, int], int] = {}
        for i, (pair, (_, action, work)) in enumerate(zip(pairs, parts, strict=True)):
            if action.kind is Kind.F and plan.graph.has_backward(action.stage, work):
                starts.setdefault(pair, i)
        changes = Counter(dict.fromkeys(starts.values(), 1))
        changes.subtract(ends.values())
        held = peak = 0
        for i in range(len(parts)):
            held += changes[i]
            peak = max(peak, held)
        most.append(peak)
    return most
