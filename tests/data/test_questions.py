import dataclasses
import json

import pytest

from mmtrain.config import config
from mmtrain.config.data import DataConfig, SourceConfig
from mmtrain.data.conversation_records import CONVERSATIONS
from mmtrain.data.questions import Decoding, is_right
from mmtrain.data.sources import open_source
from mmtrain.errors import ConfigError, DataError
from mmtrain.models.batch import IGNORE_INDEX, check_batch
from tests.jobs import write_config

CHANGES = ["--validation.enable=true", "--validation.generate=5", "--validation.generate_tokens=3"]


@pytest.mark.parametrize(
    ("answer", "reference", "tolerance", "right"),
    [
        (" a bar\n", "a bar", None, True), ("a Bar", "a bar", None, False), ("4.0", "4", None, False),
        ("4.0", "4", 0.0, True), ("4.6", "4", 0.5, False), ("-3.5", " -4", 0.5, True), ("nan", "4", 1.0, False),
        ("four", "4", 1.0, False), ("many", "many", 1.0, True), ("4", "many", 1.0, False), ("", "0", 1.0, False),
    ],
)  # fmt: skip
def test_an_answer_is_right_if_it_is_equal_or_near_enough(answer, reference, tolerance, right):
    assert is_right(answer, reference, tolerance) is right


def test_a_record_names_its_tolerance(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [{"question": "q", "answer": "4"} | more for more in ({"tolerance": 0.5}, {}, {"tolerance": -1})]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_source(DataConfig(source=str(path)), "train", CONVERSATIONS)
    assert [source[index].tolerance for index in (0, 1)] == [0.5, None]
    with pytest.raises(DataError, match=r"sample 2 of .*: `tolerance` = -1; it must be a number of at least 0"):
        source[2]


def text_folder(folder, turns):
    """A folder of conversations without images. Args: turns: of each validation sample, question and answer by turn."""
    folder.mkdir(parents=True)
    for split, samples in (("train", turns[:1]), ("validation", turns)):
        lines = [
            {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(sample)]}
            for sample in samples
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def decoded(job, dp_rank=0, dp_degree=1, token=lambda decoding, document, text: 7):
    """The decoding after all its batches, and the documents of each. Args: token: the next one of each document."""
    decoding, batches = Decoding(job, dp_rank=dp_rank, dp_degree=dp_degree), []
    for batch, meta, _ in decoding:
        check_batch(batch, meta)
        documents = [document for microbatch in meta.microbatches for document in microbatch.documents]
        batches.append([d for d in documents if d.num_targets])
        assert all(m.num_tokens <= job.training.seq_len + 3 for m in meta.microbatches)
        for microbatch, counts in zip(batch.microbatches, meta.microbatches, strict=True):
            ends = [sum(counts.lengths[: i + 1]) - 1 for i, d in enumerate(counts.documents) if d.num_targets]
            assert (microbatch.labels != IGNORE_INDEX).nonzero().flatten().tolist() == ends
        decoding.append({asked.key: token(decoding, asked.key, asked.tokens) for asked in decoding._asked})
    return decoding, batches


def test_the_last_turn_of_each_sample_is_asked_and_all_are_used_if_there_are_few(tmp_path):
    folder = text_folder(tmp_path / "text", [["a?", "1"], ["b?", "2", "c?", "3"], ["d?", "4"]])
    job = config.load(write_config(tmp_path, folder), CHANGES)
    decoding, batches = decoded(job)
    assert [(a.question, a.reference) for a in decoding.answers()] == [("a?", "1"), ("c?", "3"), ("d?", "4")]
    lengths = [[document.num_tokens for document in documents] for documents in batches]
    assert len(lengths) == 3 and lengths[2] == [length + 2 for length in lengths[0]], "one token for each a pass"


def test_several_sources_are_asked_in_turn(tmp_path):
    folders = [
        text_folder(tmp_path / name, [[f"{name}{i}?", "1"] for i in range(n)]) for name, n in (("a", 2), ("b", 9))
    ]
    job = config.load(write_config(tmp_path, folders[0]), CHANGES)
    sources = [SourceConfig(source=str(folder), weight=1.0) for folder in folders]
    job = dataclasses.replace(job, data=dataclasses.replace(job.data, source="", sources=sources))
    decoding, _ = decoded(job)
    assert [answer.question for answer in decoding.answers()] == ["a0?", "b0?", "a1?", "b1?", "b2?"]


def test_an_answer_ends_at_the_stop_token_and_an_idle_replica_runs_on(tmp_path, charts):
    job = config.load(write_config(tmp_path, charts), CHANGES)

    def stops(decoding, key, tokens):  # the questions of replica 1 at once, the others at the limit
        indices = {asked.key: index for index, asked in enumerate(decoding._asked)}
        return decoding._stop if indices[key] % 2 else 7

    (decoding, first), (_, second) = (decoded(job, dp_rank, 2, stops) for dp_rank in (0, 1))
    assert [len(documents) for documents in first] == [3, 3, 3]
    assert [len(documents) for documents in second] == [2, 0, 0], "as many passes on each replica"
    assert [len(asked.tokens) for asked in decoding._asked] == [3, 1, 3, 1, 3]
    assert [answer.answer for answer in decoding.answers()][1::2] == ["", ""], "the stop token is no text"
    assert any(answer.images for answer in decoding.answers())
    assert all(image.startswith(b"\x89PNG") for answer in decoding.answers() for image in answer.images)


def test_an_image_token_that_a_model_writes_is_no_image(tmp_path, charts):
    job = config.load(write_config(tmp_path, charts), CHANGES)
    _, batches = decoded(job, token=lambda decoding, key, tokens: decoding._processor.token_ids["image"])
    assert len(batches) == 3 and any(document.images for document in batches[2])


def test_questions_that_do_not_fit_are_left_out_or_named(tmp_path):
    folder = text_folder(tmp_path / "text", [["what? " * 99, "1"], ["b?", "2"]])
    skip = [*CHANGES, '--data.too_long="skip"', "--training.seq_len=40"]
    job = config.load(write_config(tmp_path, folder), skip)
    assert [answer.question for answer in decoded(job)[0].answers()] == ["b?"]
    with pytest.raises(
        DataError, match=r"sample 0: its question has \d+ tokens, which do not fit training.seq_len = 40"
    ):
        decoded(config.load(write_config(tmp_path, folder), [*skip, '--data.too_long="raise"']))
    with pytest.raises(DataError, match=r"^validation.generate = 5, but split 'validation' of .* has no question that"):
        decoded(config.load(write_config(tmp_path, folder), [*skip, "--training.seq_len=4"]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (CHANGES[1:2], "validation.generate = 5, but validation.enable = false, so there is no validation"),
        ([*CHANGES, "--validation.generate_tokens=0"], "validation.generate_tokens = 0; it must be at least 1"),
        ([*CHANGES, "--validation.generate=-1"], "validation.generate = -1; it must be at least 0"),
    ],
)
def test_a_setting_without_effect_is_refused(tmp_path, charts, changes, message):
    with pytest.raises(ConfigError, match=message):
        config.load(write_config(tmp_path, charts), changes)


def test_a_text_to_video_job_has_no_questions(tmp_path):
    from tests.jobs import write_video_config

    with pytest.raises(ConfigError, match=r"validation.generate = 5, but a job with \[model.dit\] makes clips"):
        config.load(write_video_config(tmp_path, tmp_path), CHANGES[:2])
