"""`planner.memory_limit`: the memory of a rank without activations, and the remainder for activations. Pure.

A rank may use memory up to its limit. The process itself, parameters (gathered copies included), gradients,
optimizer state and inputs that wait on an accelerator take a fixed amount, whatever the plan. A margin covers memory
that no plan counts. Activations get the remainder. After a step that exceeded the limit, the margin of that pipeline
rank grows from the second next step on: the next step may be planned already, and the start of the change must not
depend on the speed of planning. The margin always leaves room for one microbatch of any batch that was trained on.
"""

import math
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmtrain.config.config import Config
from mmtrain.config.memory_amount import MemoryAmount, show_bytes, show_gib
from mmtrain.config.planner import PlannerConfig
from mmtrain.costs.operators.cluster import Cluster
from mmtrain.costs.operators.hardware import Hardware
from mmtrain.errors import MemoryLimitError
from mmtrain.planner.memory.rank_bytes import RankBytes, Sharding
from mmtrain.planner.partition.partition import Partition
from mmtrain.schedule.library.memory import components
from mmtrain.schedule.plan import exceeds
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.spec.spec import ModelSpec

_COLUMNS = (
    "pp_rank",
    "limit",
    "process",
    "parameters",
    "gradients",
    "optimizer",
    "inputs",
    "margin",
    "left for activations",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBudget:
    """The memory of one rank of a pipeline rank's submesh, in bytes."""

    pp_rank: int
    state: RankBytes
    limit_bytes: float | None
    """Bytes that it may take in total; None: no limit."""
    process_bytes: float
    """Bytes of the process in addition to tensors: interpreter and libraries, or the context of an accelerator."""
    inputs_bytes: float = 0.0
    """The bytes of inputs that wait on an accelerator for their forwards (`training.inputs_ahead_mib`)."""
    margin_bytes: float
    """Reserved for memory that no plan counts."""

    @property
    def fixed_bytes(self) -> float:
        """Bytes that are held during the whole step, whatever the plan."""
        state = self.state
        return self.process_bytes + self.inputs_bytes + state.param_bytes + state.grad_bytes + state.optimizer_bytes

    @property
    def activation_bytes(self) -> float | None:
        """Bytes that activations may take; None: no limit."""
        return None if self.limit_bytes is None else self.limit_bytes - self.fixed_bytes - self.margin_bytes

    @property
    def is_enough(self) -> bool:
        """Whether activations may take more bytes than the reduced gradients take at a step's end."""
        available = self.activation_bytes
        return available is None or available > self.state.reduced_bytes

    @property
    def cells(self) -> tuple[str, ...]:
        """The rank's row of the budget's table, in GiB."""
        state = self.state
        fixed = (self.process_bytes, state.param_bytes, state.grad_bytes, state.optimizer_bytes, self.inputs_bytes)
        columns = (self.limit_bytes, *fixed, self.margin_bytes, self.activation_bytes)
        return (str(self.pp_rank), *("-" if num_bytes is None else show_gib(num_bytes) for num_bytes in columns))

    def holds(self, activation_bytes: float) -> bool:
        """Whether a plan fits. Args: activation_bytes: the peak of its activations."""
        available = self.activation_bytes
        return available is None or (self.is_enough and not exceeds(activation_bytes, available))

    def predicted_bytes(self, activation_bytes: float) -> float:
        """Peak bytes of a step, without the margin. Args: activation_bytes: the peak of its activations."""
        return self.process_bytes + self.inputs_bytes + self.state.peak_bytes(activation_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """The memory of all pipeline ranks of a job."""

    amount: MemoryAmount | None
    """The limit as it was written; None: none was."""
    ranks: tuple[RankBudget, ...]
    """The budget of each pipeline rank."""

    @property
    def limited(self) -> bool:
        """Whether there is a limit, of known size."""
        return all(rank.limit_bytes is not None for rank in self.ranks)

    @property
    def margin_bytes(self) -> tuple[float, ...]:
        """The margin of each pipeline rank."""
        return tuple(rank.margin_bytes for rank in self.ranks)

    @property
    def activation_limits(self) -> tuple[float | None, ...] | None:
        """[pp_rank] -> bytes that activations may take; None: no limit, or a part of a device of unknown memory."""
        return tuple(rank.activation_bytes for rank in self.ranks) if self.limited else None

    @property
    def is_enough(self) -> bool:
        """Whether each rank has room for activations."""
        return all(rank.is_enough for rank in self.ranks)

    def holds(self, activation_bytes: Sequence[float]) -> bool:
        """Whether a plan fits. Args: activation_bytes: [pp_rank] -> the peak of its activations."""
        return all(rank.holds(peak_bytes) for rank, peak_bytes in zip(self.ranks, activation_bytes, strict=True))

    def check(self) -> None:
        """Checks that the limit leaves memory for activations on each rank.

        Raises: MemoryLimitError: it does not; names the first such rank, its row of the table and what to change.
        """
        for rank in self.ranks:
            available = rank.activation_bytes
            if available is not None and not rank.is_enough:
                what = (
                    f"leaves pp_rank {rank.pp_rank} nothing for activations"
                    if available <= 0
                    else f"leaves pp_rank {rank.pp_rank} {show_gib(available)} GiB for activations, but at a step's "
                    f"end reduced gradients take {show_gib(rank.state.reduced_bytes)} GiB there"
                )
                cells = ", ".join(map(" ".join, zip(_COLUMNS[1:-1], rank.cells[1:-1], strict=True)))
                raise MemoryLimitError(
                    f'planner.memory_limit = "{self.amount.text if self.amount else ""}" {what} (GiB: {cells}); '
                    "raise it, lower planner.memory_margin, or raise parallelism.pipeline_parallel_degree, "
                    "tensor_parallel_degree or data_parallel_shard_degree",
                    rank.pp_rank,
                    rank.state.reduced_bytes - available,
                )

    def table(self) -> str:
        """A table in GiB, one line for each pipeline rank: limit, amounts subtracted from it, and the remainder."""
        rows = [_COLUMNS, *(rank.cells for rank in self.ranks)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(["memory in GiB:", *lines])

    def with_margins(self, margin_bytes: Sequence[float]) -> "MemoryBudget":
        """The budget with other margins. Args: margin_bytes: [pp_rank]."""
        ranks = (replace(rank, margin_bytes=m) for rank, m in zip(self.ranks, margin_bytes, strict=True))
        return replace(self, ranks=tuple(ranks))

    def with_process(self, process_bytes: float) -> "MemoryBudget":
        """The budget with other bytes of a process in addition to its tensors."""
        return replace(self, ranks=tuple(replace(rank, process_bytes=process_bytes) for rank in self.ranks))

    def raised(self, excess_bytes: Sequence[float]) -> "MemoryBudget":
        """The budget after a step, with margins that cover the bytes by which the step exceeded the prediction.

        One step moves at most half of the bytes for activations to the margin.

        Args: excess_bytes: [pp_rank] -> measured less predicted where the limit was passed; 0 elsewhere.
        """
        margins = []
        for rank, excess in zip(self.ranks, excess_bytes, strict=True):
            available = rank.activation_bytes or 0.0
            margins.append(max(rank.margin_bytes, min(excess, rank.margin_bytes + available / 2)))
        return self.with_margins(margins)

    def leaving(self, needed_bytes: Sequence[float], least: "MemoryBudget") -> "MemoryBudget":
        """The budget with margins that leave enough for activations, and for reduced gradients at a step's end.

        Args:
            needed_bytes: [pp_rank] -> the least bytes that activations take.
            least: a budget of the same ranks; margins do not become smaller than those of it.
        """
        margins = []
        for rank, least_bytes, lowest in zip(self.ranks, needed_bytes, least.ranks, strict=True):
            room = max(least_bytes, rank.state.reduced_bytes) + 1.0  # of rounding
            largest_margin = math.inf if rank.limit_bytes is None else rank.limit_bytes - rank.fixed_bytes - room
            margins.append(max(lowest.margin_bytes, min(rank.margin_bytes, largest_margin)))
        return self.with_margins(margins)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRule:
    """The memory limit and margin of `[planner]`, before the partition is known."""

    amount: MemoryAmount | None
    """None: no limit."""
    limit_bytes: float | None
    """None: no limit, or a part of a device of unknown memory."""
    margin: float
    """The margin as a fraction of the limit."""
    sharding: Sharding
    inputs_bytes: float
    """The bytes of inputs that wait on an accelerator for their forwards."""

    @classmethod
    def of(cls, config: Config, device_bytes: float | None = None, *, device: str = "") -> "MemoryRule":
        """The rule of a job.

        Args:
            device_bytes: memory of a rank's device; None: that of `planner.hardware`, if it is set.
            device: its type; empty: that of `planner.hardware`, or a CPU.
        Raises: ConfigError: the hardware does not exist.
        """
        section, hardware = config.planner, _hardware(config)
        type_of_device = device or (hardware.compute.value if hardware else "cpu")
        amount = MemoryAmount.parse("planner.memory_limit", section.memory_limit) if section.memory_limit else None
        if amount and amount.fraction and device_bytes is None:
            device_bytes = hardware.memory_bytes if hardware else None
        return cls(
            amount=amount,
            limit_bytes=amount.bytes_of(device_bytes) if amount else None,
            margin=section.memory_margin,
            sharding=Sharding.of(config),
            inputs_bytes=config.training.inputs_ahead_bytes if type_of_device != "cpu" else 0.0,
        )

    @classmethod
    def of_device(cls, config: Config) -> "MemoryRule":
        """The rule of a job; without a limit of known size, the limit is the memory of a `planner.hardware` device.

        Raises: ConfigError: the hardware does not exist.
        """
        rule = cls.of(config)
        return rule if rule.limit_bytes is not None else replace(rule, limit_bytes=_hardware_bytes(config))

    def budget(self, spec: ModelSpec, partition: Partition, process_bytes: float = 0.0) -> MemoryBudget:
        """The budget on a partition. Args: process_bytes: bytes of a process in addition to its tensors."""
        ranks = (
            RankBudget(
                pp_rank=pp_rank,
                state=self.sharding.rank_state(spec, partition, pp_rank),
                limit_bytes=self.limit_bytes,
                process_bytes=process_bytes,
                inputs_bytes=self.inputs_bytes,
                margin_bytes=self.margin * (self.limit_bytes or 0.0),
            )
            for pp_rank in range(partition.num_ranks)
        )
        return MemoryBudget(amount=self.amount, ranks=tuple(ranks))


def _hardware(config: Config) -> Hardware | None:
    """`planner.hardware`; None: it is not set."""
    if not config.planner.hardware:
        return None
    return Cluster.of(config.planner.hardware, config.parallelism.layout.world_size).hardware


def _hardware_bytes(config: Config) -> float | None:
    """Memory of a device of `planner.hardware`; None: it is not set."""
    hardware = _hardware(config)
    return hardware.memory_bytes if hardware else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetHistory:
    """The budgets of a run's steps: the first budget, and the margins of each step from which they are larger."""

    budget: MemoryBudget
    """The first budget; its margins are those of the first steps."""
    device: str
    """Kind of device on which the bytes of a process were measured."""
    margins: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """The steps at which margins grow, ascending, each with the bytes of each pp_rank."""
    needed_bytes: tuple[float, ...] = ()
    """[pp_rank] -> the largest of all batches' least activation bytes; empty: no batch yet."""

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.budget.ranks)

    def at(self, step: int) -> MemoryBudget:
        """The budget with which a step is planned."""
        margins = [margin_bytes for first_step, margin_bytes in self.margins if first_step <= step]
        return self.budget.with_margins(margins[-1]) if margins else self.budget

    @property
    def newest(self) -> MemoryBudget:
        """The budget with the newest margins."""
        return self.budget.with_margins(self.margins[-1][1]) if self.margins else self.budget

    def after(self, step: int, excess_bytes: Sequence[float], needed_bytes: Sequence[float]) -> "BudgetHistory":
        """The history after a step. Args: see `MemoryBudget.raised`; needed_bytes: of this batch, see `leaving`."""
        earlier_bytes = self.needed_bytes or (0.0,) * len(self.budget.ranks)
        needed = tuple(map(max, earlier_bytes, needed_bytes))
        margins = self.newest.raised(excess_bytes).leaving(needed, self.budget).margin_bytes
        added = () if margins == self.newest.margin_bytes else ((step + 2, margins),)
        return replace(self, margins=(*self.margins, *added), needed_bytes=needed)

    def to_dict(self) -> dict[str, Any]:
        """The values that a resumed run needs, for JSON."""
        return {
            "limit": self.budget.amount.text if self.budget.amount else "",
            "device": self.device,
            "process_bytes": self.budget.ranks[0].process_bytes,
            "margins": [[step, list(margin_bytes)] for step, margin_bytes in self.margins],
            "needed_bytes": list(self.needed_bytes),
        }

    def resumed(self, saved: Mapping[str, Any]) -> "BudgetHistory":
        """This run's history, continued from a run with the same limit, device and number of pipeline ranks.

        The bytes of a process are also taken from the earlier run, so that plans are the same. Margins are never lower
        than in this run's config.

        Args: saved: from `to_dict`; if it is empty or of a different run, the history is unchanged.
        """
        settings = self.to_dict()
        saved_margins = [
            (int(step), tuple(map(float, margin_bytes))) for step, margin_bytes in saved.get("margins", ())
        ]
        equal = all(saved.get(key) == settings[key] for key in ("limit", "device"))
        of_ranks = [row for row in (*(row for _, row in saved_margins), saved.get("needed_bytes", ())) if row]
        if not equal or any(len(row) != len(self.budget.ranks) for row in of_ranks):
            return self
        budget = self.budget.with_process(float(saved["process_bytes"]))
        nothing = (0.0,) * len(budget.ranks)
        margins = tuple(
            (step, budget.with_margins(margin_bytes).leaving(nothing, budget).margin_bytes)
            for step, margin_bytes in saved_margins
        )
        needed = tuple(map(float, saved.get("needed_bytes", nothing)))
        return replace(self, budget=budget, margins=margins, needed_bytes=needed)


def least_activation_bytes(problem: PlanningProblem) -> tuple[float, ...]:
    """[pp_rank] -> the least bytes with which microbatches can run one after another, each stage with its option of
    least memory.

    Works that depend on each other count as one microbatch. With fewer bytes on any rank there is no plan.
    """
    graph, component = problem.graph, components(problem.graph)
    kept_bytes: defaultdict[tuple[int, int], float] = defaultdict(float)
    passing_bytes: defaultdict[tuple[int, int], float] = defaultdict(float)
    restored_bytes = [0.0] * graph.num_ranks
    for stage, work in graph.nodes():
        rank, options = graph.stage_rank[stage], problem.options(stage, work)
        key, least_bytes = (component[work], rank), min(option.activation_bytes for option in options)
        if options[0].has_backward:
            kept_bytes[key] += least_bytes
        else:  # freed when its forward ends
            passing_bytes[key] = max(passing_bytes[key], least_bytes)
        restored_bytes[rank] = max(restored_bytes[rank], *(option.restored_bytes for option in options))
    needed_bytes = [0.0] * graph.num_ranks
    for key in (*kept_bytes, *passing_bytes):
        needed_bytes[key[1]] = max(needed_bytes[key[1]], kept_bytes[key], passing_bytes[key])
    return tuple(map(operator.add, needed_bytes, restored_bytes))


def too_tight(problem: PlanningProblem, section: PlannerConfig, spec: ModelSpec) -> str:
    """The error message of a memory limit that leaves a rank less than one microbatch takes, or as many as have one
    loss; empty if none does."""
    needed = least_activation_bytes(problem)
    for rank, (least_bytes, limit) in enumerate(zip(needed, problem.memory_limit_bytes, strict=True)):
        if limit is not None and exceeds(least_bytes, limit):
            key, remedies = f'planner.memory_limit = "{section.memory_limit}"', ["lower planner.memory_margin"]
            if not section.memory_limit:
                key, remedies = f"planner.search.activation_memory_gib = {section.search.activation_memory_gib:g}", []
            if all(len(options) == 1 for options in problem.costs):
                remedies.append("recompute more (activation_checkpoint.mode)")
                remedies.append("let the planner choose what to recompute (planner.enable)")
            count = 1 + max(work.microbatch for work in problem.graph.works)
            together = min(count, max(module.microbatches or count for module in spec.modules))
            what = "one microbatch"
            if together > 1:
                what = f"{together} microbatches that have one loss"
                remedies.append("lower model.contrast.microbatches")
            advice = ", ".join(["raise it", *remedies])
            return (
                f"over the memory limit: the activations of {what} take at least "
                f"{show_bytes(least_bytes)} on pp_rank {rank}, but {key} leaves them {show_bytes(limit)}; "
                f"{advice}, or make microbatches smaller (training.seq_len, for clips data.max_total_seconds)"
            )
    return ""
