import pytest

from mmtrain.schedule.library.controllable_memory import v_half, v_min
from mmtrain.schedule.library.dual_pipe_v import dual_pipe_v
from mmtrain.schedule.library.v_shape import v_chain
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
