"""The layouts of elastic jobs, and which node takes which position."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmtrain.config import config
from mmtrain.errors import ConfigError
from mmtrain.simulator.allocation.compositions import Composition, Templates
from mmtrain.simulator.allocation.node_layouts import ElasticLayouts, TooFewNodes
from mmtrain.simulator.allocation.node_positions import first_best, node_positions

GIB = 2**30


def layouts(*words, ranks_per_node=1, name="debug_vlm.toml", **memory):
    one = [f"parallelism.{axis}_degree=1" for axis in ("pipeline_parallel", "data_parallel_replicate")]
    job = config.load(name, [*one, "elastic.enable=true", *words])
    return ElasticLayouts(config=job, ranks_per_node=ranks_per_node, **memory)


def depths(made, nodes, before=None):
    found = made.layout(nodes, before)
    assert isinstance(found, Composition), found
    return found.depths


# ------------------------------------------------------------------------------------------------- layouts


def test_nodes_become_pipelines_of_at_least_n_0_nodes():
    made = layouts("elastic.min_nodes=2", "training.global_batch_size=16")
    assert depths(made, 4) == (2, 2)
    assert depths(made, 5) == (2, 3)
    assert depths(made, 6) == (2, 2, 2)


def test_a_pipeline_has_all_stages_of_its_nodes():
    made = layouts("elastic.min_nodes=1", "parallelism.tensor_parallel_degree=2", ranks_per_node=4)
    found = made.layout(2)
    assert (found.depths, found.nodes) == ((2, 2), (1, 1))


def test_an_answer_does_not_depend_on_earlier_questions():
    def made():
        return layouts("elastic.min_nodes=1", "training.global_batch_size=13", "elastic.max_failures=1")

    used, before, answers = made(), None, []
    for nodes in (9, 8, 9, 7, 5, 4, 3, 2, 6):
        answers.append((nodes, before, used.layout(nodes, before)))
        before = answers[-1][2].depths
    for nodes, before, found in reversed(answers):
        assert made().layout(nodes, before) == found


@pytest.mark.parametrize("batch", [4, 7, 16, 33])
def test_no_composition_of_all_templates_is_faster(batch):
    made = layouts(f"training.global_batch_size={batch}", "elastic.max_failures=1")
    for nodes in range(2, 8):
        best = made.layout(nodes)
        sizes = range(1, min(4, nodes - 1) + 1)  # debug_vlm can be cut into 4
        templates = Templates(
            templates=tuple(made._template(number) for number in sizes),
            max_failures=1,
            microbatches=batch,
            max_nodes=nodes,
            layer_bytes=made.layer_bytes,
        )
        assert best.seconds == templates.best(nodes).seconds
        assert sum(best.microbatches) == batch and sum(best.nodes) <= nodes and len(best.nodes) >= 2


def test_after_a_loss_pipelines_that_are_whole_stay_where_that_is_about_as_fast():
    made = layouts("elastic.min_nodes=2", "training.global_batch_size=12")
    assert depths(made, 6, before=(2, 2, 2)) == (2, 2, 2)
    assert 2 in depths(made, 5, before=(2, 2, 2))


def test_nodes_beyond_the_microbatches_or_the_layers_are_idle():
    made = layouts("training.global_batch_size=2")
    found = made.layout(12)
    assert len(found.depths) == 2 and max(found.depths) <= 4
    placed = made.placed(found, [f"n{index:02}" for index in range(12)], {})
    assert len(placed.idle) == 12 - sum(found.depths) and placed.nodes + placed.idle == tuple(
        f"n{index:02}" for index in range(12)
    )


def test_too_few_nodes_for_f_and_one_pipelines():
    words = ["elastic.min_nodes=2", "elastic.max_failures=2"]
    found = layouts(*words).layout(5)
    assert isinstance(found, TooFewNodes)
    assert found.reason == (
        "5 nodes, but 3 pipelines (elastic.max_failures + 1) of at least 2 need 6; add nodes, or set elastic.below = "
        '"go_on"'
    )
    going_on = layouts(*words, "elastic.below=go_on")
    assert depths(going_on, 5) == (2, 2) and depths(going_on, 3) == (3,) and depths(going_on, 2) == (2,)
    none = going_on.layout(1)
    assert none == TooFewNodes(reason="1 node, but the smallest pipeline needs 2; add nodes")


def test_n_0_is_the_fewest_nodes_into_whose_memory_a_pipeline_fits():
    words = ["planner.memory_limit=32MiB", "planner.memory_margin=0.0", "elastic.max_failures=0"]
    fewest = {mib: layouts(*words, process_bytes=mib * 2**20).smallest(4) for mib in (0, 4, 20)}
    assert fewest == {0: 1, 4: 2, 20: 4}
    found = layouts(*words, process_bytes=24 * 2**20).layout(3)
    assert isinstance(found, TooFewNodes)
    assert found.reason.startswith("no pipeline fits into the memory of 3 nodes; add nodes (planner.memory_limit")
    with pytest.raises(ConfigError, match="leaves pp_rank"):
        layouts(*words, "elastic.min_nodes=1", process_bytes=24 * 2**20).layout(3)


def test_a_part_of_a_device_is_a_limit_once_its_memory_is_known():
    words = ["planner.memory_limit=50%", "planner.memory_margin=0.0"]
    assert layouts(*words).smallest(4) == 1
    assert layouts(*words, device_bytes=GIB).smallest(4) == 1
    assert isinstance(layouts(*words, device_bytes=2**20).smallest(4), TooFewNodes)


@pytest.mark.parametrize("name", ["debug_sound.toml", "debug_t2v.toml", "debug_text.toml", "debug_siglip_llama.toml"])
def test_models_of_each_kind_have_layouts(name):
    made = layouts("training.global_batch_size=8", "elastic.max_failures=0", "elastic.min_nodes=2", name=name)
    assert depths(made, 2) == (2,)


def test_known_hardware_adds_the_sums_between_pipelines():
    two = "parallelism.tensor_parallel_degree=2"
    known = layouts("planner.hardware=h800", two, ranks_per_node=4)
    assert known.layout(2).sums_s > 0 == layouts(two, ranks_per_node=4).layout(2).sums_s


def test_placements_of_two_ranks_have_them_in_each_pipeline():
    made = layouts("planner.placement=parallel")
    assert made.smallest(5) == 2 and depths(made, 4) == (2, 2)


@pytest.mark.parametrize(
    ("words", "ranks", "message"),
    [
        (["parallelism.data_parallel_shard_degree=2"], 3, "dp_shard 2 x cp 1 x tp 1 = 2 ranks, and a node has 3"),
        (["parallelism.tensor_parallel_degree=4"], 2, "dp_shard 1 x cp 1 x tp 4 = 4 ranks, and a node has 2"),
        ([], 8, "elastic: a pipeline of 8 stages, on nodes of 8 ranks: model.encoder.num_segments"),
    ],
)
def test_nodes_that_have_no_stages_are_refused(words, ranks, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        layouts(*words, ranks_per_node=ranks).layout(2)
    assert "\n" not in str(raised.value)


# ----------------------------------------------------------------------------------------------- positions

MATRICES = st.integers(1, 5).flatmap(
    lambda columns: st.integers(1, columns).flatmap(
        lambda rows: st.lists(
            st.lists(st.integers(0, 3) | st.integers(0, 2**46), min_size=columns, max_size=columns),
            min_size=rows,
            max_size=rows,
        )
    )
)


@settings(max_examples=300, deadline=None)
@given(MATRICES)
def test_positions_are_the_first_of_the_best(matrix):
    rows, columns = range(len(matrix)), range(len(matrix[0]))
    all_choices = itertools.permutations(columns, len(matrix))
    best = min(all_choices, key=lambda choice: (-sum(matrix[row][choice[row]] for row in rows), choice))
    assert first_best(np.array(matrix, np.int64)) == list(best)


def test_without_state_nodes_go_by_name():
    wanted = [{("language", 0)}, {("language", 1)}]
    assert node_positions(wanted, ["c", "a", "b"], {}) == ("a", "b")


def test_nodes_keep_what_they_hold_and_a_newcomer_takes_the_rest():
    first, second, third = (frozenset({("language", index)}) for index in range(3))
    held = {"a": {("language", 2): 5}, "b": {("language", 0): 5, ("vision", 0): 100}}
    assert node_positions([first, second, third], ["a", "new", "b"], held) == ("b", "new", "a")
    both = {"a": {("language", 0): 3, ("language", 1): 4}, "b": {("language", 0): 5, ("language", 1): 5}}
    assert node_positions([first, second], ["a", "b"], both) == ("b", "a")  # 5 + 4 bytes stay, not 3 + 5


def test_a_layout_names_nodes_in_the_order_of_their_ranks():
    made = layouts("elastic.min_nodes=2")
    found = made.layout(4)
    jobs = made.jobs(found.depths)
    last = {(stage.module, layer): 9 for stage in jobs[0].partition.of_rank(1) for layer in range(*stage.layers)}
    placed = made.placed(found, ["d", "c", "b", "a"], {"a": last, "b": last})
    assert (placed.depths, placed.nodes, placed.idle) == ((2, 2), ("c", "a", "d", "b"), ())
