"""Local paths and ids of the hub: a misspelt path is not sent to the hub, and a hub that is away is asked once."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmtrain.config.data import TokenizerConfig
from mmtrain.config.model import LanguageConfig
from mmtrain.config.whole_model import with_parts
from mmtrain.data.pixels import pixel_rules
from mmtrain.data.tokenizer import load_tokenizer
from mmtrain.errors import ConfigError
from mmtrain.spec.hub_files import find_file, read_json
from mmtrain.spec.model_configs import language_config

KEYS: dict[str, Callable[[str], Any]] = {
    "model.language.pretrained": lambda value: language_config(LanguageConfig(pretrained=value)),
    "tokenizer.path": lambda value: load_tokenizer(TokenizerConfig(path=value)),
    "data.image_processor": lambda value: pixel_rules("vit", value),
}
"""Key -> what reads its value."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models" / "small").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("models/smal", r"; did you mean models/small\? \(it is not looked for on the hub, since 'models' is a folder"),
        ("model/small/x", r"; did you mean models\?"),
        ("./x", r"; \S+ has models"),
        ("/absent/x/y", "; the nearest folder that exists, /, has "),
        ("~/absent/x", "; the nearest folder that exists, "),
        ("~no-such-user/x", ": there is no user 'no-such-user' with a home folder; write the path in full"),
    ],
)
def test_a_misspelt_path_is_not_sent_to_the_hub(
    here: Path, lookups: list[str], key: str, value: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{key} = {value!r} does not exist") + message):
        KEYS[key](value)
    assert lookups == []


@pytest.mark.parametrize("key", KEYS)
def test_a_hub_that_cannot_be_reached_is_asked_once(
    here: Path, monkeypatch: pytest.MonkeyPatch, lookups: list[str], key: str
) -> None:
    both = rf"^{key} = 'model'.*there is no such folder here \(did you mean models\?\), and .*hub"
    with pytest.raises(ConfigError, match=rf"{both}.*Name or service not known"):
        KEYS[key]("model")
    before = len(lookups)
    assert 1 <= before <= 2  # the hub's client asks six times a file
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=rf"{both}.*offline mode is enabled"):
        KEYS[key]("model")
    assert len(lookups) == before


@pytest.mark.parametrize("key", KEYS)
def test_home_is_expanded(here: Path, monkeypatch: pytest.MonkeyPatch, lookups: list[str], key: str) -> None:
    monkeypatch.setenv("HOME", str(here))
    with pytest.raises(ConfigError) as caught:
        KEYS[key]("~/models/small")
    assert "does not exist" not in str(caught.value)  # it is there, but empty
    assert lookups == []


def test_files_of_a_folder(tmp_path: Path) -> None:
    key, absent = "model.language.pretrained", "model.safetensors"
    assert find_file(key, str(tmp_path), absent, optional=True) is None
    with pytest.raises(ConfigError, match=rf"^{key} = .*: the folder has no {absent}; choose another folder"):
        find_file(key, str(tmp_path), absent)
    (tmp_path / absent).touch()
    assert find_file(key, str(tmp_path), absent) == tmp_path / absent
    with pytest.raises(ConfigError, match=rf"^{key} = .*is a file; name the folder that it is in"):
        find_file(key, str(tmp_path / absent), "config.json")


def test_without_network_a_cached_model_has_no_other_files(
    here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="offline mode is enabled"):
        find_file("model.pretrained", "a/b", "processor_config.json", optional=True)
    snapshot, refs = tmp_path / "models--a--b/snapshots/abc", tmp_path / "models--a--b/refs"
    snapshot.mkdir(parents=True)
    refs.mkdir()
    (refs / "main").write_text("abc")
    (snapshot / "config.json").write_text("{}")
    assert find_file("model.pretrained", "a/b", "config.json") == snapshot / "config.json"
    assert find_file("model.pretrained", "a/b", "processor_config.json", optional=True) is None
    with pytest.raises(ConfigError, match="offline mode is enabled"):
        find_file("model.pretrained", "a/b", "processor_config.json")


def test_a_preprocessor_config_is_json(tmp_path: Path) -> None:
    for text, rule in (("{", "is not valid JSON"), ("[]", "holds no JSON object")):
        (tmp_path / "preprocessor_config.json").write_text(text)
        with pytest.raises(ConfigError, match=rf"^data.image_processor: .*preprocessor_config.json {rule}"):
            pixel_rules("vit", str(tmp_path))


def test_a_file_larger_than_any_that_a_model_has_is_refused_unread(tmp_path):
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(ConfigError, match=r"^key: .*config\.json has over 268,435,456 bytes; fetch it again"):
        read_json("key", path)


def test_a_pipe_in_place_of_a_config_is_no_config(tmp_path):
    """Reading it would never end."""
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"the folder has no config\.json"):
        find_file("key", str(tmp_path), "config.json")
    table = {"model": {"pretrained": str(tmp_path)}}
    assert with_parts(table, "a test")["model"]["encoder"] == {"pretrained": str(tmp_path)}
