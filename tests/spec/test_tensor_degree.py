import pytest

from mmtrain.config.model import EncoderConfig, LanguageConfig, ModelConfig, ProjectorConfig
from mmtrain.errors import ConfigError
from mmtrain.spec.tensor_degree import check_tensor_degree
from tests.models.dits import t2v

LANGUAGE = {
    "model_type": "qwen2", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 1,
    "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 96,
}  # fmt: skip
ENCODER = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "image_size": 16, "patch_size": 4,
}  # fmt: skip


def model(encoder=None, projector=None, **language):
    return ModelConfig(
        encoder=None if encoder is None else EncoderConfig(config={**ENCODER, **encoder}),
        projector=ProjectorConfig(**(projector or {})),
        language=LanguageConfig(config={**LANGUAGE, **language}),
    )


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_degree_that_divides_everything_is_taken(tp):
    check_tensor_degree(model({}), tp)


@pytest.mark.parametrize(
    ("changes", "tp", "name", "fits"),
    [
        ({}, 8, "num_attention_heads = 12", 4),
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, 4, "num_key_value_heads = 2", 2),
        ({"intermediate_size": 90}, 4, "intermediate_size = 90", 2),
        ({"vocab_size": 97}, 2, "vocab_size = 97", 1),
        ({"encoder": {"num_attention_heads": 2}}, 4, "model.encoder: number of attention heads = 2", 2),
        ({"encoder": {"intermediate_size": 70}}, 4, "inner columns of the MLP = 70", 2),
        ({"encoder": {}, "projector": {"hidden_size": 30}}, 4, "model.projector: inner columns = 30", 2),
    ],
)
def test_a_degree_that_does_not_fit_is_refused_with_the_largest_that_does(changes, tp, name, fits):
    with pytest.raises(ConfigError) as caught:
        check_tensor_degree(model(**changes), tp)
    assert f"parallelism.tensor_parallel_degree = {tp}" in str(caught.value)
    assert name in str(caught.value)
    assert str(caught.value).endswith(f"fits this model is {fits}")


@pytest.mark.parametrize(
    ("changes", "tp", "name", "fits"),
    [
        ({}, 4, "model.dit: num_attention_heads = 2", 2),
        ({"num_attention_heads": 4, "attention_head_dim": 8, "ffn_dim": 42}, 4, "model.dit: ffn_dim = 42", 2),
    ],
)
def test_a_degree_that_does_not_fit_a_diffusion_transformer_is_refused(changes, tp, name, fits):
    made = t2v(text={"num_key_value_heads": 4}, **changes)
    check_tensor_degree(made, fits)
    with pytest.raises(ConfigError, match=f"{name}; .* fits this model is {fits}"):
        check_tensor_degree(made, tp)


def test_an_encoder_that_every_rank_holds_whole_does_not_count():
    unfit = model({"num_attention_heads": 2})
    check_tensor_degree(unfit, 4, whole_encoder=True)
    with pytest.raises(ConfigError):
        check_tensor_degree(unfit, 4)


def test_all_refused_degrees_name_a_degree_that_is_taken():
    wide = model({}, num_attention_heads=24, hidden_size=96, num_key_value_heads=24, intermediate_size=480)
    for tp in range(1, 30):
        try:
            check_tensor_degree(wide, tp)
        except ConfigError as error:
            fits = int(str(error).rpartition(" ")[2])
            assert fits < tp
            check_tensor_degree(wide, fits)
