"""What blocks do with their activations: keep them, compute them again in their backward, or offload them.

Source: Chen et al., Training deep nets with sublinear memory cost, arXiv:1604.06174; selective: Korthikanti et
al., arXiv:2205.05198, by torch's dispatcher; a strategy for each layer and sub-microbatch: DIP, arXiv:2504.14145.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mmtrain.config.sections import ActivationCheckpointConfig
from mmtrain.errors import ConfigError
from mmtrain.parallel.grads import local_part
from mmtrain.parallel.offload import Offloaded, Offloader
from mmtrain.parallel.torch_private import Operator, OperatorPacket, is_decomposed, tree_leaves
from mmtrain.spec.memory_strategies import BlockMemory, StageMemory
from mmtrain.spec.recomputation import STATIC, Recomputation


class ActivationMemory:
    """The switch of one chunk: how each of its blocks treats its activations, for each work.

    The forward of each block is replaced once, before FSDP2, and asks the switch when it is called; a work needs no
    new hooks. Parameters keep their names, and hooks on the block itself (FSDP2) run once. The recomputation of a
    block repeats its forward, even if the switch was changed since: hooks inside of it (tensor parallelism) and
    collectives, too, in the order of the forward, on all ranks alike.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], section: ActivationCheckpointConfig, offloader: Offloader | None = None
    ) -> None:
        """Args:
        blocks: of the chunk, in order.
        section: the default of blocks, and the operations that `selective` keeps.
        offloader: of this rank; None: one of its own, for the device of the blocks.
        Raises: ConfigError: as `saved_ops`.
        """
        self.num_blocks = len(blocks)
        self._default = StageMemory.uniform(STATIC[section.mode], len(blocks))
        self._now = self._default.blocks
        self.offloader = offloader or Offloader(_device_of(blocks))
        self._works: dict[int, Offloaded] = {}
        self._loose = self._open = Offloaded(self.offloader)
        """The activations of calls outside of `of`, as measurements make them: freed by their backward, or by
        `clear`."""
        self._contexts = partial(create_selective_checkpoint_contexts, partial(_policy, saved_ops(section)))
        for index, block in enumerate(blocks):
            block.forward = _Switched(self, index, block)

    @contextmanager
    def of(self, memory: StageMemory | None, work: int) -> Iterator[None]:
        """A context around the forward of a work, in which the blocks follow `memory`; None: the default."""
        outer = self._now, self._open
        self._now = (memory or self._default).blocks
        assert len(self._now) == self.num_blocks
        offloads = BlockMemory.OFFLOAD in self._now
        if offloads:
            self._open = self._works[work] = Offloaded(self.offloader)
        try:
            yield
        except BaseException:
            self.finish(work)
            raise
        finally:
            self._now, self._open = outer
            if offloads and work in self._works and self._works[work].empty:
                del self._works[work]  # no gradient passes here

    @property
    def now(self) -> Any:
        """What the blocks that run now do."""
        return self._now, self._open

    @now.setter
    def now(self, now: Any) -> None:
        self._now, self._open = now

    def prefetch(self, work: int) -> None:
        """Starts to bring back the activations that the backward of a work needs first."""
        if work in self._works:
            self._works[work].prefetch()

    def finish(self, work: int) -> None:
        """Forgets a work, whose backward is over."""
        if work in self._works:
            self._works.pop(work).drop()

    def works(self) -> tuple[int, ...]:
        """The works whose activations are offloaded and still need their backward."""
        return tuple(self._works)

    def clear(self) -> None:
        """Forgets all works."""
        for work in self.works():
            self.finish(work)
        self._loose.drop()

    # ------------------------------------------------------------------------------- called by blocks

    def call(self, index: int, forward: Callable[..., Any], block: nn.Module, args: Any, kwargs: Any) -> Any:
        """The output of a block, which treats its activations as the switch says now."""
        how = self._now[index]
        if how is BlockMemory.KEEP or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if how is BlockMemory.OFFLOAD:
            with self._open.block(_not_its_own(block, args, kwargs)):
                return forward(*args, **kwargs)
        options = {"context_fn": self._contexts} if how is BlockMemory.SELECTIVE else {}
        # Models with dropout are refused, so no random state has to be put back.
        again = partial(forward, **kwargs) if kwargs else forward
        return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False, **options)


class _Switched:
    """A block's forward that asks the switch."""

    def __init__(self, switch: ActivationMemory, index: int, block: nn.Module) -> None:
        self._switch, self._index, self._block = switch, index, block
        self._forward = block.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._switch.call(self._index, self._forward, self._block, args, kwargs)


def _device_of(blocks: Sequence[nn.Module]) -> torch.device:
    return next((parameter.device for block in blocks for parameter in block.parameters()), torch.device("cpu"))


def _not_its_own(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """`data_ptr` of the storages that a block's forward uses and that are there without it: parameters, as they are
    now (FSDP2 gathers them around the forward), buffers, and all that it is given but the activation, its first
    argument, which all blocks share."""
    inputs = (x for x in tree_leaves((args[1:], kwargs)) if isinstance(x, Tensor))
    return {local_part(x).untyped_storage().data_ptr() for x in (*block.parameters(), *block.buffers(), *inputs)}


def saved_ops(section: ActivationCheckpointConfig) -> frozenset[Any]:
    """The operations whose results `selective` keeps: `torch.ops` objects, all overloads of one that is named without.

    Operations of a preset that this torch does not have are left out.
    Raises: ConfigError: save_ops names no operation, or one that never runs as a whole.
    """
    by_user = section.mode == "ops"
    ops: set[Any] = set()
    for name in Recomputation.by(BlockMemory.SELECTIVE, section).save_ops:
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
        ops.update(overloads)
    return frozenset(ops)


def _overloads(name: str) -> list[Any]:
    """The operations of a name `namespace.op`, the plain one first, or `namespace.op.overload`; none if unknown."""
    namespace, *path = name.split(".")
    if not 1 <= len(path) <= 2 or not all((namespace, *path)):
        return []
    op: Any = getattr(torch.ops, namespace, None)
    for part in path:
        op = getattr(op, part, None)
    if isinstance(op, OperatorPacket):
        names = sorted(op.overloads(), key=lambda overload: overload != "default")
        return [getattr(op, overload) for overload in names]
    return [op] if isinstance(op, Operator) else []


def _policy(save: Collection[Any], context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in save else CheckpointPolicy.PREFER_RECOMPUTE
