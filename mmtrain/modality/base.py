"""What planning asks of a kind of content."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from mmtrain.modality.metadata import IterationMeta, MicrobatchMeta
from mmtrain.modality.split import split_evenly
from mmtrain.modality.submesh import Submesh
from mmtrain.schedule.graph import Work
from mmtrain.spec.spec import Division, ModuleSpec, Rates, WorkSize

Unit = Any
"""The smallest part of a batch that a work consumes whole: the metadata of an image, a document or a clip. Hashable;
its `name` is how errors call it."""
Units = tuple[Unit, ...]
Weigh = Callable[[Unit], float]
"""FLOPs of a unit's forward, to which those of its backward are in proportion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkItem:
    """One work, and what it processes."""

    work: Work
    units: Units
    """What it consumes, in the order of the batch."""
    size: WorkSize
    """Rows, attended pairs and output rows."""


class Layout(Protocol):
    """The division of one module's works of an iteration over the ranks of a submesh."""

    def local_size(self, work: int, cp_rank: int, tp_rank: int) -> WorkSize:
        """Rows and outputs that one rank holds between two stages, padding included."""


class Modality(ABC):
    """One kind of content, as one module consumes it."""

    item: ClassVar[str]
    """How errors call a unit. Modules with equal items are given equal groups of units."""
    works: ClassVar[str]
    """How errors call the works of a module that consumes it."""
    parts: ClassVar[str] = "tokens"
    """What a unit's size is counted in."""
    remedy: ClassVar[str]
    """What a model lacks that has units of it in its batch, and what to change."""
    required: ClassVar[bool] = False
    """Whether every microbatch has some."""

    @abstractmethod
    def units(self, microbatch: MicrobatchMeta) -> Units:
        """What the module consumes of a microbatch, in the order of the batch."""

    @abstractmethod
    def size(self, module: ModuleSpec, units: Sequence[Unit]) -> WorkSize:
        """How much some units of one microbatch ask of a module.

        Raises: DataError: a unit that the module cannot take.
        """

    @abstractmethod
    def weigh(self, module: ModuleSpec) -> Weigh:
        """What a unit asks of a module."""

    @abstractmethod
    def owed(self, units: Sequence[Unit]) -> dict[str, int]:
        """Counts, by name, to which all works of some units must come."""

    @abstractmethod
    def paid(self, size: WorkSize) -> dict[str, int]:
        """The same counts of one work."""

    def readers(self, module: ModuleSpec) -> tuple[int, ...]:
        """Which stages of the module read tensors of the batch other than labels, as indices of its chain."""
        return (0,)

    def division(self, submesh: Submesh, module: ModuleSpec) -> Division:
        """How the ranks of a submesh divide the module."""
        return Division(tp=submesh.tp, groups=submesh.cp, key_groups=submesh.cp)

    def unevenness(self, submesh: Submesh, units: Sequence[Unit]) -> float:
        """Rows of the rank with most of a work, over an even share."""
        return 1.0

    @abstractmethod
    def layout(self, submesh: Submesh, module: ModuleSpec, works: dict[int, WorkItem], meta: IterationMeta) -> Layout:
        """The division of the works of an iteration. Args: works: number -> work, of this module alone."""

    def split(self, units: Units, size: int, weigh: Weigh) -> list[Units]:
        """The units in consecutive groups, one for each `size` of them (0: one), the heaviest as light as possible."""
        if not units:
            return []
        parts = -(-len(units) // size) if size else 1
        return [units[low:high] for low, high in split_evenly([weigh(unit) for unit in units], parts)]


def forward_rates(module: ModuleSpec) -> Rates:
    """FLOPs of a module's forward."""
    return sum((layer.matmul_flops + layer.attention_flops for layer in module.layers), Rates())


def first_of(works: dict[int, WorkItem], count: Callable[[Units], int] = len) -> dict[int, int]:
    """work -> how many units (or what `count` says of them) stand before its own in its microbatch."""
    first: dict[int, int] = {}
    taken: dict[int, int] = {}
    for number, item in works.items():
        microbatch = item.work.microbatch
        first[number] = taken.get(microbatch, 0)
        taken[microbatch] = first[number] + count(item.units)
    return first
