"""Tiny models of every family, and what one process and tensor-parallel ranks make of the same inputs."""

import itertools

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from mmtrain.config.model import EncoderConfig, LanguageConfig, LoRAConfig, ModelConfig, ProjectorConfig
from mmtrain.modality.bitfield import language_bits
from mmtrain.modality.metadata import DocumentMeta, MicrobatchMeta
from mmtrain.models.attention.context import attention_context
from mmtrain.models.batch import head_arguments
from mmtrain.models.build import build_chunk
from mmtrain.models.chunk import FeatureRows
from mmtrain.models.initialise import init_weights
from mmtrain.parallel.tensor import apply_tensor_parallel
from mmtrain.spec.builders import model_spec
from mmtrain.spec.rows import padded

LENGTHS = (7, 1, 9)
SLOTS = (1, 2, 10, 12)
WIDTH, VOCAB = 32, 96
EMBEDDING, HEAD = "language.model.embed_tokens.weight", "language.lm_head.weight"

_DECODER = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": VOCAB, "max_position_embeddings": 64,
}  # fmt: skip
LANGUAGES = {
    "qwen2": {"model_type": "qwen2", **_DECODER, "pad_token_id": 3},
    "llama": {"model_type": "llama", **_DECODER, "head_dim": 8, "attention_bias": True, "mlp_bias": True},
    "qwen3": {"model_type": "qwen3", **_DECODER, "head_dim": 8, "attention_bias": True},
}
_FIXED = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
_PACKED = {"depth": 2, "num_heads": 4, "patch_size": 4, "temporal_patch_size": 2}
ENCODERS = {
    "qwen2_vl": {"model_type": "qwen2_vl_vision", **_PACKED, "embed_dim": 32, "mlp_ratio": 2, "hidden_size": WIDTH},
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl_vision", **_PACKED, "hidden_size": 32, "intermediate_size": 48,
        "out_hidden_size": WIDTH, "window_size": 16, "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl_vision", **_PACKED, "hidden_size": 32, "intermediate_size": 48,
        "out_hidden_size": WIDTH, "num_position_embeddings": 9, "deepstack_visual_indexes": [0],
    },
    "siglip": {"model_type": "siglip_vision_model", **_FIXED},
    "siglip2": {
        "model_type": "siglip2_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_patches": 25, "patch_size": 4,
    },
    "clip": {"model_type": "clip_vision_model", **_FIXED},
    "vit": {"model_type": "vit", **_FIXED},
    "whisper": {
        "model_type": "whisper_encoder", "d_model": 32, "encoder_ffn_dim": 48, "encoder_layers": 2,
        "encoder_attention_heads": 4, "num_mel_bins": 10, "max_source_positions": 12,
    },
}  # fmt: skip


def model_config(encoder=None, language="qwen2", *, projector="mlp", trainable=True, **language_config) -> ModelConfig:
    """A model of two blocks each. Args: trainable: of encoder and language model."""
    return ModelConfig(
        encoder=None if encoder is None else EncoderConfig(config=ENCODERS[encoder], trainable=trainable),
        projector=ProjectorConfig(kind=projector),
        language=LanguageConfig(config={**LANGUAGES[language], **language_config}, trainable=trainable),
        lora=LoRAConfig(rank=3, alpha=6.0),
    )


def build(model, module, cuts=(), mesh=None):
    """The chunks of one module, cut before the given layers, divided over a tp mesh if there is one."""
    spec = model_spec(model)
    chunks = []
    for layers in itertools.pairwise([0, *cuts, len(spec.module(module).layers)]):
        chunk = build_chunk(model, spec, module, layers, device="cpu")
        init_weights(chunk, 3)
        with torch.no_grad():  # no weight is so small or so uniform that an error could hide behind it
            for name, param in chunk.named_parameters():
                tied = chunk.tied_weight() is not None and name == HEAD
                seed = sum((EMBEDDING if tied else name).encode())
                param.add_(0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)))
        if mesh is not None:
            apply_tensor_parallel(chunk, mesh)
        chunks.append(chunk)
    return chunks


def vision_inputs(encoder):
    generator = torch.Generator().manual_seed(0)
    if encoder.startswith("qwen"):
        grids = ((1, 4, 4), (2, 2, 6), (1, 6, 2))  # 13 merged units: no multiple of 2
        return torch.randn(sum(t * h * w for t, h, w in grids), 96, generator=generator), grids
    if encoder == "siglip2":
        grids = ((1, 4, 4), (1, 2, 6), (1, 6, 4))
        return torch.randn(sum(h * w for _, h, w in grids), 48, generator=generator), grids
    if encoder == "whisper":
        return torch.randn(3, 10, 24, generator=generator), ((1, 1, 12),) * 3
    return torch.randn(3, 3, 32, 32, generator=generator), ((1, 4, 4),) * 3


def run_vision(chunks, inputs):
    """This rank's rows of the features."""
    x, grids = inputs
    for chunk in chunks:
        x = chunk(x, grids=grids)
    return x


def language_inputs():
    generator = torch.Generator().manual_seed(1)
    count = sum(LENGTHS)
    labels = torch.randint(0, VOCAB, (count,), generator=generator)
    labels[torch.rand(count, generator=generator) < 0.4] = -100
    ids = torch.randint(0, VOCAB, (count,), generator=generator)
    ids[5] = 3  # the padding token of one of the models
    return ids, torch.randn(len(SLOTS), WIDTH, generator=generator), labels


def run_language(chunks, inputs, features, *, tp=1, tp_rank=0):
    """The output of the last chunk; each rank fills the slots among its rows."""
    ids, _, labels = inputs
    count = len(ids)
    missing = padded(count, tp) - count
    ids = torch.cat([ids, ids.new_zeros(missing)])
    labels = torch.cat([labels, labels.new_full((missing,), -100)])
    positions = torch.cat([torch.arange(n) for n in (*LENGTHS, missing)])
    documents = [DocumentMeta(sample=i, num_tokens=n, num_targets=0, images=()) for i, n in enumerate(LENGTHS)]
    attention = attention_context(
        language_bits(MicrobatchMeta(documents=tuple(documents))),
        rows=np.concatenate([np.arange(count), np.full(missing, -1)]),
    )
    first, rows = tp_rank * len(ids) // tp, len(ids) // tp
    mine = [(i, slot - first) for i, slot in enumerate(SLOTS) if first <= slot < first + rows]
    chosen = torch.tensor([i for i, _ in mine], dtype=torch.int64)
    x = ids
    for chunk in chunks:
        x = chunk(
            x, attention=attention, position_ids=positions, features=features if chunk.has_embed else None,
            fills={
                "vision": FeatureRows(
                    torch.tensor([slot for _, slot in mine], dtype=torch.int64),
                    lambda features: features.index_select(0, chosen),
                )
            },
            **(head_arguments(labels) if chunk.is_last else {}), want_predictions=True,
        )  # fmt: skip
    return x


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(chunks):
    return {n: full(p.grad) for chunk in chunks for n, p in chunk.named_parameters() if p.grad is not None}


def largest_error(ours, theirs):
    """Largest difference of one element, relative to its tensor's largest plus a thousandth of the largest of all."""
    assert set(ours) == set(theirs), set(ours) ^ set(theirs)
    floor = 1e-3 * max(g.abs().max() for g in theirs.values())
    assert floor > 0
    return max(float((ours[n] - g).abs().max() / (g.abs().max() + floor)) for n, g in theirs.items())


def whole_gradients_agree(chunks, group=None):
    """Whether the gradients of parameters that every rank holds whole are bitwise equal on all ranks."""
    parameters = [p for chunk in chunks for p in chunk.parameters() if p.grad is not None]
    whole = [full(p.grad) for p in parameters if not isinstance(p, DTensor) or p.placements[-1].is_replicate()]
    assert whole
    for grad in whole:
        others = [torch.empty_like(grad) for _ in range(dist.get_world_size(group))]
        dist.all_gather(others, grad.contiguous(), group=group)
        if not all(torch.equal(grad, other) for other in others):
            return False
    return True
