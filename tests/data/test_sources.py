import base64
import io
import json
import re
import shutil
import sys
import tarfile
from pathlib import Path

import pytest

from mmtrain.config.data import DataConfig
from mmtrain.data.conversation_records import CONVERSATIONS, Record
from mmtrain.data.media import raw_image
from mmtrain.data.sources import Source, _folder_of
from mmtrain.data.sources import open_source as open_any
from mmtrain.data.toy.charts import make_charts
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
            assert [image.read(10**6) for image in record.images] == [i["bytes"] for i in rows[index]["images"]]
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
    assert read(source, 1).images[0].read(10**6) == (tmp_path / "1.png").read_bytes()
    record = read(source, 2)
    assert [i.read(10**6) for i in record.images] == [png(9, 9), (tmp_path / "0.png").read_bytes()]
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
    with pytest.raises(ConfigError, match=r"the nearest folder that exists, .*train\.jsonl"):
        open_source(data(tmp_path / "no" / "x.parquet"), "train")
    for streaming in (False, True):
        with pytest.raises(ConfigError, match=r"split 'test' cannot be opened: .*train.*validation"):
            open_source(data(charts, streaming=streaming), "test")
    (tmp_path / "x.csv").write_text("a,b\n")
    with pytest.raises(ConfigError, match=r"must end in \.parquet, \.jsonl or \.json"):
        open_source(data(tmp_path / "x.csv"), "train")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "data/chart",
            r"data.source = 'data/chart' does not exist; did you mean data/charts\? \(it is not looked for",
        ),
        ("data/x", r"data.source = 'data/x' does not exist; .*/data has charts"),
        ("~no-one/x", "data.source = '~no-one/x' does not exist: there is no user 'no-one'"),
        ("https://example.com/x.parquet", "is an address; download what it names"),
        ("data/charts/train", r"data.source = 'data/charts/train' does not exist"),
        ("./chart", "data.source = './chart' does not exist"),
        ("chart.json", "data.source = 'chart.json' does not exist"),
        ("a chart", "data.source = 'a chart' does not exist"),
    ],
)
def test_a_misspelt_folder_is_never_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lookups: list[str], source: str, message: str
) -> None:
    (tmp_path / "data" / "charts").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        open_source(data(source), "train")
    assert lookups == []


@pytest.mark.parametrize(("source", "near"), [("nobody/has-this", ""), ("chart", "; did you mean charts?")])
def test_a_hub_that_cannot_be_reached_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lookups: list[str], source: str, near: str
) -> None:
    (tmp_path / "charts").mkdir()
    monkeypatch.chdir(tmp_path)
    said = f"data.source = {source!r}: no such folder, and the hub cannot be asked: "
    with pytest.raises(ConfigError) as failure:
        open_source(data(source), "train")
    assert str(failure.value) == f"{said}[Errno -2] Name or service not known{near}"
    before = len(lookups)
    assert 1 <= before <= 2  # `datasets` asks six times
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=f"^{said}.*offline mode is enabled.*{re.escape(near)}$"):
        open_source(data(source), "train")
    assert len(lookups) == before


def test_relative_paths_start_at_the_folder_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where images of the same names are others
    (tmp_path / "0.png").write_bytes(png(5, 5))
    folder = tmp_path / "set" / "data"
    (folder / "images").mkdir(parents=True)
    (folder / "0.png").write_bytes(png(9, 9))
    turns = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "red"}]
    for split in ("train", "test"):
        (folder / f"{split}.json").write_text(json.dumps([{"messages": turns, "images": ["0.png"]}]))
    for source in ("set", str(tmp_path / "set")):
        for streaming in (False, True):
            record = read(open_source(data(source, streaming=streaming), "train"), 0)
            assert record.images[0].read(10**6) == png(9, 9)
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"messages": turns, "images": [{"bytes": None, "path": "0.png"}]}]
    pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet")
    for hidden in (False, True):
        if hidden:
            monkeypatch.setitem(sys.modules, "datasets", None)
        record = read(open_source(data(folder / "a.parquet"), "train"), 0)
        assert record.images[0].read(10**6) == png(9, 9)


def test_a_column_that_is_not_read_is_not_decoded(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "red"}]
    rows = {"messages": [turns], "thumbnail": [{"bytes": b"no image", "path": None}]}
    made = datasets.Dataset.from_dict(rows).cast_column("thumbnail", datasets.Image(decode=False))
    made.cast_column("thumbnail", datasets.Image()).to_parquet(tmp_path / "a.parquet")
    assert read(open_source(data(tmp_path / "a.parquet"), "train"), 0).messages == tuple(turns)


@pytest.mark.parametrize("streaming", [False, True])
def test_lines_that_are_no_record_end_neither_the_stream_nor_the_opening(tmp_path: Path, streaming: bool) -> None:
    good = write_jsonl(tmp_path, 2).read_bytes().splitlines()
    path = tmp_path / "some.jsonl"
    path.write_bytes(b"\n".join([b"{broken", b"null", good[0], b"[" * 10**5, good[1]]) + b"\n")
    source = open_source(data(path, streaming=streaming), "train")
    for index, message in enumerate(
        ("not valid JSON", "it is a NoneType; it must be an object with `messages`, ", "", "not valid JSON", "")
    ):
        if message:
            with pytest.raises(DataError, match=rf"sample {index} of .*some\.jsonl.*: {message}"):
                source[index]
        else:
            assert read(source, index).sample == index
    if streaming:
        assert source[5] is None
    path.write_text("5\n{broken\n")
    with pytest.raises(ConfigError, match="no line of it is a JSON object"):
        open_source(data(path), "train")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_source_that_is_gone_is_no_bad_sample(tmp_path: Path, streaming: bool) -> None:
    path = write_jsonl(tmp_path, 2)
    source = open_source(data(path, streaming=streaming), "train")
    path.unlink()
    with pytest.raises(ConfigError, match=r"^data.source .* cannot be read at sample 0: .*No such file.*; restore"):
        source[0]


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"message": [], "images": []}) + "\n")
    with pytest.raises(ConfigError, match=r"has the columns message, images, .*; if 'message' is a list of t"):
        open_source(data(tmp_path / "a.jsonl"), "train")
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": 1, "image": "a.png"}) + "\n")
    with pytest.raises(ConfigError, match="has the columns id, image, but a conversation needs `messages`, "):
        open_source(data(tmp_path / "a.jsonl"), "train")
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="has the columns text, but a conversation needs `messages`, "):
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
    with pytest.raises(DataError, match=r"sample 6 of .*train.jsonl: not valid JSON"):
        source[6]
    (tmp_path / "5.png").unlink()
    with pytest.raises(DataError, match=r"5.png' cannot be read: No such file"):
        read(source, 5).images[0].read(10**6)


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


TURNS = [{"from": "human", "value": "<image>What colour?"}, {"from": "gpt", "value": "red"}]


def llava(*images: str) -> str:
    return json.dumps([{"id": i, "image": image, "conversations": TURNS} for i, image in enumerate(images)])


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "name", ["train.jsonl", "train.json", "data.jsonl", "data.json", "llava_mix.json", "set.jsonl"]
)
def test_a_folder_with_one_file_and_its_images(tmp_path: Path, name: str, streaming: bool) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "0.png").write_bytes(png(9, 9))
    (tmp_path / "dataset_info.json").write_text("{}")
    row = {"image": "images/0.png", "conversations": TURNS}
    (tmp_path / name).write_text(json.dumps(row) + "\n" if name.endswith("l") else llava("images/0.png"))
    record = read(open_source(data(tmp_path, streaming=streaming), "train"), 0)
    assert record.images[0].read(10**6) == png(9, 9)
    assert record.messages[1] == {"role": "assistant", "content": "red"}


def test_a_folder_of_images_with_texts_as_datasets_reads_it(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    for index in range(2):
        (tmp_path / f"{index}.png").write_bytes(png(9 + index, 9))
    rows = [{"file_name": f"{index}.png", "text": f"a red square, {index}"} for index in range(2)]
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_source(data(tmp_path), "train")
    found = [(read(source, i).messages[1]["content"], read(source, i).images[0].read(10**6)) for i in range(2)]
    assert found == [(f"a red square, {index}", png(9 + index, 9)) for index in range(2)]


def test_which_file_of_a_folder_is_the_training_split(tmp_path: Path) -> None:
    for name in ("validation", "notes"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"conversations": TURNS, "images": [f"{name}.png"]}) + "\n")
    assert read(open_source(data(tmp_path), "train"), 0).images[0].path.endswith("notes.png")
    (tmp_path / "other.json").write_text(llava("other.png"))
    with pytest.raises(ConfigError, match=r"split 'train' of .* does not exist; it has notes, validation, other; call"):
        open_source(data(tmp_path), "train")
    (tmp_path / "data.json").write_text(llava("data.png"))
    assert read(open_source(data(tmp_path), "train"), 0).images[0].path.endswith("data.png")
    (tmp_path / "train.json").write_text(llava("train.png"))
    assert read(open_source(data(tmp_path), "train"), 0).images[0].path.endswith("train.png")
    assert read(open_source(data(tmp_path), "validation"), 0).images[0].path.endswith("validation.png")
    assert read(open_source(data(tmp_path / "other.json"), "train"), 0).images[0].path.endswith("other.png")


@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_shards_of_a_split(tmp_path: Path, ending: str) -> None:
    for split, count in (("train", 2), ("validation", 1)):
        for index in range(count):
            path = tmp_path / f"{split}-{index:05}-of-{count:05}.{ending}"
            # A content of another type than that of the first file, which a table could not have.
            content = f"{split} {index}" if not index else [{"type": "text", "text": f"{split} {index}"}]
            messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
            path.write_text(json.dumps({"messages": messages}) + "\n")
    source = open_source(data(tmp_path), "train")
    assert read(source, 0).messages[1]["content"] == "train 0"
    assert read(source, 1).messages[1]["content"] == [{"type": "text", "text": "train 1"}]
    assert read(open_source(data(tmp_path), "validation"), 0).messages[1]["content"] == "validation 0"
    (tmp_path / f"train-00001-of-00002.{ending}").unlink()
    with pytest.raises(
        ConfigError, match=f"shards of split 'train' are missing or doubled: train-00000-of-00002.{ending}"
    ):
        open_source(data(tmp_path), "train")


@pytest.mark.parametrize(
    "name", ["my_test", "test-final", "llava_val2014", "ScienceQATest", "VAL", "dev.small", "vqa-eval", "evaluation"]
)
def test_a_file_that_is_held_out_by_its_name_is_not_trained_on(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.jsonl").write_text(json.dumps({"conversations": TURNS, "image": "held_out.png"}) + "\n")
    with pytest.raises(
        ConfigError, match=rf"split 'train' of .* does not exist; it has {name} \(by its name held out\); "
    ):
        open_source(data(tmp_path), "train")
    assert read(open_source(data(tmp_path / f"{name}.jsonl"), "train"), 0).images[0].path.endswith("held_out.png")
    for other in ("latest", "contest", "devices", "valuable"):
        path = tmp_path / f"{other}.jsonl"
        path.write_text(json.dumps({"conversations": TURNS, "image": "own.png"}) + "\n")
        assert read(open_source(data(tmp_path), "train"), 0).images[0].path.endswith("own.png")
        path.unlink()


def test_a_list_inside_of_an_object_is_named(tmp_path: Path) -> None:
    rows = [{"conversations": TURNS, "image": "0.png"}]
    for indent in (None, 1):
        (tmp_path / "a.json").write_text(json.dumps({"version": 1, "data": rows}, indent=indent))
        with pytest.raises(ConfigError, match=r"list 'data'.* write that list alone"):
            open_source(data(tmp_path / "a.json"), "train")


def test_webdataset_of_images_and_texts(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    with tarfile.open(tmp_path / "train-000000.tar", "w") as tar:
        for name, content in (("0.jpg", png(9, 9)), ("0.txt", b"a cat")):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    record = read(open_source(data(tmp_path), "train"), 0)
    assert (record.messages[1]["content"], record.images[0].read(10**6)) == ("a cat", png(9, 9))
    assert record.unread == ()


def test_where_paths_of_images_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, folder = tmp_path / "home", tmp_path / "set"
    for place in (home, folder):
        place.mkdir()
        (place / "0.png").write_bytes(png(9, 9))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    paths = ["0.png", "./0.png", "~/0.png", str(folder / "0.png"), "../set/0.png"]
    (folder / "train.json").write_text(llava(*paths, "1.png"))
    source = open_source(data("set"), "train")
    assert [read(source, i).images[0].read(10**6) for i in range(5)] == [png(9, 9)] * 5
    said = (
        f"its file '{folder}/1.png' cannot be read: No such file or directory; correct the path, which starts at the f"
    )
    with pytest.raises(DataError, match=re.escape(said)):
        read(source, 5).images[0].read(10**6)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["hf://datasets/a/b@1/data/train-0.jsonl", "hf://datasets/a/b@1/data/train-1.jsonl"], "hf://datasets/a/b@1/data"),
        (["hf://datasets/a/b@1/x/0.jsonl", "hf://datasets/a/b@1/y/1.jsonl"], "hf://datasets/a/b"),
        ([], "hf://datasets/a/b"),
    ],
)  # fmt: skip
def test_relative_paths_of_the_hub_start_in_its_repository(files: list[str], expected: str) -> None:
    folder = _folder_of(files, "hf://datasets/a/b")
    assert folder == expected
    assert raw_image("images/0.png", "", folder).path == f"{expected}/images/0.png"
