"""What "auto" stands for on each kind of device."""

import pytest

from mmtrain.config import config
from mmtrain.config.device_choices import on_device
from mmtrain.costs.cost_model import FlopsCosts
from mmtrain.costs.job_costs import on_hardware
from mmtrain.errors import ConfigError
from mmtrain.spec.builders import model_spec
from tests.costs.profiles import profile_of

OPEN = config.load("debug_vlm.toml")


def chosen(job):
    return job.training.mixed_precision_param, job.optimizer.implementation


def test_defaults_follow_the_device():
    assert chosen(OPEN) == ("auto", "auto")
    assert chosen(on_device(OPEN, "cpu")) == ("float32", "foreach")
    assert chosen(on_device(OPEN, "cuda")) == ("bfloat16", "fused")
    assert chosen(on_device(OPEN, "cuda", bfloat16=False)) == ("float32", "fused")
    assert on_device(OPEN, "cuda").training.master_weights == "all"


def test_what_a_user_sets_stays():
    job = config.load("debug_vlm.toml", ["training.mixed_precision_param=float32", "optimizer.implementation=for-loop"])
    assert on_device(job, "cuda") is job


def test_an_open_choice_counts_as_that_of_a_cpu():
    assert (OPEN.training.param_dtype, OPEN.optimizer.kernel) == ("float32", "foreach")
    with pytest.raises(ConfigError, match=r'"auto" may compute in float32; set that to "bfloat16"'):
        config.load("debug_vlm.toml", ["training.master_weights=none"])


def test_a_choice_can_be_dumped_and_read(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(config.dump(on_device(OPEN, "cuda")))
    assert config.load(path) == on_device(OPEN, "cuda")


@pytest.mark.parametrize(("hardware", "dtype"), [("a800x16", "bfloat16"), ("cpu", "float32"), ("", "auto")])
def test_a_simulated_job_goes_by_its_hardware(hardware, dtype):
    job = config.load("debug_vlm.toml", [f"planner.hardware={hardware}"] if hardware else [])
    assert on_hardware(job).training.mixed_precision_param == dtype


@pytest.mark.parametrize(("dtype", "hardware"), [("bfloat16", "cpu"), ("float32", "a800")])
def test_a_profile_says_what_an_open_choice_was_when_it_was_measured(tmp_path, dtype, hardware):
    measured = config.load("debug_vlm.toml", [f"training.mixed_precision_param={dtype}"])
    spec = model_spec(measured.model)
    profile_of(measured, spec, FlopsCosts.of(measured.planner)).write(tmp_path / "profile.json")
    keys = [f"planner.profile={tmp_path / 'profile.json'}", f"planner.hardware={hardware}"]
    assert on_hardware(config.load("debug_vlm.toml", keys)).training.mixed_precision_param == dtype
