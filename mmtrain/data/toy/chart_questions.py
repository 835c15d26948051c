"""Conversations about charts: the answer is drawn first, then a chart for it.

Answers come from decks (every answer of a question equally often), and image sizes are drawn independently of them, so
that without the image a uniform guess is optimal.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmtrain.data.toy.chart_drawing import KINDS, MAX_VALUE, ChartKind, DrawnChart
from mmtrain.data.toy.data_set import COLOURS
from mmtrain.data.toy.decks import Decks

GRADES = ("easy", "medium", "hard", "text")
GRADE_SHARES = (10, 4, 3, 3)
"""Samples of each grade, in twentieths."""

SMALLEST_SIDE, LARGEST_SIDE = 56, 168
"""Side in pixels of a single image."""
LARGEST_SIDE_OF_MANY = 112
"""Side in pixels of one of several images of a conversation."""

_NAMES = tuple(COLOURS)
_COUNTS = (2, 3, 4, 5, 6)
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
_MARKS = {"bar": "bar", "line": "point", "pie": "slice"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Charts, the turns about them, and their difficulty."""

    charts: tuple[DrawnChart, ...]
    turns: tuple[tuple[str, str], ...]
    """The questions and their answers, without placeholders."""
    grade: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The turns as chat messages; before the first question an `<image>` placeholder for each chart."""
        if len(self.charts) > 1:
            markers = "".join(f"Picture {i + 1}: <image>\n" for i in range(len(self.charts)))
        else:
            markers = "<image>\n" * len(self.charts)
        out = []
        for index, (question, answer) in enumerate(self.turns):
            out.append({"role": "user", "content": question if index else markers + question})
            out.append({"role": "assistant", "content": answer})
        return out


class ConversationMaker:
    """Makes conversations in order; the sequence depends only on the seed text."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._draw = Decks(self._random).draw
        self._makers: dict[str, tuple[Callable[[], Conversation], ...]] = {
            "easy": (self._kind, self._colour, self._count, self._kind_then_count),
            "medium": (
                self._extreme_colour,
                self._trend,
                self._taller,
                self._kind_of_image,
                self._colour_of_image,
            ),
            "hard": (
                self._value,
                self._difference,
                self._tallest,
                self._which_image,
                self._count_of_image,
            ),
            "text": (self._sum, self._minus, self._next_number, self._count_words),
        }

    def __call__(self) -> Conversation:
        """The next conversation."""
        shares = [g for g, share in zip(GRADES, GRADE_SHARES, strict=True) for _ in range(share)]
        grade = self._draw("grade", shares)
        index = self._draw(f"question {grade}", range(len(self._makers[grade])))
        return self._makers[grade][index]()

    # ------------------------------------------------------------------------------------ random parts

    def _size(self, largest: int = LARGEST_SIDE) -> tuple[int, int]:
        return self._random.randint(SMALLEST_SIDE, largest), self._random.randint(SMALLEST_SIDE, largest)

    def _chart(
        self,
        kind: ChartKind,
        values: Sequence[int],
        colours: Sequence[str] | None = None,
        largest: int = LARGEST_SIDE,
    ) -> DrawnChart:
        """A chart of random size; without colours: one for all bars, distinct ones for slices."""
        if colours is None:
            one = self._random.choice(_NAMES)
            colours = self._random.sample(_NAMES, len(values)) if kind == "pie" else [one] * len(values)
        width, height = self._size(largest)
        return DrawnChart(kind=kind, values=tuple(values), colours=tuple(colours), width=width, height=height)

    def _values(self, kind: ChartKind, count: int) -> list[int]:
        # With a thin slice or a low bar, counting would depend on the resolution.
        lowest = 3 if kind == "pie" else 2
        return [self._random.randint(lowest, MAX_VALUE) for _ in range(count)]

    def _any_chart(self, kind: ChartKind | None = None, largest: int = LARGEST_SIDE, colour: str = "") -> DrawnChart:
        chosen: ChartKind = self._random.choice(KINDS) if kind is None else kind
        count = self._random.choice(_COUNTS)
        return self._chart(chosen, self._values(chosen, count), [colour] * count if colour else None, largest)

    def _one(self, grade: str, chart: DrawnChart, question: str, answer: object) -> Conversation:
        return Conversation(charts=(chart,), turns=((question, str(answer)),), grade=grade)

    # ------------------------------------------------------------------------------------ easy

    def _kind(self) -> Conversation:
        chart = self._any_chart(self._draw("kind", KINDS))
        return self._one("easy", chart, "What kind of chart is this?", chart.kind)

    def _colour(self) -> Conversation:
        kind = self._draw("kind of colour", ("bar", "line"))
        colour = self._draw(f"colour {kind}", _NAMES)
        question = "What colour are the bars?" if kind == "bar" else "What colour is the line?"
        return self._one("easy", self._any_chart(kind, colour=colour), question, colour)  # type: ignore[arg-type]

    def _count(self) -> Conversation:
        kind = self._draw("kind of count", KINDS)
        count = self._draw(f"count {kind}", _COUNTS)
        chart = self._chart(kind, self._values(kind, count))
        return self._one("easy", chart, f"How many {_MARKS[kind]}s are there?", count)

    def _kind_then_count(self) -> Conversation:
        kind = self._draw("kind before count", KINDS)
        count = self._draw(f"count after kind {kind}", _COUNTS)
        chart = self._chart(kind, self._values(kind, count))
        turns = (("What kind of chart is this?", kind), (f"How many {_MARKS[kind]}s are there?", str(count)))
        return Conversation(charts=(chart,), turns=turns, grade="easy")

    # ------------------------------------------------------------------------------------ medium

    def _extreme_colour(self) -> Conversation:
        kind: ChartKind = self._draw("kind of extreme", ("bar", "pie"))
        largest = self._draw(f"largest {kind}", (True, False))
        answer = self._draw(f"extreme colour {kind} {largest}", _NAMES)
        count = self._random.randint(2, 5)
        index = self._random.randrange(count)
        others = self._random.sample([name for name in _NAMES if name != answer], count - 1)
        values = [self._random.randint(3, 6) for _ in range(count)]
        values[index] = MAX_VALUE if largest else 1
        colours = [*others[:index], answer, *others[index:]]
        word = {"bar": ("tallest", "shortest"), "pie": ("largest", "smallest")}[kind][not largest]
        question = f"What colour is the {word} {_MARKS[kind]}?"
        return self._one("medium", self._chart(kind, values, colours), question, answer)

    def _trend(self) -> Conversation:
        answer = self._draw("trend", ("up", "down"))
        values = sorted(self._random.sample(range(1, MAX_VALUE + 1), self._random.choice(_COUNTS)))
        chart = self._chart("line", values if answer == "up" else values[::-1])
        return self._one("medium", chart, "Does the line go up or down?", answer)

    def _taller(self) -> Conversation:
        answer = self._draw("taller", ("yes", "no"))
        values = self._values("bar", self._random.choice(_COUNTS))
        low = self._random.randint(1, MAX_VALUE - 3)
        ends = (low, self._random.randint(low + 3, MAX_VALUE))
        values[0], values[-1] = ends[::-1] if answer == "yes" else ends
        return self._one("medium", self._chart("bar", values), "Is the first bar taller than the last bar?", answer)

    def _many(self) -> tuple[int, int]:
        """How many images (2 to 6), and which of them is asked about."""
        count = self._draw("pictures", _COUNTS)
        return count, self._draw(f"asked of {count}", range(count))

    def _kind_of_image(self) -> Conversation:
        count, index = self._many()
        answer = self._draw("kind of picture", KINDS)
        charts = [self._any_chart(answer if i == index else None, LARGEST_SIDE_OF_MANY) for i in range(count)]
        turns = ((f"In picture {index + 1}, what kind of chart is it?", answer),)
        return Conversation(charts=tuple(charts), turns=turns, grade="medium")

    def _colour_of_image(self) -> Conversation:
        count, index = self._many()
        answer = self._draw("colour of picture", _NAMES)
        charts = [self._any_chart("bar", LARGEST_SIDE_OF_MANY, answer if i == index else "") for i in range(count)]
        turns = ((f"In picture {index + 1}, what colour are the bars?", answer),)
        return Conversation(charts=tuple(charts), turns=turns, grade="medium")

    # ------------------------------------------------------------------------------------ hard

    def _value(self) -> Conversation:
        kind: ChartKind = self._draw("kind of value", ("bar", "line"))
        answer = self._draw(f"value {kind}", range(1, MAX_VALUE + 1))
        values = self._values(kind, self._random.choice(_COUNTS))
        index = self._random.randrange(len(values))
        values[index] = answer
        question = f"What is the value of the {_ORDINALS[index]} {_MARKS[kind]}?"
        return self._one("hard", self._chart(kind, values), question, answer)

    def _difference(self) -> Conversation:
        answer = self._draw("difference", range(1, 7))
        values = self._values("bar", self._random.choice(_COUNTS))
        values[-1] = self._random.randint(1, MAX_VALUE - answer)
        values[0] = values[-1] + answer
        question = "How much taller is the first bar than the last bar?"
        return self._one("hard", self._chart("bar", values), question, answer)

    def _tallest(self) -> Conversation:
        ordinal = self._draw("tallest", range(len(_ORDINALS)))
        values = [self._random.randint(1, MAX_VALUE - 2) for _ in _ORDINALS]
        values[ordinal] = MAX_VALUE
        return self._one("hard", self._chart("bar", values), "Which bar is the tallest?", _ORDINALS[ordinal])

    def _which_image(self) -> Conversation:
        count, index = self._many()
        kind = self._draw("kind to find", KINDS)
        others = [other for other in KINDS if other != kind]
        kinds = [kind if i == index else self._random.choice(others) for i in range(count)]
        charts = [self._any_chart(k, LARGEST_SIDE_OF_MANY) for k in kinds]
        turns = ((f"Which picture shows a {kind} chart?", f"picture {index + 1}"),)
        return Conversation(charts=tuple(charts), turns=turns, grade="hard")

    def _count_of_image(self) -> Conversation:
        count, index = self._many()
        answer = self._draw("count of picture", _COUNTS)
        charts = [self._any_chart("bar", LARGEST_SIDE_OF_MANY) for _ in range(count)]
        charts[index] = self._chart("bar", self._values("bar", answer), largest=LARGEST_SIDE_OF_MANY)
        turns = ((f"In picture {index + 1}, how many bars are there?", str(answer)),)
        return Conversation(charts=tuple(charts), turns=turns, grade="hard")

    # ------------------------------------------------------------------------------------ text

    def _text(self, question: str, answer: object) -> Conversation:
        return Conversation(charts=(), turns=((question, str(answer)),), grade="text")

    def _sum(self) -> Conversation:
        a, b = self._random.randint(0, 9), self._random.randint(0, 9)
        return self._text(f"What is {a} plus {b}?", a + b)

    def _minus(self) -> Conversation:
        answer = self._draw("minus", range(10))
        b = self._random.randint(0, 9)
        return self._text(f"What is {answer + b} minus {b}?", answer)

    def _next_number(self) -> Conversation:
        number = self._random.randint(0, 98)
        return self._text(f"Which number comes after {number}?", number + 1)

    def _count_words(self) -> Conversation:
        answer = self._draw("words", range(1, 7))
        words = " ".join(self._random.choice(_NAMES) for _ in range(answer))
        return self._text(f"How many words are here: {words}?", answer)
