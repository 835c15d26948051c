"""Random choices of which each is equally frequent. Pure."""

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Decks:
    """Decks of cards by their names; each contains each of its choices once, and is refilled when empty."""

    def __init__(self, source: random.Random) -> None:
        """Args: source: shuffles the cards."""
        self._random = source
        self._cards: dict[str, list[object]] = {}

    def draw(self, deck: str, choices: Sequence[T]) -> T:
        """The next card of a deck. Args: choices: those of this deck, the same in each call."""
        cards = self._cards.setdefault(deck, [])
        if not cards:
            cards.extend(choices)
            self._random.shuffle(cards)
        return cards.pop()  # type: ignore[return-value]
