import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.data.readers import JsonRows
from mmtrain.errors import ConfigError, DataError

TEXT = st.text(max_size=6)
VALUES = st.recursive(
    st.none() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ROWS = st.lists(st.dictionaries(TEXT, VALUES, min_size=1, max_size=3), min_size=1, max_size=5)


def written(path: Path, text: str | bytes) -> JsonRows:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return JsonRows(path)


@given(rows=ROWS, indent=st.sampled_from([None, 1]), ascii_only=st.booleans())
def test_a_list_is_read_as_json_reads_it(
    tmp_path_factory: Any, rows: list[Any], indent: int | None, ascii_only: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "list.json"
    found = written(path, json.dumps(rows, indent=indent, ensure_ascii=ascii_only))
    assert [found[i] for i in range(len(found))] == rows
    assert list(found.layouts()) == [list(row) for row in rows]


def test_one_object_a_line_in_a_json_file(tmp_path: Path) -> None:
    found = written(tmp_path / "a.json", '{"a": "[1, {"}\n\n{"a": 2}\n')
    assert [found[0], found[1], len(found)] == [{"a": "[1, {"}, {"a": 2}, 2]
    marked = written(tmp_path / "a.json", b'\xef\xbb\xbf [{"a": "}]\\""} ,\n [1]]\n')
    assert [marked[0], marked[1], len(marked)] == [{"a": '}]"'}, [1], 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "a.json is empty; it needs one JSON object a line, or one list of objects$"),
        ("", "a.json is empty"),
        ('[{"a": 1}', "a.json: its list is not closed at the end of the file, which is cut off or damaged"),
        ('[{"a": "1}]', "a.json: its list is not closed"),
        ('[{"a": 1}] x', "a.json: its list is not closed"),
        ('[{"a": 1} {"a": 2}]', "' ' stands in front of object 1 of its list; write a list of objects, with one comma"),
        ('[{"a": 1}, 5, {"a": 2}]', "', 5, ' stands in front of object 1"),
        ('["x", {"a": 2}]', """'\\["x", ' stands in front of object 0"""),
        ('{\n "info": 1, "data": [{"a": 1}]\n}', "it is one object with the list 'data': write that list alone"),
        ('{\n "data": [1]\n}', "a.json: no line of it is a JSON object; it needs one a line, or one list of objects"),
    ],
)  # fmt: skip
def test_files_that_are_no_list_of_objects_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        written(tmp_path / "a.json", text)


def test_a_damaged_object_is_a_bad_sample(tmp_path: Path) -> None:
    found = written(tmp_path / "a.json", '[{"a": nothing}, {"a": 1}]')
    with pytest.raises(DataError, match=r"sample 0 of .*a.json: not valid JSON"):
        found[0]
    assert found[1] == {"a": 1}


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_only_positions_are_in_memory(tmp_path: Path, name: str) -> None:
    rows = [json.dumps({"number": i, "text": "x" * 2000}) for i in range(5000)]
    (tmp_path / name).write_text("\n".join(rows) if name.endswith("l") else "[" + ",\n".join(rows) + "]")
    tracemalloc.start()
    found = JsonRows(tmp_path / name)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found[4321]["number"] == 4321
    assert held < 40 * len(rows)  # two integers of 8 bytes each, and room to grow
    assert peak < 2**20 < 5000 * 2000


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_other_encodings_are_named(tmp_path: Path, name: str, encoding: str) -> None:
    text = '{"a": 1}\n{"a": 2}\n'
    with pytest.raises(ConfigError, match=f"{name} is UTF-16 or UTF-32, but JSON is read as UTF-8; convert the file"):
        written(tmp_path / name, (text if name.endswith("l") else f"[{text[:8]}]").encode(encoding))


def test_files_follow_each_other(tmp_path: Path) -> None:
    texts = ['{"a": 0}\n{"a": 1}\n', "", '[{"a": 2},\n{"a": 3}]', '{"a": 4}\n{broken\n']
    paths = [tmp_path / f"{number}.json" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    rows = JsonRows(*paths)
    assert [rows[index]["a"] for index in range(5)] == [0, 1, 2, 3, 4]
    assert len(rows) == 6
    with pytest.raises(DataError, match=r"sample 5 of .*3.json: not valid JSON"):
        rows[5]
