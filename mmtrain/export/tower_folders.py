"""The parts of two towers that make no whole model of transformers, each in a folder of its own."""

from pathlib import Path

from torch import Tensor

from mmtrain.checkpoint.run_folder import StoredRun, load_module
from mmtrain.config.model import EncoderConfig, LanguageConfig, section_of
from mmtrain.export.adapter_folders import ExportForm, plain
from mmtrain.families.catalogue import NETWORKS
from mmtrain.models.chunk import LanguageChunk, VisionChunk
from mmtrain.models.whole import spelled
from mmtrain.spec.model_configs import encoder_config, language_config


def export_tower(run: StoredRun, module: str, out: Path, *, form: ExportForm, max_shard_size: str) -> None:
    """Writes a tower, with what makes its embedding, to the folder `out / module`.

    Args: module: the encoder, or language.
    """
    model = run.job.model
    sections: dict[str, EncoderConfig | LanguageConfig] = {**model.encoders, "language": model.language}
    section = sections[module]
    chunk = load_module(run, module)
    assert isinstance(chunk, VisionChunk | LanguageChunk)
    if isinstance(section, EncoderConfig):
        values = encoder_config(section, section_of(module))
        values |= {key: True for key in ("vision_use_head",) if key in values}
    else:
        values = language_config(section)
    theirs = chunk.adapter.build_reader(values)
    known = theirs.state_dict().keys()

    def in_class(name: str) -> str:
        own = name.partition(".")[2]
        alone = any(key.startswith(f"{own.partition('.')[0]}.") for key in known)
        return own if alone else spelled(name, NETWORKS[chunk.shape.model_type].spellings[0])

    weights: dict[str, Tensor] = dict(chunk.state_dict())
    base = (section.pretrained if section.weights == "pretrained" else "") or None
    adapters = form.adapters(model.lora, base, None, out / f"{module}_adapter")
    own = form.stored(plain(weights, model.lora, adapters, in_class))
    if form.adapters_only:
        return
    theirs.load_state_dict({in_class(name): tensor for name, tensor in own.items()}, assign=True, strict=True)
    theirs.save_pretrained(out / module, max_shard_size=max_shard_size)
