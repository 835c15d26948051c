"""The interface of a kind of content for planning."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from mmtrain.modality.equal_parts import split_evenly
from mmtrain.modality.metadata import IterationMeta, MicrobatchMeta
from mmtrain.modality.submesh import Submesh
from mmtrain.schedule.graph import Work
from mmtrain.spec.layer import Division
from mmtrain.spec.spec import ModuleSpec
from mmtrain.spec.work_size import Rates, WorkSize

Unit = Any
"""The smallest part of a batch that a work consumes whole: the metadata of an image, a document or a clip. Hashable;
error messages use its `name`."""
Units = tuple[Unit, ...]
Weigh = Callable[[Unit], float]
"""FLOPs of a unit's forward, to which those of its backward are proportional."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkItem:
    """One work with its units and size."""

    work: Work
    units: Units
    """The units that it consumes, in the order of the batch."""
    size: WorkSize
    """Rows, attended pairs and output rows."""
    deferred: bool = False
    """Whether the units are of the microbatch after the work's own."""

    @property
    def owner(self) -> int:
        """Index of the microbatch that has the units, and whose works read the output."""
        return self.work.microbatch + self.deferred


class Layout(Protocol):
    """The division of one module's works of an iteration over the ranks of a submesh."""

    def local_size(self, work: int, cp_rank: int, tp_rank: int) -> WorkSize:
        """The size of one rank's rows and outputs between two stages, padding included."""


class Modality(ABC):
    """One kind of content, as one module consumes it."""

    item: ClassVar[str]
    """Name of a unit in error messages. Modules with equal items get equal groups of units."""
    works: ClassVar[str]
    """Name in error messages of the works of a module that consumes it."""
    parts: ClassVar[str] = "tokens"
    """Unit of a unit's size."""
    remedy: ClassVar[str]
    """Error message for a batch with units that no module of the model consumes: what is missing, what to change."""
    required: ClassVar[bool] = False
    """Whether every microbatch needs at least one unit."""
    counts: ClassVar[Mapping[str, str]] = {}
    """The field of `WorkSize` that has each count of `unit_counts`, by the name of the count."""

    @abstractmethod
    def units(self, microbatch: MicrobatchMeta) -> Units:
        """The units of a microbatch that the module consumes, in the order of the batch."""

    def deferred(self, microbatch: MicrobatchMeta) -> Units:
        """The units that the module consumes with the microbatch before; they are the first of `units`."""
        return ()

    @abstractmethod
    def size(self, module: ModuleSpec, units: Sequence[Unit]) -> WorkSize:
        """The size of a work with some units of one microbatch.

        Raises: DataError: the module cannot process a unit.
        """

    @abstractmethod
    def weigh(self, module: ModuleSpec) -> Weigh:
        """The function that gives the FLOPs of a unit in a module."""

    @abstractmethod
    def unit_counts(self, units: Sequence[Unit]) -> dict[str, int]:
        """The counts, by name, that the works of some units must have in total."""

    def work_counts(self, size: WorkSize) -> dict[str, int]:
        """The counts of one work, with the names of `unit_counts`."""
        return {name: getattr(size, field) for name, field in self.counts.items()}

    def readers(self, module: ModuleSpec) -> tuple[int, ...]:
        """The stages of the module that read tensors of the batch other than labels, as indices of its chain."""
        return (0,)

    def division(self, submesh: Submesh, module: ModuleSpec) -> Division:
        """The division of the module over the ranks of a submesh."""
        return Division(tp=submesh.tp, whole_rows=submesh.whole_rows, groups=submesh.cp, key_groups=submesh.cp)

    def priced_size(self, submesh: Submesh, module: ModuleSpec, item: "WorkItem") -> WorkSize:
        """The size of the work whose even division gives each rank what the most loaded rank has of this one."""
        return item.size

    @abstractmethod
    def layout(self, submesh: Submesh, module: ModuleSpec, works: dict[int, WorkItem], meta: IterationMeta) -> Layout:
        """The division of a module's works of an iteration. Args: works: index -> work, only of this module."""

    def split(self, units: Units, size: int, weigh: Weigh) -> list[Units]:
        """The units in ceil(units / size) consecutive groups (size 0: one group), with the least largest weight."""
        if not units:
            return []
        num_groups = -(-len(units) // size) if size else 1
        return [units[low:high] for low, high in split_evenly([weigh(unit) for unit in units], num_groups)]


def forward_rates(module: ModuleSpec) -> Rates:
    """FLOPs of a module's forward as a function of the work's size."""
    return sum((layer.matmul_flops + layer.attention_flops for layer in module.layers), Rates())


def first_of(works: dict[int, WorkItem], count: Callable[[Units], int] = len) -> dict[int, int]:
    """The number of units (or sum of their `count`) before a work's own in the microbatch that has them, by work."""
    first_unit: dict[int, int] = {}
    num_units: dict[int, int] = {}
    for number, item in works.items():
        first_unit[number] = num_units.get(item.owner, 0)
        num_units[item.owner] = first_unit[number] + count(item.units)
    return first_unit
