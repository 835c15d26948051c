import json

import pytest

from mmtrain.errors import ConfigError
from mmtrain.run_page.numbers import numbers
from mmtrain.run_page.page import page, write_page
from mmtrain.run_page.page_charts import charts, thinned
from mmtrain.run_page.runs import evenly, read_run

STEP = {"loss": 2.0, "tokens": 100, "image_tokens": 40, "video_tokens": 0, "tps": 50.0, "step_time_s": 1.0,
        "bubble": 0.5, "mfu": 0.1, "grad_norm": 1.0, "data_time_s": 0.0, "plan_time_s": 0.0}  # fmt: skip


def write_run(folder, lines, config="", starts=None):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if config:
        (folder / "config.toml").write_text(config)
    if starts is not None:
        (folder / "environment.json").write_text(json.dumps({"starts": starts}))
    return folder


def titles(found):
    return [chart.title for chart in found]


def chart(found, title):
    return {series.label: list(series.y) for series in next(c for c in found if c.title == title).series}


def test_the_learning_rate_and_those_of_groups(tmp_path):
    lines = [{"step": n, "lr": n * 1e-4} | STEP for n in (1, 2)]
    plain = read_run(write_run(tmp_path / "plain", lines))
    assert chart(charts([plain]), "Learning rate") == {"learning rate": [1e-4, 2e-4]}
    config = "[optimizer]\nlr = 2e-4\n" + "".join(
        f"[[optimizer.groups]]\n{group}\n"
        for group in (
            'module = "vision"\nlr = 1e-4',
            'pattern = "norm"\nweight_decay = 0.0',
            'pattern = "head"\nlr = 0.0',
        )
    )
    groups = read_run(write_run(tmp_path / "groups", lines, config))
    wanted = {"all others": [1e-4, 2e-4], "vision": [5e-5, 1e-4], "head": [0.0, 0.0]}
    assert chart(charts([groups]), "Learning rate") == {k: pytest.approx(v) for k, v in wanted.items()}
    assert set(chart(charts([plain, groups]), "Learning rate")) == {
        "plain: all others", "groups: all others", "groups: vision", "groups: head"
    }  # fmt: skip


def test_a_run_in_progress_is_read_up_to_its_last_whole_line(tmp_path):
    folder = write_run(tmp_path / "run", [{"step": 0, "validation_loss": 3.0, "accuracy": {}}, {"step": 1} | STEP])
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "lo')
    (folder / "environment.json").write_text('{"sta')
    run = read_run(folder)
    assert (run.last_step, len(run.steps), len(run.validations), run.starts, run.config_text) == (1, 1, 1, (), "")
    assert "run" in page([run])


def answers_file(folder, step, *texts):
    """Writes what a job writes of its answers after a step; the last one is wrong. Args: texts: the answers."""
    (folder / "answers").mkdir(exist_ok=True)
    card = {"question": "<image>\n<image>what is <b>it</b>?", "reference": "a bar", "images": ["aaaa", "bbbb"]}
    cards = [card | {"answer": text, "right": text != texts[-1]} for text in texts]
    (folder / "answers" / f"step-{step}.json").write_text(json.dumps({"step": step, "answers": cards}))


def test_the_newest_sheet_of_samples_is_on_the_page(tmp_path):
    lines = [STEP | {"step": step} for step in (1, 2)]
    lines.append({"step": 2, "validation_loss": 3.0, "accuracy": {}, "samples_judged": 24, "samples_right": 5})
    run = write_run(tmp_path / "run", lines)
    assert read_run(run).samples == {}
    (run / "validation_samples").mkdir()
    for step, image in ((0, "AAAA"), (2, "BBBB"), (9, "CCCC")):
        (run / "validation_samples" / f"step-{step}.json").write_text(json.dumps({"step": step, "image": image}))
    read = read_run(run)
    assert read.samples == {"step": 2, "image": "BBBB"}, "step 9 is of a run that was taken up again before it"
    assert [n.value for n in numbers(read) if n.label == "samples as their prompts say"] == ["5 of 24"]
    assert '"samples":{"step":2,"image":"BBBB"}' in page([read])
    (run / "validation_samples" / "step-2.json").write_text("[]")
    assert read_run(run).samples == {}


def test_the_newest_answers_of_a_run_are_on_its_page(tmp_path):
    lines = [{"step": 1} | STEP, {"step": 2} | STEP]
    lines.append({"step": 2, "validation_loss": 3.0, "accuracy": {}, "answers": 2, "answers_right": 1})
    folder = write_run(tmp_path / "run", lines)
    assert read_run(folder).answers == {}
    for step in (0, 2, 3):
        answers_file(folder, step, f"after {step}", "no")
    run = read_run(folder)
    assert run.answers["step"] == 2, "a later one is of an earlier start"
    assert [card["answer"] for card in run.answers["answers"]] == ["after 2", "no"]
    assert "after 2" in page([run]) and "after 0" not in page([run])
    assert {n.label: (n.value, n.note) for n in numbers(run)}["exact answers"] == ("1 of 2", "step 2")
    (folder / "answers" / "step-2.json").write_text("{")
    assert read_run(folder).answers == {} and page([read_run(folder)])


def test_an_older_run_lacks_some_charts_and_no_more(tmp_path):
    old = read_run(write_run(tmp_path / "old", [{"step": s} | STEP for s in (1, 2)]))
    found = charts([old])
    assert titles(found) == [
        "Loss", "Throughput", "Step time", "Model FLOPs utilisation", "Bubble by what was waited for",
        "Tokens by modality", "Gradient norm",
    ]  # fmt: skip
    assert chart(found, "Bubble by what was waited for") == {"all": [50.0, 50.0]}
    assert chart(found, "Tokens by modality") == {"text": [60.0, 60.0], "image": [40.0, 40.0]}
    labels = [number.label for number in numbers(old)]
    assert labels == ["steps", "loss", "tokens", "training time", "throughput", "step", "MFU", "bubble"]


def test_charts_have_the_numbers_of_the_file(tmp_path):
    more = {"compute_s_vision": 1.5, "compute_s_dit": 0.5, "mfu_vision": 0.2, "mfu_dit": None,
            "bubble_vision": 0.3, "bubble_dit": 0.1, "bubble_other": 0.1,
            "makespan_s": 2.0, "planned_makespan_s": 1.0, "plan_makespan_s": 1.0, "plan_first_makespan_s": 1.25,
            "plan_lower_bound_s": 0.8, "plan_gap": 0.25, "plan_late": 2, "plan_failed": 0, "plan_invalid": 1,
            "memory_predicted_gib": 1.0, "memory_measured_gib": None}  # fmt: skip
    validation = {"step": 2, "validation_loss": 1.5, "accuracy": {"": 0.25, "easy": 0.5}, "recall": {"images@5": 0.25},
                  "shuffled_captions_loss": 2.5}  # fmt: skip
    lines = [{"step": 1} | STEP | more, {"step": 2} | STEP | more | {"mfu_dit": 0.4}, validation]
    run = read_run(write_run(tmp_path / "run", lines))
    assert run.modules == ("vision", "dit")
    found = charts([run])
    assert chart(found, "Loss") == {
        "training": [2.0, 2.0], "validation": [1.5], "validation, other captions": [2.5],
    }  # fmt: skip
    assert chart(found, "Answers right") == {"no grade": [25.0], "easy": [50.0]}
    assert chart(found, "Pairs found") == {"images@5": [25.0]}
    mfu = chart(found, "Model FLOPs utilisation")
    assert mfu == {"whole step": [10.0] * 2, "vision": [20.0] * 2, "dit": [None, 40.0]}
    assert chart(found, "Bubble by what was waited for") == {
        "vision": [30.0] * 2,
        "dit": [10.0] * 2,
        "other": [10.0] * 2,
    }
    assert chart(found, "Compute by module") == {"vision": [1.5] * 2, "dit": [0.5] * 2}
    assert chart(found, "Makespan") == {"measured": [2.0] * 2, "planned": [1.0] * 2, "lower bound": [0.8] * 2}
    planner = chart(found, "Planner")
    assert planner["gap to the bound"] == [25.0] * 2
    assert planner["gain over the first plan"] == pytest.approx([20.0] * 2)
    assert chart(found, "Steps with their first plan") == {"late": [2] * 2, "failed": [0] * 2, "invalid": [1] * 2}
    assert chart(found, "Memory of the most loaded rank") == {"predicted": [1.0] * 2}


def test_several_runs_are_told_apart_by_colour_and_curves_by_dash(tmp_path):
    runs = [read_run(write_run(tmp_path / name, [{"step": 1} | STEP])) for name in ("one", "two")]
    found = next(c for c in charts(runs) if c.title == "Step time")
    assert [series.label for series in found.series] == [
        f"{run}: {what}" for run in ("one", "two") for what in ("step", "waits for data", "waits for a plan")
    ]
    assert [series.dash for series in found.series] == [0, 1, 2, 0, 1, 2]
    assert len({series.colour for series in found.series}) == 2
    assert not any(c.stacked for c in charts(runs))


def test_an_elastic_run_shows_its_nodes_above_its_throughput(tmp_path):
    lines = [
        {"event": "membership", "kind": "started", "nodes": 4, "generation": 1, "step": 0, "redone_steps": 0},
        {"step": 1, "generation": 1, "nodes": 4, "pipelines": 2, "time_in_steps": 0.9} | STEP,
        {"step": 2, "generation": 1, "nodes": 4, "pipelines": 2, "time_in_steps": 0.9} | STEP,
        {"event": "membership", "kind": "lost", "nodes": 3, "generation": 2, "step": 1, "redone_steps": 1},
        {"step": 2, "generation": 2, "nodes": 3, "pipelines": 1, "time_in_steps": 0.8} | STEP | {"loss": 5.0},
        {"step": 2, "generation": 1, "nodes": 4, "pipelines": 2, "time_in_steps": 0.9} | STEP,  # of an outcast
    ]
    run = read_run(write_run(tmp_path / "run", lines))
    assert run.column("loss") == [2.0, 5.0] and [event["kind"] for event in run.events] == ["started", "lost"]
    found = charts([run])
    assert chart(found, "Nodes") == {"nodes": [4, 3], "pipelines": [2, 1]}
    assert titles(found).index("Nodes") + 1 == titles(found).index("Throughput")
    shown = {number.label: (number.value, number.note) for number in numbers(run)}
    assert shown["time in finished steps"] == ("80.0%", "of the job's; changes of nodes: 1, steps redone: 1")
    plain = read_run(write_run(tmp_path / "plain", [{"step": 1} | STEP]))
    assert "Nodes" not in titles(charts([plain])) and "time in finished steps" not in str(numbers(plain))


def test_numbers_are_medians_of_the_later_half(tmp_path):
    late = {"tps": 70.0, "step_time_s": 0.5, "data_time_s": 0.1, "bubble_vision": 0.3, "mfu_vision": 0.125,
            "makespan_ratio": 1.5, "plan_late": 3, "plan_failed": 0, "plan_invalid": 0, "plan_gap": -1e-15,
            "memory_measured_gib": 2.0, "memory_predicted_gib": 1.5}  # fmt: skip
    lines = [{"step": 1} | STEP, {"step": 2} | STEP, {"step": 3} | STEP | late, {"step": 4} | STEP | late]
    run = read_run(write_run(tmp_path / "run", lines, config="[training]\nsteps = 9\n"))
    found = {number.label: (number.value, number.note) for number in numbers(run)}
    assert found["steps"] == ("4", "of 9")
    assert found["tokens"] == ("400", "")
    assert found["training time"] == ("3 s", "without validation")
    assert found["throughput"][0] == "70 /s"
    assert found["step"][0] == "500 ms"
    assert found["MFU vision"][0] == "12.5%"
    assert found["bubble"] == ("50.0%", "30.0% for vision")
    assert found["measured / planned"][0] == "1.50"
    assert found["planner gap"][0] == "0.0%"
    assert found["first plans run"] == ("3", "3 late")
    assert found["peak memory"] == ("2.00 GiB", "predicted 1.50")
    assert found["time lost to waits"] == ("20.0%", "20.0% data, 0.0% plans")


FAR_OFF = {
    "mfu": (0.05, "The devices reach little of their peak"),
    "bubble": (0.6, "Pipeline ranks are idle for long"),
    "makespan_ratio": (
        2.5,
        "Costs are not of this machine and its load, ",
    ),
    "plan_gap": (0.3, "raise planner.search.budget_evaluations"),
    "plan_late": (3, "Searches end too late"),
    "plan_failed": (3, "Searches fail"),
    "memory_measured_gib": (1.2, "It was above the limit of 1.00 GiB"),
    "data_time_s": (0.3, "raise data.num_workers"),
    "plan_time_s": (0.3, "Steps wait for plans"),
}
WELL = {"mfu": 0.4, "bubble": 0.1, "makespan_ratio": 1.2, "plan_gap": 0.01, "plan_late": 0, "plan_failed": 0,
        "memory_measured_gib": 0.9, "memory_predicted_gib": 0.8, "memory_limit_gib": 1.0}  # fmt: skip


@pytest.mark.parametrize("key", FAR_OFF)
def test_a_number_that_is_far_off_has_a_sentence(tmp_path, key):
    value, sentence = FAR_OFF[key]
    well = {"step": 1} | STEP | WELL
    assert not [number.advice for number in numbers(read_run(write_run(tmp_path / "well", [well]))) if number.advice]
    (advice,) = [
        number.advice
        for number in numbers(read_run(write_run(tmp_path / "off", [well | {key: value}])))
        if number.advice
    ]
    assert sentence in advice


@pytest.mark.parametrize(("ratio", "far"), [(0.4, True), (0.6, False), (1.9, False), (2.1, True)])
def test_costs_are_called_wrong_both_ways_from_twofold_on(tmp_path, ratio, far):
    run = read_run(write_run(tmp_path / "run", [{"step": 1} | STEP | WELL | {"makespan_ratio": ratio}]))
    assert any("not of this machine" in number.advice for number in numbers(run)) is far


def test_a_run_without_mfu_shows_its_flops(tmp_path):
    line = (
        {"step": 1}
        | STEP
        | {"mfu": None, "tflops": 0.004, "mfu_vision": None, "tflops_vision": 0.01, "bubble_vision": 0.1}
    )
    run = read_run(write_run(tmp_path / "cpu", [line]))
    assert chart(charts([run]), "Model FLOP/s") == {"whole step": [4.0], "vision": [10.0]}
    assert "Model FLOPs utilisation" not in titles(charts([run]))
    found = {number.label: number.value for number in numbers(run)}
    assert found["model FLOP/s"] == "4 G" and "MFU" not in found
    known = read_run(write_run(tmp_path / "gpu", [line | {"mfu": 0.4, "mfu_vision": 0.5}]))
    assert "Model FLOP/s" not in titles(charts([known])) and "Model FLOPs utilisation" in titles(charts([known]))


def test_a_run_may_be_named_like_a_part_of_the_page(tmp_path):
    text = page([read_run(write_run(tmp_path / "@data@", [{"step": 1} | STEP]))])
    assert "<title>@data@ - mmtrain</title>" in text and '"name":"@data@"' in text


def test_long_runs_are_thinned_to_means_and_counts_to_their_last():
    x, y = list(range(1, 11)), [1.0, 3.0, None, 5.0, None, None, 7.0, 9.0, 11.0, None]
    assert thinned(x, y, most=5) == ([2, 4, 6, 8, 10], [2.0, 5.0, None, 8.0, 11.0])
    assert thinned(x, y, most=5, last=True)[1] == [3.0, 5.0, None, 9.0, 11.0]
    assert thinned(x, y, most=10) == (x, y)
    assert thinned([], []) == ([], [])
    assert evenly(range(100), 4) == [0, 33, 66, 99]


def test_timelines_after_the_last_step_are_of_a_run_that_was_given_up(tmp_path):
    folder = write_run(tmp_path / "run", [{"step": s} | STEP for s in range(1, 6)])
    (folder / "timelines").mkdir()
    for step in (2, 4, 6):
        (folder / "timelines" / f"step-{step}.json").write_text(json.dumps(TIMELINE | {"step": step}))
    (folder / "timelines" / "step-5.json").write_text('{"step": 5, "act')
    assert [timeline["step"] for timeline in read_run(folder).timelines] == [2, 4]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "is not a folder; name the job.dump_folder of a job"),
        ({}, "has no metrics.jsonl, so no job ran in it"),
        ({"config.toml": ""}, "has no metrics.jsonl yet; try again"),
        ({"metrics.jsonl": '{"step": 0, "validation_loss": 1.0}\n'}, "has no step yet"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, files, message):
    folder = tmp_path / "run"
    if files is not None:
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_run(folder)


def test_a_page_that_cannot_be_written_is_refused(tmp_path):
    folder = write_run(tmp_path / "run", [{"step": 1} | STEP])
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory; name a file"):
        write_page([folder], tmp_path / "nowhere" / "page.html")
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        write_page([folder], tmp_path)


def test_nothing_in_a_run_can_end_the_page_s_script(tmp_path):
    evil = '[job]\ndescription = "</script><img src=x>"\n'
    text = page([read_run(write_run(tmp_path / "<b>run</b>", [{"step": 1} | STEP], config=evil))])
    assert text.count("</script>") == 2  # the page's own
    assert "<img" not in text and "<b>run" not in text


def test_a_run_may_be_called_like_a_mark_of_the_page(tmp_path):
    text = page([read_run(write_run(tmp_path / "@data@", [{"step": 1} | STEP], '[job]\ndescription = "@script@"\n'))])
    assert "<title>@data@ - mmtrain</title>" in text
    data = json.loads(text.partition('<script type="application/json" id="data">')[2].partition("</script>")[0])
    assert (data["runs"][0]["name"], data["runs"][0]["description"]) == ("@data@", "@script@")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("images", value) for value in (7, None, "aaaa", [7])),
        *(("question", None), ("answer", 3), ("right", "x"), ("reference", [])),
    ],
)
def test_an_answer_of_another_form_is_left_out(tmp_path, key, value):
    """A script of the page would fail on it, and show nothing of the run."""
    folder = write_run(tmp_path / "run", [{"step": 1} | STEP])
    answers_file(folder, 1, "yes", "no")
    path = folder / "answers" / "step-1.json"
    record = json.loads(path.read_text())
    record["answers"][0][key] = value
    record["answers"].append(7)
    path.write_text(json.dumps(record))
    assert [card["answer"] for card in read_run(folder).answers["answers"]] == ["no"]
    path.write_text(json.dumps(record | {"step": "1"}))
    assert read_run(folder).answers == {}


TIMELINE = {
    "step": 1, "modules": ["language"], "num_ranks": 1, "stages": [[0, 0, 0, 3]], "deferred": [],
    "actions": [[0, "F", 0, 0, 0.0, 1.0, 0.0, 1.0, 3, 5, 0, 1]],
    "waits": {"measured": [[0, 0.0, 0.5, None]], "planned": []},
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"actions": 7}, {"actions": [7]}, {"actions": [[0, "F"]]}, {"actions": [[1, *TIMELINE["actions"][0][1:]]]},
        {"stages": []}, {"stages": [[0]]}, {"num_ranks": "1"}, {"modules": None}, {"waits": {}}, {"step": None},
    ],
)  # fmt: skip
def test_a_timeline_of_another_form_is_left_out(tmp_path, change):
    folder = write_run(tmp_path / "run", [{"step": 1} | STEP])
    (folder / "timelines").mkdir()
    path = folder / "timelines" / "step-1.json"
    path.write_text(json.dumps(TIMELINE))
    assert read_run(folder).timelines == (TIMELINE,)
    path.write_text(json.dumps(TIMELINE | change))
    assert read_run(folder).timelines == ()
