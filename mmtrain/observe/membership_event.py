"""One change of the nodes of an elastic job, as the log and metrics.jsonl have it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EVENT = "membership"
"""`event` of its line in metrics.jsonl."""
_MIB = 2.0**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipEvent:
    """What changed with a generation, and what that took."""

    kind: str
    """started: the job begins. lost, joined, left: a node, or several. recovered: the same nodes go on."""
    nodes: int
    """The nodes of the job from now on, idle ones included."""
    pipelines: tuple[int, ...]
    """[pipeline] -> its pipeline ranks."""
    generation: int
    step: int
    """The last one before it."""
    seconds: Mapping[str, float]
    """Part of the change -> its seconds on rank 0."""
    num_bytes: int
    """The bytes that ranks sent to each other."""
    redone_steps: int
    """Steps that were begun, and lost."""

    def line(self, time_s: float) -> dict[str, Any]:
        """The line of metrics.jsonl. Args: time_s: seconds since the epoch."""
        return {
            "event": EVENT,
            "kind": self.kind,
            "nodes": self.nodes,
            "pipelines": list(self.pipelines),
            "generation": self.generation,
            "step": self.step,
            "time": round(time_s, 3),
            "seconds": {part: round(seconds, 4) for part, seconds in self.seconds.items()},
            "bytes": self.num_bytes,
            "redone_steps": self.redone_steps,
        }

    def text(self) -> str:
        """The log line."""
        what = {"started": "started", "recovered": "recovered"}.get(self.kind, f"node {self.kind}")
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in self.seconds.items())
        took = f", {sum(self.seconds.values()):.2f} s ({parts})" if parts else ""
        copied = f", {self.num_bytes / _MIB:.1f} MiB copied" if self.num_bytes else ""
        redone = f", steps to redo: {self.redone_steps}" if self.redone_steps else ""
        return (
            f"{what} after step {self.step}: nodes: {self.nodes}, pipelines: {list(self.pipelines)} (generation "
            f"{self.generation}){took}{copied}{redone}"
        )
