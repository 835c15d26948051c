"""The baseline in which every rank of the language model runs all encoders again, in simulation alone."""

from pathlib import Path

import pytest

from benchmarks import cornstarch
from mmtrain.commands.cli import main
from mmtrain.costs.machine import Machine
from mmtrain.errors import ConfigError
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.plan import make_plan
from mmtrain.schedule.action import Kind
from mmtrain.simulator.job import make_job
from mmtrain.simulator.replicated import held_partition, replicated_choice, rerun
from mmtrain.simulator.whole_iteration import IterationSimulator
from tests.jobs import write_config, write_sound_config

REPLICATED = "planner.placement=replicated"


def planner_of(tmp_path: Path, *overrides: str) -> IterationPlanner:
    job = cornstarch.job("SSS", tmp_path, pp=4, overrides=[REPLICATED, *overrides])
    return IterationPlanner(make_job(job, replicated_choice))


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


def test_every_rank_holds_all_encoders(tmp_path: Path) -> None:
    job = cornstarch.job("SSS", tmp_path, pp=4, overrides=[REPLICATED])
    simulator = IterationSimulator.of(job, Machine.of(job).network)
    parts, spec = simulator.jobs[0].partition, simulator.jobs[0].spec
    encoders = sum(spec.module(name).num_params for name in ("vision", "audio"))
    for rank, state in enumerate(simulator.pipelines[0].states):
        own = sum(
            layer.num_params
            for stage in parts.of_module("language")
            if stage.pp_rank == rank
            for layer in spec.module("language").layers[slice(*stage.layers)]
        )
        assert 4 * sum(stage.num_params for stage in state.stages) == pytest.approx(own + encoders)
        assert [stage.module for stage in held_partition(parts, rank).of_rank(rank)] == ["vision", "audio", "language"]


def test_it_is_simulated_and_refused_for_a_real_job(tmp_path: Path, capsys) -> None:
    path = write_sound_config(tmp_path, tmp_path)
    words = ["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=1F1B"]
    words += ["--model.language.num_segments=0", f"--{REPLICATED}"]
    simulated = [
        "simulate",
        "--config",
        str(path),
        "--iterations",
        "2",
        "--cluster",
        "a40x2",
        "--image-side",
        "112",
        *words,
    ]
    assert main(simulated) == 0
    replicated = capsys.readouterr().out
    assert "1F1B" in replicated and "NO PLAN" not in replicated
    assert main([*simulated, "--schedule", "planned"]) == 2
    assert "the baseline has the order of a named schedule" in capsys.readouterr().err
    assert main(["train", "--config", str(write_config(tmp_path / "plain", tmp_path)), *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert 'planner.placement = "replicated"' in line and "baseline of `mmtrain simulate` alone" in line


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["planner.memory_limit=90%", "planner.enable=true"],
            r'planner\.memory_limit = .90%. with planner\.placement = "replicated"',
        ),
        (["parallelism.pipeline_parallel_schedule=ZBV"], r"which goes down all pipeline ranks and back up"),
        (
            ["model.language.ranks=2"],
            r'model\.language\.ranks = 2 has no effect with planner\.placement = "replicated"',
        ),
    ],
)
def test_what_the_baseline_does_not_have(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planner_of(tmp_path, *overrides)
