"""Activation checkpointing: blocks that keep little and are computed again in their backward.

Source: Chen et al., Training deep nets with sublinear memory cost, arXiv:1604.06174; selective: Korthikanti et
al., arXiv:2205.05198, by torch's dispatcher.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mmtrain.config import ActivationCheckpointConfig
from mmtrain.errors import ConfigError
from mmtrain.models.chunk import Chunk
from mmtrain.models.recomputation import Recomputation
from mmtrain.parallel.torch_private import is_decomposed


def apply_activation_checkpoint(chunk: Chunk, section: ActivationCheckpointConfig) -> None:
    """Makes each block of a chunk recompute its forward in its backward, as the section says.

    A block's `forward` is replaced, so its parameters keep their names and hooks on the block itself (FSDP2) run
    once; hooks inside of it (tensor parallelism) run again with the forward. Collectives inside of a block run
    again too, in the order of the forward, on all ranks alike.

    Raises: ConfigError: as `saved_ops`.
    """
    recomputation = Recomputation.of(section)
    if not recomputation.enable:
        return
    found = saved_ops(section)
    contexts = partial(create_selective_checkpoint_contexts, partial(_policy, found)) if found else None
    for block in chunk.blocks():
        block.forward = _Recomputed(block.forward, contexts)


def saved_ops(section: ActivationCheckpointConfig) -> frozenset[Any]:
    """The operations whose results are kept: `torch.ops` objects, all overloads of one that is named without.

    Operations of a preset that this torch does not have are left out.
    Raises: ConfigError: save_ops names no operation, or one that never runs as a whole.
    """
    by_user = section.mode == "ops"
    found: set[Any] = set()
    for name in Recomputation.of(section).save_ops:
        overloads = _overloads(name)
        if by_user and not overloads:
            raise ConfigError(
                f"activation_checkpoint.save_ops: {name!r} is no operation of torch {torch.__version__}; write it as "
                'in "aten.mm" or "aten.mm.default"'
            )
        if by_user and is_decomposed(overloads[0]):
            raise ConfigError(
                f"activation_checkpoint.save_ops: {name!r} is made of other operations and never runs itself, so "
                'nothing would be kept; name those, as in "aten.mm" and "aten.addmm" for linear layers'
            )
        found.update(overloads)
    return frozenset(found)


def _overloads(name: str) -> list[Any]:
    """The operations of a name `namespace.op`, the plain one first, or `namespace.op.overload`; none if unknown."""
    namespace, *path = name.split(".")
    if not 1 <= len(path) <= 2 or not all((namespace, *path)):
        return []
    found: Any = getattr(torch.ops, namespace, None)
    for part in path:
        found = getattr(found, part, None)
    if isinstance(found, torch._ops.OpOverloadPacket):
        names = sorted(found.overloads(), key=lambda overload: overload != "default")
        return [getattr(found, overload) for overload in names]
    return [found] if isinstance(found, torch._ops.OperatorBase) else []


def _policy(save: Collection[Any], context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in save else CheckpointPolicy.PREFER_RECOMPUTE


class _Recomputed:
    """A forward that runs again when its backward needs what it would have kept."""

    def __init__(self, forward: Callable[..., Any], contexts: Callable[[], Any] | None) -> None:
        self._forward = forward
        self._options = {} if contexts is None else {"context_fn": contexts}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Models with dropout are refused, so no random state has to be put back.
        forward = partial(self._forward, **kwargs) if kwargs else self._forward
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **self._options)
