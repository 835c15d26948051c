"""Hundreds of damaged checkpoints: each is read bit for bit, or refused with one sentence, on all ranks alike."""

import itertools
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mmtrain.checkpoint.files import complete_steps
from mmtrain.checkpoint.run_folder import load_module, open_run
from mmtrain.errors import CheckpointError, MMTrainError
from tests.faults.storage import Damage, damages, load_damaged
from tests.jobs import layout, metrics, train, write_config
from tests.ranks import run_ranks
from tests.reference import model_config
from tests.stored_runs import save_run

pytestmark = pytest.mark.nightly

OF_RANKS = ["manifest.json", ".metadata", "train_state.json", "__0_0.distcp", "__1_0.distcp"]
NUM_DAMAGES = 200


def draw(files: list[str], seed: int, number: int = NUM_DAMAGES) -> list[Damage]:
    return list(itertools.islice(damages(files, seed), number))


@pytest.mark.parametrize("load_step", [-1, 4], ids=["newest", "named"])
def test_a_resume_from_a_damaged_checkpoint(tmp_path: Path, load_step: int) -> None:
    wanted = draw(OF_RANKS, seed=load_step)
    first, second = run_ranks(load_damaged, 2, tmp_path, wanted, load_step, timeout=3600)
    assert first == second
    for damage, (kind, value) in zip(wanted, first, strict=True):
        assert kind == "loaded" if load_step < 0 else kind in ("loaded", "refused"), (damage, value)
        assert kind == "loaded" or "\n" not in value, damage
    print(f"{NUM_DAMAGES} damages, load_step = {load_step}: {Counter(kind for kind, _ in first)}")


def test_a_resume_from_a_damaged_checkpoint_without_manifest(tmp_path: Path) -> None:
    """Other values cannot be told from those that were saved, but nothing else may happen."""
    wanted = [damage for damage in draw(OF_RANKS, seed=9) if damage.file != "manifest.json"]
    first, second = run_ranks(load_damaged, 2, tmp_path, wanted, -1, False, timeout=3600)
    assert [value for _, value in first] == [value for _, value in second]
    assert all(kind != "refused" or "\n" not in value for kind, value in first)
    print(f"{len(wanted)} damages without a manifest: {Counter(kind for kind, _ in first)}")


def test_an_export_of_a_damaged_checkpoint(tmp_path: Path) -> None:
    save_run(tmp_path / "run", model_config(None), steps=(2, 4))
    newest, older = (tmp_path / "run" / "checkpoint" / f"step-{step}" for step in (4, 2))
    shutil.copytree(newest, tmp_path / "whole")
    expected = load_module(open_run(tmp_path / "run"), "language").state_dict()
    outcomes: Counter[str] = Counter()
    for damage in draw([path.name for path in newest.iterdir()], seed=3, number=2 * NUM_DAMAGES):
        shutil.rmtree(newest)
        shutil.copytree(tmp_path / "whole", newest)
        damage.apply(newest, older)
        try:
            found = load_module(open_run(tmp_path / "run"), "language").state_dict()
        except CheckpointError as error:
            assert "\n" not in str(error)
            outcomes["refused"] += 1
        else:
            assert all(torch.equal(value, expected[name]) for name, value in found.items()), damage
            outcomes["loaded"] += 1
    print(f"{2 * NUM_DAMAGES} damages of an export: {outcomes}")


# ---------------------------------------------------------------------------------------- a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint of the job below, but not for two."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", place], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"a small file system cannot be mounted: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def fills_the_disk(rank: int, path: Path, overrides: list[str]) -> str:
    """What a rank says; nothing if it only misses the other one."""
    try:
        train(rank, path, overrides)
    except MMTrainError as error:
        return str(error)
    except RuntimeError as error:
        assert "by peer" in str(error)
    return ""


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_job_whose_disk_is_full(tmp_path: Path, charts: Path, small_disk: Path, mode: str) -> None:
    path = write_config(tmp_path, charts)
    extra = [*layout(pp=2), "checkpoint.enable=true", "checkpoint.interval=2", f"checkpoint.async_mode={mode}"]
    on_disk = [*extra, f"job.dump_folder={small_disk}/run"]
    folder = small_disk / "run" / "checkpoint"
    first, second = run_ranks(fills_the_disk, 2, path, on_disk, leave_together=False)
    if f"{small_disk}/run: No space left on device; make room" in first:  # the metrics met it before the checkpoint
        assert mode == "async" and second in ("", first)  # the other rank may have ended before it heard of it
    else:
        assert first == second
        assert "step-4.tmp cannot be written: [Errno 28] No space left on device; older ones" in first
    assert complete_steps(folder) == [2]
    shutil.copytree(small_disk / "run", tmp_path / "run")  # a larger disk
    run_ranks(train, 2, path, extra)
    assert complete_steps(tmp_path / "run" / "checkpoint") == [2, 4, 6]
    whole = write_config(tmp_path / "whole", charts)
    run_ranks(train, 2, whole, extra)
    assert metrics(tmp_path) == metrics(whole.parent)
