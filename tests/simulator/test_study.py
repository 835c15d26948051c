"""`mmtrain simulate`, as a user types it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mmtrain.commands.cli import main
from mmtrain.config import config
from mmtrain.errors import ConfigError
from mmtrain.simulator.study import ScheduleForecast, SimulationQuestion, simulate_job, with_schedule
from mmtrain.simulator.study_report import table, to_json
from tests.jobs import write_sound_config

ROOT = Path(__file__).resolve().parents[2]
DEBUG = ["simulate", "--config", "debug_vlm.toml", "--image-side", "112", "--iterations", "2"]


def error(capsys, *words: str) -> str:
    assert main(["simulate", "--config", "debug_vlm.toml", *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    return line


def test_a_table_has_a_line_a_schedule(capsys):
    assert main([*DEBUG, "--schedule", "1F1B,interleave,ZB-H1", "--cluster", "a40x2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("2 ranks of a40x2 (pp 2, ")
    assert "workload mix, seed 0: 2 iterations of 4 microbatches" in lines[2]
    names = [line.split()[0] for line in lines[5:8]]
    assert names == ["1F1B", "interleave", "ZB-H1"]
    assert all("%" in line and "(pp_rank" in line for line in lines[5:8])


def test_pairs_are_counted_and_not_their_tokens(capsys):
    words = ["simulate", "--config", "debug_clip.toml", "--iterations", "2", "--schedule", "1F1B"]
    assert main(words) == 0
    said = "workload image_text_pairs, seed 0: 2 iterations of 4 microbatches, 32.0 pairs a microbatch"
    assert said in capsys.readouterr().out
    assert main([*words, "--workload", "mix"]) == 2
    assert "two towers, which read pairs; choose 'image_text_pairs'" in capsys.readouterr().err


def test_several_encoders_are_simulated(tmp_path, capsys):
    path = write_sound_config(tmp_path, tmp_path)
    words = ["simulate", "--config", str(path), "--image-side", "112", "--iterations", "2", "--cluster", "a40x2"]
    words += ["--parallelism.pipeline_parallel_degree=2", "--schedule", "1F1B,planned", "--evaluations", "5"]
    traced = tmp_path / "trace.json"
    assert main([*words, "--trace", str(traced)]) == 0
    out = capsys.readouterr().out
    assert " items a microbatch" in out and "each encoder has an item: vision, audio" in out
    spans = [event for event in json.loads(traced.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["cat"].partition(",")[0] for event in spans} == {"vision", "audio", "language"}


def test_a_second_table_says_where_the_time_goes(capsys):
    assert main([*DEBUG, "--schedule", "1F1B,interleave", "--cluster", "a40x2"]) == 0
    out = capsys.readouterr().out
    lines = out[out.index("% of ranks x seconds, 100 in all:") :].splitlines()
    header = ("schedule", "model FLOPs", "below peak", "recomputation", "exchanges", "bubble", "transfers")
    assert tuple(lines[1].split("  ")[0:1] + [word.strip() for word in lines[1].split("  ")[1:] if word])[:7] == header
    for line, name in zip(lines[2:4], ("1F1B", "interleave"), strict=True):
        first, *shares = line.split()
        assert (first, len(shares)) == (name, 8)
        assert sum(map(float, shares)) == pytest.approx(100, abs=0.41)
    assert main([*DEBUG, "--schedule", "1F1B", "--parallelism.tensor_parallel_degree=2"]) == 0
    assert "model FLOPs + below peak + exchanges" in capsys.readouterr().out  # one rate does not tell them apart


@pytest.mark.parametrize(("name", "start"), [("a.svg", b"<svg"), ("a.png", b"\x89PNG")])
def test_the_breakdown_is_drawn(tmp_path, name, start):
    assert main([*DEBUG, "--schedule", "1F1B,ZB-H1", "--breakdown", str(tmp_path / name)]) == 0
    made = (tmp_path / name).read_bytes()
    assert made.startswith(start)
    if name == "a.svg":
        found = re.findall(r"<title>(1F1B|ZB-H1), (.+): ([\d.]+) %</title>", made.decode())
        for schedule in ("1F1B", "ZB-H1"):
            assert sum(float(value) for bar, _, value in found if bar == schedule) == pytest.approx(100, abs=0.41)


def test_json_has_every_iteration(capsys):
    words = [*DEBUG, "--schedule", "1F1B,interleave", "--json", "--seed", "3", "--workload", "interleaved"]
    assert main(words) == 0
    first = capsys.readouterr().out
    found = json.loads(first)
    assert (found["ranks"], found["seed"], found["workload"], found["replicas"]) == (2, 3, "interleaved", 1)
    for schedule in found["schedules"]:
        times = [step["iteration_s"] for step in schedule["iterations"]]
        assert len(times) == 2
        assert schedule["iteration_s"] == pytest.approx(sum(times) / 2)
        parts = [step["breakdown"] for step in schedule["iterations"]] + [schedule["breakdown"]]
        assert [sum(found.values()) for found in parts] == pytest.approx([1, 1, 1])
        assert schedule["peak_bytes"] == max(max(step["peak_bytes"]) for step in schedule["iterations"])
    assert main(words) == 0
    assert capsys.readouterr().out == first


def test_images_and_traces_are_written(tmp_path, capsys):
    words = ["--schedule", "1F1B,interleave", "--png", str(tmp_path / "a.png"), "--trace", str(tmp_path / "t.json")]
    assert main([*DEBUG, *words]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"1F1B", "interleave"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--schedule", "2F2B"], "schedule '2F2B' does not exist"),
        (["--schedule", "1F1B,1F1B"], "named twice"),
        (["--workload", "mixx", "--image-side", "112"], "did you mean 'mix'"),
        (["--iterations", "0"], "num_iterations = 0"),
        (["--replicas", "0"], "num_replicas = 0"),
        (["--evaluations", "0"], "evaluations = 0"),
        (["--seed", "-1"], "seed = -1"),
        (["--image-side", "0"], "image_side = 0"),
        ([], "728 x 728 pixels makes 676 tokens"),
        (["--cluster", "h800x64"], "64 accelerators"),
        (["--cluster", "h900"], "h900"),
        (["--cluster", "h800x2", "--planner.hardware=h100"], "give one of the two"),
        (["--png", "/nowhere/at/all.png"], "/nowhere/at does not exist"),
        (["--breakdown", "all.pdf"], "--breakdown all.pdf: name a file that ends in .svg or .png"),
        (["--schedule", "ZBV", "--model.encoder.num_segments=3", "--image-side", "112"], "num_segments = 3"),
    ],
)
def test_bad_input_ends_with_one_line(capsys, words, message):
    assert message in error(capsys, *words)


def question(*overrides: str, **changes) -> SimulationQuestion:
    settings = {"schedules": ("interleave",), "num_iterations": 2, "image_side": 112}
    return SimulationQuestion(config=config.load("debug_vlm.toml", overrides), **(settings | changes))


def t2v_question(*overrides: str, **changes) -> SimulationQuestion:
    settings = {"schedules": ("interleave",), "num_iterations": 2}
    overrides = ("training.global_batch_size=4", "planner.hardware=h800x16", *overrides)
    return SimulationQuestion(config=config.load("t2v_s.toml", overrides), **(settings | changes))


def test_mfu_is_model_flops_over_what_the_ranks_of_a_replica_could_do():
    report = simulate_job(question("planner.hardware=a40x2"))
    (answer,) = report.answers
    assert report.machine.peak_flops is not None
    seconds = sum(step.iteration_s for step in answer.iterations)
    flops = sum(step.flops for step in answer.iterations)
    found = to_json(report)["schedules"][0]["mfu"]
    assert found == pytest.approx(flops / (seconds * 2 * report.machine.peak_flops))


def test_a_part_of_a_device_that_nothing_names_is_no_limit():
    report = simulate_job(question("planner.memory_limit=90%", "planner.enable=true"))
    assert not report.answers[0].budgets and report.answers[0].iterations
    (note,) = (note for note in report.notes if "memory_limit" in note)
    assert note.startswith('planner.memory_limit = "90%" is left out: it is a part of a device, which --cluster names')
    named = simulate_job(question("planner.memory_limit=90%", "planner.enable=true", "planner.hardware=a40x2"))
    assert named.answers[0].budgets and not any("memory_limit" in note for note in named.notes)


def test_a_schedule_that_ignores_memory_limits_is_told_so():
    report = simulate_job(question("planner.search.activation_memory_gib=2.0", schedules=("1F1B", "interleave")))
    notes = [note for note in report.notes if "activation_memory_gib" in note]
    assert notes == ["1F1B bounds activations by its own rule; planner.search.activation_memory_gib is left out"]
    job, _ = with_schedule(report.question.config, "interleave")
    assert job.planner.search.activation_memory_gib == 2.0


def test_a_schedule_without_a_plan_is_an_answer(capsys):
    words = ["--schedule", "interleave,1F1B", "--planner.search.activation_memory_gib=0.001"]
    assert main([*DEBUG, *words]) == 1
    out = capsys.readouterr().out
    assert "interleave: NO PLAN: iteration 0: " in out
    assert "\n1F1B " in out


def test_a_schedule_without_a_plan_names_the_searched_one_that_fits(capsys):
    """With a limit that holds only plans that recompute, as a large job without recomputation."""
    words = ["--planner.search.activation_memory_gib=0.005"]
    for asked, status in (
        (["--schedule", "interleave,planned"], 1),
        (["--planner.enable=true"], 0),  # the job trains the searched plan
        (["--schedule", "interleave", "--planner.enable=true"], 1),
    ):
        assert main([*DEBUG, *words, *asked]) == status, asked
        out = capsys.readouterr().out
        (line,) = (line for line in out.splitlines() if line.startswith("interleave: NO PLAN"))
        assert "let the planner choose what to recompute (planner.enable)" in line
        assert line.endswith("planned fits: planner.enable = true trains it") == ("\nplanned " in out)


def test_too_much_memory_is_said():
    report = simulate_job(question("planner.hardware=a40x2"))
    assert "OUT OF MEMORY" not in table(report)
    object.__setattr__(report.machine, "memory_bytes", 1e6)
    rank, peak = report.answers[0].most_loaded
    assert f"OUT OF MEMORY: pp_rank {rank} needs {peak / 2**30:.3g} GiB" in table(report)
    assert to_json(report)["schedules"][0]["fits"] is False


def test_replicas_that_are_left_out_are_said():
    asked = question("parallelism.data_parallel_shard_degree=4", num_replicas=3)
    assert asked.simulated_replicas == 3
    assert any(note.startswith("3 of 4 data-parallel replicas") for note in simulate_job(asked).notes)
    assert not any("replicas" in note for note in simulate_job(question()).notes)


def test_all_schedules_read_the_same_batches():
    report = simulate_job(question(schedules=("1F1B", "GPipe")))
    one, other = report.answers
    assert [step.num_images for step in one.iterations] == [step.num_images for step in other.iterations]
    assert [step.flops for step in one.iterations] == [step.flops for step in other.iterations]


def test_samples_are_assigned_as_the_job_assigns_them():
    degrees = ["parallelism.data_parallel_shard_degree=2", "training.seq_len=1024", "training.global_batch_size=12"]

    def simulated(policy):
        asked = question(*degrees, f"assignment.policy={policy}", num_iterations=2)
        report = simulate_job(asked)
        (answer,) = report.answers
        assert to_json(report)["schedules"][0]["replica_spread_s"] == answer.mean("replica_spread_s")
        assert f"{answer.mean('replica_spread_s'):.4f}" in table(report)
        return answer

    first_fit, balanced = simulated("none"), simulated("balanced")
    assert [step.num_images for step in first_fit.iterations] == [step.num_images for step in balanced.iterations]
    assert balanced.mean("replica_spread_s") < first_fit.mean("replica_spread_s") / 2
    assert balanced.mean("iteration_s") < first_fit.mean("iteration_s")


def test_a_named_schedule_judges_the_assignment_that_it_runs():
    """Also where the job searches its plans."""
    keys = ["parallelism.data_parallel_shard_degree=2", "training.global_batch_size=12", "assignment.policy=balanced"]
    named, searching = (
        simulate_job(question(*keys, f"planner.enable={on}", schedules=("interleave",))).answers[0]
        for on in ("false", "true")
    )
    assert named.mean("iteration_s") == searching.mean("iteration_s")


def test_the_most_loaded_rank_is_that_of_any_iteration():
    (answer,) = simulate_job(question()).answers
    assert isinstance(answer, ScheduleForecast)
    rank, peak = answer.most_loaded
    assert peak == max(value for step in answer.iterations for value in step.peak_bytes)
    assert any(step.peak_bytes[rank] == peak for step in answer.iterations)


def test_no_question_has_impossible_numbers():
    with pytest.raises(ConfigError, match="num_iterations = 0; it is at least 1"):
        question(num_iterations=0)


@pytest.mark.parametrize(
    "name",
    [
        *("vlm_s", "vlm_m", "vlm_l", "vlm_xl_8k", "vlm_xl_16k"),
        *("t2v_s", "t2v_l", "t2v_xl_3k", "t2v_xl_6k"),
    ],
)
def test_the_command_in_each_papers_config_works(name, capsys):
    text = (ROOT / "configs" / f"{name}.toml").read_text()
    program, *words = text.splitlines()[0].removeprefix("# ").split()
    assert program == "mmtrain"
    words[words.index("--iterations") + 1] = "1"
    dp = config.load(f"{name}.toml").parallelism.layout.dp
    words += [f"--training.global_batch_size={max(2, dp)}"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "OUT OF MEMORY" not in out
    assert [line.split()[0] for line in out.splitlines()[5:8]] == ["1F1B", "Interleaved1F1B", "interleave"]


def test_torch_is_never_loaded():
    script = (
        "import sys\n"
        "from mmtrain.commands.cli import main\n"
        f"status = main({[*DEBUG, '--cluster', 'a40x2']!r})\n"
        "print(status, [m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_a_job_with_the_planner_has_its_searched_plans_too(capsys):
    assert main([*DEBUG, "--json"]) == 0
    first = capsys.readouterr().out
    named, searched = json.loads(first)["schedules"]
    assert (named["schedule"], searched["schedule"]) == ("interleave", "planned")
    assert searched["iteration_s"] < named["iteration_s"]
    pairs = zip(named["iterations"], searched["iterations"], strict=True)
    assert all(found["pipeline_s"] <= fixed["pipeline_s"] for fixed, found in pairs)
    assert main([*DEBUG, "--json"]) == 0
    assert capsys.readouterr().out == first
    assert main([*DEBUG, "--planner.enable=false", "--schedule", "planned", "--evaluations", "3"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[5].startswith("planned ")
    assert "note: planned: the planner tries 3 plans for each iteration (--evaluations)" in out


def test_a_search_chooses_memory_where_a_schedule_alone_has_no_plan():
    asked = question("planner.memory_limit=16MiB", schedules=("interleave", "planned"), num_iterations=1)
    named, searched = simulate_job(asked).answers
    assert named.problem and not searched.problem


def test_a_search_without_a_limit_gets_one_where_the_device_is_known(capsys):
    words = [*DEBUG, "--schedule", "planned", "--evaluations", "5"]
    assert main([*words, "--cluster", "a40x2"]) == 0
    assert 'note: planned: planner.memory_limit = "90%", as the job sets none' in capsys.readouterr().out
    for more in ([], ["--cluster", "a40x2", "--planner.memory_limit=2GiB"]):
        assert main([*words, *more]) == 0
        assert "as the job sets none" not in capsys.readouterr().out


@pytest.mark.parametrize("enable", ["true", "false"])
def test_a_planner_that_is_left_out_is_said(enable):
    notes = simulate_job(question(f"planner.enable={enable}")).notes
    assert any(note.startswith("planner.enable is left out") for note in notes) is (enable == "true")


# ------------------------------------------------------------------------------------- text to video


def test_a_text_to_video_job_reads_clips(capsys):
    words = [
        "simulate",
        "--config",
        "t2v_s.toml",
        "--cluster",
        "h800x16",
        "--iterations",
        "2",
        "--schedule",
        "interleave",
    ]
    words += ["--training.global_batch_size=4"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "workload video_captions, seed 0: 2 iterations of 4 microbatches, " in out
    assert " clips a microbatch\n" in out
    assert "note: latents count as given: no VAE runs here" in out
    assert main([*words, "--json", "--workload", "video_captions"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["workload"] == "video_captions"
    assert len(found["clips_per_microbatch"]) == 2
    assert all(1 <= count <= 8 for count in found["clips_per_microbatch"])


def test_larger_clips_take_longer_than_in_proportion():
    small, large = (simulate_job(t2v_question(image_side=side)).answers[0] for side in (128, 256))
    assert large.mean("flops") > 4 * small.mean("flops")  # four times the tokens, and more pairs each
    assert large.mean("iteration_s") > 3 * small.mean("iteration_s")


def test_a_frozen_text_encoder_has_no_backward():
    both, frozen = (simulate_job(t2v_question(*more)).answers[0] for more in ((), ("model.language.trainable=false",)))
    assert frozen.mean("flops") < both.mean("flops")
    assert frozen.mean("iteration_s") < both.mean("iteration_s")


VAE = 'model.vae.config={model_type = "autoencoder_kl_wan"}'


def test_a_vae_fills_its_rank_unless_the_partition_is_mixed():
    open_cut = ("model.dit.num_segments=0", "model.language.num_segments=0", "planner.partition=mixed-latency")
    reports = [simulate_job(t2v_question(*more)) for more in ((), (VAE,), (VAE, *open_cut))]
    assert ["latents count as given: no VAE runs here" in report.notes for report in reports] == [True, False, False]
    plain, apart, mixed = (report.answers[0] for report in reports)
    assert not apart.problem and not mixed.problem
    assert apart.mean("flops") > 1.1 * plain.mean("flops")
    assert plain.mean("iteration_s") < mixed.mean("iteration_s") < apart.mean("iteration_s")
    assert apart.mean("bubble") > mixed.mean("bubble")


@pytest.mark.parametrize("partition", ["dip", "mixed-parameters", "mixed-latency"])
def test_text_to_video_models_can_be_cut_in_every_way(partition):
    ways = ("model.dit.num_segments=0", "model.language.num_segments=0", f"planner.partition={partition}")
    (answer,) = simulate_job(t2v_question(*ways)).answers
    assert not answer.problem
    assert answer.mean("iteration_s") > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workload", "mix"], "workload 'mix' does not go with a model that reads prompts and video clips"),
        (["--image-side", "8"], "clips of 8 x 8 pixels and 16 s have [64, 0, 0] patches"),
        (["--image-side", "16400"], "the DiT takes 1 to 1024"),
        (["--parallelism.tensor_parallel_degree=8", "--parallelism.pipeline_parallel_degree=2"], "model.dit: num_att"),
    ],
)
def test_bad_input_of_a_text_to_video_job_ends_with_one_line(capsys, words, message):
    assert main(["simulate", "--config", "t2v_s.toml", "--cluster", "h800x16", *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_clips_are_not_for_other_models(capsys):
    assert "'video_captions' does not go with a model that reads no video clips" in error(
        capsys, "--workload", "video_captions", "--image-side", "112"
    )


def test_a_problem_of_a_text_to_video_job_is_planned(tmp_path, capsys):
    from mmtrain.modality.typical import TypicalSizes
    from mmtrain.planner.iteration import IterationPlanner
    from mmtrain.simulator.make_job import make_job
    from mmtrain.simulator.workloads import draw

    job = t2v_question("training.global_batch_size=6").config
    planner = IterationPlanner(make_job(job))
    batching, problem = planner.problem(
        draw("video_captions", TypicalSizes.of(job), seed=0, iteration=0), searched=True
    )
    problem.write(tmp_path / "problem.json")
    out = tmp_path / "plan.json"
    assert main(["plan", str(tmp_path / "problem.json"), "--out", str(out), "--budget-evaluations", "50"]) == 0
    assert main(["check", str(tmp_path / "problem.json"), str(out)]) == 0
    actions = {(a["op"], a["stage"], a["work"]) for order in json.loads(out.read_text())["orders"] for a in order}
    dit = [s.index for s in planner.job.partition.of_module("dit")]
    works = [w for w, work in enumerate(batching.works) if batching.modules[work.module] == "dit"]
    assert {("F", stage, work) for stage in dit for work in works} <= actions
    assert "makespan" in capsys.readouterr().out
