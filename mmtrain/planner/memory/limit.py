"""`planner.memory_limit`: what a rank's device holds beside activations, and what is left for them. Pure.

A rank may take its limit. The process itself, parameters (gathered copies included), gradients and optimizer state are
there whatever the plan says; a margin is left for what no plan counts. Activations get the rest. After a step that
took more than the limit the margin of that pipeline rank grows, from the second next step on: the next one is planned
by then, and when the change begins must not depend on how fast somebody planned. It always leaves room for a microbatch
of any batch that was trained on.
"""

import math
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmtrain.config.config import Config
from mmtrain.config.memory_amount import MemoryAmount, show_gib
from mmtrain.errors import ConfigError
from mmtrain.planner.memory.rank_state import RankState, Sharding
from mmtrain.planner.operators.cluster import Cluster
from mmtrain.planner.partition.partition import Partition
from mmtrain.schedule.library.greedy import components
from mmtrain.schedule.plan import exceeds
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.spec.spec import ModelSpec

_COLUMNS = ("pp_rank", "limit", "process", "parameters", "gradients", "optimizer", "margin", "left for activations")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBudget:
    """The memory of one rank of a pipeline rank's submesh, in bytes."""

    pp_rank: int
    state: RankState
    limit_bytes: float | None
    """What it may take in all; None: no limit."""
    process_bytes: float
    """What the process takes beside tensors: interpreter and libraries, or the context of an accelerator."""
    margin_bytes: float
    """Left for what no plan counts."""

    @property
    def fixed_bytes(self) -> float:
        """There during the whole step, whatever the plan says."""
        state = self.state
        return self.process_bytes + state.param_bytes + state.grad_bytes + state.optimizer_bytes

    @property
    def activation_bytes(self) -> float | None:
        """What activations may take; None: no limit."""
        return None if self.limit_bytes is None else self.limit_bytes - self.fixed_bytes - self.margin_bytes

    @property
    def is_enough(self) -> bool:
        """Whether something is left for activations, and more than reduced gradients take at a step's end."""
        left = self.activation_bytes
        return left is None or left > self.state.reduced_bytes

    @property
    def cells(self) -> tuple[str, ...]:
        """Its row of the budget's table, in GiB."""
        state = self.state
        parts = (self.process_bytes, state.param_bytes, state.grad_bytes, state.optimizer_bytes, self.margin_bytes)
        amounts = (self.limit_bytes, *parts, self.activation_bytes)
        return (str(self.pp_rank), *("-" if amount is None else show_gib(amount) for amount in amounts))

    def holds(self, activation_bytes: float) -> bool:
        """Whether a plan fits, given the most of its activations."""
        left = self.activation_bytes
        return left is None or (self.is_enough and not exceeds(activation_bytes, left))

    def predicted_bytes(self, activation_bytes: float) -> float:
        """Most bytes at any instant of a step, given the most of activations; the margin is not in it."""
        return self.process_bytes + self.state.peak_bytes(activation_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """The memory of all pipeline ranks of a job."""

    amount: MemoryAmount | None
    """The limit as it was written; None: none was."""
    ranks: tuple[RankBudget, ...]
    """[pp_rank]"""

    @property
    def limited(self) -> bool:
        """Whether there is a limit, of known size."""
        return all(rank.limit_bytes is not None for rank in self.ranks)

    @property
    def margin_bytes(self) -> tuple[float, ...]:
        """[pp_rank]"""
        return tuple(rank.margin_bytes for rank in self.ranks)

    @property
    def activation_limits(self) -> tuple[float | None, ...] | None:
        """[pp_rank] -> bytes that activations may take; None: no limit, or of a device whose size is not known."""
        return tuple(rank.activation_bytes for rank in self.ranks) if self.limited else None

    @property
    def is_enough(self) -> bool:
        """Whether each rank has room for activations."""
        return all(rank.is_enough for rank in self.ranks)

    def holds(self, activation_bytes: Sequence[float]) -> bool:
        """Whether a plan fits. Args: activation_bytes: [pp_rank] -> the most at any instant of it."""
        return all(rank.holds(most) for rank, most in zip(self.ranks, activation_bytes, strict=True))

    def check(self) -> None:
        """Refuses a limit that is not enough.

        Raises: ConfigError: with the first such rank, its part of the table and what to change.
        """
        for rank in self.ranks:
            left = rank.activation_bytes
            if left is not None and not rank.is_enough:
                what = (
                    f"leaves pp_rank {rank.pp_rank} nothing for activations"
                    if left <= 0
                    else f"leaves pp_rank {rank.pp_rank} {show_gib(left)} GiB for activations, but at a step's end "
                    f"reduced gradients take {show_gib(rank.state.reduced_bytes)} GiB there"
                )
                amounts = ", ".join(map(" ".join, zip(_COLUMNS[1:-1], rank.cells[1:-1], strict=True)))
                raise ConfigError(
                    f'planner.memory_limit = "{self.amount.text if self.amount else ""}" {what} (GiB: {amounts}); '
                    "raise it, lower planner.memory_margin, or raise parallelism.pipeline_parallel_degree, "
                    "tensor_parallel_degree or data_parallel_shard_degree"
                )

    def table(self) -> str:
        """One line a pipeline rank, in GiB: its limit, what is subtracted, and what is left."""
        rows = [_COLUMNS, *(rank.cells for rank in self.ranks)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(["memory in GiB:", *lines])

    def with_margins(self, margin_bytes: Sequence[float]) -> "MemoryBudget":
        """The budget with other margins. Args: margin_bytes: [pp_rank]."""
        ranks = (replace(rank, margin_bytes=m) for rank, m in zip(self.ranks, margin_bytes, strict=True))
        return replace(self, ranks=tuple(ranks))

    def with_process(self, process_bytes: float) -> "MemoryBudget":
        """The budget of processes that take other bytes beside tensors."""
        return replace(self, ranks=tuple(replace(rank, process_bytes=process_bytes) for rank in self.ranks))

    def raised(self, excess_bytes: Sequence[float]) -> "MemoryBudget":
        """The budget after a step, with margins that cover what that step took beside the prediction.

        One step takes no more than half of what was left for activations.

        Args: excess_bytes: [pp_rank] -> measured less predicted where the limit was passed; 0 elsewhere.
        """
        margins = []
        for rank, excess in zip(self.ranks, excess_bytes, strict=True):
            left = rank.activation_bytes or 0.0
            margins.append(max(rank.margin_bytes, min(excess, rank.margin_bytes + left / 2)))
        return self.with_margins(margins)

    def leaving(self, needed_bytes: Sequence[float], least: "MemoryBudget") -> "MemoryBudget":
        """The budget with margins no larger than what activations, and reduced gradients at a step's end, leave.

        Args:
            needed_bytes: [pp_rank] -> the least that activations take.
            least: of the same ranks; margins do not become smaller than its.
        """
        margins = []
        for rank, needed, other in zip(self.ranks, needed_bytes, least.ranks, strict=True):
            room = max(needed, rank.state.reduced_bytes) + 1.0  # of rounding
            most = math.inf if rank.limit_bytes is None else rank.limit_bytes - rank.fixed_bytes - room
            margins.append(max(other.margin_bytes, min(rank.margin_bytes, most)))
        return self.with_margins(margins)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRule:
    """What `[planner]` says of memory, before the partition is known."""

    amount: MemoryAmount | None
    """None: no limit."""
    limit_bytes: float | None
    """None: no limit, or a part of a device whose memory is not known."""
    margin: float
    """Part of the limit."""
    sharding: Sharding

    @classmethod
    def of(cls, config: Config, device_bytes: float | None = None) -> "MemoryRule":
        """The rule of a job.

        Args: device_bytes: memory of the device that a rank has; None: that of `planner.hardware`, if it is set.
        Raises: ConfigError: hardware that does not exist.
        """
        section = config.planner
        amount = MemoryAmount.parse("planner.memory_limit", section.memory_limit) if section.memory_limit else None
        if amount and amount.fraction and device_bytes is None:
            device_bytes = _hardware_bytes(config)
        return cls(
            amount=amount,
            limit_bytes=amount.bytes_of(device_bytes) if amount else None,
            margin=section.memory_margin,
            sharding=Sharding.of(config),
        )

    @classmethod
    def of_device(cls, config: Config) -> "MemoryRule":
        """The rule of a job that, without a limit of known size, may take all that a device of `planner.hardware` has.

        Raises: ConfigError: hardware that does not exist.
        """
        rule = cls.of(config)
        return rule if rule.limit_bytes is not None else replace(rule, limit_bytes=_hardware_bytes(config))

    def budget(self, spec: ModelSpec, partition: Partition, process_bytes: float = 0.0) -> MemoryBudget:
        """The budget on a partition. Args: process_bytes: what a process takes beside tensors."""
        ranks = (
            RankBudget(
                pp_rank=pp_rank,
                state=self.sharding.rank_state(spec, partition, pp_rank),
                limit_bytes=self.limit_bytes,
                process_bytes=process_bytes,
                margin_bytes=self.margin * (self.limit_bytes or 0.0),
            )
            for pp_rank in range(partition.num_ranks)
        )
        return MemoryBudget(amount=self.amount, ranks=tuple(ranks))


def _hardware_bytes(config: Config) -> float | None:
    """Memory of a device of `planner.hardware`; None: it is not set."""
    if not config.planner.hardware:
        return None
    return Cluster.of(config.planner.hardware, config.parallelism.mesh_shape.world_size).hardware.memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetHistory:
    """The budgets of a run's steps: the first, and one from each step on whose margins are larger."""

    budget: MemoryBudget
    """Its margins are those of the first steps."""
    device: str
    """Kind of device that the process's bytes were measured on."""
    margins: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """(step, [pp_rank] -> bytes): from this step on. Ascending."""
    needed_bytes: tuple[float, ...] = ()
    """[pp_rank] -> the least that activations took in any batch, one microbatch alone; empty: no batch yet."""

    def at(self, step: int) -> MemoryBudget:
        """The budget that a step is planned with."""
        found = [margin_bytes for first, margin_bytes in self.margins if first <= step]
        return self.budget.with_margins(found[-1]) if found else self.budget

    @property
    def newest(self) -> MemoryBudget:
        """The budget of steps that come late enough."""
        return self.budget.with_margins(self.margins[-1][1]) if self.margins else self.budget

    def after(self, step: int, excess_bytes: Sequence[float], needed_bytes: Sequence[float]) -> "BudgetHistory":
        """The history after a step. Args: as of `MemoryBudget.raised` and, of this step's batch, `leaving`."""
        before = self.needed_bytes or (0.0,) * len(self.budget.ranks)
        needed = tuple(map(max, before, needed_bytes))
        margins = self.newest.raised(excess_bytes).leaving(needed, self.budget).margin_bytes
        more = () if margins == self.newest.margin_bytes else ((step + 2, margins),)
        return replace(self, margins=(*self.margins, *more), needed_bytes=needed)

    def to_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as JSON holds it."""
        return {
            "limit": self.budget.amount.text if self.budget.amount else "",
            "device": self.device,
            "process_bytes": self.budget.ranks[0].process_bytes,
            "margins": [[step, list(margin_bytes)] for step, margin_bytes in self.margins],
            "needed_bytes": list(self.needed_bytes),
        }

    def resumed(self, saved: Mapping[str, Any]) -> "BudgetHistory":
        """This run's history, going on where another one stopped that had the same limit on as many pipeline ranks.

        What the process takes is then also that of the run before, so that plans are the same. Margins are never
        lower than this run's config says.

        Args: saved: of `to_dict`; of another run, or empty: this run starts anew.
        """
        mine = self.to_dict()
        rows = [(int(step), tuple(map(float, margin_bytes))) for step, margin_bytes in saved.get("margins", ())]
        equal = all(saved.get(key) == mine[key] for key in ("limit", "device"))
        if not equal or any(len(margin_bytes) != len(self.budget.ranks) for _, margin_bytes in rows):
            return self
        budget = self.budget.with_process(float(saved["process_bytes"]))
        nothing = (0.0,) * len(budget.ranks)
        margins = tuple(
            (step, budget.with_margins(margin_bytes).leaving(nothing, budget).margin_bytes)
            for step, margin_bytes in rows
        )
        needed = tuple(map(float, saved.get("needed_bytes", nothing)))
        return replace(self, budget=budget, margins=margins, needed_bytes=needed)


def least_activation_bytes(problem: PlanningProblem) -> tuple[float, ...]:
    """[pp_rank] -> bytes with which one microbatch after another can run, each stage with its leanest option.

    Works that depend on each other count as one microbatch. With less on any rank there is no plan.
    """
    graph, cluster = problem.graph, components(problem.graph)
    kept: defaultdict[tuple[int, int], float] = defaultdict(float)
    passing: defaultdict[tuple[int, int], float] = defaultdict(float)
    restored = [0.0] * graph.num_ranks
    for stage, work in graph.nodes():
        rank, options = graph.stage_rank[stage], problem.options(stage, work)
        key, least = (cluster[work], rank), min(option.activation_bytes for option in options)
        if options[0].has_backward:
            kept[key] += least
        else:  # freed when its forward ends
            passing[key] = max(passing[key], least)
        restored[rank] = max(restored[rank], *(option.restored_bytes for option in options))
    needed = [0.0] * graph.num_ranks
    for key in (*kept, *passing):
        needed[key[1]] = max(needed[key[1]], kept[key], passing[key])
    return tuple(map(operator.add, needed, restored))
