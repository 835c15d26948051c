import pytest

from mmtrain.config import EncoderConfig, LanguageConfig, ModelConfig, ProjectorConfig
from mmtrain.errors import ConfigError
from mmtrain.models.shapes import language_shape, vision_shape


def model(encoder=None, language=None, **projector) -> ModelConfig:
    base = {"model_type": "qwen2", "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return ModelConfig(
        encoder=EncoderConfig(config=encoder) if encoder else None,
        language=LanguageConfig(config={**base, **(language or {})}),
        projector=ProjectorConfig(**projector),
    )


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
        (model(QWEN2_VL, kind="native", spatial_merge=4), "the merger of model.encoder.config merges 2 x 2"),
        (model(QWEN2_VL, kind="native", hidden_size=9), 'hidden_size = 9 has no effect with kind = "native"'),
        (model({**QWEN2_VL, "hidden_size": 40}, kind="native"), "makes 40 columns .* language model has 48"),
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
    assert language_shape(tiny.model(None, "llama")).head_dim == 8
    assert language_shape(tiny.model(None, "qwen2")).head_dim == 6
