"""Folders of jobs as training leaves them, without any training: a config, and checkpoints of random weights."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from mmtrain.checkpoint.files import RecordingWriter, StoredCheckpoint, write_manifest
from mmtrain.checkpoint.state import average_name
from mmtrain.config import config
from mmtrain.config.config import Config
from mmtrain.config.data import DataConfig
from mmtrain.config.model import ModelConfig
from mmtrain.config.sections import TrainingConfig
from mmtrain.models.build import build_chunk
from mmtrain.models.chunk import Chunk
from mmtrain.models.initialise import init_weights
from mmtrain.spec.builders import model_spec
from mmtrain.spec.model_shapes import language_shape
from tests.lora import fill_adapters


def chunks_of(model: ModelConfig, seed: int = 0) -> dict[str, Chunk]:
    """Whole modules with random weights, none of them zero."""
    spec, found = model_spec(model), {}
    for module in spec.modules:
        chunk = build_chunk(model, spec, module.name, (0, len(module.layers)), device="cpu")
        init_weights(chunk, seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in chunk.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        fill_adapters(chunk)
        found[module.name] = chunk
    return found


def save_run(
    run: Path,
    model: ModelConfig,
    steps: tuple[int, ...] = (4,),
    state: Mapping[str, Any] = MappingProxyType({}),
    **sections: Any,
) -> dict[str, Chunk]:
    """The modules of the last checkpoint of the run that was written.

    Args: state: what its checkpoints say of training. sections: of its config.
    """
    training = TrainingConfig(steps=4, seq_len=64, global_batch_size=1)
    job = Config(model=model, **{"data": DataConfig(source="unused"), "training": training, **sections})
    run.mkdir(parents=True)
    (run / "config.toml").write_text(config.dump(job))
    chunks: dict[str, Chunk] = {}
    for step in steps:
        chunks = chunks_of(model, seed=step)
        save_checkpoint(run / "checkpoint" / f"step-{step}", model, chunks, state)
    return chunks


def save_checkpoint(
    folder: Path, model: ModelConfig, chunks: dict[str, Chunk], state: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Writes the modules as a complete checkpoint."""
    tied = language_shape(model).tied
    tensors = {
        f"model.{name}": tensor
        for chunk in chunks.values()
        for name, tensor in chunk.state_dict().items()
        if not (tied and name == "language.lm_head.weight")
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        writer = RecordingWriter(folder)
        dcp.save(tensors, storage_writer=writer, no_dist=True)
    (folder / "train_state.json").write_text(json.dumps(dict(state)))
    write_manifest(folder, writer.files)


def stored(run: Path, step: int) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whole."""
    source = StoredCheckpoint.open(run / "checkpoint" / f"step-{step}", "required")
    found = {
        name: torch.empty(value.size)
        for name, value in source.metadata.state_dict_metadata.items()
        if hasattr(value, "size")
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")  # there is only one process
        source.load(found, no_dist=True)
    return found


def averages(run: Path, step: int) -> dict[str, Tensor]:
    """Parameter -> its average, of those that a checkpoint has."""
    table = stored(run, step)
    names = [name.removeprefix("model.") for name in table if name.startswith("model.")]
    return {name: table[average_name(name)] for name in names if average_name(name) in table}
