"""Whole jobs with the planner on: they learn as without it, resume exactly, and outlive their planner."""

import dataclasses
import json
import math
import threading
import time

import pytest

from mmtrain.checkpoint.checkpoint import complete_steps
from mmtrain.config import config
from mmtrain.errors import ConfigError, DataError, PlanError, RankLostError
from tests.jobs import SAVING, SHALLOW, die_at, finished, layout, metrics, world_size, write_config
from tests.ranks import run_ranks
from tests.searches import Faulty, random_search
from tests.test_trainer import CURVE_TOLERANCE, terminated

pytestmark = pytest.mark.ranks

ON = ["planner.enable=true", "planner.search.budget_evaluations=50", "planner.search.threads=1"]
SEED = 3
"""Of the jobs of `tests.jobs`."""


def train(rank, path, overrides, find=None):
    """Runs one rank of a job with another search; what it warned of."""
    import mmtrain.training.trainer as trainer
    from mmtrain.parallel import planning

    warned = []
    planning.logger.warning = lambda text, *args: warned.append(text % args)
    job = config.load(path, overrides)
    (trainer.Trainer(job, search=find) if find else trainer.Trainer(job)).run()
    assert not [thread for thread in threading.enumerate() if thread.name == "plan-ahead"]
    return warned


def lines(folder, key):
    return [json.loads(line)[key] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


V = ["parallelism.pipeline_parallel_schedule=ZBV", "model.encoder.num_segments=2", "model.language.num_segments=2"]
FOUR_STEPS = [*SHALLOW, "training.steps=4"]
NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    ("degrees", "options", "find"),
    [
        pytest.param(layout(pp=2), ["planner.search.sub_microbatch=false"], None, id="searched"),
        pytest.param(layout(pp=2), [], random_search, id="drawn", marks=NIGHTLY),
        pytest.param(layout(pp=2, shard=2), [], random_search, id="replicas"),
        pytest.param(layout(cp=2), ["planner.search.distributed=true"], random_search, id="submesh"),
        pytest.param(layout(), [], random_search, id="one process", marks=NIGHTLY),
        pytest.param(layout(pp=2), V, random_search, id="v"),
    ],
)
def test_losses_are_those_of_a_job_without_the_planner(tmp_path, charts, degrees, options, find):
    """Whatever the plans: searched ones, and drawn ones with split backwards, on one and on several ranks."""
    path = write_config(tmp_path, charts)
    run_ranks(train, world_size(degrees), path, [*degrees, *options, *ON, *FOUR_STEPS], find)
    assert lines(tmp_path, "plan_late") == lines(tmp_path, "plan_invalid") == [0] * 4
    assert all(bound > 0 for bound in lines(tmp_path, "plan_lower_bound_s"))
    curve, reference = metrics(tmp_path), metrics(finished(charts, 1, FOUR_STEPS))
    assert sorted(curve) == [1, 2, 3, 4]
    assert max(abs(curve[s] - reference[s]) / reference[s] for s in reference) < CURVE_TOLERANCE


def test_a_job_outlives_its_planner(tmp_path, charts):
    extra = [*layout(pp=2), *SHALLOW, "training.steps=9"]
    path = write_config(tmp_path, charts)
    faults = {2: "crash", 3: "deadlock", 4: "missing", 5: "foreign", 7: "late", 8: "slow"}
    warned, others = run_ranks(
        train,
        2,
        path,
        [*extra, *ON, "planner.search.patience_s=2", "metrics.enable_tensorboard=true"],
        Faulty(SEED, faults),
    )
    losses, reference = metrics(path.parent), metrics(finished(charts, 2, extra))
    assert max(abs(losses[s] - reference[s]) / reference[s] for s in range(1, 10)) < CURVE_TOLERANCE
    assert lines(path.parent, "plan_failed") == [0, 1, 1, 1, 1, 1, 1, 1, 1]
    assert lines(path.parent, "plan_invalid") == [0, 0, 1, 2, 3, 3, 3, 3, 3]
    assert lines(path.parent, "plan_late") == [0, 0, 0, 0, 0, 0, 1, 1, 1]
    plans = zip(lines(path.parent, "plan_makespan_s"), lines(path.parent, "plan_first_makespan_s"), strict=True)
    assert [plan == first for plan, first in plans] == [step in (2, 3, 4, 5, 7) for step in range(1, 10)]
    assert [text.split(":")[0] for text in warned] == [
        "step 2 runs its first plan (search failed)",
        "step 3 runs its first plan (search invalid)",
        "step 4 runs its first plan (search invalid)",
        "step 5 runs its first plan (search invalid)",
        "step 7 runs its first plan (search timed out)",
    ]
    assert "it raised RuntimeError: the search broke down" in warned[0]
    assert all(
        word in text for text, word in zip(warned[1:4], ("deadlock", "but the plan has", "another"), strict=True)
    )
    assert others == []
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(path.parent / "run" / "tb"))
    board.Reload()
    assert {"planner/late", "planner/gap", "planner/search_s"} <= set(board.Tags()["scalars"])


def killed_at(rank, path, overrides, step):
    """Every rank is killed without warning in the middle of a step, while the next one is planned."""
    die_at(step)
    train(rank, path, overrides, random_search)


def test_a_resumed_job_plans_and_trains_as_one_that_was_never_stopped(tmp_path, charts):
    extra = [*SAVING, *ON]
    whole = write_config(tmp_path / "whole", charts)
    run_ranks(train, 2, whole, extra, random_search)
    path = write_config(tmp_path / "killed", charts)
    with pytest.raises(AssertionError, match="process died with exit code -9"):
        run_ranks(killed_at, 2, path, extra, 5)
    run_ranks(train, 2, path, extra, random_search)
    for key in ("loss", "grad_norm", "plan_makespan_s"):
        assert sorted(metrics(path.parent, key)) == [1, 2, 3, 4, 5, 6]
        assert metrics(path.parent, key) == metrics(whole.parent, key)


def test_sigterm_saves_the_step_that_was_trained_and_not_the_one_that_is_planned(tmp_path, charts):
    path = write_config(tmp_path / "a", charts)
    extra = [*SAVING, *ON, "validation.enable=true", "validation.freq=2"]
    extra += ["validation.steps=1"]
    run_ranks(terminated, 2, path, extra)
    assert complete_steps(path.parent / "run" / "checkpoint") == [2, 3]
    run_ranks(train, 2, path, extra)
    whole = finished(charts, 2, extra)
    assert metrics(path.parent) == metrics(whole)
    assert metrics(path.parent, "validation_loss") == metrics(whole, "validation_loss")


def failing_data(rank, path, overrides):
    """The loader's third batch cannot be read: what is raised, and after how many steps."""
    from mmtrain.data.loader import Loader
    from mmtrain.training.trainer import Trainer

    class Short(Loader):
        count = 0

        def __next__(self):
            self.count += 1
            if self.count == 3:
                raise DataError("the third batch is broken")
            return super().__next__()

    import mmtrain.parallel.replica_data

    mmtrain.parallel.replica_data.Loader = Short
    trainer = Trainer(config.load(path, overrides))
    with pytest.raises(DataError, match="the third batch is broken"):
        trainer.run()
    return trainer.state.step


def test_broken_data_end_the_job_at_their_own_step(tmp_path, charts):
    path = write_config(tmp_path / "a", charts)
    assert run_ranks(failing_data, 2, path, [*layout(pp=2), *SHALLOW, *ON]) == [2, 2]


def failing_alone(rank, path, overrides):
    """Rank 1 has a bug in step 3; seconds until each rank has left."""
    from mmtrain.training.trainer import Trainer

    original = Trainer.backward

    def backward(self, step, item, plan):
        if step == 3 and rank == 1:
            raise ZeroDivisionError
        return original(self, step, item, plan)

    Trainer.backward = backward
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError if rank else RankLostError):
        Trainer(config.load(path, overrides), search=Faulty(SEED, {4: "late"})).run()
    return time.monotonic() - start


def test_a_rank_that_fails_alone_leaves_while_a_search_runs(tmp_path, charts):
    path = write_config(tmp_path / "a", charts)
    assert max(run_ranks(failing_alone, 2, path, [*layout(pp=2), *SHALLOW, *ON], leave_together=False)) < 30


def with_little_memory(rank, path, overrides):
    """Nothing fits on replica 1."""
    from mmtrain.training.trainer import Trainer

    trainer = Trainer(config.load(path, overrides))
    if rank == 1:
        section = trainer.job.section.with_search(activation_memory_gib=1e-9)
        trainer.jobs = tuple(dataclasses.replace(job, section=section) for job in trainer.jobs)
    with pytest.raises(PlanError) as caught:
        trainer.run()
    return str(caught.value)


@pytest.mark.parametrize("planner", ["on", "off"])
def test_a_batch_that_fits_nowhere_ends_all_replicas(tmp_path, charts, planner):
    path = write_config(tmp_path / "a", charts)
    one, two = run_ranks(with_little_memory, 2, path, [*layout(shard=2), *SHALLOW, *(ON if planner == "on" else ())])
    assert one == two
    assert "over the memory limit" in one


def planned_gradients(rank, path, overrides):
    import torch

    from mmtrain.local.driven_steps import gradients
    from mmtrain.training.trainer import Trainer

    steps = gradients(Trainer(config.load(path, overrides)), torch.device("cpu"), 2)
    return [(result.loss, result.grad_norm) for _, result in steps]


def test_gradients_are_planned_too(tmp_path, charts):
    path = write_config(tmp_path / "a", charts)
    on = run_ranks(planned_gradients, 2, path, [*layout(pp=2), *SHALLOW, *ON])
    off = run_ranks(planned_gradients, 2, path, [*layout(pp=2), *SHALLOW])
    for step, (loss, norm) in enumerate(off[0]):
        assert all(math.isclose(rank[step][0], loss, rel_tol=CURVE_TOLERANCE) for rank in on)
        assert all(math.isclose(rank[step][1], norm, rel_tol=1e-4) for rank in on)


def run_long(tmp_path, charts, steps, timeout):
    path = write_config(tmp_path / "long", charts)
    extra = [*layout(pp=2), *ON, *SHALLOW, f"training.steps={steps}", "debug.check_plans=false"]
    run_ranks(train, 2, path, extra, timeout=timeout)
    found = {key: lines(path.parent, key) for key in ("images", "plan_late", "plan_failed", "plan_invalid", "loss")}
    assert len(found["loss"]) == steps
    assert len(set(found["images"])) > 5  # batches differ
    assert [found[key][-1] for key in ("plan_late", "plan_failed", "plan_invalid")] == [0, 0, 0]
    waits = sorted(lines(path.parent, "plan_time_s"))
    assert waits[-1] < 60.0
    return waits


def test_twelve_steps_without_a_stall(tmp_path, charts):
    run_long(tmp_path, charts, 12, timeout=240)


@pytest.mark.nightly
def test_a_thousand_steps_without_a_stall(tmp_path, charts):
    waits = run_long(tmp_path, charts, 1000, timeout=1800)
    assert waits[len(waits) // 2] < 0.5  # seconds that a step waits for its plan, in the middle of all steps


def test_patience_is_shorter_than_the_timeout_of_the_job(tmp_path, charts):
    path = write_config(tmp_path / "a", charts)
    with pytest.raises(
        ConfigError, match=r"planner\.search\.patience_s = 300\.0 is not below comm\.timeout_seconds = 300"
    ):
        config.load(path, [*ON, "planner.search.patience_s=300"])
    assert config.load(path, ["planner.search.patience_s=300"]).planner.search.patience_s == 300
