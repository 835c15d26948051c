"""The local files that a job's model and tokenizer need, checked before any process starts. Pure; no weights."""

from collections.abc import Iterator, Mapping
from math import ceil, prod
from pathlib import Path
from typing import Any

from mmtrain.config.data import TokenizerConfig
from mmtrain.config.model import (
    DitConfig,
    EncoderConfig,
    LanguageConfig,
    ModelConfig,
    VaeConfig,
    projector_section,
    section_of,
)
from mmtrain.errors import ConfigError
from mmtrain.spec.composites import check_contrast, check_embeds
from mmtrain.spec.hub_files import local_path, read_json
from mmtrain.spec.module_sizes import families
from mmtrain.spec.weight_files import STEMS, check_weight_files

MOST_GROWTH = 256
"""Characters that the steps of a tokenizer may make of one: those that are in use make fewer than ten."""
_VOCABULARIES = ("tokenizer.json", "tekken.json", "vocab.*", "*.model", "*.tiktoken", "*.vocab")
"""Names of files of which `transformers` makes a fast tokenizer needs one."""


def check_files(model: ModelConfig, tokenizer: TokenizerConfig) -> None:
    """Checks that the local folders of a job hold the weights and the tokenizer that it reads from them.

    Raises: ConfigError: weights or tokenizer are missing, damaged or refused.
    """
    towers = {section_of(name): kind for name, kind in families(model).items()} if model.reads_pairs else {}
    if model.contrast is not None:
        check_contrast(model.contrast)
    for where, source in _folders(model):
        if local_path(f"{where}.pretrained", source):
            shapes = check_weight_files(f"{where}.pretrained", source, STEMS.get(where, "model"))
            if where in towers:
                check_embeds(where, source, towers[where], shapes)
    folder = local_path("tokenizer.path", tokenizer.path) if tokenizer.path else None
    if folder:
        check_tokenizer(folder)


def _folders(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """The folders or hub ids of all weights that a job reads, each with its section."""
    sections: list[tuple[str, EncoderConfig | LanguageConfig | DitConfig | VaeConfig | None]]
    sections = [(section_of(name), encoder) for name, encoder in model.encoders.items()]
    sections += [("model.language", model.language), ("model.dit", model.dit), ("model.vae", model.vae)]
    for where, section in sections:
        if section is not None and section.pretrained and section.weights == "pretrained":
            yield where, section.pretrained
    for name in model.encoders:
        if source := model.projector_of(name).pretrained:
            yield projector_section(name), source
    if model.contrast is not None and model.contrast.pretrained:
        yield "model.contrast", model.contrast.pretrained


def check_tokenizer(folder: Path) -> None:
    """Checks the files of a tokenizer before a library reads them.

    Raises: ConfigError: there is none, or it makes so much of a text that its library would run out of memory, which
        ends the process.
    """
    if not any(file for name in _VOCABULARIES for file in folder.glob(name)):
        raise ConfigError(
            f"tokenizer.path: {folder} has no tokenizer; add the model's tokenizer.json and tokenizer_config.json, or "
            "name another folder in tokenizer.path"
        )
    if (folder / "tokenizer.json").is_file():
        check_steps(folder / "tokenizer.json")


def check_steps(path: Path) -> None:
    """Checks a tokenizer.json alone, as `check_tokenizer` does."""
    steps = read_json("tokenizer.path", path)
    for kind in ("normalizer", "pre_tokenizer", "decoder"):
        growth = _growth(steps.get(kind))
        if growth > MOST_GROWTH:
            raise ConfigError(
                f"tokenizer.path: {path} is refused: its {kind} may make {growth:.1e} characters of one, more than "
                f"{MOST_GROWTH}; take the tokenizer from the model's own authors"
            )


def _growth(step: Any) -> float:
    """The most characters that a step of a tokenizer makes of one. Of other forms than the library's it is 1."""
    if not isinstance(step, Mapping):
        return 1.0
    kind, content = step.get("type"), step.get("content", step.get("prepend"))
    if kind == "Sequence":
        inner = next((steps for key, steps in step.items() if key != "type" and isinstance(steps, list)), [])
        return prod(map(_growth, inner))
    if kind == "Prepend":
        return 1.0 + len(str(content))
    if kind == "Replace":
        pattern = step.get("pattern")
        text = pattern.get("String") if isinstance(pattern, Mapping) else None
        if isinstance(text, str) and text:
            return max(1.0, ceil(len(str(content)) / len(text)))
        return 1.0 + len(str(content))  # a regular expression may match between any two characters
    return {"ByteLevel": 2.0, "Precompiled": 16.0}.get(str(kind), 1.0)
