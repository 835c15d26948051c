"""Single steps of a job on one rank, at the placement that it has now: plan, gradients, optimizer step."""

import gc
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.checkpoint.state import NamedTensors, TrainState
from mmtrain.config.config import Config
from mmtrain.costs.learned import COST_ERRORS, MOST_CHANGE, Floats, LearnedCosts, mean_error, step_seconds
from mmtrain.errors import TrainingError
from mmtrain.launch.launched import Launched
from mmtrain.launch.stop_signals import StopSignals
from mmtrain.modality.metadata import IterationMeta
from mmtrain.models.adapter_layers import combined_key
from mmtrain.models.loss import loss_of
from mmtrain.observe.by_source import record_sources, source_sums
from mmtrain.observe.metrics import MetricReduction, Metrics
from mmtrain.observe.observer import FinishedStep, Observer, RunningStep
from mmtrain.observe.out_of_memory import explained
from mmtrain.observe.run_record import log_start
from mmtrain.observe.step_memory import DeviceMemory, JobMemory
from mmtrain.parallel.batch_runner import (
    BatchRunner,
    StepResult,
    job_denoising,
    planned_ahead,
    skip_nonfinite,
)
from mmtrain.parallel.collectives import errors_on_all
from mmtrain.parallel.fill import LocalPart
from mmtrain.parallel.grads import clip, nonfinite_ranks
from mmtrain.parallel.local_model import LocalModel, check_same_program
from mmtrain.parallel.mesh import Mesh
from mmtrain.parallel.optim import lr_factor, set_lr
from mmtrain.parallel.pipelines import check_same_assignment, sum_over_replicas
from mmtrain.parallel.placement import JobPlacement
from mmtrain.parallel.planning import PendingPlan, Planned
from mmtrain.parallel.replica_data import Item
from mmtrain.parallel.runtime import StepOutcome
from mmtrain.planner.iteration import IterationPlan, IterationPlanner
from mmtrain.planner.job import Job
from mmtrain.planner.make_plan import Search
from mmtrain.training.progress import total_steps, why_ended

logger = logging.getLogger("mmtrain")


@dataclass(kw_only=True)
class ReachedStep:
    """A step whose gradients are complete on this rank.

    Its totals come from the step's last reduction over the job. A rank that has them proves that the gradients of all
    ranks are complete; one that lost a connection there can take those of another rank.
    """

    step: int
    item: Item
    num_targets: int
    """Values that all replicas predict."""
    outcome: StepOutcome
    loss_sum: float
    """The sum of the losses of this rank."""
    reduction: MetricReduction
    totals: Tensor | None = None
    """The sums over the job, [values] float64."""

    def taken(self) -> dict[str, Tensor]:
        """The totals by name, once they are there; those of metrics are recorded."""
        assert self.totals is not None
        return self.reduction.take(self.totals)


class Steps:
    """The steps of one rank, each of which makes the next state."""

    def __init__(self, config: Config, jobs: Sequence[Job], *, search: Search, cut_s: float = 0.0) -> None:
        """Args:
        jobs: [pipeline] -> its job.
        search: finds the plans of iterations (`planner.enable`).
        cut_s: seconds that the partitions took.
        """
        self.config, self.jobs, self._cut_s = config, tuple(jobs), cut_s
        self._search = search
        self._denoising = job_denoising(config)
        self._sources = tuple(source.label for source in config.data.sources)
        self._placement: JobPlacement | None = None
        self._stops = StopSignals()
        self.metrics = Metrics()
        self.observers: list[Observer] = []
        self.state = TrainState.first(config)
        self.reached: ReachedStep | None = None
        """A step that is not applied, but whose gradients are complete on this rank."""
        self.totals: Tensor | None = None
        """[values] that the last reduction of the newest applied step gave."""
        self.items: Iterator[Item] = iter(())
        """The batches from the state on."""
        self.device_memory: DeviceMemory
        """The memory that all ranks agreed on, before the first placement."""
        self.applied: Callable[[int], None] = lambda step: None
        """Called when the weights of this rank are those after a step."""

    @property
    def job(self) -> Job:
        """The job of this rank's pipeline."""
        rank = dist.get_rank() if dist.is_initialized() else Launched.from_environment().rank
        return self.jobs[self.config.parallelism.layout.coordinates(rank).pipeline]

    @property
    def placement(self) -> JobPlacement:
        """The placement in which the job trains now."""
        assert self._placement is not None
        return self._placement

    @property
    def mesh(self) -> Mesh:
        """The one of the placement."""
        return self.placement.mesh

    @property
    def model(self) -> LocalModel:
        """The one of the placement."""
        return self.placement.model

    def build(self, device: torch.device, local: LocalPart | None = None) -> None:
        """Places the job as its config says, with initial weights. Collective over the job.

        Args: local: what this rank has of its state, as of `JobPlacement.build`.
        """
        log_start(self.config, self.jobs, device, self._cut_s, again=local is not None)
        self._learned = LearnedCosts.of(self.job.partition) if self.config.planner.learn_costs else None
        self._memory = JobMemory.budgeted(self.config, self.jobs, device, self.device_memory)
        self._placement = JobPlacement.build(self.config, self.jobs, device, self._search, local)
        self._runner = BatchRunner(
            training=self.config.training,
            job=self.job,
            placement=self._placement,
            loss=loss_of(self.config.model),
            want_losses=bool(self._sources),
            denoising=self._denoising,
        )

    def named(self) -> NamedTensors:
        """The tensors of the placement."""
        return NamedTensors(self.model.chunks, self.placement.optimizers, self.model.aliases)

    def drop_placement(self) -> None:
        """Forgets a placement that has ended, and all that refers to it."""
        self._placement, self.items, self.reached = None, iter(()), None
        self.__dict__.pop("_runner", None)
        gc.collect()  # hooks refer to modules: their memory is needed now

    # ---------------------------------------------------------------------------------------------- steps

    def run_step(self, batches: Iterator[tuple[Item, PendingPlan | None]]) -> tuple[FinishedStep, bool]:
        """Trains one step, after which the state is the one to go on from; whether a rank was asked to stop.

        Collective over the job.
        """
        self.metrics.start_step()
        start = time.perf_counter()
        item, pending = next(batches)
        loaded = time.perf_counter()
        step = self.state.step + 1
        planned = self._take(pending) if pending else None
        plan = planned.plan if planned else self.plan(item.meta, step=step)
        ready = time.perf_counter()
        running = RunningStep(step=step, meta=plan.grouped_meta, plan=plan, planned=planned)
        for observer in self.observers:
            observer.before_step(running)
        self._memory.meter.start()
        with explained(self.config, self.mesh, self._memory, running):
            result, outcome = self.train_step(step, item, plan)
        self.metrics.record("data_time_s", loaded - start)
        self.metrics.record("plan_time_s", ready - loaded)
        self.metrics.record("step_time_s", time.perf_counter() - start)
        self._memory.end_step(step, plan, self.metrics)
        self.state = self.state.with_memory(self._memory.to_dict())
        if self._learned:
            self.state = replace(self.state, costs=self._learned.to_dict())
        last = bool(why_ended(self.config, self.state))
        return FinishedStep(**vars(running), outcome=outcome, metrics=self.metrics, last=last), result.stop

    def train_step(self, step: int, item: Item, plan: IterationPlan) -> tuple[StepResult, StepOutcome]:
        """Forward, backward and optimizer step of one batch; the state is that after it. Collective over the job.

        Raises: TrainingError: loss or gradient is not finite (training.on_nonfinite = "stop"); nothing is changed.
        """
        reached = self.backward(step, item, plan)
        result = self.apply(reached)
        self.metrics.record("max_loss", self._runner.replica_loss(reached.loss_sum, item.meta))
        self.metrics.reduce_max()
        return result, reached.outcome

    def backward(self, step: int, item: Item, plan: IterationPlan) -> ReachedStep:
        """Forward and backward of one batch; its gradients are in `self.model`, complete. Collective over the job.

        Raises: TrainingError: the batch has nothing to predict. Not in a later step of a job of epochs: the last one of
            an epoch may have few samples, all of which `data.on_error` may skip.
        """
        item = item.grouped(plan.microbatches)
        check_same_assignment(item.meta, self.mesh)
        num_targets = sum_over_replicas(self.mesh, self._runner.loss.num_values(item.meta))
        if num_targets == 0 and not (self.config.training.epochs and self.state.step):
            raise TrainingError(f"step {step}: the batch has {self._runner.loss.lack}")
        outcome = self._runner.run(
            plan,
            item,
            noise=self._runner.noise(step, hides=True),
            loss_grad=1.0 / max(1, num_targets),
            dropout_key=combined_key(self.config.debug.seed, step) if self.config.model.lora.dropout else None,
        )
        outcome, (squares,) = outcome.on_host(self._runner.finish_gradients())  # the host waits here, and only here
        loss_sum = self._runner.loss_sum(outcome)
        by_source = source_sums(self._sources, plan, item.meta, item.labels, outcome.position_losses, self.mesh)
        self.metrics.is_leader = self.mesh.is_leader
        self.metrics.record("tokens", item.meta.num_all_tokens)
        self.metrics.record("clips", item.meta.num_clips)
        self.metrics.record("samples", item.meta.num_samples)
        learned, seconds = self._learned, torch.empty(0)
        if learned:
            factors = learned.at(step)
            seconds = torch.from_numpy(step_seconds(plan.result.plan, plan.problem, factors, outcome.rows))
        reduction = self.metrics.sums(
            loss=loss_sum, squares=squares, stop=self._stops.number, sources=by_source, seconds=seconds
        )
        reached = ReachedStep(
            step=step, item=item, num_targets=num_targets, outcome=outcome, loss_sum=loss_sum, reduction=reduction
        )
        self.reached = reached
        reached.totals = reduction.total()  # the last reduction: who has it knows that all ranks have come so far
        return reached

    def result(self, reached: ReachedStep) -> StepResult:
        """What the totals of a step say, which are metrics of it, too."""
        totals = reached.taken()
        loss, norm = float(totals["loss"]) / max(1, reached.num_targets), math.sqrt(totals["squares"])
        self.metrics.record("loss", loss)
        self.metrics.record("grad_norm", norm)
        record_sources(self.metrics, self._sources, totals["sources"])
        if self._learned:
            self._learn(reached.step, self._learned, totals["seconds"].numpy())
        return StepResult(loss=loss, grad_norm=norm, stop=bool(totals["stop"]))

    def _learn(self, step: int, learned: LearnedCosts, seconds: Floats) -> None:
        """Corrects the costs of later steps. Args: seconds: of all ranks, as of `step_seconds`."""
        for name, value in zip(COST_ERRORS, mean_error(seconds, learned.at(step)), strict=True):
            self.metrics.record(name, value)
        self._learned, jumps = learned.after(step, seconds)
        if jumps and dist.get_rank() == 0:
            most = max(jumps, key=lambda jump: abs(math.log(jump.ratio)))
            more = f", and {len(jumps) - 1} more" if len(jumps) > 1 else ""
            logger.warning(
                "step %d: %s as its costs had been learned%s; %g times is believed, and more if it stays so",
                step, most, more, MOST_CHANGE if most.ratio > 1 else 1 / MOST_CHANGE,
            )  # fmt: skip

    def apply(self, reached: ReachedStep, *, alone: bool = False) -> StepResult:
        """The optimizer step of complete gradients, after which the state is the next one. Collective over the job only
        where loss or gradient are not finite.

        Args: alone: other ranks cannot be asked any more.
        Raises: see `train_step`.
        """
        result, step = self.result(reached), reached.step
        state = self.state.after(
            loader=reached.item.state.to_dict(),
            tokens=int(self.metrics["tokens"]),
            clips=int(self.metrics["clips"]),
            samples=int(self.metrics["samples"]),
            skipped=not result.is_finite,
        )
        steps = total_steps(self.config, state)
        factor = lr_factor(self.config.lr_scheduler, step, steps)
        self.metrics.record("lr", self.config.optimizer.lr * factor)
        self.metrics.record("total_steps", steps)
        self.metrics.record("samples_done", math.nan if state.samples is None else state.samples)
        self.metrics.record("epoch", float(state.epochs) if reached.item.state.num_samples else math.nan)
        if reached.num_targets == 0:
            logger.warning("step %d: the batch has %s; the weights stay as they are", step, self._runner.loss.lack)
        elif result.is_finite:
            clip(self.model.parameters, result.grad_norm, self.config.training.max_norm)
            set_lr(self.placement.optimizers, factor)
            self.placement.optimizers.step()
            self.placement.optimizers.average(step)
        else:
            ranks = [] if alone else nonfinite_ranks(self.model.parameters, reached.loss_sum, self.mesh)
            skip_nonfinite(self.config.training, result, step, ranks, skipped=self.state.skipped)
        self.placement.optimizers.zero_grad()
        self.state = state
        self.reached, self.totals = None, reached.totals
        self.applied(step)
        return result

    # ---------------------------------------------------------------------------------------------- plans

    def plan(self, meta: IterationMeta, *, step: int = 0, forward_only: bool = False) -> IterationPlan:
        """The plan of an iteration, waited for. Collective over the job.

        Args: step: names the search's seed and the memory limits.
        """
        planner = self._planner(step)
        with errors_on_all(self.mesh.replicas_group):
            ahead = self.placement.ahead
            if ahead and not forward_only:
                return ahead.take(ahead.submit(step, meta, planner)).plan
            plan = planner.plan(meta, forward_only=forward_only)
            check_same_program(plan.program.hash, self.mesh)
            return plan

    def _submit(self, step: int, item: Item) -> PendingPlan:
        """Begins to search the plan of a step."""
        assert self.placement.ahead is not None
        return self.placement.ahead.submit(step, item.meta, self._planner(step))

    def _planner(self, step: int) -> IterationPlanner:
        """The planner of a step, with its limits of memory and what is known of costs."""
        planner = self._memory.limited(self.job, step)
        return replace(planner, factors=self._learned.at(step)) if self._learned else planner

    def _take(self, pending: PendingPlan) -> Planned:
        """The plan that was made while the step before ran, or the first one. Collective over the job."""
        ahead = self.placement.ahead
        assert ahead is not None
        with errors_on_all(self.mesh.replicas_group):
            return ahead.take(pending, self.config.planner.search.patience_s)

    def _resume_costs(self) -> None:
        """Goes on with the costs that the run of the state had learned, if they are of such a job."""
        if self._learned and self.state.costs:
            try:
                self._learned = self._learned.resumed(self.state.costs)
            except ValueError as error:
                if dist.get_rank() == 0:
                    logger.warning("costs are learned anew: those of step %d have %s", self.state.step, error)

    def batches(self, until: int) -> Iterator[tuple[Item, PendingPlan | None]]:
        """What the next steps are trained on, up to one of them."""
        submit = self._submit if self.placement.ahead else None
        return planned_ahead(self.items, self.state.step + 1, until, submit)
