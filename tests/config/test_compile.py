"""[compile]: what is refused next to it."""

import pytest

from mmtrain.commands.job_checks import check_inputs
from mmtrain.config import config
from mmtrain.errors import ConfigError
from mmtrain.planner.job_schedule import job_schedule
from mmtrain.schedule.library.catalogue import CATALOGUE

ON = ["compile.enable=true", "planner.search.split_backward=false"]


def load(*words, name="debug_vlm.toml"):
    return config.load(name, [*ON, *words])


def test_a_job_with_compiled_blocks():
    job = load("planner.memory_limit=4GiB", 'planner.search.memory_strategies=["keep", "recompute", "offload"]')
    assert job.compile.enable
    assert load("parallelism.context_parallel_degree=2", "activation_checkpoint.mode=full").compile.enable
    assert config.load("debug_vlm.toml", ["compile.enable=true", "planner.enable=false"]).compile.enable


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["planner.search.split_backward=true"],
            "planner.search.split_backward = true: a compiled block makes all its gradients",
        ),
        (["parallelism.separate_gradients=true"], "parallelism.separate_gradients = true: a compiled block makes all"),
        (["parallelism.tensor_parallel_degree=2"], "parallelism.tensor_parallel_degree = 2: layers that exchange rows"),
        (["activation_checkpoint.mode=selective"], 'activation_checkpoint.mode = "selective": a compiled block runs'),
        (
            ["activation_checkpoint.mode=ops", 'activation_checkpoint.save_ops=["aten.mm"]'],
            'activation_checkpoint.mode = "ops": a compiled block runs',
        ),
        (
            ["planner.memory_limit=4GiB"],
            "planner.search.memory_strategies = ['keep', 'selective', 'recompute']: a compiled",
        ),
        (["model.language.trainable=lora", "model.lora.dropout=0.1"], "model.lora.dropout = 0.1: masks are drawn"),
        (["parallelism.pipeline_parallel_degree=1", "elastic.enable=true"], "elastic.enable = true: a node that"),
    ],
)
def test_what_cannot_be_compiled_is_refused(words, message):
    with pytest.raises(ConfigError) as caught:
        load(*words)
    assert message in str(caught.value)


def test_clips_are_refused():
    with pytest.raises(ConfigError, match=r"compile.enable = true with \[model.dit\]"):
        load(name="debug_t2v.toml")


def test_schedules_that_split_backwards_are_refused():
    for name, schedule in CATALOGUE.items():
        job = load("planner.enable=false", f"parallelism.pipeline_parallel_schedule={name}")
        if schedule.splits_backward:
            with pytest.raises(ConfigError, match=f'pipeline_parallel_schedule = "{name}" splits backwards'):
                job_schedule(job)
        else:
            assert job_schedule(job).name == name


def test_a_machine_without_a_compiler_is_refused_before_any_process_starts(monkeypatch):
    monkeypatch.setattr("mmtrain.parallel.compile.why_no_compiler", lambda device: "there is no C++ compiler (g++)")
    check_inputs(config.load("debug_vlm.toml"))
    with pytest.raises(ConfigError, match=r"^compile.enable = true, but nothing can be compiled for cpu here: there"):
        check_inputs(load())
