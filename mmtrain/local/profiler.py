"""Measures the time of a job's layers, actions, transfers and step ends on this machine, with its trainer and runtime.

A trainer runs batches of noise with each layer as a stage of its own, then with each module as one stage, with whole
and with split backwards. The first run gives the seconds of each layer; the difference to the second is the overhead of
an action; the pauses between actions are the runtime's. With several pipeline ranks, as many copies as there are cores
for run in parallel, since ranks share caches and memory; two real ranks measure messages and step ends.

All of this is repeated in rounds. On a CPU, the compute of one thread is timed on that thread's own clock, which other
processes do not advance. Only actions count during which a fixed piece of work ran at about its median speed.
"""

import itertools
import math
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.config.config import Config
from mmtrain.config.topology import JobLayout
from mmtrain.costs.cost_model import HostCopy
from mmtrain.costs.profile.profile import Profile
from mmtrain.data.noise_batches import noise_batch
from mmtrain.errors import ConfigError
from mmtrain.local.driven_steps import TimedStep, timed_steps
from mmtrain.local.ranks import run_on_ranks
from mmtrain.modality.metadata import IterationMeta
from mmtrain.modality.probes import probing_iteration, work_curve
from mmtrain.observe.machine_speed import WatchedClock
from mmtrain.parallel.grads import local_part
from mmtrain.parallel.mesh import build_mesh
from mmtrain.parallel.stage import ModalityStage
from mmtrain.simulator.profiling.measurements import NUM_BLOCKS, assemble
from mmtrain.simulator.profiling.probing import CUTS, REPEATS, ProbeCut, probing_job, small_job
from mmtrain.simulator.profiling.samples import ProcessSamples, StepSample, slowest
from mmtrain.training.trainer import Trainer

MESSAGE_BYTES = tuple(4**k for k in range(5, 13))
"""Sizes of the measured transfers: 1 KiB to 16 MiB."""

_LOOK_EVERY_S = 2e-3
"""Seconds between two measurements of the speed of the machine; each takes a tenth of that."""
_MESSAGES = 12
"""Messages of each size, each way, in one round."""
_COMPUTED_S = 6e-3
"""Compute on a CPU after sending one: longer than a time slice of the scheduler."""
_COPIED_BYTES = 1 << 26
"""Size of a measured copy between device and CPU memory."""

Say = Callable[[str], None]


def profile_job(config: Config, *, rounds: int = 3, steps: int = 4, say: Say = print) -> Profile:
    """The profile of a job on this machine.

    Args: rounds: repetitions of all measurements. steps: of each trainer in a round, after a warm-up step.
    Raises: ConfigError: fewer CUDA devices than ranks that share a work, ranks that share a device, or activation
        offloading.
    """
    if config.activation_checkpoint.mode == "offload":
        raise ConfigError(
            'profile: activation_checkpoint.mode = "offload" would be measured as part of the layers; profile with '
            'another mode ("none"): copies to the CPU are measured separately'
        )
    if config.comm.share_device:
        raise ConfigError(
            "profile: comm.share_device = true; timings of ranks that share a device do not apply to ranks with one "
            "each; remove it"
        )
    section = config.parallelism
    submesh = section.tensor_parallel_degree * section.context_parallel_degree
    copies = _copies(section.pipeline_parallel_degree, submesh)
    meta = _everything(config)
    say(
        f"profile: {len(meta.microbatches)} batches of noise, {rounds} rounds of {steps} steps, {copies} x {submesh} "
        f"processes; load of this machine before {_load()}"
    )
    if not torch.cuda.is_available() and submesh > (os.cpu_count() or 1):
        say(f"profile: {submesh} ranks share {os.cpu_count()} cores, so they are slower than with a core each")
    with tempfile.TemporaryDirectory(prefix="mmtrain-profile-") as folder:
        samples = run_on_ranks(_measure_layers, submesh, config, rounds, steps, folder, comm=config.comm, copies=copies)
        pairs: list[ProcessSamples] = []
        if section.pipeline_parallel_degree > 1 and (not torch.cuda.is_available() or torch.cuda.device_count() > 1):
            say("profile: transfers and ends of steps, 2 processes")
            pairs = run_on_ranks(_measure_pair, 2, config, rounds, steps, folder, comm=config.comm)
    say(f"profile: load of this machine after {_load()}")
    together = [slowest(samples[first : first + submesh]) for first in range(0, len(samples), submesh)]
    return assemble(config, meta, together, pairs, _machine(copies))


def _copies(pp: int, submesh: int) -> int:
    if not torch.cuda.is_available():
        return max(1, min(pp, (os.cpu_count() or 1) // submesh))
    if torch.cuda.device_count() < submesh:
        raise ConfigError(
            f"profile: {submesh} tensor- and context-parallel ranks share a work, but there are "
            f"{torch.cuda.device_count()} CUDA devices; lower the degrees, or measure on a machine with more"
        )
    return 1


def _everything(job: Config) -> IterationMeta:
    return IterationMeta(microbatches=(*probing_iteration(job).microbatches, *work_curve(job).microbatches))


def _load() -> str:
    return f"{os.getloadavg()[0]:.2f} on {os.cpu_count()} cores"


# ------------------------------------------------------------------------------------------- measurements


def _measure_layers(device: torch.device, config: Config, rounds: int, steps: int, folder: str) -> ProcessSamples:
    """Actions, pauses, step ends and held bytes of the job's layers, on one pipeline rank."""
    warnings.simplefilter("ignore")  # a measurement is no test of the libraries
    samples = ProcessSamples(host_copy=measure_host_copy(device))
    for number in range(rounds):
        # A job that recomputes all blocks is measured with recomputation, and has no other options.
        repeats = REPEATS.values() if config.activation_checkpoint.mode == "none" else ()
        for cut in (*CUTS, *repeats):
            job = probing_job(config, num_blocks=NUM_BLOCKS, cut=cut, folder=_dump_folder(folder))
            clock = _watched_clock(device)
            with _steps(job, _everything(job), device, clock) as (trainer, timed):
                samples.steps += _samples(cut, timed, steps, clock)
                if cut == ProbeCut(stages="layers", splits=False) and number == 0:
                    with _counting(trainer.model.stages, samples.held, device):
                        next(timed)
        small = small_job(config, folder=_dump_folder(folder))
        last = IterationMeta(microbatches=probing_iteration(small).microbatches[-1:])
        clock = _watched_clock(device)
        with _steps(small, last, device, clock) as (_, timed):
            samples.steps += _samples(None, timed, steps, clock)
    return samples


def _samples(job: ProbeCut | None, timed: Iterator[TimedStep], steps: int, clock: WatchedClock) -> Iterator[StepSample]:
    """Args: clock: of the timed steps."""
    clock.look()
    for step in itertools.islice(timed, steps):
        clock.look()
        rows, pauses, speeds = {}, {}, {}
        start, end = step.outcome.span
        last, graph = start, step.plan.problem.graph
        for action, begin, done in step.outcome.rows:
            key = (action.stage, graph.work_of(action), action.kind)
            rows[key], pauses[key] = done - begin, begin - last
            speeds[key] = clock.speed_s(last, done)
            last = done
        yield StepSample(
            job=job,
            rows=rows,
            pauses=pauses,
            speeds_s=speeds,
            outside_s=(step.end_s - step.start_s) - (end - start),
            outside_speed_s=clock.speed_s(end, step.end_s),
        )


def measure_host_copy(device: torch.device) -> HostCopy:
    """Bandwidth between device and CPU memory: the slower direction, at its best of five."""
    cuda = device.type == "cuda"
    on_device = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    on_host = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, pin_memory=cuda)
    rates = []
    for target, source in ((on_host, on_device), (on_device, on_host)):
        seconds = []
        for _ in range(5):
            if cuda:
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            if cuda:
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
        rates.append(_COPIED_BYTES / min(seconds))
    return HostCopy(bytes_per_s=min(rates), overlaps=cuda)


@contextmanager
def _steps(
    job: Config, meta: IterationMeta, device: torch.device, clock: Callable[[], float]
) -> Iterator[tuple[Trainer, Generator[TimedStep]]]:
    """A trainer of a job and its steps on noise, after the first one."""
    trainer = Trainer(job)
    batches = itertools.repeat((noise_batch(job.model, meta, job.debug.seed), meta))
    timed = timed_steps(trainer, device, batches, clock=clock)
    try:
        next(timed)
        yield trainer, timed
    finally:
        timed.close()


def _watched_clock(device: torch.device) -> WatchedClock:
    """The clock of a measurement: on a CPU without other ranks the thread's own, which other processes do not advance;
    else the CPU's wall clock, which measures the speed only between steps, as other ranks would wait for it, and never
    on a device."""
    if device.type != "cpu":
        return WatchedClock(time.perf_counter, every_s=None)
    if dist.get_world_size() == 1:
        return WatchedClock(time.thread_time, every_s=_LOOK_EVERY_S)
    return WatchedClock(time.perf_counter, every_s=math.inf)


def _dump_folder(folder: str) -> str:
    return f"{folder}/{os.getpid()}"


@contextmanager
def _counting(
    stages: Sequence[ModalityStage], held: dict[tuple[int, int], float], device: torch.device
) -> Iterator[None]:
    """A context that counts the bytes that each forward keeps for its backward: each storage once, no parameter."""
    for stage in stages:
        stage.forward_one_chunk = _Counted(stage, held, device)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for stage in stages:
            del stage.forward_one_chunk


class _Counted:
    """A forward of a stage that counts the storage kept by autograd."""

    def __init__(self, stage: ModalityStage, held: dict[tuple[int, int], float], device: torch.device) -> None:
        self._forward, self._held, self._device = stage.forward_one_chunk, held, device
        self._stage, self._chunk, self._offloader = stage.stage_index, stage.submod, stage.memory.offloader

    def __call__(self, work: int, *args: Any, **kwargs: Any) -> Any:
        if self._device.type == "cuda":  # growth of the allocated memory without the output
            before = torch.cuda.memory_allocated(self._device)
            output = self._forward(work, *args, **kwargs)
            self._offloader.settle()  # frees offloaded activations
            root = output if isinstance(output, Tensor) else output.loss_sum
            used = torch.cuda.memory_allocated(self._device) - before - root.untyped_storage().nbytes()
            self._held[self._stage, work] = float(max(0, used))
            return output
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = self._forward(work, *args, **kwargs)
        # After the forward: FSDP2 gathers parameters in it.
        own = {local_part(parameter).untyped_storage().data_ptr() for parameter in self._chunk.parameters()}
        self._held[self._stage, work] = float(sum(size for storage_ptr, size in kept.items() if storage_ptr not in own))
        return output


def _measure_pair(device: torch.device, config: Config, rounds: int, steps: int, folder: str) -> ProcessSamples:
    """Transfers between two pipeline ranks, and their step ends."""
    warnings.simplefilter("ignore")
    samples = ProcessSamples()
    parallelism = replace(
        config.parallelism, tensor_parallel_degree=1, tensor_parallel_rows="divided", context_parallel_degree=1
    )
    plain = replace(config, parallelism=parallelism)
    for _ in range(rounds):
        _measure_messages(samples, device)
        job = probing_job(plain, num_blocks=NUM_BLOCKS, cut=CUTS[2], num_ranks=2, folder=_dump_folder(folder))
        with _steps(job, probing_iteration(job), device, time.perf_counter) as (_, timed):
            for _ in range(steps):
                step = next(timed)
                samples.spans.append((step.outcome.span[1], step.end_s))
                rows: list[Any] = [None, None]
                dist.all_gather_object(rows, step.outcome.rows)
                samples.runs.append((step.plan.problem, step.plan.program, tuple(rows)))
    return samples


def _measure_messages(samples: ProcessSamples, device: torch.device) -> None:
    """Messages in both directions, on a CPU while the sender computes.

    A message there is moved by a thread that competes with computing threads for a core, which may take milliseconds.
    """
    mesh = build_mesh(JobLayout.grid(pp=2), device)
    me, other = mesh.pp_rank, 1 - mesh.pp_rank
    to, fro = mesh.channels.group(me, other), mesh.channels.group(other, me)
    peer = mesh.channels.global_rank(other)
    clock = time.perf_counter  # shared by all processes of a machine
    square = torch.ones(96, 96)
    for num_bytes in MESSAGE_BYTES:
        sent = torch.ones(num_bytes // 4, device=device)
        for turn in range(2 * (1 + _MESSAGES)):
            sender, got = turn % 2, torch.empty_like(sent)
            dist.barrier()
            start = clock()
            work = dist.isend(sent, peer, group=to) if me == sender else dist.irecv(got, peer, group=fro)
            assert work is not None
            if me == sender:
                while device.type == "cpu" and clock() - start < _COMPUTED_S:
                    square @ square
            work.wait()
            _settle(device)
            moments: list[float] = [0.0, 0.0]
            dist.all_gather_object(moments, start if me == sender else clock())
            if turn > 1:  # the first ones also allocate memory
                samples.trips[num_bytes].append(moments[1 - sender] - moments[sender])


def _settle(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# -------------------------------------------------------------------------------------------- the machine


def _machine(copies: int) -> dict[str, str | int | float]:
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": torch.cuda.get_device_name() if cuda else _processor(),
        "device": "cuda" if cuda else "cpu",
        "cores": os.cpu_count() or 1,
        "threads": int(os.environ.get("OMP_NUM_THREADS", "1")),
        "copies": copies,
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
