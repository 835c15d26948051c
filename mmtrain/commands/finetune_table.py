"""The TOML of a fine-tuning job, from what its model and its data are."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmtrain.config.config import Config, of_table
from mmtrain.config.foreign_keys import explained
from mmtrain.config.toml_sections import apply_override, dump_table, merged_tables, shown
from mmtrain.data.conversation_records import kinds_of, record_kind
from mmtrain.data.sources import Sources, open_source
from mmtrain.data.statistics import Statistics, statistics
from mmtrain.errors import ConfigError, DataError
from mmtrain.families.catalogue import COMPOSITES, LANGUAGES
from mmtrain.models.whole_files import whole_class_config
from mmtrain.spec.builders import model_spec
from mmtrain.spec.hub_files import find_file, read_json
from mmtrain.spec.model_configs import language_config
from mmtrain.spec.spec import ModelSpec

EPOCHS = 3.0
"""The epochs, unless an override says otherwise."""
_FULL_LR, _LORA_LR = 1e-5, 1e-4
"""Peak learning rates of all weights, and of adapters: usual ones of published fine-tunings."""
_LEAST_TOKENS, _MOST_TOKENS = 256, 4096
"""The limits of a microbatch's tokens, unless a sample asks for more than the least, or an override says otherwise."""
_STEP_SAMPLES = 32
"""Samples of a step, of data that are large enough for ten such steps an epoch."""
_STEPS_AN_EPOCH = 10
_HELD_OUT, _MOST_HELD_OUT = 0.1, 1000
"""Part of the samples that is held out where the data have no validation split, and the most samples."""
_NUM_ANSWERS = 8
"""Held-out questions that are answered at each validation."""
_ROOM = 0.6
"""Part of a device that weights, gradients and moments may take, so that activations have room."""
_WHOLE = tuple(name for name, whole in COMPOSITES.items() if not whole.loss)
_DECODERS = tuple(name for name, language in LANGUAGES.items() if not language.embedding)
"""Families of models that answer."""

TomlTable = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """What there is to train on."""

    count: int
    """Ranks."""
    memory_bytes: float
    """The memory of each device."""
    name: str
    is_cpu: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuningRequest:
    """What the user asked for."""

    model: str
    data: str
    out: Path
    lora: bool
    freeze: Sequence[str]
    epochs: float | None
    overrides: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuning:
    """A fine-tuning job before it runs."""

    family: str
    """`model_type` of the model."""
    spec: ModelSpec
    found: Statistics
    """The statistics of the training samples."""
    held_out: int | None
    """Samples to validate on; None: of a stream."""
    toml: str
    config: Config


def prepared(wanted: FineTuningRequest, devices: Devices) -> FineTuning:
    """The job of a model and data.

    Raises: ConfigError: the model is of a family that does not answer, or model, data and overrides do not fit.
        DataError: no sample fits.
    """
    given: TomlTable = {}
    with explained("mmtrain finetune"):
        for override in wanted.overrides:
            apply_override(given, override)
    family, start = _of_model(wanted.model)
    start = merged_tables(start, {"data": {"source": wanted.data, "too_long": "skip"}})
    start = merged_tables(start, _trainable(start, wanted, given))
    seq_len = given.get("training", {}).get("seq_len", 2**20)
    probe = merged_tables(merged_tables(start, given), {"training": {"seq_len": seq_len, "global_batch_size": 1}})
    probe["training"] |= {"steps": 1, "epochs": 0.0}
    for section in ("validation", "checkpoint"):  # what is given of them goes with what is written below
        probe.pop(section, None)
    start["data"] |= _held_out(of_table(probe, "mmtrain finetune"))
    probe["data"] |= {**start["data"], **given.get("data", {})}
    job = of_table(probe, "mmtrain finetune")
    found, spec = statistics(job, job.data.split), model_spec(job.model)
    held_out = _count(job)
    table = merged_tables(start, _training(wanted, job, found, spec, devices, held_out))
    table = _without_doubles(merged_tables(table, given), given, wanted)
    config = of_table(table, "mmtrain finetune")
    _check_fits(config, found)
    return FineTuning(
        family=family, spec=spec, found=found, held_out=held_out, toml=_toml(table, wanted), config=config
    )


def _of_model(source: str) -> tuple[str, TomlTable]:
    """The `model_type` and the sections of a job that starts from the model.

    Raises: ConfigError: of a family that does not answer.
    """
    from mmtrain.inference.answering import whole_table

    path = find_file("MODEL", source, "config.json")
    assert path is not None
    kind = str(read_json("MODEL", path).get("model_type"))
    if kind in _WHOLE:
        return kind, whole_table(source, path.parent, whole_class_config(path.parent))
    if kind in _DECODERS:
        return kind, {"model": {"language": {"pretrained": source}}, "tokenizer": _tokenizer(source)}
    raise ConfigError(
        f"finetune: {source} has model_type = {shown(kind)}, a family that finetune does not take; name a model of "
        f"one of {', '.join((*_WHOLE, *_DECODERS))}"
    )


def _tokenizer(source: str) -> TomlTable:
    """[tokenizer] of a language model, any of whose special tokens stands for the images that it never sees."""
    from mmtrain.config.data import TokenizerConfig
    from mmtrain.data.tokenizer import read_tokenizer

    added = read_tokenizer(source).get_added_vocab()
    usual = TokenizerConfig().image_token
    return {"path": source} | ({} if usual in added or not added else {"image_token": next(iter(added))})


def _trainable(start: TomlTable, wanted: FineTuningRequest, given: TomlTable) -> TomlTable:
    """The sections that say what trains: all, or adapters of the language model; frozen parts do not."""
    model = start["model"]
    encoders = {name: f"modules.{name}" for name in model.get("modules", {})}
    if "pretrained" in model and not encoders:
        encoders = {"vision": "encoder"}
    parts = {**encoders, **({"projector": "projector"} if encoders else {}), "language": "language"}
    unknown = [name for name in wanted.freeze if name not in parts]
    if unknown:
        raise ConfigError(f"finetune: --freeze {unknown[0]}; this model has {', '.join(parts)}")
    table: TomlTable = {}
    for name, key in parts.items():
        frozen = name in wanted.freeze or (wanted.lora and name != "language")
        value = False if frozen else "lora" if wanted.lora else True
        key = f"modules.{next(iter(encoders))}.projector" if name == "projector" and "vision" not in encoders else key
        section = table
        for word in key.split("."):
            section = section.setdefault(word, {})
        section["trainable"] = value
    if wanted.lora and "language" in wanted.freeze:
        raise ConfigError("finetune: --lora adapts the language model, and --freeze language freezes it; leave one out")
    return {"model": table}


def _held_out(job: Config) -> TomlTable:
    """The keys of [data] that say what is validated on: the data's own split, or a part of the training split."""
    data = job.data
    if data.validation_part or data.sources or data.streaming:
        return {}
    kind = record_kind(kinds_of(job.model))
    try:
        open_source(data, data.validation_split, kind)
    except ConfigError:
        count = open_source(data, data.split, kind).num_samples
        assert count is not None, "it is no stream"
        if count < 2:
            raise DataError(
                f"finetune: {data.source} has {count} samples, but it needs two at least: one to train on, and one to "
                "validate on; add some"
            ) from None
        part = max(min(_HELD_OUT, _MOST_HELD_OUT / count), math.ceil(10_000 / count) / 10_000)
        return {"validation_part": round(part, 4)}
    return {}


def _count(job: Config) -> int | None:
    """Samples to validate on."""
    counts = Sources(job.data, job.data.validation_split, record_kind(kinds_of(job.model))).num_samples
    return None if None in counts else sum(count or 0 for count in counts)


def _training(
    wanted: FineTuningRequest, job: Config, found: Statistics, spec: ModelSpec, devices: Devices, held_out: int | None
) -> TomlTable:
    """All sections but model, tokenizer and data."""
    layout = _layout(spec, devices)
    replicas = layout.get("data_parallel_shard_degree", 1)
    samples = found.num_samples or _STEP_SAMPLES * _STEPS_AN_EPOCH
    wished = max(min(_STEP_SAMPLES, samples // _STEPS_AN_EPOCH), 1)
    seq_len = _seq_len(job, found, wished / replicas)
    a_bin = max(seq_len / max(found.mean, 1.0), 1.0)
    bins = max(round(wished / a_bin / replicas), 1) * replicas
    bins = max(bins, min(layout.get("pipeline_parallel_degree", 1) * replicas, samples))
    validations = math.ceil((held_out or 1) / (a_bin * bins))
    table: TomlTable = {
        "job": {"description": f"{wanted.model} fine-tuned on {wanted.data}", "dump_folder": str(wanted.out)},
        "training": {"epochs": wanted.epochs or EPOCHS, "seq_len": seq_len, "global_batch_size": bins},
        "optimizer": {
            "lr": _LORA_LR if wanted.lora else _FULL_LR,
            "beta2": 0.999,
            "weight_decay": 0.0 if wanted.lora else 0.01,
        },
        "lr_scheduler": {"warmup_ratio": 0.05, "decay_type": "cosine"},
        "parallelism": layout,
        "validation": {
            "enable": True,
            "freq": "1 epoch",
            "steps": max(validations, 1),
            "generate": min(_NUM_ANSWERS, held_out or _NUM_ANSWERS),
        },
        "checkpoint": {"interval": "1 epoch", "keep_best": "loss"},
    }
    if not devices.is_cpu:
        table["training"] |= {"mixed_precision_param": "bfloat16", "master_weights": "trained"}
        table["planner"] = {"enable": True, "memory_limit": "90%"}
    return table


def _seq_len(job: Config, found: Statistics, samples: float) -> int:
    """Tokens of a microbatch: for the longest sample, or for so many samples, up to what the model and memory allow."""
    window = int(language_config(job.model.language).get("max_position_embeddings") or _MOST_TOKENS)
    longest = found.lengths[-1] if found.lengths else 0
    wished = max(longest, min(samples * found.mean, _MOST_TOKENS), _LEAST_TOKENS)
    return min(math.ceil(wished / 64) * 64, window, max(_MOST_TOKENS, _LEAST_TOKENS))


def _layout(spec: ModelSpec, devices: Devices) -> TomlTable:
    """The degrees: as few pipeline ranks as hold the model, and sharded replicas on the other devices."""
    if devices.count == 1:
        return {}
    degrees = [d for d in range(1, devices.count + 1) if devices.count % d == 0]
    state = state_bytes(spec) / devices.count
    gathered = 2.0 * spec.num_params
    fitting = [d for d in degrees if state + gathered / d <= _ROOM * devices.memory_bytes]
    depth = min(fitting, default=devices.count)
    return {"pipeline_parallel_degree": depth, "data_parallel_shard_degree": devices.count // depth}


def state_bytes(spec: ModelSpec) -> float:
    """Bytes of float32 weights, gradients and moments of a job, of all ranks together."""
    return 4.0 * spec.num_params + spec.num_trained_params * (4.0 + 8.0)


def _without_doubles(table: TomlTable, given: Mapping[str, Any], wanted: FineTuningRequest) -> TomlTable:
    """The table without keys that stand for the same as one that the user gave."""
    for section, one, other in (("training", "steps", "epochs"), ("lr_scheduler", "warmup_steps", "warmup_ratio")):
        if one in given.get(section, {}) and other not in given[section] and not (other == "epochs" and wanted.epochs):
            table[section] = {key: value for key, value in table[section].items() if key != other}
    return {section: keys for section, keys in table.items() if keys}


def _check_fits(config: Config, found: Statistics) -> None:
    """Refuses data of which no sample can be trained on. Raises: DataError: and why."""
    most = config.training.seq_len
    if found.fits(most):
        return
    if not found.lengths:
        why = f"none can be read; the first: {found.reason}" if found.unreadable else "there is none"
        raise DataError(
            f"finetune: of {config.data.description} no sample fits: {why}; correct them or name other data"
        )
    raise DataError(
        f"finetune: of {config.data.description} no sample fits: they have {found.lengths[0]:,} tokens or more, but "
        f"training.seq_len = {most:,}; raise it, as far as the model's window allows, or set a smaller data.max_pixels"
    )


def _toml(table: TomlTable, wanted: FineTuningRequest) -> str:
    lines = [
        f"# Made by `mmtrain finetune {wanted.model} {wanted.data}`; runs again, or elsewhere, with `mmtrain train`."
    ]
    body: list[str] = []
    dump_table(table, (), body)
    return "\n".join([*lines, *body]) + "\n"
