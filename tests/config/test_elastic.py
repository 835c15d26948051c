"""[elastic]: what is refused in it and next to it, and the ordinary job of some pipelines."""

import re

import pytest

from mmtrain.config import config
from mmtrain.config.config import with_depths
from mmtrain.errors import ConfigError

ON = ["parallelism.pipeline_parallel_degree=1", "elastic.enable=true"]


def load(*words):
    return config.load("debug_vlm.toml", [*ON, *words])


def test_an_elastic_job_has_one_stage_until_it_has_nodes():
    job = load("parallelism.tensor_parallel_degree=2", 'elastic.lighthouse="http://node-0:29510"')
    assert job.parallelism.layout.depths == (1,) and job.parallelism.layout.stage_size == 2
    assert job.elastic.beat_s == job.elastic.silent_s / 4


def test_the_job_of_some_pipelines_is_an_ordinary_one(tmp_path):
    job = load("elastic.max_failures=0", "parallelism.tensor_parallel_degree=2")
    some = with_depths(job, [1, 2])
    assert some.parallelism.layout.depths == (1, 2) and not some.elastic.enable
    path = tmp_path / "job.toml"
    for one in (job, some):
        path.write_text(config.dump(one))
        assert config.load(path) == one
    assert with_depths(some, [1, 1]) == with_depths(job, [1, 1])


def test_placements_that_need_two_ranks_are_those_of_its_pipelines():
    job = load("planner.placement=parallel")
    assert with_depths(job, [2, 2]).parallelism.layout.depths == (2, 2)
    with pytest.raises(ConfigError, match=re.escape("parallelism.pipelines[0] = 1: modules on ranks of their own")):
        with_depths(job, [1, 2])


FOLLOW = "with elastic.enable = true, where pipelines and their ranks follow from the nodes"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["elastic.silent_s=0.5"], "elastic.silent_s = 0.5: 4 beats have to be missed, and there are at least 0.25 s"),
        (["elastic.silent_s=-1"], "elastic.silent_s = -1.0: 4 beats"),
        (["elastic.silent_s=300"], "elastic.silent_s = 300.0 is not below comm.timeout_seconds = 300"),
        (["elastic.leave_wait_s=9", "comm.timeout_seconds=9", "elastic.silent_s=8"], "elastic.leave_wait_s = 9.0 is"),
        (["elastic.max_failures=-1"], "elastic.max_failures = -1; it must be at least 0"),
        (["elastic.min_nodes=-1"], "elastic.min_nodes = -1; it must be at least 0"),
        (["elastic.below=stop"], 'elastic.below = "stop"; choose one of "save", "go_on"'),
        (["checkpoint.enable=false"], 'elastic.below = "save" with checkpoint.enable = false'),
        (["elastic.max_failures=4"], "training.global_batch_size = 4 microbatches are fewer than the 5 replicas of 5"),
        (["parallelism.pipelines=[1,2]"], f"parallelism.pipelines = [1, 2] {FOLLOW}"),
        (["parallelism.pipeline_parallel_degree=2"], f"parallelism.pipeline_parallel_degree = 2 {FOLLOW}"),
        (["parallelism.data_parallel_replicate_degree=2"], f"parallelism.data_parallel_replicate_degree = 2 {FOLLOW}"),
        (["model.language.num_segments=0", "model.language.pipeline_layout=Et|t*2L"], "model.language.pipeline_layout"),
        (["planner.placement=parallel", "model.language.ranks=1"], f"model.language.ranks = 1 {FOLLOW}"),
        (["parallelism.pipeline_parallel_schedule=o.csv"], 'parallelism.pipeline_parallel_schedule = "o.csv" with'),
    ],
)
def test_what_is_refused(words, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        load(*words)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "address",
    ["node:29510", "https://node:29510", "http://node", "http://:29510", "http://node:0", "http://node:99999",
     "http://node:29510/x", "http://me@node:29510", "http://node:port"],
)  # fmt: skip
def test_a_lighthouse_is_an_address_with_a_port(address):
    with pytest.raises(ConfigError, match=re.escape(f'elastic.lighthouse = "{address}"; it is an address with a port')):
        load(f'elastic.lighthouse="{address}"')


@pytest.mark.parametrize("address", ["http://node:29510", "http://10.0.0.1:1", "http://[::1]:29510", "http://a.b:1/"])
def test_addresses_of_lighthouses(address):
    assert load(f'elastic.lighthouse="{address}"').elastic.lighthouse == address


def test_without_enable_the_other_keys_refuse_nothing():
    words = ["parallelism.pipeline_parallel_degree=2", "checkpoint.enable=false", "elastic.silent_s=400"]
    assert not config.load("debug_vlm.toml", words).elastic.enable
