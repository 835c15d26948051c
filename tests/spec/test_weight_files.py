"""Files of weights and tokenizers that a job names: what is missing, damaged or elsewhere is one sentence."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from mmtrain.config.data import TokenizerConfig
from mmtrain.config.model import LanguageConfig, ModelConfig
from mmtrain.data.tokenizer import SHIPPED, load_tokenizer
from mmtrain.errors import ConfigError
from mmtrain.models.pretrained import open_tensors
from mmtrain.spec.job_files import check_files, check_tokenizer
from mmtrain.spec.weight_files import check_weight_files, header, weight_files

TENSORS = {"a": np.ones((2, 3), np.float32), "b": np.zeros((0, 4), np.float16), "c": np.ones((), np.int64)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def index(folder: Path, files: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def test_the_header_says_what_the_library_finds(folder: Path) -> None:
    with safe_open(str(folder / "model.safetensors"), "np") as theirs:
        assert header("key", folder / "model.safetensors") == {
            name: tuple(theirs.get_slice(name).get_shape()) for name in list(theirs.keys())
        }


def test_a_cut_file_is_one_sentence_at_any_length(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"^key: .*\.safetensors cannot be read as safetensors: .*; fetch or"):
            weight_files("key", str(folder))


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x02}q\x00.", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]", b'\x08\0\0\0\0\0\0\0{"a": 1}']
)
def test_what_is_no_safetensors_file_is_one_sentence(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        weight_files("key", str(folder))


def test_what_only_the_library_refuses_is_one_sentence(folder: Path) -> None:
    """A type that it does not know; a tensor that the file lacks."""
    path = folder / "model.safetensors"
    unread = "cannot be read as safetensors: .*"
    with pytest.raises(ConfigError, match=f"{unread}none"), open_tensors("key", path) as tensors:
        tensors.get_tensor("none")
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F99"'))
    with pytest.raises(ConfigError, match=f"{unread}F99"), open_tensors("key", path):
        pass


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/outside.safetensors", "a/../../x.safetensors", "model.bin", "", 7, None]
)
def test_an_index_names_files_of_its_own_folder_alone(folder: Path, name: Any) -> None:
    index(folder, {"a": name})
    with pytest.raises(ConfigError, match=r"index\.json is refused: it names '.*'; weights are \.safetensors files of"):
        weight_files("key", str(folder))


@pytest.mark.parametrize("files", [None, [], {}, "model.safetensors"])
def test_an_index_without_files_is_one_sentence(folder: Path, files: Any) -> None:
    index(folder, files)
    with pytest.raises(ConfigError, match=r"index\.json has no weight_map from names to files"):
        weight_files("key", str(folder))


def test_all_files_of_an_index_are_there_and_hold_what_it_says(folder: Path) -> None:
    (folder / "more").mkdir()
    save_file({"d": TENSORS["a"]}, folder / "more" / "second.safetensors")
    index(folder, dict.fromkeys("abc", "model.safetensors") | {"d": "more/second.safetensors"})
    assert check_weight_files("key", str(folder)) == {"a": (2, 3), "b": (0, 4), "c": (), "d": (2, 3)}
    index(folder, {"a": "model.safetensors", "e": "more/second.safetensors"})
    with pytest.raises(ConfigError, match=r"second\.safetensors has no e, as its index says; fetch both again"):
        check_weight_files("key", str(folder))
    index(folder, {"a": "model-2.safetensors"})
    with pytest.raises(ConfigError, match=r"the folder has no model-2\.safetensors"):
        check_weight_files("key", str(folder))


def test_weights_and_tokenizer_are_looked_for_before_processes_start(folder: Path) -> None:
    def job(**more: Any) -> ModelConfig:
        return ModelConfig(language=LanguageConfig(pretrained=str(folder), **more))

    with pytest.raises(ConfigError, match=r"^tokenizer\.path: .* has no tokenizer; add the model's tokenizer\.json"):
        check_files(job(), TokenizerConfig(path=str(folder)))
    check_files(job(), TokenizerConfig())
    check_files(job(), TokenizerConfig(path=str(SHIPPED)))
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"^model\.language\.pretrained: .* its header says"):
        check_files(job(), TokenizerConfig())
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"^model\.language\.pretrained = .*: there is no model\.safetensors"):
        check_files(job(), TokenizerConfig())
    check_files(job(weights="random"), TokenizerConfig())


# ------------------------------------------------------------------------------------------- tokenizers

LLAMA = {"type": "Sequence", "normalizers": [
    {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
]}  # fmt: skip
T5 = {"type": "Sequence", "normalizers": [
    {"type": "Precompiled", "precompiled_charsmap": ""}, {"type": "Strip", "strip_left": False, "strip_right": True},
    {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"},
]}  # fmt: skip
GROWS = {"type": "Replace", "pattern": {"String": "a"}, "content": 10 * "a"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False}
EVERYWHERE = {"type": "Replace", "pattern": {"Regex": ""}, "content": 999 * "a"}


def tokenizer(folder: Path, **steps: Any) -> Path:
    shutil.copytree(SHIPPED, folder / "tokenizer")
    path = folder / "tokenizer" / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | steps))
    return path.parent


@pytest.mark.parametrize("step", [LLAMA, T5, {"type": "NFC"}, None, {"type": "Sequence", "normalizers": []}])
def test_the_steps_of_known_tokenizers_are_harmless(tmp_path: Path, step: Any) -> None:
    check_tokenizer(tokenizer(tmp_path, normalizer=step))


@pytest.mark.parametrize(
    "steps",
    [
        {"normalizer": {"type": "Sequence", "normalizers": 12 * [GROWS]}},
        {"normalizer": EVERYWHERE},
        {"decoder": {"type": "Sequence", "decoders": [{"type": "Sequence", "decoders": 6 * [GROWS]}]}},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": 30 * [{"type": "ByteLevel", "add_prefix_space": False}],
            }
        },
    ],
)
def test_a_step_that_grows_text_without_limit_is_refused(tmp_path: Path, steps: dict[str, Any]) -> None:
    """The library would ask for terabytes, and end the process."""
    folder = tokenizer(tmp_path, **steps)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is refused: its \w+ may make \d.* characters of one"):
        load_tokenizer(TokenizerConfig(path=str(folder)))


def test_a_tokenizer_of_the_hub_is_checked_as_one_of_a_folder_is(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("mmtrain.data.tokenizer.unreachable", lambda source: "no network")
    cached = tmp_path / "models--them--theirs"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    tokenizer(tmp_path, normalizer=EVERYWHERE).rename(tmp_path / "abc")
    (cached / "snapshots").mkdir()
    (tmp_path / "abc").rename(cached / "snapshots" / "abc")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is refused: its normalizer may make 1\.0e\+03 characters"):
        load_tokenizer(TokenizerConfig(path="them/theirs"))
