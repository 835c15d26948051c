"""A linear function of a work's size: FLOPs, bytes or rows of one operator, or bytes of one tensor. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmtrain.spec.spec import ZERO_WORK, Rates, WorkSize

Coefficients = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """A constant plus so much for each of what a `WorkSize` counts."""

    fixed: float = 0.0
    row: float = 0.0
    pair: float = 0.0
    output: float = 0.0
    window_pair: float = 0.0
    cross_pair: float = 0.0
    text: float = 0.0
    clip: float = 0.0

    def __call__(self, size: WorkSize = ZERO_WORK) -> float:
        pairs = self.pair * size.pairs + self.window_pair * size.window_pairs
        total = self.fixed + self.row * size.rows + pairs + self.output * size.outputs
        return total + self.cross_pair * size.cross_pairs + self.text * size.texts + self.clip * size.clips

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(
            fixed=self.fixed + other.fixed,
            row=self.row + other.row,
            pair=self.pair + other.pair,
            output=self.output + other.output,
            window_pair=self.window_pair + other.window_pair,
            cross_pair=self.cross_pair + other.cross_pair,
            text=self.text + other.text,
            clip=self.clip + other.clip,
        )

    def __mul__(self, factor: float) -> "Amount":
        return Amount(
            fixed=self.fixed * factor,
            row=self.row * factor,
            pair=self.pair * factor,
            output=self.output * factor,
            window_pair=self.window_pair * factor,
            cross_pair=self.cross_pair * factor,
            text=self.text * factor,
            clip=self.clip * factor,
        )

    __rmul__ = __mul__

    @property
    def rates(self) -> Rates:
        """The same without the constant."""
        return Rates(
            row=self.row,
            pair=self.pair,
            output=self.output,
            window_pair=self.window_pair,
            cross_pair=self.cross_pair,
            text=self.text,
            clip=self.clip,
        )


NOTHING = Amount()


def coefficients(amounts: Iterable[Amount]) -> Coefficients:
    """[amounts, 8]: times `values(size)` it gives all of them at once."""
    rows = [(a.fixed, a.row, a.pair, a.output, a.window_pair, a.cross_pair, a.text, a.clip) for a in amounts]
    return np.array(rows, dtype=np.float64).reshape(-1, 8)


def values(size: WorkSize, of: int = 1) -> Coefficients:
    """[8]: what `coefficients` are multiplied with, for one of `of` equal works that the size is cut into."""
    counts = (size.rows, size.pairs, size.outputs, size.window_pairs, size.cross_pairs, size.texts, size.clips)
    return np.array((1.0, *(count / of for count in counts)), dtype=np.float64)
