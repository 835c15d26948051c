"""The card of a data set names files of its own folder; what it names elsewhere is neither looked for nor read."""

import http.server
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmtrain.config.data import DataConfig
from mmtrain.data.conversation_records import CONVERSATIONS
from mmtrain.data.dataset_cards import check_files
from mmtrain.data.sources import open_source
from mmtrain.errors import ConfigError

ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "secret"}]}


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """An address of this machine, and what was asked of it."""
    asked: list[str] = []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = json.dumps([ROW]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body if self.command == "GET" else b"")

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}", asked
        running.shutdown()


def data_set(folder: Path, config: Any, name: str = "README.md") -> DataConfig:
    """A folder with a file of its own, one next to it, and a card."""
    theirs = folder / "theirs"
    (theirs / "more").mkdir(parents=True)
    (folder / "private.json").write_text(json.dumps([ROW]))
    for own in ("part-0.json", "part-1.json", "more/part-2.json"):
        (theirs / own).write_text(json.dumps([ROW]))
    text = yaml.safe_dump({"configs": [{"config_name": "default"} | config], "license": "mit"})
    (theirs / name).write_text(f"---\n{text}---\n# Theirs\n" if name == "README.md" else text)
    if name != "README.md":
        (theirs / "README.md").write_text("# Theirs\n")
    return DataConfig(source=str(theirs))


@pytest.mark.parametrize("name", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize(
    "config",
    [
        {"data_files": "../private.json"},
        {"data_files": "more/../../private.json"},
        {"data_files": [{"split": "train", "path": ["part-0.json", "../private.json"]}]},
        {"data_files": [{"split": "train", "path": "part-0.json"}, {"split": "test", "path": "FOLDER/private.json"}]},
        {"data_files": "URL/private.json"},
        {"data_files": "file://FOLDER/private.json"},
        {"data_files": "zip://*::URL/private.zip"},
        {"data_files": "hf://datasets/somebody/private/train.json"},
        {"data_dir": "..", "data_files": "private.json"},
        {"data_files": {"train": "../private.json"}},
    ],
)
def test_files_elsewhere_are_refused_before_they_are_looked_for(
    tmp_path: Path, server: tuple[str, list[str]], config: dict[str, Any], name: str
) -> None:
    address, asked = server
    text = json.dumps(config).replace("FOLDER", str(tmp_path)).replace("URL", address)
    data = data_set(tmp_path, json.loads(text), name)
    with pytest.raises(
        ConfigError, match=rf"^data\.source = .* is refused: its {name} names .*outside of the data set"
    ):
        open_source(data, "train", CONVERSATIONS)
    assert asked == []


@pytest.mark.parametrize(
    "config", [{"data_files": "*.json"}, {"data_files": [{"split": "train", "path": ["part-0.json", "more/*"]}]}, {}]
)
def test_a_card_that_names_its_own_files_is_read(tmp_path: Path, config: dict[str, Any]) -> None:
    rows = open_source(data_set(tmp_path, config), "train", CONVERSATIONS)
    assert rows.num_samples == (3 if not config else 2)


def test_a_folder_may_be_a_link_or_have_a_roundabout_path(tmp_path: Path) -> None:
    data = data_set(tmp_path, {"data_files": "part-*.json"})
    (tmp_path / "link").symlink_to(data.source)
    for path in ("link", "theirs/more/..", "link/../theirs"):
        rows = open_source(replace(data, source=str(tmp_path / path)), "train", CONVERSATIONS)
        assert rows.num_samples == 2


def test_a_card_that_is_no_yaml_is_one_sentence(tmp_path: Path) -> None:
    data = data_set(tmp_path, {})
    (Path(data.source) / "README.md").write_text("---\nconfigs: [\n---\n")
    with pytest.raises(ConfigError, match=r"its README\.md cannot be read: .*; correct it"):
        open_source(data, "train", CONVERSATIONS)


def test_what_was_found_elsewhere_is_not_read() -> None:
    root = "hf://datasets/them/theirs@"
    check_files("key", root, {"train": [f"{root}1234/train.json"]})
    for file in ("https://elsewhere/train.json", "hf://datasets/you/private@1/train.json", "/home/you/train.json"):
        with pytest.raises(ConfigError, match=r"^key is refused: it names '.*', which is outside of the data set"):
            check_files("key", root, {"train": [f"{root}1234/train.json"], "test": [file]})
