"""Damage to the files of a checkpoint, and a small job on two ranks that saves and loads it."""

import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mmtrain.checkpoint.checkpoint import Checkpointer
from mmtrain.checkpoint.files import MANIFEST
from mmtrain.checkpoint.state import NamedTensors, TrainState
from mmtrain.config.optimizer import OptimizerConfig
from mmtrain.config.sections import CheckpointConfig
from mmtrain.errors import MMTrainError
from mmtrain.parallel.optim import build_optimizers

KINDS = ("flip", "zeros", "cut", "half", "longer", "missing", "stale", "pipe")


@dataclass(frozen=True)
class Damage:
    """What happens to one file of a checkpoint."""

    kind: str
    file: str
    seed: int = 0

    def apply(self, checkpoint: Path, older: Path) -> None:
        """Damages the file. Args: older: another checkpoint, whose file of this name a stale one is."""
        path, draw = checkpoint / self.file, random.Random(self.seed)
        data = bytearray(path.read_bytes())
        path.unlink()
        if self.kind == "flip":
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        elif self.kind == "zeros":
            length = min(len(data), 32 * 1024)
            start = draw.randrange(len(data) - length + 1)
            data[start : start + length] = bytes(length)
        elif self.kind == "cut":
            del data[-1]
        elif self.kind == "half":
            del data[len(data) // 2 :]
        elif self.kind == "longer":
            data += b"\0"
        elif self.kind == "stale":
            data = bytearray((older / self.file).read_bytes())
        if self.kind == "pipe":
            os.mkfifo(path)
        elif self.kind != "missing":
            path.write_bytes(data)


def damages(files: list[str], seed: int) -> Iterator[Damage]:
    """Endless ones, each kind of each file among them."""
    draw = random.Random(seed)
    while True:
        rounds = [Damage(kind, file, draw.getrandbits(32)) for kind in KINDS for file in files]
        yield from draw.sample(rounds, len(rounds))


class SmallJob:
    """A module whose rows are divided over both ranks and one that is this rank's own, with moments of AdamW."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.folder = folder
        self.model = nn.ModuleDict({"shared": nn.Linear(96, 96), f"own{rank}": nn.Linear(64, 64 + 32 * rank)})
        fully_shard(self.model["shared"], mesh=init_device_mesh("cpu", (2,)))
        self.optimizers = build_optimizers(OptimizerConfig(), [self.model], ())
        self.tensors = NamedTensors([self.model], self.optimizers, {})
        torch.manual_seed(rank)

    def checkpointer(self, **section: Any) -> Checkpointer:
        """One that has just been started."""
        return Checkpointer(CheckpointConfig(enable=True, **section), self.folder)

    def train(self) -> None:
        """One step on gradients that are drawn."""
        for parameter in self.model.parameters():
            parameter.grad = torch.empty_like(parameter)
            _local(parameter.grad).normal_()
        self.optimizers.step()

    def spoil(self) -> None:
        """Overwrites all that a load has to bring back."""
        with torch.no_grad():
            for value in (*self.model.state_dict().values(), *self.optimizers.state_dict().values()):
                if isinstance(value, Tensor):
                    _local(value).fill_(-1)
        torch.manual_seed(99)

    def values(self) -> dict[str, Any]:
        """Parameters, state of the optimizer and random state of this rank."""
        found = {**self.model.state_dict(), **self.optimizers.state_dict(), "rng": torch.get_rng_state()}
        return {name: _local(value).clone() if isinstance(value, Tensor) else value for name, value in found.items()}


def save_two(job: SmallJob, folder: Path) -> dict[int, dict[str, Any]]:
    """The values of checkpoints 2 and 4, which are saved into `folder`."""
    saved = {}
    for step in (2, 4):
        job.train()
        state = TrainState(step=step, loader={"seed": 3, "epoch": 0, "cursor": step})
        job.checkpointer().save(state, job.tensors)
        saved[step] = job.values()
    if dist.get_rank() == 0:
        shutil.copytree(job.folder, folder)
    return saved


def load_damaged(
    rank: int, folder: Path, wanted: list[Damage], load_step: int = -1, manifest: bool = True
) -> list[tuple[str, Any]]:
    """What a rank sees of each kind of damage to the newer one of two checkpoints: ("loaded", step) if every value is
    bit for bit what that step saved, ("other values", step), or ("refused", sentence).
    """
    job, whole, outcomes = SmallJob(rank, folder / "checkpoint"), folder / "whole", []
    saved = save_two(job, whole)
    for damage in wanted:
        if rank == 0:
            shutil.rmtree(job.folder)
            shutil.copytree(whole, job.folder)
            if not manifest:
                for path in job.folder.glob(f"*/{MANIFEST}"):
                    path.unlink()
            damage.apply(job.folder / "step-4", job.folder / "step-2")
        dist.barrier()
        job.spoil()
        try:
            state = job.checkpointer(load_step=load_step).load(job.tensors)
            assert state is not None
            same = equal(job.values(), saved[state.step]) if state.step in saved else False
            outcomes.append(("loaded" if same else "other values", state.step))
        except MMTrainError as error:
            outcomes.append(("refused", str(error)))
        dist.barrier()
    return outcomes


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two sets of values are the same bit for bit."""
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        for name, value in one.items()
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
