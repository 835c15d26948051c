"""Traces of the times at which nodes are lost and join: read from a file, or drawn. Pure."""

import csv
import math
import random
import re
from dataclasses import dataclass
from pathlib import Path

from mmtrain.errors import ConfigError

_COLUMNS = ["time", "event", "node"]
_UNITS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, kw_only=True)
class Event:
    """Everything that happens at one time."""

    time_s: float
    """Seconds from the trace's beginning."""
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trace:
    """Events by ascending time."""

    events: tuple[Event, ...]
    """The first is at 0 and has the nodes that are there from the beginning; the last ends the trace."""

    def most(self, nodes: int) -> "Trace":
        """The trace of a job that uses at most as many nodes at a time: those that are there longest.

        A waiting node joins when one that is used is lost.
        """
        used: list[str] = []
        waiting: list[str] = []
        events = []
        for event in self.events:
            lost = tuple(node for node in event.lost if node in used)
            used = [node for node in used if node not in lost]
            waiting = [*(node for node in waiting if node not in event.lost), *event.joined]
            joined, waiting = waiting[: nodes - len(used)], waiting[nodes - len(used) :]
            used += joined
            if lost or joined or event is self.events[-1]:
                events.append(Event(time_s=event.time_s, lost=lost, joined=tuple(joined)))
        return Trace(tuple(events))

    @property
    def most_nodes(self) -> int:
        """The largest number of nodes at a time."""
        count = largest = 0
        for event in self.events:
            count += len(event.joined) - len(event.lost)
            largest = max(largest, count)
        return largest


def read_trace(path: Path) -> Trace:
    """The trace of a CSV file with the columns time (seconds), event (`lost` or `joined`) and node (a name).

    Its first time is 0; the nodes that joined then are there from the beginning.

    Raises: ConfigError: it cannot be read; times do not ascend; a node is lost that is not there, or joins that is; no
        event follows the first time.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"simulate: --failures {path} cannot be read ({error}); name a CSV file") from None
    if not rows or [name.strip() for name in rows[0]] != _COLUMNS:
        raise ConfigError(
            f"{path}:1: its columns are {','.join(rows[0]) if rows else 'missing'!r}; write time,event,node"
        )
    there: set[str] = set()
    known: set[str] = set()
    found: dict[float, tuple[list[str], list[str]]] = {}
    for number, row in enumerate(rows[1:], 2):
        if not any(row):
            continue
        where = f"{path}:{number}"
        time_s, event, node = _checked(row, where)
        if found and time_s < next(reversed(found)):
            raise ConfigError(f"{where}: time {row[0]} is before {next(reversed(found)):g}; sort the lines by time")
        _take(event, node, there, known, where)
        lost, joined = found.setdefault(time_s, ([], []))
        if event == "lost" and node in joined:  # gone at once
            joined.remove(node)
        else:
            (joined if event == "joined" else lost).append(node)
    if len(found) < 2:
        raise ConfigError(f"{path}: {len(found)} times have events; a trace has those of the beginning and a later one")
    first = next(iter(found))
    return Trace(tuple(Event(time_s=t - first, lost=tuple(of[0]), joined=tuple(of[1])) for t, of in found.items()))


def _checked(row: list[str], where: str) -> tuple[float, str, str]:
    """The values of a line. Raises: ConfigError: one is wrong."""
    if len(row) != len(_COLUMNS):
        raise ConfigError(f"{where}: {len(row)} values; a line is time,event,node")
    time, event, node = (value.strip() for value in row)
    try:
        time_s = float(time)
    except ValueError:
        time_s = math.nan
    if not math.isfinite(time_s) or time_s < 0:
        raise ConfigError(f"{where}: time {time!r} is no number of seconds from 0 on; write one")
    if event not in ("lost", "joined"):
        raise ConfigError(f"{where}: event {event!r} is neither lost nor joined; write one of them")
    if not node:
        raise ConfigError(f"{where}: the node has no name; write one")
    return time_s, event, node


def _take(event: str, node: str, there: set[str], known: set[str], where: str) -> None:
    """One line's change of the nodes that are there. Raises: ConfigError: it cannot be."""
    if event == "joined":
        if node in there:
            raise ConfigError(
                f"{where}: node {node!r} joined twice; write when it was lost between, or remove the line"
            )
        there.add(node)
        known.add(node)
        return
    if not there:
        raise ConfigError(f"{where}: node {node!r} is lost, more losses than nodes; write which nodes joined before")
    if node not in known:
        raise ConfigError(f"{where}: node {node!r} is lost, which never joined; write when it did, or correct its name")
    if node not in there:
        raise ConfigError(f"{where}: node {node!r} was lost twice; write when it joined again, or remove the line")
    there.remove(node)


def drawn_trace(nodes: int, every_s: float, repair_s: float, hours: float, seed: int) -> Trace:
    """A trace in which one of the nodes that are there is lost after an exponential time, the mean of all losses
    together `every_s`, and joins again after `repair_s`.

    Args: nodes: from the beginning. hours: after which it ends.
    """
    rng, end_s = random.Random(seed), 3600 * hours
    there = [f"node{index}" for index in range(nodes)]
    events = [Event(time_s=0.0, joined=tuple(there))]
    away: list[tuple[float, str]] = []
    fails_s = rng.expovariate(1 / every_s)
    while min([fails_s, *(back for back, _ in away)]) < end_s:
        if away and away[0][0] <= fails_s:
            time_s, node = away.pop(0)
            there.append(node)
            events.append(Event(time_s=time_s, joined=(node,)))
            continue
        if there:
            node = there.pop(rng.randrange(len(there)))
            away.append((fails_s + repair_s, node))
            events.append(Event(time_s=fails_s, lost=(node,)))
        fails_s += rng.expovariate(1 / every_s)
    return Trace((*events, Event(time_s=end_s)))


def seconds_of(text: str, option: str) -> float:
    """Seconds of a duration such as `90s`, `10m`, `6h` or `90`. Args: option: its name.

    Raises: ConfigError: it is none, or not positive.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    seconds = float(match[1]) * _UNITS[match[2] or "s"] if match else 0.0
    if not seconds:
        raise ConfigError(f"simulate: {option} {text!r} is no positive duration; write one such as 90s, 10m or 6h")
    return seconds
