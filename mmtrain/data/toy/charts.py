"""The built-in real data set: charts drawn at varied sizes, and conversations whose answers need the image.

Made once by `mmtrain data charts OUT --num-samples N --seed S`: parquet files that
`datasets.load_dataset(OUT)` opens with the splits `train` and `validation`, and a data set card.
"""

import io
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmtrain.data.toy.chart_drawing import draw
from mmtrain.data.toy.chart_questions import (
    GRADES,
    LARGEST_SIDE,
    LARGEST_SIDE_OF_MANY,
    SMALLEST_SIDE,
    Conversation,
    ConversationMaker,
)
from mmtrain.data.toy.folder import Progress, new_folder, split_sizes, told

_ROWS_OF_A_GROUP = 100
_FEATURES = {
    "messages": {
        "feature": {
            "role": {"dtype": "string", "_type": "Value"},
            "content": {"dtype": "string", "_type": "Value"},
        },
        "_type": "List",
    },
    "images": {"feature": {"_type": "Image"}, "_type": "List"},
    "grade": {"dtype": "string", "_type": "Value"},
}
"""Column types in the form that `datasets` keeps in a parquet file's metadata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartsSummary:
    """What was made."""

    num_train: int
    num_validation: int
    num_images: int
    """Images of both splits."""
    num_bytes: int
    """Size of both parquet files."""
    blind_accuracy: dict[str, float]
    """For each grade with images, the validation accuracy of a guess that knows the question alone."""


def make_charts(
    out: str | Path,
    num_samples: int,
    seed: int = 0,
    *,
    validation_fraction: float = 0.1,
    progress: Progress | None = None,
) -> ChartsSummary:
    """A summary of the data set that was written to a new folder `out`.

    Equal arguments give equal bytes on one machine. The files are written aside and the folder is
    renamed into place, so that it is either absent or whole.

    Args:
        num_samples: conversations of both splits together.
        validation_fraction: share of them in the validation split, which has its own charts.
        progress: told about every sample.
    Raises: ConfigError: num_samples too small or the fraction outside of (0, 1). DataError: `out` exists.
    """
    out = Path(out)
    splits = split_sizes("charts", num_samples, seed, validation_fraction)
    with new_folder("charts", out) as aside:
        made = num_images = num_bytes = 0
        for split, count in splits.items():
            path = aside / "data" / f"{split}-00000-of-00001.parquet"
            num_images += _write(path, told(conversations(split, count, seed), progress, made, num_samples))
            num_bytes += path.stat().st_size
            made += count
        summary = ChartsSummary(
            num_train=splits["train"],
            num_validation=splits["validation"],
            num_images=num_images,
            num_bytes=num_bytes,
            blind_accuracy=blind_accuracy(
                conversations("train", splits["train"], seed),
                conversations("validation", splits["validation"], seed),
            ),
        )
        (aside / "README.md").write_text(_card(summary, num_samples, seed), encoding="utf-8")
    return summary


def conversations(split: str, count: int, seed: int) -> Iterator[Conversation]:
    """The conversations of a split, without their drawings; the first ones of a longer split are the same."""
    make = ConversationMaker(f"charts/{split}/{seed}")
    for _ in range(count):
        yield make()


def chart_texts(count: int, seed: int) -> Iterator[str]:
    """The text of a train split in the form that a model sees, for training a tokenizer."""
    for conversation in conversations("train", count, seed):
        for message in conversation.messages:
            text = message["content"].replace("<image>", "")
            yield f"{message['role']}\n{text}\n"


def blind_accuracy(known: Iterable[Conversation], asked: Iterable[Conversation]) -> dict[str, float]:
    """For each grade with images, the accuracy on `asked` of a guess that does not look at them.

    The guess is the answer that the same question (with as many images) has most often in `known`:
    what a model reaches that has learned everything but to see.
    """
    answers: dict[object, Counter[str]] = defaultdict(Counter)
    for conversation in known:
        for key, answer in _asked(conversation):
            answers[key][answer] += 1
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for conversation in asked:
        if conversation.charts:
            for key, answer in _asked(conversation):
                guess = answers[key].most_common(1)
                right[conversation.grade] += bool(guess) and guess[0][0] == answer
                total[conversation.grade] += 1
    return {grade: right[grade] / total[grade] for grade in GRADES if total[grade]}


def _asked(conversation: Conversation) -> Iterator[tuple[object, str]]:
    """(what is known without the images, answer) of each turn."""
    for turn, (question, answer) in enumerate(conversation.turns):
        yield (len(conversation.charts), conversation.turns[:turn], question), answer


def _write(path: Path, sample: Iterable[Conversation]) -> int:
    """Number of images written to a parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema(
        [("messages", pa.list_(message)), ("images", pa.list_(image)), ("grade", pa.string())],
        metadata={"huggingface": json.dumps({"info": {"features": _FEATURES}})},
    )
    num_images = 0
    rows: list[dict[str, Any]] = []
    # Images are compressed already, and small groups keep a random read cheap.
    with pq.ParquetWriter(path, schema, compression={"messages": "snappy", "grade": "snappy"}) as writer:
        for conversation in sample:
            images = [{"bytes": _png(draw(chart)), "path": None} for chart in conversation.charts]
            rows.append({"messages": conversation.messages, "images": images, "grade": conversation.grade})
            num_images += len(images)
            if len(rows) == _ROWS_OF_A_GROUP:
                writer.write_table(pa.Table.from_pylist(rows, schema))
                rows.clear()
        if rows:
            writer.write_table(pa.Table.from_pylist(rows, schema))
    return num_images


def _png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=4)
    return buffer.getvalue()


def _card(summary: ChartsSummary, num_samples: int, seed: int) -> str:
    blind = "\n".join(f"| {grade} | {value:.0%} |" for grade, value in summary.blind_accuracy.items())
    return f"""---
license: apache-2.0
task_categories: [visual-question-answering]
pretty_name: Charts
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*.parquet
  - split: validation
    path: data/validation-*.parquet
---
# Charts

Bar, line and pie charts with short question-answer conversations, made by
`mmtrain data charts OUT --num-samples {num_samples} --seed {seed}`. The same command makes the same data.

{summary.num_train} training and {summary.num_validation} validation samples, {summary.num_images} images,
{summary.num_bytes / 1e6:.1f} MB. The validation split has its own charts.

| column | content |
|---|---|
| `messages` | list of `role`, `content`; `<image>` stands for an image; answers are one or two words |
| `images` | list of PNG images, in the order of the placeholders: none, one, or two to six |
| `grade` | `easy`, `medium`, `hard` or `text` |

`easy` asks for the kind of chart, its colour, its number of marks; `medium` for the largest mark, the trend,
a comparison, the kind or colour of one image of several; `hard` for values, differences, positions, a
image among several; `text` is arithmetic and counting without an image.

Sides are {SMALLEST_SIDE} to {LARGEST_SIDE} pixels, {SMALLEST_SIDE} to {LARGEST_SIDE_OF_MANY} where a
conversation has several images, and say nothing about the answer.
Every answer of a question is equally frequent. A guess that knows the question but not the image (the
most frequent answer in the training split) has this accuracy on the validation split:

| grade | blind accuracy |
|---|---|
{blind}
"""
