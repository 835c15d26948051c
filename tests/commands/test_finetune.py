"""`mmtrain finetune`: from 40 images, a ShareGPT file and a stored model to a fine-tuned folder and an answer."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from mmtrain.checkpoint.run_folder import load_module, open_run
from mmtrain.commands.cli import main
from mmtrain.config import config
from mmtrain.data.conversations import ReadDocument, make_processor, packed
from mmtrain.inference.answering import Answerer, asked
from mmtrain.launch.processes import end_with_parent
from mmtrain.modality.metadata import MicrobatchMeta
from mmtrain.models.reference import ReferenceModel
from mmtrain.spec.builders import model_spec
from tests.strangers import IMAGES, edited, save_stranger

COLOURS = ("red", "green", "blue")


PAGE = Path(__file__).resolve().parents[2] / "docs/fine_tuning.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a ShareGPT file of 40 drawn images."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    rows = []
    for number in range(40):
        colour = COLOURS[number % 3]
        Image.new("RGB", (56, 56 + 28 * (number % 2)), colour).save(tmp_path / f"images/{number}.png")
        turns = [{"from": "human", "value": "<image>\nWhat colour?"}, {"from": "gpt", "value": colour}]
        rows.append({"image": f"images/{number}.png", "conversations": turns})
    (tmp_path / DATA).write_text(json.dumps(rows))
    return tmp_path


@pytest.fixture
def work(folder: Path) -> Path:
    """The same with a stored model."""
    save_stranger(folder / "whole", "qwen2_5_vl")
    (folder / DATA).rename(folder / "data.json")
    return folder


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which a command ends."""
    assert main(list(words)) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ")
    return line


MODEL, DATA = "Qwen/Qwen2.5-VL-7B-Instruct", "my_data.json"
"""As in the first two commands of docs/fine_tuning.md."""
CLASSES = {
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
}
TRAINED = {
    ("qwen2_5_vl", ""): "134,112 parameters (vision 0.1 M, language 0.1 M), of which 134,112 train",
    ("qwen2_5_vl", "--lora"): "139,488 parameters (vision 0.1 M frozen, language 0.1 M), of which 5,376 train",
    ("qwen3_vl", ""): "159,392 parameters (vision 0.1 M, language 0.1 M), of which 159,392 train",
    ("qwen3_vl", "--lora"): "165,152 parameters (vision 0.1 M frozen, language 0.1 M), of which 5,760 train",
    ("llava", ""): "113,776 parameters (vision 0.0 M, language 0.1 M), of which 113,776 train",
    ("llava", "--lora"): "121,840 parameters (vision 0.0 M frozen, language 0.1 M), of which 8,064 train",
}
"""(family, option) -> what is said of the parameters."""
MERGED = 1e-5
"""Float32, of logits up to 3: adapters are added to the weights once, not in each forward. Measured: at most 1.8e-6,
and 0 without adapters."""


def page_commands() -> list[list[str]]:
    """The two commands at the top of the guide."""
    first = re.findall(r"```\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    return [shlex.split(line)[1:] for line in first.splitlines()]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("family", "lora"),
    [pytest.param(*of, marks=() if of == ("qwen3_vl", "--lora") else pytest.mark.nightly) for of in TRAINED],
)
def test_two_commands(folder, capfd, family, lora):
    """Word by word those of the guide, with fewer epochs, at a rate that random weights notice."""
    save_stranger(folder / MODEL, family)
    finetune, generate = page_commands()
    short = ["--epochs", "1", "--data.num_workers=0", f"--optimizer.lr={'1e-2' if lora else '3e-3'}"]
    options = [*short, *([lora, "--model.lora.rank=4"] if lora else [])]
    assert main([*finetune, *options]) == 0
    told = capfd.readouterr().out
    for line in (
        f"model: {family}, {TRAINED[family, lora]}",
        "data: 36 samples: 36 with images, videos or sounds",
        "too long for 256 tokens: 0 of 36",
        "validation: 4 samples, of the same, not trained on",
        "template: <|im_start|>user QUESTION<|im_end|>",
        "answers: ",
        f"outputs/mine/model: step {5 if family == 'llava' else 3}",
    ):
        assert line in told, line
    toml = Path("outputs/mine/finetune.toml").read_text()
    assert toml in told, "what runs is printed"
    assert config.load("outputs/mine/finetune.toml").training.epochs == 1

    Path("FILE").write_bytes(Path("images/0.png").read_bytes())
    assert main([*generate, "--max-new-tokens", "4"]) == 0
    assert capfd.readouterr().out

    inputs = Answerer.of(Path("outputs/mine/model")).inputs(asked("What colour?", [Path("images/1.png")]))
    exported, before = (theirs(path, family)(**inputs).logits[0] for path in ("outputs/mine/model", MODEL))
    torch.testing.assert_close(exported, our_logits(Path("outputs/mine")), rtol=0, atol=MERGED)
    assert not torch.allclose(exported, before, atol=1e-3)


def theirs(folder: str, family: str) -> Any:
    """The class of transformers, without gradients."""
    model = getattr(transformers, CLASSES[family]).from_pretrained(folder).eval()
    return model.requires_grad_(False)


@torch.no_grad()
def our_logits(folder: Path) -> torch.Tensor:
    """[T, vocabulary]: of the same question, by the forward that trains, adapters apart."""
    run, logits = open_run(folder), list[torch.Tensor]()
    model = ReferenceModel(run.job.model, model_spec(run.job.model), seed=0, stored=partial(load_module, run))

    def predict(of_microbatch: torch.Tensor) -> torch.Tensor:
        logits.append(of_microbatch)
        return of_microbatch.argmax(dim=-1)

    model.chunks["language"].predict = predict
    processor = make_processor(run.job)
    document = processor.prompt(asked("What colour?", [Path("images/1.png")]))
    meta = replace(document.meta, num_targets=document.meta.num_tokens)
    labelled = replace(document, meta=meta, labels=np.zeros_like(document.input_ids))
    tensors = packed([ReadDocument(document=labelled, pixels=processor.pixels(document))])
    model.microbatch(tensors, MicrobatchMeta(documents=(meta,)), want_predictions=True)
    return torch.cat(logits)


@pytest.mark.ranks
@pytest.mark.nightly
def test_transformers_warns_of_special_tokens_at_most_once(work):
    """In processes that load transformers themselves: the command, its two ranks, their data workers."""
    edited("config.json", lambda values: values["text_config"].update(bos_token_id=151643))(work / "whole")
    words = ("finetune", "whole", "data.json", "--epochs", "1", "--parallelism.pipeline_parallel_degree=2")
    command = [sys.executable, "-m", "mmtrain.commands.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=end_with_parent)
    assert (done.stdout + done.stderr).count("bos_token_id") <= 1, done.stderr


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
    (work / "own.py").write_text("def score(answers, references):\n    return 1.0\n")
    own = ("--validation.metric=own.py:score", "--checkpoint.keep_best=highest score", "--validation.patience=2")
    assert main(["finetune", "whole", "data.json", "--dry-run", "--out", "own", *own]) == 0
    job = config.load("own/finetune.toml")
    assert (job.validation.metric, job.validation.generate) == ("own.py:score", 4)
    assert (job.checkpoint.keep_best, job.validation.patience) == ("highest score", 2)
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
    line = error_of(capsys, "finetune", "whole", "data.json", "--epochs", "2", "--training.steps=3")
    assert "training.steps = 3 and training.epochs = 2 are both set; keep one" in line
    stream = ("--data.streaming=true", "--data.shuffle=false", "--data.validation_split=train")
    line = error_of(capsys, "finetune", "whole", "data.json", *stream)
    assert "training.epochs = 3 with data.streaming = true: the number of samples of a stream is not known" in line
    line = error_of(capsys, "finetune", "whole", "data.json", "--validation.metric=own.py:score")
    assert line.startswith("error: validation.metric: own.py cannot be read")
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
