"""Random faults in values that came from a file, and commands that are run on them in a process that may crash."""

import copy
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MOST_CPU_S = 8.0
"""Of one command, in a process that has compiled the kernels."""
MOST_LETTERS = 4000
"""Of an error."""
MOST_WALL_S = 900.0
"""Of one command: it hangs. Machines are busy at times."""

NUMBERS: list[Any] = [
    0, 1, -1, 2, 3, 7, 1000, 10**6, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30, 10**300,
    10**400, 0.0, -0.0, 0.5, -0.5, 1e-9, 1e-300, 5e-324, 1e9, 1e18, 1e300, 1.7e308, -1e300, float("nan"), float("inf"),
    float("-inf"),
]  # fmt: skip
TEXTS = [
    "", " ", "a", "0", "1e9", "true", "None", "\0", "a\0b", "\n", "a\nb", "é", "\u202e", "/", "..", "/dev/zero",
    "x" * 100_000,
]  # fmt: skip
OTHERS: list[Any] = [True, False, [], {}, [[]], [1], ["a"], [0, 0], {"a": 1}, {"": 0}, [[[[[[[[]]]]]]]]]


def slots(value: Any) -> list[tuple[Any, Any]]:
    """(container, key or index) of everything inside of a value."""
    found: list[tuple[Any, Any]] = []
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        found += [(value, key), *slots(inner)]
    return found


def mutated(value: Any, rng: random.Random, pool: Sequence[Any]) -> Any:
    """A copy of a value with one to three random faults. Args: pool: what may stand in the place of anything."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = slots(value)
        if not places:
            return value
        container, key = rng.choice(places)
        old, kind = container[key], rng.randrange(10)
        is_number = isinstance(old, int | float) and not isinstance(old, bool)
        if kind < 2:
            container[key] = copy.deepcopy(rng.choice(pool))
        elif kind < 4:
            container[key] = rng.choice(NUMBERS) if is_number else copy.deepcopy(rng.choice(pool))
        elif kind < 6 and is_number:
            container[key] = type(old)(abs(old) * rng.choice([0, 0.1, 2, 1000]) + rng.choice([0, 1]))
        elif kind == 6:
            del container[key]
        elif kind == 7 and isinstance(container, list):
            container.insert(rng.randrange(len(container) + 1), copy.deepcopy(old))
        elif kind == 8 and isinstance(container, dict):
            container[rng.choice(["colour", "", "a b", "é", "a\nb", key + key, key.upper()])] = copy.deepcopy(old)
        else:
            other, at = rng.choice(places)
            if (isinstance(other, dict) and at in other) or (isinstance(other, list) and at < len(other)):
                container[key] = copy.deepcopy(other[at])
    return value


def damaged(data: bytes, rng: random.Random) -> bytes:
    """The bytes of a file with one fault: cut, a bit flipped, bytes lost, doubled or NUL."""
    at, until = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    until = min(until, at + 200)
    kind = rng.randrange(5)
    if kind == 0:
        return data[:at]
    if kind == 1 and at < len(data):
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    return data[:at] + {2: b"", 3: data[at:until] * 2, 4: b"\0" * (until - at)}.get(kind, b"") + data[until:]


@dataclass(frozen=True)
class Outcome:
    """What a command came to."""

    words: list[str]
    status: int | None = None
    """None: it raised, or its process died."""
    out: str = ""
    err: str = ""
    cpu_s: float = 0.0
    died: str = ""
    """The traceback, or how the process ended."""

    @property
    def fault(self) -> str:
        """What is wrong with how it ended; empty: nothing."""
        if self.died:
            return self.died
        lines = self.err.splitlines()
        if self.status not in (0, 1, 2):
            return f"exit status {self.status}"
        drawn = all(line.startswith("  rank ") for line in lines[1:])  # the orders around the step that is wrong
        if self.status == 2 and not (lines and lines[0].startswith("error: ") and drawn):
            return f"not one line of an error: {self.err[:1000]}"
        if len(self.err) > MOST_LETTERS:
            return f"an error of {len(self.err)} letters: {self.err[:1000]}"
        if self.status != 2 and lines:
            return f"words on standard error: {lines[:5]}"
        if self.status == 1 and len(self.out.splitlines()) != 1:
            return f"not one line of an answer: {self.out[:500]}"
        return f"{self.cpu_s:.1f} s of CPU time" if self.cpu_s > MOST_CPU_S else ""


def run_all(commands: Sequence[list[str]], folder: Path) -> list[Outcome]:
    """What each command of `mmtrain` came to. They share processes; one that dies takes no other command with it."""
    found: list[Outcome] = []
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    while len(found) < len(commands):
        todo = folder / "commands.json"
        todo.write_text(json.dumps(commands[len(found) :]))
        words = [sys.executable, "-m", "tests.faults.worker", str(todo)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment) as worker:
            assert worker.stdout is not None
            found += [Outcome(**json.loads(line)) for line in worker.stdout]
        if len(found) < len(commands):
            found.append(Outcome(commands[len(found)], died=f"the process ended with {worker.returncode}"))
    return found


def report(outcomes: Sequence[Outcome], faults: Sequence[tuple[Outcome, str]]) -> str:
    """How many commands ended how, and the first faults in full."""
    counts = Counter((outcome.words[0], outcome.status) for outcome in outcomes)
    names = {0: "accepted", 1: "answered no", 2: "refused", None: "died"}
    lines = [f"{word}: {number} {names[status]}" for (word, status), number in sorted(counts.items(), key=str)]
    longest = max((outcome.cpu_s for outcome in outcomes), default=0.0)
    lines += [f"{len(faults)} faults, longest command {longest:.1f} s of CPU time"]
    kinds: dict[str, tuple[Outcome, str]] = {}
    for outcome, fault in faults:
        kinds.setdefault(fault[-200:], (outcome, fault))
    return "\n".join(lines + [f"--- {outcome.words}\n{fault}" for outcome, fault in list(kinds.values())[:40]])
