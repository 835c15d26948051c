import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings

from mmtrain.errors import PlanError
from mmtrain.schedule.action import BACKWARD, Kind
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.library.stp import stp
from mmtrain.schedule.passes.offload import offload
from mmtrain.schedule.plan import Plan, check, entry_costs
from mmtrain.schedule.problem import Option, PlanningProblem
from mmtrain.schedule.simulate import simulate
from tests.schedule.problems import as_units, chain, halves, problems

SHARES = 4
"""Blocks of a chunk."""


def offloading(keep: Option, host_s: float, restored_bytes: float = 0.0) -> list[Option]:
    """Options that offload 0 .. `SHARES` blocks. Args: host_s: seconds of the copies of all of them."""
    return [
        replace(
            keep,
            name=f"{k} offload",
            activation_bytes=keep.activation_bytes * (1 - k / SHARES),
            weight_bytes=0.0,
            restored_bytes=restored_bytes if k else 0.0,
            host_s=host_s * k / SHARES,
        )
        for k in range(SHARES + 1)
    ]


def v(p: int, m: int, host_s: float, restored_bytes: float = 0.0) -> PlanningProblem:
    problem = chain(p, m, v=True, cost=replace(halves(1.0, 1.0, 1.0, 4.0), contention=0.0))
    return replace(problem, costs=(tuple(offloading(problem.costs[0][0], host_s, restored_bytes)),))


def limited(problem: PlanningProblem, limits) -> PlanningProblem:
    return replace(problem, memory_limit_bytes=tuple(limits))


def peaks(plan: Plan, problem: PlanningProblem) -> list[float]:
    """Bytes of each rank, by what each activation of it is doing at each step."""
    found = []
    for parts in plan.parts:
        held: dict[tuple[int, int], float] = {}
        most = 0.0
        for step in range(1 + max(step for step, _, _ in parts)):
            here = [(action, work) for at, action, work in parts if at == step]
            restored = 0.0
            for action, work in here:
                option = plan.option(problem, action.stage, work)
                if action.kind is Kind.F:
                    held[action.stage, work] = option.activation_bytes
                if action.kind in BACKWARD:
                    restored += option.restored_bytes
            most = max(most, sum(held.values()) + restored)
            for action, work in here:
                if action.kind in BACKWARD:
                    del held[action.stage, work]
        found.append(most)
    return found


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize(("host_s", "alone", "in_block"), [(1.0, 4, 4), (2.0, 2, 4), (4.0, 1, 3), (1e3, 0, 0)])
def test_copies_fit_into_the_entries_that_they_run_in(p: int, host_s: float, alone: int, in_block: int) -> None:
    """A forward of 1 s alone offloads what 1 s copies; in a block, which takes 2 or 3 s, more. No action is longer."""
    problem = v(p, 4 * p, host_s)
    plan = stp(problem)
    seconds = [[cost.seconds for cost in costs] for costs in entry_costs(plan, problem)]
    kept = peaks(plan, problem)
    assert tuple(kept) == simulate(problem, plan).peak_bytes
    most_alone = most_in_block = 0
    for step in range(1, 40):
        limits = [peak * (1 - step / 40) for peak in kept]
        changed = offload(plan, limited(problem, limits))
        if changed is None:
            break
        assert changed.orders == plan.orders
        check(changed, limited(problem, limits))
        assert {stage for stage, _ in changed.options} <= set(range(p)), "stages of the way down alone"
        assert peaks(changed, problem) == pytest.approx(simulate(problem, changed).peak_bytes, rel=1e-12)
        if [[cost.seconds for cost in costs] for costs in entry_costs(changed, problem)] != seconds:
            break  # beyond what costs no time
        assert simulate(problem, changed).makespan_s == simulate(problem, plan).makespan_s
        for order, works in zip(changed.orders, changed.works, strict=True):
            for entry, work in zip(order, works, strict=True):
                for part in entry.parts:
                    if part.kind is Kind.F:
                        option = changed.options.get((part.stage, work), 0)
                        if len(entry.parts) > 1:
                            most_in_block = max(most_in_block, option)
                        else:
                            most_alone = max(most_alone, option)
    assert most_alone <= alone and most_in_block <= in_block
    if alone:
        assert most_alone == alone
    if p == 2 and in_block:
        assert most_in_block > alone or alone == SHARES


@pytest.mark.parametrize("host_s", [1.0, 3.0, 20.0])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2)])
def test_it_offloads_whenever_any_choice_fits_and_for_nothing_if_any_does(p: int, m: int, host_s: float) -> None:
    """Against all choices of options for first chunks, at each limit that tells two of them apart."""
    problem = v(p, m, host_s)
    problem = replace(problem, costs=(problem.costs[0][::2],))
    plan = stp(problem)
    nodes = [(stage, work) for stage in range(p) for work in range(m)]
    table = []
    for options in product(range(3), repeat=len(nodes)):
        one = replace(plan, options=dict(zip(nodes, options, strict=True)))
        timeline = simulate(problem, one)
        table.append((timeline.peak_bytes, timeline.makespan_s))
    kept_s = simulate(problem, plan).makespan_s
    for peak in sorted({max(peaks) for peaks, _ in table}):
        for limit in (peak, peak * (1 - 1e-6)):
            fitting = [makespan_s for peaks, makespan_s in table if max(peaks) <= limit]
            changed = offload(plan, limited(problem, [limit] * p))
            assert (changed is None) == (not fitting)
            if changed is not None and min(fitting) == kept_s:
                assert simulate(problem, changed).makespan_s == kept_s


def test_no_more_is_offloaded_than_the_limit_needs() -> None:
    problem = v(2, 8, 1.0)
    plan = stp(problem)
    (first, second) = simulate(problem, plan).peak_bytes
    assert offload(plan, limited(problem, [first, second])) == plan
    assert offload(plan, limited(problem, [None, None])) == plan
    changed = offload(plan, limited(problem, [first, second - 1.0]))
    assert changed is not None and {stage for stage, _ in changed.options} == {1}


def test_what_backwards_bring_back_has_room() -> None:
    problem = v(2, 8, 1.0, restored_bytes=3.0)
    plan = stp(problem)
    limits = [0.8 * peak for peak in simulate(problem, plan).peak_bytes]
    changed = offload(plan, limited(problem, limits))
    assert changed is not None
    check(changed, limited(problem, limits))
    with pytest.raises(PlanError, match="over the limit"):
        check(changed, limited(problem, [0.7 * limit for limit in limits]))
    assert offload(plan, limited(problem, [2.0, 2.0])) is None


def test_without_offloading_among_the_options_there_is_none() -> None:
    problem = v(2, 8, 1.0)
    without = replace(problem, costs=(tuple(replace(o, host_s=0.0) for o in problem.costs[0]),))
    assert offload(stp(without), limited(without, [20.0, 20.0])) is None


@settings(max_examples=60, deadline=None)
@given(problems(v=True))
def test_plans_of_any_problem_keep_their_limits(problem: PlanningProblem) -> None:
    """With several modules, frozen stages and absent modalities."""
    problem = as_units(problem)
    costs = tuple(
        tuple(offloading(one, min(map(one.duration_s, (Kind.F, Kind.B, Kind.I))))) if one.has_backward else (one,)
        for one, *_ in problem.costs
    )
    problem = replace(problem, costs=costs, memory_limit_bytes=(None,) * problem.graph.num_ranks)
    for name in ("STP", "1F1B"):
        plan = CATALOGUE[name].make(problem)
        timeline = simulate(problem, plan)
        for share in (0.95, 0.8):
            given_limits = limited(problem, [share * peak for peak in timeline.peak_bytes])
            changed = offload(plan, given_limits)
            if changed is not None:
                check(changed, given_limits)
                assert math.isclose(simulate(problem, changed).makespan_s, timeline.makespan_s, rel_tol=1e-12)
