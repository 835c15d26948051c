"""A checkpoint in one process: damage, missing manifests, and files that would run a program."""

import dataclasses
import importlib
import json
import logging
import os
import pickle
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from mmtrain.checkpoint.files import (
    MANIFEST,
    METADATA,
    STATE,
    FileRecord,
    RecordingWriter,
    StoredCheckpoint,
    complete_steps,
    write_manifest,
)
from mmtrain.checkpoint.run_folder import load_module, open_run
from mmtrain.checkpoint.stored_metadata import CLASSES, read_metadata
from mmtrain.commands.cli import main
from mmtrain.config import config
from mmtrain.errors import CheckpointError
from tests.faults.storage import KINDS, Damage
from tests.reference import model_config
from tests.stored_runs import save_run


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run with two checkpoints."""
    run = tmp_path_factory.mktemp("whole") / "run"
    save_run(run, model_config(None), steps=(2, 4))
    return run


@pytest.fixture
def run(tmp_path: Path, whole: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def checkpoint(run: Path) -> Path:
    return run / "checkpoint" / "step-4"


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_module(open_run(run), "language").state_dict()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "stale"])
def test_damage_to_any_file_is_named(run: Path, kind: str) -> None:
    expected = weights(run)
    for path in sorted(checkpoint(run).iterdir()):
        before = path.read_bytes()
        Damage(kind, path.name, seed=5).apply(checkpoint(run), run / "checkpoint" / "step-2")
        try:
            found = weights(run)
        except CheckpointError as error:
            assert re.search(rf"step-4 is damaged: .*{path.name}.*; name another checkpoint with --step$", str(error))
        else:  # it lacks the end of its last line, or is missing
            assert (path.name, kind) in [(MANIFEST, "cut"), (MANIFEST, "missing")]
            assert all(torch.equal(value, expected[name]) for name, value in found.items())
        path.unlink(missing_ok=True)
        path.write_bytes(before)


def test_files_of_another_save_are_damage(run: Path) -> None:
    """Each is whole, but they do not belong together."""
    Damage("stale", "__0_0.distcp").apply(checkpoint(run), run / "checkpoint" / "step-2")
    with pytest.raises(CheckpointError, match=r"the content of __0_0\.distcp is not what was saved"):
        weights(run)


def test_a_command_that_finds_damage_ends_with_one_line_and_takes_no_other_step(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Damage("flip", "__0_0.distcp").apply(checkpoint(run), run)
    assert main(["export", str(run), str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {checkpoint(run)} is damaged: ")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_without_manifest_loads_with_one_warning_unless_one_is_required(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = weights(run)
    (checkpoint(run) / MANIFEST).unlink()
    with caplog.at_level(logging.WARNING, "mmtrain"):
        stored = open_run(run)
        for _ in range(2):
            chunk = load_module(stored, "language")
    assert [record.message for record in caplog.records if record.name == "mmtrain"] == [
        f"{checkpoint(run)} has no manifest.json: damage to its files may go unnoticed"
    ]
    assert all(torch.equal(value, expected[name]) for name, value in chunk.state_dict().items())
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace('verify = "auto"', 'verify = "required"'))
    assert config.load(run / "config.toml").checkpoint.verify == "required"
    with pytest.raises(CheckpointError, match=r'has no manifest.json, but checkpoint.verify = "required"; set "auto"'):
        open_run(run)


def test_only_names_that_a_save_gives_are_checkpoints(run: Path) -> None:
    newest = checkpoint(run)
    for name in ("step-0030", f"step-{10**59}", "step-\u0663", "step-7.tmp", "step-+7", "xstep-7", "step-7\n"):
        shutil.copytree(newest, newest.with_name(name))
    assert complete_steps(newest.parent) == [2, 4]
    assert open_run(run).step == 4


def test_a_folder_that_was_renamed_to_another_step_is_named(run: Path) -> None:
    """It would be the newest for ever."""
    (checkpoint(run) / MANIFEST).unlink()
    (checkpoint(run) / STATE).write_text(json.dumps({"step": 4}))
    assert open_run(run).step == 4
    os.replace(checkpoint(run), checkpoint(run).with_name("step-30"))
    with pytest.raises(CheckpointError, match=r"step-30 is damaged: train_state.json is of step 4, so the folder was"):
        open_run(run)


def test_verification_can_be_off(run: Path) -> None:
    """Then only what cannot be read is damage."""
    Damage("flip", STATE).apply(checkpoint(run), run)
    (checkpoint(run) / STATE).write_text("{ }")
    (run / "config.toml").write_text((run / "config.toml").read_text().replace('verify = "auto"', 'verify = "off"'))
    weights(run)
    Damage("half", "__0_0.distcp").apply(checkpoint(run), run)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp has \d+ bytes and needs \d+"):
        weights(run)


# ----------------------------------------------------------------------------------- files of others


class Program:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def seal(folder: Path) -> None:
    """Writes a manifest that fits, as whoever makes such a file would."""
    names = [path.name for path in folder.iterdir() if path.name not in (MANIFEST, METADATA, STATE)]
    write_manifest(folder, {name: FileRecord.of(folder / name) for name in names})


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_metadata_that_would_run_a_program_are_refused(run: Path, tmp_path: Path, protocol: int) -> None:
    made = tmp_path / "made"
    (checkpoint(run) / METADATA).write_bytes(pickle.dumps(Program(made), protocol=protocol))
    seal(checkpoint(run))
    with pytest.raises(
        CheckpointError, match=r"step-4 is refused: \.metadata asks for posix\.mkdir, which no"
    ) as caught:
        open_run(run)
    assert "\n" not in str(caught.value)
    assert not made.exists()


@pytest.mark.parametrize(
    "name", [("torch", "load"), ("torch.serialization", "load"), ("builtins", "eval"), ("pathlib", "os.system")]
)
def test_no_other_name_is_looked_up(run: Path, name: tuple[str, str]) -> None:
    module, attribute = (b"\x8c" + bytes([len(part)]) + part.encode() for part in name)
    (checkpoint(run) / METADATA).write_bytes(b"\x80\x04" + module + attribute + b"\x93.")
    seal(checkpoint(run))
    with pytest.raises(CheckpointError, match=f"asks for {'.'.join(name)}, which no checkpoint needs"):
        open_run(run)


def test_metadata_that_an_older_python_wrote_are_read_and_look_nothing_up(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 3.11.4 a member of an enumeration is pickled as `getattr` of its class and its name."""

    def by_name(member: _MEM_FORMAT_ENCODING, _: int) -> tuple[Any, ...]:
        return getattr, (type(member), member.name)

    metadata = dcp.FileSystemReader(checkpoint(run)).read_metadata()
    wanted = open_run(run).checkpoint.metadata
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    raw = pickle.dumps(metadata)
    assert b"getattr" in raw
    (checkpoint(run) / METADATA).write_bytes(raw)
    seal(checkpoint(run))
    assert open_run(run).checkpoint.metadata == wanted


@pytest.mark.parametrize("place", ["../other", "/dev/zero", "", "..", 7])
def test_metadata_cannot_name_a_file_elsewhere(run: Path, place: Any) -> None:
    metadata = dcp.FileSystemReader(checkpoint(run)).read_metadata()
    for stored in metadata.storage_data.values():
        stored.relative_path = place
    (checkpoint(run) / METADATA).write_bytes(pickle.dumps(metadata))
    seal(checkpoint(run))
    with pytest.raises(CheckpointError, match=r"is damaged: (\.metadata cannot be read|\.\. is no file)"):
        weights(run)


def rewriting(module: str, name: str, attribute: str, value: str) -> bytes:
    """Opcodes that look up a class, set an attribute of it, and drop it. (BUILD with a state of slots.)"""
    words = [b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name, attribute, value)]
    return words[0] + words[1] + b"\x93" + b"N}" + words[2] + words[3] + b"s" + b"\x86" + b"b" + b"0"


def test_a_pickle_cannot_rewrite_the_check_of_paths(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another `PosixPath.name` a tensor of another run's file would be loaded."""
    elsewhere = "../step-2/__0_0.distcp"
    metadata = dcp.FileSystemReader(checkpoint(run)).read_metadata()
    for stored in metadata.storage_data.values():
        stored.relative_path = elsewhere
    raw = pickle.dumps(metadata, protocol=4)
    (checkpoint(run) / METADATA).write_bytes(raw[:2] + rewriting("pathlib", "PosixPath", "name", elsewhere) + raw[2:])
    seal(checkpoint(run))
    monkeypatch.setattr(type(run), "name", type(run).name)  # restored, whatever happens
    before = vars(type(run))["name"]
    with pytest.raises(CheckpointError, match=r"is damaged: \.metadata cannot be read"):
        weights(run)
    assert vars(type(run))["name"] is before


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in CLASSES for name in CLASSES[module]])
def test_no_class_of_a_pickle_can_be_changed(module: str, name: str) -> None:
    theirs = getattr(importlib.import_module(module), name)
    pickled = b"\x80\x04" + rewriting(module, name, "theirs", "x") + pickle.dumps(None)[2:]
    with pytest.raises(TypeError):
        read_metadata(pickled)
    assert not hasattr(theirs, "theirs")


def test_metadata_are_read_as_torch_reads_them(run: Path) -> None:
    """Of tensors in several parts, of scalars, and of values other than tensors."""
    raw = (checkpoint(run) / METADATA).read_bytes()
    ours, theirs = read_metadata(raw), pickle.loads(raw)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    for index, place in theirs.storage_data.items():
        assert dataclasses.asdict(ours.storage_data[index]) == dataclasses.asdict(place)


def test_a_value_that_would_run_a_program_is_refused(tmp_path: Path) -> None:
    """Values beside tensors are pickles in the files of the ranks."""
    folder, writer = tmp_path / "step-1", RecordingWriter(tmp_path / "step-1")
    values = {"weight": torch.ones(3), "plain": (0.5, True, "text", None), "rng.0": Program(tmp_path / "made")}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        dcp.save(values, storage_writer=writer, no_dist=True)
        (folder / STATE).write_text("{}")
        write_manifest(folder, writer.files)
        found: dict[str, Any] = {"weight": torch.zeros(3), "plain": None}
        stored = StoredCheckpoint.open(folder, "required")
        stored.load(found, no_dist=True)
        assert found["plain"] == values["plain"] and torch.equal(found["weight"], values["weight"])
        with pytest.raises(CheckpointError, match=r"is refused: rng\.0 asks for posix\.mkdir, which no checkpoint"):
            stored.load({"rng.0": None}, no_dist=True)
    assert not (tmp_path / "made").exists()
    assert json.loads((folder / MANIFEST).read_text())["version"] == 1
