"""What memory a part of a program takes."""

from pathlib import Path
from typing import Any

from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """The bytes of the largest memory that an operation has made or read."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = (leaf for leaf in tree_leaves((made, args, kwargs)) if isinstance(leaf, Tensor) and not leaf.is_meta)
        self.num_bytes = max(self.num_bytes, *(t.untyped_storage().nbytes() for t in tensors), 0)
        return made


class Peak(TorchDispatchMode):
    """The most bytes at one time of the memory that operations have made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {s.data_ptr() for s in _storages((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for storage in _storages(made):
            if storage.data_ptr() not in given:  # a view has no memory of its own
                self._made[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self._made = {place: row for place, row in self._made.items() if not row[0].expired()}
        self.num_bytes = max(self.num_bytes, sum(size for _, size in self._made.values()))
        return made


def _storages(tree: Any) -> list[UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and not leaf.is_meta]


class Grown:
    """The bytes of physical memory by which this process grows at most inside."""

    num_bytes = 0

    def __enter__(self) -> "Grown":
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        self._before = _resident("VmRSS")
        return self

    def __exit__(self, *error: object) -> None:
        self.num_bytes = _resident("VmHWM") - self._before


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
