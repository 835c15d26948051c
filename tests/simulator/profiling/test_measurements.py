"""Samples of a machine whose seconds are known come to a profile that knows them."""

import re
from dataclasses import replace

import pytest

from mmtrain.config import config as config_module
from mmtrain.costs.cost_model import FlopsCosts
from mmtrain.costs.measured_costs import MeasuredCosts
from mmtrain.costs.overheads import DISPATCH
from mmtrain.costs.profile.calibration import calibrate
from mmtrain.costs.profile.profile import Profile
from mmtrain.costs.profile.profile_table import table
from mmtrain.errors import ConfigError
from mmtrain.modality.metadata import IterationMeta
from mmtrain.modality.probes import probing_iteration, work_curve
from mmtrain.modality.submesh import Submesh
from mmtrain.modality.typical import reference_sizes
from mmtrain.planner.batching import make_batching
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.schedule.action import Kind
from mmtrain.schedule.problem import P2P
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.partition_choice import partition_of
from mmtrain.simulator.profiling.measurements import NUM_BLOCKS, assemble, trainable_params
from mmtrain.simulator.profiling.probing import CUTS, REPEATS, probing_job, small_job
from mmtrain.simulator.profiling.samples import ProcessSamples, SpeedFilter, StepSample, slowest
from mmtrain.spec.builders import model_spec
from mmtrain.spec.memory_strategies import BlockMemory
from mmtrain.spec.recomputation import Recomputation
from mmtrain.spec.spec import clips_work, documents_work
from tests.costs.profiles import MACHINE
from tests.jobs import video_config

FLOPS = FlopsCosts(flops_per_s=1e8, p2p=P2P(latency_s=0.0, bytes_per_s=1.0))
FIXED = {Kind.F: 3e-3, Kind.B: 2e-3, Kind.I: 4e-3, Kind.W: 1e-3}
PAUSE = {Kind.F: 5e-4, Kind.B: 1e-4, Kind.I: 2e-4, Kind.W: 3e-4}
PARAM_S, STEP_S, PIPELINE_S = 2e-8, 7e-3, 0.25


def everything(config) -> IterationMeta:
    return IterationMeta(microbatches=(*probing_iteration(config).microbatches, *work_curve(config).microbatches))


ADDED = {"selective": (0.1, 0.4), "recompute": (0.0, 0.9)}
"""What a strategy adds to F and to B, as parts of F."""


def samples_of(config, costs=FLOPS) -> ProcessSamples:
    """What would be measured if layers took their FLOPs, and actions FIXED and PAUSE."""
    found = ProcessSamples()
    meta = everything(config)
    for cut in (*CUTS, *REPEATS.values()):
        job = probing_job(config, num_blocks=NUM_BLOCKS, cut=cut, folder="unused")
        added = next((ADDED[how] for how, other in REPEATS.items() if other == cut), (0.0, 0.0))
        made = make_job(job)
        batching = make_batching(meta, made.spec)
        graph = IterationPlanner(replace(made, costs=costs)).problem(meta)[1].graph
        rows, pauses = {}, {}
        for stage, work in graph.nodes():
            place = made.partition.stages[stage]
            module, size = made.spec.module(place.module), batching.sizes[work]
            times = [costs.layer(module, index, size, input_grad=index > 0) for index in range(*place.layers)]
            inside, later = sum(t.backward_input_s for t in times), sum(t.backward_weight_s for t in times)
            seconds = {Kind.F: sum(t.forward_s for t in times)}
            if graph.has_backward(stage, work) and cut.splits and later:
                seconds |= {Kind.I: inside, Kind.W: later}
            elif graph.has_backward(stage, work):
                seconds |= {Kind.B: inside + later}
            for kind, amount in seconds.items():
                as_if = Kind.I if kind is Kind.B and cut.splits else kind
                rows[stage, work, kind] = amount + FIXED[as_if]
                if cut.mode:
                    rows[stage, work, kind] += added[kind is Kind.B] * (seconds[Kind.F] + FIXED[Kind.F])
                pauses[stage, work, kind] = PAUSE[kind]
        found.steps += [sample(cut, config, rows, pauses)] * 3
    return replace(found, steps=[*found.steps, *[sample(None, config, {}, {})] * 3])


def sample(cut, config, rows, pauses) -> StepSample:
    job = (
        small_job(config, folder="unused")
        if cut is None
        else probing_job(config, num_blocks=NUM_BLOCKS, cut=cut, folder="unused")
    )
    params = sum(module.num_trainable_params for module in model_spec(job.model).modules)
    return StepSample(
        job=cut,
        rows=rows,
        pauses=pauses,
        speeds_s=dict.fromkeys(rows, 1.0),
        outside_s=STEP_S + PARAM_S * params,
        outside_speed_s=1.0,
    )


def slower(step: StepSample, factor: float) -> StepSample:
    return replace(
        step,
        rows={place: factor * seconds for place, seconds in step.rows.items()},
        pauses={place: factor * seconds for place, seconds in step.pauses.items()},
        speeds_s={place: factor * seconds for place, seconds in step.speeds_s.items()},
        outside_s=factor * step.outside_s,
        outside_speed_s=factor * step.outside_speed_s,
    )


@pytest.fixture(scope="module")
def config():
    return config_module.load("debug_vlm.toml", [])


@pytest.fixture(scope="module")
def samples(config):
    return samples_of(config)


def test_layers_actions_and_ends_of_steps_are_found_again(config, samples):
    profile = assemble(config, everything(config), [samples], [], MACHINE)
    for kind in FIXED:
        assert getattr(profile.overheads, DISPATCH[kind]) == pytest.approx(FIXED[kind] + PAUSE[kind], rel=0.05), kind
    assert profile.step.param_s == pytest.approx(PARAM_S)
    assert profile.step.fixed_s == pytest.approx(STEP_S)
    assert profile.transfer is None
    spec = model_spec(config.model)
    batching = make_batching(probing_iteration(config), spec)
    costs = MeasuredCosts(profile=profile, p2p=FLOPS.p2p)
    for work, size in zip(batching.works, batching.sizes, strict=True):
        module = spec.modules[work.module]
        blocks = [index for index, layer in enumerate(module.layers) if layer.is_block]
        ours = costs.layer(module, blocks[-1], size, input_grad=True)
        theirs = FLOPS.layer(module, blocks[-1], size, input_grad=True)
        assert ours.forward_s == pytest.approx(theirs.forward_s, rel=0.02)
        assert ours.backward_input_s == pytest.approx(theirs.backward_input_s, rel=0.03)
        assert ours.backward_weight_s == pytest.approx(theirs.backward_weight_s, rel=0.03)
        assert ours.split_s < 0.02 * theirs.forward_s


def test_what_strategies_add_is_measured_and_kept(config, samples, tmp_path):
    profile = assemble(config, everything(config), [samples], [], MACHINE)
    assert profile.repeats == {how: pytest.approx(sum(parts)) for how, parts in ADDED.items()}
    profile.write(tmp_path / "p.json")
    assert Profile.read(tmp_path / "p.json").repeats == profile.repeats
    spec = model_spec(config.model)
    costs, module = MeasuredCosts(profile=profile, p2p=FLOPS.p2p), spec.module("language")
    size = reference_sizes(spec, 256)["language"]
    forward = costs.layer(module, 1, size, input_grad=True).forward_s
    for how, part in profile.repeats.items():
        recomputation = Recomputation.by(BlockMemory(how), config.activation_checkpoint)
        assert costs.repeated_s(module, 1, size, recomputation) == pytest.approx(part * forward)
        assert costs.repeated_s(module, 0, size, recomputation) == 0.0, "an embedding keeps all"


def test_actions_on_a_slower_machine_do_not_count(config, samples):
    def disturbed(step: StepSample, odd: int) -> StepSample:
        """The machine is slower next to every other action."""
        slow = slower(step, 1.4)
        places = [place for number, place in enumerate(step.rows) if number % 2 == odd]
        return replace(
            slow if odd else step,
            rows={**step.rows, **{place: slow.rows[place] for place in places}},
            pauses={**step.pauses, **{place: slow.pauses[place] for place in places}},
            speeds_s={**step.speeds_s, **{place: slow.speeds_s[place] for place in places}},
        )

    steps = [one for step in samples.steps for one in (disturbed(step, 0), disturbed(step, 1), step)]
    third = replace(samples, steps=steps)
    calm, loud = (assemble(config, everything(config), [one], [], MACHINE) for one in (samples, third))
    assert loud.layers == calm.layers
    assert loud.overheads == calm.overheads
    assert loud.noise.forward == pytest.approx(calm.noise.forward)
    assert loud.step == calm.step
    assert loud.machine == calm.machine


def test_without_looks_everything_counts(config, samples):
    def unwatched(step: StepSample) -> StepSample:
        return replace(step, speeds_s=dict.fromkeys(step.rows, 0.0), outside_speed_s=0.0)

    one = assemble(config, everything(config), [samples], [], MACHINE)
    other = assemble(
        config, everything(config), [replace(samples, steps=[unwatched(s) for s in samples.steps])], [], MACHINE
    )
    assert other.layers == one.layers
    assert other.machine["look_ms"] == 0.0


def test_ranks_that_share_works_wait_for_the_slowest(config, samples):
    other = replace(samples, steps=[slower(step, 0.5) for step in samples.steps], held={(0, 0): 2.0})
    first = replace(samples, held={(0, 0): 7.0})
    assert slowest([other, first]) == first


def test_times_at_the_typical_speed_count_or_the_two_nearest_to_it():
    place = (0, 0, Kind.F)
    steps = [
        StepSample(
            job=None,
            rows={place: 1.0},
            pauses={place: 0.0},
            speeds_s={place: speed},
            outside_s=0.0,
            outside_speed_s=0.0,
        )
        for speed in (1.0, 1.1, 3.0)
    ]
    calm = SpeedFilter(steps)
    assert [calm.counts(speed) for speed in (0.9, 0.95, 1.26, 1.27)] == [False, True, True, False]
    assert calm.speed_s == pytest.approx(1.05)
    assert calm.median([(1.1, 4.0), (1.5, 9.0), (1.0, 5.0), (1.1, 7.0)]) == 5.0, "three count"
    assert calm.median([(9.0, 90.0), (3.0, 30.0), (5.0, 50.0)]) == 40.0, "none does"


def test_processes_are_taken_together(config, samples):
    one = assemble(config, everything(config), [samples], [], MACHINE)
    assert assemble(config, everything(config), [samples, samples], [], MACHINE) == one


def test_the_curve_is_one_stage_of_the_job(config, samples):
    profile = assemble(config, everything(config), [samples], [], MACHINE)
    spec = model_spec(config.model)
    stages = len(partition_of(config, spec).of_module("vision"))
    assert stages == 2
    batching = make_batching(work_curve(config), spec)
    vision = [size for w, size in zip(batching.works, batching.sizes, strict=True) if w.module == 0]
    actions = profile.overheads.forward_s + profile.overheads.backward_s
    assert [number for number, _ in profile.curve.seconds] == [len(m.images) for m in work_curve(config).microbatches]
    for (_, seconds), size in zip(profile.curve.seconds, vision, strict=True):
        module = spec.module("vision")
        times = [FLOPS.layer(module, index, size, input_grad=index > 0) for index in range(len(module.layers))]
        total = sum(t.forward_s + t.backward_input_s + t.backward_weight_s for t in times)
        assert seconds == pytest.approx(total / stages + actions, rel=0.02)


def test_transfers_and_the_pipelines_part_of_a_step_come_from_two_ranks(config, samples):
    two = make_job(probing_job(config, num_blocks=NUM_BLOCKS, cut=CUTS[2], num_ranks=2, folder="unused"))
    largest = max(trainable_params(two.spec, two.partition, rank) for rank in range(2))
    end = STEP_S + PARAM_S * largest + PIPELINE_S
    sizes = [2**k for k in range(10, 24, 2)]
    pairs = [
        ProcessSamples(trips={size: [1e-4 + size / 1e9] for size in sizes}, spans=[(done, 10.0 + end)] * 4)
        for done in (9.0, 10.0)  # one rank waits for the other
    ]
    profile = assemble(config, everything(config), [samples], pairs, MACHINE)
    assert profile.transfer.latency_s == pytest.approx(1e-4)
    assert profile.transfer.byte_s == pytest.approx(1e-9)
    assert profile.step.pipeline_s == pytest.approx(PIPELINE_S)


# ------------------------------------------------------------------------------------------------ clips


SLOW = replace(FLOPS, flops_per_s=1e7)
"""So that what actions take beside layers is little of small works."""


@pytest.fixture(scope="module", params=["", "language"], ids=["all train", "frozen text encoder"])
def video(request, tmp_path_factory):
    """(text-to-video job, its samples)."""
    frozen = [f"--model.{request.param}.trainable=false"] if request.param else []
    config = video_config(tmp_path_factory.mktemp("clips"), *frozen)
    return config, samples_of(config, SLOW)


def test_layers_of_a_dit_and_its_text_encoder_are_found_again(video):
    config, samples = video
    profile = assemble(config, everything(config), [samples], [], MACHINE)
    for kind in FIXED:
        assert getattr(profile.overheads, DISPATCH[kind]) == pytest.approx(FIXED[kind] + PAUSE[kind], rel=0.05), kind
    assert profile.step.param_s == pytest.approx(PARAM_S)
    assert profile.step.fixed_s == pytest.approx(STEP_S)
    assert profile.repeats == {how: pytest.approx(sum(parts), rel=0.01) for how, parts in ADDED.items()}
    spec = model_spec(config.model)
    # Clips of other lengths, numbers and captions than were measured.
    sizes = {
        "language": documents_work([11, 40, 23], 74),
        "dit": clips_work([108, 72, 36], [11, 40, 23], 216),
    }
    costs = MeasuredCosts(profile=profile, p2p=SLOW.p2p)
    for module in spec.modules:
        ours = costs.layer(module, 2, sizes[module.name], input_grad=True)
        theirs = SLOW.layer(module, 2, sizes[module.name], input_grad=True)
        assert ours.forward_s == pytest.approx(theirs.forward_s, rel=0.02)
        assert ours.backward_input_s == pytest.approx(theirs.backward_input_s, rel=0.04)
        assert ours.backward_weight_s == pytest.approx(theirs.backward_weight_s, rel=0.04)


def test_the_curve_of_clips_is_one_stage_of_the_dit(video):
    config, samples = video
    profile = assemble(config, everything(config), [samples], [], MACHINE)
    spec = model_spec(config.model)
    metas = work_curve(config).microbatches
    (one,) = metas[0].clips
    assert profile.curve.patches == one.num_tokens
    assert [number for number, _ in profile.curve.seconds] == [len(m.clips) for m in metas] == [1, 2, 3, 4]
    layers, actions = spec.module("dit"), profile.overheads.forward_s + profile.overheads.backward_s
    for (number, seconds), meta in zip(profile.curve.seconds, metas, strict=True):
        size = clips_work([one.num_tokens] * number, meta.text_lengths, meta.num_targets)
        times = [SLOW.layer(layers, index, size, input_grad=index > 0) for index in range(len(layers.layers))]
        total = sum(t.forward_s + t.backward_input_s + t.backward_weight_s for t in times)
        assert seconds == pytest.approx(total + actions, rel=0.02)


def test_a_text_to_video_job_is_planned_with_its_profile_and_no_other(video, tmp_path):
    config, samples = video
    profile = assemble(config, everything(config), [samples], [], MACHINE)
    path = tmp_path / "p.json"
    profile.write(path)
    assert Profile.read(path) == profile
    measured = replace(config, planner=replace(config.planner, profile=str(path)))
    planner = IterationPlanner(make_job(measured))
    assert isinstance(planner.job.costs, MeasuredCosts)
    assert planner.job.sub_microbatch_size == 2, "what the config says"
    assert planner.plan(probing_iteration(config)).result.timeline.makespan_s > 0
    values = {**config.model.dit.config, "ffn_dim": 64}
    other = replace(measured, model=replace(config.model, dit=replace(config.model.dit, config=values)))
    with pytest.raises(ConfigError, match=r"measured with dit blocks of num_params = .* blocks\.0 of this job"):
        make_job(other)


def test_the_table_of_a_text_to_video_job_has_the_weights_of_clips(video):
    config, samples = video
    profile = assemble(config, everything(config), [samples], [], MACHINE)
    spec = model_spec(config.model)
    text = table(profile, spec, Submesh(), calibrate(profile, config, spec, "cpu"))
    assert "pair x attended pairs + cross x pairs with text tokens + text x text tokens + clip x clips + fixed" in text
    assert "dit blocks             F " in text
    assert "Clips a second of a DiT work, relative to the best, by their number: 1: " in text
    assert re.search(r"model\.dit\.sub_microbatch_size = \d is the smallest with 95 % .* clips of \d+ tokens", text)
    assert "nan" not in text
    block = next(layer.fits["forward"] for layer in profile.layers if (layer.module, layer.role) == ("dit", "blocks"))
    (line,) = (line for line in text.splitlines() if line.startswith("dit blocks"))
    row, pair, cross, texts, clip, fixed = map(float, line.split("|")[1].split())
    assert (row, texts, clip) == pytest.approx((1e6 * block.row, 1e6 * block.text, 1e6 * block.clip), abs=1e-3)
    assert (pair, cross, fixed) == pytest.approx(
        (1e9 * block.pair, 1e9 * block.cross_pair, 1e6 * block.fixed), abs=1e-3
    )
