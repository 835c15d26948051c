"""Simulated iterations of several pipelines, of equal and of unequal depth."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean

import pytest

from mmtrain.commands.cli import main
from mmtrain.config import config
from mmtrain.config.config import Config, each_pipeline
from mmtrain.costs.machine import Machine, NominalNetwork
from mmtrain.costs.operators.operator_graph import OpKind
from mmtrain.errors import ConfigError
from mmtrain.modality.metadata import IterationMeta
from mmtrain.planner.assignment.dealing import Dealer
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.make_plan import make_plan
from mmtrain.planner.memory.rank_bytes import Sharding
from mmtrain.schedule.problem import P2P
from mmtrain.schedule.timeline import Timeline
from mmtrain.simulator.allocation.candidate import Candidate
from mmtrain.simulator.allocation.candidate_judge import Effort, Judge
from mmtrain.simulator.drawn_steps import divided, drawn_steps
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.whole_iteration import IterationSimulator

NETWORK = NominalNetwork(p2p=P2P(latency_s=0.01, bytes_per_s=1e8))
UNTIED = "model.language.config.tie_word_embeddings=false"
DEBUG = ["simulate", "--config", "debug_vlm.toml", "--image-side", "112", "--iterations", "2"]
TWO_THREE = ["--parallelism.pipeline_parallel_degree=1", "--parallelism.pipelines=[2,3]"]


def load(*overrides: str) -> Config:
    degree = ["parallelism.pipeline_parallel_degree=1"] * any("pipelines" in one for one in overrides)
    return config.load("debug_vlm.toml", [*degree, "training.global_batch_size=10", *overrides])


def batches(job: Config, counts: Sequence[int]) -> list[IterationMeta]:
    """[replica] -> as many microbatches of a drawn step."""
    (step,) = drawn_steps(job, "mix", 1, image_side=112)
    starts = [sum(counts[:replica]) for replica in range(len(counts))]
    return [IterationMeta(microbatches=step[start : start + n]) for start, n in zip(starts, counts, strict=True)]


def timelines(job: Config, metas: Sequence[IterationMeta]) -> list[Timeline]:
    """[replica] -> its pipeline, made by its own pipeline's planner."""
    layout, jobs = job.parallelism.layout, each_pipeline(job, make_job)
    made = [jobs[layout.pipeline_of(replica)] for replica in range(len(metas))]
    return [
        make_plan(IterationPlanner(own).problem(meta)[1], own.schedule).timeline
        for own, meta in zip(made, metas, strict=True)
    ]


def rank_end_s(timeline: Timeline, rank: int) -> float:
    return max((row.end_s for row in timeline.of_rank(rank)), default=0.0)


def test_equal_depths_are_a_grid() -> None:
    listed = load("parallelism.pipelines=[2,2]")
    grid = load("parallelism.pipeline_parallel_degree=2", "parallelism.data_parallel_replicate_degree=2")
    metas = batches(listed, (5, 5))
    found = [IterationSimulator.of(job, NETWORK).simulate(metas)[0] for job in (listed, grid)]
    assert asdict(found[0]) == asdict(found[1])
    assert found[0].reduce_s > 0


def test_ranks_of_a_grid_reduce_and_add_up_stage_by_stage() -> None:
    job = load("parallelism.data_parallel_replicate_degree=2", "parallelism.data_parallel_shard_degree=2", UNTIED)
    metas = batches(job, (3, 2, 2, 3))
    found, _ = IterationSimulator.of(job, NETWORK).simulate(metas)
    made, lines = make_job(job), timelines(job, metas)
    ends = []
    for rank in (0, 1):
        end = max(rank_end_s(line, rank) for line in lines)
        for stage in Sharding.of(job).rank_state(made.spec, made.partition, rank).stages:
            end += NETWORK.collective_s(OpKind.REDUCE_SCATTER, 4 * stage.num_trainable, [0, 1])
            end += NETWORK.collective_s(OpKind.ALL_REDUCE, 4 * stage.num_trainable / 2, [0, 1])
        ends.append(end)
    assert found.pipeline_s + found.reduce_s == pytest.approx(max(ends), rel=1e-12)


def test_each_replica_runs_on_its_pipeline_and_the_sums_wait_for_all() -> None:
    job = load("parallelism.pipelines=[2,3]")
    metas = batches(job, (4, 6))
    simulator = IterationSimulator.of(job, NETWORK)
    found, slowest = simulator.simulate(metas)
    lines = timelines(job, metas)
    assert [line.num_ranks for line in lines] == [2, 3]
    assert found.replicas_s == tuple(line.makespan_s for line in lines)
    assert slowest == max(lines, key=lambda line: line.makespan_s)
    assert found.bubble == pytest.approx(fmean(line.bubble for line in lines))
    assert (found.num_microbatches, found.gather_s) == (10, 0)  # one rank a stage: nothing to gather
    ready = [
        [rank_end_s(line, stage.pp_rank) for stage in own.partition.stages]
        for line, own in zip(lines, each_pipeline(job, make_job), strict=True)
    ]
    assert found.pipeline_s + found.reduce_s == pytest.approx(simulator.sums.end_s(ready))
    assert found.iteration_s == pytest.approx(found.pipeline_s + found.reduce_s + found.optimizer_s)
    assert found.activation_bytes == (*lines[0].peak_bytes, *lines[1].peak_bytes)
    states = [state for pipeline in simulator.pipelines for state in pipeline.states]
    peaks = zip(states, found.activation_bytes, strict=True)
    assert found.peak_bytes == tuple(state.peak_bytes(activations) for state, activations in peaks)


def test_a_pipeline_may_be_simulated_without_the_others() -> None:
    job = load("parallelism.pipelines=[2,3]")
    metas = batches(job, (4, 6))
    found, slowest = IterationSimulator.of(job, NETWORK).simulate(metas[1:], replicas=[1])
    assert slowest == timelines(job, metas)[1]
    assert found.replicas_s == (slowest.makespan_s,)


def test_gathers_are_those_of_a_pipelines_own_ranks() -> None:
    class Slow:
        """A network in which only the ranks of the second pipeline take time."""

        def collective_s(self, kind: OpKind, num_bytes: float, ranks: Sequence[int]) -> float:
            return 0.5 if kind is OpKind.ALL_GATHER and min(ranks) >= 4 else 0.0

    job = load("parallelism.pipelines=[2,3]", "parallelism.data_parallel_shard_degree=2")
    found, _ = IterationSimulator.of(job, Slow()).simulate(batches(job, (2, 2, 3, 3)))
    assert found.gather_s >= 0.5
    alone, _ = IterationSimulator.of(job, Slow()).simulate(batches(job, (2, 2)))
    assert alone.gather_s == 0


def test_candidates_of_unequal_depth_are_judged_by_whole_and_by_part() -> None:
    job = load("parallelism.pipelines=[2,3]", "planner.enable=false", "parallelism.pipeline_parallel_schedule=1F1B")
    (step,) = steps = drawn_steps(job, "mix", 1, image_side=112)
    judge = Judge(config=job, steps=lambda of: steps)
    simulator = IterationSimulator.of(job, Machine.of(job).network)
    wanted, _ = simulator.simulate(divided(step, 2, Dealer.of(job, simulator.jobs)))
    whole = judge.judge(Candidate(), Effort(evaluations=0))
    assert (whole.problem, whole.seconds, whole.peak_bytes) == ("", (wanted.iteration_s,), max(wanted.peak_bytes))
    part = judge.judge(Candidate(), Effort(evaluations=0, num_microbatches=8))
    assert part.seconds[0] == pytest.approx(wanted.iteration_s, rel=0.2)


# ------------------------------------------------------------------------------------------------ command


def test_the_command_tells_pipelines_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DEBUG, *TWO_THREE, "--schedule", "1F1B,interleave", "--cluster", "a40x5"]) == 0
    out = capsys.readouterr().out
    assert "5 ranks of a40x5 (pipelines [2, 3], dp_shard 1, " in out
    assert out.count("of pipeline ") == 2


def test_json_has_the_peaks_of_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DEBUG, *TWO_THREE, "--schedule", "1F1B", "--json", "--cluster", "a40x5"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["schedules"]
    peaks = [max(of) for of in zip(*(step["peak_bytes"] for step in found["iterations"]), strict=True)]
    assert len(peaks) == 5
    most = [0, 1, 2, 3, 4][peaks.index(max(peaks))]
    assert (found["peak_pipeline"], found["peak_pp_rank"]) == ((0, most) if most < 2 else (1, most - 2))
    assert found["peak_bytes"] == max(peaks)


def test_memory_has_a_table_for_each_depth(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--schedule", "planned", "--evaluations", "2", "--cluster", "a40x5", "--planner.memory_limit=90%"]
    assert main([*DEBUG, *TWO_THREE, *words]) == 0
    out = capsys.readouterr().out
    assert "planned (pipelines of 2 ranks): memory" in out
    assert "planned (pipelines of 3 ranks): memory" in out


def test_a_stage_on_two_nodes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--parallelism.data_parallel_shard_degree=3", "--training.global_batch_size=6", "--cluster", "h800x16"]
    assert main([*DEBUG, *TWO_THREE, *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "parallelism.pipelines = [2, 3]: a stage has dp_shard 3 x cp 1 x tp 1 = 3 ranks, and a node has 8" in line


def test_the_machine_is_that_of_all_ranks() -> None:
    job = load("parallelism.pipelines=[8,3]", "planner.hardware=h800")
    assert Machine.of(job).name == "h800x16"
    with pytest.raises(ConfigError, match="make 11 ranks"):
        Machine.of(load("parallelism.pipelines=[8,3]", "planner.hardware=h800x32"))
