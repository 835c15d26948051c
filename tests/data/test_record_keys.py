"""Keys of records: honoured as transformers and their authors' tools do it, harmless, named in the log, or refused."""

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmtrain.data.conversation_records import CONVERSATIONS, Record
from mmtrain.data.loader import Loader
from mmtrain.data.processor import Processor
from mmtrain.data.sources import open_source
from mmtrain.errors import DataError
from mmtrain.modality.geometry import OwnSize, image_geometry
from mmtrain.models.batch import IGNORE_INDEX
from tests.data.samples import SIGLIP, make_config, png
from tests.data.test_processor import make_processor, targets

SHOWS = (  # in the manner of Qwen's templates
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.name %}[{{ m.name }}]{% endif %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUOTES = SHOWS.replace("c.function.arguments | tojson", "'`' + c.function.arguments + '`'")
"""As DeepSeek's, which takes arguments as a text."""

TOOL = {"type": "function", "function": {"name": "zoom", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "zoom", "arguments": {"x": 3, "y": None}}}


def user(text: Any = "hi", **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def bot(text: Any = "yo", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def called(arguments: Any) -> dict[str, Any]:
    return {**CALL, "function": {"name": "zoom", "arguments": arguments}}


Write = Callable[[Path, list[dict[str, Any]]], Path]


def as_json(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_parquet(folder: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def read(folder: Path, row: dict[str, Any], *others: dict[str, Any], write: Write = as_json) -> Record:
    """The first of some rows."""
    record = open_source(make_config(write(folder, [row, *others])).data, "train", CONVERSATIONS)[0]
    assert record is not None
    return record


def tokens(processor: Processor, record: Record) -> str:
    return str(processor.tokenizer.decode(processor.document(record).input_ids))


CONVERSATION = [
    user("zoom", name="ann"),
    bot(None, tool_calls=[CALL], reasoning_content="so"),
    {"role": "tool", "content": "ok", "tool_call_id": "c1"},
    bot("done"),
]


@pytest.mark.parametrize("write", [as_json, as_parquet])
@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]])
def test_a_conversation_goes_to_the_template_whole(tmp_path: Path, tools: Any, write: Write) -> None:
    """Token equality with transformers. In a table every struct has all keys, most of them null."""
    processor = make_processor(SHOWS)
    other = {"messages": [user(), bot(tool_calls=[called({"other": "z"})])], "tools": tools}
    record = read(tmp_path, {"messages": CONVERSATION, "tools": tools}, other, write=write)
    document = processor.document(record)
    call = CALL if write is as_json else called({"x": 3})  # a table cannot tell null from absent
    messages = [CONVERSATION[0], {**CONVERSATION[1], "tool_calls": [call]}, *CONVERSATION[2:]]
    theirs = processor.tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=True, return_dict=False)
    assert document.input_ids.tolist() == theirs
    shown = json.dumps(call["function"]["arguments"])
    assert targets(processor, document) == [f"<think>so</think><call>zoom {shown}</call><|im_end|>", "done<|im_end|>"]
    assert record.unread == ()


@pytest.mark.parametrize(
    ("template", "arguments", "shown"),
    [
        (SHOWS, '{"x": 3}', '{"x": 3}'),  # as of OpenAI: a text would be quoted once more
        (SHOWS, {"x": 3}, '{"x": 3}'),
        (QUOTES, '{"x":3}', '`{"x":3}`'),
    ],
)
def test_arguments_that_are_a_text_of_json(tmp_path: Path, template: str, arguments: Any, shown: str) -> None:
    processor = make_processor(template)
    record = read(tmp_path, {"messages": [user(), bot(None, tool_calls=[called(arguments)])]})
    assert targets(processor, processor.document(record)) == [f"<call>zoom {shown}</call><|im_end|>"]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user(), bot()]},
        {"question": "hi", "answer": "yo"},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
    ],
)
@pytest.mark.parametrize("column", ["system", "system_prompt"])
def test_a_system_column_begins_the_prompt(tmp_path: Path, row: dict[str, Any], column: str) -> None:
    text = tokens(make_processor(), read(tmp_path, {**row, column: "Be terse."}))
    said = ("system\nBe terse.", "user\nhi", "assistant\nyo")
    assert text == "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in said)
    assert "system" not in tokens(make_processor(), read(tmp_path, {**row, column: ""}))


@pytest.mark.parametrize(
    ("key", "off", "on"), [("weight", 0, 1), ("weight", 0.0, None), ("loss", False, True), ("train", False, None)]
)
@pytest.mark.parametrize("form", ["messages", "conversations"])
def test_answers_that_are_not_learnt(tmp_path: Path, form: str, key: str, off: Any, on: Any) -> None:
    turns = [user(weight=0), bot("bad", **{key: off}), user("more"), bot("good", **{key: on})]
    if form == "conversations":
        speakers = {"user": "human", "assistant": "gpt"}
        turns = [{"from": speakers[t.pop("role")], "value": t.pop("content"), **t} for t in turns]
    processor, plain = make_processor(), [user(), bot("bad"), user("more"), bot("good")]
    document = processor.document(read(tmp_path, {form: turns}))
    whole = processor.document(read(tmp_path, {"messages": plain}))
    assert targets(processor, document) == ["good<|im_end|>"]
    assert document.input_ids.tolist() == whole.input_ids.tolist()
    kept = document.labels != IGNORE_INDEX
    assert np.array_equal(document.labels[kept], whole.labels[kept])


def row(**columns: Any) -> dict[str, Any]:
    return {"messages": [user(), bot()], **columns}


def shown(**part: Any) -> dict[str, Any]:
    """A row with a part of a kind."""
    return {"messages": [user([{"type": "image", "image": "0.png", **part}]), bot()]}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row(chosen=[bot()]), "sample 0 of .*: `chosen` is of training on preferences, which mmtrain does not do"),
        (row(rejected_response="no"), "`rejected_response` is of training on preferences"),
        (row(kto_tag=False), "`kto_tag` is of training on preferences"),
        (row(label=True), "`label` is of training on preferences"),
        ({"question": "hi", "answer": "yo", "chosen": "y", "rejected": "n"}, "`chosen` is of training on preferences"),
        (row(history=[["a", "b"]]), "`history` is not read; write its turns as `messages`"),
        (row(functions=[TOOL]), "`functions` is not read; write them as `tools`"),
        (row(loss_weight=0.5), "`loss_weight` is not supported; give an answer `weight` 0 or 1"),
        (row(max_pixels=3136), "`max_pixels` is not read for a whole record; write it into the part of its image"),
        (row(chat_template_kwargs={"enable_thinking": False}), "`chat_template_kwargs` is not supported; name one"),
        ({"messages": [user("a <bbox>"), bot()], "objects": {"bbox": [[1, 2, 3, 4]]}}, "`objects` is not read, and"),
        (row(system=5), "`system` is a int; it must be text"),
        ({"messages": [{"role": "system", "content": "a"}, user(), bot()], "system": "b"}, "it has `system`, and its"),
        (row(tools=5), "`tools` is .*; write a list of objects, or that list as JSON"),
        (row(tools="zoom"), "`tools` is .*; write a list of objects, or that list as JSON"),
        (row(tools=["zoom"]), "`tools` is .*; write a list of objects, or that list as JSON"),
        (row(tools=[TOOL]), "it has `tools`, which the tokenizer's chat template does not show; name a template"),
        ({"messages": [user(), bot(tool_calls=[CALL])]}, "it has `tool_calls`, which the tokenizer"),
        ({"messages": [user(), bot(None, tool_calls=[CALL])]}, "it has `tool_calls`, which the tokenizer"),
        ({"messages": [user(), bot(reasoning_content="so")]}, "it has `reasoning_content`, which the"),
        ({"messages": [user(), bot(weight=0.5)]}, "a message has `weight` = 0.5; it must be 0 or 1, false or true"),
        ({"messages": [user(), bot(loss="no")]}, "a message has `loss` = 'no'; it must be 0 or 1, false or true"),
        ({"messages": [user(weight=1), bot()]}, "a message of the role 'user' has `weight` = 1, but answers of the"),
        ({"messages": [user(), bot(masked=True)]}, "a message: `masked` is not supported; give an answer `weight` 0"),
        ({"messages": [user(), bot(weight=0)]}, "none of its answers is learnt, as their `weight`, `loss`, "),
        ({"messages": [user(images=["a.png"]), bot()]}, "a message: `images` is not read there; keep images"),
        (shown(type="video", video="a.mp4", fps=2), "a part with a video has `fps`, which is not supported; set d"),
        (shown(max_pixels=0.5), "image 0 of sample 0 of .*: `max_pixels` = 0.5; it must be a whole number of pixels"),
        (shown(resized_width=28), "it has one of `resized_height` and `resized_width`; give both, or remove it"),
        (shown(min_pixels=9, max_pixels=8), "`max_pixels` = 8 is below `min_pixels` = 9; raise it"),
    ],
)  # fmt: skip
def test_keys_that_ask_for_something_else_are_refused_by_name(tmp_path: Path, bad: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_processor().document(read(tmp_path, bad))


def test_tools_that_a_template_only_mentions_are_refused(tmp_path: Path) -> None:
    mentions = make_processor(
        "{# tools, tool_calls #}{% set tools = 0 %}" + str(make_processor().tokenizer.chat_template)
    )
    for bad, key in ((row(tools=[TOOL]), "tools"), ({"messages": [user(), bot("a", tool_calls=[CALL])]}, "tool_calls")):
        with pytest.raises(DataError, match=f"it has `{key}`, which the tokenizer's chat template does not show"):
            mentions.document(read(tmp_path, bad))
        with pytest.raises(DataError, match=f"it has `{key}`, which the tokenizer's chat template does not show"):
            mentions.prompt(read(tmp_path, bad))


HARMLESS = [
    row(id="7", source="a", dataset="b", split="train", metadata={"a": 1}, __key__="0", width=3, height=4, url="u"),
    row(chosen=None, rejected=[], tools=[], system="", history=[], label=3, objects={"bbox": []}, loss=1, tools_=None),
    {"question": "hi", "answer": "yo", "label": True},
    {"messages": [user(name="ann", id=1, weight=None), bot(tool_calls=[], function_call=None, refusal=None, weight=1)]},
    {"messages": [user([{"type": "image_url", "image_url": {"url": "0.png", "detail": "low"}, "text": None}]), bot()]},
]


@pytest.mark.parametrize("harmless", HARMLESS)
def test_harmless_keys_change_nothing(tmp_path: Path, harmless: dict[str, Any]) -> None:
    (tmp_path / "0.png").write_bytes(png(56, 56))
    processor, record = make_processor(), read(tmp_path, harmless)
    plain = [user(harmless.get("messages", [user()])[0]["content"]), bot()]
    assert tokens(processor, record) == tokens(processor, read(tmp_path, {"messages": plain}))
    assert processor.renderer.unread.take() == []


@pytest.mark.parametrize("write", [as_json, as_parquet])
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_other_keys_are_named_once_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_workers: int, write: Write
) -> None:
    """By the process of the loader alone, whatever the number of workers and replicas that read them."""
    rows = [{**row(mood="good", id=3), "messages": [user(tone="soft"), bot()]} for _ in range(8)]
    source = write(tmp_path, rows)
    config = make_config(source, num_workers=num_workers, seq_len=64)
    with caplog.at_level(logging.INFO, "mmtrain"):
        for dp_rank in range(2):
            with Loader(config, num_steps=3, dp_rank=dp_rank, dp_degree=2) as loader:
                assert len(list(loader)) == 3
    keys = "keys that are not read: 'mood', 'tone' of a message"
    assert [text.partition(" has ")[2] for text in caplog.messages] == [keys]


SIZES = [
    {"min_pixels": 40000, "max_pixels": 50000},
    {"max_pixels": 3200},
    {"min_pixels": 200_000},
    {"max_pixels": 10**7},
    {"resized_height": 280, "resized_width": 140},
    {"resized_height": 2800, "resized_width": 1400},
]


@pytest.mark.parametrize("own", SIZES)
def test_the_size_of_one_image_is_that_of_qwen_vl_utils(tmp_path: Path, own: dict[str, int]) -> None:
    """`fetch_image` resizes by the limits of the part, else to 4 to 16384 tokens; then comes the image processor."""
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    (tmp_path / "0.png").write_bytes(png(420, 210))
    image = Image.open(tmp_path / "0.png").convert("RGB")
    size = own.get("resized_height", image.height), own.get("resized_width", image.width)
    limits = {"min_pixels": 4 * 784, "max_pixels": 16384 * 784}
    limits |= {name: value for name, value in own.items() if "pixels" in name}
    fetched = module.smart_resize(*size, factor=28, **limits)
    theirs = module.Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 112 * 784})(
        image.resize(fetched[::-1], Image.Resampling.BICUBIC), return_tensors="np"
    )
    processor = make_processor(SHOWS)
    reader = processor.readers.of_kind["image"]
    geometry = image_geometry({"model_type": "qwen2_vl"}, spatial_merge=2, min_pixels=3136, max_pixels=112 * 784)
    reader = dataclasses.replace(reader, geometry=geometry)  # type: ignore[type-var]
    processor.readers = dataclasses.replace(processor.readers, of_kind={"image": reader})
    part = {"type": "image", "image": "0.png", **own}
    for parts, columns in (([part], {}), ([{**part, "image": None}], {"images": ["0.png"]})):
        document = processor.document(read(tmp_path, {"messages": [user(parts), bot()], **columns}))
        grid = document.meta.images[0].grid
        assert grid == tuple(theirs["image_grid_thw"][0].tolist())
        if grid == (1, fetched[0] // 14, fetched[1] // 14):  # else they resize twice
            np.testing.assert_array_equal(processor.pixels(document)[0].numpy(), theirs["pixel_values"])


def test_encoders_of_one_size_refuse_the_size_of_one_image(tmp_path: Path) -> None:
    from mmtrain.data.conversations import make_processor as processor_of

    (tmp_path / "0.png").write_bytes(png(56, 56))
    record = read(tmp_path, shown(max_pixels=784))
    assert record.images[0].size == OwnSize(max_pixels=784)  # type: ignore[union-attr]
    with pytest.raises(DataError, match="image 0 of sample 0: it has `max_pixels`, but all images of this encoder"):
        processor_of(make_config("x", encoder=SIGLIP)).document(record)
