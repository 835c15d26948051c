"""Efficiencies fitted to measured layers."""

from dataclasses import replace
from pathlib import Path

import pytest

from mmtrain.config import config as config_module
from mmtrain.costs.operator_costs import OperatorCosts
from mmtrain.costs.operators.cluster import Cluster
from mmtrain.costs.operators.operator_graph import OpKind
from mmtrain.costs.profile.calibration import calibrate
from mmtrain.costs.profile.profile_table import table
from mmtrain.errors import ConfigError
from mmtrain.modality.submesh import Submesh
from mmtrain.spec.builders import model_spec
from tests.costs.profiles import profile_of

CONFIG = config_module.load("debug_vlm.toml", [])
SPEC = model_spec(CONFIG.model)
SLOWER = {OpKind.MATMUL: 2.0, OpKind.ATTENTION: 1.5, OpKind.ELEMENTWISE: 3.0}


def operator_costs(hardware: str, rule=None) -> OperatorCosts:
    return OperatorCosts.of(CONFIG, SPEC, Cluster.of(hardware, 2), rule)


def slower(op, size, seconds):
    """A machine whose kernels take longer than the profile says, but start as fast."""
    fixed = op.launches * operator_costs("cpu")._hardware.launch_s
    return fixed + SLOWER.get(op.kind, 1.0) * (seconds - fixed)


def test_a_machine_that_is_the_profile_has_factors_of_one():
    found = calibrate(profile_of(CONFIG, SPEC, operator_costs("cpu")), CONFIG, SPEC, "cpu")
    assert found.error_before < 1e-6
    assert found.error < 1e-6
    assert found.factors[OpKind.MATMUL] == pytest.approx(1.0, rel=1e-3)


def test_the_factors_of_a_slower_machine_are_found_and_its_profile_simulates_it(tmp_path: Path):
    profile = profile_of(CONFIG, SPEC, operator_costs("cpu", slower))
    found = calibrate(profile, CONFIG, SPEC, "cpu")
    assert found.error_before > 0.3
    assert found.error < 1e-3
    for kind, factor in SLOWER.items():
        assert found.factors[kind] == pytest.approx(factor, rel=0.02)
    path = tmp_path / "mine.toml"
    path.write_text(found.to_toml())
    calibrated = operator_costs(str(path))
    for module in SPEC.modules:
        for index, layer in enumerate(module.layers):
            size = next(of.points["forward"][3][0] for of in profile.layers if of.module == module.name)
            ours = calibrated.layer(module, index, size, input_grad=True).forward_s
            theirs = operator_costs("cpu", slower).layer(module, index, size, input_grad=True).forward_s
            assert ours == pytest.approx(theirs, rel=0.02), layer.name


def test_faster_than_the_peak_is_written_as_the_peak(tmp_path: Path):
    found = calibrate(profile_of(CONFIG, SPEC, operator_costs("cpu")), CONFIG, SPEC, "cpu")
    fast = replace(found, factors={**found.factors, "matmul": 0.01})
    path = tmp_path / "fast.toml"
    path.write_text(fast.to_toml())
    costs = operator_costs(str(path))
    assert costs._hardware.efficiency[OpKind.MATMUL].compute == 1.0


def test_unknown_hardware_is_refused():
    with pytest.raises(ConfigError, match="abacus"):
        calibrate(profile_of(CONFIG, SPEC, operator_costs("cpu")), CONFIG, SPEC, "abacus")


def test_the_table_has_every_layer_its_fit_and_the_rule():
    profile = profile_of(CONFIG, SPEC, operator_costs("cpu"))
    text = table(profile, SPEC, Submesh(), calibrate(profile, CONFIG, SPEC, "cpu"))
    for layer in profile.layers:
        assert f"{layer.module} {layer.role}" in text
    assert "nan" not in text
    # 1, 2, 4 images in 2.0, 3.0, 4.1 s: 0.51, 0.68, 1 of the best
    assert "1: 51 %, 2: 68 %, 4: 100 %" in text
    assert "model.encoder.sub_microbatch_size = 4 is the smallest with 95 % of the best" in text
    assert "Hardware profile cpu: mean error of a layer 0 %" in text
