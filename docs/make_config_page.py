"""python docs/make_config_page.py > docs/config.md

Prints the page of all configuration keys, read from the dataclasses of `mmtrain/config/`: types and
defaults from their fields, meanings from the text under each field.
"""

import ast
import dataclasses
import inspect
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from mmtrain.config import config

INTRODUCTION = """\
# Configuration

*Made by `python docs/make_config_page.py > docs/config.md` from `mmtrain/config/`; do not edit it by hand.*

A job is one TOML file. `mmtrain config --config FILE` checks it and prints it with all defaults; each run
writes the same text to `config.toml` in its dump folder.

- **Strict.** An unknown key, a wrong type, a value outside of its choices or a missing key is an error with
  the dotted name of the key. An integer is accepted where a float is asked for; nothing else is converted.
- **Bounded.** Counts and sizes are at most 2147483647, rates and other numbers 1e21, where nothing less is said;
  numbers are finite, and texts have at most 4096 characters, none of them NUL.
- **Where a file is found.** `--config` takes a path, or a bare name that is looked up in `configs/` of the
  working directory and then of the source tree.
- **`extends = "base.toml"`**, at the top of a file, names another file, relative to this one. Tables are
  merged key by key; an inline model `config` is replaced as a whole, and `[job]` is not inherited.
- **On the command line**, `--section.key=value` sets one key, after all files. The value is TOML; a string
  may be left unquoted.

Rules between sections:

- `data_parallel_replicate_degree` x `data_parallel_shard_degree` is at most `training.global_batch_size`.
- `tensor_parallel_degree` must divide the query heads, key heads, MLP width and vocabulary of the language model, and
  the heads and widths of encoder and projector unless `encoder_tensor_parallel = "data"`.
- `fsdp_reshard_after_forward = "always"` needs `data_parallel_shard_degree = 1`.
- `encoder_context_parallel = "patches"` and `encoder_tensor_parallel = "data"` need a degree above 1 on their axis.
- `tensor_parallel_rows = "whole"` needs `tensor_parallel_degree` above 1.
- Keys of `[data]` for clips (`fps`, `max_seconds`, `max_total_seconds`, `max_clips`, `video_area`, `video_aspects`,
  `video_frames`) need `[model.dit]`; those for images (`image_processor`, `min_pixels`, `max_pixels`, `blank_images`),
  sounds (`blank_audio`) and videos of conversations (`video_fps`, `video_min_frames`, `video_max_frames`,
  `video_min_pixels`, `video_max_pixels`) exclude it.
- `data.blank_audio` needs an encoder of sound; tokens of encoders differ from each other, and from
  `tokenizer.image_token` and `tokenizer.video_token`.
- `data.source` and `data.sources` exclude each other; names of sources are unique.
- `data.max_seconds` is at most `data.max_total_seconds`.
- `[model.lora]` needs a module with `trainable = "lora"`.
- The product of all degrees is the number of processes that the launcher must start.
- One of `training.steps` and `training.epochs` is set. Epochs, also those of `validation.freq` and
  `checkpoint.interval`, need one `data.source` that is not streamed; `training.epochs` and `validation.patience`
  exclude `elastic.enable`.
- `lr_scheduler.warmup_steps` is at most `training.steps`; `warmup_steps` and `warmup_ratio` exclude each other.
- `checkpoint.keep_best` names a figure that the validations have.
- At least one of encoder, projector, language model and DiT is trainable.
- `[diffusion]` and `validation.shuffled_captions` need `[model.dit]`; the latter also two clips a replica.
- `[model.dit]` goes without `[model.encoder]` and `[model.projector]`; its `text_dim` is the language model's width.
- `[model.dit]` needs `context_parallel_degree = 1`.
- `[model.vae]` needs `[model.dit]`, whose `in_channels` are the channels of its latents.
- `planner.search.eager_forwards` above 0 needs an encoder, and one of the schedules `1F1B`, `Interleaved1F1B`, `ZB-H1`,
  `ZB-H2` and `InterleavedZeroBubble`.
- `planner.search.activation_memory_gib` needs the schedule `interleave` or `ZB-AutoSchedule`; so does
  `planner.memory_limit`, unless `planner.enable` and `planner.search.memory` are on. Only one of the two limits may be
  set.
"""


def page() -> str:
    """The whole page as Markdown."""
    parts = [INTRODUCTION]
    for path, section in sections(config.Config, ""):
        doc = inspect.cleandoc(section.__doc__ or "").removeprefix(f"[{path}]").lstrip(":").strip()
        parts.append(f"## [{path}]\n")
        if doc:
            parts.append(f"{doc[0].upper()}{doc[1:]}\n")
        rows = list(_rows(section))
        if rows:
            parts.append("| key | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def sections(cls: type, path: str) -> Iterator[tuple[str, type]]:
    """(dotted name, dataclass) of every section below a dataclass, outer ones first."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        section, is_list = _section(hints[field.name])
        if section is not None:
            name = f"{path}.{field.name}" if path else field.name
            yield f"[{name}]" if is_list else name, section
            yield from sections(section, name)


def meanings(cls: type) -> dict[str, str]:
    """Key -> the text under its field, on one line; keys without one are absent."""
    (node,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(node, ast.ClassDef)
    found = {}
    for before, after in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(before, ast.AnnAssign)
            and isinstance(before.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            found[before.target.id] = " ".join(after.value.value.split())
    return found


def _rows(cls: type) -> Iterator[str]:
    hints, text = typing.get_type_hints(cls), meanings(cls)
    for field in dataclasses.fields(cls):
        if _section(hints[field.name])[0] is None:
            cells = (f"`{field.name}`", _type(hints[field.name]), _default(field), text.get(field.name, ""))
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _section(hint: Any) -> tuple[type | None, bool]:
    """(the section of a field, if it is one or a list of them; whether it is a list)."""
    (inner,) = typing.get_args(hint) if typing.get_origin(hint) is list else (_without_none(hint),)
    return inner if dataclasses.is_dataclass(inner) else None, typing.get_origin(hint) is list


def _without_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType) and type(None) in typing.get_args(hint):
        (hint,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint


def _type(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " or ".join(f"`{_toml(choice)}`" for choice in typing.get_args(hint))
    if typing.get_origin(hint) is list:
        (inner,) = typing.get_args(hint)
        return f"array of {_type(inner)}s"
    if isinstance(hint, types.UnionType):
        return " or ".join(_type(arg) for arg in typing.get_args(hint) if arg is not type(None))
    return {bool: "boolean", int: "integer", float: "float", str: "string"}.get(hint, "table")


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{_toml(field.default)}`"
    return "required" if field.default_factory is dataclasses.MISSING else f"`{_toml(field.default_factory())}`"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        short = f"{value:g}".replace("e+", "e")  # 4e14 reads better than fifteen digits
        return short if any(c in short for c in ".e") else f"{short}.0"
    return f'"{value}"' if isinstance(value, str) else repr(value)


if __name__ == "__main__":
    print(page(), end="")
