"""What policies have in common: the samples of a step, and loads that are filled with them. Pure: integers, with
explicit keys of ties, so that every process that knows the same costs gets the same assignment."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from mmtrain.planner.assignment.assignment import AssignedMicrobatch, Assignment, Dealt, SampleCost


class NoRoomError(Exception):
    """A sample that no microbatch has room for, or a microbatch without a sample."""


@dataclass(frozen=True)
class AssignmentInput:
    """The arguments of `assign` that all policies read."""

    samples: Sequence[SampleCost]
    bins: Sequence[Sequence[int]]
    dealt: Dealt
    """[replica] -> its bins, if they stay as they are; it has as many microbatches."""
    capacity: tuple[int, ...]
    paces: tuple[int, ...] = ()
    """[replica] -> time of its pipeline for equal work, in any unit; empty: equal ones."""

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """[replica] -> its microbatches."""
        return tuple(map(len, self.dealt))

    @property
    def first_fit(self) -> Assignment:
        """The bins as given."""
        return assignment_of([self.bins[b] for b in own] for own in self.dealt)

    def pace(self, replica: int) -> int:
        """Time of a replica's pipeline for equal work."""
        return self.paces[replica] if self.paces else 1

    def replicas(self) -> "list[FilledLoad]":
        """An empty load for each replica, with the room of its microbatches."""
        return [FilledLoad(index, [count * most for most in self.capacity]) for index, count in enumerate(self.counts)]

    def microbatches(self, count: int) -> "list[FilledLoad]":
        """An empty load for each microbatch. Args: count: of them."""
        return [FilledLoad(index, list(self.capacity)) for index in range(count)]

    def fits(self, members: Iterable[int]) -> bool:
        """Whether some samples are within the capacity of one microbatch."""
        sizes = zip(*(self.samples[i].size for i in members), strict=True)
        return not self.capacity or all(sum(of) <= most for of, most in zip(sizes, self.capacity, strict=True))

    def language_ns(self, members: Iterable[int]) -> int:
        """The language work of some samples."""
        return sum(self.samples[i].language_ns for i in members)


def assignment_of(replicas: Iterable[Iterable[Iterable[int]]]) -> Assignment:
    """An assignment without deferral. Args: replicas: [replica][microbatch] -> samples."""
    made = (tuple(AssignedMicrobatch(tuple(own)) for own in microbatches) for microbatches in replicas)
    return Assignment(replicas=tuple(made))


class FilledLoad:
    """The samples of a replica or microbatch while it is filled."""

    __slots__ = ("encoder_ns", "index", "language_ns", "room", "samples")

    def __init__(self, index: int, room: list[int]) -> None:
        self.index, self.room = index, room
        self.samples: list[int] = []
        self.encoder_ns = self.language_ns = 0

    @property
    def total_ns(self) -> int:
        return self.encoder_ns + self.language_ns

    def has_room(self, cost: SampleCost) -> bool:
        return all(size <= room for size, room in zip(cost.size, self.room, strict=False))

    def add(self, sample: int, cost: SampleCost) -> None:
        self.samples.append(sample)
        self.encoder_ns += cost.encoder_ns
        self.language_ns += cost.language_ns
        self.room = [room - size for room, size in zip(self.room, cost.size, strict=False)]


class LoadKey(Protocol):
    """Sort key of a load that may get a sample; the least one gets it."""

    def __call__(self, load: FilledLoad, cost: SampleCost, /) -> tuple[int, ...]: ...


def fill(step: AssignmentInput, order: Iterable[int], loads: list[FilledLoad], key: LoadKey) -> None:
    """Adds samples, one after the other, to the load with room and the least key."""
    for i in order:
        cost = step.samples[i]
        options = [load for load in loads if load.has_room(cost)]
        if not options:
            raise NoRoomError(f"sample {i} of size {', '.join(map(str, cost.size))} has no room")
        min(options, key=lambda load: key(load, cost)).add(i, cost)


def falling(step: AssignmentInput, members: Iterable[int]) -> list[int]:
    """Samples by encoder work, then by language work, most first."""
    costs = step.samples
    return sorted(members, key=lambda i: (-costs[i].encoder_ns, -costs[i].language_ns, i))
