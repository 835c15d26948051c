"""Checkpoints of a vocabulary that pipeline ranks divide: torch's own files hold whole tensors, whoever saved them."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mmtrain.checkpoint.checkpoint import Checkpointer
from mmtrain.checkpoint.run_folder import load_module, open_run
from mmtrain.checkpoint.state import TrainState
from mmtrain.config import config
from mmtrain.config.config import Config
from mmtrain.config.sections import CheckpointConfig
from mmtrain.errors import ConfigError
from mmtrain.export.folder import export
from tests.checkpoint.test_move import DIVIDED, FIXED, UNTIED, Placed, new_world
from tests.jobs import layout, world_size, write_config
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

TOKENS = 770
"""Not a multiple of 3 parts, nor each part of 3 shards."""
EMBEDDING, HEAD = "language.model.embed_tokens.weight", "language.lm_head.weight"


class Save(NamedTuple):
    """A layout that goes on from the checkpoint of the one before, and saves its own."""

    overrides: list[str]
    mode: str = "disabled"

    @property
    def world(self) -> int:
        return world_size(self.overrides[:5])


CHAIN = [
    Save([*layout(pp=2), DIVIDED]),
    Save(layout(pp=2)),
    Save([*layout(pp=2, tp=2, shard=2), DIVIDED], "async"),
    Save([*layout(pp=3), DIVIDED], "async"),
    Save([*layout(pp=2, shard=3), DIVIDED]),
    Save(layout(tp=2)),
]
WORLD = max(save.world for save in CHAIN)


def job_of(folder: Path, overrides: list[str], tokens: int = TOKENS) -> Config:
    size = f"model.language.config.vocab_size={tokens}"
    return config.load(folder / "job.toml", [*FIXED, size, *overrides])


def went(rank: int, folder: Path, more: list[str]) -> list[list[str]]:
    """Through all layouts; names of tensors that differ from those that were saved before, [save]."""
    differing: list[list[str]] = []
    for number, save in enumerate(CHAIN):
        new_world(folder, str(number), list(range(save.world)), rank)
        if rank >= save.world:
            continue
        job = job_of(folder, [*save.overrides, *more])
        placed = Placed(job)
        section = CheckpointConfig(enable=True, async_mode=save.mode, keep_latest_k=0)
        own = Checkpointer(section, folder / "run/checkpoint")
        if number:
            wanted, fresh = torch.load(folder / f"{number}.pt"), placed.whole()
            state = own.load(placed.named)
            assert state is not None and state.step == number
            loaded = placed.whole()
            assert any(not torch.equal(loaded[name], value) for name, value in fresh.items())
            assert loaded.keys() <= wanted.keys()
            differing.append([name for name in loaded if not torch.equal(loaded[name], wanted[name])])
        placed.step()
        gathered: list[Any] = [None] * save.world
        dist.all_gather_object(gathered, placed.whole())
        if rank == 0:
            torch.save(
                {name: value for found in gathered for name, value in found.items()}, folder / f"{number + 1}.pt"
            )
            if number == 0:
                (folder / "run").mkdir(exist_ok=True)
                (folder / "run/config.toml").write_text(config.dump(job))
        own.save(TrainState(step=number + 1, loader={}), placed.named)
        placed.step()  # in place, while what was saved is written
        own.finish()
        dist.barrier()
    new_world(folder, "end", list(range(WORLD)), rank)
    dist.barrier()  # a rank that leaves closes connections that others still make
    return differing


@pytest.mark.parametrize(
    "more", [pytest.param([], id="tied"), pytest.param([UNTIED], id="untied", marks=pytest.mark.nightly)]
)
def test_any_layout_loads_what_any_other_one_saved_bit_for_bit(tmp_path: Path, more: list[str]) -> None:
    write_config(tmp_path, tmp_path / "nowhere")
    for rank, differing in enumerate(run_ranks(went, WORLD, tmp_path, more)):
        ranks = [save for save in CHAIN[1:] if rank < save.world]
        assert differing == [[] for _ in ranks], rank
    moments = {f"optimizer.state.{EMBEDDING}.{key}" for key in ("exp_avg", "exp_avg_sq", "step")}
    for number, save in enumerate(CHAIN):
        wanted = torch.load(tmp_path / f"{number + 1}.pt")
        run = open_run(tmp_path / "run", number + 1)
        stored = run.checkpoint.metadata.state_dict_metadata
        assert wanted.keys() <= stored.keys() and moments <= stored.keys(), save
        assert stored[f"model.{EMBEDDING}"].size == (TOKENS, 48)
        assert (f"model.{HEAD}" in stored) == bool(more)
        chunk = load_module(run, "language")
        for name, parameter in chunk.named_parameters():
            assert torch.equal(parameter, wanted[f"model.{name}"]), (save, name)
    export(tmp_path / "run", tmp_path / "out", step=1, parts=True)  # of rows
    exported, wanted = load_file(tmp_path / "out/language/model.safetensors"), torch.load(tmp_path / "1.pt")
    for name in ("model.embed_tokens.weight", "lm_head.weight")[: 1 + bool(more)]:
        assert torch.equal(exported[name], wanted[f"model.language.{name}"])


def of_other_sizes(rank: int, folder: Path) -> list[str]:
    """What a job says of a checkpoint with another vocabulary, of a whole and of a divided model."""
    said = []
    for number, more in enumerate(([], [DIVIDED])):
        saved, here = (Placed(job_of(folder, [*layout(pp=2), *more], tokens)) for tokens in (770, 768))
        own = Checkpointer(CheckpointConfig(enable=True), folder / f"sizes{number}/checkpoint")
        own.save(TrainState(step=1, loader={}), saved.named)
        before = here.whole()
        with pytest.raises(ConfigError) as caught:
            own.load(here.named)
        after = here.whole()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        said.append(str(caught.value).replace(f"sizes{number}", "sizes"))
    return said


def test_a_vocabulary_of_another_size_is_refused_as_a_whole_one_is(tmp_path: Path) -> None:
    write_config(tmp_path, tmp_path / "nowhere")
    for whole, divided in run_ranks(of_other_sizes, 2, tmp_path):
        assert whole == divided
        assert f"does not fit this model: model.{EMBEDDING} has shape (770, 48) there and (768, 48) here;" in divided
