"""The sizes and flags of a configured encoder for costs, geometry and adapters. Pure; no weights."""

from dataclasses import replace
from typing import Any

from mmtrain.config.model import EncoderConfig, ModelConfig, ProjectorConfig, projector_section, section_of
from mmtrain.errors import ConfigError
from mmtrain.families.catalogue import ENCODERS, LANGUAGES
from mmtrain.families.shapes import ROW_FRAMES, VisionShape, check_divides
from mmtrain.spec.composites import selected_features
from mmtrain.spec.model_configs import encoder_config
from mmtrain.spec.model_shapes import language_shape, section_name


def vision_shape(model: ModelConfig, module: str = "vision") -> VisionShape:
    """The sizes of an encoder of a model that has it.

    Raises: ConfigError: its sizes do not fit together, or the projector does not fit.
    """
    section, projector = model.encoders[module], model.projector_of(module)
    values = encoder_config(section, section_of(module))
    where = section_name(section_of(module), section)
    try:
        shape = ENCODERS[values["model_type"]].shape(values, where, model.merge_of(module))
    except ConfigError as error:  # which speaks of the usual projector
        raise ConfigError(str(error).replace("model.projector.", f"{projector_section(module)}.")) from None
    if shape.one_row != (section.kind == "audio") and module != "vision":
        raise ConfigError(
            f'{section_of(module)}.kind = "{section.kind}", but {where} ({shape.model_type}) reads '
            f"{'spectrograms of sound' if shape.one_row else 'images'}; change one of the two"
        )
    if section.sound_rows == "sound":
        if shape.packed or not shape.one_row:
            why = "runs no other rows" if shape.one_row else "hears nothing"
            raise ConfigError(
                f'{section_of(module)}.sound_rows = "sound" has no effect: {where} ({shape.model_type}) {why}; '
                "remove it"
            )
        shape = replace(shape, packed=True, fixed_grid=None, patch_dim=ROW_FRAMES * shape.mel_bins)
    shape = _with_selected_features(section, projector, section_of(module), shape, where)
    check_divides(where, "number of heads", shape.num_heads, "width", shape.width)
    if model.reads_pairs:
        return _tower(model, shape, values, where)
    if projector.kind != "native":
        return shape
    _check_native(model, projector_section(module), shape, where)
    return replace(shape, taps=_taps(values, where, shape.depth, language_shape(model).depth))


def _tower(model: ModelConfig, shape: VisionShape, values: dict[str, Any], where: str) -> VisionShape:
    """The shape of an encoder that makes one embedding of an image.

    Raises: ConfigError: it makes none, or one whose width is not that of a caption's.
    """
    encoder = ENCODERS[shape.model_type]
    if not encoder.pooling:
        towers = ", ".join(name for name, one in ENCODERS.items() if one.pooling)
        raise ConfigError(
            f"[model.contrast] trains two towers, but {where} ({shape.model_type}) makes no embedding of an image; "
            f"towers are {towers}"
        )
    if not values.get(encoder.pools, True):
        raise ConfigError(
            f"{where}: {encoder.pools} = false, but [model.contrast] needs what makes the embedding of an image; "
            "set it to true"
        )
    width, captions = values.get(encoder.embedding), language_shape(model)
    if not width:
        raise ConfigError(f"{where}: {encoder.embedding}, the width of an embedding, is missing; set it")
    if width != captions.embedding_width:
        text = section_name("model.language", model.language)
        raise ConfigError(
            f"{where}: {encoder.embedding} = {width}, but {text} makes embeddings of {captions.embedding_width} "
            f"columns ({LANGUAGES[captions.model_type].embedding}); make them equal"
        )
    return replace(shape, pooling=encoder.pooling, embedding_width=width)


def _with_selected_features(
    section: EncoderConfig, projector: ProjectorConfig, name: str, shape: VisionShape, where: str
) -> VisionShape:
    """The shape of the part of an encoder that makes the features which the projector reads.

    Raises: ConfigError: there is no such block or class token, or they do not fit the projector.
    """
    layer, select = selected_features(section)
    if abs(layer) > shape.depth:
        raise ConfigError(
            f"{name}.feature_layer = {layer}, but {where} has {shape.depth} blocks; choose 1 to {shape.depth}, "
            f"or -1 to -{shape.depth} from the last one"
        )
    if layer and projector.kind == "native":
        if not section.feature_layer:
            raise ConfigError(
                f'{projector.SECTION}.kind = "native", but {name}.pretrained is of a LLaVA model, whose projector is '
                'of another kind; set kind = "llava"'
            )
        raise ConfigError(
            f'{name}.feature_layer = {layer}, but its projector of kind "native" reads the output of the last '
            'block; remove it, or use kind = "mlp"'
        )
    if layer and shape.pool > 1:
        raise ConfigError(
            f"{name}.feature_layer = {layer}, but {where} ({shape.model_type}) makes its features of rows behind its "
            "last block; remove it"
        )
    if select == "default" and not shape.class_token:
        raise ConfigError(
            f'{name}.feature_select = "default" leaves out the class token, but {where} ({shape.model_type}) '
            'has none; set feature_select = "full"'
        )
    keeps_class_token = select == "full" and shape.class_token
    if keeps_class_token and shape.merge > 1:
        raise ConfigError(
            f'{name}.feature_select = "full" keeps the class token, which has no neighbours to merge with, but its '
            f"projector merges {shape.merge} x {shape.merge} features; set its spatial_merge = 1"
        )
    return replace(
        shape,
        depth=(layer if layer > 0 else shape.depth + 1 + layer) if layer else shape.depth,
        final_norm=shape.final_norm and not layer,
        keeps_class_token=keeps_class_token,
    )


def check_patches_split(model: ModelConfig) -> None:
    """Checks that the patches of an encoder's images can be divided over ranks.

    Raises: ConfigError: they cannot, as its images have one fixed size.
    """
    fixed = [shape.model_type for name in model.encoders if not (shape := vision_shape(model, name)).packed]
    for model_type in fixed:
        raise ConfigError(
            f'parallelism.encoder_context_parallel = "patches", but the patches of a {model_type} are those of one '
            'fixed size and stay together; use "images"'
        )


def _taps(values: dict[str, Any], where: str, depth: int, language_depth: int) -> tuple[int, ...]:
    """The blocks that a native merger reads in addition to the last one.

    Raises: ConfigError: there are no such blocks, or no language layers that take them.
    """
    key = ENCODERS[values["model_type"]].sizes.get("taps")
    if key is None:
        return ()
    taps = tuple(values[key])
    if list(taps) != sorted(set(taps)) or any(block >= depth for block in taps):
        raise ConfigError(
            f"{where}: {key} = {list(taps)}; they name blocks 0 to {depth - 1}, each once and in their order"
        )
    if len(taps) > language_depth:
        raise ConfigError(
            f"{where}: {key} = {list(taps)}: each of these features is added to the output of a "
            f"language layer of its own, but the language model has {language_depth}; name at most as many"
        )
    return taps


def _check_native(model: ModelConfig, section: str, shape: VisionShape, where: str) -> None:
    """Checks that a configured native merger exists and fits."""
    if not shape.native_merge:
        raise ConfigError(
            f'{section}.kind = "native", but {where} ({shape.model_type}) has no merger of its own; use "mlp"'
        )
    if shape.merge != shape.native_merge:
        raise ConfigError(
            f"{section}.spatial_merge = {shape.merge}, but the merger of {where} merges "
            f"{shape.native_merge} x {shape.native_merge}; set spatial_merge = {shape.native_merge} or "
            'kind = "mlp"'
        )
    language_width = language_shape(model).width
    if shape.native_width != language_width:
        raise ConfigError(
            f'{section}.kind = "native": the merger of {where} makes {shape.native_width} columns '
            f'(hidden_size), but the language model has {language_width}; change one or use kind = "mlp"'
        )
