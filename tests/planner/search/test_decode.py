"""What the kernels say of random problems, against the modules that judge all plans."""

import math
import random
from dataclasses import replace

import numba
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmtrain.planner.search.evaluate import anneal, evaluate, start_chain
from mmtrain.planner.search.instance import Searched
from mmtrain.planner.search.kernels.arrays import GROUP, KIND, B, Chain, Decoder, F, W
from mmtrain.planner.search.kernels.decode import block_s
from mmtrain.planner.search.orders import GroupOrder, by_component, component_orders, order_of
from mmtrain.schedule.action import Kind
from mmtrain.schedule.graph import ModuleStages, Work
from mmtrain.schedule.plan import check
from mmtrain.schedule.problem import P2P, Option, PlanningProblem
from mmtrain.schedule.simulate import simulate
from tests.examples import examples
from tests.schedule.problems import as_units, chain, problems, two_modules

DECODERS = st.builds(
    Decoder,
    memory=st.tuples(*[st.sampled_from([0.0, 0.3, 1.0])] * 3),
    speed=st.tuples(*[st.sampled_from([0.0, 0.5, 1.0])] * 3),
    gap=st.sampled_from([0.0, 0.5, 1.0]),
    backward_first=st.booleans(),
    split=st.booleans(),
    braid=st.booleans(),
    wait=st.sampled_from([0.0, 0.5, 1.0]),
)


def of_modules(searched: Searched, how: Decoder) -> Decoder:
    """A drawn decoder for the modules of a problem."""
    num = searched.num_modules
    return how._replace(memory=how.memory[:num], speed=how.speed[:num])


def random_order(searched: Searched, seed: int) -> GroupOrder:
    rng = random.Random(seed)
    halves = [rng.sample(range(searched.num_groups), searched.num_groups) for _ in range(2)]
    return order_of(np.array(halves, np.int64))


@settings(max_examples=examples(400), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    problem=problems(limits=True) | problems() | problems(limits=True).map(as_units),
    how=DECODERS,
    seed=st.integers(0, 9),
)
def test_an_evaluation_is_what_its_plan_comes_to(problem: PlanningProblem, how: Decoder, seed: int) -> None:
    searched = Searched.of(problem)
    w = searched.workspace()
    makespan = evaluate(searched, w, random_order(searched, seed), of_modules(searched, how), 20)
    if makespan == math.inf:  # over the reservation, where no order of ranks keeps it, or too little memory
        assert any(limit is not None for limit in problem.memory_limit_bytes)
        return
    plan = searched.plan(w, join=False)
    check(plan, problem)
    assert simulate(problem, plan).end_s == pytest.approx(makespan, rel=1e-12, abs=1e-12)
    joined = searched.plan(w)
    check(joined, problem)
    # Of layers that run as units, I and W as one B hide exchanges.
    shortest = 0.0 if problem.runs_units else makespan * (1 - 1e-12)
    assert shortest <= simulate(problem, joined).end_s <= makespan * (1 + 1e-12)
    if not how.split:
        assert not plan.split


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems(), how=DECODERS, seed=st.integers(0, 9))
def test_the_same_priorities_decode_to_the_same_plan(problem: PlanningProblem, how: Decoder, seed: int) -> None:
    searched = Searched.of(problem)
    plans = []
    for before in (seed, seed + 1):  # a workspace that was used keeps nothing
        w = searched.workspace()
        for order in (random_order(searched, before), random_order(searched, seed)):
            evaluate(searched, w, order, of_modules(searched, how), 5)
        plans.append(searched.plan(w))
    assert plans[0] == plans[1]


@pytest.mark.parametrize("count", [1, 63, 64, 65, 4031, 4032, 4033, 4100])
def test_queues_of_any_length_are_served_in_their_order(count: int) -> None:
    searched = Searched.of(chain(1, count))
    w = searched.workspace()
    order = random_order(searched, 0)
    evaluate(searched, w, order, searched.decoder(0.0, 0.0, 0.0, False, False), 0)
    served = w.order[0, : w.length[0]]
    assert [int(a) >> 2 for a in served if a & 3 == F] == order[1][0].tolist()


@pytest.mark.parametrize("count", [65, 4300])
def test_long_queues_with_gaps_lose_nothing(count: int) -> None:
    problem = chain(2, count)
    searched = Searched.of(problem)
    w = searched.workspace()
    makespan = evaluate(searched, w, random_order(searched, 0), searched.decoder(0.0, 0.0, 0.5, False, True), 0)
    plan = searched.plan(w)
    check(plan, problem)
    assert simulate(problem, plan).end_s == pytest.approx(makespan, rel=1e-12)


@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems(), how=DECODERS, seed=st.integers(0, 99), hot=st.sampled_from([1e-9, 1e-2]))
def test_a_chain_stands_at_what_it_last_accepted(problem: PlanningProblem, how: Decoder, seed: int, hot: float) -> None:
    searched = Searched.of(problem)
    w = searched.workspace()
    order = random_order(searched, seed)
    how = of_modules(searched, how)
    chain = start_chain(searched, order, how, evaluate(searched, w, order, how, 0), seed)
    anneal(searched, w, chain, 40, (hot, hot), 0, can_split=True, can_braid=True, reorder=True)
    (at, group_at), there = standing(chain)
    for half in range(2):
        assert group_at[half, at[half]].tolist() == list(range(searched.num_groups))
    assert evaluate(searched, w, (at, group_at), there, 0) == chain.cost[0]
    assert chain.cost[1] <= chain.cost[0]


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems(limits=True) | problems().map(as_units), how=DECODERS, seed=st.integers(0, 99))
def test_a_move_that_is_not_decoded_changes_nothing(problem: PlanningProblem, how: Decoder, seed: int) -> None:
    searched = Searched.of(problem)
    w, order = searched.workspace(), random_order(searched, seed)
    how = of_modules(searched, how)
    chain = start_chain(searched, order, how, evaluate(searched, w, order, how, 5), seed)
    for _ in range(40):
        before, there = standing(chain), chain.current[0]
        anneal(searched, w, chain, 1, (1e-2, 1e-2), 5, can_split=True, can_braid=True, reorder=True)
        if chain.current[0] == there and (chain.at != before[0][0]).any():
            assert decoded(searched, *standing(chain)) == decoded(searched, *before)


def test_a_chain_goes_where_it_would_if_each_move_were_decoded() -> None:
    searched = Searched.of(two_modules(2, [3, 0, 1, 2, 5, 1, 1]))
    order, how = by_component(searched, range(7)), searched.decoder(0.0, 0.0, 0.5, False, True)
    ways: list[list[object]] = []
    for forget in (False, True):
        w = searched.workspace()
        chain = start_chain(searched, order, how, evaluate(searched, w, order, how, 0), 3)
        way: list[object] = []
        left_out = 0
        for _ in range(400):
            before, there = chain.at.tolist(), chain.current[0]
            if forget:
                chain.current[1] = 0
            anneal(searched, w, chain, 1, (1e-2, 1e-2), 0, can_split=True, can_braid=False, reorder=True)
            left_out += chain.current[0] == there and chain.at.tolist() != before
            way.append((chain.at.tolist(), chain.decoder.tolist(), chain.cost.tolist()))
        assert (left_out == 0) if forget else (left_out > 100)
        ways.append(way)
    assert ways[0] == ways[1]


@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    problem=problems() | problems().map(as_units),
    how=DECODERS,
    seed=st.integers(0, 99),
    hot=st.sampled_from([1e-9, 1e-3, 1e-1]),
)
def test_decoding_that_ends_early_is_of_plans_that_are_not_accepted(
    problem: PlanningProblem, how: Decoder, seed: int, hot: float
) -> None:
    searched = Searched.of(problem)
    order, drawn = random_order(searched, seed), replace(searched, factors=np.ones((1, len(searched.nodes), 3)))
    how, ways = of_modules(searched, how), []
    for one in (searched, drawn):  # with draws, if only of factors of 1, it never ends early
        w = one.workspace()
        chain = start_chain(one, order, how, evaluate(one, w, order, how, 0), seed)
        for _ in range(20):
            anneal(one, w, chain, 5, (hot, hot), 0, can_split=True, can_braid=True, reorder=True)
            ways.append((chain.at.tolist(), chain.decoder.tolist(), chain.cost.tolist()))
    assert ways[:20] == ways[20:]


def standing(chain: Chain) -> tuple[GroupOrder, Decoder]:
    """Where a chain stands."""
    return (chain.at.astype(np.int64), chain.group_at.astype(np.int64)), Decoder.from_array(chain.decoder)


def decoded(searched: Searched, order: GroupOrder, how: Decoder) -> list[list[int]]:
    """The actions of each rank."""
    w = searched.workspace()
    evaluate(searched, w, order, how, 0)
    return [row[:length].tolist() for row, length in zip(w.order, w.length, strict=True)]


def test_priorities_decide_what_is_served_first() -> None:
    problem = chain(1, 3)
    searched = Searched.of(problem)
    w = searched.workspace()
    order = order_of(np.array([[2, 0, 1], [0, 1, 2]], np.int64))
    evaluate(searched, w, order, searched.decoder(0.0, 0.0, 0.0, True, False), 0)
    assert str(searched.plan(w)) == "0F2.0 0B2.0 0F0.0 0B0.0 0F1.0 0B1.0"
    evaluate(searched, w, order, searched.decoder(0.0, 0.0, 0.0, False, False), 0)
    assert str(searched.plan(w)) == "0F2.0 0B2.0 0F0.0 0B0.0 0F1.0 0B1.0"


def test_weight_halves_fill_the_time_before_a_gradient() -> None:
    problem = chain(2, 2)
    searched = Searched.of(problem)
    w = searched.workspace()
    order = by_component(searched, [0, 1])
    makespan = evaluate(searched, w, order, searched.decoder(0.0, 0.0, 1.0, False, True), 0)
    assert makespan == 7.0  # the bound: 1 + 2 x (F + I + W)
    assert Kind.W in {action.kind for action in searched.plan(w, join=False).orders[1]}


def test_memory_bounds_what_is_in_flight() -> None:
    peaks = []
    for limit in (None, 2.0):
        problem = chain(2, 6, memory_limit_bytes=[limit, limit])
        searched = Searched.of(problem)
        w = searched.workspace()
        evaluate(searched, w, by_component(searched, range(6)), searched.decoder(0.0, 0.0, 0.0, False, False), 0)
        plan = searched.plan(w)
        check(plan, problem)
        peaks.append(max(simulate(problem, plan).peak_bytes))
    assert peaks[0] > 2.0 == peaks[1]


def test_each_module_has_its_own_assumption_of_memory_and_speed() -> None:
    def made(vision: list[Option], language: list[Option]) -> Searched:
        problem = two_modules(2, [1, 2, 1, 2, 1, 1], memory_limit_bytes=[9.0, 9.0])
        return Searched.of(replace(problem, costs=(tuple(vision), tuple(language))))

    def with_bytes(name: str, held: float, input_s: float) -> Option:
        return Option(name=name, forward_s=1.0, backward_input_s=input_s, backward_weight_s=1.0, activation_bytes=held)

    keep, lean = with_bytes("keep", 2.0, 1.0), with_bytes("lean", 1.0, 1.75)
    both, plans = made([keep, lean], [keep, lean]), []
    for memory, speed in (((0.0, 1.0), (0.0, 0.0)), ((1.0, 0.0), (0.0, 1.0)), ((1.0, 1.0), (1.0, 0.0))):
        # What it assumes of a module is what a problem with this one option says.
        only = made(*([with_bytes("assumed", 2.0 - m, 1.0 + 0.75 * s)] for m, s in zip(memory, speed, strict=True)))
        order = by_component(both, range(6))
        how = Decoder(memory, speed, 0.0, False, False)
        plans.append(decoded(both, order, how))
        assert plans[-1] == decoded(only, order, only.decoder(0.0, 0.0, 0.0, False, False))
    assert len({str(plan) for plan in plans}) == 3


def test_a_forward_waits_for_a_backward_that_arrives_soon() -> None:
    # Rank 1 runs the backward of microbatch 0 from 2.0 to 3.4; rank 0 is free at 3.0.
    cost = Option(name="keep", forward_s=1.0, backward_input_s=0.7, backward_weight_s=0.7, activation_bytes=1.0)
    searched, first = Searched.of(chain(2, 4, cost=cost)), []
    for wait in (0.0, 0.25, 0.5):
        w = searched.workspace()
        how = searched.decoder(0.0, 0.0, 0.0, False, False)._replace(wait=wait)
        evaluate(searched, w, by_component(searched, range(4)), how, 0)
        first.append(str(searched.plan(w)).splitlines()[0])
    at_once, waiting = (
        "0F0.0 0F1.0 0F2.0 0F3.0 0B0.0 0B1.0 0B2.0 0B3.0",
        "0F0.0 0F1.0 0F2.0 0B0.0 0F3.0 0B1.0 0B2.0 0B3.0",
    )
    assert first == [at_once, at_once, waiting]


def test_groups_are_passes_over_the_ranks() -> None:
    searched = Searched.of(chain(2, 2, num_segments=2))
    assert searched.groups == ((0, 0), (0, 1), (1, 0), (1, 1))
    assert searched.arrays.node[:, GROUP].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    down_and_up = Searched.of(chain(2, 1, v=True))
    assert down_and_up.arrays.node[:, GROUP].tolist() == [
        0,
        0,
        1,
        1,
    ]  # where the first ended


def test_seed_orders_are_permutations() -> None:
    searched = Searched.of(two_modules(2, [3, 0, 1, 2, 5]))
    found = component_orders(searched)
    assert len(found) == 8
    assert all(sorted(order) == list(range(5)) for order in found)
    rising, falling = found[1], found[2]
    assert rising == (1, 2, 3, 0, 4)
    assert falling == rising[::-1]
    for order in found:
        at, group_at = by_component(searched, order)
        for half in range(2):
            assert sorted(group_at[half]) == list(range(searched.num_groups))
            assert (group_at[half][at[half]] == np.arange(searched.num_groups)).all()


VISION, LANGUAGE = (8.0, 17.0, 12.0, 17.0, 7.0), (15.0, 15.0, 18.0, 15.0, 13.0)
"""Compute and exchanges of F and of I, and W: about those of VLM-M on 8 tensor-parallel ranks."""


def units(seconds: tuple[float, ...], size: float) -> list[Option]:
    forward_s, forward_exchange_s, input_s, input_exchange_s, weight_s = (size * value for value in seconds)
    return [
        Option(
            name="keep",
            forward_s=forward_s + forward_exchange_s,
            backward_input_s=input_s + input_exchange_s,
            backward_weight_s=weight_s,
            activation_bytes=size,
            forward_exchange_s=forward_exchange_s,
            backward_exchange_s=input_exchange_s,
            contention=0.19,
        )
    ]


def exchanges_of_vision(num_ranks: int = 4, count: int = 16) -> PlanningProblem:
    """Two vision works a microbatch, whose exchanges take longer than their compute, before one of language."""
    rng = random.Random(0)
    works: list[Work] = []
    for microbatch in range(count):
        first = len(works)
        works += [Work(module=0, microbatch=microbatch, sub_microbatch=i) for i in range(2)]
        works.append(Work(module=1, microbatch=microbatch, sub_microbatch=0, after=(first, first + 1)))
    half = 2 * num_ranks
    return PlanningProblem.build(
        num_ranks=num_ranks,
        modules=[
            ModuleStages(name="vision", stages=tuple(range(half))),
            ModuleStages(name="language", stages=tuple(range(half, 2 * half))),
        ],
        stage_rank=[*range(num_ranks)] * 4,
        works=works,
        costs=[units(LANGUAGE if work.module else VISION, rng.uniform(0.6, 1.2)) for work in works],
        cost_index=[[i] * half for i in range(len(works))],
        output_bytes=[[0.0] * half] * len(works),
        p2p=P2P(latency_s=0.01, bytes_per_s=1e9),
    )


@numba.njit
def in_block_s(load, forward, backward, kind):  # type: ignore[no-untyped-def]
    return block_s(load, forward, backward, kind)


@st.composite
def options_in_blocks(draw: st.DrawFn) -> Option:
    forward_s, forward_exchange_s, input_s, input_exchange_s, weight_s, split_s, host_s = draw(
        st.lists(st.floats(0, 1e3), min_size=7, max_size=7)
    )
    return replace(
        units((forward_s, forward_exchange_s, input_s, input_exchange_s, weight_s), 1.0)[0],
        split_s=split_s,
        host_s=host_s,
        contention=draw(st.floats(0, 1)),
    )


@given(forward=options_in_blocks(), backward=options_in_blocks())
def test_the_kernel_gives_a_block_the_seconds_of_its_load(forward: Option, backward: Option) -> None:
    p = Searched.of(two_modules(1, [1], vision=forward, language=backward)).arrays
    vision, language = (int(p.first[kind]) for kind in p.node[:, KIND])
    for kind in (Kind.B, Kind.W):
        found = in_block_s(p.load, vision, language, W if kind is Kind.W else B)
        assert found == forward.load(Kind.F).together(backward.load(kind)).seconds


def test_a_block_takes_the_backward_that_saves_most_for_what_it_usually_saves() -> None:
    """Against the one that saves most: in blocks of vision alone exchanges take longer than compute."""
    problem = exchanges_of_vision()
    searched = Searched.of(problem)
    equal = replace(searched, arrays=searched.arrays._replace(usual_s=np.ones_like(searched.arrays.usual_s)))
    order, how = by_component(searched, range(16)), searched.decoder(0.0, 0.0, 0.0, False, False, True)
    usual, most = (evaluate(one, one.workspace(), order, how, 0) for one in (searched, equal))
    assert usual < 0.98 * most


def test_what_a_backward_usually_saves_is_that_with_the_mean_forward() -> None:
    problem = two_modules(1, [1], vision=units(VISION, 1.0)[0], language=units(LANGUAGE, 1.0)[0])
    (usual_s,) = Searched.of(problem).arrays.usual_s.tolist()
    mean_s, mean_exchange_s = (8 + 15) / 2, (17 + 15) / 2
    for saved, (_, _, input_s, exchange_s, weight_s) in zip(usual_s, (VISION, LANGUAGE), strict=True):
        alone = mean_s + mean_exchange_s + input_s + max(weight_s, exchange_s) + 0.19 * min(weight_s, exchange_s)
        under = max(mean_exchange_s - input_s, 0.0)
        first, second = (input_s + under, mean_exchange_s), (mean_s + weight_s - under, exchange_s)
        together = sum(max(pair) + 0.19 * min(pair) for pair in (first, second))
        assert saved == pytest.approx(alone - together)
