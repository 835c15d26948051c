"""Files of TOML as editors and people write them."""

from pathlib import Path

import pytest

from mmtrain.config.toml_text import read_toml
from mmtrain.errors import ConfigError

TEXT = '[data]\nsource = "ümlaut"\n'


@pytest.mark.parametrize("data", [TEXT.encode("utf-8-sig"), TEXT.replace("\n", "\r\n").encode()])
def test_what_editors_add_is_read(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "job.toml").write_bytes(data)
    assert read_toml(tmp_path / "job.toml") == {"data": {"source": "ümlaut"}}


def test_another_encoding_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(TEXT, encoding="utf-16")
    with pytest.raises(ConfigError, match=r"job\.toml: not valid TOML: it is no text in UTF-8 .*; save it as UTF-8$"):
        read_toml(tmp_path / "job.toml")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("source = data/text", 'source = data/text; a string needs quotes: source = "data/text"'),
        ("name = AdamW # x", 'name = AdamW # x; a string needs quotes: name = "AdamW"'),
        ("source = ~/x", 'source = ~/x; a string needs quotes: source = "~/x"'),
        ("source = \u201cx\u201d", 'source = \u201cx\u201d; a string needs quotes: source = "x"'),
        ("enable = True", "enable = True; a boolean is in small letters: enable = true"),
        ('source: "x"', "source: \"x\"; a value is behind `=`: source = \"x\""),
        (r'a = "C:\Users\x"', r"""a = "C:\Users\x"; a string with backslashes needs single quotes: a = 'C:\Users\x'"""),
        ("lr = 1e-", "lr = 1e-"),
        ("steps = [1,, 2]", "steps = [1,, 2]"),
        ("a = 1\na = 2", "a = 2"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_toml_is_shown_with_what_may_have_been_meant(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "job.toml").write_text(f"[data]\n{line}\n")
    with pytest.raises(ConfigError) as found:
        read_toml(tmp_path / "job.toml")
    reason, _, rest = str(found.value).partition("): ")
    assert "not valid TOML: " in reason and f" (at line {2 + line.count(chr(10))}, column " in reason
    assert rest == said
