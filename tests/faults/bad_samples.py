"""Samples that no job can use, each by a name: what is wrong with it. Files that they name are made in a folder."""

import base64
import io
import json
import os
import random
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.data.samples import png
from tests.data.sound_files import chunk, form, riff, tone, wav

QUESTION = {"role": "user", "content": "<image>What colour?"}
ANSWER = {"role": "assistant", "content": "red"}
GOOD = {"messages": [QUESTION, ANSWER], "images": ["good.png"]}
GOOD_SOUND = {"messages": [{"role": "user", "content": "<audio>What?"}, ANSWER], "audio": "good.wav", "id": 7}
GOOD_CLIP = {"caption": "a red circle moves", "frames": "good_clip", "fps": 8}
GOOD_LATENTS = {"caption": "a red circle moves", "latents": "good.npy"}
HALF = "\ud800"
"""Half of a character, as JSON can write it."""

ANYTHING: list[Any] = [5, -1, 2.5, float("nan"), float("inf"), 10**400, True, None]
ANYTHING += ["", "red", "user", "assistant", "good.png", "good.npy", HALF, [], [[]], [None], [{}], {}]
"""Values, mostly not of the type that a field has; a seeded choice of them makes further samples."""

LINES: dict[str, bytes] = {
    "broken JSON": b"{broken",
    "half a line": json.dumps(GOOD).encode()[:-20],
    "null": b"null",
    "a number": b"5",
    "NaN": b"NaN",
    "true": b"true",
    "a text": b'"hello"',
    "a list": b"[1, 2]",
    "an empty object": b"{}",
    "deep lists": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"messages":' * 100_000,
    "no UTF-8": b'{"messages": "\xff\xfe"}',
    "an integer of 5000 digits": b'{"messages": ' + b"9" * 5000 + b"}",
    "zeros": b"\0" * 100,
}
"""Whole lines of a jsonl file."""


def _turns(*turns: Any) -> dict[str, Any]:
    """Columns of a sample without images. Args: turns: (role, content) of each message."""
    return {"messages": [{"role": role, "content": content} for role, content in turns], "images": []}


def _asked(content: Any) -> dict[str, Any]:
    return _turns(("user", content), ("assistant", "red"))


def _nested(depth: int) -> Any:
    value: Any = "deep"
    for _ in range(depth):
        value = [value]
    return value


MESSAGES: dict[str, dict[str, Any]] = {
    "messages null": {"messages": None},
    "messages a text": {"messages": "hello"},
    "messages a number": {"messages": 5},
    "messages empty": {"messages": []},
    "messages an empty object": {"messages": {}},
    "messages of numbers": {"messages": [5]},
    "messages of nulls": {"messages": [None]},
    "messages of lists": {"messages": [[], []]},
    "columns of unequal length": {"messages": {"role": ["user"], "content": ["a", "b"]}},
    "columns that are numbers": {"messages": {"role": 5, "content": 5}},
    "conversations in place of messages": {"messages": None, "conversations": [{"from": "human", "value": "hi"}]},
    "only a question": _turns(("user", "hello")),
    "only an answer": _turns(("assistant", "hello")),
    "an answer first": _turns(("assistant", "hello"), ("user", "hello")),
    "no role": {"messages": [{"content": "hello"}, ANSWER]},
    "a role of ShareGPT": _turns(("human", "hello"), ("gpt", "red")),
    "one unknown role": _turns(("user", "hello"), ("assistant", "red"), ("human", "why?")),
    "a capital role": _turns(("User", "hello"), ("assistant", "red")),
    "an empty role": _turns(("", "hello"), ("assistant", "red")),
    "a role of a number": _turns((3, "hello"), ("assistant", "red")),
    "a role of a list": _turns((["user"], "hello"), ("assistant", "red")),
    "a role of an object": _turns(({"a": 1}, "hello"), ("assistant", "red")),
    "a role that breaks lines": _turns(("user\nassistant\x1b[31m", "hello"), ("assistant", "red")),
    "a role with half a character": _turns((HALF, "hello"), ("assistant", "red")),
    "a very long role": _turns(("user" * 100_000, "hello"), ("assistant", "red")),
    "a tool, which the template has not": _turns(("user", "hello"), ("tool", "3"), ("assistant", "red")),
    "no content": {"messages": [{"role": "user"}, ANSWER]},
    "content null": _asked(None),
    "content a number": _asked(7),
    "content NaN": _asked(float("nan")),
    "content an object": _asked({"text": "hello"}),
    "parts of numbers": _asked([5]),
    "parts of nulls": _asked([None]),
    "parts of lists": _asked([["text"]]),
    "deep parts": _asked(_nested(300)),
    "a part without a type": _asked([{}]),
    "a part of unknown type": _asked([{"type": "video", "video": "x.mp4"}]),
    "a part whose type is a list": _asked([{"type": ["text"], "text": "hello"}]),
    "a part of very long type": _asked([{"type": "x" * 1_000_000}]),
    "a text part without text": _asked([{"type": "text"}]),
    "a text part of a number": _asked([{"type": "text", "text": 5}]),
    "half a character in a question": _asked(f"hello {HALF}"),
    "half a character in an answer": _turns(("user", "hello"), ("assistant", f"{HALF} red")),
    "half a character in a part": _asked([{"type": "text", "text": HALF}]),
    "more placeholders than images": _asked("<image><image>"),
    "ten thousand placeholders": _asked("<image>" * 10_000),
    "fewer placeholders than images": {**_asked("hello"), "images": ["good.png"]},
    "an image part without an image": _asked([{"type": "image"}]),
    "the image token as text": _asked("what is <|image_pad|>?"),
    "preferences": {"chosen": "red", "rejected": "blue"},
    "a bad answer of preferences": {"label": False},
    "tools that the template does not show": {"tools": [{"name": "zoom"}]},
    "tools a number": {"tools": 5},
    "tools of broken JSON": {"tools": "[{"},
    "a call that the template does not show": {"messages": [QUESTION, {**ANSWER, "tool_calls": [{"name": "zoom"}]}]},
    "nothing but a call": {"messages": [QUESTION, {"role": "assistant", "tool_calls": [5]}]},
    "a weight of a half": {"messages": [QUESTION, {**ANSWER, "weight": 0.5}]},
    "a weight of NaN": {"messages": [QUESTION, {**ANSWER, "weight": float("nan")}]},
    "a weight of a list": {"messages": [QUESTION, {**ANSWER, "loss": [1]}]},
    "a question with a weight": {"messages": [{**QUESTION, "weight": 1}, ANSWER]},
    "no answer with a weight": {"messages": [QUESTION, {**ANSWER, "weight": 0}]},
    "an image of a message": {"messages": [{**QUESTION, "images": ["good.png"]}, ANSWER]},
    "system a number": {"system": 5},
    "two of the role system": {"messages": [{"role": "system", "content": "a"}, QUESTION, ANSWER], "system": "b"},
    "an image of a broken size": _asked([{"type": "image", "image": "good.png", "max_pixels": 1e9}]),
    "an image of one side": _asked([{"type": "image", "image": "good.png", "resized_width": 56}]),
    "an image of a thin size": _asked(
        [{"type": "image", "image": "good.png", "resized_width": 2**31 - 1, "resized_height": 1}]
    ),
    "grade a number": {"grade": 3},
    "grade NaN": {"grade": float("nan")},
    "grade a list": {"grade": ["easy"]},
    "grade an object": {"grade": {"a": 1}},
    "grade with half a character": {"grade": HALF},
}
"""Columns of rows, in place of those of `GOOD`."""

IMAGES: dict[str, Any] = {
    "images a text": "good.png",
    "images a number": 5,
    "images an object": {"path": "good.png"},
    "an image of a number": [3],
    "an image of NaN": [float("nan")],
    "an image of true": [True],
    "an image of null": [None],
    "an image of a list": [[]],
    "an image of an empty object": [{}],
    "an empty path": [""],
    "an image struct of nulls": [{"bytes": None, "path": None}],
    "a path of a number": [{"path": 5}],
    "a path of a list": [{"path": ["good.png"]}],
    "bytes of a list": [{"bytes": [1, 2]}],
    "bytes of a text": [{"bytes": "abc", "path": "good.png"}],
    "no such file": ["absent.png"],
    "a folder": ["good_clip"],
    "a device without end": ["/dev/zero"],
    "a random device": ["/dev/urandom"],
    "a terminal": ["/dev/tty"],
    "a pipe without a writer": ["pipe"],
    "a socket": ["socket"],
    "memory of the process": ["/proc/self/mem"],
    "the log of the kernel": ["/proc/kmsg"],
    "a link in a circle": ["circle"],
    "a link to nothing": ["dangling"],
    "an empty file": ["empty"],
    "a file of a tebibyte": ["sparse"],
    "a name that is too long": ["a" * 5000],
    "a name with a zero": ["a\0b"],
    "a name that breaks lines": ["a\nb\x1b[31m"],
    "a name with half a character": [f"{HALF}.png"],
    "a device as URL": ["file:///dev/zero"],
    "an unknown protocol": ["nosuch://x.png"],
    "an archive that is none": ["zip://x.png::good.png"],
    "an archive in a device": ["zip://x.png::/dev/zero"],
    "base64 that is none": ["data:image/png;base64,@@"],
    "base64 with an umlaut": ["data:image/png;base64,\u00e4\u00e4\u00e4\u00e4"],
    "base64 with half a character": [f"data:image/png;base64,{HALF}"],
    "base64 of text": ["data:image/png;base64," + base64.b64encode(b"hello").decode()],
    "base64 of nothing": ["data:"],
}
"""The column `images` of rows."""


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _noise(mode: str = "RGB", size: tuple[int, int] = (120, 90)) -> Image.Image:
    values = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(values).convert(mode)


def _cut(kind: str) -> bytes:
    """An image that is cut off in its middle."""
    data = _saved(_noise(), kind)
    return data[: len(data) // 2]


def _png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG of a stated size with some chunks (name, content)."""
    head = (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    parts = [b"\x89PNG\r\n\x1a\n"]
    for name, content in (head, *chunks, (b"IEND", b"")):
        parts.append(struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content)))
    return b"".join(parts)


def _flipped(data: bytes, first: int, last: int) -> bytes:
    return data[:first] + bytes(byte ^ 0xFF for byte in data[first:last]) + data[last:]


def _zeros(num_bytes: int) -> bytes:
    """That many zeros, compressed."""
    packer = zlib.compressobj(9)
    block = bytes(2**20)
    made = b"".join(packer.compress(block[: num_bytes - at]) for at in range(0, num_bytes, 2**20))
    return made + packer.flush()


FILES: dict[str, Callable[[], bytes]] = {
    "text": lambda: b"hello",
    "HTML": lambda: b"<!DOCTYPE html><html><body>404</body></html>",
    "SVG": lambda: b'<svg xmlns="http://www.w3.org/2000/svg"/>',
    "PDF": lambda: b"%PDF-1.7\n%%EOF",
    "PostScript": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 60 60\n%%EndComments\nshowpage\n",
    "an MP4": lambda: b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom" + bytes(99),
    "gzip": lambda: b"\x1f\x8b\x08\0" + bytes(60),
    "noise": lambda: random.Random(3).randbytes(5000),
    "a PNG without content": lambda: png()[:33],
    "a PNG with nothing in it": lambda: _png(60, 60),
    "a PNG cut off": lambda: _cut("PNG"),
    "a PNG with flipped bytes": lambda: _flipped(png(200, 200), 60, 90),
    "a PNG whose header is flipped": lambda: _flipped(png(), 8, 20),
    "a PNG with too little content": lambda: _png(600, 600, (b"IDAT", _zeros(1000))),
    "a PNG of no width": lambda: _png(0, 60, (b"IDAT", _zeros(60))),
    "a PNG of 9000 x 9000": lambda: _png(9000, 9000, (b"IDAT", _zeros(9000 * 27001))),
    "a PNG of 50000 x 50000": lambda: _png(50_000, 50_000, (b"IDAT", _zeros(10_000))),
    "a PNG of 2**31 columns": lambda: _png(2**31 - 1, 2**31 - 1),
    "a PNG with a text of 99 MiB": lambda: _png(60, 60, (b"zTXt", b"a\0\0" + _zeros(99 * 2**20))),
    "a PNG that is too thin": lambda: png(2000, 6),
    "a JPEG without content": lambda: _saved(_noise(), "JPEG")[:200],
    "a JPEG cut off": lambda: _cut("JPEG"),
    "a WebP cut off": lambda: _cut("WEBP"),
    "a GIF cut off": lambda: _cut("GIF")[:40],
    "a BMP cut off": lambda: _cut("BMP"),
    "a TIFF cut off": lambda: _cut("TIFF"),
    "a JPEG 2000 cut off": lambda: _cut("JPEG2000")[:300],
    "a TGA cut off": lambda: _cut("TGA"),
    "a PCX cut off": lambda: _cut("PCX")[:200],
    "an ICO cut off": lambda: _cut("ICO")[:30],
    "a PPM of 10**16 pixels": lambda: b"P6 99999999 99999999 255\n" + bytes(60),
    "a PPM cut off": lambda: b"P6 600 600 255\n" + bytes(60),
    "a PPM of text": lambda: b"P3 60 60 255\nred green",
    "a BMP of 10**18 pixels": lambda: b"BM" + struct.pack("<IIIIiiHH", 99, 0, 54, 40, 10**9, 10**9, 1, 24) + bytes(60),
    "a TIFF in a circle": lambda: b"II*\0\x08\0\0\0\0\0\x08\0\0\0",
    "a TIFF with 2**32 values": lambda: b"II*\0\x08\0\0\0\x01\0\x00\x01\x04\0\xff\xff\xff\xff\x08\0\0\0\0\0\0\0",
    "grey floats": lambda: _saved(_noise("F"), "TIFF"),
    "grey integers of 32 bits": lambda: _saved(_noise("I"), "TIFF"),
    "a map of floats": lambda: b"Pf\n60 60\n-1.0\n" + bytes(4 * 3600),
}
"""Files that one image of a sample names."""

SOUNDS: dict[str, Any] = {
    "a sound of a number": 5,
    "a sound of true": True,
    "a sound of an empty object": {},
    "a sound of nulls": {"bytes": None, "path": None},
    "two sounds": ["good.wav", "good.wav"],
    "no sounds": [],
    "an array without a rate": {"array": [0.0, 0.5]},
    "an array of rate 0": {"array": [0.0, 0.5], "sampling_rate": 0},
    "an array of an endless rate": {"array": [0.0, 0.5], "sampling_rate": 10**400},
    "an array of a broken rate": {"array": [0.0, 0.5], "sampling_rate": 22050.5},
    "an array of texts": {"array": ["a", "b"], "sampling_rate": 16000},
    "an array of unequal lists": {"array": [[0.0], [0.0, 0.5]], "sampling_rate": 16000},
    "an array of nothing": {"array": [], "sampling_rate": 16000},
    "an array with a NaN": {"array": [0.0, float("nan")], "sampling_rate": 16000},
    "an array of 300 channels": {"array": [[0.0] * 300] * 300, "sampling_rate": 16000},
    "a sound that is absent": "absent.wav",
    "a sound that is a device": "/dev/zero",
    "a sound that is a pipe": "pipe",
    "a sound that is a folder": "good_clip",
    "a sound of a tebibyte": "sparse",
    "an empty sound": "empty",
    "a sound that is an image": "good.png",
    "a sound whose base64 is none": "data:audio/wav;base64,@@",
    "a sound that breaks lines": "a\nb\x1b[31m.wav",
}
"""The column `audio` of rows, in place of that of `GOOD_SOUND`."""

SOUND_FILES: dict[str, Callable[[], bytes]] = {
    "a sound cut off": lambda: wav(tone())[:-500],
    "a sound cut off in its header": lambda: wav(tone())[:30],
    "a sound of no sample": lambda: riff(form(), chunk(b"data", b"")),
    "a sound without data": lambda: riff(form()),
    "a sound without a form": lambda: riff(chunk(b"data", bytes(100))),
    "a sound of rate 0": lambda: riff(form(rate=0), chunk(b"data", bytes(100))),
    "a sound of rate 2**32": lambda: riff(form(rate=2**32 - 1), chunk(b"data", bytes(100))),
    "a sound of no channel": lambda: riff(form(channels=0, block=2), chunk(b"data", bytes(100))),
    "a sound of 65535 channels": lambda: riff(form(channels=65535, bits=8, block=65535), chunk(b"data", bytes(65535))),
    "a sound of an unknown codec": lambda: riff(form(codec=0x5555), chunk(b"data", bytes(100))),
    "a sound of 128 bits": lambda: riff(form(bits=128, block=16), chunk(b"data", bytes(160))),
    "a sound of more than it has": lambda: riff(form(), chunk(b"data", bytes(100), 10**9)),
    "a sound with an infinity": lambda: riff(form(3, bits=32), chunk(b"data", np.full(9, np.inf, "<f4").tobytes())),
    "a FLAC that is none": lambda: b"fLaC" + bytes(99),
    "an Ogg that is none": lambda: b"OggS" + bytes(99),
    "a sound of text": lambda: b"hello",
}
"""Files that a sample names as its sound."""

CLIPS: dict[str, dict[str, Any]] = {
    "caption null": {"caption": None},
    "caption a number": {"caption": 5},
    "caption a list": {"caption": ["a"]},
    "caption empty": {"caption": ""},
    "caption of spaces": {"caption": " \n "},
    "caption with half a character": {"caption": f"a {HALF}"},
    "fps 0": {"fps": 0},
    "fps negative": {"fps": -8},
    "fps NaN": {"fps": float("nan")},
    "fps infinite": {"fps": float("inf")},
    "fps a text": {"fps": "8"},
    "fps true": {"fps": True},
    "fps of 400 digits": {"fps": 10**400},
    "fps next to nothing": {"fps": 1e-320},
    "no content": {"frames": None},
    "two contents": {"latents": "good.npy"},
    "latents for a model of pixels": {"frames": None, "latents": "good.npy"},
    "frames a number": {"frames": 5},
    "frames an object": {"frames": {}},
    "no frames": {"frames": []},
    "frames of numbers": {"frames": [5] * 8},
    "frames of nulls": {"frames": [None] * 8},
    "no such folder": {"frames": "absent"},
    "a file as folder": {"frames": "good.png"},
    "a folder without frames": {"frames": "empty_folder"},
    "a folder whose name is too long": {"frames": "a" * 5000},
    "a folder with a zero in its name": {"frames": "a\0b"},
    "a folder with half a character": {"frames": HALF},
    "too few frames": {"frames": ["good_clip/000.png"]},
    "a frame that is absent": {"frames": [*[f"good_clip/00{i}.png" for i in range(7)], "absent.png"]},
    "a frame that is a device": {"frames": ["good_clip/000.png"] * 7 + ["/dev/zero"]},
    "a frame of another size": {"frames": ["good_clip/000.png"] * 7 + ["good.png"]},
    "a frame that is corrupt": {"frames": ["good_clip/000.png"] * 7 + ["cut.png"]},
    "16 frames of 9000 x 9000": {"frames": ["huge.png"] * 16},
    "a last frame of 9000 x 9000": {"frames": ["good_clip/000.png"] * 7 + ["huge.png"]},
    "a video that is a device": {"frames": None, "video": "/dev/zero"},
    "a video that is a pipe": {"frames": None, "video": "pipe"},
    "a video that is text": {"frames": None, "video": "good.npy"},
    "a video that is a number": {"frames": None, "video": 5},
}
"""Columns of clips, in place of those of `GOOD_CLIP`."""


def npy(shape: Any, dtype: str = "<f4", content: bytes = b"", order: str = "False") -> bytes:
    """A .npy file that says that it has some shape and dtype."""
    head = f"{{'descr': {dtype!r}, 'fortran_order': {order}, 'shape': {shape}, }}".encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + content


SHAPE = (4, 8, 6, 10)


def _saved_array(values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()


def _one_value(value: float) -> bytes:
    values = np.zeros(SHAPE)
    values[1, 2, 3, 4] = value
    return _saved_array(values)


def _npz(name: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return buffer.getvalue()


def _changed_npz(offset: int, value: int) -> bytes:
    """An archive in whose entries, local and central, one field of two bytes has another value."""
    data = bytearray(_npz("latents.npy", _saved_array(np.zeros(SHAPE, np.float32))))
    for start, shift in ((data.index(b"PK\3\4"), 0), (data.index(b"PK\1\2"), 2)):
        data[start + offset + shift : start + offset + shift + 2] = struct.pack("<H", value)
    return bytes(data)


LATENTS: dict[str, Callable[[], bytes]] = {
    "latents of text": lambda: b"hello",
    "latents cut off in the header": lambda: npy(SHAPE)[:20],
    "latents cut off": lambda: npy(SHAPE, content=bytes(100)),
    "latents of 2.5 TiB": lambda: npy((4, 2**38 // 192, 6, 10), "<f8"),
    "latents of 10**40 bytes": lambda: npy((4, 8, 10**19, 10**19)),
    "latents of negative shape": lambda: npy((4, -8, -6, 10)),
    "latents of no frames": lambda: npy((4, 0, 6, 10)),
    "latents of three dimensions": lambda: npy((4, 8, 6), content=bytes(768)),
    "latents of integers": lambda: npy(SHAPE, "<i4", bytes(7680)),
    "latents of objects": lambda: npy(SHAPE, "|O", b"cos\nsystem\n(S'true'\ntR."),
    "latents of texts": lambda: npy(SHAPE, "<U9", bytes(99)),
    "latents of complex numbers": lambda: npy(SHAPE, "<c8", bytes(15360)),
    "latents of an unknown type": lambda: npy(SHAPE, "<z9"),
    "latents whose shape is a program": lambda: npy("__import__('os')"),
    "latents whose shape is a text": lambda: npy("'abc'"),
    "latents with a deep header": lambda: npy("(" * 5000),
    "latents of version 9": lambda: b"\x93NUMPY\x09\x00" + npy(SHAPE)[8:],
    "latents with a header of 64 KiB": lambda: npy(f"({'4, ' * 20000})"),
    "latents with a NaN": lambda: _one_value(float("nan")),
    "latents with an infinity": lambda: _one_value(float("inf")),
    "latents beyond float32": lambda: _one_value(1e300),
    "latents of other channels": lambda: _saved_array(np.zeros((3, 8, 6, 10), np.float32)),
    "latents of odd rows": lambda: _saved_array(np.zeros((4, 8, 5, 10), np.float32)),
    "latents of too few frames": lambda: _saved_array(np.zeros((4, 1, 6, 10), np.float32)),
    "an archive of nothing": lambda: _npz("readme.txt", b"hello"),
    "an archive of text": lambda: _npz("latents.npy", b"hello"),
    "an archive that expands": lambda: _npz("latents.npy", npy((4, 8, 10_000, 10_000), content=bytes(10**7))),
    "an archive cut off": lambda: _npz("latents.npy", npy(SHAPE, content=bytes(7680)))[:-30],
    "an archive with a password": lambda: _changed_npz(6, 1),
    "an archive of unknown compression": lambda: _changed_npz(8, 77),
    "an archive of another compression": lambda: _changed_npz(8, 14),
}
"""Files that a clip names as its latents."""


def make_files(folder: Path) -> None:
    """Makes what the samples name: good files, and those that are no files."""
    for name in ("good_clip", "empty_folder", "files"):
        (folder / name).mkdir()
    for index in range(8):
        (folder / "good_clip" / f"{index:03}.png").write_bytes(png(24, 24))
    (folder / "good.png").write_bytes(png())
    (folder / "good.wav").write_bytes(wav(tone()))
    (folder / "cut.png").write_bytes(png(24, 24)[:70])
    (folder / "huge.png").write_bytes(FILES["a PNG of 9000 x 9000"]())
    (folder / "empty").touch()
    (folder / "good.npy").write_bytes(_saved_array(np.zeros(SHAPE, np.float32)))
    os.mkfifo(folder / "pipe")
    os.mknod(folder / "socket", 0o140600)
    (folder / "circle").symlink_to("circle")
    (folder / "dangling").symlink_to("nothing")
    with (folder / "sparse").open("wb") as file:
        file.truncate(2**40)


def _file(folder: Path, name: str, content: bytes) -> str:
    """The path, relative to the folder, of a file with some content."""
    path = folder / "files" / f"{zlib.crc32(name.encode())}.bin"
    path.write_bytes(content)
    return str(path.relative_to(folder))


def conversations(folder: Path) -> dict[str, bytes]:
    """Every bad sample of a job that reads conversations, as a line of a jsonl file in a folder with `make_files`."""
    rows = {**MESSAGES, **{name: {"images": images} for name, images in IMAGES.items()}}
    rows |= {name: {"images": [_file(folder, name, make())]} for name, make in FILES.items()}
    return LINES | {name: json.dumps({**GOOD, **row}).encode() for name, row in rows.items()}


def sounds(folder: Path) -> dict[str, bytes]:
    """The same of a job whose model hears."""
    rows = SOUNDS | {name: _file(folder, name, make()) for name, make in SOUND_FILES.items()}
    return {name: json.dumps({**GOOD_SOUND, "audio": value}).encode() for name, value in rows.items()}


def clips(folder: Path) -> dict[str, bytes]:
    """The same of a job that reads clips as pixels."""
    del folder
    return {name: json.dumps({**GOOD_CLIP, **row}).encode() for name, row in CLIPS.items()}


def latents(folder: Path) -> dict[str, bytes]:
    """The same of a job that reads latents."""
    rows = {name: {"latents": _file(folder, name, make())} for name, make in LATENTS.items()}
    rows |= {"latents in a device": {"latents": "/dev/zero"}, "latents in a pipe": {"latents": "pipe"}}
    rows |= {"latents in an empty file": {"latents": "empty"}, "latents of 1 TiB": {"latents": "sparse"}}
    return {name: json.dumps({**GOOD_LATENTS, **row}).encode() for name, row in rows.items()}


def _odd_wav() -> bytes:
    """A sound with a chunk that is not known, of WAVE_FORMAT_EXTENSIBLE."""
    extensible = form(0xFFFE, channels=2, bits=24)[8:] + struct.pack("<HHIH", 22, 24, 3, 1) + bytes(14)
    return riff(chunk(b"LIST", b"odd"), chunk(b"fmt ", extensible), chunk(b"data", bytes(range(240)) * 6))


def mutated_file(kinds: Sequence[str], seed: int) -> bytes:
    """An image, sound or archive of one of the kinds in which a few bytes are others, or cut off; it may be good."""
    dice = random.Random(seed)
    kind = dice.choice(kinds)
    makers = {"NPY": lambda: _one_value(1.0), "NPZ": lambda: _npz("latents.npy", _one_value(1.0)), "WAV": _odd_wav}
    data = bytearray(makers[kind]() if kind in makers else _saved(_noise(size=(60, 70)), kind))
    for _ in range(dice.randint(1, 3)):
        first = len(data) if dice.random() < 0.5 else 200
        data[dice.randrange(min(first, len(data)))] = dice.randrange(256)
    return bytes(data[: dice.randrange(len(data))] if dice.random() < 0.2 else data)


def mutated(good: dict[str, Any], seed: int) -> bytes:
    """A good row in which one value, at any depth, is another one; it may still be good."""
    dice = random.Random(seed)
    row = json.loads(json.dumps(good))
    value, keys = row, list(row)
    while True:
        key = dice.choice(keys)
        inner = value[key]
        if not isinstance(inner, dict | list) or not inner or dice.random() < 0.3:
            break
        value, keys = inner, list(inner) if isinstance(inner, dict) else list(range(len(inner)))
    value[key] = dice.choice(ANYTHING)
    return json.dumps(row).encode()
