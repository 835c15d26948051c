import json

import pytest

from mmtrain.config import EncoderConfig, LanguageConfig
from mmtrain.errors import ConfigError
from mmtrain.models.families import encoder_config, find_file, language_config


def folder(tmp_path, values) -> str:
    (tmp_path / "config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return str(tmp_path)


def test_an_inline_config_gets_the_defaults_of_its_family(tiny):
    values = encoder_config(EncoderConfig(config={"model_type": "siglip_vision_model", "hidden_size": 64}))
    assert values["hidden_size"] == 64
    assert values["patch_size"] == 16


def test_other_names_of_a_key_are_understood():
    values = encoder_config(EncoderConfig(config={"model_type": "qwen2_vl", "num_hidden_layers": 5}))
    assert values["model_type"] == "qwen2_vl_vision"
    assert values["depth"] == 5
    assert "num_hidden_layers" not in values


@pytest.mark.parametrize(
    ("whole", "inner", "found"),
    [
        ("qwen2_vl", {"depth": 7, "in_chans": 3}, "qwen2_vl_vision"),
        ("qwen2_5_vl", {"depth": 7, "model_type": "qwen2_5_vl", "in_chans": 3}, "qwen2_5_vl_vision"),
        ("siglip", {"num_hidden_layers": 7, "model_type": "siglip_vision_model"}, "siglip_vision_model"),
    ],
)
def test_a_whole_model_gives_its_vision_config(tmp_path, whole, inner, found):
    path = folder(tmp_path, {"model_type": whole, "hidden_size": 99, "vision_config": inner})
    values = encoder_config(EncoderConfig(pretrained=path))
    assert values["model_type"] == found
    assert values.get("depth", values.get("num_hidden_layers")) == 7
    assert values["hidden_size"] != 99


def test_a_folder_may_hold_keys_that_mmtrain_does_not_know(tmp_path):
    path = folder(tmp_path, {"model_type": "llama", "transformers_version": "4.40", "vocab_size": 77})
    assert language_config(LanguageConfig(pretrained=path))["vocab_size"] == 77


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "qwen3"},
            r"'qwen3' is not a known language model; known are qwen2, llama; did you mean 'qwen2'",
        ),
        ({"model_type": "qwen2", "hiden_size": 8}, r"unknown key 'hiden_size'; did you mean 'hidden_size'"),
        ({"model_type": "qwen2", "zzz": 8}, r"unknown key 'zzz'; qwen2 has vocab_size"),
        ({"model_type": "qwen2", "hidden_size": 8.5}, r"hidden_size = 8.5; it must be an integer above 0"),
        (
            {"model_type": "qwen2", "num_hidden_layers": 0},
            r"num_hidden_layers = 0; it must be an integer above 0",
        ),
        (
            {"model_type": "qwen2", "tie_word_embeddings": 1},
            r"tie_word_embeddings = 1; it must be true or false",
        ),
        ({"model_type": "qwen2", "hidden_act": 3}, r"hidden_act = 3; it must be a string"),
        (
            {"model_type": "llama", "num_key_value_heads": "2"},
            r"num_key_value_heads = '2'; it must be an integer",
        ),
        ({"model_type": "llama", "rms_norm_eps": "x"}, r"rms_norm_eps = 'x'; it must be a number"),
        (
            {"model_type": "llama", "attention_dropout": 0.1},
            r"attention_dropout = 0.1; dropout is not supported",
        ),
        ({"model_type": "qwen2", "use_sliding_window": True}, r"use_sliding_window = true"),
    ],
)
def test_language_configs_that_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        language_config(LanguageConfig(config=config))


def test_an_encoder_is_no_language_model_and_the_other_way_round():
    with pytest.raises(ConfigError, match="'vit' is not a known language model"):
        language_config(LanguageConfig(config={"model_type": "vit"}))
    with pytest.raises(ConfigError, match="'llama' is not a known encoder; known are qwen2_vl_vision, qwen2_vl, qwe"):
        encoder_config(EncoderConfig(config={"model_type": "llama"}))


@pytest.mark.parametrize(
    ("model_type", "key"),
    [
        ("vit", "hidden_dropout_prob"),
        ("vit", "attention_probs_dropout_prob"),
        ("whisper", "activation_dropout"),
        ("whisper", "encoder_layerdrop"),
    ],
)
def test_dropout_of_an_encoder_is_refused(model_type, key):
    with pytest.raises(ConfigError, match=f"{key} = 0.5; dropout is not supported"):
        encoder_config(EncoderConfig(config={"model_type": model_type, key: 0.5}))


@pytest.mark.parametrize("value", [3, [1, -2], [True], ["1"]])
def test_a_list_of_blocks_holds_integers(value):
    with pytest.raises(ConfigError, match=r"fullatt_block_indexes = .*; it must be a list of integers of at least 0"):
        encoder_config(EncoderConfig(config={"model_type": "qwen2_5_vl", "fullatt_block_indexes": value}))


def test_sources_that_do_not_exist(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="there is no such folder"):
        language_config(LanguageConfig(pretrained=str(tmp_path / "absent")))
    with pytest.raises(ConfigError, match=r"the folder has no config.json"):
        language_config(LanguageConfig(pretrained=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"nobody/nothing.*could not be fetched from the hub"):
        language_config(LanguageConfig(pretrained="nobody/nothing"))
    with pytest.raises(ConfigError, match="not valid JSON"):
        language_config(LanguageConfig(pretrained=folder(tmp_path, "{")))
    with pytest.raises(ConfigError, match="no JSON object"):
        language_config(LanguageConfig(pretrained=folder(tmp_path, "[]")))
    assert find_file("model.language", str(tmp_path), "model.safetensors", optional=True) is None
