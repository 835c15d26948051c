"""Oobleck as its thesis has it: its templates, compositions, division of microbatches and recovery. Pure.

Templates are mapped by T1 + T2 + T3 and run 1F1B; compositions have the best throughput by that estimate (by a
knapsack, which finds what enumeration does); microbatches are divided by program (2.6); losses follow the local rule.
Seconds are simulated as ours are. All stages have tensor parallelism of one degree, since one that differs by stage
cannot be simulated; the degree is the best one in simulation.

Source: Jang, Efficient Multimodal Model Training at Scale, dissertation, University of Michigan, 2026, sections 2.4 and
2.5.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmtrain.config.config import Config
from mmtrain.config.topology import JobLayout
from mmtrain.costs.machine import Machine
from mmtrain.errors import ConfigError, PlanError
from mmtrain.modality.metadata import IterationMeta
from mmtrain.planner.memory.rank_bytes import Sharding
from mmtrain.planner.partition.partition import Partition, StageSpec
from mmtrain.planner.search_settings import PLANNED
from mmtrain.simulator.allocation.candidate import Candidate
from mmtrain.simulator.allocation.compositions import Composition, Template, Templates
from mmtrain.simulator.allocation.degrees import divisors, priced_layers, values_of
from mmtrain.simulator.allocation.mapping import StageMapping, map_stages
from mmtrain.simulator.allocation.templates import TemplateMaker, grad_bytes, held_layers
from mmtrain.simulator.failures.systems import LocalRule, Running
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.partition_choice import Choice
from mmtrain.simulator.pipeline_sums import PipelineSums
from mmtrain.simulator.study import with_schedule
from mmtrain.simulator.whole_iteration import IterationSimulator, SimulatedPipeline
from mmtrain.spec.builders import DTYPE_BYTES, model_spec
from mmtrain.spec.spec import ModelSpec

LITERAL: dict[str, Any] = {
    "parallelism.pipeline_parallel_schedule": "1F1B",
    "planner.enable": False,
    "planner.memory_limit": "",
    "activation_checkpoint.mode": "full",
}
"""Settings of the thesis's runtime."""


@dataclass(frozen=True, kw_only=True)
class LiteralTemplates:
    """Templates by T1 + T2 + T3."""

    simulated: Templates
    estimated: Templates
    """The same ones, with T1 + T2 + T3 in place of simulated seconds, and sums that take no time."""


@dataclass(kw_only=True)
class Oobleck(LocalRule):
    """Compositions by estimated seconds, microbatches by least variance."""

    estimated: Templates

    def best(self, nodes: int, before: Running | None) -> Composition:
        """The composition with the best estimated throughput. Raises: ConfigError: see `Templates.best`."""
        if (nodes, ()) not in self._found:
            sizes = self.estimated.best(nodes).nodes
            pipelines = [one for one in map(self.templates.of, sizes) if one is not None]
            self._found[nodes, ()] = self.dealt(self.templates.composed(pipelines))
        return self._found[nodes, ()]

    def dealt(self, composition: Composition) -> Composition:
        """The composition with microbatches by program (2.6), T_i the estimated seconds of one microbatch."""
        known = [self.estimated.of(nodes) for nodes in composition.nodes]
        counts = least_variance([one.seconds(1) for one in known if one is not None], self.templates.microbatches)
        slowest = max(one.seconds(count) for one, count in zip(composition.pipelines, counts, strict=True))
        return replace(composition, microbatches=tuple(counts), pipeline_s=slowest)


def least_variance(times: Sequence[float], microbatches: int) -> list[int]:
    """[pipeline] -> microbatches N_i of at least one that add up, with the least sum of (N_i T_i - mean)^2.

    Real numbers are rounded; then single microbatches move as long as that helps, which need not reach the best one.

    Args: times: T_i.
    """
    each = np.array(times, float)
    counts = np.maximum(1, np.floor(microbatches / each / (1 / each).sum())).astype(int)

    def variance_after(change: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """[candidate] Args: change: [candidate, pipeline]."""
        ends = (counts + change) * each
        found: np.ndarray[Any, np.dtype[np.float64]] = np.where(
            (counts + change < 1).any(axis=1), np.inf, ends.var(axis=1)
        )
        return found

    one = np.eye(len(each), dtype=np.int64)
    while (rest := microbatches - int(counts.sum())) != 0:
        counts = counts + int(np.sign(rest)) * one[int(variance_after(int(np.sign(rest)) * one).argmin())]
    moves = (one[:, None] - one[None]).reshape(-1, len(each))
    while (found := variance_after(moves)).min() < variance_after(np.zeros_like(moves[:1]))[0] * (1 - 1e-12):
        counts = counts + moves[int(found.argmin())]
    return [int(count) for count in counts]


def literal_templates(
    maker: TemplateMaker, sizes: Sequence[int], settings: Mapping[str, Any] = LITERAL
) -> LiteralTemplates:
    """The templates of some numbers of nodes that fit into memory.

    Args: settings: key of the config -> value, of the runtime.
    Raises: ConfigError: none fits, or fewer than f + 1 do.
    """
    config = maker.config
    spec = model_spec(config.model, dtype_bytes=DTYPE_BYTES[config.training.param_dtype])
    found: list[tuple[float, LiteralTemplates]] = []
    for degree in divisors(maker.per_node):
        stage = JobLayout.grid(tp=degree)
        priced = priced_layers(config, maker.costs, stage)
        if priced is None:
            continue
        layer_s = [
            seconds for module in spec.modules for seconds in priced.get(module.name, [0.0] * len(module.layers))
        ]
        tried = (_literal(maker, spec, layer_s, nodes, {**values_of(stage), **settings}) for nodes in sizes)
        made = [one for one in tried if one is not None]
        try:
            templates = LiteralTemplates(
                simulated=maker.joined([one for one, _ in made]),
                estimated=replace(maker.joined([two for _, two in made]), sums_s=lambda pipelines: 0.0),
            )
            found.append((templates.simulated.best(maker.nodes).seconds, templates))
        except ConfigError:  # too few fit
            continue
    if not found:
        raise ConfigError(f"simulate: no template of Oobleck fits on {maker.nodes} nodes (--nodes); use more nodes")
    return min(found, key=lambda one: one[0])[1]


def _literal(
    maker: TemplateMaker, spec: ModelSpec, layer_s: Sequence[float], nodes: int, values: Mapping[str, Any]
) -> tuple[Template, Template] | None:
    """A template as simulated and as estimated; None: it does not fit.

    Args:
        layer_s: of all modules in the model's order, on the GPUs of a stage.
        values: key of the config -> value, the degrees of a stage among them.
    """
    stage = Candidate().having(values).job(maker.config).parallelism.layout
    mapping = map_stages([layer_s], nodes * maker.per_node // stage.tp)
    if mapping is None:
        return None
    depth = len(mapping.stages)
    points: list[tuple[int, float]] = []
    peak_bytes = 0.0
    try:
        job = _job(maker, depth, maker.counts(stage, nodes)[-1], values)
        machine = Machine.of(job)
        simulator = _simulator(job, machine, mapped_partition(spec, mapping))
        for count in maker.counts(stage, nodes):
            iteration, _ = simulator.simulate([IterationMeta(microbatches=maker.typical[:count])], seed=maker.seed)
            peak_bytes = max(peak_bytes, *iteration.peak_bytes)
            points.append((count, iteration.iteration_s))
    except (ConfigError, PlanError):
        return None
    if machine.memory_bytes is not None and peak_bytes > machine.memory_bytes:
        return None
    (made_job,) = simulator.jobs
    partition = made_job.partition
    made = Template(
        nodes=nodes,
        depth=depth,
        points=tuple(points),
        held=held_layers(partition, nodes),
        partition=partition,
        grad_bytes=grad_bytes(Sharding.of(job), made_job.spec, partition),
        peak_bytes=peak_bytes,
    )
    estimates = tuple((count, mapping.seconds(count)) for count in (*range(1, depth + 1), 4 * depth))
    return made, replace(made, points=estimates)


def _job(maker: TemplateMaker, depth: int, microbatches: int, values: Mapping[str, Any]) -> Config:
    """One pipeline. Raises: ConfigError: the values do not fit together."""
    of_pipeline = {"parallelism.pipeline_parallel_degree": depth, "training.global_batch_size": microbatches}
    job = Candidate().having({**values, **of_pipeline}).job(maker.config)
    return with_schedule(job, PLANNED, maker.evaluations)[0] if job.planner.enable else job


def _simulator(job: Config, machine: Machine, partition: Partition) -> IterationSimulator:
    """The simulator of a job that is cut so. Raises: ConfigError: it does not fit."""

    def choose(config: Config, spec: ModelSpec, *args: object) -> Choice:
        return Choice(partition=partition, spec=spec)

    made, sharding, network = make_job(job, choose), Sharding.of(job), machine.network
    return IterationSimulator(
        layout=job.parallelism.layout,
        pipelines=(SimulatedPipeline.of(made, 0, sharding, network),),
        sums=PipelineSums.of([made.partition], made.spec, sharding, network),
        searches=job.planner.enable,
        tells_apart=False,
    )


def mapped_partition(spec: ModelSpec, mapping: StageMapping) -> Partition:
    """The partition of a mapping: each of its stages is a pipeline rank with a stage for each of its modules."""
    chain = [(module, index) for module in spec.modules for index in range(len(module.layers))]
    stages: list[StageSpec] = []
    for rank, stage in enumerate(mapping.stages):
        for module in spec.modules:
            layers = [index for owner, index in chain[slice(*stage.layers)] if owner is module]
            if layers:
                stages.append(StageSpec.of(len(stages), module, (layers[0], layers[-1] + 1), rank, 0))
    return Partition(len(mapping.stages), tuple(stages), spec.text.name, 1)
