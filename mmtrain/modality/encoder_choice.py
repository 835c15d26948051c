"""The choice of the encoder that reads what a record has. Pure."""

from mmtrain.config.model import ModelConfig, section_of
from mmtrain.errors import ConfigError
from mmtrain.modality.geometry import model_geometry
from mmtrain.modality.sounds import sound_rules


def readers_of_kinds(model: ModelConfig) -> dict[str, str]:
    """Kind of content of a record -> the encoder that reads it.

    Images and videos are those of [model.encoder], audio is that of the first further encoder of sound; each other
    encoder has a kind of its own, of its name.
    Raises: ConfigError: the name of an encoder is the kind of another one.
    """
    readers = dict.fromkeys(("image", "video"), "vision") if model.encoder is not None else {}
    for module, section in model.modules.items():
        hears = section.kind == "audio"
        kind = "audio" if hears and "audio" not in readers else module
        if kind in readers or kind in ("image", "video") or (kind == "audio" and not hears):
            raise ConfigError(
                f"[{section_of(module)}]: records have {kind!r} for another encoder; call this one otherwise, or write "
                "[model.modules.audio] before other encoders of sound"
            )
        readers[kind] = module
    return readers


def check_readable(model: ModelConfig) -> None:
    """Checks that the data loader reads what the encoders of a model read.

    Raises: ConfigError: an encoder reads nothing that is known, or records have its name for something else.
    """
    for module in dict.fromkeys(readers_of_kinds(model).values()):
        size = sound_rules if model.encoders[module].kind == "audio" else model_geometry
        size(model, module)
