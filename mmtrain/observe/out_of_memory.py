"""What is left behind by a step that ran out of memory: its plan, what was predicted, what was there, and advice."""

import gc
import json
import math
import os
import re
import shutil
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmtrain.config.config import Config
from mmtrain.config.memory_amount import show_gib
from mmtrain.config.sections import MEMORY_STRATEGIES
from mmtrain.errors import MMTrainError
from mmtrain.modality.metadata import IterationMeta, MicrobatchMeta
from mmtrain.parallel.torch_private import dump_cuda_memory
from mmtrain.planner.iteration import IterationPlan
from mmtrain.planner.memory.limit import MemoryBudget
from mmtrain.planner.plan_json import plan_to_json
from mmtrain.schedule.io.strict_json import write_text

FOLDER = "out_of_memory"
"""Inside of job.dump_folder."""

_WORDS = (
    "DefaultCPUAllocator: can't allocate memory",
    "bad_alloc",
    "Cannot allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
_ASKED = (
    re.compile(r"tried to allocate (?P<number>\d+) bytes"),
    re.compile(r"Tried to allocate (?P<number>\d+(?:\.\d+)?) (?P<unit>[KMG]iB)"),
)
_UNITS = {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
_MOST_TENSORS = 100
"""Lines of the table of live tensors."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A step on the rank that ran out of memory."""

    config: Config
    step: int
    rank: int
    pp_rank: int
    device: torch.device
    meta: IterationMeta
    plan: IterationPlan
    budget: MemoryBudget
    measured_bytes: float | None
    """The peak of the step until then; None: not known."""

    @property
    def predicted_bytes(self) -> tuple[float, ...]:
        """[pp_rank]"""
        assert self.plan.result.timeline is not None
        peaks = self.plan.result.timeline.peak_bytes
        return tuple(rank.predicted_bytes(peak) for rank, peak in zip(self.budget.ranks, peaks, strict=True))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had, on an accelerator or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def asked_bytes(error: BaseException) -> float | None:
    """How much the failed allocation wanted; None if the error does not say."""
    for form in _ASKED:
        if match := form.search(str(error)):
            return float(match["number"]) * _UNITS.get(match.groupdict().get("unit") or "", 1.0)
    return None


def explained(error: BaseException, scene: Scene) -> MMTrainError:
    """The error for the user, after what is known of the step was saved under job.dump_folder.

    Never raises: what cannot be saved, on a full disk or without any memory, is said.
    """
    folder = Path(scene.config.job.dump_folder) / FOLDER / f"step_{scene.step}_rank_{scene.rank}"
    try:
        _write(folder, error, scene)
        saved = f"The step's plan, the prediction and a memory snapshot are in {folder}"
    except (OSError, MemoryError, RuntimeError) as fault:
        saved = f"The step's plan could not be saved in {folder}: {type(fault).__name__}: {fault}"
    asked = asked_bytes(error)
    more = f"; {show_gib(asked)} GiB more were asked for" if asked else ""
    return MMTrainError(
        f"step {scene.step}: rank {scene.rank} (pp_rank {scene.pp_rank}) is out of memory{more}. {_amounts(scene)}. "
        f"{advice(scene, asked)}. {saved}"
    )


def _amounts(scene: Scene) -> str:
    mine = scene.budget.ranks[scene.pp_rank]
    limit = (
        f" of planner.memory_limit = {show_gib(mine.limit_bytes)} GiB" if mine.limit_bytes is not None else ", no limit"
    )
    measured = f"; taken until then: {show_gib(scene.measured_bytes)} GiB" if scene.measured_bytes is not None else ""
    return f"Predicted: {show_gib(scene.predicted_bytes[scene.pp_rank])} GiB{limit}{measured}"


def advice(scene: Scene, asked: float | None) -> str:
    """Which option to change, the likeliest first."""
    section, config = scene.config.planner, scene.config
    mine, taken = scene.budget.ranks[scene.pp_rank], (scene.measured_bytes or 0.0) + (asked or 0.0)
    words = []
    if mine.limit_bytes is None and section.activation_memory_gib:
        words.append(f"lower planner.activation_memory_gib (it is {section.activation_memory_gib:g})")
    elif mine.limit_bytes is None:
        words.append('set planner.memory_limit, such as "90%", so that plans keep within it')
    elif scene.measured_bytes is not None and taken <= mine.limit_bytes:
        words.append(
            f"lower planner.memory_limit below {show_gib(taken)}GiB, since the device has no more for this rank"
        )
    else:
        excess = (taken - scene.predicted_bytes[scene.pp_rank]) / mine.limit_bytes
        margin = math.ceil(100 * excess) / 100
        to = f" to {margin:g}" if section.memory_margin < margin < 0.9 else ""
        words.append(
            f"raise planner.memory_margin{to} (it is {section.memory_margin:g}), or lower planner.memory_limit"
        )
    if config.activation_checkpoint.mode == "none":
        if not (section.enable and section.memory):
            words.append('let blocks be recomputed: planner.enable = true, or activation_checkpoint.mode = "full"')
        elif missing := [how for how in MEMORY_STRATEGIES if how not in section.memory_strategies]:
            words.append(f"add {' and '.join(missing)} to planner.memory_strategies")
    size = " or model.encoder.sub_microbatch_size" if config.model.encoder else ""
    words.append(f"lower training.seq_len{size}, or raise parallelism.pipeline_parallel_degree")
    return f"First {words[0]}; {'; '.join(f'or {word}' for word in words[1:])}"


# --------------------------------------------------------------------------------------------- the files


def _write(folder: Path, error: BaseException, scene: Scene) -> None:
    """Writes all files aside, then gives the folder its name."""
    aside = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    _write_snapshot(aside, scene.device)  # while the tensors of the step are still there
    traceback.clear_frames(error.__traceback__)  # and now they need not be
    write_text(aside / "prediction.json", json.dumps(_prediction(error, scene), indent=1) + "\n")
    scene.plan.problem.write(aside / "problem.json.gz")
    write_text(aside / "plan.json", plan_to_json(scene.plan.problem, scene.plan.result))
    program = scene.plan.program
    options = "".join(f"stage {stage}, work {work}: {name}\n" for (stage, work), name in sorted(program.memory.items()))
    (aside / "program.txt").write_text(f"{program}\n\n{options}")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(aside, folder)


def _prediction(error: BaseException, scene: Scene) -> dict[str, Any]:
    budget = scene.budget
    assert scene.plan.result.timeline is not None
    return {
        "step": scene.step,
        "rank": scene.rank,
        "pp_rank": scene.pp_rank,
        "error": str(error).split("\n", 1)[0],
        "asked_bytes": asked_bytes(error),
        "measured_bytes": scene.measured_bytes,
        "predicted_bytes": list(scene.predicted_bytes),
        "planned_activation_bytes": list(scene.plan.result.timeline.peak_bytes),
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
        "batch": [_counts(microbatch) for microbatch in scene.meta.microbatches],
    }


def _counts(microbatch: MicrobatchMeta) -> dict[str, Any]:
    """How much a microbatch is."""
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
    """What held memory: the allocator's blocks on CUDA, for torch's memory viewer; else the process and its tensors."""
    if device.type == "cuda":
        dump_cuda_memory(str(folder / "memory_snapshot.pickle"))
        return
    status = Path("/proc/self/status")
    parts = [status.read_text() if status.exists() else "this system has no /proc/self/status\n"]
    try:
        parts.append(live_tensors(gc.get_objects()))
    except MemoryError:
        parts.append("the live tensors could not be listed: there was no memory for that\n")
    (folder / "memory_snapshot.txt").write_text("\n".join(parts))


def live_tensors(objects: Sequence[object]) -> str:
    """A table of the tensors among some objects, by bytes; each storage counts once, with its largest view."""
    largest: dict[int, tuple[int, int, str]] = {}  # storage -> (numbers of the view, bytes of the storage, words)
    for found in objects:
        if not issubclass(type(found), Tensor):  # isinstance would ask proxies
            continue
        tensor: Any = found
        try:
            storage = tensor.untyped_storage()
            key, size = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # a tensor made of others, which are listed themselves
            continue
        words = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        if size:
            largest[key] = max(largest.get(key, (0, 0, "")), (tensor.numel(), size, words))
    count, total = Counter[str](), Counter[str]()
    for _, size, words in largest.values():
        count[words] += 1
        total[words] += size
    lines = [f"{'GiB':>12s} {'number':>7s}  tensors that Python sees (autograd holds others)"]
    for words, size in sorted(total.items(), key=lambda item: (-item[1], item[0]))[:_MOST_TENSORS]:
        lines.append(f"{show_gib(size):>12s} {count[words]:7d}  {words}")
    lines.append(f"{show_gib(sum(total.values())):>12s} {sum(count.values()):7d}  all")
    return "\n".join(lines) + "\n"
