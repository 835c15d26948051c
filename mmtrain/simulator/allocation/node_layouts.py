"""The layout of an elastic job on some nodes: the composition of its pipelines, and where each node goes. Pure.

Equal arguments give equal layouts in every process and on every machine, whatever was asked before, so that no layout
is sent. Nothing is simulated but what chooses a partition: a microbatch passes a pipeline in the sum of its ranks'
seconds, and further ones follow at the pace of the slowest rank. A template is made only where one that divides its
work perfectly would be chosen.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from mmtrain.config.config import Config, each_pipeline, of_pipeline, with_depths
from mmtrain.costs.operators.cluster import Cluster
from mmtrain.errors import ConfigError, MemoryLimitError
from mmtrain.modality.typical import TypicalSizes, reference_sizes
from mmtrain.planner.assignment.dealing import microbatch_seconds
from mmtrain.planner.job import Job
from mmtrain.planner.memory.limit import MemoryRule
from mmtrain.planner.memory.rank_bytes import Sharding
from mmtrain.simulator.allocation.compositions import Composition, Layer, Template, Templates
from mmtrain.simulator.allocation.node_positions import NodeLayout, node_positions
from mmtrain.simulator.allocation.templates import grad_bytes, held_layers, layer_bytes, sums_s
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.typical_iterations import usual_workload
from mmtrain.simulator.workloads import draw

_TYPICAL = 8
"""Microbatches by whose mean templates are compared."""
_MORE_NODES = 4
"""Nodes of a pipeline beyond those of the smallest. Deeper ones gain little where shallow ones have microbatches, but
each number of nodes takes a partition to compare, and mixtures move many layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TooFewNodes:
    """A job that cannot go on."""

    reason: str
    """One line."""


@dataclass(kw_only=True)
class ElasticLayouts:
    """The layouts of one elastic job."""

    config: Config
    """The config of a job with elastic.enable."""
    ranks_per_node: int
    device_bytes: float | None = None
    """Memory of a rank's device, the same value in all processes; None: that of `planner.hardware`, if it is set."""
    device: str = ""
    """The type of a rank's device; empty: that of `planner.hardware`, or a CPU."""
    process_bytes: float = 0.0
    """Bytes of a process in addition to its tensors, the same value in all processes."""
    _made: dict[int, Template | ConfigError] = field(default_factory=dict, repr=False)
    """Nodes -> the template, or why there is none."""
    _jobs: dict[tuple[int, ...], tuple[Job, ...]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        layout = self.config.parallelism.layout
        if self.ranks_per_node % layout.stage_size:
            raise ConfigError(
                f"elastic: a stage has dp_shard {layout.dp_shard} x cp {layout.cp} x tp {layout.tp} = "
                f"{layout.stage_size} ranks, and a node has {self.ranks_per_node}; a stage lies inside of one node, so "
                "set these degrees to a divisor of a node's ranks"
            )

    # ------------------------------------------------------------------------------------------- choice

    def layout(self, nodes: int, before: Sequence[int] | None = None) -> Composition | TooFewNodes:
        """The composition with the shortest step on some nodes, or why the job cannot go on.

        Args: before: the depths that it replaces; of compositions that take about as long, the one with the fewest
            bytes to copy then counts. None: none.
        Raises: ConfigError: the model cannot be cut into the stages of the smallest pipeline.
        """
        smallest = self.smallest(nodes)
        if isinstance(smallest, TooFewNodes):
            return smallest
        section = self.config.elastic
        pipelines, replicas = section.max_failures + 1, self.config.parallelism.data_parallel_shard_degree
        if nodes < pipelines * smallest:
            if section.below == "save":
                return TooFewNodes(
                    reason=f"{_counted(nodes)}, but {pipelines} pipelines (elastic.max_failures + 1) of at least "
                    f'{smallest} need {pipelines * smallest}; add nodes, or set elastic.below = "go_on"'
                )
            pipelines = nodes // smallest
        most = self.config.training.global_batch_size // replicas
        pipelines = min(pipelines, most)
        useful = max(2 * smallest - 1, smallest + _MORE_NODES, math.ceil(nodes / most))
        largest = min(useful, nodes - (pipelines - 1) * smallest)
        return self._best(range(smallest, largest + 1), nodes, pipelines, before or ())

    def smallest(self, nodes: int) -> int | TooFewNodes:
        """The nodes n_0 of the smallest pipeline; or why some nodes have none. Errors: see `layout`."""
        given = self.config.elastic.min_nodes
        least_depth = 1 if self.config.planner.placement == "spread" else 2
        least = given or math.ceil(least_depth / self._stages)
        if nodes < least:
            return TooFewNodes(reason=f"{_counted(nodes)}, but the smallest pipeline needs {least}; add nodes")
        for number in (given,) if given else range(least, nodes + 1):
            made = self._template(number)
            if isinstance(made, Template):
                return number
            if given or not isinstance(made, MemoryLimitError):
                raise made
        return TooFewNodes(reason=f"no pipeline fits into the memory of {_counted(nodes)}; add nodes ({made})")

    def placed(
        self, composition: Composition, nodes: Sequence[str], held: Mapping[str, Mapping[Layer, int]]
    ) -> NodeLayout:
        """The layout of a composition in which nodes lack the fewest bytes in all; of equal ones, the first by names.

        Args:
            nodes: names of those that may train: none that leaves.
            held: name of a node -> layer -> bytes of its state there; a node that is absent holds nothing.
        """
        jobs = self.jobs(composition.depths)
        wanted = [
            layers
            for job, number in zip(jobs, composition.nodes, strict=True)
            for layers in held_layers(job.partition, number)
        ]
        chosen = node_positions(wanted, nodes, held)
        idle = tuple(sorted({*nodes} - {*chosen}))
        return NodeLayout(depths=composition.depths, nodes=chosen, idle=idle)

    def jobs(self, depths: tuple[int, ...]) -> tuple[Job, ...]:
        """[pipeline] -> its job in a composition of these depths, as `make_job` makes it. Raises: ConfigError."""
        if depths not in self._jobs:
            self._jobs[depths] = each_pipeline(with_depths(self.config, depths), make_job)
        return self._jobs[depths]

    # ---------------------------------------------------------------------------------------- templates

    def _best(self, sizes: range, nodes: int, pipelines: int, before: Sequence[int]) -> Composition:
        """The best composition of templates. Args: sizes: their nodes. before: as of `layout`, empty: none."""
        first = self._template(sizes.start)
        assert isinstance(first, Template)
        old = [one for depth in before if isinstance(one := self._template(depth // self._stages), Template)]
        replaced = Composition(pipelines=tuple(old), microbatches=(), pipeline_s=0.0, sums_s=0.0) if old else None
        known = {number: self._perfect(first, number) for number in sizes if number * self._stages <= self._most_depth}
        shown = [sizes.start, *(one.nodes for one in old)]
        while True:
            for number in shown:
                if number in known:
                    known = self._with_made(known, number)
            templates = Templates(
                templates=tuple(known.values()),
                max_failures=pipelines - 1,
                microbatches=self.config.training.global_batch_size,
                max_nodes=nodes,
                sums_s=self._sums_s,
                layer_bytes=self.layer_bytes,
            )
            best = templates.best(nodes, replaced)
            shown = [one.nodes for one in best.pipelines if one.partition is None]
            if not shown:
                return best

    def _with_made(self, known: dict[int, Template], number: int) -> dict[int, Template]:
        """The templates with the one of some nodes as it is; without it, and larger ones, if there is none."""
        made = self._template(number)
        if isinstance(made, Template):
            return known | {number: made}
        return {other: one for other, one in known.items() if other < number}

    def _perfect(self, first: Template, nodes: int) -> Template:
        """A template that divides the work of the smallest one into equal parts, so that none is faster."""
        depth = nodes * self._stages
        through_s = first.points[0][1]
        points = ((1, through_s), (2, through_s + through_s / depth))
        return replace(first, nodes=nodes, depth=depth, points=points, partition=None, held=())

    def _template(self, nodes: int) -> Template | ConfigError:
        if nodes not in self._made:
            try:
                self._made[nodes] = self._make(nodes)
            except ConfigError as error:
                self._made[nodes] = error
        return self._made[nodes]

    def _make(self, nodes: int) -> Template:
        """The template of some nodes. Raises: ConfigError: it cannot be cut, or does not fit into the memory."""
        depth = nodes * self._stages
        config = self._config_of(depth)
        try:
            job = make_job(config)
        except MemoryLimitError:
            raise
        except ConfigError as error:
            raise ConfigError(
                f"elastic: a pipeline of {depth} stages, on nodes of {self.ranks_per_node} ranks: {error}"
            ) from error
        MemoryRule.of(config, self.device_bytes, device=self.device).budget(
            job.spec, job.partition, self.process_bytes
        ).check()
        seconds = self._rank_seconds(config, job)
        through_s, pace_s = _rounded(sum(seconds)), _rounded(max(seconds))
        return Template(
            nodes=nodes,
            depth=depth,
            points=((1, through_s), (2, through_s + pace_s)),
            replicas=config.parallelism.data_parallel_shard_degree,
            held=held_layers(job.partition, nodes),
            partition=job.partition,
            grad_bytes=grad_bytes(Sharding.of(config), job.spec, job.partition),
        )

    def _config_of(self, depth: int) -> Config:
        """The job of equal pipelines of a depth, f + 1 of them but at least two where microbatches allow it."""
        most = self.config.training.global_batch_size // self.config.parallelism.data_parallel_shard_degree
        pipelines = min(most, max(2, self.config.elastic.max_failures + 1))
        return of_pipeline(with_depths(self.config, [depth] * pipelines), 0)

    def _rank_seconds(self, config: Config, job: Job) -> list[float]:
        """[pp_rank] -> seconds of a typical microbatch; of a model for which none can be drawn, in proportion to
        FLOPs."""
        try:
            bins = replace(TypicalSizes.typical(config), num_microbatches=_TYPICAL)
            drawn = draw(usual_workload(config), bins, seed=0, iteration=0)
            return [float(seconds) for seconds in microbatch_seconds(job, drawn).mean(axis=0)]
        except ConfigError:  # the encoder does not read images
            sizes = reference_sizes(job.spec, config.training.seq_len)
            loads = [0.0] * job.partition.num_ranks
            for stage in job.partition.stages:
                flops = job.spec.layer_flops(stage.module, sizes[stage.module])[slice(*stage.layers)]
                loads[stage.pp_rank] += sum(layer.total for layer in flops) / config.planner.device.flops_per_s
            return loads

    @property
    def _stages(self) -> int:
        """Stages of a node."""
        return self.ranks_per_node // self.config.parallelism.layout.stage_size

    @cached_property
    def layer_bytes(self) -> dict[Layer, float]:
        """Layer -> bytes of its weights and moments."""
        return layer_bytes(self.config)

    @property
    def _most_depth(self) -> int:
        """Pipeline ranks beyond which one would have no layer."""
        return len(self.layer_bytes)

    def _sums_s(self, pipelines: Sequence[Template]) -> float:
        network = self._network
        return 0.0 if network is None else sums_s(network, pipelines, network.hardware.gpus_per_node)

    @cached_property
    def _network(self) -> Cluster | None:
        """The network between the nodes; None: unknown."""
        hardware = self.config.planner.hardware
        return Cluster.of(hardware) if hardware else None


def _rounded(seconds: float) -> float:
    """Seconds to six digits, so that processors that sum in another order choose the same layout."""
    return float(f"{seconds:.6g}")


def _counted(nodes: int) -> str:
    return f"{nodes} node{'s' * (nodes != 1)}"
