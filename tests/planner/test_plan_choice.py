import math
from dataclasses import replace

import pytest

from mmtrain.config import config
from mmtrain.config.planner import PlannerConfig, SearchConfig
from mmtrain.errors import PlanError
from mmtrain.modality.metadata import DocumentMeta, IterationMeta, MicrobatchMeta
from mmtrain.modality.typical import TypicalSizes
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.job_schedule import job_schedule
from mmtrain.planner.make_plan import JobMethod, best_of, make_plan
from mmtrain.planner.memory.limit import MemoryRule
from mmtrain.planner.result import PlanResult
from mmtrain.planner.search.search_options import SearchOptions
from mmtrain.planner.search_settings import (
    search_options,
    search_seed,
    search_threads,
    show_switches,
)
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.workloads import draw
from tests.schedule.problems import as_units, chain, two_modules

PROBLEM = two_modules(2, [1, 0, 2])


@pytest.mark.parametrize(
    ("asked", "cores", "ranks", "threads"),
    [(0, 128, 8, 8), (0, 2, 2, 1), (0, 1, 1, 1), (0, 16, 1, 8), (0, 7, 1, 3), (5, 2, 2, 5)],
)
def test_ranks_share_half_of_the_cores(asked, cores, ranks, threads):
    assert search_threads(asked, cores, ranks) == threads


def test_each_step_and_searcher_has_a_seed_that_is_the_same_next_time():
    seeds = {search_seed(job, step, member) for job in range(3) for step in range(50) for member in range(4)}
    assert len(seeds) == 600
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert search_seed(3, 7, 1) == 749222


def test_searchers_share_the_evaluations_and_not_the_seconds():
    section = PlannerConfig(
        search=SearchConfig(budget_evaluations=10, budget_s=2.0, split_backward=False, memory=False)
    )
    options = search_options(section, seed=4, threads=2, num_searchers=4)
    assert (options.budget_evaluations, options.budget_s, options.seed, options.threads) == (3, 2.0, 4, 2)
    assert (options.reorder, options.split, options.memory) == (True, False, False)
    assert (
        search_options(PlannerConfig(search=SearchConfig(budget_evaluations=0)), seed=0, threads=1).budget_evaluations
        == 0
    )


def test_nothing_is_searched_where_the_order_is_that_of_a_schedule():
    options = search_options(PlannerConfig(), seed=0, threads=1)
    section = PlannerConfig(enable=True, search=SearchConfig(interleave=False))
    assert make_plan(PROBLEM, JobMethod("1F1B", section, options)) == make_plan(PROBLEM, "1F1B")
    searched = make_plan(PROBLEM, JobMethod("1F1B", section.with_search(interleave=True), options))
    assert searched == make_plan(PROBLEM, options) and searched.evaluations > 1


def test_a_searched_plan_that_is_longer_than_the_first_one_does_not_run():
    """The search serves what can start first, and may here neither split nor change the order of microbatches."""
    problem = two_modules(4, [3, 0, 5, 1])
    section = PlannerConfig(
        enable=True, search=SearchConfig(reorder=False, split_backward=False, budget_evaluations=30)
    )
    options = search_options(section, seed=7, threads=1)
    first, searched = make_plan(problem, "1F1B"), make_plan(problem, options)
    assert first.makespan_s < searched.makespan_s
    found = make_plan(problem, JobMethod("1F1B", section, options))
    assert (found.plan, found.timeline) == (first.plan, first.timeline)
    assert (found.evaluations, found.seed) == (searched.evaluations, 7)
    assert best_of(first, searched) == found
    none = PlanResult(problem=problem, status="infeasible", message="nothing found")
    assert best_of(none, searched) is searched
    assert best_of(first, none) is none, "a search that failed is seen, and not hidden by the first plan"


def test_a_result_without_a_plan_says_why_where_the_plan_is_read():
    result = make_plan(two_modules(2, [1], memory_limit_bytes=(1e-3, None)), SearchOptions(budget_evaluations=3))
    assert (result.status, result.has_plan, result.makespan_s) == ("infeasible", False, math.inf)
    for read in (lambda: result.plan, lambda: result.timeline):
        with pytest.raises(PlanError) as error:
            read()
        assert str(error.value) == result.message and "memory" in result.message


def test_searches_of_few_plans_keep_the_groups_of_samples():
    section = PlannerConfig(enable=True, search=SearchConfig(regroup=True, budget_evaluations=0, budget_s=9.0))
    few, many = section.with_evaluations(100).search, section.with_evaluations(2600).search
    assert (few.budget_evaluations, few.budget_s, few.regroup) == (100, 0.0, False)
    assert (many.budget_evaluations, many.budget_s, many.regroup) == (2600, 0.0, True)


def test_switches_are_one_line():
    assert show_switches(PlannerConfig(), 1) == "planner: off; partition search, sub-microbatches on"
    section = PlannerConfig(enable=True, search=SearchConfig(memory=False, budget_s=1.5, distributed=True))
    assert show_switches(section, 2) == (
        "planner: on; partition search, sub-microbatches on, interleave on, reorder on, split backward on, memory off; "
        "anneal, 1000 evaluations or 1.5 s, 2 threads on every rank; patience 60 s"
    )
    assert show_switches(PlannerConfig(search=SearchConfig(braid=True)), 1).endswith(
        "sub-microbatches on, blocks of a forward and a backward"
    )


def test_blocks_are_in_the_plans_of_the_schedule_and_of_the_search():
    words = ["planner.search.braid=true", "parallelism.tensor_parallel_degree=2"]
    job = config.load("debug_vlm.toml", words)
    schedule = job_schedule(job)
    problem = as_units(chain(2, 6, num_segments=2), contention=0.0)
    first = make_plan(problem, JobMethod(schedule, job.planner))
    assert "&" in str(first.plan) and first.message == f"the order of schedule {schedule.name}, in blocks"
    assert search_options(job.planner, seed=0, threads=1).braid
    found = make_plan(problem, JobMethod.searching(schedule, job.planner, seed=0))
    apart = job_schedule(config.load("debug_vlm.toml", words[1:]))
    alone = make_plan(problem, JobMethod.searching(apart, PlannerConfig(), seed=0))
    assert found.timeline.makespan_s <= first.timeline.makespan_s
    assert found.timeline.makespan_s < alone.timeline.makespan_s


@pytest.mark.parametrize(
    "words",
    [
        ["parallelism.pipeline_parallel_degree=8", "parallelism.context_parallel_degree=2"],
        # No memory options fit the orders that `interleave` makes without limits.
        ["parallelism.pipeline_parallel_degree=16", "planner.search.sub_microbatch=false"],
        [
            "parallelism.pipeline_parallel_degree=8",
            "parallelism.context_parallel_degree=2",
            "parallelism.pipeline_parallel_schedule=ZB-AutoSchedule",
        ],
    ],
    ids=("cp", "deep", "zero bubble"),
)
def test_the_first_plan_under_a_tight_limit_is_near_the_search(words):
    more = ["planner.hardware=h800x16", "parallelism.tensor_parallel_degree=1", 'activation_checkpoint.mode="none"']
    job = config.load("vlm_s.toml", [*more, "training.global_batch_size=32", 'planner.memory_limit="92%"', *words])
    planner = IterationPlanner(make_job(job))
    limits = MemoryRule.of(job).budget(planner.job.spec, planner.job.partition).activation_limits
    meta = draw("mix", TypicalSizes.of(job), seed=0, iteration=0)
    problem = IterationPlanner(planner.job, limits).problem(meta, searched=True)[1]
    first = make_plan(problem, JobMethod(planner.job.schedule, job.planner))
    searched = make_plan(problem, SearchOptions(budget_evaluations=300))
    own = make_plan(problem, planner.job.schedule)
    assert own.timeline.makespan_s > 1.6 * searched.timeline.makespan_s, "microbatches one after another"
    assert first.timeline.makespan_s <= 1.1 * searched.timeline.makespan_s
    assert make_plan(problem, JobMethod(planner.job.schedule, job.planner)) == first
    # With a limit that delays nothing, the plan is that of the schedule.
    roomy = replace(problem, memory_limit_bytes=tuple(20 * limit for limit in limits))
    assert make_plan(roomy, JobMethod(planner.job.schedule, job.planner)) == make_plan(roomy, planner.job.schedule)


def test_images_of_a_microbatch_can_stay_together():
    sizes = [
        make_job(config.load("debug_vlm.toml", [f"planner.search.sub_microbatch={word}"])).sub_microbatch_size
        for word in ("true", "false")
    ]
    assert sizes == [8, 0]


def test_an_iteration_is_planned_in_parts_as_in_one_go():
    job = config.load("debug_vlm.toml", ["planner.enable=true"])
    planner = IterationPlanner(make_job(job))
    meta = draw("mix", TypicalSizes.of(job, 112), seed=0, iteration=0, replica=0)
    whole = planner.plan(meta)
    iteration = planner.prepare(meta, searched=True)
    first = iteration.first
    parts = planner.finish(iteration, first)
    assert parts.program == whole.program
    assert parts.result.timeline == whole.result.timeline == first.timeline
    with pytest.raises(PlanError, match="nothing found"):
        planner.finish(iteration, PlanResult(problem=iteration.problem, status="infeasible", message="nothing found"))


def test_a_job_offloads_first_chunks_as_far_as_its_limit_needs():
    """The orders of STP, with copies on an H20's link that no action waits for."""
    words = [
        "planner.enable=true",
        "planner.search.interleave=false",
        'planner.search.memory_strategies=["keep", "offload"]',
        "parallelism.pipeline_parallel_degree=2",
        "parallelism.tensor_parallel_degree=2",
        "parallelism.pipeline_parallel_schedule=STP",
        "model.language.num_segments=2",
        "training.global_batch_size=8",
        "training.seq_len=4096",
        "planner.hardware=h20x4",
        "model.language.config.num_hidden_layers=12",
        "model.language.config.hidden_size=1024",
        "model.language.config.intermediate_size=4096",
        "model.language.config.max_position_embeddings=4096",
    ]
    job = config.load("debug_text.toml", [*words, 'planner.memory_limit="90GB"'])
    planner = IterationPlanner(make_job(job))
    document = DocumentMeta(sample=0, num_tokens=4096, num_targets=4096, images=())
    meta = IterationMeta(microbatches=(MicrobatchMeta(documents=(document,)),) * 8)
    wide = planner.problem(meta, searched=True)[1]
    free = make_plan(wide, JobMethod.searching(planner.job.schedule, job.planner, seed=0))
    assert not free.plan.options
    limits = tuple(0.85 * peak for peak in free.timeline.peak_bytes)
    tight = IterationPlanner(planner.job, limits).problem(meta, searched=True)[1]
    found = make_plan(tight, JobMethod.searching(planner.job.schedule, job.planner, seed=0))
    assert "activations of first chunks offloaded" in found.message
    assert {stage for stage, _ in found.plan.options} <= {0, 1}, "the way down alone"
    assert {"offload" in found.plan.option(tight, *node).name for node in found.plan.options} == {True}
    assert all(peak <= limit for peak, limit in zip(found.timeline.peak_bytes, limits, strict=True))
    assert found.timeline.makespan_s == pytest.approx(free.timeline.makespan_s, rel=1e-9)
