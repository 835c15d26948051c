"""Figures of a validation: by which one it is compared with others, and a metric of the user's own."""

import re
from dataclasses import dataclass

from mmtrain.config.toml_sections import shown
from mmtrain.errors import ConfigError

LOWEST = {"loss": True, "accuracy": False, "exact_match": False}
"""Figures that a validation may have without a metric of the user's own -> whether the lowest one is the best."""

_FIGURE = re.compile(r"(?:(?P<best>lowest|highest) )?(?P<name>[\w.-]{1,100})")
_METRIC = re.compile(r"(?P<path>.+\.py):(?P<function>[^\W\d]\w*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number of a validation, and which of two values is better."""

    name: str
    lowest: bool

    @classmethod
    def parse(cls, key: str, text: str) -> "Figure":
        """The figure of a text such as "loss", "exact_match" or "lowest NAME".

        Args: key: how errors call it. Raises: ConfigError: another form.
        """
        match = _FIGURE.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"{key} = {shown(text)}; write {', '.join(LOWEST)} or a name of the numbers of validation.metric, with "
                '"lowest " or "highest " before it where that is not what the name stands for'
            )
        lowest = LOWEST.get(match["name"], False) if match["best"] is None else match["best"] == "lowest"
        return cls(name=match["name"], lowest=lowest)

    @property
    def text(self) -> str:
        """The figure as it is written, with its direction."""
        return f"{'lowest' if self.lowest else 'highest'} {self.name}"

    def better(self, value: float, than: float | None) -> bool:
        """Whether a value is better than another one, or the first. NaN is better than none."""
        return value == value and (than is None or (value < than if self.lowest else value > than))


def metric_file(text: str) -> tuple[str, str]:
    """Path and function of `validation.metric`. The file is not opened.

    Raises: ConfigError: it is not of the form FILE.py:FUNCTION, or an address.
    """
    match = _METRIC.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"validation.metric = {shown(text)}; write PATH:FUNCTION, a Python file and the name of its function"
        )
    if "://" in text:
        raise ConfigError(
            f"validation.metric = {shown(text)} is an address; a metric is a program, so it is run from a local file"
        )
    return match["path"], match["function"]
