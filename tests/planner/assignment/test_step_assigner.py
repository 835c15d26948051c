"""How a job judges assignments: by a short search or by its own schedule, within the memory that its config tells."""

import math
from dataclasses import replace

from mmtrain.config import config
from mmtrain.modality.typical import TypicalSizes
from mmtrain.planner.assignment.step_assigner import StepAssigner
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.make_plan import make_plan
from mmtrain.planner.search.search import search
from mmtrain.planner.search.search_options import SearchOptions
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.workloads import draw

JOB = ["training.global_batch_size=8", "parallelism.pipeline_parallel_degree=4", "assignment.policy=balanced"]
SEARCHED = ["planner.enable=true", "planner.search.budget_evaluations=300"]


def judged(*keys):
    """(planner, batch, its judged seconds)."""
    job = config.load("vlm_s.toml", ["planner.hardware=h800x16", "planner.memory_limit=", *JOB, *keys])
    made, meta = make_job(job), draw("mix", TypicalSizes.of(job), seed=0, iteration=0)
    assigner = StepAssigner.of(job, [made])
    assert assigner is not None
    return IterationPlanner(made), meta, assigner.makespan_s(meta)


def test_a_batch_takes_as_long_as_a_short_search_finds():
    planner, meta, found = judged(*SEARCHED)
    problem = planner.problem(meta, searched=True)[1]
    best = search(problem, SearchOptions(budget_evaluations=300)).timeline.makespan_s
    assert best * (1 - 1e-9) <= found < make_plan(problem, "interleave").timeline.makespan_s


def test_a_named_schedule_is_judged_by_itself():
    planner, meta, found = judged("planner.enable=false", "parallelism.pipeline_parallel_schedule=1F1B")
    assert found == make_plan(planner.problem(meta)[1], "1F1B").timeline.makespan_s


def test_limits_that_the_config_tells_hold():
    tight, loose = (judged(*SEARCHED, f"planner.memory_limit={gib}GiB")[2] for gib in (20, 60))
    assert loose < tight < math.inf


def test_with_a_device_of_unknown_memory_no_plan_holds_weight_gradients_back():
    """Its plans would hold more than any device, and look shorter than those that the job can have."""
    job = config.load("vlm_s.toml", [*JOB, *SEARCHED, "planner.memory_limit=92%"])
    assert not job.planner.hardware
    assigner = StepAssigner.of(job, [make_job(job)])
    section = assigner.planners[0].job.section
    assert section == replace(job.planner, memory_limit="").with_search(split_backward=False)
    assert assigner.makespan_s(draw("mix", TypicalSizes.of(job), seed=0, iteration=0)) < math.inf
