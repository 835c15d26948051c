"""What accelerators and clusters can do: profiles in TOML, strictly read. Pure.

A profile says what the vendor's data sheet says, and how much of it each kind of operator reaches. `extends = "other"`
takes over another profile's keys.
"""

import dataclasses
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from mmtrain.config.toml_sections import shown
from mmtrain.errors import ConfigError
from mmtrain.planner.operators.graph import DeviceKind, OpKind, Phase

FOLDER = Path(__file__).resolve().parents[1] / "hardware"
"""The profiles that come with mmtrain."""


_MAY_BE_ZERO = ("launch_s", "latency_s", "fill", "keys")


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """The part of a device's rates that a kind of operator reaches, at best: the inverse of DIP's factors a."""

    compute: float = 1.0
    """1 / a_fop."""
    memory: float = 1.0
    """1 / a_mem."""
    network: float = 1.0
    """1 / a_net."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way between two accelerators, or between one and its host."""

    bytes_per_s: float
    """In one direction, of one accelerator."""
    latency_s: float
    """Fixed part of a message or collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How a device cuts a matrix product: see `latency.product_efficiency`."""

    units: int
    """Processors that work on one tile each (streaming multiprocessors)."""
    rows: int
    columns: int
    """Of the tile of the result that one processor makes."""
    fill: int
    """Steps of the inner dimension that starting and ending a tile cost."""
    most_splits: int = 1
    """Parts that the inner dimension may be cut into, to give all processors work (split-K)."""
    keys: int = 0
    """Keys that attention reads at once; a query's last block of them is half empty on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of accelerator."""

    name: str
    compute: DeviceKind
    """gpu or cpu."""
    bf16_flops_per_s: float
    """Dense (without sparsity)."""
    fp32_flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: float
    gpus_per_node: int
    launch_s: float
    """Fixed part of a kernel on the device's own queue."""
    links: Mapping[DeviceKind, Link]
    """nvlink, network and pcie."""
    tiles: Tiles
    efficiency: Mapping[str, Efficiency] = field(default_factory=dict)
    """By kind, or by `kind.phase` for that phase alone; absent: all of the rates."""

    def flops_per_s(self, dtype_bytes: int) -> float:
        """Peak of products of numbers of so many bytes."""
        return self.bf16_flops_per_s if dtype_bytes <= 2 else self.fp32_flops_per_s

    def efficiency_of(self, kind: OpKind, phase: Phase) -> Efficiency:
        """What an operator reaches at best."""
        found = self.efficiency.get(f"{kind}.{phase}") or self.efficiency.get(kind)
        return found or Efficiency()


@lru_cache(maxsize=64)
def load_hardware(name: str) -> Hardware:
    """A profile by its name, as `h800`, or by the path of a TOML file.

    Raises: ConfigError: no such profile, an unknown or missing key, a wrong type, or a number out of range.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not os.path.isfile(path) or name == "defaults":  # false of names that cannot exist, too
        known = ", ".join(hardware_names())
        raise ConfigError(f"hardware {shown(name)} does not exist; name one of {known}, or a TOML file")
    return _hardware(_read(path, ()), path)


def hardware_names() -> tuple[str, ...]:
    """The names of the profiles that come with mmtrain."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem != "defaults"))


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    if path in seen:
        raise ConfigError(f"{path.name}: `extends` goes in a circle: {' -> '.join(p.name for p in (*seen, path))}")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a readable TOML file: {error}") from error
    base = table.pop("extends", None)
    if base is None:
        return table
    places = [place / f"{base}.toml" for place in (path.parent, FOLDER)]
    found = next((place for place in places if place.is_file()), None)
    if not isinstance(base, str) or found is None:
        raise ConfigError(f"{path}: extends = {base!r}; name a profile beside it, or one that comes with mmtrain")
    return _merge(_read(found, (*seen, path)), table)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _merge(out[key], value) if both else value
    return out


def _hardware(table: dict[str, Any], path: Path) -> Hardware:
    where = str(path)
    links, efficiency = table.pop("links", {}), table.pop("efficiency", {})
    tiles = _part(Tiles, table.pop("tiles", {}), f"{where}: tiles")
    compute = table.pop("compute", "gpu")
    if compute not in ("gpu", "cpu"):
        raise ConfigError(f"{where}: compute = {compute!r}; it is gpu or cpu")
    wanted = {"nvlink", "network", "pcie"}
    if not isinstance(links, dict) or set(links) != wanted:
        raise ConfigError(f"{where}: [links] must have just {', '.join(sorted(wanted))}")
    hardware: Hardware = _part(
        Hardware,
        {"name": path.stem, **table},
        where,
        compute=DeviceKind(compute),
        links={DeviceKind(key): _part(Link, value, f"{where}: links.{key}") for key, value in links.items()},
        tiles=tiles,
        efficiency=_efficiencies(efficiency, f"{where}: efficiency"),
    )
    return hardware


def _efficiencies(table: Any, where: str) -> dict[str, Efficiency]:
    """`[efficiency.KIND]`, and in it a table for a phase that differs."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where} = {table!r}; it is a section")
    kinds, phases = {kind.value for kind in OpKind}, {phase.value for phase in Phase}
    out = {}
    for kind, entry in table.items():
        if kind not in kinds or not isinstance(entry, dict):
            raise ConfigError(f"{where}.{kind}: name a section after one of {', '.join(sorted(kinds))}")
        own = {key: value for key, value in entry.items() if key not in phases}
        out[kind] = _part(Efficiency, own, f"{where}.{kind}")
        for phase in phases & set(entry):
            out[f"{kind}.{phase}"] = _part(Efficiency, {**own, **entry[phase]}, f"{where}.{kind}.{phase}")
    for key, value in out.items():
        for name in ("compute", "memory", "network"):
            if getattr(value, name) > 1:
                raise ConfigError(f"{where}.{key}.{name} = {getattr(value, name)}; nothing reaches more than 1")
    return out


def _part(cls: type, table: Any, where: str, **given: Any) -> Any:
    """A dataclass from a table: each key known, of the right type and in range, and none missing."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where} = {table!r}; it is a section")
    fields = {f.name: f for f in dataclasses.fields(cls) if f.name not in given}
    values: dict[str, Any] = dict(given)
    for key, value in table.items():
        if key not in fields:
            raise ConfigError(f"{where}: unknown key {key}; there are {', '.join(fields)}")
        wanted = fields[key].type
        if wanted in (float, int):
            number = type(value) is int or (wanted is float and type(value) is float)
            least = "at least 0" if key in _MAY_BE_ZERO else "above 0"
            if not number or not 0 <= value < math.inf or (not value and key not in _MAY_BE_ZERO):
                kind = "an integer" if wanted is int else "a finite number"
                raise ConfigError(f"{where}.{key} = {value!r}; it must be {kind} {least}")
        if wanted is str and not isinstance(value, str):
            raise ConfigError(f"{where}.{key} = {value!r}; it must be a string")
        values[key] = value
    missing = [
        name
        for name, f in fields.items()
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{where}: the key {missing[0]} is missing")
    return cls(**values)
