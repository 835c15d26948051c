"""The built-in data set of sounds: beeps and sweeps, some with an image, and questions that need one of them, or both.

Made once by `mmtrain data sounds OUT --num-samples N --seed S`: parquet files that `datasets.load_dataset(OUT)` opens
with the splits `train` and `validation`, and a data set card.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from mmtrain.data.sounds import wav_bytes
from mmtrain.data.toy.data_set import COLOURS, MESSAGES, DataSet, Summary, card_head, image_value
from mmtrain.data.toy.decks import Decks

RATE = 16_000
"""Samples a second."""
SECONDS = (1.0, 1.5)
"""Shortest and longest sound."""
COUNTS = (1, 2, 3, 4)
"""Beeps of a sound."""
LOW, HIGH = (200.0, 400.0), (1200.0, 2400.0)
"""Hertz of low and high tones."""
GRADES = ("sound", "image", "both")
"""What an answer needs."""
SIDE = 56
"""Pixels along a side of an image."""

_BEEP_S, _GAP_S, _FADE_S = 0.12, 0.1, 0.01
_LOUDNESS, _NOISE = 0.5, 0.01
_MANY_HERTZ = 3.0
"""Ratio of the ends of a sweep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A sound as a value."""

    tones: tuple[tuple[float, float, float, float], ...]
    """The start and end in seconds and the first and last hertz of each tone; tones are apart from each other."""
    seconds: float
    seed: int
    """The seed of its quiet noise."""

    def samples(self) -> np.ndarray:
        """[samples] float64: tones that fade in and out, and noise."""
        count = round(self.seconds * RATE)
        times = np.arange(count) / RATE
        wave = _NOISE * np.random.default_rng(self.seed).uniform(-1, 1, count)
        for start, end, first, last in self.tones:
            inside = np.clip(times - start, 0, end - start)
            cycles = inside * (first + (last - first) * inside / (2 * (end - start)))
            fade = np.clip(np.minimum(times - start, end - times) / _FADE_S, 0, 1)
            wave += _LOUDNESS * fade * np.sin(2 * np.pi * cycles)
        return wave


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A sound, perhaps an image of two colours, and a question about them."""

    sound: Heard
    halves: tuple[str, str] | None
    """Colours of the left and the right half of the image; None: there is none."""
    question: str
    answer: str
    grade: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat messages, with placeholders before the question."""
        marks = "<audio>" + "<image>" * (self.halves is not None)
        return [{"role": "user", "content": f"{marks}\n{self.question}"}, {"role": "assistant", "content": self.answer}]


class SampleMaker:
    """Makes samples in order; the sequence depends only on the seed text. Every answer of a question is equally
    frequent."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._draw = Decks(self._random).draw

    def __call__(self) -> Sample:
        """The next sample."""
        makers = (self._count, self._pitch, self._trend, self._colour, self._side, self._side)
        return self._draw("question", makers)()

    def _heard(self, *tones: tuple[float, float, float]) -> Heard:
        """A sound of tones (seconds, first and last hertz) with gaps of random length between them."""
        seconds = self._random.uniform(*SECONDS)
        room = seconds - sum(tone[0] for tone in tones) - _GAP_S * (len(tones) - 1)
        cuts = sorted(self._random.uniform(0, room) for _ in tones)
        placed, before = [], 0.0
        for index, (cut, (length, first, last)) in enumerate(zip(cuts, tones, strict=True)):
            start = cut + before + index * _GAP_S
            placed.append((start, start + length, first, last))
            before += length
        return Heard(tones=tuple(placed), seconds=seconds, seed=self._random.randrange(2**31))

    def _beep(self, hertz: tuple[float, float]) -> tuple[float, float, float]:
        pitch = self._random.uniform(*hertz)
        return _BEEP_S, pitch, pitch

    def _any_sound(self) -> Heard:
        return self._heard(*(self._beep((LOW[0], HIGH[1])) for _ in range(self._random.choice(COUNTS))))

    def _halves(self, index: int, colour: str) -> tuple[str, str]:
        """An image whose half of an index has a colour, and the other half another one."""
        other = self._random.choice([name for name in COLOURS if name != colour])
        return (colour, other) if index == 0 else (other, colour)

    def _count(self) -> Sample:
        count, pitch = self._draw("count", COUNTS), self._random.choice((LOW, HIGH))
        sound = self._heard(*(self._beep(pitch) for _ in range(count)))
        return self._of_sound(sound, "How many beeps are there?", str(count))

    def _pitch(self) -> Sample:
        answer = self._draw("pitch", ("low", "high"))
        tones = [self._beep(LOW if answer == "low" else HIGH) for _ in range(self._random.choice(COUNTS))]
        return self._of_sound(self._heard(*tones), "Is the sound high or low?", answer)

    def _trend(self) -> Sample:
        answer = self._draw("trend", ("up", "down"))
        low = self._random.uniform(LOW[0], HIGH[1] / _MANY_HERTZ)
        ends = (low, low * _MANY_HERTZ) if answer == "up" else (low * _MANY_HERTZ, low)
        sound = self._heard((self._random.uniform(0.5, 0.9), *ends))
        return self._of_sound(sound, "Does the sound go up or down?", answer)

    def _of_sound(self, sound: Heard, question: str, answer: str) -> Sample:
        return Sample(sound=sound, halves=None, question=question, answer=answer, grade="sound")

    def _colour(self) -> Sample:
        index = self._draw("half", (0, 1))
        answer = self._draw(f"colour {index}", tuple(COLOURS))
        question = f"What colour is on the {('left', 'right')[index]}?"
        halves = self._halves(index, answer)
        return Sample(sound=self._any_sound(), halves=halves, question=question, answer=answer, grade="image")

    def _side(self) -> Sample:
        index = self._draw("pitch of side", (0, 1))
        answer = self._draw(f"colour of side {index}", tuple(COLOURS))
        tones = [self._beep((LOW, HIGH)[index]) for _ in range(self._random.choice(COUNTS))]
        question = "Low is left, high is right. What colour is meant?"
        halves = self._halves(index, answer)
        return Sample(sound=self._heard(*tones), halves=halves, question=question, answer=answer, grade="both")


def sound_samples(split: str, count: int, seed: int) -> Iterator[Sample]:
    """The samples of a split, as values; the first ones of a longer split are the same."""
    make = SampleMaker(f"sounds/{split}/{seed}")
    for _ in range(count):
        yield make()


def draw(halves: tuple[str, str]) -> Image.Image:
    """The image of two colours, side by side."""
    image = Image.new("RGB", (SIDE, SIDE), COLOURS[halves[0]])
    image.paste(COLOURS[halves[1]], (SIDE // 2, 0, SIDE, SIDE))
    return image


_FEATURES = {
    "messages": MESSAGES,
    "images": {"feature": {"_type": "Image"}, "_type": "List"},
    "audios": {"feature": {"sampling_rate": RATE, "_type": "Audio"}, "_type": "List"},
    "grade": {"dtype": "string", "_type": "Value"},
}
"""Column types in the form that `datasets` keeps in a parquet file's metadata."""


def _row(sample: Sample) -> dict[str, Any]:
    return {
        "messages": sample.messages,
        "images": [] if sample.halves is None else [image_value(draw(sample.halves))],
        "audios": [{"bytes": wav_bytes(sample.sound.samples(), RATE), "path": None}],
        "grade": sample.grade,
    }


def _card(summary: Summary, num_samples: int, seed: int) -> str:
    return f"""{card_head("audio-text-to-text", "Sounds")}
Beeps and sweeps, some with an image of two colours, and a question about them, made by
`mmtrain data sounds OUT --num-samples {num_samples} --seed {seed}`. The same command makes the same data.

{summary.num_train} training and {summary.num_validation} validation samples, {summary.num_images} sounds,
{summary.num_bytes / 1e6:.1f} MB.

| column | content |
|---|---|
| `messages` | one question and its answer of one word; `<audio>` and `<image>` stand for the sound and the image |
| `audios` | one sound of {SECONDS[0]:g} to {SECONDS[1]:g} s: WAV, {RATE} samples a second |
| `images` | one image of {SIDE} x {SIDE} pixels, or none |
| `grade` | what the answer needs: {", ".join(f"`{grade}`" for grade in GRADES)} |

`sound` asks for the number of beeps ({", ".join(map(str, COUNTS))}), for high or low, for up or down; `image` for the
colour of the left or the right half, with a sound that says nothing about it; in `both` the sound says which half is
meant. Every answer of a question is equally frequent: without the sound, guesses are right in 42 % of `sound` and in
half of `both`; without the image, in one of {len(COLOURS)} of `image` and `both`.
"""


make_sounds = DataSet(
    kind="sounds", samples=sound_samples, row=_row, features=_FEATURES, images="audios", card=_card
).make
"""Writes the data set: see `DataSet.make`."""
