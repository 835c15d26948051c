"""`mmtrain tune`: candidates are TOML, small spaces are searched to their best, and what is written trains."""

import itertools
from dataclasses import replace

import pytest

from mmtrain.commands.cli import main
from mmtrain.config import config
from mmtrain.config.topology import JobLayout
from mmtrain.errors import ConfigError
from mmtrain.simulator.allocation.candidate import Candidate
from mmtrain.simulator.allocation.candidate_judge import Effort, Judge, Judged
from mmtrain.simulator.allocation.degrees import values_of
from mmtrain.simulator.allocation.space import AXES, Space
from mmtrain.simulator.allocation.tune import Tuner, ordered
from mmtrain.simulator.drawn_steps import drawn_steps
from mmtrain.simulator.typical_iterations import usual_workload
from tests.jobs import write_config

ON_H100 = ["planner.hardware=h100", "training.global_batch_size=8"]
LAST = Effort(num_steps=2, evaluations=20)


def tuner(job, num_gpus, **changes):
    steps = drawn_steps(job, usual_workload(job), 2, image_side=56)
    return Tuner(
        space=Space(config=job, num_gpus=num_gpus, **changes),
        judge=Judge(config=job, steps=lambda of: steps),
        effort=LAST,
    )


def all_of(space):
    """Every candidate of a space: all degrees with the values of all axes, at most one of each axis."""
    for first in space.first():
        degrees = first.job(space.config).parallelism.layout if runs(first, space.config) else None
        if degrees is None:
            continue
        choices = {axis: [{}] for axis in AXES}
        for axis, values in space.others(degrees):
            choices[axis].append(values)
        for cut, braided, picked in itertools.product(
            (False, True), (False, True), itertools.product(*choices.values())
        ):
            one = space.searched_cut(first, degrees) if cut else first
            one = space.braided(one, degrees) if braided else one
            if one is not None:
                yield one.having({key: value for values in picked for key, value in values.items()})


def runs(candidate, job):
    try:
        return candidate.job(job)
    except ConfigError:
        return None


# ------------------------------------------------------------------------------------------- candidates


@pytest.mark.parametrize(
    ("name", "num_gpus"),
    [
        ("debug_text", 2),
        ("debug_qwen2_vl", 4),
        ("debug_sound", 2),
        ("debug_t2v", 4),
        ("vlm_s", 16),
        ("qwen2_vl_7b", 16),
    ],
)
def test_the_toml_of_each_candidate_loads_to_its_job(name, num_gpus, tmp_path):
    base = config.find_file(f"{name}.toml").resolve()
    changes = ["planner.hardware=h100"]
    job = config.load(base, changes)
    space = Space(config=job, num_gpus=num_gpus, replicate=True)
    path, checked = tmp_path / "job.toml", 0
    candidates = list(all_of(space))
    for one in candidates[:: max(1, len(candidates) // 30)]:
        path.write_text(f'extends = "{base}"\n{one.toml(job)}')
        made = runs(one, job)
        if made is None:
            with pytest.raises(ConfigError):
                config.load(path, changes)
        else:
            loaded = config.load(path, changes)
            assert replace(loaded, job=made.job) == made, one.described(job)
            checked += 1
    assert checked >= 10


def test_values_of_the_command_line_stay():
    job = config.load("vlm_s.toml", ["planner.hardware=h100", "parallelism.tensor_parallel_degree=2"])
    keys = ("parallelism.tensor_parallel_degree", "activation_checkpoint.mode", "model.encoder.num_segments")
    space = Space(config=job, num_gpus=16, fixed=frozenset(keys))
    made = [one.job(job) for one in all_of(space) if runs(one, job)]
    assert len({one.parallelism.layout for one in made}) > 5
    for one in made:
        assert one.parallelism.tensor_parallel_degree == 2
        assert one.activation_checkpoint.mode == "full" and one.model.encoder.num_segments == 2
    assert {one.parallelism.pipeline_parallel_schedule for one in made} >= {"interleave", "ZB-AutoSchedule"}


def test_a_given_number_of_replicas_stays():
    key = "parallelism.data_parallel_replicate_degree"
    job = config.load("debug_text.toml", [*ON_H100, f"{key}=2"])
    for replicate in (False, True):
        space = Space(config=job, num_gpus=8, fixed=frozenset({key}), replicate=replicate)
        found = [one.job(job).parallelism.layout for one in space.first()]
        assert len(found) > 5 and {mesh.dp_replicate for mesh in found} == {2}


def test_candidates_that_fail_at_last_are_no_answer():
    """Nothing fits into the steps of the last look, which are longer than those of the first."""
    job = config.load("debug_text.toml", ON_H100)
    search = tuner(job, 2)
    judge = search.judge.judge
    search.judge.judge = lambda one, effort: (
        Judged(candidate=one, problem="no plan fits") if effort is LAST else judge(one, effort)
    )
    with pytest.raises(ConfigError, match=r"tune: none of \d candidates runs; the first: no plan fits"):
        search.run()


def test_other_numbers_of_tokens_keep_the_tokens_of_a_step():
    job = config.load("debug_text.toml", ON_H100)
    space = Space(config=job, num_gpus=2, tokens=(job.training.seq_len, 2 * job.training.seq_len))
    sizes = {(one.training.seq_len, one.training.global_batch_size) for one in (c.job(job) for c in space.first())}
    assert len(sizes) == 2
    assert len({tokens * batch for tokens, batch in sizes}) == 1


def test_an_axis_that_is_left_out_stays_as_the_job_has_it():
    job = config.load("vlm_s.toml", ["planner.hardware=h100"])
    for axis, keys in {
        "degrees": ("parallelism.tensor_parallel_degree", "parallelism.encoder_tensor_parallel"),
        "cut": ("model.encoder.num_segments", "planner.partition", "planner.placement"),
        "memory": ("activation_checkpoint.mode", "planner.memory_limit"),
        "schedule": ("parallelism.pipeline_parallel_schedule", "planner.search.interleave"),
        "braid": ("planner.search.braid",),
    }.items():
        space = Space(config=job, num_gpus=16, axes=tuple(other for other in AXES if other != axis))
        for one in all_of(space):
            assert not one.difference(job).keys() & set(keys), axis


# --------------------------------------------------------------------------------------------- judging


def test_a_part_of_a_step_stands_for_the_whole():
    """The heaviest replica's first microbatches, and what they leave out in proportion to its work."""
    job = config.load("debug_qwen2_vl.toml", [*ON_H100, "training.global_batch_size=32"])
    judge = tuner(job, 2).judge
    of = Space(config=job, num_gpus=4)
    for degrees in (JobLayout.grid(pp=2, dp_shard=2), JobLayout.grid(dp_shard=4), JobLayout.grid(pp=2, tp=2)):
        candidate = of.settled(values_of(degrees))
        whole = judge.judge(candidate, Effort(evaluations=0))
        part = judge.judge(candidate, Effort(evaluations=0, num_microbatches=16))
        assert whole.mean_s == pytest.approx(part.mean_s, rel=0.1), degrees
        assert part.mfu is None and whole.mfu > 0


def test_ties_are_broken_by_simplicity():
    job = config.load("debug_text.toml", ON_H100)

    def row(seconds, **values):
        keys = {"cp": "parallelism.context_parallel_degree", "tp": "parallelism.tensor_parallel_degree"}
        return Judged(candidate=Candidate().having({keys[k]: v for k, v in values.items()}), seconds=seconds)

    fastest, simple = row((1.00, 2.00, 3.00), tp=2, cp=2), row((1.02, 1.99, 3.01), tp=2)
    # The mean difference is 0.0067 with a standard error of 0.0088: a tie.
    assert ordered([fastest, simple], job) == [simple, fastest]
    slower = row((1.02, 2.02, 3.021), tp=2)  # 0.0203 with an error of 0.0003: none
    assert ordered([slower, fastest], job) == [fastest, slower]
    assert ordered([row((1.0,), tp=2, cp=2), row((1.0001,), tp=2)], job)[0].seconds == (1.0,)


@pytest.mark.parametrize("num_gpus", [2, pytest.param(8, marks=pytest.mark.nightly)])
def test_the_best_of_a_small_space_is_found(num_gpus):
    job = config.load("debug_text.toml", [*ON_H100, "model.language.config.num_hidden_layers=8"])
    search = tuner(job, num_gpus)
    best = search.run().best
    looks = [search.judge.judge(one, LAST) for one in dict.fromkeys(all_of(search.space))]
    fastest = min(look.mean_s for look in looks)
    assert len(looks) > 30
    assert best.mean_s <= fastest * 1.005, best.candidate.described(job)


@pytest.mark.nightly
def test_two_runs_are_equal():
    job = config.load("debug_qwen2_vl.toml", ON_H100)
    first, second = (tuner(job, 4).run() for _ in range(2))
    assert (first.rows, first.refused, first.num_tried) == (second.rows, second.refused, second.num_tried)


# ----------------------------------------------------------------------------------------- the command


def test_what_is_written_gives_the_same_seconds(capsys, tmp_path):
    out = tmp_path / "best.toml"
    words = ["--config", "debug_qwen2_vl.toml", "--cluster", "h100x4", "--iterations", "2", "--evaluations", "20"]
    assert main(["tune", *words, "--training.global_batch_size=8", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert main(["config", "--config", str(out)]) == 0
    capsys.readouterr()
    command = shown.strip().splitlines()[-1].partition("the same iterations: mmtrain ")[2].split()
    assert main(command) == 0
    seconds = out.read_text().removeprefix("# ").partition(" s an iteration")[0]
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("planned"))
    assert row.split()[1] == seconds
    assert f"1        {seconds}" in shown


def refused(capsys, *words):
    config_words = () if "--config" in words else ("--config", "vlm_s.toml")
    assert main(["tune", *config_words, *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cluster", "h800"], "--cluster h800 names no number of GPUs; write h800x16"),
        (["--cluster", "h801x8"], 'hardware "h801x8" does not exist'),
        (["--cluster", "h800x9"], "a cluster of 9 h800: a node has 8 of them"),
        (["--cluster", "h800x16", "--axes", "degree"], "axis 'degree' does not exist; did you mean 'degrees'?"),
        (["--cluster", "h800x16", "--schedules", "1F2B"], "1F1B"),
        (["--cluster", "cpux16", "--axes", "braid"], 'planner.hardware = "cpux16" (--cluster) hides no exchanges'),
        (
            ["--cluster", "h800x16", "--axes", "cut", "--parallelism.pipeline_parallel_degree=1"],
            "parallelism.pipeline_parallel_degree = 1 cuts nothing",
        ),
        (
            ["--cluster", "h800x16", "--axes", "schedule,braid", "--parallelism.tensor_parallel_degree=1"],
            "--axes braid: parallelism.tensor_parallel_degree = 1 exchanges nothing",
        ),
        (["--cluster", "h800x16", "--tokens", "5000"], "--tokens 5000 does not divide the 524288 tokens of a step"),
        (["--cluster", "h800x16", "--tokens", "many"], "--tokens many; give numbers of tokens"),
        (["--cluster", "h800x16", "--keep", "0"], "--keep 0; it is at least 1"),
        (["--cluster", "h800x16", "--seed", "-1"], "--seed -1; it is at least 0"),
        (["--cluster", "h800x16", "--planner.hardware=h800"], "--cluster sets planner.hardware"),
        (["--cluster", "h800x16", "--workload", "mixx"], "did you mean 'mix'?"),
        (["--cluster", "h800x16", "--out", "nowhere/best.toml"], "there is no folder nowhere"),
        (["--cluster", "h800x16", "--out", "best.yaml"], "name a file that ends in .toml"),
        (["--cluster", "h800x16", "--samples", "a.json", "--workload", "mix"], "both say what samples are"),
        (["--cluster", "a40x2"], "lacks "),
        (
            ["--cluster", "h800x16", "--parallelism.tensor_parallel_degree=3"],
            "no degrees of parallelism make 16 GPUs (--cluster) with parallelism.tensor_parallel_degree = 3",
        ),
        (
            ["--cluster", "h800x16", "--axes", "cut", "--parallelism.data_parallel_shard_degree=2"],
            "make 32 ranks; change a degree",
        ),
    ],
)
def test_bad_input_is_one_line(capsys, words, message):
    assert message in refused(capsys, *words)


def test_a_recipe_is_written_beside(capsys, tmp_path):
    """Where nothing is searched, one of FlexPipe's types is the fastest schedule of a deep chain."""
    out = tmp_path / "best.toml"
    changes = ["--training.global_batch_size=16", "--model.language.config.num_hidden_layers=16"]
    changes += ["--planner.enable=false", "--parallelism.pipeline_parallel_degree=4"]
    words = ["--config", "debug_text.toml", "--cluster", "h100x4", "--iterations", "1", "--schedules", "1F1B"]
    assert main(["tune", *words, *changes, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert f"written to {out} and {tmp_path / 'best_schedule.py'}" in shown
    assert main(shown.partition("the same iterations: mmtrain ")[2].split()) == 0
    seconds = out.read_text().removeprefix("# ").partition(" s an iteration")[0]
    assert capsys.readouterr().out.partition("best_schedule.py")[2].split()[0] == seconds
    out.unlink()
    assert "best_schedule.py exists" in refused(capsys, "--cluster", "h100x4", "--out", f"{tmp_path}/best.toml")


def test_a_file_that_exists_is_kept(capsys, tmp_path):
    out = tmp_path / "best.toml"
    out.write_text("mine")
    assert "exists; name another file" in refused(capsys, "--cluster", "h800x16", "--out", str(out))
    assert out.read_text() == "mine"


def test_what_is_not_the_same_for_all_rows_is_said(capsys):
    words = ["--config", "debug_text.toml", "--cluster", "h100x2", "--iterations", "1", "--keep", "9"]
    job = config.load("debug_text.toml")
    tokens, batch = job.training.seq_len, 512
    assert main(["tune", *words, f"--training.global_batch_size={batch}", "--tokens", f"{2 * tokens}"]) == 0
    shown = capsys.readouterr().out
    assert "note: rows with another training.seq_len read other batches" in shown
    assert "note: 256 of 512 microbatches of a step are simulated, those of the replicas with most work" in shown


def test_a_batch_with_fewer_microbatches_than_replicas_is_counted(capsys):
    words = [
        "--config",
        "debug_text.toml",
        "--cluster",
        "h100x4",
        "--training.global_batch_size=3",
        "--iterations",
        "1",
    ]
    assert main(["tune", *words]) == 0
    assert "refused: training.global_batch_size = 3 microbatches are fewer than the 4" in capsys.readouterr().out


def test_a_recipe_that_gets_stuck_is_counted(capsys, tmp_path):
    recipe = tmp_path / "stuck.py"
    recipe.write_text(
        "from mmtrain.schedule.recipe import Recipe\n\n\n"
        "def schedule(P):\n    return Recipe(step=lambda moment: None)\n"
    )
    words = ["--config", "debug_text.toml", "--cluster", "h100x2", "--iterations", "1", "--schedules", str(recipe)]
    assert main(["tune", *words]) == 0
    assert "refused: " in (shown := capsys.readouterr().out) and "the recipe gets stuck after" in shown


@pytest.mark.ranks
@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_tuned_job_trains_and_keeps_its_gradients(num_ranks, charts, tmp_path, capsys):
    path, out = write_config(tmp_path, charts), tmp_path / "best.toml"
    words = ["--config", str(path), "--cluster", f"cpux{num_ranks}", "--iterations", "1", "--evaluations", "10"]
    assert main(["tune", *words, "--parallelism.pipeline_parallel_degree=2", "--out", str(out)]) == 0
    assert main(["check-parity", "--config", str(out)]) == 0, capsys.readouterr()
    assert main(["train", "--config", str(out), "--training.steps=2"]) == 0
