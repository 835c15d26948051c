"""What an elastic job says of a change: how far ranks came, what they tell newcomers, how long it took."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mmtrain.checkpoint.state import TrainState
from mmtrain.errors import RankLostError, TrainingError
from mmtrain.observe.metrics import Metrics
from mmtrain.parallel.agreement import Mark

MOST_FAILURES = 5
"""The failures of a step on the same nodes after which a job may end."""


@dataclass(slots=True)
class Marks:
    """How far this rank has come."""

    state: Mark | None = None
    """The mark of the state that the rank holds."""
    training: int = 0
    """The generation in which it trained last."""
    began: int = 0
    ended: int = 0
    """See `RankReport`."""
    values: dict[str, float] = field(default_factory=dict)
    """Metrics of the newest step."""

    def apply(self, mark: Mark, metrics: Metrics) -> None:
        """The weights are those after a step."""
        self.state = mark
        names = ("loss", "grad_norm", "lr", "tokens")
        self.values = {"step": mark[1], **{name: metrics[name] for name in names}}


@dataclass(slots=True)
class Change:
    """The seconds of each part of a change."""

    _seconds: dict[str, float] = field(default_factory=dict)
    _part: str = ""
    _start: float = 0.0

    def begin(self, part: str) -> None:
        """The part before ends, if there is one."""
        now = time.perf_counter()
        if self._part:
            self._seconds[self._part] = self._seconds.get(self._part, 0.0) + now - self._start
        self._part, self._start = part, now

    def end(self) -> dict[str, float]:
        """Part -> its seconds. Further ones are those of the next change."""
        self.begin("")
        seconds, self._seconds = self._seconds, {}
        return seconds


@dataclass(slots=True)
class Failures:
    """The times at which the same nodes failed in the same step."""

    timeout_s: float
    """The seconds for which gloo may keep a rank whose connections are closed: the others meet in vain meanwhile."""
    _where: tuple[Sequence[str], int] = ((), 0)
    _times: list[float] = field(default_factory=list)

    def add(self, nodes: Sequence[str], step: int, reason: str) -> None:
        """Counts one. Raises: RankLostError: they have failed again and again, for longer than a rank may be kept."""
        if self._where != (nodes, step):
            self._where, self._times = (nodes, step), []
        self._times.append(time.monotonic())
        if len(self._times) >= MOST_FAILURES and self._times[-1] - self._times[0] > 2 * self.timeout_s:
            raise RankLostError(
                f"step {step} failed {len(self._times)} times in a row though no node was lost: {reason}; raise "
                "comm.timeout_seconds if it is slower than that, else look at the processes and the network"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReport:
    """The report of a rank with a state to those without it."""

    mark: Mark
    state: TrainState
    depths: tuple[int, ...]
    """The depths of the layout before."""
    nodes: tuple[str, ...]
    """The nodes that trained in it."""
    job: str
    went_back_to: int
    """See `Checkpointer`."""
    values: dict[str, float]
    """Metrics of the newest step, which its line may lack."""

    def to_dict(self) -> dict[str, Any]:
        """The value as a table for JSON."""
        return {name: getattr(self, name) for name in StateReport.__slots__} | {"state": self.state.to_dict()}

    @classmethod
    def parse(cls, raw: Any) -> "StateReport":
        """The inverse of `to_dict`. Raises: TrainingError: it is none."""
        try:
            if set(raw) != set(cls.__slots__):
                raise ValueError(f"has the keys {sorted(raw)}")
            generation, step = raw["mark"]
            return cls(
                mark=(int(generation), int(step)),
                state=TrainState.from_dict(raw["state"]),
                depths=tuple(int(depth) for depth in raw["depths"]),
                nodes=tuple(str(name) for name in raw["nodes"]),
                job=str(raw["job"]),
                went_back_to=int(raw["went_back_to"]),
                values={str(name): float(value) for name, value in raw["values"].items()},
            )
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise TrainingError(
                f"a rank of another version of mmtrain tells {raw!r:.200} ({error}); install one version on all nodes"
            ) from None
