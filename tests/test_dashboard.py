"""What a real job leaves for those who look at it, and its page in a real browser."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmtrain.config import config
from mmtrain.run_page.measured import breakdown
from mmtrain.run_page.page import write_page
from mmtrain.run_page.runs import read_run
from mmtrain.schedule.view.drawing import COLOURS
from mmtrain.simulator.breakdown import TimePart
from tests.browser import BROWSER, DRIVER, MISSING, Browser, browser
from tests.jobs import layout, metrics, train, write_config
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

EXTRA = [
    *layout(pp=2), "planner.enable=true", "planner.search.budget_evaluations=50", "planner.search.threads=1",
    "metrics.timeline_freq=2", "metrics.trace_freq=3", "metrics.enable_tensorboard=true",
    "validation.enable=true", "validation.steps=1", "validation.freq=3", "checkpoint.enable=true",
    "checkpoint.interval=3",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, charts: Path) -> Path:
    """The folder of a job that was started twice."""
    path = write_config(tmp_path_factory.mktemp("dashboard"), charts)
    run_ranks(train, 2, path, [*EXTRA, "training.steps=3"])
    run_ranks(train, 2, path, [*EXTRA, "training.steps=6"])
    return path.parent / "run"


def test_every_step_has_its_parts(run: Path) -> None:
    def of(key: str) -> list[float]:
        return [value for _, value in sorted(metrics(run.parent, key).items())]

    assert len(of("makespan_s")) == 6
    for measured, planned, ratio, step in zip(
        of("makespan_s"), of("planned_makespan_s"), of("makespan_ratio"), of("step_time_s"), strict=True
    ):
        assert 0 < measured < step and planned > 0
        assert ratio == pytest.approx(measured / planned)
    assert of("planned_makespan_s") == of("plan_makespan_s")
    parts = [of(f"bubble_{name}") for name in ("vision", "language", "other")]
    assert [sum(row) for row in zip(*parts, strict=True)] == pytest.approx(of("bubble"))
    assert all(value >= -1e-9 for row in parts for value in row)
    for part in of("mfu_vision") + of("mfu_language"):
        assert 0 < part < 1
    # The whole step does what its modules do, and is idle besides.
    for whole, vision, language in zip(of("mfu"), of("mfu_vision"), of("mfu_language"), strict=True):
        assert whole < max(vision, language)
    assert all(0 <= age < 60 for age in of("plan_age_s"))


def test_the_time_of_every_step_is_divided(run: Path) -> None:
    for line in read_run(run).steps:
        found = breakdown(line)
        assert found is not None
        assert found[TimePart.MODEL_FLOPS] == pytest.approx(line["mfu"])
        assert found[TimePart.BUBBLE] < line["bubble"]
        assert found[TimePart.BUBBLE] + found[TimePart.TRANSFERS] < line["makespan_s"] / line["step_time_s"]
        assert 0 < found.by_label["gather, reduce + optimizer"] < 1


def test_timelines_are_images_and_data(run: Path) -> None:
    names = {path.name for path in (run / "timelines").iterdir()}
    assert names == {f"step-{step}.{kind}" for step in (2, 3, 4, 6) for kind in ("svg", "json")}  # 3: once the last
    assert "measured: 2 ranks" in (run / "timelines" / "step-4.svg").read_text()
    data = json.loads((run / "timelines" / "step-4.json").read_text())
    assert (data["step"], data["modules"], data["num_ranks"]) == (4, ["vision", "language"], 2)
    assert len(data["stages"]) == 4
    for stage, kind, _, _, start, end, planned_start, planned_end, rows, flops, *_ in data["actions"]:
        assert 0 <= start <= end and 0 <= planned_start <= planned_end
        assert rows > 0 and (flops > 0 or kind in "IW"), (stage, kind)
    measured = metrics(run.parent, "makespan_s")[4]
    assert max(action[5] for action in data["actions"]) == pytest.approx(measured, abs=1e-6)
    for name, place in (("measured", 4), ("planned", 6)):
        idle = sum(end - start for _, start, end, _ in data["waits"][name])
        busy = sum(action[place + 1] - action[place] for action in data["actions"])
        span = max(action[place + 1] for action in data["actions"])
        assert idle + busy == pytest.approx(2 * span, abs=1e-4)
    total = sum(action[9] for action in data["actions"])
    step = metrics(run.parent, "step_time_s")[4]
    peak = config.load(run / "config.toml").metrics.peak_flops
    assert total == pytest.approx(metrics(run.parent, "mfu")[4] * step * peak * 2, rel=1e-6)


def test_traces_have_arrows_and_details(run: Path) -> None:
    events = json.loads((run / "traces" / "step-3.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {(event["pid"], event["tid"]) for event in spans} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert {"module", "work", "microbatch", "rows", "model_flops", "memory", "layers"} <= spans[0]["args"].keys()
    arrows = {event["id"] for event in events if event["ph"] == "s"}
    assert arrows and arrows == {event["id"] for event in events if event["ph"] == "f"}


def test_tensorboard_has_them_too(run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run / "tb"))
    board.Reload()
    assert {
        "modality/vision/mfu(%)", "modality/language/bubble(%)", "pipeline/bubble_other(%)", "planner/age_s",
        "pipeline/makespan_measured(s)", "pipeline/makespan_planned(s)", "pipeline/makespan_ratio",
    } <= set(board.Tags()["scalars"])  # fmt: skip
    assert {image.step for image in board.Images("timeline")} == {2, 3, 4, 6}
    assert board.Images("timeline")[0].width == 1200


def test_each_start_is_remembered(run: Path) -> None:
    starts = json.loads((run / "environment.json").read_text())["starts"]
    assert [start["step"] for start in starts] == [0, 3]
    assert {"time", "torch", "python", "device", "commit"} <= starts[0].keys()
    assert (starts[0]["ranks"], starts[0]["mesh"]) == (2, {"pp": 2})


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    if not (BROWSER and DRIVER):
        pytest.skip(MISSING)
    with browser() as found:
        found.resize(1400, 1000)
        yield found


@pytest.fixture
def shown(run: Path, window: Browser, tmp_path: Path) -> Browser:
    """The window with the page of the run."""
    write_page([run], tmp_path / "page.html")
    window.open(tmp_path / "page.html")
    return window


PIXELS = """
const canvas = document.getElementById("timeline");
const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
const found = new Set();
for (let i = 0; i < data.length; i += 4) {
  if (data[i + 3] === 255) found.add("#" + [0, 1, 2].map((k) => data[i + k].toString(16).padStart(2, "0")).join(""));
}
return [...found];
"""


def view(window: Browser) -> tuple[float, float]:
    low, high = map(float, window.run('return document.getElementById("timeline").dataset.view').split())
    return low, high


def text(window: Browser, selector: str) -> str:
    return str(window.run("return document.querySelector(arguments[0]).textContent", selector))


def test_the_page_is_drawn_without_a_complaint(shown: Browser, run: Path) -> None:
    counts = shown.run(
        "return Object.fromEntries([...document.querySelectorAll('.chart')].map((chart) =>"
        "[chart.querySelector('h3').textContent, chart.querySelectorAll('path.curve').length]))"
    )
    assert counts == {
        "Loss": 2, "Answers right": 4, "Throughput": 1, "Step time": 3, "Where the time of a step goes": 6,
        "Model FLOPs utilisation": 3, "Compute by module": 2,
        "Bubble by what was waited for": 3, "Makespan": 3, "Planner": 2, "Steps with their first plan": 3,
        "Memory of the most loaded rank": 2, "Tokens by modality": 2, "Gradient norm": 1,
        "Learning rate": 1, "Samples": 1,
    }  # fmt: skip
    assert shown.run("return document.querySelectorAll('.tile').length") >= 14
    assert shown.run("return document.querySelectorAll('.chart .start').length") == 16  # resumed after step 3
    data = json.loads((run / "timelines" / "step-6.json").read_text())
    drawn = {COLOURS[data["stages"][stage][0]][kind] for stage, kind, *_ in data["actions"]}
    assert len(drawn) >= 4 and drawn <= set(shown.run(PIXELS))
    assert "resumed after step 3" in text(shown, "#header")
    assert 'pipeline_parallel_schedule = "' in text(shown, "details.config pre")
    assert shown.errors() == []
    assert shown.screenshot().startswith(b"\x89PNG")


def test_the_timeline_zooms_moves_and_tells(shown: Browser) -> None:
    whole = view(shown)
    shown.run("document.getElementById('timeline').scrollIntoView({ block: 'center' })")
    shown.wheel("#timeline", 100, -40, -400)
    zoomed = view(shown)
    assert zoomed[1] - zoomed[0] < 0.5 * (whole[1] - whole[0])
    assert whole[0] <= zoomed[0] and zoomed[1] <= whole[1]
    shown.drag("#timeline", (100, -40), (0, -40))
    moved = view(shown)
    assert moved[0] > zoomed[0] and moved[1] - moved[0] == pytest.approx(zoomed[1] - zoomed[0], abs=2e-6)
    shown.click("#timeline-fit")
    assert view(shown) == whole
    tips = set()
    for x in range(-500, 500, 50):  # over the first row: some are actions, some idle
        shown.move("#timeline", x, -60)
        tips.add(text(shown, "#tip"))
    assert any("measured" in tip and "GFLOP" in tip for tip in tips)
    shown.click("#timeline-before")
    assert shown.run("return document.getElementById('timeline-step').selectedOptions[0].textContent") == "4"
    assert view(shown) != whole
    shown.click("#timeline-stretch")
    assert shown.errors() == []


def test_charts_show_values_zoom_and_have_a_logarithmic_axis(shown: Browser) -> None:
    shown.run("document.querySelector('.chart').scrollIntoView({ block: 'center' })")
    shown.move(".chart > svg", 0, 0)
    loss = text(shown, ".chart .legend .value")
    assert float(loss) > 0 and "step 3" in text(shown, ".chart > svg .cursor + text")
    curve = "return document.querySelector('.chart path.curve').getAttribute('d')"
    linear = shown.run(curve)
    shown.click(".chart input.log")
    assert shown.run(curve) != linear
    points = [shown.run(curve).count("L")]
    shown.drag(".chart > svg", (-150, 0), (0, 0))
    points.append(shown.run(curve).count("L"))
    assert points[1] < points[0]
    shown.click("#range-all")
    assert shown.run(curve).count("L") == points[0]
    assert shown.errors() == []


def test_the_page_fits_a_phone_and_the_dark(shown: Browser) -> None:
    light = shown.run("return getComputedStyle(document.body).backgroundColor")
    shown.resize(380, 800)
    shown.prefer_dark(True)
    try:
        assert shown.run("return document.documentElement.scrollWidth") <= 380
        assert shown.run("return getComputedStyle(document.body).backgroundColor") != light
        assert shown.errors() == []
    finally:
        shown.prefer_dark(False)
        shown.resize(1400, 1000)


def test_several_runs_and_older_ones_share_a_page(run: Path, window: Browser, tmp_path: Path) -> None:
    older = tmp_path / "older"
    older.mkdir()
    kept = ("step", "loss", "tokens", "step_time_s", "bubble", "tps", "validation_loss", "accuracy")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    old = [{key: value for key, value in line.items() if key in kept} for line in lines]
    (older / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    write_page([run, older], tmp_path / "both.html")
    window.open(tmp_path / "both.html")
    assert window.run("return document.querySelectorAll('h1').length") == 2
    assert window.run("return document.querySelectorAll('.chart:first-child path.curve').length") == 4
    write_page([older], tmp_path / "old.html")
    window.open(tmp_path / "old.html")
    assert window.run("return document.getElementById('timelines').hidden") is True
    assert window.errors() == []
