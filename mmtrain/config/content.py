"""The rules between a model and its data: what kind of content it reads, and which keys are about another kind."""

from mmtrain.config.assignment import AssignmentConfig
from mmtrain.config.data import DataConfig, DiffusionConfig, TokenizerConfig
from mmtrain.config.elastic import ElasticConfig
from mmtrain.config.model import ModelConfig, ProjectorConfig, placeholder, section_of
from mmtrain.config.sections import ParallelismConfig, TrainingConfig, ValidationConfig
from mmtrain.config.toml_sections import shown
from mmtrain.errors import ConfigError

VIDEO_KEYS = (
    "fps",
    "max_seconds",
    "max_total_seconds",
    "max_clips",
    "video_area",
    "video_aspects",
    "video_frames",
)
"""Keys of [data] that only clips follow."""
CONVERSATION_VIDEO_KEYS = (
    "video_fps",
    "video_min_frames",
    "video_max_frames",
    "video_min_pixels",
    "video_max_pixels",
)
"""Keys of [data] that only videos of conversations follow."""
IMAGE_KEYS = ("image_processor", "min_pixels", "max_pixels", "blank_images", "blank_audio", *CONVERSATION_VIDEO_KEYS)
"""Keys of [data] that only images, videos and sounds of conversations follow."""


def check_content(model: ModelConfig, data: DataConfig, tokenizer: TokenizerConfig) -> None:
    """Refuses keys of the data that this kind of job would ignore. Raises: ConfigError."""
    video = model.dit is not None
    default = DataConfig(source="any")
    for name in IMAGE_KEYS if video else VIDEO_KEYS:
        value = getattr(data, name)
        if value != getattr(default, name):
            why = "a job with [model.dit] reads video clips" if video else "a job without [model.dit] reads no clips"
            raise ConfigError(f"data.{name} = {shown(value)} has no effect: {why}; remove it")
    if data.blank_audio and not any(section.kind == "audio" for section in model.modules.values()):
        raise ConfigError("data.blank_audio = true has no effect: the model has no encoder of sound; remove it")
    for key in ("image_token", "video_token"):
        for name, section in model.modules.items():
            if (token := placeholder(name, section)) == getattr(tokenizer, key):
                raise ConfigError(
                    f"{section_of(name)}.token = {shown(token)} is tokenizer.{key}, too; give each its own token"
                )
    if not model.reads_pairs and data.max_pairs != default.max_pairs:
        raise ConfigError(
            f"data.max_pairs = {data.max_pairs} has no effect: a job without [model.contrast] reads no pairs; remove it"
        )
    if (video or model.reads_pairs) and tokenizer.chat_template:
        value = shown(tokenizer.chat_template)
        raise ConfigError(f"tokenizer.chat_template = {value} has no effect: captions are no conversations; remove it")


def check_clips(
    model: ModelConfig,
    diffusion: DiffusionConfig,
    *,
    data: DataConfig,
    training: TrainingConfig,
    validation: ValidationConfig,
    parallelism: ParallelismConfig,
) -> None:
    """Refuses what does not go with a text-to-video model, or with any other. Raises: ConfigError."""
    if validation.shuffled_captions:
        _check_caption_control(model, data, training, parallelism)
    if validation.samples and (model.dit is None or model.vae is not None):
        lack = (
            "there is no [model.dit], which makes clips"
            if model.dit is None
            else ("the decoder of [model.vae] is not a part of training (`mmtrain sample` decodes)")
        )
        raise ConfigError(f"validation.samples = {validation.samples}, but {lack}; set it to 0")
    if model.dit is None:
        if model.vae is not None:
            raise ConfigError("[model.vae] is set, but there is no [model.dit] that reads its latents; add one")
        if diffusion != DiffusionConfig():
            raise ConfigError("[diffusion] is set, but there is no [model.dit], which it is about; remove the section")
        return
    if validation.generate:
        raise ConfigError(
            f"validation.generate = {validation.generate}, but a job with [model.dit] makes clips, not answers; "
            "set it to 0 (`mmtrain sample` makes clips of a run)"
        )
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
    if parallelism.fsdp_reshard_after_forward == "always":
        raise ConfigError(
            'parallelism.fsdp_reshard_after_forward = "always" with [model.dit]: a block of the DiT runs once for each '
            'size of its clips, and would gather its parameters as often; set "step"'
        )
    if parallelism.context_parallel_degree > 1:
        raise ConfigError(
            f"parallelism.context_parallel_degree = {parallelism.context_parallel_degree} with [model.dit]: the "
            "frames of a clip are not divided yet; set it to 1, and use tensor, pipeline or data parallelism"
        )


def check_pairs(
    model: ModelConfig,
    *,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    assignment: AssignmentConfig,
    elastic: ElasticConfig,
    validation: ValidationConfig,
) -> None:
    """Refuses what does not go with two towers, or is not built for them. Raises: ConfigError."""
    contrast = model.contrast
    if contrast is None:
        if size := model.language.sub_microbatch_size:
            raise ConfigError(
                f"model.language.sub_microbatch_size = {size} has no effect without [model.contrast]: the documents of "
                "a microbatch are one packed sequence; remove it"
            )
        return
    if model.encoder is None:
        raise ConfigError(
            "[model.contrast] is set, but there is no [model.encoder], the tower that reads the images; add one"
        )
    other = "[model.dit]" if model.dit is not None else f"[{section_of(next(iter(model.modules), 'vision'))}]"
    if model.dit is not None or model.modules:
        raise ConfigError(
            f"[model.contrast] and {other} are both set, but two towers read images and captions alone; remove one"
        )
    if model.projector != ProjectorConfig():
        raise ConfigError(
            "[model.projector] has no effect with [model.contrast]: the image tower projects its embedding itself; "
            "remove the section"
        )
    for key, value, built, why in (
        ("parallelism.tensor_parallel_degree", parallelism.tensor_parallel_degree, 1, "towers are not divided yet"),
        ("parallelism.context_parallel_degree", parallelism.context_parallel_degree, 1, "captions are not divided yet"),
        ("parallelism.vocabulary_parallel", parallelism.vocabulary_parallel, "tensor", "a text tower has no head"),
        ("model.encoder.feature_layer", model.encoder.feature_layer, 0, "a tower has all of its blocks"),
        ("model.encoder.feature_select", model.encoder.feature_select, "auto", "the class of a tower decides"),
        ("model.language.attention_mask", model.language.attention_mask, "causal", "the class of a tower decides"),
        ("assignment.policy", assignment.policy, "none", "the loss depends on which pairs are together"),
        ("elastic.enable", elastic.enable, False, "the loss depends on which pairs are together"),
        ("validation.generate", validation.generate, 0, "two towers answer no questions"),
    ):
        if value != built:
            raise ConfigError(f"{key} = {shown(value)} with [model.contrast]: {why}; set it to {shown(built)}")
    each = training.global_batch_size // parallelism.layout.dp
    if contrast.microbatches > each:
        raise ConfigError(
            f"model.contrast.microbatches = {contrast.microbatches}, but a replica has {each} microbatches a step "
            f"(training.global_batch_size = {training.global_batch_size} over {parallelism.layout.dp} replicas); lower "
            "it, or set 0 for all of them"
        )


def _check_caption_control(
    model: ModelConfig, data: DataConfig, training: TrainingConfig, parallelism: ParallelismConfig
) -> None:
    """Refuses a control that would not be done, or could show nothing."""
    key = "validation.shuffled_captions = true"
    if model.dit is None:
        raise ConfigError(f"{key}, but there is no [model.dit], so there is no caption; remove it")
    dp = parallelism.layout.dp
    if data.max_clips == 1 and training.global_batch_size < 2 * dp:
        raise ConfigError(
            f"{key}, but a replica has one clip a step (data.max_clips = 1, training.global_batch_size = "
            f"{training.global_batch_size} over {dp} replicas), so there is no other caption; remove it or "
            "raise one of the two"
        )
