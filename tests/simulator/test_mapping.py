"""Oobleck's mapping: the exact program against all mappings, and against the thesis's divide and conquer."""

import math
import random
from itertools import combinations

import pytest
from templates import divide_and_conquer

from mmtrain.simulator.allocation.mapping import map_stages


def random_layers(rng, num_layers, per_node, step=0.0):
    """[g - 1][layer] -> seconds that fall with GPUs, less than in proportion; in steps, many are equal."""
    base = [rng.uniform(0.2, 2) for _ in range(num_layers)]
    if step:
        base = [step * max(1, round(one / step)) for one in base]
    return [[one / g**0.7 for one in base] for g in range(1, per_node + 1)]


def iteration_s(stages, microbatches):
    """T1 + T2 + T3 of stages' seconds, as the thesis prints it."""
    slowest = stages.index(max(stages))
    steady = microbatches - len(stages) + slowest - 1
    return sum(stages) + steady * stages[slowest] + sum(stages[slowest:])


def gpu_splits(nodes, per_node):
    """All ways to divide the GPUs of each node among consecutive stages."""

    def compositions(total):
        for count in range(total):
            for cuts in combinations(range(1, total), count):
                yield [b - a for a, b in zip((0, *cuts), (*cuts, total), strict=True)]

    splits = [[]]
    for _ in range(nodes):
        splits = [[*one, *more] for one in splits for more in compositions(per_node)]
    return splits


def least_of_all(layers, nodes):
    num_layers, best = len(layers[0]), math.inf
    for gpus in gpu_splits(nodes, len(layers)):
        for cuts in combinations(range(1, num_layers), len(gpus) - 1):
            bounds = zip((0, *cuts), (*cuts, num_layers), strict=True)
            stages = [sum(layers[g - 1][a:b]) for g, (a, b) in zip(gpus, bounds, strict=True)]
            best = min(best, iteration_s(stages, 4 * len(stages)))
    return best


CASES = [(4, 1, 1), (5, 2, 2), (6, 3, 2), (7, 2, 3), (8, 4, 1), (6, 2, 4), (5, 1, 4), (9, 3, 1)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("num_layers", "nodes", "per_node"), CASES)
def test_no_mapping_is_faster(num_layers, nodes, per_node, seed):
    layers = random_layers(random.Random(seed), num_layers, per_node, step=0.5 if seed % 2 else 0.0)
    found = map_stages(layers, nodes)
    seconds = found.seconds(4 * len(found.stages))
    assert seconds == pytest.approx(least_of_all(layers, nodes), rel=1e-9)
    assert seconds == pytest.approx(divide_and_conquer(layers, nodes), rel=1e-9)
    assert [stage.layers[0] for stage in found.stages[1:]] == [stage.layers[1] for stage in found.stages[:-1]]
    assert found.stages[-1].layers[1] == num_layers and found.stages[-1].gpus[1] == nodes * per_node
    for stage in found.stages:
        first, end = stage.gpus
        assert first // per_node == (end - 1) // per_node, "a stage stays in a node"
        assert stage.seconds == pytest.approx(sum(layers[end - first - 1][slice(*stage.layers)]))


def test_layers_that_only_some_numbers_of_gpus_divide():
    layers = [[1.0] * 4, [math.inf] * 4]
    assert [stage.gpus for stage in map_stages(layers, 2).stages] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert map_stages([[math.inf] * 4], 2) is None
    assert map_stages([[1.0] * 4], 5) is None, "a node for each layer, at most"


def test_seconds_of_other_numbers_of_microbatches():
    found = map_stages([[1.0, 1.0, 1.0]], 3)
    assert [found.seconds(count) for count in (3, 4, 12)] == [5.0, 6.0, 14.0], "(P - 1 + m) (f + b)"
