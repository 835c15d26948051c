"""What a user sees of a run: the log line, the progress bar, tensorboard, metrics.jsonl."""

import io
import json
import logging
import math
import os
import re
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from mmtrain.config.sections import MetricsConfig
from mmtrain.data.questions import Answer
from mmtrain.errors import ConfigError, one_line
from mmtrain.launch.whole_files import write_whole
from mmtrain.observe.answers import log_lines, markdown, num_right
from mmtrain.observe.by_source import SourceTotals
from mmtrain.observe.step_metrics import PlannerMetrics, StepMetrics, Validation
from mmtrain.parallel.titan import TensorBoardLogger, WandBLogger

logger = logging.getLogger("mmtrain")

_PEAK_FLOPS = {  # dense bf16, from the vendors' data sheets
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "B200": 2250e12,
}


def peak_flops(section: MetricsConfig, device: torch.device) -> float:
    """FLOP/s that MFU is measured against: configured, or those of the data sheet of a known accelerator.

    NaN where neither is known. On a CPU it is not measured either: a matrix product at the start of a job measures the
    load of the machine more than the CPU.
    """
    if section.peak_flops:
        return section.peak_flops
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, flops in sorted(_PEAK_FLOPS.items(), key=lambda item: -len(item[0])):
            if re.search(rf"\b{known}\b", name):
                return flops
        logger.warning("unknown device %r: MFU is not known; set metrics.peak_flops", name)
    return math.nan


def memory_gib(device: torch.device) -> tuple[float, float]:
    """(peak memory of this rank in GiB, percent of the device): the allocator's on a GPU, else the process's.

    Since the peak was last reset, which each step of a job does.
    """
    if device.type == "cuda":
        used, total = (
            torch.cuda.max_memory_reserved(device),
            torch.cuda.get_device_properties(device).total_memory,
        )
    else:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return used / 2**30, 100 * used / total


_LINE_KEYS = (
    "step", "loss", "grad_norm", "lr", "step_time_s", "data_time_s", "plan_time_s", "tokens", "images", "image_tokens",
    "sounds", "sound_s", "sound_tokens", "patches", "clips", "frames", "video_tokens", "skipped_samples", "bubble",
    "deferred_samples", "deferred_images", "deferred_gib", "not_deferred", "assignment_s", "unassigned",
    "memory_predicted_gib", "memory_measured_gib", "memory_limit_gib", "program_s", "peak_s", "replica_spread_s",
    "planned_replica_spread_s",
)  # fmt: skip
"""Fields of `StepMetrics` in a line of metrics.jsonl, under the same names."""


class Reporter:
    """Writes a run's metrics; does nothing where it is not enabled."""

    def __init__(
        self,
        section: MetricsConfig,
        folder: Path,
        *,
        enabled: bool,
        steps: int,
        start: int,
        config: dict[str, Any] | None = None,
    ) -> None:
        """Args: config: of the job, for wandb. Raises: ConfigError: wandb cannot start."""
        self._enabled = enabled
        self._board: TensorBoardLogger | None = None
        self._wandb: WandBLogger | None = None
        self._file: TextIO | None = None
        self._bar: Any = None
        if not enabled:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if section.enable_wandb:
            self._wandb = _start_wandb(folder, config)
        self._file = _continue_jsonl(folder / "metrics.jsonl", start)
        if section.enable_tensorboard:
            self._board = TensorBoardLogger(str(folder / section.save_tb_folder))
            _continue_board(self._board, start)
        if section.progress_bar and sys.stderr.isatty():
            self._bar = tqdm(total=steps, initial=start, unit="step", dynamic_ncols=True, file=sys.stderr)

    def step(self, m: StepMetrics, *, quiet: bool = False) -> None:
        """Reports one training step. Args: quiet: to metrics.jsonl only."""
        if not self._enabled:
            return
        tps = m.tokens / m.step_time_s / m.world_size
        items_s = (m.clips or m.images) / m.step_time_s
        item = "clips" if m.clips else "images"
        sounds = f"sounds/s: {m.sounds / m.step_time_s:.1f} ({m.sound_s:.1f}s of sound)  " if m.sounds else ""
        self._line(
            {key: getattr(m, key) for key in _LINE_KEYS}
            | {"tps": tps, "tflops": m.tflops, "mfu": m.mfu}
            | {"makespan_s": m.measured_s, "planned_makespan_s": m.planned_s, "makespan_ratio": m.slowdown}
            | {
                f"{key}_{name}": getattr(module, key)
                for key in ("compute_s", "tflops", "mfu", "bubble", "spread_s", "planned_spread_s")
                for name, module in m.modules.items()
            }
            | ({"bubble_other": m.bubble_other} if m.modules else {})
            | _planner_values(m.planner, "plan_{}")
            | _source_values(m.sources, "{key}/{name}")
        )
        if quiet:
            return
        self._say(
            f"step: {m.step:4d}  loss: {m.loss:7.4f}  grad_norm: {m.grad_norm:7.4f}  "
            f"memory: {m.memory_gib:.2f}GiB({m.memory_percent:.1f}%)  {_memory_text(m)}"
            f"tps: {tps:,.0f}  tflops: {m.tflops:.4f}  "
            + (f"mfu: {100 * m.mfu:.1f}%  " if math.isfinite(m.mfu) else "")
            + (f"{item}/s: {items_s:.1f}  " if items_s or not sounds else "")
            + f"{sounds}bubble: {100 * m.bubble:.0f}%"
            + (f"  {m.planner}" if m.planner else "")
            + _sources_text(m.sources)
        )
        if self._bar is not None:
            self._bar.update(m.step - self._bar.n)
            self._bar.set_postfix(loss=f"{m.loss:.3f}")
        self._scalars(_scalars(m, tps, f"throughput({item}/s)", items_s), m.step)

    def validation(self, step: int, result: Validation) -> None:
        """Reports one validation."""
        if not self._enabled:
            return
        shares = {grade: right / count for grade, (right, count) in sorted(result.accuracy.items()) if count}
        text = "".join(f"  {grade}: {100 * share:.1f}%" for grade, share in shares.items())
        text = f"  accuracy{text}" if text else ""
        shuffled = result.shuffled_loss
        if shuffled is not None:
            text += f"  with shuffled captions: {shuffled:.4f}"
        text += _sources_text(result.sources)
        self._say(f"validate step: {step:4d}  loss: {result.loss:7.4f}{text}")
        losses = {name: totals.loss for name, totals in result.sources.items() if totals.loss is not None}
        extra = {} if shuffled is None else {"validation_metrics/loss_shuffled_captions": shuffled}
        self._scalars(
            {"validation_metrics/loss": result.loss, **extra}
            | {f"validation_metrics/accuracy/{grade}": share for grade, share in shares.items()}
            | {f"validation_metrics/loss/{name}": loss for name, loss in losses.items()},
            step,
        )
        line = {"step": step, "validation_loss": result.loss, "accuracy": shares}
        line |= {} if shuffled is None else {"shuffled_captions_loss": shuffled}
        line |= {"loss_by_source": losses} if losses else {}
        self._line(line | (self._answers(step, result.answers) if result.answers else {}))

    def _answers(self, step: int, answers: Sequence[Answer]) -> dict[str, int]:
        """Reports answers to held-out questions; what metrics.jsonl says of them."""
        for line in log_lines(answers):
            self._say(line)
        right = num_right(answers)
        self._scalars({"validation/exact_match": right / len(answers)}, step)
        if self._board is not None:
            self._board.writer.add_text("validation/answers", markdown(answers), step)
        return {"answers": len(answers), "answers_right": right}

    def image(self, step: int, name: str, make: Callable[[], bytes]) -> None:
        """Shows an image in tensorboard and wandb. Args: make: its PNG file; called only if there is one of them."""
        if self._board is None and self._wandb is None:
            return
        with Image.open(io.BytesIO(make())) as image:
            if self._board is not None:
                self._board.writer.add_image(name, np.asarray(image), step, dataformats="HWC")
            if self._wandb is not None:
                self._wandb.log({name: self._wandb.wandb.Image(image)}, step)

    def close(self) -> None:
        """Flushes and closes all files."""
        for output in (self._board, self._wandb, self._file, self._bar):
            if output is not None:
                output.close()

    def _say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        logger.info(text)

    def _scalars(self, values: Mapping[str, float], step: int) -> None:
        for board in (self._board, self._wandb):
            if board is not None:
                board.log(dict(values), step)

    def _line(self, values: Mapping[str, Any]) -> None:
        assert self._file is not None
        finite = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in values.items()}
        self._file.write(json.dumps(finite) + "\n")  # JSON has no NaN
        self._file.flush()


def _start_wandb(folder: Path, config: dict[str, Any] | None) -> WandBLogger:
    os.environ.setdefault("WANDB_PROJECT", "mmtrain")
    os.environ.setdefault("WANDB_RUN_NAME", folder.name)
    os.environ.setdefault("WANDB_SILENT", "true")  # its lines would come between those of the log
    try:
        return WandBLogger(str(folder), config)
    except Exception as error:  # of its transport, its settings, or a missing account
        raise ConfigError(
            f"metrics.enable_wandb: no run could be started: {one_line(error, 300)}; log in with `wandb login`, or set "
            "WANDB_MODE=offline, which keeps the run in this folder"
        ) from error


def _memory_text(m: StepMetrics) -> str:
    """A step's memory and its limit, for the log line; empty without a limit."""
    if not math.isfinite(m.memory_limit_gib):
        return ""
    measured = f"{m.memory_measured_gib:.2f}" if math.isfinite(m.memory_measured_gib) else "-"
    return f"predicted: {m.memory_predicted_gib:.2f} measured: {measured} of {m.memory_limit_gib:.2f}GiB  "


def _scalars(m: StepMetrics, tps: float, item_tag: str, items_s: float) -> dict[str, float]:
    """The tensorboard scalars of a step; those of memory, utilisation and makespans only where they are known."""
    kind = "video" if m.clips else "image"
    values = {
        "loss_metrics/global_avg_loss": m.loss,
        "loss_metrics/global_max_loss": m.max_loss,
        "grad_norm": m.grad_norm,
        "lr": m.lr,
        "throughput(tps)": tps,
        item_tag: items_s,
        "tflops": m.tflops,
        "time_metrics/end_to_end(s)": m.step_time_s,
        "time_metrics/data_loading(s)": m.data_time_s,
        "time_metrics/data_loading(%)": 100 * m.data_time_s / m.step_time_s,
        "time_metrics/planning(s)": m.plan_time_s,
        "memory/max_reserved(GiB)": m.memory_gib,
        "memory/max_reserved(%)": m.memory_percent,
        "pipeline/bubble(%)": 100 * m.bubble,
        "modality/text/tokens": m.tokens - m.image_tokens - m.sound_tokens - m.video_tokens,
        f"modality/{kind}/tokens": m.video_tokens if m.clips else m.image_tokens,
        f"modality/{kind}/count": m.clips or m.images,
        **({"modality/video/frames": m.frames} if m.clips else {"modality/image/patches": m.patches}),
        **({"modality/audio/count": m.sounds, "modality/audio/seconds": m.sound_s} if m.sounds else {}),
        **({"modality/audio/tokens": m.sound_tokens} if m.sounds else {}),
        "data/skipped_samples": m.skipped_samples,
        **({"pipeline/deferred_images": m.deferred_images} if m.deferred_images or m.not_deferred else {}),
        **({"pipeline/not_deferred": m.not_deferred} if m.deferred_images or m.not_deferred else {}),
    }
    optional = {
        "memory/predicted(GiB)": m.memory_predicted_gib,
        "memory/measured(GiB)": m.memory_measured_gib,
        "memory/limit(GiB)": m.memory_limit_gib,
        "mfu(%)": 100 * m.mfu,
        "pipeline/makespan_measured(s)": m.measured_s,
        "pipeline/makespan_planned(s)": m.planned_s,
        "pipeline/makespan_ratio": m.slowdown,
        "pipeline/bubble_other(%)": 100 * m.bubble_other if m.modules else math.nan,
        "assignment/replica_spread(s)": m.replica_spread_s,
        "assignment/replica_spread_planned(s)": m.planned_replica_spread_s,
        "assignment/seconds": m.assignment_s or math.nan,
        "assignment/deferred_samples": m.deferred_samples or math.nan,
        "assignment/deferred(GiB)": m.deferred_gib or math.nan,
    }
    for name, module in m.modules.items():
        optional[f"modality/{name}/compute(s)"] = module.compute_s
        optional[f"modality/{name}/tflops"] = module.tflops
        optional[f"modality/{name}/mfu(%)"] = 100 * module.mfu
        optional[f"modality/{name}/bubble(%)"] = 100 * module.bubble
        optional[f"modality/{name}/microbatch_spread(s)"] = module.spread_s
        optional[f"modality/{name}/microbatch_spread_planned(s)"] = module.planned_spread_s
    values |= {tag: value for tag, value in optional.items() if math.isfinite(value)}
    return values | _planner_values(m.planner, "planner/{}") | _source_values(m.sources, "sources/{name}/{key}")


def _sources_text(sources: Mapping[str, SourceTotals]) -> str:
    """What the log says of several sources; empty of one."""
    counts = {name: f"{totals.samples} samples" for name, totals in sources.items()}
    losses = {name: totals.loss for name, totals in sources.items()}
    parts = (f"{loss:.4f} ({counts[name]})" if loss is not None else counts[name] for name, loss in losses.items())
    return "".join(f"  {name}: {part}" for name, part in zip(sources, parts, strict=True))


def _source_values(sources: Mapping[str, SourceTotals], pattern: str) -> dict[str, float]:
    """The metrics of several sources, as far as they are known. Args: pattern: of the keys."""
    values = {
        pattern.format(key=key, name=name): getattr(totals, key)
        for key in ("loss", "samples", "tokens")
        for name, totals in sources.items()
    }
    return {key: value for key, value in values.items() if value is not None}


def _planner_values(m: PlannerMetrics | None, name: str) -> dict[str, float]:
    """The planner's metrics; empty if the planner is off. Args: name: pattern of the keys."""
    if m is None:
        return {}
    values = {
        "evaluations": m.evaluations,
        "search_s": m.search_s,
        "makespan_s": m.makespan_s,
        "first_makespan_s": m.first_s,
        "lower_bound_s": m.bound_s,
        "gap": m.gap,
        "late": m.late,
        "failed": m.failed,
        "invalid": m.invalid,
        "age_s": m.age_s,
    }
    return {name.format(key): value for key, value in values.items()}


def _continue_board(board: TensorBoardLogger, start: int) -> None:
    """Makes tensorboard forget the points of older files that a resumed run repeats."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    first = start + 1 if start else 0  # a new run validates before its first step
    board.writer.file_writer.add_event(Event(step=first, session_log=SessionLog(status=SessionLog.START)))


def _continue_jsonl(path: Path, start: int) -> TextIO:
    """The metrics file, opened to append, without the steps that a resumed run repeats."""
    if path.exists():
        kept = []
        for line in path.read_text().splitlines():
            try:
                if start and json.loads(line)["step"] <= start:
                    kept.append(line + "\n")
            except (json.JSONDecodeError, KeyError):
                continue  # truncated by a kill
        write_whole(path, "".join(kept))
    return open(path, "a", encoding="utf-8")
