"""[planner] with [planner.search] and [planner.device], and their rules with other sections."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mmtrain.config.bounds import at_least, at_most
from mmtrain.config.memory_amount import MemoryAmount
from mmtrain.config.model import ModelConfig, section_of
from mmtrain.config.sections import MOST_SECONDS, ActivationCheckpointConfig, CommConfig, ParallelismConfig
from mmtrain.config.toml_sections import FilePath, shown
from mmtrain.errors import ConfigError
from mmtrain.schedule.library.names import EAGER_SCHEDULES, MEMORY_BOUNDED_SCHEDULES, file_of

MEMORY_STRATEGIES = ("keep", "selective", "recompute", "offload")
"""What a block may do with its activations."""
Strategy = Literal["anneal", "mcts", "first"]
"""How the planner searches orders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """[planner.search]: what is chosen for each iteration, and how long it is searched."""

    sub_microbatch: bool = True
    """Cut the images of a microbatch into works of their own size; else they are one work."""
    interleave: bool = True
    """Order the works of all modules on each rank by the planner; else the order is that of
    parallelism.pipeline_parallel_schedule, and the planner chooses memory alone."""
    reorder: bool = True
    """Search the order of microbatches; else the first come first."""
    regroup: bool = False
    """Let the search also choose which samples are processed together: how many images or clips are one work, and into
    how many microbatches the samples of a replica's batch go, see docs/planner.md. The step has the same samples, loss
    and gradients. It needs a budget of 2,600 evaluations, or seconds."""
    split_backward: bool = True
    """Let the planner split backwards into input-gradient and weight-gradient passes (I, W)."""
    braid: bool = False
    """Run a forward and a backward of a rank as one block where that shortens an iteration: the exchanges of tensor
    parallelism of one then lie under the compute of the other. In searched plans, and in those of
    parallelism.pipeline_parallel_schedule (docs/planner.md)."""
    eager_forwards: int = 0
    """Microbatches that ranks with an encoder have in flight in addition to those of
    parallelism.pipeline_parallel_schedule, as far as memory limits allow, which leaves time for the late backwards of
    deferred images; of 1F1B, Interleaved1F1B, ZB-H1, ZB-H2 and InterleavedZeroBubble alone."""
    memory: bool = True
    """Under a memory limit, choose for each stage and work what its blocks do, among memory_strategies; else, and
    without a limit, all do what [activation_checkpoint] says. It is left alone where that mode is not none."""
    memory_strategies: list[str] = field(default_factory=lambda: ["keep", "selective", "recompute"])
    """What a block may do with its activations: keep; selective and recompute, as in [activation_checkpoint]; offload
    (to host memory; on a CPU that is a copy, and saves nothing)."""
    activation_memory_gib: float = 0.0
    """GiB that activations alone may take on one rank, for schedules `interleave` and `ZB-AutoSchedule`; 0: no limit.
    Instead of memory_limit, not beside it."""
    strategy: Strategy = "anneal"
    """How orders are searched; first: not at all."""
    budget_evaluations: int = 1000
    """Plans tried for an iteration; 0: no limit."""
    budget_s: float = 0.0
    """Seconds of search; 0: no limit. Plans then depend on the machine's speed."""
    threads: int = 0
    """Threads of the search on each rank that searches; 0: half of the cores, shared by the ranks of the machine.
    Plans do not depend on it unless budget_s ends the search."""
    distributed: bool = False
    """Every rank of a replica searches with a seed of its own, and the best plan counts; else the first rank alone."""
    patience_s: float = 60.0
    """Seconds that a step waits for its plan, then it runs the first plan, in the order of
    parallelism.pipeline_parallel_schedule; under a memory limit, of interleave where that cannot keep it, or the
    shortest of a few orders."""
    noise: float = 0.0
    """Deviation of the actual seconds of an action from the modelled ones, as a part of them, that searched plans have
    to bear; with a profile what it measured counts instead. 0: none."""
    draws: int = 64
    """Draws of such seconds by which the last eight plans of a search are compared; the search itself compares all
    plans by an eighth of them."""

    def __post_init__(self) -> None:
        at_most("planner.search", self, budget_s=MOST_SECONDS, patience_s=MOST_SECONDS, threads=1024, noise=1.0)
        at_most("planner.search", self, draws=4096, eager_forwards=1024)
        at_least("planner.search", self, activation_memory_gib=0.0, budget_evaluations=0, budget_s=0.0, threads=0)
        at_least("planner.search", self, patience_s=0.0, noise=0.0, draws=1, eager_forwards=0)
        for how in self.memory_strategies:
            if how not in MEMORY_STRATEGIES:
                raise ConfigError(
                    f"planner.search.memory_strategies names {shown(how)}, which does not exist; choose from "
                    f"{', '.join(MEMORY_STRATEGIES)}"
                )
        if not self.memory_strategies:
            raise ConfigError(
                'planner.search.memory_strategies is empty; write ["keep"] to let all blocks keep their activations'
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """[planner.device]: a device and its links, as costs count them without `hardware` and `profile`."""

    flops_per_s: float = 4e14
    """Achieved floating-point operations a second of one rank; only ratios matter to an order."""
    p2p_latency_s: float = 2e-5
    """Fixed part of one transfer between pipeline ranks, seconds."""
    p2p_bytes_per_s: float = 2.5e10
    """Bandwidth between pipeline ranks."""
    host_bytes_per_s: float = 2.5e10
    """Bandwidth between device and host memory, for memory strategy offload."""

    def __post_init__(self) -> None:
        at_most("planner.device", self, p2p_latency_s=3600.0)
        at_least("planner.device", self, p2p_latency_s=0.0, flops_per_s=1.0, p2p_bytes_per_s=1.0, host_bytes_per_s=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """[planner]: how the model is cut, whether each iteration is planned, within which memory and by which costs."""

    enable: bool = False
    """Search a better plan for every batch, beside the step before; else each iteration has the order of
    parallelism.pipeline_parallel_schedule."""
    partition: Literal["search", "dip", "mixed-parameters", "mixed-latency"] = "search"
    """How modules are cut whose num_segments is 0 and that have no pipeline_layout, see docs/parallelism.md.
    search: the numbers of segments with the shortest simulated iterations, or one chain of equal time if that is
    shorter by far, all modules are open and it fits into the memory (if that is unknown: takes no more than
    separated modules); dip: as many passes as the module is slower than the fastest one; mixed-*: one chain of all
    modules, cut into stages of equal parameters or equal time."""
    placement: Literal["spread", "parallel", "colocated", "search"] = "spread"
    """Pipeline ranks of the modules, see docs/parallelism.md. spread: all ranks hold a part of each. parallel: each
    module has ranks of its own. colocated: the modules that read data share the first ranks, and the others have ranks
    of their own. search: the one with the shortest simulated iterations, chains included. How many ranks, where a
    section's `ranks` does not say it: those for which the most loaded rank computes least."""
    memory_limit: str = ""
    """What a rank may take of its device's memory in all: "72GiB", "500MB", or a part as "90%" (of a CPU: of the
    machine's memory, shared by its ranks); empty: no limit. Parameters, gradients, optimizer state, the process
    itself, on a GPU training.inputs_ahead_mib, and memory_margin are subtracted; activations get the rest, see
    docs/memory.md."""
    memory_margin: float = 0.05
    """Part of memory_limit that is left for what the plan does not count: temporary tensors, fragments. It grows by
    itself after a step that took more than memory_limit."""
    hardware: FilePath = ""
    """Accelerator or cluster that costs are simulated on, as `h800` or `h800x16`, or a TOML file; empty: FLOPs over
    planner.device.flops_per_s."""
    profile: FilePath = ""
    """File that `mmtrain profile` wrote: costs are what it measured, whatever `hardware` says; empty: none."""
    learn_costs: bool = False
    """Let each step's measured seconds correct the costs of later ones, by module, pipeline rank, and forward, input or
    weight gradient. Plans then depend on measurements: two runs of one config have other plans and, up to rounding,
    the same losses."""
    search: SearchConfig = field(default_factory=SearchConfig)
    """What is chosen for each iteration."""
    device: DeviceConfig = field(default_factory=DeviceConfig)
    """Speed of a device and its links."""

    def with_evaluations(self, evaluations: int) -> "PlannerConfig":
        """The same with searches of as many plans, whatever time they take. Samples keep their groups where so few
        cannot judge others."""
        regroup = self.search.regroup and evaluations >= LEAST_REGROUPED and not self.search.distributed
        return self.with_search(budget_evaluations=evaluations, budget_s=0.0, regroup=regroup)

    def with_search(self, **values: Any) -> "PlannerConfig":
        """The same with other values of [planner.search]."""
        return replace(self, search=replace(self.search, **values))

    def __post_init__(self) -> None:
        search = self.search
        if self.enable and search.strategy != "first" and not search.budget_evaluations and not search.budget_s:
            raise ConfigError(
                "planner.search.budget_evaluations = 0 and planner.search.budget_s = 0 let the search go on for ever; "
                "set one of them"
            )
        if not 0 <= self.memory_margin < 1:
            raise ConfigError(f"planner.memory_margin = {self.memory_margin}; it must be at least 0 and below 1")
        if self.memory_limit:
            MemoryAmount.parse("planner.memory_limit", self.memory_limit)
            if search.activation_memory_gib:
                raise ConfigError(
                    f'planner.memory_limit = "{self.memory_limit}" and planner.search.activation_memory_gib = '
                    f"{search.activation_memory_gib} are two limits of one memory; remove the second"
                )


JUDGED_GROUPING = 400
"""Evaluations by which one grouping of samples is judged; with fewer than 300, single actions are hardly changed, and
results say little where memory is short."""
MADE_GROUPING = 250
"""Evaluations that are taken from the budget for making the problem of a grouping."""
LEAST_REGROUPED = 4 * (JUDGED_GROUPING + MADE_GROUPING)
"""Evaluations in half of which two groupings can be judged."""


def check_planner(
    planner: PlannerConfig,
    model: ModelConfig,
    parallelism: ParallelismConfig,
    checkpointing: ActivationCheckpointConfig,
    comm: CommConfig,
) -> None:
    """Refuses what does not fit other sections; changes nothing. Raises: ConfigError: the first rule that is broken."""
    schedule = parallelism.pipeline_parallel_schedule
    _check_partition(planner, model)
    _check_placement(planner, model, parallelism.pipeline_parallel_degree)
    _check_eager(planner, model, schedule)
    if planner.search.braid:
        _check_braid(parallelism)
    if planner.search.regroup:
        _check_regroup(planner, model, parallelism)
    if planner.enable and planner.search.patience_s >= comm.timeout_seconds:
        raise ConfigError(
            f"planner.search.patience_s = {planner.search.patience_s} is not below comm.timeout_seconds = "
            f"{comm.timeout_seconds}: while one replica waits for its plan, the others wait for that replica, "
            "and would stop the job; lower the first or raise the second"
        )
    if file_of(schedule) is None:  # a file is not read yet
        check_memory_limit(planner, parallelism, checkpointing, keeps_limits=schedule in MEMORY_BOUNDED_SCHEDULES)


def _check_partition(planner: PlannerConfig, model: ModelConfig) -> None:
    """Refuses to cut modules by themselves where all are cut as one chain."""
    how = planner.partition
    if not how.startswith("mixed"):
        return
    keys: list[tuple[str, str | int]] = []
    for name, section in model.cut_modules.items():
        keys += [(f"{section_of(name)}.num_segments", section.num_segments)] if name != "language" else []
        keys += [(f"{section_of(name)}.pipeline_layout", section.pipeline_layout)]
    for key, value in keys:
        if value:
            raise ConfigError(
                f'planner.partition = "{how}" cuts all modules as one chain, but {key} = {value!r} cuts a module by '
                'itself; remove it, or set planner.partition = "search"'
            )


def _check_placement(planner: PlannerConfig, model: ModelConfig, num_ranks: int) -> None:
    """Refuses placements that cannot be, and numbers of ranks that have no effect or do not add up."""
    how = planner.placement
    sections = {f"{section_of(name)}.ranks": section.ranks for name, section in model.cut_modules.items()}
    given = {key: ranks for key, ranks in sections.items() if ranks}
    if how == "spread":
        for key, ranks in given.items():
            raise ConfigError(
                f'{key} = {ranks} has no effect with planner.placement = "spread", in which all ranks hold a part of '
                'each module; remove it, or set "parallel" or "colocated"'
            )
        return
    if len(sections) == 1:
        raise ConfigError(
            f'planner.placement = "{how}", but the model has one module; set "spread", which puts it on all ranks'
        )
    if planner.partition != "search":
        raise ConfigError(
            f'planner.placement = "{how}" with planner.partition = "{planner.partition}", which puts every '
            "module on all ranks; remove one of the two"
        )
    if how == "search" and given:
        key, ranks = next(iter(given.items()))
        raise ConfigError(f'{key} = {ranks} has no effect with planner.placement = "{how}"; remove it')
    if num_ranks < 2:
        raise ConfigError(
            f'planner.placement = "{how}" with parallelism.pipeline_parallel_degree = {num_ranks}: modules on ranks of '
            'their own need at least two; raise the degree, or set "spread"'
        )


def _check_eager(planner: PlannerConfig, model: ModelConfig, schedule: str) -> None:
    """Refuses forwards ahead of a schedule's rule where there is no such rule or no encoder."""
    count = planner.search.eager_forwards
    if count and schedule not in EAGER_SCHEDULES:
        raise ConfigError(
            f'planner.search.eager_forwards = {count} with parallelism.pipeline_parallel_schedule = "{schedule}", '
            f"which has no number of forwards in flight to raise; set 0, or choose one of {', '.join(EAGER_SCHEDULES)}"
        )
    if count and len(model.cut_modules) == 1:
        raise ConfigError(
            f"planner.search.eager_forwards = {count}, but the model has one module, so no encoder can work ahead; "
            "set 0"
        )


def _check_regroup(planner: PlannerConfig, model: ModelConfig, parallelism: ParallelismConfig) -> None:
    """Refuses to group samples where nothing searches, or where the loss depends on their groups."""
    search, key = planner.search, "planner.search.regroup = true"
    off = {
        "planner.enable = false": not planner.enable,
        "planner.search.interleave = false": not search.interleave,
        'planner.search.strategy = "first"': search.strategy == "first",
    }
    if any(off.values()):
        raise ConfigError(
            f"{key} with {next(name for name, is_off in off.items() if is_off)}: the search, which groups samples, is "
            'off; remove it, or set planner.enable = true, planner.search.interleave = true and strategy = "anneal"'
        )
    if model.reads_pairs:
        raise ConfigError(
            f"{key} with [model.contrast]: the loss compares the samples of a microbatch, so groups cannot be chosen "
            "by their time; remove it"
        )
    if model.lora.dropout:
        raise ConfigError(
            f"{key} with model.lora.dropout = {model.lora.dropout}: masks are drawn for works, so losses would depend "
            "on the plan; set one of them to its default"
        )
    degrees = parallelism.layout.pp, parallelism.context_parallel_degree
    searchers = math.prod((*degrees, parallelism.tensor_parallel_degree)) if search.distributed else 1
    if search.budget_evaluations and search.budget_evaluations // searchers < LEAST_REGROUPED:
        of_ranks = f" for {searchers} ranks (planner.search.distributed)" if searchers > 1 else ""
        raise ConfigError(
            f"{key} with planner.search.budget_evaluations = {search.budget_evaluations}{of_ranks}: two groupings "
            f"cannot be judged with fewer than {LEAST_REGROUPED * searchers}; raise it, or remove the key"
        )


def _check_braid(section: ParallelismConfig) -> None:
    if section.tensor_parallel_degree == 1:
        raise ConfigError(
            "planner.search.braid = true with parallelism.tensor_parallel_degree = 1: nothing is exchanged inside of "
            "layers, so blocks of a forward and a backward hide nothing; remove it, or raise the degree"
        )
    if section.fsdp_reshard_after_forward == "always":
        raise ConfigError(
            'planner.search.braid = true with parallelism.fsdp_reshard_after_forward = "always": one pass of a block '
            'would free parameters that the other one still uses; set "step", or remove planner.search.braid'
        )


def check_memory_limit(
    planner: PlannerConfig,
    parallelism: ParallelismConfig,
    checkpointing: ActivationCheckpointConfig,
    *,
    keeps_limits: bool,
) -> None:
    """Refuses a limit that nobody would keep: neither the planner, which chooses memory, nor the schedule.

    Args: keeps_limits: whether the schedule does. Raises: ConfigError: nobody would.
    """
    schedule = parallelism.pipeline_parallel_schedule
    if keeps_limits:
        return
    bounded = " and ".join(map(repr, MEMORY_BOUNDED_SCHEDULES))
    chooses = checkpointing.mode == "none" and len(planner.search.memory_strategies) > 1
    if planner.memory_limit and planner.enable and planner.search.memory and not (planner.search.interleave or chooses):
        raise ConfigError(
            f'planner.memory_limit = "{planner.memory_limit}" with planner.search.interleave = false: the orders are '
            f'those of "{schedule}", which has its own rule of memory, and activation_checkpoint.mode = '
            f'"{checkpointing.mode}" with planner.search.memory_strategies = {planner.search.memory_strategies} '
            "leaves no choice of memory either. Set planner.search.interleave = true, mode none and more strategies, "
            f"or one of the schedules {bounded}"
        )
    if planner.memory_limit and not (planner.enable and planner.search.memory):
        name = "enable" if not planner.enable else "search.memory"
        raise ConfigError(
            f'planner.memory_limit = "{planner.memory_limit}" with planner.{name} = false is kept by '
            f'parallelism.pipeline_parallel_schedule = {bounded} alone; "{schedule}" has its own rule of memory. '
            f"Set planner.{name} = true, or one of these schedules, or remove the limit"
        )
    if planner.search.activation_memory_gib:
        raise ConfigError(
            f"planner.search.activation_memory_gib = {planner.search.activation_memory_gib} is honoured by "
            f"parallelism.pipeline_parallel_schedule = {bounded} alone; "
            f'"{schedule}" bounds its memory by its own rule. Remove one of the two'
        )
