"""The partition of one module as a string, such as `Et*3|t*4|t*4|t*3,L`: the layers of each chunk.

Symbols: `E` the first layer (embedding), `t` a block, `N` the norm after an encoder's blocks, `P` its projector, `L`
the language model's head with its norm and loss; `V`, only in logs, a whole VAE. Where the vocabulary is divided over
the pipeline ranks, `E` is what takes the embedding's results in, and `L` the norm alone: one layout fits both.
`|` ends a chunk, `x*3` repeats a symbol, `(tt|)*3` a group; commas and spaces are ignored. Chunks come in forward
order: the first segment on ranks 0 .. P-1, then the next one.

Source: Megatron Core's `--pipeline-model-parallel-layout`. It has no encoder symbols, but `m` for multi-token
prediction, and allows empty chunks; here every chunk has a layer.
"""

import re
from collections.abc import Sequence
from itertools import groupby

from mmtrain.errors import ConfigError
from mmtrain.spec.spec import ModuleSpec

_SYMBOLS = {"embed": "E", "inputs": "E", "norm": "N", "projector": "P", "pool": "P", "head": "L", "encode": "V"}
_LAYERS = "Et" + "".join(symbol for symbol in dict.fromkeys(_SYMBOLS.values()) if symbol not in "EV")
_REPEATED = re.compile(rf"(?:([{_LAYERS}|])(?=\*)|\(([{_LAYERS}|]*)\))(?:\*([0-9]{{1,9}}))?(?![*0-9])")
"""A symbol with its `*3`, or an innermost group with or without a repetition."""
_MOST = 100_000
"""Largest number of symbols after repetition; more must be a mistake."""


def chunk_bounds(text: str, module: ModuleSpec, where: str) -> list[tuple[int, int]]:
    """The layers (start, end) of each chunk that a layout names.

    Args: where: name of the key, for errors.
    Raises: ConfigError: the text is no layout, has an empty chunk, or its layers differ from those of the module.
    """
    chunks = _expand(text, where).split("|")
    for index, chunk in enumerate(chunks):
        if not chunk:
            raise ConfigError(f"{where} = {text!r}: chunk {index} has no layer; give every chunk at least one")
    named, expected = "".join(chunks), _symbols(module)
    if named != expected:
        raise ConfigError(
            f"{where} = {text!r} has the layers {_compress(named)}, but the module has {_compress(expected)}; name "
            "each layer once, in this order"
        )
    ends = [len("".join(chunks[: index + 1])) for index in range(len(chunks))]
    return list(zip([0, *ends], ends, strict=False))


def show_layout(module: ModuleSpec, bounds: Sequence[tuple[int, int]]) -> str:
    """The layout string of chunks with these layers (start, end)."""
    return "|".join(_compress(_symbols(module)[low:high]) for low, high in bounds)


def _symbols(module: ModuleSpec) -> str:
    """One of each layer; the last one of a module that predicts tokens is its head, or the norm before all heads."""
    symbols = "".join("t" if layer.is_block else _SYMBOLS[layer.name] for layer in module.layers)
    return symbols[:-1] + "L" if module.consumes == "documents" else symbols


def _compress(symbols: str) -> str:
    runs = [(symbol, len(list(run))) for symbol, run in groupby(symbols)]
    return "".join(symbol if count == 1 else f"{symbol}*{count}" for symbol, count in runs)


def _expand(text: str, where: str) -> str:
    """The symbols and bars of a layout without repetitions and groups."""
    expanded = re.sub(r"[,\s]", "", text)
    while match := _REPEATED.search(expanded):
        unit, count = match[1] or match[2] or "", int(match[3] or 1)
        if len(expanded) + len(unit) * count > _MOST:
            raise ConfigError(f"{where} = {text!r} has more than {_MOST} layers")
        expanded = expanded[: match.start()] + unit * count + expanded[match.end() :]
    for symbol in expanded:
        if symbol not in f"{_LAYERS}|":
            raise ConfigError(
                f"{where} = {text!r}: {symbol!r} is unknown or out of place; write for example Et*3|(t*4|)*2t*3,L with "
                f"the layers {', '.join(_LAYERS)}"
            )
    return expanded
