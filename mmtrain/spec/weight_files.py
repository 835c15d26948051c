"""The safetensors files of a folder or hub id: which one holds which tensor, by index and headers. Pure; no weights."""

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from mmtrain.errors import ConfigError, one_line, shown
from mmtrain.spec.hub_files import find_file, read_json

_LONGEST_HEADER = 100_000_000
"""Bytes of a header, as the library safetensors limits it."""

STEMS = {"model.dit": "diffusion_pytorch_model", "model.vae": "diffusion_pytorch_model"}
"""Section -> what its files of weights are called, where that is not `model`."""

Shapes = Mapping[str, tuple[int, ...]]
"""Name of a tensor -> its shape."""


def weight_files(key: str, source: str, stem: str = "model", instead: str = "") -> dict[str, str]:
    """Name of a tensor -> the file of the source that holds it, from the index, or the header of the only file.

    Args:
        key: of the config that names the source, for errors. stem: of the names of the files.
        instead: what else to do if there are none.
    Raises: ConfigError: there are no such files, or the index names anything else than files of the source.
    """
    index = find_file(key, source, f"{stem}.safetensors.index.json", optional=True)
    if index is not None:
        files = read_json(key, index).get("weight_map")
        if not isinstance(files, dict) or not files:
            raise ConfigError(f"{key}: {index} has no weight_map from names to files; fetch it again")
        for name in dict.fromkeys(map(str, files.values())):
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or path.suffix != ".safetensors":
                raise ConfigError(
                    f"{key}: {index} is refused: it names {shown(name)}; weights are .safetensors files of the index's "
                    "own folder, take the model from someone you trust"
                )
        return {name: str(file) for name, file in files.items()}
    single = find_file(key, source, f"{stem}.safetensors", optional=True)
    if single is None:
        raise ConfigError(
            f"{key} = {source!r}: there is no {stem}.safetensors (or its index); save the weights as safetensors"
            + (f", or {instead}" if instead else "")
        )
    return dict.fromkeys(header(key, single), single.name)


def check_weight_files(key: str, source: str, stem: str = "model") -> Shapes:
    """The tensors of all files of a local source, of which none is missing or damaged as far as headers and sizes tell.

    Raises: ConfigError: as `weight_files` and `header`.
    """
    files = weight_files(key, source, stem)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in dict.fromkeys(files.values()):
        path = find_file(key, source, file)
        assert path is not None
        stored = header(key, path)
        for name in (name for name in files if files[name] == file):
            if name not in stored:
                raise ConfigError(f"{key}: {path} has no {name}, as its index says; fetch both again")
            shapes[name] = stored[name]
    return shapes


def header(key: str, path: Path) -> Shapes:
    """The tensors in a safetensors file, whose size is that of its header and what the header describes.

    Raises: ConfigError: it is truncated, or no safetensors file.
    """
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if num_bytes < 8 or length > min(num_bytes - 8, _LONGEST_HEADER):
                raise ValueError(f"its {num_bytes} bytes do not hold its header")
            table = json.loads(file.read(length))
        table.pop("__metadata__", None)
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in table.items()}
        end = 8 + length + max((int(entry["data_offsets"][1]) for entry in table.values()), default=0)
        if num_bytes != end:
            raise ValueError(f"it has {num_bytes} bytes, and its header says {end}")
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(key, path, error) from None
    return shapes


def damaged(key: str, path: Path, error: Exception) -> ConfigError:
    """The error of a safetensors file that cannot be read."""
    reason = one_line(error, 200) if isinstance(error, ValueError | OSError) else type(error).__name__
    return ConfigError(f"{key}: {path} cannot be read as safetensors: {reason}; fetch or save it again")
