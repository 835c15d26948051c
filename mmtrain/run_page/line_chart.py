"""Curves over iterations as a PNG file, painted by Pillow."""

import io
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from mmtrain.errors import ConfigError
from mmtrain.schedule.view.drawing import GRID, INK, PAPER, round_step

_COLOURS = ("#2b6ca3", "#c2500a", "#2c7a3a", "#65459b", "#b8860b", "#1b9aaa", "#a3295c", "#5f6b6d")
_BACKDROP = "#8a949e"
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 1200, 520, 76, 76, 64, 52


def png(
    curves: Mapping[str, Sequence[float]],
    *,
    title: str,
    unit: str,
    backdrop: tuple[str, Sequence[float]] | None = None,
    scale: int = 2,
) -> bytes:
    """The curves as a PNG file, one point an iteration, counted from 1; both axes begin at 0.

    Args:
        curves: name -> values, all of one length.
        unit: of the values, at the left axis.
        backdrop: name and values of a dashed curve with its own axis at the right.
    Raises: ConfigError: there is nothing to draw.
    """
    if not curves or not all(curves.values()):
        raise ConfigError("a chart needs at least one curve with a point; no schedule of this question has a plan")
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (_WIDTH * scale, _HEIGHT * scale), PAPER)
    paint = _Paint(ImageDraw.Draw(image), {size: ImageFont.load_default(size * scale) for size in (12, 15)}, scale)
    count = max(map(len, curves.values()))
    xs = [_LEFT + (_WIDTH - _LEFT - _RIGHT) * (i + 0.5) / count for i in range(count)]
    paint.text(_LEFT, 18, title, size=15)
    top = _axis(paint, [v for values in curves.values() for v in values], left=True)
    for tick in range(0, count, max(1, math.ceil(count / 20))):
        paint.text(xs[tick], _HEIGHT - _BOTTOM + 14, str(tick + 1), anchor="mm")
    paint.text(_WIDTH / 2, _HEIGHT - 14, "iteration", anchor="mm")
    paint.text(_LEFT, 42, unit)
    x = _LEFT + paint.length(unit) + 30
    if backdrop is not None:
        name, values = backdrop
        right = _axis(paint, values, left=False)
        paint.curve(xs, [_y(v, right) for v in values], _BACKDROP, dashed=True)
        x = paint.legend(x, name, _BACKDROP)
    for index, (name, values) in enumerate(curves.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        paint.curve(xs, [_y(v, top) for v in values], colour)
        x = paint.legend(x, name, colour)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def _axis(paint: "_Paint", values: Sequence[float], *, left: bool) -> float:
    """Paints ticks from 0 to a round number above all values; returns that number."""
    step = round_step(max(values) / 6)
    top = step * max(1, math.ceil(max(values) / step - 1e-9))
    for k in range(round(top / step) + 1):
        y = _y(k * step, top)
        if left:
            paint.line([(_LEFT, y), (_WIDTH - _RIGHT, y)], GRID, 1)
        where = (_LEFT - 8, "rm") if left else (_WIDTH - _RIGHT + 8, "lm")
        paint.text(where[0], y, f"{k * step:g}", anchor=where[1], colour=INK if left else _BACKDROP)
    return top


def _y(value: float, top: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / top


class _Paint:
    """Pillow's pen in unscaled pixels."""

    def __init__(self, pen: Any, fonts: Mapping[int, Any], scale: int) -> None:
        self._pen, self._fonts, self._scale = pen, fonts, scale

    def text(self, x: float, y: float, text: str, *, size: int = 12, anchor: str = "lm", colour: str = INK) -> None:
        self._pen.text((x * self._scale, y * self._scale), text, fill=colour, font=self._fonts[size], anchor=anchor)

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: float) -> None:
        scaled = [(x * self._scale, y * self._scale) for x, y in points]
        self._pen.line(scaled, fill=colour, width=round(width * self._scale), joint="curve")

    def curve(self, xs: Sequence[float], ys: Sequence[float], colour: str, *, dashed: bool = False) -> None:
        points = list(zip(xs, ys, strict=False))
        if len(points) == 1:  # a dot
            points.append((points[0][0] + 3, points[0][1]))
        if not dashed:
            self.line(points, colour, 2)
            return
        for (x0, y0), (x1, y1) in pairwise(points):
            pieces = max(1, round(math.hypot(x1 - x0, y1 - y0) / 8))
            for k in range(0, pieces, 2):
                ends = [(x0 + (x1 - x0) * f, y0 + (y1 - y0) * f) for f in (k / pieces, min(1.0, (k + 1) / pieces))]
                self.line(ends, colour, 1.5)

    def legend(self, x: float, name: str, colour: str) -> float:
        """Paints a name with its colour at x; returns the x of the next one."""
        self.line([(x, 42), (x + 22, 42)], colour, 3)
        self.text(x + 28, 42, name)
        return x + 28 + self.length(name) + 24

    def length(self, text: str) -> float:
        """Width of a text."""
        return float(self._fonts[12].getlength(text)) / self._scale
