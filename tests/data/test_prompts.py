"""The tokens of a job are those of the processor of transformers in the same folder, for each family and chat template:
in training, for validation answers and `mmtrain generate`, and from the exported folder."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, LlavaProcessor, Qwen2AudioProcessor

from mmtrain.config.data import TokenizerConfig
from mmtrain.data.chat_templates import answer_ending
from mmtrain.data.conversation_records import Record, kinds_of, record_kind
from mmtrain.data.conversations import make_processor
from mmtrain.data.media_readers import Readers
from mmtrain.data.processor import Document, Processor
from mmtrain.data.questions import question_before
from mmtrain.data.sources import open_source
from mmtrain.data.tokenizer import load_tokenizer
from mmtrain.models.batch import IGNORE_INDEX
from mmtrain.observe.run_record import log_prompts
from tests.data.prompts import FAMILIES, FRAMES, TEMPLATES, job, make_tokenizer, processor_of, save_folder, write_media

TEXT, MORE, ANSWER, SECOND = ({"type": "text", "text": text} for text in ("What colour?", "And now", "red", "a bar"))
KINDS = {"qwen": "image", "llava": "image", "audio": "audio"}


def conversations(kind: str) -> dict[str, list[list[dict[str, str]]]]:
    """Name -> contents of turns, of user and assistant in turns. Args: kind: of the items."""
    first, second = ({"type": kind, kind: f"{n}.{'wav' if kind == 'audio' else 'png'}"} for n in "ab")
    return {
        "an item, then text": [[first, TEXT], [ANSWER]],
        "text, then an item": [[TEXT, first], [ANSWER]],
        "two items": [[first, TEXT, second, MORE], [ANSWER]],
        "items in two turns": [[first, TEXT], [ANSWER], [MORE, second], [SECOND]],
        "an item alone": [[first], [ANSWER]],
        "no item": [[TEXT], [ANSWER], [MORE], [SECOND]],
        "two texts": [[TEXT, MORE, first], [ANSWER]],
    }


def messages_of(turns: list[list[dict[str, str]]], system: str = "") -> list[dict[str, Any]]:
    said = [{"role": "system", "content": [{"type": "text", "text": system}]}] if system else []
    return [*said, *({"role": r, "content": c} for r, c in zip(itertools.cycle(("user", "assistant")), turns))]


def theirs(processor: Any, messages: list[dict[str, Any]], folder: Path, *, strings: bool, **options: Any) -> list[int]:
    """The tokens of transformers' processor. Args: strings: whether the template takes answers as text."""
    given = []
    for message in messages:
        parts = message["content"]
        named = [p if p["type"] == "text" else {**p, p["type"]: str(folder / p[p["type"]])} for p in parts]
        content: Any = parts[0]["text"] if strings and message["role"] == "assistant" else named
        given.append({"role": message["role"], "content": content})
    made = processor.apply_chat_template(given, tokenize=True, return_dict=True, **options)
    return [int(token) for token in made["input_ids"][0]]


def read(config: Any) -> list[Record]:
    source = open_source(config.data, "train", record_kind(kinds_of(config.model)))
    return [record for i in range(source.num_samples or 0) if (record := source[i]) is not None]


def check_ends(processor: Processor, document: Document, answers: list[str]) -> None:
    """Each answer is learnt up to one special token, which stops decoding."""
    stop, at = processor.ending.token, 0
    labels = document.labels[document.labels != IGNORE_INDEX].tolist()
    for length, answer in zip(document.meta.answers, answers, strict=True):
        learnt = labels[at : at + length]
        assert learnt[-1] == stop and stop not in learnt[:-1]
        assert processor.tokenizer.decode(learnt[:-1]).strip() == answer
        at += length
    assert at == len(labels) == document.meta.num_targets
    assert processor.tokenizer.convert_ids_to_tokens(stop) in processor.tokenizer.get_added_vocab()


def check_family(folder: Path, monkeypatch: Any, family: str, name: str, cases: list[str], begins: bool) -> None:
    write_media(folder)
    kind = KINDS[FAMILIES[family]]
    save_folder(family, folder / "whole", TEMPLATES[FAMILIES[family]][name], begins=begins)
    all_turns = {case: turns for case, turns in conversations(kind).items() if case in cases}
    talks = [messages_of(turns, system) for turns in all_turns.values() for system in ("", "Be kind.")]
    config = job(family, folder, [{"messages": talk} for talk in talks])
    ours, made = make_processor(config), processor_of(family, folder / "whole", monkeypatch)
    strings = name == "answers as text"
    for talk, record in zip(talks, read(config), strict=True):
        document = ours.document(record)
        assert document.input_ids.tolist() == theirs(made, talk, folder, strings=strings), (
            talk,
            ours.renderer.template.text,
        )
        answers = [turn for turn, message in enumerate(talk) if message["role"] == "assistant"]
        for turn in answers:
            prompt = ours.prompt(question_before(record, turn).record)
            expected = theirs(made, talk[:turn], folder, strings=strings, add_generation_prompt=True)
            assert prompt.input_ids.tolist() == expected
            if turn == answers[0]:
                assert document.input_ids[: document.meta.prefix].tolist() == expected, "training sees this prompt"
        check_ends(ours, document, [talk[turn]["content"][0]["text"] for turn in answers])


def test_a_line_break_beside_a_placeholder_is_the_one_that_the_template_writes(tmp_path, monkeypatch) -> None:
    write_media(tmp_path)
    for family, mark, item in (("llava", "<image>", "a.png"), ("qwen2_audio", "<audio>", "a.wav")):
        kind = KINDS[FAMILIES[family]]
        folder = tmp_path / family
        folder.mkdir()
        save_folder(family, folder / "whole", TEMPLATES[FAMILIES[family]]["own"], begins=True)
        texts = [f"{mark}\nWhat colour?", f"{mark}What colour?"] + [f"What colour?\n{mark}"] * (family == "llava")
        answer = {"role": "assistant", "content": "red"}
        rows = [{"messages": [{"role": "user", "content": text}, answer], f"{kind}s": [f"../{item}"]} for text in texts]
        config = job(family, folder, rows)
        ours, made = make_processor(config), processor_of(family, folder / "whole", monkeypatch)
        parts = messages_of([[{"type": kind, kind: item}, TEXT], [ANSWER]])
        expected = theirs(made, parts, tmp_path, strings=False)
        for record in read(config):
            assert ours.document(record).input_ids.tolist() == expected


def test_images_of_a_llava_have_no_markers_though_its_tokenizer_has_them(tmp_path, monkeypatch) -> None:
    write_media(tmp_path)
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}</s>{% endfor %}"
    save_folder("llava", tmp_path / "whole", template, begins=True)
    config = job(
        "llava", tmp_path, [{"messages": messages_of([[TEXT, {"type": "image", "image": "a.png"}], [ANSWER]])}]
    )
    ours, made = make_processor(config), processor_of("llava", tmp_path / "whole", monkeypatch)
    assert "<|vision_start|>" in ours.tokenizer.get_vocab()
    expected = made(text="user: What colour?<image></s>assistant: red</s>", images=[str(tmp_path / "a.png")])
    assert ours.document(read(config)[0]).input_ids.tolist() == expected["input_ids"][0]


def test_a_model_that_reads_text_alone_has_the_tokens_of_its_tokenizer(tmp_path) -> None:
    for name, template in (("with", "{{ bos_token }}"), ("without", "")):
        template += "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
        tokenizer = make_tokenizer(tmp_path / name, template, begins=True)
        messages = ({"role": "user", "content": "What colour?"}, {"role": "assistant", "content": "red"})
        expected = tokenizer.apply_chat_template(list(messages), return_dict=False)
        ours = Processor(tokenizer, Readers(of_kind={}, unread={}))
        found = ours.document(Record(sample=0, messages=messages, images=()))
        assert found.input_ids.tolist() == expected and (tokenizer.bos_token_id in expected) == (name == "with")


def test_the_log_of_a_job_says_that_its_answers_do_not_end(tmp_path, caplog) -> None:
    caplog.set_level("INFO", "mmtrain")
    for eos in ("</s>", None):
        folder = tmp_path / str(eos).strip("</>")
        folder.mkdir()
        save_folder("llava", folder / "whole", TEMPLATES["llava"]["own"], eos=eos)
        log_prompts(job("llava", folder, []))
        assert len(caplog.messages) == (eos is None)
    assert caplog.messages[0].startswith(
        "no token ends an answer: the chat template writes no special token behind one"
    )


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_tokens_of_videos_are_those_of_the_processor(tmp_path, monkeypatch, family: str) -> None:
    """Qwen3-VL was trained without the markers around all patches in time, which its processor of 5.23 leaves there."""
    write_media(tmp_path)
    save_folder(family, tmp_path / "whole", TEMPLATES["qwen"]["own"])
    video = {"type": "video", "video": "walk.npy"}
    talk = messages_of([[TEXT, video], [ANSWER], [{"type": "image", "image": "a.png"}, MORE, video], [SECOND]])
    config = job(family, tmp_path, [{"messages": talk, "fps": 4.0}])
    ours, made = make_processor(config), processor_of(family, tmp_path / "whole", monkeypatch)
    expected = made(
        text=[made.apply_chat_template(talk)], images=[str(tmp_path / "a.png")], videos=[FRAMES, FRAMES],
        video_metadata=[{"total_num_frames": len(FRAMES), "fps": 4.0}] * 2,
    )["input_ids"][0]  # fmt: skip
    text = ours.tokenizer.decode(expected)
    if family == "qwen3_vl":
        text, count = re.subn(r"<\|vision_start\|>(<[\d.]+ seconds>.*?)<\|vision_end\|>(?!<\d)", r"\1", text)
        assert count == 2
    document = ours.document(read(config)[0])
    assert ours.tokenizer.decode(document.input_ids) == text
    assert family == "qwen3_vl" or document.input_ids.tolist() == expected


FILES = ("tokenizer_config.json", "chat_template.jinja", "chat_template.json", "processor_config.json")


@pytest.mark.parametrize("names", [FILES[: n + 1] for n in range(4)] + [FILES[:1] + FILES[2:3], FILES[1:3], FILES[3:]])
def test_the_template_is_that_of_the_file_that_the_processor_takes(tmp_path, monkeypatch, names) -> None:
    make_tokenizer(tmp_path)
    for name in names:
        template = TEMPLATES["llava"]["own"].replace("USER", name).replace(": ", f" {name}: ")
        path = tmp_path / name
        if path.suffix == ".jinja":
            path.write_text(template)
        else:
            values = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps(values | {"chat_template": template}))
    taken = LlavaProcessor.get_processor_dict(tmp_path)[0].get("chat_template")
    theirs = taken or AutoTokenizer.from_pretrained(tmp_path).chat_template
    assert theirs and names[-1] in theirs
    section = TokenizerConfig(path=str(tmp_path), image_token="<image>")
    assert load_tokenizer(section).chat_template == theirs


def test_without_a_file_it_is_that_of_the_class_or_in_tokens_of_the_tokenizer(tmp_path) -> None:
    save_folder("qwen2_audio", tmp_path / "whole")
    config = job("qwen2_audio", tmp_path, [])
    made = Qwen2AudioProcessor.from_pretrained(tmp_path / "whole")
    assert make_processor(config).renderer.template.text == made.chat_template
    plain = load_tokenizer(TokenizerConfig(path=str(tmp_path / "whole"), image_token="<image>"))
    assert "<|im_end|>" in plain.chat_template
    text = (tmp_path / "whole/tokenizer.json").read_text()
    (tmp_path / "whole/tokenizer.json").write_text(text.replace("<|im_", "<unused_"))
    other = load_tokenizer(TokenizerConfig(path=str(tmp_path / "whole"), image_token="<image>"))
    turns = [{"role": "user", "content": "a < b"}, {"role": "assistant", "content": "c < d"}]
    assert other.apply_chat_template(turns, tokenize=False) == "user:\na < b\nassistant:\nc < d</s>\n"
    assert other.decode([answer_ending(other).token]) == "</s>"


DAILY = [
    ("qwen2_vl", "own", False), ("qwen2_5_vl", "beginning written", True), ("qwen3_vl", "own", False),
    ("llava", "own", True), ("llava", "items last, trimmed", False), ("qwen2_audio", "own", False),
    ("qwen2_audio", "answers as text", True), ("qwen2_vl", "two ends", False),
]  # fmt: skip


@pytest.mark.parametrize(("family", "name", "begins"), DAILY)
def test_tokens_are_those_of_the_processor(tmp_path, monkeypatch, family: str, name: str, begins: bool) -> None:
    check_family(tmp_path, monkeypatch, family, name, ["text, then an item", "items in two turns"], begins)


@pytest.mark.nightly
@pytest.mark.parametrize("begins", [False, True], ids=["", "begins"])
@pytest.mark.parametrize(("family", "name"), [(f, name) for f, of in FAMILIES.items() for name in TEMPLATES[of]])
def test_tokens_of_each_family_template_and_conversation_are_those_of_the_processor(
    tmp_path, monkeypatch, family: str, name: str, begins: bool
) -> None:
    kind = KINDS[FAMILIES[family]]
    check_family(tmp_path, monkeypatch, family, name, list(conversations(kind)), begins)
