"""Memory of a running rank: device memory, memory of the process besides tensors, the peak of each step, and the
margins, which grow after a step that exceeds `planner.memory_limit`.

On CUDA a peak is that of the allocator plus the context. On a CPU it is that of the whole process (resident set), which
Linux can count from a given time on.
"""

import logging
import math
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mmtrain.config.config import Config, each_pipeline
from mmtrain.config.memory_amount import GIB, show_bytes
from mmtrain.observe.metrics import Metrics
from mmtrain.planner.iteration import IterationPlan, IterationPlanner
from mmtrain.planner.job import Job
from mmtrain.planner.memory.limit import BudgetHistory, MemoryBudget, MemoryRule, least_activation_bytes

logger = logging.getLogger("mmtrain")

ROUNDED_TO_BYTES = 2.0**26
"""The memory of a process is rounded up to a multiple, so that small variations between runs change no plan."""

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
_GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of a rank before its model is built."""

    device_bytes: float
    """Memory of a rank's device; on a CPU, that of the machine divided by its ranks. Of a job, the minimum."""
    process_bytes: float
    """Memory of the process besides tensors. Of a job, the maximum."""

    @classmethod
    def agreed(cls, device: torch.device, num_ranks: int) -> "DeviceMemory":
        """The values that hold for all ranks. Collective over the job. Args: num_ranks: on this machine."""
        own = cls.own(device, num_ranks)
        largest = torch.tensor([-own.device_bytes, own.process_bytes], dtype=torch.float64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return cls(device_bytes=-float(largest[0]), process_bytes=float(largest[1]))

    @classmethod
    def own(cls, device: torch.device, num_ranks: int) -> "DeviceMemory":
        """The values of this rank. Args: num_ranks: on this machine."""
        memory = _cuda_memory(device, _sharers(num_ranks)) if device.type == "cuda" else _host_memory(num_ranks)
        device_bytes, process_bytes = memory
        rounded = -(-process_bytes // ROUNDED_TO_BYTES) * ROUNDED_TO_BYTES
        return cls(device_bytes=device_bytes, process_bytes=rounded)


def _sharers(num_ranks: int) -> int:
    """Ranks on one CUDA device of this machine: 1, except with comm.share_device."""
    return -(-num_ranks // int(torch.cuda.device_count()))


def _cuda_memory(device: torch.device, sharers: int = 1) -> tuple[float, float]:
    """Bytes of a device for each of the ranks that share it, and those besides tensors, before any rank has tensors."""
    free, total = torch.cuda.mem_get_info(device)
    return total / sharers, max(0.0, float(total - free - torch.cuda.memory_reserved(device))) / sharers


def _host_memory(num_ranks: int) -> tuple[float, float]:
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        allowed = _GROUP_LIMIT.read_text().strip()
        total = min(total, float(allowed)) if allowed != "max" else total
    except OSError:  # no control group, or not version 2
        pass
    return total / num_ranks, _status_bytes("VmRSS") or 0.0


def _status_bytes(key: str) -> float | None:
    """A size in /proc/self/status, in bytes; None: absent."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:  # not Linux
        return None
    matching = [line for line in lines if line.startswith(key + ":")]
    return float(matching[0].split()[1]) * 1024 if matching else None


class PeakMeter:
    """The peak memory of this rank since `start`."""

    def __init__(self, device: torch.device, process_bytes: float, *, shared: bool = False) -> None:
        """Args:
        process_bytes: added to the tensors of an accelerator; on a CPU it is part of the measurement.
        shared: other ranks are on the same CUDA device.
        """
        self._device, self._shared = device, shared
        self._process_bytes = process_bytes
        self._resets = True

    def start(self) -> None:
        """Resets the peak."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._resets = _reset_peak()

    def peak_bytes(self) -> float | None:
        """The peak since `start`; None: not known on this system."""
        if self._device.type == "cuda":
            outside = self._process_bytes
            if not self._shared:  # else tensors of other ranks are included
                outside = max(outside, _cuda_memory(self._device)[1])  # NCCL's buffers are allocated later
            return float(torch.cuda.max_memory_allocated(self._device)) + outside
        return _status_bytes("VmHWM") if self._resets else None


def memory_gib(device: torch.device) -> tuple[float, float]:
    """The peak memory of this rank in GiB, and in percent of the device: the allocator's on a GPU, else the process's.

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


def _reset_peak() -> bool:
    """Makes Linux count the peak of this process from now on; returns whether it does."""
    try:
        _RESET.write_text("5")
    except OSError:
        return False
    return True


def in_gib(num_bytes: float | None) -> float:
    """Bytes in GiB; NaN if they are not known."""
    return math.nan if num_bytes is None else num_bytes / GIB


class JobMemory:
    """The memory of a job's ranks from step to step. Its methods are called by all ranks alike."""

    def __init__(
        self,
        device: torch.device,
        pp_rank: int,
        budgets: Sequence[BudgetHistory],
        own: int = 0,
        *,
        shares_device: bool = False,
    ) -> None:
        """Args: budgets: of the pipelines of each depth; own: which of them is this rank's."""
        self._device, self._pp_rank, self._all, self._own = device, pp_rank, tuple(budgets), own
        self.meter = PeakMeter(device, self._budgets.budget.ranks[pp_rank].process_bytes, shared=shares_device)
        """The meter of the step that runs."""

    @classmethod
    def budgeted(cls, config: Config, jobs: Sequence[Job], device: torch.device, found: DeviceMemory) -> "JobMemory":
        """What the plans of a layout have to leave free, of what was found before any model was there.

        Args: jobs: [pipeline] -> its job.
        Raises: ConfigError: planner.memory_limit leaves nothing for activations.
        """
        layout, by_depth = config.parallelism.layout, {job.partition.num_ranks: job for job in jobs}
        place = layout.coordinates(dist.get_rank())

        def budget_of(own: Config) -> BudgetHistory:
            job, rule = by_depth[own.parallelism.layout.pp], MemoryRule.of(own, found.device_bytes, device=device.type)
            budget = rule.budget(job.spec, job.partition, found.process_bytes)
            budget.check()
            return BudgetHistory(budget=budget, device=device.type)

        of_pipelines = dict(zip(layout.depths, each_pipeline(config, budget_of), strict=True))
        own = list(of_pipelines).index(layout.depths[place.pipeline])
        made = cls(device, place.pp, list(of_pipelines.values()), own, shares_device=config.comm.share_device)
        for budgets in made._all:
            if budgets.budget.limited:
                logger.info("%s%s", made._of(budgets), budgets.budget.table())
        made.meter.start()
        if made.meter.peak_bytes() is None:
            logger.info("memory: the peak of a step cannot be measured on this system")
        return made

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Continues with the margins of an earlier run.

        Args: saved: of `to_dict`.
        Raises: ConfigError: they leave nothing for activations.
        """
        before = self._all
        self._all = tuple(one.resumed(saved.get("depths", {}).get(f"{one.num_ranks}", saved)) for one in before)
        for old, new in zip(before, self._all, strict=True):
            new.newest.check()
            if new != old:
                logger.info("resumed %s%s", self._of(new), new.newest.table())

    def to_dict(self) -> dict[str, Any]:
        """The state for a resumed run; empty without a limit."""
        parts = {f"{budgets.num_ranks}": budgets.to_dict() for budgets in self._all if budgets.budget.limited}
        return {"depths": parts} if len(parts) > 1 else next(iter(parts.values()), {})

    def _of(self, budgets: BudgetHistory) -> str:
        """The pipelines that have these budgets, for the log; empty: all."""
        return f"pipelines of {budgets.num_ranks} ranks: " if len(self._all) > 1 else ""

    @property
    def _budgets(self) -> BudgetHistory:
        """The budgets of this rank's pipeline."""
        return self._all[self._own]

    def budget(self, step: int) -> MemoryBudget:
        """The budget of a step."""
        return self._budgets.at(step)

    def limited(self, job: Job, step: int) -> IterationPlanner:
        """The planner of a job with the limits of a step."""
        limits, widest = (b.activation_limits for b in (self._budgets.at(step), self._budgets.budget))
        return IterationPlanner(job, limits, None if widest == limits else widest)

    def end_step(self, step: int, plan: IterationPlan, metrics: Metrics) -> None:
        """Records the memory of a step; larger margins for later steps if it exceeded the limit. Collective over the
        job."""
        measured, budget = self.meter.peak_bytes(), self._budgets.at(step).ranks[self._pp_rank]
        predicted = budget.predicted_bytes(plan.result.timeline.peak_bytes[self._pp_rank])
        excess = [torch.zeros(len(budgets.budget.ranks), dtype=torch.float64) for budgets in self._all]
        if measured is not None and budget.limit_bytes is not None and measured > budget.limit_bytes:
            excess[self._own][self._pp_rank] = max(0.0, measured - predicted)
        needed = [torch.zeros_like(of_depth) for of_depth in excess]
        if self._budgets.budget.limited:
            needed[self._own] += torch.tensor(least_activation_bytes(plan.problem))
        reserved_gib, reserved_percent = memory_gib(self._device)
        metrics.record("memory_gib", reserved_gib)
        metrics.record("memory_percent", reserved_percent)
        metrics.record("memory_predicted_gib", in_gib(predicted))
        metrics.record("memory_measured_gib", in_gib(measured))
        metrics.record("memory_limit_gib", in_gib(budget.limit_bytes))
        largest = metrics.reduce_max(excess=torch.cat(excess), needed=torch.cat(needed))
        if self._budgets.budget.limited:
            sizes = [len(of_depth) for of_depth in excess]
            parts = (largest[name].split(sizes) for name in ("excess", "needed"))
            self._all = tuple(
                self._after(step, budgets, over.tolist(), least.tolist())
                for budgets, over, least in zip(self._all, *parts, strict=True)
            )

    def _after(
        self, step: int, before: BudgetHistory, excess: Sequence[float], needed: Sequence[float]
    ) -> BudgetHistory:
        """The budgets of the pipelines of one depth after a step, logged.

        Args: [pp_rank] -> bytes, equal on all ranks. excess: over the prediction where the limit was exceeded.
        needed: the least activations of a microbatch.
        """
        after = before.after(step, excess, needed)
        for old, new in zip(before.newest.ranks, after.newest.ranks, strict=True):
            margins = f"from {show_bytes(old.margin_bytes)} to {show_bytes(new.margin_bytes)} from step {step + 2} on"
            if new.margin_bytes > old.margin_bytes:  # equal on all ranks: one of them logs it
                logger.info(
                    "step %d: %spp_rank %d passed planner.memory_limit, with %s more than predicted; its margin grows "
                    "%s",
                    step,
                    self._of(after),
                    new.pp_rank,
                    show_bytes(excess[new.pp_rank]),
                    margins,
                )
            elif new.margin_bytes < old.margin_bytes:
                logger.info(
                    "step %d: %sone microbatch takes %s on pp_rank %d; to leave room for it, the margin that had grown "
                    "goes back %s",
                    step,
                    self._of(after),
                    show_bytes(needed[new.pp_rank]),
                    new.pp_rank,
                    margins,
                )
        return after
