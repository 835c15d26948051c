import dataclasses
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mmtrain.costs.operators.hardware import DeviceLink, Efficiency, Hardware, Tiles, load_hardware
from mmtrain.costs.operators.latency import Latencies, attention_efficiency, product_efficiency
from mmtrain.costs.operators.operator_graph import Device, DeviceKind, Graph, Operator, OpKind, Phase, ProductShape
from mmtrain.spec.work_size import Rates, WorkSize

TILES = Tiles(units=10, rows=100, columns=10, fill=50, keys=64)
MACHINE = Hardware(
    name="test",
    compute=DeviceKind.GPU,
    bf16_flops_per_s=1000.0,
    fp32_flops_per_s=100.0,
    memory_bytes_per_s=10.0,
    memory_bytes=1e9,
    gpus_per_node=8,
    launch_s=0.25,
    links={kind: DeviceLink(bytes_per_s=20.0, latency_s=0.5) for kind in DeviceKind if not kind.computes},
    tiles=TILES,
    efficiency={
        "norm": Efficiency(compute=0.5, memory=0.5),
        "norm.backward_input": Efficiency(memory=0.25),
        "all_gather": Efficiency(network=0.5),
    },
)
NO_SIZE = WorkSize(rows=0, pairs=0, outputs=0)


def seconds(op: Operator, size: WorkSize = NO_SIZE, **more: object) -> float:
    return float(Latencies(MACHINE, **more)(Graph(operators=(op,)), size)[0])  # type: ignore[arg-type]


def product(m: float, n: float, k: float, tiles: Tiles = TILES) -> float:
    return float(product_efficiency(np.array([m]), np.array([n]), np.array([k]), tiles)[0])


def test_the_slowest_of_computing_memory_and_network_counts() -> None:
    norm = Operator(name="x", kind=OpKind.NORM, flops=Rates(fixed=1000.0), mem_bytes=Rates(fixed=1.0))
    assert seconds(norm) == 2.0 + 0.25
    assert seconds(dataclasses.replace(norm, mem_bytes=Rates(fixed=50.0))) == 10.0 + 0.25
    assert seconds(dataclasses.replace(norm, launches=4)) == 2.0 + 1.0
    gather = Operator(name="x", kind=OpKind.ALL_GATHER, device=Device(DeviceKind.NVLINK), net_bytes=Rates(fixed=30.0))
    assert seconds(gather) == 3.0 + 0.5


def test_launches_and_fixed_amounts_count_for_each_call() -> None:
    norm = Operator(name="x", kind=OpKind.NORM, mem_bytes=Rates(fixed=5.0, row=1.0), launches=2, each_call=True)
    three = WorkSize(rows=30, pairs=0, outputs=0, clips=9, calls=3)
    assert seconds(norm, three) == pytest.approx(3 * (15.0 / 5.0 + 0.5))
    assert seconds(dataclasses.replace(norm, each_call=False), three) == pytest.approx(35.0 / 5.0 + 0.5)
    shape = ProductShape(m=Rates(row=1.0), n=Rates(fixed=10.0), k=Rates(fixed=50.0))
    wide = Operator(name="x", kind=OpKind.MATMUL, flops=Rates(row=1000.0), shape=shape, launches=0, each_call=True)
    # Three results of 100 x 10 need one tile each, and run alone.
    assert seconds(wide, WorkSize(rows=300, pairs=0, outputs=0, clips=9, calls=3)) == pytest.approx(
        3 * seconds(wide, WorkSize(rows=100, pairs=0, outputs=0, clips=3, calls=1))
    )


def test_amounts_follow_the_work() -> None:
    op = Operator(
        name="x",
        kind=OpKind.MATMUL,
        mem_bytes=Rates(fixed=1.0, row=2.0, pair=3.0, output=4.0, window_pair=5.0),
        launches=0,
    )
    assert seconds(op, WorkSize(rows=1, pairs=2, outputs=3, window_pairs=4)) == pytest.approx(
        (1 + 2 + 6 + 12 + 20) / 10
    )


def test_a_phase_may_have_its_own_factors() -> None:
    op = Operator(name="x", kind=OpKind.NORM, mem_bytes=Rates(fixed=5.0), launches=0)
    assert seconds(op) == 1.0
    assert seconds(dataclasses.replace(op, phase=Phase.BACKWARD_INPUT)) == 2.0


def test_a_rule_overrides_the_rates() -> None:
    op = Operator(name="x", kind=OpKind.NORM, mem_bytes=Rates(fixed=5.0), launches=0)
    assert seconds(op, rule=lambda op, size, by_rates: 3 * by_rates + size.rows) == 3.0
    assert seconds(op, links={}, dtype_bytes=4) == 1.0


def test_wide_numbers_compute_at_their_own_rate() -> None:
    op = Operator(name="x", kind=OpKind.MATMUL, flops=Rates(fixed=1000.0), launches=0)
    assert (seconds(op), seconds(op, dtype_bytes=4)) == (1.0, 10.0)


def test_links_may_be_replaced() -> None:
    op = Operator(name="x", kind=OpKind.P2P, device=Device(DeviceKind.NETWORK), net_bytes=Rates(fixed=40.0))
    assert seconds(op) == 2.5
    assert seconds(op, links={DeviceKind.NETWORK: DeviceLink(bytes_per_s=40.0, latency_s=0.0)}) == 1.0


def test_tiles_and_waves_and_depth() -> None:
    deep = 1e12
    assert product(1000, 10, deep) == pytest.approx(1.0)  # ten tiles on ten processors
    assert product(1100, 10, deep) == pytest.approx(0.55)  # eleven: a second wave for one
    assert product(950, 10, deep) == pytest.approx(0.95)  # the last tile is half empty
    assert product(1000, 10, 50) == pytest.approx(0.5)  # as many steps to start and end as to run
    assert product(100, 10, deep) == pytest.approx(0.1)  # one tile on ten processors
    assert product(100, 10, deep, dataclasses.replace(TILES, most_splits=8)) == pytest.approx(0.8)


def test_more_rows_come_nearer_to_the_full_rate() -> None:
    tiles = load_hardware("h800").tiles
    small, large = product(16, 4096, 4096, tiles), product(65536, 4096, 4096, tiles)
    assert small < 0.7 < 0.95 < large <= 1


def test_attention_to_few_keys_is_slower() -> None:
    found = attention_efficiency(np.array([10.0, 10.0, 0.0]), np.array([320.0, 32e6, 0.0]), TILES)
    assert found[0] == pytest.approx(0.5)
    assert found[1] == pytest.approx(1.0, abs=1e-4)
    assert found[2] == 1.0


def test_products_are_slowed_and_the_rest_is_not() -> None:
    shape = ProductShape(m=Rates(row=1.0), n=Rates(fixed=10.0), k=Rates(fixed=50.0))
    op = Operator(name="x", kind=OpKind.MATMUL, flops=Rates(fixed=1000.0), shape=shape, launches=0)
    ops = (op, dataclasses.replace(op, shape=None))
    latencies, graph = Latencies(MACHINE), Graph(operators=ops)
    assert latencies(graph, WorkSize(rows=1000, pairs=0, outputs=0)).tolist() == pytest.approx([2.0, 1.0])
    assert latencies(graph, WorkSize(rows=100, pairs=0, outputs=0)).tolist() == pytest.approx([20.0, 1.0])


def test_threads_that_price_works_at_the_same_time_get_their_own_seconds() -> None:
    norm = Operator(name="x", kind=OpKind.NORM, mem_bytes=Rates(row=1.0))
    latencies, graph = Latencies(MACHINE), Graph(operators=(norm,))

    def price(rows: int) -> set[float]:
        return {float(latencies(graph, WorkSize(rows=rows, pairs=0, outputs=0))[0]) for _ in range(40_000)}

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(price, (50, 500))) == [{10.0 + 0.25}, {100.0 + 0.25}]
    finally:
        sys.setswitchinterval(before)
