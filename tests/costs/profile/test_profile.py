"""A profile as a file and as a cost model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mmtrain.config import config as config_module
from mmtrain.costs.cost_model import FlopsCosts
from mmtrain.costs.measured_costs import MeasuredCosts
from mmtrain.costs.overheads import charged
from mmtrain.costs.profile.fits import SizeFit, fit_sizes
from mmtrain.costs.profile.profile import Profile, TransferProfile, check_fits
from mmtrain.errors import ConfigError, PlanError
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.schedule.action import Kind
from mmtrain.schedule.problem import P2P
from mmtrain.simulator.make_job import make_job
from mmtrain.spec.builders import model_spec
from mmtrain.spec.recomputation import Recomputation
from mmtrain.spec.spec import documents_work
from mmtrain.spec.work_size import WorkSize
from tests.costs.profiles import OVERHEADS, profile_of
from tests.planner.specs import META

FLOPS = FlopsCosts(flops_per_s=1e9, p2p=P2P(latency_s=1e-5, bytes_per_s=1e9))
FULL = Recomputation(enable=True)
SIZE = {"vision": WorkSize(rows=640, pairs=70_000, outputs=160), "language": documents_work([100, 37], 50)}
VLM = ("debug_vlm.toml",)
JOBS = [
    VLM,
    ("debug_vlm.toml", "--model.encoder.trainable=false"),
    ("debug_vlm.toml", "--model.language.trainable=false"),
    ("debug_lora.toml",),
    ("debug_siglip_llama.toml",),
    ("debug_text.toml",),
]


def job(name: str, *overrides: str):
    config = config_module.load(name, list(overrides))
    return config, model_spec(config.model)


def costs_of(profile: Profile, **fields: object) -> MeasuredCosts:
    return MeasuredCosts(profile=profile, p2p=FLOPS.p2p, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", JOBS, ids=lambda name: " ".join(name))
def test_a_profile_gives_back_the_seconds_that_it_was_made_from(name):
    config, spec = job(*name)
    profile = profile_of(config, spec, FLOPS)
    whole = costs_of(profile)
    for module in spec.modules:
        grad = spec.grad_enters(module.name)
        for index, layer in enumerate(module.layers):
            size = SIZE[module.name]
            if "siglip" in name[0] and module.name == "vision":  # images of one size, so pairs go with rows
                size = profile.layers[0].points["forward"][0][0]
                size += size
            ours = whole.layer(module, index, size, input_grad=grad)
            theirs = FLOPS.layer(module, index, size, input_grad=grad)
            for field in ("forward_s", "backward_input_s", "backward_weight_s"):
                assert getattr(ours, field) == pytest.approx(getattr(theirs, field), rel=1e-6, abs=1e-12), (
                    layer,
                    field,
                )
            grad = grad or layer.trainable


def test_a_split_backward_has_its_own_seconds_and_a_whole_one_is_the_sum():
    config, spec = job(*VLM)
    module = spec.module("language")
    profile = profile_of(config, spec, FLOPS, split_factors=(1.25, 1.5))
    expected = FLOPS.layer(module, 1, SIZE["language"], input_grad=True)
    split = costs_of(profile).layer(module, 1, SIZE["language"], input_grad=True)
    for field in ("forward_s", "backward_input_s", "backward_weight_s"):
        assert getattr(split, field) == pytest.approx(getattr(expected, field))
    assert split.split_s == pytest.approx(0.25 * expected.forward_s + 0.5 * expected.backward_input_s)


def test_weight_gradients_take_no_longer_than_the_backward_that_they_are_a_part_of():
    """Both are measured, so that noise may turn them around: I and W together take as long as the backward did."""
    config, spec = job(*VLM)
    module, profile = spec.module("language"), profile_of(config, spec, FLOPS)
    turned = {"backward": "backward_weight", "backward_weight": "backward"}
    layers = [replace(of, fits={name: of.fits[turned.get(name, name)] for name in of.fits}) for of in profile.layers]
    expected = FLOPS.layer(module, 1, SIZE["language"], input_grad=True)
    found = costs_of(replace(profile, layers=tuple(layers))).layer(module, 1, SIZE["language"], input_grad=True)
    assert (found.backward_input_s, found.backward_weight_s) == pytest.approx((0.0, expected.backward_weight_s))


def test_a_layer_without_the_gradient_of_its_input_takes_the_flops_that_are_left():
    config, spec = job(*VLM)
    measured = costs_of(profile_of(config, spec, FLOPS))
    for module, index in (("language", 1), ("language", 0), ("vision", 0), ("vision", 1)):
        for grad in (False, True):
            ours = measured.layer(spec.module(module), index, SIZE[module], input_grad=grad)
            theirs = FLOPS.layer(spec.module(module), index, SIZE[module], input_grad=grad)
            assert ours.backward_input_s == pytest.approx(theirs.backward_input_s, rel=1e-6, abs=1e-12)


def test_a_frozen_layer_with_nothing_before_it_has_no_backward():
    config, spec = job("debug_vlm.toml", "--model.encoder.trainable=false")
    found = costs_of(profile_of(config, spec, FLOPS)).layer(spec.module("vision"), 1, SIZE["vision"], input_grad=False)
    assert (found.backward_input_s, found.backward_weight_s) == (0.0, 0.0)


@pytest.mark.parametrize("measured", [Recomputation(), FULL])
@pytest.mark.parametrize("wanted", [Recomputation(), FULL])
def test_recomputation_is_told_apart_from_the_backward(measured, wanted):
    config, spec = job(*VLM)
    costs = costs_of(profile_of(config, spec, FLOPS, recomputation=measured))
    module, size = spec.module("language"), SIZE["language"]
    for index in (1, len(module.layers) - 1):
        times = costs.layer(module, index, size, input_grad=True)
        expected = FLOPS.layer(module, index, size, input_grad=True)
        assert times.backward_input_s == pytest.approx(expected.backward_input_s)
        assert costs.repeated_s(module, index, size, wanted) == pytest.approx(
            FLOPS.repeated_s(module, index, size, wanted), rel=1e-6, abs=1e-12
        )


def test_actions_transfers_and_ends_of_steps_are_as_measured():
    config, spec = job(*VLM)
    transfer = TransferProfile(latency_s=1e-4, byte_s=1e-9)
    profile = profile_of(config, spec, FLOPS, transfer=transfer)
    one = costs_of(profile)
    assert (one.overheads, one.noise) == (profile.overheads, profile.noise)
    assert one.step_s(10**9) == pytest.approx(0.5 + 1.0)
    two = costs_of(profile, several_ranks=True)
    assert two.step_s(10**9) == pytest.approx(0.5 + 1.0 + 0.25)


def test_a_job_is_planned_with_its_profile(tmp_path: Path):
    config, spec = job(*VLM)
    transfer = TransferProfile(latency_s=0.125, byte_s=1e-9)
    path = tmp_path / "profile.json"
    profile_of(config, spec, FLOPS, transfer=transfer).write(path)
    planned, _ = job("debug_vlm.toml", f'--planner.profile="{path}"')
    planner = IterationPlanner(make_job(planned))
    assert isinstance(planner.job.costs, MeasuredCosts)
    _, problem = planner.problem(META)
    plain = make_job(config)
    _, flops = IterationPlanner(replace(plain, costs=FLOPS)).problem(META)
    paid = charged(flops, OVERHEADS)
    for stage, work in problem.graph.nodes():
        ours, theirs = problem.options(stage, work)[0], paid.options(stage, work)[0]
        assert ours.duration_s(Kind.F) == pytest.approx(theirs.duration_s(Kind.F))
        assert ours.duration_s(Kind.B) == pytest.approx(theirs.duration_s(Kind.B), abs=1e-8)
    assert problem.p2p.latency_s == 0.125 + OVERHEADS.message_s
    assert problem.p2p.bytes_per_s == pytest.approx(1e9)


# --------------------------------------------------------------------------------------------------- files


def test_json_is_read_back_equal(tmp_path: Path):
    for name in JOBS:
        config, spec = job(*name)
        transfer = TransferProfile(latency_s=1e-4, byte_s=1e-9, error=0.1)
        profile = profile_of(config, spec, FLOPS, recomputation=Recomputation(enable=True, save_ops=("aten.mm",)))
        profile = replace(profile, transfer=transfer)
        profile.write(tmp_path / "profile.json.gz")
        assert Profile.read(tmp_path / "profile.json.gz") == profile


def _changed(change) -> str:
    config, spec = job(*VLM)
    table = json.loads(profile_of(config, spec, FLOPS).to_json())
    change(table)
    return json.dumps(table)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(version=1), "version = 1; this program reads version 2"),
        (lambda t: t.update(more=1), "more is unknown"),
        (lambda t: t.pop("overheads"), "overheads is missing"),
        (lambda t: t["overheads"].update(send_s=-1.0), r"overheads.send_s = -1.0; it must be finite and at least 0"),
        (lambda t: t["noise"].update(shared=2.0), r"noise.shared = 2.0; it must be in 0 .. 1"),
        (lambda t: t["step"].update(param_s="fast"), "step.param_s = 'fast' must be a number"),
        (lambda t: t["layers"][0]["fits"].update(sideways={}), r"layers\[0\].fits.sideways is unknown"),
        (lambda t: t["layers"][1]["fits"]["forward"].pop("row"), r"layers\[1\].fits.forward.row is missing"),
        (lambda t: t["layers"][0]["points"]["forward"][0].pop(), r"points.forward\[0\] has 4 entries"),
        (lambda t: t["layers"][0].update(input_grad=1), r"layers\[0\].input_grad = 1 must be true or false"),
        (lambda t: t["curve"]["seconds"][0].append(1), r"curve.seconds\[0\] has 3 entries"),
        (lambda t: t.update(transfer={"latency_s": 0, "byte_s": 0, "error": 0}), "byte_s = 0"),
        (lambda t: t["machine"].update(cores=[2]), r"machine.cores = \[2\] must be a text or a number"),
        (lambda t: t["recomputation"].update(enable="no"), "recomputation.enable = 'no'"),
    ],
)  # fmt: skip
def test_a_fault_is_named_with_its_path(change, message):
    with pytest.raises(PlanError, match=message):
        Profile.from_json(_changed(change))


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(PlanError, match=r"nowhere\.json: there is no such file"):
        Profile.read(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--training.mixed_precision_param=bfloat16", "dtype = float32, but this job has bfloat16"),
        ("--parallelism.tensor_parallel_degree=2", "tensor_parallel_degree = 1, but this job has 2"),
        ("--model.language.config.intermediate_size=512", "num_params = 147,968, but layers.0 of this job has"),
        ("--model.language.trainable=false", "num_trainable_params = "),
        ("--training.attention_backend=sdpa", "attention_backend = auto, but this job has sdpa"),
    ],
)
def test_a_profile_of_another_job_is_refused(override, message):
    config, spec = job(*VLM)
    profile = profile_of(config, spec, FLOPS)
    other = config_module.load("debug_vlm.toml", [override] if "intermediate" not in override else [])
    if "intermediate" in override:
        wider = {**other.model.language.config, "intermediate_size": 512}
        other = replace(other, model=replace(other.model, language=replace(other.model.language, config=wider)))
    with pytest.raises(ConfigError, match=message):
        check_fits(profile, other, model_spec(other.model), "p.json")


def test_a_profile_without_the_layout_of_rows_was_measured_with_divided_rows():
    tp = "--parallelism.tensor_parallel_degree=2"
    config, spec = job(*VLM, tp)
    profile = profile_of(config, spec, FLOPS)
    older = replace(profile, job={key: value for key, value in profile.job.items() if key != "tensor_parallel_rows"})
    check_fits(older, config, spec, "p.json")
    whole, spec = job(*VLM, tp, "--parallelism.tensor_parallel_rows=whole")
    for other in (older, profile):
        with pytest.raises(ConfigError, match="tensor_parallel_rows = divided, but this job has whole"):
            check_fits(other, whole, spec, "p.json")


def test_more_layers_and_pipeline_ranks_are_the_same_job_to_a_profile():
    config, spec = job(*VLM)
    profile = profile_of(config, spec, FLOPS)
    values = {**config.model.language.config, "num_hidden_layers": 9}
    deeper = replace(config, model=replace(config.model, language=replace(config.model.language, config=values)))
    check_fits(profile, deeper, model_spec(deeper.model), "p.json")


def test_a_text_job_has_no_use_for_a_profile_without_its_layers():
    config, spec = job("debug_text.toml")
    vlm, vlm_spec = job(*VLM)
    with pytest.raises(ConfigError, match="vision = none, but this job has qwen2_vl_vision"):
        check_fits(profile_of(config, spec, FLOPS), vlm, vlm_spec, "p.json")


def test_a_profile_of_clips_is_read_back_and_others_are_written_as_before():
    from mmtrain.spec.spec import clips_work

    config, spec = job(*VLM)
    before = profile_of(config, spec, FLOPS)
    assert "cross_pair" not in before.to_json()
    layer = before.layers[0]
    rows = [len(row) for row in json.loads(before.to_json())["layers"][0]["points"]["forward"]]
    assert set(rows) == {5}
    sizes = [clips_work([n] * 2, [t, 2 * t], 2 * n) for n, t in ((64, 3), (100, 9), (30, 30), (7, 50), (200, 1))]
    true = SizeFit(row=1e-6, pair=1e-9, cross_pair=3e-9, text=2e-6)
    points = {"forward": tuple((size, true(size)) for size in sizes)}
    made = replace(layer, points=points, fits={"forward": true})
    profile = replace(before, layers=(made,))
    assert Profile.from_json(profile.to_json()) == profile
    earlier = json.loads(profile.to_json())
    for point in earlier["layers"][0]["points"]["forward"]:
        del point[7]  # calls: each clip was one
    (read,) = Profile.from_json(json.dumps(earlier)).layers
    assert [size.calls for size, _ in read.points["forward"]] == [2] * len(sizes)
    found = fit_sizes(sizes, [true(size) for size in sizes])
    assert all(found(size) == pytest.approx(true(size), rel=1e-6) for size in sizes)
