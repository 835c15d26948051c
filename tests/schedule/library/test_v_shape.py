import dataclasses

import pytest

from mmtrain.schedule.library.controllable_memory import v_half, v_min
from mmtrain.schedule.library.dual_pipe_v import dual_pipe_v
from mmtrain.schedule.library.stp import stp, stp_lean
from mmtrain.schedule.library.v_shape import v_chunks
from mmtrain.schedule.library.zbv import zbv
from mmtrain.schedule.plan import check
from mmtrain.schedule.simulate import simulate
from tests.schedule.problems import as_units, chain, halves, two_modules

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


def test_what_is_a_v() -> None:
    assert v_chunks(chain(3, 2, v=True).graph) == {stage: stage for stage in range(6)}
    assert v_chunks(chain(3, 2, num_segments=2).graph) is None
    assert v_chunks(two_modules(2, [1, 0]).graph) is None


@pytest.mark.parametrize(
    ("num_ranks", "vision", "language", "chunks"),
    [
        (2, [0], [1, 1, 0], [0, 1, 2, 3]),  # the vision encoder is the first chunk
        (2, [0], [0, 1, 1, 0], [0, 0, 1, 2, 3]),
        (2, [0, 1], [1, 1, 0], [0, 1, 1, 2, 3]),
        (2, [0, 1, 1], [1, 0], [0, 1, 2, 2, 3]),
        (2, [0, 1], [1, 0], [0, 1, 2, 3]),
        (2, [0, 1, 1, 0], [0], [0, 1, 2, 3, 3]),
        (1, [0], [0, 0], [0, 0, 1]),
        (1, [0, 0], [0], [0, 1, 1]),
        (1, [0], [0], [0, 1]),
        (2, [0, 1], [0, 1], None),
        (2, [0, 1], [1, 1], None),  # a chunk is missing
        (2, [0, 0], [1, 1, 0], None),  # two stages of a module in one chunk
        (2, [0, 1, 1, 0], [0, 1, 1, 0], None),  # two Vs
    ],
)
def test_stages_of_two_modules_as_one_v(num_ranks, vision, language, chunks) -> None:
    for images in ([1, 0], [2, 1], [0, 0]):
        graph = two_modules(num_ranks, images, ranks=(vision, language)).graph
        alone = chunks is None and language == [0, 1, 1, 0] and not any(images)
        assert v_chunks(graph) == ({4: 0, 5: 1, 6: 2, 7: 3} if alone else dict(enumerate(chunks)) if chunks else None)


def test_a_module_that_feeds_itself_is_no_v() -> None:
    graph = chain(2, 2, v=True).graph
    works = (graph.works[0], dataclasses.replace(graph.works[1], after=(0,)))
    assert v_chunks(dataclasses.replace(graph, works=works)) is None


@pytest.mark.parametrize("make", [stp, stp_lean, dual_pipe_v])
@pytest.mark.parametrize("p", range(1, 5))
def test_modules_as_one_v_hold_what_the_template_holds(make, p: int) -> None:
    """Chunks of vision and language with as many bytes as the chunks of one module, in as many works as there are."""
    m = 3 * p
    one = chain(p, m, v=True, cost=halves(1, 1, 1, 6.0))
    down = [*range(p), *reversed(range(p))]
    for count in (1, 2, 3):
        cost = halves(1 / count, 1 / count, 1 / count, 6.0 / count)
        both = two_modules(p, [count] * m, vision=cost, language=halves(1, 1, 1, 6.0), ranks=(down[:p], down[p:]))
        peaks = [simulate(problem, make(problem)).peak_bytes for problem in (one, as_units(both))]
        assert all(theirs >= ours for theirs, ours in zip(*peaks, strict=True)), (p, count)


def test_a_block_of_several_works_has_the_braids_that_hide_most() -> None:
    """One rank, whose first chunk has vision and language: three works there, one in the second chunk, and microbatch 1
    without images."""
    problem = as_units(
        two_modules(1, [2, 0, 2], vision=halves(1, 1, 1), language=halves(4, 4, 4), ranks=([0], [0, 0])), share=0.5
    )
    plan = stp(problem)
    check(plan, problem)
    assert str(plan) == (
        "0F0.0 0F0.1 1F0.0 2F0.0 1F1.0 2F1.0&2B0.0 0F2.0&1B0.0 0F2.1&0B0.1 1F2.0&0B0.0 2F2.0&2B1.0 1B1.0 2B2.0 1B2.0 "
        "0B2.1 0B2.0"
    )


@pytest.mark.parametrize(("make", "held"), [(zbv, 4.0), (v_half, 3.0), (v_min, 2.0), (dual_pipe_v, 4.5)])
def test_several_modules_hold_as_many_microbatches(make, held: float) -> None:
    problem = two_modules(4, [1] * 16, vision=halves(1, 1, 1, 0.25), language=halves(1, 1, 1, 0.75))
    timeline = simulate(problem, make(problem))
    assert max(timeline.peak_bytes) <= held
