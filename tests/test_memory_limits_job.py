"""Real jobs under `planner.memory_limit`: the same losses, measured peaks, margins that grow, and what a rank that has
no memory left leaves behind."""

import json
import re
import resource
import time
from pathlib import Path

import pytest
import torch

from mmtrain.commands.cli import main
from mmtrain.config import config
from mmtrain.errors import ConfigError, MMTrainError
from tests.jobs import layout, metrics, write_config
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

GIB = 2**30
ON = ["planner.enable=true", "planner.search.budget_evaluations=50", "planner.search.threads=1"]


def train(rank, path, overrides):
    """Runs one rank of a job; what it logged, as rank 0 would."""
    import mmtrain.training.trainer as trainer

    logged = []
    for level in ("info", "warning"):
        setattr(trainer.logger, level, lambda text, *args: logged.append(text % args if args else text))
    job = trainer.Trainer(config.load(path, overrides))
    job.run()
    return logged, job.state.memory


def values(folder, key):
    return list(metrics(folder, key).values())


PLANNER = pytest.mark.parametrize(
    "planner", [pytest.param([], id="off", marks=pytest.mark.nightly), pytest.param(ON, id="on")]
)


@PLANNER
def test_a_limit_changes_no_loss_while_all_fits(tmp_path, charts, planner):
    free, limited = (write_config(tmp_path / name, charts) for name in ("free", "limited"))
    extra = [*layout(pp=2), *planner, "metrics.enable_tensorboard=true"]
    logged = {
        path: run_ranks(train, 2, path, [*extra, *more])
        for path, more in ((free, []), (limited, ["planner.memory_limit=6GiB"]))
    }
    # With options to choose from, the search may try equally good orders in another turn.
    assert metrics(limited.parent) == pytest.approx(metrics(free.parent), rel=1e-6 if planner else 0.0)
    for path in (free, limited):
        for key in ("memory_predicted_gib", "memory_measured_gib"):
            found = values(path.parent, key)
            assert len(found) == 6
            assert all(0.05 < value < 6 for value in found), found
    tables = [[text for text in logged[path][0][0] if text.startswith("memory in GiB")] for path in (free, limited)]
    assert tables[0] == []
    (table,) = tables[1]
    assert [line.split()[:2] for line in table.splitlines()[2:]] == [["0", "6.00"], ["1", "6.00"]]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(limited.parent / "run" / "tb"))
    board.Reload()
    assert {"memory/predicted(GiB)", "memory/measured(GiB)", "memory/limit(GiB)"} <= set(board.Tags()["scalars"])


# ---------------------------------------------------------------------------------------------- overshoot


def with_ballast(rank, path, overrides, step, num_bytes):
    """On pp_rank 1, something that no plan knows of takes memory during one step. (limits by step, state, log)"""
    from mmtrain.training.trainer import Trainer

    run_step, limits = Trainer.train_step, {}

    def train_step(self, number, item, plan):
        limits[number] = plan.problem.memory_limit_bytes
        ballast = torch.ones(num_bytes // 4) if number == step and self.mesh.pp_rank == 1 else None
        try:
            return run_step(self, number, item, plan)
        finally:
            del ballast

    Trainer.train_step = train_step
    logged, state = train(rank, path, overrides)
    return limits, state, logged


@PLANNER
def test_an_overshoot_raises_the_margin_of_that_rank_and_a_resumed_run_goes_on_with_it(tmp_path, charts, planner):
    path = write_config(tmp_path / "job", charts)
    extra = [*layout(pp=2), *planner, "planner.memory_limit=2GiB", "checkpoint.enable=true", "checkpoint.interval=1"]
    extra += ["checkpoint.keep_latest_k=0"]
    (limits, state, logged), (others, other_state, _) = run_ranks(with_ballast, 2, path, extra, 2, 2 * GIB)
    assert (limits, state) == (others, other_state)
    ((first, margins),) = state["margins"]  # once: when the ballast is gone, no step is over the limit
    assert first == 4
    assert margins[0] == pytest.approx(0.05 * 2 * GIB)
    # More than half of what was left went beyond the prediction; one step takes no more than half.
    left = limits[1][1]
    assert margins[1] == pytest.approx(margins[0] + left / 2)
    assert limits[1] == limits[2] == limits[3]
    assert limits[4] == limits[5] == limits[6] == (limits[1][0], pytest.approx(left / 2))
    (said,) = [text for text in logged if "passed planner.memory_limit" in text]
    assert re.match(r"step 2: pp_rank 1 passed .* its margin grows from 102 MiB to \d+ MiB from step 4 on", said)
    measured, predicted = (values(path.parent, f"memory_{key}_gib") for key in ("measured", "predicted"))
    assert [value > 2 for value in measured] == [False, True, False, False, False, False]
    assert max(predicted) < 2

    # From the step after the overshoot: one step with the limits of before, as in the run that went on.
    losses = metrics(path.parent)
    found = run_ranks(with_ballast, 2, path, [*extra, "checkpoint.load_step=2"], 0, 0)
    for again, resumed, words in found:
        assert again == {step: limits[step] for step in (3, 4, 5, 6)}
        assert resumed == state
        assert any(text.startswith("resumed memory in GiB") for text in words)
    assert metrics(path.parent) == losses


def with_ballast_always(rank, path, overrides, num_bytes):
    """Every step takes more than planned on pp_rank 1. ([step] -> limit of its activations, log)"""
    from mmtrain.training.trainer import Trainer

    run_step, limits = Trainer.train_step, []

    def train_step(self, number, item, plan):
        limits.append(plan.problem.memory_limit_bytes[1])
        ballast = torch.ones(num_bytes // 4) if self.mesh.pp_rank == 1 else None
        try:
            return run_step(self, number, item, plan)
        finally:
            del ballast

    Trainer.train_step = train_step
    return limits, train(rank, path, overrides)[0]


@pytest.mark.nightly
def test_a_margin_that_grows_every_step_never_ends_the_job(tmp_path, charts):
    path = write_config(tmp_path / "job", charts)
    extra = [*layout(pp=2), "planner.memory_limit=1GiB", "training.steps=14"]
    (limits, logged), _ = run_ranks(with_ballast_always, 2, path, extra, GIB)
    assert len(limits) == len(metrics(path.parent)) == 14
    assert limits[0] == limits[1] == pytest.approx(2 * limits[2])  # half of what was left, step after step
    assert limits[-1] == limits[-2] < 0.02 * limits[0]  # until there is room for a microbatch alone
    assert 0 < sum("passed planner.memory_limit" in text for text in logged) < 12


def refused(rank, path, overrides):
    with pytest.raises(ConfigError) as caught:
        train(rank, path, overrides)
    return str(caught.value)


def test_a_limit_below_what_the_process_takes_is_refused_on_every_rank(tmp_path, charts):
    path = write_config(tmp_path / "job", charts)
    one, two = run_ranks(refused, 2, path, [*layout(pp=2), "planner.memory_limit=150MiB"])
    assert one == two
    assert one.startswith('planner.memory_limit = "150MiB" leaves pp_rank 0 nothing for activations')


def test_a_part_of_a_cpu_is_of_the_machine_shared_by_its_ranks(tmp_path, charts):
    path = write_config(tmp_path / "job", charts)
    found = run_ranks(train, 2, path, [*layout(pp=2), "planner.memory_limit=50%", "training.steps=2"])
    (table,) = [text for text in found[0][0] if text.startswith("memory in GiB")]
    total = int(re.search(r"MemTotal: +(\d+) kB", Path("/proc/meminfo").read_text())[1]) * 1024 / GIB
    assert float(table.splitlines()[2].split()[1]) <= total / 4 * 1.01


# ------------------------------------------------------------------------------------------ out of memory


def short_of_memory(rank, path, overrides):
    """pp_rank 1 may take 1 GiB of addresses beside what it has. (kind of error, its text, seconds)"""
    if rank == 1:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + GIB
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    start = time.monotonic()
    try:
        train(rank, path, overrides)
    except Exception as error:
        return type(error).__name__, isinstance(error, MMTrainError), str(error), time.monotonic() - start
    return "", False, "", time.monotonic() - start


@pytest.mark.parametrize("planner", [[], [*ON, "planner.memory_limit=6GiB"]], ids=["no limit", "limit"])
def test_a_rank_without_memory_says_what_to_change_and_leaves_its_plan(tmp_path, charts, planner, capsys):
    path = write_config(tmp_path / "job", charts)
    path.write_text(path.read_text().replace("vocab_size = 768", "vocab_size = 600000"))
    extra = [*layout(pp=2), *planner, "training.seq_len=2048", "training.steps=2", "training.loss_chunk_tokens=0"]
    other, mine = run_ranks(short_of_memory, 2, path, extra, leave_together=False)
    assert other[:3] == mine[:3]  # its neighbour is gone: it says the same, and does not wait
    assert max(other[3], mine[3]) < 60
    name, ours, text, _ = mine
    assert ours, (name, text)
    assert re.match(
        r"step 1: rank 1 \(pp_rank 1\) is out of memory; [\d.]+ GiB more were requested\. Predicted: ", text
    )
    folder = tmp_path / "job" / "run" / "out_of_memory" / "step_1_rank_1"
    assert f"memory snapshot are in {folder}" in text
    if planner:
        assert "GiB of planner.memory_limit = 6.00 GiB; used until then: " in text
        assert "First lower planner.memory_limit below" in text
        assert "or add offload to planner.search.memory_strategies" in text
    else:
        assert 'First set planner.memory_limit, such as "90%"' in text
    assert "lower training.seq_len or model.encoder.sub_microbatch_size" in text

    names = {"memory_snapshot.txt", "plan.json", "prediction.json", "problem.json.gz", "program.txt"}
    assert {file.name for file in folder.iterdir()} == names
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]
    said = json.loads((folder / "prediction.json").read_text())
    assert (said["step"], said["rank"], said["pp_rank"]) == (1, 1, 1)
    assert said["asked_bytes"] > 1e6
    assert said["memory_limit"] == ("6GiB" if planner else None)
    assert said["measured_bytes"] > said["memory"][1]["process_bytes"] > 0
    assert len(said["batch"]) == 4 and all(row["tokens"] > 500 and row["images"] for row in said["batch"])
    snapshot = (folder / "memory_snapshot.txt").read_text()
    assert "VmHWM:" in snapshot
    assert "float32 [600000, 48]" in snapshot

    problem, plan = str(folder / "problem.json.gz"), str(folder / "plan.json")
    capsys.readouterr()
    assert main(["schedule", "show", plan, "--problem", problem]) == 0
    assert "makespan" in capsys.readouterr().out
    assert main(["schedule", "show", plan, "--problem", problem, "--format", "program"]) == 0
    assert main(["check", problem, plan]) == 0
