"""Jobs whose pipeline ranks divide the vocabulary, or whose heads make their logits in pieces, do what others do; those
of a divided one go on from their checkpoints."""

import json
import shutil
from pathlib import Path

import pytest

from tests.jobs import SAVING, layout, metrics, train, world_size, write_config
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

DIVIDED = "parallelism.vocabulary_parallel=pipeline"
WATCHED = [
    "training.steps=5", "validation.enable=true", "validation.freq=2", "validation.steps=1", "validation.generate=4",
    "validation.generate_tokens=4",
]  # fmt: skip
TOLERANCE = 1e-6
"""Of losses, relative. Measured: at most 2e-7."""
RESUMED = 1e-4
"""Of steps after a checkpoint of another layout. Measured: at most 2e-6."""


def run(folder: Path, charts: Path, *overrides: str, ranks: int = 2) -> dict[str, dict[int, float]]:
    """What a job recorded."""
    run_ranks(train, ranks, write_config(folder, charts), [*WATCHED, *overrides])
    return {key: metrics(folder, key) for key in ("loss", "grad_norm", "validation_loss")}


def written(folder: Path) -> list[tuple[str, bool]]:
    """The answers after the last step."""
    table = json.loads((folder / "run" / "answers" / "step-4.json").read_text())
    return [(answer["answer"], answer["right"]) for answer in table["answers"]]


def same(one: dict[str, dict[int, float]], other: dict[str, dict[int, float]]) -> bool:
    return all(one[key] == pytest.approx(other[key], rel=TOLERANCE) and one[key] for key in one)


def model(tied: bool) -> list[str]:
    return [*SAVING, f"model.language.config.tie_word_embeddings={str(tied).lower()}"]


def test_losses_validation_and_answers_are_those_of_an_undivided_job(tmp_path, charts):
    whole = run(tmp_path / "whole", charts, *model(tied=True))
    assert same(whole, run(tmp_path / "divided", charts, *model(tied=True), DIVIDED))
    assert written(tmp_path / "whole") == written(tmp_path / "divided")
    for name, more in (("pieces", []), ("pieces, divided", [DIVIDED])):
        pieces = run(tmp_path / name, charts, *model(tied=True), "training.loss_chunk_tokens=7", *more)
        assert same(whole, pieces), name
        assert written(tmp_path / name) == written(tmp_path / "whole"), name


@pytest.mark.nightly
@pytest.mark.parametrize("tied", [True, False])
def test_jobs_go_on_from_each_others_checkpoints(tmp_path, charts, tied):
    whole = run(tmp_path / "whole", charts, *model(tied))
    assert same(whole, run(tmp_path / "divided", charts, *model(tied), DIVIDED))
    changes = {
        "from whole": ("whole", 2, layout(pp=3), [DIVIDED]),
        "from halves": ("divided", 2, layout(shard=2), []),
        "from thirds": ("from whole", 4, layout(pp=2, tp=2), [DIVIDED]),
    }
    for name, (source, step, degrees, more) in changes.items():
        stored = Path("run") / "checkpoint" / f"step-{step}"
        shutil.copytree(tmp_path / source / stored, tmp_path / name / stored)
        found = run(tmp_path / name, charts, *model(tied), *degrees, *more, ranks=world_size(degrees))
        assert set(found["loss"]) == set(range(step + 1, 6))
        assert all(found[key][s] == pytest.approx(whole[key][s], rel=RESUMED) for key in whole for s in found[key])
