"""The metadata of a checkpoint, read from a pickle that cannot do anything.

Torch pickles objects of its own classes. Here each class that may occur is an inert one of this module, which keeps
what it is given and has no method that a pickle could reach or replace; the values are then checked one by one and put
into torch's classes.
"""

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

_T = TypeVar("_T")

_METADATA = "torch.distributed.checkpoint.metadata"
CLASSES = {
    _METADATA: (
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": ("PosixPath",),
    "builtins": ("getattr",),  # by which Python before 3.11.4 pickles a member of an enumeration; inert like all others
}
"""Module -> names of what torch writes into metadata, in addition to the dtypes."""
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """The location of a part: bytes of a file in the checkpoint's folder. The names are those that torch's reader asks
    for."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class ForbiddenError(Exception):
    """A name that a pickle of metadata must not use."""


class _Inert:
    """An object of a pickle: its arguments and its state, of no type that can be relied on."""

    __slots__ = ("args", "state")
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> "_Inert":
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """An unpickler that makes plain values, dtypes, and objects of `inert` classes."""

    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw))
        self.inert = {
            (module, name): type(name, (_Inert,), {"__slots__": ()}) for module in CLASSES for name in CLASSES[module]
        }
        """Classes of this pickle alone, by module and name: an attribute that it could set would reach no other one."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) not in self.inert:
            raise ForbiddenError(f"{module}.{name}")
        return self.inert[module, name]


def read_metadata(raw: bytes) -> Metadata:
    """The metadata in a pickle as torch writes it: of each tensor its dtype, shape and parts, and where each part is.

    Raises:
        ForbiddenError: it asks for anything that no metadata have.
        Exception: of any kind: it is no pickle, or holds values of other types.
    """
    fields = _fields(_Unpickler(raw).load(), "Metadata")
    return Metadata(
        state_dict_metadata=_table(fields["state_dict_metadata"], _text, _stored),
        storage_data=_table(fields["storage_data"], _index, _place),
    )


def _stored(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    """What is stored under a name."""
    if _is(value, "BytesStorageMetadata"):
        return BytesStorageMetadata()
    fields = _fields(value, "TensorStorageMetadata")
    properties = _typed(fields["properties"], _Inert)
    dtype = _typed(properties.state, tuple)[0] if _is(properties, "TensorProperties") else None
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in _typed(fields["chunks"], list)]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=_typed(dtype, torch.dtype)),
        size=_size(fields["size"]),
        chunks=[ChunkStorageMetadata(offsets=_size(c["offsets"]), sizes=_size(c["sizes"])) for c in chunks],
    )


def _index(value: Any) -> MetadataIndex:
    fields = _fields(value, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _text(fields["fqn"]),
        None if offset is None else _size(offset),
        None if index is None else _count(index),
    )


def _place(value: Any) -> StoredBytes:
    fields = _fields(value, "_StorageInfo")
    name, offset, length = _text(fields["relative_path"]), _count(fields["offset"]), _count(fields["length"])
    if not name or Path(name).name != name:
        raise ValueError(f"bytes {offset} to {offset + length} of {name!r}")
    return StoredBytes(name, offset, length)


def _size(value: Any) -> torch.Size:
    if not _is(value, "Size"):
        raise TypeError(f"{_name(value)} in place of a size")
    return torch.Size([_count(number) for given in value.args for number in _typed(given, tuple)])


def _table(value: Any, key: Callable[[Any], Any], entry: Callable[[Any], Any]) -> dict[Any, Any]:
    return {key(name): entry(stored) for name, stored in _typed(value, dict).items()}


def _fields(value: Any, name: str) -> Mapping[str, Any]:
    """The fields of an object of a class."""
    if not _is(value, name):
        raise TypeError(f"{_name(value)} in place of {name}")
    return _typed(value.state, dict)


def _text(value: Any) -> str:
    return _typed(value, str)


def _count(value: Any) -> int:
    if _typed(value, int) < 0:
        raise ValueError(f"{value} in place of a number of at least 0")
    return int(value)


def _typed(value: Any, kind: type[_T]) -> _T:
    if not isinstance(value, kind):
        raise TypeError(f"{_name(value)} in place of {kind.__name__}")
    return value


def _is(value: Any, name: str) -> bool:
    return isinstance(value, _Inert) and type(value).__name__ == name


def _name(value: Any) -> str:
    return type(value).__name__
