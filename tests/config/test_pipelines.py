"""`parallelism.pipelines`: which job each pipeline has, and what is refused of which pipeline."""

import re

import pytest

from mmtrain.commands.cli import main
from mmtrain.config import config
from mmtrain.config.config import each_pipeline, of_pipeline
from mmtrain.errors import ConfigError
from mmtrain.simulator.make_job import make_job

ONE = ["parallelism.pipeline_parallel_degree=1", "parallelism.data_parallel_shard_degree=1"]


def load(name, *words):
    return config.load(name, [*ONE, *words])


def test_each_pipeline_has_the_job_of_a_grid_of_pipelines_like_it():
    job = load("debug_vlm.toml", "parallelism.pipelines=[2,3,3]", "training.global_batch_size=16")
    for index, depth in enumerate((2, 3, 3)):
        own = of_pipeline(job, index).parallelism
        assert (own.pipelines, own.layout.depths) == ([], (depth,) * 3)
    assert [of_pipeline(job, index).training.global_batch_size for index in range(3)] == [12, 18, 18]
    first, second, third = each_pipeline(job, make_job)
    assert (first.partition.num_ranks, second.partition.num_ranks) == (2, 3) and second is third


def test_equal_pipelines_are_a_grid():
    grid = config.load("debug_vlm.toml", ["parallelism.data_parallel_replicate_degree=2"])
    listed = load("debug_vlm.toml", "parallelism.pipelines=[2,2]")
    assert of_pipeline(grid, 1) is grid
    assert listed.parallelism.layout == grid.parallelism.layout
    assert of_pipeline(listed, 1) == grid


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["parallelism.pipelines=[2,3]", "parallelism.pipeline_parallel_degree=2"],
            "parallelism.pipelines = [2, 3] with parallelism.pipeline_parallel_degree = 2, which it is in place of",
        ),
        (
            ["parallelism.pipelines=[2,3]", "parallelism.data_parallel_replicate_degree=2"],
            "parallelism.pipelines = [2, 3] with parallelism.data_parallel_replicate_degree = 2",
        ),
        (["parallelism.pipelines=[0]"], "parallelism.pipelines = [0]; each pipeline has at least 1"),
        (
            ["parallelism.pipelines=[1,1,1,1,1]"],
            "training.global_batch_size = 4 microbatches are fewer than the 5 data-parallel replicas",
        ),
        (
            ["parallelism.pipelines=[2,1]", "planner.placement=parallel"],
            'planner.placement = "parallel" with parallelism.pipelines[1] = 1: modules on ranks of their own',
        ),
        (
            ["parallelism.pipelines=[2,40]"],
            "model.encoder.num_segments: module 'vision' has 4 layers (cut points), but parallelism.pipelines[1] = 40",
        ),
        (
            ["parallelism.pipelines=[2,3]", "planner.search.eager_forwards=1"],
            "planner.search.eager_forwards = 1 with parallelism",
        ),
    ],
)
def test_what_is_refused(words, message):
    with pytest.raises(ConfigError, match="^(configs/debug_vlm.toml: )?" + re.escape(message)):
        each_pipeline(load("debug_vlm.toml", *words), make_job)


def test_a_batch_that_equal_pipelines_do_not_divide_stays_as_it_is():
    words = ["parallelism.pipelines=[2,2]", "training.global_batch_size=5"]
    assert of_pipeline(load("debug_vlm.toml", *words), 0).training.global_batch_size == 5


@pytest.mark.parametrize("command", [["tune", "--cluster", "h800x8"], ["allocate", "--cluster", "h800", "--gpus", "8"]])
def test_degrees_of_equal_pipelines_are_not_looked_for_in_a_job_of_others(command, capsys):
    words = ["--config", "debug_vlm.toml", *(f"--{key}" for key in ONE), "--parallelism.pipelines=[2,3]"]
    assert main([*command, *words]) == 2
    assert "parallelism.pipelines = [2, 3], but this looks for degrees of equal pipelines" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["tune", "--cluster", "h800x8"], ["allocate", "--cluster", "h800", "--gpus", "8"]])
def test_nor_in_an_elastic_job(command, capsys):
    words = ["--config", "debug_vlm.toml", *(f"--{key}" for key in ONE), "--elastic.enable=true"]
    assert main([*command, *words]) == 2
    assert "elastic.enable = true, but this looks for degrees of equal pipelines" in capsys.readouterr().err


def test_a_stage_larger_than_a_node_is_refused_before_anything_starts(capsys):
    keys = ["planner.hardware=h800", "parallelism.data_parallel_shard_degree=16", "training.global_batch_size=64"]
    words = ["--parallelism.pipeline_parallel_degree=1", "--parallelism.pipelines=[1,2]", *(f"--{key}" for key in keys)]
    assert main(["config", "--config", "debug_vlm.toml", *words]) == 2
    assert "a stage has dp_shard 16 x cp 1 x tp 1 = 16 ranks, and a node has 8" in capsys.readouterr().err
