import pytest

from mmtrain.schedule.action import Kind
from mmtrain.schedule.library.controllable_memory import v_half, v_min
from mmtrain.schedule.library.dual_pipe_v import dual_pipe_v, template
from mmtrain.schedule.library.v_shape import Slot, v_chain
from mmtrain.schedule.library.zbv import zbv
from mmtrain.schedule.plan import check
from mmtrain.schedule.simulate import simulate
from tests.schedule.problems import chain, halves, two_modules

UNIT = halves(1.0, 1.0, 1.0, activation_bytes=0.5)
"""One of the two stages of a rank: half of what a microbatch holds there."""


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
def test_zbv_has_no_bubble_and_the_memory_of_1f1b(p: int) -> None:
    for m in (2 * p - 1, 2 * p, 5 * p):
        problem = chain(p, m, v=True, cost=UNIT)
        timeline = simulate(problem, zbv(problem))
        assert timeline.span_s == (6.0 * m,) * p
        assert timeline.makespan_s == 6.0 * m + p - 1
        assert max(timeline.peak_bytes) == p


@pytest.mark.parametrize("p", [2, 3, 4, 5, 6, 8, 9, 12, 16])
def test_v_min_holds_a_third_with_two_thirds_of_the_bubble(p: int) -> None:
    for m in (2 * p, 5 * p):
        problem = chain(p, m, v=True, cost=UNIT)
        timeline = simulate(problem, v_min(problem))
        assert max(timeline.peak_bytes) == (p + 4) // 3
        assert max(timeline.span_s) == 6.0 * m + 4 * p - 5  # 1F1B: 6m + 6(p - 1)


@pytest.mark.parametrize("p", [2, 3, 4, 5, 6, 8, 9, 12, 16])
def test_v_half_holds_half_with_half_of_the_bubble(p: int) -> None:
    for m in (2 * p, 5 * p):
        problem = chain(p, m, v=True, cost=UNIT)
        timeline = simulate(problem, v_half(problem))
        assert max(timeline.peak_bytes) == (p + 2) // 2
        assert max(timeline.span_s) <= 6.0 * m + 3 * p


@pytest.mark.parametrize("cost", [(1.0, 1.0, 1.0), (2.0, 2.0, 1.0), (4.0, 3.0, 2.0), (5.0, 4.0, 4.0)])
@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_dual_pipe_v_has_its_bubble_and_memory(p: int, cost: tuple[float, float, float]) -> None:
    forward, backward_input, weight = cost
    for m in (2 * p, 3 * p):
        problem = chain(p, m, v=True, cost=halves(*cost))
        timeline = simulate(problem, dual_pipe_v(problem))
        assert timeline.makespan_s == 2 * m * sum(cost) + (p - 1) * (forward + backward_input - weight)
        assert max(timeline.peak_bytes) == 2 * p + 1  # stages; PP + 1 for PP = 2p stages


@pytest.mark.parametrize("cost", [(1.0, 1.0, 1.0), (2.0, 2.0, 1.0), (3.0, 3.0, 2.0)])
@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_pairs_as_blocks_have_the_published_bubble_of_dual_pipe_v(p: int, cost: tuple[float, float, float]) -> None:
    """(PP/2 - 1)(F&B + B - 3W) with PP = 2p, B = I + W, and blocks that take as long as their parts, F = I."""
    forward, backward_input, weight = cost
    whole = backward_input + weight
    bubble = (p - 1) * (forward + whole + whole - 3 * weight)
    assert makespan_of_blocks(template(p, 3 * p), *cost) == 2 * 3 * p * sum(cost) + bubble


def makespan_of_blocks(slots: list[list[Slot]], forward: float, backward_input: float, weight: float) -> float:
    """Seconds if a forward and the backward behind it, of the other leg, start and end together."""
    p = len(slots)
    seconds = {Kind.F: forward, Kind.B: backward_input + weight, Kind.I: backward_input, Kind.W: weight}
    end: dict[tuple[bool, int, int], float] = {}  # (forward or not, stage, microbatch)
    free, place, progress = [0.0] * p, [0] * p, True
    while progress:
        progress = False
        for rank, mine in enumerate(slots):
            while place[rank] < len(mine):
                block = mine[place[rank] : place[rank] + 2]
                if [s.kind for s in block] != [Kind.F, Kind.B] or block[0].leg == block[1].leg:
                    block = block[:1]
                if len(block) == 2 and block[0].microbatch == block[1].microbatch:
                    block = block[:1]  # the last rank's first: one is the input of the other
                needs = [need for slot in block for need in needed(slot, rank, p)]
                if any(need not in end for need in needs):
                    break
                start = max([free[rank], *(end[need] for need in needs)])
                free[rank] = start + sum(seconds[slot.kind] for slot in block)
                for slot in block:
                    if slot.kind is not Kind.W:
                        end[slot.kind is Kind.F, stage_of(slot, rank, p), slot.microbatch] = free[rank]
                place[rank] += len(block)
                progress = True
    assert place == [len(mine) for mine in slots]
    return max(free)


def stage_of(slot: Slot, rank: int, p: int) -> int:
    return rank if slot.leg == 0 else 2 * p - 1 - rank


def needed(slot: Slot, rank: int, p: int) -> list[tuple[bool, int, int]]:
    stage = stage_of(slot, rank, p)
    if slot.kind is Kind.F:
        return [(True, stage - 1, slot.microbatch)] if stage else []
    if slot.kind is Kind.W:
        return [(False, stage, slot.microbatch)]
    behind = [(False, stage + 1, slot.microbatch)] if stage < 2 * p - 1 else []
    return [(True, stage, slot.microbatch), *behind]


@pytest.mark.parametrize("make", [zbv, v_half, v_min, dual_pipe_v])
@pytest.mark.parametrize("p", [1, 2, 3, 6])
def test_few_microbatches_are_no_special_case(make, p: int) -> None:
    for m in range(1, 2 * p):
        problem = chain(p, m, v=True)
        check(make(problem), problem)


def test_only_one_module_down_and_back_up_is_a_v() -> None:
    assert v_chain(chain(3, 2, v=True).graph) == (0, 1, 2, 3, 4, 5)
    assert v_chain(chain(3, 2, num_segments=2).graph) is None
    assert v_chain(two_modules(2, [1, 0]).graph) is None


@pytest.mark.parametrize(("make", "held"), [(zbv, 4.0), (v_half, 3.0), (v_min, 2.0), (dual_pipe_v, 4.5)])
def test_several_modules_hold_as_many_microbatches(make, held: float) -> None:
    problem = two_modules(4, [1] * 16, vision=halves(1, 1, 1, 0.25), language=halves(1, 1, 1, 0.75))
    timeline = simulate(problem, make(problem))
    assert max(timeline.peak_bytes) <= held
