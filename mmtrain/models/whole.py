"""The whole model of transformers that a job's modules make together: its class, config, and names of weights."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from mmtrain.config.model import ModelConfig, section_of
from mmtrain.errors import ConfigError
from mmtrain.families.catalogue import COMPOSITES
from mmtrain.families.composite import Spelling
from mmtrain.modality.metadata import DocumentMeta
from mmtrain.models.adapters import parameters_on_meta
from mmtrain.models.spectrogram import spectrogram_of
from mmtrain.spec.composites import class_name, selected_features
from mmtrain.spec.contrast import CONTRAST
from mmtrain.spec.model_configs import encoder_config, language_config
from mmtrain.spec.model_shapes import language_shape
from mmtrain.spec.module_sizes import projection_of, whole_kind, why_not_whole
from mmtrain.spec.vision_shapes import vision_shape


def only_encoder(model: ModelConfig) -> str:
    """The name of the encoder of a whole model, which has one."""
    (name,) = model.encoders
    return name


def _feature_select(model: ModelConfig) -> str:
    name = only_encoder(model)
    select = selected_features(model.encoders[name]).select
    return select if select != "auto" else "default" if vision_shape(model, name).class_token else "full"


def _feature_layer(model: ModelConfig) -> int:
    return selected_features(model.encoders[only_encoder(model)]).layer or -1


def _projector_act(model: ModelConfig) -> str:
    projection = projection_of(model, only_encoder(model))
    assert projection is not None
    return projection.hidden_act


_JOINS: Mapping[str, Callable[[ModelConfig], Any]] = {
    "vision_feature_layer": _feature_layer,
    "vision_feature_select_strategy": _feature_select,
    "projector_hidden_act": _projector_act,
    "multimodal_projector_bias": lambda model: True,
    "projection_dim": lambda model: language_shape(model).embedding_width,
}
"""Keys of a whole model's config that say how its parts are joined -> their values."""


def whole_config(model: ModelConfig, tokens: Mapping[str, int]) -> PreTrainedConfig:
    """The config of the whole model that a job's modules make together.

    Args: tokens: keys of ids of tokens -> ids, as far as the class of the config has them.
    Raises: ConfigError: they make none.
    """
    import transformers

    kind = whole_kind(model)
    if not kind:
        raise ConfigError(why_not_whole(model))
    whole, name = COMPOSITES[kind], only_encoder(model)
    config_class = getattr(transformers, f"{whole.class_name}Config")
    text, encoder = (
        {key: value for key, value in values.items() if value is not None}
        for values in (language_config(model.language), encoder_config(model.encoders[name], section_of(name)))
    )
    known = {key: value for key, value in tokens.items() if hasattr(config_class(), key)}
    parts = {whole.parts["model.language"].config: text, whole.parts["model.encoder"].config: encoder}
    config: PreTrainedConfig = config_class(
        **parts,
        **{key: text[key] for key in ("tie_word_embeddings",) if key in text},
        **{key: _JOINS[key](model) for key in whole.defaults},
        **known,
    )
    config.architectures = [class_name(kind)]
    seen = getattr(config, whole.parts["model.encoder"].config)
    if hasattr(seen, "vision_use_head"):
        seen.vision_use_head = model.reads_pairs  # a pooler, whose output no language model reads
    return config


def empty_whole(config: PreTrainedConfig) -> PreTrainedModel:
    """The whole model with parameters on the meta device."""
    import transformers

    config._attn_implementation = "sdpa"
    with parameters_on_meta(), no_init_weights():
        model: PreTrainedModel = getattr(transformers, config.architectures[0])(config)
    return model


def whole_model(config: PreTrainedConfig, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """The whole model with weights, without a copy of them.

    Args: weights: under the names of its class; a tied head may be absent.
    """
    model = filled(empty_whole(config), weights)
    absent = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not absent, f"no values for {absent}"
    return model


def filled(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """The model with weights in place of its own, without a copy of them; parameters without any stay as they are."""
    model.load_state_dict(weights, assign=True, strict=False)
    model.tie_weights()
    return model.eval()


def in_class(kind: str, name: str) -> str:
    """The name of one of our parameters in the class of a whole model.

    Args: kind: `model_type` of the whole model. name: as a chunk has it, with the module.
    """
    part = COMPOSITES[kind].parts[_section(name)]
    return spelled(name, part.spellings[part.in_class])


def in_classes(kind: str, name: str) -> list[str]:
    """The names of a parameter in the class of each release of transformers, today's first. Args: as of `in_class`."""
    part = COMPOSITES[kind].parts[_section(name)]
    older = (spelling for spelling in part.spellings if spelling is not part.spellings[part.in_class])
    return [in_class(kind, name), *(spelled(name, spelling) for spelling in older)]


def on_disk(kind: str, name: str, spellings: Mapping[str, Spelling]) -> str:
    """The name of one of our parameters in the files of a whole model.

    Args: spellings: key of `Composite.parts` -> that of the files which its weights came from; else, or if transformers
    5 alone reads it, those of new files are taken.
    """
    section = _section(name)
    part = COMPOSITES[kind].parts[section]
    spelling, newer = spellings.get(section), [part.spellings[index] for index in part.newer]
    return spelled(name, part.spellings[part.written] if spelling is None or spelling in newer else spelling)


def _section(name: str) -> str:
    """The key in `Composite.parts` of the part that a parameter belongs to."""
    module = name.partition(".")[0]
    if module in ("language", CONTRAST):
        return f"model.{module}"
    return "model.projector" if module == "projector" or module.endswith("_projector") else "model.encoder"


def spelled(name: str, spelling: Spelling) -> str:
    """The name of one of our parameters in stored weights. Args: name: as a chunk has it, with the module."""
    own = name.partition(".")[2]
    stored, here = max(
        ((stored, here) for stored, here in spelling.items() if own.startswith(here)), key=lambda pair: len(pair[1])
    )
    return stored + own.removeprefix(here)


def token_types(document: DocumentMeta) -> Tensor:
    """[T] int64: 1 for the tokens of images, 2 for those of videos, 0 for text."""
    types = torch.zeros(document.num_tokens, dtype=torch.int64)
    for image in document.images:
        types[image.start : image.start + image.num_tokens] = 2 if image.is_video else 1
    return types


def class_inputs(document: DocumentMeta, pixels: list[Tensor], config: Any) -> dict[str, Tensor]:
    """The arguments of a whole class for the images and videos, or the sounds, of a document.

    Args: pixels: of each of them. config: of the class.
    """
    pairs = list(zip(document.images, pixels, strict=True))
    if pairs and hasattr(config, "audio_config"):
        num_frames = 2 * config.audio_config.max_source_positions
        num_rows = torch.tensor([image.num_patches for image in document.images])
        return {
            "input_features": torch.stack([spectrogram_of(patches, num_frames) for patches in pixels]),
            "feature_attention_mask": (torch.arange(num_frames) < 2 * num_rows[:, None]).long(),
        }
    if pairs and pixels[0].dim() != 2:
        return {"pixel_values": torch.cat(pixels)}
    inputs = {"mm_token_type_ids": token_types(document)[None]} if pairs else {}
    grids = [(images[0], (sum(i.grid[0] for i in images), *images[0].grid[1:])) for images in document.of_placeholders]
    for video, pixels_key, grid_key in (
        (False, "pixel_values", "image_grid_thw"),
        (True, "pixel_values_videos", "video_grid_thw"),
    ):
        if of_kind := [pair for pair in pairs if pair[0].is_video == video]:
            inputs[pixels_key] = torch.cat([values for _, values in of_kind])
            inputs[grid_key] = torch.tensor([grid for image, grid in grids if image.is_video == video])
            if video and hasattr(config.vision_config, "tokens_per_second"):
                inputs["second_per_grid_ts"] = torch.tensor([image.seconds for image, _ in of_kind])
    return inputs
