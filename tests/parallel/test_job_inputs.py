"""What of a job its ranks compare: each difference that would train something else, and none that would not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import mmtrain
from mmtrain.config import config
from mmtrain.costs.operators.hardware import load_hardware
from mmtrain.launch.launched import Launched
from mmtrain.parallel import job_inputs as module
from mmtrain.parallel.alike import Subject
from mmtrain.parallel.job_inputs import job_inputs
from mmtrain.planner.job_schedule import job_schedule
from tests.jobs import write_config

FIRST = Launched(rank=0, world_size=1, local_rank=0, local_world_size=1)


def of(job: Path, *overrides: str, launched: Launched = FIRST) -> dict[str, Subject]:
    values = config.load(job, overrides)
    subjects = job_inputs(values, job_schedule(values), torch.device("cpu"), launched)
    return {subject.name: subject for subject in subjects}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job whose weights, tokenizer, data, schedule, profile and hardware are files in its folder."""
    from safetensors.torch import save_file

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "data" / "image.png").touch()
    (tmp_path / "model").mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    shutil.copytree(Path(mmtrain.__file__).parent / "assets" / "tokenizer", tmp_path / "tokenizer")
    (tmp_path / "recipe.csv").write_text("0F0,0B0\n")
    (tmp_path / "gpu.toml").write_text('extends = "h800"\nlaunch_s = 1e-6\n')
    (tmp_path / "profile.json").write_text("{}")
    path = write_config(tmp_path, tmp_path / "data")
    text = path.read_text()
    language = text[text.index("[model.language]") : text.index("[data]")]
    changed = text.replace(language, f'[model.language]\npretrained = "{tmp_path}/model"\n')
    names = {"tokenizer.path": "tokenizer", "parallelism.pipeline_parallel_schedule": "recipe.csv",
             "planner.hardware": "gpu.toml", "planner.profile": "profile.json"}  # fmt: skip
    path.write_text(changed + "".join(f'\n[{k.split(".")[0]}]\n{k.split(".")[1]} = "{tmp_path}/{v}"\n'
                                      for k, v in names.items() if k != "planner.profile")
                    + f'profile = "{tmp_path}/profile.json"\n')  # fmt: skip
    return path


def differing(one: dict[str, Subject], other: dict[str, Subject]) -> dict[str, set[str]]:
    """Subject -> keys whose values differ."""
    found = {}
    for name in one:
        keys = one[name].values.keys() | other[name].values.keys()
        different = {key for key in keys if one[name].values.get(key) != other[name].values.get(key)}
        assert bool(different) == (one[name].digest != other[name].digest)
        found |= {name: different} if different else {}
    return found


def larger_header(folder: Path) -> None:
    from safetensors.torch import save_file

    save_file({"b": torch.zeros(2)}, folder / "model" / "model.safetensors")


def appended(name: str) -> Callable[[Path], None]:
    def append(folder: Path) -> None:
        with (folder / name).open("a") as file:
            file.write("\n")

    return append


@pytest.mark.parametrize(
    ("change", "subject", "key"),
    [
        (appended("data/train.jsonl"), "data", "data.source: train.jsonl"),
        (lambda folder: (folder / "data" / "other.png").touch(), "data", "data.source: images"),
        (lambda folder: (folder / "data" / "more.jsonl").touch(), "data", "data.source: more.jsonl"),
        (larger_header, "files of the model", "model.language.pretrained: model.safetensors"),
        (appended("model/config.json"), "files of the model", "model.language.pretrained: config.json"),
        (appended("tokenizer/tokenizer.json"), "tokenizer or processor", "tokenizer.path: tokenizer.json"),
        (appended("recipe.csv"), "cost or schedule file", "parallelism.pipeline_parallel_schedule"),
        (appended("profile.json"), "cost or schedule file", "planner.profile"),
    ],
)
def test_a_changed_file_is_a_difference(job, change, subject, key):
    before = of(job)
    change(job.parent)
    assert differing(before, of(job)) == {subject: {key}}


def test_a_changed_base_of_the_hardware_is_a_difference(job):
    (job.parent / "base.toml").write_text((job.parent / "gpu.toml").read_text())
    (job.parent / "gpu.toml").write_text('extends = "base"\n')
    before = of(job)
    (job.parent / "base.toml").write_text('extends = "h800"\nlaunch_s = 2e-6\n')
    load_hardware.cache_clear()
    assert differing(before, of(job)) == {"cost or schedule file": {"planner.hardware"}}


def test_weights_that_are_not_read_and_files_of_no_use_make_no_difference(job):
    random = "model.language.weights=random"
    before = of(job, random)
    larger_header(job.parent)
    (job.parent / "model" / "README.md").touch()
    (job.parent / "data" / "notes.md").touch()
    (job.parent / "data" / ".cache").mkdir()
    (job.parent / "data" / ".cache" / "x.jsonl").touch()
    assert differing(before, of(job, random)) == {}


def test_equal_files_in_another_folder_make_no_difference(job):
    before = of(job)
    for name in ("data", "model", "tokenizer"):
        shutil.copytree(job.parent / name, job.parent / "moved" / name)
    moved = [
        f"data.source={job.parent}/moved/data",
        f"model.language.pretrained={job.parent}/moved/model",
        f"tokenizer.path={job.parent}/moved/tokenizer",
    ]
    assert differing(before, of(job, *moved)) == {}


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("optimizer.lr=1e-4", "optimizer.lr"),
        ("debug.seed=4", "debug.seed"),
        ("training.steps=7", "training.steps"),
        ("checkpoint.interval=7", "checkpoint.interval"),
        ("comm.timeout_seconds=7", "comm.timeout_seconds"),
        ("model.encoder.config.depth=3", "model.encoder.config.depth"),
    ],
)
def test_a_key_of_the_config_is_a_difference(job, override, key):
    assert differing(of(job), of(job, override)) == {"config": {key}}


@pytest.mark.parametrize(
    "override",
    [
        "job.dump_folder=there",
        "job.description=mine",
        "data.num_workers=3",
        "planner.search.threads=2",
        "metrics.log_freq=5",
    ],
)
def test_what_nodes_may_have_for_themselves(job, override):
    assert differing(of(job), of(job, override)) == {}


def test_several_sources_count_one_by_one(job):
    folder = job.parent / "data"
    shutil.copytree(folder, job.parent / "second")
    tables = [{"source": str(folder), "weight": 1.0}, {"source": str(job.parent / "second"), "weight": 2.0}]
    written = (
        "[" + ", ".join("{" + ", ".join(f"{k} = {json.dumps(v)}" for k, v in t.items()) + "}" for t in tables) + "]"
    )
    several = ["data.source=", f"data.sources={written}"]
    before = of(job, *several)
    (job.parent / "second" / "train.jsonl").write_text("{}")
    assert differing(before, of(job, *several)) == {"data": {"data.sources[1].source: train.jsonl"}}
    assert differing(before, of(job, several[0], several[1].replace("2.0", "3.0"))).get("config") == {
        "data.sources[1].weight"
    }


def test_versions_and_sources_are_compared(job, monkeypatch, tmp_path):
    before = of(job)
    assert before["versions"].values["torch"] == torch.__version__
    assert "mmtrain/training/trainer.py" in before["source of mmtrain"].values
    monkeypatch.setattr(module.torch, "__version__", "2.0")
    assert differing(before, of(job)) == {"versions": {"torch"}}


def test_a_rank_looks_at_what_its_node_and_replica_read(job):
    """Of two nodes with one pipeline of four ranks, the second one may have no data."""
    degree = ["parallelism.pipeline_parallel_degree=4", "parallelism.pipeline_parallel_schedule=1F1B"]
    named = {
        rank: set(of(job, *degree, launched=Launched(rank=rank, world_size=4, local_rank=rank % 2, local_world_size=2)))
        for rank in range(4)
    }
    assert named[0] - named[1] >= {"data", "files of the model", "source of mmtrain", "tokenizer or processor"}
    assert named[2] - named[3] >= {"files of the model", "source of mmtrain"}
    assert "data" not in named[2]
    assert named[1] == named[3] >= {"config", "versions", "device"}


def test_data_that_a_rank_lacks_are_a_value_not_an_error(job):
    """Other ranks wait for what this one says."""
    before = of(job)
    missing = of(job, "data.source=/nowhere/at/all")
    assert "does not exist" in missing["data"].values["data.source"]
    assert set(differing(before, missing)) == {"data"}
