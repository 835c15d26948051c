"""A trace played on a system: microbatches that count, by interval. Pure.

A loss takes half a step, its mean; where the state is gone with its nodes or the system restarts, half of what is done
between checkpoints. What has to be done again counts once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mmtrain.simulator.allocation.compositions import Layer
from mmtrain.simulator.failures.systems import Running, System
from mmtrain.simulator.failures.trace import Event, Trace


@dataclass(frozen=True, kw_only=True)
class FailureCosts:
    """What events and checkpoints cost."""

    detection_s: float
    """The seconds from a loss until all nodes know it."""
    change_s: float
    """The seconds of a change of the layout, without what nodes copy."""
    bytes_per_s: float
    """The rate at which a node receives what it lacks."""
    restart_s: float
    """The seconds from the end of a job until its first step from a checkpoint."""
    checkpoint_s: float
    """The seconds for which a checkpoint stops training."""
    checkpoint_every: int
    """Steps between checkpoints."""


@dataclass(frozen=True, kw_only=True)
class TrainedInterval:
    """What was trained between two events."""

    start_s: float
    seconds: float
    nodes: int
    """The nodes that are there."""
    samples: float
    """Microbatches, without those that were done before."""
    step_s: float
    """Seconds of a step; 0: nothing runs."""
    lost_s: float
    """Seconds at its beginning in which nothing was trained, or what was done before was done again."""

    @property
    def rate(self) -> float:
        """Microbatches a second."""
        return self.samples / self.seconds


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A trace, played."""

    intervals: tuple[TrainedInterval, ...]
    restarts: int
    """How often training went on from a checkpoint."""

    @property
    def rate(self) -> float:
        """Mean microbatches a second."""
        return sum(one.samples for one in self.intervals) / sum(one.seconds for one in self.intervals)


@dataclass(kw_only=True)
class _Progress:
    """What a system has done, and owes."""

    idle_s: float = 0.0
    """Seconds until it trains."""
    again: float = 0.0
    """Microbatches to do again."""
    going: float = 0.0
    """Microbatches since training began or went on after a loss, at a step's beginning."""
    restarted: float = 0.0
    """Microbatches since training began or went on from a checkpoint."""


def replay(trace: Trace, system: System, costs: FailureCosts) -> Replay:
    """The trace, played on a system. All systems start at once with the nodes of the beginning."""
    player, nodes, found = _Player(system, costs), list[str](), []
    for event, following in zip(trace.events, trace.events[1:], strict=False):
        nodes = [*(node for node in nodes if node not in event.lost), *event.joined]
        player.take(event, nodes)
        samples, lost_s = player.train(following.time_s - event.time_s)
        found.append(
            TrainedInterval(
                start_s=event.time_s,
                seconds=following.time_s - event.time_s,
                nodes=len(nodes),
                samples=samples,
                step_s=player.running.step_s if player.running else 0.0,
                lost_s=lost_s,
            )
        )
    return Replay(intervals=tuple(found), restarts=player.restarts)


class _Player:
    """A system in the middle of a trace."""

    def __init__(self, system: System, costs: FailureCosts) -> None:
        self.system, self.costs = system, costs
        self.templates = system.templates
        self.running: Running | None = None
        self.progress = _Progress()
        self.restarts = 0

    @property
    def rate(self) -> float:
        """Microbatches a second between events, with checkpoints."""
        if self.running is None:
            return 0.0
        steps = self.costs.checkpoint_every
        return self.templates.microbatches * steps / (steps * self.running.step_s + self.costs.checkpoint_s)

    def take(self, event: Event, nodes: Sequence[str]) -> None:
        """An event: what runs from now on, and what the change costs."""
        before, lost = self.running, set(event.lost)
        after = self.system.running(before, nodes)
        if before is None:
            if after is not None and event.time_s > 0:
                self._restart()
        elif lost & set(before.held()):
            self._lose(before, after, lost)
        elif after is not None and after.slots != before.slots:
            self._change(before, after)
        self.running = after

    def _lose(self, before: Running, after: Running | None, lost: set[str]) -> None:
        """Nodes in use are lost."""
        held = {node: layers for node, layers in before.held().items() if node not in lost}
        survives = frozenset[Layer]().union(*held.values()) == frozenset[Layer]().union(*before.held().values())
        whole, done = self.templates.microbatches, self.progress.going
        if not self.system.live or not survives:
            whole, done = whole * self.costs.checkpoint_every, self.progress.restarted
        gone = done if done < whole else whole / 2
        self.progress.again += gone
        self.progress.going = 0.0
        self.progress.restarted -= gone
        if after is None:  # what is left is saved before the end
            self.progress.restarted = 0.0
        elif self.system.live and survives:
            self.progress.idle_s += self.costs.detection_s
            self._copy(held, after)
        else:
            self._restart(self.costs.detection_s)

    def _change(self, before: Running, after: Running) -> None:
        """Changes the layout at a step's end, with all nodes of the one before still there."""
        if self.system.live:
            self._copy(before.held(), after)
            return
        self._restart(self.costs.checkpoint_s)

    def _restart(self, after_s: float = 0.0) -> None:
        """A restart, in place of one that has not ended. Args: after_s: seconds until it begins."""
        self.restarts += 1
        self.progress.going = self.progress.restarted = 0.0
        self.progress.idle_s = after_s + self.costs.restart_s

    def _copy(self, held: dict[str, frozenset[Layer]], after: Running) -> None:
        """Nodes receive what they lack, all at once."""
        of_layer = self.templates.layer_bytes
        lacking = (layers - held.get(node, frozenset()) for node, layers in after.held().items())
        most = max(sum(of_layer.get(layer, 1.0) for layer in layers) for layers in lacking)
        self.progress.idle_s += self.costs.change_s + most / self.costs.bytes_per_s

    def train(self, seconds: float) -> tuple[float, float]:
        """Trains for some seconds. Returns: microbatches that count, and seconds without any."""
        waited = min(seconds, self.progress.idle_s)
        self.progress.idle_s -= waited
        if not self.rate:
            return 0.0, seconds
        done = (seconds - waited) * self.rate
        again = min(done, self.progress.again)
        self.progress.again -= again
        self.progress.going += done
        self.progress.restarted += done
        return done - again, waited + again / self.rate
