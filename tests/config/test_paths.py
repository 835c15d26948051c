"""Keys that name files: `~` is the home folder in all of them, and a job without a folder gets one of its own."""

from pathlib import Path
from typing import Any

import pytest

from mmtrain.commands.cli import main
from mmtrain.config import config
from mmtrain.config.toml_sections import build
from mmtrain.errors import ConfigError
from tests.config.test_config import BASE

PATHS: dict[str, dict[str, Any]] = {
    "job.dump_folder": {},
    "checkpoint.folder": {},
    "tokenizer.path": {},
    "tokenizer.chat_template": {},
    "data.source": {},
    "data.image_processor": {"source": "x"},
    "planner.hardware": {},
    "planner.profile": {},
    "parallelism.pipeline_parallel_schedule": {},
    "model.pretrained": {"language": {"config": {"model_type": "llama"}}},
    "model.language.pretrained": {},
    "model.encoder.pretrained": {},
    "model.dit.pretrained": {},
    "model.projector.pretrained": {"kind": "llava"},
    "model.lora.pretrained": {},
    "model.contrast.pretrained": {},
    "model.vae.pretrained": {},
}
"""Key -> other keys that its section needs."""


@pytest.mark.parametrize("key", PATHS)
def test_a_tilde_is_the_home_folder(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    *sections, name = key.split(".")
    hint: Any = config.Config
    for section in sections:
        hint = {f.name: f for f in hint.__dataclass_fields__.values()}[section].type
        hint = next((part for part in getattr(hint, "__args__", ()) if part is not type(None)), hint)

    def value(text: str) -> str:
        return str(getattr(build(hint, PATHS[key] | {name: text}, ".".join(sections), "job.toml"), name))

    assert value("~/x/y.csv") == "/home/me/x/y.csv"
    assert value("x/~/y.csv") == "x/~/y.csv"
    with pytest.raises(ConfigError, match=rf'{key} = "~no-one/y.csv": there is no user \'no-one\' with a home folder'):
        value("~no-one/y.csv")


def test_a_tilde_of_a_command_and_of_a_config_file_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """bash leaves that of --config=~/job.toml."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base.toml").write_text(BASE)
    (tmp_path / "job.toml").write_text('extends = "~/base.toml"\n')
    assert config.load("~/job.toml").training.steps == 10
    words = ["schedule", "show", "1F1B", "--pp", "2", "--microbatches", "2", "--format", "svg", "--out=~/plan.svg"]
    assert main(words) == 0
    assert (tmp_path / "plan.svg").is_file()


def test_a_job_without_a_folder_gets_one_named_after_its_file(tmp_path: Path) -> None:
    """Two jobs do not find each other's checkpoints, also if one extends the other."""
    (tmp_path / "base.toml").write_text(BASE)
    (tmp_path / "mine.v2.toml").write_text('extends = "base.toml"\n[optimizer]\nlr = 1e-3\n')
    base, mine = (config.load(tmp_path / f"{name}.toml") for name in ("base", "mine.v2"))
    assert (base.job.dump_folder, mine.job.dump_folder) == ("outputs/base", "outputs/mine.v2")
    assert base.checkpoint.enable and base.checkpoint.keep_latest_k == 2
    (tmp_path / "base.toml").write_text(BASE + '[job]\ndump_folder = "runs/a"\n')
    base, mine = (config.load(tmp_path / f"{name}.toml") for name in ("base", "mine.v2"))
    assert (base.job.dump_folder, mine.job.dump_folder) == ("runs/a", "outputs/mine.v2")
    (tmp_path / "config.toml").write_text(config.dump(mine))  # as in the folder of the run
    assert config.load(tmp_path / "config.toml") == mine
    assert config.load(tmp_path / "base.toml", ["job.dump_folder=b"]).job.dump_folder == "b"


def test_jobs_that_ship_have_folders_of_their_own() -> None:
    names = [path.stem for path in Path(config.__file__).resolve().parents[2].glob("configs/*.toml")]
    assert names and all(config.load(f"{name}.toml").job.dump_folder == f"outputs/{name}" for name in names)
