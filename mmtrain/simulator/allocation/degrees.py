"""Degrees of parallelism on a number of GPUs, and the candidates that they make with their estimated seconds. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmtrain.config.assignment import AssignmentConfig
from mmtrain.config.config import Config
from mmtrain.config.model import section_of
from mmtrain.config.topology import JobLayout
from mmtrain.costs.operators.cluster import Cluster
from mmtrain.errors import ConfigError
from mmtrain.modality.equal_parts import split_evenly
from mmtrain.planner.assignment.sample_costs import SampleCosts, SamplePricer, times
from mmtrain.simulator.allocation.candidate import Candidate
from mmtrain.simulator.allocation.stable_batch import proportional
from mmtrain.simulator.make_job import check_degrees
from mmtrain.spec.work_size import ZERO_WORK, WorkSize


def values_of(mesh: JobLayout) -> dict[str, Any]:
    """Key of the config -> degree, of the meshes of jobs."""
    return {
        "parallelism.data_parallel_replicate_degree": mesh.dp_replicate,
        "parallelism.data_parallel_shard_degree": mesh.dp_shard,
        "parallelism.context_parallel_degree": mesh.cp,
        "parallelism.tensor_parallel_degree": mesh.tp,
        "parallelism.pipeline_parallel_degree": mesh.pp,
    }


def meshes(config: Config, num_gpus: int, *, replicate: bool = False) -> Iterator[JobLayout]:
    """All meshes of a number of GPUs, with the ranks of tp inside of a node, the least tp and cp first.

    Args: replicate: also several replicas of FSDP2's shards.
    """
    per_node = gpus_of_node(config, num_gpus)
    for tp in (tp for tp in divisors(num_gpus) if tp <= per_node):
        for cp in divisors(num_gpus // tp):
            for pp in divisors(num_gpus // (tp * cp)):
                rest = num_gpus // (tp * cp * pp)
                for replicas in divisors(rest) if replicate else [1]:
                    yield JobLayout.grid(pp=pp, dp_replicate=replicas, dp_shard=rest // replicas, cp=cp, tp=tp)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Degrees of parallelism, and the pipeline ranks of each module."""

    mesh: JobLayout
    ranks: tuple[int, ...]
    """[module], of those that are cut; they add up to the degree of the pipeline. Empty: all ranks hold a part of each
    module."""
    candidate: Candidate
    """The settings of both."""
    seconds: float
    """The seconds of an iteration by equation 4.2."""

    @property
    def key(self) -> tuple[float, int, int, int, tuple[int, ...]]:
        """Sort key: the estimate, then the least tp, cp and dp."""
        return self.seconds, self.mesh.tp, self.mesh.cp, self.mesh.dp, self.ranks


def check_grid(config: Config, command: str) -> None:
    """Refuses a job of pipelines of its own, where degrees of equal ones are looked for. Raises: ConfigError."""
    if config.parallelism.pipelines:
        raise ConfigError(
            f"{command}: parallelism.pipelines = {config.parallelism.pipelines}, but this looks for degrees of equal "
            "pipelines; remove the key (`mmtrain allocate --nodes` finds pipelines of unequal depth)"
        )
    if config.elastic.enable:
        raise ConfigError(
            f"{command}: elastic.enable = true, but this looks for degrees of equal pipelines, and those of an elastic "
            "job follow from its nodes; set it to false (`mmtrain allocate --nodes` finds the degrees of a stage)"
        )


def gpus_of_node(config: Config, num_gpus: int) -> int:
    """GPUs of one node of the job's hardware; without hardware, all. Raises: ConfigError: it does not exist."""
    hardware = config.planner.hardware
    return Cluster.of(hardware, num_gpus).hardware.gpus_per_node if hardware else num_gpus


def estimates(config: Config, costs: SampleCosts, num_gpus: int) -> list[Estimate]:
    """All degrees that fit, with their placements, the shortest estimate first."""
    made: list[Estimate] = []
    priced: dict[tuple[int, int], Mapping[str, Sequence[float]] | None] = {}
    for mesh in meshes(config, num_gpus):
        key = mesh.tp, mesh.cp
        if key not in priced:
            priced[key] = priced_layers(config, costs, mesh)
        if (layers := priced[key]) is not None and config.training.global_batch_size % mesh.dp == 0:
            made += _placements(config, layers, mesh)
    return sorted(made, key=lambda one: one.key)


def divisors(number: int) -> list[int]:
    """All numbers that divide a number, the least first."""
    return [n for n in range(1, number + 1) if number % n == 0]


def priced_layers(config: Config, costs: SampleCosts, mesh: JobLayout) -> Mapping[str, Sequence[float]] | None:
    """Module -> [layer] -> seconds of forward and backward of a mean microbatch; None: tp or cp do not fit."""
    alone = replace(mesh, depths=(1,) * mesh.dp_replicate, dp_shard=mesh.pp * mesh.dp_shard)
    job = replace(
        config,
        training=replace(config.training, global_batch_size=mesh.world_size),
        assignment=AssignmentConfig(),
    )
    values = values_of(alone) | {"planner.placement": "spread"}
    values |= {f"{section_of(name)}.ranks": 0 for name in config.model.cut_modules}
    try:
        job = Candidate().having(values).job(job)
        check_degrees(job)
        pricer = SamplePricer.of(job)
    except ConfigError:
        return None
    totals: dict[str, WorkSize] = {}
    for sample in costs.samples:
        for name, size in pricer.sizes(sample.meta).items():
            totals[name] = totals.get(name, ZERO_WORK) + size
    factor = per_microbatch(costs) / len(costs.samples)
    return {
        name: [
            forward_s + backward_s
            for forward_s, backward_s in pricer.layer_seconds(name, times(size, factor), fed=len(totals) > 1)
        ]
        for name, size in totals.items()
    }


def per_microbatch(costs: SampleCosts) -> float:
    """Mean number of samples of a full microbatch."""
    means = np.mean([sample.size for sample in costs.samples], axis=0)
    return float(min(most / mean for most, mean in zip(costs.limits, means, strict=True)))


def _placements(config: Config, priced: Mapping[str, Sequence[float]], mesh: JobLayout) -> list[Estimate]:
    """All modules on all ranks; and each on ranks of its own: in proportion to its work, or with one rank moved."""
    num_ranks = mesh.pp
    total, count = sum(map(sum, priced.values())), config.training.global_batch_size // mesh.dp
    names = [name for name in config.model.cut_modules if name in priced]
    most = [len(priced[name]) for name in names]

    def estimate(ranks: tuple[int, ...], slowest_s: float) -> Estimate:
        candidate = Candidate().having(values_of(mesh) | _placed(config, ranks))
        return Estimate(mesh=mesh, ranks=ranks, candidate=candidate, seconds=total + (count - 1) * slowest_s)

    made = [estimate((), total / num_ranks)] if all(num_ranks <= layers for layers in most) else []
    if len(names) < 2 or len(names) != len(config.model.cut_modules) or not len(names) <= num_ranks <= sum(most):
        return made
    work = np.array([[sum(priced[name]) for name in names]])
    first = proportional(work, num_ranks, most)[0].tolist()
    options = {tuple(first)}
    for source in range(len(names)):
        for target in range(len(names)):
            moved = list(first)
            moved[source] -= 1
            moved[target] += 1
            if all(1 <= n <= layers for n, layers in zip(moved, most, strict=True)):
                options.add(tuple(moved))
    for ranks in sorted(options):
        made.append(estimate(ranks, max(_slowest_s(priced[name], n) for name, n in zip(names, ranks, strict=True))))
    return made


def _placed(config: Config, ranks: tuple[int, ...]) -> dict[str, Any]:
    """The settings of a placement. Args: ranks: [module]; empty: all modules on all ranks."""
    sections = {name: section_of(name) for name in config.model.cut_modules}
    if not ranks:
        given = {f"{sections[name]}.ranks": 0 for name, module in config.model.cut_modules.items() if module.ranks}
        return {"planner.placement": "spread", **given}
    values: dict[str, Any] = {"planner.placement": "parallel", "planner.partition": "search"}
    for section, count in zip(sections.values(), ranks, strict=True):
        values |= {f"{section}.num_segments": 1, f"{section}.ranks": count}
    return values


def _slowest_s(layers: Sequence[float], num_ranks: int) -> float:
    """Equation 4.1: the slowest stage of the best cut."""
    return max(sum(layers[low:high]) for low, high in split_evenly(layers, num_ranks))
