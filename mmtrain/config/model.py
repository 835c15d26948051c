"""[model]: the modality modules, each with its section."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from mmtrain.config.bounds import at_least, at_most
from mmtrain.config.layer_ranges import check_ranges
from mmtrain.config.toml_sections import FilePath, shown
from mmtrain.errors import ConfigError

Trainable = Literal[True, False, "lora"]
FeatureSelect = Literal["auto", "default", "full"]

MOST_SEGMENTS = 1024
"""The most segments of one module."""

ProjectorName = Literal["mlp", "native", "llava", "linear"]

WHOLE_PROJECTORS: Mapping[str, ProjectorName] = {"llava": "llava"}
"""`model_type` of a whole model that sees -> the kind of its projector, if that is not its encoder's own merger."""

WHOLE_LOSSES: Mapping[str, Literal["clip", "siglip"]] = {"clip": "clip", "siglip": "siglip"}
"""`model_type` of a whole model of two towers -> the loss that trains them."""

_WITHOUT_MERGE = ("llava", "linear")
"""Kinds of projectors that make a token of each feature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorConfig:
    """[model.projector]: from encoder features to the language model's width."""

    SECTION: ClassVar[str] = "model.projector"
    kind: ProjectorName = "mlp"
    """mlp: norm, merge of spatial_merge x spatial_merge neighbours, two linear layers. native: the encoder's own
    merger. llava: LLaVA's two linear layers, without norm or merge. linear: Qwen2-Audio's one linear layer."""
    spatial_merge: int = 0
    """Neighbouring features along each side that become one token; native requires the encoder's value. 0: 2, and 1
    with llava and linear, which merge none."""
    hidden_size: int = 0
    """Width between the two linear layers of `mlp`; 0: the merged width. That of `llava` is the language model's."""
    hidden_act: str = ""
    """Activation function between the two linear layers of `llava`; empty: that of `pretrained`, otherwise gelu."""
    pretrained: FilePath = ""
    """Hugging Face id or local folder of an exported projector of this kind; for `llava` also of a whole LLaVA model,
    for `linear` of a Qwen2-Audio model. Empty: random weights."""
    trainable: Trainable = True
    """true: train it; false: keep it fixed; "lora": train low-rank adapters of its linear layers, see [model.lora]."""

    def __post_init__(self) -> None:
        at_most("model.projector", self, spatial_merge=1024)
        at_least("model.projector", self, spatial_merge=0, hidden_size=0)
        if self.kind in _WITHOUT_MERGE and self.spatial_merge > 1:
            raise ConfigError(
                f'model.projector.spatial_merge = {self.spatial_merge}, but kind = "{self.kind}" merges no features; '
                'remove it, or use kind = "mlp"'
            )
        for key, kind in (("hidden_size", "mlp"), ("hidden_act", "llava")):
            if getattr(self, key) and self.kind != kind:
                raise ConfigError(
                    f'model.projector.{key} = {shown(getattr(self, key))} has no effect with kind = "{self.kind}"; '
                    "remove it"
                )
        if self.pretrained and self.kind == "native":
            raise ConfigError(
                f'model.projector.pretrained = {self.pretrained!r} has no effect with kind = "native", whose weights '
                "come with the encoder; remove it"
            )

    @property
    def merge(self) -> int:
        """Neighbouring features along each side that become one token."""
        return self.spatial_merge or (1 if self.kind in _WITHOUT_MERGE else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """[model.encoder]: the vision encoder. Leave the table out to train a language model alone. Further encoders are
    tables [model.modules.NAME] of the same keys."""

    SECTION: ClassVar[str] = "model.encoder"
    kind: Literal["images", "audio"] = "images"
    """What it reads. That of [model.encoder] reads images."""
    sound_rows: Literal["window", "sound"] = "window"
    """Which rows of a sound are run. window: all rows of each window are run, silence included, as by the encoder's
    class. sound: those of the sound alone, packed, and silence makes no token; Qwen2-Audio's encoder has no other
    way."""
    token: str = ""
    """The placeholder of a further encoder in the tokenizer's vocabulary that its features replace; empty: <NAME>."""
    projector: ProjectorConfig | None = None
    """The projector of a further encoder, [model.modules.NAME.projector]; that of [model.encoder] is
    [model.projector]."""
    pretrained: FilePath = ""
    """Hugging Face id or local folder; its config.json decides the class. Or give `config`."""
    config: dict[str, Any] = field(default_factory=dict)
    """Inline Hugging Face config with its `model_type`; the weights are then random."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """Whether the weights of `pretrained` are loaded, or only its shape is taken."""
    trainable: Trainable = True
    """true: train it; false: keep it fixed; "lora": train low-rank adapters of it, see [model.lora]. The projector
    has its own switch."""
    trainable_layers: str = ""
    """Blocks that train, or with "lora" have adapters, as "12..", "0..3, 8" or "-4.." (the last four); empty: all. With
    true nothing else of the module trains then: its first layer and its last norm stay fixed."""
    feature_layer: int = 0
    """The block whose output the projector reads, counted from the first (1, 2, ...) or from the last (-1, -2, ...), as
    LLaVA's vision_feature_layer. Later blocks, and the norm after the last one, are neither built nor run. 0: that of
    the LLaVA model that `pretrained` names; of another encoder its output, after the last block and the final norm."""
    feature_select: FeatureSelect = "auto"
    """Features of an image, as LLaVA's vision_feature_select_strategy. default: without the class token. full: all, so
    that a class token becomes a token of the language model, too. auto: that of the LLaVA model that `pretrained`
    names; of another encoder all patches without a class token."""
    ranks: int = 0
    """Pipeline ranks of the module, if planner.placement is not spread; 0: as the placement says."""
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
        _check_layers("model.encoder", self)
        at_most("model.encoder", self, num_segments=MOST_SEGMENTS)
        at_least("model.encoder", self, num_segments=0, sub_microbatch_size=0, ranks=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageConfig:
    """[model.language]: the language model."""

    pretrained: FilePath = ""
    """Hugging Face id or local folder; its config.json decides the class. Or give `config`."""
    config: dict[str, Any] = field(default_factory=dict)
    """Inline Hugging Face config with its `model_type`; the weights are then random."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """Whether the weights of `pretrained` are loaded, or only its shape is taken."""
    trainable: Trainable = True
    """true: train it; false: keep it fixed; "lora": train low-rank adapters of it, see [model.lora]."""
    trainable_layers: str = ""
    """Blocks that train, or with "lora" have adapters, as "12..", "0..3, 8" or "-4.." (the last four); empty: all. With
    true nothing else of the module trains then: embedding, last norm and head stay fixed."""
    attention_mask: Literal["causal", "image_bidirectional", "prefix", "modality"] = "causal"
    """Inside of each document: causal; or also both ways inside of each image; or before the first answer. modality:
    text is causal; tokens of images see those of all images, both ways, and no text."""
    loss: Literal["cross_entropy"] = "cross_entropy"
    """What is minimised: the cross-entropy of the next token, over the labelled ones. A text encoder has no loss."""
    ranks: int = 0
    """Pipeline ranks of the module, if planner.placement is not spread; 0: as the placement says."""
    num_segments: int = 0
    """K: the module is cut into pipeline_parallel_degree x K chunks; 0: as planner.partition says. In a mixed
    partition, chunks of all modules on each rank; 0: as few as the schedule needs."""
    pipeline_layout: str = ""
    """Layers of each chunk in the manner of Megatron's layouts, "Et*3|t*4|t*4|t*3,L", see docs/models.md; P x K
    chunks, which also sets K. Empty: chunks of equal work."""
    sub_microbatch_size: int = 0
    """The captions in one sub-microbatch of a tower of captions ([model.contrast]). 0: all of a microbatch."""

    def __post_init__(self) -> None:
        _check_source("model.language", self)
        _check_layers("model.language", self)
        at_most("model.language", self, num_segments=MOST_SEGMENTS)
        at_least("model.language", self, num_segments=0, ranks=0, sub_microbatch_size=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """[model.lora]: low-rank adapters (arXiv:2106.09685, by `peft`) of the modules with trainable = "lora"."""

    pretrained: FilePath = ""
    """Folder or hub id of adapters in the form of `peft` to start from, such as `mmtrain export` writes; they adapt the
    modules with trainable = "lora". Empty: new ones, which change nothing at first."""
    rank: int = 16
    """Rows of the first and columns of the second matrix of an adapter."""
    alpha: float = 32.0
    """An adapter's output is scaled by alpha / rank, or by alpha / sqrt(rank) with use_rslora."""
    use_rslora: bool = False
    """Rank-stabilised LoRA (arXiv:2312.03732): the scale is alpha / sqrt(rank)."""
    use_dora: bool = False
    """DoRA (arXiv:2402.09353): each row of an adapted weight is scaled to a length that trains, too. The lengths are
    compared with those of the weights at each forward, which takes rank x rows x columns of each weight once more."""
    dropout: float = 0.0
    """Part of an adapter's inputs that is replaced by zero in training, from 0 up to but not including 1; the others
    are divided by 1 - dropout. Which ones follows from debug.seed, the step, the work and the layer, so that a pass
    that is repeated (recomputation, a resumed step) has the same; another batching of samples has others."""
    target_modules: list[str] = field(default_factory=list)
    """Last names of the linear layers that get an adapter; empty: all linear layers of the blocks."""

    def __post_init__(self) -> None:
        at_most("model.lora", self, alpha=1e6)
        at_least("model.lora", self, rank=1, alpha=0.0)
        if self.alpha == 0:
            raise ConfigError("model.lora.alpha = 0.0; it must be above 0, or adapters change nothing")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"model.lora.dropout = {self.dropout}; it must be at least 0 and below 1")

    @property
    def scale(self) -> float:
        """The factor of an adapter's output."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class DitConfig:
    """[model.dit]: the diffusion transformer of a text-to-video model; [model.language] encodes its prompts."""

    pretrained: FilePath = ""
    """Hugging Face id or local folder of the transformer alone; its config.json decides the shape. Or give `config`."""
    config: dict[str, Any] = field(default_factory=dict)
    """Inline config with `model_type = "wan"` and the keys of diffusers' WanTransformer3DModel; `text_dim` is the width
    of the text encoder. The weights are then random."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """Whether the weights of `pretrained` are loaded, or only its shape is taken."""
    trainable: Trainable = True
    """true: train it; false: keep it fixed; "lora" is refused for now."""
    loss: Literal["squared_error"] = "squared_error"
    """What is minimised: the squared error over all numbers of the targets, which diffusion.prediction names."""
    ranks: int = 0
    """Pipeline ranks of the module, if planner.placement is not spread; 0: as the placement says."""
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
        at_most("model.dit", self, num_segments=MOST_SEGMENTS)
        at_least("model.dit", self, num_segments=0, sub_microbatch_size=0, ranks=0)
        if self.trainable == "lora":
            raise ConfigError('model.dit.trainable = "lora": the DiT has no adapters yet; set true or false')


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeConfig:
    """[model.vae]: the frozen VAE that makes the latents of a text-to-video model from frames. Leave the table out if
    the data hold latents, or the DiT reads pixels."""

    pretrained: FilePath = ""
    """Hugging Face id or local folder of the VAE alone; its config.json decides the class. Or give `config`."""
    config: dict[str, Any] = field(default_factory=dict)
    """Inline config with `model_type = "autoencoder_kl"` (each frame by itself) or "autoencoder_kl_wan" (1 + 4 k frames
    become 1 + k) and the keys of diffusers' class of that name; the weights are then random."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """Whether the weights of `pretrained` are loaded, or only its shape is taken."""

    def __post_init__(self) -> None:
        _check_source("model.vae", self, example="autoencoder_kl_wan")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContrastConfig:
    """[model.contrast]: two towers, [model.encoder] of images and [model.language] of their captions, trained to find
    the pairs among those of a group (CLIP, arXiv:2103.00020; SigLIP, arXiv:2303.15343)."""

    SECTION: ClassVar[str] = "model.contrast"
    loss: Literal["clip", "siglip"] = "clip"
    """What is minimised. clip: the cross-entropy of the caption of each image and of the image of each caption, half
    each, with a temperature that trains. siglip: of each image with each caption whether they are a pair, with a
    temperature and a bias."""
    microbatches: int = 0
    """K: consecutive microbatches of a replica whose pairs are told apart from each other; the last group may have
    fewer. 0: all of a replica's. Pairs of other replicas are no negatives."""
    pretrained: FilePath = ""
    """Hugging Face id or local folder of a whole CLIP or SigLIP model, or an exported folder, whose temperature and
    bias training starts with. Empty: those of a new model."""
    trainable: Literal[True, False] = True
    """Whether temperature and bias train."""

    def __post_init__(self) -> None:
        at_least("model.contrast", self, microbatches=0)


ModuleConfig = EncoderConfig | LanguageConfig | DitConfig | VaeConfig
"""The section of one module."""

MODULES = {"vae": "vae", "vision": "encoder", "language": "language", "dit": "dit"}
"""Name of a module -> its section in [model], each module behind those that feed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """[model]: the modality modules. Each may be written as `[model.modules.NAME]` with its `kind` and the module that
    it `feeds`: vision (images) for [model.encoder], language (text), dit (latents), vae (frames)."""

    pretrained: FilePath = ""
    """Hugging Face id or local folder of a whole vision-language model, see docs/models.md. It is the `pretrained` of
    [model.encoder] and [model.language] unless these have a source of their own. The projector is then that of the
    model (kind = "native", the encoder's own merger, or "llava") unless [model.projector] names a kind; the
    tokenizer is that of the model unless [tokenizer] names a path, and so is the image processor, if it has one, unless
    data.image_processor names another. Of Qwen2-Audio it is the `pretrained` of [model.modules.audio] and of its
    projector; of CLIP and SigLIP, if both towers are its own, also of [model.contrast], whose loss is that of the
    model unless the section names another."""
    language: LanguageConfig
    encoder: EncoderConfig | None = None
    dit: DitConfig | None = None
    vae: VaeConfig | None = None
    contrast: ContrastConfig | None = None
    projector: ProjectorConfig = field(default_factory=ProjectorConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)

    modules: dict[str, EncoderConfig] = field(default_factory=dict)
    """Further encoders by their names, each a table [model.modules.NAME]."""

    def __post_init__(self) -> None:
        tokens: dict[str, str] = {}
        for name, section in self.modules.items():
            where = section_of(name)
            reserved = name in MODULES or name in ("projector", "modules", "adapter", "other")
            if reserved or name.endswith(("_projector", "_adapter")) or not _NAME.fullmatch(name):
                raise ConfigError(
                    f"[{where}]: an encoder is called by lower-case letters, digits and _, not as the module of "
                    f"another kind ({', '.join(MODULES)}) and without _projector or _adapter at its end; call it by "
                    "what it reads, as in [model.modules.audio]"
                )
            token = placeholder(name, section)
            if token in tokens:
                raise ConfigError(f"{where}.token = {shown(token)} is that of {tokens[token]} too; choose another")
            tokens[token] = where
        if self.modules and self.dit is not None:
            raise ConfigError(
                f"[{section_of(next(iter(self.modules)))}] and [model.dit] are both set, but a text-to-video model "
                "reads prompts and latents alone; remove one of the two"
            )
        if self.encoder is not None:
            for key, default in (("kind", "images"), ("token", ""), ("projector", None)):
                if getattr(self.encoder, key) != default:
                    places = {"token": "tokenizer.image_token", "projector": "[model.projector]"}
                    instead = places.get(key, "[model.modules.audio]")
                    raise ConfigError(f"model.encoder.{key} is for further encoders; write {instead}")
        if len(self.encoders) >= GROUPS:
            raise ConfigError(
                f"[model]: {len(self.encoders)} encoders; an attention mask tells the tokens of at most {GROUPS - 1} "
                "apart, remove some"
            )

    @property
    def encoders(self) -> dict[str, EncoderConfig]:
        """Name -> section of the encoders whose features enter the language model, in the order of their works."""
        return ({"vision": self.encoder} if self.encoder is not None else {}) | self.modules

    def projector_of(self, module: str) -> ProjectorConfig:
        """The section of an encoder's projector."""
        return self.projector if module == "vision" else self.encoders[module].projector or ProjectorConfig()

    def merge_of(self, module: str) -> int:
        """Neighbouring features of an encoder along each side that become one token; a tower merges none."""
        return 1 if self.reads_pairs else self.projector_of(module).merge

    @property
    def sections(self) -> dict[str, ModuleConfig]:
        """Name -> section of the modules that the model has, each behind those that feed it."""
        sections = {"vae": self.vae, **self.encoders, "language": self.language, "dit": self.dit}
        return {name: section for name, section in sections.items() if section is not None}

    @property
    def cut_modules(self) -> dict[str, EncoderConfig | LanguageConfig | DitConfig]:
        """The sections of the modules that pipeline ranks divide."""
        return {name: section for name, section in self.sections.items() if not isinstance(section, VaeConfig)}

    def with_modules(self, sections: Mapping[str, ModuleConfig | None]) -> "ModelConfig":
        """The model with other sections of some modules; None: without the module."""
        changes: dict[str, Any] = {MODULES[name]: section for name, section in sections.items() if name in MODULES}
        others = {name: sections.get(name, section) for name, section in self.modules.items()}
        return replace(self, **changes, modules={name: x for name, x in others.items() if isinstance(x, EncoderConfig)})

    @property
    def reads_clips(self) -> bool:
        """Whether it learns from video clips with captions, and not from conversations."""
        return self.dit is not None

    @property
    def reads_pairs(self) -> bool:
        """Whether it learns from images with captions, by two towers, and not from conversations."""
        return self.contrast is not None

    @property
    def encodes_clips(self) -> bool:
        """Whether a VAE of the job makes the latents of clips."""
        return self.vae is not None


GROUPS = 12
"""Groups of tokens that an attention mask tells apart, text among them: `modality.bitfield.GROUP_BITS`."""
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


def placeholder(name: str, section: EncoderConfig) -> str:
    """The token that the features of a further encoder replace."""
    return section.token or f"<{name}>"


def projector_name(module: str) -> str:
    """How the projector of an encoder is called in names of parameters and groups of them."""
    return "projector" if module == "vision" else f"{module}_projector"


def projector_section(module: str) -> str:
    """The dotted name of the section that configures the projector of an encoder."""
    return "model.projector" if module == "vision" else f"{section_of(module)}.projector"


def section_of(module: str) -> str:
    """The dotted name of the section that configures a module."""
    return f"model.{MODULES[module]}" if module in MODULES else f"model.modules.{module}"


def _check_layers(path: str, module: EncoderConfig | LanguageConfig) -> None:
    if module.trainable_layers and module.trainable is False:
        raise ConfigError(
            f"{path}.trainable_layers = {shown(module.trainable_layers)} has no effect with trainable = false; set "
            'trainable = true or "lora", or remove it'
        )
    if module.trainable_layers:
        check_ranges(f"{path}.trainable_layers", module.trainable_layers)


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
