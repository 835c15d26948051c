"""Data sets of a `dataset_info.json` give the records that the same conversations give as `messages`."""

import json
from pathlib import Path
from typing import Any

import pytest

from mmtrain.config.data import DataConfig, SourceConfig
from mmtrain.data.conversation_records import CONVERSATIONS, Record
from mmtrain.data.sources import Sources, open_source
from mmtrain.errors import ConfigError, DataError
from tests.data.samples import png

LIST: dict[str, Any] = {
    "identity": {"file_name": "identity.json"},
    "talk": {
        "file_name": "sub/talk.jsonl",
        "formatting": "alpaca",
        "columns": {"prompt": "ask", "query": "more", "response": "answer", "history": "before", "system": "role"},
    },
    "images": {
        "file_name": "images.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "images"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "glaive": {"file_name": "glaive.json", "formatting": "sharegpt", "columns": {"tools": "tools", "system": "system"}},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "red.png").write_bytes(png())
    identity = [
        {"instruction": "hi", "input": "", "output": "Hello."},
        {"instruction": "add", "input": "1 2", "output": "3", "unused": 7},
    ]
    (tmp_path / "identity.json").write_text(json.dumps(identity))
    talk = {
        "ask": "and now?",
        "more": None,
        "answer": "three",
        "before": [["one?", "one"], ["two?", "two"]],
        "role": "s",
    }
    (tmp_path / "sub" / "talk.jsonl").write_text(json.dumps(talk) + "\n")
    turns = [{"role": "user", "content": "<image>which?"}, {"role": "assistant", "content": "red"}]
    with_images = [{"messages": turns, "images": ["red.png"]}, {"messages": turns, "images": "red.png"}]
    (tmp_path / "images.json").write_text(json.dumps(with_images))
    calls = [
        {"from": "human", "value": "book"},
        {"from": "function_call", "value": "{}"},
        {"from": "gpt", "value": "ok"},
    ]
    said = [{"from": "system", "value": "be kind"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
    glaive = [
        {"conversations": said[1:], "tools": '[{"name": "book"}]', "system": "be kind"},
        {"conversations": said, "tools": "", "system": ""},
        {"conversations": calls},
    ]
    (tmp_path / "glaive.json").write_text(json.dumps(glaive))
    listed(tmp_path, LIST)
    return tmp_path


def listed(folder: Path, entries: dict[str, Any]) -> None:
    (folder / "dataset_info.json").write_text(json.dumps(entries))


def records(folder: Path, split: str, *, streaming: bool = False) -> list[Record]:
    data = DataConfig(source=str(folder / "dataset_info.json"), streaming=streaming, shuffle=not streaming)
    source = open_source(data, split, CONVERSATIONS)
    return [record for index in range(2) if (record := source[index] if streaming or index < len(source) else None)]


def said(*texts: str, system: str = "") -> list[dict[str, str]]:
    roles = ("user", "assistant") * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return [{"role": "system", "content": system}] * bool(system) + messages


@pytest.mark.parametrize("streaming", [False, True])
def test_each_entry_is_a_split(folder: Path, streaming: bool) -> None:
    def messages(split: str) -> list[list[Any]]:
        return [list(record.messages) for record in records(folder, split, streaming=streaming)]

    assert messages("identity") == [said("hi", "Hello."), said("add\n1 2", "3")]
    assert messages("talk") == [said("one?", "one", "two?", "two", "and now?", "three", system="s")]
    assert messages("images") == [said("<image>which?", "red")] * 2
    assert messages("glaive") == [said("hi", "ho", system="be kind")] * 2
    assert records(folder, "glaive")[0].tools == ({"name": "book"},)


def test_images_are_found_from_the_folder_of_the_list(folder: Path) -> None:
    for record in records(folder, "images"):
        assert [image.read(10**6) for image in record.images] == [png()]


def test_turns_of_tools_are_refused_by_name(folder: Path) -> None:
    source = open_source(DataConfig(source=str(folder / "dataset_info.json")), "glaive", CONVERSATIONS)
    with pytest.raises(DataError, match=r"sample 2 of .* from 'function_call': calls of tools are read as `messages`"):
        source[2]


def test_parquet_reads_as_json(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    wanted = records(folder, "identity")
    pq.write_table(
        pa.Table.from_pylist(json.loads((folder / "identity.json").read_text())), folder / "identity.parquet"
    )
    listed(folder, LIST | {"other": {"file_name": "identity.parquet"}})
    assert [record.messages for record in records(folder, "other")] == [record.messages for record in wanted]


def test_several_entries_are_mixed(folder: Path) -> None:
    path = str(folder / "dataset_info.json")
    mixed = [SourceConfig(source=path, split=split, weight=1.0) for split in ("identity", "images")]
    assert [source.label for source in mixed] == ["identity", "images"]
    sources = Sources(DataConfig(sources=mixed), "train", CONVERSATIONS)
    assert sources.num_samples == (2, 2)
    first = sources[1]
    assert first is not None and first.source == "images"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hf_hub_url": "me/set"}, r"hf_hub_url is not supported; remove it, read are file_name, formatting, columns"),
        ({"ranking": True}, r"ranking is not supported"),
        ({"num_samples": 5}, r"num_samples is not supported"),
        ({"formatting": "openai"}, r"formatting = 'openai' is not supported; convert it to sharegpt"),
        ({"columns": {"chosen": "a"}}, r"columns: chosen is not supported; remove it, read are prompt, query"),
        ({"columns": {"messages": "a"}}, r"columns: messages is not supported"),
        ({"columns": ["a"]}, r"columns = \['a'\]; it must be an object of names"),
        ({"tags": {"user_tag": 3}}, r"tags = .*; it must be an object of names"),
        ({"formatting": ["a"]}, r"formatting = \['a'\] is not supported"),
        ({"tags": {"user": "u"}}, r"tags: user is not supported; remove it, read are role_tag"),
        ({"file_name": "../x.json"}, r"file_name = '\.\./x\.json' is outside of the folder"),
        ({"file_name": "/etc/x.json"}, r"is outside of the folder"),
        ({"file_name": "x.json"}, r"file_name = 'x\.json' does not exist"),
        ({"file_name": "x.csv"}, r"a file must end in \.parquet, \.jsonl or \.json"),
        ({"file_name": None}, r"no file_name; download the data set, and name its file there"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(folder: Path, change: dict[str, Any], message: str) -> None:
    listed(folder, {"identity": LIST["identity"] | change})
    with pytest.raises(ConfigError, match=message):
        records(folder, "identity")


def test_an_entry_that_is_not_there_is_refused_with_those_that_are(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no data set 'identiy'; did you mean 'identity'\? data.split names one of"):
        records(folder, "identiy")


@pytest.mark.parametrize("row", [{"instruction": "a"}, {"instruction": 3, "output": "a"}, {"output": 3}, [], {}])
def test_a_row_of_another_form_is_refused(folder: Path, row: Any) -> None:
    (folder / "identity.json").write_text(json.dumps([{"instruction": "a", "output": "b"}, row]))
    with pytest.raises(DataError, match=r"sample 1 of "):
        records(folder, "identity")
