"""The built-in real data set: charts drawn at varied sizes, and conversations whose answers need the image.

Made once by `mmtrain data charts OUT --num-samples N --seed S`: parquet files that
`datasets.load_dataset(OUT)` opens with the splits `train` and `validation`, and a data set card.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
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
from mmtrain.data.toy.data_set import MESSAGES, DataSet, Summary, card_head, image_value

_FEATURES = {
    "messages": MESSAGES,
    "images": {"feature": {"_type": "Image"}, "_type": "List"},
    "grade": {"dtype": "string", "_type": "Value"},
}
"""Column types in the form that `datasets` keeps in a parquet file's metadata."""


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
    """The accuracy on `asked` of a guess that does not look at the images, for each grade with images.

    The guess is the most frequent answer in `known` to the same question (with as many images): the accuracy of a
    perfect model that cannot see.
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
    """The information without the images, and the answer, of each turn."""
    for turn, (question, answer) in enumerate(conversation.turns):
        yield (len(conversation.charts), conversation.turns[:turn], question), answer


def _row(conversation: Conversation) -> dict[str, Any]:
    images = [image_value(draw(chart)) for chart in conversation.charts]
    return {"messages": conversation.messages, "images": images, "grade": conversation.grade}


def _card(summary: Summary, num_samples: int, seed: int) -> str:
    known = conversations("train", summary.num_train, seed)
    accuracy = blind_accuracy(known, conversations("validation", summary.num_validation, seed))
    blind = "\n".join(f"| {grade} | {value:.0%} |" for grade, value in accuracy.items())
    return f"""{card_head("visual-question-answering", "Charts")}
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


make_charts = DataSet(
    kind="charts", samples=conversations, row=_row, features=_FEATURES, images="images", card=_card
).make
"""Writes the data set: see `DataSet.make`."""
