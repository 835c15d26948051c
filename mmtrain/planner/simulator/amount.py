"""A linear function of a work's size: FLOPs, bytes or rows of one operator, or bytes of one tensor. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmtrain.models.spec import ZERO_WORK, Rates, WorkSize

Coefficients = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """A constant plus so much per row, attended pair, output row and pair attended inside of windows."""

    fixed: float = 0.0
    row: float = 0.0
    pair: float = 0.0
    output: float = 0.0
    window_pair: float = 0.0

    def __call__(self, size: WorkSize = ZERO_WORK) -> float:
        pairs = self.pair * size.pairs + self.window_pair * size.window_pairs
        return self.fixed + self.row * size.rows + pairs + self.output * size.outputs

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(
            fixed=self.fixed + other.fixed,
            row=self.row + other.row,
            pair=self.pair + other.pair,
            output=self.output + other.output,
            window_pair=self.window_pair + other.window_pair,
        )

    def __mul__(self, factor: float) -> "Amount":
        return Amount(
            fixed=self.fixed * factor,
            row=self.row * factor,
            pair=self.pair * factor,
            output=self.output * factor,
            window_pair=self.window_pair * factor,
        )

    __rmul__ = __mul__

    @property
    def rates(self) -> Rates:
        """The same without the constant."""
        return Rates(row=self.row, pair=self.pair, output=self.output, window_pair=self.window_pair)


NOTHING = Amount()


def coefficients(amounts: Iterable[Amount]) -> Coefficients:
    """[amounts, 5]: times `values(size)` it gives all of them at once."""
    rows = [(a.fixed, a.row, a.pair, a.output, a.window_pair) for a in amounts]
    return np.array(rows, dtype=np.float64).reshape(-1, 5)


def values(size: WorkSize) -> Coefficients:
    """[5]: what `coefficients` are multiplied with."""
    return np.array((1.0, size.rows, size.pairs, size.outputs, size.window_pairs), dtype=np.float64)
