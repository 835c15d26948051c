"""Jobs whose costs follow what their steps took."""

import json

import pytest

from mmtrain.config import config
from mmtrain.errors import ConfigError
from tests.jobs import layout, metrics, train, write_config
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

LEARNING = [
    "planner.enable=true",
    "planner.search.budget_evaluations=50",
    "planner.search.threads=1",
    "planner.learn_costs=true",
]


def test_plans_change_and_losses_do_not(tmp_path, charts):
    """Whatever the order of actions, each step learns the same."""
    extra = [*layout(pp=2), *LEARNING, "training.steps=4", "checkpoint.enable=true", "checkpoint.interval=4"]
    path = write_config(tmp_path / "learned", charts)
    run_ranks(train, 2, path, extra)
    run_ranks(train, 1, write_config(tmp_path / "one", charts), [*layout(), "training.steps=4"])
    assert metrics(tmp_path / "learned") == pytest.approx(metrics(tmp_path / "one"), rel=1e-5)
    assert sorted(metrics(tmp_path / "learned", "cost_error")) == [1, 2, 3, 4]
    # Seconds of this machine instead of those of a nominal device, from the third step on.
    planned = metrics(tmp_path / "learned", "planned_makespan_s")
    assert min(planned[3], planned[4]) > 100 * max(planned[1], planned[2])

    folder = tmp_path / "learned" / "run" / "checkpoint" / "step-4"
    costs = json.loads((folder / "train_state.json").read_text())["costs"]
    assert (costs["modules"], costs["num_ranks"]) == (["vision", "language"], 2)
    run_ranks(train, 2, path, [*extra, "training.steps=5"])
    assert metrics(tmp_path / "learned", "planned_makespan_s")[5] > 100 * planned[1]
    log = tmp_path / "learned" / "run" / "log.txt"
    assert "learned anew" not in log.read_text()
    run_ranks(train, 1, path, [*layout(), *LEARNING, *extra[-2:], "training.steps=6"])
    assert "costs are learned anew: those of step 5 have pipeline ranks 2, this job 1" in log.read_text()
    assert metrics(tmp_path / "learned", "planned_makespan_s")[6] < planned[3] / 100


@pytest.mark.parametrize("other", ["elastic.enable=true", "parallelism.pipelines=[1, 2]"])
def test_pipelines_of_several_depths_learn_no_costs(tmp_path, charts, other):
    with pytest.raises(ConfigError, match=r"planner\.learn_costs = true with"):
        config.load(write_config(tmp_path, charts), [*LEARNING, "checkpoint.enable=true", other])
