"""The pipelines that use a number of nodes best: multisets of templates with the shortest step. Pure.

A *template* is one pipeline on some nodes: a copy of the model, and its seconds for a number of microbatches. A
*composition* is a list of them that divide the microbatches of a step. Nothing enumerates compositions (64 nodes have
over 200,000): for a step time each template has a capacity, the microbatches that it ends in time, and a knapsack over
nodes and the number of pipelines has the largest total.

Source of templates and of at least f + 1 pipelines: Oobleck (Jang, Efficient Multimodal Model Training at Scale,
dissertation, University of Michigan, 2026, section 2.4). It enumerates by the coin change problem, and divides
microbatches by the least variance of the pipelines' seconds, which is not the shortest step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mmtrain.errors import ConfigError
from mmtrain.planner.partition.partition import Partition

Layer = tuple[str, int]
"""A module, and the index of one of its layers."""
Floats = npt.NDArray[np.float64]
_EPSILON = 1e-9
"""Relative difference of seconds that are equal."""
_ABOUT = 0.005
"""Relative difference of seconds that simulation cannot tell, for which nothing is copied."""
_LEVELS = (1.0, 1.02, 1.05)
"""Times of the shortest step of the pipelines, within which compositions are compared with their sums."""


@dataclass(frozen=True, kw_only=True)
class Template:
    """One pipeline on some nodes."""

    nodes: int
    depth: int
    """Pipeline ranks."""
    points: tuple[tuple[int, float], ...]
    """The seconds for some microbatches of a replica, ascending; linear between and behind them, constant before the
    first."""
    replicas: int = 1
    """The replicas (dp_shard) inside of the pipeline, which divide its microbatches; each needs one."""
    held: tuple[frozenset[Layer], ...] = ()
    """[node of the pipeline] -> layers of which it holds the state."""
    partition: Partition | None = None
    """What each pipeline rank runs; None: unknown."""
    grad_bytes: float = 0.0
    """Largest bytes of gradients that one rank has to sum with other pipelines."""
    peak_bytes: float = 0.0
    """The peak bytes of the most loaded rank; 0: unknown."""

    def seconds(self, microbatches: int) -> float:
        """Seconds of a step without sums between pipelines. Args: microbatches: of the pipeline, at least one a
        replica."""
        return float(self.table(microbatches)[-1])

    def table(self, microbatches: int) -> Floats:
        """[i] -> seconds of i + 1 microbatches, never falling. Args: microbatches: the most."""
        of_replica = 1 + np.arange(microbatches) // self.replicas
        counts, seconds = (np.array(column, float) for column in zip(*self.points, strict=True))
        if len(counts) == 1:
            counts, seconds = np.array([0.0, counts[0]]), np.array([0.0, seconds[0]])
        piece = np.clip(np.searchsorted(counts, of_replica), 1, len(counts) - 1)
        slope = np.diff(seconds)[piece - 1] / np.diff(counts)[piece - 1]
        line = seconds[piece] + slope * (of_replica - counts[piece])
        return np.maximum.accumulate(np.maximum(line, seconds[0]))


@dataclass(frozen=True, kw_only=True)
class Composition:
    """Pipelines that train together."""

    pipelines: tuple[Template, ...]
    microbatches: tuple[int, ...]
    """[pipeline] -> its share of a step's; they add up to those of the step."""
    pipeline_s: float
    """Seconds of the slowest pipeline."""
    sums_s: float
    """Seconds of the sums of gradients between the pipelines."""

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.pipeline_s + self.sums_s

    @property
    def nodes(self) -> tuple[int, ...]:
        """[pipeline] -> its nodes."""
        return tuple(one.nodes for one in self.pipelines)

    @property
    def depths(self) -> tuple[int, ...]:
        """[pipeline] -> its pipeline ranks: `parallelism.pipelines`."""
        return tuple(one.depth for one in self.pipelines)


@dataclass(frozen=True, kw_only=True)
class Templates:
    """The templates of a job, and the compositions that they make."""

    templates: tuple[Template, ...]
    """The templates by ascending nodes, one for a number of nodes."""
    max_failures: int
    """The failures f: a composition has at least f + 1 pipelines."""
    microbatches: int
    """The microbatches of a step."""
    max_nodes: int
    """The largest number of nodes that is asked for."""
    sums_s: Callable[[Sequence[Template]], float] = lambda pipelines: 0.0
    """Seconds of the sums of gradients between pipelines."""
    layer_bytes: Mapping[Layer, float] = field(default_factory=dict)
    """Bytes of a layer's state; absent: 1."""
    _knapsacks: dict[float, "_Knapsack"] = field(default_factory=dict, repr=False)
    """Step time -> the largest capacities."""

    def best(self, nodes: int, before: Composition | None = None) -> Composition:
        """The composition with the shortest step on some nodes, pipelines with the fewest nodes first.

        It may leave nodes idle where more nodes make no shorter step. Of the compositions whose pipelines are about as
        fast, the one that is fastest with its sums; ties go to fewer idle nodes, then to fewer pipelines.

        Args: before: the composition that it replaces. Then of those up to half a percent slower than the fastest the
            one with the fewest bytes to copy; None: none.
        Raises: ConfigError: there is none: too few nodes, or fewer microbatches than replicas.
        """
        found = self.ranked(nodes, before)
        ties = [one for one in found if one.seconds <= found[0].seconds * (1 + (_ABOUT if before else _EPSILON))]
        copied = {one.nodes: self.copied_bytes(before, one) if before else 0.0 for one in ties}
        return min(ties, key=lambda one: (copied[one.nodes], -sum(one.nodes), len(one.nodes), one.nodes))

    def ranked(self, nodes: int, before: Composition | None = None) -> list[Composition]:
        """The compositions among which `best` chooses, the shortest step first. Arguments and errors: see `best`."""
        self.check(nodes)
        found = {one.nodes: one for one in map(self.composed, self._candidates(nodes, before))}
        return sorted(found.values(), key=lambda one: (one.seconds, one.nodes))

    def check(self, nodes: int) -> None:
        """Checks that some nodes have a composition. Raises: ConfigError: see `best`."""
        least, smallest = self.max_failures + 1, self.templates[0]
        if nodes < least * smallest.nodes:
            raise ConfigError(
                f"allocate: {nodes} nodes (--nodes) are fewer than {least} pipelines (--max-failures "
                f"{self.max_failures}) of at least {smallest.nodes} nodes; use at least {least * smallest.nodes} "
                "nodes, or tolerate fewer failures"
            )
        check_microbatches(self.microbatches, self.max_failures, smallest.replicas)

    def of(self, nodes: int) -> Template | None:
        """The template of a number of nodes; None: there is none."""
        return next((one for one in self.templates if one.nodes == nodes), None)

    def composed(self, pipelines: Sequence[Template]) -> Composition:
        """Pipelines with the microbatches that make their step shortest: each one goes to the pipeline that would end
        it first. Args: pipelines: of no more replicas than there are microbatches."""
        tables = [self._tables[one.nodes] for one in pipelines]
        least = [one.replicas for one in pipelines]
        counts = list(least)
        if rest := self.microbatches - sum(least):
            optional = np.concatenate([table[n : n + rest] for table, n in zip(tables, least, strict=True)])
            seconds = np.partition(optional, rest - 1)[rest - 1]
            ends = [[int(np.searchsorted(table, seconds, side)) for side in ("left", "right")] for table in tables]
            counts = [max(n, under) for n, (under, _) in zip(least, ends, strict=True)]
            for index, (_, most) in enumerate(ends):  # those that end exactly then, as many as there are
                counts[index] += max(0, min(self.microbatches - sum(counts), most - counts[index]))
        return Composition(
            pipelines=tuple(pipelines),
            microbatches=tuple(counts),
            pipeline_s=float(max(table[count - 1] for table, count in zip(tables, counts, strict=True))),
            sums_s=self.sums_s(pipelines),
        )

    def copied_bytes(self, before: Composition, after: Composition) -> float:
        """Bytes of state that nodes lack after a change of the composition.

        Pipelines of as many nodes stay as they are. The nodes of all others take, one after the other, the position
        of which they hold most.
        """
        stay = list(after.pipelines)
        free: list[frozenset[Layer]] = []
        for one in before.pipelines:
            if one in stay:
                stay.remove(one)
            else:
                free += one.held
        total = 0.0
        for wanted in (held for one in stay for held in one.held):
            best = max(free, key=lambda held: self._bytes(held & wanted), default=frozenset())
            if best in free:
                free.remove(best)
            total += self._bytes(wanted - best)
        return total

    def _bytes(self, layers: frozenset[Layer]) -> float:
        return sum(self.layer_bytes.get(layer, 1.0) for layer in layers)

    # ------------------------------------------------------------------------------------------ knapsack

    @cached_property
    def _tables(self) -> dict[int, Floats]:
        """Nodes of a template -> [i] -> seconds of i + 1 microbatches."""
        return {one.nodes: one.table(self.microbatches) for one in self.templates}

    @cached_property
    def _times(self) -> Floats:
        """All step times that there can be, ascending."""
        return np.unique(np.concatenate([table[one.replicas - 1 :] for one, table in self._usable]))

    @property
    def _usable(self) -> list[tuple[Template, Floats]]:
        return [(one, self._tables[one.nodes]) for one in self.templates if one.replicas <= self.microbatches]

    def _candidates(self, nodes: int, before: Composition | None) -> Iterator[list[Template]]:
        """The fastest pipelines, others that are nearly as fast, and small changes of the composition before."""
        low, high = 0, len(self._times) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._knapsack(self._times[middle]).counts(nodes) else (middle + 1, high)
        for level in _LEVELS:
            knapsack = self._knapsack(self._times[low] * level)
            counts = knapsack.counts(nodes)
            for count in {counts[0], counts[len(counts) // 2], counts[-1]}:
                yield knapsack.pipelines(nodes, count)
        if before is not None:
            for index, one in enumerate(before.pipelines):
                other = self.of(one.nodes + nodes - sum(before.nodes))
                if other is not None:
                    changed = [*before.pipelines[:index], other, *before.pipelines[index + 1 :]]
                    yield sorted(changed, key=lambda template: template.nodes)

    def _knapsack(self, seconds: float) -> "_Knapsack":
        if seconds not in self._knapsacks:
            self._knapsacks[seconds] = _Knapsack.of(self, seconds)
        return self._knapsacks[seconds]


def check_microbatches(microbatches: int, max_failures: int, replicas: int) -> None:
    """Checks that each replica of f + 1 pipelines gets a microbatch. Args: replicas: of a pipeline.

    Raises: ConfigError: they do not.
    """
    if microbatches < (max_failures + 1) * replicas:
        raise ConfigError(
            f"allocate: training.global_batch_size = {microbatches} microbatches are fewer than {max_failures + 1} "
            f"pipelines (--max-failures {max_failures}) of {replicas} replicas; raise it, or tolerate fewer failures"
        )


@dataclass(frozen=True, kw_only=True)
class _Knapsack:
    """The most microbatches that pipelines end in time."""

    templates: list[Template]
    """The templates that end one microbatch of each replica in time."""
    capacity: Floats
    """[template] -> the microbatches that it ends in time."""
    total: Floats
    """[number of pipelines, nodes] -> the largest sum of capacities on at most as many nodes."""
    least: int
    microbatches: int

    @classmethod
    def of(cls, of: Templates, seconds: float) -> "_Knapsack":
        usable = [
            (one, np.searchsorted(table, seconds * (1 + _EPSILON), "right"))
            for one, table in of._usable
            if table[one.replicas - 1] <= seconds * (1 + _EPSILON)
        ]
        capacity = np.array([count for _, count in usable], float)
        sizes = np.array([one.nodes for one, _ in usable])
        most = min(of.max_nodes // of.templates[0].nodes, of.microbatches // of.templates[0].replicas)
        before = np.arange(of.max_nodes + 1)[None] - sizes[:, None]
        before[before < 0] = of.max_nodes + 1  # where nothing is
        total = np.full((most + 1, of.max_nodes + 2), -np.inf)
        total[0, :-1] = 0.0
        for count in range(1, most + 1):
            total[count, :-1] = np.maximum.accumulate((total[count - 1][before] + capacity[:, None]).max(axis=0))
        return cls(
            templates=[one for one, _ in usable],
            capacity=capacity,
            total=total[:, :-1],
            least=of.max_failures + 1,
            microbatches=of.microbatches,
        )

    def counts(self, nodes: int) -> list[int]:
        """The numbers of pipelines, ascending, that end all microbatches in time."""
        ends = np.flatnonzero(self.total[:, nodes] >= self.microbatches)
        return [int(count) for count in ends if count >= self.least]

    def pipelines(self, nodes: int, count: int) -> list[Template]:
        """The templates with the largest capacity, ascending. Args: count: of pipelines."""
        chosen = []
        for left in reversed(range(count)):
            row = self.total[left]
            value, index = max(
                (row[nodes - one.nodes] + capacity, -index)
                for index, (one, capacity) in enumerate(zip(self.templates, self.capacity, strict=True))
                if one.nodes <= nodes
            )
            assert value == self.total[left + 1, nodes]
            chosen.append(self.templates[-index])
            nodes -= chosen[-1].nodes
        return sorted(chosen, key=lambda one: one.nodes)
