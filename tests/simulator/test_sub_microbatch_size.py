import dataclasses

from mmtrain.config import config
from mmtrain.costs.job_costs import cost_model
from mmtrain.costs.sub_microbatch import Curve
from mmtrain.modality.typical import TypicalSizes, reference_sizes
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.sub_microbatch_size import simulated_curve, sub_microbatch_size
from mmtrain.spec.builders import model_spec
from mmtrain.spec.recomputation import Recomputation
from mmtrain.spec.spec import images_work
from tests.costs.profiles import profile_of
from tests.jobs import video_config

RULE = "model.encoder.sub_microbatch_size=0"


def size(name: str, *overrides: str) -> int:
    job = config.load(name, overrides)
    spec = model_spec(job.model, dtype_bytes=4)
    return sub_microbatch_size(job, spec, cost_model(job, spec))


def test_the_config_decides_where_it_says_a_number():
    assert size("debug_vlm.toml") == 8
    assert size("vlm_s.toml", "planner.hardware=h800x16") == 12


def test_all_images_are_one_work_where_cutting_is_switched_off():
    assert size("debug_vlm.toml", "planner.search.sub_microbatch=false") == 0
    assert make_job(config.load("debug_vlm.toml", ["planner.search.sub_microbatch=false"])).sub_microbatch_size == 0


def test_a_text_model_has_no_vision_works():
    assert size("debug_text.toml") == 0


def test_flops_alone_balance_a_vision_work_with_a_full_microbatch():
    job = config.load("vlm_s.toml", [RULE])
    spec = model_spec(job.model, dtype_bytes=2)
    found = size("vlm_s.toml", RULE)
    (grid,) = {TypicalSizes.typical(job).grid}
    image = images_work(spec.module("vision"), [grid])
    text = spec.flops("language", reference_sizes(spec, job.training.seq_len)["language"]).total
    assert spec.flops("vision", image).total * found <= text < spec.flops("vision", image).total * (found + 1)
    assert 3 <= found <= 6  # 5.5 x 10^9 x 2704 patches each, beside 8 x 10^9 x 8192 tokens


def test_simulated_hardware_gives_a_curve():
    job = config.load("vlm_s.toml", [RULE, "planner.hardware=h800x16"])
    spec = model_spec(job.model, dtype_bytes=2)
    curve = simulated_curve(spec, cost_model(job, spec), Recomputation(), TypicalSizes.typical(job))
    assert curve.patches == 52 * 52
    assert [number for number, _ in curve.seconds] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]  # 48 x 169 < 8192
    rates = [number / seconds for number, seconds in curve.seconds]
    assert rates[0] < 0.9 * max(rates)
    assert rates[-1] > 0.95 * max(rates)
    assert 1 < size("vlm_s.toml", RULE, "planner.hardware=h800x16") <= 16


def test_a_profile_has_measured_it(tmp_path):
    job = config.load("debug_vlm.toml", [RULE])
    spec = model_spec(job.model, dtype_bytes=4)
    curve = Curve(patches=64, seconds=((1, 2.0), (2, 2.5), (4, 4.0), (8, 8.0)))  # 4 images a 4 s are the best
    profile = dataclasses.replace(profile_of(job, spec, cost_model(job, spec)), curve=curve)
    path = tmp_path / "profile.json"
    profile.write(path)
    assert size("debug_vlm.toml", RULE, f"planner.profile={path}") == 4
    without = dataclasses.replace(profile, curve=None)
    without.write(path)
    assert size("debug_vlm.toml", RULE, f"planner.profile={path}") >= 1  # from the fits of its layers


def test_clips_of_a_work_are_those_of_the_config_even_with_a_curve(tmp_path):
    plain = video_config(tmp_path)
    spec = model_spec(plain.model, dtype_bytes=4)
    profile = profile_of(plain, spec, cost_model(plain, spec))
    assert profile.curve is not None
    profile.write(tmp_path / "profile.json")
    for number in (0, 1, 2):
        words = [f"planner.profile={tmp_path}/profile.json", f"model.dit.sub_microbatch_size={number}"]
        job = video_config(tmp_path, *words)
        assert sub_microbatch_size(job, spec, cost_model(job, spec)) == number
