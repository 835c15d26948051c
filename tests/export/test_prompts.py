"""The processor that transformers reads from an exported folder makes the prompts that the run was trained on, and its
`generate` stops where answers end."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from mmtrain.config import config as config_module
from mmtrain.config.config import Config
from mmtrain.data.conversations import make_processor
from mmtrain.data.questions import Decoding, question_before
from mmtrain.export.folder import export
from mmtrain.inference.answering import Answerer, asked
from tests.commands.test_generate import speaking
from tests.data.prompts import FAMILIES, TEMPLATES, job, processor_of, save_folder, write_media
from tests.data.test_prompts import ANSWER, KINDS, SECOND, TEXT, messages_of, read, theirs
from tests.stored_runs import save_run

TEXT_ALONE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATE_NAMES = {**{name: name for name in TEMPLATES["qwen"]}, "text alone": "", "none": ""}


def run_of(family: str, name: str, folder: Path, *rows: dict[str, Any]) -> Config:
    """Saves a run that started from a whole model. Args: name: of its chat template."""
    write_media(folder)
    template = {"text alone": TEXT_ALONE, "none": ""}.get(name) or TEMPLATES[FAMILIES[family]].get(name, "")
    save_folder(family, folder / "whole", template, weights=True, begins=family == "llava")
    config = job(family, folder, list(rows))
    save_run(folder / "run", config.model, data=config.data, tokenizer=config.tokenizer)
    return config_module.load(folder / "run/config.toml")


def check_folder(folder: Path, monkeypatch: Any, family: str, name: str) -> None:
    kind = KINDS[FAMILIES[family]]
    first, second = ({"type": kind, kind: f"{n}.{'wav' if kind == 'audio' else 'png'}"} for n in "ab")
    talk = messages_of([[TEXT, first], [ANSWER], [second, TEXT], [SECOND]])
    config = run_of(family, name, folder, {"messages": talk})
    export(folder / "run", folder / "out")
    ours, made = make_processor(config), processor_of(family, folder / "out", monkeypatch)
    (record,) = read(config)
    strings = name == "answers as text"
    assert ours.document(record).input_ids.tolist() == theirs(made, talk, folder, strings=strings)
    prompt = theirs(made, talk[:1], folder, strings=strings, add_generation_prompt=True)
    assert ours.prompt(question_before(record, 1).record).input_ids.tolist() == prompt
    stops = json.loads((folder / "out/generation_config.json").read_text())["eos_token_id"]
    assert ours.ending.token in (stops if isinstance(stops, list) else [stops])
    for source in ("run", "out"):
        of_source = Answerer.of(folder / source)
        found = of_source._processor.prompt(question_before(record, 1).record)
        assert (found.input_ids.tolist(), of_source._stop) == (prompt, ours.ending.token)


@pytest.mark.parametrize(("family", "name"), [("llava", "own"), ("qwen2_vl", "text alone"), ("qwen2_audio", "none")])
def test_the_exported_folder_makes_the_prompts_of_training(tmp_path, monkeypatch, family: str, name: str) -> None:
    check_folder(tmp_path, monkeypatch, family, name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", TEMPLATE_NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_exported_folder_of_each_family_and_template_makes_the_prompts_of_training(
    tmp_path, monkeypatch, family: str, name: str
) -> None:
    check_folder(tmp_path, monkeypatch, family, name)


@pytest.mark.parametrize("encoder", ["siglip_vision_model", "clip_vision_model"])
def test_separate_modules_that_make_a_llava_have_its_processor(tmp_path, encoder: str) -> None:
    """They have the tokenizer that ships with mmtrain, whose template shows text alone."""
    write_media(tmp_path)
    model = speaking(encoder)
    model = dataclasses.replace(model, encoder=dataclasses.replace(model.encoder, feature_layer=-2))
    save_run(tmp_path / "run", model)
    assert export(tmp_path / "run", tmp_path / "out").model == "LlavaForConditionalGeneration"
    made = transformers.AutoProcessor.from_pretrained(tmp_path / "out")
    talk = messages_of([[TEXT, {"type": "image", "image": "a.png"}]])
    expected = theirs(made, talk, tmp_path, strings=False, add_generation_prompt=True)
    assert 16 <= expected.count(made.image_token_id) <= 17 and made.image_token == "<|image_pad|>"
    for source in ("run", "out"):
        inputs = Answerer.of(tmp_path / source).inputs(asked("What colour?<image>", [tmp_path / "a.png"]))
        assert inputs["input_ids"][0].tolist() == expected


def test_files_with_another_template_do_not_come_before_it(tmp_path, monkeypatch) -> None:
    """A processor takes the older chat_template.json, and a key of processor_config.json, first."""
    run_of("llava", "own", tmp_path)
    mine = tmp_path / "mine.jinja"
    mine.write_text(TEMPLATES["llava"]["items last, trimmed"])
    older = {"chat_template": TEMPLATES["llava"]["own"]}
    (tmp_path / "whole/chat_template.json").write_text(json.dumps(older))
    path = tmp_path / "whole/processor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | older))
    settings = {"eos_token_id": [0, 1], "temperature": 0.5}
    (tmp_path / "whole/generation_config.json").write_text(json.dumps(settings))
    text = (tmp_path / "run/config.toml").read_text()
    (tmp_path / "run/config.toml").write_text(text.replace('chat_template = ""', f'chat_template = "{mine}"'))
    export(tmp_path / "run", tmp_path / "out")
    made = transformers.AutoProcessor.from_pretrained(tmp_path / "out")
    assert made.chat_template == made.tokenizer.chat_template == mine.read_text()
    stop = made.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == settings | {"eos_token_id": stop}
    ids = Answerer.of(tmp_path / "out").inputs(asked("What?<image>", [tmp_path / "a.png"]))["input_ids"][0]
    question = [{"type": "text", "text": "What?"}, {"type": "image", "image": "a.png"}]
    expected = theirs(made, messages_of([question]), tmp_path, strings=False, add_generation_prompt=True)
    assert ids.tolist() == expected


def test_validation_answers_continue_the_prompt_of_the_processor(tmp_path, monkeypatch) -> None:
    write_media(tmp_path)
    save_folder("llava", tmp_path / "whole", TEMPLATES["llava"]["own"], begins=True)
    talk = messages_of([[TEXT, {"type": "image", "image": "a.png"}], [ANSWER]])
    changes = ("--validation.enable=true", "--validation.generate=1", "--validation.generate_tokens=2")
    config = job("llava", tmp_path, [{"messages": talk}], *changes, '--data.validation_split="train"')
    decoding = Decoding(config, dp_rank=0, dp_degree=1)
    batch, _, _ = next(iter(decoding))
    made = processor_of("llava", tmp_path / "whole", monkeypatch)
    expected = theirs(made, talk[:1], tmp_path, strings=False, add_generation_prompt=True)
    assert batch.microbatches[0].input_ids.tolist() == expected
    stop = made.tokenizer.eos_token_id
    decoding.append({asked.key: stop for asked in decoding._asked})
    assert [answer.answer for answer in decoding.answers()] == [""] and list(decoding) == []
