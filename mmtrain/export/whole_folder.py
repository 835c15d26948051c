"""A job's checkpoint as one folder: the whole model of transformers that its modules make together.

OUT/config.json, model*.safetensors     what the whole class's `from_pretrained` reads, and `[model] pretrained` here;
                                        names of weights are those that they were loaded with
OUT/tokenizer*, chat_template.jinja     the tokenizer with the chat template that made the prompts of training
OUT/preprocessor_config.json, ...       the image processor, with the sizes and colours that the job used, or the
                                        feature extractor of sound; generation settings as they came with the model,
                                        and the token that ends answers
OUT/adapter                             low-rank adapters, for `peft`; absent where they were merged into the weights
"""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from mmtrain.checkpoint.run_folder import StoredRun, load_module
from mmtrain.config.config import Config
from mmtrain.config.model import EncoderConfig, LanguageConfig, placeholder, projector_section, section_of
from mmtrain.data.media_readers import image_rules, make_readers
from mmtrain.data.pixels import PixelRules
from mmtrain.data.processor import Processor
from mmtrain.data.tokenizer import load_tokenizer
from mmtrain.errors import ConfigError
from mmtrain.export.adapter_folders import ExportForm, plain
from mmtrain.families.catalogue import COMPOSITES, ENCODERS
from mmtrain.modality.geometry import ImageGeometry
from mmtrain.modality.sounds import SoundRules, sound_rules
from mmtrain.modality.videos import video_rules
from mmtrain.models.chunk import VisionChunk
from mmtrain.models.fused_qkv import from_head_major, is_fused
from mmtrain.models.pretrained import stored_spelling
from mmtrain.models.unused import unused_weights
from mmtrain.models.whole import in_class, on_disk, only_encoder, whole_config, whole_model
from mmtrain.spec.composites import whole_section
from mmtrain.spec.contrast import CONTRAST
from mmtrain.spec.hub_files import PROCESSOR_FILES, find_file, processor_config, read_json
from mmtrain.spec.model_shapes import language_shape
from mmtrain.spec.module_sizes import whole_kind
from mmtrain.spec.vision_shapes import vision_shape

MERGED = ExportForm(merge_adapters=True)
_COPIED = (
    "generation_config.json",
    *PROCESSOR_FILES.values(),
    "processor_config.json",
)
"""Files that belong to a whole model, of which training changes single values at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The modules of a run as one model."""

    kind: str
    """`model_type` of the whole model."""
    weights: dict[str, Tensor]
    """Our names, with the module -> values as Hugging Face orders them; adapters are merged, or written."""


def gather(run: StoredRun, *, adapters: Path | None = None, form: ExportForm = MERGED) -> Whole:
    """The weights of a run's modules under names of one model, which its modules make (`whole_kind`).

    Args: adapters: folder for low-rank adapters, if the form does not merge them.
    """
    model = run.job.model
    kind, encoder, weights = whole_kind(model), only_encoder(model), dict[str, Tensor]()
    for module in (encoder, "language", *([CONTRAST] if model.contrast else [])):
        chunk = load_module(run, module)
        heads = chunk.shape.num_heads if isinstance(chunk, VisionChunk) else 0
        fused = chunk.adapter.fused_qkv if isinstance(chunk, VisionChunk) else ()
        for name, tensor in chunk.state_dict().items():
            weights[name] = from_head_major(tensor, heads) if is_fused(name, fused) else tensor
            if module == CONTRAST:
                weights[name] = tensor.reshape(COMPOSITES[kind].scalar)
    unused = unused_weights(model, run.job.debug.seed, encoder)
    weights = {f"{encoder}.{name}": tensor for name, tensor in unused.items()} | weights
    folder = None
    if adapters is not None:
        task = None if model.contrast else "CAUSAL_LM"
        folder = form.adapters(model.lora, model.pretrained or None, task, adapters)
    return Whole(kind=kind, weights=plain(weights, model.lora, folder, lambda name: in_class(kind, name)))


def assembled(run: StoredRun) -> PreTrainedModel:
    """The whole model of transformers with the weights of a run, adapters merged."""
    whole = gather(run)
    config = whole_config(run.job.model, _tokens(run.job, load_tokenizer(run.job.tokenizer)))
    return whole_model(config, {in_class(whole.kind, name): tensor for name, tensor in whole.weights.items()})


def export_whole(run: StoredRun, out: Path, *, form: ExportForm, max_shard_size: str) -> None:
    """Writes the folder of the whole model into `out`, which exists; adapters alone lie in `out` itself."""
    job, model, name = run.job, run.job.model, only_encoder(run.job.model)
    whole = gather(run, adapters=out if form.adapters_only else out / "adapter", form=form)
    if form.adapters_only:
        return
    processor = None if model.contrast else stored_processor(job)
    tokenizer = processor.tokenizer if processor else caption_tokenizer(job)
    sections: dict[str, EncoderConfig | LanguageConfig]
    sections = {section_of(name): model.encoders[name], "model.language": model.language}
    sources = {where: section.pretrained for where, section in sections.items() if section.weights == "pretrained"}
    sources[projector_section(name)] = model.projector_of(name).pretrained
    sources[f"model.{CONTRAST}"] = model.contrast.pretrained if model.contrast else ""
    stored = {where: stored_spelling(where, source) for where, source in sources.items() if source}
    spellings = {whole_section(where): spelling for where, spelling in stored.items() if spelling}
    tied = language_shape(model).tied
    tensors = {
        on_disk(whole.kind, name, spellings): tensor.contiguous()
        for name, tensor in form.stored(whole.weights).items()
        if not (tied and name == "language.lm_head.weight")
    }
    save_torch_state_dict(tensors, out, max_shard_size=max_shard_size, metadata={"format": "pt"})
    config = whole_config(model, _tokens(job, tokenizer))
    config.dtype = form.dtype
    config.save_pretrained(out)
    source = next((sources[where] for where in sections if stored.get(where)), "")
    _write_processor(out, job, source)
    tokenizer.save_pretrained(out)
    if processor is None:
        return
    if not (out / "generation_config.json").exists():
        GenerationConfig(pad_token_id=processor.ending.token).save_pretrained(out)
    end_as_trained(out, processor.ending.token)
    if job.tokenizer.video_token in tokenizer.get_vocab():
        _write_video_processor(out, job)
    if name_of_processor := COMPOSITES[whole.kind].processor:
        _write_token_counts(out, job, name_of_processor)
    if source and find_file("model.pretrained", source, "chat_template.json", optional=True) is not None:
        template = {"chat_template": tokenizer.chat_template}
        _write_json(out / "chat_template.json", template)


def stored_processor(job: Config) -> Processor:
    """The processor of a run; the chat template of its tokenizer is the one that made the run's prompts."""
    tokenizer = load_tokenizer(job.tokenizer, model=job.model)
    processor = Processor(tokenizer, make_readers(job, tokenizer.get_vocab()))
    tokenizer.chat_template = processor.renderer.template.text
    return processor


def caption_tokenizer(job: Config) -> Any:
    """The tokenizer of a run with two towers; no caption is longer than the tower's positions."""
    tokenizer = load_tokenizer(job.tokenizer, captions=True, model=job.model)
    tokenizer.chat_template = None
    tokenizer.model_max_length = min(tokenizer.model_max_length, language_shape(job.model).max_positions)
    return tokenizer


def end_as_trained(folder: Path, stop: int | None) -> None:
    """Lets `generate` of an exported folder stop at the token that ends answers, if its settings name others.

    Args: stop: None: there is no such token.
    """
    path = folder / "generation_config.json"
    values = read_json(str(folder), path) if path.exists() else {}
    ends = values.get("eos_token_id")
    if path.exists() and stop is not None and stop not in (ends if isinstance(ends, list) else [ends]):
        _write_json(path, values | {"eos_token_id": stop})


def _tokens(job: Config, tokenizer: Any) -> dict[str, int]:
    """Keys of a whole model's config -> ids, of the tokens that the vocabulary has."""
    image, vocabulary, encoder = job.tokenizer.image_token, tokenizer.get_vocab(), only_encoder(job.model)
    names = {
        "image_token_id": image,
        "image_token_index": image,
        "video_token_id": job.tokenizer.video_token,
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
        "audio_token_index": placeholder(encoder, job.model.encoders[encoder]),
    }
    return {key: vocabulary[token] for key, token in names.items() if token in vocabulary}


def _write_processor(out: Path, job: Config, source: str) -> None:
    """Copies the files of the image processor and of generation from the source, and writes those that it lacks."""
    for name in _COPIED if source else ():
        path = find_file("model.pretrained", source, name, optional=True)
        if path is not None:
            shutil.copyfile(path, out / name)
    whole = out / "processor_config.json"
    if whole.exists() and "chat_template" in (values := read_json(str(out), whole)):  # it comes before the tokenizer's
        _write_json(whole, {key: value for key, value in values.items() if key != "chat_template"})
    if vision_shape(job.model, name := only_encoder(job.model)).one_row:
        if not (out / PROCESSOR_FILES["image"]).exists() and not (out / "processor_config.json").exists():
            _write_config(out, "image", _feature_extractor(sound_rules(job.model, name)))
    elif not _prepares_as_trained(out, job):
        geometry, rules = image_rules(job)
        assert geometry is not None and rules is not None
        _write_config(out, "image", _preprocessor(job, geometry, rules))


def _write_config(out: Path, content: str, values: Mapping[str, Any]) -> None:
    """Writes the config of a processor. Args: content: as of `processor_config`."""
    _write_json(out / PROCESSOR_FILES[content], values)
    path, key = out / "processor_config.json", f"{content}_processor"
    if path.exists() and key in (whole := read_json(str(out), path)):  # which comes first
        _write_json(path, whole | {key: values})


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _write_token_counts(out: Path, job: Config, processor: str) -> None:
    """Writes what a processor counts the tokens of an image from. Args: processor: its class."""
    path, (geometry, _) = out / "processor_config.json", image_rules(job, only_encoder(job.model))
    select = read_json(str(out), out / "config.json")["vision_feature_select_strategy"]
    grid = geometry.grid(geometry.image_size, geometry.image_size)
    own = {
        "processor_class": processor,
        "image_token": job.tokenizer.image_token,
        "patch_size": geometry.patch_size,
        "vision_feature_select_strategy": select,
        "num_additional_image_tokens": geometry.num_tokens(grid) + (select == "default") - grid[1] * grid[2],
    }
    _write_json(path, (read_json(str(out), path) if path.exists() else {}) | own)


def _write_video_processor(out: Path, job: Config) -> None:
    """Writes the config of the Hugging Face video processor that does what the job did, which may set other limits and
    frames than the source's."""
    videos = video_rules(job.model, job.data)
    if videos is None:
        return
    values = {
        "video_processor_type": videos.processor,
        "patch_size": videos.patches.patch_size,
        "merge_size": videos.patches.merge,
        "temporal_patch_size": videos.unit,
        "size": {"shortest_edge": videos.min_pixels, "longest_edge": videos.max_pixels},
        "cap_pixels_per_frame": False,  # another default is announced
        "do_sample_frames": True,
        "fps": videos.fps,
        "min_frames": videos.min_frames,
        "max_frames": videos.max_frames,
    }
    _, rules = image_rules(job)
    assert rules is not None
    _write_config(out, "video", values | _colours(rules))


def _prepares_as_trained(out: Path, job: Config) -> bool:
    """Whether the folder has an image processor, whose sizes and colours are those of the job: it may set others."""
    if processor_config(str(out), str(out)) is None:
        return False
    data = dataclasses.replace(job.data, image_processor=str(out), min_pixels=0, max_pixels=0)
    try:
        (geometry, rules), trained = image_rules(dataclasses.replace(job, data=data)), image_rules(job)
    except ConfigError:  # a processor that no job could use, so this one took another
        return False
    assert rules is not None and trained[1] is not None
    rules, of_job = (dataclasses.replace(r, min_pixels=0, max_pixels=0) for r in (rules, trained[1]))  # in the geometry
    return (geometry, rules) == (trained[0], of_job)


def _preprocessor(job: Config, geometry: ImageGeometry, rules: PixelRules) -> dict[str, Any]:
    """The config of the Hugging Face image processor that does what this package does."""
    images = ENCODERS[vision_shape(job.model, only_encoder(job.model)).model_type].images
    assert images is not None
    colours = {"image_processor_type": images.processor, **_colours(rules)}
    side = geometry.image_size
    if geometry.layout == "packed":
        return {
            "patch_size": geometry.patch_size,
            "merge_size": geometry.merge,
            "temporal_patch_size": geometry.temporal_patch_size,
            "min_pixels": geometry.min_pixels,
            "max_pixels": geometry.max_pixels,
            **colours,
        }
    if geometry.layout == "cropped":
        edge = rules.shortest_edge or side
        sizes = {"size": {"shortest_edge": edge}, "crop_size": {"height": side, "width": side}}
        return {**sizes, **colours}
    return {"size": {"height": side, "width": side}, **colours}


def _feature_extractor(rules: SoundRules) -> dict[str, Any]:
    """The config of the Hugging Face feature extractor that does what this package does."""
    seconds = rules.seconds(rules.window_samples)
    return {
        "feature_extractor_type": rules.extractor,
        "feature_size": rules.mel_bins,
        "sampling_rate": rules.rate,
        "hop_length": rules.hop,
        "chunk_length": int(seconds) if seconds.is_integer() else seconds,
        "return_attention_mask": True,
    }


def _colours(rules: PixelRules) -> dict[str, Any]:
    return {"image_mean": list(rules.mean), "image_std": list(rules.std), "resample": int(rules.resample)}
