"""Answers to held-out questions as the user sees them: lines of the log, a table, the file for the page."""

import html
import json
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import shorten

from mmtrain.data.questions import Answer
from mmtrain.launch.atomic_files import write_whole

_NUM_LOGGED = 2
"""Answers in the log."""


def log_lines(answers: Sequence[Answer]) -> list[str]:
    """How many answers are right, and the first ones, of those about images before others."""
    lines = [f"answers: {num_right(answers)} of {len(answers)} exact"]
    for shown in sorted(answers, key=lambda answer: not answer.images)[:_NUM_LOGGED]:
        question, answer, reference = map(_short, (shown.question, shown.answer, shown.reference))
        lines.append(f"  {question} -> {answer or '(nothing)'} ({'right' if shown.right else f'wrong: {reference}'})")
    return lines


def markdown(answers: Sequence[Answer]) -> str:
    """A table in Markdown."""
    rows = ["| question | answer | reference | right |", "|---|---|---|---|"]
    for shown in answers:
        cells = (shown.question, shown.answer, shown.reference, "yes" if shown.right else "no")
        rows.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(rows)


def num_right(answers: Sequence[Answer]) -> int:
    """How many of them are right."""
    return sum(answer.right for answer in answers)


def write_answers(path: Path, step: int, answers: Sequence[Answer]) -> None:
    """Writes them as JSON, from which `mmtrain report` shows them: `answers`, a list of the fields of `Answer`, whose
    images are base64 of PNG files."""
    rows = [asdict(answer) | {"images": [b64encode(image).decode() for image in answer.images]} for answer in answers]
    write_whole(path, json.dumps({"step": step, "answers": rows}, ensure_ascii=False))


def _short(text: str) -> str:
    """The start of a text on one line; what a model writes may have any characters."""
    return shorten("".join(c if c.isprintable() else " " for c in text), 80)


def _cell(text: str) -> str:
    """Text for a table in Markdown, which shows it as it is."""
    return " ".join(html.escape(text).replace("|", "&#124;").split())
