"""This rank's box of a tensor of the model, and tensors of which ranks hold rows of their own under one name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from mmtrain.checkpoint.copy_plan import Shard
from mmtrain.parallel.torch_private import raw_part, tensor_like, tree_map_only


def shard_of(name: str, tensor: Tensor, dtype: torch.dtype, first: int = 0) -> Shard:
    """This rank's box of a tensor. Needs no process group.

    FSDP2 over tensor parallelism divides what tensor parallelism has divided, though its axis comes first: such a
    placement is not `is_shard`, and comes last here.
    Args: name: that it is stored under. dtype: of the shard. first: row of the stored tensor with which it begins.
    """
    offsets, lengths = [0] * tensor.ndim, list(tensor.shape)
    if isinstance(tensor, DTensor):
        axes = [(not p.is_shard(), axis, p) for axis, p in enumerate(tensor.placements) if not p.is_replicate()]
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None
        for _, axis, placement in sorted(axes, key=lambda item: item[:2]):
            dim: int = placement.dim  # type: ignore[attr-defined]
            part = -(-lengths[dim] // tensor.device_mesh.size(axis))
            begin = min(part * coordinate[axis], lengths[dim])
            offsets[dim] += begin
            lengths[dim] = min(part, lengths[dim] - begin)
        assert tuple(lengths) == raw_part(tensor).shape, (name, lengths, tensor.placements)
    if first:
        offsets[0] += first
    return Shard(name, tuple(offsets), tuple(lengths), str(dtype).removeprefix("torch."))


class RowsOf(torch.Tensor):
    """Rows of a larger tensor as torch's distributed checkpoints see them: boxes of all of it.

    An operation on it is one on its part (copies of a save in the background).
    """

    part: Tensor
    """This rank's rows; FSDP2 and tensor parallelism may divide them further."""
    first: int
    """The first of the rows."""

    @staticmethod
    def __new__(cls, part: Tensor, first: int, total: int) -> "RowsOf":
        """Args: total: rows of the whole tensor."""
        made: RowsOf = tensor_like(cls, part, (total, *part.shape[1:]))
        made.part, made.first = part, first
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RowsOf({self.part!r}, first={self.first}, total={len(self)})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        operands = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls)]
        first, total = operands[0].first, operands[0].shape[0]
        parts = tree_map_only(cls, lambda rows: rows.part, (tuple(args), dict(kwargs or {})))
        return tree_map_only(Tensor, lambda part: cls(part, first, total), func(*parts[0], **parts[1]))

    def _box(self) -> Shard:
        return shard_of("", self.part, self.part.dtype, self.first)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(raw_part(self.part))
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        box = self._box()
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths))] if box.elements else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return raw_part(self.part)
