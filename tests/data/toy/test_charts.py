import io
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from mmtrain.data.toy.chart_drawing import DrawnChart, draw
from mmtrain.data.toy.chart_questions import GRADES, LARGEST_SIDE, SMALLEST_SIDE
from mmtrain.data.toy.charts import blind_accuracy, conversations, make_charts
from mmtrain.data.toy.data_set import COLOURS
from mmtrain.errors import ConfigError


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_bytes_depend_on_number_and_seed_alone(tmp_path: Path, charts: Path) -> None:
    told: list[tuple[int, int]] = []
    summary = make_charts(tmp_path / "again", 200, 7, progress=lambda done, total: told.append((done, total)))
    assert told == [(i, 200) for i in range(1, 201)]
    assert (summary.num_train, summary.num_validation) == (180, 20)
    assert files(tmp_path / "again") == files(charts)
    make_charts(tmp_path / "other", 200, 8)
    assert files(tmp_path / "other").keys() == files(charts).keys()
    assert files(tmp_path / "other") != files(charts)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "other"]  # nothing is left aside


def test_datasets_opens_the_folder_with_its_splits_and_images(charts: Path) -> None:
    import datasets

    both = datasets.load_dataset(str(charts))
    assert {split: len(rows) for split, rows in both.items()} == {"train": 180, "validation": 20}
    assert both["train"].features["images"].feature == datasets.Image()
    seen = Counter()
    for row in both["train"]:
        text = "".join(m["content"] for m in row["messages"])
        assert text.count("<image>") == len(row["images"])
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"] * (len(row["messages"]) // 2)
        for image in row["images"]:
            assert SMALLEST_SIDE <= min(image.size) <= max(image.size) <= LARGEST_SIDE
        seen[row["grade"], min(len(row["images"]), 2)] += 1
    grades = {grade for grade, _ in seen}
    assert grades == set(GRADES)
    assert seen["text", 0] == sum(n for (_, images), n in seen.items() if images == 0) > 0
    assert sum(n for (_, images), n in seen.items() if images == 2) > 10
    pixels = [image.tobytes() for split in both.values() for row in split for image in row["images"]]
    assert len(set(pixels)) == len(pixels)  # no chart is in both splits


def test_no_guess_without_the_image_is_much_better_than_chance() -> None:
    train, validation = list(conversations("train", 20000, 0)), list(conversations("validation", 4000, 0))
    blind = blind_accuracy(train, validation)
    # The kind of chart has 3 answers, its colour 6, its number of marks 5.
    assert blind["easy"] == pytest.approx((2 / 3 + 1 / 6 + 2 / 5) / 5, abs=0.03)
    assert blind["medium"] < 0.42
    assert blind["hard"] < 0.25
    assert "text" not in blind
    by_question: dict[str, Counter[str]] = {}
    for conversation in train:
        if conversation.grade == "easy":
            by_question.setdefault(conversation.turns[0][0], Counter())[conversation.turns[0][1]] += 1
    assert set(by_question) == {
        "What kind of chart is this?",
        "What colour are the bars?",
        "What colour is the line?",
        *(f"How many {mark}s are there?" for mark in ("bar", "point", "slice")),
    }
    for question, answers in by_question.items():
        assert max(answers.values()) <= 1.1 * min(answers.values()), (question, answers)


def test_sizes_say_nothing_about_the_answer() -> None:
    areas: dict[str, list[int]] = {}
    for conversation in conversations("train", 20000, 1):
        if conversation.turns[0][0] == "What kind of chart is this?":
            chart = conversation.charts[0]
            areas.setdefault(conversation.turns[0][1], []).append(chart.width * chart.height)
    means = [sum(a) / len(a) for a in areas.values()]
    assert len(means) == 3
    assert max(means) < 1.05 * min(means)


def test_answers_are_true_of_their_charts() -> None:
    checked = Counter()
    for conversation in conversations("train", 3000, 2):
        for question, answer in conversation.turns:
            charts = conversation.charts
            if question.startswith("How many") and charts:
                assert len(charts[0].values) == int(answer)
            elif question.startswith("What colour are the bars"):
                assert set(charts[0].colours) == {answer}
            elif question.startswith("What colour is the tallest"):
                values = charts[0].values
                assert charts[0].colours[values.index(max(values))] == answer
                assert values.count(max(values)) == 1
            elif question.startswith("What colour is the smallest"):
                values = charts[0].values
                assert charts[0].colours[values.index(min(values))] == answer
                assert values.count(min(values)) == 1
            elif question.startswith("Is the first bar"):
                assert (charts[0].values[0] > charts[0].values[-1]) == (answer == "yes")
            elif question.startswith("How much taller"):
                assert charts[0].values[0] - charts[0].values[-1] == int(answer)
            elif question.startswith("In picture"):
                chart = charts[int(question.split()[2].rstrip(",")) - 1]
                assert answer in (chart.kind, chart.colours[0], str(len(chart.values)))
            elif question.startswith("Which picture shows a"):
                kinds = [chart.kind for chart in charts]
                wanted = question.split()[4]
                assert kinds.count(wanted) == 1
                assert answer == f"picture {kinds.index(wanted) + 1}"
            elif question.startswith("What is") and "plus" in question:
                assert int(answer) == int(question.split()[2]) + int(question.split()[4].rstrip("?"))
            else:
                continue
            checked[" ".join(question.split()[:2])] += 1
    assert len(checked) >= 6
    assert min(checked.values()) > 50


@pytest.mark.parametrize("size", [(56, 56), (168, 56), (56, 168), (168, 168)])
@pytest.mark.parametrize("kind", ["bar", "line", "pie"])
def test_marks_are_bold(kind: str, size: tuple[int, int]) -> None:
    names = ("red", "blue", "green") if kind == "pie" else ("red",) * 3
    chart = DrawnChart(kind=kind, values=(5, 9, 3), colours=names, width=size[0], height=size[1])
    counts = {colour: count for count, colour in draw(chart).getcolors(1 << 16)}
    for name in set(names):
        assert counts[COLOURS[name]] > 0.02 * size[0] * size[1], name


def test_card_tells_the_command_and_the_blind_accuracy(charts: Path) -> None:
    card = (charts / "README.md").read_text()
    assert "mmtrain data charts OUT --num-samples 200 --seed 7" in card
    assert "| easy | " in card
    assert "data/validation-*.parquet" in card


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("mine")
    with pytest.raises(ConfigError, match="there exists already; remove it"):
        make_charts(tmp_path / "there", 10, 0)
    assert (tmp_path / "there" / "file").read_text() == "mine"
    with pytest.raises(ConfigError, match="num_samples = 1"):
        make_charts(tmp_path / "new", 1, 0)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        make_charts(tmp_path / "new", 10, 0, validation_fraction=1.0)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_charts(tmp_path / "new", 10, 0, progress=stop)
    assert [p.name for p in tmp_path.iterdir()] == ["there"]


def test_images_are_png(charts: Path) -> None:
    import pyarrow.parquet as pq

    rows = pq.read_table(charts / "data" / "validation-00000-of-00001.parquet").to_pylist()
    formats = {Image.open(io.BytesIO(image["bytes"])).format for row in rows for image in row["images"]}
    assert formats == {"PNG"}
