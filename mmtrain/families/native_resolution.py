"""Vision-language models whose images keep their size: packed patches with rotary positions, an own merger, and a
language model with positions on the axes time, height and width. Pure; no weights."""

from collections.abc import Mapping
from typing import Any

from mmtrain.errors import ConfigError
from mmtrain.families.composite import Composite, Part, removed
from mmtrain.families.decoders import DECODER, WINDOWS
from mmtrain.families.family import CLIP_MEAN, CLIP_STD, ImageDefaults
from mmtrain.families.shapes import VisionShape, check_divides, single_size
from mmtrain.families.tensor_table import Style, TensorTable, block_styles, two_linears

SIZES = {"width": "hidden_size", "depth": "depth", "heads": "num_heads", "mlp": "intermediate_size"}
ALIASES = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}

IMAGES = ImageDefaults(
    layout="native",
    processor="Qwen2VLImageProcessor",
    mean=CLIP_MEAN,
    std=CLIP_STD,
    min_pixels=56 * 56,
    max_pixels=28 * 28 * 1280,
)

TEXT = DECODER.like(
    {
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "use_sliding_window": False,
    },
    WINDOWS,
    axis_columns=(16, 24, 24),
    qkv_bias=True,
)


def packed_shape(
    values: Mapping[str, Any], where: str, merge: int, sizes: Mapping[str, str], **flags: Any
) -> VisionShape:
    """The sizes of the encoder. Args: sizes: as of `Encoder`. flags: fields of the shape that these keys do not say."""
    width_key = sizes["width"]
    width, heads = values[width_key], values["num_heads"]
    patch = single_size(where, "patch_size", values["patch_size"])
    frames = single_size(where, "temporal_patch_size", values["temporal_patch_size"])
    check_divides(where, "number of heads", heads, "width", width)
    if width // heads % 4:
        raise ConfigError(
            f"{where}: {width_key} / num_heads = {width // heads}; rotary positions of two axes need a multiple of 4"
        )
    fields = {"embed_bias": False, **flags}
    return VisionShape(
        model_type=values["model_type"],
        width=width,
        depth=values["depth"],
        num_heads=heads,
        mlp_width=values[sizes["mlp"]] if "mlp" in sizes else int(width * values["mlp_ratio"]),
        patch_dim=values["in_channels"] * frames * patch * patch,
        hidden_act=values["hidden_act"],
        patch_size=patch,
        packed=True,
        joint_qkv=True,
        rotary=True,
        native_merge=values["spatial_merge_size"],
        native_width=values[sizes["out"]],
        merge=merge,
        **fields,
    )


def merger_styles(name: str, layers: str) -> dict[str, Style]:
    """A merger of a norm and two linear layers. Args: layers: their names, divided by spaces."""
    norm, *linears = layers.split()
    return {f"{name}.{norm}": "whole", **two_linears(name, *linears)}


def packed_table(mlp_inputs: str, mlp_output: str) -> TensorTable:
    """How the encoder is divided: its queries, keys and values are rows of one layer head by head, so a part is heads.

    Args: names of the layers of the MLP, several divided by spaces.
    """
    return TensorTable(
        blocks="vision.blocks",
        block=block_styles("norm1 norm2", "attn.qkv", "attn.proj", mlp_inputs, mlp_output),
        heads=("attn.num_heads",),
        embed={"vision.patch_embed": "whole"},
        merger=merger_styles("vision.merger", "ln_q mlp.0 mlp.2"),
    )


def whole_model(name: str, class_name: str, *, older: bool) -> Composite:
    """The whole model.

    Args: older: its files may have names of weights, and a form of the config, that are older than its class; then the
        text config, too, may say that its head is tied, and transformers 4 looks for the class in it.
    """
    tied = "tie_word_embeddings"
    return Composite(
        class_name=class_name,
        encoders=(f"{name}_vision",),
        languages=(f"{name}_text",),
        projector="native",
        class_in_text=older,
        parts={
            "model.encoder": Part(
                config="vision_config",
                model_type=f"{name}_vision",
                spellings=removed("model.visual.", "visual.")[: 1 + older],
                written=int(older),
                in_class=0,
            ),
            "model.language": Part(
                config="text_config",
                flat=older,
                model_type=f"{name}_text",
                shared=(tied,) if older else (),
                decided={} if older else {tied: False},
                spellings=(
                    {"model.language_model.": "model.", "lm_head.": "lm_head."},
                    {"model.": "model.", "lm_head.": "lm_head."},
                )[: 1 + older],
                written=int(older),
                in_class=0,
            ),
        },
    )
