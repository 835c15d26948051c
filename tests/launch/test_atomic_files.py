"""Files and folders that are either absent or complete."""

import pytest

from mmtrain.errors import ConfigError
from mmtrain.launch.atomic_files import new_folder, write_whole


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_and_its_folder_made(tmp_path):
    path = tmp_path / "new" / "file.json"
    write_whole(path, "one")
    write_whole(path, "zwölf")
    assert path.read_text(encoding="utf-8") == "zwölf"
    assert names(path.parent) == ["file.json"]


def test_a_folder_appears_when_it_is_complete(tmp_path):
    out = tmp_path / "deep" / "out"
    with new_folder(out) as aside:
        (aside / "file").write_text("one")
        assert not out.exists()
    assert names(out) == ["file"]
    assert names(out.parent) == ["out"]


def test_an_error_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "out") as aside:
        (aside / "file").write_text("one")
        raise KeyboardInterrupt
    assert names(tmp_path) == []


def test_an_empty_folder_is_filled_and_any_other_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with new_folder(tmp_path / "empty") as aside:
        (aside / "file").write_text("one")
    assert names(tmp_path / "empty") == ["file"]
    with pytest.raises(ConfigError, match="empty exists already; remove it or name another folder"):
        new_folder(tmp_path / "empty").__enter__()
    with pytest.raises(ConfigError, match="x cannot be made: Not a directory; name another folder"):
        new_folder(tmp_path / "empty" / "file" / "x").__enter__()


def test_what_a_killed_command_left_is_removed(tmp_path):
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "stale").write_text("")
    with new_folder(tmp_path / "out") as aside:
        (aside / "file").write_text("one")
    assert names(tmp_path / "out") == ["file"]
