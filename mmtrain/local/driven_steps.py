"""Training steps that a caller drives one by one, for comparisons and measurements: no record, no checkpoints."""

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mmtrain.modality.metadata import IterationMeta
from mmtrain.models.batch import Batch
from mmtrain.parallel.batch_runner import StepResult
from mmtrain.parallel.replica_data import Item
from mmtrain.parallel.runtime import StepOutcome
from mmtrain.planner.iteration import IterationPlan
from mmtrain.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """The times of one training step on one rank, seconds on a clock of the host."""

    plan: IterationPlan
    outcome: StepOutcome
    start_s: float
    """The time at which all ranks were there."""
    end_s: float
    """The time at which weights were updated; on an accelerator with all its work done."""


def gradients(
    trainer: Trainer,
    device: torch.device,
    num_steps: int,
    batches: Iterator[tuple[Batch, IterationMeta]] | None = None,
) -> Iterator[tuple[Item, StepResult]]:
    """The first batches with their loss; while one is held, its gradients are in `trainer.model`.

    Weights stay as they were built. Sets the job up and ends it; the process group must exist. Collective.

    Args: batches: instead of the job's data, equal on all ranks of a replica; first asked when the mesh exists.
    """
    try:
        trainer.set_up(device)
        items = trainer.items if batches is None else (trainer.placement.data.item(*batch) for batch in batches)
        for step in range(1, num_steps + 1):
            item = next(items)
            yield item, trainer.result(trainer.backward(step, item, trainer.plan(item.meta, step=step)))
            trainer.placement.optimizers.zero_grad()
    finally:
        trainer.tear_down()


def timed_steps(
    trainer: Trainer,
    device: torch.device,
    batches: Iterable[tuple[Batch, IterationMeta]],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Generator[TimedStep]:
    """Trains on given batches instead of the job's data, and says when each step ran.

    The ranks start each step together; a step is planned before its clock starts, however long that takes. All
    ranks of a replica give equal batches. Sets the job up and ends it; the process group must exist. Collective.

    Args: clock: of steps and, on a CPU, actions. `time.thread_time` counts neither other processes nor waits.
    """
    try:
        trainer.set_up(device)
        trainer.placement.runtime.use_clock(clock)
        for step, (batch, meta) in enumerate(batches, 1):
            item = trainer.placement.data.item(batch, meta)
            plan = trainer.plan(meta, step=step)
            dist.barrier()
            start = clock()
            _, outcome = trainer.train_step(step, item, plan)
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            yield TimedStep(plan=plan, outcome=outcome, start_s=start, end_s=clock())
    finally:
        trainer.tear_down()
