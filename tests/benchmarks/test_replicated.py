"""The baseline of benchmarks/cornstarch.py in which every rank of the language model runs all encoders again."""

from pathlib import Path

import pytest

from benchmarks import cornstarch
from benchmarks.replicated import replicated_partition, rerun
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.make_plan import make_plan
from mmtrain.schedule.action import Kind
from mmtrain.simulator.cuts import placing_weights
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.partition_choice import Choice


def planner_of(tmp_path: Path, *overrides: str) -> IterationPlanner:
    def choose(config, spec, costs, sub_microbatch):
        weights = placing_weights(config, spec, costs, sub_microbatch)
        return Choice(partition=replicated_partition(spec, 4, 1, weights), spec=spec)

    return IterationPlanner(make_job(cornstarch.job("SSS", tmp_path, pp=4, overrides=overrides), choose))


def test_each_stage_takes_its_own_seconds_and_those_of_all_encoders(tmp_path: Path) -> None:
    planner = planner_of(tmp_path)
    batching, problem = planner.problem(cornstarch.batch())
    again = rerun(problem)
    assert [module.name for module in again.graph.modules] == ["language"]
    assert len(again.graph.works) == cornstarch.MICROBATCHES
    text = next(w for w in range(len(batching.works)) if batching.module_of(w) == "language")
    before = batching.works[text].after
    assert {batching.module_of(w) for w in before} == {"vision", "audio"}
    encoders = [problem.options(problem.graph.stages(w)[0], w)[0] for w in before]
    for stage in range(4):
        own = problem.options(problem.graph.stages(text)[stage], text)[0]
        both = again.options(stage, 0)[0]
        for kind in (Kind.F, Kind.B):
            parts = [option.load(kind).compute_s for option in (own, *encoders)]
            assert both.load(kind).compute_s == pytest.approx(sum(parts))
        kept = sum(option.activation_bytes for option in encoders if option.has_backward)
        assert both.activation_bytes == own.activation_bytes + kept


def test_1f1b_takes_what_its_closed_form_says(tmp_path: Path) -> None:
    """Equal stages: a language model of as many blocks as ranks, apart from its ends; without transfers."""
    keys = ("planner.device.p2p_latency_s=0.0", "planner.device.p2p_bytes_per_s=1e21", "planner.hardware=")
    again = rerun(planner_of(tmp_path, *keys).problem(cornstarch.batch())[1])
    slowest = max(again.options(stage, 0)[0].load(Kind.F).seconds for stage in range(4))
    backward = max(again.options(stage, 0)[0].load(Kind.B).seconds for stage in range(4))
    timeline = make_plan(again, "1F1B").timeline
    assert timeline is not None
    most = (cornstarch.MICROBATCHES + 3) * (slowest + backward)
    loads = [sum(again.options(stage, 0)[0].load(kind).seconds for kind in (Kind.F, Kind.B)) for stage in range(4)]
    assert max(loads) * cornstarch.MICROBATCHES < timeline.makespan_s <= most * (1 + 1e-9)
