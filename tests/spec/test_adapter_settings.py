"""Settings of adapters that `peft` wrote: scales against those of its own layers, and what is refused."""

import json

import pytest
from peft import LoraConfig, get_peft_model
from torch import nn

from mmtrain.config.model import LoRAConfig
from mmtrain.errors import ConfigError
from mmtrain.spec.adapter_settings import check_settings

LAYERS = ("blocks.0.q_proj", "blocks.0.v_proj", "blocks.1.q_proj", "blocks.1.v_proj")


def model() -> nn.Module:
    def block() -> nn.Module:
        return nn.ModuleDict({"q_proj": nn.Linear(8, 8), "v_proj": nn.Linear(8, 8)})

    return nn.ModuleDict({"blocks": nn.ModuleList([block(), block()])})


def written(folder, **settings):
    """The settings that peft writes, and the (rank, scale) of each of its layers."""
    tuned = get_peft_model(
        model(), LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]} | settings))
    )
    tuned.save_pretrained(folder)
    layers = [tuned.base_model.model.get_submodule(name) for name in LAYERS]
    return json.loads((folder / "adapter_config.json").read_text()), {
        (layer.r["default"], layer.scaling["default"]) for layer in layers
    }


def check(stored, **lora):
    check_settings("here", stored, LoRAConfig(**({"rank": 4, "alpha": 8.0} | lora)), LAYERS)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True},
        {"r": 8, "lora_alpha": 5, "use_rslora": True},
        {"alpha_pattern": {"q_proj": 64, "v_proj": 64}},
        {"alpha_pattern": {r"blocks\.\d+\.\w_proj": 3.5}},
        {"rank_pattern": {"q_proj": 2, r"blocks\..*": 2}},
        {"lora_dropout": 0.1, "init_lora_weights": "gaussian", "fan_in_fan_out": True},
    ],
)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_one_scale_of_all_layers_is_taken_as_alpha_over_rank(tmp_path, settings):
    stored, ((rank, scale),) = written(tmp_path, **settings)
    check(stored, rank=rank, alpha=scale * rank)
    with pytest.raises(ConfigError, match=r"set model\.lora\.alpha = ") as error:
        check(stored, rank=rank, alpha=2 * scale * rank)
    said = float(str(error.value).rpartition("= ")[2])
    assert said == pytest.approx(scale * rank, rel=1e-8)
    check(stored, rank=rank, alpha=said)
    with pytest.raises(ConfigError, match=rf"set model\.lora\.rank = {rank}"):
        check(stored, rank=rank + 1, alpha=scale * rank)


@pytest.mark.parametrize("pattern", [r"(.+)+x", r"(\w*)*x", r".*.*.*.*x"])
def test_a_pattern_that_takes_hours_is_refused_at_once(pattern):
    with pytest.raises(ConfigError, match=r"alpha_pattern has the pattern .*; write it without repeated groups"):
        check({"r": 4, "lora_alpha": 8, "alpha_pattern": {pattern: 8}})


@pytest.mark.parametrize(
    ("key", "value"), [("alpha_pattern", {"q_proj": 64}), ("rank_pattern", {"blocks.1.v_proj": 2})]
)
def test_layers_of_several_scales_or_ranks_are_refused_by_name(tmp_path, key, value):
    stored, layers = written(tmp_path, **{key: value})
    assert len(layers) == 2
    with pytest.raises(ConfigError, match=rf"here has {key} = "):
        check(stored)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_dora": True},
        {"lora_bias": True},
        {"bias": "all"},
        {"modules_to_save": ["head"]},
        {"trainable_token_indices": [3]},
        {"target_parameters": ["blocks.0.q_proj.weight"]},
        {"layer_replication": [[0, 2], [1, 2]]},
        {"alora_invocation_tokens": [1, 2]},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "olora"},
        {"peft_type": "LOHA"},
        {"a_setting_of_next_year": 0.5},
    ],
)
def test_a_setting_that_changes_what_adapters_compute_is_refused_by_name(settings):
    stored = json.loads(json.dumps(LoraConfig(r=4, lora_alpha=8).to_dict(), default=list)) | {"peft_type": "LORA"}
    check(stored)
    with pytest.raises(ConfigError, match=rf"{next(iter(settings))} = .*"):
        check(stored | settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"r": "4"},
        {"r": 0},
        {"r": 2.5},
        {"lora_alpha": None},
        {"lora_alpha": 10**400},
        {"alpha_pattern": ["q"]},
        {"rank_pattern": {"(": 4}},
    ],
)
def test_settings_that_are_no_numbers_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings)) + r"|rank of"):
        check({"r": 4, "lora_alpha": 8} | settings)
