"""A metric of the user's own: what it may return, when it runs, and how its mistakes are said."""

import pytest

from mmtrain.data.questions import Answer
from mmtrain.errors import ConfigError
from mmtrain.observe.own_metric import answer_numbers, check_metric
from tests.guides import File, steps

ANSWERS = [
    Answer(
        question="q?", reference=reference, answer=answer, right=answer == reference, images=(), sample=f"sample {i}"
    )
    for i, (answer, reference) in enumerate([("4", "4"), ("five", "5"), ("", "seven")])
]


def numbers(tmp_path, body: str, answers=ANSWERS) -> dict[str, float]:
    """What the metric of a file says, whose function `score` has this body."""
    path = tmp_path / "scores.py"
    path.write_text(f"import numpy as np, torch\ndef score(answers, references):\n    {body}\n")
    check_metric(f"{path}:score")
    return answer_numbers(answers, f"{path}:score")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return 0.5", {"score": 0.5}),
        ("return len(answers) == 3", {"score": 1.0}),
        ("return np.float32(2)", {"score": 2.0}),
        ("return torch.tensor(2)", {"score": 2.0}),
        ("return [len(r) - len(a) for a, r in zip(answers, references)]", {"score": 2 / 3}),
        ("return np.array([1, 2, 6])", {"score": 3.0}),
        ("return torch.tensor([1.0, 2.0, 6.0])", {"score": 3.0}),
        ("return {'f1': 0.25, 'cer': [1, 2, 3]}", {"f1": 0.25, "cer": 2.0}),
    ],
)
def test_a_number_one_for_each_answer_or_a_table_of_them(tmp_path, body, expected):
    assert numbers(tmp_path, body) == {"exact_match": 1 / 3} | expected


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "return [int(a) for a in answers]",
            r"scores\.py:3: ValueError: .*'five'.* \(in score, sample 1: answer 'five'",
        ),
        ("return 1 / (3 - len(answers))", r"ZeroDivisionError.*\(in score, of all 3 answers together, of none alone\)"),
        ("raise SystemExit('no')", r"scores\.py:3: SystemExit: no \(in score, sample 0"),
        ("pass", r"scores\.py, score returned no number: None; return a finite one"),
        ("return float('nan')", r"score returned no number: nan"),
        ("return 'high'", r"score returned no number: 'high'"),
        ("return [1, 2]", r"score returned 2 numbers for 3 answers; return one for each"),
        ("return [1, None, 2]", r"score returned no number for sample 1: None, of answer 'five' and reference '5'"),
        ("return [1, 2, float('inf')]", r"score returned no number for sample 2: inf, of answer '' and ref"),
        ("return {}", r"score returned no number: an empty table"),
        ("return {'loss': 1}", r"score returned a number named 'loss'; its names are texts other than loss, accuracy"),
        ("return {'a': 1, 'b': 'x'}", r"score, 'b' returned no number: 'x'"),
    ],
)
def test_a_metric_that_raises_or_returns_no_number_is_named_with_its_sample(tmp_path, body, message):
    with pytest.raises(ConfigError, match=message) as caught:
        numbers(tmp_path, body)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"scores\.py cannot be read: No such file or directory; name a file"),
        ("def scores(a, r): return 1\n", r"has no function 'score'; define `def score\(answers, references\)`, or name "
                                         r"one of scores"),
        ("def score(:\n", r"scores\.py:1: not a Python file"),
        ("'''def score'''\n", r"has no function 'score'"),
    ],
)  # fmt: skip
def test_a_metric_that_is_not_there_is_refused_before_it_runs(tmp_path, text, message):
    path = tmp_path / "scores.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        check_metric(f"{path}:score")


def test_the_example_of_the_docs(tmp_path):
    (file,) = (step for step in steps("checkpoints.md") if isinstance(step, File))
    (tmp_path / file.name).write_text(file.text)
    check_metric(f"{tmp_path / file.name}:word_error")
    assert answer_numbers(ANSWERS, f"{tmp_path / file.name}:word_error")["word_error"] == 1.0


def test_looking_for_a_metric_does_not_run_it(tmp_path):
    path, mark = tmp_path / "scores.py", tmp_path / "ran"
    start = f"open({str(mark)!r}, 'w').close()\n"
    for text in ("def score(a, r): return 1", "from operator import eq as score", "score = lambda a, r: 1"):
        path.write_text(f"{start}{text}\n")
        check_metric(f"{path}:score")
    assert not mark.exists()
    answer_numbers(ANSWERS, f"{path}:score")
    assert mark.exists()
    mark.unlink()
    answer_numbers(ANSWERS, f"{path}:score")
    assert not mark.exists(), "the file runs once"
    assert answer_numbers(ANSWERS, "") == {"exact_match": 1 / 3}
