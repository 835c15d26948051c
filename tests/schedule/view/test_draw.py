import io
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise

import pytest
from PIL import Image

from mmtrain.schedule.plan import Plan
from mmtrain.schedule.simulate import simulate
from mmtrain.schedule.timeline import Timeline
from mmtrain.schedule.view.draw import png, svg, text, trace_events
from mmtrain.schedule.view.drawing import Box, layout, seconds, stacked
from tests.schedule.problems import chain, option, two_modules

PROBLEM = two_modules(2, [1, 0], vision=option(1.0, 2.0), language=option(2.0, 4.0))
PLAN = Plan.parse(PROBLEM.graph, "0F0.0 2F1.0 2F0.0 2B1.0 2B0.0 0B0.0\n1F0.0 3F1.0 3B1.0 3F0.0 3B0.0 1B0.0")
TIMELINE = simulate(PROBLEM, PLAN)


def test_text_shows_modules_directions_and_idle_time() -> None:
    assert text(TIMELINE, width=46).split("\n") == [
        "2 ranks, makespan 23 s, bubble 34.8 %, peak of activations 3 B",
        "rank 0 |v0l1--l0--........L1======....L0======....V0==|",
        "rank 1 |..v0..l1--L1======l0--L0======........V0==....|",
        "v = vision, l = language; small letter forward (-), capital backward (= whole, ~ input, : weight), . idle",
    ]


def test_modules_of_one_first_letter_are_told_apart() -> None:
    named = replace(TIMELINE, stage_modules=("layout", "layout", "language", "language"))
    assert text(named).split("\n")[-1].startswith("l = layout, a = language; ")
    assert "|l0" in text(named) and "A1=" in text(named)


def test_long_timelines_take_several_bands() -> None:
    problem = chain(1, 12, cost=option(1.0, 1.0))
    order = " ".join(f"0F{m}.0 0B{m}.0" for m in range(12))
    lines = text(simulate(problem, Plan.parse(problem.graph, order)), width=48).split("\n")
    assert lines[1:5] == [
        "from 0 s",
        "rank 0 |l0--L0==l1--L1==l2--L2==l3--L3==l4--L4==l5--L5==|",
        "from 12 s",
        "rank 0 |l6--L6==l7--L7==l8--L8==l9--L9==l10-L10=l11-L11=|",
    ]


def test_svg_is_well_formed_and_has_a_tooltip_an_action() -> None:
    root = ElementTree.fromstring(svg(TIMELINE, title="a <b> & c"))
    titles = [e.text for e in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == len(TIMELINE.rows)
    assert "F0.0 vision s0: 0 s to 1 s" in titles
    assert "a <b> & c" in [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]


def test_png_has_the_drawing_s_size_and_colours() -> None:
    image = Image.open(io.BytesIO(png(TIMELINE, width=800, scale=1)))
    drawing = layout(TIMELINE, width=800)
    assert image.size == (drawing.width, drawing.height)
    box = next(s for s in drawing.shapes if isinstance(s, Box) and s.title.startswith("B0.0 language"))
    pixel = image.getpixel((round(box.x) + 3, round(box.y) + 3))
    assert "#{:02x}{:02x}{:02x}".format(*pixel) == box.fill


def test_actions_lie_inside_of_the_paper_and_do_not_overlap() -> None:
    drawing = layout(TIMELINE, width=900)
    rows: dict[float, list[Box]] = {}
    for shape in drawing.shapes:
        if isinstance(shape, Box) and shape.title:
            rows.setdefault(shape.y, []).append(shape)
    assert len(rows) == 2
    for boxes in rows.values():
        for left, right in pairwise(boxes):
            assert left.x + left.width <= right.x
        assert boxes[-1].x + boxes[-1].width <= 900


def test_trace_has_a_process_a_timeline_and_a_thread_a_rank() -> None:
    later = replace(TIMELINE, rows=tuple(r._replace(start_s=r.start_s + 5, end_s=r.end_s + 5) for r in TIMELINE.rows))
    trace = trace_events({"measured": later, "planned": TIMELINE})
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {(e["pid"], e["tid"]) for e in events} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    first = next(e for e in events if e["pid"] == 0 and e["name"] == "F0.0 language s2")
    assert (first["ts"], first["dur"]) == (3e6, 2e6)
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert names == {"measured", "planned", "rank 0", "rank 1"}


def test_one_timeline_can_be_traced_alone() -> None:
    assert len([e for e in trace_events(TIMELINE)["traceEvents"] if e["ph"] == "X"]) == len(TIMELINE.rows)


def test_empty_timeline_can_be_drawn() -> None:
    empty = Timeline.from_rows(PROBLEM.graph, [])
    assert "rank 1 |....|" in text(empty, width=4)
    assert svg(empty).startswith("<svg")
    assert png(empty)[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "0 s"), (12.5, "12.5 s"), (0.0125, "12.5 ms"), (3e-6, "3 us"), (4e-9, "0.004 us")],
)
def test_seconds_have_a_fitting_unit(value: float, words: str) -> None:
    assert seconds(value) == words


def test_two_timelines_are_drawn_below_each_other_at_one_scale() -> None:
    slower = replace(TIMELINE, rows=tuple(r._replace(start_s=2 * r.start_s, end_s=2 * r.end_s) for r in TIMELINE.rows))
    drawing = stacked({"measured": slower, "planned": TIMELINE}, width=900)
    boxes = [s for s in drawing.shapes if isinstance(s, Box) and s.title.startswith("B1.0 language s2")]
    assert boxes[0].y < boxes[1].y
    assert boxes[0].width + 1 == pytest.approx(2 * (boxes[1].width + 1))
    assert drawing.height == 2 * layout(TIMELINE, width=900).height
    both = svg({"measured": slower, "planned": TIMELINE})
    assert "measured: 2 ranks, makespan 46 s" in both and "planned: 2 ranks, makespan 23 s" in both
    assert Image.open(io.BytesIO(png({"a": slower, "b": TIMELINE}, width=900, scale=1))).size[1] == drawing.height


def test_a_trace_has_arrows_between_ranks_and_details() -> None:
    first = TIMELINE.rows[0].action
    trace = trace_events(TIMELINE, graph=PROBLEM.graph, details={first: {"flops": 5.0}})
    events = trace["traceEvents"]
    starts, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    # Vision F and B, language F and B of two microbatches, and both ways between the modules' ends on ranks 1 and 0.
    assert len(starts) == 8 and starts.keys() == ends.keys()
    assert all(starts[k]["tid"] != ends[k]["tid"] and starts[k]["ts"] <= ends[k]["ts"] for k in starts)
    assert {e["name"] for e in starts.values()} == {"activation", "gradient"}
    spans = [e for e in events if e["ph"] == "X"]
    assert [e["args"] for e in spans if "flops" in e["args"]] == [{"action": str(first), "flops": 5.0}]
    for arrow in starts.values():  # inside of the span that it leaves
        assert any(s["tid"] == arrow["tid"] and s["ts"] <= arrow["ts"] < s["ts"] + s["dur"] for s in spans)
