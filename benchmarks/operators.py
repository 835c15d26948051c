"""python benchmarks/operators.py [--counts 1 16 256]

Operators that one block dispatches, forward and backward, by the number of documents or images in it: each of them is a
launch of at least one kernel on a GPU, and takes the host some microseconds. Views are left out. Documents have
different lengths and share 4,096 tokens; images have different sizes, 16 to 400 patches. Weights and inputs are
bfloat16, heads have 64 columns. On a machine with CUDA all runs there; else scaled-dot-product attention runs on the
CPU, and variable-length attention on the meta device, where nothing is computed, with the operators of CUDA.
"""

import argparse
import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmtrain.config.model import EncoderConfig, LanguageConfig, ModelConfig, ProjectorConfig
from mmtrain.modality.bitfield import language_bits
from mmtrain.modality.metadata import DocumentMeta, MicrobatchMeta
from mmtrain.modality.positions import token_positions
from mmtrain.models.attention.backend import Backend
from mmtrain.models.attention.context import AttentionChoices, attention_context
from mmtrain.models.attention.varlen import LIMITS
from mmtrain.models.build import build_chunk
from mmtrain.models.chunk import Chunk
from mmtrain.models.initialise import init_weights
from mmtrain.spec.builders import model_spec
from mmtrain.spec.layer import LayerSpec
from mmtrain.spec.spec import documents_work, images_work
from mmtrain.spec.vision_shapes import vision_shape
from mmtrain.spec.work_size import WorkSize

TOKENS = 4096
COLUMNS = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
LANGUAGE = {"model_type": "qwen2", **COLUMNS, "num_hidden_layers": 1, "num_key_value_heads": 1, "vocab_size": 64}
SIZES = {"depth": 1, "num_heads": 2, "patch_size": 4, "in_channels": 3, "temporal_patch_size": 1}
QWEN = {**SIZES, "hidden_size": 128, "out_hidden_size": 128, "intermediate_size": 256}
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"model_type": "qwen2_vl_vision", **SIZES, "embed_dim": 128, "hidden_size": 128, "mlp_ratio": 2},
    "qwen2_5_vl, windows": {
        "model_type": "qwen2_5_vl_vision", **QWEN, "window_size": 16, "fullatt_block_indexes": [],
    },
    "siglip2": {
        "model_type": "siglip2_vision_model", **COLUMNS, "num_hidden_layers": 1, "num_patches": 256, "patch_size": 4,
    },
}  # fmt: skip
"""Name of a row of the table -> the encoder's config."""


class Work(NamedTuple):
    """Some layers of a module and what they compute."""

    run: Callable[[], Tensor]
    chunk: Chunk
    layers: tuple[LayerSpec, ...]
    size: WorkSize


class Operators(TorchDispatchMode):
    """Counts operators on a device that make new tensors or write, which launch kernels."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.count = device, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = function._schema.returns
        is_view = returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        out = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        self.count += not is_view and any(x.device.type == self.device for x in tensors)
        return out


def lengths(count: int, total: int) -> list[int]:
    """Different lengths, no two neighbours equal, with a sum."""
    draw = random.Random(count)
    found = [max(1, total // count * draw.choice((2, 3, 4, 5, 6)) // 4) for _ in range(count)]
    for i in range(1, count):
        found[i] += found[i] == found[i - 1]
    found[-1] = max(1, found[-1] + total - sum(found))
    return found


def grids(count: int) -> tuple[tuple[int, int, int], ...]:
    """Patches of images of different sizes."""
    draw = random.Random(count)
    return tuple((1, 2 * draw.randint(2, 10), 2 * draw.randint(2, 10)) for _ in range(count))


def make_chunk(model: ModelConfig, module: str, layers: tuple[int, int], device: str) -> Chunk:
    """Some layers of a module in bfloat16, on a device."""
    chunk = build_chunk(model, model_spec(model, dtype_bytes=2), module, layers, device=device, dtype=torch.bfloat16)
    if device == "meta":
        return chunk.to("meta")  # its buffers are real
    init_weights(chunk, 0)
    return chunk


def documents(language: dict[str, Any], count: int, backend: Backend, device: str, tokens: int = TOKENS) -> Work:
    """A block of a language model with some documents."""
    parts = lengths(count, tokens)
    metas = [DocumentMeta(sample=i, num_tokens=n, num_targets=0, images=()) for i, n in enumerate(parts)]
    meta = MicrobatchMeta(documents=tuple(metas))
    model = ModelConfig(encoder=None, language=LanguageConfig(config=language))
    chunk = make_chunk(model, "language", (1, 2), device)
    context = attention_context(language_bits(meta), choices=AttentionChoices(backend))
    positions = torch.from_numpy(token_positions(meta.documents, 1)).to(device)
    layers = model_spec(model, dtype_bytes=2).module("language").layers[1:2]
    x = activation(tokens, language["hidden_size"], device)
    return Work(lambda: chunk(x, attention=context, position_ids=positions), chunk, layers, documents_work(parts, 0))


def images(
    encoder: dict[str, Any], count: int, backend: Backend, device: str, layers: tuple[int, int] = (1, 2)
) -> Work:
    """A block, or other layers, of an encoder with some images."""
    model = ModelConfig(
        encoder=EncoderConfig(config=encoder),
        projector=ProjectorConfig(spatial_merge=2),
        language=LanguageConfig(config=LANGUAGE),
    )
    shape, chunk, found = vision_shape(model), make_chunk(model, "vision", layers, device), grids(count)
    module = model_spec(model, dtype_bytes=2).module("vision")
    x = activation(sum(h * w for _, h, w in found), shape.width if layers[0] else shape.patch_dim, device)
    return Work(
        lambda: chunk(x, grids=found, attention=AttentionChoices(backend)),
        chunk,
        module.layers[slice(*layers)],
        images_work(module, found),
    )


def activation(rows: int, columns: int, device: str) -> Tensor:
    """What comes in, whose gradient is wanted."""
    return torch.randn(rows, columns, dtype=torch.bfloat16, device=device).requires_grad_()


def count_twice(work: Work, device: str) -> tuple[int, int]:
    """Operators of forward and backward."""
    with Operators(device) as forward:
        out = work.run()
    gradient = torch.ones_like(out)
    with Operators(device) as backward:
        torch.autograd.backward(out, gradient)
    return forward.count, backward.count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 16, 256], help="documents or images")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        LIMITS["meta"] = LIMITS["cuda"]._replace(capability=(0, 0))
    devices: dict[Backend, str] = (
        dict.fromkeys(("sdpa", "varlen"), "cuda") if on_gpu else {"sdpa": "cpu", "varlen": "meta"}
    )
    print("operators, forward / backward")
    print(f"{'block':24}{'attention':12}" + "".join(f"{count:>16}" for count in args.counts))
    parts: dict[str, Callable[..., Work]] = {"qwen2": partial(documents, LANGUAGE)}
    parts |= {name: partial(images, config) for name, config in VISION.items()}
    parts["siglip2, embedding"] = partial(images, VISION["siglip2"], layers=(0, 1))
    for name, part in parts.items():
        for backend, device in devices.items():
            cells = ["{} / {}".format(*count_twice(part(count, backend, device), device)) for count in args.counts]
            print(f"{name:24}{backend:12}" + "".join(f"{cell:>16}" for cell in cells))


if __name__ == "__main__":
    main()
