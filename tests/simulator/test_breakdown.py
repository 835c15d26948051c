from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmtrain.config import config
from mmtrain.costs.cost_model import FlopsCosts, LayerTimes
from mmtrain.costs.machine import Machine
from mmtrain.errors import ConfigError
from mmtrain.modality.typical import TypicalSizes
from mmtrain.simulator.breakdown import COMPUTING, Breakdown, TimePart, computing
from mmtrain.simulator.study import Report, ScheduleForecast, SimulationQuestion, simulate_job
from mmtrain.simulator.whole_iteration import IterationSimulator
from mmtrain.simulator.workloads import draw
from mmtrain.spec.builders import model_spec
from tests.costs.profiles import profile_of

ON_A40 = "planner.hardware=a40"
TP, CP = "parallelism.tensor_parallel_degree=2", "parallelism.context_parallel_degree=2"
FREE_MESSAGES = ("planner.device.p2p_latency_s=0.0", "planner.device.p2p_bytes_per_s=1e15")


def report(*overrides: str, schedule: str = "1F1B", iterations: int = 1) -> Report:
    job = config.load("debug_vlm.toml", overrides)
    asked = SimulationQuestion(
        config=job, schedules=(schedule,), evaluations=5, num_iterations=iterations, num_replicas=2, image_side=112
    )
    return simulate_job(asked)


def answer(*overrides: str, schedule: str = "1F1B", iterations: int = 1) -> ScheduleForecast:
    return report(*overrides, schedule=schedule, iterations=iterations).answers[0]


@settings(deadline=None, max_examples=12)
@given(
    schedule=st.sampled_from(["GPipe", "1F1B", "ZB-H1", "Optimus", "interleave", "planned"]),
    mode=st.sampled_from(["none", "selective", "full", "offload"]),
    degree=st.sampled_from(["", TP, CP, "parallelism.data_parallel_shard_degree=2"]),
    hardware=st.sampled_from(["", ON_A40]),
    limit=st.sampled_from(["", "planner.memory_limit=24MiB"]),
)
def test_parts_add_up_to_all_rank_seconds(schedule: str, mode: str, degree: str, hardware: str, limit: str) -> None:
    words = [f"activation_checkpoint.mode={mode}", degree, hardware, limit if schedule == "planned" else ""]
    made = report(*filter(None, words), schedule=schedule, iterations=2)
    found = made.answers[0]
    if found.problem:
        return  # the limit leaves too little
    for step in found.iterations:
        breakdown = step.breakdown
        assert sum(breakdown.shares.values()) == pytest.approx(1, abs=1e-9)
        assert min(breakdown.shares.values()) >= -1e-9
        assert {part for parts in breakdown.shares for part in parts} == set(TimePart) - {TimePart.INPUT}
        idle = breakdown[TimePart.BUBBLE] + breakdown[TimePart.TRANSFERS]
        busy = sum(share for parts, share in breakdown.shares.items() if parts[0] in COMPUTING)
        assert busy + idle == pytest.approx(step.pipeline_s / step.iteration_s)
        if len(step.replicas_s) == 1:
            assert idle == pytest.approx(step.bubble * step.pipeline_s / step.iteration_s)
        assert breakdown[TimePart.REDUCTIONS] == pytest.approx((step.gather_s + step.reduce_s) / step.iteration_s)
        assert breakdown[TimePart.OPTIMIZER] == pytest.approx(step.optimizer_s / step.iteration_s)
    if made.machine.peak_flops:
        shape = made.question.config.parallelism.layout
        mfu = found.mfu(shape.world_size // shape.dp, made.machine.peak_flops)
        assert found.breakdown[TimePart.MODEL_FLOPS] == pytest.approx(mfu)


def test_the_breakdown_of_several_iterations_weighs_them_by_their_time() -> None:
    short, long = Breakdown.of(1, {(TimePart.BUBBLE,): 1}), Breakdown.of(3, {(TimePart.BUBBLE,): 3})
    assert Breakdown.mean([short, long], [1, 3])[TimePart.BUBBLE] == 1
    parts = [
        {(TimePart.BUBBLE,): 1.0, (TimePart.OPTIMIZER,): 0.0},
        {(TimePart.BUBBLE,): 0.0, (TimePart.OPTIMIZER,): 3.0},
    ]
    both = Breakdown.mean([Breakdown.of(1, parts[0]), Breakdown.of(3, parts[1])], [1, 3])
    assert both.by_label == {"bubble": 0.25, "optimizer": 0.75}


def test_parts_that_do_not_add_up_are_a_bug() -> None:
    with pytest.raises(AssertionError, match=r"add up to 0\.5"):
        Breakdown.of(2, {(TimePart.BUBBLE,): 1})
    with pytest.raises(AssertionError, match="negative"):
        Breakdown.of(1, {(TimePart.BUBBLE,): 2, (TimePart.OPTIMIZER,): -1})


def test_what_is_not_known_apart_is_one_part() -> None:
    found = computing(10, {TimePart.MODEL_FLOPS: 4, TimePart.EXCHANGES: None})
    assert found == {
        (TimePart.MODEL_FLOPS,): 4,
        (TimePart.BELOW_PEAK, TimePart.RECOMPUTATION, TimePart.EXCHANGES): 6,
    }
    assert answer(TP).breakdown.by_label.keys() >= {"model FLOPs + below peak + exchanges", "recomputation"}


def test_without_a_known_peak_all_kernels_are_one_part() -> None:
    assert "model FLOPs + below peak" in answer().breakdown.by_label
    assert answer("metrics.peak_flops=1e11").breakdown[TimePart.MODEL_FLOPS] == pytest.approx(
        0.2 * answer().breakdown.by_label["model FLOPs + below peak"]  # planner.device.flops_per_s is 2e10
    )


def test_a_peak_that_costs_exceed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"peak of 1e\+10 FLOP/s a device; raise metrics.peak_flops, or lower"):
        answer("metrics.peak_flops=1e10")


def test_messages_that_take_no_time_delay_nothing() -> None:
    assert abs(answer(*FREE_MESSAGES).breakdown[TimePart.TRANSFERS]) < 1e-7
    slow = answer("planner.device.p2p_latency_s=0.01")
    assert slow.breakdown[TimePart.TRANSFERS] > 0.1
    at_once = answer(*FREE_MESSAGES).iterations[0]
    lost = slow.iterations[0].pipeline_s - at_once.pipeline_s
    assert slow.breakdown[TimePart.TRANSFERS] == pytest.approx(lost / slow.iterations[0].iteration_s)


@pytest.mark.parametrize("hardware", [ON_A40, "planner.device.flops_per_s=2e10"])
def test_recomputation_is_what_backwards_repeat(hardware: str) -> None:
    kept, full = (answer(hardware, f"activation_checkpoint.mode={mode}") for mode in ("none", "full"))
    assert kept.breakdown[TimePart.RECOMPUTATION] == 0
    assert full.breakdown[TimePart.RECOMPUTATION] > 0.1
    seconds = [
        {parts: share * found.iterations[0].iteration_s for parts, share in found.breakdown.shares.items()}
        for found in (kept, full)
    ]
    rest = [parts for parts in seconds[0] if parts[0] in COMPUTING and parts != (TimePart.RECOMPUTATION,)]
    assert [seconds[0][parts] for parts in rest] == pytest.approx([seconds[1][parts] for parts in rest])


def test_exchanges_are_those_of_several_ranks() -> None:
    assert answer(ON_A40).breakdown[TimePart.EXCHANGES] == 0
    assert answer().breakdown[TimePart.EXCHANGES] == 0
    for degree in (TP, CP):
        assert answer(ON_A40, degree).breakdown[TimePart.EXCHANGES] > 0.01


def test_hidden_exchanges_delay_nothing(tmp_path: Path) -> None:
    """Compute takes as long as before, whatever whole backwards hide under their weight gradients."""
    seconds: list[dict[TimePart, float]] = []
    for contention in (0.0, 1.0):
        hardware = tmp_path / f"contention_{contention:g}.toml"
        hardware.write_text(f'extends = "a40"\ncontention = {contention}\n')
        found = answer(f"planner.hardware={hardware}", TP)
        seconds.append({part: found.breakdown[part] * found.mean("iteration_s") for part in COMPUTING})
    hidden, exposed = seconds
    assert 0 < hidden[TimePart.EXCHANGES] < exposed[TimePart.EXCHANGES]
    for part in (TimePart.MODEL_FLOPS, TimePart.BELOW_PEAK, TimePart.RECOMPUTATION):
        assert hidden[part] == pytest.approx(exposed[part])


def test_exchanges_within_measured_layers_are_not_known_apart(tmp_path: Path) -> None:
    for words, names in (
        ([], {"model FLOPs", "below peak", "recomputation", "exchanges"}),
        ([TP], {"model FLOPs", "below peak + exchanges", "recomputation"}),
    ):
        made = config.load("debug_vlm.toml", words)
        spec = model_spec(made.model, dtype_bytes=4)
        profile = profile_of(made, spec, FlopsCosts.of(made.planner, shares=2 if words else 1))
        profile.write(tmp_path / "profile.json")
        found = answer(*words, f"planner.profile={tmp_path / 'profile.json'}", "metrics.peak_flops=1e11")
        assert found.breakdown.by_label.keys() >= names
        assert 0 < found.breakdown[TimePart.MODEL_FLOPS] < 0.2  # planner.device.flops_per_s is a fifth of the peak


@dataclass(frozen=True)
class Uniform:
    """Costs under which each stage takes a second forward and two backward."""

    inner: Any
    num_blocks: list[int]
    """[block] -> blocks of its stage."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def layer(self, module: Any, index: int, size: Any, *, input_grad: bool) -> LayerTimes:
        count = self.num_blocks[index]
        return LayerTimes(forward_s=1 / count, backward_input_s=1 / count, backward_weight_s=1 / count)

    def without_exchanges(self) -> "Uniform":
        return self


@pytest.mark.parametrize("microbatches", [2, 7])
def test_the_bubble_of_a_plain_chain_is_the_known_one(microbatches: int) -> None:
    words = ["parallelism.pipeline_parallel_schedule=1F1B", f"training.global_batch_size={microbatches}"]
    job = config.load("debug_text.toml", [*words, *FREE_MESSAGES, "planner.enable=false"])
    sim = IterationSimulator.of(job, Machine.of(job).network)
    stages = sim.jobs[0].partition.stages
    assert [stage.module for stage in stages] == ["language"] * sim.jobs[0].partition.num_ranks
    counts = [high - low for low, high in (stage.layers for stage in stages) for _ in range(high - low)]
    sim = sim.with_jobs(lambda job: replace(job, costs=Uniform(job.costs, counts)))
    ranks = len(stages)
    assert ranks > 1
    found, _ = sim.simulate([draw("interleaved", TypicalSizes.of(job), seed=0, iteration=0)])
    assert found.pipeline_s == pytest.approx((ranks - 1 + microbatches) * 3)
    assert found.breakdown[TimePart.BUBBLE] == pytest.approx(
        (ranks - 1) / (ranks - 1 + microbatches) * found.pipeline_s / found.iteration_s
    )
