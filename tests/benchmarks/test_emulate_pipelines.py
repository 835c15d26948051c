"""Emulated pipelines and their sums: in virtual time they end exactly as simulated."""

import pytest
import torch
from emulate_pipelines import execute, make_pipelines

from mmtrain.config import config
from mmtrain.schedule.simulate import simulate
from tests.ranks import run_ranks


def on_a_rank(rank, step):
    return execute(torch.device("cpu"), step, -1)[0]


@pytest.mark.parametrize("pipelines", ["[2,2]", "[2,3]"])
def test_sums_end_as_simulated(pipelines):
    job = config.load(
        "debug_vlm.toml",
        [
            "parallelism.pipeline_parallel_degree=1",
            f"parallelism.pipelines={pipelines}",
            "planner.hardware=a40",
            "training.global_batch_size=10",
        ],
    )
    step = make_pipelines(job, unit_s=1.0, message_bytes=4096.0, image_side=112)
    timelines = [simulate(case.problem, case.plan) for case in step.cases]
    found = run_ranks(on_a_rank, sum(job.parallelism.layout.depths), step)
    assert max(end for _, end, _ in found) == step.end_s(timelines)
    assert max(pipeline for pipeline, _, _ in found) == max(timeline.end_s for timeline in timelines)
    assert step.end_s(timelines) > max(timeline.end_s for timeline in timelines)
    counts = {round(count) for _, _, gradients in found for count in gradients}
    assert {2, 4} <= counts <= {2, 3, 4}  # a copy in each pipeline; of the tied matrix two, unless one rank has both
