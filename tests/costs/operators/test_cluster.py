import pytest

from mmtrain.costs.operators.cluster import Cluster, sent_bytes
from mmtrain.costs.operators.operator_graph import DeviceKind, OpKind
from mmtrain.errors import ConfigError


def test_names_of_clusters() -> None:
    found = Cluster.of("h800x16")
    assert (found.hardware.name, found.num_gpus, found.num_nodes) == ("h800", 16, 2)
    assert Cluster.of("h800", 4).num_gpus == 4
    assert Cluster.of("h800", 9).num_gpus == 16
    assert Cluster.of("a40x2").num_nodes == 1


def test_a_file_has_a_size_too(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "mine.toml").write_text('extends = "h800"\ngpus_per_node = 4\n')
    assert Cluster.of(f"{tmp_path}/mine.tomlx12").num_nodes == 3


@pytest.mark.parametrize("name", ["h800x12", "h800x0"])
def test_nodes_are_full(name: str) -> None:
    with pytest.raises(ConfigError, match="a node has 8 of them"):
        Cluster.of(name)


def test_unknown_hardware_is_named() -> None:
    with pytest.raises(ConfigError, match='hardware "h900x8" does not exist'):
        Cluster.of("h900x8")


def test_nvlink_inside_of_a_node_and_the_network_between_nodes() -> None:
    found = Cluster.of("h800x16")
    assert found.device(range(8)) is DeviceKind.NVLINK
    assert found.device([7, 8]) is DeviceKind.NETWORK
    assert found.device([3]) is DeviceKind.NVLINK
    assert found.link(range(4)).bytes_per_s == 200e9


def test_ranks_of_one_node_send_over_their_own_cards() -> None:
    found = Cluster.of("h800x16")
    assert found.link([0, 8]).bytes_per_s == 50e9
    assert found.link([0, 1, 8, 9]).bytes_per_s == 100e9
    assert found.link(range(16)).bytes_per_s == 200e9  # eight cards, but no faster than NVLink


def test_a_ring_sends_all_parts_but_its_own() -> None:
    assert sent_bytes(OpKind.ALL_GATHER, 800.0, 8) == 700.0
    assert sent_bytes(OpKind.REDUCE_SCATTER, 800.0, 4) == 600.0
    assert sent_bytes(OpKind.ALL_REDUCE, 800.0, 2) == 800.0


def test_collectives_take_latency_and_bytes() -> None:
    found = Cluster.of("h800x16")
    assert found.collective_s(OpKind.ALL_GATHER, 1e9, [0]) == 0.0
    assert found.collective_s(OpKind.ALL_GATHER, 1e9, range(8)) == pytest.approx(1.5e-5 + 0.875e9 / (0.75 * 200e9))
    assert found.collective_s(OpKind.ALL_REDUCE, 1e9, [0, 8]) == pytest.approx(3e-5 + 1e9 / (0.75 * 50e9))
