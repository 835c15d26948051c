from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from mmtrain.config import config
from mmtrain.costs.machine import NominalNetwork, RankNetwork
from mmtrain.errors import PlanError
from mmtrain.modality.metadata import IterationMeta
from mmtrain.modality.typical import TypicalSizes
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.make_plan import make_plan
from mmtrain.schedule.problem import P2P
from mmtrain.schedule.timeline import Timeline
from mmtrain.simulator.whole_iteration import IterationSimulator
from mmtrain.simulator.workloads import draw
from mmtrain.spec.memory_strategies import BlockMemory

FREE = NominalNetwork(p2p=P2P(latency_s=0.0, bytes_per_s=1e30))


def simulator(*overrides: str, network: RankNetwork = FREE) -> IterationSimulator:
    return IterationSimulator.of(config.load("debug_vlm.toml", overrides), network)


def batches(number: int = 1, *overrides: str) -> list[IterationMeta]:
    bins = TypicalSizes.of(config.load("debug_vlm.toml", overrides), 112)
    return [draw("mix", bins, seed=0, iteration=0, replica=replica) for replica in range(number)]


def pipeline(sim: IterationSimulator, meta: IterationMeta) -> Timeline:
    timeline = make_plan(IterationPlanner(sim.jobs[0]).problem(meta)[1], sim.jobs[0].schedule).timeline
    assert timeline is not None
    return timeline


@dataclass(frozen=True)
class Slow:
    """Costs whose optimizer takes a second a million parameters."""

    inner: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step_s(self, num_params: int) -> float:
        return num_params / 1e6


def test_one_replica_without_fsdp_takes_its_pipeline_and_the_optimizer() -> None:
    sim, (meta,) = simulator(), batches()
    sim = sim.with_jobs(lambda job: replace(job, costs=Slow(job.costs)))
    found, timeline = sim.simulate([meta])
    assert timeline == pipeline(sim, meta)
    assert (found.gather_s, found.reduce_s) == (0, 0)
    assert found.pipeline_s == timeline.makespan_s
    assert found.optimizer_s == max(state.updated_params for state in sim.pipelines[0].states) / 1e6
    assert found.iteration_s == pytest.approx(found.pipeline_s + found.optimizer_s)
    assert found.bubble == timeline.bubble
    assert found.activation_bytes == timeline.peak_bytes
    assert found.num_images == meta.num_images
    assert found.num_microbatches == 4


def test_model_flops_are_those_of_training() -> None:
    sim, (meta,) = simulator(), batches()
    found, _ = sim.simulate([meta])
    batching, _ = IterationPlanner(sim.jobs[0]).problem(meta)
    assert found.flops == sum(part.total for part in sim.jobs[0].flops(batching).values())


def test_the_slowest_replica_decides() -> None:
    sim = simulator("parallelism.data_parallel_shard_degree=2")
    metas = batches(2, "parallelism.data_parallel_shard_degree=2")
    together, slowest = sim.simulate(metas)
    alone = [sim.simulate([meta])[0] for meta in metas]
    assert alone[0].pipeline_s != alone[1].pipeline_s
    assert together.replicas_s == tuple(one.pipeline_s for one in alone)
    assert together.pipeline_s == slowest.makespan_s == max(together.replicas_s)
    assert together.iteration_s == pytest.approx(max(one.iteration_s for one in alone))
    assert together.flops == pytest.approx((alone[0].flops + alone[1].flops) / 2)
    assert together.peak_bytes == tuple(
        max(pair) for pair in zip(alone[0].peak_bytes, alone[1].peak_bytes, strict=True)
    )


class Steady:
    """A network whose collectives take one time each."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def collective_s(self, kind: object, num_bytes: float, ranks: Sequence[int]) -> float:
        return self.seconds if len(ranks) > 1 else 0.0


def test_gradients_are_reduced_when_a_ranks_replicas_have_ended() -> None:
    untied = "model.language.config.tie_word_embeddings=false"
    sim = simulator("parallelism.data_parallel_shard_degree=2", untied, network=Steady(0.25))
    metas = batches(2, "parallelism.data_parallel_shard_degree=2")
    found, _ = sim.simulate(metas)
    lines = [pipeline(sim, meta) for meta in metas]
    ends = [max(line.of_rank(rank)[-1].end_s for line in lines) for rank in (0, 1)]
    reduces = [0.25 * len(sim.jobs[0].partition.of_rank(rank)) for rank in (0, 1)]
    reduced = max(end + reduce for end, reduce in zip(ends, reduces, strict=True))
    assert found.pipeline_s + found.reduce_s == pytest.approx(reduced)
    assert found.iteration_s == pytest.approx(found.gather_s + reduced)


def test_gathers_wait_as_far_as_the_pipeline_needs_them() -> None:
    sim = simulator("parallelism.data_parallel_shard_degree=2", network=Steady(0.25))
    (meta,) = batches(1, "parallelism.data_parallel_shard_degree=2")
    found, _ = sim.simulate([meta])
    line = pipeline(sim, meta)
    delays = []
    for rank in (0, 1):
        for place, stage in enumerate(sim.jobs[0].partition.of_rank(rank)):
            first = min(row.start_s for row in line.of_rank(rank) if row.action.stage == stage.index)
            delays.append(0.25 * (place + 1) - first)
    assert found.gather_s == pytest.approx(max(delays))
    assert 0.25 <= found.gather_s < 0.5
    # What has arrived before its stage is needed costs nothing more.
    quick, _ = simulator("parallelism.data_parallel_shard_degree=2", network=Steady(1e-6)).simulate([meta])
    assert quick.gather_s == pytest.approx(1e-6)


def test_memory_is_state_plus_activations_plus_the_block_that_is_recomputed() -> None:
    full = "activation_checkpoint.mode=full"
    kept, (meta,) = simulator(), batches()
    recomputed = simulator(full)
    more, less = kept.simulate([meta])[0], recomputed.simulate([meta])[0]
    assert all(a > b for a, b in zip(more.activation_bytes, less.activation_bytes, strict=True))
    problem = IterationPlanner(recomputed.jobs[0]).problem(meta)[1]
    spec, batching = recomputed.jobs[0].spec, IterationPlanner(recomputed.jobs[0]).problem(meta)[0]
    recomputation = recomputed.jobs[0].memory.recomputation(BlockMemory.RECOMPUTE)
    for work, size in enumerate(batching.sizes):
        for stage in recomputed.jobs[0].partition.of_module(batching.modules[batching.works[work].module]):
            layers = spec.module(stage.module).layers[slice(*stage.layers)]
            (option,) = problem.options(stage.index, work)
            assert option.restored_bytes == max(recomputation.peak_bytes(layer, size) for layer in layers) > 0
            assert option.name == "recompute"
    assert less.activation_bytes == pipeline(recomputed, meta).peak_bytes
    assert less.peak_bytes[0] == recomputed.pipelines[0].states[0].peak_bytes(less.activation_bytes[0])


def test_an_iteration_without_a_plan_says_why() -> None:
    sim = simulator("planner.search.activation_memory_gib=0.001")
    with pytest.raises(
        PlanError, match=r"planner\.search\.activation_memory_gib = 0\.001 leaves them 1\.02 MiB; raise it"
    ):
        sim.simulate(batches())
