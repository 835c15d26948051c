"""The ways to cut a model that a config leaves open, and the partition that each of them is. Pure."""

import itertools
from collections.abc import Mapping, Sequence
from typing import NoReturn

from mmtrain.config.config import Config
from mmtrain.config.model import section_of
from mmtrain.costs.cost_model import CostModel
from mmtrain.errors import ConfigError
from mmtrain.modality.typical import reference_sizes
from mmtrain.planner.batching import SubMicrobatch
from mmtrain.planner.job_schedule import job_schedule
from mmtrain.planner.partition.partition import Partition, Placed, divide_ranks, partition
from mmtrain.simulator.cut_search import Cut
from mmtrain.simulator.typical_iterations import TypicalIterations
from mmtrain.spec.spec import ModelSpec

PLACEMENTS: tuple[Placed, ...] = ("parallel", "colocated")
"""The placements of modules that do not reach every rank."""
MOST_SEGMENTS = 4
"""The largest K that the search tries."""


# ---------------------------------------------------------------------------------------------- placed


def _groups(spec: ModelSpec, placement: Placed) -> list[list[str]]:
    """The modules that share ranks, in the order of their ranks."""
    modules = [module for module in spec.modules if module.pp_rank is None]
    if placement == "parallel":
        return [[module.name] for module in modules]
    wholes = {module.name for module in spec.modules if module.pp_rank is not None}
    readers = [module.name for module in modules if not set(module.after) - wholes]
    return [readers, *([module.name] for module in modules if module.name not in readers)]


def placed_cut(config: Config, spec: ModelSpec, placement: Placed, weights: Mapping[str, Sequence[float]]) -> Cut:
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
    return {name: count or job_schedule(config).least_passes for name, count in given_segments(config).items()}


def placed_partition(config: Config, spec: ModelSpec, cut: Cut, weights: Mapping[str, Sequence[float]]) -> Partition:
    """The partition with modules on ranks of their own. Args: weights: module -> [layer] -> seconds or FLOPs."""
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


def ranks_text(cut: Cut, spec: ModelSpec) -> str:
    """The ranks of each group of placed modules, for the log."""
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


def placed_cuts(config: Config, spec: ModelSpec, weights: Mapping[str, Sequence[float]]) -> list[Cut]:
    """The best numbers of ranks for each placement, and those with one rank moved from a group to another."""
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


def given_segments(config: Config) -> dict[str, int]:
    """K of each module that can be cut, as the config gives it, else the schedule; 0: left open."""
    by_schedule = job_schedule(config).segments
    default = by_schedule.get("", 0)
    return {
        name: section.num_segments or (0 if section.pipeline_layout else by_schedule.get(name, default))
        for name, section in config.model.cut_modules.items()
    }


def _layouts(config: Config) -> dict[str, str]:
    return {name: section.pipeline_layout for name, section in config.model.cut_modules.items()}


def separated_partition(config: Config, spec: ModelSpec, segments: Mapping[str, int]) -> Partition:
    """The separated partition with the K of each module; 0: by DIP's rule, raised to what the schedule needs."""
    sizes, layouts = reference_sizes(spec, config.training.seq_len), _layouts(config)
    num_ranks = config.parallelism.pipeline_parallel_degree
    schedule = job_schedule(config)
    separated = partition(spec, num_ranks, segments, sizes, schedule.placement, layouts)
    num_chunks = sum(len(separated.of_module(module.name)) for module in spec.modules if module.pp_rank is None)
    missing = schedule.least_passes - num_chunks // num_ranks
    text = spec.text.name
    if missing > 0 and not segments[text] and not layouts[text]:
        return partition(spec, num_ranks, {**segments, text: 1 + missing}, sizes, schedule.placement, layouts)
    if missing > 0:
        key = f"{section_of(text)}.num_segments = {segments[text]}"
        if layouts[text]:
            key = f"{section_of(text)}.pipeline_layout = {layouts[text]!r}"
        refuse_few_passes(config, key, schedule.least_passes - missing)
    return separated


def refuse_few_passes(config: Config, key: str, passes: int) -> NoReturn:
    """Raises the error of a partition with fewer passes than the schedule needs. Args: key: and value, that make so
    few."""
    raise ConfigError(
        f'parallelism.pipeline_parallel_schedule = "{config.parallelism.pipeline_parallel_schedule}" needs at least '
        f"{job_schedule(config).least_passes} chunks on each pipeline rank, but {key} makes {passes}; raise it, leave "
        "it out, or choose another schedule"
    )


def open_modules(config: Config) -> dict[str, bool]:
    """Module -> whether it has neither a K nor a layout."""
    layouts = _layouts(config)
    return {name: not count and not layouts[name] for name, count in given_segments(config).items()}


def separated_cuts(config: Config, spec: ModelSpec) -> list[Cut]:
    """Cuts that the numbers of layers and the schedule allow; a module with a layout keeps its configured K."""
    segments, left_open = given_segments(config), open_modules(config)
    ranges = []
    for module in (module for module in spec.modules if module.pp_rank is None):
        allowed = _passes(config, 1, len(module.layers))
        ranges.append(allowed if left_open[module.name] else [segments[module.name]])
    combinations = list(itertools.product(*ranges))
    layouts = any(_layouts(config).values())  # which may make any number of passes
    return [Cut(c) for c in combinations if layouts or sum(c) >= job_schedule(config).least_passes]


def chains(config: Config, spec: ModelSpec) -> list[Cut]:
    """The chains that the numbers of layers and the schedule allow, if no module has a K or a layout.

    A model of one module is cut by seconds where the search decides about its vocabulary: a whole one then costs as
    little as it can.
    """
    num_ranks = config.parallelism.pipeline_parallel_degree
    chained = [module for module in spec.modules if module.section == module.name]
    differs = len(chained) > 1 or config.parallelism.vocabulary_parallel == "search"
    if num_ranks == 1 or not differs or not all(open_modules(config).values()):
        return []
    num_layers = sum(len(module.layers) for module in chained)
    return [Cut((passes,), is_chain=True) for passes in _passes(config, job_schedule(config).least_passes, num_layers)]


def _passes(config: Config, least: int, num_layers: int) -> list[int]:
    """The numbers of segments into which the schedule lets layers be cut."""
    largest = min(MOST_SEGMENTS, num_layers // config.parallelism.pipeline_parallel_degree)
    is_v = job_schedule(config).placement == "v"
    return [passes for passes in range(least, largest + 1) if passes == 2 or not is_v]
