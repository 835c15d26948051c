"""The forms of a conversation, each as people have it, and the examples of docs/data.md."""

import base64
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from mmtrain.config.data import DataConfig, TokenizerConfig
from mmtrain.data import questions
from mmtrain.data.conversation_forms import FORMS, conversation_form
from mmtrain.data.conversation_records import CONVERSATIONS, Record
from mmtrain.data.media_readers import SoundReader, vision_readers
from mmtrain.data.pixels import pixel_rules
from mmtrain.data.processor import Document, Processor
from mmtrain.data.questions import question_before
from mmtrain.data.sources import open_source
from mmtrain.data.tokenizer import load_tokenizer
from mmtrain.errors import ConfigError, DataError
from mmtrain.modality.geometry import image_geometry
from mmtrain.modality.sounds import SoundRules
from mmtrain.modality.videos import VideoRules
from tests.data.samples import QWEN, png
from tests.data.sound_files import tone, wav
from tests.guides import DOCS, blocks

TURNS = [{"from": "human", "value": "<image>What colour?"}, {"from": "gpt", "value": "red"}]
MESSAGES = [{"role": "user", "content": "<image>What colour?"}, {"role": "assistant", "content": "red"}]

TEXT = {"type": "text", "text": "What colour?"}
VALUE = {"type": "text", "value": "What colour?"}


@pytest.fixture(scope="module")
def processor() -> Processor:
    geometry = image_geometry(QWEN, spatial_merge=2, min_pixels=0, max_pixels=28 * 28 * 16)
    tokenizer = load_tokenizer(TokenizerConfig())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|video_pad|>", "<audio>"]})
    limits = {"min_frames": 4, "max_frames": 8, "min_pixels": geometry.min_pixels, "max_pixels": geometry.max_pixels}
    videos = VideoRules(patches=geometry, fps=2.0, **limits)
    rules = pixel_rules("qwen2_vl")
    readers = vision_readers(
        TokenizerConfig(), geometry, rules, DataConfig(source="x"), videos, vocabulary=tokenizer.get_vocab()
    )
    sounds = SoundReader(
        token="<audio>",
        module="audio",
        rules=SoundRules(mel_bins=80, window_rows=50, merge=2),
        data=DataConfig(source="x"),
    )
    return Processor(tokenizer, dataclasses.replace(readers, of_kind={**readers.of_kind, "audio": sounds}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the images, the sound, and the folder of frames, that the examples name."""
    for name in ("images", "walk"):
        (tmp_path / name).mkdir()
    (tmp_path / "walk" / "0.png").write_bytes(png(56, 56))
    (tmp_path / "beep.wav").write_bytes(wav(tone()))
    for index in range(2):
        (tmp_path / "images" / f"{index}.png").write_bytes(png(56 + 28 * index, 56))
    return tmp_path


def read(source: Path, index: int = 0) -> Record:
    record = open_source(DataConfig(source=str(source)), "train", CONVERSATIONS)[index]
    assert record is not None
    return record


def read_row(folder: Path, row: dict[str, Any]) -> Record:
    (folder / "train.jsonl").write_text(json.dumps(row) + "\n")
    return read(folder)


def text_of(processor: Processor, document: Document) -> str:
    return str(processor.tokenizer.decode(document.input_ids))


def expected(processor: Processor, question: str = "What colour?", image: str = "<|image_pad|>" * 4) -> str:
    framed = f"<|vision_start|>{image}<|vision_end|>" if image else ""
    return f"<|im_start|>user\n{framed}{question}<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n"


ROWS: dict[str, dict[str, Any]] = {
    "LLaVA": {"id": 3, "image": "images/0.png", "conversations": TURNS},
    "LLaVA, a list": {"image": ["images/0.png"], "conversations": TURNS},
    "ShareGPT under messages": {"images": ["images/0.png"], "messages": TURNS},
    "roles under conversations": {"images": ["images/0.png"], "conversations": MESSAGES},
    "OpenAI": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "images/0.png", "detail": "auto"}},
                    TEXT,
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "red"}]},
        ]
    },
    "a part with a path": {
        "messages": [
            {"role": "user", "content": [{"type": "image", "path": "images/0.png"}, TEXT]},
            MESSAGES[1],
        ]
    },
    "The Cauldron": {"images": ["images/0.png"], "texts": [{"user": "What colour?", "assistant": "red"}]},
    "question and answer": {"image": "images/0.png", "question": "What colour?", "answer": "red"},
    "webdataset": {"__key__": "0", "jpg": "images/0.png", "txt": "red"},
    "parts of LLaMA-Factory": {
        "messages": [
            {"role": "user", "content": [{"type": "image", "value": "images/0.png"}, VALUE]},
            {"role": "assistant", "content": [{"type": "text", "value": "red"}]},
        ]
    },
    "base64 alone": {"image": base64.b64encode(png(56, 56)).decode(), "question": "What colour?", "answer": "red"},
    "a question that marks its image": {"image": "images/0.png", "question": "<image>What colour?", "answer": "red"},
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_each_form_gives_the_same_tokens(folder: Path, processor: Processor, name: str) -> None:
    record = read_row(folder, ROWS[name])
    assert [image.read(10**6) for image in record.images] == [png(56, 56)]
    question = "" if "txt" in ROWS[name] else "What colour?"
    assert text_of(processor, processor.document(record)) == expected(processor, question)


def test_each_row_has_the_form_of_its_own_columns(folder: Path) -> None:
    rows = [*ROWS.values(), {"caption": "red", "image": "images/0.png"}]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_source(DataConfig(source=str(folder)), "train", CONVERSATIONS)
    answers = [source[index].messages[-1]["content"] for index in range(len(rows))]  # type: ignore[union-attr]
    assert [answer if isinstance(answer, str) else answer[0]["text"] for answer in answers] == ["red"] * len(rows)


TYPED = [{"type": "image", "image": "images/0.png"}, {"type": "text", "text": "An <image>?"}]
PLAIN = [{"type": "image"}, TYPED[1]]
SVG = "<svg><image></svg>"


@pytest.mark.parametrize(
    ("row", "question", "answer"),
    [
        ({"messages": [{"role": "user", "content": TYPED}, {"role": "assistant", "content": SVG}]},
         "{image}An <image>?", SVG),
        ({"image": "images/0.png",
          "messages": [{"role": "user", "content": PLAIN}, {"role": "assistant", "content": "x"}]},
         "{image}An <image>?", "x"),
        ({"image": "images/0.png",
          "messages": [{"role": "user", "content": "<image>!"}, {"role": "assistant", "content": "<svg>\\<image>"}]},
         "{image}!", "<svg><image>"),
        ({"image": "images/0.png", "question": "A \\<image>?", "answer": "x"}, "{image}A <image>?", "x"),
        ({"question": "A \\<video>, \\<b>?", "answer": "x"}, "A <video>, \\<b>?", "x"),
    ],
)  # fmt: skip
def test_placeholders_that_are_text(
    folder: Path, processor: Processor, row: dict[str, Any], question: str, answer: str
) -> None:
    """Those after a backslash, and those of records whose images all have parts, which are text for transformers."""
    record = read_row(folder, row)
    image = "<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>"
    tokens = text_of(processor, processor.document(record))
    said = question.format(image=image)
    assert tokens == f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
    assert question_before(record, 1).reference == answer
    assert questions.text_of(record.messages[0]) == question.format(image="<image>")


@pytest.mark.parametrize("column", ["caption", "text"])
def test_a_text_about_an_image_is_the_answer_to_the_image(folder: Path, processor: Processor, column: str) -> None:
    record = read_row(folder, {"image": "images/0.png", column: "red"})
    assert text_of(processor, processor.document(record)) == expected(processor, question="")
    with pytest.raises(DataError, match=f"sample 1 of .*: no image, video or sound; it has only `{column}`, a t"):
        (folder / "train.jsonl").write_text(
            json.dumps({"image": "a.png", column: "red"}) + f'\n{{"{column}": "red"}}\n'
        )
        read(folder, 1)


def test_questions_without_an_image_and_several_turns(folder: Path, processor: Processor) -> None:
    record = read_row(folder, {"question": "What colour?", "answer": "red"})
    assert text_of(processor, processor.document(record)) == expected(processor, image="")
    pairs = [{"user": "a", "assistant": "b"}, {"user": "c", "assistant": "d"}]
    record = read_row(folder, {"texts": pairs, "images": ["images/0.png", "images/1.png"]})
    contents = [message["content"] for message in record.messages]
    assert contents == ["<image><image>a", "b", "c", "d"]
    assert len(processor.document(record).meta.images) == 2


@pytest.mark.parametrize("column", ["image", "jpg", "jpeg", "png", "webp", "images"])
@pytest.mark.parametrize("with_datasets", [True, False])
def test_bytes_in_parquet(
    tmp_path: Path, processor: Processor, monkeypatch: pytest.MonkeyPatch, column: str, with_datasets: bool
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not with_datasets:
        monkeypatch.setitem(sys.modules, "datasets", None)
    values: list[Any] = [png(56, 56), {"bytes": png(56, 56), "path": "0.png"}]
    for number, value in enumerate(values):
        row = {column: [value] if column == "images" else value, "question": "What colour?", "answer": "red"}
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.Table.from_pylist([row]), path)
        record = read(path)
        assert record.images[0].data == png(56, 56)
        assert text_of(processor, processor.document(record)) == expected(processor)


def test_images_of_parts_and_of_columns_keep_their_order(folder: Path) -> None:
    inline = "data:image/png;base64," + base64.b64encode(b"inline").decode()
    content = [
        {"type": "text", "text": "<image> then"},
        {"type": "image_url", "image_url": inline},
        {"type": "image"},
    ]
    row = {"messages": [{"role": "user", "content": content}, MESSAGES[1]], "images": ["images/0.png", "images/1.png"]}
    found = [image.read(10**6) for image in read_row(folder, row).images]
    assert found == [png(56, 56), b"inline", png(84, 56)]
    assert len(read_row(folder, {**row, "images": [*row["images"], "images/0.png"]}).images) == 4  # one too many stays


@pytest.mark.parametrize(
    ("more", "contents"),
    [
        ({}, ["Add.", "3"]),
        ({"input": "", "history": []}, ["Add.", "3"]),
        ({"input": "1 2", "history": [["One?", "1"], ["Two?", "2"]]}, ["One?", "1", "Two?", "2", "Add.\n1 2", "3"]),
    ],
)
def test_an_instruction_has_its_input_and_the_turns_before(
    folder: Path, more: dict[str, Any], contents: list[str]
) -> None:
    messages = read_row(folder, {"instruction": "Add.", "output": "3", **more}).messages
    assert [message["content"] for message in messages] == contents
    assert [message["role"] for message in messages] == ["user", "assistant"] * (len(contents) // 2)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"conversations": [{"from": "bing", "value": "a"}]}, "a turn is from 'bing'; it must be from human, gpt, s"),
        ({"conversations": [{"from": ["human"], "value": "a"}]}, r"a turn is from \['human'\]; it must be"),
        ({"conversations": "hello"}, "`conversations` is not a list of role and content, or from and value"),
        ({"texts": [{"user": "a"}]}, "`assistant` of `texts` is a NoneType; it must be text"),
        ({"texts": []}, "its `texts` is empty; its columns are texts$"),
        ({"messages": None}, "its `messages` is null; its columns are messages$"),
        ({"messages": None, "text": "a"}, "its `messages` is null; its columns are messages, text$"),
        ({"instruction": "a", "output": "b", "history": "c"}, "`history` is not a list of pairs; write a question and"),
        ({"instruction": "a", "output": 3}, "`output` is a int; it must be text"),
        ({"instruction": ["a"], "output": "b"}, "`instruction` is a list; it must be text"),
        ({"instruction": "a", "output": "b", "history": [["c", 1]]}, "`history` is a int; it must be text"),
        ({"question": "a", "id": 1}, "no `answer`; its columns are question, id$"),
        ({"txt": "a"}, "no image, video or sound; it has only `txt`, a text about one$"),
        ({"id": 1}, "no conversation; its columns are id; it needs `messages`, `conversations`, `texts`, `question`"),
        ({"image": "a.png", "text": "a", "caption": "b"}, "it has `caption` with .* and `text` with .*, each of wh"),
        ({"texts": {"user": ["a", "b"], "assistant": ["c"]}}, "`texts` is not a list of user and assistant"),
        ({"messages": {"role": 5}}, "`messages` is not a list of role and content"),
        ({"question": "a", "answer": ["b", "c"]}, "`answer` is a list; it must be text"),
        ({"image": "a.png", "jpg": "b.png", "question": "a", "answer": "b"}, "it has `image` and `jpg`; keep"),
        ({"images": "a.png", "question": "a", "answer": "b"}, "`images` is a str; it must be a list"),
        ({"question": "a", "answer": None}, "its `answer` is null; its columns are question, answer$"),
    ],
)  # fmt: skip
def test_bad_rows_are_named(folder: Path, row: dict[str, Any], message: str) -> None:
    """And one that is of no form does not decide for its source."""
    (folder / "train.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(ROWS['LLaVA'])}\n")
    with pytest.raises(DataError, match=f"^sample 0 of .*: {message}"):
        read(folder)
    assert read(folder, 1).messages[1]["content"] == "red"


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([{"from": "human", "value": "What colour?"}, TURNS[1]],
         "0 `<image>` placeholders in its messages, but 1 images; write `<image>` in its text once for each image"),
        ([{"role": "human", "content": "<image>"}, MESSAGES[1]],
         "a message has the role 'human'; the roles are system, user, assistant"),
        ([{"from": "human", "value": None}, TURNS[1]],
         "a message's `content` is absent or null; write text or a list of parts (its keys are role, content)"),
        ([{"from": "human", "text": "a"}, TURNS[1]],
         "a message's `content` is absent or null; write text or a list of parts (its keys are role, content, text)"),
        ([{"role": "user", "content": [{"type": "text", "content": "a"}]}, MESSAGES[1]],
         "a part of type 'text' has `text` = None; write its text there (its keys are type, content)"),
    ],
)  # fmt: skip
def test_bad_conversations_are_named(folder: Path, processor: Processor, turns: Any, message: str) -> None:
    record = read_row(folder, {"image": "images/0.png", "conversations": turns})
    with pytest.raises(DataError, match=f"^sample 0: {re.escape(message)}"):
        processor.document(record)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("message images",
         r"has the columns message, images, but a conversation needs `messages`, `conversations`, `texts`, `question` "
             r"with `answer`, `instruction` with `output`, or an image, video or sound with one of `caption`, `text`, "
             r"`txt`; if 'message' is a list of turns, rename it to 'messages'$"),
        ("txt __key__", r"has the columns txt, __key__, but .*; rename yours, or write them as `messages` \(docs"),
        ("text", r"has the columns text, but .*; rename yours, or write them as `messages` \(docs"),
        ("id image", "has the columns id, image, but .*; rename yours, or write them as `messages`"),
        ("caption", "has the columns caption, but"),
        ("prompt chosen rejected", "has the columns prompt, .*; these are of training on preferences, which"),
        ("caption frames fps", r".*; these are clips, which a job with \[model.dit\] reads$"),
        ("image text caption", r"has `caption` with an .* and `text` with an image, video or sound, each of which"),
        ("image text question answer", "has `question` with `answer` and `text` with an image, video or sound, each"),
    ],
)  # fmt: skip
def test_columns_of_no_form_are_refused(columns: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^data.source a {message}"):
        conversation_form("a", columns.split())


def test_a_whole_conversation_comes_before_single_turns() -> None:
    assert conversation_form("a", ["text", "image", "conversations", "messages"]).columns == ("messages",)
    assert conversation_form("a", ["question", "answer", "texts"]).columns == ("texts",)


def test_the_examples_of_the_page_are_read(folder: Path, processor: Processor, monkeypatch: pytest.MonkeyPatch) -> None:
    page = DOCS / "data.md"
    used = set()
    for example in blocks(page, "json"):
        row = json.loads(example)
        used.add(conversation_form("a", list(row)).columns)
        document = processor.document(read_row(folder, row))
        assert len(document.meta.images) == 1 + len(row.get("videos", []))
        assert document.meta.num_targets > 1
    assert used == {form.columns for form in FORMS}
    monkeypatch.chdir(folder)
    for script in blocks(page, "python"):
        exec(script, {})
    assert len(processor.document(read(folder / "train.parquet")).meta.images) == 1
