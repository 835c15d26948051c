"""The loader assigns the samples of its steps: the same sets, whatever the policy and the number of replicas."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mmtrain.config import config
from mmtrain.config.config import Config
from mmtrain.data.loader import LoadedStep, Loader
from mmtrain.errors import DataError
from mmtrain.planner.assignment.step_assigner import StepAssigner
from mmtrain.planner.job import Job
from mmtrain.simulator.make_job import make_job
from tests.data.samples import text_row, write_jsonl


def job(source: Path | str, dp: int = 1, *, seq_len: int = 256, **assignment: Any) -> Config:
    return config.load(
        "debug_vlm.toml",
        [
            f"data.source={source}",
            "data.num_workers=0",
            "training.global_batch_size=8",
            f"training.seq_len={seq_len}",
            f"parallelism.data_parallel_replicate_degree={dp}",
            *(f"assignment.{key}={str(value).lower()}" for key, value in assignment.items()),
        ],
    )


@functools.cache
def made_of(seq_len: int) -> Job:
    """The job of `job`, whatever it reads."""
    return make_job(job("unused", seq_len=seq_len))


def loaded(job: Config, num: int, **options: Any) -> list[list[LoadedStep]]:
    """[replica][step]"""
    assigner = StepAssigner.of(job, [made_of(job.training.seq_len)])
    degree = job.parallelism.layout.dp
    replicas = []
    for rank in range(degree):
        with Loader(job, num_steps=num, dp_rank=rank, dp_degree=degree, assigner=assigner, **options) as loader:
            replicas.append(list(loader))
    return replicas


def sets(replicas: Sequence[Sequence[LoadedStep]]) -> list[list[int]]:
    """[step] -> its samples in ascending order."""
    return [
        sorted(d.sample for _, meta, _ in step for m in meta.microbatches for d in m.documents)
        for step in zip(*replicas, strict=True)
    ]


POLICIES = [
    {"policy": "balanced", "evaluations": 4},
    {"policy": "balanced", "evaluations": 4, "fewer_microbatches": True, "samples_per_step": 16},
    {"policy": "balanced", "evaluations": 0, "samples_per_step": 24},
    {"policy": "entrain", "defer": True, "samples_per_step": 24},
    {"policy": "entrain", "fewer_microbatches": True, "samples_per_step": 24},
]


@pytest.mark.parametrize("options", POLICIES, ids=lambda o: "-".join(map(str, o.values())))
def test_every_policy_has_the_sets_and_targets_of_none(charts: Path, options: dict[str, Any]) -> None:
    plain = {key: value for key, value in options.items() if key == "samples_per_step"}
    expected = loaded(job(charts, **plain), 3)
    for dp in (1, 2, 4):
        found = loaded(job(charts, dp, **options), 3)
        assert sets(found) == sets(expected)
        for step in range(3):
            metas = [replica[step][1] for replica in found]
            assert sum(meta.num_targets for meta in metas) == expected[0][step][1].num_targets
            assert len({meta.assignment for meta in metas}) == 1
            assert len({replica[step][2] for replica in found} | {expected[0][step][2]}) == 1
            assert all(m.num_tokens <= 256 and m.documents for meta in metas for m in meta.microbatches)


def test_workers_and_resumed_loaders_assign_alike(charts: Path) -> None:
    two = job(charts, 2, policy="entrain", defer=True, samples_per_step=24)
    whole = loaded(two, 4)
    metas = [[step[1] for step in replica] for replica in whole]
    assert [[step[1] for step in replica] for replica in loaded(two, 4, num_workers=2)] == metas
    later = loaded(two, 2, state=whole[0][1][2])
    assert [[step[1] for step in replica] for replica in later] == [own[2:] for own in metas]
    # Another number of replicas continues with the same sets.
    other = loaded(job(charts, 4, policy="entrain", defer=True, samples_per_step=24), 2, state=whole[0][1][2])
    assert sets(other) == sets(whole)[2:]


def test_deferred_documents_come_first_in_the_microbatch_behind(charts: Path) -> None:
    deferred = 0
    for steps in loaded(job(charts, 2, seq_len=512, policy="entrain", defer=True, samples_per_step=28), 3):
        for _, meta, _ in steps:
            for microbatch in meta.microbatches:
                early = [document.deferred for document in microbatch.documents]
                assert early == sorted(early, reverse=True)
                deferred += sum(early)
    assert deferred


def test_a_corrupt_image_moves_no_other_sample(tmp_path: Path) -> None:
    write_jsonl(tmp_path, 40, {i: text_row(3 * i) for i in range(0, 40, 3)})
    strict = job(tmp_path, 2, policy="balanced", samples_per_step=20)
    before = loaded(strict, 1)
    victim = next(d.sample for m in before[0][0][1].microbatches for d in m.documents if d.images)
    image = tmp_path / f"{victim}.png"
    image.write_bytes(image.read_bytes()[: image.stat().st_size // 2])
    with pytest.raises(DataError, match=f"sample {victim}"):
        loaded(strict, 1)
    after = loaded(dataclasses.replace(strict, data=dataclasses.replace(strict.data, on_error="skip")), 1)
    for old, new in zip(before, after, strict=True):
        for left, right in zip(old[0][1].microbatches, new[0][1].microbatches, strict=True):
            assert [d for d in left.documents if d.sample != victim] == list(right.documents)


def test_a_set_without_a_place_keeps_the_bins_of_first_fit(tmp_path: Path) -> None:
    """Microbatches are so full that hardly anything but first-fit finds a place for all."""
    write_jsonl(tmp_path, 60, {i: text_row((118, 118, 96, 96, 44)[i % 5]) for i in range(60)})
    [[(_, meta, _)]] = loaded(job(tmp_path, policy="entrain"), 1)
    assert meta.assignment is not None
    assert "first-fit" in meta.assignment.reason
    [[(_, plain, _)]] = loaded(job(tmp_path), 1)
    assert plain.microbatches == meta.microbatches
