"""Jobs without float32 masters: what is the same to the bit, what an update rounds, and the memory that is planned."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from mmtrain.config import config
from mmtrain.config.optimizer import OptimizerConfig
from mmtrain.errors import ConfigError
from mmtrain.export.folder import export
from mmtrain.parallel.optim import build_optimizers
from mmtrain.planner.memory.rank_bytes import Sharding
from mmtrain.simulator.partition_choice import partition_of
from mmtrain.spec.builders import model_spec
from tests.jobs import SHALLOW, finished, layout, metrics, train, write_config
from tests.ranks import run_ranks

BFLOAT16 = (*SHALLOW, "training.mixed_precision_param=bfloat16")
ADAPTERS = (*BFLOAT16, "model.encoder.trainable=false", 'model.language.trainable="lora"', "model.lora.use_dora=true")
SAVES = ("checkpoint.enable=true", "checkpoint.interval=3")


@pytest.mark.ranks
@pytest.mark.parametrize(
    "degrees",
    [pytest.param(layout(), marks=pytest.mark.nightly, id="one"), pytest.param(layout(shard=2), id="two shards")],
)
def test_frozen_weights_in_bfloat16_change_no_number(charts: Path, degrees: list[str]) -> None:
    world = 1 + (degrees != layout())
    masters = finished(charts, world, [*degrees, *ADAPTERS])
    found = finished(charts, world, [*degrees, *ADAPTERS, "training.master_weights=trained"])
    for key in ("loss", "grad_norm"):
        assert metrics(found, key) == metrics(masters, key)


@pytest.mark.ranks
def test_a_job_without_masters_learns_resumes_and_is_exported(tmp_path: Path, charts: Path) -> None:
    none = [*BFLOAT16, "training.master_weights=none", "lr_scheduler.decay_ratio=0.0", *SAVES]
    whole = finished(charts, 2, [*layout(shard=2), *none])
    losses = metrics(whole)
    assert losses[1] == metrics(finished(charts, 2, [*layout(shard=2), *BFLOAT16]))[1], "weights are rounded to compute"
    assert losses[6] < losses[1] - 0.2
    job = write_config(tmp_path, charts)
    run_ranks(train, 2, job, [*layout(shard=2), *none, "training.steps=3"])
    (tmp_path / "run/metrics.jsonl").rename(tmp_path / "before.jsonl")
    run_ranks(train, 2, job, [*layout(shard=2), *none])
    assert metrics(tmp_path) == {step: losses[step] for step in (4, 5, 6)}
    export(tmp_path / "run", tmp_path / "out")
    from safetensors.torch import load_file

    for path in (tmp_path / "out").rglob("*.safetensors"):
        assert all(torch.equal(x, x.bfloat16().float()) for x in load_file(path).values()), "nothing is between"


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_an_update_is_that_of_a_float32_weight_rounded(moments: str) -> None:
    generator = torch.Generator().manual_seed(1)
    model = nn.Linear(24, 16, bias=False)
    start = torch.randn(16, 24, generator=generator).bfloat16()
    model.weight = nn.Parameter(start.clone())
    optimizers = build_optimizers(OptimizerConfig(lr=3e-2, moments_dtype=moments), [model], [])
    theirs = nn.Parameter(start.float())
    wanted = torch.optim.AdamW([theirs], lr=3e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for _ in range(3):
        grad = torch.randn(16, 24, generator=generator).bfloat16()
        model.weight.grad, theirs.grad = grad.clone(), grad.float()
        optimizers.step()
        wanted.step()
        with torch.no_grad():
            theirs.copy_(theirs.bfloat16())
            for key in ("exp_avg", "exp_avg_sq") if moments == "bfloat16" else ():
                wanted.state[theirs][key].copy_(wanted.state[theirs][key].bfloat16())
        assert model.weight.dtype is torch.bfloat16
        assert torch.equal(model.weight.float(), theirs)


def test_a_small_update_is_lost() -> None:
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizers = build_optimizers(OptimizerConfig(lr=1e-3, weight_decay=0.0), [model], [])
    model.weight.grad = torch.ones(4, 4, dtype=torch.bfloat16)
    optimizers.step()
    assert torch.equal(model.weight, torch.ones(4, 4)), "0.1 % is less than half of the step from 1 down, 0.39 %"


def test_planning_counts_the_bytes_of_shards(charts: Path, tmp_path: Path) -> None:
    job = config.load(write_config(tmp_path, charts), [*layout(shard=2), *ADAPTERS])
    spec = model_spec(job.model, dtype_bytes=2)
    sizes = {}
    for masters in ("all", "trained", "none"):
        of_job = dataclasses.replace(job, training=dataclasses.replace(job.training, master_weights=masters))
        sizes[masters] = Sharding.of(of_job).rank_state(spec, partition_of(of_job, spec), 0)
    params = sum(module.num_params for module in spec.modules) - 0
    trained = sum(module.num_trainable_params for module in spec.modules)
    saved = {masters: sizes["all"].param_bytes - state.param_bytes for masters, state in sizes.items()}
    tied = spec.module("language").layers[-1].num_shared_params
    assert saved["trained"] == pytest.approx(2 * (params - trained) / 2, rel=0.2) and tied
    assert saved["none"] - saved["trained"] == pytest.approx(2 * trained / 2)
    assert sizes["none"].reduced_bytes * 2 == sizes["trained"].reduced_bytes == sizes["all"].reduced_bytes


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.master_weights=none"], r"master_weights = \"none\" holds weights in bfloat16, but training.mixed"),
        (
            [*BFLOAT16, "training.master_weights=none", "optimizer.ema_decay=0.9"],
            r"master_weights = \"none\" with optimizer.ema_decay = 0.9: averages in bfloat16 would not move",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(charts: Path, tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.load(write_config(tmp_path, charts), overrides)
