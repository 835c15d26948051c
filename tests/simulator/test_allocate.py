"""Algorithm 3 of Entrain, and `mmtrain allocate` as a user types it."""

import math
import tomllib
from dataclasses import replace

import pytest

from mmtrain.commands.cli import main
from mmtrain.commands.sample_files import drawn_costs
from mmtrain.config import config
from mmtrain.config.topology import JobLayout
from mmtrain.costs.machine import Machine
from mmtrain.errors import ConfigError
from mmtrain.simulator.allocation.allocate import allocate, described
from mmtrain.simulator.drawn_steps import divided, packed_step
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.whole_iteration import IterationSimulator

ON_A40 = ["planner.hardware=a40", "training.global_batch_size=8"]


@pytest.fixture(scope="module")
def job():
    return config.load("debug_vlm.toml", ON_A40)


@pytest.fixture(scope="module")
def costs(job):
    return drawn_costs(job, 256)


@pytest.fixture(scope="module")
def answer(job, costs):
    return allocate(job, costs, 8, finalists=4, largest=4096)


def test_all_gpus_are_used_and_the_fastest_comes_first(job, answer):
    for one in answer.ranked:
        degrees, ranks = one.estimate.mesh, one.estimate.ranks
        assert degrees.world_size == 8
        assert not ranks or sum(ranks) == degrees.pp
        assert job.training.global_batch_size % degrees.dp == 0
    seconds = [one.judged.mean_s for one in answer.ranked]
    assert seconds == sorted(seconds) and sum(s < math.inf for s in seconds) == 4
    assert {bool(one.estimate.ranks) for one in answer.ranked} == {True, False}
    assert answer.num_candidates > len(answer.ranked)


def test_a_step_waits_for_the_slowest_of_all_replicas(job, costs):
    """With one microbatch a replica and no pipeline, no step is shorter than its slowest microbatch alone."""
    ranked = allocate(job, costs, 8, finalists=12).ranked
    (whole,) = [one for one in ranked if one.estimate.mesh == JobLayout.grid(dp_shard=8)]
    alone = whole.estimate.candidate.job(job)
    machine = Machine.of(alone)
    simulator = IterationSimulator.of(alone, machine.network)
    step = packed_step(job, costs, (0, 0))
    assert len(step) == job.training.global_batch_size == 8
    metas = divided(step, 8)
    each = [simulator.simulate([meta])[0].iteration_s for meta in metas]
    assert whole.judged.mean_s == pytest.approx(simulator.simulate(metas)[0].iteration_s)
    assert whole.judged.mean_s >= max(each)
    assert simulator.simulate(metas[:2])[0].iteration_s < 0.99 * max(each), "two replicas are not all"


def test_equation_4_2_with_the_best_cut_of_each_module(job, costs, answer):
    """Of two modules with a rank each, all stages are known: the sum of both, and K - 1 times the longer one."""
    ranked = [one.estimate for one in allocate(job, costs, 2, finalists=6).ranked]
    pair = next(one for one in ranked if one.ranks == (1, 1))
    whole = next(one for one in ranked if one.mesh.pp == 1)
    count, total = job.training.global_batch_size, whole.seconds / (job.training.global_batch_size // 2)
    assert total < pair.seconds < count * total
    assert pair.seconds >= total + (count - 1) * total / 2


def test_what_it_prints_can_be_planned(job, answer, tmp_path):
    for one in answer.ranked:
        text = one.estimate.candidate.toml(job)
        tomllib.loads(text)
        path = tmp_path / "job.toml"
        path.write_text(f'extends = "{config.find_file("debug_vlm.toml").resolve()}"\n{text}')
        loaded = config.load(path, ON_A40)
        assert loaded.parallelism.layout.world_size == 8
        if one.judged.seconds:
            made = make_job(loaded)
            for name, ranks in zip(job.model.cut_modules, one.estimate.ranks, strict=False):
                assert len({stage.pp_rank for stage in made.partition.of_module(name)}) == ranks


def test_the_number_of_samples_goes_with_the_ranks(job, costs, answer):
    assert answer.stable_for is not None and answer.stability is not None
    assert sum(answer.stability.whole) == answer.stable_for.mesh.pp
    assert answer.stability.message.startswith(("b_min = ", "no stable batch"))
    again = allocate(job, replace(costs, is_whole=True), 8, finalists=4, largest=4096)
    assert "all 256 samples of the source" in again.stability.message
    assert [described(job, one) for one in again.ranked] == [described(job, one) for one in answer.ranked]


def test_gpus_that_no_degrees_use_are_refused():
    video = config.load("debug_t2v.toml")
    with pytest.raises(ConfigError, match=r"^allocate: no degrees of parallelism use 97 GPUs \(--gpus\)"):
        allocate(video, drawn_costs(video, 8), 97)


def test_a_model_of_one_module_has_no_ranks_of_its_own_but_as_many_finalists():
    text = config.load("debug_text.toml", ON_A40)
    costs = drawn_costs(text, 16)
    assert [len(allocate(text, costs, 2, finalists=n).ranked) for n in (1, 2)] == [1, 2]


def test_ranks_and_samples_of_the_job_as_it_is_exclude_no_degrees(job, costs):
    """Equation 4.2 prices a microbatch on each GPU and all modules on all ranks, which these keys would refuse."""
    placed = ["planner.placement=parallel", "parallelism.pipeline_parallel_degree=4", "model.encoder.ranks=1"]
    few = ["assignment.policy=balanced", "assignment.samples_per_step=8"]
    other = config.load("debug_vlm.toml", [*ON_A40, *placed, *few])
    found, plain = (allocate(of, costs, 16, finalists=1) for of in (other, job))
    assert found.num_candidates == plain.num_candidates
    assert found.best.mesh == plain.best.mesh


def test_that_none_runs_says_what_to_change(capsys):
    assert "whose memory is not known here; name the device" in refused(capsys, '--planner.memory_limit="90%"')


def refused(capsys, *words):
    assert main(["allocate", "--config", "debug_vlm.toml", "--gpus", "2", *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_the_command_prints_trials_a_ranking_and_toml(capsys, tmp_path):
    path = tmp_path / "samples.json"
    drawn = ["--samples", "100", "--workload", "interleaved", "--out", str(path)]
    assert main(["profile", "--config", "debug_vlm.toml", *drawn]) == 0
    assert "the first 100 samples of workload interleaved; of their seconds: vision " in capsys.readouterr().out
    assert (
        main(["allocate", "--config", "debug_vlm.toml", "--gpus", "4", "--samples", str(path), "--finalists", "2"]) == 0
    )
    out = capsys.readouterr().out
    assert "samples of workload interleaved, 4 GPUs" in out
    assert "batches: " in out and "[parallelism]\n" in out
    text = out[out.index("[parallelism]") :]
    degrees = [value for key, value in tomllib.loads(text)["parallelism"].items() if key.endswith("_degree")]
    assert math.prod(degrees) == 4
    assert (
        main(
            ["allocate", "--config", "debug_vlm.toml", "--gpus", "4", "--samples", str(path), "--training.seq_len=128"]
        )
        == 2
    )
    assert "training.seq_len = 256, but this job has 128" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--alpha", "1"], "allocate: alpha = 1.0; it must be from 0.0001 to below 1"),
        (["--p-error", "0"], "allocate: p_error = 0.0; it must be from 0.0001 to below 1"),
        (["--p-error", "1e-12"], "allocate: p_error = 1e-12; it must be from 0.0001 to below 1"),
        (["--gpus", "1000000007"], "allocate: --gpus 1000000007; it is at most 1048576"),
        (["--finalists", "0"], "allocate: --finalists 0; it is at least 1"),
        (["--workload", "mixx"], "workload 'mixx' does not exist; did you mean 'mix'?"),
        (["--samples", "nowhere.json"], "nowhere.json: there is no such file"),
        (["--samples", "a.json", "--workload", "mix"], "give one of the two"),
        (["--cluster", "a41"], "hardware"),
    ],
)
def test_bad_input_is_one_line(capsys, words, message):
    assert message in refused(capsys, *words)


def test_real_data_are_priced_without_their_pixels(capsys, charts, tmp_path):
    path = tmp_path / "samples.json"
    source = f"--data.source={charts}"
    assert main(["profile", "--config", "debug_vlm.toml", source, "--samples", "30", "--out", str(path)]) == 0
    assert f"the first 30 samples of {charts}" in capsys.readouterr().out
    assert main(["profile", "--config", "debug_vlm.toml", source, "--samples", "100000", "--out", str(path)]) == 0
    assert ": all " in capsys.readouterr().out
    assert main(["profile", "--config", "debug_vlm.toml", "--workload", "mix"]) == 2
    assert "--workload mix has no effect without --samples N" in capsys.readouterr().err
