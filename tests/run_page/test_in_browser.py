"""What only a browser shows of a page: advice, the axis of a loss with spikes, the timeline's length."""

import json
from collections.abc import Iterator

import pytest

from mmtrain.run_page.page import write_page
from mmtrain.run_page.runs import read_run
from tests.browser import BROWSER, DRIVER, MISSING, Browser, browser
from tests.run_page.test_runs import STEP, answers_file, write_run

pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason=MISSING)


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A page of two timelines, one 4 times and one 1.25 times as long as planned, of a loss that begins with spikes."""
    lines = [
        {"step": step} | STEP | {"loss": 6.0 if step <= 8 else 1 + 1 / step, "mfu": 0.5, "makespan_ratio": 4.0}
        for step in range(1, 201)
    ]
    run = write_run(tmp_path_factory.mktemp("page") / "run", lines)
    (run / "timelines").mkdir()
    for step, end in ((100, 1.25), (200, 4.0)):
        action = [0, "F", 0, 0, 0.0, end, 0.0, 1.0, 10, 1e9]
        data = {"step": step, "modules": ["language"], "num_ranks": 1, "stages": [[0, 0, 0, 1]], "actions": [action]}
        data["waits"] = {"measured": [], "planned": []}
        (run / "timelines" / f"step-{step}.json").write_text(json.dumps(data))
    assert len(read_run(run).timelines) == 2
    answers_file(run, 200, "a bar", "<i>no</i>")
    write_page([run], run / "page.html")
    with browser() as found:
        found.resize(1400, 1000)
        found.open(run / "page.html")
        yield found


def test_advice_stands_below_the_numbers(window: Browser) -> None:
    advice = window.run("return [...document.querySelectorAll('.advice li')].map((item) => item.textContent)")
    assert any(text.startswith("measured / planned 4.00 Costs are not of this machine") for text in advice)
    off = window.run("return [...document.querySelectorAll('.tile.off .label')].map((label) => label.textContent)")
    assert len(off) == len(advice) and "measured / planned" in off


def test_each_answer_has_a_card_with_its_images(window: Browser) -> None:
    cards = window.run("return [...document.querySelectorAll('.answer')].map((card) => card.innerText.split('\\n'))")
    lines = [[line for line in card if line] for card in cards]
    assert lines[0] == ["what is <b>it</b>?", "\u2713 right: a bar"]
    assert lines[1] == ["what is <b>it</b>?", "\u2717 wrong: <i>no</i>", "the record's answer: a bar"]
    images = "[...card.querySelectorAll('img')].map((image) => image.src)"
    shown = window.run(f"return [...document.querySelectorAll('.answer')].map((card) => {images})")
    assert shown == [["data:image/png;base64,aaaa", "data:image/png;base64,bbbb"]] * 2
    title = window.run("return document.querySelector('#answers h2').textContent")
    assert title == "Answers to held-out questions after step 200: 1 of 2 right"


def test_a_few_high_values_do_not_flatten_the_loss(window: Browser) -> None:
    first = "[...document.querySelectorAll('.chart')][0]"
    assert window.run(f"return {first}.querySelector('.cut').textContent") == "cut off: values up to 6"
    marks = window.run(
        f"return [...{first}.querySelectorAll('text[text-anchor=end]:not(.cut)')].map((m) => m.textContent)"
    )
    assert max(map(float, marks)) < 2


def test_the_tip_of_an_action_says_that_costs_are_of_another_machine(window: Browser) -> None:
    """The last step took 4 s instead of 1 s, the one before 1.25 s."""
    tip = "return document.getElementById('tip').textContent"
    for before, is_far in (((), True), (("#timeline-before",), False)):
        for button in before:
            window.click(button)
        window.move("#timeline", -400, -30)
        told = window.run(tip)
        assert "(measured / planned " in told
        assert ("planned with costs that are not of this machine and its load: run mmtrain profile" in told) == is_far
    window.click("#timeline-after")


def test_a_planned_timeline_is_stretched_where_it_is_far_from_the_measured_one(window: Browser) -> None:
    checked = "return document.getElementById('timeline-stretch').checked"
    assert window.run(checked) is True
    window.click("#timeline-before")
    assert window.run(checked) is False
    window.click("#timeline-stretch")  # what the reader chose stays
    window.click("#timeline-stretch")
    window.click("#timeline-after")
    assert window.run(checked) is False
    assert window.errors() == []
