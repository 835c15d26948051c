"""Averages of weights in whole jobs: they are those of a plain loop, on any layout, after any resume."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mmtrain.checkpoint.run_folder import load_module, open_run
from mmtrain.config import config
from mmtrain.errors import ConfigError
from mmtrain.parallel.optim import ema_part
from tests.jobs import SAVING, SHALLOW, die_at, finished, layout, metrics, train, world_size, write_config
from tests.ranks import run_ranks
from tests.stored_runs import averages, stored

pytestmark = pytest.mark.ranks

DECAY = 0.3
"""Step 4 is the first one with it: 5 / 14 stays by the warm-up alone."""
EMA = f"optimizer.ema_decay={DECAY}"
EVERY = [*SHALLOW, "checkpoint.enable=true", "checkpoint.interval=1", "training.steps=5", EMA]


def plain_averages(run: Path, steps: int) -> dict[str, Tensor]:
    """The same by a loop over the weights that were saved after each step."""
    found: dict[str, Tensor] = {}
    for step in range(1, steps + 1):
        for name, value in stored(run, step).items():
            if name.startswith("model."):
                found.setdefault(name.removeprefix("model."), value.clone()).lerp_(value, 1 - ema_part(DECAY, step))
    return found


@pytest.mark.parametrize(
    "degrees",
    [
        layout(shard=2),
        *(pytest.param(d, marks=pytest.mark.nightly) for d in (layout(pp=2), layout(tp=2), layout(pp=2, cp=2))),
    ],
)
def test_averages_are_those_of_a_plain_loop_and_of_one_process(charts: Path, degrees: list[str]) -> None:
    run = finished(charts, world_size(degrees), [*degrees, *EVERY]) / "run"
    ours, plain = averages(run, 5), plain_averages(run, 5)
    assert len(ours) > 30
    for name, value in ours.items():
        assert torch.equal(value, plain[name]), name
    one = averages(finished(charts, 1, EVERY) / "run", 5)
    assert ours.keys() == one.keys()
    moved = torch.cat([(value - stored(run, 1)[f"model.{name}"]).flatten() for name, value in one.items()])
    off = torch.cat([(ours[name] - value).flatten() for name, value in one.items()])
    assert off.norm() < 0.02 * moved.norm()


def killed(rank: int, path: Path, overrides: list[str]) -> None:
    die_at(4)
    train(rank, path, overrides)


def test_a_resumed_job_averages_exactly(tmp_path: Path, charts: Path) -> None:
    overrides = [*SAVING, EMA]
    whole = finished(charts, 2, overrides)
    path = write_config(tmp_path, charts)
    with pytest.raises(AssertionError, match="process died with exit code -9"):
        run_ranks(killed, 2, path, overrides)
    run_ranks(train, 2, path, overrides)
    ours, theirs = averages(tmp_path / "run", 6), averages(whole / "run", 6)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert metrics(tmp_path) == metrics(whole) == metrics(finished(charts, 2, SAVING)), "they change no weight"


def test_of_an_older_checkpoint_they_begin_at_its_weights(tmp_path: Path, charts: Path) -> None:
    old = finished(charts, 2, SAVING) / "run"
    path = write_config(tmp_path, charts)
    (tmp_path / "run" / "checkpoint").mkdir(parents=True)
    os.symlink(old / "checkpoint" / "step-2", tmp_path / "run" / "checkpoint" / "step-2")
    run_ranks(train, 1, path, [*SHALLOW, "checkpoint.enable=true", "checkpoint.interval=1", EMA, "training.steps=3"])
    before, after = stored(old, 2), stored(tmp_path / "run", 3)
    ours = averages(tmp_path / "run", 3)
    for name, value in ours.items():
        expected = before[f"model.{name}"].lerp(after[f"model.{name}"], 1 - ema_part(DECAY, 3))
        assert torch.equal(value, expected), name
    assert "has no averages of weights: they begin at its weights" in (tmp_path / "run" / "log.txt").read_text()
    with pytest.raises(ConfigError, match=r"--weights ema: .*step-2 has no averages of weights"):
        open_run(old, 2, weights="ema")


def test_a_module_is_loaded_with_either(charts: Path) -> None:
    run = finished(charts, 2, [*SAVING, EMA]) / "run"
    expected = {"ema": averages(run, 6), "trained": {n.removeprefix("model."): t for n, t in stored(run, 6).items()}}
    for weights, default in (("ema", None), ("trained", "trained")):
        opened = open_run(run, 6, weights=default)
        assert opened.weights == weights, "averages, where there are any"
        for name, value in load_module(opened, "language").named_parameters():
            if name != "language.lm_head.weight":  # the embedding
                assert torch.equal(value, expected[weights][name]), name
    assert not torch.equal(*(expected[kind]["language.model.norm.weight"] for kind in expected))


def validated(rank: int, path: Path, overrides: list[str]) -> tuple[float, float, float]:
    """Validation loss of averages, of the weights, and of weights that were set to the averages by hand."""
    from mmtrain.observe.validation import Validator
    from mmtrain.parallel.torch_private import raw_part
    from mmtrain.training.trainer import Trainer

    trainer = Trainer(config.load(path, overrides))
    trainer.set_up(torch.device("cpu"))
    for step, item in zip((1, 2), trainer.items, strict=False):
        trainer.train_step(step, item, trainer.plan(item.meta, step=step))
    held = [raw_part(p).clone() for p in trainer.model.parameters]

    def loss(weights: str) -> float:
        section = config.with_values(trainer.config, {"validation.weights": weights}).validation
        plan = partial(trainer.plan, step=3, forward_only=True)
        return Validator(section=section, sources=(), runner=trainer._runner, plan=plan).validate().loss

    found = loss("ema"), loss("trained")
    assert all(torch.equal(raw_part(p), value) for p, value in zip(trainer.model.parameters, held, strict=True))
    for _, parameter, optimizer, _ in trainer.placement.optimizers.trained():
        raw_part(parameter).copy_(raw_part(optimizer.state[parameter]["ema"]))
    found = (*found, loss("trained"))
    trainer.tear_down()
    return found


@pytest.mark.parametrize("degrees", [layout(shard=2), layout(pp=2)])
def test_a_validation_takes_them(tmp_path: Path, charts: Path, degrees: list[str]) -> None:
    overrides = [*degrees, *SHALLOW, EMA, "validation.enable=true", "validation.steps=1"]
    for ema, trained, by_hand in run_ranks(validated, 2, write_config(tmp_path, charts), overrides):
        assert ema == by_hand != trained


def test_a_validation_of_averages_that_no_one_makes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'validation.weights = "ema", but optimizer.ema_decay = 0.0'):
        config.load(write_config(tmp_path, tmp_path), ["validation.weights=ema"])
