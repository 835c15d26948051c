"""`mmtrain finetune`: from 40 images, a ShareGPT file and a stored model to a fine-tuned folder and an answer."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image

from mmtrain.checkpoint.run_folder import open_run
from mmtrain.commands.answering import Answerer, asked
from mmtrain.commands.cli import main
from mmtrain.commands.export_whole import assembled
from mmtrain.config import config
from tests.strangers import IMAGES, save_stranger

COLOURS = ("red", "green", "blue")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a stored model and a ShareGPT file of 40 drawn images."""
    monkeypatch.chdir(tmp_path)
    save_stranger(tmp_path / "whole", "qwen2_5_vl")
    (tmp_path / "images").mkdir()
    rows = []
    for number in range(40):
        colour = COLOURS[number % 3]
        Image.new("RGB", (56, 56 + 28 * (number % 2)), colour).save(tmp_path / f"images/{number}.png")
        turns = [{"from": "human", "value": "<image>\nWhat colour?"}, {"from": "gpt", "value": colour}]
        rows.append({"image": f"images/{number}.png", "conversations": turns})
    (tmp_path / "data.json").write_text(json.dumps(rows))
    return tmp_path


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which a command ends."""
    assert main(list(words)) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ")
    return line


@pytest.mark.ranks
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "trained"),
    [
        (("--optimizer.lr=3e-3",), "134,112 parameters (vision 0.1 M, language 0.1 M), of which 134,112 train"),
        (
            ("--lora", "--model.lora.rank=4", "--optimizer.lr=1e-2"),
            "139,488 parameters (vision 0.1 M frozen, language 0.1 M), of which 5,376 train",
        ),
    ],
    ids=["full", "lora"],
)
def test_two_commands(work, capfd, options, trained):
    assert (
        main(["finetune", "whole", "data.json", "--out", "run", "--epochs", "1", "--data.num_workers=0", *options]) == 0
    )
    told = capfd.readouterr().out
    for line in (
        f"model: qwen2_5_vl, {trained}",
        "data: 36 samples: 36 with images, videos or sounds",
        "too long for 256 tokens: 0 of 36",
        "validation: 4 samples, of the same, not trained on",
        "template: <|im_start|>user QUESTION<|im_end|>",
        "answers: ",
        "run/model: step 3",
    ):
        assert line in told, line
    toml = (work / "run/finetune.toml").read_text()
    assert toml in told, "what runs is printed"
    assert config.load(work / "run/finetune.toml").training.epochs == 1

    asked_for = ["--image", "images/0.png", "--prompt", "What colour?", "--max-new-tokens", "4"]
    assert main(["generate", "run/model", *asked_for]) == 0
    assert capfd.readouterr().out

    theirs = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained("run/model").eval()
    ours = assembled(open_run(Path("run"))).eval()
    before = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained("whole").eval()
    inputs = Answerer.of(Path("run/model")).inputs(asked("What colour?", [Path("images/1.png")]))
    with torch.no_grad():
        logits, own, old = (model(**inputs).logits for model in (theirs, ours, before))
    assert torch.equal(logits, own)
    assert not torch.allclose(logits, old, atol=1e-4)


def test_what_is_written_for_fine_tuning(work, capsys):
    assert main(["finetune", "whole", "data.json", "--freeze", "vision", "--dry-run", "--training.seq_len=128"]) == 0
    assert "not run: mmtrain train --config outputs/whole-data/finetune.toml" in capsys.readouterr().out
    job = config.load("outputs/whole-data/finetune.toml")
    assert job.model.encoder is not None and job.model.encoder.trainable is False
    assert job.model.projector.trainable is True and job.model.language.trainable is True
    assert (job.training.epochs, job.training.seq_len, job.optimizer.lr) == (3, 128, 1e-5)
    assert job.data.validation_part == 0.1 and job.validation.enable and job.checkpoint.keep_best == "loss"
    assert main(["finetune", "whole", "data.json", "--lora", "--dry-run", "--out", "other", "--training.steps=7"]) == 0
    job = config.load("other/finetune.toml")
    assert job.model.language.trainable == "lora" and job.model.projector.trainable is False
    assert (job.training.steps, job.training.epochs, job.optimizer.lr) == (7, 0, 1e-4)
    assert "is of another fine-tuning" in error_of(capsys, "finetune", "whole", "data.json", "--out", "other")


def test_bad_input(work, capsys, monkeypatch):
    for family in ("gpt7", "clip", "clip_text_model"):
        line = other_family(work, capsys, family)
        assert f'model_type = "{family}", a family that finetune does not take; name a model of one of' in line
        assert line.endswith(
            "qwen2_vl, qwen2_5_vl, qwen3_vl, llava, qwen2_audio, qwen2, llama, qwen3, mistral, "
            "qwen2_vl_text, qwen2_5_vl_text, qwen3_vl_text"
        )
    line = error_of(capsys, "finetune", "whole", "data.json", "--training.seq_len=8")
    assert "no sample fits: they have 19 tokens or more, but training.seq_len = 8" in line
    Path("broken.json").write_text(json.dumps([{"image": "none.png", "question": "?", "answer": "!"}] * 4))
    line = error_of(capsys, "finetune", "whole", "broken.json")
    assert "no sample fits: none can be read; the first: image 0 of sample 0: its file" in line
    Path("one.json").write_text(json.dumps([{"question": "?", "answer": "!"}]))
    assert "has 1 samples, but it needs two at least" in error_of(capsys, "finetune", "whole", "one.json")
    line = error_of(capsys, "finetune", "whole", "data.json", "--freeze", "audio")
    assert line == "error: finetune: --freeze audio; this model has vision, projector, language"
    assert "it must be above 0" in error_of(capsys, "finetune", "whole", "data.json", "--epochs", "0")
    assert "unknown key optimizer.rl" in error_of(capsys, "finetune", "whole", "data.json", "--optimizer.rl=1")
    line = error_of(capsys, "finetune", "whole", "data.json", "--training.num_train_epochs=1")
    assert "num_train_epochs of Hugging Face Trainer, LLaMA-Factory, ms-swift is training.epochs" in line
    Path("run/model").mkdir(parents=True)
    assert "run/model is there already" in error_of(capsys, "finetune", "whole", "data.json", "--out", "run")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "torchrun has started this process" in error_of(capsys, "finetune", "whole", "data.json")


def other_family(work: Path, capsys: pytest.CaptureFixture[str], family: str) -> str:
    """What is said of a model whose config.json names this family."""
    (work / "other").mkdir(exist_ok=True)
    (work / "other/config.json").write_text(json.dumps({"model_type": family}))
    return error_of(capsys, "finetune", "other", "data.json")


def save_decoder(folder: Path, family: str) -> None:
    """A language model without vision, with its tokenizer."""
    save_stranger(folder)
    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    of_family = transformers.AutoConfig.for_model(family, **sizes, **heads)
    transformers.AutoModelForCausalLM.from_config(of_family).save_pretrained(folder)
    (folder / IMAGES).unlink()


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_decoder_without_vision(tmp_path, monkeypatch, capsys, family):
    monkeypatch.chdir(tmp_path)
    save_decoder(tmp_path / "decoder", family)
    rows = [{"instruction": f"What is {number} + 1?", "input": "", "output": f"{number + 1}"} for number in range(20)]
    (tmp_path / "data.json").write_text(json.dumps(rows))
    assert main(["finetune", "decoder", "data.json", "--out", "run", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert f"model: {family}, " in told and "data: 18 samples: 0 with images" in told
    job = config.load("run/finetune.toml")
    assert job.model.encoder is None and job.model.language.pretrained == "decoder"
    assert main(["finetune", "decoder", "data.json", "--out", "run", "--dry-run", "--freeze", "vision"]) == 2
    assert capsys.readouterr().err == "error: finetune: --freeze vision; this model has language\n"
