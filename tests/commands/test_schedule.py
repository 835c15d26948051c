import csv
import io
import json
from pathlib import Path

import pytest

from mmtrain.commands.cli import main
from mmtrain.schedule.chain import plain_chain
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.problem import PlanningProblem
from tests.jobs import layout, write_config
from tests.schedule.problems import option, two_modules

CHAIN = ["--pp", "2", "--microbatches", "3"]


@pytest.fixture
def job(tmp_path, charts) -> Path:
    return write_config(tmp_path, charts)


def shown(capsys, *words: str) -> str:
    assert main(["schedule", *words]) == 0
    return capsys.readouterr().out


def refused(capsys, *words: str) -> str:
    assert main(["schedule", *words]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    return lines[0]


def test_list_names_every_schedule(capsys) -> None:
    lines = shown(capsys, "list").splitlines()
    assert [line.split()[0] for line in lines] == list(CATALOGUE)
    assert all(len(line.split()) > 3 for line in lines)


def test_show_draws_a_chain(capsys) -> None:
    def form(name: str) -> str:
        return shown(capsys, "show", "1F1B", *CHAIN, "--format", name)

    assert "1F1B: makespan 12 s" in form("text")  # (p - 1 + m)(f + b) = (1 + 3)(1 + 2)
    assert form("svg").startswith("<svg")
    json.loads(form("trace"))
    assert PlanningProblem.from_json(form("problem")).graph.num_ranks == 2
    assert json.loads(form("json"))["makespan_s"] == 12.0
    assert form("program").startswith("0F0.0 0SEND_F0.0>1 ")
    assert form("csv") == "0F0,0F1,,0B0,0F2,0B1,,0B2\n,1F0,1B0,1F1,1B1,1F2,1B2\n"
    assert form("csv-comms").startswith("0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,")


def test_show_takes_costs_and_segments(capsys) -> None:
    # (m + p - 1)(F + I + W), and a transfer to the last rank and one back
    assert "makespan 11.5 s" in shown(capsys, "show", "GPipe", *CHAIN, "--costs", "1,1.25,0.5,0.25")
    text = shown(capsys, "show", "1F1B", *CHAIN, "--segments", "2", "--format", "csv")
    assert {word.partition("F")[0] for word in text.replace("\n", ",").split(",") if "F" in word} == set("0123")


@pytest.mark.parametrize("form", ["csv", "csv-comms"])
def test_show_draws_what_torch_wrote(tmp_path, capsys, form: str) -> None:
    file = tmp_path / "plan.csv"
    assert main(["schedule", "show", "ZBV", *CHAIN, "--format", form, "--out", str(file)]) == 0
    out = shown(capsys, "show", str(file), "--costs", "1,1,1")
    assert out.splitlines()[-1] == shown(capsys, "show", "ZBV", *CHAIN).splitlines()[-1].replace("ZBV", "plan.csv")
    assert shown(capsys, "show", str(file), *CHAIN, "--segments", "2") == out, "the words that `compare` takes"
    for word, own in (("--pp", 2), ("--microbatches", 3), ("--segments", 2)):
        line = refused(capsys, "show", str(file), word, "7")
        assert f"{word} 7, but {file} is for {own}; leave it out" in line


def test_orders_as_csv_are_drawn_on_a_problem(tmp_path, capsys) -> None:
    file, problem = tmp_path / "plan.csv", tmp_path / "problem.json"
    for form, out in (("csv", file), ("problem", problem)):
        assert main(["schedule", "show", "ZB-H1", *CHAIN, "--format", form, "--out", str(out)]) == 0
    of_file = shown(capsys, "show", str(file), "--problem", str(problem))
    assert of_file == shown(capsys, "show", "ZB-H1", *CHAIN).replace("ZB-H1", str(file))


def test_show_draws_a_plan_of_a_problem(tmp_path, capsys) -> None:
    problem, plan = tmp_path / "problem.json.gz", tmp_path / "plan.json"
    two_modules(2, [1, 0, 2]).write(problem)
    first = shown(capsys, "show", "interleave", "--problem", str(problem)).splitlines()
    assert (
        main(["schedule", "show", "interleave", "--problem", str(problem), "--format", "json", "--out", str(plan)]) == 0
    )
    assert shown(capsys, "show", str(plan), "--problem", str(problem)).splitlines()[:-1] == first[:-1]


def test_show_draws_a_batch(job, capsys, tmp_path) -> None:
    overrides = [f"--{o}" for o in layout(pp=2)]
    assert "interleave: makespan" in shown(capsys, "show", "--config", str(job), "--batch", "1", *overrides)
    assert "ZB-H1: makespan" in shown(capsys, "show", "ZB-H1", "--config", str(job), *overrides)
    image = tmp_path / "plan.png"
    shown(capsys, "show", "--config", str(job), *overrides, "--format", "png", "--out", str(image))
    assert image.read_bytes().startswith(b"\x89PNG")


def test_a_batch_is_shown_as_the_job_assigns_it(job, capsys, tmp_path) -> None:
    out = tmp_path / "problem.json"
    keys = ["policy=entrain", "samples_per_step=24", "defer=true"]
    overrides = [*layout(pp=2), "training.global_batch_size=8", *(f"assignment.{key}" for key in keys)]
    words = [f"--{override}" for override in overrides]
    shown(capsys, "show", "--config", str(job), *words, "--format", "problem", "--out", str(out))
    assert PlanningProblem.read(out).graph.deferred


def test_compare_has_a_line_for_each_schedule(capsys) -> None:
    lines = shown(capsys, "compare").splitlines()
    assert [line.split()[0] for line in lines[1:-2]] == [*CATALOGUE, "planned"]
    rows = {row["schedule"]: row for row in json.loads(shown(capsys, "compare", "1F1B", "ZB-H1", "--format", "json"))}
    assert rows["1F1B"] == {
        "schedule": "1F1B", "makespan_s": 33.0, "bubble": pytest.approx(3 / 11), "idle_s": 9.0,
        "peak_bytes": 4 * 2.0**20, "least_peak_bytes": 2.0**20, "refused": None,
    }  # fmt: skip
    assert rows["ZB-H1"]["makespan_s"] == 27.0
    table = list(csv.DictReader(io.StringIO(shown(capsys, "compare", "GPipe", "--format", "csv"))))
    assert [(row["schedule"], float(row["makespan_s"])) for row in table] == [("GPipe", 33.0)]


def test_compare_searches_on_the_stages_of_the_best_schedule_before_it(tmp_path, capsys) -> None:
    problem = tmp_path / "problem.json"
    two_modules(2, [1, 0, 2, 3], language=option(3.0, 5.0)).write(problem)
    words = ["compare", "GPipe", "ZB-H1", "1F1B", "planned", "--problem", str(problem), "--evaluations", "200"]
    text = shown(capsys, *words, "--seed", "7")
    lines = text.splitlines()
    seconds = {line.split()[0]: float(line.split()[1]) for line in lines[1:5]}
    assert seconds["planned"] < min(seconds["GPipe"], seconds["ZB-H1"], seconds["1F1B"])
    assert lines[-1] == (
        "planned: what planner.enable makes of the stages of ZB-H1; 200 plans tried, seed 7 (--evaluations, --seed)"
    )
    assert shown(capsys, *words, "--seed", "7") == text
    alone = json.loads(shown(capsys, "compare", "planned", "--format", "json"))
    assert [(row["schedule"], row["makespan_s"]) for row in alone] == [("planned", 27.0)]


def test_compare_searches_a_batch_as_its_job_would(job, capsys) -> None:
    overrides = [f"--{o}" for o in layout(pp=2)]
    words = ["compare", "interleave", "planned", "--config", str(job), *overrides, "--format", "json"]
    named, searched = json.loads(shown(capsys, *words, "--evaluations", "50"))
    assert searched["makespan_s"] <= named["makespan_s"]
    named, searched = json.loads(
        shown(capsys, *words, "--evaluations", "50", "--planner.search.activation_memory_gib=0.003")
    )
    assert named["refused"] and not searched["refused"]  # with memory options of its own for each work


def test_show_says_what_exchanges_each_rank_waits_for(capsys) -> None:
    words = ("--pp", "4", "--microbatches", "12", "--exchange", "0.25")
    lines = shown(capsys, "show", "STP", *words).splitlines()
    assert lines[-2].startswith("STP: makespan 41.25 s")  # 2 * 12 * 1.5 + 3 * 0.5 + 15 * 0.25
    assert lines[-1] == "exposed exchanges s 2.25, 2.5, 2.75, 3"
    assert "L1" in lines[2] and "l8&L0" in "".join(lines)


def test_blocks_of_any_schedule_are_drawn_and_compared(capsys) -> None:
    words = ("--pp", "4", "--microbatches", "12", "--exchange", "0.25")
    plain, braided = (shown(capsys, "show", "ZBV", *words, *more).splitlines() for more in ((), ("--braid",)))
    assert "&" not in "".join(plain[:4]) and "&" in "".join(braided[:4])
    seconds = [float(lines[-2].split()[2]) for lines in (plain, braided)]
    assert seconds[1] < 0.95 * seconds[0]
    named, searched = json.loads(
        shown(
            capsys,
            "compare",
            "STP",
            "planned",
            *words,
            "--segments",
            "2",
            "--braid",
            "--evaluations",
            "50",
            "--format",
            "json",
        )
    )
    assert searched["makespan_s"] <= named["makespan_s"]


@pytest.mark.parametrize("words", [["--evaluations", "0"], ["--seed", "-1"]])
def test_compare_refuses_a_search_without_plans(words: list[str], capsys) -> None:
    assert "the first is at least 1, the second at least 0" in refused(capsys, "compare", *words)


def test_compare_says_why_a_schedule_has_no_plan(tmp_path, capsys) -> None:
    path = tmp_path / "problem.json"
    plain_chain(2, 4, CATALOGUE["1F1B"]).write(path)
    text = path.read_text().replace("[null, null]", "[1.5, 1.5]")
    path.write_text(text.replace("null", "1.5"))
    lines = shown(capsys, "compare", "GPipe", "interleave", "--problem", str(path)).splitlines()
    assert "rank 0, step 1: 0F1.0 raises activations to 2 bytes" in lines[1]
    assert lines[2].split()[1] == "24"  # one microbatch after the other


def test_compare_cuts_a_config_s_model_as_each_schedule_wants(job, capsys) -> None:
    overrides = [f"--{o}" for o in layout(pp=2)]
    lines = shown(capsys, "compare", "1F1B", "ZBV", "--config", str(job), *overrides).splitlines()
    assert float(lines[1].split()[1]) > 0
    assert lines[2].startswith("ZBV")
    assert "num_segments = 1: a V-shaped schedule" in lines[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["GPipe9"], "schedule 'GPipe9' does not exist"),
        (["--config", "a", "--problem", "b"], "not both"),
        (["--format", "png"], "needs --out"),
        (["--pp", "0"], "--pp 0; it is at least 1"),
        (["--segments", "0"], "--segments 0; it is at least 1"),
        (["ZBV", "--segments", "3"], "3 chunks on each rank; this schedule needs 2"),
        (["LoopedBFS", "--segments", "1"], "1 chunks on each rank; this schedule needs at least 2"),
        (["STP", "--segments", "3"], "3 chunks on each rank; this schedule needs 2"),
        (["--exchange", "-1"], "--exchange -1.0; it is between 0 and 1e9 seconds"),
        (["--braid"], "--braid without --exchange: blocks hide exchanges; give the chain some"),
        (["--problem", "nothing.json", "--exchange", "1"], "--exchange is for a plain chain"),
        (["--costs", "1,2"], "--costs 1,2: give three or four numbers, each 0 or between"),
        (["--costs", "1e308,1,1"], "--costs 1e308,1,1: give"),
        (["--costs", ""], "--costs : give"),
        (["--costs", "1,2,x"], "--costs 1,2,x: give three or four numbers"),
        (["--costs", "1,0,0"], "a backward takes time"),
        (["--training.steps=1"], "overrides a config; name it with --config"),
        (["--problem", "nothing.json"], "nothing.json"),
        (["--problem", "nothing.json", "--pp", "3"], "--pp is for a plain chain"),
        (["--problem", "nothing.json", "--costs", "1,1,1"], "--costs is for a plain chain"),
        (["--batch", "1"], "give --config"),
        (["--config", "debug_vlm.toml", "--batch", "-1"], "batches count from 0"),
        (["--out", "/nowhere/at/all.txt"], "the folder /nowhere/at does not exist"),
        (["plan.json"], "plan.json is a plan for some problem; name it with --problem FILE"),
        (["nothing.csv"], "nothing.csv: cannot be read: [Errno 2] No such file"),
    ],
)
def test_show_refuses(capsys, words: list[str], message: str) -> None:
    assert message in refused(capsys, "show", *words)


def test_show_names_the_file_that_is_no_plan(tmp_path, capsys) -> None:
    file = tmp_path / "plan.csv"
    file.write_text("0F0,0X0\n")
    assert f"{file}: row 0, column 1: '0X0' is not an action" in refused(capsys, "show", str(file))


def test_compare_refuses_an_unknown_name_before_it_plans(capsys) -> None:
    assert "schedule 'GPipe9' does not exist" in refused(capsys, "compare", "1F1B", "GPipe9")
