import base64
import json
import shutil
import sys
from pathlib import Path

import pytest

from mmtrain.config import DataConfig
from mmtrain.data.charts import make_charts
from mmtrain.data.sources import CONVERSATIONS, Record, Source
from mmtrain.data.sources import open_source as open_any
from mmtrain.errors import ConfigError, DataError
from tests.data.samples import png, write_jsonl


def data(source: Path | str, *, streaming: bool = False) -> DataConfig:
    return DataConfig(source=str(source), streaming=streaming, shuffle=False)


def open_source(section: DataConfig, split: str) -> Source[Record]:
    return open_any(section, split, CONVERSATIONS)


def read(source: Source[Record], index: int) -> Record:
    record = source[index]
    assert record is not None
    return record


@pytest.mark.parametrize("streaming", [False, True])
def test_parquet_by_index_and_as_a_stream(charts: Path, streaming: bool) -> None:
    import pyarrow.parquet as pq

    path = charts / "data" / "train-00000-of-00001.parquet"
    rows = pq.read_table(path).to_pylist()
    for source in (open_source(data(charts, streaming=streaming), "train"), open_source(data(path), "train")):
        for index in (0, 1, 2, 150, 179, 5):
            record = read(source, index)
            assert record.sample == index
            assert record.grade == rows[index]["grade"]
            assert list(record.messages) == rows[index]["messages"]
            assert [image.read() for image in record.images] == [i["bytes"] for i in rows[index]["images"]]
    source = open_source(data(charts, streaming=streaming), "validation")
    assert source.num_samples == (None if streaming else 20)
    if streaming:
        assert source[20] is None
        assert read(source, 0).sample == 0


def test_without_datasets_parquet_reads_the_same(charts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_it = [read(open_source(data(charts), split), i) for split in ("train", "validation") for i in (0, 19, 7)]
    monkeypatch.setitem(sys.modules, "datasets", None)
    without = [read(open_source(data(charts), split), i) for split in ("train", "validation") for i in (0, 19, 7)]
    assert without == with_it
    stream = open_source(data(charts, streaming=True), "train")
    assert read(stream, 179).sample == 179
    assert stream[180] is None
    with pytest.raises(ConfigError, match=r"split 'test' of .* does not exist; it has train, validation"):
        open_source(data(charts), "test")
    with pytest.raises(ConfigError, match="the hub needs the package `datasets`"):
        open_source(data("org/name"), "train")


@pytest.mark.parametrize("streaming", [False, True])
def test_jsonl_paths_are_relative_to_the_file(tmp_path: Path, streaming: bool) -> None:
    url = "data:image/png;base64," + base64.b64encode(png(9, 9)).decode()
    path = write_jsonl(tmp_path, 4, {2: {"images": [url, "0.png"], "grade": "hard"}, 3: {"images": None}})
    source = open_source(data(path, streaming=streaming), "train")
    assert read(source, 1).images[0].read() == (tmp_path / "1.png").read_bytes()
    record = read(source, 2)
    assert [i.read() for i in record.images] == [png(9, 9), (tmp_path / "0.png").read_bytes()]
    assert record.grade == "hard"
    assert read(source, 3).images == ()
    if streaming:
        assert source[4] is None


def test_a_folder_of_jsonl_files_has_their_splits(tmp_path: Path) -> None:
    write_jsonl(tmp_path, 3)
    write_jsonl(tmp_path, 2, name="validation")
    assert open_source(data(tmp_path), "validation").num_samples == 2
    with pytest.raises(ConfigError, match=r"split 'test' of .* does not exist; it has train, validation"):
        open_source(data(tmp_path), "test")
    with pytest.raises(ConfigError, match="whose only split is 'train'; for 'validation' name a folder"):
        open_source(data(tmp_path / "train.jsonl"), "validation")


def test_missing_sources_name_what_exists(tmp_path: Path, charts: Path) -> None:
    write_jsonl(tmp_path, 2)
    with pytest.raises(ConfigError, match=r"trian.jsonl' does not exist; did you mean .*train.jsonl"):
        open_source(data(tmp_path / "trian.jsonl"), "train")
    with pytest.raises(ConfigError, match="neither does its folder"):
        open_source(data(tmp_path / "no" / "x.parquet"), "train")
    for streaming in (False, True):
        with pytest.raises(ConfigError, match=r"split 'test' cannot be opened: .*train.*validation"):
            open_source(data(charts, streaming=streaming), "test")
    (tmp_path / "x.csv").write_text("a,b\n")
    with pytest.raises(ConfigError, match=r"must end in \.parquet or \.jsonl"):
        open_source(data(tmp_path / "x.csv"), "train")
    with pytest.raises(ConfigError, match="cannot be opened") as failure:
        open_source(data("nobody/has-this"), "train")
    assert "\n" not in str(failure.value)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"message": [], "images": []}) + "\n")
    with pytest.raises(ConfigError, match="no column `messages`; it has message, images; did you mean 'message'"):
        open_source(data(tmp_path / "a.jsonl"), "train")
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="no column `messages`; it has text"):
        open_source(data(tmp_path / "a.parquet"), "train")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        open_source(data(tmp_path / "empty.jsonl"), "train")


def test_a_bad_row_is_named(tmp_path: Path) -> None:
    bad = {
        0: {"messages": "hello"},
        1: {"images": "0.png"},
        2: {"images": [3]},
        3: {"images": ["data:image/png;base64,@@"]},
        4: {"images": [{"bytes": None, "path": None}]},
    }
    path = write_jsonl(tmp_path, 6, bad)
    with path.open("a") as file:
        file.write("{broken\n")
    source = open_source(data(path), "train")
    messages = [
        "is not a list",
        "`images` is a str",
        "a int; it must be a path",
        "base64 text",
        "neither bytes nor",
    ]
    for index, message in enumerate(messages):
        with pytest.raises(DataError, match=f"sample {index} of .*{message}"):
            source[index]
    with pytest.raises(DataError, match="record 6: not valid JSON"):
        source[6]
    (tmp_path / "5.png").unlink()
    with pytest.raises(DataError, match=r"5.png cannot be read: No such file"):
        read(source, 5).images[0].read()


def test_folders_of_one_name_and_a_folder_written_anew_keep_their_own_samples(tmp_path: Path) -> None:
    # The cache of `datasets` knows such a folder by its name and README alone.
    for folder, seed, num_samples in ((tmp_path / "a" / "set", 1, 30), (tmp_path / "b" / "set", 2, 50)):
        make_charts(folder, num_samples=num_samples, seed=seed)
    first, second = (open_source(data(tmp_path / folder / "set"), "train") for folder in "ab")
    assert (first.num_samples, second.num_samples) == (27, 45)
    before = read(first, 0)
    shutil.rmtree(tmp_path / "a" / "set")
    make_charts(tmp_path / "a" / "set", num_samples=30, seed=3)
    assert read(open_source(data(tmp_path / "a" / "set"), "train"), 0) != before
