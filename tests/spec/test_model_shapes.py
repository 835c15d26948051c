import json
from dataclasses import replace

import pytest

from mmtrain.config.model import EncoderConfig, LanguageConfig, ModelConfig, ProjectorConfig
from mmtrain.errors import ConfigError
from mmtrain.spec.builders import model_spec
from mmtrain.spec.model_shapes import check_window, language_shape
from mmtrain.spec.vision_shapes import check_patches_split, vision_shape


def model(encoder=None, language=None, **projector) -> ModelConfig:
    base = {"model_type": "qwen2", "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return ModelConfig(
        encoder=EncoderConfig(config=encoder) if encoder else None,
        language=LanguageConfig(config={**base, **(language or {})}),
        projector=ProjectorConfig(**projector),
    )


QWEN2_5_VL = {"model_type": "qwen2_5_vl", "hidden_size": 64, "num_heads": 4, "out_hidden_size": 48}
QWEN2_VL = {"model_type": "qwen2_vl", "embed_dim": 64, "num_heads": 4, "hidden_size": 48}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (model({**QWEN2_VL, "num_heads": 5}), "width = 64 is not a multiple of number of heads = 5"),
        (model({**QWEN2_VL, "num_heads": 32}), "embed_dim / num_heads = 2; .*multiple of 4"),
        (model({**QWEN2_VL, "patch_size": [14, 16]}), "only square sizes are supported"),
        (
            model({"model_type": "vit", "image_size": 30}),
            "image_size = 30 is not a multiple of patch_size = 16",
        ),
        (model({"model_type": "vit"}, spatial_merge=3), "makes 14 x 14 patches; choose a divisor of 14"),
        (model({"model_type": "vit"}, kind="native"), r"\(vit\) has no merger of its own; use \"mlp\""),
        (model({"model_type": "siglip2", "num_patches": 250}), "num_patches = 250; .* it must be a square number"),
        (model(QWEN2_VL, kind="native", spatial_merge=4), "the merger of model.encoder.config merges 2 x 2"),
        (model({**QWEN2_VL, "hidden_size": 40}, kind="native"), "makes 40 columns .* language model has 48"),
        (model({**QWEN2_5_VL, "num_heads": 32}), "hidden_size / num_heads = 2; .*multiple of 4"),
        (
            model({**QWEN2_5_VL, "window_size": 20}),
            r"window_size = 20 pixels is less than one merged token of .* 2 \* 14",
        ),
        (model({**QWEN2_5_VL, "out_hidden_size": 40}, kind="native"), "makes 40 columns .* language model has 48"),
        (
            model({"model_type": "whisper"}, spatial_merge=7),
            r"makes 1500 frames \(max_source_positions\); choose a div",
        ),
        (model({"model_type": "whisper", "d_model": 65}), "d_model = 65; sines and cosines of positions need an even"),
        (model({"model_type": "whisper"}, kind="native"), r"\(whisper_encoder\) has no merger of its own"),
    ],
)
def test_encoders_and_projectors_that_do_not_fit(config, message):
    with pytest.raises(ConfigError, match=message):
        vision_shape(config)


@pytest.mark.parametrize(
    ("language", "message"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple of num_key_value_heads = 3"),
        ({"hidden_size": 50}, "hidden_size = 50 is not a multiple of num_attention_heads = 4"),
        ({"head_dim": 7}, "the width of a head is 7"),
    ],
)
def test_language_models_that_do_not_fit(language, message):
    with pytest.raises(ConfigError, match=message):
        language_shape(model(language=language))


CLIP = {"model_type": "clip", "num_hidden_layers": 4, "image_size": 64}


def with_features(encoder, projector="llava", **features) -> ModelConfig:
    base = model(encoder, kind=projector)
    return replace(base, encoder=EncoderConfig(config=encoder, **features))


@pytest.mark.parametrize(
    ("encoder", "features", "depth", "final_norm", "tokens"),
    [
        (CLIP, {}, 4, False, 4),  # its norm is for the pooled class token
        (CLIP, {"feature_layer": -1}, 4, False, 4),
        (CLIP, {"feature_layer": -2}, 3, False, 4),
        (CLIP, {"feature_layer": 1, "feature_select": "full"}, 1, False, 5),
        ({"model_type": "vit"}, {}, 12, True, 196),
        ({"model_type": "vit"}, {"feature_layer": -12, "feature_select": "default"}, 1, False, 196),
        ({"model_type": "siglip"}, {"feature_select": "full"}, 12, True, 196),
        ({"model_type": "siglip"}, {"feature_layer": -1}, 12, False, 196),
    ],
)
def test_features_that_the_projector_reads(encoder, features, depth, final_norm, tokens):
    shape = vision_shape(with_features(encoder, **features))
    assert (shape.depth, shape.final_norm, shape.full_tokens) == (depth, final_norm, tokens)
    layers = model_spec(with_features(encoder, **features)).module("vision").layers
    assert sum(layer.is_block for layer in layers) == depth
    assert [layer.name for layer in layers].count("norm") == final_norm


@pytest.mark.parametrize(
    ("encoder", "features", "projector", "message"),
    [
        (
            CLIP,
            {"feature_layer": 5},
            "llava",
            "= 5, but model.encoder.config has 4 blocks; choose 1 to 4,",
        ),
        (CLIP, {"feature_layer": -5}, "llava", "feature_layer = -5, but .* or -1 to -4 from the last one"),
        (QWEN2_VL, {"feature_layer": -2}, "native", '"native" reads the output of the last block; remove it'),
        (CLIP, {"feature_select": "full"}, "mlp", "merges 2 x 2 features; set its spatial_merge = 1"),
        ({"model_type": "siglip"}, {"feature_select": "default"}, "llava", r"siglip_vision_model\) has none; set"),
    ],
)
def test_features_that_there_are_not(encoder, features, projector, message):
    with pytest.raises(ConfigError, match=message):
        vision_shape(with_features(encoder, projector, **features))


def test_shapes_of_the_tiny_models(tiny):
    shape = vision_shape(tiny.model("vit"))
    assert shape.class_token
    assert shape.fixed_grid == (1, 4, 4)
    assert shape.merge == 2
    assert not shape.packed
    shape = vision_shape(tiny.model("qwen2_vl"))
    assert shape.packed
    assert shape.patch_dim == 3 * 2 * 4 * 4
    assert shape.fixed_grid is None
    shape = vision_shape(tiny.model("qwen2_5_vl"))
    assert (shape.window, shape.full_blocks, shape.native_width) == (2, (1,), 24)
    assert shape.gated_mlp
    assert shape.rms_norm
    shape = vision_shape(tiny.model("whisper", projector={"spatial_merge": 3}))
    assert (shape.fixed_grid, shape.patches_per_token, shape.patch_dim) == ((1, 1, 12), 3, 20)
    assert not shape.key_bias
    assert language_shape(tiny.model(None, "llama")).head_dim == 8
    assert language_shape(tiny.model(None, "qwen2")).head_dim == 6


def test_the_side_of_a_window_is_rounded_down_to_merged_tokens():
    """112 pixels are 8 patches of 14; three of them are one token, and two tokens are one window."""
    assert vision_shape(model(QWEN2_5_VL)).window == 4
    assert vision_shape(model(QWEN2_5_VL, spatial_merge=1)).window == 8
    assert vision_shape(model(QWEN2_5_VL, spatial_merge=3)).window == 2


def test_orders_follow_the_windows():
    shape = vision_shape(model({**QWEN2_5_VL, "window_size": 28}))
    assert shape.feature_order(((1, 4, 4),)).tolist() == [0, 1, 2, 3]
    shape = vision_shape(model({**QWEN2_5_VL, "window_size": 56}))
    assert shape.feature_order(((1, 4, 8),)).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert shape.row_order(((1, 4, 8),))[:12].tolist() == [*range(8), *range(16, 20)]
    assert vision_shape(model(QWEN2_VL)).row_order(((1, 4, 8),)).tolist() == list(range(32))


@pytest.mark.parametrize("encoder", ["siglip", "clip", "vit", "whisper"])
def test_patches_of_a_fixed_size_cannot_be_divided(tiny, encoder):
    with pytest.raises(ConfigError, match=r'encoder_context_parallel = "patches", but .*; use "images"'):
        check_patches_split(tiny.model(encoder))
    check_patches_split(tiny.model("qwen2_5_vl"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"deepstack_visual_indexes": [1, 0]}, r"indexes = \[1, 0\]; they name blocks 0 to 2, each once and in their"),
        ({"deepstack_visual_indexes": [1, 1]}, r"indexes = \[1, 1\]; they name blocks 0 to 2, each once"),
        ({"deepstack_visual_indexes": [3]}, r"indexes = \[3\]; they name blocks 0 to 2"),
        (
            {"depth": 5, "deepstack_visual_indexes": [0, 1, 2, 3]},
            "added to the output of a language layer of its own, but the language model has 3; name at most as many",
        ),
        ({"num_position_embeddings": 8}, "num_position_embeddings = 8; positions form a square, so it must be"),
        ({"out_hidden_size": 48}, "makes 48 columns"),
    ],
)
def test_taps_and_positions_that_do_not_fit_are_refused(tiny, change, message):
    with pytest.raises(ConfigError, match=message):
        vision_shape(tiny.model("qwen3_vl", projector={"kind": "native"}, encoder_config=change))


def test_keys_of_other_families_in_a_folder_change_nothing(tiny, tmp_path):
    stray = {
        "model_type": "qwen2_vl_vision",
        "window_size": 112,
        "num_position_embeddings": 7,
        "deepstack_visual_indexes": [9],
    }
    (tmp_path / "config.json").write_text(json.dumps(tiny.encoders["qwen2_vl"] | stray))
    model = tiny.model("qwen2_vl", projector={"kind": "native"})
    read = replace(model, encoder=replace(model.encoder, config={}, pretrained=str(tmp_path), weights="random"))
    assert vision_shape(read) == vision_shape(model)


def test_only_its_own_merger_reads_taps(tiny):
    unread = {"deepstack_visual_indexes": [9, 2]}
    assert vision_shape(tiny.model("qwen3_vl", encoder_config=unread)).taps == ()
    assert vision_shape(tiny.model("qwen3_vl", projector={"kind": "native"})).taps == (0, 1)
    check_patches_split(tiny.model(None))


AXES = {"model_type": "qwen2_vl_text", "num_attention_heads": 4, "hidden_size": 48}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {},
            r"mrope_section = \[16, 24, 24\]; .* whose sum is half of the width of a head, 6; set it",
        ),
        ({"rope_parameters": {"mrope_section": [2, 2, 3]}}, r"mrope_section = \[2, 2, 3\]; it has three numbers"),
        ({"rope_parameters": {"mrope_section": [3, 3]}}, r"mrope_section = \[3, 3\]; it has three numbers"),
        ({"rope_parameters": {"mrope_section": [7, -1, 0]}}, r"mrope_section = \[7, -1, 0\]; it has three numbers"),
        ({"rope_parameters": {"mrope_section": "2"}}, r'mrope_section = "2"; it has three numbers'),
        (
            {"rope_parameters": {"mrope_section": [2, 1, 1]}, "head_dim": 8},
            "head_dim = 8, but heads of this family have hidden_size / num_attention_heads = 12 columns; leave",
        ),
    ],
)
def test_columns_of_three_axes_that_do_not_fit(changes, message):
    with pytest.raises(ConfigError, match=message):
        language_shape(model(language={**AXES, **changes}))


def test_columns_of_three_axes(tiny):
    for key in ("rope_parameters", "rope_scaling"):
        shape = language_shape(model(language={**AXES, key: {"type": "mrope", "mrope_section": [1, 2, 3]}}))
        assert (shape.axis_columns, shape.position_axes) == ((1, 2, 3), 3)
    assert language_shape(tiny.model(None)).position_axes == 1


def test_a_window_must_cover_the_sequence(tmp_path):
    mistral = {"model_type": "mistral", "hidden_size": 48}
    check_window(model(language=mistral), 4096)
    with pytest.raises(ConfigError, match=r"sliding_window = 4096 tokens is below training.seq_len = 4097; .* at most"):
        check_window(model(language=mistral), 4097)
    check_window(model(language={**mistral, "sliding_window": 8192}), 8192)
    check_window(model(language={"model_type": "qwen2", "sliding_window": 4096}), 8192)  # its windows are off
    (tmp_path / "config.json").write_text('{"model_type": "mistral", "sliding_window": null}')
    check_window(ModelConfig(language=LanguageConfig(pretrained=str(tmp_path))), 10**6)
