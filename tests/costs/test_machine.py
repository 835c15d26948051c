import pytest

from mmtrain.config import config
from mmtrain.costs.machine import Machine, NominalNetwork
from mmtrain.costs.operators.cluster import Cluster
from mmtrain.costs.operators.operator_graph import OpKind
from mmtrain.errors import ConfigError
from mmtrain.schedule.problem import P2P


def machine(*overrides: str, name: str = "vlm_s.toml") -> Machine:
    return Machine.of(config.load(name, overrides))


def test_without_a_name_the_machine_is_the_nominal_one() -> None:
    found = machine("planner.device.p2p_bytes_per_s=5.0", "planner.device.p2p_latency_s=0.25")
    assert found.network == NominalNetwork(p2p=P2P(latency_s=0.25, bytes_per_s=5.0))
    assert (found.peak_flops, found.memory_bytes) == (None, None)


def test_a_named_cluster_gives_peak_memory_and_network() -> None:
    found = machine("planner.hardware=h800x16")
    assert found.name == "h800x16"
    assert (found.peak_flops, found.memory_bytes) == (989e12, 80e9)
    assert found.network == Cluster.of("h800x16")
    assert machine("planner.hardware=h800").name == "h800x16"
    assert machine("planner.hardware=h800x16", "training.mixed_precision_param=float32").peak_flops == 67e12
    assert machine("planner.hardware=h800x16", "metrics.peak_flops=1e15").peak_flops == 1e15


@pytest.mark.parametrize("name", ["h800x8", "h800x64"])
def test_a_cluster_of_another_size_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}'.*make 16 ranks.*h800x16"):
        machine(f"planner.hardware={name}")


def test_a_node_that_is_not_full_is_enough() -> None:
    assert machine("planner.hardware=a40x2", name="debug_vlm.toml").name == "a40x2"


def test_a_nominal_collective_is_a_ring() -> None:
    network = NominalNetwork(p2p=P2P(latency_s=0.5, bytes_per_s=10.0))
    assert network.collective_s(OpKind.ALL_GATHER, 80.0, range(4)) == 0.5 + 80 * 3 / 4 / 10
    assert network.collective_s(OpKind.ALL_REDUCE, 80.0, range(4)) == 0.5 + 2 * 80 * 3 / 4 / 10
    assert network.collective_s(OpKind.ALL_GATHER, 80.0, [3]) == 0
