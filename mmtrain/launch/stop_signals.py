"""SIGTERM and SIGINT as the wish that a job ends after its present step."""

import os
import signal
from typing import Any

from mmtrain.launch.processes import STOPS


class StopSignals:
    """Records the signals that end a job, from `catch` to `release`; a second SIGINT does what it did before."""

    def __init__(self) -> None:
        self.number = 0
        """The number of the newest signal; 0: none came."""
        self.notice = ""
        """A line that the first SIGINT prints; empty on all ranks but one."""
        self._before: dict[int, Any] = {}

    def catch(self, notice: str) -> None:
        """Takes the signals."""
        self.notice = notice
        self._before = {number: signal.signal(number, self._on_signal) for number in STOPS}

    def release(self) -> None:
        """Gives the signals back to those who had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        earlier, self.number = self.number, number  # at once: the launcher's signal may interrupt this
        if not earlier and number == signal.SIGINT:
            os.write(2, self.notice.encode())  # not through the log, which this signal may have interrupted
        before = self._before.get(number)
        if number == earlier == signal.SIGINT and callable(before):  # else a launcher ends this process
            before(number, frame)
