"""The training job of one rank: set-up, the training loop, steps, validation, checkpoints.

All ranks of a replica get the metadata of each batch; every rank then plans the iteration by itself and gets the same
program. With the planner on, the data of a step are read before the step before runs, so that its plan is searched
meanwhile.

What is trained (`TrainState` and the tensors by name) and where (`Placement`) are two values, so a job can go on at
another layout in the same processes.
"""

import dataclasses
import gc
import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.checkpoint.checkpoint import Checkpointer
from mmtrain.checkpoint.held import HeldTensors
from mmtrain.checkpoint.shared_folder import check_shared
from mmtrain.checkpoint.state import NamedTensors, TrainState, seed_everything
from mmtrain.config import config as config_module
from mmtrain.config.config import Config
from mmtrain.config.sections import ParallelismConfig
from mmtrain.data.packing import LoaderState
from mmtrain.data.questions import Key
from mmtrain.data.tokenizer import job_tokenizer
from mmtrain.errors import MMTrainError, TrainingError
from mmtrain.launch.launched import Launched, local_world_size
from mmtrain.launch.processes import check_temporary_folder
from mmtrain.launch.stop_signals import StopSignals
from mmtrain.modality.buckets import check_video
from mmtrain.modality.metadata import IterationMeta
from mmtrain.models.attention.context import AttentionChoices
from mmtrain.models.batch import Batch, check_batch, with_other_captions
from mmtrain.models.diffusion import ClipNoise, Denoising, null_token
from mmtrain.models.loss import loss_of
from mmtrain.observe.by_source import source_sums, source_totals
from mmtrain.observe.host_memory import keep_freed_memory
from mmtrain.observe.job_summary import few_clips
from mmtrain.observe.log_file import setup_logging
from mmtrain.observe.out_of_memory import OutOfMemoryContext, explain, is_out_of_memory
from mmtrain.observe.run_record import FinishedStep, RunRecord, StepResult, log_prompts, log_start, owned_by_rank_zero
from mmtrain.observe.step_memory import DeviceMemory, JobMemory
from mmtrain.observe.step_metrics import Validation
from mmtrain.observe.validation import count_answers, next_tokens, validation_of_all, whole_predictions
from mmtrain.parallel.activation_memory import saved_ops
from mmtrain.parallel.alike import check_alike
from mmtrain.parallel.build import LocalModel, check_same_assignment, check_same_program
from mmtrain.parallel.collectives import errors_on_all, sum_over
from mmtrain.parallel.feed import StepFeed
from mmtrain.parallel.feeds.inputs import StepInputs
from mmtrain.parallel.grads import clip, fill_missing_grads, nonfinite_ranks, sync_tied, total_norm
from mmtrain.parallel.job_inputs import job_inputs
from mmtrain.parallel.meeting import Patience, meet
from mmtrain.parallel.mesh import Mesh, init_process_group, pick_device
from mmtrain.parallel.optim import lr_factor, set_lr
from mmtrain.parallel.placement import Placement
from mmtrain.parallel.planning import PendingPlan, PlanAhead, Planned
from mmtrain.parallel.replica_data import Item
from mmtrain.parallel.roll_call import RollCall, common_reason, is_communication
from mmtrain.parallel.runtime import StepOutcome
from mmtrain.parallel.tensor import finish_gradients
from mmtrain.parallel.torch_private import default_store, set_default_timeout, set_timeout
from mmtrain.planner.iteration import IterationPlan, IterationPlanner
from mmtrain.planner.partition.partition import Partition
from mmtrain.planner.plan_choice import Search
from mmtrain.planner.search import search as searching
from mmtrain.simulator.job import job_planner

logger = logging.getLogger("mmtrain")


MOST_SKIPPED = 10
"""Steps in a row that training.on_nonfinite = "skip" skips."""


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """When one training step ran on one rank, seconds on a clock of the host."""

    plan: IterationPlan
    outcome: StepOutcome
    start_s: float
    """All ranks were there."""
    end_s: float
    """Weights are updated; on an accelerator all its work is done."""


class Trainer:
    """One rank of a training job."""

    def __init__(self, config: Config, *, search: Search = searching.search) -> None:
        """Checks the config, and prepares all that needs no process group.

        Args: search: finds the plans of iterations (`planner.enable`).
        Raises: ConfigError.
        """
        self.config = config
        self._search = search
        check_temporary_folder(config.data.num_workers)
        check_video(config)
        self.folder = Path(config.job.dump_folder)
        saved_ops(config.activation_checkpoint)
        self.planner, self._cut_s = _planner_in_time(config)
        self._loss = loss_of(config.model)
        self._denoising: Denoising | None = None
        if config.model.reads_clips:
            self._denoising = Denoising.of(config, null_token(job_tokenizer(config)))
        self._record: RunRecord | None = None
        self.checkpointer: Checkpointer | None = None
        self._placement: Placement | None = None
        self.state = TrainState.first(config)
        self._sources = tuple(source.label for source in config.data.sources)
        self._stops = StopSignals()
        self._patience = Patience.at_start(config.comm)

    @property
    def placement(self) -> Placement:
        """Where the job is trained now."""
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

    @property
    def partition(self) -> Partition:
        """The one of the planner."""
        return self.planner.partition

    def run(self, layouts: Mapping[int, ParallelismConfig] | None = None) -> None:
        """Trains to the last step, or until SIGTERM or SIGINT. Joins the job's process group unless the caller has.

        A run without steps left writes no files.

        Args: layouts: step -> `[parallelism]` of the steps after it; for as many ranks as the job has.
        Raises:
            MMTrainError: the same on all ranks.
            RankLostError: a rank does not answer. This process can only end: its process groups are of no use any more.
        """
        launched, comm = Launched.from_environment(), self.config.comm
        setup_logging(launched.rank)
        device = pick_device(comm)
        owns_group, lost = not dist.is_initialized(), False
        store = meet(comm) if owns_group else default_store()
        roll_call = RollCall(store, launched.rank, launched.world_size)
        try:
            with common_reason(roll_call, lambda: self._patience, self._locate):
                if owns_group:
                    check_alike(store, launched, job_inputs(self.config, self.planner.schedule, device, launched))
                    init_process_group(comm, device, store)
                with owned_by_rank_zero(self.folder):
                    if self.config.checkpoint.enable:
                        check_shared(self.folder)
                    self._set_up(device, resumes=True)
                    self._train(layouts or {})
        except MMTrainError as error:
            lost = is_communication(error.__cause__)
            if self._record is not None:
                self._record.failed(error)
            raise
        finally:
            self._tear_down(lost=lost)
            if owns_group and not lost and dist.is_initialized():  # it would wait for the lost rank
                dist.destroy_process_group()

    def _train(self, layouts: Mapping[int, ParallelismConfig]) -> None:
        steps = self.config.training.steps
        if self.state.step >= steps:
            # No warning, which each rank would show.
            text = "no step is left: step %d of training.steps = %d is done; raise it, or name another job.dump_folder"
            logger.info(text, self.state.step, steps)
            return
        self._record = RunRecord(self.config, self.planner, self.mesh, self.state.step)
        if dist.get_rank() == 0:
            log_prompts(self.config)
        end = "saves and ends" if self.checkpointer else "ends"
        self._patience = Patience.later(self.config.comm)
        set_timeout(timedelta(seconds=self._patience.seconds))
        notice = f"Ctrl-C: the job {end} after this step; once more ends it at once\n"
        self._stops.catch(notice if dist.get_rank() == 0 else "")
        try:
            for step, parallelism in sorted(layouts.items()):
                if not self._loop(step):
                    return
                self.change_layout(parallelism)
            self._loop(steps)
            self._say_what_is_left()
            if few := few_clips(self.config, self.state.clips):
                logger.info("%s", few)
        except TrainingError:  # on every rank: a checkpoint that is being written is still good
            if self.checkpointer:
                self.checkpointer.finish()
            raise

    def _say_what_is_left(self) -> None:
        """Logs what the run leaves."""
        step, skipped = self.state.step, self.state.skipped
        if self.checkpointer and step == self.config.training.steps:
            logger.info("the model of step %d is in %s", step, self.checkpointer.folder)
        if skipped:
            logger.info(
                "steps %d to %d were skipped: the weights are those of the step before", step + 1 - skipped, step
            )

    def _locate(self, function: str) -> str:
        """The position of this rank in the job, for a message. Args: function: that it runs."""
        if self._placement is not None and self._placement.runtime.doing:
            return f"at step {self.state.step + 1}, {self._placement.runtime.doing}"
        return f"after step {self.state.step}, {function}" if self.state.step else f"before the first step, {function}"

    # --------------------------------------------------------------------------------------- set-up

    def _set_up(self, device: torch.device, *, resumes: bool = False) -> None:
        """Sets up the process, and the first layout.

        Args: resumes: with the state of the newest checkpoint, and the job saves its own; else with initial weights.
        """
        config = self.config
        seed_everything(config.debug.seed, config.debug.deterministic)
        if device.type == "cpu":
            keep_freed_memory()
        set_default_timeout(timedelta(seconds=config.comm.timeout_seconds))
        self._device_memory = DeviceMemory.agreed(device, local_world_size(config.parallelism.mesh_shape.world_size))
        if config.checkpoint.enable and resumes:
            self.checkpointer = Checkpointer(config.checkpoint, self.folder / config.checkpoint.folder)
        self._build(device)
        if self.checkpointer and (saved := self.checkpointer.load(self._named())):
            self.state = saved.resumed(self.state.settings)
        self._take_up()

    def _build(self, device: torch.device) -> None:
        """Places the job as its config says, with initial weights. Collective over the job."""
        log_start(self.config, self.planner, device, self._cut_s)
        self._memory = JobMemory.budgeted(self.config, self.planner, device, self._device_memory)
        self._placement = Placement.build(self.config, self.planner, device, self._search)

    def _named(self) -> NamedTensors:
        """The tensors of the placement."""
        model = self.model
        return NamedTensors(model.chunks, self.placement.optimizers, model.aliases)

    def _take_up(self) -> None:
        """Continues from the state: its margins of memory and its position in the data."""
        self._memory.resume(self.state.memory)
        self._items = self.placement.data.training(LoaderState.from_dict(self.state.loader))

    def change_layout(self, parallelism: ParallelismConfig) -> None:
        """Continues at other degrees of parallelism, in the same processes, as a resumed job does. Collective.

        Raises: ConfigError: the job does not fit them.
        """
        config = dataclasses.replace(self.config, parallelism=parallelism)
        config_module.check(config)
        parallelism.mesh_shape.check_world_size(dist.get_world_size())
        planner, cut_s = _planner_in_time(config)
        logger.info("after step %d the layout changes", self.state.step)
        device, tensors = self.mesh.device, HeldTensors.of(self._named())
        assert self._record is not None
        self._record.forget_layout()
        self.placement.close()
        self._placement, self._items = None, iter(())
        gc.collect()  # hooks refer to modules: their memory is needed now
        self.config, self.planner, self._cut_s = config, planner, cut_s
        self._build(device)
        tensors.restore(self._named())
        self._take_up()
        self._record.describe(config, planner, self.mesh, self.state.step)

    def _tear_down(self, *, lost: bool = False) -> None:
        """Args: lost: a rank does not answer."""
        self._stops.release()
        if self._record is not None:
            self._record.close()
        if self._placement is not None:
            self._placement.stop(lost=lost)

    # ----------------------------------------------------------------------------------------- loop

    def _loop(self, until: int) -> bool:
        """Trains up to a step, or until it is asked to stop; whether there are steps left to train."""
        config = self.config
        steps, until = config.training.steps, min(until, config.training.steps)
        stopped = False
        if config.validation.enable and self.state.step == 0:
            self.validate(0)
        assert self._record is not None
        batches = self._batches(self.state.step + 1, until)
        while self.state.step < until and not stopped:
            finished = self._next_step(batches)
            self._record.step(finished)
            step, stopped = finished.step, finished.result.stop
            if self.checkpointer:
                self.checkpointer.poll()
                if step % config.checkpoint.interval == 0 or step == steps or stopped:
                    self.checkpointer.save(self.state, self._named())
            due = step % config.validation.freq == 0 or step == steps
            if config.validation.enable and due and not stopped:  # a stop leaves little time
                self.validate(step)
            if stopped:
                reason = signal.Signals(self._stops.number).name if self._stops.number else "a signal to another rank"
                logger.info("%s: stopped after step %d%s", reason, step, ", saved" if self.checkpointer else "")
        if self.checkpointer:
            self.checkpointer.finish()
        return not stopped and self.state.step < steps

    def _next_step(self, batches: Iterator[tuple[Item, PendingPlan | None]]) -> FinishedStep:
        """Trains one step, after which the state is the one to go on from. Collective over the job."""
        start = time.perf_counter()
        item, pending = next(batches)
        loaded = time.perf_counter()
        step = self.state.step + 1
        planned = self._take(pending) if pending else None
        plan = planned.plan if planned else self._plan(item.meta, step=step)
        ready = time.perf_counter()
        self._memory.start_step()
        try:
            result, outcome = self.train_step(step, item, plan)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise explain(error, self._out_of_memory_context(step, item, plan)) from error
        end = time.perf_counter()
        memory = self._memory.end_step(step, plan)
        self.state = dataclasses.replace(
            self.state,
            step=step,
            loader=item.state.to_dict(),
            tokens=self.state.tokens + result.tokens,
            clips=None if self.state.clips is None else self.state.clips + result.clips,
            memory=self._memory.to_dict() or self.state.memory,
            skipped=0 if result.is_finite else self.state.skipped + 1,
        )
        return FinishedStep(
            step=step,
            result=result,
            outcome=outcome,
            meta=item.meta,
            plan=plan,
            planned=planned,
            memory=memory,
            data_time_s=loaded - start,
            plan_time_s=ready - loaded,
            step_time_s=end - start,
        )

    def train_step(self, step: int, item: Item, plan: IterationPlan) -> tuple[StepResult, StepOutcome]:
        """Forward, backward and optimizer step of one batch. Collective over the job.

        Raises: TrainingError: loss or gradient is not finite (training.on_nonfinite = "stop"); nothing is changed.
        """
        result, outcome = self.backward(step, item, plan)
        if result.is_finite:
            clip(self.model.parameters, result.grad_norm, self.config.training.max_norm)
            factor = lr_factor(self.config.lr_scheduler, step, self.config.training.steps)
            set_lr(self.placement.optimizers, factor)
            self.placement.optimizers.step()
        else:
            self._handle_nonfinite(step, result.loss, result.grad_norm, self._loss_sum(outcome))
        self.placement.optimizers.zero_grad()
        return result, outcome

    def backward(self, step: int, item: Item, plan: IterationPlan) -> tuple[StepResult, StepOutcome]:
        """Forward and backward of one batch; its gradients are in `self.model`, complete. Collective over the job.

        Raises: TrainingError: the batch has nothing to predict.
        """
        check_same_assignment(item.meta, self.mesh)
        num_targets = sum_over(self.mesh.batch_group, self._loss.num_values(item.meta))
        if num_targets == 0:
            raise TrainingError(f"step {step}: the batch has {self._loss.lack}")
        outcome = self._run(plan, item, noise=self._noise(step, hides=True), loss_grad=1.0 / num_targets)
        parameters = self.model.parameters
        fill_missing_grads(parameters)
        finish_gradients(parameters)
        sync_tied(self.model.tied, self.mesh)
        norm = total_norm(parameters, self.mesh, skip=self._tied_copy_to_skip())
        loss_sum = self._loss_sum(outcome)
        counts = (item.meta.num_all_tokens, item.meta.num_clips) if self.mesh.is_leader else (0, 0)
        by_source = source_sums(self._sources, plan, item.meta, item.labels, outcome.position_losses, self.mesh)
        totals = torch.tensor([loss_sum, *counts, self._stops.number, *by_source.flatten()], dtype=torch.float64)
        dist.all_reduce(totals)
        largest = torch.tensor(loss_sum / max(1, self._loss.num_values(item.meta)), dtype=torch.float64)
        if self.mesh.replica_group is not None:
            dist.all_reduce(largest, group=self.mesh.replica_group)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        result = StepResult(
            loss=float(totals[0]) / num_targets,
            max_loss=float(largest),
            grad_norm=float(norm),
            tokens=int(totals[1]),
            clips=int(totals[2]),
            stop=bool(totals[3]),
            sources=source_totals(self._sources, totals[4:]),
        )
        return result, outcome

    def _out_of_memory_context(self, step: int, item: Item, plan: IterationPlan) -> OutOfMemoryContext:
        """Where this rank ran out of memory."""
        return OutOfMemoryContext(
            config=self.config,
            step=step,
            rank=self.mesh.rank,
            pp_rank=self.mesh.pp_rank,
            device=self.mesh.device,
            meta=item.meta,
            plan=plan,
            budget=self._memory.budget(step),
            measured_bytes=self._memory.peak_bytes(),
        )

    def gradients(
        self, device: torch.device, num_steps: int, batches: Iterator[tuple[Batch, IterationMeta]] | None = None
    ) -> Iterator[tuple[Item, StepResult]]:
        """The first batches with their loss; while one is held, its gradients are in `self.model`.

        Weights stay as they were built. Sets the job up and ends it; the process group must exist. Collective.

        Args: batches: instead of the job's data, equal on all ranks of a replica; first asked when the mesh exists.
        """
        try:
            self._set_up(device)
            items = self._items if batches is None else (self.placement.data.item(*batch) for batch in batches)
            for step in range(1, num_steps + 1):
                item = next(items)
                yield item, self.backward(step, item, self._plan(item.meta, step=step))[0]
                self.placement.optimizers.zero_grad()
        finally:
            self._tear_down()

    def timed_steps(
        self,
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
            self._set_up(device)
            self.placement.runtime.use_clock(clock)
            for step, (batch, meta) in enumerate(batches, 1):
                item = self.placement.data.item(batch, meta)
                plan = self._plan(meta, step=step)
                dist.barrier()
                start = clock()
                _, outcome = self.train_step(step, item, plan)
                if device.type != "cpu":
                    torch.accelerator.synchronize(device)
                yield TimedStep(plan=plan, outcome=outcome, start_s=start, end_s=clock())
        finally:
            self._tear_down()

    def _loss_sum(self, outcome: StepOutcome) -> float:
        """This rank's share of its replica's loss: tp ranks hold equal losses, cp ranks those of their own tokens."""
        if self.mesh.place.tp:
            return 0.0
        return sum((float(loss) for loss in outcome.losses.values()), 0.0)

    def _handle_nonfinite(self, step: int, loss: float, norm: float, local_loss: float) -> None:
        ranks = nonfinite_ranks(self.model.parameters, local_loss, self.mesh)
        message = f"step {step}: loss {loss}, gradient norm {norm}; not finite on ranks {ranks}"
        if self.config.training.on_nonfinite == "skip":
            if self.state.skipped + 1 < MOST_SKIPPED:
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

    def _plan(self, meta: IterationMeta, *, step: int = 0, forward_only: bool = False) -> IterationPlan:
        """The plan of an iteration, waited for. Collective over the job.

        Args: step: names the search's seed and the memory limits.
        """
        planner = self._memory.limited(self.planner, step)
        with errors_on_all(self.mesh.batch_group):
            ahead = self.placement.ahead
            if ahead and not forward_only:
                return ahead.now(step, meta, planner).plan
            plan = ahead.forward(meta, planner) if ahead else planner.plan(meta, forward_only=forward_only)
            check_same_program(plan.program.hash, self.mesh)
            return plan

    def _take(self, pending: PendingPlan) -> Planned:
        """The plan that was made while the step before ran, or the first one. Collective over the job."""
        ahead = self.placement.ahead
        assert ahead is not None
        with errors_on_all(self.mesh.batch_group):
            return ahead.take(pending, self.config.planner.patience_s)

    def _run(
        self,
        plan: IterationPlan,
        item: Item,
        *,
        noise: ClipNoise | None,
        loss_grad: float = 1.0,
        want_predictions: bool = False,
    ) -> StepOutcome:
        """Args: noise: of a text-to-video job. want_predictions: of a language model's tokens."""
        if item.batch is not None and self.mesh.pp_rank == 0:  # other ranks may have a part of it
            check_batch(item.batch, item.meta, self._denoising.scale if self._denoising else None)
        coordinates = self.mesh.place
        inputs = StepInputs(
            layout=plan.layout,
            meta=item.meta,
            mesh=self.mesh,
            batch=item.batch,
            labels=item.labels,
            noise=noise,
            attention=AttentionChoices(
                backend=self.config.training.attention_backend,
                part_blocks=self.config.training.attention_part_blocks,
            ),
            want_predictions=want_predictions,
            want_losses=bool(self._sources),
        )
        self.placement.runtime.load(
            plan.program,
            lambda stage, work: self.planner.output_shape(plan.layout, stage, work, coordinates.cp, coordinates.tp),
        )
        return self.placement.runtime.step(StepFeed(self.partition, inputs), loss_grad=loss_grad)

    def _noise(self, step: int, *, hides: bool) -> ClipNoise | None:
        """The random choices of a step of a text-to-video job. Args: hides: captions may be hidden."""
        return self._denoising.noise(step, hides=hides) if self._denoising else None

    def _tied_copy_to_skip(self) -> torch.nn.Parameter | None:
        """The tied head is counted in the norm where the embedding is."""
        if not self.model.tied or self.partition.tie_ranks[1] != self.mesh.pp_rank:
            return None
        return self.model.tied[-1]

    # --------------------------------------------------------------------------------- data of a step

    def _batches(self, first: int, last: int) -> Iterator[tuple[Item, PendingPlan | None]]:
        """The items of the steps first .. last; with the planner on, each after the next one is being planned.

        An error in the data of a step is raised when that step comes, and not when it was read.
        """
        ahead = self.placement.ahead
        if ahead is None:
            for _ in range(first, last + 1):
                yield next(self._items), None
            return
        waiting: deque[tuple[Item, PendingPlan] | Exception] = deque()
        for step in range(first, last + 1):
            while len(waiting) < 2 and step + len(waiting) <= last:
                waiting.append(self._fetch(step + len(waiting), ahead))
            fetched = waiting.popleft()
            if isinstance(fetched, Exception):
                raise fetched
            yield fetched

    def _fetch(self, step: int, ahead: PlanAhead) -> tuple[Item, PendingPlan] | Exception:
        """The item of a step, whose plan is searched from now on; or the error of its data."""
        try:
            item = next(self._items)
        except Exception as error:
            return error
        return item, ahead.submit(step, item.meta, self._memory.limited(self.planner, step))

    # ------------------------------------------------------------------------------------ validation

    def validate(self, step: int) -> Validation:
        """Loss and answers on held-out data, through the pipeline.

        An answer is right if every one of its tokens is the most likely one after the right prefix, which
        is when greedy decoding would write it.
        """
        result = self._validated(step, self.placement.data.validation(self.config.validation.steps))
        if self.config.validation.shuffled_captions:
            items = self.placement.data.validation(self.config.validation.steps, with_other_captions)
            result = dataclasses.replace(result, shuffled_loss=self._validated(step, items).loss)
        if self.config.validation.generate:
            answers = self.placement.data.answers(partial(self._next_tokens, step))
            result = dataclasses.replace(result, answers=answers)
        assert self._record is not None
        self._record.validation(step, result)
        return result

    def _next_tokens(self, step: int, item: Item) -> dict[Key, int]:
        """The most likely next token of each question, over all replicas. Collective over the job."""
        plan, _, predictions = self._predicted(step, item, noise=None)
        return next_tokens(plan, item.meta, predictions)

    def _predicted(
        self, step: int, item: Item, *, noise: ClipNoise | None
    ) -> tuple[IterationPlan, StepOutcome, dict[int, Tensor]]:
        """A forward pass, and work -> predicted token of each labelled position; the latter on one rank of a submesh,
        elsewhere empty. Collective over the job."""
        plan = self._plan(item.meta, step=step + 1, forward_only=True)
        outcome = self._run(plan, item, noise=noise, want_predictions=True)
        predictions = whole_predictions(plan, item.labels, outcome.predictions, self.mesh)
        return plan, outcome, predictions if self.mesh.place.cp == self.mesh.place.tp == 0 else {}

    def _validated(self, step: int, items: Iterator[Item]) -> Validation:
        mesh = self.mesh
        loss_sum, num_targets = 0.0, 0
        accuracy: dict[str, tuple[int, int]] = {}
        by_source = torch.zeros(len(self._sources), 4, dtype=torch.float64)
        for number, item in enumerate(items):
            plan, outcome, predictions = self._predicted(step, item, noise=self._noise(-1 - number, hides=False))
            loss_sum += self._loss_sum(outcome)
            by_source += source_sums(self._sources, plan, item.meta, item.labels, outcome.position_losses, mesh)
            if outcome.losses and mesh.place.cp == mesh.place.tp == 0:
                num_targets += self._loss.num_values(item.meta)
                count_answers(plan, item.meta, item.labels, predictions, accuracy)
        return validation_of_all(loss_sum, num_targets, accuracy, self._sources, by_source)


def _planner_in_time(config: Config) -> tuple[IterationPlanner, float]:
    """The planner of a job, and the seconds that it took to make."""
    start = time.perf_counter()
    planner = job_planner(config)
    return planner, time.perf_counter() - start
