"""What samples cost, and which of them run in which microbatch of which replica. Pure."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCost:
    """What one sample of a step costs."""

    encoder_ns: int
    """Nanoseconds of forward and backward of all modules before the language model; 0: it has nothing for them."""
    language_ns: int
    """Nanoseconds of forward and backward of the language model; above 0."""
    size: tuple[int, ...] = ()
    """The size of the sample under each limit of a microbatch."""

    @property
    def total_ns(self) -> int:
        """Nanoseconds of all modules."""
        return self.encoder_ns + self.language_ns


@dataclass(frozen=True, slots=True)
class AssignedMicrobatch:
    """One microbatch: indices of the step's samples, whose encoder work it does."""

    samples: tuple[int, ...]
    """The samples in order; never empty."""
    deferred: tuple[int, ...] = ()
    """The samples among `samples` whose language work the replica's next microbatch does; never all of them."""


Status = Literal["assigned", "whole bins", "first-fit"]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The microbatches of all replicas."""

    replicas: tuple[tuple[AssignedMicrobatch, ...], ...]
    """[replica][microbatch], in the order of execution. With `fewer_microbatches` replicas may have unequal numbers."""
    status: Status = "assigned"
    """`first-fit`: the policy could not place all samples within the limits, so these are the bins as given. `whole
    bins`: `balanced` deals those bins to replicas, and exchanges samples only while it refines."""
    message: str = ""
    """Why the status is not `assigned`, in one sentence."""
    evaluations: int = 0
    """Makespans that the refinement asked for."""

    @cached_property
    def digest(self) -> str:
        """A hash of the microbatches, by which processes compare their assignments."""
        text = repr([[(one.samples, one.deferred) for one in microbatches] for microbatches in self.replicas])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def language_samples(microbatches: Sequence[AssignedMicrobatch]) -> tuple[tuple[int, ...], ...]:
    """[microbatch] of a replica -> the samples whose language work it does: those deferred to it, then its own."""
    arriving: tuple[int, ...] = ()
    of_language: list[tuple[int, ...]] = []
    for own in microbatches:
        of_language.append((*arriving, *(i for i in own.samples if i not in own.deferred)))
        arriving = own.deferred
    return tuple(of_language)


MakespanOf = Callable[[int, Sequence[AssignedMicrobatch]], float]
"""A function of a replica and its microbatches: the replica's makespan, in any unit."""
Dealt = tuple[tuple[int, ...], ...]
"""[replica] -> its microbatches of the step, ascending; every one has at least one."""


def in_turns(num_microbatches: int, num_replicas: int) -> Dealt:
    """Microbatch g of a step for replica g % R."""
    return tuple(tuple(range(replica, num_microbatches, num_replicas)) for replica in range(num_replicas))
