"""A job's checkpoint as Hugging Face folders, in one process without process groups, module by module.

OUT/language, OUT/vision     what `from_pretrained` of the real classes reads, and `pretrained = ...` here
OUT/*_adapter                low-rank adapters, for `peft`; absent where they were merged into the weights
OUT/projector                the projector of kind `mlp`, for [model.projector] pretrained = ...
OUT/README.md                what is what
"""

import json
import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from mmtrain import config
from mmtrain.checkpoint import complete_steps
from mmtrain.config import Config, EncoderConfig, LanguageConfig, LoRAConfig
from mmtrain.data.tokenizer import load_tokenizer
from mmtrain.errors import ConfigError
from mmtrain.models.chunk import Chunk, LanguageChunk, VisionChunk, build_chunk
from mmtrain.models.families import encoder_config, find_file, language_config
from mmtrain.models.fused_qkv import from_head_major, is_fused
from mmtrain.models.linears import adapted_linears
from mmtrain.models.pretrained import projector_sizes
from mmtrain.models.shapes import vision_shape
from mmtrain.models.spec_builders import model_spec
from mmtrain.models.trainable import adapter_names, is_adapter, plain_name, stored_adapter_name, target_pattern

MAX_SHARD_SIZE = "5GB"
"""Of one safetensors file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export wrote."""

    step: int
    """Of the checkpoint."""
    folders: tuple[str, ...]
    """Inside of the exported folder."""
    num_bytes: int


def export(run: Path, out: Path, *, step: int | None = None, merge_adapters: bool = False) -> Exported:
    """What was written to `out`, which appears only when it is complete.

    Args:
        run: a job's dump folder, with config.toml and checkpoints.
        step: of the checkpoint; None: the newest complete one.
        merge_adapters: add W + (alpha / rank) B A to the weights instead of writing adapters beside them.
    Raises: ConfigError: `out` exists, `run` is no dump folder, no such checkpoint, or one of another model.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already; remove it or name another folder")
    if not (run / "config.toml").is_file():
        raise ConfigError(f"{run} holds no config.toml; name the job.dump_folder of a run")
    job = config.load(run / "config.toml")
    sections = (job.model.encoder, job.model.language)
    if merge_adapters and not any(section is not None and section.trainable == "lora" for section in sections):
        raise ConfigError(f'{run}: no module was trained with trainable = "lora", so there is nothing to merge')
    chosen = _choose(run / job.checkpoint.folder, step)
    source = run / job.checkpoint.folder / f"step-{chosen}"
    aside = out.with_name(out.name + ".tmp")
    shutil.rmtree(aside, ignore_errors=True)  # of an export that was killed
    aside.mkdir(parents=True)
    try:
        for module in ("language", "vision") if job.model.encoder is not None else ("language",):
            _export_module(job, module, source, aside, merge_adapters)
        tokenizer = load_tokenizer(job.tokenizer, captions=job.model.dit is not None)
        tokenizer.save_pretrained(aside / "language")
        (aside / "README.md").write_text(_readme(job, chosen, aside, out), encoding="utf-8")
        os.replace(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    files = [path for path in out.rglob("*") if path.is_file()]
    return Exported(
        step=chosen,
        folders=tuple(sorted(path.name for path in out.iterdir() if path.is_dir())),
        num_bytes=sum(path.stat().st_size for path in files),
    )


def _choose(folder: Path, step: int | None) -> int:
    steps = complete_steps(folder)
    if not steps:
        raise ConfigError(f"{folder} has no complete checkpoint; train with checkpoint.enable = true")
    if step is not None and step not in steps:
        raise ConfigError(f"--step {step}: {folder} has {', '.join(f'step-{s}' for s in steps)}; name one of these")
    return steps[-1] if step is None else step


# ---------------------------------------------------------------------------------------- one module


def _export_module(job: Config, module: str, source: Path, out: Path, merge_adapters: bool) -> None:
    model = job.model
    spec = model_spec(model)
    chunk = build_chunk(model, spec, module, (0, len(spec.module(module).layers)), device="cpu")
    chunk.requires_grad_(False)
    _load(chunk, module, source)
    section: EncoderConfig | LanguageConfig
    if isinstance(chunk, VisionChunk):
        assert model.encoder is not None
        section, values, ours = model.encoder, encoder_config(model.encoder), chunk.vision
        if chunk.projector is not None:
            _save_projector(chunk, out / "projector")
    else:
        assert isinstance(chunk, LanguageChunk)
        section, values, ours = model.language, language_config(model.language), chunk.language
    weights = {name: _in_their_order(chunk, name, tensor) for name, tensor in ours.state_dict().items()}
    adapters = {name: tensor for name, tensor in weights.items() if is_adapter(name)}
    if adapters and merge_adapters:
        _merge(weights, adapters, model.lora)
    elif adapters:
        pattern = target_pattern(adapted_linears(model, module), chunk.host.blocks)
        _save_adapters(adapters, pattern, model.lora, section, module, out / f"{module}_adapter")
    theirs = chunk.host.build(values, "sdpa")
    if module == "language":
        theirs.config.use_cache = values.get("use_cache", True)  # was off for training
    _fill(theirs, {plain_name(name): tensor for name, tensor in weights.items() if name not in adapters})
    theirs.save_pretrained(out / module, max_shard_size=MAX_SHARD_SIZE)
    if module == "language" and section.pretrained:
        settings = find_file("model.language", section.pretrained, "generation_config.json", optional=True)
        if settings is not None:
            shutil.copyfile(settings, out / module / "generation_config.json")


def _load(chunk: Chunk, module: str, source: Path) -> None:
    """Fills a whole module from a checkpoint, in place."""
    tied = isinstance(chunk, LanguageChunk) and chunk.shape.tied
    # A tied head is the embedding, and is stored once.
    tensors = {
        f"model.{name}": tensor
        for name, tensor in chunk.state_dict().items()
        if not (tied and name == "language.lm_head.weight")
    }
    stored = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
    prefixes = ("model.vision.", "model.projector.") if module == "vision" else ("model.language.",)
    problems = [f"it has no {name}" for name in tensors if name not in stored]
    problems += [f"this one has no {n}" for n in sorted(stored) if n.startswith(prefixes) and n not in tensors]
    for name, tensor in tensors.items():
        size = tuple(getattr(stored.get(name), "size", tensor.shape))
        if size != tuple(tensor.shape):
            problems.append(f"{name} has shape {size} there and {tuple(tensor.shape)} here")
    if problems:
        raise ConfigError(
            f"{source} is not of the model in config.toml: {problems[0]}"
            + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")
            + "; restore the config.toml of the run that saved it"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")  # one process is what we want
        dcp.load(tensors, checkpoint_id=source, no_dist=True)


def _in_their_order(chunk: Chunk, name: str, tensor: Tensor) -> Tensor:
    """The tensor with its rows as Hugging Face orders them."""
    if isinstance(chunk, VisionChunk) and is_fused(name, chunk.host.fused_qkv):
        return from_head_major(tensor, chunk.shape.num_heads)
    return tensor


def _merge(weights: dict[str, Tensor], adapters: dict[str, Tensor], lora: LoRAConfig) -> None:
    """Adds each adapter to the weight that it adapts, in place."""
    for name in [n for n in weights if n not in adapters and plain_name(n) != n and n.endswith(".weight")]:
        down, up = (adapters[adapter] for adapter in adapter_names(name))
        weights[name].add_(up @ down, alpha=lora.alpha / lora.rank)


def _fill(module: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    """Gives a Hugging Face module on the meta device its weights, without a copy."""
    absent = [name for name, _ in module.named_children() if not any(k.startswith(f"{name}.") for k in weights)]
    for name in absent:  # a merger that was not trained, since the projector is our own
        if any(True for _ in module.get_submodule(name).parameters()):
            setattr(module, name, None)
    module.load_state_dict(weights, assign=True, strict=True)


def _save_projector(chunk: VisionChunk, folder: Path) -> None:
    assert chunk.projector is not None
    folder.mkdir()
    save_file(chunk.projector.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(projector_sizes(chunk.projector), indent=2) + "\n")


def _save_adapters(
    adapters: dict[str, Tensor],
    pattern: str,
    lora: LoRAConfig,
    section: EncoderConfig | LanguageConfig,
    module: str,
    folder: Path,
) -> None:
    """A folder for `PeftModel.from_pretrained`."""
    from peft import LoraConfig

    base = section.pretrained if section.weights == "pretrained" else ""
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=pattern,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM" if module == "language" else None,
        base_model_name_or_path=base or None,
        inference_mode=True,
    )
    folder.mkdir()
    settings.save_pretrained(folder)
    tensors = {stored_adapter_name(name): tensor.contiguous() for name, tensor in adapters.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


# ----------------------------------------------------------------------------------------- read me


def _readme(job: Config, step: int, out: Path, final: Path) -> str:
    """What is what in the exported folder. Args: out: where it is now. final: where it will be."""
    lines = [
        f"# {job.job.description or 'A model trained by mmtrain'}",
        "",
        f"Weights after step {step}, float32.",
        "",
        f"- `language/`: `{_class_name(out / 'language')}` with its tokenizer; "
        "`transformers.AutoModelForCausalLM.from_pretrained` reads it.",
    ]
    again = ["[model.language]", f'pretrained = "{final / "language"}"']
    if job.model.encoder is not None:
        projector = job.model.projector
        made = (
            "its own merger makes the tokens of the language model."
            if projector.kind == "native"
            else "use its `last_hidden_state`, without a class token; a pooler or merger of its own was not trained "
            "and is left out."
        )
        lines.append(f"- `vision/`: the encoder, `{_class_name(out / 'vision')}`; {made}")
        if projector.kind == "mlp" and vision_shape(job.model).window:
            lines.append(
                "  These features come window by window, and so do the tokens that the projector makes of them."
            )
        again += ["[model.encoder]", f'pretrained = "{final / "vision"}"', "[model.projector]"]
        again += [f'kind = "{projector.kind}"', f"spatial_merge = {projector.spatial_merge}"]
        if projector.kind == "mlp":
            lines.append(
                "- `projector/`: from these features to tokens of the language model, "
                "`mmtrain.models.projector.Projector`, its sizes in `config.json`."
            )
            again += [f"hidden_size = {projector.hidden_size}", f'pretrained = "{final / "projector"}"']
    adapters = [module for module in ("language", "vision") if (out / f"{module}_adapter").is_dir()]
    for module in adapters:
        lines.append(
            f"- `{module}_adapter/`: low-rank adapters, which the weights of `{module}/` do not contain; "
            f"`peft.PeftModel.from_pretrained(model, '{module}_adapter')`."
        )
    note = "To train on from here" + (" (without the adapters; --merge-adapters keeps them):" if adapters else ":")
    return "\n".join([*lines, "", note, "", "```toml", *again, "```", ""])


def _class_name(folder: Path) -> str:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return str(values["architectures"][0])
