"""Random faults in folders of models: `mmtrain generate` answers, or refuses in one line, whatever somebody made."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests import sounds
from tests.data.sound_files import wav
from tests.faults.mutations import NUMBERS, OTHERS, TEXTS, Outcome, damaged, mutated, report, run_all
from tests.strangers import CONFIG, IMAGES, KINDS, TOKENIZER, TOKENS, save_stranger

NUM_FOLDERS = 60
"""Of each kind of model."""
JSON = (CONFIG, TOKENIZER, TOKENS, IMAGES, "model.safetensors.index.json")
TEMPLATES = [
    "", "{{ messages }}", "{{ messages[0]['content'] }}", "{{ 'a' * 100000000 }}{{ messages[0]['content'] }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "{{ raise_exception('no') }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ messages[0].content | list }}", "{% include 'x' %}",
    "{{ namespace.__init__.__globals__ }}", "{{ '%999999999d' % 1 }}", "\x1b[2J{{ messages[0]['content'] }}",
]  # fmt: skip
POOL: list[Any] = [
    *NUMBERS, *TEXTS, *OTHERS, None, "../outside.safetensors", "stranger/kernel", "qwen2", "gelu", "float16", "model",
    {"type": "Replace", "pattern": {"Regex": ""}, "content": "aa"}, {"type": "Sequence", "normalizers": []},
]  # fmt: skip


def index_of(folder: Path) -> None:
    """An index of the only file of weights."""
    raw = (folder / "model.safetensors").read_bytes()
    names = [name for name in json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")]) if name != "__metadata__"]
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def header_changed(raw: bytes, rng: random.Random) -> bytes:
    """A file of weights with a fault in its header, whose length fits."""
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.dumps(mutated(json.loads(raw[8:end]), rng, POOL)).encode("utf-8", "surrogatepass")
    return len(header).to_bytes(8, "little") + header + raw[end:]


def change(folder: Path, rng: random.Random) -> None:
    """One fault in a folder."""
    kind = rng.randrange(10)
    path = folder / rng.choice([name for name in JSON if (folder / name).exists()])
    if kind < 6:
        value = mutated(json.loads(path.read_text()), rng, POOL)
        path.write_bytes(json.dumps(value).encode("utf-8", "surrogatepass"))
    elif kind == 6:
        path = rng.choice(sorted(folder.iterdir()))
        path.write_bytes(damaged(path.read_bytes(), rng))
    elif kind == 7:
        path = folder / "model.safetensors"
        path.write_bytes(header_changed(path.read_bytes(), rng))
    elif kind == 8:
        (folder / "chat_template.jinja").write_text(rng.choice(TEMPLATES))
    else:
        rng.choice(sorted(folder.iterdir())).unlink()


def refused_or_answered(outcome: Outcome) -> str:
    """What is wrong with how a command ended; empty: nothing."""
    lines = [line for line in outcome.err.splitlines() if line.strip()]
    if outcome.died or outcome.status not in (0, 2):
        return outcome.died or f"exit status {outcome.status}"
    if outcome.status == 2 and not (len(lines) == 1 and lines[0].startswith("error: ") and len(lines[0]) < 4000):
        return f"not one line of an error: {outcome.err[:1000]}"
    if outcome.status == 0 and lines:
        return f"words on standard error: {lines[:5]}"
    steering = {letter for letter in outcome.out + outcome.err if not letter.isprintable() and letter not in "\n\t"}
    steering = {letter for letter in steering if ord(letter) < 160}
    return f"control characters {sorted(steering)}" if steering else ""


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_folders(tmp_path: Path, kind: str) -> None:
    rng = random.Random(KINDS.index(kind))
    whole, folders = save_stranger(tmp_path / "whole", kind), []
    index_of(whole)
    shutil.copyfile(whole / "model.safetensors", tmp_path / "outside.safetensors")
    for number in range(NUM_FOLDERS):
        folder = Path(shutil.copytree(whole, tmp_path / f"{number}"))
        if rng.randrange(3):
            (folder / "model.safetensors.index.json").unlink()
        change(folder, rng)
        folders.append(folder)
    Image.new("RGB", (60, 40), (200, 30, 90)).save(tmp_path / "a.png")
    (tmp_path / "a.wav").write_bytes(wav(sounds.wave(0.4, 1)))
    asked = ["--audio", str(tmp_path / "a.wav")] if kind == "qwen2_audio" else ["--image", str(tmp_path / "a.png")]
    words = ["--prompt", "what is that?", "--max-new-tokens", "2", *asked]
    outcomes = run_all([["generate", str(folder), *words] for folder in folders], tmp_path)
    faults = [(outcome, fault) for outcome in outcomes if (fault := refused_or_answered(outcome))]
    print(report(outcomes, faults))
    assert not faults, report(outcomes, faults)
    assert 0.1 < sum(outcome.status == 0 for outcome in outcomes) / NUM_FOLDERS < 0.9, "these mutations do not try both"
