import pytest

from mmtrain.config import config
from mmtrain.costs.machine import NominalNetwork
from mmtrain.planner.job import Job
from mmtrain.planner.memory.rank_bytes import RankBytes, Sharding
from mmtrain.schedule.problem import P2P
from mmtrain.simulator.make_job import make_job

NETWORK = NominalNetwork(p2p=P2P(latency_s=0.5, bytes_per_s=1e6))


def held(*overrides: str, pp_rank: int = 0) -> tuple[RankBytes, Sharding, Job]:
    """What a pipeline rank of the debug job holds. Args: overrides: of [parallelism], or of a section that is named."""
    job = config.load("debug_vlm.toml", [o if "." in o else f"parallelism.{o}" for o in overrides])
    made, sharding = make_job(job), Sharding.of(job)
    return sharding.rank_state(made.spec, made.partition, pp_rank), sharding, made


def params(made: Job, pp_rank: int, module: str | None = None) -> int:
    return sum(
        layer.num_params
        for stage in made.partition.of_rank(pp_rank)
        if module in (None, stage.module)
        for layer in made.spec.module(stage.module).layers[slice(*stage.layers)]
    )


@pytest.mark.parametrize("pp_rank", [0, 1])
def test_without_fsdp_a_parameter_takes_16_bytes(pp_rank: int) -> None:
    state, _, made = held(pp_rank=pp_rank)
    count = params(made, pp_rank)
    assert (state.param_bytes, state.grad_bytes, state.optimizer_bytes) == (4 * count, 4 * count, 8 * count)
    assert state.updated_params == count
    assert state.peak_bytes(7.0) == 16 * count + 7


def test_an_average_takes_4_bytes_more() -> None:
    for options in ((), ("data_parallel_shard_degree=4", "optimizer.moments_dtype=bfloat16")):
        (without, _, made), (state, _, _) = held(*options), held(*options, "optimizer.ema_decay=0.9")
        assert state.optimizer_bytes - without.optimizer_bytes == 4 * params(made, 0) / (4 if options else 1)
        assert (state.param_bytes, state.grad_bytes) == (without.param_bytes, without.grad_bytes)


def test_fsdp_shards_what_rests_and_gathers_what_computes() -> None:
    state, _, made = held("data_parallel_shard_degree=4", "training.mixed_precision_param=bfloat16")
    count = params(made, 0)
    assert state.param_bytes == count * (4 / 4 + 2)
    assert state.grad_bytes == 4 * count  # whole until the reduction
    assert state.optimizer_bytes == 8 * count / 4
    assert state.updated_params == count / 4
    # At the end of a step the reduced shards are there, and no activation.
    assert state.peak_bytes(0.0) == pytest.approx(count * (1 + 2 + 4 + 2 + 1))
    assert state.peak_bytes(1e12) == pytest.approx(count * 9 + 1e12)


def test_replicas_hold_copies_and_context_ranks_hold_shards() -> None:
    copies, _, made = held("data_parallel_replicate_degree=2")
    assert copies.updated_params == params(made, 0)
    context, _, _ = held("context_parallel_degree=2")
    assert context.updated_params == params(made, 0) / 2


def test_tensor_parallelism_divides_a_module_unless_its_ranks_hold_it_whole() -> None:
    state, _, made = held("tensor_parallel_degree=2")
    assert sum(stage.num_params for stage in state.stages) == params(made, 0) / 2
    whole, _, _ = held("tensor_parallel_degree=2", "encoder_tensor_parallel=data")
    vision, language = params(made, 0, "vision"), params(made, 0, "language")
    assert [stage.num_params for stage in whole.stages] == [vision, language / 2]
    assert whole.updated_params == vision / 2 + language / 2  # sharded over the tensor-parallel ranks instead


def test_what_is_gathered_at_each_use_is_never_there_as_a_whole() -> None:
    base = ("context_parallel_degree=2", "encoder_context_parallel=patches")
    once, _, made = held(*base, pp_rank=1)
    always, _, _ = held(*base, "fsdp_reshard_after_forward=always", pp_rank=1)
    largest = []
    for stage in made.partition.of_rank(1):
        layers = made.spec.module(stage.module).layers[slice(*stage.layers)]
        two = 2 * max(layer.num_params for layer in layers)
        largest.append(min(two, sum(layer.num_params for layer in layers)))
    assert once.param_bytes - always.param_bytes == 4 * (params(made, 1) - max(largest))
    assert not any(stage.gathered_once for stage in always.stages)


def test_frozen_parameters_have_no_gradient_and_no_moments() -> None:
    state, _, made = held("model.encoder.trainable=false", "model.projector.trainable=false")
    language = params(made, 0, "language")
    assert state.param_bytes == 4 * params(made, 0)
    assert (state.grad_bytes, state.optimizer_bytes) == (4 * language, 8 * language)


def test_offload_keeps_shards_and_moments_off_the_device() -> None:
    state, _, made = held("training.enable_cpu_offload=true")
    assert state.optimizer_bytes == state.reduced_bytes == 0
    assert state.param_bytes == 4 * params(made, 0)


def test_collectives_have_the_bytes_of_a_ring() -> None:
    overrides = ("data_parallel_shard_degree=4", "data_parallel_replicate_degree=2", "training.global_batch_size=8")
    state, sharding, _ = held(*overrides, "training.mixed_precision_param=bfloat16")
    stage = state.stages[0]
    gather = 0.5 + 2 * stage.num_params * 3 / 4 / 1e6
    assert sharding.gather_s(NETWORK, stage, 0) == pytest.approx(gather)
    scatter = 0.5 + 4 * stage.num_params * 3 / 4 / 1e6
    assert sharding.reduce_s(NETWORK, stage, 0) == pytest.approx(scatter)


def test_a_job_without_fsdp_exchanges_nothing() -> None:
    state, sharding, _ = held()
    assert sharding.gather_s(NETWORK, state.stages[0], 0) == sharding.reduce_s(NETWORK, state.stages[0], 0) == 0


class Ranks:
    """A network that notes who takes part."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []

    def collective_s(self, kind: object, num_bytes: float, ranks: list[int]) -> float:
        self.groups.append(list(ranks))
        return 0.0


def test_groups_are_those_of_the_mesh() -> None:
    degrees = ("data_parallel_replicate_degree=2", "data_parallel_shard_degree=2", "context_parallel_degree=2")
    state, sharding, _ = held(*degrees, "tensor_parallel_degree=2", pp_rank=1)
    noted = Ranks()
    sharding.reduce_s(noted, state.stages[0], 1)
    sharding.gather_s(noted, state.stages[0], 1, pipeline=1)
    assert noted.groups == [[8, 10, 12, 14], [24, 26, 28, 30]]


@pytest.mark.parametrize(("activation_bytes", "peak"), [(0.0, 1110.0), (5.0, 1110.0), (3000.0, 4100.0)])
def test_reduced_gradients_come_when_activations_are_gone(activation_bytes: float, peak: float) -> None:
    state = RankBytes(
        stages=(), param_bytes=100.0, grad_bytes=0.0, reduced_bytes=10.0, optimizer_bytes=1000.0, updated_params=0.0
    )
    assert state.peak_bytes(activation_bytes) == peak
