import pytest

from mmtrain.errors import PlanError
from mmtrain.schedule.graph import ModuleStages, Work
from mmtrain.schedule.library.forward_only import forward_only
from mmtrain.schedule.library.interleave import interleave
from mmtrain.schedule.library.memory import components
from mmtrain.schedule.plan import check
from mmtrain.schedule.problem import Option, PlanningProblem
from mmtrain.schedule.simulate import simulate
from tests.schedule.problems import NO_P2P, chain, option, two_modules


def test_last_rank_alternates_and_never_idles_on_a_chain() -> None:
    problem = chain(2, 3, cost=option(forward_s=1.0, backward_s=1.0))
    assert str(interleave(problem)) == "0F0.0 0F1.0 0F2.0 0B0.0 0B1.0 0B2.0\n1F0.0 1B0.0 1F1.0 1B1.0 1F2.0 1B2.0"


def test_an_action_without_duration_ends_before_the_next_rank_decides() -> None:
    # Forwards take no time, so microbatch 0 is at its first backward before rank 1 looks for another forward.
    frozen, free = option(forward_s=0.0, backward_s=0.0), option(forward_s=0.0, backward_s=1.0)
    rank_0, rank_1 = str(interleave(two_modules(2, [1, 1], vision=frozen, language=free))).splitlines()
    assert rank_0 == "0F0.0 0F1.0 2F0.0 2B0.0 2F1.0 2B1.0"
    assert rank_1 == "1F0.0 3F0.0 3B0.0 1F1.0 3F1.0 3B1.0"


def test_memory_limit_holds_back_forwards() -> None:
    free = chain(2, 8)
    tight = chain(2, 8, memory_limit_bytes=[2.0, 1.0])
    assert simulate(free, interleave(free)).peak_bytes[0] > 2.0
    plan = interleave(tight)
    check(plan, tight)
    assert simulate(tight, plan).peak_bytes == (2.0, 1.0)


def test_full_memory_cannot_lock_out_the_oldest_microbatch() -> None:
    # Vision forwards of three microbatches would fill rank 0, and then no language forward could run.
    problem = two_modules(2, [2, 2, 2], memory_limit_bytes=[3.0, 3.0])
    plan = interleave(problem)
    check(plan, problem)


def test_microbatch_over_the_limit_is_refused_with_rank_and_bytes() -> None:
    problem = two_modules(2, [1, 3], memory_limit_bytes=[8.0, 3.0])
    with pytest.raises(PlanError, match=r"rank 1: microbatch 1 alone needs 4 bytes .* limit of 3 bytes"):
        interleave(problem)


def test_smaller_options_are_taken_where_the_fastest_do_not_fit() -> None:
    options = [
        Option(name=n, forward_s=1, backward_input_s=b, backward_weight_s=1, activation_bytes=a)
        for n, b, a in (("keep", 1, 4), ("recompute", 2, 1))
    ]
    problem = PlanningProblem.build(
        num_ranks=1,
        modules=[ModuleStages(name="language", stages=(0,))],
        stage_rank=[0],
        works=[Work(module=0, microbatch=m, sub_microbatch=0) for m in range(2)],
        costs=[options, [option(activation_bytes=2.0)]],
        cost_index=[[0], [1]],
        output_bytes=[[0.0], [0.0]],
        p2p=NO_P2P,
        memory_limit_bytes=[3.0],
    )
    plan = interleave(problem)
    check(plan, problem)
    assert plan.options == {(0, 0): 1}


def test_passing_memory_of_frozen_stages_is_awaited() -> None:
    # The frozen stage needs the whole limit for a moment: nothing may be held when it runs.
    frozen = option(backward_s=0.0, activation_bytes=2.0)
    problem = two_modules(1, [1, 1, 1], vision=frozen, memory_limit_bytes=[2.0])
    plan = interleave(problem)
    check(plan, problem)


def test_components_follow_after_links() -> None:
    assert components(two_modules(1, [2, 0, 1]).graph) == [0, 0, 0, 1, 2, 2]


def test_forward_only_leaves_no_bubble_at_the_first_rank() -> None:
    problem = chain(3, 5, cost=option(backward_s=0.0))
    timeline = simulate(problem, forward_only(problem))
    assert timeline.makespan_s == 3 - 1 + 5


def test_forward_only_refuses_a_backward() -> None:
    with pytest.raises(PlanError, match="stage 0 has a backward for work 0"):
        forward_only(chain(2, 1))
