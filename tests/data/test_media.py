import base64
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from mmtrain.data.media import RawImage, check_text, raw_image
from mmtrain.errors import DataError


def read(path: object, max_bytes: int = 100) -> bytes:
    return RawImage(data=None, path=str(path)).read(max_bytes)


HEADS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"RIFF", b"BM\0", b"II*\0", b"MM\0*", b"\0\0\0 ftyp", b"ID3")
"""How encoded files begin."""


@pytest.mark.parametrize(
    ("value", "data", "path"),
    [
        ("a/b.png", None, "/here/a/b.png"),
        ("/a/b.png", None, "/a/b.png"),
        ("hf://datasets/a/b.png", None, "hf://datasets/a/b.png"),
        ({"path": "b.png"}, None, "/here/b.png"),
        ({"bytes": b"abc", "path": None}, b"abc", ""),
        ({"bytes": b"abc", "path": "b.png"}, b"abc", "/here/b.png"),
        (b"abc", b"abc", ""),
        ("data:image/png;base64," + base64.b64encode(b"abc").decode(), b"abc", ""),
        *((base64.b64encode(head + bytes(48)).decode(), head + bytes(48), "") for head in HEADS),
        ("/9j/" + "frames/" * 9 + "0.png", None, "/9j/" + "frames/" * 9 + "0.png"),
    ],
)
def test_what_names_or_holds_a_file(value: Any, data: bytes | None, path: str) -> None:
    assert raw_image(value, "image 0", "/here") == RawImage(data=data, path=path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (5, "a int; it must be a path, a data: URL, or bytes"),
        ([1, 2], "a list; it must be"),
        ({"path": 5}, "a int; it must be"),
        ({"path": ["a"]}, "a list; it must be"),
        ({"bytes": [1, 2]}, "a list; it must be"),
        ({"bytes": "abc", "path": "b.png"}, "a str; it must be"),
        ({"bytes": None, "path": None}, "it has neither bytes nor a path"),
        ({}, "it has neither bytes nor a path"),
        (None, "it has neither bytes nor a path"),
        ("", "it has neither bytes nor a path"),
        ("data:image/png;base64,@@", "its base64 text is damaged"),
        ("data:image/png;base64,\u00e4\u00e4", "its base64 text is damaged: string argument should contain only ASCII"),
    ],
)
def test_what_does_neither(value: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"^image 0: {message}"):
        raw_image(value, "image 0", "/here")


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening one waits for a writer
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "empty").touch()
    irregular = "it is no regular file, but a folder, device or pipe"
    for path, reason in {
        "/dev/zero": irregular,
        "file:///dev/zero": irregular,
        "zip://a.png::/dev/zero": irregular,
        f"zip://a.png::file://{tmp_path}/pipe": irregular,
        str(tmp_path / "pipe"): irregular,
        str(tmp_path): irregular,
        "/proc/self/mem": "it is empty",
        str(tmp_path / "empty"): "it is empty",
        str(tmp_path / "circle"): "Too many levels",
        str(tmp_path / "absent"): "No such file",
        str(tmp_path / ("a" * 300)): "File name too long",
        "a\0b": "embedded null",
        "nosuch://a.png": "Protocol not known: nosuch",
    }.items():
        with pytest.raises(DataError, match=rf"^its file '.*' cannot be read: {reason}"):
            read(path)
    with pytest.raises(DataError, match=rf"^its file '.*/pipe' cannot be read: {irregular}"):
        RawImage(data=None, path=str(tmp_path / "pipe")).local_path()


def test_no_more_is_read_than_allowed(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(100))
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.bin", bytes(100))
    for name in (path, f"file://{path}", f"zip://a.bin::{tmp_path}/a.zip"):
        assert read(name) == bytes(100)
        with pytest.raises(DataError, match=r"^it has 100 bytes, more than data.max_media_bytes = 99; raise"):
            read(name, 99)
    with pytest.raises(DataError, match=r"^it has 100 bytes, more than"):
        RawImage(data=bytes(100)).read(99)
    with path.open("wb") as file:
        file.truncate(2**40)  # a hole
    with pytest.raises(DataError, match=rf"^it has {2**40} bytes, more than"):
        read(path)


def test_messages_show_any_name_on_one_short_line() -> None:
    for name in ("a\nb\x1b[31m", "\ud800", "a" * 10**6):
        with pytest.raises(DataError) as failure:
            read(name)
        assert str(failure.value).isprintable()
        assert len(str(failure.value)) < 400


def test_text_is_whole_characters() -> None:
    assert check_text("a\U0001f600", "text") == "a\U0001f600"
    with pytest.raises(
        DataError, match=r"^text has a lone surrogate, '\\ud83d', at 1; write the whole character or remove it$"
    ):
        check_text("a\ud83d", "text")


def test_an_address_that_does_not_answer_is_no_matter_of_paths() -> None:
    with pytest.raises(DataError) as failure:
        read("http://127.0.0.1:9/a.png")
    said = str(failure.value)
    assert said.startswith("its file 'http://127.0.0.1:9/a.png' cannot be read: ")
    assert "127.0.0.1:9" in said.partition("cannot be read")[2]
    assert said.endswith("; download the file, and name its path")
    assert "relative" not in said
