"""2,000 random faults in job configs and their overrides: each is accepted or refused with one line.

Accepted is what `mmtrain config` resolves, cuts and divides; what it prints is read back as the same config.
"""

import datetime
import json
import math
import random
import tomllib
from pathlib import Path
from typing import Any

import pytest

from mmtrain.config import config
from tests.faults.mutations import NUMBERS, OTHERS, ROOT, TEXTS, Outcome, damaged, mutated, report, run_all

NUM_FILES, NUM_OVERRIDES = 1600, 400
POOL: list[Any] = [
    *NUMBERS, *TEXTS, *OTHERS, datetime.date(2026, 1, 2), datetime.time(3, 4), [1, "a"], "search", "lora", "full",
    "90%", "72GiB", "h800x16",
]  # fmt: skip
NO_VALUES = ["", "=", "{", "[1", '"', "1.2.3", "a b", "\n[x]"]
NAMES = ["debug_vlm", "debug_t2v", "debug_text", "debug_siglip_llama", "debug_4d", "debug_lora", "vlm_s", "t2v_s"]


def toml(value: Any) -> str:
    """A value as TOML, tables inline."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{toml(str(key))} = {toml(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False)
    return value.isoformat() if isinstance(value, datetime.date | datetime.time) else repr(value)


def tables() -> list[dict[str, Any]]:
    """The configs as they are, and with all of their defaults written out."""
    found = []
    for name in NAMES:
        path = ROOT / "configs" / f"{name}.toml"
        found += [tomllib.loads(path.read_text()), tomllib.loads(config.dump(config.load(path)))]
    return found


def override(table: dict[str, Any], rng: random.Random) -> str:
    """A random value for a key that exists, or nearly. Args: table: of some config."""
    section = rng.choice(list(table))
    key = rng.choice(list(table[section]) or ["x"]) if isinstance(table[section], dict) else "x"
    value = toml(rng.choice(POOL)) if rng.randrange(4) else rng.choice(NO_VALUES)
    name = rng.choice([f"{section}.{key}"] * 6 + [section, f"{section}.{key}.x", f"{section}.", "."])
    return f"--{name}={value}" if len(value) < 100_000 else f"--{name}=long"


def not_read_back(outcome: Outcome) -> str:
    """What is wrong with the printed config of an accepted job; empty: nothing."""
    try:
        table = tomllib.loads(outcome.out)
    except tomllib.TOMLDecodeError as error:
        return f"what it prints is not TOML: {error}\n{outcome.out[:2000]}"
    return "" if "training" in table else f"what it prints lacks a section: {sorted(table)}"


@pytest.mark.nightly
def test_configs(tmp_path: Path) -> None:
    rng = random.Random(2)
    commands, bases = [], tables()
    for number in range(NUM_FILES):
        table = mutated(rng.choice(bases), rng, POOL)
        text = "".join(f"{toml(str(key))} = {toml(value)}\n" for key, value in table.items())
        data = text.encode("utf-8", "surrogatepass")
        path = tmp_path / f"{number}.toml"
        path.write_bytes(damaged(data, rng) if rng.randrange(10) == 0 else data)
        commands.append(["config", "--config", str(path)])
    for _ in range(NUM_OVERRIDES):
        name = f"{rng.choice(NAMES)}.toml"
        commands.append(
            ["config", "--config", name, *[override(rng.choice(bases), rng) for _ in range(rng.choice([1, 2]))]]
        )
    outcomes = run_all(commands, tmp_path)
    faults = [(outcome, fault) for outcome in outcomes if (fault := outcome.fault)]
    faults += [(found, why) for found in outcomes if found.status == 0 and (why := not_read_back(found))]
    print(report(outcomes, faults))
    assert not faults, report(outcomes, faults)
