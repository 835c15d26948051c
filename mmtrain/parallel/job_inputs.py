"""What all ranks of a job must have alike: config, versions, sources, and the files that the config names."""

import hashlib
import json
import mimetypes
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import mmtrain
from mmtrain.config.config import Config
from mmtrain.config.toml_sections import to_dict
from mmtrain.costs.operators.cluster import Cluster
from mmtrain.errors import ConfigError, one_line
from mmtrain.launch.launched import Launched
from mmtrain.parallel.alike import Subject
from mmtrain.schedule.library.catalogue import Schedule
from mmtrain.spec.hub_files import cached_folder, local_path

MAY_DIFFER = (
    "job.description",
    "job.dump_folder",
    "data.num_workers",
    "data.prefetch",
    "planner.search.threads",
    "metrics.",
)
"""Beginnings of the keys of the config that each node may have for itself; `check_shared` is about job.dump_folder."""

_PACKAGES = (
    "torchtitan", "transformers", "tokenizers", "datasets", "diffusers", "peft", "numpy", "numba", "scipy", "pillow",
)  # fmt: skip
"""The packages that decide, next to torch, what is learnt or in which order."""

_MODEL = ("config.json", "adapter_config.json", "*.safetensors.index.json", "*.safetensors")
_TOKENIZER = (
    "tokenizer*", "vocab*", "merges.txt", "*.tiktoken", "added_tokens.json", "special_tokens_map.json", "config.json",
    "chat_template*", "*processor_config.json",
)  # fmt: skip
_RECORDS = (".parquet", ".json", ".jsonl", ".arrow", ".csv", ".tar", ".zip")
"""Endings of files of a data set that count one by one; of images, sounds and videos only the number counts."""
_SOURCES = (".py", ".toml", ".json")

_LONGEST_HEADER = 2**27
"""Bytes; more than the header of any safetensors file."""

Settings = Mapping[str, Any]
"""Dotted key of the config -> its value."""


def job_inputs(config: Config, schedule: Schedule, device: torch.device, launched: Launched) -> tuple[Subject, ...]:
    """What this rank of a job starts from, as `check_alike` compares it.

    The first rank of each node looks at the sources and at the files of models; the first rank of each model replica,
    which reads the data, at these and at the tokenizer.
    """
    settings = dict(_flat(to_dict(config)))
    place = config.parallelism.layout.coordinates(launched.rank)
    gpus = "make the GPUs of all nodes visible, or train on their CPUs with CUDA_VISIBLE_DEVICES="
    install, copy = "install the same versions on all nodes", "copy the same files to all nodes"
    fetch = "name one id, and fetch its newest files into the cache of each node"
    subjects = [
        Subject(name="device", values={"device": device.type}, remedy=gpus),
        Subject(name="versions", values=_versions(), remedy=install),
        Subject(name="config", values=_config(settings), remedy="start all nodes with one TOML file and overrides"),
        Subject(name="cost or schedule file", values=_planned_by(settings, schedule), remedy=copy),
    ]
    if launched.local_rank == 0:
        subjects.append(Subject(name="source of mmtrain", values=_sources(), remedy=install))
        subjects.append(Subject(name="files of the model", values=_weights(settings), remedy=copy, partial=True))
        subjects.append(Subject(name="models of the hub", values=_hub(settings), remedy=fetch, partial=True))
    if place.pp == place.cp == place.tp == 0:
        subjects.append(Subject(name="tokenizer or processor", values=_tokenizer(settings), remedy=copy))
        subjects.append(Subject(name="data", values=_data(settings), remedy=copy))
    return tuple(subjects)


def node_inputs(
    config: Config, schedule: Schedule, device: torch.device, local_rank: int, ranks: int
) -> tuple[Subject, ...]:
    """What a rank of an elastic job starts from, where each node may read the data.

    Args: config: of one stage; ranks: of a node.
    """
    stage = config.parallelism.layout.world_size
    place = Launched(rank=local_rank % stage, world_size=stage, local_rank=local_rank, local_world_size=ranks)
    return job_inputs(config, schedule, device, place)


def alike_config(config: Config) -> dict[str, str]:
    """Dotted key -> value of all that nodes may not have for themselves."""
    return dict(_config(dict(_flat(to_dict(config)))))


def _flat(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables, and of lists of them, under their dotted keys."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}{key}.")
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            yield from _flat({f"{key}[{index}]": item for index, item in enumerate(value)}, path)
        else:
            yield f"{path}{key}", value


def _versions() -> dict[str, str]:
    found = {"mmtrain": mmtrain.__version__, "torch": str(torch.__version__)}
    found["python"] = ".".join(platform.python_version_tuple()[:2])
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


_FILE_KEYS = ("pretrained", "path", "chat_template", "image_processor", "source", "hardware", "profile",
              "pipeline_parallel_schedule")  # fmt: skip
"""Last parts of keys that name files. Their contents are compared, so that nodes may have these in other folders."""


def _config(settings: Settings) -> dict[str, str]:
    shared = {key: value for key, value in settings.items() if not key.startswith(MAY_DIFFER)}
    of_file = {key: "(a name)" for key, value in shared.items() if value and key.rpartition(".")[2] in _FILE_KEYS}
    return {key: of_file.get(key) or json.dumps(value, sort_keys=True, default=str) for key, value in shared.items()}


def _planned_by(settings: Settings, schedule: Schedule) -> dict[str, str]:
    """What plans are made by: the schedule, the hardware and the profile."""
    hardware, profile = settings["planner.hardware"], settings["planner.profile"]
    return {
        "parallelism.pipeline_parallel_schedule": schedule.digest or schedule.name,
        "planner.hardware": hardware and _short(repr(Cluster.of(hardware).hardware).encode()),
        "planner.profile": profile and _digest(Path(profile)),
    }


def _sources() -> dict[str, str]:
    package = Path(mmtrain.__file__).parent
    files = (file for file in package.rglob("*") if file.suffix in _SOURCES and file.is_file())
    return {f"{package.name}/{file.relative_to(package)}": _digest(file) for file in sorted(files)}


def _weights(settings: Settings) -> dict[str, str]:
    """Configs and headers of weights of the folders that `pretrained` names, each once."""
    found: dict[str, str] = {}
    for key, source in _named(settings, "pretrained"):
        random = settings.get(f"{key.removesuffix('pretrained')}weights") == "random"
        found |= _contents(key, source, _MODEL[:1] if random else _MODEL)
    return found


def _hub(settings: Settings) -> dict[str, str]:
    """Ids on the hub with their commit, as far as this node has them by now."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        if value and key.rpartition(".")[2] in ("pretrained", "path", "image_processor"):
            try:
                folder = None if local_path(key, value) else cached_folder(value)
            except ConfigError:  # which says later what is wrong
                continue
            found |= {key: f"{value} at commit {folder.name}"} if folder else {}
    return found


def _tokenizer(settings: Settings) -> dict[str, str]:
    found: dict[str, str] = {}
    for key in ("tokenizer.path", "tokenizer.chat_template", "data.image_processor", "model.pretrained"):
        if source := settings.get(key):
            found |= _contents(key, source, _TOKENIZER)
    return found


def _data(settings: Settings) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, source in _named(settings, "source"):
        found |= _readable(key, source, _listing) or {key: source}
    return found


def _named(settings: Settings, end: str) -> list[tuple[str, str]]:
    """The keys with this last part, each with its value; the first one of each value."""
    keys = {value: key for key, value in reversed(list(settings.items())) if value and key.rpartition(".")[2] == end}
    return [(key, value) for value, key in keys.items()]


def _contents(key: str, source: str, patterns: tuple[str, ...]) -> dict[str, str]:
    """Key and name of each of these files of a local folder -> digest."""

    def listed(key: str, path: Path) -> dict[str, str]:
        if path.is_file():
            return {key: _digest(path)}
        files = (file for file in _files(path) if any(fnmatch(file.name, pattern) for pattern in patterns))
        return {f"{key}: {file.relative_to(path)}": _digest(file) for file in files}

    return _readable(key, source, listed)


def _listing(key: str, path: Path) -> dict[str, str]:
    """Names and sizes of a data set's files of records, and the number of its images, sounds and videos."""
    if path.is_file():
        return {key: f"{path.stat().st_size} bytes"}
    found, media = {}, Counter[str]()
    for file in _files(path):
        if file.suffix in _RECORDS:
            found[f"{key}: {file.relative_to(path)}"] = f"{file.stat().st_size} bytes"
        else:
            media[(mimetypes.guess_type(file.name)[0] or "").partition("/")[0]] += 1
    return found | {f"{key}: {kind}s": f"{media[kind]} files" for kind in ("image", "audio", "video") if media[kind]}


def _files(folder: Path) -> Iterator[Path]:
    """All files below a folder but hidden ones, in order."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(place, name) for name in sorted(names) if not name.startswith("."))


def _readable(key: str, source: str, read: Callable[[str, Path], dict[str, str]]) -> dict[str, str]:
    """What `read` finds at a path; nothing of an id on the hub. An error is a value, too: others wait for one."""
    try:
        path = local_path(key, source)
        return read(key, path) if path else {}
    except (ConfigError, OSError) as error:
        return {key: one_line(error, 100)}


def _digest(path: Path) -> str:
    """The digest of a file's content; for weights, of their header and size."""
    with path.open("rb") as file:
        if path.suffix != ".safetensors":
            return _short(file.read())
        length = file.read(8)
        header = file.read(min(int.from_bytes(length, "little"), _LONGEST_HEADER))
        return _short(length + header + str(os.fstat(file.fileno()).st_size).encode())


def _short(content: bytes) -> str:
    return f"SHA-256 {hashlib.sha256(content).hexdigest()[:12]}"
