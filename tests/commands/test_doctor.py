"""`mmtrain doctor`: what it reports, and that `train` refuses all that it refuses."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mmtrain.commands.cli import main, train_main
from mmtrain.config import config
from mmtrain.data.processor_check import compare_processors
from mmtrain.parallel.pair_speeds import measure_pairs, tournament
from tests.launched import TORCHRUN, Job
from tests.ranks import run_ranks
from tests.strangers import CONFIG, TOKENIZER, edited, save_stranger, weights

JOB = """
[model]
pretrained = "whole"
[model.projector]
kind = "{projector}"
[data]
source = "data.jsonl"
num_workers = 0
[training]
steps = 1
seq_len = 64
global_batch_size = 1
[optimizer]
lr = 1e-4
[checkpoint]
enable = false
"""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a stored model, ten questions, and a job of them."""
    folder = tmp_path_factory.mktemp("stored")
    save_stranger(folder / "whole")
    rows = [{"question": f"What is {number} + 1?", "answer": f"{number + 1}"} for number in range(10)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "job.toml").write_text(JOB.format(projector="native"))
    return folder


@pytest.fixture
def work(tmp_path: Path, stored: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, as the working directory."""
    folder = Path(shutil.copytree(stored, tmp_path / "work"))
    monkeypatch.chdir(folder)
    return folder


def row(text: str) -> Callable[[Path], None]:
    """What makes a line the first one of the data."""

    def change(folder: Path) -> None:
        path = folder / "data.jsonl"
        path.write_text(text + "\n" + path.read_text())

    return change


def of_model(change: Callable[[Path], None]) -> Callable[[Path], None]:
    """A change of the folder of the model."""
    return lambda folder: change(folder / "whole")


def test_what_it_reports(work, capsys):
    assert main(["doctor", "--config", "job.toml"]) == 0
    told = capsys.readouterr().out
    for line in (
        "ok    config: the model can be built",
        " tensors are stored with the names and shapes that the model has; ",
        "ok    tokenizer: 448 entries",
        "ok    data, train: 10 samples: 0 with images",
        "ok    data, train: too long for 64 tokens: 0 of 10",
        "ok    launcher: none; the job has 1 ranks",
    ):
        assert line in told, told


def reshaped(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in tensors if name.endswith("q_proj.bias"))
    tensors[name] = torch.cat([tensors[name], tensors[name]])


def nothing(folder: Path) -> None:
    """Keeps the folder; what is wrong is in the overrides."""


def cut(name: str) -> Callable[[Path], None]:
    """What makes a file of the model shorter."""
    return of_model(lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-9]) and None)


def text_file(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


QUESTION = '"question": "What?", "answer": "red"}'
REFUSED: dict[str, tuple[Callable[[Path], None], str, *tuple[str, ...]]] = {
    # The folder of the model
    "no weights": (of_model(lambda folder: (folder / "model.safetensors").unlink()), "there is no model.safetensors"),
    "cut weights": (cut("model.safetensors"), "cannot be read as safetensors"),
    "a shape": (of_model(weights(reshaped)), "has shape (96,) in the checkpoint, but the config makes (48,)"),
    "a tensor": (of_model(weights(lambda tensors: tensors.pop(next(iter(tensors))))), "the checkpoint misses"),
    "a family": (of_model(edited(CONFIG, lambda values: values.update(model_type="gpt7"))), "gpt7"),
    "sizes": (of_model(edited(CONFIG, lambda v: v["text_config"].update(intermediate_size=96))), "makes (96, 48)"),
    "no adapters": (nothing, "adapter_config.json", "--model.lora.pretrained=x", "--model.language.trainable='lora'"),
    # Tokenizer and template
    "no tokenizer": (of_model(lambda folder: (folder / TOKENIZER).unlink()), "has no tokenizer"),
    "a cut tokenizer": (cut(TOKENIZER), "tokenizer"),
    "an image token": (nothing, "image_token", "--tokenizer.image_token=<photo>"),
    "no template": (nothing, "none.jinja", "--tokenizer.chat_template=none.jinja"),
    "a template": (text_file("t.jinja", "{% for %}"), "cannot be used", "--tokenizer.chat_template=t.jinja"),
    "a deaf template": (text_file("t.jinja", "hello"), "shows no text", "--tokenizer.chat_template=t.jinja"),
    # Data
    "no data": (lambda folder: (folder / "data.jsonl").unlink(), "data.source = 'data.jsonl'"),
    "no image": (row('{"image": "none.png", ' + QUESTION), "none.png"),
    "not an image": (row('{"image": "job.toml", ' + QUESTION), "image 0 of sample 0"),
    "too long": (row(json.dumps({"question": "1 " * 90, "answer": "2"})), "do not fit training.seq_len = 64"),
    "a row": (row('{"question": "What?"}'), "no `answer`"),
    "no JSON": (row("{"), "data.jsonl"),
    "nothing fits": (nothing, "seq_len", "--training.seq_len=4", "--data.too_long=skip"),
    "no validation split": (nothing, "validation", "--validation.enable=true"),
    "a stream of epochs": (nothing, "streaming", "--data.streaming=true", "--training.epochs=1", "--training.steps=0"),
    # The job
    "a cut": (nothing, "64 chunks, and each chunk needs a layer", "--parallelism.pipeline_parallel_degree=64"),
    "heads": (nothing, "does not divide", "--parallelism.tensor_parallel_degree=3"),
    "a recipe": (text_file("r.py", "1 / 0"), "r.py", '--parallelism.pipeline_parallel_schedule="r.py"'),
    "hardware": (nothing, "does not exist", '--planner.hardware="h900x8"'),
    "a profile": (nothing, "none.json", '--planner.profile="none.json"'),
    "an own metric": (
        nothing, "none.py", "--validation.metric='none.py:score'", "--validation.enable=true",
        "--validation.generate=1", "--data.validation_part=0.2",
    ),
    "an operator": (
        nothing, "aten.nothing", "--activation_checkpoint.mode='ops'",
        "--activation_checkpoint.save_ops=['aten.nothing']",
    ),
    "a key of others": (nothing, "training.epochs", "--training.num_train_epochs=1"),
}  # fmt: skip
"""What is changed, a part of the message, and overrides."""
DAILY = ("a shape", "no data", "too long", "an own metric")


@pytest.mark.parametrize(
    "what", [what if what in DAILY else pytest.param(what, marks=pytest.mark.nightly) for what in REFUSED]
)
def test_doctor_refuses_what_train_refuses(work, capsys, what):
    change, message, *overrides = REFUSED[what]
    change(work)
    (work / "outputs").mkdir()  # messages may have the names in the folder
    said = []
    for command in ("doctor", "train"):
        assert main([command, "--config", "job.toml", "--data.shuffle=false", *overrides]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert message in line, line
        said.append(line)
    assert said[0] == said[1]


@pytest.mark.ranks
def test_both_refuse_another_number_of_ranks(work, capsys, monkeypatch):
    """Under torchrun, before the ranks meet."""
    for name, value in (("WORLD_SIZE", "3"), ("RANK", "0"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    said = []
    for run in (lambda: main(["doctor", "--config", "job.toml"]), lambda: train_main(["--config", "job.toml"])):
        assert run() == 2
        said.append(capsys.readouterr().err.splitlines()[-1])
    assert said[0] == said[1] and "= 1 ranks, but the job has 3" in said[0]


def test_a_template_that_differs_from_the_processor_is_told(tmp_path):
    save_stranger(tmp_path / "whole", "llava")
    (tmp_path / "job.toml").write_text(JOB.format(projector="llava").replace('"whole"', f'"{tmp_path}/whole"'))
    from transformers import AutoTokenizer, LlavaProcessor, SiglipImageProcessor

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "whole")
    images = SiglipImageProcessor(size={"height": 16, "width": 16})
    options = {"patch_size": 4, "image_token": "<|image_pad|>", "vision_feature_select_strategy": "full"}
    LlavaProcessor(images, tokenizer, chat_template=TEMPLATE, **options).save_pretrained(tmp_path / "whole")
    job = config.load(tmp_path / "job.toml")
    compared = compare_processors(job)
    assert compared.theirs == "LlavaProcessor"
    (tmp_path / "other.jinja").write_text(TEMPLATE.replace("<|im_end|>", "<|im_end|>!"))
    other = config.load(tmp_path / "job.toml", [f"tokenizer.chat_template={tmp_path}/other.jinja"])
    assert compared.is_equal, compared
    assert compare_processors(other).difference.startswith("from token ")


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<|image_pad|>{% else %}{{ p['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("size", range(2, 10))
def test_each_pair_meets_once_and_no_rank_twice_in_a_round(size):
    rounds = tournament(size)
    pairs = [pair for of_round in rounds for pair in of_round]
    assert sorted(pairs) == [(low, high) for low in range(size) for high in range(low + 1, size)]
    for of_round in rounds:
        ranks = [rank for pair in of_round for rank in pair]
        assert len(ranks) == len(set(ranks))


def measured(rank: int):
    return measure_pairs(torch.device("cpu"))


@pytest.mark.ranks
def test_all_pairs_are_measured_and_the_slowest_is_named():
    of_ranks = run_ranks(measured, 3)
    assert all(of_rank == of_ranks[0] for of_rank in of_ranks)
    pairs = of_ranks[0].pair_s
    assert sorted(pairs) == [(0, 1), (0, 2), (1, 2)] and min(pairs.values()) > 0
    slowest = max(pairs, key=lambda pair: pairs[pair])
    assert f"between rank {slowest[0]} (" in of_ranks[0].lines()[0]


@pytest.mark.ranks
def test_under_torchrun_the_ranks_measure_each_other(work):
    """As docs/fine_tuning.md says, with a job of two ranks; gloo."""
    command = (*TORCHRUN, "2", "--no-python", sys.executable, "-m", "mmtrain.commands.cli", "doctor")
    words = (
        "--config",
        str(work / "job.toml"),
        "--parallelism.pipeline_parallel_degree=2",
        "--training.global_batch_size=2",
    )
    words += (f"--model.pretrained={work}/whole", f"--data.source={work}/data.jsonl")
    with Job(work, *command, *words) as job:
        assert job.end() == 0, job.output
    lines = [line for line in job.output.splitlines() if line.startswith(("ok  ", "warn"))]
    (config_line,) = (line for line in lines if line.startswith("ok    config: "))
    assert "partition" in config_line
    assert any(line.startswith("ok    launcher: rank 0 of 2, which meet at ") for line in lines)
    assert re.match(
        r"ok    ranks: 1 pairs of 2 ranks, 8 MiB each way: median [\d.]+ GB/s, slowest [\d.]+ GB/s between "
        r"rank 0 \(\S+\) and rank 1 \(\S+\)$",
        lines[-2],
    )
    assert re.match(r"ok    ranks: sum of 32 MiB over all ranks: [\d.]+ ms$", lines[-1])
    assert len(lines) == len(set(lines)), "rank 0 alone reports"
