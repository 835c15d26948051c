"""Initial weights that do not depend on how the model is cut.

Every submodule is initialised by its Hugging Face class's own rule from a random stream of its own, seeded
by (seed, its name). Children come before their parent, as in Hugging Face, whose parents overwrite children.
A layer with an adapter starts as it does without; adapters start as in LoRA, arXiv:2106.09685, sec. 4.1.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from mmtrain.config.model import projector_name
from mmtrain.models.adapters import VisionAdapter
from mmtrain.models.chunk import Chunk, LanguageChunk, VisionChunk
from mmtrain.models.dit import DitChunk, init_tables
from mmtrain.models.trainable import is_adapter, plain_name
from mmtrain.models.vae import VaeChunk, VaeDecoder

_EMBEDDING = "language.model.embed_tokens"
_HEAD = "language.lm_head"

Step = tuple[str, nn.Module, Callable[[nn.Module], object]]
"""The name that seeds a module, the module, and its rule."""


@torch.no_grad()
def init_weights(chunk: Chunk | VaeDecoder, seed: int) -> None:
    """Sets every parameter of a materialised chunk, in place, only from (seed, name).

    On one kind of device, any two chunks that hold a parameter get equal values. The global random state is
    left as it was. The projector has `nn.Linear`'s default distribution.
    """
    _run(chunk, _plan(chunk), seed)


@torch.no_grad()
def init_encoder(module: PreTrainedModel, adapter: VisionAdapter, seed: int, name: str = "vision") -> None:
    """Sets every parameter of a part of an encoder, in place, as a chunk that holds it has them.

    Args: name: of the encoder in its model.
    """
    _run(module, _hugging_face(module, name, partial(adapter.init_weights, module)), seed)


def _run(whole: nn.Module, plan: Iterable[Step], seed: int) -> None:
    for param in whole.parameters():
        param.fill_(torch.nan)  # shows below if a class forgets one of its parameters
    device = next(whole.parameters()).device
    on_cuda = device.type == "cuda"
    stream = torch.cuda.default_generators[device.index] if on_cuda else torch.default_generator
    with torch.random.fork_rng(devices=[device.index] if on_cuda else []):
        for name, module, init in plan:
            stream.manual_seed(_seed(seed, name))
            init(module)
    for name, param in whole.named_parameters():
        assert not param.isnan().any(), f"{name} was not initialised by {type(whole).__name__}"


def _plan(chunk: Chunk | VaeDecoder) -> Iterator[Step]:
    """The initialisation of a chunk, in the order to run."""
    if isinstance(chunk, VisionChunk):
        encoder = chunk.module_spec.name
        yield from _hugging_face(chunk.vision, encoder, partial(chunk.adapter.init_weights, chunk.vision))
        if chunk.projector is not None:
            for name, module in _children_first(chunk.projector, projector_name(encoder)):
                if isinstance(module, nn.Linear | nn.LayerNorm):
                    yield name, module, lambda m: m.reset_parameters()
    elif isinstance(chunk, LanguageChunk):
        rule = chunk.language._init_weights
        for name, module, init in _hugging_face(chunk.language, "language", rule):
            if not (name == _HEAD and chunk.shape.tied):
                yield name, module, init
        if chunk.shape.tied and chunk.has_norm and not chunk.has_embed:
            # The copy in the head starts as the embedding does: same rule, same stream.
            weight, padding = chunk.language.lm_head.weight, chunk.language.config.pad_token_id
            yield _EMBEDDING, nn.Embedding(*weight.shape, padding_idx=padding, _weight=weight), rule
    elif isinstance(chunk, DitChunk):  # diffusers' classes have their rules in their constructors
        for name, module in _children_first(chunk.dit, "dit"):
            yield name, module, init_tables
    elif isinstance(chunk, VaeChunk | VaeDecoder):
        for name, module in _children_first(chunk.vae, "vae"):
            yield name, module, chunk.adapter.init_own


def _hugging_face(module: nn.Module, name: str, rule: Callable[[nn.Module], object]) -> Iterator[Step]:
    """The plan of a Hugging Face module, whose own rule does not know of adapters."""
    for child_name, child in _children_first(module, name):
        if not is_adapter(child_name):
            yield plain_name(child_name), child, rule
        elif isinstance(child, nn.Linear):
            yield child_name, child, _kaiming if ".lora_A." in child_name else _zero


def _kaiming(adapter: nn.Module) -> None:
    """The uniform distribution of `nn.Linear`, as `peft` has it for the first matrix."""
    nn.init.kaiming_uniform_(adapter.weight, a=math.sqrt(5))


def _zero(adapter: nn.Module) -> None:
    """The second matrix, so that the model starts as the one without adapters."""
    nn.init.zeros_(adapter.weight)


def _children_first(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _children_first(child, f"{name}.{child_name}")
    yield name, module


def _seed(seed: int, name: str) -> int:
    """63 bits that depend only on the arguments."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big") >> 1
