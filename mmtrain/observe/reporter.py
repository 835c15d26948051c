"""What a user sees of a run: the log line, the progress bar, tensorboard, metrics.jsonl."""

import io
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from mmtrain.config.sections import MetricsConfig
from mmtrain.costs.operators.hardware import hardware_of_device
from mmtrain.data.questions import Answer
from mmtrain.errors import ConfigError, one_line
from mmtrain.observe.answers import log_lines, markdown, num_right
from mmtrain.observe.by_source import SourceTotals
from mmtrain.observe.membership_event import MembershipEvent
from mmtrain.observe.metrics import StepValues
from mmtrain.observe.metrics_history import MetricsHistory
from mmtrain.observe.validation import Validation
from mmtrain.observe.validation_clips import ClipSamples
from mmtrain.parallel.titan import TensorBoardLogger, WandBLogger
from mmtrain.run_page.metric_table import METRICS, source_text

logger = logging.getLogger("mmtrain")


def peak_flops(section: MetricsConfig, device: torch.device) -> float:
    """FLOP/s that MFU is measured against: configured, or the dense bf16 rate of a known accelerator.

    NaN where neither is known. On a CPU it is not measured either: a matrix product at the start of a job measures the
    load of the machine more than the CPU.
    """
    if section.peak_flops:
        return section.peak_flops
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        hardware = hardware_of_device(name)
        if hardware is not None:
            return hardware.bf16_flops_per_s
        logger.warning("unknown device %r: MFU is not known; set metrics.peak_flops", name)
    return math.nan


class Reporter:
    """Writes a run's metrics: rank 0 has one."""

    def __init__(
        self,
        section: MetricsConfig,
        folder: Path,
        *,
        steps: int | None,
        start: int,
        config: dict[str, Any] | None = None,
        generation: int | None = None,
    ) -> None:
        """Args: steps: of the job; None: not known before they are trained. config: of the job, for wandb. generation:
            of an elastic job; None: of another one.

        Raises: ConfigError: wandb cannot start.
        """
        self._generation = generation
        self._board: TensorBoardLogger | None = None
        self._wandb: WandBLogger | None = None
        self._bar: Any = None
        folder.mkdir(parents=True, exist_ok=True)
        if section.enable_wandb:
            self._wandb = _start_wandb(folder, config)
        self._history = MetricsHistory.kept(folder / "metrics.jsonl", start, generation)
        self._file = _appended(folder / "metrics.jsonl")
        if section.enable_tensorboard:
            self._board = TensorBoardLogger(str(folder / "tb"))
            _continue_board(self._board, start)
        if section.progress_bar and sys.stderr.isatty():
            self._bar = tqdm(total=steps, initial=start, unit="step", dynamic_ncols=True, file=sys.stderr)

    def step(self, m: StepValues, *, quiet: bool = False) -> None:
        """Reports one training step. Args: quiet: to metrics.jsonl only."""
        self._line(m.line())
        if quiet:
            return
        self._say(m.text())
        step = int(m["step"])
        if self._bar is not None:
            self._bar.total = max(step, round(m["total_steps"]))
            self._bar.update(step - self._bar.n)
            self._bar.set_postfix(loss=f"{m['loss']:.3f}")
        self._scalars(m.scalars(), step)

    def note(self, values: Mapping[str, float]) -> None:
        """Writes the line of an earlier step, unless metrics.jsonl has it. Args: values: `step` and others by key."""
        if int(values["step"]) > self._history.last_step:
            known = {metric.name for metric in METRICS if not metric.in_file}
            line = {key: value for key, value in values.items() if key not in known}
            self._line(line | {"step": int(values["step"])})  # readers want a whole number

    def membership(self, event: MembershipEvent) -> None:
        """Reports a change of the nodes of an elastic job."""
        self._say(event.text())
        self._line(event.line(time.time()))

    def time_in_steps(self, step_s: float) -> float:
        """The part of the time since the job began that is in finished steps; NaN: it is no elastic job.

        Args: step_s: seconds of a step that has just ended, whose line is not written.
        """
        return self._history.time_in_steps(time.time(), step_s)

    def validation(self, step: int, result: Validation) -> None:
        """Reports one validation."""
        shares, recall = _shares(result.accuracy), _shares(result.recall)
        text = _shares_text("accuracy", shares) + _shares_text("recall", recall)
        own = {name: value for name, value in result.numbers.items() if name != "exact_match"}
        text += "".join(f"  {name}: {value:.4f}" for name, value in own.items())
        best = result.so_far
        text += f"  best: {best.text}" if best.text else ""
        shuffled = result.shuffled_loss
        if shuffled is not None:
            text += f"  with shuffled captions: {shuffled:.4f}"
        text += _sources_text(result.sources)
        self._say(f"validate step: {step:4d}  loss: {result.loss:7.4f}{text}")
        losses = {name: totals.loss for name, totals in result.sources.items() if totals.loss is not None}
        extra = {} if shuffled is None else {"validation_metrics/loss_shuffled_captions": shuffled}
        self._scalars(
            {"validation_metrics/loss": result.loss, **extra}
            | {f"validation_metrics/accuracy{'/' * bool(grade)}{grade}": share for grade, share in shares.items()}
            | {f"validation_metrics/recall/{name}": share for name, share in recall.items()}
            | {f"validation_metrics/loss/{name}": loss for name, loss in losses.items()}
            | {f"validation_metrics/metric/{name}": value for name, value in own.items()},
            step,
        )
        line = {"step": step, "validation_loss": result.loss, "accuracy": shares}
        line |= {"recall": recall} if recall else {}
        line |= {} if shuffled is None else {"shuffled_captions_loss": shuffled}
        line |= {"loss_by_source": losses} if losses else {}
        line |= {"metric": own} if own else {}
        line |= {"best": best.best, "best_step": best.best_step, "best_by": best.figure} if best.text else {}
        line |= self._answers(step, result.answers) if result.answers else {}
        self._line(line | (self._samples(step, result.samples) if result.samples is not None else {}))

    def _samples(self, step: int, samples: ClipSamples) -> dict[str, int]:
        """Reports clips for held-out prompts; what metrics.jsonl says of them."""
        self.image(step, "validation/samples", samples.png)
        verdict = samples.verdict
        if verdict is None:
            return {}
        self._say(f"samples: {verdict.text()}")
        self._scalars({"validation/samples_right": verdict.right / verdict.num_clips}, step)
        return {"samples_judged": verdict.num_clips, "samples_right": verdict.right}

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
        of_generation = {} if self._generation is None else {"generation": self._generation}
        finite = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in values.items()}
        line = finite | of_generation
        self._history.take(line)
        self._file.write(json.dumps(line) + "\n")  # JSON has no NaN
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


def _shares(counts: Mapping[str, tuple[int, int]]) -> dict[str, float]:
    """Name -> part of what was looked for that was right. Args: counts: name -> (right, all)."""
    return {name: right / count for name, (right, count) in sorted(counts.items()) if count}


def _shares_text(what: str, shares: Mapping[str, float]) -> str:
    """What the log says of shares; empty without any. The only one may have no name: of records without grades."""
    if set(shares) == {""}:
        return f"  {what}: {100 * shares['']:.1f}%"
    text = "".join(f"  {name or 'no grade'}: {100 * share:.1f}%" for name, share in shares.items())
    return f"  {what}{text}" if text else ""


def _sources_text(sources: Mapping[str, SourceTotals]) -> str:
    """What the log says of several sources; empty of one."""
    return "".join(f"  {source_text(name, totals.samples, totals.loss)}" for name, totals in sources.items())


def _continue_board(board: TensorBoardLogger, start: int) -> None:
    """Makes tensorboard forget the points of older files that a resumed run repeats."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    first = start + 1 if start else 0  # a new run validates before its first step
    board.writer.file_writer.add_event(Event(step=first, session_log=SessionLog(status=SessionLog.START)))


def _appended(path: Path) -> TextIO:
    return open(path, "a", encoding="utf-8")
