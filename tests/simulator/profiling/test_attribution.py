import pytest

from mmtrain.simulator.profiling.attribution import attribute
from mmtrain.spec.work_size import WorkSize

SIZES = {work: WorkSize(rows=rows, pairs=rows, outputs=rows) for work, rows in enumerate((10, 100, 1000))}
LAYERS = (2e-3, 5e-3, 5e-3, 1e-3)
"""Seconds a row."""


def seconds(work: int) -> list[float]:
    return [rate * SIZES[work].rows for rate in LAYERS]


def test_what_each_stage_costs_beside_its_layer_is_found_again():
    fixed = 0.01
    single = {work: [x + fixed for x in seconds(work)] for work in SIZES}
    joined = {work: sum(seconds(work)) + fixed for work in SIZES}
    found = attribute(SIZES, single, joined, blocks=(1, 2))
    assert found.fixed_s == pytest.approx(fixed)
    for work in SIZES:
        assert found.layers[work] == pytest.approx(seconds(work))


def test_what_a_stage_costs_by_row_is_shared_by_its_layers():
    by_row = 1e-3
    single = {work: [x + 0.01 + by_row * SIZES[work].rows for x in seconds(work)] for work in SIZES}
    joined = {work: sum(seconds(work)) + 0.01 + by_row * SIZES[work].rows for work in SIZES}
    found = attribute(SIZES, single, joined)
    assert found.fixed_s == pytest.approx(0.01)
    assert found.layers[2] == pytest.approx([x * (sum(LAYERS) + by_row) / sum(LAYERS) for x in seconds(2)])


def test_what_the_first_of_equal_layers_does_for_all_is_the_actions():
    once = 0.03
    single = {work: [x + once * (i == 1) for i, x in enumerate(seconds(work))] for work in SIZES}
    joined = {work: sum(seconds(work)) + once for work in SIZES}
    found = attribute(SIZES, single, joined, blocks=(1, 2))
    assert found.fixed_s == pytest.approx(once)
    assert found.layers[0] == pytest.approx(seconds(0))


def test_layers_and_the_fixed_part_add_up_to_the_joined_stage_whatever_is_measured():
    single = {0: [0.5, 0.7, 0.6, 0.1], 1: [5.2, 9.9, 11.0, 2.0], 2: [44.0, 97.0, 99.0, 17.0]}
    joined = {0: 1.5, 1: 27.0, 2: 255.0}
    found = attribute(SIZES, single, joined, blocks=(1, 2))
    for work in SIZES:
        assert sum(found.layers[work]) + found.fixed_s == pytest.approx(joined[work])
        assert min(found.layers[work]) >= 0


def test_a_layer_without_such_an_action_stays_without():
    single = {work: [None, *(x + 0.01 for x in seconds(work)[1:])] for work in SIZES}
    joined = {work: sum(seconds(work)[1:]) + 0.01 for work in SIZES}
    found = attribute(SIZES, single, joined, blocks=(1, 2))
    assert found.layers[1][0] is None
    assert found.layers[1][1:] == pytest.approx(seconds(1)[1:])


def test_one_layer_is_the_whole_stage():
    found = attribute(SIZES, {work: [2.0] for work in SIZES}, dict.fromkeys(SIZES, 2.0))
    assert (found.fixed_s, found.layers[0]) == (0.0, (2.0,))


def test_nothing_measured_is_nothing():
    assert attribute(SIZES, {}, {}).layers == {}
