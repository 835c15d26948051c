"""Jobs with an encoder of sound, on real files: gradients, loss curves and resume at several layouts."""

import json
from pathlib import Path

import numpy as np
import pytest

from mmtrain.commands.cli import main
from mmtrain.config import config
from mmtrain.data.loader import Loader
from tests.data.samples import png
from tests.data.sound_files import noise, save_hearing_tokenizer, tone, wav
from tests.jobs import TEMPLATE, die_at, layout, metrics, train, world_size
from tests.ranks import run_ranks, warm_ranks
from tests.test_trainer import CURVE_TOLERANCE

pytestmark = pytest.mark.ranks

HEARS = """
[model.modules.audio]
kind = "audio"
config = {{ model_type = "whisper_encoder", d_model = 32, encoder_layers = 2, encoder_attention_heads = 4, encoder_ffn_dim = 64, num_mel_bins = 80, max_source_positions = 20 }}
num_segments = 1
sub_microbatch_size = 3
[model.modules.audio.projector]
spatial_merge = 2
[model.modules.maps]
kind = "images"
config = {{ model_type = "vit", hidden_size = 32, intermediate_size = 64, num_hidden_layers = 2, num_attention_heads = 4, image_size = 32, patch_size = 8 }}
num_segments = 1
[tokenizer]
path = "{folder}/tokenizer"
[model.language]
"""  # noqa: E501
SHALLOW = ["model.encoder.config.depth=2", "model.language.config.num_hidden_layers=2"]
SAVING = ["checkpoint.enable=true", "checkpoint.interval=2", "training.steps=4"]


def write_job(folder: Path, *, vision: bool = True) -> Path:
    """A job in `folder` on sounds of up to three windows, images and maps, alone or together, with texts between."""
    folder.mkdir(parents=True, exist_ok=True)
    save_hearing_tokenizer(folder / "tokenizer")
    rng, rows = np.random.default_rng(0), []
    (folder / "0.png").write_bytes(png(84, 56))
    (folder / "map.png").write_bytes(png(40, 30, "green"))
    kinds = [("audio",), ("image", "audio"), (), ("maps", "audio"), ("image",), ("audio", "audio")]
    for index in range(24):
        content, row = "", {"audio": [], "image": [], "maps": []}
        for kind in kinds[index % len(kinds)]:
            if kind != "audio" and not vision:
                continue
            name = {"image": "0.png", "maps": "map.png", "audio": f"{index}-{len(row['audio'])}.wav"}[kind]
            if kind == "audio":
                samples = tone(rng.uniform(200, 3000), rng.uniform(0.05, 1.1), 8000)
                (folder / name).write_bytes(wav(samples + 0.1 * noise(len(samples), index), 8000))
            content += f"<{kind}>"
            row[kind].append(name)
        turns = [{"role": "user", "content": content + "What?"}, {"role": "assistant", "content": f"answer {index}"}]
        rows.append(json.dumps({"messages": turns, **row}) + "\n")
    (folder / "train.jsonl").write_text("".join(rows))
    text = TEMPLATE.replace("[model.language]\n", HEARS).format(folder=folder, data=folder)
    removed = () if vision else (("[model.encoder]", "[model.modules.audio]"), ("[model.modules.maps]", "[tokenizer]"))
    for start, end in removed:
        text = text[: text.index(start)] + text[text.index(end) :]
    path = folder / "job.toml"
    path.write_text(text)
    return path


LAYOUTS = [
    layout(pp=2),
    *(
        pytest.param(degrees, marks=pytest.mark.nightly)
        for degrees in (layout(), layout(tp=2), layout(cp=2), layout(shard=2), layout(pp=2, replicate=2))
    ),
]


@pytest.mark.parametrize("degrees", LAYOUTS)
def test_gradients_are_those_of_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str], degrees) -> None:
    """Of batches that the loader read from files: the loss and every gradient."""
    path = write_job(tmp_path)
    with warm_ranks():
        assert main(["check-parity", "--config", str(path), "--steps=2", *(f"--{d}" for d in degrees)]) == 0
    printed = capsys.readouterr().out
    assert "PASS: relative tolerance 0.0001" in printed
    assert "audio whisper_encoder" in printed


def test_a_model_that_hears_alone_has_the_same_gradients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_job(tmp_path, vision=False)
    with warm_ranks():
        assert main(["check-parity", "--config", str(path), *(f"--{d}" for d in layout(pp=2))]) == 0
    assert "PASS: relative tolerance 0.0001" in capsys.readouterr().out


def killed(rank, path, overrides):
    """Every rank is killed without warning in the middle of step 4."""
    die_at(4)
    train(rank, path, overrides)


def test_two_processes_learn_what_one_learns_and_a_killed_job_continues_exactly(tmp_path: Path) -> None:
    overrides = [*SHALLOW, *SAVING]
    curves = {}
    for name, degrees in (("one", layout()), ("two", layout(pp=2))):
        path = write_job(tmp_path / name)
        run_ranks(train, world_size(degrees), path, [*degrees, *overrides])
        curves[name] = metrics(path.parent)
        assert sorted(curves[name]) == [1, 2, 3, 4]
    for step, loss in curves["one"].items():
        assert abs(curves["two"][step] - loss) / loss < CURVE_TOLERANCE
    path = write_job(tmp_path / "killed")
    with pytest.raises(AssertionError, match="process died with exit code -9"):
        run_ranks(killed, 2, path, [*layout(pp=2), *overrides])
    run_ranks(train, 2, path, [*layout(pp=2), *overrides])
    assert metrics(path.parent) == curves["two"]
    with Loader(config.load(path, overrides), num_steps=4) as loader:
        metas = [meta for _, meta, _ in loader]
    for key, number in (("sounds", "num_sounds"), ("images", "num_images")):
        counted = metrics(tmp_path / "two", key)
        assert counted == {step: getattr(meta, number) for step, meta in enumerate(metas, 1)}
    seconds = metrics(tmp_path / "two", "sound_s")
    assert seconds == pytest.approx({step: meta.sound_s for step, meta in enumerate(metas, 1)})


def test_a_name_that_records_need_is_refused_before_processes_start(tmp_path: Path, capsys) -> None:
    path = write_job(tmp_path)
    path.write_text(path.read_text().replace("model.modules.maps", "model.modules.video"))
    assert main(["train", "--config", str(path)]) != 0
    assert "[model.modules.video]: records have 'video' for another encoder" in capsys.readouterr().err
