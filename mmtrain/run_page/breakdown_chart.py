"""Breakdowns of rank-seconds as bars of coloured parts, one bar a schedule."""

from collections.abc import Mapping

from mmtrain.errors import ConfigError
from mmtrain.schedule.view.drawing import GRID, INK, PAPER, Box, Drawing, Label
from mmtrain.simulator.breakdown import Breakdown, TimePart, label

HUES: dict[TimePart, tuple[str, str]] = {
    TimePart.MODEL_FLOPS: ("#2c7a3a", "#a8d8a4"),
    TimePart.BELOW_PEAK: ("#2b6ca3", "#9ecae1"),
    TimePart.RECOMPUTATION: ("#65459b", "#cbbde0"),
    TimePart.EXCHANGES: ("#c2500a", "#fdbe85"),
    TimePart.BUBBLE: ("#9aa5ae", "#5f6b6d"),
    TimePart.TRANSFERS: ("#a3295c", "#e39ac0"),
    TimePart.REDUCTIONS: ("#b8860b", "#e8c468"),
    TimePart.OPTIMIZER: ("#1b7f8c", "#7fd0da"),
    TimePart.INPUT: ("#3d4852", "#c3cad1"),
}
"""Part -> its colour on white, and on black."""

_WIDTH, _LEFT, _RIGHT, _TOP, _BAR, _GAP, _AXIS = 1200, 170, 24, 84, 40, 14, 36
_CHAR = 7.0
"""Width of a character of the legend in pixels, slightly too large."""
_READABLE = 3.5
"""Percent of the widest bar that hold a number."""


def drawing(bars: Mapping[str, Breakdown], *, title: str) -> Drawing:
    """A bar for each breakdown, all of one length, with percentages; a legend above, an axis below.

    Args: bars: name -> breakdown.
    Raises: ConfigError: there is nothing to draw.
    """
    if not bars:
        raise ConfigError("a chart needs at least one bar; no schedule of this question has a plan")
    inner = _WIDTH - _LEFT - _RIGHT
    bottom = _TOP + len(bars) * (_BAR + _GAP)
    shapes: list[Box | Label] = [Label(_LEFT, 20, title, 14, "start")]
    x = float(_LEFT)
    for parts in dict.fromkeys(parts for breakdown in bars.values() for parts in breakdown.shares):
        shapes += [Box(x, 46, 12, 12, HUES[parts[0]][0]), Label(x + 18, 52, label(parts), 12, "start")]
        x += 18 + _CHAR * len(label(parts)) + 14
    for tenth in range(0, 11, 2):
        x = _LEFT + inner * tenth / 10
        shapes += [Box(x, _TOP - 6, 1, bottom - _TOP, GRID), Label(x, bottom + 12, f"{10 * tenth} %", 12, "middle")]
    for number, (name, breakdown) in enumerate(bars.items()):
        x, y = float(_LEFT), _TOP + number * (_BAR + _GAP)
        shapes.append(Label(_LEFT - 10, y + _BAR / 2, name, 12, "end"))
        for parts, share in breakdown.shares.items():
            percent, width = 100 * share, inner * max(0.0, share)
            shapes.append(Box(x, y, width, _BAR, HUES[parts[0]][0], f"{name}, {label(parts)}: {percent:.1f} %"))
            if percent >= _READABLE:
                ink = INK if parts[0] is TimePart.BUBBLE else PAPER
                shapes.append(Label(x + width / 2, y + _BAR / 2, f"{percent:.1f}", 12, "middle", ink))
            x += width
    return Drawing(_WIDTH, bottom + _AXIS, tuple(shapes))
