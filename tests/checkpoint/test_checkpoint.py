"""Checkpoints on ranks that cannot trust their disk: what all of them load instead, or say with one voice."""

import errno
import json
import resource
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from mmtrain.checkpoint import checkpoint
from mmtrain.checkpoint.files import MANIFEST, RecordingWriter, complete_steps
from mmtrain.checkpoint.state import TrainState
from mmtrain.config import config
from mmtrain.errors import ConfigError, MMTrainError
from tests.faults.storage import Damage, SmallJob, equal, load_damaged
from tests.jobs import layout, write_config
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

DAMAGES = [
    Damage("flip", "__1_0.distcp"),
    Damage("zeros", "__0_0.distcp"),
    Damage("half", "__1_0.distcp"),
    Damage("missing", "__0_0.distcp"),
    Damage("cut", ".metadata"),
    Damage("missing", ".metadata"),
    Damage("half", "train_state.json"),
    Damage("flip", "manifest.json"),
]


def damaged(rank: int, folder: Path) -> list[list[tuple[str, object]]]:
    """All damages under automatic resume, then under `load_step`, then some without a manifest."""
    cut = [damage for damage in DAMAGES if damage.kind in ("half", "cut", "missing")]
    return [
        load_damaged(rank, folder / "newest", DAMAGES),
        load_damaged(rank, folder / "named", DAMAGES, load_step=4),
        load_damaged(rank, folder / "old", cut, manifest=False),
    ]


def test_damage_is_named_on_all_ranks_and_the_newest_whole_checkpoint_is_used(tmp_path: Path) -> None:
    ranks = run_ranks(damaged, 2, tmp_path)
    assert ranks[0] == ranks[1]
    newest, named, old = ranks[0]
    assert newest == [("loaded", 2)] * len(DAMAGES)
    assert old == [("loaded", 2)] * len(old)
    for damage, (kind, text) in zip(DAMAGES, named, strict=True):
        assert kind == "refused"
        assert "\n" not in text
        assert text.startswith("checkpoint.load_step = 4: ")
        assert "step-4 is damaged: " in text and damage.file in text, text
    left = sorted(path.name for path in (tmp_path / "newest" / "checkpoint").iterdir())
    assert left == ["damaged-0-step-4", "step-2"]


def on_a_full_disk(rank: int, folder: Path, mode: str) -> str:
    """Rank 1 may write no more than 4 kB a file during the save of step 4. Returns what every rank says."""
    job = SmallJob(rank, folder)
    checkpointer = job.checkpointer(async_mode=mode)
    for step in (2, 4):
        job.train()
        if step == 4 and rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        try:
            checkpointer.save(TrainState(step=step, loader={}), job.tensors)
            checkpointer.finish()
        except MMTrainError as error:
            message = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert [path.name for path in folder.iterdir()] == ["step-2"]
    dist.barrier()
    checkpointer.save(TrainState(step=6, loader={}), job.tensors)
    checkpointer.finish()
    saved = job.values()
    job.spoil()
    state = job.checkpointer().load(job.tensors)
    assert state is not None and state.step == 6 and equal(job.values(), saved)
    return message


def deleted_during_a_save(rank: int, folder: Path) -> str:
    """What rank 1 wrote is gone before the checkpoint is complete."""
    original = RecordingWriter.write_data

    def write_data(self, plan, planner):
        results = original(self, plan, planner)
        if rank == 1:
            (folder / "step-2.tmp" / "__1_0.distcp").unlink()
        return results

    job = SmallJob(rank, folder)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(MMTrainError) as caught:
        patch.setattr(RecordingWriter, "write_data", write_data)
        job.checkpointer().save(TrainState(step=2, loader={}), job.tensors)
    assert list(folder.iterdir()) == []
    return str(caught.value)


def not_seen_by_rank_1(rank: int, folder: Path) -> str:
    """As on a network file system that tells one machine later than another."""
    job = SmallJob(rank, folder)
    for step in (2, 4):
        job.checkpointer().save(TrainState(step=step, loader={}), job.tensors)
    checkpointer = job.checkpointer()
    checkpointer.folder = folder / "old" if rank == 1 else folder
    with pytest.raises(MMTrainError) as caught:
        checkpointer.load(job.tensors)
    assert complete_steps(folder) == [2, 4]
    return str(caught.value)


def file_systems_that_fail(rank: int, folder: Path) -> list[str]:
    return [
        on_a_full_disk(rank, folder / "at-once", "disabled"),
        on_a_full_disk(rank, folder / "in-background", "async"),
        deleted_during_a_save(rank, folder / "deleted"),
        not_seen_by_rank_1(rank, folder / "late"),
    ]


def test_what_a_file_system_refuses_is_one_sentence_on_all_ranks_and_changes_nothing(tmp_path: Path) -> None:
    ranks = run_ranks(file_systems_that_fail, 2, tmp_path)
    assert ranks[0] == ranks[1]
    full, background, deleted, late = ranks[0]
    assert full == (
        f"checkpoint: {tmp_path}/at-once/step-4.tmp cannot be written: [Errno 27] File too large; older ones are "
        "unharmed"
    )
    assert background == full.replace("at-once", "in-background")
    assert "step-2.tmp cannot be written: [Errno 2] No such file or directory" in deleted
    assert "\n" not in deleted
    assert late.startswith(
        f"checkpoint: rank 1: {tmp_path}/late/old/step-4 is damaged: train_state.json is missing; rank 0"
    )
    for mode in ("at-once", "in-background"):
        assert complete_steps(tmp_path / mode) == [2, 6]
        files = json.loads((tmp_path / mode / "step-6" / MANIFEST).read_text())["files"]
        others = [path for path in (tmp_path / mode / "step-6").iterdir() if path.name != MANIFEST]
        assert {path.name: path.stat().st_size for path in others} == {n: f["bytes"] for n, f in files.items()}


def saved_twice(rank: int, folder: Path, mode: str) -> None:
    """As where rank 0 is lost between a checkpoint's last byte and the others' news of it, and the others go on."""
    job = SmallJob(rank, folder)
    job.train()
    for _ in range(2):
        checkpointer = job.checkpointer(async_mode=mode)
        checkpointer.save(TrainState(step=2, loader={}), job.tensors)
        checkpointer.finish()
        dist.barrier()
    assert [path.name for path in folder.iterdir()] == ["step-2"]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_complete_checkpoint_is_not_written_again(tmp_path: Path, mode: str) -> None:
    run_ranks(saved_twice, 2, tmp_path / "checkpoint", mode)


def with_old_ones_that_stay(rank: int, folder: Path) -> list[str]:
    """Saves steps 2, 4, 6 and 8 of which two are kept, and starts again after each; step 2 is a link, and of step 4
    something cannot be removed, as a mount. Returns the warnings."""
    job, said = SmallJob(rank, folder / "checkpoint"), []
    remove = shutil.rmtree

    def rmtree(path, **kwargs):
        if "step-4" in str(path) and not kwargs:  # else it ignores errors
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        remove(path, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", rmtree)
        patch.setattr(checkpoint.logger, "warning", lambda text, *args: said.append(text % args))
        for step in (2, 4, 6, 8):
            job.train()
            job.checkpointer(keep_latest_k=2).save(TrainState(step=step, loader={}), job.tensors)
            if step == 2 and rank == 0:
                shutil.move(job.folder / "step-2", folder / "elsewhere")
                (job.folder / "step-2").symlink_to(folder / "elsewhere")
                (job.folder / "step-2-notes.tmp").mkdir()
            dist.barrier()
        saved = job.values()
        job.spoil()
        state = job.checkpointer().load(job.tensors)
    assert state is not None and state.step == 8 and equal(job.values(), saved)
    return said


def test_an_old_checkpoint_that_cannot_be_removed_ends_no_job_and_blocks_no_restart(tmp_path: Path) -> None:
    said, of_rank_1 = run_ranks(with_old_ones_that_stay, 2, tmp_path)
    folder = tmp_path / "checkpoint"
    assert of_rank_1 == []
    assert said[0] == f"{folder}/step-2 was a link and is removed; its files stay in {tmp_path}/elsewhere"
    assert said[1].startswith(f"{folder}/step-4 cannot be removed: [Errno 16] Device or resource busy")
    assert said[2].startswith(f"{folder}/step-4.tmp cannot be removed")
    assert len(said) == 3
    assert sorted(path.name for path in folder.iterdir()) == ["step-2-notes.tmp", "step-4.tmp", "step-6", "step-8"]
    assert complete_steps(tmp_path) == [] and (tmp_path / "elsewhere" / MANIFEST).is_file()


def refused(rank: int, path: Path) -> str:
    from mmtrain.training.trainer import Trainer

    with pytest.raises(ConfigError) as caught:
        Trainer(config.load(path, layout(pp=2))).run()
    return str(caught.value)


def test_a_dump_folder_that_cannot_be_made_is_one_sentence_on_all_ranks(tmp_path: Path) -> None:
    path = write_config(tmp_path, tmp_path / "no data")
    (tmp_path / "run").write_text("a file")
    messages = run_ranks(refused, 2, path)
    assert messages == [
        f"job.dump_folder = '{tmp_path}/run' cannot be written: File exists ({tmp_path}/run); name another folder, "
        "make room, or correct its permissions"
    ] * 2  # fmt: skip
