"""CPU seconds of each test, with those of the processes that it started: the table of `tests/durations.json`.

`make test` prints the files that take over twice the share of the suite that the table gives them.
`python -m pytest --write-durations` writes the files that it ran into the table.
"""

import json
import os
import resource
from collections import Counter
from multiprocessing import forkserver
from pathlib import Path

import pytest

TABLE = Path(__file__).with_name("durations.json")
_TICKS = os.sysconf("SC_CLK_TCK")


def used() -> float:
    """CPU seconds so far of this process, its ended children, and the ranks that its fork server started."""
    own = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    server = forkserver._forkserver._forkserver_pid
    if server is None:
        return own
    try:
        fields = Path(f"/proc/{server}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:  # no /proc, or the server has ended
        return own
    return own + sum(int(ticks) for ticks in fields[11:15]) / _TICKS


class CpuTime:
    """Adds `cpu_s` to each report, and sums them by file where the reports come together."""

    def __init__(self, config: pytest.Config) -> None:
        self.last = 0.0
        self.by_file: Counter[str] = Counter()
        self.write = config.getoption("--write-durations")

    @pytest.hookimpl
    def pytest_collection_finish(self) -> None:
        self.last = used()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        now = used()
        report.cpu_s, self.last = now - self.last, now
        return report

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.by_file[report.location[0]] += report.cpu_s

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter) -> None:
        total = sum(self.by_file.values())
        table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
        if self.write:
            table |= {name: round(seconds, 1) for name, seconds in self.by_file.items()}
            table = {name: table[name] for name in sorted(table) if (TABLE.parents[1] / name).exists()}
            TABLE.write_text(json.dumps(table, indent=0) + "\n")
        known = sum(seconds for name, seconds in table.items() if name in self.by_file)
        mine = sum(seconds for name, seconds in self.by_file.items() if name in table)
        slow = [
            (seconds, seconds / mine / (table[name] / known), name)
            for name, seconds in self.by_file.items()
            if table.get(name) and seconds > 2 and seconds / mine > 2 * table[name] / known
        ]
        terminalreporter.write_line(f"CPU time of the tests: {total:.0f} s")
        for seconds, factor, name in sorted(slow, reverse=True):
            terminalreporter.write_line(f"  {name}: {seconds:.0f} s, {factor:.1f} times its share in {TABLE.name}")
