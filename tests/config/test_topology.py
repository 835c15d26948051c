import pytest

from mmtrain.config.topology import MeshShape
from mmtrain.errors import ConfigError


def test_ranks_and_places_are_inverse():
    shape = MeshShape(pp=2, dp_replicate=2, dp_shard=3, tp=2)
    places = [shape.coordinates(rank) for rank in range(shape.world_size)]
    assert len(set(places)) == 24
    assert [shape.rank(place) for place in places] == list(range(24))


def test_pp_is_the_outermost_axis_and_tp_the_innermost():
    shape = MeshShape(pp=2, dp_shard=2, tp=2)
    assert [shape.coordinates(r).pp for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [shape.coordinates(r).tp for r in range(8)] == [0, 1] * 4


def test_dp_rank_counts_replicate_and_shard():
    shape = MeshShape(dp_replicate=2, dp_shard=2)
    assert [shape.dp_rank(r) for r in range(4)] == [0, 1, 2, 3]


def test_a_degree_of_zero_is_refused():
    with pytest.raises(ConfigError, match="the tp degree is 0"):
        MeshShape(tp=0)


def test_wrong_world_size_says_the_product():
    with pytest.raises(ConfigError, match=r"pp=2 \* dp_shard=2 = 4 ranks, but the job has 3"):
        MeshShape(pp=2, dp_shard=2).check_world_size(3)
    MeshShape(pp=2, dp_shard=2).check_world_size(4)


def test_a_rank_outside_is_refused():
    with pytest.raises(ConfigError, match="rank 4 is outside"):
        MeshShape(pp=4).coordinates(4)
