"""The partition, made once: which layers form which stage, and which pipeline rank holds it.

A *separated* partition cuts each module by itself, so that all pipeline ranks hold an equal part of it; or, *placed*,
those ranks that are its own or that encoders share. A *mixed* one cuts the layers of all modules as one chain; a rank
in the middle may then hold the end of one module and the beginning of the next, and a module need not reach every rank.
Which one a job gets is decided in `choice`.

Sources: DIP, arXiv:2504.14145, sections 3.1 and 4: separated partitioning, K_i = floor(T_i / T_1). Cornstarch,
arXiv:2503.11367, section 3.3.1: modules on ranks of their own, cut by the seconds of frozen and other layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

from mmtrain.config.model import section_of
from mmtrain.errors import ConfigError
from mmtrain.modality.equal_parts import split_evenly
from mmtrain.planner.partition.balance import level_owners
from mmtrain.planner.partition.pipeline_layout import chunk_bounds
from mmtrain.schedule.graph import ModuleStages
from mmtrain.schedule.library.catalogue import ChunkPlacement
from mmtrain.spec.spec import ModelSpec, ModuleSpec
from mmtrain.spec.work_size import WorkSize

Placed = Literal["", "parallel", "colocated"]
"""How modules are placed that do not reach every rank, as planner.placement; empty: they are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One chunk of one module and the pipeline rank that runs it."""

    index: int
    """The index over all modules."""
    module: str
    layers: tuple[int, int]
    """Range of the module's layers, the end excluded."""
    pp_rank: int
    segment: int
    """Index of the pass over the pipeline ranks, within the module; if mixed, within the chain of all modules."""
    first: bool
    """Whether it holds the module's first layer."""
    last: bool
    """Whether it holds the module's last layer."""
    of_vocabulary: bool = False
    """Whether its module is a part of a divided vocabulary, or joins such parts."""

    @classmethod
    def of(cls, index: int, module: ModuleSpec, layers: tuple[int, int], pp_rank: int, segment: int) -> "StageSpec":
        """The stage with some layers of a module. Arguments: see the fields."""
        return cls(
            index=index,
            module=module.name,
            layers=layers,
            pp_rank=pp_rank,
            segment=segment,
            first=layers[0] == 0,
            last=layers[1] == len(module.layers),
            of_vocabulary=module.section != module.name,
        )


@dataclass(frozen=True)
class Partition:
    """All stages of a model, by index."""

    num_ranks: int
    stages: tuple[StageSpec, ...]
    text: str
    """Name of the language model."""
    passes: int = 0
    """The parts of a mixed partition's chain on each rank, v; 0: it is separated."""
    placed: Placed = ""
    """How modules are placed that do not reach every rank: the value of planner.placement."""

    def __str__(self) -> str:
        """Chunks on each rank: of the chain, or K of each module; and whether each has a part of the vocabulary."""
        divided = ", vocabulary divided" if any(stage.of_vocabulary for stage in self.stages) else ""
        if self.passes:
            return f"chain x {self.passes}{divided}"
        cut = [module for module in self.modules if not self.stages[module.stages[0]].of_vocabulary]
        ranks = [len({self.stage_rank[stage] for stage in module.stages}) for module in cut]
        counts = [len(module.stages) // n for module, n in zip(cut, ranks, strict=True)]
        if self.placed:
            return " + ".join(f"{count} on {n}" for count, n in zip(counts, ranks, strict=True)) + divided
        return " + ".join(map(str, counts)) + divided

    def of_rank(self, pp_rank: int) -> tuple[StageSpec, ...]:
        """The stages that a pipeline rank holds, ascending."""
        return tuple(stage for stage in self.stages if stage.pp_rank == pp_rank)

    def of_module(self, module: str) -> tuple[StageSpec, ...]:
        """The stages of a module, in forward order."""
        return tuple(stage for stage in self.stages if stage.module == module)

    @property
    def tie_ranks(self) -> tuple[int, int]:
        """The pipeline ranks of the language model's first and last stage, which hold the copies of a tied matrix."""
        stages = self.of_module(self.text)
        return stages[0].pp_rank, stages[-1].pp_rank

    def hops(self, spec: ModelSpec) -> frozenset[tuple[int, int]]:
        """All pairs (source, target) of pipeline ranks between which activations, or their gradients, may travel.

        Args: spec: the model that is cut.
        """
        edges = [pair for module in self.modules for pair in pairwise(module.stages)]
        for module in spec.modules:
            first = self.of_module(module.name)[0].index
            edges += [(self.of_module(name)[-1].index, first) for name in module.after]
        forward = {(self.stage_rank[source], self.stage_rank[target]) for source, target in edges}
        return frozenset((a, b) for hop in forward for a, b in (hop, hop[::-1]) if a != b)

    @cached_property
    def modules(self) -> tuple[ModuleStages, ...]:
        """The chains of stages, in the model's order of modules."""
        names = dict.fromkeys(stage.module for stage in self.stages)
        return tuple(ModuleStages(name=n, stages=tuple(s.index for s in self.of_module(n))) for n in names)

    @cached_property
    def stage_rank(self) -> tuple[int, ...]:
        """[stage] -> pipeline rank."""
        return tuple(stage.pp_rank for stage in self.stages)


def partition(
    spec: ModelSpec,
    num_ranks: int,
    num_segments: Mapping[str, int],
    sizes: Mapping[str, WorkSize],
    placement: ChunkPlacement = "loop",
    layouts: Mapping[str, str] | None = None,
    placed: Placed = "",
    ranks: Mapping[str, range] | None = None,
    weights: Mapping[str, Sequence[float]] | None = None,
) -> Partition:
    """The separated partition: each module cut into P x K chunks of consecutive layers, K chunks on each of P ranks.

    A module that is not cut is one chunk on its rank. The cut minimises the largest chunk of a module (FLOPs of forward
    and backward at the reference sizes, including embedding and head). Among such cuts single layers are moved until
    the FLOPs of the ranks, over all modules, cannot become more equal; ties go to equal numbers of layers.

    Args:
        num_ranks: P.
        num_segments: K of each module; 0 or absent: floor(T_i / T_1) by DIP's rule, limited by the number of layers.
        sizes: a typical work of each module.
        placement: loop: chunk j is on rank j % P. v: down the ranks and back up, so that each module begins and ends
            on rank 0; K is 2 (or 0).
        layouts: the chunks of a module as a layout string, see `pipeline_layout`; absent or empty: of equal work.
        placed: how modules are placed, if they have `ranks`.
        ranks: the pipeline ranks of each module that is cut, in place of all P.
        weights: module -> [layer] -> its cost in any unit, in place of FLOPs.
    Raises: ConfigError: a module has fewer layers than chunks, a K that the placement does not allow, or a wrong
        layout.
    Source: DIP, arXiv:2504.14145, sections 3.1 and 4.
    """
    totals = {m.name: spec.flops(m.name, sizes[m.name]).total for m in spec.modules if m.pp_rank is None}
    fastest = min((t for t in totals.values() if t > 0), default=1.0)
    cuts: dict[str, _Cut] = {}
    for module in spec.modules:
        costs = [flops.total for flops in spec.layer_flops(module.name, sizes[module.name])]
        if weights is not None:
            costs = list(weights[module.name])
        if module.pp_rank is not None:
            cuts[module.name] = _Cut(
                bounds=((0, len(costs)),), costs=costs, ranks=[module.pp_rank % num_ranks], fixed=True
            )
            continue
        by_rule = int(totals[module.name] // fastest)
        layout = (layouts or {}).get(module.name, "")
        own = ranks[module.name] if ranks else range(num_ranks)
        cuts[module.name] = _cut(
            module, costs, own, num_segments.get(module.name, 0), by_rule, placement=placement, layout=layout
        )
    stages: list[StageSpec] = []
    for name, cut in _level_ranks(cuts, num_ranks).items():
        for j, layers in enumerate(cut.bounds):
            segment = list(cut.ranks[:j]).count(cut.ranks[j])
            stages.append(StageSpec.of(len(stages), spec.module(name), layers, cut.ranks[j], segment))
    return Partition(num_ranks, tuple(stages), spec.text.name, placed=placed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """A module's chunks."""

    bounds: tuple[tuple[int, int], ...]
    costs: Sequence[float]
    """The cost of each layer."""
    ranks: Sequence[int]
    """[chunk] -> its pipeline rank."""
    fixed: bool
    """Whether its bounds must not change: those of a layout, or the one chunk of a module that is not cut."""


def _level_ranks(cuts: Mapping[str, _Cut], num_ranks: int) -> dict[str, _Cut]:
    """The cuts after moving single layers, module by module, until no move makes the ranks more equal."""
    levelled = dict(cuts)
    changed = True
    while changed:
        changed = False
        for name, cut in levelled.items():
            if cut.fixed:
                continue
            loads = [0.0] * num_ranks
            for other_cut in levelled.values():
                for rank, (low, high) in zip(other_cut.ranks, other_cut.bounds, strict=True):
                    loads[rank] += sum(other_cut.costs[low:high]) if other_cut is not cut else 0.0
            bounds = level_owners(cut.bounds, cut.costs, cut.ranks, loads)
            changed |= bounds != cut.bounds
            levelled[name] = replace(cut, bounds=bounds)
    return levelled


def _cut(
    module: ModuleSpec,
    costs: list[float],
    ranks: Sequence[int],
    segments: int,
    by_rule: int,
    *,
    placement: ChunkPlacement,
    layout: str,
) -> "_Cut":
    """The chunks of a module, and their ranks. Args: segments: K; 0: `by_rule`, limited by the number of layers."""
    num_ranks = len(ranks)
    bounds = _layout_bounds(layout, module, num_ranks, segments) if layout else []
    segments = len(bounds) // num_ranks if bounds else segments
    if placement == "v":
        _check_v(module, segments)
        segments = 2
    if segments == 0:
        segments = max(1, min(by_rule, len(module.layers) // num_ranks))
    _check_layers(module, num_ranks, segments)
    return _Cut(
        bounds=tuple(bounds) or split_evenly(costs, num_ranks * segments),
        costs=costs,
        ranks=_ranks(ranks, segments, placement),
        fixed=bool(bounds),
    )


def rank_loads(costs: Mapping[str, Sequence[float]], segments: Mapping[str, int], num_ranks: int) -> list[float]:
    """[rank] -> the cost of its layers, if some modules share ranks. Args: costs: module -> [layer]; segments: K."""
    cuts = {
        name: _Cut(
            bounds=split_evenly(of_layers, num_ranks * segments[name]),
            costs=of_layers,
            ranks=[j % num_ranks for j in range(num_ranks * segments[name])],
            fixed=False,
        )
        for name, of_layers in costs.items()
    }
    loads = [0.0] * num_ranks
    for cut in _level_ranks(cuts, num_ranks).values():
        for rank, bounds in zip(cut.ranks, cut.bounds, strict=True):
            loads[rank] += sum(cut.costs[slice(*bounds)])
    return loads


def divide_ranks(
    costs: Mapping[str, Sequence[float]],
    groups: Sequence[Sequence[str]],
    segments: Mapping[str, int],
    num_ranks: int,
    given: Mapping[str, int],
) -> tuple[int, ...] | None:
    """[group] -> its number of pipeline ranks, such that the most loaded rank has the least; None: there is no way.

    Exact, by dynamic programming over the groups; ties go to more ranks for the last ones.

    Args:
        costs: module -> [layer] -> seconds of forward and backward.
        groups: modules that share ranks.
        segments: K of each module: it needs a layer for each of its chunks.
        given: module -> its number of ranks, where the config says it.
    Source: Cornstarch, arXiv:2503.11367, equation 3.5, over modules.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for group in groups:
        of_group = {name: costs[name] for name in group}
        most = min(len(of_layers) // segments[name] for name, of_layers in of_group.items())
        wanted = {given[name] for name in group if given.get(name)}
        counts = [n for n in range(1, min(num_ranks, most) + 1) if wanted <= {n}]
        load = {n: max(rank_loads(of_group, segments, n)) for n in counts}
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for before, (largest, chosen) in best.items():
            for n in counts:
                value = max(largest, load[n]), (*chosen, n)
                longer[before + n] = min(longer.get(before + n, value), value)
        best = longer
    return best[num_ranks][1] if num_ranks in best else None


def _ranks(ranks: Sequence[int], passes: int, placement: ChunkPlacement) -> list[int]:
    """[chunk] -> its pipeline rank."""
    down = list(ranks)
    return down + down[::-1] if placement == "v" else down * passes


def mixed_partition(
    spec: ModelSpec,
    num_ranks: int,
    passes: int,
    weights: Mapping[str, Sequence[float]],
    placement: ChunkPlacement = "loop",
) -> Partition:
    """The mixed partition: the layers of all modules, in their order, cut as one chain into P x v parts.

    The cut minimises the largest part; ties go to equal numbers of layers. A part with layers of several modules is one
    stage of each of them, on the same rank. Parts of a divided vocabulary are not in the chain: each rank has an equal
    one.

    Args:
        num_ranks: P.
        passes: v.
        weights: module -> [layer] -> its cost, in any unit.
        placement: loop: part j is on rank j % P. v: down the ranks and back up, so that v is 2.
    Raises: ConfigError: there are fewer layers than parts, or a v that the placement does not allow.
    """
    if placement == "v":
        _check_v(spec.text, passes)
    ranks = _ranks(range(num_ranks), passes, placement)
    chain = [module for module in spec.modules if module.section == module.name]
    all_layers = [(module, index) for module in chain for index in range(len(module.layers))]
    if len(all_layers) < num_ranks * passes:
        raise ConfigError(
            f"parallelism.pipeline_parallel_degree = {num_ranks} x {passes} passes (model.language.num_segments) = "
            f"{num_ranks * passes} chunks, but all modules together have {len(all_layers)} layers (cut points), and "
            "each chunk needs a layer; lower one of them, or use a deeper model"
        )
    bounds_of_parts = split_evenly([weights[module.name][index] for module, index in all_layers], num_ranks * passes)
    stages: list[StageSpec] = []
    position = {module.name: number for number, module in enumerate(spec.modules)}
    others = [module for module in spec.modules if module not in chain]

    def add_others(before: int) -> None:
        while others and position[others[0].name] < before:
            single = others.pop(0)
            assert single.pp_rank is not None
            stages.append(StageSpec.of(len(stages), single, (0, len(single.layers)), single.pp_rank, 0))

    for j, bounds in enumerate(bounds_of_parts):
        for module in chain:
            indices = [index for owner, index in all_layers[slice(*bounds)] if owner is module]
            if indices:
                add_others(position[module.name])
                layers = indices[0], indices[-1] + 1
                stages.append(StageSpec.of(len(stages), module, layers, ranks[j], j // num_ranks))
    add_others(len(spec.modules))
    return Partition(num_ranks, tuple(stages), spec.text.name, passes)


def _layout_bounds(layout: str, module: ModuleSpec, num_ranks: int, segments: int) -> list[tuple[int, int]]:
    """The chunks (first layer, end) of a layout; checks that their number fits the ranks and K."""
    section = section_of(module.name)
    bounds = chunk_bounds(layout, module, f"{section}.pipeline_layout")
    needed = f"{num_ranks} x {segments}" if segments else f"a multiple of {num_ranks}"
    if len(bounds) % num_ranks or (segments and len(bounds) != num_ranks * segments):
        raise ConfigError(
            f"{section}.pipeline_layout = {layout!r} has {len(bounds)} chunks; "
            f"parallelism.pipeline_parallel_degree and {section}.num_segments need {needed}"
        )
    return bounds


def _check_v(module: ModuleSpec, segments: int) -> None:
    if segments not in (0, 2):
        section = section_of(module.name)
        raise ConfigError(
            f"{section}.num_segments = {segments}: a V-shaped schedule (parallelism.pipeline_parallel_schedule) goes "
            "through the ranks twice, once down and once back up; set num_segments to 2 (or 0), or choose another "
            "schedule"
        )


def _check_layers(module: ModuleSpec, num_ranks: int, segments: int) -> None:
    chunks = num_ranks * segments
    if len(module.layers) < chunks:
        section = section_of(module.name)
        raise ConfigError(
            f"{section}.num_segments: module {module.name!r} has {len(module.layers)} layers (cut points), "
            f"but parallelism.pipeline_parallel_degree = {num_ranks} x {segments} segments = {chunks} "
            "chunks, and each chunk needs a layer; lower num_segments or pipeline_parallel_degree, or use a "
            "deeper model"
        )
