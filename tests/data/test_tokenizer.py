import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.config.data import TokenizerConfig
from mmtrain.data.tokenizer import (
    CAPTION_VOCAB_SIZE,
    SHIPPED,
    SHIPPED_CAPTIONS,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    load_tokenizer,
    main,
    save_tokenizer,
    train_tokenizer,
)
from mmtrain.data.toy.charts import chart_texts
from mmtrain.data.toy.shapes import shape_captions, shape_clips
from mmtrain.errors import ConfigError


@pytest.fixture(scope="module")
def shipped() -> Any:
    return load_tokenizer(TokenizerConfig())


@pytest.mark.parametrize(("shipped", "options"), [(SHIPPED, []), (SHIPPED_CAPTIONS, ["--captions"])])
def test_training_again_gives_the_shipped_files(tmp_path: Path, shipped: Path, options: list[str]) -> None:
    main([str(tmp_path / "out"), *options])
    for path in shipped.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name


@given(text=st.text(max_size=60))
def test_any_text_round_trips(shipped: Any, text: str) -> None:
    ids = shipped.encode(text, add_special_tokens=False)
    assert shipped.decode(ids, skip_special_tokens=False) == text


def test_vocabulary_and_special_tokens(shipped: Any) -> None:
    assert len(shipped) == VOCAB_SIZE
    assert shipped.is_fast
    assert [shipped.convert_tokens_to_ids(t) for t in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    for token in SPECIAL_TOKENS:
        assert len(shipped.encode(token, add_special_tokens=False)) == 1
    assert shipped.eos_token == "<|im_end|>"
    for word in ("bar", "line", "pie", "purple", "yes", "first"):
        assert len(shipped.encode(word, add_special_tokens=False)) == 1, word


def test_captions_have_about_a_token_a_word() -> None:
    tokenizer = load_tokenizer(TokenizerConfig(), captions=True)
    assert len(tokenizer) == CAPTION_VOCAB_SIZE
    captions = list(shape_captions(500, 9)) + [clip.caption for clip in shape_clips("validation", 100, 9)]
    num_words = sum(len(caption.split()) for caption in captions)
    assert sum(len(tokenizer.encode(caption)) for caption in captions) < 1.1 * num_words
    for caption in captions[:20]:
        assert tokenizer.decode(tokenizer.encode(caption)) == caption


def test_captions_need_no_image_token(tmp_path: Path) -> None:
    save_tokenizer(train_tokenizer(shape_captions(300, 1), 300), tmp_path)
    text = (tmp_path / "tokenizer_config.json").read_text().replace("<|image_pad|>", "<|vision_end|>")
    (tmp_path / "tokenizer_config.json").write_text(text)
    section = TokenizerConfig(path=str(tmp_path), image_token="<none>")
    assert len(load_tokenizer(section, captions=True)) == 300
    with pytest.raises(ConfigError, match="image_token = '<none>' is no special token"):
        load_tokenizer(section)


def test_auto_tokenizer_loads_the_folder_with_its_template() -> None:
    by_path = load_tokenizer(TokenizerConfig(path=str(SHIPPED)))
    text = by_path.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_tokenizer_without_template_gets_chatml(tmp_path: Path) -> None:
    save_tokenizer(train_tokenizer(chart_texts(300, 1), 300), tmp_path)
    config = (tmp_path / "tokenizer_config.json").read_text().replace('"chat_template"', '"unknown"')
    (tmp_path / "tokenizer_config.json").write_text(config)
    tokenizer = load_tokenizer(TokenizerConfig(path=str(tmp_path)))
    assert "<|im_start|>" in tokenizer.chat_template
    assert len(tokenizer) == 300


def test_the_template_of_a_file_and_of_the_folder(tmp_path: Path) -> None:
    save_tokenizer(train_tokenizer(chart_texts(300, 1), 300), tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"chat_template"', '"unknown"'))
    shows = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": shows}))
    assert load_tokenizer(TokenizerConfig(path=str(tmp_path))).chat_template == shows
    for name, text in {"mine.jinja": shows, "mine.json": json.dumps({"chat_template": shows})}.items():
        (tmp_path / name).write_text(text)
        assert load_tokenizer(TokenizerConfig(chat_template=str(tmp_path / name))).chat_template == shows


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("absent.jinja", None, "absent.jinja' does not exist"),
        ("folder", None, "is no file; name one with a Jinja template"),
        ("bytes.jinja", b"\xff", "cannot be read: 'utf-8' codec"),
        ("no.json", b"{}", "no.json has no text for the key chat_template"),
        ("broken.jinja", b"{% for %}", "cannot be used: Expected an expression"),
        ("silent.jinja", b"nothing", "cannot be used: it shows no text of a user's message; name a file with another"),
    ],
)
def test_a_template_that_cannot_be_used(tmp_path: Path, name: str, text: bytes | None, message: str) -> None:
    (tmp_path / "folder").mkdir()
    if text is not None:
        (tmp_path / name).write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(TokenizerConfig(chat_template=str(tmp_path / name)))


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer.path = .*absent' does not exist"):
        load_tokenizer(TokenizerConfig(path=str(tmp_path / "absent")))
    for word in ("<img>", "bar"):  # an ordinary word would turn up in texts
        with pytest.raises(ConfigError, match=rf"image_token = '{word}' is no special token .* has .*<\|image_pad\|>"):
            load_tokenizer(TokenizerConfig(image_token=word))
    with pytest.raises(ConfigError, match="instead of 5000: too little text"):
        train_tokenizer(["a b c"], 5000)
