"""What an adapter_config.json of `peft` says: the rank and scale of each adapter, and what is not supported. Pure."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mmtrain.config.model import LoRAConfig
from mmtrain.config.toml_sections import shown
from mmtrain.errors import ConfigError

_READ = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "peft_type")
"""Keys that are read here, in addition to `init_lora_weights`."""
_WITHOUT_EFFECT = (
    # which layers: the stored names say it
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    # of the training that made them
    *("lora_dropout", "inference_mode", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    # of the program
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "runtime_config"),
    # linear layers have rows of outputs whatever this says
    "fan_in_fan_out",
    # settings of what other keys turn on
    *("megatron_core", "qalora_group_size", "ensure_weight_tying"),
)
"""Keys that do not change what stored adapters compute, whatever their value."""
_OFF: tuple[Any, ...] = (None, False, "", "none", [], {})
"""Values of all other keys with which they do nothing."""
_KEEP_BASE = (None, True, False, "gaussian", "orthogonal", "eva", "mica")
"""Values of `init_lora_weights` that leave the adapted weights as they are."""

_HARD = re.compile(r"\)[*+{]|([*+{].*){4}", re.DOTALL)
"""Patterns with which comparing a name can take exponential time, or more than the cube of its length."""


def check_settings(where: str, stored: Mapping[str, Any], lora: LoRAConfig, layers: Iterable[str]) -> None:
    """Checks that stored adapters compute what adapters of `[model.lora]` compute with the same weights.

    Args:
        where: the file, for errors. stored: its content.
        layers: names of the adapted layers in the model that `peft` adapted.
    Raises: ConfigError: another rank or scale, or a setting that is not supported.
    """
    if stored.get("peft_type", "LORA") != "LORA":
        raise ConfigError(f"{where}: peft_type = {shown(stored['peft_type'])}; only adapters of type LORA are read")
    known = {*_READ, *_WITHOUT_EFFECT, "init_lora_weights"}
    refused = [key for key, value in stored.items() if key not in known and value not in _OFF]
    if stored.get("init_lora_weights") not in _KEEP_BASE:  # the weights that they adapt are other ones than the base's
        refused.append("init_lora_weights")
    if refused:
        raise _unsupported(where, stored, refused[0], "with which adapters compute something else than LoRA does here")
    ranks, scales = zip(*(_rank_and_scale(where, stored, layer) for layer in layers), strict=True)
    if len(set(ranks)) > 1:
        raise _unsupported(where, stored, "rank_pattern", "but all adapters have one rank here, model.lora.rank")
    if len(set(scales)) > 1:
        raise _unsupported(where, stored, "alpha_pattern", "but all adapters have one scale here, model.lora.alpha")
    rank, scale = ranks[0], scales[0]
    if rank != lora.rank:
        raise ConfigError(f"{where} has r = {rank}, but model.lora.rank = {lora.rank}; set model.lora.rank = {rank}")
    if not math.isclose(scale, lora.scale, rel_tol=1e-6):
        divisor = "sqrt(model.lora.rank)" if lora.use_rslora else "model.lora.rank"
        raise ConfigError(
            f"{where} has {_scaling_text(stored)}, so its adapters are scaled by {scale:.9g}, but model.lora.alpha / "
            f"{divisor} = {lora.scale:.9g}; set model.lora.alpha = {float(f'{scale / lora.scale * lora.alpha:.9g}')}"
        )
    if bool(stored.get("use_dora")) != lora.use_dora:
        theirs = shown(bool(stored.get("use_dora")))
        raise ConfigError(
            f"{where} has use_dora = {theirs}, but model.lora.use_dora = {shown(lora.use_dora)}; set "
            f"model.lora.use_dora = {theirs}"
        )


def _rank_and_scale(where: str, stored: Mapping[str, Any], layer: str) -> tuple[int, float]:
    """The rank of a layer's adapter, and the factor of its output. Source: `LoraModel` of peft 0.21."""
    rank = _of_layer(where, stored, "r", "rank_pattern", layer)
    alpha = _of_layer(where, stored, "lora_alpha", "alpha_pattern", layer)
    if rank != int(rank):
        raise ConfigError(f"{where} has a rank of {rank} for {layer}; it is a whole number, save them again with peft")
    return int(rank), alpha / (math.sqrt(rank) if stored.get("use_rslora") else rank)


def _of_layer(where: str, stored: Mapping[str, Any], key: str, patterns_key: str, layer: str) -> float:
    """The value of a key for one layer, of which the first pattern that its name ends with decides."""
    patterns = stored.get(patterns_key) or {}
    try:
        if hard := next((pattern for pattern in patterns if _HARD.search(pattern)), None):
            raise ConfigError(
                f"{where}: {patterns_key} has the pattern {shown(hard)}, which might take hours to compare; write it "
                "without repeated groups, with at most three repetitions"
            )
        found = (v for pattern, v in patterns.items() if re.match(rf"(.*\.)?({pattern})$", layer))
        value = next(found, stored.get(key))
    except (AttributeError, TypeError, re.error):
        raise ConfigError(
            f"{where}: {patterns_key} = {shown(patterns)} is no table of patterns of names; save the adapters again "
            "with peft"
        ) from None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e9:
        raise ConfigError(
            f"{where}: {key} = {shown(value)} for {layer} is no number above 0; save the adapters again with peft"
        )
    return value


def _scaling_text(stored: Mapping[str, Any]) -> str:
    keys = ["lora_alpha", *(key for key in ("alpha_pattern", "use_rslora") if stored.get(key))]
    return ", ".join(f"{key} = {shown(stored.get(key))}" for key in keys)


def _unsupported(where: str, stored: Mapping[str, Any], key: str, why: str) -> ConfigError:
    return ConfigError(
        f"{where} has {key} = {shown(stored[key])}, {why}; merge these adapters into their base model with peft "
        "(`merge_and_unload`), and name the result in model.pretrained"
    )
