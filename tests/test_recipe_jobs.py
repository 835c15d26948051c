"""Whole jobs in the order of a recipe: losses, validation, the file in the run's folder, and ranks that disagree."""

import hashlib
import json

import pytest

from mmtrain.config import config
from mmtrain.errors import ConfigError
from mmtrain.simulator.job import make_job
from tests.jobs import SHALLOW, finished, layout, metrics, train, world_size, write_config
from tests.ranks import run_ranks
from tests.test_trainer import CURVE_TOLERANCE

HEAD = "from mmtrain.schedule.recipe import Placement, Recipe, Rule, Traversal\n"
RECIPES = {
    "split": "Recipe(in_flight=4 * P, until='W', split_backward=True, overrides={'vision': Rule(in_flight=3)})",
    "v": "Recipe(placement='v', first='alternate', forward='depth', backward='oldest', separate_gradients=True)",
    "functions": "Recipe(in_flight=lambda r: 2 * r.num_chunks, step=lambda moment: moment.ready[-1])",
}
VALIDATED = ["validation.enable=true", "validation.freq=4", "validation.steps=2"]
FOUR_STEPS = [*SHALLOW, "training.steps=4"]


def write_recipe(folder, name):
    path = folder / f"{name}.py"
    path.write_text(f"{HEAD}\ndef schedule(P):\n    return {RECIPES[name]}\n")
    return path


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", ["split", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("v", "functions"))]
)
def test_losses_are_those_of_one_process_and_the_run_keeps_the_recipe(tmp_path, charts, name):
    path, recipe = write_config(tmp_path, charts), write_recipe(tmp_path, name)
    degrees = layout(pp=2)
    segments = ["model.encoder.num_segments=0", "model.language.num_segments=0"]
    keys = [f"parallelism.pipeline_parallel_schedule={recipe}", *degrees, *segments, *FOUR_STEPS, *VALIDATED]
    run_ranks(train, world_size(degrees), path, keys)
    curve, reference = metrics(tmp_path), metrics(finished(charts, 1, FOUR_STEPS))
    assert sorted(curve) == [1, 2, 3, 4]
    assert max(abs(curve[s] - reference[s]) / reference[s] for s in reference) < CURVE_TOLERANCE
    assert (tmp_path / "run" / "schedule.py").read_text() == recipe.read_text()
    digest = hashlib.sha256(recipe.read_bytes()).hexdigest()
    assert (tmp_path / "run" / "schedule.sha256").read_text() == f"{digest}  schedule.py\n"
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("validation_loss" in step for step in steps)


def test_what_a_job_refuses_of_a_recipe(tmp_path):
    path = tmp_path / "recipe.py"

    def refused(returned, *keys):
        path.write_text(f"{HEAD}\ndef schedule(P):\n    return {returned}\n")
        job = config.load(
            "vlm_s.toml", [f"parallelism.pipeline_parallel_schedule={path}", "planner.enable=false", *keys]
        )
        with pytest.raises(ConfigError) as caught:
            make_job(job)
        return str(caught.value)

    free = 'planner.memory_limit=""'
    assert "names ranks (Placement.ranks), but a job has each" in refused(
        "Recipe(placement=Placement(ranks=[0]))", free
    )
    assert "is honoured by parallelism" in refused("Recipe()", free, "planner.activation_memory_gib=10")
    assert "is kept by parallelism" in refused("Recipe()")
    assert "recipe.py:4: NameError" in refused("Recip()", free)


def test_the_placement_of_a_recipe_cuts_what_the_config_leaves_open(tmp_path):
    path = tmp_path / "recipe.py"
    path.write_text(f"{HEAD}\ndef schedule(P):\n    return Recipe(placement=Placement('circular', 3), memory=True)\n")
    keys = [f"parallelism.pipeline_parallel_schedule={path}", "planner.enable=false"]
    open_keys = ["model.encoder.num_segments=0", "model.language.num_segments=0"]
    cut = make_job(config.load("vlm_s.toml", [*keys, *open_keys])).partition
    assert len(cut.of_module("vision")) == len(cut.of_module("language")) == 3 * cut.num_ranks
    cut = make_job(config.load("vlm_s.toml", [*keys, *open_keys[:1], "model.language.num_segments=1"])).partition
    assert len(cut.of_module("language")) == cut.num_ranks
