"""What others made and we open runs no code of theirs; for checkpoints see test_checkpoint_files.py."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest

from mmtrain.config.data import DataConfig, TokenizerConfig
from mmtrain.data.sources import CONVERSATIONS, open_source
from mmtrain.data.tokenizer import SHIPPED, load_tokenizer
from mmtrain.errors import ConfigError


class Program:
    """Unpickled, it makes a folder."""

    def __reduce__(self):
        return os.mkdir, ("made",)


@pytest.mark.parametrize("source", ["pandas", "parquet", "webdataset"])
def test_the_name_of_a_file_format_is_no_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """`datasets` would read what lies in the working directory, pickles among it."""
    monkeypatch.chdir(tmp_path)
    Path("train.pkl").write_bytes(pickle.dumps(Program()))
    with pytest.raises(ConfigError, match=f"data.source = '{source}' is a file format of `datasets`; name a file"):
        open_source(DataConfig(source=source), "train", CONVERSATIONS)
    assert not Path("made").exists()


def test_a_folder_that_is_called_like_a_format_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("json").mkdir()
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    Path("json/train.json").write_text(json.dumps(rows))
    Path("other.json").write_text("[]")
    assert open_source(DataConfig(source="json"), "train", CONVERSATIONS).num_samples == 1


def test_code_of_a_tokenizer_is_refused_whatever_the_terminal_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(SHIPPED, tmp_path / "tokenizer")
    path = tmp_path / "tokenizer" / "tokenizer_config.json"
    table = json.loads(path.read_text())
    table["tokenizer_class"], table["auto_map"] = "Theirs", {"AutoTokenizer": [None, "theirs.Theirs"]}
    path.write_text(json.dumps(table))
    (tmp_path / "tokenizer" / "theirs.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'made')!r})\n")
    monkeypatch.setattr("builtins.input", lambda text: "y")
    with pytest.raises(ConfigError, match=r"tokenizer\.path = .* cannot be loaded: .*contains custom code"):
        load_tokenizer(TokenizerConfig(path=str(tmp_path / "tokenizer")))
    assert not (tmp_path / "made").exists()
