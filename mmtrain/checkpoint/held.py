"""Tensors between two layouts: each part in the host memory of one rank, sent from there to the ranks that need it.

This is a save and a load of torch DCP whose storage is the ranks themselves, so names and shards are planned as those
of a checkpoint are.
"""

import io
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mmtrain.checkpoint.state import NamedTensors


@dataclass(frozen=True, slots=True)
class HeldTensors:
    """Copies of all tensors of a job, which need no layout: this rank's share of them."""

    metadata: Metadata
    """Names, shapes and parts; its `storage_data` has the rank that holds a part, or the bytes of another value."""
    parts: dict[MetadataIndex, Tensor]
    """What this rank holds, in host memory. Of equal parts on several ranks, one rank holds it."""

    @classmethod
    def of(cls, named: NamedTensors) -> "HeldTensors":
        """Those of one layout. Collective over the job."""
        writer = _Writer()
        metadata = dcp.save(named.table(), storage_writer=writer)
        return cls(metadata, writer.parts)

    def restore(self, named: NamedTensors) -> None:
        """Puts them into another layout of the same ranks. Collective over the job."""
        tensors = named.table()
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        dcp.load(tensors, storage_reader=_Reader(self), planner=planner)
        named.restore(tensors)


class _Writer(dcp.StorageWriter):
    """Keeps the parts that a save gives to this rank."""

    def __init__(self) -> None:
        self.parts: dict[MetadataIndex, Tensor] = {}

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    def write_data(self, plan: Any, planner: Any) -> Any:
        results = []
        for item in plan.items:
            value = planner.resolve_data(item)
            if isinstance(value, Tensor):
                self.parts[item.index] = value.detach().to("cpu", copy=True)
                source: int | bytes = dist.get_rank()
            else:
                source = value.getvalue()
            results.append(WriteResult(index=item.index, size_in_bytes=0, storage_data=source))
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {result.index: result.storage_data for part in results for result in part}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class _Reader(dcp.StorageReader):
    """Gets the parts that a load asks for from the ranks that hold them."""

    def __init__(self, held: HeldTensors) -> None:
        self._held = held
        self._sources: dict[MetadataIndex, int | bytes] = held.metadata.storage_data

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._held.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Tells each rank what others read from it: (rank, index in its plan, what)."""
        asked: list[list[tuple[int, int, ReadItem]]] = [[] for _ in plans]
        for rank, plan in enumerate(plans):
            for index, item in enumerate(plan.items):
                source = self._sources[item.storage_index]
                if isinstance(source, int) and source != rank:
                    asked[source].append((rank, index, item))
        return [replace(plan, storage_data=own) for plan, own in zip(plans, asked, strict=True)]

    def read_data(self, plan: LoadPlan, planner: Any) -> Any:
        sent: list[tuple[Any, Tensor]] = []
        for rank, index, item in plan.storage_data:
            part = self._part(item).contiguous()
            sent.append((dist.isend(part, rank, tag=index), part))
        arriving: list[tuple[Any, Tensor, Tensor]] = []
        for index, item in enumerate(plan.items):
            source = self._sources[item.storage_index]
            if isinstance(source, bytes):
                planner.load_bytes(item, io.BytesIO(source))
                continue
            target = planner.resolve_tensor(item).detach()
            if source == dist.get_rank():
                target.copy_(self._part(item))
            else:
                part = torch.empty(item.lengths, dtype=target.dtype)
                arriving.append((dist.irecv(part, source, tag=index), part, target))
        for message, part, target in arriving:
            message.wait()
            target.copy_(part)
        for message, _ in sent:
            message.wait()
        return _done(None)

    def _part(self, item: ReadItem) -> Tensor:
        """What a rank asked for of a part that this rank holds."""
        box = zip(item.storage_offsets, item.lengths, strict=True)
        return self._held.parts[item.storage_index][tuple(slice(first, first + count) for first, count in box)]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _done(value: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
