"""Hardware profiles: rates and sizes of accelerators and their nodes, from strict TOML. Pure.

A profile has the rates of the vendor's data sheet, and the fraction of them that each kind of operator reaches.
`extends = "other"` inherits the keys of another profile.
"""

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from mmtrain.config.toml_sections import merged_tables, shown
from mmtrain.config.toml_text import read_toml
from mmtrain.costs.operators.operator_graph import DeviceKind, OpKind, Phase
from mmtrain.costs.overheads import NO_OVERHEADS, Overheads
from mmtrain.errors import ConfigError, nearest

FOLDER = Path(__file__).resolve().parents[1] / "hardware"
"""The profiles that come with mmtrain."""


_MAY_BE_ZERO = ("launch_s", "latency_s", "fill", "keys", "contention", *(f.name for f in dataclasses.fields(Overheads)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """The largest fraction of a device's rates that a kind of operator reaches: the inverse of DIP's factors a."""

    compute: float = 1.0
    """The share of the peak rate of FLOPs, 1 / a_fop."""
    memory: float = 1.0
    """The share of the memory's rate, 1 / a_mem."""
    network: float = 1.0
    """The share of a link's rate, 1 / a_net."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLink:
    """A link between two accelerators, or between one and its host."""

    bytes_per_s: float
    """Rate of one accelerator in one direction."""
    latency_s: float
    """Fixed part of a message or collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How a device divides a matrix product into tiles: see `latency.product_efficiency`."""

    units: int
    """Processors that work on one tile each (streaming multiprocessors)."""
    rows: int
    columns: int
    """Rows and columns of the tile of the result that one processor computes."""
    fill: int
    """Overhead of starting and ending a tile, in steps of the inner dimension."""
    most_splits: int = 1
    """Largest number of parts of the inner dimension, which give all processors work (split-K)."""
    keys: int = 0
    """Keys that attention reads at once; a query's last block of them is half empty on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of accelerator."""

    name: str
    compute: DeviceKind
    """The kind of device that computes: gpu or cpu."""
    bf16_flops_per_s: float
    """Peak rate in bfloat16, dense (without sparsity)."""
    fp32_flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: float
    gpus_per_node: int
    launch_s: float
    """Fixed seconds of a kernel on the device's queue."""
    links: Mapping[DeviceKind, DeviceLink]
    """The links by kind: nvlink, network and pcie."""
    tiles: Tiles
    efficiency: Mapping[str, Efficiency] = field(default_factory=dict)
    """The efficiency of each operator kind, or `kind.phase` for that phase alone; absent: all of the rates."""
    contention: float = 1.0
    """Seconds that compute and an exchange at one time take beyond the longer of both, as a share of the shorter; 1:
    nothing is hidden."""
    overheads: Overheads = NO_OVERHEADS
    """What the host adds to actions and messages; absent: it runs ahead of its device."""

    def flops_per_s(self, dtype_bytes: int) -> float:
        """Peak rate of products. Args: dtype_bytes: bytes of an element."""
        return self.bf16_flops_per_s if dtype_bytes <= 2 else self.fp32_flops_per_s

    def efficiency_of(self, kind: OpKind, phase: Phase) -> Efficiency:
        """The fractions of the peak rates that an operator reaches."""
        efficiency = self.efficiency.get(f"{kind}.{phase}") or self.efficiency.get(kind)
        return efficiency or Efficiency()


@lru_cache(maxsize=64)
def load_hardware(name: str) -> Hardware:
    """A profile by its name, as `h800`, or by the path of a TOML file.

    Raises: ConfigError: the profile does not exist, has an unknown or missing key, a wrong type, or a number out of
        range.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not os.path.isfile(path) or name == "defaults":  # false of names that cannot exist, too
        near = nearest(name, hardware_names())
        hint = f"; did you mean {near[0]}?" if near else ""
        names = ", ".join(hardware_names())
        raise ConfigError(f"hardware {shown(name)} does not exist; name one of {names}, or a TOML file{hint}")
    return _hardware(_read(path, ()), path)


def hardware_names() -> tuple[str, ...]:
    """The names of the profiles that come with mmtrain."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem != "defaults"))


def hardware_of_device(device_name: str) -> Hardware | None:
    """The profile whose name is a word of a device's name, such as "NVIDIA H100 80GB HBM3"; None: it is unknown."""
    words = re.findall(r"\w+", device_name.lower())
    name = next((name for name in hardware_names() if name in words), None)
    return load_hardware(name) if name else None


def _read(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    if path in chain:
        raise ConfigError(f"{path.name}: `extends` goes in a circle: {' -> '.join(p.name for p in (*chain, path))}")
    try:
        table = read_toml(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; name a TOML file") from None
    base = table.pop("extends", None)
    if base is None:
        return table
    candidates = [folder / f"{base}.toml" for folder in (path.parent, FOLDER)]
    base_path = next((folder for folder in candidates if folder.is_file()), None)
    if not isinstance(base, str) or base_path is None:
        raise ConfigError(
            f"{path}: extends = {base!r}; name a profile in the same folder, or one that comes with mmtrain"
        )
    return merged_tables(_read(base_path, (*chain, path)), table)


def _hardware(table: dict[str, Any], path: Path) -> Hardware:
    where = str(path)
    links, efficiency = table.pop("links", {}), table.pop("efficiency", {})
    tiles = _from_table(Tiles, table.pop("tiles", {}), f"{where}: tiles")
    overheads = _from_table(Overheads, table.pop("overheads", {}), f"{where}: overheads")
    compute = table.pop("compute", "gpu")
    if compute not in ("gpu", "cpu"):
        raise ConfigError(f"{where}: compute = {compute!r}; it is gpu or cpu")
    kinds = {"nvlink", "network", "pcie"}
    if not isinstance(links, dict) or set(links) != kinds:
        raise ConfigError(f"{where}: [links] must have just {', '.join(sorted(kinds))}")
    hardware: Hardware = _from_table(
        Hardware,
        {"name": path.stem, **table},
        where,
        compute=DeviceKind(compute),
        links={
            DeviceKind(key): _from_table(DeviceLink, value, f"{where}: links.{key}") for key, value in links.items()
        },
        tiles=tiles,
        overheads=overheads,
        efficiency=_efficiencies(efficiency, f"{where}: efficiency"),
    )
    if hardware.contention > 1:
        raise ConfigError(
            f"{where}.contention = {hardware.contention}; it must be between 0 (exchanges run during compute for "
            "nothing) and 1 (after it)"
        )
    return hardware


def _efficiencies(table: Any, where: str) -> dict[str, Efficiency]:
    """The efficiencies of `[efficiency.KIND]` and its sub-tables `[efficiency.KIND.PHASE]`."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where} = {table!r}; it is a section")
    kinds, phases = {kind.value for kind in OpKind}, {phase.value for phase in Phase}
    efficiencies = {}
    for kind, entry in table.items():
        if kind not in kinds or not isinstance(entry, dict):
            raise ConfigError(f"{where}.{kind}: name a section after one of {', '.join(sorted(kinds))}")
        for_all_phases = {key: value for key, value in entry.items() if key not in phases}
        efficiencies[kind] = _from_table(Efficiency, for_all_phases, f"{where}.{kind}")
        for phase in phases & set(entry):
            efficiencies[f"{kind}.{phase}"] = _from_table(
                Efficiency, {**for_all_phases, **entry[phase]}, f"{where}.{kind}.{phase}"
            )
    for key, value in efficiencies.items():
        for name in ("compute", "memory", "network"):
            if getattr(value, name) > 1:
                raise ConfigError(f"{where}.{key}.{name} = {getattr(value, name)}; nothing reaches more than 1")
    return efficiencies


def _from_table(cls: type, table: Any, where: str, **fixed_values: Any) -> Any:
    """A dataclass from a table: each key known, of the right type and in range, and none missing."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where} = {table!r}; it is a section")
    fields = {f.name: f for f in dataclasses.fields(cls) if f.name not in fixed_values}
    values: dict[str, Any] = dict(fixed_values)
    for key, value in table.items():
        if key not in fields:
            raise ConfigError(f"{where}: unknown key {key}; there are {', '.join(fields)}")
        expected = fields[key].type
        if expected in (float, int):
            number = type(value) is int or (expected is float and type(value) is float)
            bound = "at least 0" if key in _MAY_BE_ZERO else "above 0"
            if not number or not 0 <= value < math.inf or (not value and key not in _MAY_BE_ZERO):
                kind = "an integer" if expected is int else "a finite number"
                raise ConfigError(f"{where}.{key} = {value!r}; it must be {kind} {bound}")
        if expected is str and not isinstance(value, str):
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
