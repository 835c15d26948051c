"""The pages under docs/ agree with the code: keys, drawn examples, links and names of files."""

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest

from mmtrain import cli, config

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [path for pattern in ("README.md", "docs/*.md") for path in sorted(ROOT.glob(pattern))]

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"(?<![\w/])(?:\w+/)*\w+\.py\b")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return [body for found, body in BLOCK.findall(page.read_text()) if found == language]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_the_page_of_keys_is_up_to_date():
    made = script("make_config_page").page()
    assert (DOCS / "config.md").read_text() == made, "run python docs/make_config_page.py > docs/config.md"


def test_the_page_of_schedules_and_its_pictures_are_up_to_date():
    page, pictures = script("make_schedules_page").make_page()
    assert (DOCS / "schedules.md").read_text() == page, "run python docs/make_schedules_page.py"
    assert {path.stem: path.read_text() for path in (DOCS / "pictures").glob("*.svg")} == pictures


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    text = BLOCK.sub("", page.read_text())
    for link in LINK.findall(text):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(path), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=name)
def test_files_that_are_named_exist(page):
    for file in FILE.findall(page.read_text()):
        assert (ROOT / file).is_file() or (ROOT / "mmtrain" / file).is_file(), f"{page.name} names {file}"


def test_drawn_examples_are_what_the_command_prints(tmp_path, monkeypatch, capsys):
    page = DOCS / "schedule.md"
    (problem,) = blocks(page, "json")
    (tmp_path / "two_modules.json").write_text(problem)
    monkeypatch.chdir(tmp_path)
    examples = blocks(page, "console")
    assert len(examples) == 4
    for example in examples:
        command, _, shown = example.partition("\n")
        prompt, program, *words = shlex.split(command)
        assert (prompt, program) == ("$", "mmtrain")
        assert cli.main(words) == 0
        assert capsys.readouterr().out.rstrip() == shown.rstrip(), f"{command} prints something else now"


def test_the_swapped_encoder_is_a_whole_config(tmp_path):
    from mmtrain.models.spec_builders import model_spec

    (text,) = blocks(DOCS / "models.md", "toml")
    base = str(ROOT / "configs" / "debug_vlm.toml")
    (tmp_path / "job.toml").write_text(text.replace("debug_vlm.toml", base))
    spec = model_spec(config.load(tmp_path / "job.toml").model)
    assert [layer.name for layer in spec.module("vision").layers][-2:] == ["norm", "projector"]
