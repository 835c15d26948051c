"""python benchmarks/traces/convert.py [--bamboo FOLDER] [FILE ...]

Converts public traces of spot instances into the CSV files beside this one, which `mmtrain simulate --failures` reads.
FOLDER is `traces/` of Bamboo's repository; all its traces are written. A FILE is written beside itself as FILE.csv.

Read are Bamboo's two formats: lines of `milliseconds,add|remove,node`, and lines of `date, time, number of instances`
in any order: nodes join until there are as many, or random ones (seed 0) are lost.
"""

import argparse
import random
import re
from datetime import datetime
from pathlib import Path

HERE = Path(__file__).parent
BAMBOO = {
    "p3": "p3-trace.csv",
    "g4dn": "g4dn-trace.csv",
    "a100": "gcloud/a100x1-east1b.txt",
    "v100": "gcloud/v100x1-east1c.txt",
}
"""Name of ours -> file of Bamboo's."""
FIRST_MINUTES_S = 1500
"""Nodes that joined so early, before any was lost, are there from the beginning: the fleet was being started."""
Event = tuple[float, str, str]
"""(seconds, lost or joined, node)."""


def of_events(text: str) -> list[Event]:
    """Of lines with milliseconds, `add` or `remove`, and a node."""
    rows = [line.split(",") for line in text.split()]
    kinds = {"add": "joined", "remove": "lost"}
    return [(int(time) / 1000, kinds[kind], node) for time, kind, node in rows]


def of_counts(text: str) -> list[Event]:
    """Of lines with a date, a time and a number of instances; those with the same time count in the file's order."""
    counts: list[tuple[datetime, int]] = []
    for line in text.strip().splitlines():
        moment, number = line.rsplit(",", 1)
        counts.append((datetime.strptime(moment, "%Y-%m-%d, %H:%M:%S"), int(number)))
    counts.sort(key=lambda row: row[0])
    events: list[Event] = []
    there: list[str] = []
    rng, started = random.Random(0), 0
    for when, count in counts:
        seconds = (when - counts[0][0]).total_seconds()
        while len(there) > count:
            events.append((seconds, "lost", there.pop(rng.randrange(len(there)))))
        while len(there) < count:
            there.append(f"node{(started := started + 1)}")
            events.append((seconds, "joined", there[-1]))
    return events


def from_the_start(events: list[Event]) -> list[Event]:
    """The events in order of time, which begins when the fleet has started; nodes of its start join at 0."""
    events = sorted(events, key=lambda event: event[0])
    first_lost = next((time for time, kind, _ in events if kind == "lost"), float("inf"))
    start = max(time for time, kind, _ in events if time <= events[0][0] + FIRST_MINUTES_S and time < first_lost)
    return [(max(0.0, time - start), kind, node) for time, kind, node in events]


def converted(text: str) -> str:
    """A trace of either format as CSV."""
    events = of_events(text) if re.match(r"\d+,(add|remove),", text) else of_counts(text)
    rows = [f"{time:.0f},{kind},{node}" for time, kind, node in from_the_start(events)]
    return "\n".join(["time,event,node", *rows]) + "\n"


def main() -> None:
    """Writes the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bamboo", type=Path, metavar="FOLDER")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    args = parser.parse_args()
    for name, file in BAMBOO.items() if args.bamboo else ():
        (HERE / f"{name}.csv").write_text(converted((args.bamboo / file).read_text()))
    for file in args.files:
        file.with_name(f"{file.name}.csv").write_text(converted(file.read_text()))


if __name__ == "__main__":
    main()
