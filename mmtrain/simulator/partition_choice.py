"""The partition of a job: set by its config, or chosen by a rule or a search. Pure.

The choice depends only on the config, so all ranks make the same one before any data are read.

Sources: DIP, arXiv:2504.14145, sections 4 and 7.1, which names the mixed partitions of its baselines: Megatron-LM's by
parameters, and nnScaler's (Lin et al., OSDI 2024) by time.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

from mmtrain.config.config import Config
from mmtrain.config.model import section_of
from mmtrain.costs.cost_model import CostModel
from mmtrain.costs.job_costs import cost_model
from mmtrain.errors import ConfigError
from mmtrain.planner.batching import SubMicrobatch
from mmtrain.planner.job_schedule import job_schedule
from mmtrain.planner.memory.limit import MemoryRule
from mmtrain.planner.partition.partition import Partition, mixed_partition
from mmtrain.simulator import cuts
from mmtrain.simulator.cut_search import CHAIN_WORTH, Cut, Found, best_cut, microbatches_to_judge, simplicity
from mmtrain.simulator.sub_microbatch_size import sub_microbatch_size
from mmtrain.simulator.typical_iterations import TypicalIterations
from mmtrain.spec.spec import ModelSpec
from mmtrain.spec.vocabulary import divided_vocabulary, with_loss_chunks


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A job's partition, and how it was chosen."""

    partition: Partition
    spec: ModelSpec
    """The model that it cuts: that of the config, or the one whose vocabulary a search divides."""
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
    if placement != "spread" and schedule.placement == "v":
        raise ConfigError(
            f'planner.placement = "{placement}" with parallelism.pipeline_parallel_schedule = '
            f'"{config.parallelism.pipeline_parallel_schedule}", which goes down all pipeline ranks and back up in '
            'every module; choose another schedule, or set "spread"'
        )
    if placement == "parallel" or placement == "colocated":
        weights = cuts.placing_weights(config, spec, costs, sub_microbatch)
        cut = cuts.placed_cut(config, spec, placement, weights)
        placed = cuts.placed_partition(config, spec, cut, weights)
        return Choice(
            partition=placed, spec=spec, summary=f"partition: modules {placement}, {cuts.ranks_text(cut, spec)}"
        )
    if how == "mixed-parameters" or how == "mixed-latency":
        return _mixed(config, spec, costs, sub_microbatch)
    if how == "search":
        choice = _searched(config, spec, costs, sub_microbatch)
        if choice is not None:
            return choice
    return Choice(partition=cuts.separated_partition(config, spec, cuts.given_segments(config)), spec=spec)


# --------------------------------------------------------------------------------------------- searched


@dataclass(frozen=True, kw_only=True, eq=False)
class _Candidates:
    """The cuts of a model, whole or with its vocabulary divided."""

    config: Config
    spec: ModelSpec
    costs: CostModel
    sub_microbatch: SubMicrobatch

    def draw(self, **how: Any) -> TypicalIterations:
        """Typical iterations. Arguments and errors: see `TypicalIterations.draw`."""
        return TypicalIterations.draw(self.config, self.spec, self.costs, self.sub_microbatch, **how)

    @cached_property
    def typical(self) -> TypicalIterations:
        """The iterations that are drawn. Errors: see `TypicalIterations.draw`."""
        return self.draw()

    @cached_property
    def names(self) -> list[str]:
        """The modules that are cut."""
        return [module.name for module in self.spec.modules if module.pp_rank is None]

    @cached_property
    def weights(self) -> Mapping[str, Sequence[float]]:
        """Module -> [layer] -> seconds of typical iterations."""
        return self.typical.layer_seconds()

    @cached_property
    def cuts(self) -> list[Cut]:
        """All cuts but those of placed modules."""
        found = [*cuts.separated_cuts(self.config, self.spec), *cuts.chains(self.config, self.spec)]
        return self._marked(found)

    @cached_property
    def placed_cuts(self) -> list[Cut]:
        """The cuts of placed modules, if the placement is searched."""
        return self._marked(cuts.placed_cuts(self.config, self.spec, self.weights)) if _places(self.config) else []

    def partition(self, cut: Cut) -> Partition:
        """The partition of one of the cuts."""
        if cut.placement:
            return cuts.placed_partition(self.config, self.spec, cut, self.weights)
        if cut.is_chain:
            num_ranks, placement = self.config.parallelism.pipeline_parallel_degree, job_schedule(self.config).placement
            return mixed_partition(self.spec, num_ranks, cut.segments[0], self.weights, placement)
        return cuts.separated_partition(self.config, self.spec, dict(zip(self.names, cut.segments, strict=True)))

    def _marked(self, found: list[Cut]) -> list[Cut]:
        return [replace(cut, divides_vocabulary=self.spec.divides_vocabulary) for cut in found]


def _candidates(
    config: Config, spec: ModelSpec, costs: CostModel, sub_microbatch: SubMicrobatch
) -> dict[bool, _Candidates]:
    """Whether the vocabulary is divided -> the cuts. Each alone, unless parallelism.vocabulary_parallel is searched."""
    specs, parallelism = [spec], config.parallelism
    if parallelism.vocabulary_parallel == "search" and parallelism.pipeline_parallel_degree > 1:
        with suppress(ConfigError):  # more parts than tokens
            divided = divided_vocabulary(spec, parallelism.pipeline_parallel_degree, parallelism.tensor_parallel_degree)
            specs.append(with_loss_chunks(divided, config))
    return {
        one.divides_vocabulary: _Candidates(
            config=config,
            spec=one,
            costs=costs if one is spec else cost_model(config, one),
            sub_microbatch=sub_microbatch,
        )
        for one in specs
    }


def _places(config: Config) -> bool:
    """Whether the search tries modules on ranks of their own."""
    return config.planner.placement == "search" and job_schedule(config).placement != "v"


def _searched(config: Config, spec: ModelSpec, costs: CostModel, sub_microbatch: SubMicrobatch) -> Choice | None:
    """The choice of a search; None: the config determines the partition, or a search is not possible."""
    models = _candidates(config, spec, costs, sub_microbatch)
    tried = [cut for model in models.values() for cut in model.cuts]
    is_open = any(cuts.open_modules(config).values()) or _places(config) or len(models) > 1
    if not tried or not is_open:
        return None

    def choice(cut: Cut, summary: str = "") -> Choice:
        model = models[cut.divides_vocabulary]
        return Choice(partition=model.partition(cut), spec=model.spec, summary=summary)

    is_alone = len(tried) == 1 and not tried[0].is_chain and not _places(config)
    if config.parallelism.pipeline_parallel_degree == 1 or is_alone:  # on one rank, all cuts take the same time
        return choice(min(tried, key=simplicity))
    try:
        found = _found(config, models)
    except ConfigError:  # the encoder does not read images: there is no workload for it
        return None
    return choice(found.best, _summary(found, models[found.best.divides_vocabulary])) if found else None


def _found(config: Config, models: Mapping[bool, _Candidates]) -> Found | None:
    """The best cut; None: none has a plan. Raises: ConfigError: typical iterations cannot be drawn."""
    tried = [cut for model in models.values() for cut in model.cuts]
    tried += [cut for model in models.values() for cut in model.placed_cuts]

    @cache
    def partition_for(cut: Cut) -> Partition:
        return models[cut.divides_vocabulary].partition(cut)

    def drawn(**how: Any) -> dict[bool, TypicalIterations]:
        return {divides: model.draw(**how) for divides, model in models.items()}

    # Division adds candidates, and does not change how closely each is looked at.
    first = next(iter(models.values()))
    num_ranks, typical = config.parallelism.pipeline_parallel_degree, first.typical

    def judging_s(iterations: TypicalIterations) -> list[float]:
        own = [cut for cut in tried if models[cut.divides_vocabulary] is first]
        return [iterations.judging_s(partition_for(cut)) for cut in own]

    rates = judging_s(first.draw(is_quick=True)), judging_s(typical)
    quick_microbatches, exact_microbatches = microbatches_to_judge(
        num_ranks, typical.num_microbatches, *rates, typical.rank_s
    )
    quick = drawn(most_microbatches=quick_microbatches, is_quick=True)
    exact = drawn(most_microbatches=exact_microbatches)
    memory = MemoryRule.of_device(config)

    def seconds(iterations: Mapping[bool, TypicalIterations], cut: Cut) -> float:
        within = None if cut.is_even else memory
        return iterations[cut.divides_vocabulary].seconds(partition_for(cut), within=within)

    @cache
    def peak_bytes(cut: Cut) -> float:
        return exact[cut.divides_vocabulary].peak_bytes(partition_for(cut))

    is_mixed = any(len(model.names) > 1 for model in models.values())

    def fits(chain: Cut, instead: Cut) -> bool:
        # A V-shaped schedule has its own order on a chain alone, and with it the memory that it is known for.
        is_known = memory.limit_bytes is not None or job_schedule(config).placement == "v"
        return is_known or not is_mixed or peak_bytes(chain) <= peak_bytes(instead)

    margin = CHAIN_WORTH if is_mixed and not _places(config) else 0.0
    return best_cut(tried, partial(seconds, quick), partial(seconds, exact), fits, margin)


def _summary(search: Found, model: _Candidates) -> str:
    segments = search.best.segments
    if search.best.placement:
        chosen = f"modules {search.best.placement}, {cuts.ranks_text(search.best, model.spec)}"
    elif search.best.is_chain:
        what = "one chain of all modules" if len(model.names) > 1 else f"{model.names[0]} cut by time"
        chosen = f"{what}, {segments[0]} on each rank"
    else:
        chosen = ", ".join(f"{name} {count}" for name, count in zip(model.names, segments, strict=True)) + " segments"
    chosen += ", vocabulary divided" * search.best.divides_vocabulary
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
    passes = cuts.given_segments(config)[spec.text.name]
    if 0 < passes < schedule.least_passes:
        cuts.refuse_few_passes(config, f"{section_of(spec.text.name)}.num_segments = {passes}", passes)
    if how == "mixed-parameters":
        weights: Mapping[str, Sequence[float]] = {m.name: [x.num_params for x in m.layers] for m in spec.modules}
    else:
        weights = _typical_layer_seconds(config, spec, costs, sub_microbatch)
    num_ranks = config.parallelism.pipeline_parallel_degree
    passes = passes or (2 if schedule.placement == "v" else schedule.least_passes)
    cut = mixed_partition(spec, num_ranks, passes, weights, schedule.placement)
    return Choice(
        partition=cut, spec=spec, summary=f"partition: {how}, one chain of all modules, {passes} on each rank"
    )


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
