"""Jobs on a machine that lacks packages: what stands in for torchtitan is the same, and nothing else is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from mmtrain.config.sections import OptimizerConfig
from mmtrain.config.topology import MeshShape
from mmtrain.parallel import titan, without_titan
from mmtrain.parallel.optim import build_optimizers
from tests.parallel.test_optim import Model
from tests.ranks import run_alone

MISSING = ("torchtitan", "numba", "llvmlite", "datasets", "pyarrow", "tensorboard", "scipy", "diffusers", "peft")


def optimizers_of(model: nn.Module) -> Any:
    """As a job builds them, with a part that has nothing to train."""
    frozen = nn.Embedding(2, 2).requires_grad_(False)
    return build_optimizers(OptimizerConfig(lr=0.1, weight_decay=0.3), [model, frozen], [])


def without_torchtitan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the job's container anew over the other one."""
    own = staticmethod(titan.FrozenAwareOptimizers._build_param_groups)

    class FrozenAware(without_titan.OptimizersContainer):
        _build_param_groups = own

        def __init__(self, *args: Any, moments: torch.dtype, **kwargs: Any) -> None:
            assert moments == torch.float32, "those of torch's own optimizers"
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(titan, "OptimizersContainer", without_titan.OptimizersContainer)
    monkeypatch.setattr("mmtrain.parallel.optim.LocalOptimizers", FrozenAware)
    monkeypatch.setattr("mmtrain.parallel.optim.ParamGroupConfig", without_titan.ParamGroupConfig)


def copied(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def test_optimizers_step_and_store_as_those_of_torchtitan(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    models = [Model(), Model()]
    models[1].load_state_dict(models[0].state_dict())
    pair = [optimizers_of(models[0])]
    without_torchtitan(monkeypatch)
    pair.append(optimizers_of(models[1]))
    assert isinstance(pair[1], without_titan.OptimizersContainer)
    for step in range(3):
        if step == 2:  # each goes on from what the other one stored
            stored = [copied(optimizers.state_dict()) for optimizers in pair]
            assert set(stored[0]) == set(stored[1])
            for optimizers, other in zip(pair, reversed(stored), strict=True):
                optimizers.load_state_dict(other)
        for model, optimizers in zip(models, pair, strict=True):
            model.head(model.norm(model.linear(model.embed(torch.arange(5))))).square().sum().backward()
            optimizers.step()
            optimizers.zero_grad()
    for (name, ours), theirs in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_what_was_never_stepped_is_stored_without_a_change() -> None:
    model = Model()
    before = [parameter.clone() for parameter in model.parameters()]
    groups = [without_titan.ParamGroupConfig(pattern="weight$", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.5})]
    config = without_titan.OptimizersContainer.Config(param_groups=groups)
    state = without_titan.OptimizersContainer(config, model_parts=[model]).state_dict()
    assert state["param_groups.linear.weight.lr"] == 0.5
    assert not state["state.linear.weight.exp_avg"].any()
    assert "state.linear.bias.exp_avg" not in state
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


SHAPE = MeshShape(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2)
NAMES = ("tp", "fsdp", "batch", ["dp_replicate", "fsdp"])


def ranks_of_meshes(rank: int) -> list[list[list[int]]]:
    """Of torchtitan's meshes and of ours: the ranks of this rank's submeshes."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=SHAPE.world_size)
    try:
        found = []
        for kind in (titan.ParallelDims, without_titan.ParallelDims):
            titan.ParallelDims = kind
            dims = titan.parallel_dims(SHAPE)
            found.append([dims.get_mesh(name).mesh.tolist() for name in NAMES])
        return found
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", [0, 13])
def test_meshes_have_the_ranks_of_those_of_torchtitan(rank: int) -> None:
    theirs, ours = run_alone(ranks_of_meshes, rank)
    assert ours == theirs
    assert all(rank in np.ravel(mesh) for mesh in ours)


def test_a_job_trains_on_a_machine_that_lacks_packages(tmp_path: Path) -> None:
    """One line says that no plan is searched, one that there are no tensorboard files."""
    question = {"role": "user", "content": "two and two"}
    rows = [{"messages": [question, {"role": "assistant", "content": str(number)}]} for number in range(40)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["parallelism.pipeline_parallel_degree=1", "training.steps=2", "training.seq_len=64"]
    options += ["data.num_workers=0", "checkpoint.enable=true"]
    options += [f'data.source="{tmp_path}/train.jsonl"', f'job.dump_folder="{tmp_path}/run"']
    script = f"import sys; sys.modules.update(dict.fromkeys({MISSING}))\n"
    script += "from mmtrain.commands.cli import train_main; sys.exit(train_main(sys.argv[1:]))"
    words = ["--config", "debug_text.toml", *(f"--{option}" for option in options)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout + done.stderr
    assert said.count("no search, as numba is not installed: plans are those of interleave") == 1
    assert said.count("as tensorboard is not installed") == 1
    assert "Traceback" not in said
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "run/checkpoint/step-2/.metadata").is_file()
