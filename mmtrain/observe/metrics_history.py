"""The lines of metrics.jsonl that a resumed job keeps, and what follows from them."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmtrain.launch.atomic_files import write_whole
from mmtrain.observe.membership_event import EVENT


@dataclass(slots=True)
class MetricsHistory:
    """What is known of the lines of the run so far."""

    last_step: int = 0
    """The newest step that has a line."""
    _began: float | None = None
    """The start of the elastic job, seconds since the epoch; None: the job is not elastic."""
    _steps_s: float = 0.0
    """Seconds of its steps since then."""

    @classmethod
    def kept(cls, path: Path, start: int, generation: int | None) -> "MetricsHistory":
        """The history in a file, which is written anew without the steps that a resumed run repeats, and without the
        events of an elastic job that ended before this one began.

        Args: start: the last step that is not repeated; 0: a new run. generation: of an elastic job.
        """
        history = cls()
        if not path.exists():
            return history
        text = path.read_text(encoding="utf-8")
        kept = []
        for line in text.splitlines():
            try:
                values = json.loads(line)
                if _stays(values, start, generation):
                    history.take(values)
                    kept.append(line + "\n")
            except (json.JSONDecodeError, KeyError, TypeError):
                continue  # truncated by a kill
        write_whole(path, "".join(kept))
        return history

    def take(self, line: Mapping[str, Any]) -> None:
        """Follows the file by one line."""
        if line.get("event") == EVENT:
            if line["kind"] == "started" or self._began is None:
                self._began, self._steps_s = float(line["time"]), 0.0
        elif "grad_norm" in line:
            self.last_step = max(self.last_step, int(line["step"]))
            self._steps_s += float(line.get("step_time_s") or 0.0)

    def time_in_steps(self, now: float, step_s: float) -> float:
        """The part of the time since an elastic job began that is in its finished steps; NaN: it is none.

        Args: now: seconds since the epoch. step_s: of a step without a line.
        """
        if self._began is None:
            return math.nan
        total_s = self._steps_s + step_s
        return total_s / max(now - self._began, total_s)  # a clock may be set back


def _stays(values: Mapping[str, Any], start: int, generation: int | None) -> bool:
    if "event" in values and generation is not None and values["generation"] < generation:
        return True
    return bool(start) and bool(values["step"] <= start)
