"""What is an error of memory, how much was asked for, what to change, and the table of tensors."""

import dataclasses
import gc
from pathlib import Path

import pytest
import torch

from mmtrain.config import config
from mmtrain.modality.typical import TypicalSizes
from mmtrain.observe.out_of_memory import (
    OutOfMemoryContext,
    advice,
    explain,
    is_out_of_memory,
    live_tensors,
    requested_bytes,
)
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.memory.limit import MemoryRule
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.workloads import draw

GIB = 2**30
CUDA_WORDS = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.2 GiB"


def too_much() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**58, dtype=torch.uint8)
    return caught.value


def test_errors_of_memory_are_known_with_their_amount():
    error = too_much()
    assert is_out_of_memory(error)
    assert requested_bytes(error) == 2**58
    cuda = torch.OutOfMemoryError(CUDA_WORDS)
    assert is_out_of_memory(cuda)
    assert requested_bytes(cuda) == 2.5 * GIB
    assert is_out_of_memory(MemoryError())
    assert requested_bytes(MemoryError()) is None


def test_other_errors_are_not():
    assert not is_out_of_memory(RuntimeError("Connection closed by peer [127.0.0.1]:1234"))
    assert not is_out_of_memory(ValueError("std::bad_alloc"))


def context(folder: Path, *overrides: str, measured: float | None = 1.0 * GIB) -> OutOfMemoryContext:
    """The first step of the debug job, on its second rank."""
    job = config.load("debug_vlm.toml", [f"job.dump_folder={folder}", *overrides])
    planner = IterationPlanner(make_job(job))
    meta = draw("mix", TypicalSizes.of(job, 112), seed=0, iteration=0)
    return OutOfMemoryContext(
        config=job,
        step=7,
        rank=1,
        pp_rank=1,
        device=torch.device("cpu"),
        meta=meta,
        plan=planner.plan(meta),
        budget=MemoryRule.of(job).budget(planner.job.spec, planner.job.partition, 0.25 * GIB),
        measured_bytes=measured,
    )


def test_the_first_advice_follows_from_what_went_wrong(tmp_path):
    assert advice(context(tmp_path), 0.5 * GIB).startswith('First set planner.memory_limit, such as "90%"')
    limit = "planner.memory_limit=2GiB"
    # The device had less than the limit says.
    assert advice(context(tmp_path, limit), 0.5 * GIB).startswith("First lower planner.memory_limit below 1.50GiB")
    # The step wanted more than was predicted: 2.2 of 2 GiB, predicted 0.3.
    words = advice(context(tmp_path, limit, measured=2.1 * GIB), 0.1 * GIB)
    assert words.startswith("First raise planner.memory_margin (it is 0.05), or lower planner.memory_limit")
    tight = context(tmp_path, limit, "planner.memory_margin=0.01", measured=1.9 * GIB)
    raised = dataclasses.replace(tight, budget=tight.budget.with_process(1.8 * GIB))
    assert advice(raised, 0.2 * GIB).startswith("First raise planner.memory_margin to 0.15 (it is 0.01)")


def test_advice_names_only_what_the_job_has_not_done(tmp_path):
    assert "or add offload to planner.search.memory_strategies" in advice(context(tmp_path), None)
    every = context(tmp_path, 'planner.search.memory_strategies=["keep", "selective", "recompute", "offload"]')
    assert "memory_strategies" not in advice(every, None)
    off = advice(context(tmp_path, "planner.enable=false"), None)
    assert 'or let blocks be recomputed: planner.enable = true, or activation_checkpoint.mode = "full"' in off
    full = advice(context(tmp_path, "planner.enable=false", "activation_checkpoint.mode=full"), None)
    assert "recomputed" not in full
    assert "lower training.seq_len or model.encoder.sub_microbatch_size, or raise parallelism" in full


def test_what_is_left_behind_replaces_what_was_there(tmp_path):
    for text in ("old", "new"):
        (tmp_path / "out_of_memory" / "step_7_rank_1").mkdir(parents=True, exist_ok=True)
        (tmp_path / "out_of_memory" / "step_7_rank_1" / text).touch()
    error = explain(too_much(), context(tmp_path))
    assert "step 7: rank 1 (pp_rank 1) is out of memory; 268435456 GiB more were requested. Predicted: 0.2" in str(
        error
    )
    (folder,) = (tmp_path / "out_of_memory").iterdir()
    assert folder.name == "step_7_rank_1"
    assert not (folder / "old").exists()
    assert (folder / "program.txt").read_text().strip()


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "out_of_memory").touch()
    assert "The step's plan could not be saved in" in str(explain(too_much(), context(tmp_path)))


def test_each_storage_counts_once():
    whole = torch.zeros(1024, 256)
    parts = [whole[0], whole[1:3], torch.zeros(2, 128)]
    lines = live_tensors([whole, *parts, "text", gc]).splitlines()
    assert lines[1].split() == ["0.000977", "1", "float32", "[1024,", "256]"]
    assert lines[2].split() == ["0.000000954", "1", "float32", "[2,", "128]"]
    assert lines[3].split()[1:] == ["2", "all"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_real_error_on_a_gpu_leaves_the_allocators_blocks(tmp_path):
    held = torch.ones(1024, device="cuda")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    assert requested_bytes(caught.value) == pytest.approx(2**50, rel=0.01)
    explain(caught.value, dataclasses.replace(context(tmp_path), device=held.device))
    assert (tmp_path / "out_of_memory" / "step_7_rank_1" / "memory_snapshot.pickle").stat().st_size > 0
