"""Charts as values, and their drawing with Pillow: bold colours and thick marks, for tiny encoders."""

import math
from dataclasses import dataclass
from typing import Literal

from PIL import Image, ImageDraw

from mmtrain.data.toy.data_set import COLOURS

ChartKind = Literal["bar", "line", "pie"]

KINDS: tuple[ChartKind, ...] = ("bar", "line", "pie")
MAX_VALUE = 9
"""Values of bars and points are 1 .. 9; there is a grid line at every second unit."""

_WHITE, _BLACK, _GRID = (255, 255, 255), (0, 0, 0), (205, 205, 205)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnChart:
    """One chart and the size of its image."""

    kind: ChartKind
    values: tuple[int, ...]
    """Height of each bar or point, or weight of each slice, in order (slices clockwise from the top)."""
    colours: tuple[str, ...]
    """Name of each mark's colour; a line takes the first one."""
    width: int
    """Pixels."""
    height: int
    """Pixels."""

    def __post_init__(self) -> None:
        assert len(self.values) == len(self.colours), self
        assert all(1 <= value <= MAX_VALUE for value in self.values), self


def draw(chart: DrawnChart) -> Image.Image:
    """The RGB image of a chart; equal charts give equal pixels."""
    image = Image.new("RGB", (chart.width, chart.height), _WHITE)
    pen = ImageDraw.Draw(image)
    if chart.kind == "pie":
        _draw_pie(pen, chart)
        return image
    left, right = round(0.08 * chart.width), chart.width - 2
    top, bottom = round(0.04 * chart.height), chart.height - max(3, round(0.06 * chart.height))

    def y_of(value: float) -> float:
        return bottom - (bottom - top) * value / (MAX_VALUE + 0.5)

    for value in range(2, MAX_VALUE + 1, 2):
        pen.line([(left, y_of(value)), (right, y_of(value))], fill=_GRID, width=1)
    slot = (right - left) / len(chart.values)
    centres = [left + slot * (i + 0.5) for i in range(len(chart.values))]
    if chart.kind == "bar":
        for x, value, colour in zip(centres, chart.values, chart.colours, strict=True):
            pen.rectangle((x - 0.35 * slot, y_of(value), x + 0.35 * slot, bottom), fill=COLOURS[colour])
    else:
        points = [(x, y_of(value)) for x, value in zip(centres, chart.values, strict=True)]
        side, ink = min(chart.width, chart.height), COLOURS[chart.colours[0]]
        pen.line(points, fill=ink, width=max(3, side // 20), joint="curve")
        radius = max(4.0, side / 14)
        for x, y in points:
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=ink)
    pen.line([(left, top), (left, bottom), (right, bottom)], fill=_BLACK, width=2)
    return image


def _draw_pie(pen: ImageDraw.ImageDraw, chart: DrawnChart) -> None:
    radius = 0.46 * min(chart.width, chart.height)
    x, y = chart.width / 2, chart.height / 2
    total, start = sum(chart.values), -90.0
    borders = []
    for value, colour in zip(chart.values, chart.colours, strict=True):
        end = start + 360 * value / total
        pen.pieslice((x - radius, y - radius, x + radius, y + radius), start, end, fill=COLOURS[colour])
        borders.append(start)
        start = end
    for angle in borders:
        tip = (x + radius * math.cos(math.radians(angle)), y + radius * math.sin(math.radians(angle)))
        pen.line([(x, y), tip], fill=_WHITE, width=2)
