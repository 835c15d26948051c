import pytest

from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.graph import ModuleStages, Work
from mmtrain.schedule.library.one_f_one_b import one_f_one_b, segments
from mmtrain.schedule.plan import check
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.simulate import simulate
from tests.schedule.problems import NO_P2P, chain, option, two_modules


def megatron(num_ranks: int, rank: int, segments: int, microbatches: int) -> list[Action]:
    """Megatron-LM's order of one rank, from its formula for the number of warm-up forwards."""

    def place(k: int, forward: bool) -> tuple[int, int]:
        group, inside = divmod(k, num_ranks * segments)
        segment = inside // num_ranks
        if not forward:
            segment = segments - 1 - segment
        return segment * num_ranks + rank, group * num_ranks + inside % num_ranks

    def forward(k: int) -> Action:
        stage, microbatch = place(k, True)
        return Action(Kind.F, stage, microbatch, 0)

    def backward(k: int) -> Action:
        stage, microbatch = place(k, False)
        return Action(Kind.B, stage, microbatch, 0)

    total = microbatches * segments
    ahead = num_ranks - rank - 1
    warm_up = min(total, ahead if segments == 1 else 2 * ahead + (segments - 1) * num_ranks)
    order = [forward(k) for k in range(warm_up)]
    for k in range(total - warm_up):
        order += [forward(k + warm_up), backward(k)]
    return order + [backward(k) for k in range(total - warm_up, total)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 8, 16])
def test_plain_chain_is_classic_1f1b(num_ranks: int, microbatches: int) -> None:
    plan = one_f_one_b(chain(num_ranks, microbatches))
    assert [list(order) for order in plan.orders] == [
        megatron(num_ranks, rank, 1, microbatches) for rank in range(num_ranks)
    ]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("segments", [2, 3, 4])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_several_segments_are_megatrons_interleaved_1f1b(num_ranks: int, segments: int, groups: int) -> None:
    plan = one_f_one_b(chain(num_ranks, groups * num_ranks, num_segments=segments))
    assert [list(order) for order in plan.orders] == [
        megatron(num_ranks, rank, segments, groups * num_ranks) for rank in range(num_ranks)
    ]


@pytest.mark.parametrize(("num_ranks", "microbatches"), [(1, 3), (2, 4), (4, 4), (4, 9)])
def test_makespan_and_bubble_have_their_closed_forms(num_ranks: int, microbatches: int) -> None:
    problem = chain(num_ranks, microbatches, cost=option(forward_s=1.0, backward_s=2.5))
    timeline = simulate(problem, one_f_one_b(problem))
    assert timeline.makespan_s == pytest.approx((num_ranks - 1 + microbatches) * 3.5)
    assert timeline.bubble == pytest.approx((num_ranks - 1) / (num_ranks - 1 + microbatches))
    assert timeline.peak_bytes == tuple(float(min(num_ranks - r, microbatches)) for r in range(num_ranks))


@pytest.mark.parametrize(("num_ranks", "segments", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 3, 4)])
def test_interleaved_bubble_shrinks_with_segments(num_ranks: int, segments: int, microbatches: int) -> None:
    cost = option(forward_s=1.0, backward_s=2.0)
    problem = chain(num_ranks, microbatches, num_segments=segments, cost=cost)
    timeline = simulate(problem, one_f_one_b(problem))
    assert timeline.makespan_s == pytest.approx((microbatches * segments + num_ranks - 1) * 3.0)


def test_works_of_two_modules_in_one_golden_plan() -> None:
    # Microbatch 1 is text alone, microbatch 2 has two sub-microbatches of images.
    plan = one_f_one_b(two_modules(2, [1, 0, 2]))
    assert str(plan) == GOLDEN


GOLDEN = """\
0F0.0 2F0.0 2F1.0 0F2.0 0F2.1 2B0.0 2B1.0 2F2.0 0B0.0 2B2.0 0B2.0 0B2.1
1F0.0 3F0.0 3B0.0 3F1.0 3B1.0 1F2.0 1B0.0 1F2.1 3F2.0 3B2.0 1B2.0 1B2.1"""


def test_frozen_prefix_is_not_in_flight() -> None:
    problem = two_modules(2, [1] * 4, vision=option(backward_s=0.0))
    plan = one_f_one_b(problem)
    check(plan, problem)
    language = [str(a) for a in plan.orders[1] if a.stage == 3]
    assert language == [f"3{kind}{m}.0" for m in range(4) for kind in "FB"]
    assert not [a for order in plan.orders for a in order if a.kind is Kind.B and a.stage < 2]


@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_mixed_chain_is_classic_1f1b_whatever_rank_two_modules_meet_on(where: int, microbatches: int) -> None:
    """Ranks 0 .. where hold vision, ranks where .. 2 hold language: the two stages of one rank are one pair."""
    ranks = [*range(where + 1), *range(where, 3)]
    works = [
        Work(module=w % 2, microbatch=w // 2, sub_microbatch=0, after=(w - 1,) * (w % 2))
        for w in range(2 * microbatches)
    ]
    problem = PlanningProblem.build(
        num_ranks=3,
        modules=[
            ModuleStages(name="vision", stages=tuple(range(where + 1))),
            ModuleStages(name="language", stages=tuple(range(where + 1, 4))),
        ],
        stage_rank=ranks,
        works=works,
        costs=[[option(1.0, 2.0)], [option(0.5, 1.0)]],
        cost_index=[[int(r == where) for r in (ranks[where + 1 :] if w.module else ranks[: where + 1])] for w in works],
        output_bytes=[[0.0] * (where + 1 if w.module == 0 else 3 - where) for w in works],
        p2p=NO_P2P,
    )
    plan = one_f_one_b(problem)
    check(plan, problem)
    for rank, order in enumerate(plan.orders):
        mine = [stage for stage, holder in enumerate(ranks) if holder == rank]
        wanted = [
            Action(a.kind, stage, a.microbatch, 0)
            for a in megatron(3, rank, 1, microbatches)
            for stage in (mine if a.kind is Kind.F else mine[::-1])
        ]
        assert list(order) == wanted, rank
    assert simulate(problem, plan).makespan_s == pytest.approx((2 + microbatches) * 3.0)


def test_modules_that_all_ranks_hold_are_segments_of_their_own() -> None:
    assert segments(two_modules(2, [1]).graph) == {0: 0, 1: 0, 2: 1, 3: 1}
    assert segments(two_modules(1, [1]).graph) == {0: 0, 1: 1}
