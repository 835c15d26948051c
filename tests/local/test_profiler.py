"""A small job measured for real: the profile is whole, and planning can use it."""

import re
import tempfile
from pathlib import Path

import pytest

from mmtrain.commands.cli import main
from mmtrain.config import config as config_module
from mmtrain.costs.profile.profile import HELD, TIMES, Profile, role
from mmtrain.costs.sub_microbatch import smallest_efficient
from mmtrain.modality.probes import mixed_iteration, probing_iteration
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.simulator.make_job import make_job
from mmtrain.spec.builders import model_spec
from tests.jobs import write_config, write_sound_config, write_video_config
from tests.ranks import run_ranks, warm_ranks

pytestmark = pytest.mark.ranks

KINDS = [("language", "embed"), ("language", "layers"), ("language", "norm")]
KINDS += [("dit", "embed"), ("dit", "blocks"), ("dit", "head")]
PP2 = ["--parallelism.pipeline_parallel_degree=2", "--training.seq_len=64"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(config file, profile file, what was printed)."""
    import contextlib
    import io

    folder = tmp_path_factory.mktemp("profile")
    job, out, printed = write_config(folder, folder), folder / "p.json", io.StringIO()
    words = ["profile", "--config", str(job), "--out", str(out), "--rounds", "1", "--steps", "1"]
    words += ["--hardware-out", str(folder / "mine.toml")]
    with contextlib.redirect_stdout(printed), warm_ranks():
        assert main([*words, *PP2]) == 0
    return job, out, printed.getvalue()


def test_every_kind_of_layer_has_times_and_bytes(measured):
    job, out, _ = measured
    profile = Profile.read(out)
    assert profile.machine["look_ms"] > 0
    spec = model_spec(config_module.load(job, PP2).model)
    assert [(layer.module, layer.role) for layer in profile.layers] == list(
        dict.fromkeys((module.name, role(layer)) for module in spec.modules for layer in module.layers)
    )
    for layer in profile.layers:
        if layer.role in ("blocks", "layers", "projector", "head"):
            assert set(layer.points) == {*TIMES, HELD}
        for name in TIMES:
            assert all(seconds >= 0 for _, seconds in layer.points.get(name, ()))
    blocks = profile.layer("language", spec.module("language").layers[1])
    for name in TIMES:
        assert blocks.at(name, blocks.points[name][0][0]) > 0


def test_held_bytes_are_what_planning_counts(measured):
    job, out, _ = measured
    spec = model_spec(config_module.load(job, PP2).model)
    for layer in Profile.read(out).layers:
        if layer.role in ("blocks", "layers", "projector"):
            one = next(x for x in spec.module(layer.module).layers if role(x) == layer.role)
            size, held = max(layer.points[HELD], key=lambda point: point[1])
            assert held == pytest.approx(one.activation_bytes(size), rel=0.1)


def test_two_ranks_exchanged_messages(measured):
    profile = Profile.read(measured[1])
    transfer, overheads = profile.transfer, profile.overheads
    assert transfer is not None
    assert 0 < overheads.send_s + overheads.receive_s < 0.1
    assert 0 < overheads.forward_s < 0.1
    assert 1e6 < 1 / transfer.byte_s < 1e12


def test_the_rule_reads_the_measured_curve(measured):
    _, out, text = measured
    profile = Profile.read(out)
    found = smallest_efficient(profile.curve)
    assert found.size in [number for number, _ in profile.curve.seconds]
    assert f"model.encoder.sub_microbatch_size = {found.size} is the smallest" in text


def test_a_job_is_simulated_with_its_profile(measured):
    job, out, _ = measured
    config = config_module.load(job, [*PP2, f'--planner.profile="{out}"'])
    planner = IterationPlanner(make_job(config))
    timeline = planner.plan(probing_iteration(config)).result.timeline
    assert 0 < timeline.makespan_s < 60
    assert planner.job.costs.step_s(10_000) >= 0


def test_fitted_efficiencies_are_a_hardware_profile(measured):
    job, out, text = measured
    mine = out.parent / "mine.toml"
    config = config_module.load(job, [*PP2, f'--planner.hardware="{mine}"'])
    planner = IterationPlanner(make_job(config))
    assert planner.plan(probing_iteration(config)).result.timeline.makespan_s > 0
    before, after = re.search(r"mean error of a layer (\d+) %; with the factors a below ([\d.]+) %", text).groups()
    assert float(after) <= float(before) + 1


def test_each_of_several_encoders_is_measured_and_planned_with(tmp_path: Path, capsys):
    words = ["--training.seq_len=48", "--activation_checkpoint.mode=full"]
    job, out = write_sound_config(tmp_path, tmp_path / "nowhere"), tmp_path / "p.json"
    with warm_ranks():
        assert main(["profile", "--config", str(job), "--out", str(out), "--rounds", "1", "--steps", "1", *words]) == 0
    profile, config = Profile.read(out), config_module.load(job, [*words, f'--planner.profile="{out}"'])
    planner = IterationPlanner(make_job(config))
    sound = [layer for layer in profile.layers if layer.module == "audio"]
    assert [layer.role for layer in sound] == ["embed", "blocks", "norm", "projector"]
    for layer in sound[1:]:
        assert {size.rows for size, _ in layer.points["forward"]} >= {12, 24, 48}
    text = capsys.readouterr().out
    assert "audio blocks" in text and "model.encoder.sub_microbatch_size = " in text
    meta = mixed_iteration(config, 1)
    batching, problem = planner.problem(meta)
    work = next(w for w in range(len(batching.works)) if batching.module_of(w) == "audio")
    size, module = batching.sizes[work], planner.job.spec.module("audio")
    expected = sum(profile.layer("audio", layer).at("forward", size) for layer in module.layers)
    (stage,) = problem.graph.stages(work)
    assert problem.options(stage, work)[0].forward_s == pytest.approx(expected + profile.overheads.forward_s)


@pytest.mark.nightly  # daily `test_measurements.py` has such samples, and `test_held_bytes.py` such ranks
def test_ranks_that_share_works_are_measured_together(tmp_path: Path, capsys):
    job, out = write_config(tmp_path, tmp_path), tmp_path / "p.json"
    words = ["--training.seq_len=64", "--parallelism.tensor_parallel_degree=2"]
    assert main(["profile", "--config", str(job), "--out", str(out), "--rounds", "1", "--steps", "1", *words]) == 0
    text, profile = capsys.readouterr().out, Profile.read(out)
    assert profile.job["tensor_parallel_degree"] == 2
    assert profile.machine["look_ms"] > 0, "between steps"
    (line,) = re.findall(r"Bytes held from F to B, measured over planned: (.*)\.\n", text)
    ratios = {name: float(ratio) for name, ratio in re.findall(r"(\w+ \w+) ([\d.]+)", line)}
    for name in ("vision embed", "vision blocks", "vision projector", "language layers", "language head"):
        assert ratios[name] == pytest.approx(1, abs=0.1), name
    config = config_module.load(job, [*words, f'--planner.profile="{out}"'])
    planner = IterationPlanner(make_job(config))
    assert planner.plan(probing_iteration(config)).result.timeline.makespan_s > 0


def look_at_samples(rank):
    """Of real steps: (StepSample, (begin of the program, its end, end of the step)), at a clock that says as its speed
    from when to when it was asked."""
    import time

    import torch

    from mmtrain.local import profiler
    from mmtrain.observe.machine_speed import WatchedClock
    from mmtrain.simulator.profiling.probing import CUTS, probing_job

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        config = config_module.load(write_config(path, path), ["--training.seq_len=64"])
        job = probing_job(config, num_blocks=1, cut=CUTS[0], folder=folder)
        clock = WatchedClock(time.perf_counter, every_s=None)
        clock.speed_s = lambda start, end: end - start
        seen = []
        with profiler._steps(job, probing_iteration(job), torch.device("cpu"), clock) as (_, timed):

            def watched():
                for step in timed:
                    seen.append((*step.outcome.span, step.start_s, step.end_s))
                    yield step

            return list(zip(profiler._samples(CUTS[0], watched(), 2, clock), seen, strict=True))


def test_the_speed_of_a_sample_is_that_of_its_own_seconds():
    (found,) = run_ranks(look_at_samples, 1)
    assert len(found) == 2
    for sample, (begin, end, step_begin, step_end) in found:
        assert len(sample.rows) > 10
        assert sample.rows.keys() == sample.pauses.keys() == sample.speeds_s.keys()
        for place, seconds in sample.rows.items():
            assert seconds > 0 and sample.pauses[place] >= 0
            assert sample.speeds_s[place] == pytest.approx(sample.pauses[place] + seconds)
        assert sum(sample.speeds_s.values()) <= end - begin
        assert sample.outside_s == pytest.approx(step_end - step_begin - (end - begin))
        assert sample.outside_speed_s == step_end - end


def test_a_text_to_video_job_is_measured_and_planned_with(tmp_path: Path, capsys):
    words = ["--data.video_frames=[2, 8]", "--data.max_clips=2", "--model.language.trainable=false"]
    job, out = write_video_config(tmp_path, tmp_path / "nowhere"), tmp_path / "p.json"
    with warm_ranks():
        assert main(["profile", "--config", str(job), "--out", str(out), "--rounds", "1", "--steps", "1", *words]) == 0
    text = capsys.readouterr().out
    profile, config = Profile.read(out), config_module.load(job, [*words, f'--planner.profile="{out}"'])
    assert [(layer.module, layer.role) for layer in profile.layers] == KINDS
    dit = model_spec(config.model).module("dit")
    blocks = profile.layer("dit", dit.layers[1])
    assert set(blocks.points) == {*TIMES, HELD}
    size, held = max(blocks.points[HELD], key=lambda point: point[1])
    assert held == pytest.approx(dit.layers[1].activation_bytes(size), rel=0.1)
    assert {size.clips for size, _ in blocks.points["forward"]} == {1, 2}
    assert "backward" not in profile.layers[1].points, "a frozen text encoder has no backward"
    assert [number for number, _ in profile.curve.seconds] == [1, 2]
    assert "model.dit.sub_microbatch_size = " in text
    planner = IterationPlanner(make_job(config))
    assert 0 < planner.plan(probing_iteration(config)).result.timeline.makespan_s < 60


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "0"], "--rounds 0; it is at least 1"),
        (["--out", "profile.txt"], "must end in .json or .json.gz"),
        (["--out", "/nowhere/p.json"], "the folder /nowhere does not exist"),
        (["--hardware", "abacus"], '"abacus" does not exist'),
        (["--model.language.num_segments=7"], "needs a layer"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(tmp_path: Path, capsys, monkeypatch, options, message):
    from mmtrain.local import profiler

    def started(*_, **__):
        raise AssertionError("something was measured")

    monkeypatch.setattr(profiler, "profile_job", started)
    assert main(["profile", "--config", str(write_config(tmp_path, tmp_path)), *options]) == 2
    assert message in capsys.readouterr().err


PAIRS = ["--data.source=none", "--data.max_pairs=4", "--parallelism.pipeline_parallel_degree=1"]


def test_batches_of_pairs_have_several_numbers_and_lengths():
    job = config_module.load("debug_clip.toml", PAIRS)
    microbatches = probing_iteration(job).microbatches
    assert all(len(one.images) == one.num_targets == 1 for m in microbatches for one in m.documents)
    sizes = {(len(m.documents), *{document.num_tokens for document in m.documents}) for m in microbatches}
    assert sizes == {(number, length) for number in (1, 2, 4) for length in (32, 8, 4)}


@pytest.mark.nightly
def test_two_towers_are_measured(tmp_path):
    out, few = tmp_path / "p.json", [*PAIRS, "--data.max_pairs=2", "--training.seq_len=8"]
    words = ["profile", "--config", "debug_clip.toml", "--out", str(out), "--rounds", "1", "--steps", "1", *few]
    with warm_ranks():
        assert main([*words, f"--job.dump_folder={tmp_path}"]) == 0
    job = config_module.load("debug_clip.toml", [*few, f"--planner.profile={out}"])
    assert [(layer.module, layer.role) for layer in Profile.read(out).layers] == list(
        dict.fromkeys((module.name, role(layer)) for module in make_job(job).spec.modules for layer in module.layers)
    )
