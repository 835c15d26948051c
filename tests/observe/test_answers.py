"""Answers to held-out questions in the log, tensorboard, metrics.jsonl and a file."""

import base64
import json

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mmtrain.config.sections import MetricsConfig
from mmtrain.data.questions import Answer
from mmtrain.observe.answers import log_lines, markdown, write_answers
from mmtrain.observe.log_file import setup_logging
from mmtrain.observe.metrics import Reporter
from mmtrain.observe.validation import Validation

ANSWERS = tuple(
    Answer(question=question, reference="4", answer=answer, right=answer == "4", images=images)
    for question, answer, images in [
        ("2 + 2?", "4", ()),
        ("<image>\nhow many?", "\x1b[2J 5|<b>\n", (b"png",)),
        ("<image>\nand here?", "4", (b"a", b"b")),
    ]
)


def test_the_log_has_the_first_answers_about_images_on_a_line_each():
    assert log_lines(ANSWERS) == [
        "answers: 2 of 3 exact",
        "  <image> how many? -> [2J 5|<b> (wrong: 4)",
        "  <image> and here? -> 4 (right)",
    ]
    assert log_lines(ANSWERS[:1])[1:] == ["  2 + 2? -> 4 (right)"]
    silent = Answer(question="word " * 99, reference="4", answer="", right=False, images=())
    assert log_lines([silent])[1].endswith("[...] -> (nothing) (wrong: 4)") and len(log_lines([silent])[1]) < 120


def test_tensorboard_has_the_share_and_a_table_and_metrics_the_numbers(tmp_path, capsys):
    setup_logging(0)
    reporter = Reporter(MetricsConfig(progress_bar=False), tmp_path, enabled=True, steps=10, start=0)
    reporter.validation(4, Validation(loss=2.0, accuracy={}, answers=ANSWERS))
    reporter.validation(6, Validation(loss=2.0, accuracy={}))
    reporter.close()
    board = EventAccumulator(str(tmp_path / "tb")).Reload()
    (point,) = board.Scalars("validation/exact_match")
    assert (point.step, round(point.value, 6)) == (4, 0.666667)
    (text,) = board.Tensors("validation/answers/text_summary")
    assert text.tensor_proto.string_val[0].decode() == markdown(ANSWERS)
    assert markdown(ANSWERS).splitlines()[3].endswith("5&#124;&lt;b&gt; | 4 | no |")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line.get("answers"), line.get("answers_right")) for line in lines] == [(3, 2), (None, None)]
    assert "answers: 2 of 3 exact" in capsys.readouterr().out


def test_the_file_has_all_of_each_answer(tmp_path):
    write_answers(tmp_path / "answers" / "step-4.json", 4, ANSWERS)
    read = json.loads((tmp_path / "answers" / "step-4.json").read_text())
    assert read["step"] == 4 and [card["right"] for card in read["answers"]] == [True, False, True]
    assert [base64.b64decode(image) for image in read["answers"][2]["images"]] == [b"a", b"b"]
    assert read["answers"][1]["question"] == "<image>\nhow many?"
