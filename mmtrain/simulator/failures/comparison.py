"""Systems compared on one trace, as text. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from mmtrain.simulator.allocation.compositions import Templates
from mmtrain.simulator.failures.oobleck import LiteralTemplates, Oobleck
from mmtrain.simulator.failures.systems import BestComposition, EqualPipelines, LocalRule, ReRouting, System
from mmtrain.simulator.failures.trace import Trace
from mmtrain.simulator.failures.trace_replay import FailureCosts, Replay, replay
from mmtrain.simulator.study_report import aligned

OURS, OOBLECK = "ours", "Oobleck"


def systems(templates: Templates, literal: LiteralTemplates) -> dict[str, System]:
    """Name -> system."""
    return {
        OURS: BestComposition(templates=templates),
        "local rule": LocalRule(templates=templates),
        OOBLECK: Oobleck(templates=literal.simulated, estimated=literal.estimated),
        "restart": EqualPipelines(templates=templates, live=False),
        "grid": EqualPipelines(templates=templates, live=True),
        "re-routing": ReRouting(templates=templates, live=True),
    }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A trace, played on several systems."""

    replays: Mapping[str, Replay]
    ideal: tuple[float, ...]
    """[interval] -> microbatches a second of the best composition of all nodes, in proportion to nodes."""

    @property
    def ideal_rate(self) -> float:
        """The mean rate of the ideal system."""
        spans = [one.seconds for one in next(iter(self.replays.values())).intervals]
        return sum(rate * seconds for rate, seconds in zip(self.ideal, spans, strict=True)) / sum(spans)


def compare(trace: Trace, played: Mapping[str, System], templates: Templates, costs: FailureCosts) -> Comparison:
    """The trace, played on each system. Args: templates: those of the ideal."""
    replays = {name: replay(trace, system, costs) for name, system in played.items()}
    whole = templates.microbatches / templates.best(templates.max_nodes).seconds / templates.max_nodes
    return Comparison(replays=replays, ideal=tuple(whole * one.nodes for one in next(iter(replays.values())).intervals))


def table_of_systems(found: Comparison) -> str:
    """A line for each system: its mean over the trace."""
    rows = [("", "microbatches/s", "of the ideal", "without training", "restarts")]
    for name, one in found.replays.items():
        lost = sum(min(i.lost_s, i.seconds) for i in one.intervals) / sum(i.seconds for i in one.intervals)
        share = f"{100 * one.rate / found.ideal_rate:.1f} %"
        rows.append((name, f"{one.rate:.3f}", share, f"{100 * lost:.1f} %", str(one.restarts)))
    return "\n".join(aligned(rows)) + "\n"


def table_of_intervals(found: Comparison) -> str:
    """A line for each interval between events: microbatches a second of each system."""
    rows = [("from s", "to s", "nodes", "ideal", *found.replays)]
    for index, ideal in enumerate(found.ideal):
        each = [one.intervals[index] for one in found.replays.values()]
        span = f"{each[0].start_s:.0f}", f"{each[0].start_s + each[0].seconds:.0f}", str(each[0].nodes)
        rows.append((*span, f"{ideal:.3f}", *(f"{one.rate:.3f}" for one in each)))
    return "\n".join(aligned(rows)) + "\n"
