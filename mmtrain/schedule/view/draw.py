"""A simulated or measured timeline as text, SVG, PNG, or Chrome / Perfetto trace."""

import html
import io
from collections.abc import Mapping
from typing import Any

from mmtrain.schedule.action import BRAID, RESULT_OF, Action, Kind
from mmtrain.schedule.graph import WorkGraph
from mmtrain.schedule.timeline import Timeline
from mmtrain.schedule.view.drawing import PAPER, Box, Drawing, headline, layout, mark, name, num_bands, seconds, stacked

_FILL = {Kind.F: "-", Kind.B: "=", Kind.I: "~", Kind.W: ":"}

_WIDTH = 1600
"""The width of an SVG document, and of a PNG file unless it is given."""


def text(timeline: Timeline, width: int = 120) -> str:
    """The timeline as a grid of characters, time to the right, in one or several bands of `width` columns.

    An action starts with a letter of its module, small for a forward and capital for a backward, and its microbatch;
    the rest of its time is `-` forward, `=` backward, `~` I, `:` W, `&` a braid. An instruction is `+` and its
    microbatch. `.` is idle.
    An action shorter than its label has only the letter; one shorter than half a column is invisible.
    """
    bands = num_bands(timeline, width, 4)  # columns, which hold a letter and two digits
    cells = [_cells(timeline, rank, bands * width) for rank in range(timeline.num_ranks)]
    lines = [headline(timeline)]
    for band in range(bands):
        low = band * width
        if bands > 1:
            lines.append(f"from {seconds(timeline.makespan_s * band / bands)}")
        lines += [f"rank {rank} |{row[low : low + width]}|" for rank, row in enumerate(cells)]
    modules = ", ".join(f"{letter} = {module}" for module, letter in _letters(timeline).items())
    blocks = any(len(row.action.parts) > 1 for rank in range(timeline.num_ranks) for row in timeline.of_rank(rank))
    kinds = "small letter forward (-), capital backward (= whole, ~ input, : weight)" + ", & a braid" * blocks
    kinds += ", + an instruction" * any(row.action.kind not in (*_FILL, BRAID) for row in timeline.rows)
    kinds += ", > of images that the next microbatch reads" * bool(timeline.deferred)
    lines.append(f"{modules}; {kinds}, . idle")
    return "\n".join(lines)


def _cells(timeline: Timeline, rank: int, width: int) -> str:
    scale = width / timeline.makespan_s if timeline.makespan_s > 0 else 0.0
    cells = ["."] * width
    for row in timeline.of_rank(rank):
        low, high = (round((t - timeline.start_s) * scale) for t in (row.start_s, row.end_s))
        labels = [_label(timeline, part) for part in row.action.parts]
        fitting = [text for text in ("&".join(labels), labels[0]) if len(text) <= high - low]
        label = fitting[0] if fitting else labels[0][:1][: high - low]
        cells[low:high] = label.ljust(high - low, _FILL.get(row.action.kind, "&" if len(row.action.parts) > 1 else "+"))
    return "".join(cells)


def _label(timeline: Timeline, action: Action) -> str:
    letter = _letters(timeline)[timeline.stage_modules[action.stage]]
    letter = letter if action.kind is Kind.F else letter.upper() if action.kind in _FILL else "+"
    return f"{letter}{action.microbatch}{mark(timeline, action)}"


def _letters(timeline: Timeline) -> dict[str, str]:
    """Module -> the first letter of its name that no module before it has; if there is none, its first."""
    letters: dict[str, str] = {}
    for module in dict.fromkeys(timeline.stage_modules):
        unused = [c for c in module.lower() if c.isalpha() and c not in letters.values()]
        letters[module] = unused[0] if unused else module[:1].lower()
    return letters


def svg(timeline: Timeline | Mapping[str, Timeline], *, title: str = "") -> str:
    """The drawing of a timeline as an SVG document; each action has a tooltip with its name and times.

    Args: timeline: one, or several by name, which are drawn below each other at one scale. title: of a single one.
    """
    return document(_drawing(timeline, _WIDTH, title))


def document(drawing: Drawing) -> str:
    """A drawing as an SVG document."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{drawing.width}" height="{drawing.height}" '
        f'viewBox="0 0 {drawing.width} {drawing.height}" font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="100%" height="100%" fill="{PAPER}"/>',
    ]
    for shape in drawing.shapes:
        if isinstance(shape, Box):
            area = f'x="{shape.x:.2f}" y="{shape.y:.2f}" width="{shape.width:.2f}" height="{shape.height:.2f}"'
            tip = f"<title>{html.escape(shape.title)}</title>" if shape.title else ""
            lines.append(f'<rect {area} fill="{shape.fill}">{tip}</rect>')
        else:
            lines.append(
                f'<text x="{shape.x:.2f}" y="{shape.y:.2f}" font-size="{shape.size}" fill="{shape.colour}" '
                f'text-anchor="{shape.anchor}" dominant-baseline="central" pointer-events="none">'
                f"{html.escape(shape.text)}</text>"
            )
    return "\n".join([*lines, "</svg>"]) + "\n"


def _drawing(timeline: Timeline | Mapping[str, Timeline], width: int, title: str) -> Drawing:
    if isinstance(timeline, Timeline):
        return layout(timeline, width=width, title=title)
    return stacked(timeline, width=width)


def png(timeline: Timeline | Mapping[str, Timeline], *, width: int = _WIDTH, title: str = "", scale: int = 2) -> bytes:
    """The drawing of a timeline as a PNG file of `scale` x `width` pixels across. Arguments as of `svg`."""
    return painted(_drawing(timeline, width, title), scale)


def painted(drawing: Drawing, scale: int = 2) -> bytes:
    """A drawing as a PNG file of `scale` pixels for each of its own."""
    from PIL import Image, ImageDraw, ImageFont  # only this format needs it

    image = Image.new("RGB", (drawing.width * scale, drawing.height * scale), PAPER)
    pen = ImageDraw.Draw(image)
    fonts = {size: ImageFont.load_default(size * scale) for size in (9, 11, 12, 14)}
    anchors = {"start": "lm", "middle": "mm", "end": "rm"}
    for shape in drawing.shapes:
        if isinstance(shape, Box):
            low = (round(shape.x * scale), round(shape.y * scale))
            high = (round((shape.x + shape.width) * scale) - 1, round((shape.y + shape.height) * scale) - 1)
            pen.rectangle((*low, max(low[0], high[0]), max(low[1], high[1])), fill=shape.fill)
        else:
            pen.text(
                (shape.x * scale, shape.y * scale),
                shape.text,
                fill=shape.colour,
                font=fonts[shape.size],
                anchor=anchors[shape.anchor],
            )
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def trace_events(
    timelines: Timeline | Mapping[str, Timeline],
    *,
    graph: WorkGraph | None = None,
    details: Mapping[Action, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """One or several timelines as a Chrome trace, which chrome://tracing and ui.perfetto.dev open.

    Each timeline is a process, each rank a thread; an action is an event such as `F3.0 language s5`. A result that
    another rank needs is a flow, drawn as an arrow.

    Args:
        timelines: one, or several by name, such as measured and planned, each from its own first start.
        graph: of the iteration, for the flows; None: without them.
        details: of actions, shown for a selected one.
    """
    named = {"pipeline": timelines} if isinstance(timelines, Timeline) else timelines
    events: list[dict[str, Any]] = []
    for process, (label, timeline) in enumerate(named.items()):
        events.append(_metadata("process_name", process, 0, label))
        for rank in range(timeline.num_ranks):
            events.append(_metadata("thread_name", process, rank, f"rank {rank}"))
        for row in timeline.rows:
            more = details.get(row.action, {}) if details else {}
            events.append(
                {
                    "name": name(timeline, row.action),
                    "cat": f"{timeline.stage_modules[row.action.stage]},{row.action.kind}",
                    "ph": "X",
                    "pid": process,
                    "tid": row.rank,
                    "ts": (row.start_s - timeline.start_s) * 1e6,
                    "dur": (row.end_s - row.start_s) * 1e6,
                    "args": {"action": str(row.action), **more},
                }
            )
        events += _flows(timeline, graph, process) if graph else []
        for rank, profile in enumerate(timeline.memory):
            for when, held in profile:
                events.append(
                    {
                        "name": f"activation bytes, rank {rank}",
                        "ph": "C",
                        "pid": process,
                        "ts": (when - timeline.start_s) * 1e6,
                        "args": {"bytes": held},
                    }
                )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _flows(timeline: Timeline, graph: WorkGraph, process: int) -> list[dict[str, Any]]:
    """An arrow for each result needed by another rank: from its producer's end to the start of its consumer."""
    parts = [(row, part) for row in timeline.rows for part in row.action.parts if part.kind in RESULT_OF]
    makers = {(RESULT_OF[part.kind], part.stage, graph.work_of(part)): row for row, part in parts}
    events: list[dict[str, Any]] = []
    for row, part in parts:
        for result, _ in graph.needs(part.kind, part.stage, graph.work_of(part)):
            maker = makers.get(result)
            if maker is None or maker.rank == row.rank:
                continue
            common = {"name": "activation" if result[0] is Kind.F else "gradient", "cat": "transfer", "pid": process}
            common["id"] = f"{process}.{len(events) // 2}"
            inside = min((maker.end_s - maker.start_s) / 2, 1e-9)  # a flow belongs to the event around its time
            leaves = (maker.end_s - inside - timeline.start_s) * 1e6
            events.append(common | {"ph": "s", "tid": maker.rank, "ts": leaves})
            events.append(
                common | {"ph": "f", "bp": "e", "tid": row.rank, "ts": (row.start_s - timeline.start_s) * 1e6}
            )
    return events


def _metadata(kind: str, process: int, thread: int, label: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": label}}
