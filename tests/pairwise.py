"""Selections of cases that are few, and still hold every pair of choices."""

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Row = TypeVar("Row", bound=Hashable)


def covering(
    rows: Sequence[Row], choices: Callable[[Row], Sequence[Hashable]], cost: Callable[[Row], float]
) -> list[Row]:
    """The fewest rows found, in order, in which each pair of choices occurs together that occurs in any row.

    Greedy: the row with most uncovered pairs for its cost comes next; ties go to the earlier row.

    Args: choices: what a row chooses, in every dimension; equal values of different dimensions differ.
    """
    pairs = {row: set(itertools.combinations(enumerate(choices(row)), 2)) for row in rows}
    missing = set().union(*pairs.values())
    found = set()
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing) / cost(row))
        missing -= pairs[best]
        found.add(best)
    return [row for row in rows if row in found]
