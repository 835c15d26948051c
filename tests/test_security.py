"""What others made and we open runs no code of theirs; for checkpoints see test_checkpoint_files.py."""

import http.server
import json
import os
import pickle
import re
import shutil
import threading
from pathlib import Path

import pytest

import mmtrain
from mmtrain.commands.cli import main
from mmtrain.config.data import DataConfig, TokenizerConfig
from mmtrain.data.conversation_records import CONVERSATIONS
from mmtrain.data.media import raw_image
from mmtrain.data.sources import open_source
from mmtrain.data.tokenizer import SHIPPED, load_tokenizer
from mmtrain.errors import ConfigError, DataError
from mmtrain.schedule.recipe.schedule_files import schedule_of
from tests.jobs import write_config


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


def test_a_loading_script_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "theirs.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'made')!r})\n")
    with pytest.raises(ConfigError, match=r"^data.source = .* no longer supported, but found theirs"):
        open_source(DataConfig(source=str(folder)), "train", CONVERSATIONS)
    assert not (tmp_path / "made").exists()


def test_an_address_in_a_record_is_asked_through_redirects_and_keeps_the_limit() -> None:
    """As SECURITY.md says."""
    asked: list[str] = []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.command} {self.path}")
            self.send_response(302 if self.path == "/moved" else 200)
            self.send_header("Location", "/image")
            self.send_header("Content-Length", "100")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(bytes(100))

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        image = raw_image(f"http://127.0.0.1:{server.server_port}/moved", "an image", "")
        assert image.read(100) == bytes(100)
        assert {"HEAD /moved", "GET /image"} <= set(asked)
        asked.clear()
        with pytest.raises(DataError, match=r"has 100 bytes, more than data.max_media_bytes = 99"):
            image.read(99)
        assert not any(word.startswith("GET") for word in asked)
        server.shutdown()


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


# --------------------------------------------------------------------------------------- configs of others


def test_a_config_whose_folders_lack_weights_or_tokenizer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any process starts."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaConfig(**sizes, vocab_size=768).save_pretrained(tmp_path / "theirs")
    words = ["--config", str(write_config(tmp_path, tmp_path / "data")), "--model.language.config={}"]
    words += [f"--model.language.pretrained={tmp_path / 'theirs'}"]
    for command in ("config", "train"):
        assert main([command, *words]) == 2
        assert "there is no model.safetensors (or its index); save the weights" in capsys.readouterr().err
    words += ["--model.language.weights=random", f"--tokenizer.path={tmp_path / 'theirs'}"]
    for command in ("config", "train"):
        assert main([command, *words]) == 2
        assert "theirs has no tokenizer; add the model's tokenizer.json" in capsys.readouterr().err


def recipe_config(tmp_path: Path, *overrides: str) -> list[str]:
    """`--config FILE` of a job whose recipe makes a folder `made`."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        f"import os\nos.makedirs({str(tmp_path / 'made')!r}, exist_ok=True)\n"
        "from mmtrain.schedule.recipe import Recipe\n\ndef schedule(P):\n    return Recipe()\n"
    )
    path = write_config(tmp_path, tmp_path / "data")
    schedule = f'--parallelism.pipeline_parallel_schedule="{recipe}"'
    return ["--config", str(path), schedule, "--parallelism.pipeline_parallel_degree=2", *overrides]


def test_looking_at_a_config_runs_no_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = recipe_config(tmp_path)
    assert main(["config", *words]) == 0
    said = capsys.readouterr().out.splitlines()
    assert f"pipeline_parallel_schedule = {json.dumps(str(tmp_path / 'recipe.py'))}" in said
    assert said[-1] == (
        f"# {str(tmp_path / 'recipe.py')!r} is a program, which is not run here: how it cuts the model is not checked"
    )
    assert main(["config", *words, "--model.language.config.num_attention_heads=5"]) == 2, "the model is checked"
    assert not (tmp_path / "made").exists()
    schedule_of(str(tmp_path / "recipe.py"), 2)
    assert (tmp_path / "made").exists(), "it is one that would make a folder"


def test_an_error_about_a_name_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "\x1b]0;x\x07\x9bé").mkdir()
    assert main(["generate", str(tmp_path / "\x1b]0;x\x07\x9bé"), "--prompt", "what?"]) == 2
    assert "\\u001b]0;x\\u0007\\u009bé has neither config.toml nor config.json" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["report", "run", "--\x1b]0;x\x07"])
    assert "unrecognized arguments: --\\u001b]0;x\\u0007" in capsys.readouterr().err


CALLS = {
    r"\.from_pretrained\(": "data/processor_check.py data/tokenizer.py",
    r"\bsafe_open\(|\bload_file\(": "models/pretrained.py",
    r"\bload_dataset(_builder)?\(": "data/sources.py",
    r"\btorch\.load\(": "checkpoint/files.py local/parity.py",
    r"pickle\.(loads?|Unpickler)\b": "checkpoint/stored_metadata.py local/ranks.py parallel/mesh.py",
    r"hf_hub_download\(|snapshot_download\(": "config/whole_model.py spec/hub_files.py",
}
"""What opens files of somebody -> the files of ours that call it, where the guards are. The pickles of `local`
are of a temporary folder of our own, those of `parallel` come from ranks of the job."""


@pytest.mark.parametrize("call", CALLS)
def test_what_opens_files_is_called_in_one_place(call: str) -> None:
    package = Path(mmtrain.__file__).parent
    code = {path: re.sub(r"`[^`]*`", "", path.read_text()) for path in package.rglob("*.py")}
    found = sorted(path.relative_to(package).as_posix() for path, text in code.items() if re.search(call, text))
    assert " ".join(found) == CALLS[call]
