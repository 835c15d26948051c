from dataclasses import replace

import pytest

from mmtrain.config.planner import DeviceConfig, PlannerConfig
from mmtrain.costs.cost_model import FlopsCosts, LayerTimes, equal_layers
from mmtrain.costs.overheads import NO_OVERHEADS
from mmtrain.spec.recomputation import Recomputation
from mmtrain.spec.spec import ModuleSpec
from mmtrain.spec.work_size import Rates, WorkSize
from tests.planner.specs import layers, vlm

SIZE = WorkSize(rows=100, pairs=0, outputs=0)
COSTS = FlopsCosts.of(
    PlannerConfig(device=DeviceConfig(flops_per_s=10.0, p2p_latency_s=0.5, p2p_bytes_per_s=8.0)), shares=2
)


def test_flops_over_the_rate_of_all_ranks() -> None:
    vision = vlm().module("vision")
    assert COSTS.layer(vision, 0, SIZE, input_grad=True) == LayerTimes(
        forward_s=5.0, backward_input_s=5.0, backward_weight_s=5.0
    )
    assert COSTS.layer(vision, 0, SIZE, input_grad=False) == LayerTimes(forward_s=5.0, backward_weight_s=5.0)
    assert COSTS.p2p.latency_s == 0.5
    assert COSTS.step_s(10**9) == 0.0
    assert COSTS.overheads == NO_OVERHEADS


def test_weight_gradients_without_linear_layers_are_in_the_first_half() -> None:
    vision = vlm().module("vision")
    convolution = replace(vision, layers=(replace(vision.layers[0], linear_bytes=Rates()),))
    assert COSTS.layer(convolution, 0, SIZE, input_grad=True) == LayerTimes(forward_s=5.0, backward_input_s=10.0)


def test_recomputation_repeats_the_forward() -> None:
    vision = vlm().module("vision")
    assert COSTS.repeated_s(vision, 0, SIZE, Recomputation(enable=True)) == 5.0
    assert COSTS.repeated_s(vision, 0, SIZE, Recomputation()) == 0.0
    assert COSTS.repeated_exchange_s(vision, 0, SIZE, Recomputation(enable=True)) == 0.0
    assert COSTS.contention == 1.0


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (["embed", "blocks.0", "blocks.1", "blocks.2"], [0, 1, 1, 1]),
        (["embed", "norm", "projector"], [0, 1, 2]),
    ],
)
def test_layers_are_equal_but_for_their_number(names: list[str], kinds: list[int]) -> None:
    made = tuple(replace(layer, name=name) for layer, name in zip(layers(len(names)), names, strict=True))
    assert equal_layers(ModuleSpec(name="vision", layers=made)) == kinds


def test_layers_that_cost_another_amount_are_not_equal() -> None:
    one, other = layers(2)
    assert equal_layers(ModuleSpec(name="x", layers=(one, replace(other, matmul_flops=Rates(row=2.0)), one))) == [
        0,
        1,
        0,
    ]
