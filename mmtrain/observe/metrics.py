"""The metrics of a step: recorded where they are known, shared by all ranks in few collectives, shown by rank 0.

`run_page/metric_table.py` says of each how ranks share it, and where it is shown.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.run_page.metric_table import BY_NAME, METRICS, Metric, Reduce

_UNKNOWN = -math.inf
"""Sent instead of a NaN, of which the maximum is not defined."""


@dataclass(frozen=True, slots=True)
class StepValues:
    """The metrics of one step, as rank 0 shows them."""

    values: dict[str, float]
    """Key -> value, of all metrics."""
    rows: tuple[tuple[Metric, str], ...]
    """Metric and the module or source it is of, in the order of the table."""

    def __getitem__(self, key: str) -> float:
        return self.values[key]

    def _items(self) -> Iterator[tuple[Metric, str, float]]:
        return ((metric, of, self.values[metric.name.format(of)]) for metric, of in self.rows)

    def line(self) -> dict[str, float]:
        """The line of metrics.jsonl."""
        return {metric.name.format(of): value for metric, of, value in self._items() if metric.in_file}

    def scalars(self) -> dict[str, float]:
        """Tag -> value, for tensorboard and wandb."""
        return {
            metric.tag.format(of): metric.scale * value if metric.scale != 1 else value
            for metric, of, value in self._items()
            if metric.tag and metric.when(self.values, value)
        }

    def text(self) -> str:
        """The log line."""
        parts = (
            metric.text(self.values, of) if callable(metric.text) else metric.text.format_map(self.values)
            for metric, of, value in self._items()
            if metric.text and metric.when(self.values, value)
        )
        return "  ".join(part for part in parts if part)


@dataclass(slots=True)
class Metrics:
    """Takes the values of a step on this rank. All ranks record the same names, in the same order."""

    is_leader: bool = True
    """Whether this rank speaks for its replica."""
    _recorded: dict[str, dict[str, float]] = field(default_factory=dict)
    """Metric -> module or source, or "" -> value."""
    _local: list[tuple[str, str]] = field(default_factory=list)
    """The metrics that wait for the other ranks' values."""
    _own: dict[str, Metric] = field(default_factory=dict)
    """Metrics that the table lacks."""
    _over_run: dict[str, float] = field(default_factory=dict)
    """Metric -> its sum over the steps."""

    def start_step(self) -> None:
        """Forgets the values of the step before."""
        self._recorded.clear()
        self._local.clear()

    def record(self, name: str, value: float, of: str = "", *, reduce: Reduce | None = None) -> None:
        """Notes a value of this step.

        Args:
            name: of the table; or a new one, which is then the key in metrics.jsonl and the tag of tensorboard.
            of: the module or source for `{}` in the name.
            reduce: of a new name.
        """
        if reduce is not None and name not in BY_NAME:
            self._own[name] = Metric(name=name, tag=name, reduce=reduce)
        self._recorded.setdefault(name, {})[of] = value
        if self._metric(name).reduce is not Reduce.LAST:
            self._local.append((name, of))

    def __getitem__(self, name: str) -> float:
        return self._recorded[name][""]

    def _metric(self, name: str) -> Metric:
        return self._own[name] if name in self._own else BY_NAME[name]

    def reduce(self, **others: float | Tensor) -> dict[str, Tensor]:
        """Shares what was recorded since the last call as a sum, a mean or a spread. Collective over the job: one
        reduction, if there is anything to share.

        Returns: the sums over all ranks of other values, by their names.
        """
        return self.sums(**others).run()

    def reduce_max(self, **others: float | Tensor) -> dict[str, Tensor]:
        """Shares what was recorded as a maximum, and maxima of other values, as `reduce` does with sums."""
        return self._reduction(dist.ReduceOp.MAX, others).run()

    def sums(self, **others: float | Tensor) -> "MetricReduction":
        """What `reduce` shares, as a value that is reduced later."""
        return self._reduction(dist.ReduceOp.SUM, others)

    def _reduction(self, operation: dist.ReduceOp.RedOpType, others: dict[str, float | Tensor]) -> "MetricReduction":
        is_max = operation == dist.ReduceOp.MAX
        due = [key for key in self._local if (self._metric(key[0]).reduce is Reduce.MAX) == is_max]
        self._local = [key for key in self._local if key not in due]
        rows = [torch.tensor(self._parts(*key), dtype=torch.float64) for key in due]
        rows += [torch.as_tensor(value, dtype=torch.float64) for value in others.values()]
        flat = torch.cat([row.flatten() for row in rows]) if rows else torch.empty(0, dtype=torch.float64)
        return MetricReduction(self, operation, tuple(due), tuple(others), tuple(row.shape for row in rows), flat)

    def _parts(self, name: str, of: str) -> list[float]:
        """What this rank adds to the reduction of a value."""
        value, reduce = float(self._recorded[name][of]), self._metric(name).reduce
        if reduce is Reduce.MAX:
            return [_UNKNOWN if math.isnan(value) else value]
        parts = {Reduce.SUM: [value], Reduce.MEAN: [value, 1.0], Reduce.SPREAD: [value, 1.0, value**2]}[reduce]
        return parts if self.is_leader else [0.0] * len(parts)

    def _take(self, name: str, of: str, parts: list[float]) -> None:
        """Args: parts: of all ranks together."""
        value, reduce = parts[0], self._metric(name).reduce
        if reduce is Reduce.MAX:
            value = math.nan if value == _UNKNOWN else value
        elif reduce is Reduce.MEAN:
            value /= parts[1]
        elif reduce is Reduce.SPREAD:
            value = max(0.0, parts[2] / parts[1] - (value / parts[1]) ** 2) ** 0.5
        self._recorded[name][of] = int(value) if isinstance(self._recorded[name][of], int) else value

    def finished(self) -> StepValues:
        """The values of the step, which were reduced, and those that follow from them; counts of the run go on."""
        for metric in METRICS:
            if metric.over_run and metric.name in self._recorded:
                added = self[metric.name] if metric.over_run == "sum" else int(self[metric.name] > 0)
                self._over_run[metric.name] = self._over_run.get(metric.name, 0) + added
                self._recorded[metric.name][""] = self._over_run[metric.name]
        values = {name.format(of): value for name, found in self._recorded.items() for of, value in found.items()}
        for metric in METRICS:
            if metric.of is not None:
                values[metric.name] = metric.of(values)
                self._recorded[metric.name] = {"": values[metric.name]}
        rows = (
            (metric, of) for metric in (*METRICS, *self._own.values()) for of in self._recorded.get(metric.name, ())
        )
        return StepValues(values, tuple(rows))


@dataclass(frozen=True, slots=True)
class MetricReduction:
    """Values of a step on their way over all ranks. It can be completed by the result that another rank has."""

    _metrics: Metrics
    _operation: dist.ReduceOp.RedOpType
    _due: tuple[tuple[str, str], ...]
    _others: tuple[str, ...]
    _shapes: tuple[torch.Size, ...]
    flat: Tensor
    """[number of values] float64; of this rank."""

    def run(self) -> dict[str, Tensor]:
        """The values of all ranks, see `Metrics.reduce`. Collective over the job, if there are any."""
        return self.take(self.total())

    def total(self) -> Tensor:
        """[number of values] over all ranks, for `take`. Collective over the job, if there are any."""
        flat = self.flat.clone()
        if flat.numel():
            dist.all_reduce(flat, op=self._operation)
        return flat

    def take(self, flat: Tensor) -> dict[str, Tensor]:
        """The values of `run`, from a result of the collective."""
        sizes = [shape.numel() for shape in self._shapes]
        parts = [part.view(shape) for part, shape in zip(flat.split(sizes), self._shapes, strict=True)]
        for key, part in zip(self._due, parts, strict=False):
            self._metrics._take(*key, part.tolist())
        return dict(zip(self._others, parts[len(self._due) :], strict=True))
