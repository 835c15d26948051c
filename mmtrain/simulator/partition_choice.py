"""The partition of a job: set by its config, or chosen by a rule or a search. Pure.

The choice depends only on the config, so all ranks make the same one before any data are read.

Sources: DIP, arXiv:2504.14145, sections 4 and 7.1, which names the mixed partitions of its baselines: Megatron-LM's by
parameters, and nnScaler's (Lin et al., OSDI 2024) by time.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NoReturn

from mmtrain.config.config import Config
from mmtrain.config.model import section_of
from mmtrain.costs.cost_model import CostModel
from mmtrain.costs.job_costs import cost_model
from mmtrain.errors import ConfigError
from mmtrain.modality.typical import reference_sizes
from mmtrain.planner.batching import SubMicrobatch
from mmtrain.planner.job_schedule import job_schedule
from mmtrain.planner.memory.limit import MemoryRule
from mmtrain.planner.partition.partition import Partition, Placed, divide_ranks, mixed_partition, partition
from mmtrain.simulator.cut_search import CHAIN_WORTH, Cut, Found, best_cut, looks, simplicity
from mmtrain.simulator.typical_iterations import TypicalIterations
from mmtrain.simulator.work_size import sub_microbatch_size
from mmtrain.spec.spec import ModelSpec

PLACEMENTS: tuple[Placed, ...] = ("parallel", "colocated")
"""Of modules that do not reach every rank."""
MOST_SEGMENTS = 4
"""The largest K that the search tries."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A job's partition, and how it was chosen."""

    partition: Partition
    summary: str = ""
    """How it was chosen, for the log; empty if the config determines it."""


def partition_of(config: Config, spec: ModelSpec) -> Partition:
    """The partition of a job, placed as its schedule requires. Errors: see `choose_partition`."""
    costs = cost_model(config, spec)
    return choose_partition(config, spec, costs, sub_microbatch_size(config, spec, costs)).partition


def choose_partition(config: Config, spec: ModelSpec, costs: CostModel, sub_microbatch: SubMicrobatch) -> Choice:
    """The partition of a job, placed as its schedule requires, and how it was chosen.

    Args: sub_microbatch: images in a vision work, or clips in a DiT work; 0: all of a microbatch.
    Raises: ConfigError: there are fewer layers than chunks, fewer or more chunks than the schedule needs,
        `planner.partition` does not fit the schedule, or the schedule braids and parameters do not stay gathered.
    Source: DIP, arXiv:2504.14145, section 4.
    """
    how, schedule = config.planner.partition, job_schedule(config)
    if schedule.refusal:
        raise ConfigError(
            f'parallelism.pipeline_parallel_schedule = "{schedule.name}" {schedule.refusal}; choose another '
            "schedule, or change its file"
        )
    if schedule.braids and config.parallelism.fsdp_reshard_after_forward == "always":
        raise ConfigError(
            'parallelism.fsdp_reshard_after_forward = "always" with parallelism.pipeline_parallel_schedule = '
            f'"{schedule.name}": two passes of a block use one chunk in turns, so one would free parameters that the '
            'other still needs; set "step", or choose a schedule without braids'
        )
    placement = config.planner.placement
    if placement not in ("spread", "replicated") and schedule.placement == "v":
        raise ConfigError(
            f'planner.placement = "{placement}" with parallelism.pipeline_parallel_schedule = '
            f'"{config.parallelism.pipeline_parallel_schedule}", which goes down all pipeline ranks and back up in '
            'every module; choose another schedule, or set "spread"'
        )
    if placement == "replicated":
        raise ConfigError(
            'planner.placement = "replicated", in which every rank of the language model runs all encoders again, is a '
            'baseline of `mmtrain simulate` alone; set "spread", "parallel", "colocated" or "search"'
        )
    if placement == "parallel" or placement == "colocated":
        weights = placing_weights(config, spec, costs, sub_microbatch)
        cut = _placed_cut(config, spec, placement, weights)
        placed = _placed(config, spec, cut, weights)
        return Choice(partition=placed, summary=f"partition: modules {placement}, {_ranks_text(cut, spec)}")
    if how == "mixed-parameters" or how == "mixed-latency":
        return _mixed(config, spec, costs, sub_microbatch)
    if how == "search":
        choice = _searched(config, spec, costs, sub_microbatch)
        if choice is not None:
            return choice
    return Choice(partition=_separated(config, spec, _given_segments(config)))


# ---------------------------------------------------------------------------------------------- placed


def _groups(spec: ModelSpec, placement: Placed) -> list[list[str]]:
    """The modules that share ranks, in the order of their ranks."""
    modules = [module for module in spec.modules if not module.is_whole]
    if placement == "parallel":
        return [[module.name] for module in modules]
    wholes = {module.name for module in spec.modules if module.is_whole}
    readers = [module.name for module in modules if not set(module.after) - wholes]
    return [readers, *([module.name] for module in modules if module.name not in readers)]


def _placed_cut(config: Config, spec: ModelSpec, placement: Placed, weights: Mapping[str, Sequence[float]]) -> Cut:
    """The ranks of each group of modules for which the most loaded rank has least. Errors: see `_no_ranks`."""
    groups, segments = _groups(spec, placement), _placed_segments(config)
    sections = config.model.cut_modules
    given = {name: section.ranks for name, section in sections.items()}
    num_ranks = config.parallelism.pipeline_parallel_degree
    ranks = divide_ranks(weights, groups, segments, num_ranks, given)
    if ranks is None:
        _no_ranks(spec, groups, segments, num_ranks, given)
    return Cut(tuple(segments.values()), placement=placement, ranks=ranks)


def placing_weights(
    config: Config, spec: ModelSpec, costs: CostModel, sub_microbatch: SubMicrobatch
) -> Mapping[str, Sequence[float]]:
    """Module -> [layer] -> forward and backward: seconds, or FLOPs if no workload can be drawn for the model."""
    try:
        return TypicalIterations.draw(config, spec, costs, sub_microbatch).layer_seconds()
    except ConfigError:
        sizes = reference_sizes(spec, config.training.seq_len)
        return {m.name: [flops.total for flops in spec.layer_flops(m.name, sizes[m.name])] for m in spec.modules}


def _placed_segments(config: Config) -> dict[str, int]:
    """K of each module on ranks of its own."""
    return {name: count or job_schedule(config).least_passes for name, count in _given_segments(config).items()}


def _placed(config: Config, spec: ModelSpec, cut: Cut, weights: Mapping[str, Sequence[float]]) -> Partition:
    ends = list(itertools.accumulate(cut.ranks, initial=0))
    ranges = itertools.starmap(range, itertools.pairwise(ends))
    return partition(
        spec,
        config.parallelism.pipeline_parallel_degree,
        {name: 0 if _layouts(config)[name] else count for name, count in _placed_segments(config).items()},
        reference_sizes(spec, config.training.seq_len),
        layouts=_layouts(config),
        placed=cut.placement,
        ranks={name: own for group, own in zip(_groups(spec, cut.placement), ranges, strict=True) for name in group},
        weights=weights,
    )


def _ranks_text(cut: Cut, spec: ModelSpec) -> str:
    groups = zip(_groups(spec, cut.placement), cut.ranks, strict=True)
    return ", ".join(f"{' and '.join(group)} on {n} rank{'s' * (n > 1)}" for group, n in groups)


def _no_ranks(
    spec: ModelSpec,
    groups: Sequence[Sequence[str]],
    segments: Mapping[str, int],
    num_ranks: int,
    given: Mapping[str, int],
) -> NoReturn:
    said = [f"{section_of(name)}.ranks = {count}" for name, count in given.items() if count]
    needs = [
        f"{' and '.join(group)} at least 1 and at most {min(len(spec.module(m).layers) // segments[m] for m in group)}"
        for group in groups
    ]
    raise ConfigError(
        f"{', '.join(said) or 'planner.placement'}: parallelism.pipeline_parallel_degree = {num_ranks} pipeline ranks "
        f"cannot be divided so; {', '.join(needs)}, and they must add up to {num_ranks}; change them, or leave "
        "`ranks` out"
    )


def _placed_cuts(config: Config, spec: ModelSpec, weights: Mapping[str, Sequence[float]]) -> list[Cut]:
    """For each placement the best numbers of ranks, and those with one rank moved from a group to another."""
    cuts: dict[Cut, None] = {}
    segments, num_ranks = _placed_segments(config), config.parallelism.pipeline_parallel_degree
    for placement in PLACEMENTS:
        groups = _groups(spec, placement)
        best = divide_ranks(weights, groups, segments, num_ranks, {})
        if best is None or (placement == "colocated" and groups == _groups(spec, "parallel")):
            continue
        moves = [best]
        for source, target in itertools.permutations(range(len(best)), 2):
            moved = list(best)
            moved[source], moved[target] = moved[source] - 1, moved[target] + 1
            moves.append(tuple(moved))
        for ranks in moves:
            fit = (
                n > 0 and all(n * segments[name] <= len(spec.module(name).layers) for name in group)
                for n, group in zip(ranks, groups, strict=True)
            )
            if all(fit):
                cuts[Cut(tuple(segments.values()), placement=placement, ranks=ranks)] = None
    return list(cuts)


# ------------------------------------------------------------------------------------------- separated


def _given_segments(config: Config) -> dict[str, int]:
    """K of each module that can be cut, as the config gives it, else the schedule; 0: left open."""
    by_schedule = job_schedule(config).segments
    default = by_schedule.get("", 0)
    return {
        name: section.num_segments or (0 if section.pipeline_layout else by_schedule.get(name, default))
        for name, section in config.model.cut_modules.items()
    }


def _layouts(config: Config) -> dict[str, str]:
    return {name: section.pipeline_layout for name, section in config.model.cut_modules.items()}


def _separated(config: Config, spec: ModelSpec, segments: Mapping[str, int]) -> Partition:
    """The separated partition with the K of each module; 0: by DIP's rule, raised to what the schedule needs."""
    sizes, layouts = reference_sizes(spec, config.training.seq_len), _layouts(config)
    num_ranks = config.parallelism.pipeline_parallel_degree
    schedule = job_schedule(config)
    separated = partition(spec, num_ranks, segments, sizes, schedule.placement, layouts)
    num_chunks = sum(len(separated.of_module(module.name)) for module in spec.modules if not module.is_whole)
    missing = schedule.least_passes - num_chunks // num_ranks
    text = spec.text.name
    if missing > 0 and not segments[text] and not layouts[text]:
        return partition(spec, num_ranks, {**segments, text: 1 + missing}, sizes, schedule.placement, layouts)
    if missing > 0:
        key = f"{section_of(text)}.num_segments = {segments[text]}"
        if layouts[text]:
            key = f"{section_of(text)}.pipeline_layout = {layouts[text]!r}"
        _refuse_few_passes(config, key, schedule.least_passes - missing)
    return separated


def _refuse_few_passes(config: Config, key: str, passes: int) -> None:
    raise ConfigError(
        f'parallelism.pipeline_parallel_schedule = "{config.parallelism.pipeline_parallel_schedule}" needs at least '
        f"{job_schedule(config).least_passes} chunks on each pipeline rank, but {key} makes {passes}; raise it, leave "
        "it out, or choose another schedule"
    )


# --------------------------------------------------------------------------------------------- searched


def _searched(config: Config, spec: ModelSpec, costs: CostModel, sub_microbatch: SubMicrobatch) -> Choice | None:
    """The choice of a search; None: the config determines the partition, or a search is not possible."""
    memory = MemoryRule.of_device(config)
    separated_cuts, chains = _separated_cuts(config, spec), _chains(config, spec)
    num_ranks, placement = config.parallelism.pipeline_parallel_degree, job_schedule(config).placement
    searches_placement = config.planner.placement == "search" and placement != "v"
    left_open = any(_open(config).values()) or searches_placement
    if not (separated_cuts or chains) or not left_open:
        return None
    names = [module.name for module in spec.modules if not module.is_whole]

    def separated(cut: Cut) -> Partition:
        return _separated(config, spec, dict(zip(names, cut.segments, strict=True)))

    if num_ranks == 1 or (
        len(separated_cuts) == 1 and not chains and not searches_placement
    ):  # on one rank, all cuts take the same time
        return Choice(partition=separated(min(separated_cuts, key=simplicity)))
    draw = partial(TypicalIterations.draw, config, spec, costs, sub_microbatch)
    try:
        typical = draw()
    except ConfigError:  # the encoder does not read images: there is no workload for it
        return None
    weights = typical.layer_seconds() if chains or searches_placement else {}
    cuts = [*separated_cuts, *chains, *(_placed_cuts(config, spec, weights) if searches_placement else [])]

    @cache
    def partition_for(cut: Cut) -> Partition:
        if cut.placement:
            return _placed(config, spec, cut, weights)
        if cut.is_chain:
            return mixed_partition(spec, num_ranks, cut.segments[0], weights, placement)
        return separated(cut)

    def judging_s(iterations: TypicalIterations) -> list[float]:
        return [iterations.judging_s(partition_for(cut)) for cut in cuts]

    rates = judging_s(draw(is_quick=True)), judging_s(typical)
    quick_microbatches, exact_microbatches = looks(num_ranks, typical.num_microbatches, *rates, typical.rank_s)
    exact = draw(most_microbatches=exact_microbatches)

    def seconds(iterations: TypicalIterations, cut: Cut) -> float:
        return iterations.seconds(partition_for(cut), within=None if cut.is_even else memory)

    @cache
    def peak_bytes(cut: Cut) -> float:
        return exact.peak_bytes(partition_for(cut))

    def fits(chain: Cut, instead: Cut) -> bool:
        # A V-shaped schedule has its own order on a chain alone, and with it the memory that it is known for.
        is_known = memory.limit_bytes is not None or placement == "v"
        return is_known or peak_bytes(chain) <= peak_bytes(instead)

    quick = draw(most_microbatches=quick_microbatches, is_quick=True)
    margin = 0.0 if searches_placement else CHAIN_WORTH
    result = best_cut(cuts, partial(seconds, quick), partial(seconds, exact), fits, margin)
    if result is None:
        return None
    return Choice(partition=partition_for(result.best), summary=_summary(result, names, spec))


def _open(config: Config) -> dict[str, bool]:
    """Module -> whether it has neither a K nor a layout."""
    layouts = _layouts(config)
    return {name: not count and not layouts[name] for name, count in _given_segments(config).items()}


def _separated_cuts(config: Config, spec: ModelSpec) -> list[Cut]:
    """Cuts that the numbers of layers and the schedule allow; a module with a layout keeps its configured K."""
    segments, left_open = _given_segments(config), _open(config)
    ranges = []
    for module in (module for module in spec.modules if not module.is_whole):
        allowed = _passes(config, 1, len(module.layers))
        ranges.append(allowed if left_open[module.name] else [segments[module.name]])
    combinations = list(itertools.product(*ranges))
    layouts = any(_layouts(config).values())  # which may make any number of passes
    return [Cut(c) for c in combinations if layouts or sum(c) >= job_schedule(config).least_passes]


def _chains(config: Config, spec: ModelSpec) -> list[Cut]:
    """The chains that the numbers of layers and the schedule allow, if no module has a K or a layout."""
    num_ranks = config.parallelism.pipeline_parallel_degree
    several = num_ranks > 1 and len(spec.modules) > 1
    if not several or not all(_open(config).values()):
        return []
    num_layers = sum(len(module.layers) for module in spec.modules)
    return [Cut((passes,), is_chain=True) for passes in _passes(config, job_schedule(config).least_passes, num_layers)]


def _passes(config: Config, least: int, num_layers: int) -> list[int]:
    """The numbers of segments into which the schedule lets layers be cut."""
    largest = min(MOST_SEGMENTS, num_layers // config.parallelism.pipeline_parallel_degree)
    is_v = job_schedule(config).placement == "v"
    return [passes for passes in range(least, largest + 1) if passes == 2 or not is_v]


def _summary(search: Found, names: Sequence[str], spec: ModelSpec) -> str:
    segments = search.best.segments
    if search.best.placement:
        chosen = f"modules {search.best.placement}, {_ranks_text(search.best, spec)}"
    elif search.best.is_chain:
        chosen = f"one chain of all modules, {segments[0]} on each rank"
    else:
        chosen = ", ".join(f"{name} {count}" for name, count in zip(names, segments, strict=True)) + " segments"
    tried = ", ".join(f"{cut}: {seconds:.4g} s" for cut, seconds in search.finalists if seconds < math.inf)
    too_large = "".join(f"; {cut} takes more memory" for cut in search.too_large)
    return (
        f"partition: {chosen}, by search; simulated iterations of the best of {search.num_tried} tried: {tried}"
        f"{too_large}"
    )


# ------------------------------------------------------------------------------------------------ mixed


def _mixed(config: Config, spec: ModelSpec, costs: CostModel, sub_microbatch: SubMicrobatch) -> Choice:
    """All modules cut as one chain into parts of equal parameters or of equal seconds."""
    how, schedule = config.planner.partition, job_schedule(config)
    passes = _given_segments(config)[spec.text.name]
    if 0 < passes < schedule.least_passes:
        _refuse_few_passes(config, f"{section_of(spec.text.name)}.num_segments = {passes}", passes)
    if how == "mixed-parameters":
        weights: Mapping[str, Sequence[float]] = {m.name: [x.num_params for x in m.layers] for m in spec.modules}
    else:
        weights = _typical_layer_seconds(config, spec, costs, sub_microbatch)
    num_ranks = config.parallelism.pipeline_parallel_degree
    passes = passes or (2 if schedule.placement == "v" else schedule.least_passes)
    cut = mixed_partition(spec, num_ranks, passes, weights, schedule.placement)
    return Choice(partition=cut, summary=f"partition: {how}, one chain of all modules, {passes} on each rank")


def _typical_layer_seconds(
    config: Config, spec: ModelSpec, costs: CostModel, sub_microbatch: SubMicrobatch
) -> Mapping[str, Sequence[float]]:
    try:
        return TypicalIterations.draw(config, spec, costs, sub_microbatch).layer_seconds()
    except ConfigError as error:
        raise ConfigError(
            'planner.partition = "mixed-latency" needs the times of typical images, which cannot be drawn for this '
            f'model ({error}); choose "mixed-parameters" or "search"'
        ) from error
