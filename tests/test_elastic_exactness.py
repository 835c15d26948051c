"""Elastic jobs of all kinds lose a node, and are bit for bit those that were stopped, saved and resumed there."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.elastic_faults import Fault
from tests.elastic_jobs import ANY_NUMBER, JOB, SAVING, check_like_resumed, run_elastic
from tests.jobs import write_config, write_video_config

pytestmark = pytest.mark.ranks

IN_AN_ACTION = [Fault(slot=1, step=3, place="action", action=5)]
TWO_NODES = [(0, [1, 1]), (2, [1])]
ADAPTERS = ['model.language.trainable="lora"', "model.encoder.trainable=false"]
PLANNED = [
    "planner.enable=true",
    "planner.search.budget_evaluations=50",
    "planner.search.threads=1",
    "planner.search.patience_s=50.0",
]
ASSIGNED = ["training.seq_len=384", "assignment.samples_per_step=20", "lr_scheduler.decay_ratio=0"]
ASSIGNED += ["assignment.policy=balanced", "assignment.evaluations=2"]
BACKGROUND = ["checkpoint.async_mode=async", "checkpoint.interval=1", "data.num_workers=1"]


def nightly(*values: object, id: str) -> object:
    return pytest.param(*values, id=id, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        pytest.param(ADAPTERS, 1, id="frozen and LoRA"),
        nightly(PLANNED, 1, id="planned"),
        nightly(ASSIGNED, 1, id="assigned"),
        nightly(BACKGROUND, 1, id="saved in the background, workers"),
        nightly(["parallelism.tensor_parallel_degree=2"], 2, id="tp"),
        nightly(["parallelism.data_parallel_shard_degree=2"], 2, id="dp_shard"),
        nightly(["parallelism.context_parallel_degree=2"], 2, id="cp"),
    ],
)
def test_two_nodes_lose_one(tmp_path: Path, charts: Path, options: list[str], ranks: int) -> None:
    path = write_config(tmp_path, charts)
    run = run_elastic(path, [*JOB, *options, *ANY_NUMBER], 2, IN_AN_ACTION, ranks=ranks)
    assert run.phases == TWO_NODES
    check_like_resumed(run, path, [*JOB, *options], stage=ranks)


@pytest.mark.nightly
def test_a_text_to_video_job(tmp_path: Path, shapes: Path) -> None:
    path, job = write_video_config(tmp_path, shapes), [*SAVING, "training.global_batch_size=6"]
    run = run_elastic(path, [*job, *ANY_NUMBER], 2, IN_AN_ACTION)
    assert run.phases == TWO_NODES
    check_like_resumed(run, path, job)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("nodes", "lost", "phases"),
    [
        (5, [0], [(0, [2, 3]), (2, [2, 2])]),
        (5, [4, 2], [(0, [2, 3]), (2, [3])]),
        (4, [1], [(0, [2, 2]), (2, [3])]),
        (3, [1], [(0, [2])]),
    ],
)
def test_deeper_pipelines(
    tmp_path: Path, charts: Path, nodes: int, lost: list[int], phases: Sequence[tuple[int, list[int]]]
) -> None:
    path, deep = write_config(tmp_path, charts), ["elastic.min_nodes=2", "elastic.max_failures=0"]
    faults = [Fault(slot=slot, step=3, place="action", action=5) for slot in lost]
    run = run_elastic(path, [*JOB, *deep], nodes, faults)
    assert run.phases == phases
    check_like_resumed(run, path, JOB)


def test_an_idle_node_takes_the_place_of_a_lost_one(tmp_path: Path, charts: Path) -> None:
    path, job = write_config(tmp_path, charts), [*JOB, "training.global_batch_size=2"]
    run = run_elastic(path, [*job, *ANY_NUMBER], 3, IN_AN_ACTION)
    assert [event["pipelines"] for event in run.events] == [[1, 1], [1, 1]]
    assert [event["nodes"] for event in run.events] == [3, 2]
    check_like_resumed(run, path, job, phases=[(0, [1, 1])])
