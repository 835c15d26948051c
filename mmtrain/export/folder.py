"""A job's checkpoint as Hugging Face folders, in one process without process groups, module by module.

OUT/language, OUT/vision     what `from_pretrained` of the real classes reads, and `pretrained = ...` here
OUT/NAME                     the same of a further encoder [model.modules.NAME]
OUT/dit                      the same of a diffusion transformer, by its class in diffusers
OUT/scheduler                the scheduler of diffusers that samples from it
OUT/*_adapter                low-rank adapters, for `peft`; absent where they were merged into the weights
OUT/projector                the projector unless its kind is `native`, for [model.projector] pretrained = ...
OUT/NAME_projector           that of a further encoder
OUT/contrast                 the parameters of the loss of two towers, for [model.contrast] pretrained = ...
OUT/README.md                what is what
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from mmtrain.checkpoint.run_folder import CheckpointStep, StoredRun, Weights, load_module, open_run
from mmtrain.config.config import Config
from mmtrain.config.model import (
    EncoderConfig,
    LanguageConfig,
    ModelConfig,
    projector_name,
    projector_section,
    section_of,
)
from mmtrain.data.chat_templates import answer_ending
from mmtrain.data.tokenizer import load_tokenizer
from mmtrain.errors import ConfigError
from mmtrain.export.adapter_folders import ExportForm, plain
from mmtrain.export.older_readers import add_older_keys
from mmtrain.export.tower_folders import export_tower
from mmtrain.export.whole_folder import caption_tokenizer, end_as_trained, export_whole
from mmtrain.families.catalogue import COMPOSITES, PROJECTORS
from mmtrain.launch.atomic_files import new_folder
from mmtrain.modality.buckets import latent_channels
from mmtrain.models.adapters import decoder
from mmtrain.models.chunk import Chunk, LanguageChunk, VisionChunk
from mmtrain.models.diffusion import make_scheduler, null_token
from mmtrain.models.dit import DitChunk, build_dit
from mmtrain.models.fused_qkv import from_head_major, is_fused
from mmtrain.models.unused import unused_weights
from mmtrain.models.whole import only_encoder
from mmtrain.spec.composites import class_name, selected_features
from mmtrain.spec.contrast import CONTRAST
from mmtrain.spec.hub_files import find_file
from mmtrain.spec.model_configs import dit_config, encoder_config, language_config
from mmtrain.spec.model_shapes import language_shape
from mmtrain.spec.module_sizes import projector_sizes, whole_kind
from mmtrain.spec.vision_shapes import vision_shape

MAX_SHARD_SIZE = "5GB"
"""Bytes of one safetensors file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The result of an export."""

    step: int
    """Step of the checkpoint."""
    folders: tuple[str, ...]
    """The folders within the exported folder."""
    model: str
    """The class that reads it; empty: it has a folder for each module."""
    num_bytes: int


def export(
    folder: Path,
    out: Path,
    *,
    step: CheckpointStep | None = None,
    weights: Weights = "trained",
    form: ExportForm = ExportForm(),  # noqa: B008  immutable
    parts: bool = False,
) -> Exported:
    """The summary of an export to `out`, which appears only when it is complete: one folder if the modules make a whole
    model of transformers (see `export_whole`), else a folder for each.

    Args:
        folder: a job's dump folder, with config.toml and checkpoints.
        step: of the checkpoint, see `open_run`; None: the newest complete one.
        form: what is written of the weights.
        parts: a folder for each module in any case.
    Raises: ConfigError: `out` exists, `folder` is no dump folder, no such checkpoint, or one of another model.
    """
    run = open_run(folder, step, weights=weights)
    model = run.job.model
    _check_form(folder, model, form)
    kind = "" if parts else whole_kind(model)
    with new_folder(out) as aside:
        if kind:
            export_whole(run, aside, form=form, max_shard_size=MAX_SHARD_SIZE)
        else:
            _export_parts(run, aside, form)
        (aside / "README.md").write_text(_readme(run, aside, out, form, kind), encoding="utf-8")
        add_older_keys(aside)
    files = [path for path in out.rglob("*") if path.is_file()]
    return Exported(
        step=run.step,
        folders=tuple(sorted(path.name for path in out.iterdir() if path.is_dir())),
        model=class_name(kind) if kind else "",
        num_bytes=sum(path.stat().st_size for path in files),
    )


def _check_form(folder: Path, model: ModelConfig, form: ExportForm) -> None:
    sections: dict[str, bool | str] = {section_of(name): s.trainable for name, s in model.cut_modules.items()}
    sections |= {projector_section(name): model.projector_of(name).trainable for name in model.encoders}
    if (form.merge_adapters or form.adapters_only) and "lora" not in sections.values():
        what, option = ("merge", "merge-adapters") if form.merge_adapters else ("write", "adapters-only")
        raise ConfigError(
            f'{folder}: no module was trained with trainable = "lora", so there is nothing to {what}; leave '
            f"--{option} out"
        )
    whole = [where for where, trainable in sections.items() if trainable is True]
    if form.adapters_only and whole:
        raise ConfigError(
            f"{folder}: {whole[0]} was trained with trainable = true, so adapters alone would leave out its weights; "
            "leave --adapters-only out"
        )


def _export_parts(run: StoredRun, aside: Path, form: ExportForm) -> None:
    """A folder for each module, in `aside`."""
    model = run.job.model
    if model.contrast is not None:
        for name in (*model.encoders, "language"):
            export_tower(run, name, aside, form=form, max_shard_size=MAX_SHARD_SIZE)
        if not form.adapters_only:
            weights = form.stored(load_module(run, CONTRAST).contrast.state_dict())
            _save_own(weights, {"loss": model.contrast.loss}, aside / CONTRAST)
            caption_tokenizer(run.job).save_pretrained(aside / "language")
        return
    _export_language(run, aside, form)
    for name in model.encoders:
        _export_encoder(run, name, aside, form)
    if form.adapters_only:
        return
    if model.dit is not None:
        _export_dit(run, aside, form)
    tokenizer = load_tokenizer(run.job.tokenizer, captions=model.dit is not None, model=model)
    if model.dit is None:
        end_as_trained(aside / "language", answer_ending(tokenizer).token)
    tokenizer.save_pretrained(aside / "language")


# --------------------------------------------------------------------------------------- the modules


def _export_encoder(run: StoredRun, module: str, out: Path, form: ExportForm) -> None:
    """An encoder and its projector."""
    model, section = run.job.model, run.job.model.encoders[module]
    chunk = load_module(run, module)
    assert isinstance(chunk, VisionChunk)
    if chunk.projector is not None:
        name = projector_name(module)
        base = model.projector_of(module).pretrained or None
        adapters = form.adapters(model.lora, base, None, out / f"{name}_adapter")
        weights = form.stored(plain(chunk.projector.state_dict(), model.lora, adapters))
        if not form.adapters_only:
            _save_own(weights, projector_sizes(model, module), out / name)
    weights = {name: _in_their_order(chunk, name, tensor) for name, tensor in chunk.vision.state_dict().items()}
    weights = plain(weights, model.lora, form.adapters(model.lora, _base(section), None, out / f"{module}_adapter"))
    if form.adapters_only:
        return
    theirs = chunk.adapter.build(encoder_config(section, section_of(module)), "sdpa")
    _fill(theirs, form.stored(unused_weights(model, run.job.debug.seed, module) | weights))
    theirs.save_pretrained(out / module, max_shard_size=MAX_SHARD_SIZE)


def _export_language(run: StoredRun, out: Path, form: ExportForm) -> None:
    section = run.job.model.language
    chunk = load_module(run, "language")
    assert isinstance(chunk, LanguageChunk)
    weights = chunk.language.state_dict()
    values = language_config(section)
    theirs: Any = chunk.adapter.build(values, "sdpa")
    theirs.config.use_cache = values.get("use_cache", True)  # was off during training
    if not chunk.has_head:  # a text encoder: the class without a head, whose names lack the first part
        prefix = f"{theirs.base_model_prefix}."
        theirs = theirs.base_model
        weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    task = "CAUSAL_LM" if chunk.has_head else None
    lora, folder = run.job.model.lora, out / "language_adapter"
    weights = plain(weights, lora, form.adapters(lora, _base(section), task, folder))
    if form.adapters_only:
        return
    _fill(theirs, form.stored(weights))
    theirs.save_pretrained(out / "language", max_shard_size=MAX_SHARD_SIZE)
    if chunk.has_head and section.pretrained:
        settings = find_file("model.language.pretrained", section.pretrained, "generation_config.json", optional=True)
        if settings is not None:
            shutil.copyfile(settings, out / "language" / "generation_config.json")


def _export_dit(run: StoredRun, out: Path, form: ExportForm) -> None:
    """The diffusion transformer and its scheduler."""
    section = run.job.model.dit
    assert section is not None
    chunk = load_module(run, "dit")
    assert isinstance(chunk, DitChunk)
    theirs = build_dit(dit_config(section))
    theirs.load_state_dict(form.stored(chunk.dit.state_dict()), assign=True, strict=True)
    theirs.save_pretrained(out / "dit", max_shard_size=MAX_SHARD_SIZE)
    make_scheduler(run.job.diffusion).save_pretrained(out / "scheduler")


def _in_their_order(chunk: Chunk, name: str, tensor: Tensor) -> Tensor:
    """The tensor with its rows in the order of Hugging Face."""
    if isinstance(chunk, VisionChunk) and is_fused(name, chunk.adapter.fused_qkv):
        return from_head_major(tensor, chunk.shape.num_heads)
    return tensor


def _base(section: EncoderConfig | LanguageConfig) -> str | None:
    return (section.pretrained if section.weights == "pretrained" else "") or None


# ------------------------------------------------------------------------------------ into their modules


def _fill(module: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    """Sets the weights of a Hugging Face module on the meta device, without a copy."""
    absent = [name for name, _ in module.named_children() if not any(k.startswith(f"{name}.") for k in weights)]
    for name in absent:  # a merger that was not trained, since the projector replaces it
        if any(True for _ in module.get_submodule(name).parameters()):
            setattr(module, name, None)
    module.load_state_dict(weights, assign=True, strict=True)


def _save_own(weights: dict[str, Tensor], sizes: Mapping[str, int | str], folder: Path) -> None:
    """Writes a module that transformers has no class for. Args: sizes: its config.json."""
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(sizes, indent=2) + "\n")


# ----------------------------------------------------------------------------------------- read me


def _readme(run: StoredRun, out: Path, final: Path, form: ExportForm, kind: str) -> str:
    """The README of the exported folder.

    Args: out: its present path. final: its final path. kind: of a whole model, or empty.
    """
    lines = _title(run, form)
    if form.adapters_only:
        return _ended(lines, [], out, final)
    if run.job.model.dit is not None:
        return _video_readme(run, lines, out, final)
    if run.job.model.contrast is not None and not kind:
        return _towers_readme(run, lines, out, final)
    return _whole_readme(run, lines, out, final, kind) if kind else _readme_of_parts(run, lines, out, final)


def _readme_of_parts(run: StoredRun, lines: list[str], out: Path, final: Path) -> str:
    """The readme of a folder for each module. Args: lines: its first lines."""
    job, reader = run.job, decoder(language_shape(run.job.model).model_type).reader
    lines = [
        *lines,
        f"- `language/`: `{_class_name(out / 'language')}` with its tokenizer; "
        f"`transformers.{reader}.from_pretrained` reads it{'' if 'Causal' in reader else ', without its head'}.",
    ]
    again = ["[model.language]", f'pretrained = "{final / "language"}"']
    for name, section in job.model.encoders.items():
        projector = job.model.projector_of(name)
        called = "the encoder" if name == "vision" else f"the encoder `{name}`"
        lines.append(f"- `{name}/`: {called}, `{_class_name(out / name)}` of transformers 5; {_features(job, name)}")
        if projector.kind != "native" and vision_shape(job.model, name).window:
            lines.append(
                "  These features come window by window, and so do the tokens that the projector makes of them."
            )
        layer, select = selected_features(section)
        again += [f"[{section_of(name)}]", f'pretrained = "{final / name}"']
        again += [f'kind = "{section.kind}"'] if name in job.model.modules else []
        again += [f'token = "{section.token}"'] if section.token else []
        again += [f"feature_layer = {layer}"] if layer else []
        again += [f'feature_select = "{select}"'] if select != "auto" else []
        again += [f"[{projector_section(name)}]", f'kind = "{projector.kind}"', f"spatial_merge = {projector.merge}"]
        again += [f"hidden_size = {projector.hidden_size}"] if projector.kind == "mlp" else []
        if projector.kind != "native":
            lines.append(
                f"- `{projector_name(name)}/`: from these features to tokens of the language model, "
                f"{PROJECTORS[projector.kind].made_by}, its sizes in `config.json`."
            )
            again.append(f'pretrained = "{final / projector_name(name)}"')
    return _ended(lines, again, out, final)


def _features(job: Config, module: str) -> str:
    """The description of which output of an exported encoder is read, and which of its parts were not trained."""
    if job.model.projector_of(module).kind == "native":
        return "its own merger makes the tokens of the language model."
    section, shape = job.model.encoders[module], vision_shape(job.model, module)
    layer, _ = selected_features(section)
    rows = "with" if shape.keeps_class_token else "without"
    origin = f"those of `{section.pretrained}`" if _base(section) else "random, as they would start a job"
    return (
        f"use its `{f'hidden_states[{layer}]' if layer else 'last_hidden_state'}`, {rows} a class token. What is "
        f"behind it in the class was not trained: blocks and norms are {origin}; a pooler or merger is left out: where "
        "the class makes one all the same, `from_pretrained` rightly reports its weights as missing."
    )


def _whole_readme(run: StoredRun, lines: list[str], out: Path, final: Path, kind: str) -> str:
    """The readme of the folder of a whole model."""
    reads = f"`transformers.{class_name(kind)}.from_pretrained` reads this folder"
    if run.job.model.contrast is not None:
        lines = [*lines, f"{reads}, and `AutoProcessor` its tokenizer and image processor."]
    else:
        lines = [
            *lines,
            f"{reads}; vLLM, too, which has this class. `mmtrain generate` answers questions about images with it.",
        ]
    again = ["[model]", f'pretrained = "{final}"']
    projector = COMPOSITES[kind].projector
    if run.job.model.encoder is not None and projector not in ("", "native"):
        again += ["[model.projector]", f'kind = "{projector}"']
    return _ended(lines, again, out, final)


def _towers_readme(run: StoredRun, lines: list[str], out: Path, final: Path) -> str:
    """The readme of two towers that make no whole model."""
    contrast = run.job.model.contrast
    assert contrast is not None
    again = list[str]()
    for name, what in ((only_encoder(run.job.model), "images"), ("language", "captions")):
        lines.append(f"- `{name}/`: the tower of {what}; `transformers.{_class_name(out / name)}` reads it.")
        again += [f"[{section_of(name)}]", f'pretrained = "{final / name}"']
    lines.append(f"- `{CONTRAST}/`: logit_scale, and logit_bias if there is one, of the loss {contrast.loss}.")
    again += ["[model.contrast]", f'loss = "{contrast.loss}"', f'pretrained = "{final / CONTRAST}"']
    return _ended(lines, again, out, final)


def _video_readme(run: StoredRun, lines: list[str], out: Path, final: Path) -> str:
    """The readme of a text-to-video model."""
    null = null_token(load_tokenizer(run.job.tokenizer, captions=True, model=run.job.model))
    section = run.job.model.dit
    assert section is not None
    pixels, vae, made_by = latent_channels(section) == 3, run.job.model.vae, ""
    if vae is not None:  # frozen, so there is nothing to export
        source = (
            f"`{vae.pretrained}`" if vae.pretrained else "[model.vae] of the run's config.toml, with its debug.seed"
        )
        made_by = f"those of the VAE of {source}, normalised."
    (scheduler,) = (json.loads(path.read_text())["_class_name"] for path in (out / "scheduler").iterdir())
    lines = [
        *lines,
        f"- `language/`: the text encoder, `{_class_name(out / 'language')}` with its tokenizer; "
        "`transformers.AutoModel.from_pretrained` reads it. Its `last_hidden_state` of a caption conditions the DiT; "
        f"for guidance, no caption is token {null}, as often as the caption has tokens.",
        "- `dit/`: `diffusers.WanTransformer3DModel.from_pretrained` reads it. Its latents are "
        + (made_by or ("pixels from -1 to 1." if pixels else "those that it was trained on.")),
        f"- `scheduler/`: `diffusers.{scheduler}.from_pretrained` reads it.",
    ]
    again = ["[model.language]", f'pretrained = "{final / "language"}"', "[model.dit]"]
    again.append(f'pretrained = "{final / "dit"}"')
    if vae is not None and vae.pretrained:
        again += ["[model.vae]", f'pretrained = "{vae.pretrained}"']
    return _ended(lines, again, out, final)


def _title(run: StoredRun, form: ExportForm) -> list[str]:
    title = run.job.job.description or "A model trained by mmtrain"
    weights = "adapters" if form.adapters_only else "weights"
    what = f"Averages of the {weights}" if run.weights == "ema" else weights.capitalize()
    return [f"# {title}", "", f"{what} after step {run.step}, {str(form.dtype).removeprefix('torch.')}.", ""]


def _ended(lines: list[str], again: list[str], out: Path, final: Path) -> str:
    """The README, with its adapters and the config for further training.

    Args: again: lines of that config. out: the folder's present path. final: its final path.
    """
    adapters = sorted(path.parent for path in out.rglob("adapter_config.json"))
    for folder in adapters:
        name = str(folder.relative_to(out))
        base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
        adapted = name.removesuffix("_adapter") if name.endswith("_adapter") else "the whole model"
        source = f", of `{base}`" if base else ""
        lines.append(
            f"- `{name}/`: low-rank adapters of {adapted}{source}, which no weights here contain; "
            f"`peft.PeftModel.from_pretrained(model, '{name}')`."
        )
    note = ["", "To train on from here:", "", "```toml", *again, "```", ""] if again else [""]
    if adapters:
        one = len(adapters) == 1 and not adapters[0].name.endswith("_adapter")
        folder = final / adapters[0].relative_to(out) if one else final
        note += [
            'Adapters go on with `trainable = "lora"` in the sections of their modules, and '
            f'`[model.lora]` of the run with `pretrained = "{folder}"`.',
            "",
        ]
    return "\n".join([*lines, *note])


def _class_name(folder: Path) -> str:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return str(values["architectures"][0])
