"""Jobs with two towers: equal loss curves on every layout, exact resume, and held-out pairs that are found."""

import json

import pytest

from mmtrain.config import config
from mmtrain.data.toy.pairs import make_pairs
from tests.jobs import TEMPLATE, die_at, layout, metrics, train
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

CURVE_TOLERANCE = 1e-5
"""Relative difference of losses between layouts. Measured: at most 2.2e-7."""

TOWERS = """
[job]
dump_folder = "{folder}/run"
[model.encoder]
config = {{ model_type = "clip_vision_model", hidden_size = 32, intermediate_size = 64, num_hidden_layers = 2, num_attention_heads = 4, image_size = 32, patch_size = 8, projection_dim = 24 }}
num_segments = 1
sub_microbatch_size = 3
[model.language]
config = {{ model_type = "clip_text_model", hidden_size = 32, intermediate_size = 64, num_hidden_layers = 2, num_attention_heads = 4, vocab_size = 416, max_position_embeddings = 32, projection_dim = 24, bos_token_id = 0, eos_token_id = 0 }}
num_segments = 1
sub_microbatch_size = 4
[model.contrast]
microbatches = 2
[data]
source = "{data}"
num_workers = 0
max_pairs = 6
[training]
steps = 6
seq_len = 32
global_batch_size = 4
[validation]
enable = true
freq = 6
steps = 1
"""  # noqa: E501


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs") / "data"
    make_pairs(folder, 300, seed=0)
    return folder


def write_job(folder, data):
    folder.mkdir(parents=True)
    path = folder / "job.toml"
    ends = TEMPLATE[TEMPLATE.index("[optimizer]") :]
    path.write_text((TOWERS + ends).format(folder=folder, data=data))
    return path


def test_all_layouts_have_one_loss_curve(tmp_path, data):
    planning = ["planner.enable=true", "planner.search.budget_evaluations=50", "planner.device.flops_per_s=1e10"]
    for name, world, extra in (
        ("one", 1, layout()),
        ("planned", 2, [*layout(pp=2), *planning]),
        ("placed", 2, [*layout(pp=2), 'planner.placement="parallel"', "parallelism.pipeline_parallel_schedule=1F1B"]),
        ("one, each alone", 1, [*layout(), "model.contrast.microbatches=1"]),
        ("replicas, each alone", 2, [*layout(shard=2), "model.contrast.microbatches=1"]),
    ):
        run_ranks(train, world, write_job(tmp_path / name, data), extra)
    assert sorted(metrics(tmp_path / "one")) == list(range(1, 7))
    alone = "one, each alone"  # replicas have other microbatches, so other groups of several
    for name, wanted in (("planned", "one"), ("placed", "one"), ("replicas, each alone", alone)):
        assert metrics(tmp_path / name) == pytest.approx(metrics(tmp_path / wanted), rel=CURVE_TOLERANCE), name
        assert metrics(tmp_path / name, "recall") == metrics(tmp_path / wanted, "recall"), name
    recall = metrics(tmp_path / "one", "recall")[6]
    assert sorted(recall) == ["captions@1", "captions@5", "images@1", "images@5"]
    losses = metrics(tmp_path / "one", "validation_loss")
    assert losses[6] < 0.9 * losses[0]


def test_the_losses_of_several_sources_are_told_apart_in_a_group(tmp_path, data):
    make_pairs(tmp_path / "other", 60, seed=1)
    names = {"one": data, "two": tmp_path / "other"}
    tables = ", ".join(f'{{source="{folder}", weight=1.0, name="{name}"}}' for name, folder in names.items())
    extra = [*layout(), 'data.source=""', f"data.sources=[{tables}]", "training.steps=2", "validation.freq=2"]
    run_ranks(train, 1, write_job(tmp_path / "job", data), extra)
    whole = metrics(tmp_path / "job")
    parts = {name: (metrics(tmp_path / "job", f"loss/{name}"), metrics(tmp_path / "job", f"samples/{name}"))
             for name in names}  # fmt: skip
    for step in (1, 2):
        sums = [(losses[step] * counts[step], counts[step]) for losses, counts in parts.values()]
        assert all(0 < count < 24 for _, count in sums) and sum(count for _, count in sums) == 24
        assert sum(total for total, _ in sums) / 24 == pytest.approx(whole[step], rel=CURVE_TOLERANCE)
    assert set(metrics(tmp_path / "job", "loss_by_source")[2]) == set(names)


def killed(rank, path, overrides):
    """Every rank is killed without warning in the middle of step 3."""
    die_at(3)
    train(rank, path, overrides)


def test_a_killed_job_continues_exactly(tmp_path, data):
    extra = [
        *layout(pp=2),
        "checkpoint.enable=true",
        "checkpoint.interval=2",
        "training.steps=4",
        "model.contrast.loss=siglip",
    ]
    whole = write_job(tmp_path / "whole", data)
    run_ranks(train, 2, whole, extra)
    broken = write_job(tmp_path / "broken", data)
    with pytest.raises(AssertionError, match="died"):
        run_ranks(killed, 2, broken, extra)
    run_ranks(train, 2, broken, extra)
    assert metrics(broken.parent) == metrics(whole.parent)
    assert sorted(metrics(whole.parent)) == [1, 2, 3, 4]


@pytest.mark.nightly
def test_the_small_job_finds_held_out_pairs(tmp_path):
    """`debug_clip.toml`: recall at 1 and 5 at least 5 times chance, in both directions."""
    make_pairs(tmp_path / "data", 6000, seed=0)
    extra = [f'data.source="{tmp_path / "data"}"', f'job.dump_folder="{tmp_path / "run"}"']
    extra += ["metrics.enable_tensorboard=false"]
    config.load("debug_clip.toml", extra)
    run_ranks(train, 2, "debug_clip.toml", extra, timeout=1500)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = [line["recall"] for line in lines if "recall" in line][-1]
    chance = 1 / 128
    assert all(share >= 5 * chance * int(name[-1]) for name, share in last.items()), last
    assert min(last.values()) > 0.5
