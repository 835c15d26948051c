"""Intervals of a job, in steps or in epochs."""

import re
from dataclasses import dataclass
from fractions import Fraction

from mmtrain.config.bounds import MOST_INTEGER
from mmtrain.config.toml_sections import shown
from mmtrain.errors import ConfigError

_FORM = re.compile(r"(?P<number>\d{1,10}(?:\.\d{1,9})?) (?P<unit>step|epoch)s?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """How often something is done: each so many steps, or each so many epochs; one of the two is above 0."""

    steps: int = 0
    epochs: Fraction = Fraction(0)

    @classmethod
    def parse(cls, key: str, value: int | str) -> "Interval":
        """The interval that a value stands for: 50 or "50 steps", "2 epochs", "0.5 epochs".

        Args: key: how errors call it.
        Raises: ConfigError: another form, nothing, or a part of a step.
        """
        match = _FORM.fullmatch(value) if isinstance(value, str) else None
        if match is None and isinstance(value, str):
            raise ConfigError(
                f'{key} = {shown(value)}; write a number of steps, as 50, or a number of epochs, as "0.5 epochs"'
            )
        number = Fraction(match["number"]) if match else Fraction(value)
        in_epochs = match is not None and match["unit"] == "epoch"
        if not (number > 0 if in_epochs else number >= 1 and number.denominator == 1) or number > MOST_INTEGER:
            raise ConfigError(
                f"{key} = {shown(value)}; it must be a whole number of steps from 1, or a number of epochs above 0, "
                f"at most {MOST_INTEGER}"
            )
        return cls(epochs=number) if in_epochs else cls(steps=int(number))

    def count(self, step: int, epochs: Fraction) -> int:
        """How many whole intervals there are up to a point of the job. Args: step, epochs: that are done there."""
        return step // self.steps if self.steps else epochs // self.epochs
