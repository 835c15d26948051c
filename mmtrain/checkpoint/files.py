"""The files of one checkpoint: a manifest of what was written, and reading that trusts none of them.

A file is intact if it has the size and the SHA-256 of the manifest. Whatever a file contains, reading it creates
tensors and plain values and calls nothing: torch's own reader would unpickle its content.
"""

import hashlib
import io
import json
import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from mmtrain.checkpoint.stored_metadata import ForbiddenError, read_metadata
from mmtrain.errors import CheckpointError, MMTrainError

MANIFEST, METADATA, STATE = "manifest.json", ".metadata", "train_state.json"
"""Size and SHA-256 of all other files; file and offset of each tensor; step and position in the data."""

_FOLDER = re.compile(r"step-(0|[1-9][0-9]{0,9})")


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder with this name; None: a checkpoint's folder has another name."""
    match = _FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def complete_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending. Their files may have been damaged since."""
    if not folder.is_dir():
        return []
    steps = []
    for entry in folder.iterdir():
        step = step_of(entry.name)
        if step is not None and any((entry / name).exists() for name in (MANIFEST, METADATA, STATE)):
            steps.append(step)
    return sorted(steps)


# ------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The record of one file in a manifest."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "FileRecord":
        """The record of a file, which is read a block at a time. Raises: OSError."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
            return cls(file.tell(), digest.hexdigest())


class RecordingWriter(dcp.FileSystemWriter):
    """torch's writer, which also records the files that it wrote: after a save, in `files`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.files: dict[str, FileRecord] = {}

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Writes as torch's writer does. Raises: OSError: what torch hides behind an error of its own."""
        try:
            results = super().write_data(plan, planner)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise cause or error from None
        names = {result.storage_data.relative_path for result in results.wait()}
        self.files = {name: FileRecord.of(Path(self.path) / name) for name in sorted(names)}
        return results


def write_manifest(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Writes the manifest of a checkpoint. Args: files: by name; those of `METADATA` and `STATE` are added.

    Raises: OSError: also if one of the files is no longer there.
    """
    for name in files:
        (folder / name).stat()
    own = {name: FileRecord.of(folder / name) for name in (METADATA, STATE)}
    rows = {name: {"bytes": file.bytes, "sha256": file.sha256} for name, file in sorted({**own, **files}.items())}
    (folder / MANIFEST).write_text(json.dumps({"version": 1, "files": rows}, indent=1) + "\n")


# ------------------------------------------------------------------------------------------- reading


@dataclass(slots=True)
class StoredCheckpoint:
    """A checkpoint opened for reading: manifest, metadata and state are read and checked, tensors are not."""

    folder: Path
    manifest: dict[str, FileRecord] | None
    """The record of each file; None: absent, or not to be used."""
    warning: str = ""
    """A warning for the user if it is loaded."""
    state: dict[str, Any] = field(init=False)
    """Content of `STATE`."""
    metadata: Metadata = field(init=False)
    _ends: dict[str, int] = field(init=False)
    """File -> least size in bytes that the metadata require."""
    _compared: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, folder: Path, verify: str) -> "StoredCheckpoint":
        """A checkpoint whose manifest, metadata and state are intact.

        Args: verify: as `checkpoint.verify`.
        Raises:
            CheckpointError: one of them is damaged, or refused; no manifest, and verify = "required".
            MMTrainError: a file cannot be read.
        """
        opened = cls(folder, None)
        with opened.reading():
            if verify != "off" and (folder / MANIFEST).exists():
                opened.manifest = opened._read_manifest()
            elif verify == "required":
                raise CheckpointError(
                    f'{folder} has no {MANIFEST}, but checkpoint.verify = "required"; set "auto" to load it unverified'
                )
            opened.state = opened._read_state()
            opened._read_metadata()
        if verify == "auto" and opened.manifest is None:
            opened.warning = f"{folder} has no {MANIFEST}: damage to its files may go unnoticed"
        return opened

    def load(self, tensors: dict[str, Any], *, no_dist: bool = False) -> None:
        """Fills tensors in place and replaces other values. Collective over the job, unless `no_dist`.

        Each file is hashed by one of the ranks that read it; an error on one rank is raised on all.
        Raises: the values are then undefined.
            CheckpointError: a file is damaged, or contains an object that is no plain value.
            MMTrainError: a file cannot be read.
        """
        with self.reading():
            try:
                dcp.load(tensors, storage_reader=_Reader(self), planner=_Planner(self), no_dist=no_dist)
            except CheckpointException as error:
                raise first_failure(error) from error

    def check_sizes(self, names: Iterable[str]) -> None:
        """Checks that files of tensors exist and have their size. Raises: as `load`."""
        with self.reading():
            for name in sorted(set(names)):
                size = self._regular(name).stat().st_size
                if size < self._ends[name]:
                    raise self.damaged(f"{name} has {size} bytes and needs {self._ends[name]}")

    def check_contents(self, names: Iterable[str]) -> None:
        """Compares files of tensors with the manifest, each once. Raises: as `load`."""
        with self.reading():
            for name in sorted(set(names) - self._compared) if self.manifest is not None else ():
                self._compare(name, FileRecord.of(self.folder / name))
                self._compared.add(name)

    def damaged(self, what: str) -> CheckpointError:
        """The error of a damaged checkpoint, in one line whatever its files contain."""
        return CheckpointError(f"{self.folder} is damaged: {_printable(what)}")

    def refused(self, part: str, name: str) -> CheckpointError:
        """The error of a part of the checkpoint that refers to something other than data."""
        return CheckpointError(
            f"{self.folder} is refused: {_printable(part)} asks for {_printable(name)}, which no checkpoint needs; "
            "loading it could run any program"
        )

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Converts errors of reading the files."""
        try:
            yield
        except FileNotFoundError as error:
            raise self.damaged(f"{Path(error.filename or '').name} is missing") from None
        except OSError as error:
            raise MMTrainError(f"checkpoint: {error}") from None
        except MMTrainError:
            raise
        except Exception as error:
            if self.manifest is not None:  # the bytes are those that were saved, so the files are not the cause
                raise
            reason = re.split(r"\.\s|\n", str(error), maxsplit=1)[0]  # torch goes on to advise trusting the file
            raise self.damaged(f"it cannot be read: {type(error).__name__}: {reason}") from None

    def _regular(self, name: str) -> Path:
        path = self.folder / name
        path.stat()
        if not path.is_file():  # reading a pipe or a device may never end
            raise self.damaged(f"{name} is no file")
        return path

    def _compare(self, name: str, actual: FileRecord) -> None:
        wanted = (self.manifest or {}).get(name)
        if wanted is None:
            raise self.damaged(f"{MANIFEST} does not know {name}")
        if actual.bytes != wanted.bytes:
            raise self.damaged(f"{name} has {actual.bytes} bytes, not {wanted.bytes} as when it was saved")
        if actual.sha256 != wanted.sha256:
            raise self.damaged(f"the content of {name} is not what was saved (its SHA-256 differs)")

    def _bytes(self, name: str) -> bytes:
        """The content of a small file, compared with the manifest."""
        data = self._regular(name).read_bytes()
        if self.manifest is not None:
            self._compare(name, FileRecord(len(data), hashlib.sha256(data).hexdigest()))
        return data

    def _read_manifest(self) -> dict[str, FileRecord]:
        try:
            table = json.loads(self._regular(MANIFEST).read_bytes())
            if table["version"] != 1:
                raise ValueError(f"version {table['version']}")
            return {name: FileRecord(row["bytes"], row["sha256"]) for name, row in table["files"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self.damaged(f"{MANIFEST} cannot be read: {error!r}") from None

    def _read_state(self) -> dict[str, Any]:
        raw = self._bytes(STATE)
        try:
            table = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise self.damaged(f"{STATE} cannot be read: {error}") from None
        if not isinstance(table, dict):
            raise self.damaged(f"{STATE} holds no table")
        saved, named = table.get("step"), step_of(self.folder.name)
        if isinstance(saved, int) and named not in (None, saved):
            raise self.damaged(f"{STATE} is of step {saved}, so the folder was renamed or copied")
        return table

    def _read_metadata(self) -> None:
        raw = self._bytes(METADATA)
        try:
            self.metadata = read_metadata(raw)
        except ForbiddenError as error:
            raise self.refused(METADATA, str(error)) from None
        except Exception as error:
            raise self.damaged(f"{METADATA} cannot be read: {type(error).__name__}: {error}") from None
        self._ends = {}
        for stored in self.metadata.storage_data.values():
            name = stored.relative_path
            self._ends[name] = max(stored.offset + stored.length, self._ends.get(name, 0))


def first_failure(error: CheckpointException) -> BaseException:
    """The cause of a failed save or load: an mmtrain error, else the error of the lowest rank."""
    causes: list[BaseException] = [cause for _, (cause, _) in sorted(error.failures.items())]
    return next((cause for cause in causes if isinstance(cause, MMTrainError)), causes[0])


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


class _Reader(dcp.FileSystemReader):
    """torch's reader of a checkpoint with metadata that are read already; checks files before it reads them."""

    def __init__(self, stored: StoredCheckpoint) -> None:
        super().__init__(stored.folder)
        self._stored = stored

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._stored.metadata

    def prepare_local_plan(self, plan: Any) -> Any:
        self._stored.check_sizes(map(self._file, plan.items))
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Selects for each file the reader that hashes it: the one that reads most of it, on ties the one with least
        to hash."""
        readers: dict[str, Counter[int]] = defaultdict(Counter)
        for rank, plan in enumerate(plans):
            for item in plan.items:
                readers[self._file(item)][rank] += max(1, item.lengths.numel())
        files: list[list[str]] = [[] for _ in plans]
        for name, counts in sorted(readers.items()):
            most = max(counts.values())
            rank = min((r for r in counts if counts[r] == most), key=lambda r: (len(files[r]), r))
            files[rank].append(name)
        return [replace(plan, storage_data=own) for plan, own in zip(plans, files, strict=True)]

    def read_data(self, plan: Any, planner: Any) -> Any:
        self._stored.check_contents(plan.storage_data)
        return super().read_data(plan, planner)

    def _file(self, item: Any) -> str:
        name: str = self.storage_data[item.storage_index].relative_path
        return name


class _Planner(dcp.DefaultLoadPlanner):
    """torch's planner for a flat table whose values other than tensors are plain."""

    def __init__(self, stored: StoredCheckpoint) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._stored = stored

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError:
            unsafe: list[str] = []
            value.seek(0)
            with suppress(Exception):
                unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(value)
            if not unsafe:
                file = self.metadata.storage_data[read_item.storage_index].relative_path
                raise self._stored.damaged(f"{name} in {file} cannot be read") from None
            raise self._stored.refused(name, unsafe[0]) from None
