"""One stage on its rank: a chunk, and the activations and gradients that wait around it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from mmtrain.config.sections import ActivationCheckpointConfig
from mmtrain.errors import PlanError
from mmtrain.models.adapter_layers import DropoutKeys
from mmtrain.parallel import passes
from mmtrain.parallel.activation_memory import ActivationMemory
from mmtrain.parallel.mesh import Channels, Route
from mmtrain.parallel.offload import Offloader
from mmtrain.parallel.passes import Fill
from mmtrain.parallel.torch_private import (
    PipelineStage,
    fsdp_modules,
    fsdp_pass,
    gathers_itself,
    gradient_edge,
    set_fsdp_pass,
    settle_grads,
)
from mmtrain.parallel.weight_grads import WeightGrads
from mmtrain.schedule.graph import Edge, WorkGraph
from mmtrain.spec.memory_strategies import StageMemory

ShapeOf = Callable[[int, int], tuple[int, ...]]
"""(stage, work) -> shape of the activation that the stage sends on for the work."""

KeyOf = Callable[[int], int]
"""Work -> the key of the masks of its dropout."""

_NO_CONTEXT = nullcontext()


class _NothingSent(dist.Work):
    """The transfer of an empty tensor: done before it starts."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class Arriving(dist.Work):
    """A message that is received, and the function that takes it."""

    def __init__(self, message: dist.Work, then: Callable[[], Any]) -> None:
        super().__init__()
        self._message, self._then = message, then

    def wait(self, timeout: Any = None) -> bool:
        self._message.wait()
        self._then()
        return True


def _sum_popped(box: dict[Edge, Tensor], edges: Sequence[Edge]) -> Tensor:
    """The sum of the tensors of some edges, taken out one after the other; a single one itself."""
    total = box.pop(edges[0])
    for number, edge in enumerate(edges[1:]):
        # Not into the first one: its producer, or another edge, may have it, too.
        total = total.add_(box.pop(edge)) if number else total + box.pop(edge)
    return total


class ModalityStage(PipelineStage):
    """torch's stage, with boxes keyed by edges of the work graph instead of neighbours and chunk ids.

    A tensor is held from the moment it exists to the moment it is used, and no longer: an activation
    received until its forward, an output until it is sent (the backward starts from its gradient
    edge), a gradient until its backward.
    """

    def __init__(
        self,
        chunk: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        channels: Channels,
        dtype: torch.dtype,
        memory: ActivationMemory | None = None,
        *,
        divided: bool = False,
        output_dtypes: Mapping[int, torch.dtype] = MappingProxyType({}),
        reduces: bool = True,
        compiled: Collection[nn.Module] = (),
    ) -> None:
        """Args:
        dtype: of activations.
        memory: the switch of the chunk's blocks; None: it has none.
        divided: the layers of the chunk exchange activations with the other ranks of tensor parallelism.
        output_dtypes: stage -> dtype of its outputs, where it is another one.
        reduces: whether REDUCE of this stage reduces the gradients of its chunk, and not that of a stage before it with
            the same chunk.
        """
        super().__init__(chunk, stage_index, num_stages, device, group=group)
        self.channels = channels
        self.dtype = dtype
        self.output_dtypes = output_dtypes
        self.reduces = reduces
        self.graph: WorkGraph | None = None
        self.shape_of: ShapeOf | None = None
        self.split: frozenset[int] = frozenset()
        """The works whose backward is split."""
        self.memory = memory or ActivationMemory((), ActivationCheckpointConfig(), Offloader(device))
        self.strategies: dict[int, StageMemory] = {}
        """work -> how the blocks treat its activations; absent: the default of the switch."""
        self.weight_grads = WeightGrads(chunk, without=compiled)
        self.dropout = DropoutKeys(chunk)
        self.key_of: KeyOf | None = None
        """The key of the dropout of a work; None: nothing is dropped."""
        self.divided = divided
        self.num_exchanges = 0
        """The exchanges of its last forward."""
        self.sums: frozenset[str] = getattr(chunk, "sums", frozenset())
        """Modules whose outputs, added up, are the chunk's input."""
        self.fsdp_modules: list[FSDPModule] = []
        """The parts of the chunk that FSDP2 shards, the root first; empty without FSDP2."""
        self.stays_gathered = False
        """Whether their parameters stay gathered during a step, by the actions of its program."""
        self.hides_exchanges = False
        """Whether a whole backward makes weight gradients while it waits for exchanges."""
        self.clear_runtime_states()

    def start_step(
        self,
        graph: WorkGraph,
        shape_of: ShapeOf,
        split: Collection[int] = (),
        strategies: Mapping[int, StageMemory] | None = None,
        key_of: KeyOf | None = None,
    ) -> None:
        """Takes the works and activation shapes of the next program.

        Args:
            split: works with I and W instead of B.
            strategies: work -> how the blocks treat its activations.
            key_of: work -> the key of the dropout of adapters; None: nothing is dropped.
        """
        self.key_of = key_of
        self.graph, self.shape_of, self.split = graph, shape_of, frozenset(split)
        self.strategies = dict(strategies or {})
        self.has_backward = True
        self.fsdp_modules = fsdp_modules(self.submod)
        frees = bool(self.fsdp_modules) and gathers_itself(self.submod)
        self.stays_gathered = bool(self.fsdp_modules) and not frees
        self.hides_exchanges = self.divided and not frees
        self.clear_runtime_states()

    def clear_runtime_states(self) -> None:
        """Drops whatever a broken step left behind."""
        super().clear_runtime_states()
        self.inbox: dict[Edge, Tensor] = {}
        """Activations that wait for their forward."""
        self.outbox: dict[Edge, Tensor] = {}
        """Outputs that wait to be sent."""
        self.grad_inbox: dict[Edge, Tensor] = {}
        """Gradients of outputs that wait for their backward."""
        self.grad_outbox: dict[Edge, Tensor] = {}
        """Gradients of inputs that wait to be sent."""
        self.saved: dict[int, tuple[Any, list[tuple[list[Edge], Tensor]]]] = {}
        """work -> (where its backward starts, the inputs that get a gradient, and for which edges)."""
        self.weight_grads.clear()
        self.memory.clear()

    def leftovers(self) -> list[str]:
        """One message for each tensor that should have been consumed by the end of a step."""
        boxes: dict[str, Mapping[Any, Any]] = {
            "activation received": self.inbox,
            "output not sent": self.outbox,
            "gradient received": self.grad_inbox,
            "gradient not sent": self.grad_outbox,
            "forward without its backward, work": self.saved,
            "weight gradients without their W, work": dict.fromkeys(self.weight_grads.works()),
            "offloaded activations without their backward, work": dict.fromkeys(self.memory.works()),
        }
        return [f"stage {self.stage_index}: {what} {key}" for what, box in boxes.items() for key in box]

    # ------------------------------------------------------------------------------------- compute

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = False,
    ) -> Any:
        """The chunk's output for one work; its inputs come from the inbox, after `args`.

        Inputs that the chunk adds up (`Chunk.sums`) are one input, as that of the stage before would be, and one tensor
        until the backward.

        Raises: PlanError: the output has not the shape or dtype that the receiver expects.
        """
        assert self.graph is not None and self.shape_of is not None
        graph, stage, work = self.graph, self.stage_index, fwd_chunk_id
        edges = graph.inputs(stage, work)
        summed = [edge for edge in edges if self.sums and self._module_name(edge) in self.sums]
        own, others, leaves = [*args], [], []
        if summed:
            wanting = [edge for edge in summed if edge.grad]
            own.append(_sum_popped(self.inbox, summed).requires_grad_(bool(wanting)))
            leaves += [(wanting, own[-1])] if wanting else []
        for edge in edges:
            if edge in summed:
                continue
            activation = self.inbox.pop(edge).requires_grad_(edge.grad)
            if edge.work == work:
                own.append(activation)
            else:
                others.append((edge, activation))
            if edge.grad:
                leaves.append(([edge], activation))
        backward = graph.has_backward(stage, work)
        before = passes.num_exchanges()
        self.memory.offloader.settle()
        strategy = self.memory.of(self.strategies.get(work), work) if backward else _NO_CONTEXT
        deferring = self._deferring(work) if backward else _NO_CONTEXT
        with torch.set_grad_enabled(backward), deferring, strategy, self._dropping(work):
            if own and others:  # features of other modules join the stage's own input
                output = self.submod(*own, features=self._features(others), **(kwargs or {}))
            else:
                output = self.submod(*own, *(t for _, t in others), **(kwargs or {}))
        self.num_exchanges = passes.num_exchanges() - before
        consumers = graph.outputs(stage, work)
        root = output if isinstance(output, Tensor) else output.loss_sum
        made, planned = (tuple(root.shape), root.dtype), (self.shape_of(stage, work), self._output_dtype(stage))
        if consumers and made != planned:
            raise PlanError(
                f"stage {stage}, work {work}: the chunk made an activation of shape {made[0]} and {made[1]}, but the "
                f"plan's metadata says {planned[0]} and {planned[1]}; the model's spec and module disagree"
            )
        if backward:
            if not root.numel():  # no image on this rank: no trainable layer took part
                root.requires_grad_()
            start = gradient_edge(root) if consumers else root
            self.saved[work] = (start, leaves)
        for edge in consumers:
            self.outbox[edge] = root.detach()
        return output

    def _features(self, inputs: list[tuple[Edge, Tensor]]) -> Tensor | dict[str, Tensor]:
        """What other modules made for this one; by their names, if there are several."""
        assert self.graph is not None
        parts_of: dict[str, list[Tensor]] = {}
        for edge, tensor in inputs:
            parts_of.setdefault(self._module_name(edge), []).append(tensor)
        joined = {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in parts_of.items()}
        return joined if len(joined) > 1 else next(iter(joined.values()))

    def _module_name(self, edge: Edge) -> str:
        """The module whose output an edge carries."""
        assert self.graph is not None
        return self.graph.modules[self.graph.works[edge.work].module].name

    def _output_dtype(self, stage: int) -> torch.dtype:
        return self.output_dtypes.get(stage, self.dtype)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Runs the backward of one work; gradients of its inputs go to the grad_outbox.

        While it waits for an exchange inside of a layer, it makes weight gradients that wait.

        Args:
            loss: gradient to start from where the chunk's output is the loss; else the grad_inbox has it.
            full_backward: also the weight gradients of linear layers; they otherwise wait for `backward_weight`. It
                must be as `split` was before the forward.
        """
        assert full_backward is (bwd_chunk_id not in self.split)
        assert self.graph is not None
        start, leaves = self.saved.pop(bwd_chunk_id)
        edges = [e for e in self.graph.outputs(self.stage_index, bwd_chunk_id) if e.grad]
        grad = _sum_popped(self.grad_inbox, edges) if edges else loss
        self.memory.prefetch(bwd_chunk_id)  # before the others settle: its last block may not have left yet
        self.memory.offloader.settle()
        filled = full_backward and self.hides_exchanges
        filling = passes.filled(self.some_weights(bwd_chunk_id)) if filled else _NO_CONTEXT
        with self._deferring(bwd_chunk_id), self._dropping(bwd_chunk_id), filling:
            torch.autograd.backward(start, grad)
        if filled:
            self.backward_weight(bwd_chunk_id)
        self.memory.finish(bwd_chunk_id)
        for edges, leaf in leaves:
            # An input that the loss does not depend on: its producer expects a gradient of zero.
            self.grad_outbox |= dict.fromkeys(edges, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
            leaf.grad = None

    def prefetch(self, work: int) -> None:
        """Starts to bring back the offloaded activations that the backward of a work needs first."""
        self.memory.prefetch(work)

    def backward_input(self, work: int, loss: Any = None) -> None:
        """Runs the input-gradient pass (I) of one work: the backward without the weight gradients of linear layers.

        A stage without an input that gets a gradient has this pass, too, for the gradients between its layers.
        """
        self.backward_one_chunk(work, loss=loss, full_backward=False)

    def backward_weight(self, work: int) -> None:
        """Runs the weight-gradient pass (W) of one work."""
        self.weight_grads.run(work)
        settle_grads(self.fsdp_modules)

    def some_weights(self, work: int, num_exchanges: int = 0) -> Fill:
        """A part of the weight-gradient pass of one work, to be run during an exchange.

        Args: num_exchanges: divide the pass over so many; 0: what waits is run, over the exchanges that follow at once.
        """
        per_exchange = -(-self.weight_grads.num_waiting(work) // num_exchanges) if num_exchanges else 0

        def run(scatters: bool) -> None:
            waiting = self.weight_grads.num_waiting(work)
            self.weight_grads.run_some(work, per_exchange or (-(-waiting // 2) if scatters else waiting))

        return run

    def _deferring(self, work: int) -> AbstractContextManager[None]:
        return self.weight_grads.deferred(work) if self.hides_exchanges or work in self.split else _NO_CONTEXT

    def _dropping(self, work: int) -> AbstractContextManager[None]:
        return self.dropout.of(self.key_of(work)) if self.key_of is not None else _NO_CONTEXT

    @property
    def pass_state(self) -> Any:
        """What belongs to the pass that runs, where two passes take turns."""
        return self.weight_grads.open, self.dropout.now, self.memory.now, fsdp_pass(self.fsdp_modules)

    @pass_state.setter
    def pass_state(self, state: Any) -> None:
        self.weight_grads.open, self.dropout.now, self.memory.now, in_hooks = state
        set_fsdp_pass(self.fsdp_modules, in_hooks)

    # ----------------------------------------------------------------------------------- transfers

    def _route(self, edge: Edge, forward: bool) -> Route:
        assert self.graph is not None
        source, target = self.graph.stage_rank[edge.source], self.graph.stage_rank[edge.target]
        return self.channels.route(*((source, target) if forward else (target, source)), pp_rank=self.group_rank)

    def send(self, edge: Edge, forward: bool) -> tuple[dist.Work, Tensor]:
        """Starts to send an output (or the gradient of an input); keep the tensor until the work is done."""
        box = self.outbox if forward else self.grad_outbox
        tensor = box.pop(edge).contiguous()
        if not tensor.numel():  # this rank has no image of the work, and its peer expects none
            return _NothingSent(), tensor
        if self.channels.through_host:
            tensor = tensor.cpu()
        group, peer = self._route(edge, forward)
        return group.send([tensor], peer, 0), tensor

    def receive(self, edge: Edge, forward: bool) -> tuple[dist.Work, Tensor]:
        """Starts to receive an input (or the gradient of an output) into memory of the planned shape."""
        assert self.shape_of is not None
        shape = self.shape_of(edge.source, edge.work)
        tensor = torch.empty(shape, dtype=self._output_dtype(edge.source), device=self.device)
        if not tensor.numel():
            return _NothingSent(), tensor
        group, peer = self._route(edge, forward)
        arriving = torch.empty_like(tensor, device="cpu") if self.channels.through_host else tensor
        work = group.recv([arriving], peer, 0)
        return (work if arriving is tensor else Arriving(work, partial(tensor.copy_, arriving))), tensor
