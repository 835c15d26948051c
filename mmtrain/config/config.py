"""The typed configuration of one job, and a strict TOML loader for it.

One frozen dataclass a TOML section; under each field its meaning and unit. Loading never changes a
value and never ignores one: an unknown key, a wrong type, a value outside of its choices or a
missing key is refused with its dotted path. Nothing here imports torch.

All sections, and the rules among them, are in this one file: it is what a user reads to learn what can be said.
"""

import dataclasses
import difflib
import math
import os
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mmtrain.config.memory_amount import MemoryAmount
from mmtrain.config.toml_sections import apply_override, build, dump_table, read_with_bases, shown, to_dict
from mmtrain.config.topology import MeshShape
from mmtrain.errors import ConfigError
from mmtrain.schedule.library.names import MEMORY_BOUNDED_SCHEDULES, ScheduleName


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """[job]: what this run is and where its files go."""

    description: str = ""
    """Title of the run's page and of what is exported; a file that extends this one does not inherit it."""
    dump_folder: str = "outputs"
    """Folder for the resolved config, checkpoints, metrics and traces; made if absent."""

    def __post_init__(self) -> None:
        _not_empty("job", self, "dump_folder")


Trainable = Literal[True, False, "lora"]

MOST_SEGMENTS = 1024
"""Of one module."""
MOST_WORKERS = 128
"""Processes that prepare the batches of one replica."""
MOST_SECONDS = 10_000_000
"""Of any wait: four months."""
MOST_RANKS = 2**16
"""Along one axis of the mesh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """[model.encoder]: the vision encoder. Leave the table out to train a language model alone."""

    pretrained: str = ""
    """Hugging Face id or local folder; its config.json decides the class. Or give `config`."""
    config: dict[str, Any] = field(default_factory=dict)
    """Inline Hugging Face config with its `model_type`; the weights are then random."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """With `pretrained`: load its weights, or take only its shape."""
    trainable: Trainable = True
    """true: train it; false: keep it fixed; "lora": train low-rank adapters of it, see [model.lora]. The projector
    has its own switch."""
    num_segments: int = 0
    """K: the module is cut into pipeline_parallel_degree x K chunks; 0: as planner.partition says."""
    pipeline_layout: str = ""
    """Layers of each chunk in the manner of Megatron's layouts, "Et*3|t*4|t*4|t*3,L", see docs/models.md; P x K
    chunks, which also sets K. Empty: chunks of equal work."""
    sub_microbatch_size: int = 0
    """Images in one sub-microbatch; a microbatch with N images runs as ceil(N / size). 0: the smallest number with 95 %
    of the best efficiency, by planner.profile or planner.hardware; without these, as many as take no longer than the
    language model takes for a full microbatch."""

    def __post_init__(self) -> None:
        _check_source("model.encoder", self)
        _at_most("model.encoder", self, num_segments=MOST_SEGMENTS)
        _at_least("model.encoder", self, num_segments=0, sub_microbatch_size=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorConfig:
    """[model.projector]: from encoder features to the language model's width."""

    kind: Literal["mlp", "native"] = "mlp"
    """mlp: merge spatial_merge x spatial_merge neighbours, two linear layers. native: the encoder's own merger."""
    spatial_merge: int = 2
    """Neighbouring features along each side that become one token; native requires the encoder's value."""
    hidden_size: int = 0
    """Width between the two linear layers of `mlp`; 0: the merged width."""
    pretrained: str = ""
    """Hugging Face id or local folder of an exported projector of kind `mlp`; empty: random weights."""
    trainable: Literal[True, False] = True
    """Whether the projector's parameters train."""

    def __post_init__(self) -> None:
        _at_most("model.projector", self, spatial_merge=1024)
        _at_least("model.projector", self, spatial_merge=1, hidden_size=0)
        if self.pretrained and self.kind == "native":
            raise ConfigError(
                f'model.projector.pretrained = {self.pretrained!r} has no effect with kind = "native", whose weights '
                "come with the encoder; remove it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageConfig:
    """[model.language]: the language model."""

    pretrained: str = ""
    """Hugging Face id or local folder; its config.json decides the class. Or give `config`."""
    config: dict[str, Any] = field(default_factory=dict)
    """Inline Hugging Face config with its `model_type`; the weights are then random."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """With `pretrained`: load its weights, or take only its shape."""
    trainable: Trainable = True
    """true: train it; false: keep it fixed; "lora": train low-rank adapters of it, see [model.lora]."""
    attention_mask: Literal["causal", "image_bidirectional", "prefix"] = "causal"
    """Inside of each document: causal; or also both ways inside of each image; or before the first answer."""
    num_segments: int = 0
    """K: the module is cut into pipeline_parallel_degree x K chunks; 0: as planner.partition says. In a mixed
    partition, chunks of all modules on each rank; 0: as few as the schedule needs."""
    pipeline_layout: str = ""
    """Layers of each chunk in the manner of Megatron's layouts, "Et*3|t*4|t*4|t*3,L", see docs/models.md; P x K
    chunks, which also sets K. Empty: chunks of equal work."""

    def __post_init__(self) -> None:
        _check_source("model.language", self)
        _at_most("model.language", self, num_segments=MOST_SEGMENTS)
        _at_least("model.language", self, num_segments=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """[model.lora]: low-rank adapters (arXiv:2106.09685, by `peft`) of the modules with trainable = "lora"."""

    rank: int = 16
    """Rows of the first and columns of the second matrix of an adapter."""
    alpha: float = 32.0
    """An adapter's output is scaled by alpha / rank."""
    target_modules: list[str] = field(default_factory=list)
    """Last names of the linear layers that get an adapter; empty: all linear layers of the blocks."""

    def __post_init__(self) -> None:
        _at_most("model.lora", self, alpha=1e6)
        _at_least("model.lora", self, rank=1, alpha=0.0)
        if self.alpha == 0:
            raise ConfigError("model.lora.alpha = 0.0; it must be above 0, or adapters change nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class DitConfig:
    """[model.dit]: the diffusion transformer of a text-to-video model; [model.language] encodes its prompts."""

    pretrained: str = ""
    """Hugging Face id or local folder of the transformer alone; its config.json decides the shape. Or give `config`."""
    config: dict[str, Any] = field(default_factory=dict)
    """Inline config with `model_type = "wan"` and the keys of diffusers' WanTransformer3DModel; `text_dim` is the width
    of the text encoder. The weights are then random."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """With `pretrained`: load its weights, or take only its shape."""
    trainable: Trainable = True
    """true: train it; false: keep it fixed; "lora" is refused for now."""
    num_segments: int = 0
    """K: the module is cut into pipeline_parallel_degree x K chunks; 0: as planner.partition says."""
    pipeline_layout: str = ""
    """Layers of each chunk in the manner of Megatron's layouts, "Et*3|t*4|t*4|t*3,L", see docs/models.md; P x K
    chunks, which also sets K. Empty: chunks of equal work."""
    sub_microbatch_size: int = 0
    """Clips in one sub-microbatch; a microbatch with N clips runs as ceil(N / size), each with a work of the text
    encoder for its own prompts. 0: all clips of the microbatch."""

    def __post_init__(self) -> None:
        _check_source("model.dit", self, example="wan")
        _at_most("model.dit", self, num_segments=MOST_SEGMENTS)
        _at_least("model.dit", self, num_segments=0, sub_microbatch_size=0)
        if self.trainable == "lora":
            raise ConfigError('model.dit.trainable = "lora": the DiT has no adapters yet; set true or false')


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeConfig:
    """[model.vae]: the frozen VAE that makes the latents of a text-to-video model from frames. Leave the table out if
    the data hold latents, or the DiT reads pixels."""

    pretrained: str = ""
    """Hugging Face id or local folder of the VAE alone; its config.json decides the class. Or give `config`."""
    config: dict[str, Any] = field(default_factory=dict)
    """Inline config with `model_type = "autoencoder_kl"` (each frame by itself) or "autoencoder_kl_wan" (1 + 4 k frames
    become 1 + k) and the keys of diffusers' class of that name; the weights are then random."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """With `pretrained`: load its weights, or take only its shape."""

    def __post_init__(self) -> None:
        _check_source("model.vae", self, example="autoencoder_kl_wan")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """[model]: the modality modules."""

    language: LanguageConfig
    encoder: EncoderConfig | None = None
    dit: DitConfig | None = None
    vae: VaeConfig | None = None
    projector: ProjectorConfig = field(default_factory=ProjectorConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionConfig:
    """[diffusion]: what a text-to-video model learns to predict, from what."""

    prediction: Literal["flow", "epsilon", "v"] = "flow"
    """flow: of x = (1 - t) data + t noise the velocity, noise - data (rectified flow, arXiv:2209.03003). epsilon, v: of
    x = a data + s noise, cosine schedule (arXiv:2102.09672), the noise, or a noise - s data (arXiv:2202.00512)."""
    timestep_sampling: Literal["uniform", "logit_normal"] = "logit_normal"
    """How t in (0, 1) is drawn for each clip; logit_normal: the logistic function of a normal number
    (arXiv:2403.03206)."""
    logit_mean: float = 0.0
    """Mean of that normal number; above 0: more noise."""
    logit_std: float = 1.0
    """Its standard deviation."""
    shift: float = 1.0
    """s: t becomes s t / (1 + (s - 1) t), in training and sampling; above 1: more noise, for many tokens a clip. flow
    alone."""
    caption_dropout: float = 0.1
    """Part of the clips whose caption is hidden, so that sampling can be guided (arXiv:2207.12598)."""

    def __post_init__(self) -> None:
        _at_least("diffusion", self, caption_dropout=0.0)
        if not abs(self.logit_mean) <= 100:
            raise ConfigError(f"diffusion.logit_mean = {self.logit_mean}; it must be from -100 to 100")
        for name, most in (("logit_std", 10.0), ("shift", 1000.0)):
            if not 0 < getattr(self, name) <= most:
                raise ConfigError(f"diffusion.{name} = {getattr(self, name)}; it must be above 0 and at most {most:g}")
        for name, default in (("logit_mean", 0.0), ("logit_std", 1.0)):
            if self.timestep_sampling == "uniform" and getattr(self, name) != default:
                value = getattr(self, name)
                raise ConfigError(
                    f'diffusion.{name} = {value} has no effect with timestep_sampling = "uniform"; remove it'
                )
        if self.caption_dropout >= 1:
            raise ConfigError(
                f"diffusion.caption_dropout = {self.caption_dropout}; it must be below 1, or no caption is ever read"
            )
        if self.shift != 1 and self.prediction != "flow":
            raise ConfigError(
                f'diffusion.shift = {self.shift} has no effect with prediction = "{self.prediction}", whose schedule '
                "is fixed; remove it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """[tokenizer]"""

    path: str = ""
    """Hugging Face id or local folder of a tokenizer; empty: the small one that ships with mmtrain, for charts or, with
    [model.dit], for captions."""
    image_token: str = "<|image_pad|>"
    """The token that stands for one image feature; it must be in the vocabulary."""

    def __post_init__(self) -> None:
        _not_empty("tokenizer", self, "image_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """[data]: where samples come from and what happens to bad ones."""

    source: str
    """Hugging Face dataset id, a folder, or a .parquet / .jsonl file, with `messages` and `images` columns; with
    [model.dit] `caption` and one of `frames`, `latents`, `video`."""
    split: str = "train"
    """Split to train on."""
    validation_split: str = "validation"
    """Split to validate on."""
    streaming: bool = False
    """Read without an index; needs shuffle = false, since a shuffle buffer cannot be resumed exactly."""
    shuffle: bool = True
    """A new deterministic order each epoch."""
    on_error: Literal["raise", "skip"] = "raise"
    """A sample that cannot be read (corrupt image, images and tokens that disagree): stop, or drop it and count it."""
    too_long: Literal["raise", "skip", "truncate"] = "raise"
    """A sample (or caption) of more than training.seq_len tokens: stop, drop and count it, or cut its end (text-only
    samples and captions)."""
    num_workers: int = 1
    """Background processes that prepare batches; 0: in the training process."""
    prefetch: int = 2
    """Batches kept ready by each worker."""
    image_processor: str = ""
    """Hugging Face id or folder of an image processor; empty: the encoder's default processor class."""
    min_pixels: int = 0
    """Smallest image area after resizing (native-resolution encoders); 0: the processor's value."""
    max_pixels: int = 0
    """Largest image area after resizing (native-resolution encoders); 0: the processor's value."""
    max_media_bytes: int = 2**30
    """Largest encoded image or file of latents, bytes, and largest array in one; a larger one is a bad sample."""
    max_decoded_pixels: int = 2**26
    """Largest image or frame before resizing, in pixels; a larger one is a bad sample. Decoding takes about 8 bytes a
    pixel. At most 178956970, where Pillow stops; it warns from half of that on."""
    blank_images: bool = False
    """Replace the content of every image by grey: a control that shows what the images are worth."""
    fps: float = 16.0
    """Frames a second that clips are sampled to; of latents, frames a second that they are."""
    source_fps: float = 0.0
    """Frames a second of records without `fps`; 0: as data.fps says, so that their frames are taken as they are."""
    max_seconds: float = 16.0
    """Longest clip; what is longer is cut at its end."""
    max_total_seconds: float = 16.0
    """All clips of one microbatch together."""
    max_clips: int = 8
    """Clips of one microbatch."""
    video_area: int = 65536
    """Pixels of one frame, about: frames are resized to sizes of this area, multiples of the DiT's patch."""
    video_aspects: list[str] = field(default_factory=lambda: ["1:1", "4:3", "3:4", "16:9", "9:16"])
    """Width to height of these sizes; a clip goes to the nearest one, cropped at its middle."""
    video_frames: list[int] = field(default_factory=list)
    """Numbers of frames that clips are cut to, multiples of the DiT's patch; a clip goes to the longest one that it
    fills. Empty: the longest clip, and 3/4, 1/2, 3/8, 1/4, 3/16, ... of it."""

    def __post_init__(self) -> None:
        if not self.source:
            raise ConfigError("data.source: is empty; name a dataset id, folder or file")
        _not_empty("data", self, "split", "validation_split")
        _at_most("data", self, num_workers=MOST_WORKERS, prefetch=1024)
        _at_least("data", self, num_workers=0, prefetch=1, min_pixels=0, max_pixels=0)
        _at_least("data", self, max_clips=1, video_area=1, max_decoded_pixels=1)
        if self.max_media_bytes < 1:
            raise ConfigError(f"data.max_media_bytes = {self.max_media_bytes}; it must be at least 1")
        for name, least, most in (("fps", 0.001, 1000.0), ("max_seconds", 0.001, 86400.0)):
            if not least <= getattr(self, name) <= most:
                raise ConfigError(f"data.{name} = {getattr(self, name)}; it must be from {least} to {most:g}")
        if self.source_fps and not 0.001 <= self.source_fps <= 1000:
            raise ConfigError(f"data.source_fps = {self.source_fps}; it must be from 0.001 to 1000, or 0 for data.fps")
        _at_most("data", self, max_total_seconds=1e6)
        if self.max_decoded_pixels > 178_956_970:
            raise ConfigError(f"data.max_decoded_pixels = {self.max_decoded_pixels}; it must be at most 178956970")
        if self.max_seconds > self.max_total_seconds:
            raise ConfigError(
                f"data.max_seconds = {self.max_seconds} is above data.max_total_seconds = {self.max_total_seconds}: "
                "such a clip fits into no microbatch; lower the first or raise the second"
            )
        if not self.video_aspects:
            raise ConfigError('data.video_aspects is empty; write ["1:1"] for squares alone')
        for aspect in self.video_aspects:
            sides = aspect.split(":")
            if len(sides) != 2 or not all(side.isdecimal() and len(side) <= 4 and int(side) for side in sides):
                raise ConfigError(
                    f"data.video_aspects names {shown(aspect)}; write width:height in whole numbers of at most four "
                    'digits, as "16:9"'
                )
        if any(count < 1 for count in self.video_frames):
            raise ConfigError(f"data.video_frames = {shown(self.video_frames)}; a number of frames is at least 1")
        if self.streaming and self.shuffle:
            raise ConfigError(
                "data.streaming = true with data.shuffle = true: a streaming shuffle buffer is refilled on "
                "resume and would lose and repeat samples; set data.shuffle = false or data.streaming = false"
            )
        if self.max_pixels and self.max_pixels < self.min_pixels:
            raise ConfigError(
                f"data.max_pixels = {self.max_pixels} is below data.min_pixels = {self.min_pixels}; raise it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """[training]"""

    steps: int
    """Optimizer steps of the whole job."""
    seq_len: int
    """Tokens of one packed microbatch, image tokens included; with [model.dit], of the longest caption."""
    global_batch_size: int
    """Packed microbatches of one step over all data-parallel replicas."""
    max_norm: float = 1.0
    """Gradient norm above which gradients are scaled down; 0: never."""
    mixed_precision_param: Literal["float32", "bfloat16"] = "float32"
    """Dtype that FSDP2 computes in; master weights stay float32."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the gradient reduction."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A loss or gradient norm that is NaN or infinite: stop before the optimizer step, or skip that step."""
    attention_backend: Literal["auto", "sdpa", "flex"] = "auto"
    """sdpa: scaled-dot-product attention block by block. flex: FlexAttention, on CUDA. auto: flex on CUDA where a mask
    is not a plain one, else sdpa."""
    enable_cpu_offload: bool = False
    """Keep sharded parameters, gradients and optimizer state in host memory (FSDP2)."""

    def __post_init__(self) -> None:
        _at_most("training", self, seq_len=2**24, global_batch_size=2**20)
        _at_least("training", self, steps=1, seq_len=2, global_batch_size=1, max_norm=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """[optimizer]: decoupled weight decay on matrices; norms, biases and embeddings are not decayed."""

    name: Literal["AdamW"] = "AdamW"
    """Update rule."""
    lr: float = 8e-4
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decay of matrices, times the learning rate."""
    implementation: Literal["for-loop", "foreach", "fused"] = "foreach"
    """Kernel of torch's optimizer."""

    def __post_init__(self) -> None:
        _at_most("optimizer", self, lr=1e6, eps=1e6, weight_decay=1e6)
        _at_least("optimizer", self, lr=0.0, beta1=0.0, beta2=0.0, eps=0.0, weight_decay=0.0)
        for name in ("beta1", "beta2"):
            if getattr(self, name) >= 1:
                raise ConfigError(f"optimizer.{name} = {getattr(self, name)}; it must be below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class LRSchedulerConfig:
    """[lr_scheduler]: linear warm-up, stable part, decay."""

    warmup_steps: int = 0
    """Steps from near 0 to the peak."""
    decay_type: Literal["cosine", "linear", "sqrt"] = "cosine"
    """Shape of the decay."""
    decay_ratio: float = 1.0
    """Part of the steps after warm-up over which the rate decays; 0: it stays at the peak."""
    min_lr_factor: float = 0.0
    """Rate at the end, as a fraction of the peak."""

    def __post_init__(self) -> None:
        _at_least("lr_scheduler", self, warmup_steps=0, decay_ratio=0.0, min_lr_factor=0.0)
        for name in ("decay_ratio", "min_lr_factor"):
            if getattr(self, name) > 1:
                raise ConfigError(f"lr_scheduler.{name} = {getattr(self, name)}; it is a fraction, at most 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismConfig:
    """[parallelism]: the degree of each mesh axis, and the schedule."""

    data_parallel_replicate_degree: int = 1
    """Replicas that hold whole copies of the (sharded) parameters: HSDP's outer axis."""
    data_parallel_shard_degree: int = 1
    """Ranks over which FSDP2 shards parameters, gradients and optimizer state."""
    context_parallel_degree: int = 1
    """Ranks that divide the tokens of each microbatch, and its images."""
    context_parallel_split: Literal["causal", "balanced"] = "balanced"
    """Which tokens a rank takes. causal: two mirrored pieces of the sequence. balanced: blocks by unmasked work."""
    context_parallel_block_size: int = 128
    """Tokens of a block of the balanced split."""
    encoder_context_parallel: Literal["images", "patches"] = "images"
    """images: each context-parallel rank encodes whole images. patches: all ranks share each image's patches
    (native-resolution encoders), for images too large for one rank."""
    tensor_parallel_degree: int = 1
    """Ranks that divide each layer's heads, inner columns and the vocabulary, and between layers the rows."""
    encoder_tensor_parallel: Literal["shard", "data"] = "shard"
    """shard: the encoder's layers are divided like the language model's. data: each tensor-parallel rank holds the
    whole encoder and encodes its part of the images."""
    fsdp_reshard_after_forward: Literal["step", "always"] = "step"
    """step: parameters are gathered once a step. always: before each use, and freed after it (an encoder only where
    its ranks share each image); needs data_parallel_shard_degree = 1, since replicas with different plans cannot
    agree on an order of gathers."""
    pipeline_parallel_degree: int = 1
    """P: pipeline ranks."""
    pipeline_parallel_schedule: ScheduleName = "interleave"
    """Order of forwards and backwards, see docs/schedules.md. interleave: DIP's greedy dual queues over the work
    graph. 1F1B: one forward, one backward. The zero-bubble and V-shaped schedules split backwards in two halves."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name.endswith("_degree") and not 1 <= value <= MOST_RANKS:
                raise ConfigError(f"parallelism.{f.name} = {value}; a degree is at least 1 and at most {MOST_RANKS}")
        _at_least("parallelism", self, context_parallel_block_size=1)

    @property
    def mesh_shape(self) -> MeshShape:
        """The degrees as a mesh."""
        return MeshShape(
            pp=self.pipeline_parallel_degree,
            dp_replicate=self.data_parallel_replicate_degree,
            dp_shard=self.data_parallel_shard_degree,
            cp=self.context_parallel_degree,
            tp=self.tensor_parallel_degree,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCheckpointConfig:
    """[activation_checkpoint]: what all blocks do with their activations, whatever the batch."""

    mode: Literal["none", "selective", "full", "ops", "offload"] = "none"
    """none: keep all, unless the planner chooses (planner.memory under a memory limit). full: recompute each block.
    selective: recompute every block but its matrix products and attention. ops: recompute all of a block but the
    operations in save_ops. offload: activations wait in host memory."""
    save_ops: list[str] = field(default_factory=list)
    """With mode = "ops": names of torch operations whose results are kept, as in "aten.mm"."""

    def __post_init__(self) -> None:
        if bool(self.save_ops) != (self.mode == "ops"):
            raise ConfigError(
                f'activation_checkpoint.mode = "{self.mode}" with save_ops = {self.save_ops}: mode "ops", and no '
                'other, takes a list of operations to keep; without any, it is mode "full"'
            )


MEMORY_STRATEGIES = ("keep", "selective", "recompute", "offload")
"""What a block may do with its activations."""
Strategy = Literal["anneal", "mcts", "random", "dfs", "first"]
"""How the planner searches orders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """[planner]: how the model is cut and each iteration planned, and the device that costs are counted on."""

    enable: bool = False
    """Search a better plan for every batch, beside the step before; else each iteration has the order of
    parallelism.pipeline_parallel_schedule."""
    partition: Literal["search", "dip", "mixed-parameters", "mixed-latency"] = "search"
    """How modules are cut whose num_segments is 0 and that have no pipeline_layout, see docs/partition.md. search: the
    numbers of segments with the shortest simulated iterations, or one chain of equal time if that is shorter by far,
    all modules are open and planner.hardware or a memory_limit says what a device holds; dip: as many passes as the
    module is slower than the fastest one; mixed-*: one chain of all modules, cut into stages of equal parameters or
    equal time."""
    sub_microbatch: bool = True
    """Cut the images of a microbatch into works of their own size; else they are one work."""
    interleave: bool = True
    """Order the works of all modules on each rank by the planner; else the order is that of
    parallelism.pipeline_parallel_schedule, and the planner chooses memory alone."""
    reorder: bool = True
    """Search the order of microbatches; else the first come first."""
    split_backward: bool = True
    """Let the planner split backwards into input and weight halves."""
    memory: bool = True
    """Under a memory limit, choose for each stage and work what its blocks do, among memory_strategies; else, and
    without a limit, all do what [activation_checkpoint] says. It is left alone where that mode is not none."""
    memory_strategies: list[str] = field(default_factory=lambda: ["keep", "selective", "recompute"])
    """What a block may do with its activations: keep; selective and recompute, as in [activation_checkpoint]; offload
    (to host memory; on a CPU that is a copy, and saves nothing)."""
    memory_limit: str = ""
    """What a rank may take of its device's memory in all: "72GiB", "500MB", or a part as "90%" (of a CPU: of the
    machine's memory, shared by its ranks); empty: no limit. Parameters, gradients, optimizer state, the process itself
    and memory_margin are subtracted; activations get the rest, see docs/memory.md."""
    memory_margin: float = 0.05
    """Part of memory_limit that is left for what the plan does not count: temporary tensors, fragments. It grows by
    itself after a step that took more than memory_limit."""
    strategy: Strategy = "anneal"
    """How orders are searched; first: not at all."""
    budget_evaluations: int = 1000
    """Plans tried for an iteration; 0: no limit."""
    budget_s: float = 0.0
    """Seconds of search; 0: no limit. Plans then depend on the machine's speed."""
    threads: int = 0
    """Threads of the search on each rank that searches; 0: half of the cores, shared by the ranks of the machine.
    Plans do not depend on it unless budget_s ends the search."""
    distributed: bool = False
    """Every rank of a replica searches with a seed of its own, and the best plan counts; else the first rank alone."""
    patience_s: float = 60.0
    """Seconds that a step waits for its plan, then it runs the first plan, in the order of
    parallelism.pipeline_parallel_schedule; under a memory limit that this cannot keep, of interleave."""
    flops_per_s: float = 4e14
    """Achieved floating-point operations a second of one rank; only ratios matter to an order."""
    p2p_latency_s: float = 2e-5
    """Fixed part of one transfer between pipeline ranks, seconds."""
    p2p_bytes_per_s: float = 2.5e10
    """Bandwidth between pipeline ranks."""
    host_bytes_per_s: float = 2.5e10
    """Bandwidth between device and host memory, for memory strategy offload."""
    activation_memory_gib: float = 0.0
    """GiB that activations alone may take on one rank, for schedules `interleave` and `ZB-AutoSchedule`; 0: no limit.
    Instead of memory_limit, not beside it."""
    hardware: str = ""
    """Accelerator or cluster that costs are simulated on, as `h800` or `h800x16`, or a TOML file; empty: FLOPs over
    flops_per_s."""
    profile: str = ""
    """File that `mmtrain profile` wrote: costs are what it measured, whatever `hardware` says; empty: none."""

    def __post_init__(self) -> None:
        _at_most("planner", self, p2p_latency_s=3600.0, budget_s=MOST_SECONDS, patience_s=MOST_SECONDS, threads=1024)
        _at_least("planner", self, p2p_latency_s=0.0, activation_memory_gib=0.0, budget_evaluations=0, budget_s=0.0)
        _at_least("planner", self, threads=0, patience_s=0.0, flops_per_s=1.0, p2p_bytes_per_s=1.0)
        _at_least("planner", self, host_bytes_per_s=1.0)
        if self.enable and self.strategy != "first" and not self.budget_evaluations and not self.budget_s:
            raise ConfigError(
                "planner.budget_evaluations = 0 and planner.budget_s = 0 let the search go on for ever; set one of them"
            )
        for how in self.memory_strategies:
            if how not in MEMORY_STRATEGIES:
                raise ConfigError(
                    f"planner.memory_strategies names {shown(how)}, which does not exist; choose of "
                    f"{', '.join(MEMORY_STRATEGIES)}"
                )
        if not self.memory_strategies:
            raise ConfigError(
                'planner.memory_strategies is empty; write ["keep"] to let all blocks keep their activations'
            )
        if not 0 <= self.memory_margin < 1:
            raise ConfigError(f"planner.memory_margin = {self.memory_margin}; it must be at least 0 and below 1")
        if self.memory_limit:
            MemoryAmount.parse("planner.memory_limit", self.memory_limit)
            if self.activation_memory_gib:
                raise ConfigError(
                    f'planner.memory_limit = "{self.memory_limit}" and planner.activation_memory_gib = '
                    f"{self.activation_memory_gib} are two limits of one memory; remove the second"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationConfig:
    """[validation]: loss and answer accuracy on held-out samples, through the pipeline."""

    enable: bool = False
    """Validate at all."""
    freq: int = 50
    """Steps between validations; there is also one before the first step and one after the last."""
    steps: int = 4
    """Batches of training.global_batch_size microbatches in one validation."""
    shuffled_captions: bool = False
    """With [model.dit]: also the loss with each clip under the caption of another; it should be higher."""

    def __post_init__(self) -> None:
        _at_least("validation", self, freq=1, steps=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """[checkpoint]: sharded checkpoints of model, optimizer, schedule, loader and random state."""

    enable: bool = False
    """Save, and resume from what is there."""
    folder: str = "checkpoint"
    """Folder inside of job.dump_folder."""
    interval: int = 500
    """Steps between checkpoints; there is also one after the last step."""
    keep_latest_k: int = 10
    """Older checkpoints are removed; 0: keep all."""
    load_step: int = -1
    """Step to resume from; -1: the newest one that is whole, if there is any. Later ones are renamed aside."""
    verify: Literal["auto", "required", "off"] = "auto"
    """Whether files are compared with the manifest (size, SHA-256) before they are read, also by `mmtrain export` and
    `sample`. auto: if there is one, else a warning; required: a checkpoint without one is refused; off: no."""
    async_mode: Literal["disabled", "async"] = "disabled"
    """async: write in the background while training goes on."""

    def __post_init__(self) -> None:
        _not_empty("checkpoint", self, "folder")
        _at_least("checkpoint", self, interval=1, keep_latest_k=0, load_step=-1)
        if self.keep_latest_k == 1:
            raise ConfigError(
                "checkpoint.keep_latest_k = 1 would leave no complete checkpoint while one is replaced; "
                "set 0 (keep all) or at least 2"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """[metrics]"""

    log_freq: int = 1
    """Steps between log lines and tensorboard points; metrics.jsonl has every step."""
    enable_tensorboard: bool = True
    """Write tensorboard files."""
    save_tb_folder: str = "tb"
    """Folder inside of job.dump_folder."""
    trace_freq: int = 0
    """Steps between timelines written as Chrome / Perfetto traces; 0: never."""
    timeline_freq: int = 100
    """Steps between images of the measured beside the planned timeline, in tensorboard and in RUN/timelines, where
    `mmtrain report` finds them; one of the last step as well. 0: never."""
    progress_bar: bool = True
    """A bar below the log when standard error is a terminal."""
    peak_flops: float = 0.0
    """Peak FLOP/s of one device, the MFU's denominator; 0: that of known accelerators, by name. Of others, and of a
    CPU, no MFU is shown then, only FLOP/s."""

    def __post_init__(self) -> None:
        _not_empty("metrics", self, "save_tb_folder")
        _at_least("metrics", self, log_freq=1, trace_freq=0, timeline_freq=0, peak_flops=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommConfig:
    """[comm]: process groups."""

    timeout_seconds: int = 300
    """A rank that waits longer for another one ends the job, and names the rank that does not answer. It holds for
    every process group; set it above the slowest thing that one rank does alone."""
    share_device: bool = False
    """Ranks of a machine may share its CUDA devices, in turns. They talk over gloo and through host memory, since NCCL
    refuses two ranks on one device: to try a layout on fewer devices, not to train."""

    def __post_init__(self) -> None:
        _at_most("comm", self, timeout_seconds=MOST_SECONDS)
        _at_least("comm", self, timeout_seconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugConfig:
    """[debug]"""

    seed: int = 0
    """Seed of weights, data order and every other random choice."""
    deterministic: bool = False
    """Deterministic kernels only; an operation that has none raises."""
    check_plans: bool = False
    """Prove each plan free of deadlock under three models of the transport before it runs."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"debug.seed = {self.seed}; it must be at least 0 and below 2**63")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One job: every section of its TOML file."""

    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    job: JobConfig = field(default_factory=JobConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    @property
    def data_encoder(self) -> bool:
        """Whether tensor-parallel ranks hold whole encoders and divide the images."""
        section = self.parallelism
        divided = section.encoder_tensor_parallel == "data" and section.tensor_parallel_degree > 1
        return divided and self.model.encoder is not None

    @property
    def regathered(self) -> frozenset[str]:
        """Modules whose parameters FSDP2 gathers before each use, not once a step.

        Not an encoder whose ranks take different images: one that has none would not gather, and the others wait.
        """
        section = self.parallelism
        if section.fsdp_reshard_after_forward == "step":
            return frozenset()
        divided = section.context_parallel_degree > 1 and section.encoder_context_parallel == "images"
        return frozenset({"language"} if divided or self.data_encoder else {"language", "vision"})


def uses_fsdp(shape: MeshShape, training: TrainingConfig, *, data_encoder: bool = False) -> bool:
    """Whether chunks are sharded by FSDP2: where ranks hold equal parameters and work on different data, or for the
    sake of its mixed precision or offload.

    Args: data_encoder: tensor-parallel ranks hold whole encoders and work on different images.
    """
    low_precision = "bfloat16" in (training.mixed_precision_param, training.mixed_precision_reduce)
    spread = shape.dp * shape.cp * (shape.tp if data_encoder else 1) > 1
    return spread or low_precision or training.enable_cpu_offload


def check(config: Config) -> None:
    """Refuses sections that do not fit together; changes nothing.

    Raises: ConfigError: the first rule that is broken, with the values and what to change.
    """
    parallelism = config.parallelism
    dp = parallelism.mesh_shape.dp
    if config.training.global_batch_size % dp:
        raise ConfigError(
            f"training.global_batch_size = {config.training.global_batch_size} microbatches cannot be shared "
            f"equally by {dp} data-parallel replicas; make it a multiple of {dp}"
        )
    if config.training.seq_len < parallelism.context_parallel_degree:
        raise ConfigError(
            f"training.seq_len = {config.training.seq_len} tokens cannot be divided by "
            f"parallelism.context_parallel_degree = {parallelism.context_parallel_degree} ranks; lower the degree"
        )
    if config.training.steps < config.lr_scheduler.warmup_steps:
        raise ConfigError(
            f"lr_scheduler.warmup_steps = {config.lr_scheduler.warmup_steps} is more than "
            f"training.steps = {config.training.steps}; lower it"
        )
    if config.checkpoint.load_step >= 0 and not config.checkpoint.enable:
        raise ConfigError(
            f"checkpoint.load_step = {config.checkpoint.load_step}, but checkpoint.enable = false; set it to true"
        )
    modules: list[LanguageConfig | EncoderConfig | DitConfig] = [config.model.language]
    modules += [module for module in (config.model.encoder, config.model.dit) if module is not None]
    projector = config.model.encoder is not None and config.model.projector.trainable
    if not projector and not any(module.trainable for module in modules):
        raise ConfigError("model: every module has trainable = false, so there is nothing to train; change one")
    if config.model.lora != LoRAConfig() and not any(module.trainable == "lora" for module in modules):
        raise ConfigError('[model.lora] is set, but no module has trainable = "lora"; set one, or remove the section')
    if parallelism.fsdp_reshard_after_forward == "always" and parallelism.data_parallel_shard_degree > 1:
        raise ConfigError(
            'parallelism.fsdp_reshard_after_forward = "always" with data_parallel_shard_degree = '
            f"{parallelism.data_parallel_shard_degree}: these ranks share parameters but run different plans, so they "
            'would gather them in different orders and wait for each other forever; set "step", or a shard degree of '
            "1 (context parallelism still shards, and data_parallel_replicate_degree adds replicas)"
        )
    _check_encoder_parallelism(config)
    _check_data(config)
    _check_dit(config)
    _check_partition(config)
    if config.planner.enable and config.planner.patience_s >= config.comm.timeout_seconds:
        raise ConfigError(
            f"planner.patience_s = {config.planner.patience_s} is not below comm.timeout_seconds = "
            f"{config.comm.timeout_seconds}: while one replica waits for its plan, the others wait for that replica, "
            "and would stop the job; lower the first or raise the second"
        )
    _check_memory_limit(config)


def _check_memory_limit(config: Config) -> None:
    """Refuses a limit that nobody would keep: neither the planner, which chooses memory, nor the schedule."""
    section, schedule = config.planner, config.parallelism.pipeline_parallel_schedule
    if schedule in MEMORY_BOUNDED_SCHEDULES:
        return
    bounded = " and ".join(map(repr, MEMORY_BOUNDED_SCHEDULES))
    chooses = config.activation_checkpoint.mode == "none" and len(section.memory_strategies) > 1
    if section.memory_limit and section.enable and section.memory and not (section.interleave or chooses):
        raise ConfigError(
            f'planner.memory_limit = "{section.memory_limit}" with planner.interleave = false: the orders are those of '
            f'"{schedule}", which has its own rule of memory, and activation_checkpoint.mode = '
            f'"{config.activation_checkpoint.mode}" with planner.memory_strategies = {section.memory_strategies} '
            "leaves no choice of memory either. Set planner.interleave = true, mode none and more strategies, or one "
            f"of the schedules {bounded}"
        )
    if section.memory_limit and not (section.enable and section.memory):
        switch = "enable" if not section.enable else "memory"
        raise ConfigError(
            f'planner.memory_limit = "{section.memory_limit}" with planner.{switch} = false is kept by '
            f'parallelism.pipeline_parallel_schedule = {bounded} alone; "{schedule}" has its own rule of memory. '
            f"Set planner.{switch} = true, or one of these schedules, or remove the limit"
        )
    if section.activation_memory_gib:
        raise ConfigError(
            f"planner.activation_memory_gib = {section.activation_memory_gib} is honoured by "
            f"parallelism.pipeline_parallel_schedule = {bounded} alone; "
            f'"{schedule}" bounds its memory by its own rule. Remove one of the two'
        )


VIDEO_KEYS = (
    "fps",
    "source_fps",
    "max_seconds",
    "max_total_seconds",
    "max_clips",
    "video_area",
    "video_aspects",
    "video_frames",
)
"""Keys of [data] that only clips follow."""
IMAGE_KEYS = ("image_processor", "min_pixels", "max_pixels", "blank_images")
"""Keys of [data] that only images of conversations follow."""


def _check_data(config: Config) -> None:
    """Refuses keys of the data that this kind of job would ignore."""
    video = config.model.dit is not None
    default = DataConfig(source=config.data.source)
    for name in IMAGE_KEYS if video else VIDEO_KEYS:
        value = getattr(config.data, name)
        if value != getattr(default, name):
            why = "a job with [model.dit] reads video clips" if video else "a job without [model.dit] reads no clips"
            raise ConfigError(f"data.{name} = {shown(value)} has no effect: {why}; remove it")


def _check_partition(config: Config) -> None:
    """Refuses to cut modules by themselves where all are cut as one chain."""
    how = config.planner.partition
    if not how.startswith("mixed"):
        return
    encoder = config.model.encoder
    keys: list[tuple[str, str | int]] = [("model.language.pipeline_layout", config.model.language.pipeline_layout)]
    if encoder is not None:
        keys += [
            ("model.encoder.num_segments", encoder.num_segments),
            ("model.encoder.pipeline_layout", encoder.pipeline_layout),
        ]
    if config.model.dit is not None:
        keys += [
            ("model.dit.num_segments", config.model.dit.num_segments),
            ("model.dit.pipeline_layout", config.model.dit.pipeline_layout),
        ]
    for key, value in keys:
        if value:
            raise ConfigError(
                f'planner.partition = "{how}" cuts all modules as one chain, but {key} = {value!r} cuts a module by '
                'itself; remove it, or set planner.partition = "search"'
            )


def _check_dit(config: Config) -> None:
    """Refuses what does not go with a text-to-video model."""
    model = config.model
    _check_caption_control(config)
    if model.dit is None:
        if model.vae is not None:
            raise ConfigError("[model.vae] is set, but there is no [model.dit] that reads its latents; add one")
        if config.diffusion != DiffusionConfig():
            raise ConfigError("[diffusion] is set, but there is no [model.dit], which it is about; remove the section")
        return
    if model.encoder is not None:
        raise ConfigError(
            "[model.dit] and [model.encoder] are both set, but a text-to-video model reads prompts and latents alone; "
            "remove one of the two"
        )
    if model.projector != ProjectorConfig():
        raise ConfigError("[model.projector] has no effect with [model.dit], which projects the text itself; remove it")
    if model.language.attention_mask != "causal":
        raise ConfigError(
            f'model.language.attention_mask = "{model.language.attention_mask}" has no effect with [model.dit]: the '
            "text encoder reads prompts, without images or answers; remove it"
        )
    if config.parallelism.fsdp_reshard_after_forward == "always":
        raise ConfigError(
            'parallelism.fsdp_reshard_after_forward = "always" with [model.dit]: a block of the DiT runs once for each '
            'clip, and would gather its parameters as often; set "step"'
        )
    if config.parallelism.context_parallel_degree > 1:
        raise ConfigError(
            f"parallelism.context_parallel_degree = {config.parallelism.context_parallel_degree} with [model.dit]: the "
            "frames of a clip are not divided yet; set it to 1, and use tensor, pipeline or data parallelism"
        )


def _check_caption_control(config: Config) -> None:
    """Refuses a control that would not be done, or could show nothing."""
    if not config.validation.shuffled_captions:
        return
    key = "validation.shuffled_captions = true"
    if config.model.dit is None:
        raise ConfigError(f"{key}, but there is no [model.dit], so there is no caption; remove it")
    if config.data.max_clips == 1 and config.training.global_batch_size == config.parallelism.mesh_shape.dp:
        raise ConfigError(
            f"{key}, but a replica has one clip a step (data.max_clips = 1, training.global_batch_size = "
            f"{config.training.global_batch_size} over as many replicas), so there is no other caption; remove it or "
            "raise one of the two"
        )


def _check_encoder_parallelism(config: Config) -> None:
    """Refuses ways to divide the encoder that do not fit the degrees."""
    section = config.parallelism
    if config.model.encoder is None:
        for key, default in (("encoder_context_parallel", "images"), ("encoder_tensor_parallel", "shard")):
            if getattr(section, key) != default:
                raise ConfigError(
                    f'parallelism.{key} = "{getattr(section, key)}", but there is no [model.encoder]; remove the key'
                )
        return
    patches = section.encoder_context_parallel == "patches"
    if patches and section.context_parallel_degree == 1:
        raise ConfigError(
            'parallelism.encoder_context_parallel = "patches" with context_parallel_degree = 1: there is no rank to '
            'share patches with; raise the degree, or set "images"'
        )
    if section.encoder_tensor_parallel == "data" and section.tensor_parallel_degree == 1:
        raise ConfigError(
            'parallelism.encoder_tensor_parallel = "data" with tensor_parallel_degree = 1: there is no rank to divide '
            'the images with; raise the degree, or set "shard"'
        )


# ---------------------------------------------------------------------------------------------- loading


def load(path: str | Path, overrides: typing.Sequence[str] = ()) -> Config:
    """The checked configuration of a TOML file, after its `extends` chain and command-line overrides.

    Args:
        path: a file, or a bare name that is looked up in the folder `configs` of the working
            directory and of the source tree.
        overrides: `--section.key=value` or `section.key=value`, the value in TOML syntax (a string
            may be left unquoted).
    Raises: ConfigError: with file, dotted key, value, rule and what to change.
    """
    found = find_file(path)
    try:
        table = read_with_bases(found, ())
        for override in overrides:
            apply_override(table, override)
        config: Config = build(Config, table, "", str(found))
    except RecursionError:
        raise ConfigError(f"{found}: tables are nested hundreds deep; write them flatter") from None
    check(config)
    return config


def find_file(path: str | Path) -> Path:
    """The config file that a user's word names.

    Raises: ConfigError: no such file; with the places searched and the names that exist there.
    """
    direct = Path(path)
    if os.path.isfile(direct):  # which is false of names that cannot exist
        return direct
    if os.path.isdir(direct):
        raise ConfigError(f"config file {shown(str(path))} is a folder; name a file in it")
    folders = [Path("configs"), Path(__file__).resolve().parents[2] / "configs"]
    if direct.parent == Path("."):
        for folder in folders:
            if os.path.isfile(folder / direct):
                return folder / direct
    known = sorted({p.name for folder in folders if folder.is_dir() for p in folder.glob("*.toml")})
    near = difflib.get_close_matches(direct.name, known, 1)
    hint = f"did you mean {near[0]}?" if near else f"configs/ has {', '.join(known) or 'no file'}"
    raise ConfigError(f"config file {shown(str(path))} does not exist; {hint}")


def dump(config: Config) -> str:
    """The resolved configuration as TOML text that `load` reads back to an equal value."""
    lines: list[str] = []
    dump_table(to_dict(config), (), lines)
    return "\n".join(lines).strip() + "\n"


def _check_source(
    path: str, module: EncoderConfig | LanguageConfig | DitConfig | VaeConfig, example: str = "qwen2"
) -> None:
    if bool(module.pretrained) == bool(module.config):
        raise ConfigError(
            f"{path}: give either `pretrained` (an id or a folder) or `config` (an inline table); "
            f"now {'both are' if module.pretrained else 'neither is'} given"
        )
    if module.config and not isinstance(module.config.get("model_type"), str):
        raise ConfigError(f'{path}.config: `model_type` is missing; name it, as in model_type = "{example}"')


MOST_INTEGER, MOST_FLOAT = 2**31 - 1, 1e21
"""What no count or size, and no rate, is above, where nothing less is said."""


def _at_least(section: str, values: Any, **bounds: float) -> None:
    for name, bound in bounds.items():
        value = getattr(values, name)
        if not bound <= value < math.inf:
            raise ConfigError(f"{section}.{name} = {value}; it must be at least {bound} and finite")
        _at_most(section, values, **{name: MOST_INTEGER if isinstance(value, int) else MOST_FLOAT})


def _at_most(section: str, values: Any, **bounds: float) -> None:
    """Refuses values that no job needs: libraries would fail on them in ways of their own."""
    for name, bound in bounds.items():
        value = getattr(values, name)
        if not value <= bound:
            raise ConfigError(f"{section}.{name} = {value}; it must be at most {bound}")


def _not_empty(section: str, values: Any, *names: str) -> None:
    for name in names:
        if not getattr(values, name):
            raise ConfigError(f"{section}.{name} is empty; give it a name, or leave the key out")


def world_size_from_environment() -> int:
    """Number of ranks that the launcher started (`WORLD_SIZE` of torchrun), 1 without a launcher.

    Raises: ConfigError: it is no number.
    """
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or not 0 < len(text) < 10 or not int(text):
        raise ConfigError(f"the environment says WORLD_SIZE = {shown(text)}; it is the job's number of ranks")
    return int(text)
