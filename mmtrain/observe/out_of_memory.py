"""The report of a step that ran out of memory: its plan, predicted and measured memory, live tensors, and advice."""

import gc
import json
import math
import os
import re
import shutil
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmtrain.config.config import Config
from mmtrain.config.memory_amount import show_gib
from mmtrain.config.planner import MEMORY_STRATEGIES
from mmtrain.errors import MMTrainError
from mmtrain.modality.metadata import IterationMeta, MicrobatchMeta
from mmtrain.observe.observer import RunningStep
from mmtrain.observe.step_memory import JobMemory
from mmtrain.parallel.mesh import Mesh
from mmtrain.parallel.torch_private import dump_cuda_memory
from mmtrain.planner.iteration import IterationPlan
from mmtrain.planner.memory.limit import MemoryBudget
from mmtrain.planner.plan_json import plan_to_json
from mmtrain.schedule.io.strict_json import write_text

FOLDER = "out_of_memory"
"""The folder of snapshots, inside of job.dump_folder."""

_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "bad_alloc",
    "Cannot allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
_REQUESTS = (
    re.compile(r"tried to allocate (?P<number>\d+) bytes"),
    re.compile(r"Tried to allocate (?P<number>\d+(?:\.\d+)?) (?P<unit>[KMG]iB)"),
)
_UNITS = {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
_MAX_TENSORS = 100
"""Rows of the table of live tensors."""


@dataclass(frozen=True, kw_only=True)
class OutOfMemoryContext:
    """The step and rank that ran out of memory."""

    config: Config
    step: int
    rank: int
    pp_rank: int
    device: torch.device
    meta: IterationMeta
    plan: IterationPlan
    budget: MemoryBudget
    measured_bytes: float | None
    """The peak of the step until the failure; None: not known."""

    @property
    def predicted_bytes(self) -> tuple[float, ...]:
        """[pp_rank] -> predicted peak of the step."""
        peaks = self.plan.result.timeline.peak_bytes
        return tuple(rank.predicted_bytes(peak) for rank, peak in zip(self.budget.ranks, peaks, strict=True))


@contextmanager
def explained(config: Config, mesh: Mesh, memory: JobMemory, running: RunningStep) -> Iterator[None]:
    """A context in which a step runs, and a failed allocation is explained. Raises: MMTrainError: there was one."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        context = OutOfMemoryContext(
            config=config,
            step=running.step,
            rank=mesh.rank,
            pp_rank=mesh.pp_rank,
            device=mesh.device,
            meta=running.meta,
            plan=running.plan,
            budget=memory.budget(running.step),
            measured_bytes=memory.meter.peak_bytes(),
        )
        raise explain(error, context) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error reports a failed allocation, on an accelerator or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)


def requested_bytes(error: BaseException) -> float | None:
    """Size of the failed allocation; None if the error does not tell."""
    for pattern in _REQUESTS:
        if match := pattern.search(str(error)):
            return float(match["number"]) * _UNITS.get(match.groupdict().get("unit") or "", 1.0)
    return None


def explain(error: BaseException, context: OutOfMemoryContext) -> MMTrainError:
    """The error for the user, after the step's plan and memory were saved under job.dump_folder.

    Never raises: where saving fails (full disk, no memory), the message tells so.
    """
    folder = Path(context.config.job.dump_folder) / FOLDER / f"step_{context.step}_rank_{context.rank}"
    try:
        _write(folder, error, context)
        saved = f"The step's plan, the prediction and a memory snapshot are in {folder}"
    except (OSError, MemoryError, RuntimeError) as fault:
        saved = f"The step's plan could not be saved in {folder}: {type(fault).__name__}: {fault}"
    requested = requested_bytes(error)
    more = f"; {show_gib(requested)} GiB more were requested" if requested else ""
    return MMTrainError(
        f"step {context.step}: rank {context.rank} (pp_rank {context.pp_rank}) is out of memory{more}. "
        f"{_amounts(context)}. {advice(context, requested)}. {saved}"
    )


def _amounts(context: OutOfMemoryContext) -> str:
    rank = context.budget.ranks[context.pp_rank]
    limit = ", no limit"
    if rank.limit_bytes is not None:
        limit = f" of planner.memory_limit = {show_gib(rank.limit_bytes)} GiB"
    measured = (
        f"; used until then: {show_gib(context.measured_bytes)} GiB" if context.measured_bytes is not None else ""
    )
    return f"Predicted: {show_gib(context.predicted_bytes[context.pp_rank])} GiB{limit}{measured}"


def advice(context: OutOfMemoryContext, requested: float | None) -> str:
    """The options to change, the likeliest first. Args: requested: bytes of the failed allocation."""
    section, config = context.config.planner, context.config
    limit_bytes = context.budget.ranks[context.pp_rank].limit_bytes
    used = (context.measured_bytes or 0.0) + (requested or 0.0)
    options = []
    if limit_bytes is None and section.search.activation_memory_gib:
        options.append(f"lower planner.search.activation_memory_gib (it is {section.search.activation_memory_gib:g})")
    elif limit_bytes is None:
        options.append('set planner.memory_limit, such as "90%", so that plans keep within it')
    elif context.measured_bytes is not None and used <= limit_bytes:
        options.append(
            f"lower planner.memory_limit below {show_gib(used)}GiB, since the device has no more for this rank"
        )
    else:
        excess = (used - context.predicted_bytes[context.pp_rank]) / limit_bytes
        margin = math.ceil(100 * excess) / 100
        to = f" to {margin:g}" if section.memory_margin < margin < 0.9 else ""
        options.append(
            f"raise planner.memory_margin{to} (it is {section.memory_margin:g}), or lower planner.memory_limit"
        )
    if config.activation_checkpoint.mode == "none":
        if not (section.enable and section.search.memory):
            options.append('let blocks be recomputed: planner.enable = true, or activation_checkpoint.mode = "full"')
        elif missing := [how for how in MEMORY_STRATEGIES if how not in section.search.memory_strategies]:
            options.append(f"add {' and '.join(missing)} to planner.search.memory_strategies")
    size = " or model.encoder.sub_microbatch_size" if config.model.encoder else ""
    depth = "pipelines" if config.parallelism.pipelines else "pipeline_parallel_degree"
    options.append(f"lower training.seq_len{size}, or raise parallelism.{depth}")
    return f"First {options[0]}; {'; '.join(f'or {option}' for option in options[1:])}"


# --------------------------------------------------------------------------------------------- the files


def _write(folder: Path, error: BaseException, context: OutOfMemoryContext) -> None:
    """Writes all files into a temporary folder, then renames it."""
    aside = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    _write_snapshot(aside, context.device)  # before the tensors of the step are freed
    traceback.clear_frames(error.__traceback__)  # frees them
    write_text(aside / "prediction.json", json.dumps(_prediction(error, context), indent=1) + "\n")
    context.plan.problem.write(aside / "problem.json.gz")
    write_text(aside / "plan.json", plan_to_json(context.plan.result))
    program = context.plan.program
    options = "".join(f"stage {stage}, work {work}: {name}\n" for (stage, work), name in sorted(program.memory.items()))
    (aside / "program.txt").write_text(f"{program}\n\n{options}")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(aside, folder)


def _prediction(error: BaseException, context: OutOfMemoryContext) -> dict[str, Any]:
    budget = context.budget
    return {
        "step": context.step,
        "rank": context.rank,
        "pp_rank": context.pp_rank,
        "error": str(error).split("\n", 1)[0],
        "asked_bytes": requested_bytes(error),
        "measured_bytes": context.measured_bytes,
        "predicted_bytes": list(context.predicted_bytes),
        "planned_activation_bytes": list(context.plan.result.timeline.peak_bytes),
        "memory_limit": budget.amount.text if budget.amount else None,
        "memory": [
            {
                "pp_rank": rank.pp_rank,
                "limit_bytes": rank.limit_bytes,
                "process_bytes": rank.process_bytes,
                "param_bytes": rank.state.param_bytes,
                "grad_bytes": rank.state.grad_bytes,
                "optimizer_bytes": rank.state.optimizer_bytes,
                "reduced_bytes": rank.state.reduced_bytes,
                "margin_bytes": rank.margin_bytes,
                "left_bytes": rank.activation_bytes,
            }
            for rank in budget.ranks
        ],
        "batch": [_counts(microbatch) for microbatch in context.meta.microbatches],
    }


def _counts(microbatch: MicrobatchMeta) -> dict[str, Any]:
    """The sizes of a microbatch."""
    if microbatch.clips:
        return {
            "video_tokens": microbatch.num_video_tokens,
            "text_tokens": microbatch.num_text_tokens,
            "clips": [list(clip.bucket) for clip in microbatch.clips],
        }
    return {
        "tokens": microbatch.num_tokens,
        "targets": microbatch.num_targets,
        "documents": len(microbatch.documents),
        "images": len(microbatch.images),
        "patches": sum(image.num_patches for image in microbatch.images),
    }


def _write_snapshot(folder: Path, device: torch.device) -> None:
    """Writes a CUDA allocator snapshot for torch's memory viewer; on a CPU, the process's status and live tensors."""
    if device.type == "cuda":
        dump_cuda_memory(str(folder / "memory_snapshot.pickle"))
        return
    status = Path("/proc/self/status")
    parts = [status.read_text() if status.exists() else "this system has no /proc/self/status\n"]
    try:
        parts.append(live_tensors(gc.get_objects()))
    except MemoryError:
        parts.append("the live tensors could not be listed: out of memory\n")
    (folder / "memory_snapshot.txt").write_text("\n".join(parts))


def live_tensors(objects: Sequence[object]) -> str:
    """A table of the tensors among some objects, by bytes; each storage counts once, with its largest view."""
    largest: dict[int, tuple[int, int, str]] = {}  # storage -> (elements of the view, bytes, dtype and shape)
    for candidate in objects:
        if not issubclass(type(candidate), Tensor):  # isinstance would call into proxies
            continue
        tensor: Any = candidate
        try:
            storage = tensor.untyped_storage()
            key, size = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # a wrapper of other tensors, which are listed themselves
            continue
        label = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        if size:
            largest[key] = max(largest.get(key, (0, 0, "")), (tensor.numel(), size, label))
    count, total = Counter[str](), Counter[str]()
    for _, size, label in largest.values():
        count[label] += 1
        total[label] += size
    lines = [f"{'GiB':>12s} {'number':>7s}  tensors that Python sees (autograd holds others)"]
    for label, size in sorted(total.items(), key=lambda item: (-item[1], item[0]))[:_MAX_TENSORS]:
        lines.append(f"{show_gib(size):>12s} {count[label]:7d}  {label}")
    lines.append(f"{show_gib(sum(total.values())):>12s} {sum(count.values()):7d}  all")
    return "\n".join(lines) + "\n"
