"""Which partition a job gets: what its config says, and where that leaves it open, a rule or a search. Pure.

The choice follows from the config alone, so that all ranks make the same one, before any data are read.

Sources: DIP, arXiv:2504.14145, sections 4 and 7.1, which names the mixed partitions of its baselines: Megatron-LM's by
parameters, and nnScaler's (Lin et al., OSDI 2024) by time.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mmtrain.config import Config
from mmtrain.errors import ConfigError
from mmtrain.models.spec import ModelSpec
from mmtrain.planner.cost_model import CostModel
from mmtrain.planner.job_costs import cost_model
from mmtrain.planner.partition import Partition, mixed_partition, partition, reference_sizes
from mmtrain.planner.typical_iterations import TypicalIterations
from mmtrain.planner.vision_works import sub_microbatch_size
from mmtrain.schedule.library.catalogue import CATALOGUE, Schedule

MOST_SEGMENTS = 4
"""K that the search tries at most."""
WORTH = 0.005
"""Part of an iteration that each segment more has to save: it costs launches and messages that no cost model sees."""
CHAIN_WORTH = 0.03
"""Part of an iteration that a mixed chain has to save besides: its ranks are level for one mixture of modalities."""
FINALISTS = 3
"""Separated candidates that are simulated on all iterations, after all were on a part of one; and the best chain."""


@dataclass(frozen=True)
class Cut:
    """A way to cut a model that the search may choose."""

    is_chain: bool
    """Whether all modules are one chain, cut by time."""
    segments: tuple[int, ...]
    """Chunks on each rank: K of each module that is cut, in the model's order; of a chain one number."""

    @property
    def least_gain(self) -> float:
        """Part of an iteration that it has to save."""
        return WORTH * sum(self.segments) + CHAIN_WORTH * self.is_chain


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A job's partition, and how it was found."""

    partition: Partition
    words: str = ""
    """For the log; empty if the config left nothing open."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search over ways to cut came to."""

    best: Cut
    finalists: tuple[tuple[Cut, float], ...]
    """With seconds of a mean iteration, chains last, fewest segments first."""
    num_tried: int


def partition_of(config: Config, spec: ModelSpec) -> Partition:
    """The partition that a job's config asks for, placed as its schedule wants. Errors: see `choose_partition`."""
    costs = cost_model(config, spec)
    return choose_partition(config, spec, costs, sub_microbatch_size(config, spec, costs)).partition


def choose_partition(config: Config, spec: ModelSpec, costs: CostModel, sub_microbatch: int) -> Choice:
    """The partition that a job's config asks for, placed as its schedule wants, and how it was found.

    Args: sub_microbatch: pictures in a vision work, or clips in a DiT work; 0: all of a microbatch.
    Raises: ConfigError: fewer layers than chunks, fewer or more chunks than the schedule needs, or a way to cut that
        does not go with the schedule.
    """
    how = config.planner.partition
    if how == "mixed-parameters" or how == "mixed-latency":
        return _mixed(config, spec, costs, sub_microbatch)
    if how == "search":
        found = _searched(config, spec, costs, sub_microbatch)
        if found is not None:
            return found
    return Choice(partition=_separated(config, spec, _given_segments(config)))


def best_cut(candidates: Sequence[Cut], quick: Callable[[Cut], float], exact: Callable[[Cut], float]) -> Found | None:
    """The candidate with the least seconds x (1 + `least_gain`); None: none has a plan.

    Ties go to separated modules, then to fewer segments, first of all modules, then of the first ones.

    Args:
        quick: seconds by which finalists are picked; infinite: no plan.
        exact: seconds that decide.
    """

    def simplest_first(cuts: Iterable[Cut]) -> list[Cut]:
        return sorted(cuts, key=lambda c: (c.is_chain, sum(c.segments), c.segments))

    def ranked(times: Mapping[Cut, float]) -> list[Cut]:
        kept = simplest_first(c for c, seconds in times.items() if seconds < math.inf)
        return sorted(kept, key=lambda c: times[c] * (1 + c.least_gain))

    order = ranked({c: quick(c) for c in candidates})
    finalists = [c for c in order if not c.is_chain][:FINALISTS] + [c for c in order if c.is_chain][:1]
    times = {c: exact(c) for c in simplest_first(finalists)}
    order = ranked(times)
    if not order:
        return None
    return Found(best=order[0], finalists=tuple(times.items()), num_tried=len(candidates))


# ------------------------------------------------------------------------------------------- separated


def _given_segments(config: Config) -> dict[str, int]:
    """K of each module as the config gives it; 0: left open."""
    found = {"language": config.model.language.num_segments}
    if config.model.encoder:
        found["vision"] = config.model.encoder.num_segments
    if config.model.dit:
        found["dit"] = config.model.dit.num_segments
    return found


def _layouts(config: Config) -> dict[str, str]:
    found = {"language": config.model.language.pipeline_layout}
    if config.model.encoder:
        found["vision"] = config.model.encoder.pipeline_layout
    if config.model.dit:
        found["dit"] = config.model.dit.pipeline_layout
    return found


def _separated(config: Config, spec: ModelSpec, segments: Mapping[str, int]) -> Partition:
    """The separated partition with K of each module, by DIP's rule where that is 0, and enough for the schedule."""
    sizes, layouts = reference_sizes(spec, config.training.seq_len), _layouts(config)
    num_ranks = config.parallelism.pipeline_parallel_degree
    schedule = _schedule(config)
    found = partition(spec, num_ranks, segments, sizes, schedule.placement, layouts)
    cut = sum(len(found.of_module(module.name)) for module in spec.modules if not module.is_whole)
    missing = schedule.least_passes - cut // num_ranks
    if missing > 0 and not segments["language"] and not layouts["language"]:
        return partition(spec, num_ranks, {**segments, "language": 1 + missing}, sizes, schedule.placement, layouts)
    if missing > 0:
        key = f"model.language.num_segments = {segments['language']}"
        if layouts["language"]:
            key = f"model.language.pipeline_layout = {layouts['language']!r}"
        _refuse_few_passes(config, key, schedule.least_passes - missing)
    return found


def _schedule(config: Config) -> Schedule:
    return CATALOGUE[config.parallelism.pipeline_parallel_schedule]


def _refuse_few_passes(config: Config, key: str, passes: int) -> None:
    raise ConfigError(
        f'parallelism.pipeline_parallel_schedule = "{config.parallelism.pipeline_parallel_schedule}" needs at least '
        f"{_schedule(config).least_passes} chunks on each pipeline rank, but {key} makes {passes}; raise it, leave it "
        "out, or choose another schedule"
    )


# --------------------------------------------------------------------------------------------- searched


def _searched(config: Config, spec: ModelSpec, costs: CostModel, sub_microbatch: int) -> Choice | None:
    """The choice of a search; None: nothing is open, or nothing can be searched."""
    candidates = _candidates(config, spec)
    if _schedule(config).placement == "v" or not candidates or not any(_open(config).values()):
        return None
    names = [module.name for module in spec.modules if not module.is_whole]
    num_ranks = config.parallelism.pipeline_parallel_degree

    def separated(cut: Cut) -> Partition:
        return _separated(config, spec, dict(zip(names, cut.segments, strict=True)))

    chains = _chains(config, spec)
    if num_ranks == 1 or len(candidates + chains) == 1:  # one rank has nothing to interleave
        return Choice(partition=separated(min(candidates, key=lambda c: (sum(c.segments), c.segments))))
    try:
        few = TypicalIterations.draw(
            config, spec, costs, sub_microbatch, most_microbatches=2 * num_ranks, most_iterations=1
        )
        typical = TypicalIterations.draw(config, spec, costs, sub_microbatch)
    except ConfigError:  # the encoder reads something else than pictures: no workload stands for it
        return None
    weights = typical.layer_seconds()

    def parts(cut: Cut) -> Partition:
        return mixed_partition(spec, num_ranks, cut.segments[0], weights) if cut.is_chain else separated(cut)

    found = best_cut(candidates + chains, lambda c: few.seconds(parts(c)), lambda c: typical.seconds(parts(c)))
    if found is None:
        return None
    return Choice(partition=parts(found.best), words=_words(found, names))


def _open(config: Config) -> dict[str, bool]:
    """Which modules have neither a K nor a layout."""
    layouts = _layouts(config)
    return {name: not count and not layouts[name] for name, count in _given_segments(config).items()}


def _candidates(config: Config, spec: ModelSpec) -> list[Cut]:
    """Separated modules, with the numbers of segments that layers and schedule allow; a module with a layout has the
    number that it was given."""
    num_ranks, given, left_open = config.parallelism.pipeline_parallel_degree, _given_segments(config), _open(config)
    ranges = []
    for module in (module for module in spec.modules if not module.is_whole):
        most = max(1, min(MOST_SEGMENTS, len(module.layers) // num_ranks))
        ranges.append(range(1, most + 1) if left_open[module.name] else [given[module.name]])
    found = list(itertools.product(*ranges))
    layouts = any(_layouts(config).values())  # which may make any number of passes
    return [Cut(is_chain=False, segments=c) for c in found if layouts or sum(c) >= _schedule(config).least_passes]


def _chains(config: Config, spec: ModelSpec) -> list[Cut]:
    """Mixed chains that layers and schedule allow, where several modules have all been left open."""
    if len(spec.modules) == 1 or not all(_open(config).values()):
        return []
    num_layers = sum(len(module.layers) for module in spec.modules)
    most = min(MOST_SEGMENTS, num_layers // config.parallelism.pipeline_parallel_degree)
    return [Cut(is_chain=True, segments=(v,)) for v in range(_schedule(config).least_passes, most + 1)]


def _words(found: Found, names: Sequence[str]) -> str:
    def short(cut: Cut) -> str:
        return f"chain x {cut.segments[0]}" if cut.is_chain else " + ".join(map(str, cut.segments))

    best = ", ".join(f"{name} {count}" for name, count in zip(names, found.best.segments, strict=False)) + " segments"
    if found.best.is_chain:
        best = f"one chain of all modules, {found.best.segments[0]} on each rank"
    tried = ", ".join(f"{short(cut)}: {seconds:.4g} s" for cut, seconds in found.finalists)
    return f"partition: {best}, by search; simulated iterations of the best of {found.num_tried} tried: {tried}"


# ------------------------------------------------------------------------------------------------ mixed


def _mixed(config: Config, spec: ModelSpec, costs: CostModel, sub_microbatch: int) -> Choice:
    """All modules cut as one chain of equal parameters or of equal seconds."""
    how, schedule = config.planner.partition, _schedule(config)
    if schedule.placement == "v":
        raise ConfigError(
            f'planner.partition = "{how}" goes round the pipeline ranks, but parallelism.pipeline_parallel_schedule = '
            f'"{config.parallelism.pipeline_parallel_schedule}" wants each module down the ranks and back up; choose '
            'another schedule, or planner.partition = "search"'
        )
    passes = config.model.language.num_segments
    if 0 < passes < schedule.least_passes:
        _refuse_few_passes(config, f"model.language.num_segments = {passes}", passes)
    passes = passes or schedule.least_passes
    if how == "mixed-parameters":
        weights: Mapping[str, Sequence[float]] = {m.name: [x.num_params for x in m.layers] for m in spec.modules}
    else:
        weights = _typical_layer_seconds(config, spec, costs, sub_microbatch)
    parts = mixed_partition(spec, config.parallelism.pipeline_parallel_degree, passes, weights)
    return Choice(partition=parts, words=f"partition: {how}, one chain of all modules, {passes} on each rank")


def _typical_layer_seconds(
    config: Config, spec: ModelSpec, costs: CostModel, sub_microbatch: int
) -> Mapping[str, Sequence[float]]:
    try:
        return TypicalIterations.draw(config, spec, costs, sub_microbatch).layer_seconds()
    except ConfigError as error:
        raise ConfigError(
            'planner.partition = "mixed-latency" needs the times of typical pictures, which cannot be drawn for this '
            f'model ({error}); choose "mixed-parameters" or "search"'
        ) from error
