"""Clocks of the actions of a rank."""

import time
from collections.abc import Callable
from typing import Any

import torch

from mmtrain.schedule.action import Action

Times = tuple[tuple[tuple[Action, float, float], ...], tuple[float, float]]
"""The (action, start, end) of each action, and start and end of the program: seconds."""


class ActionClock:
    """Start and end of each compute action: the host's clock on a CPU, device events elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.host: Callable[[], float] = time.perf_counter
        self.now: Callable[[], Any] = self.host
        """The present moment: seconds, or an event."""
        self._device = device
        self._rows: list[tuple[Action, Any, Any]] = []
        self._start = 0.0
        self._zero: Any = None

    def start(self) -> None:
        """Begins to time a program."""
        self._rows = []
        self._start = self.host()
        self.now = self.host
        if self._device.type != "cpu":
            self.now = self._event
            self._zero = self._event()

    def record(self, action: Action, start: Any) -> None:
        """Notes that an action ends now."""
        self._rows.append((action, start, self.now()))

    def stop(self) -> Callable[[], Times]:
        """What says the times of the program, which has been issued by now."""
        rows, start, zero = self._rows, self._start, self._zero
        if self._device.type == "cpu":
            times: Times = tuple(rows), (start, self.host())
            return lambda: times
        last = self._event()

        def seconds(event: Any) -> float:
            return start + float(zero.elapsed_time(event)) / 1e3

        def read() -> Times:
            last.synchronize()
            return tuple((a, seconds(s), seconds(e)) for a, s, e in rows), (start, seconds(last))

        return read

    def _event(self) -> Any:
        event = torch.Event(self._device.type, enable_timing=True)
        event.record()
        return event
