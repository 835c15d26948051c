"""The models of DIP (arXiv:2504.14145), tables 2, 3 and 6: parameter counts against the Hugging Face classes."""

import pytest
import torch
import transformers
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from mmtrain.config import config
from mmtrain.spec.builders import model_spec
from mmtrain.spec.model_configs import dit_config, encoder_config, language_config

NAMES = ("vlm_s", "vlm_m", "vlm_l", "vlm_xl_8k", "vlm_xl_16k")
TABLE = {  # layers, width, MLP width, heads, groups (table 2); GPT 175B as in arXiv:2005.14165
    "vlm_s": ((63, 1792, 15360, 16), (32, 4096, 14336, 32, 8)),
    "vlm_m": ((63, 1792, 15360, 16), (64, 5120, 27648, 40, 8)),
    "vlm_l": ((48, 6144, 24576, 48), (80, 8192, 29568, 64, 8)),
    "vlm_xl_8k": ((48, 6144, 24576, 48), (96, 12288, 49152 * 2 // 3, 96, 96)),
    "vlm_xl_16k": ((48, 6144, 24576, 48), (96, 12288, 49152 * 2 // 3, 96, 96)),
}
BILLIONS = {"vlm_s": (4.29, 8.03), "vlm_m": (4.29, 32.76), "vlm_l": (21.75, 72.71), "vlm_xl_8k": (21.75, 175.2)}


def parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def their_encoder(values: dict) -> torch.nn.Module:
    """The real class on the meta device, without the part that mmtrain leaves out: head or merger."""
    values = {key: value for key, value in values.items() if value is not None}
    if values.pop("model_type") == "siglip_vision_model":
        settings = transformers.SiglipVisionConfig(**values)
        settings.vision_use_head = False
        return transformers.SiglipVisionModel(settings)
    tower = Qwen2VisionTransformerPretrainedModel(
        transformers.models.qwen2_vl.configuration_qwen2_vl.Qwen2VLVisionConfig(**values)
    )
    tower.merger = torch.nn.Identity()
    return tower


def their_language(values: dict) -> torch.nn.Module:
    values = {key: value for key, value in values.items() if value is not None}
    if values.pop("model_type") == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**values))
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**values))


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_those_of_the_hugging_face_classes(name):
    model = config.load(f"{name}.toml").model
    with torch.device("meta"):
        theirs = (
            parameters(their_encoder(encoder_config(model.encoder))),
            parameters(their_language(language_config(model.language))),
        )
    spec = model_spec(model)
    encoder = sum(layer.num_params for layer in spec.module("vision").layers if layer.name != "projector")
    assert (encoder, spec.module("language").num_params) == theirs
    if name in BILLIONS:
        assert [round(count / 1e9, 2) for count in theirs] == pytest.approx(BILLIONS[name], abs=0.03)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_those_of_the_papers_tables(name):
    from mmtrain.spec.model_shapes import language_shape
    from mmtrain.spec.vision_shapes import vision_shape

    model = config.load(f"{name}.toml").model
    vision, language = vision_shape(model), language_shape(model)
    assert (
        (vision.depth, vision.width, vision.mlp_width, vision.num_heads),
        (language.depth, language.width, language.mlp_width, language.num_heads, language.num_kv_heads),
    ) == TABLE[name]
    assert (vision.patch_size, vision.merge) == (14, 4)


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("vlm_s", (1, 4, 4)),
        ("vlm_m", (1, 8, 4)),
        ("vlm_l", (1, 8, 8)),
        ("vlm_xl_8k", (128, 8, 8)),
        ("vlm_xl_16k", (128, 8, 16)),
        ("t2v_s", (1, 4, 4)),
        ("t2v_l", (1, 8, 8)),
        ("t2v_xl_3k", (96, 8, 4)),
        ("t2v_xl_6k", (96, 8, 8)),
    ],
)
def test_degrees_are_those_of_the_papers_tables(name, degrees):
    shape = config.load(f"{name}.toml").parallelism.layout
    assert (shape.dp, shape.tp, shape.pp) == degrees


def test_the_gated_block_has_the_parameters_of_gpt_3s():
    layer = model_spec(config.load("vlm_xl_8k.toml").model).module("language").layers[1]
    plain = 4 * 12288**2 + 2 * 12288 * 49152  # GPT-3's matrices
    assert layer.matmul_flops.row == 2 * plain
    assert layer.num_params == pytest.approx(plain, rel=1e-4)  # the rest are biases and norms


@pytest.mark.parametrize(
    ("name", "sizes", "billions"),
    [
        ("t2v_s", (28, 3584, 10240, 28), 5.05),
        ("t2v_l", (48, 6144, 24576, 48), 29.33),
        ("t2v_xl_3k", (48, 6144, 24576, 48), 29.38),
        ("t2v_xl_6k", (48, 6144, 24576, 48), 29.38),
    ],
)
def test_the_diffusion_transformers_are_those_of_the_papers_tables(name, sizes, billions):
    from diffusers import WanTransformer3DModel

    from mmtrain.spec.model_shapes import dit_shape, language_shape

    model = config.load(f"{name}.toml").model
    shape, text = dit_shape(model), language_shape(model)
    assert (shape.depth, shape.width, shape.mlp_width, shape.num_heads) == sizes
    values = {key: value for key, value in dit_config(model.dit).items() if key != "model_type"}
    with torch.device("meta"):
        theirs = parameters(WanTransformer3DModel(**values))
        whole = their_language(language_config(model.language))
    spec = model_spec(model)
    assert spec.module("dit").num_params == theirs
    assert round(theirs / 1e9, 2) == pytest.approx(billions, abs=0.03)
    # A text encoder has no head.
    assert spec.module("language").num_params == parameters(whole) - text.vocab_size * text.width
