"""The runtime's sums of gradients over pipelines and over copies of a tied matrix: messages and seconds. Pure.

Layers with equal holders in a row are one message, the last layer first. A rank starts a message once the gradients of
its stages in it are reduced and all messages before it have started there. It is on its way when all of its ranks have
started it and their links are free: a link carries one message at a time. The runtime divides long messages; the parts
are queued together, so that a message has one latency here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from mmtrain.config.topology import Coordinates
from mmtrain.costs.machine import RankNetwork
from mmtrain.costs.operators.operator_graph import OpKind
from mmtrain.planner.memory.rank_bytes import Sharding
from mmtrain.planner.partition.partition import Partition
from mmtrain.spec.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SumMessage:
    """Gradients of layers with equal holders."""

    holders: tuple[tuple[int, int], ...]
    """The pipeline and stage of each copy, ascending."""
    holder_ranks: tuple[int, ...]
    """The global rank of each, those of one position in a stage."""
    num_bytes: float

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that add them up, ascending."""
        return tuple(sorted({*self.holder_ranks}))


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSums:
    """The messages of a step, in their order."""

    messages: tuple[SumMessage, ...]
    seconds: tuple[float, ...]
    """The seconds of each message."""

    @classmethod
    def of(
        cls, partitions: Sequence[Partition], spec: ModelSpec, sharding: Sharding, network: RankNetwork
    ) -> "PipelineSums":
        """The sums of a job. Args: partitions: [pipeline]."""
        messages = _messages(partitions, spec, sharding)
        seconds = tuple(network.collective_s(OpKind.ALL_REDUCE, one.num_bytes, one.ranks) for one in messages)
        return cls(messages=messages, seconds=seconds)

    def end_s(self, reduced_s: Sequence[Sequence[float]]) -> float:
        """The time at which all gradients are complete. Args: reduced_s: [pipeline][stage] -> when its REDUCE has
        ended."""
        started_s: dict[int, float] = {}
        ready_s: list[float] = []
        for message in self.messages:
            for (pipeline, stage), rank in zip(message.holders, message.holder_ranks, strict=True):
                started_s[rank] = max(started_s.get(rank, 0.0), reduced_s[pipeline][stage])
            ready_s.append(max(started_s[rank] for rank in message.ranks))
        free_s: dict[int, float] = {}

        def start_s(index: int) -> float:
            return max([ready_s[index], *(free_s.get(rank, 0.0) for rank in self.messages[index].ranks)])

        waiting = list(range(len(self.messages)))
        while waiting:
            index = min(waiting, key=start_s)
            waiting.remove(index)
            free_s.update(dict.fromkeys(self.messages[index].ranks, start_s(index) + self.seconds[index]))
        return max([*map(max, reduced_s), *free_s.values()])


def _messages(partitions: Sequence[Partition], spec: ModelSpec, sharding: Sharding) -> tuple[SumMessage, ...]:
    """The messages in the order in which all ranks walk them."""
    elements, holders = _layer_elements(partitions[0], spec, sharding), _layer_holders(partitions, spec)
    found: list[SumMessage] = []
    for key, layers in groupby(reversed(elements), holders.__getitem__):
        if len(key) == 1:
            continue
        places = [Coordinates(pipeline=pipeline, pp=partitions[pipeline].stage_rank[stage]) for pipeline, stage in key]
        ranks = tuple(map(sharding.shape.rank, places))
        num_bytes = sharding.reduce_dtype_bytes * sum(elements[layer] for layer in layers)
        found.append(SumMessage(holders=key, holder_ranks=ranks, num_bytes=num_bytes))
    return tuple(found)


def _layer_elements(partition: Partition, spec: ModelSpec, sharding: Sharding) -> dict[tuple[str, int], float]:
    """The trainable parameters of a rank's shard of each (module, layer), in forward order; only layers that have some.

    A tied matrix counts where it is first.
    """
    found: dict[tuple[str, int], float] = {}
    for stage in partition.stages:
        for index, layer in enumerate(spec.module(stage.module).layers[slice(*stage.layers)], stage.layers[0]):
            state = sharding.stage_state(spec, replace(stage, layers=(index, index + 1)))
            if state.num_trainable:
                tied = layer.num_shared_params / layer.num_trainable_params if layer.adapters is None else 0.0
                found[stage.module, index] = (1 - tied) * state.num_trainable / state.shards
    return found


def _layer_holders(
    partitions: Sequence[Partition], spec: ModelSpec
) -> dict[tuple[str, int], tuple[tuple[int, int], ...]]:
    """The holders (pipeline, stage) of each (module, layer), ascending."""
    found: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for pipeline, partition in enumerate(partitions):
        for stage in partition.stages:
            for index in range(*stage.layers):
                found.setdefault((stage.module, index), []).append((pipeline, stage.index))
    for embed, head in spec.ties:
        found[embed] += found[head]
    return {layer: tuple(sorted(set(held))) for layer, held in found.items()}
