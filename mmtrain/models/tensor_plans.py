"""Which layer of each family is divided how: the tables of tensor parallelism.

Module names are those of Hugging Face and diffusers, so a table is checked against the module that it is applied to:
every name in it must exist, and every parameter must be named by it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Style = Literal[
    "columns",
    "columns_whole",
    "columns_gather",
    "rows",
    "rows_whole",
    "gathered",
    "moved",
    "norm_gather",
    "norm",
    "norm_heads",
    "norm_columns",
    "vocabulary",
    "whole",
]
"""How one module is divided, with its input -> its output. The rows of a rank are those that it has between layers: its
part of them, or all (`parallelism.tensor_parallel_rows`); then "this rank's rows -> all rows" moves nothing.

- norm_gather: a norm, not divided. This rank's rows -> all rows, for the layers of style `columns` behind it, whose
  gradients are summed here.
- columns: a linear layer's outputs are divided. All rows -> all rows, this rank's columns.
- columns_whole: the same for an input that all ranks computed alike, so that its gradient is summed here.
- columns_gather: as columns_whole, but -> all columns.
- rows: a linear layer's inputs are divided. All rows, this rank's columns -> this rank's rows, summed over ranks.
- rows_whole: the same, but -> all rows.
- gathered: a module with layers of style `columns` behind its inputs. Of the first input this rank's rows -> all rows;
  the others were computed by all ranks alike. The gradients of all are summed here, once for all of these layers.
- moved: a table of shifts and scales that a block of a DiT holds itself, whole on every rank, which adds values to it
  that all ranks computed alike, and uses it for its own rows: the gradients of both are summed here.
- norm: a norm, not divided. This rank's rows -> the same.
- norm_heads: a norm of each head, not divided. This rank's heads of all rows -> the same.
- norm_columns: a root-mean-square norm's columns are divided. This rank's columns of all rows -> the same, where the
  mean square of a row is that of all columns.
- vocabulary: an embedding's tokens are divided. All ids -> this rank's rows.
- whole: every rank holds and computes all of it, from equal inputs, and so has the whole gradient. Also of a parameter
  that the model itself holds.
"""

Styles = Mapping[str, Style]


@dataclass(frozen=True, kw_only=True)
class FamilyPlan:
    """How one family is divided; names are relative to the chunk, those of `block` to a block."""

    blocks: str
    """Name of the list of blocks."""
    block: Styles
    heads: tuple[str, ...] = ()
    """Attributes of a block that count attention heads and that its forward reads; a rank has its part of them."""
    embed: Styles
    norm: Styles = field(default_factory=dict)
    """What follows the last block: the final norm, and the head."""
    states: Styles = field(default_factory=dict)
    """What follows the last block of a text encoder, which has no head."""
    merger: Styles = field(default_factory=dict)
    """The family's own projector."""
    tap_merger: Styles = field(default_factory=dict)
    """That of one tap, whose number stands for {}."""


PROJECTORS: Mapping[str, Styles] = {
    "mlp": {"projector.norm": "whole", "projector.fc1": "columns_whole", "projector.fc2": "rows_whole"},
    "llava": {"projector.linear_1": "columns_whole", "projector.linear_2": "rows_whole"},
    "linear": {"projector.linear": "columns_gather"},
}
"""Our own projectors, by their kind."""


def _block(norms: str, inputs: str, output: str, mlp_inputs: str, mlp_output: str) -> Styles:
    """A block of a norm, attention, a norm and an MLP. Args: names of its modules, several divided by spaces."""
    before_attention, before_mlp = norms.split()
    return {
        before_attention: "norm_gather",
        **dict.fromkeys(inputs.split(), "columns"),
        output: "rows",
        before_mlp: "norm_gather",
        **dict.fromkeys(mlp_inputs.split(), "columns"),
        mlp_output: "rows",
    }


_SEPARATE_QKV = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"
_GATED_MLP = ("mlp.gate_proj mlp.up_proj", "mlp.down_proj")

_DECODER = FamilyPlan(
    blocks="language.model.layers",
    block=_block("input_layernorm post_attention_layernorm", _SEPARATE_QKV, "self_attn.o_proj", *_GATED_MLP),
    embed={"language.model.embed_tokens": "vocabulary"},
    norm={"language.model.norm": "whole", "language.lm_head": "columns_whole"},
    states={"language.model.norm": "norm"},
)


_SIGLIP_BLOCK = _block("layer_norm1 layer_norm2", _SEPARATE_QKV, "self_attn.out_proj", "mlp.fc1", "mlp.fc2")


_SIGLIP = FamilyPlan(
    blocks="vision.encoder.layers",
    block=_SIGLIP_BLOCK,
    embed={"vision.embeddings": "whole"},
    norm={"vision.post_layernorm": "norm"},
)


def _merger(name: str, layers: str) -> Styles:
    """A norm and two linear layers. Args: layers: their names, divided by spaces."""
    norm, inputs, output = layers.split()
    return {f"{name}.{norm}": "whole", f"{name}.{inputs}": "columns_whole", f"{name}.{output}": "rows_whole"}


def _qwen_vision(mlp_inputs: str, mlp_output: str) -> FamilyPlan:
    """Qwen2-VL or a successor, whose queries, keys and values are rows of one layer head by head: a part is heads."""
    return FamilyPlan(
        blocks="vision.blocks",
        block=_block("norm1 norm2", "attn.qkv", "attn.proj", mlp_inputs, mlp_output),
        heads=("attn.num_heads",),
        embed={"vision.patch_embed": "whole"},
        merger=_merger("vision.merger", "ln_q mlp.0 mlp.2"),
    )


_QWEN3_MERGER = "norm linear_fc1 linear_fc2"


def _attention(name: str) -> Styles:
    """One attention of a DiT's block: queries and keys are normed over the columns of all heads."""
    columns = {f"{name}.to_{part}": "columns" for part in "qkv"}
    norms = {f"{name}.norm_{part}": "norm_columns" for part in "qk"}
    return {name: "gathered", **columns, **norms, f"{name}.to_out.0": "rows"}  # type: ignore[dict-item]


def _two_linears(name: str) -> Styles:
    return {f"{name}.linear_1": "columns_whole", f"{name}.linear_2": "rows_whole"}


_WHISPER = FamilyPlan(
    blocks="vision.layers",
    block=_block("self_attn_layer_norm final_layer_norm", _SEPARATE_QKV, "self_attn.out_proj", "fc1", "fc2"),
    heads=("self_attn.num_heads",),
    embed={"vision.conv1": "whole", "vision.conv2": "whole", "vision.embed_positions": "whole"},
    norm={"vision.layer_norm": "norm"},
)

_QWEN3 = replace(
    _DECODER, block={**_DECODER.block, **dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), "norm_heads")}
)

PLANS: Mapping[str, FamilyPlan] = {
    "qwen2": _DECODER,
    "llama": _DECODER,
    "mistral": _DECODER,
    "qwen2_vl_text": _DECODER,
    "qwen2_5_vl_text": _DECODER,
    "qwen3": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "qwen2_vl_vision": _qwen_vision("mlp.fc1", "mlp.fc2"),
    "qwen2_5_vl_vision": _qwen_vision(*_GATED_MLP),
    "qwen3_vl_vision": replace(
        _qwen_vision("mlp.linear_fc1", "mlp.linear_fc2"),
        embed={"vision.patch_embed": "whole", "vision.pos_embed": "whole"},
        merger=_merger("vision.merger", _QWEN3_MERGER),
        tap_merger=_merger("vision.deepstack_merger_list.{}", _QWEN3_MERGER),
    ),
    "siglip_vision_model": _SIGLIP,
    "siglip2_vision_model": _SIGLIP,
    "clip_vision_model": FamilyPlan(
        blocks="vision.encoder.layers",
        block=_SIGLIP_BLOCK,
        embed={"vision.embeddings": "whole", "vision.pre_layrnorm": "whole"},
    ),
    "vit": FamilyPlan(
        blocks="vision.layers",
        block=_block(
            "layernorm_before layernorm_after",
            _SEPARATE_QKV.replace("self_attn", "attention"),
            "attention.o_proj",
            "mlp.fc1",
            "mlp.fc2",
        ),
        embed={"vision.embeddings": "whole"},
        norm={"vision.layernorm": "norm"},
    ),
    "whisper_encoder": _WHISPER,
    "qwen2_audio_encoder": _WHISPER,
    "wan": FamilyPlan(
        blocks="dit.blocks",
        block={
            "scale_shift_table": "moved",
            **_attention("attn1"),
            "norm2": "norm",
            **_attention("attn2"),
            "ffn": "gathered",
            "ffn.net.0.proj": "columns",
            "ffn.net.2": "rows",
        },
        heads=("attn1.heads", "attn2.heads"),
        embed={
            "dit.patch_embedding": "whole",
            **_two_linears("dit.condition_embedder.text_embedder"),
            **_two_linears("dit.condition_embedder.time_embedder"),
            "dit.condition_embedder.time_proj": "columns_gather",
        },
        norm={"dit.scale_shift_table": "whole", "dit.proj_out": "whole"},
    ),
}
"""By the `model_type` of `spec.families`."""
