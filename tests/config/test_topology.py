import pytest

from mmtrain.config.topology import JobLayout
from mmtrain.errors import ConfigError


@pytest.mark.parametrize(
    "layout",
    [
        JobLayout.grid(pp=2, dp_replicate=2, dp_shard=3, tp=2),
        JobLayout(depths=(2, 3), dp_shard=2, cp=2),
        JobLayout(depths=(1, 3, 2), tp=2),
    ],
)
def test_ranks_and_places_are_inverse(layout):
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert len(set(places)) == layout.world_size
    assert [layout.rank(place) for place in places] == list(range(layout.world_size))


def test_a_pipeline_is_the_outermost_axis_then_pp_and_tp_the_innermost():
    layout = JobLayout(depths=(1, 2), dp_shard=2, tp=2)
    assert [layout.coordinates(r).pipeline for r in range(12)] == [0] * 4 + [1] * 8
    assert [layout.coordinates(r).pp for r in range(12)] == [0] * 8 + [1] * 4
    assert [layout.coordinates(r).tp for r in range(12)] == [0, 1] * 6


def test_dp_rank_counts_pipelines_and_shards():
    layout = JobLayout.grid(dp_replicate=2, dp_shard=2)
    assert [layout.dp_rank(r) for r in range(4)] == [0, 1, 2, 3]
    assert [layout.pipeline_of(dp_rank) for dp_rank in range(4)] == [0, 0, 1, 1]
    assert [JobLayout(depths=(2, 3)).dp_rank(r) for r in range(5)] == [0, 0, 1, 1, 1]


def test_groups_differ_in_their_axes_alone():
    layout = JobLayout(depths=(1, 2), tp=2)
    assert layout.groups("pp") == [(0,), (1,), (2, 4), (3, 5)]
    assert layout.groups("pipeline", "pp") == [(0, 2, 4), (1, 3, 5)]
    assert layout.groups("pp", "tp") == [(0, 1), (2, 3, 4, 5)]


def test_a_degree_of_zero_is_refused():
    with pytest.raises(ConfigError, match="the tp degree is 0"):
        JobLayout.grid(tp=0)
    with pytest.raises(ConfigError, match="the pp degree is 0"):
        JobLayout(depths=())


def test_wrong_world_size_says_the_product():
    with pytest.raises(ConfigError, match=r"pp=2 \* dp_shard=2 = 4 ranks, but the job has 3"):
        JobLayout.grid(pp=2, dp_shard=2).check_world_size(3)
    JobLayout.grid(pp=2, dp_shard=2).check_world_size(4)
    with pytest.raises(ConfigError, match=r"\(2 \+ 3 pipeline ranks\) \* tp=2 = 10 ranks, but the job has 8"):
        JobLayout(depths=(2, 3), tp=2).check_world_size(8)


def test_a_rank_outside_is_refused():
    with pytest.raises(ConfigError, match="rank 4 is outside"):
        JobLayout.grid(pp=4).coordinates(4)


def test_a_stage_of_unequal_pipelines_lies_inside_of_a_node():
    JobLayout(depths=(2, 3), dp_shard=2, tp=2).check_nodes(8)
    JobLayout(depths=(2, 3), dp_shard=2, tp=2).check_nodes(20)  # one node
    JobLayout.grid(pp=2, dp_replicate=2, dp_shard=16).check_nodes(8)
    with pytest.raises(ConfigError, match=r"pipelines = \[2, 3\]: a stage has .* = 16 ranks, and a node has 8"):
        JobLayout(depths=(2, 3), dp_shard=8, tp=2).check_nodes(8)
