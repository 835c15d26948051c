import io
import wave
from collections import Counter
from itertools import pairwise
from pathlib import Path

import datasets
import numpy as np
import pytest

from mmtrain.data.toy.data_set import COLOURS
from mmtrain.data.toy.sounds import (
    COUNTS,
    GRADES,
    HIGH,
    LOW,
    RATE,
    SECONDS,
    SIDE,
    Heard,
    draw,
    make_sounds,
    sound_samples,
)
from tests.data.toy.test_charts import files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sounds") / "set"
    make_sounds(out, 40, seed=7)
    return out


def test_bytes_depend_on_number_and_seed_alone(tmp_path: Path, folder: Path) -> None:
    summary = make_sounds(tmp_path / "again", 40, 7)
    assert (summary.num_train, summary.num_validation, summary.num_images) == (36, 4, 40)
    assert files(tmp_path / "again") == files(folder)
    make_sounds(tmp_path / "other", 40, 8)
    assert files(tmp_path / "other") != files(folder)
    card = (folder / "README.md").read_text()
    assert "mmtrain data sounds OUT --num-samples 40 --seed 7" in card


def test_datasets_opens_the_folder_with_its_sounds(folder: Path, tmp_path: Path) -> None:
    both = datasets.load_dataset(str(folder), cache_dir=str(tmp_path))  # its own knows a folder by its last name alone
    assert {split: len(rows) for split, rows in both.items()} == {"train": 36, "validation": 4}
    assert both["train"].features["audios"].feature == datasets.Audio(sampling_rate=RATE)
    rows = both["train"].cast_column("audios", datasets.List(datasets.Audio(decode=False)))
    for row in rows:
        text = row["messages"][0]["content"]
        assert (text.count("<audio>"), text.count("<image>")) == (1, len(row["images"]))
        with wave.open(io.BytesIO(row["audios"][0]["bytes"])) as file:  # the standard library's reader
            assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2)
            assert SECONDS[0] <= file.getnframes() / RATE <= SECONDS[1] + 1 / RATE
        assert row["grade"] in GRADES


def pitches(sound: Heard) -> list[float]:
    """The loudest frequency of each tone, hertz, first half and second half apart."""
    samples, found = sound.samples(), []
    for start, end, _, _ in sound.tones:
        middle = (start + end) / 2
        for low, high in ((start, middle), (middle, end)):
            part = samples[round(low * RATE) : round(high * RATE)]
            found.append(np.argmax(np.abs(np.fft.rfft(part, 16_000))) * RATE / 16_000)
    return found


def beeps(sound: Heard) -> int:
    """The number of loud parts."""
    loud = np.abs(sound.samples()).reshape(-1)[: len(sound.samples()) // 160 * 160].reshape(-1, 160).max(axis=1) > 0.1
    return int(loud[0]) + int((loud[1:] & ~loud[:-1]).sum())


def test_answers_are_true_of_their_sounds_and_images() -> None:
    checked: Counter[str] = Counter()
    for sample in sound_samples("train", 300, 1):
        checked[sample.question] += 1
        found = pitches(sample.sound)
        middle = (LOW[1] + HIGH[0]) / 2
        if sample.question.startswith("How many"):
            assert beeps(sample.sound) == int(sample.answer)
        elif sample.question.startswith("Is the sound"):
            assert all((pitch > middle) == (sample.answer == "high") for pitch in found)
        elif sample.question.startswith("Does"):
            assert (found[1] > found[0]) == (sample.answer == "up")
        else:
            assert sample.halves is not None
            left, right = (draw(sample.halves).getpixel((x, SIDE // 2)) for x in (2, SIDE - 2))
            if sample.grade == "both":
                wanted = right if found[0] > middle else left
            else:
                wanted = left if sample.question.endswith("left?") else right
            assert COLOURS[sample.answer] == wanted
            assert left != right
    assert len(checked) == 6
    assert min(checked.values()) > 15


def test_no_guess_is_better_than_chance() -> None:
    answers: dict[str, Counter[str]] = {}
    for sample in sound_samples("train", 6000, 0):
        answers.setdefault(sample.question, Counter())[sample.answer] += 1
    assert {len(found) for found in answers.values()} == {2, len(COUNTS), len(COLOURS)}
    for question, found in answers.items():
        assert max(found.values()) <= 1.15 * min(found.values()), (question, found)


def test_tones_lie_inside_of_their_sound_and_apart() -> None:
    for sample in sound_samples("validation", 500, 3):
        tones = sample.sound.tones
        assert tones[0][0] >= 0 and tones[-1][1] <= sample.sound.seconds
        assert all(later[0] - earlier[1] >= 0.0999 for earlier, later in pairwise(tones))
        assert np.abs(sample.sound.samples()).max() < 0.55


def test_samples_are_values() -> None:
    first, again = (list(sound_samples("train", 20, 5)) for _ in range(2))
    assert first == again
    assert first[:5] == list(sound_samples("train", 5, 5))
