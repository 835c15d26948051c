"""The pages under docs/ agree with the code: keys, drawn examples, links and names of files."""

import dataclasses
import importlib.util
import re
import shlex
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import pytest

from mmtrain.commands import cli
from mmtrain.config import config
from tests import counts
from tests.guides import BLOCK, DOCS, ROOT, File, blocks, steps

MADE = {"errors.md"}
"""Pages that `make docs` makes, and nobody commits."""
PAGES = [path for pattern in ("*.md", "docs/*.md") for path in sorted(ROOT.glob(pattern)) if path.name not in MADE]

LINK = re.compile(r"\]\(([^)\s]+)\)")
SPAN = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
FILE = re.compile(r"(?<![\w/])(?:\w+/)*\w+\.py\b")
ITEM = re.compile(r"^( *)(?:[-*]|\d+\.) ")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page; the site is set to give the same."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    plain = [re.sub(r"\]\([^)]*\)", "", heading) for heading in headings]
    found: Counter[str] = Counter()
    for heading in plain:
        found[re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")] += 1
    assert all(count == 1 for count in found.values()), (
        f"{page.name} has two headings of one name, whose anchors differ"
    )
    return set(found)


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_the_page_of_keys_is_up_to_date():
    made = script("make_config_page").page()
    assert (DOCS / "config.md").read_text() == made, "run python docs/make_config_page.py > docs/config.md"


def test_the_page_of_other_trainers_keys_is_up_to_date():
    made = script("make_coming_from_page").page()
    assert (DOCS / "coming_from.md").read_text() == made, (
        "run python docs/make_coming_from_page.py > docs/coming_from.md"
    )


def test_the_page_of_errors_is_made_and_its_links_lead_somewhere():
    page = DOCS / "errors.md"  # `make docs` writes it
    made = script("make_errors_page").page()
    assert made.count("\n- `") > 900
    follow_links(page, made)


def test_every_error_says_what_to_do():
    errors = script("make_errors_page")
    silent = [f"{m.file}:{m.line}: {m.text}" for m in errors.messages() if not errors.says_what_to_do(m)]
    assert not silent, "say it in the message, or in NOTES of docs/make_errors_page.py"


def test_the_shapes_of_messages():
    import ast

    shape = script("make_errors_page").shape
    source = """f"{section}.{f.name} = {value!r}: {len(rows)} of {', '.join(known)}" + "; name " f'one'"""
    assert shape(ast.parse(source).body[0].value) == "{section}.{name} = '{value}': {number} of {...}; name one"


def test_the_page_of_schedules_and_its_images_are_up_to_date():
    page, images = script("make_schedules_page").make_page()
    assert (DOCS / "schedules.md").read_text() == page, "run python docs/make_schedules_page.py"
    assert {path.stem: path.read_text() for path in (DOCS / "images").glob("*.svg")} == images


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    follow_links(page, page.read_text())


def follow_links(page: Path, text: str) -> None:
    """Each link of a page's text leads to a file, and to a heading in it."""
    for link in LINK.findall(SPAN.sub("", BLOCK.sub("", text))):
        if link.startswith(("https://", "http://")):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(path), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=name)
def test_every_page_stands_in_the_navigation_of_the_site(page):
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    assert len(re.findall(rf": {re.escape(page.name)}$", navigation, re.MULTILINE)) == 1


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=name)
def test_links_do_not_leave_the_site(page):
    for link in LINK.findall(SPAN.sub("", BLOCK.sub("", page.read_text()))):
        assert not link.startswith("../"), f"{page.name}: {link} is no page of the site; write its name as code"


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=name)
def test_lists_look_on_the_site_as_they_do_on_github(page):
    before = ""
    for line in BLOCK.sub("", page.read_text()).splitlines():
        if item := ITEM.match(line):
            assert len(item[1]) % 4 == 0, f"{page.name}: indent by four: {line}"
            goes_on = not before or before.startswith(" ") or ITEM.match(before)
            assert goes_on, f"{page.name}: a list begins after an empty line: {line}"
        before = line


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=name)
def test_files_that_are_named_exist(page):
    shown = {step.name for step in steps(page.name) if isinstance(step, File)}
    for file in FILE.findall(page.read_text()):
        assert file in shown or (ROOT / file).is_file() or (ROOT / "mmtrain" / file).is_file(), (
            f"{page.name} names {file}"
        )


def test_drawn_examples_are_what_the_command_prints(tmp_path, monkeypatch, capsys):
    page = DOCS / "schedule.md"
    (problem,) = blocks(page, "json")
    (tmp_path / "two_modules.json").write_text(problem)
    monkeypatch.chdir(tmp_path)
    examples = [
        example for example in blocks(page, "console") if "Rounds" not in example
    ]  # that one is yet to be added
    assert len(examples) == 4
    for example in examples:
        command, _, shown = example.partition("\n")
        prompt, program, *words = shlex.split(command)
        assert (prompt, program) == ("$", "mmtrain")
        assert cli.main(words) == 0
        assert capsys.readouterr().out.rstrip() == shown.rstrip(), f"{command} prints something else now"


def test_the_model_with_several_encoders_is_one():
    from mmtrain.config.model import ModelConfig
    from mmtrain.config.module_tables import short_form
    from mmtrain.config.toml_sections import build

    _, text = blocks(DOCS / "models.md", "toml")
    model = build(ModelConfig, short_form(tomllib.loads(text)["model"], "models.md"), "model", "models.md")
    assert {name: section.kind for name, section in model.encoders.items()} == {"vision": "images", "audio": "audio"}
    assert model.projector_of("audio").merge == 2


def test_the_swapped_encoder_is_a_whole_config(tmp_path):
    from mmtrain.spec.builders import model_spec

    text, _ = blocks(DOCS / "models.md", "toml")
    base = str(ROOT / "configs" / "debug_vlm.toml")
    (tmp_path / "job.toml").write_text(text.replace("debug_vlm.toml", base))
    spec = model_spec(config.load(tmp_path / "job.toml").model)
    assert [layer.name for layer in spec.module("vision").layers][-2:] == ["norm", "projector"]


def unknown_keys(section: type, table: dict, path: str) -> list[str]:
    """The keys of a table of TOML that a section of the config does not have."""
    hints, found = get_type_hints(section), []
    for key, value in table.items():
        if key not in hints:
            found.append(f"{path}{key}")
        elif isinstance(value, dict):
            kinds = [kind for kind in (hints[key], *get_args(hints[key])) if dataclasses.is_dataclass(kind)]
            named = get_origin(hints[key]) is dict
            for name, inner in value.items() if named else [("", value)]:
                where = f"{path}{key}.{name}." if named else f"{path}{key}."
                found += unknown_keys(kinds[0], inner, where) if kinds else []
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if "```toml" in page.read_text()], ids=name)
def test_tables_of_the_pages_have_keys_of_the_config(page):
    for text in blocks(page, "toml"):
        table = tomllib.loads(text)
        if set(table) - {"extends"} <= set(get_type_hints(config.Config)):  # else it is another file, as of hardware
            assert not unknown_keys(config.Config, {k: v for k, v in table.items() if k != "extends"}, "")


def test_readme_and_pages_stay_short():
    counted = counts.words()
    assert counted["README.md"] <= 1_300, "README.md: one thing in, one thing out"
    assert counted["docs, written"] <= 56_500, "docs: merge what stands twice before a page is added"
    assert counted["docs, written, outside of code and tables"] <= 45_000
