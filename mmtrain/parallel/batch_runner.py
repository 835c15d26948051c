"""Batches on their way through the pipeline of one layout."""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.config.config import Config
from mmtrain.config.sections import TrainingConfig
from mmtrain.data.tokenizer import job_tokenizer
from mmtrain.errors import TrainingError
from mmtrain.modality.metadata import IterationMeta
from mmtrain.models.adapter_layers import combined_key
from mmtrain.models.attention.context import AttentionChoices
from mmtrain.models.batch import check_batch, labelled_tokens
from mmtrain.models.diffusion import ClipNoise, Denoising, null_token
from mmtrain.models.loss import Loss
from mmtrain.parallel.feed import StepFeed
from mmtrain.parallel.feed_ahead import FeedAhead, Uploads, forwards_of
from mmtrain.parallel.feeds.inputs import StepInputs
from mmtrain.parallel.grads import fill_missing_grads, squared_norm
from mmtrain.parallel.offload import copies_to
from mmtrain.parallel.placement import JobPlacement
from mmtrain.parallel.planning import PendingPlan
from mmtrain.parallel.replica_data import Item
from mmtrain.parallel.runtime import StepOutcome
from mmtrain.parallel.stage import KeyOf
from mmtrain.parallel.tensor import finish_gradients
from mmtrain.planner.batching import Batching
from mmtrain.planner.iteration import IterationPlan
from mmtrain.planner.job import Job
from mmtrain.schedule.recipe.instructions import functions_of

logger = logging.getLogger("mmtrain")

MOST_SKIPPED = 10
"""Steps in a row that training.on_nonfinite = "skip" skips."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What the weights after a step depend on, over all replicas."""

    loss: float
    grad_norm: float
    stop: bool
    """Whether some rank was asked to stop."""

    @property
    def is_finite(self) -> bool:
        """Whether the step may change the weights."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True, kw_only=True)
class BatchRunner:
    """Runs batches on one rank."""

    training: TrainingConfig
    job: Job
    placement: JobPlacement
    loss: Loss
    """The loss that the model is trained with."""
    want_losses: bool
    """Whether outcomes have the loss of each labelled position."""
    denoising: Denoising | None
    """The noise of a text-to-video job."""

    def run(
        self,
        plan: IterationPlan,
        item: Item,
        *,
        noise: ClipNoise | None,
        loss_grad: float = 1.0,
        want_predictions: bool = False,
        dropout_key: int | None = None,
    ) -> StepOutcome:
        """The outcome of a plan. Collective over pp.

        Args: noise: of a text-to-video job. want_predictions: of a language model's tokens. dropout_key: of the masks
            of this step's dropout; None: nothing is dropped.
        """
        mesh, runtime = self.placement.mesh, self.placement.runtime
        if item.batch is not None and mesh.pp_rank == 0:  # other ranks may have a part of it
            check_batch(item.batch, item.meta, self.denoising.scale if self.denoising else None)
        layout = plan.layout.with_labelled(labelled_tokens(item.labels))
        uploads = self._uploads
        inputs = StepInputs(
            layout=layout,
            meta=item.meta,
            mesh=mesh,
            batch=item.batch,
            labels=item.labels,
            uploads=uploads,
            noise=noise,
            attention=AttentionChoices(
                backend=self.training.attention_backend, part_blocks=self.training.attention_part_blocks
            ),
            want_predictions=want_predictions,
            want_losses=self.want_losses,
        )
        runtime.load(
            plan.program,
            lambda stage, work: self.job.output_shape(layout, stage, work, mesh.place.cp, mesh.place.tp),
            functions_of(self.job.schedule.instructions, self.job.partition.modules),
            None if dropout_key is None else self._keys(dropout_key, layout.batching),
        )
        feed = FeedAhead(
            StepFeed(self.job.partition, inputs),
            uploads,
            forwards_of(plan.program, mesh.pp_rank),
            most_bytes=self.training.inputs_ahead_bytes if mesh.device.type != "cpu" else 0.0,
        )
        try:
            return runtime.step(feed, loss_grad=loss_grad)
        finally:
            feed.close()

    @cached_property
    def _uploads(self) -> Uploads:
        device = self.placement.mesh.device
        return Uploads(device, copies_to(device))

    def _keys(self, dropout_key: int, batching: Batching) -> KeyOf:
        """Work -> the key of its dropout, which depends on its units, and on the rows that this rank's group has."""
        mesh = self.placement.mesh

        def key_of(work: int) -> int:
            module = batching.spec.module(batching.module_of(work))
            units = [(unit.source, unit.sample, getattr(unit, "key", ())) for unit in batching.items[work].units]
            own_rows = mesh.place.cp, mesh.place.tp if module.shares_units and mesh.data_encoder else 0
            return combined_key(dropout_key, module.name, *own_rows, units)

        return key_of

    def noise(self, step: int, *, hides: bool) -> ClipNoise | None:
        """The random choices of a step of a text-to-video job. Args: hides: captions may be hidden."""
        return self.denoising.noise(step, hides=hides) if self.denoising else None

    def loss_sum(self, outcome: StepOutcome) -> float:
        """This rank's share of its replica's loss: tp ranks hold equal losses, cp ranks those of their own tokens.

        Args: outcome: on the host.
        """
        return 0.0 if self.placement.mesh.place.tp else sum(map(float, outcome.losses.values()), 0.0)

    def replica_loss(self, loss_sum: float, meta: IterationMeta) -> float:
        """The mean loss of this rank's replica. Collective over the replica. Args: loss_sum: of this rank."""
        loss = torch.tensor(loss_sum / max(1, self.loss.num_values(meta)), dtype=torch.float64)
        if self.placement.mesh.replica_group is not None:
            dist.all_reduce(loss, group=self.placement.mesh.replica_group)
        return float(loss)

    def finish_gradients(self) -> Tensor:
        """Completes the gradients of this rank's parameters over all axes. Collective over the job.

        Returns: this rank's share of the square of the gradients' norm, a float64 scalar of the device.
        """
        model, mesh = self.placement.model, self.placement.mesh
        parameters = model.parameters  # a walk over all modules
        fill_missing_grads(parameters)
        finish_gradients(parameters)
        model.sums.finish()
        # The tied head is counted in the norm where the embedding is.
        skip = model.tied[-1] if model.tied and self.job.partition.tie_ranks[1] == mesh.pp_rank else None
        return squared_norm(parameters, mesh, skip=skip)


def job_denoising(config: Config) -> Denoising | None:
    """The random choices of a text-to-video job; None of another one. Raises: ConfigError."""
    return Denoising.of(config, null_token(job_tokenizer(config))) if config.model.reads_clips else None


def planned_ahead(
    items: Iterator[Item], first: int, last: int, submit: Callable[[int, Item], PendingPlan] | None
) -> Iterator[tuple[Item, PendingPlan | None]]:
    """The items of the steps first .. last, or up to the last item, each after the next one is being planned.

    An error in the data of a step is raised when that step comes, and not when it was read.

    Args: submit: begins to plan the item of a step; None: plans are made when their step comes.
    """
    if submit is None:
        yield from ((item, None) for item in islice(items, last + 1 - first))
        return
    ahead = _fetched(islice(items, last + 1 - first), first, submit)
    waiting = deque(islice(ahead, 1))
    while waiting:
        waiting.extend(islice(ahead, 1))
        fetched = waiting.popleft()
        if isinstance(fetched, Exception):
            raise fetched
        yield fetched


def _fetched(
    items: Iterator[Item], first: int, submit: Callable[[int, Item], PendingPlan]
) -> Iterator[tuple[Item, PendingPlan] | Exception]:
    """Items from a step on, whose plan is searched from then on; the last may be the error of its data."""
    for step in count(first):
        try:
            item = next(items)
        except StopIteration:
            return
        except Exception as error:
            yield error
            return
        yield item, submit(step, item)


def skip_nonfinite(section: TrainingConfig, result: StepResult, step: int, ranks: list[int], *, skipped: int) -> None:
    """Logs that a step is skipped.

    Args: ranks: whose loss or gradients are not finite. skipped: steps in a row before it.
    Raises: TrainingError: it is one too many, or none may be skipped.
    """
    message = f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}; not finite on ranks {ranks}"
    if section.on_nonfinite == "skip":
        if skipped + 1 < MOST_SKIPPED:
            logger.warning("%s; the step is skipped", message)
            return
        raise TrainingError(
            f"{message}. It is the {MOST_SKIPPED}th skipped step in a row: other batches do not help, since the "
            f"weights are those after step {step - MOST_SKIPPED}; lower optimizer.lr, set training.max_norm, or go "
            "back with checkpoint.load_step"
        )
    raise TrainingError(
        f"{message}. Nothing was changed by this step; lower optimizer.lr, check the data, or set "
        'training.on_nonfinite = "skip"'
    )
