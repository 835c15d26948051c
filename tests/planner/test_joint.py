"""The search over groups of samples and their order: nothing is lost, it does not depend on threads, and it pays."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from mmtrain.config import config
from mmtrain.modality.metadata import IterationMeta
from mmtrain.modality.typical import TypicalSizes
from mmtrain.planner import joint
from mmtrain.planner.batching import check_conservation
from mmtrain.planner.grouping import Grouping, Groupings, grouped
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.joint import search_iteration
from mmtrain.planner.make_plan import best_of
from mmtrain.planner.search.search import search
from mmtrain.planner.search.search_options import SearchOptions
from mmtrain.schedule.plan import check
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.typical_iterations import usual_workload
from mmtrain.simulator.workloads import draw

OPTIONS = SearchOptions(budget_evaluations=3900)


@cache
def drawn(name: str, *overrides: str) -> tuple[IterationPlanner, IterationMeta]:
    """A small iteration of a job of DIP's, in which memory is short."""
    words = [
        "training.global_batch_size=24",
        "planner.hardware=h800x16",
        'planner.memory_limit="60GiB"',
        'activation_checkpoint.mode="none"',
        "planner.search.regroup=true",
        "planner.search.budget_evaluations=3900",
        *overrides,
    ]
    job = config.load(f"{name}.toml", words)
    return IterationPlanner(make_job(job)), draw(usual_workload(job), TypicalSizes.of(job), seed=0, iteration=0)


def samples(meta: IterationMeta) -> Counter[object]:
    return Counter(sample for microbatch in meta.microbatches for sample in microbatch.samples)


@cache
def searched(options: SearchOptions = OPTIONS):
    planner, meta = drawn("vlm_s")
    iteration = planner.prepare(meta, searched=True)
    return iteration, *search_iteration(planner, iteration, options, search)


def test_other_groups_make_a_plan_shorter_and_lose_no_sample():
    iteration, found, result = searched()
    given = search(iteration.problem, replace(OPTIONS, budget_evaluations=4 * OPTIONS.budget_evaluations))
    assert result.makespan_s < 0.96 * given.makespan_s  # of four times the budget; measured: 0.938
    assert samples(found.grouped_meta) == samples(iteration.meta)
    assert len(found.grouped_meta.microbatches) != len(iteration.meta.microbatches)
    check_conservation(found.grouped_meta, found.batching)
    check(result.plan, found.problem)
    assert result.evaluations <= OPTIONS.budget_evaluations  # it was judged to be shorter by far


def test_a_plan_is_never_longer_than_that_of_the_given_groups(monkeypatch):
    """Both groupings are searched where the other one was not judged shorter by far, here by any part."""
    monkeypatch.setattr(joint, "SURE_GAIN", 1.0)
    planner, meta = drawn("vlm_s")
    iteration = planner.prepare(meta, searched=True)
    options = replace(OPTIONS, budget_evaluations=2600)
    _, result = search_iteration(planner, iteration, options, search)
    assert result.makespan_s <= search(iteration.problem, options).makespan_s
    assert result.evaluations > 1.2 * options.budget_evaluations  # both were searched


def test_no_groups_are_judged_where_the_busiest_rank_works_all_the_time():
    planner, meta = drawn("vlm_s", 'planner.memory_limit="900GiB"', 'planner.hardware=""')
    iteration = planner.prepare(meta, searched=True)
    options = replace(OPTIONS, budget_evaluations=2600)
    found, result = search_iteration(planner, iteration, options, search)
    assert found is iteration
    assert result == best_of(iteration.first, search(iteration.problem, options))


def test_a_judged_problem_has_fewer_options_and_as_much_room():
    planner, meta = drawn("vlm_s")
    problem = planner.prepare(meta, searched=True).problem
    judged = joint._judged_problem(problem)
    assert max(map(len, problem.costs)) > 4
    for few, listed in zip(judged.costs, problem.costs, strict=True):
        assert len(few) == min(4, len(listed))
        assert [few[0].name, few[-1].name] == [listed[0].name, listed[-1].name]
    assert judged.held_limit_bytes == problem.held_limit_bytes
    plan = search(judged, replace(OPTIONS, budget_evaluations=400))
    whole = search(problem, replace(OPTIONS, budget_evaluations=4000))
    assert plan.makespan_s < 1.04 * whole.makespan_s  # measured: 1.02


def test_works_of_text_alone_have_no_other_size():
    planner, meta = drawn("vlm_s")
    without = [replace(document, images=()) for one in meta.microbatches for document in one.documents]
    text = replace(meta, microbatches=(type(meta.microbatches[0]).of(without),))
    assert Groupings(planner.job, text).of(0.5, 1.0) is None
    assert Groupings(planner.job, meta).of(0.5, 1.0) is not None


def test_the_plan_does_not_depend_on_threads():
    _, one, first = searched()
    _, two, second = searched(replace(OPTIONS, threads=2))
    assert one.grouping == two.grouping
    assert first.plan == second.plan


def test_a_small_budget_goes_to_the_given_groups():
    iteration, found, result = searched(replace(OPTIONS, budget_evaluations=300))
    assert found is iteration
    assert result.evaluations == 300


def test_the_search_ends_early_where_it_is_cancelled():
    planner, meta = drawn("vlm_s")
    iteration = planner.prepare(meta, searched=True)
    _, result = search_iteration(planner, iteration, OPTIONS, search, cancelled=lambda: True)
    assert result.evaluations < 400  # those that judge the given groups, and a first few


def test_seconds_end_the_search():
    _, _, result = searched(SearchOptions(budget_evaluations=0, budget_s=0.2))
    assert result.has_plan


def test_groups_where_nothing_fits_are_passed_over():
    planner, meta = drawn("vlm_s")
    iteration = planner.prepare(meta, searched=True)
    groupings = Groupings(planner.job, meta)
    assert groupings.of(1.0, 1e-3) is None  # no microbatch
    assert groupings.of(1.0, 0.5) is None  # they are full already
    assert groupings.of(1.0, 1e3) is None  # more microbatches than samples
    tight = replace(planner, activation_limits=[1e9] * planner.job.partition.num_ranks)
    found, result = search_iteration(tight, iteration, OPTIONS, search)
    assert found is iteration
    assert result.has_plan


@pytest.mark.parametrize("name", ["vlm_s", "t2v_s"])
@pytest.mark.parametrize("number", [0.75, 1.25, 2.0])
def test_groups_have_every_sample_once_and_no_more_tokens_than_given(name, number):
    planner, meta = drawn(name, "training.global_batch_size=8")
    half = grouped(meta, tuple((i,) for i in range(sum(len(m.samples) for m in meta.microbatches))))
    given = half if number < 1 else meta  # of single samples, so that fewer microbatches have room
    grouping = Groupings(planner.job, replace(given, microbatches=given.microbatches)).of(0.5, number)
    if grouping is None:
        assert number != 1.25
        return
    made = grouped(given, grouping.microbatches)
    assert len(made.microbatches) == round(number * len(given.microbatches))
    assert samples(made) == samples(given)
    for count in ("num_tokens", "num_text_tokens", "num_video_tokens"):
        assert max(getattr(m, count) for m in made.microbatches) <= max(getattr(m, count) for m in given.microbatches)
    assert grouping.sub_microbatch_size == max(1, planner.job.sub_microbatch_size // 2)
    iteration = planner.prepare(given, searched=True)
    again = planner.regrouped(iteration, grouping)
    check_conservation(again.grouped_meta, again.batching)


def test_sizes_are_scaled_for_each_module():
    planner, meta = drawn("vlm_s")
    of_modules = replace(planner.job, sub_microbatch_size={"vision": 12, "audio": 0})
    largest = max(len(microbatch.images) for microbatch in meta.microbatches)
    assert Groupings(of_modules, meta).of(0.5, 1.0) == Grouping(
        sub_microbatch_size={"vision": 6, "audio": round(largest / 2)}
    )
    assert Groupings(replace(planner.job, sub_microbatch_size=0), meta).of(0.25, 1.0) == Grouping(
        sub_microbatch_size=round(largest / 4)
    )
    whole = replace(planner.job, sub_microbatch_size=0, section=planner.job.section.with_search(sub_microbatch=False))
    assert Groupings(whole, meta).of(0.5, 1.0) is None  # works of whole microbatches are asked for
    assert Groupings(planner.job, meta).of(1.0, 1.0) is None  # the given one
