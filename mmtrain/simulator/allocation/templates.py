"""The templates of a job: one pipeline on each number of nodes, with its simulated seconds. Pure.

All pipelines share the degrees of a stage (dp_shard, cp, tp), whose ranks lie inside of one node; they differ in depth.
The smallest template has n_0 nodes, the fewest on which one pipeline fits into memory; the largest leaves n_0 nodes to
each of f other pipelines. The degrees are those with the shortest step on all nodes: for each of them the smallest
template is simulated, and larger ones are guessed from it until the best composition consists of simulated ones.

Source of templates and of their sizes: Oobleck (Jang, Efficient Multimodal Model Training at Scale, dissertation,
University of Michigan, 2026, section 2.4.1). It varies the GPUs of the stages of a pipeline, too (`oobleck_templates`).
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from mmtrain.config.config import Config
from mmtrain.config.elastic import ElasticConfig
from mmtrain.config.topology import JobLayout
from mmtrain.costs.machine import RankNetwork
from mmtrain.costs.operators.cluster import Cluster
from mmtrain.costs.operators.operator_graph import DeviceKind, OpKind, Phase
from mmtrain.errors import ConfigError
from mmtrain.planner.assignment.sample_costs import SampleCosts, SamplePricer
from mmtrain.planner.memory.rank_bytes import Sharding, param_state_bytes
from mmtrain.planner.partition.partition import Partition
from mmtrain.simulator.allocation.candidate import Candidate
from mmtrain.simulator.allocation.candidate_judge import GIB, Effort, Judge, Judged
from mmtrain.simulator.allocation.compositions import Composition, Layer, Template, Templates, check_microbatches
from mmtrain.simulator.allocation.degrees import divisors, priced_layers, values_of
from mmtrain.simulator.allocation.mapping import map_stages
from mmtrain.simulator.drawn_steps import StepMicrobatches, packed_step
from mmtrain.spec.builders import DTYPE_BYTES, model_spec
from mmtrain.spec.spec import ModelSpec

MOST_SIMULATED = 4
"""Degrees of a stage of which templates are simulated, those with the shortest estimates."""
_MASTER_BYTES = 4
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(kw_only=True)
class TemplateMaker:
    """Makes the templates of one job on nodes of its hardware."""

    config: Config
    costs: SampleCosts
    """The costs of samples of its source."""
    nodes: int
    """N, all that there are."""
    max_failures: int
    """The failures f that a job must survive."""
    evaluations: int = 20
    """Plans that a search tries for each number of microbatches, with planner.enable."""
    seed: int = 0
    """The seed of all draws."""
    progress: Callable[[], None] = lambda: None
    """Called after each simulated template."""
    _made: dict[tuple[JobLayout, int], Template | Judged] = field(default_factory=dict, repr=False)
    _smallest: dict[JobLayout, int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        parallelism = replace(self.config.parallelism, pipelines=[])
        self.config = replace(self.config, parallelism=parallelism, elastic=ElasticConfig())
        hardware = self.config.planner.hardware
        if not hardware:
            raise ConfigError(
                'allocate: --nodes with planner.hardware = "", of which the GPUs of a node are unknown; name one by '
                "--cluster"
            )
        numbered = re.fullmatch(r"(.+)x\d+", hardware)
        hardware = numbered[1] if numbered else hardware
        self.config = replace(self.config, planner=replace(self.config.planner, hardware=hardware))
        self.cluster = Cluster.of(hardware, self.nodes * Cluster.of(hardware).hardware.gpus_per_node)
        self.per_node = self.cluster.hardware.gpus_per_node

    @property
    def node_bytes_per_s(self) -> float:
        """The rate at which a node receives what other nodes send."""
        hardware = self.cluster.hardware
        reached = hardware.efficiency_of(OpKind.P2P, Phase.FORWARD).network
        return hardware.links[DeviceKind.NETWORK].bytes_per_s * reached * self.per_node

    # ------------------------------------------------------------------------------------------- choice

    def chosen(self) -> tuple[JobLayout, Templates]:
        """The degrees of a stage (pp = 1) with the shortest step on all nodes, and all their templates.

        Raises: ConfigError: no pipeline fits on the nodes, or fewer than f + 1 do; with what is missing.
        """
        estimated: list[tuple[float, JobLayout, Templates]] = []
        problems: list[ConfigError] = []
        for stage in self.stages():
            try:
                templates = self._estimated(stage)
                estimated.append((templates.best(self.nodes).seconds, stage, templates))
            except ConfigError as error:
                problems.append(error)
        ranked: list[tuple[float, JobLayout]] = []
        for _, stage, templates in sorted(estimated, key=lambda one: (one[0], one[1].degrees)):
            try:
                ranked.append((self._refined(stage, templates).best(self.nodes).seconds, stage))
            except ConfigError as error:
                problems.append(error)
            if len(ranked) == MOST_SIMULATED:
                break
        if not ranked:
            raise self._why_none(problems)
        best = min(ranked, key=lambda one: (one[0], one[1].tp, one[1].cp))[1]
        return best, self.templates(best)

    def stages(self) -> Iterator[JobLayout]:
        """All degrees of a stage whose ranks divide the GPUs of a node; pp is 1."""
        for size in divisors(self.per_node):
            for tp in divisors(size):
                for cp in divisors(size // tp):
                    yield JobLayout.grid(dp_shard=size // (tp * cp), cp=cp, tp=tp)

    def templates(self, stage: JobLayout) -> Templates:
        """All templates of some degrees of a stage, simulated. Raises: ConfigError: see `chosen`."""
        smallest = self.smallest(stage)
        made = [self.template(stage, nodes) for nodes in range(smallest, self._largest(smallest) + 1)]
        return self.joined([one for one in made if isinstance(one, Template)])

    def simulated_s(self, stage: JobLayout, composition: Composition) -> float:
        """Seconds of an iteration of a composition, simulated as one job with its sums; infinite: it does not run.

        Args: stage: the degrees of its stages.
        """
        values = values_of(stage) | {"parallelism.pipelines": composition.depths}
        return self._judge.judge(Candidate().having(values), Effort(evaluations=self.evaluations)).mean_s

    def smallest(self, stage: JobLayout) -> int:
        """The nodes n_0 of the smallest pipeline with some degrees of a stage. Raises: ConfigError: more than all
        nodes, or too few microbatches."""
        check_microbatches(self.config.training.global_batch_size, self.max_failures, stage.dp)
        closest: Judged | None = None
        for nodes in range(1, self.nodes + 1):
            made = self.template(stage, nodes)
            if isinstance(made, Template):
                return self._smallest.setdefault(stage, nodes)
            closest = min([one for one in (closest, made) if one], key=lambda one: one.missing_bytes)
        raise _DoesNotFitError(closest)

    @property
    def fewest(self) -> tuple[int, JobLayout]:
        """The least n_0 of all degrees that were tried, and the degrees."""
        return min(((nodes, stage) for stage, nodes in self._smallest.items()), key=lambda one: one[0])

    def template(self, stage: JobLayout, nodes: int) -> Template | Judged:
        """The template of a number of nodes, or why there is none."""
        if (stage, nodes) not in self._made:
            self._made[stage, nodes] = self._simulated(stage, nodes)
            self.progress()
        return self._made[stage, nodes]

    def counts(self, stage: JobLayout, nodes: int) -> list[int]:
        """Microbatches of a replica for which a template is simulated, ascending: one; its share of a step's on all
        nodes, half and twice as many; and its share beside f of the smallest pipelines."""
        others = self.max_failures * self._smallest.get(stage, nodes)
        most = max(1, self.config.training.global_batch_size // stage.dp)
        shares = (nodes / self.nodes * part for part in (0.5, 1, 2))
        return sorted({1, *(min(most, max(1, round(most * part))) for part in (*shares, nodes / (nodes + others)))})

    # --------------------------------------------------------------------------------------- simulation

    def _simulated(self, stage: JobLayout, nodes: int) -> Template | Judged:
        depth = nodes * self.per_node // stage.world_size
        points: list[tuple[int, float]] = []
        peak_bytes = 0.0
        for count in reversed(self.counts(stage, nodes)):
            values = values_of(replace(stage, depths=(depth,))) | {"training.global_batch_size": count * stage.dp}
            candidate = Candidate().having(values)
            judged = self._judge.judge(candidate, Effort(evaluations=self.evaluations))
            if judged.seconds:
                points.append((count, judged.mean_s))
                peak_bytes = max(peak_bytes, judged.peak_bytes)
            elif not points:
                return judged
        job = self._judge.scheduled(candidate)
        assert job is not None
        (made,) = job.simulator.jobs
        partition = made.partition
        return Template(
            nodes=nodes,
            depth=depth,
            points=tuple(reversed(points)),
            replicas=stage.dp,
            held=held_layers(partition, nodes),
            partition=partition,
            grad_bytes=grad_bytes(Sharding.of(job.config), made.spec, partition),
            peak_bytes=peak_bytes,
        )

    @cached_property
    def _judge(self) -> Judge:
        steps = self.typical
        return Judge(config=self.config, steps=lambda job: [steps[: job.training.global_batch_size]], seed=self.seed)

    @cached_property
    def typical(self) -> StepMicrobatches:
        """The microbatches of a step, such that each beginning of it has small and large ones in equal parts.

        By the golden ratio's sequence over the microbatches in the order of their work, from the middle one.
        """
        step, pricer = packed_step(self.config, self.costs, (self.seed, 0)), SamplePricer.of(self.config)
        ordered = sorted(step, key=pricer.microbatch_s)
        positions = (0.5 + _GOLDEN * np.arange(len(ordered))) % 1
        return tuple(ordered[rank] for rank in np.argsort(np.argsort(positions, kind="stable"), kind="stable"))

    # ---------------------------------------------------------------------------------------- estimates

    def _estimated(self, stage: JobLayout) -> Templates:
        """The smallest template, and larger ones by it: a microbatch passes them in the same time, and further ones
        follow in proportion to nodes. Raises: ConfigError: none fits, or fewer than f + 1."""
        smallest = self.smallest(stage)
        known = self.template(stage, smallest)
        assert isinstance(known, Template)
        made, first_s = [known], known.points[0][1]
        for nodes in range(smallest + 1, self._largest(smallest) + 1):
            points = tuple((n, first_s + (seconds - first_s) * smallest / nodes) for n, seconds in known.points)
            depth = known.depth * nodes // smallest
            made.append(
                Template(nodes=nodes, depth=depth, points=points, replicas=stage.dp, grad_bytes=known.grad_bytes)
            )
        return self.joined(made)

    def _refined(self, stage: JobLayout, templates: Templates) -> Templates:
        """The templates, with those simulated of which the best composition on all nodes consists. Raises: see
        `chosen`."""
        while True:
            guessed = [one for one in templates.best(self.nodes).pipelines if not one.peak_bytes]
            if not guessed:
                return templates
            made = {one.nodes: self.template(stage, one.nodes) for one in guessed}
            known = [made.get(one.nodes, one) for one in templates.templates]
            templates = self.joined([one for one in known if isinstance(one, Template)])

    def joined(self, made: Sequence[Template]) -> Templates:
        """Templates of the job. Raises: ConfigError: there are none."""
        if not made:
            raise ConfigError(f"allocate: no pipeline fits on {self.nodes} nodes (--nodes)")
        return Templates(
            templates=tuple(made),
            max_failures=self.max_failures,
            microbatches=self.config.training.global_batch_size,
            max_nodes=self.nodes,
            sums_s=lambda pipelines: sums_s(self.cluster, pipelines, self.per_node),
            layer_bytes=layer_bytes(self.config),
        )

    def _largest(self, smallest: int) -> int:
        """Nodes of the largest template. Raises: ConfigError: there are fewer than f + 1 times the smallest."""
        pipelines = self.max_failures + 1
        if self.nodes < pipelines * smallest:
            raise _TooFewNodesError(
                f"allocate: --nodes {self.nodes} with --max-failures {self.max_failures}: {pipelines} pipelines of at "
                f"least {smallest} nodes need {pipelines * smallest}; use more nodes, or tolerate fewer failures"
            )
        return self.nodes - self.max_failures * smallest

    def _why_none(self, problems: Sequence[ConfigError]) -> ConfigError:
        """The error of the degrees that come closest."""
        few = [one for one in problems if isinstance(one, _TooFewNodesError)]
        closest = [one.judged for one in problems if isinstance(one, _DoesNotFitError) and one.judged]
        if few or not closest:
            return [*few, *problems][0]
        one = min(closest, key=lambda judged: judged.missing_bytes)
        if one.missing_bytes == math.inf:
            return ConfigError(f"allocate: no pipeline runs on {self.nodes} nodes (--nodes); the first: {one.problem}")
        mesh = one.candidate.job(self.config).parallelism.layout
        return ConfigError(
            f"allocate: --nodes {self.nodes}: no pipeline fits into their memory; the closest one (pp {mesh.pp}, "
            f"dp_shard {mesh.dp_shard}, cp {mesh.cp}, tp {mesh.tp}) lacks {one.missing_bytes / GIB:.1f} GiB on pp_rank "
            f'{one.peak_rank}; use more nodes, optimizer.moments_dtype = "bfloat16", or shorter training.seq_len'
        )


class _TooFewNodesError(ConfigError):
    """A pipeline fits, but not f + 1."""


class _DoesNotFitError(ConfigError):
    """No number of nodes holds a pipeline."""

    def __init__(self, judged: Judged | None) -> None:
        super().__init__("no pipeline fits" if judged is None else judged.problem)
        self.judged = judged


def sums_s(network: RankNetwork, pipelines: Sequence[Template], per_node: int) -> float:
    """Seconds of the sums between pipelines: one all-reduce of the largest gradients of a rank of any pipeline.

    An upper bound where pipelines are equal, since it overlaps with nothing.

    Args: per_node: GPUs of a node.
    """
    first_ranks = [sum(one.nodes for one in pipelines[:index]) * per_node for index in range(len(pipelines))]
    return network.collective_s(OpKind.ALL_REDUCE, max(one.grad_bytes for one in pipelines), first_ranks)


def layer_bytes(config: Config) -> dict[Layer, float]:
    """Layer -> bytes of its weights and the optimizer's state."""
    spec = model_spec(config.model, dtype_bytes=DTYPE_BYTES[config.training.param_dtype])
    of_optimizer = param_state_bytes(config.optimizer)
    return {
        (module.name, index): _MASTER_BYTES * layer.num_params + of_optimizer * layer.num_trainable_params
        for module in spec.modules
        for index, layer in enumerate(module.layers)
    }


def oobleck_templates(config: Config, costs: SampleCosts, sizes: Sequence[int], per_node: int) -> list[Template]:
    """The thesis's templates: one chain of all layers, stages of 1 to all GPUs of a node by tensor parallelism, and
    T1 + T2 + T3 in place of simulation.

    Args: sizes: nodes of each template. per_node: GPUs of a node.
    """
    spec = model_spec(config.model, dtype_bytes=DTYPE_BYTES[config.training.param_dtype])
    chain = [(module.name, index) for module in spec.modules for index in range(len(module.layers))]
    layer_s = []
    for gpus in range(1, per_node + 1):
        priced = priced_layers(config, costs, JobLayout.grid(tp=gpus))
        layer_s.append([math.inf if priced is None else priced.get(name, ())[index] for name, index in chain])
    made = []
    for nodes in sizes:
        mapping = map_stages(layer_s, nodes)
        if mapping is not None:
            depth = len(mapping.stages)
            held: list[frozenset[Layer]] = [frozenset()] * nodes
            for stage in mapping.stages:
                held[stage.gpus[0] // per_node] |= frozenset(chain[slice(*stage.layers)])
            points = tuple((count, mapping.seconds(count)) for count in (*range(1, depth + 1), 4 * depth))
            made.append(Template(nodes=nodes, depth=depth, points=points, held=tuple(held)))
    return made


def held_layers(partition: Partition, nodes: int) -> tuple[frozenset[Layer], ...]:
    """[node] -> the layers of its pipeline ranks."""
    held: list[frozenset[Layer]] = [frozenset()] * nodes
    for stage in partition.stages:
        node = stage.pp_rank * nodes // partition.num_ranks
        held[node] |= frozenset((stage.module, layer) for layer in range(*stage.layers))
    return tuple(held)


def grad_bytes(sharding: Sharding, spec: ModelSpec, partition: Partition) -> float:
    """Bytes of the sharded gradients of the rank that has most."""
    loads = [0.0] * partition.num_ranks
    for stage in partition.stages:
        state = sharding.stage_state(spec, stage)
        loads[stage.pp_rank] += sharding.reduce_dtype_bytes * state.num_trainable / state.shards
    return max(loads)
