"""A job that answers held-out questions through its own pipeline, as transformers' `generate` of the class does."""

import base64
import io
import json

import pytest
from PIL import Image

from mmtrain.config import config
from mmtrain.config.data import TokenizerConfig
from mmtrain.data.questions import Decoding
from mmtrain.data.tokenizer import load_tokenizer
from mmtrain.inference.answering import Answerer, Sampling
from tests.jobs import layout, metrics, train, world_size, write_config
from tests.ranks import run_ranks
from tests.whole_models import TEXT, VISION, whole_model

NUM_TOKENS = 6
CHANGES = [
    "training.steps=2", "validation.enable=true", "validation.steps=1", "model.encoder.config={}",
    "model.language.config={}", "metrics.enable_tensorboard=true",
]  # fmt: skip
ZBV = ["parallelism.pipeline_parallel_schedule=ZBV", "model.encoder.num_segments=2", "model.language.num_segments=2"]
ASKS = ["validation.generate=5", f"validation.generate_tokens={NUM_TOKENS}"]


def whole(tmp_path, family="qwen2_vl"):
    """Overrides of a job that begins with a whole model of random weights."""
    text = TEXT | {"vocab_size": 512, "max_position_embeddings": 512, "num_hidden_layers": 2}
    vision = VISION[family] | {"patch_size": 14, "depth": 2} | ({"window_size": 56} if family == "qwen2_5_vl" else {})
    model = whole_model(family, text, vision, tied=True)
    model.config.video_token_id = text["vocab_size"] - 1  # the tokenizer has no such token
    model.save_pretrained(tmp_path / "whole")
    load_tokenizer(TokenizerConfig()).save_pretrained(tmp_path / "whole")
    return [*CHANGES, f"model.pretrained={tmp_path}/whole"]


def answers(folder, step):
    """What a job wrote of its answers after a step."""
    return json.loads((folder / "run" / "answers" / f"step-{step}.json").read_text())["answers"]


def theirs(folder, source, overrides):
    """The answers of transformers to the questions of a job. Args: source: a run or an exported folder."""
    job = config.load(write_config(folder / "asked", overrides[-1]), overrides[:-1])
    asked = Decoding(job, dp_rank=0, dp_degree=1)._asked
    answerer, sampling = Answerer.of(source), Sampling(max_new_tokens=NUM_TOKENS)
    return [answerer.answer(question.question.record, sampling) for question in asked]


@pytest.mark.ranks
def test_one_process_answers_as_transformers_does_and_training_does_not_notice(tmp_path, charts):
    changes = [*whole(tmp_path), "checkpoint.enable=true"]
    for name, asks in (("asks", ASKS), ("does_not", [])):
        run_ranks(train, 1, write_config(tmp_path / name, charts), [*changes, *asks])
    ours = {step: answers(tmp_path / "asks", step) for step in (0, 2)}
    for step, source in ((0, tmp_path / "whole"), (2, tmp_path / "asks" / "run")):
        assert [answer["answer"] for answer in ours[step]] == theirs(tmp_path, source, [*changes, *ASKS, charts])
    assert ours[0] != ours[2]
    assert len({answer["answer"] for answer in ours[0]}) > 1 and len(ours[0]) == 5
    for key in ("loss", "grad_norm", "validation_loss"):
        assert metrics(tmp_path / "asks", key) == metrics(tmp_path / "does_not", key)
    assert metrics(tmp_path / "asks", "answers") == {0: 5, 2: 5}
    log = (tmp_path / "asks" / "run" / "log.txt").read_text()
    right = metrics(tmp_path / "asks", "answers_right")[2]
    assert f"answers: {right} of 5 exact" in log and right == sum(answer["right"] for answer in ours[2])
    assert not (tmp_path / "does_not" / "run" / "answers").exists()
    images = [Image.open(io.BytesIO(base64.b64decode(data))) for answer in ours[0] for data in answer["images"]]
    assert images and all(max(image.size) <= 160 for image in images)


@pytest.mark.ranks
def test_four_ranks_answer_as_transformers_does(tmp_path, charts):
    changes = [*whole(tmp_path), *layout(pp=2, tp=2), *ASKS]
    run_ranks(train, 4, write_config(tmp_path / "four", charts), changes)
    assert [a["answer"] for a in answers(tmp_path / "four", 0)] == theirs(
        tmp_path, tmp_path / "whole", [*changes, charts]
    )


@pytest.mark.ranks
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2_vl", layout(pp=2, cp=2)),
        ("qwen2_vl", layout(cp=2, tp=2)),
        ("qwen2_vl", layout(shard=2, tp=2)),
        ("qwen2_vl", [*layout(replicate=2, pp=2), "planner.enable=true"]),
        ("qwen2_vl", [*layout(pp=2), *ZBV]),
        ("qwen2_vl", [*layout(pp=2), "model.encoder.trainable=false", 'model.language.trainable="lora"']),
        ("qwen2_vl", [*layout(tp=2), 'parallelism.encoder_tensor_parallel="data"']),
        ("qwen2_5_vl", layout(pp=2, tp=2)),
    ],
)
def test_every_layout_answers_as_transformers_does(tmp_path, charts, family, changes):
    changes = [*whole(tmp_path, family), *changes, *ASKS, "checkpoint.enable=true"]
    degrees = [change for change in changes if "_degree=" in change]
    run_ranks(train, world_size(degrees), write_config(tmp_path / "job", charts), changes)
    for step, source in ((0, tmp_path / "whole"), (2, tmp_path / "job" / "run")):
        ours = [answer["answer"] for answer in answers(tmp_path / "job", step)]
        assert ours == theirs(tmp_path, source, [*changes, charts])
