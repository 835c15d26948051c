import json
import math

import pytest

from mmtrain.config.model import DitConfig, EncoderConfig, LanguageConfig, VaeConfig
from mmtrain.errors import ConfigError
from mmtrain.families.catalogue import DITS, ENCODERS, LANGUAGES, VAES
from mmtrain.spec.model_configs import dit_config, encoder_config, language_config, vae_config

NAMES = ("qwen2", "llama", "qwen3", "mistral")
NAMES += ("qwen2_vl_text", "qwen2_vl", "qwen2_5_vl_text", "qwen2_5_vl", "qwen3_vl_text", "qwen3_vl")
NAMES += ("siglip_text_model", "clip_text_model")
"""What names a language model."""


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
        ("siglip2", {"num_hidden_layers": 7, "model_type": "siglip2_vision_model"}, "siglip2_vision_model"),
        ("clip", {"num_hidden_layers": 7, "model_type": "clip_vision_model"}, "clip_vision_model"),
        ("llava", {"num_hidden_layers": 7}, "clip_vision_model"),
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
            {"model_type": "qwen4"},
            rf'model_type = "qwen4" is no supported language model; supported are {", ".join(NAMES)}$',
        ),
        ({"model_type": "qwen2", "hiden_size": 8}, r"unknown key \"hiden_size\"; did you mean \"hidden_size\""),
        ({"model_type": "qwen2", "zzz": 8}, r"unknown key \"zzz\"; qwen2 has vocab_size"),
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
            r"num_key_value_heads = \"2\"; it must be an integer",
        ),
        ({"model_type": "llama", "rms_norm_eps": "x"}, r"rms_norm_eps = \"x\"; it must be a number"),
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
    with pytest.raises(ConfigError, match=r'"vit" is no supported language model; .*; \[model.encoder\] takes it'):
        language_config(LanguageConfig(config={"model_type": "vit"}))
    with pytest.raises(ConfigError, match='"llama" is no supported encoder; supported are qwen2_vl_vision, qwen2_vl, '):
        encoder_config(EncoderConfig(config={"model_type": "llama"}))


@pytest.mark.parametrize(
    ("model_type", "hint"),
    [
        ("quen2", "qwen2"),
        ("lama", "llama"),
        ("qwen4", None),  # another version is no misspelling
        ("qwen25", None),
        ("vipllava", None),  # nor is another family that Hugging Face knows
        ("mllama", None),
        ("phi", None),
        (["qwen2"], None),
    ],
)
def test_only_a_misspelt_family_gets_a_hint(tmp_path, model_type, hint):
    path = folder(tmp_path, {"model_type": model_type})
    with pytest.raises(ConfigError, match="supported are qwen2, llama, ") as found:
        language_config(LanguageConfig(pretrained=path))
    assert str(found.value).endswith(f'did you mean "{hint}"?' if hint else ", ".join(NAMES))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        {"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}},
        {"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e6}},
    ],
)
def test_positions_of_three_axes_are_refused_by_name(tmp_path, rope):
    wanted = r"model.language: rope_\w+ = \{.*mrope.*\}: .* \(mrope\) are those of the model types qwen2_vl_text, "
    with pytest.raises(ConfigError, match=wanted):
        language_config(LanguageConfig(config={"model_type": "qwen2", **rope}))
    with pytest.raises(ConfigError, match=wanted):
        language_config(LanguageConfig(pretrained=folder(tmp_path, {"model_type": "qwen2", **rope})))


@pytest.mark.parametrize("rope", [None, {}, {"rope_type": "default"}, {"type": "linear", "factor": 2.0}])
def test_positions_of_one_axis_are_taken(rope):
    assert language_config(LanguageConfig(config={"model_type": "llama", "rope_scaling": rope}))["rope_scaling"] == rope
    with pytest.raises(ConfigError, match='rope_scaling has the type "nonsense"; choose one of default, linear'):
        language_config(LanguageConfig(config={"model_type": "llama", "rope_scaling": {"type": "nonsense"}}))


SECTIONS = {
    "encoder": (EncoderConfig, encoder_config, ENCODERS),
    "language": (LanguageConfig, language_config, LANGUAGES),
    "dit": (DitConfig, dit_config, DITS),
    "vae": (VaeConfig, vae_config, VAES),
}
WRONG = (
    -1, 0, 2**31, 2**64, 10**5000, 0.5, -1e300, 1e308, math.nan, math.inf, "", "x", "\0", True, False, None,
    [], [1], [-1], [0], [2**64], ["x"], [[]], [math.nan], {}, {"a": 1}, {"rope_type": 3}, {"rope_type": []}, {1: 2},
)  # fmt: skip


@pytest.mark.parametrize("section", SECTIONS)
def test_a_wrong_value_of_any_key_is_an_error_of_one_line_or_a_config(section):
    """What is accepted has the type of its default, so that nothing later fails on it."""
    make, read, families = SECTIONS[section]
    for family, values in families.items():
        for key in ("model_type", *values.defaults, *values.optional, *values.aliases):
            for wrong in WRONG:
                try:
                    found = read(make(config={"model_type": family, key: wrong})).get(values.aliases.get(key, key))
                except ConfigError as error:
                    assert "\n" not in str(error) and "\0" not in str(error) and len(str(error)) < 900
                    continue
                default = values.defaults.get(key)
                if default is not None and not isinstance(default, tuple):
                    kinds = (int, float) if isinstance(default, float) else (type(default), list)
                    assert isinstance(found, kinds), (family, key, wrong)


def test_an_unknown_activation_function_is_refused():
    with pytest.raises(ConfigError, match='hidden_act = "gleu" is no activation function; known are gelu, '):
        language_config(LanguageConfig(config={"model_type": "llama", "hidden_act": "gleu"}))


def test_layers_that_attend_in_part_are_refused():
    with pytest.raises(ConfigError, match="packed documents attend in full here, in every layer"):
        language_config(LanguageConfig(config={"model_type": "qwen2", "layer_types": ["sliding_attention"]}))


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
    with pytest.raises(ConfigError, match=r"fullatt_block_indexes = .*; it must be a list of integers from 0 to \d+"):
        encoder_config(EncoderConfig(config={"model_type": "qwen2_5_vl", "fullatt_block_indexes": value}))


def test_sources_that_do_not_exist(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for source in (str(tmp_path / "absent"), "~nobody/x", str(tmp_path / ("x" * 300))):
        with pytest.raises(ConfigError, match="does not exist"):
            language_config(LanguageConfig(pretrained=source))
    with pytest.raises(ConfigError, match=r"the folder has no config.json"):
        language_config(LanguageConfig(pretrained=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"nobody/nothing.*could not be fetched from the hub"):
        language_config(LanguageConfig(pretrained="nobody/nothing"))
    with pytest.raises(ConfigError, match="not valid JSON"):
        language_config(LanguageConfig(pretrained=folder(tmp_path, "{")))
    for text in ('{"vocab_size": 1' + "0" * 5000 + "}", "[" * 100_000):
        with pytest.raises(ConfigError, match="not valid JSON"):
            language_config(LanguageConfig(pretrained=folder(tmp_path, text)))
    with pytest.raises(ConfigError, match="no JSON object"):
        language_config(LanguageConfig(pretrained=folder(tmp_path, "[]")))


def test_a_whole_model_gives_its_language_model(tmp_path):
    rope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    flat = {"model_type": "qwen2_vl", "hidden_size": 99, "rope_scaling": rope, "vision_config": {"hidden_size": 3}}
    for values in (flat, {"model_type": "qwen2_vl", "hidden_size": 3, "text_config": {"hidden_size": 99}}):
        found = language_config(LanguageConfig(pretrained=folder(tmp_path, values)))
        assert (found["model_type"], found["hidden_size"], found["rms_norm_eps"]) == ("qwen2_vl_text", 99, 1e-5)
        assert "vision_config" not in found


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_vl_moe", "internvl", None])
def test_an_unknown_whole_model_is_refused_with_the_known_ones(tmp_path, model_type):
    path = folder(tmp_path, {"model_type": model_type, "text_config": {"model_type": "qwen2"}, "vision_config": {}})
    with pytest.raises(ConfigError) as found:
        language_config(LanguageConfig(pretrained=path))
    shown = f'"{model_type}"' if model_type else "None"
    assert str(found.value).endswith(
        f"is a whole model with model_type = {shown}; supported whole models are qwen2_vl, qwen2_5_vl, qwen3_vl, "
        "siglip, clip, llava, qwen2_audio. Name one of them, or a language model by itself"
    )
