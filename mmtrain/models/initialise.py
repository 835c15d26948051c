"""Initial weights that do not depend on how the model is cut.

Every submodule is initialised by its Hugging Face class's own rule from a random stream of its own, seeded
by (seed, its name). Children come before their parent, as in Hugging Face, whose parents overwrite children.
A layer with an adapter starts as it does without; adapters start as in LoRA, arXiv:2106.09685, sec. 4.1.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import nn
from transformers import PreTrainedModel

from mmtrain.config.model import projector_name
from mmtrain.models.adapters import VisionAdapter
from mmtrain.models.chunk import Chunk, LanguageChunk, VisionChunk
from mmtrain.models.contrast import ContrastChunk
from mmtrain.models.dit import DitChunk, init_tables
from mmtrain.models.trainable import is_adapter, plain_name, start_magnitudes
from mmtrain.models.vae import VaeChunk, VaeDecoder
from mmtrain.models.vocabulary import VocabularyPart
from mmtrain.spec.spec import VocabularyRows

_EMBEDDING = "language.model.embed_tokens"
_HEAD = "language.lm_head"

Initialisation = tuple[str, nn.Module, Callable[[nn.Module], object]]
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


def _run(whole: nn.Module, plan: Iterable[Initialisation], seed: int) -> None:
    if not any(True for _ in whole.parameters()):
        return
    for param in whole.parameters():
        param.fill_(torch.nan)  # shows below if a class forgets one of its parameters
    device = next(whole.parameters()).device
    on_cuda = device.type == "cuda"
    stream = torch.cuda.default_generators[device.index] if on_cuda else torch.default_generator
    with torch.random.fork_rng(devices=[device.index] if on_cuda else []):
        for name, module, init in plan:
            stream.manual_seed(_seed(seed, name))
            init(module)
    start_magnitudes(whole)
    for name, param in whole.named_parameters():
        assert not param.isnan().any(), f"{name} was not initialised by {type(whole).__name__}"


def _plan(chunk: Chunk | VaeDecoder) -> Iterator[Initialisation]:
    """The initialisation of a chunk, in the order to run."""
    if isinstance(chunk, VisionChunk):
        encoder = chunk.module_spec.name
        yield from _hugging_face(chunk.vision, encoder, partial(chunk.adapter.init_weights, chunk.vision))
        if chunk.projector is not None:
            for name, module in _children_first(chunk.projector, projector_name(encoder)):
                if is_adapter(name):
                    yield from _of_adapter(name, module)
                elif isinstance(module, nn.Linear | nn.LayerNorm):
                    yield plain_name(name), module, lambda m: m.reset_parameters()
    elif isinstance(chunk, LanguageChunk | VocabularyPart):
        rule, tied = chunk.language._init_weights, chunk.shape.tied
        for name, module, init in _hugging_face(chunk.language, "language", rule):
            if name not in (_EMBEDDING, _HEAD):
                yield name, module, init
            elif name == _EMBEDDING or not (tied and chunk.has_embed):
                # A tied head without its embedding starts as that does: same rule, same stream.
                of_tokens = name == _EMBEDDING or tied
                padding = chunk.language.config.pad_token_id if of_tokens else None
                draw = partial(_init_rows, rule, nn.Embedding if of_tokens else nn.Linear, padding)
                yield _EMBEDDING if of_tokens else _HEAD, module, partial(draw, chunk.stored_rows.get(f"{name}.weight"))
    elif isinstance(chunk, DitChunk):  # diffusers' classes have their rules in their constructors
        for name, module in _children_first(chunk.dit, "dit"):
            yield name, module, init_tables
    elif isinstance(chunk, ContrastChunk):
        yield chunk.module_spec.name, chunk, ContrastChunk.init_weights  # type: ignore[misc]
    elif isinstance(chunk, VaeChunk | VaeDecoder):
        for name, module in _children_first(chunk.vae, "vae"):
            yield name, module, chunk.adapter.init_own


_BLOCK_ROWS = 256
"""Rows of a matrix of the vocabulary that are drawn at once. On a CPU torch draws normal numbers in groups of 16, so
that blocks of whole groups, drawn one after the other, are those of one large matrix. A GPU draws in no such order:
there a whole matrix has the values of its rows since it is drawn in the same blocks."""


def _init_rows(
    rule: Callable[[nn.Module], object],
    kind: type[nn.Embedding] | type[nn.Linear],
    padding: int | None,
    rows: VocabularyRows | None,
    module: nn.Module,
) -> None:
    """Some rows of a matrix, or all, as in the whole one, of which only a block exists at a time.

    Args: rule: for a module of this kind. padding: token whose row is the rule's own; below 0 counted from the end.
        rows: None: all.
    """
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    own_first, own_last, total = rows or (0, len(weight), len(weight))
    padding = None if padding is None else padding % total
    starts = [*range(0, max(1, total - _BLOCK_ROWS + 1), _BLOCK_ROWS), total]
    for start, end in pairwise(starts):
        shape = end - start, weight.shape[1]
        block: nn.Module
        if kind is nn.Embedding:
            own = padding - start if padding is not None and start <= padding < end else None
            block = nn.Embedding(*shape, padding_idx=own, _weight=weight.new_empty(shape))
        else:
            block = nn.Linear(1, 1, bias=False, device="meta")  # which draws nothing
            block.weight = nn.Parameter(weight.new_empty(shape))
        rule(block)
        first, last = max(start, own_first), min(end, own_last)
        if first < last:
            weight[first - own_first : last - own_first] = block.weight[first - start : last - start]


def _hugging_face(module: nn.Module, name: str, rule: Callable[[nn.Module], object]) -> Iterator[Initialisation]:
    """The plan of a Hugging Face module, whose own rule does not know of adapters."""
    for child_name, child in _children_first(module, name):
        if not is_adapter(child_name):
            yield plain_name(child_name), child, rule
        else:
            yield from _of_adapter(child_name, child)


def _of_adapter(name: str, module: nn.Module) -> Iterator[Initialisation]:
    if isinstance(module, nn.Linear):
        yield name, module, _kaiming if ".lora_A." in name else _zero


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
