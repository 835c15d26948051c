"""Peaks of single steps, and what all ranks agree on before their models are there."""

import math

import pytest
import torch

from mmtrain.observe import step_memory
from mmtrain.observe.step_memory import ROUNDED_TO_BYTES, DeviceMemory, PeakMeter, in_gib
from tests.ranks import run_ranks

MIB = 2**20


def peak(meter: PeakMeter, num_bytes: int) -> float:
    """Of a step that takes a tensor of some bytes for a while."""
    meter.start()
    tensor = torch.ones(num_bytes // 4)
    del tensor
    found = meter.peak_bytes()
    assert found is not None
    return found


def test_a_peak_on_a_cpu_is_that_of_one_step():
    meter = PeakMeter(torch.device("cpu"), process_bytes=123.0)
    small = peak(meter, 4)
    assert small > 10 * MIB  # the process itself
    large = peak(meter, 256 * MIB)
    assert large - small == pytest.approx(256 * MIB, rel=0.1)
    assert peak(meter, 4) < small + 64 * MIB


def test_a_system_without_peaks_of_a_step_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(step_memory, "_RESET", tmp_path / "nowhere" / "clear_refs")
    meter = PeakMeter(torch.device("cpu"), process_bytes=0.0)
    meter.start()
    assert meter.peak_bytes() is None
    assert math.isnan(in_gib(None))


def agreed(rank):
    ballast = torch.ones(300 * MIB // 4) if rank else None
    found = DeviceMemory.agreed(torch.device("cpu"), num_ranks=1 + rank)
    del ballast
    return found


@pytest.mark.ranks
def test_ranks_agree_on_the_smallest_device_and_the_largest_process():
    alone, (one, two) = run_ranks(agreed, 1)[0], run_ranks(agreed, 2)
    assert one == two
    assert one.device_bytes == pytest.approx(alone.device_bytes / 2)
    assert one.process_bytes - alone.process_bytes == pytest.approx(300 * MIB, abs=2 * ROUNDED_TO_BYTES)
    assert one.process_bytes % ROUNDED_TO_BYTES == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_peak_on_a_gpu_is_the_allocators_beside_the_context():
    meter = PeakMeter(torch.device("cuda", 0), process_bytes=500 * MIB)
    meter.start()
    before = torch.cuda.memory_allocated()
    tensor = torch.ones(64 * MIB, device="cuda")
    del tensor
    free, total = torch.cuda.mem_get_info()
    outside = max(500 * MIB, total - free - torch.cuda.memory_reserved())
    assert meter.peak_bytes() == pytest.approx(before + 256 * MIB + outside, abs=64 * MIB)
    meter.start()
    assert meter.peak_bytes() == pytest.approx(before + outside, abs=64 * MIB)
