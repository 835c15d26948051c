from itertools import permutations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmtrain.planner.bound import lower_bound_s, one_machine_s
from mmtrain.planner.make_plan import make_plan
from mmtrain.schedule.graph import ModuleStages, Work
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.problem import P2P, PlanningProblem
from tests.examples import examples
from tests.schedule.problems import as_units, chain, option, problems

JOB = st.tuples(st.sampled_from([0.0, 1.0, 2.5]), st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([0.0, 1.0, 4.0]))


def test_a_chain() -> None:
    problem = chain(2, 8, cost=option(1.0, 2.0))
    assert lower_bound_s(problem) == 8 * 3.0 + 1.0
    assert lower_bound_s(problem, split=False) == 8 * 3.0 + 1.0 + 2.0  # the last backward goes on to the first rank


def test_what_comes_after_the_last_backward_counts_its_transfer() -> None:
    problem = chain(2, 8, cost=option(1.0, 2.0), p2p=P2P(latency_s=0.5, bytes_per_s=1.0))
    # Rank 1 begins after a forward and a transfer, computes 24 s, and a transfer and a backward follow.
    assert lower_bound_s(problem, split=False) == 1.5 + 8 * 3.0 + 2.5


def test_one_machine_by_hand() -> None:
    assert one_machine_s([]) == 0.0
    # The long job is interrupted by the one that a long tail follows.
    assert one_machine_s([(0.0, 4.0, 0.0), (1.0, 1.0, 5.0)]) == 7.0
    assert one_machine_s([(3.0, 1.0, 0.0)]) == 4.0


@given(jobs=st.lists(JOB, min_size=1, max_size=5))
def test_no_order_of_whole_jobs_beats_the_machine_bound(jobs: list[tuple[float, float, float]]) -> None:
    def makespan(order: tuple[tuple[float, float, float], ...]) -> float:
        now, last = 0.0, 0.0
        for head, seconds, tail in order:
            now = max(now, head) + seconds
            last = max(last, now + tail)
        return last

    best = min(map(makespan, permutations(jobs)))
    found = one_machine_s(jobs)
    assert found <= best + 1e-9
    load = sum(seconds for _, seconds, _ in jobs)
    assert found >= max(min(h for h, _, _ in jobs) + load + min(t for _, _, t in jobs), max(map(sum, jobs))) - 1e-9


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems() | problems().map(as_units), schedule=st.sampled_from(list(CATALOGUE)))
def test_no_plan_beats_the_bound(problem: PlanningProblem, schedule: str) -> None:
    result = make_plan(problem, schedule)
    least = lower_bound_s(problem, split=bool(result.plan.split))
    assert result.timeline.end_s >= least * (1 - 1e-12)
    assert lower_bound_s(problem) <= lower_bound_s(problem, split=False) * (1 + 1e-12)


def test_the_way_back_from_the_busiest_rank_takes_its_transfer() -> None:
    problem = PlanningProblem.build(
        num_ranks=2,
        modules=[ModuleStages(name="language", stages=(0, 1))],
        stage_rank=[0, 1],
        works=[Work(module=0, microbatch=m, sub_microbatch=0) for m in range(2)],
        costs=[[option(1.0, 1.0)], [option(10.0, 10.0)]],
        cost_index=[[0, 1]] * 2,
        output_bytes=[[0.0, 0.0]] * 2,
        p2p=P2P(latency_s=1.0, bytes_per_s=1e9),
    )
    # The second rank begins after a forward and a transfer, works for 40 s, and a transfer and a backward follow.
    assert lower_bound_s(problem, split=False) == 44.0
