"""A candidate of an allocation or of tuning: settings of a job, and nothing else. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmtrain.config.config import Config, value_of, with_values
from mmtrain.config.toml_sections import dump_table, shown


@dataclass(frozen=True)
class Candidate:
    """Values of some keys of a job's config, which lie over the config."""

    values: tuple[tuple[str, Any], ...] = ()
    """The values by dotted key, in the order in which they were set."""

    def having(self, values: Mapping[str, Any]) -> "Candidate":
        """The candidate with further values, or others of the same keys."""
        return Candidate(tuple({**dict(self.values), **values}.items()))

    def job(self, config: Config) -> Config:
        """The job that it makes of a config. Raises: ConfigError: the values do not fit together."""
        return with_values(config, dict(self.values))

    def difference(self, config: Config) -> dict[str, Any]:
        """Dotted key -> value, where it is not the config's."""
        return {key: value for key, value in self.values if value_of(config, key) != value}

    def toml(self, config: Config) -> str:
        """The candidate's difference as sections of a TOML file."""
        return toml_of(self.difference(config))

    def described(self, config: Config) -> str:
        """The candidate's difference in one line."""
        return ", ".join(f"{key} = {shown(value)}" for key, value in self.difference(config).items())


def toml_of(values: Mapping[str, Any]) -> str:
    """Sections of a TOML file. Args: values: dotted key -> value."""
    sections: dict[tuple[str, ...], dict[str, Any]] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        sections.setdefault(tuple(path), {})[last] = value
    lines: list[str] = []
    for section, table in sections.items():
        dump_table(table, section, lines)
    return "\n".join(lines).lstrip() + "\n" * bool(lines)
