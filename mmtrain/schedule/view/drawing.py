"""The layout of a timeline's drawing: shapes that any format can paint."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.timeline import Row, Timeline

Colour = str
"""A colour as #rrggbb."""

COLOURS: tuple[dict[Kind, Colour], ...] = (
    {Kind.F: "#9ecae1", Kind.B: "#2b6ca3", Kind.I: "#4a90c4", Kind.W: "#c9dfee"},
    {Kind.F: "#fdbe85", Kind.B: "#c2500a", Kind.I: "#e88440", Kind.W: "#fde3c8"},
    {Kind.F: "#a8d8a4", Kind.B: "#2c7a3a", Kind.I: "#5aa864", Kind.W: "#d8eed6"},
    {Kind.F: "#cbbde0", Kind.B: "#65459b", Kind.I: "#8f74bb", Kind.W: "#e6dff0"},
    {Kind.F: "#e39ac0", Kind.B: "#a3295c", Kind.I: "#c4608f", Kind.W: "#f4dbe8"},
    {Kind.F: "#7fd0da", Kind.B: "#1b7f8c", Kind.I: "#4da7b2", Kind.W: "#d3eff2"},
)
"""One hue a module: forward is light, backward dark, I and W in between."""
INSTRUCTION_COLOUR: Colour = "#7b8794"
"""The colour of the instructions of a recipe, whatever their module."""
_DARK = frozenset({Kind.B, Kind.I})
_KIND_WORDS = {Kind.F: "forward", Kind.B: "backward", Kind.I: "backward, input", Kind.W: "backward, weight"}

INK = "#1f2933"
GRID = "#d5dae0"
IDLE = "#f3f4f6"
PAPER = "#ffffff"

_LEFT, _RIGHT, _TOP, _ROW, _GAP, _AXIS = 64, 20, 62, 38, 8, 44
_MOST_BANDS = 6
_READABLE = 14
"""Width in pixels of an action that holds a two-digit number."""
_CHAR = 0.6
"""Width of a digit over the font size, slightly too large for the fonts in use."""


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    fill: Colour
    title: str = ""
    """The tooltip, in formats that have them."""


@dataclass(frozen=True, slots=True)
class Label:
    """One line of text, vertically centred at y."""

    x: float
    y: float
    text: str
    size: int
    anchor: Literal["start", "middle", "end"]
    colour: Colour = INK


@dataclass(frozen=True, slots=True)
class Drawing:
    """Shapes to be painted in order on white paper."""

    width: int
    height: int
    shapes: tuple[Box | Label, ...]


def layout(timeline: Timeline, *, width: int = 1600, title: str = "", span_s: float = 0.0, bands: int = 0) -> Drawing:
    """The drawing of a timeline: one row a rank, a box an action, a legend above, a time axis below.

    Where half of the actions would be too narrow for their number, time is cut into several bands below each other.

    Args: span_s, bands: time range and number of bands; 0: as the timeline needs.
    """
    inner = width - _LEFT - _RIGHT
    count = bands or num_bands(timeline, inner)
    band_s = (span_s or timeline.makespan_s) / count
    scale = inner / band_s if band_s > 0 else 0.0
    band_height = timeline.num_ranks * (_ROW + _GAP) + _AXIS
    shapes: list[Box | Label] = [Label(_LEFT, 18, title or headline(timeline), 14, "start")]
    shapes += _legend(timeline)
    stages: dict[tuple[int, str], set[int]] = {}
    for row in timeline.rows:
        for part in row.action.parts:
            stages.setdefault((row.rank, timeline.stage_modules[part.stage]), set()).add(part.stage)
    for number in range(count):
        band = _Band(number * band_s, (number + 1) * band_s, _TOP + number * band_height, scale)
        shapes += _axis(timeline, band, last=number == count - 1)
        for rank in range(timeline.num_ranks):
            y = band.top + rank * (_ROW + _GAP)
            shapes.append(Label(_LEFT - 8, y + _ROW / 2, f"rank {rank}", 12, "end"))
            shapes.append(Box(_LEFT, y, inner, _ROW, IDLE))
            for row in timeline.of_rank(rank):
                many = len(stages[rank, timeline.stage_modules[row.action.stage]]) > 1
                shapes += _action(timeline, row, band, y, many)
    return Drawing(width, _TOP + count * band_height, tuple(shapes))


def stacked(timelines: Mapping[str, Timeline], *, width: int = 1600) -> Drawing:
    """The drawings of several timelines below each other, at one scale of time. Args: timelines: by name."""
    span_s = max(timeline.makespan_s for timeline in timelines.values())
    bands = max(num_bands(timeline, width - _LEFT - _RIGHT) for timeline in timelines.values())
    shapes: list[Box | Label] = []
    height = 0
    for label, timeline in timelines.items():
        title = f"{label}: {headline(timeline)}"
        drawing = layout(timeline, width=width, title=title, span_s=span_s, bands=bands)
        shapes += [replace(shape, y=shape.y + height) for shape in drawing.shapes]
        height += drawing.height
    return Drawing(width, height, tuple(shapes))


class _Band(NamedTuple):
    """A stretch of time, in seconds from the first start, and where it is drawn."""

    low_s: float
    high_s: float
    top: int
    scale: float
    """Pixels a second."""


def num_bands(timeline: Timeline, width: int, readable: int = _READABLE) -> int:
    """The bands in which half of the actions are at least `readable` of `width` long; 1 to `_MOST_BANDS`."""
    lengths = sorted(row.end_s - row.start_s for row in timeline.rows)
    median = lengths[len(lengths) // 2] if lengths else 0.0
    return min(_MOST_BANDS, math.ceil(readable * timeline.makespan_s / median / width)) if median > 0 else 1


def _action(timeline: Timeline, row: Row, band: _Band, y: float, many: bool) -> Iterator[Box | Label]:
    """The part of an action within a band; the longer part has the label."""
    start, end = row.start_s - timeline.start_s, row.end_s - timeline.start_s
    low, high = max(start, band.low_s), min(end, band.high_s)
    if high < low or (high == low and (start < low or low == band.high_s < timeline.makespan_s)):
        return
    x, w = _LEFT + (low - band.low_s) * band.scale, (high - low) * band.scale
    tip = f"{name(timeline, row.action)}: {seconds(row.start_s)} to {seconds(row.end_s)}"
    height = _ROW / len(row.action.parts)  # the parts of a braid lie above each other
    for number, part in enumerate(row.action.parts):
        # A thin gap between neighbours, but no invisible action.
        module, top = timeline.stage_modules[part.stage], y + number * height
        yield Box(x, top, max(w - 1.0, 0.6), height, colour(timeline, module, part.kind), tip)
        text, size = _longest_that_fits(part, w - 3, many=many, mark=mark(timeline, part))
        if text:
            ink = PAPER if part.kind in _DARK else INK
            yield Label(x + w / 2, top + height / 2, text, size, "middle", ink)


def headline(timeline: Timeline) -> str:
    """One line: ranks, makespan, bubble and, if known, the largest peak."""
    text = f"{timeline.num_ranks} ranks, makespan {seconds(timeline.makespan_s)}"
    text += f", bubble {100 * timeline.bubble:.1f} %"
    if timeline.peak_bytes:
        text += f", peak of activations {size(max(timeline.peak_bytes))}"
    return text


def colour(timeline: Timeline, module: str, kind: Kind) -> Colour:
    """The fill of one kind of action of a module."""
    names = list(dict.fromkeys(timeline.stage_modules))
    return COLOURS[names.index(module) % len(COLOURS)].get(kind, INSTRUCTION_COLOUR)


def name(timeline: Timeline, action: Action) -> str:
    """The text of an action: `F3.0 language s5`; `F3.1> vision s0`: of a work that feeds the next microbatch."""
    return " & ".join(
        f"{part.kind}{part.microbatch}.{part.sub_microbatch}{mark(timeline, part)} "
        f"{timeline.stage_modules[part.stage]} s{part.stage}"
        for part in action.parts
    )


def mark(timeline: Timeline, action: Action) -> str:
    """`>` behind the number of a work that feeds another microbatch; else empty."""
    return ">" if timeline.is_deferred(action) else ""


def seconds(value: float) -> str:
    """Seconds in a suitable unit."""
    if value == 0:
        return "0 s"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * factor >= 1 or unit == "us":
            return f"{value * factor:.4g} {unit}"
    raise AssertionError("the last unit always suits")


def round_step(rough: float) -> float:
    """The least of 1, 2, 5 times a power of ten that is at least `rough`; 1 for 0."""
    if rough <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))


def size(amount: float) -> str:
    """Bytes in a suitable unit."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if amount >= 2**power:
            return f"{amount / 2**power:.4g} {unit}"
    return f"{amount:.4g} B"


def _longest_that_fits(action: Action, width: float, many: bool, mark: str) -> tuple[str, int]:
    """The longest of `5.1 s3` (where the rank has many stages of the module), `5.1` and `5`, each with its mark, and
    its size."""
    microbatch = f"{action.microbatch}{mark}"
    whole = f"{action.microbatch}.{action.sub_microbatch}{mark}" if action.sub_microbatch else microbatch
    texts = [f"{whole} s{action.stage}"] * many + [whole, microbatch]
    for text, size in [*((text, 11) for text in texts), (microbatch, 9)]:
        if len(text) * size * _CHAR <= width:
            return text, size
    return "", 0


def _legend(timeline: Timeline) -> Iterator[Box | Label]:
    kinds = {(timeline.stage_modules[part.stage], part.kind) for row in timeline.rows for part in row.action.parts}
    x, y = float(_LEFT), 32
    for module in dict.fromkeys(timeline.stage_modules):
        for kind in (*_KIND_WORDS, *sorted({kind for _, kind in kinds} - _KIND_WORDS.keys())):
            if (module, kind) in kinds:
                text = f"{module} {_KIND_WORDS.get(kind, kind)}"
                yield Box(x, y, 14, 14, colour(timeline, module, kind))
                yield Label(x + 20, y + 7, text, 12, "start")
                x += 20 + len(text) * 12 * 0.56 + 22


def _axis(timeline: Timeline, band: _Band, *, last: bool) -> Iterator[Box | Label]:
    """Ticks of one band; the tick at its end belongs to the next band, if there is one."""
    if not band.scale:
        return
    bottom = band.top + timeline.num_ranks * (_ROW + _GAP)
    step = round_step((band.high_s - band.low_s) / 10)
    first = math.ceil(band.low_s / step - 1e-9)
    for tick in range(first, math.floor(band.high_s / step + (1e-9 if last else -1e-9)) + 1):
        x = _LEFT + (tick * step - band.low_s) * band.scale
        yield Box(x, band.top - 4, 1, bottom - band.top + 4, GRID)
        yield Label(x, bottom + 12, seconds(tick * step), 11, "middle")
