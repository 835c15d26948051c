"""The parts of an iteration's rank-seconds, from model FLOPs at the peak rate to idle time. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class TimePart(StrEnum):
    """A part of the rank-seconds (ranks x seconds) of an iteration, in the order of tables and charts."""

    MODEL_FLOPS = "model FLOPs"
    """Model FLOPs at the peak rate: as a fraction of all rank-seconds, the MFU."""
    BELOW_PEAK = "below peak"
    """What computing takes in addition: products below the peak rate, elementwise kernels, launches, dispatch."""
    RECOMPUTATION = "recomputation"
    """What backwards repeat of forwards, without exchanges of tensor parallelism, and waiting for offloads."""
    EXCHANGES = "exchanges"
    """Tensor- and context-parallel collectives within layers, as far as they delay computing."""
    BUBBLE = "bubble"
    """Idle pipeline ranks from the start of the pipelines to the end of the slowest one, less `TRANSFERS`."""
    TRANSFERS = "transfers"
    """Idle time that the same orders would not have if messages between pipeline ranks arrived at once."""
    REDUCTIONS = "gather, reduce"
    """Data-parallel gathers of parameters and reductions of gradients, outside of the pipelines' time."""
    OPTIMIZER = "optimizer"
    """The optimizer step; in a measured step also the gradients' norm, and waiting for other replicas."""
    INPUT = "data, plan"
    """Waiting for data and for the plan, in a measured step."""


COMPUTING = (TimePart.MODEL_FLOPS, TimePart.BELOW_PEAK, TimePart.RECOMPUTATION, TimePart.EXCHANGES)
"""The parts of the time in which actions run."""

Parts = tuple[TimePart, ...]
"""Parts that cannot be told apart; usually one."""


@dataclass(frozen=True)
class Breakdown:
    """The rank-seconds of an iteration, divided into parts that add up to 1."""

    shares: Mapping[Parts, float]
    """Fraction of each part, or of several together that cannot be told apart; none is negative."""

    def __post_init__(self) -> None:
        total = sum(self.shares.values())
        assert abs(total - 1) < 1e-6, f"the parts add up to {total}"
        assert min(self.shares.values()) > -1e-6, f"a part is negative: {self.by_label}"

    @classmethod
    def of(cls, total_s: float, seconds: Mapping[Parts, float]) -> "Breakdown":
        """The parts in their order. Args: seconds: of each part, in the unit of `total_s`, which they add up to."""
        ordered = sorted(seconds, key=lambda parts: list(TimePart).index(parts[0]))
        return cls({parts: seconds[parts] / total_s for parts in ordered})

    @classmethod
    def mean(cls, breakdowns: Sequence["Breakdown"], weights: Sequence[float]) -> "Breakdown":
        """The breakdown of several iterations together. Args: weights: seconds of each; all have equal parts."""
        pairs = list(zip(breakdowns, weights, strict=True))
        total = sum(weights)
        return cls({parts: sum(b.shares[parts] * w for b, w in pairs) / total for parts in breakdowns[0].shares})

    def __getitem__(self, part: TimePart) -> float:
        """The fraction of one part. Raises: KeyError: it cannot be told from others."""
        return self.shares[(part,)]

    @property
    def by_label(self) -> dict[str, float]:
        """Name of a part, or names joined by " + " -> fraction."""
        return {label(parts): share for parts, share in self.shares.items()}


def label(parts: Parts) -> str:
    """The name of a part, or the names of several joined by " + "."""
    return " + ".join(parts)


def computing(busy_s: float, known: Mapping[TimePart, float | None]) -> dict[Parts, float]:
    """The parts of the time in which actions run; what is not known apart is joined with `TimePart.BELOW_PEAK`.

    Args:
        busy_s: rank-seconds of all actions.
        known: rank-seconds of some of `COMPUTING`; None or absent: cannot be told apart.
    """
    apart: dict[Parts, float] = {(part,): seconds for part, seconds in known.items() if seconds is not None}
    joint = tuple(part for part in COMPUTING if (part,) not in apart)
    return {**apart, joint: busy_s - sum(apart.values())}
