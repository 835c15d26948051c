"""Microbatches dealt to pipelines of unequal depth, against all ways to divide them."""

from itertools import pairwise, product

import numpy as np
import pytest

from mmtrain.config import config
from mmtrain.config.config import each_pipeline
from mmtrain.modality.metadata import IterationMeta
from mmtrain.planner.assignment.assign import assign
from mmtrain.planner.assignment.assignment import SampleCost, in_turns
from mmtrain.planner.assignment.dealing import Dealer, deal, digest_of, microbatch_seconds, paces, replica_seconds
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.simulator.drawn_steps import divided, drawn_steps
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.typical_iterations import usual_workload

UNEQUAL = ["parallelism.pipelines=[2,3]", "parallelism.pipeline_parallel_degree=1", "training.global_batch_size=10"]


def slowest(seconds, dealt):
    return max(replica_seconds(own[list(chosen)]) for own, chosen in zip(seconds, dealt, strict=True))


def all_counts(num, replicas):
    cuts = product(range(1, num), repeat=replicas - 1)
    return [
        tuple(b - a for a, b in pairwise((0, *cut, num)))
        for cut in cuts
        if all(a < b for a, b in pairwise((0, *cut, num)))
    ]


@pytest.mark.parametrize("depths", [(2, 3), (1, 2, 3), (1, 1, 4)])
@pytest.mark.parametrize("num", [3, 5, 11])
def test_of_equal_microbatches_no_other_division_is_faster(depths, num):
    rng = np.random.default_rng(num)
    seconds = [np.tile(rng.uniform(0.5, 1.5, depth) / depth, (num, 1)) for depth in depths]
    best = min(
        max(replica_seconds(own[:count]) for own, count in zip(seconds, counts, strict=True))
        for counts in all_counts(num, len(depths))
    )
    assert slowest(seconds, deal(seconds)) == pytest.approx(best)


def test_every_microbatch_is_dealt_once_and_every_replica_has_one():
    rng = np.random.default_rng(0)
    for num in range(4, 40):
        seconds = [rng.exponential(1.0, (num, depth)) / depth for depth in (1, 1, 2, 8)]
        dealt = deal(seconds)
        assert sorted(index for own in dealt for index in own) == list(range(num))
        assert all(own and list(own) == sorted(own) for own in dealt)
        assert slowest(seconds, dealt) <= slowest(seconds, in_turns(num, 4)) * 1.5
        assert dealt == deal(seconds) and digest_of(dealt) != digest_of(in_turns(num, 4))


def test_a_microbatch_goes_to_the_replica_that_would_finish_it_first():
    slow, fast = np.full((5, 1), 3.0), np.full((5, 2), 1.0)
    # Ends with one more: 3 against 2; 3 against 3, where the lower number has it; then 6 against 3, 4, 5.
    assert deal([slow, fast]) == ((1,), (0, 2, 3, 4))
    assert deal([slow[:2], fast[:2]]) == ((1,), (0,))  # the last one to a replica that has none


@pytest.mark.parametrize("name", ["debug_vlm.toml", "debug_text.toml", "debug_t2v.toml", "debug_sound.toml"])
def test_seconds_are_those_of_the_planning_problem(name):
    job = config.load(name, [*UNEQUAL, "parallelism.data_parallel_shard_degree=1"])
    (step,) = drawn_steps(job, usual_workload(job), 1, image_side=56)
    jobs, meta = each_pipeline(job, make_job), IterationMeta(microbatches=step)
    for one in jobs:
        problem = IterationPlanner(one).problem(meta)[1]
        wanted = np.zeros((len(step), one.partition.num_ranks))
        for stage, work in problem.graph.nodes():
            option = problem.options(stage, work)[0]
            microbatch, rank = problem.graph.works[work].microbatch, problem.graph.stage_rank[stage]
            wanted[microbatch, rank] += option.forward_s + option.backward_input_s + option.backward_weight_s
        assert np.allclose(microbatch_seconds(one, meta), wanted, rtol=1e-9, atol=0)
    dealer = Dealer.of(job, jobs)
    replicas = divided(step, 2, dealer)
    assert [len(meta.microbatches) for meta in replicas] == [len(own) for own in dealer(step)]
    assert sorted(map(id, step)) == sorted(id(one) for meta in replicas for one in meta.microbatches)
    seconds = dealer.seconds(step)
    assert slowest(seconds, dealer(step)) <= slowest(seconds, in_turns(len(step), 2)) + 1e-12


def test_pipelines_of_one_depth_take_turns():
    even = config.load("debug_vlm.toml", ["parallelism.pipelines=[2,2]", "parallelism.pipeline_parallel_degree=1"])
    assert Dealer.of(even, each_pipeline(even, make_job)) is None
    assert in_turns(5, 2) == ((0, 2, 4), (1, 3))
    (step,) = drawn_steps(even, "mix", 1, image_side=56)
    assert [len(meta.microbatches) for meta in divided(step[:3], 2)] == [2, 1]


def test_policies_give_a_faster_pipeline_more_work():
    rng = np.random.default_rng(1)
    samples = [SampleCost(encoder_ns=int(e), language_ns=int(w)) for e, w in rng.integers(10, 1000, (120, 2))]
    bins = [list(range(10 * b, 10 * b + 10)) for b in range(12)]
    seconds = [np.full((12, 1), 3.0), np.full((12, 3), 1.0)]
    dealt = deal(seconds)
    assert [len(own) for own in dealt] == [3, 9]
    for policy in ("entrain", "balanced"):
        made = assign(policy, samples, bins, dealt=dealt, paces=paces(seconds))
        assert made.status == "assigned" and [len(own) for own in made.replicas] == [3, 9], policy
        work = [sum(samples[i].language_ns for one in own for i in one.samples) for own in made.replicas]
        assert work[1] / work[0] == pytest.approx(3, rel=0.15), policy
        assert sorted(i for own in made.replicas for one in own for i in one.samples) == list(range(120))
