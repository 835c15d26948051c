"""Candidates of an allocation: degrees of parallelism that fit a job, with an estimate of their seconds. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmtrain.config.assignment import AssignmentConfig
from mmtrain.config.config import Config, check
from mmtrain.config.model import section_of
from mmtrain.costs.operators.cluster import Cluster
from mmtrain.errors import ConfigError
from mmtrain.modality.split import split_evenly
from mmtrain.planner.assignment.sample_costs import SampleCosts, SamplePricer, times
from mmtrain.simulator.job import check_degrees
from mmtrain.simulator.stable_batch import proportional
from mmtrain.spec.work_size import ZERO_WORK, WorkSize


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Degrees of parallelism, and the pipeline ranks of each module."""

    dp: int
    cp: int
    tp: int
    ranks: tuple[int, ...]
    """[module], of those that are cut; they add up to `num_ranks`. Empty: all ranks hold a part of each module."""
    num_ranks: int
    """Pipeline ranks."""
    estimate_s: float
    """Seconds of an iteration by equation 4.2."""

    @property
    def key(self) -> tuple[float, int, int, int, tuple[int, ...]]:
        """Sort key: the estimate, then the least tp, cp and dp."""
        return self.estimate_s, self.tp, self.cp, self.dp, self.ranks

    def job(self, config: Config) -> Config:
        """The job with these degrees. Raises: ConfigError: it does not fit them."""
        parallelism = replace(
            config.parallelism,
            data_parallel_replicate_degree=1,
            data_parallel_shard_degree=self.dp,
            context_parallel_degree=self.cp,
            tensor_parallel_degree=self.tp,
            pipeline_parallel_degree=self.num_ranks,
        )
        job = replace(config, parallelism=parallelism)
        modules = config.model.cut_modules.items()
        for (name, section), count in zip(modules, self.ranks or [0] * len(modules), strict=True):
            job = _with_ranks(job, name, count, 1 if self.ranks else section.num_segments)
        placement = replace(job.planner, placement="parallel" if self.ranks else "spread")
        job = replace(job, planner=replace(placement, partition="search") if self.ranks else placement)
        check(job)
        return job

    def toml(self, config: Config) -> str:
        """What to put into the job's TOML file, as sections."""
        lines = [
            "[parallelism]",
            "data_parallel_replicate_degree = 1",
            f"data_parallel_shard_degree = {self.dp}",
            f"context_parallel_degree = {self.cp}",
            f"tensor_parallel_degree = {self.tp}",
            f"pipeline_parallel_degree = {self.num_ranks}",
            "",
            "[planner]",
            f'placement = "{"parallel" if self.ranks else "spread"}"',
        ]
        if self.ranks and config.planner.partition != "search":
            lines.append('partition = "search"')
        for name, count in zip(config.model.cut_modules, self.ranks, strict=False):
            lines += ["", f"[{section_of(name)}]", "num_segments = 1", f"ranks = {count}"]
        if not self.ranks:
            given = [name for name, section in config.model.cut_modules.items() if section.ranks]
            lines += [line for name in given for line in ("", f"[{section_of(name)}]", "ranks = 0")]
        return "\n".join(lines) + "\n"


def candidates_of(config: Config, costs: SampleCosts, num_gpus: int) -> list[Candidate]:
    """All degrees that fit, the shortest estimate first."""
    hardware = config.planner.hardware
    per_node = Cluster.of(hardware, num_gpus).hardware.gpus_per_node if hardware else num_gpus
    made: list[Candidate] = []
    for tp in _divisors(num_gpus):
        for cp in _divisors(num_gpus // tp):
            if tp > per_node:
                continue
            priced = _priced(config, costs, num_gpus, tp, cp)
            if priced is None:
                continue
            for num_ranks in _divisors(num_gpus // (tp * cp)):
                made += _placements(config, priced, num_gpus // (tp * cp * num_ranks), cp, tp, num_ranks)
    return sorted(made, key=lambda candidate: candidate.key)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _priced(
    config: Config, costs: SampleCosts, num_gpus: int, tp: int, cp: int
) -> Mapping[str, Sequence[float]] | None:
    """Module -> [layer] -> seconds of forward and backward of a mean microbatch; None: the degrees do not fit."""
    parallelism = replace(
        config.parallelism,
        data_parallel_replicate_degree=1,
        data_parallel_shard_degree=num_gpus // (tp * cp),
        context_parallel_degree=cp,
        tensor_parallel_degree=tp,
        pipeline_parallel_degree=1,
    )
    batch = replace(config.training, global_batch_size=num_gpus)
    planner = replace(config.planner, placement="spread")
    job = replace(config, parallelism=parallelism, training=batch, planner=planner, assignment=AssignmentConfig())
    for name, section in config.model.cut_modules.items():
        job = _with_ranks(job, name, 0, section.num_segments)
    try:
        check(job)
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


def _placements(
    config: Config, priced: Mapping[str, Sequence[float]], dp: int, cp: int, tp: int, num_ranks: int
) -> list[Candidate]:
    """All modules on all ranks; and each on ranks of its own: in proportion to its work, or with one rank moved."""
    batch = config.training.global_batch_size
    if batch % dp:
        return []
    degrees = {"dp": dp, "cp": cp, "tp": tp, "num_ranks": num_ranks}
    total, count = sum(map(sum, priced.values())), batch // dp
    names = [name for name in config.model.cut_modules if name in priced]
    most = [len(priced[name]) for name in names]
    made = []
    if all(num_ranks <= layers for layers in most):
        made.append(Candidate(ranks=(), estimate_s=total + (count - 1) * total / num_ranks, **degrees))
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
        slowest = max(_slowest_s(priced[name], n) for name, n in zip(names, ranks, strict=True))
        made.append(Candidate(ranks=ranks, estimate_s=total + (count - 1) * slowest, **degrees))
    return made


def _slowest_s(layers: Sequence[float], num_ranks: int) -> float:
    """Equation 4.1: the slowest stage of the best cut."""
    return max(sum(layers[low:high]) for low, high in split_evenly(layers, num_ranks))


def _with_ranks(config: Config, name: str, count: int, num_segments: int) -> Config:
    """The job with other segments and ranks of a module."""
    model: Any = config.model
    section, key = model.cut_modules[name], section_of(name).removeprefix("model.")
    changed = replace(section, ranks=count, num_segments=num_segments)
    further = {"modules": {**model.modules, name: changed}} if key.startswith("modules.") else {key: changed}
    return replace(config, model=replace(model, **further))
