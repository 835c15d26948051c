"""Bad samples of every kind: a job that skips goes on and counts each, one that does not ends with a line naming it."""

import itertools
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mmtrain.config.config import Config, load
from mmtrain.data.loader import Loader
from mmtrain.errors import DataError
from tests.data.samples import make_config
from tests.data.sound_files import hearing
from tests.data.videos import make_video_config
from tests.faults import bad_samples
from tests.jobs import write_config

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:PIL")

ROOT = Path(__file__).parents[2]

BAD, NUM_GOOD = 2, 4
"""Where the bad sample stands in its file, and how many good ones stand around it."""

MUTATIONS = 200

ROOM: dict[str, Any] = {"seq_len": 2**16, "global_batch_size": 1}
"""So that one step holds a whole file."""


def conversation_config(source: Path, **data: Any) -> Config:
    return make_config(source, **ROOM, **data)


def sound_config(source: Path, **data: Any) -> Config:
    return hearing(make_config(source, vocab_size=450, **ROOM, **data), source.parent)


def clip_config(source: Path, **data: Any) -> Config:
    data |= {"video_frames": [4, 8], "max_total_seconds": 1e3, "max_clips": 10**4}
    return make_video_config(source, **ROOM, **data)


def latent_config(source: Path, **data: Any) -> Config:
    data |= {"video_frames": [4, 8], "max_total_seconds": 1e3, "max_clips": 10**4}
    return make_video_config(source, dit={"in_channels": 4}, **ROOM, **data)


Lines = Callable[[Path], dict[str, bytes]]
JOBS: dict[str, tuple[Lines, dict[str, Any], Callable[..., Config]]] = {
    "conversations": (bad_samples.conversations, bad_samples.GOOD, conversation_config),
    "sounds": (bad_samples.sounds, bad_samples.GOOD_SOUND, sound_config),
    "clips": (bad_samples.clips, bad_samples.GOOD_CLIP, clip_config),
    "latents": (bad_samples.latents, bad_samples.GOOD_LATENTS, latent_config),
}
"""Bad lines, a good row, and a config of each kind of data."""


FILES = {
    "conversations": ("images", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "JPEG2000", "AVIF", "PPM"]),
    "sounds": ("audio", ["WAV"]),
    "latents": ("latents", ["NPY", "NPZ"]),
}
"""Kind of data -> the column with a file, and kinds of files that it may have."""


class TookTooLong(BaseException):
    """No `Exception`, which would be taken for one of the sample's."""


@contextmanager
def bounded(seconds: int = 300, num_bytes: int = 2**31) -> Iterator[None]:
    """Fails if what is done takes longer, or needs more memory."""

    def ring(*_: object) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, ring)
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    held = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (held + num_bytes, limits[1]))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_DATA, limits)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bad")
    bad_samples.make_files(made)
    return made


def first_step(config: Config) -> tuple[list[int], int]:
    """Samples of the first step, and how many it has left out."""
    with Loader(config, num_steps=1) as loader:
        ((_, meta, _),) = loader
    samples = [part.sample for m in meta.microbatches for part in (*m.documents, *m.clips)]
    return samples, meta.num_skipped


def outcome(config: Callable[..., Config], source: Path) -> str | None:
    """What the error of the bad sample says, or None if it was used; both policies agree on it."""
    kept = [i for i in range(NUM_GOOD + 1) if i != BAD]
    with bounded():
        samples, num_skipped = first_step(config(source, on_error="skip", shuffle=False))
    if num_skipped == 0:
        assert samples == sorted([*kept, BAD])
        with bounded():
            assert first_step(config(source, shuffle=False)) == (samples, 0)
        return None
    assert (samples, num_skipped) == (kept, 1)
    with bounded(), pytest.raises(DataError) as failure:
        first_step(config(source, shuffle=False))
    return str(failure.value)


def write(source: Path, good: dict[str, Any], bad: bytes) -> Path:
    lines = [json.dumps(good).encode()] * NUM_GOOD
    source.write_bytes(b"\n".join([*lines[:BAD], bad, *lines[BAD:]]) + b"\n")
    return source


def check_all(kind: str, source: Path, good: dict[str, Any], bad: dict[str, bytes], *, usable: bool) -> None:
    """Every sample is left out and named by its error in one line. Args: usable: or used."""
    config, wrong, num_refused = JOBS[kind][2], {}, 0
    for name, line in bad.items():
        try:
            said = outcome(config, write(source, good, line))
            assert usable or said is not None, "it was used"
            if said is not None:
                num_refused += 1
                assert f"sample {BAD}" in said, said
                assert said.isprintable(), said
                assert "MemoryError" not in said, said
                assert len(said) < 700, said
                print(f"{kind}: {name}: {said}")
        except (Exception, TookTooLong) as error:
            wrong[name] = f"{type(error).__name__}: {str(error)[:300]}"
    print(f"{kind}: {len(bad)} samples, {num_refused} refused, {len(wrong)} not as they should be")
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())
    assert not usable or 0.1 < num_refused / len(bad) < 0.97, "these mutations do not try both"


@pytest.mark.nightly
@pytest.mark.parametrize("kind", JOBS)
def test_each_kind_of_bad_sample(folder: Path, kind: str) -> None:
    lines, good, _ = JOBS[kind]
    check_all(kind, folder / "train.jsonl", good, lines(folder), usable=False)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", JOBS)
def test_mutated_samples_are_used_or_named(folder: Path, kind: str) -> None:
    good = JOBS[kind][1]
    bad = {f"mutation {seed}": bad_samples.mutated(good, seed) for seed in range(MUTATIONS)}
    check_all(kind, folder / "train.jsonl", good, bad, usable=True)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", FILES)
def test_mutated_files_are_used_or_named(folder: Path, kind: str) -> None:
    good, bad, (column, kinds) = JOBS[kind][1], {}, FILES[kind]
    for seed in range(MUTATIONS):
        path = folder / "files" / f"{seed}.bin"
        path.write_bytes(bad_samples.mutated_file(kinds, seed))
        value = [str(path)] if column == "images" else str(path)
        bad[f"file {seed}"] = json.dumps({**good, column: value}).encode()
    check_all(kind, folder / "train.jsonl", good, bad, usable=True)


@pytest.mark.parametrize("kind", JOBS)
def test_all_of_them_in_one_step(folder: Path, kind: str) -> None:
    """With a good sample behind each: the good ones are there, each bad one is counted once."""
    lines, good, config = JOBS[kind]
    bad = lines(folder)
    row = json.dumps(good).encode()
    (folder / "train.jsonl").write_bytes(b"\n".join(line for pair in bad.values() for line in (pair, row)) + b"\n")
    with bounded():
        found = first_step(config(folder / "train.jsonl", on_error="skip", shuffle=False))
    assert found == (list(range(1, 2 * len(bad), 2)), len(bad))


def run_job(source: Path, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    path = write_config(folder, source)
    words = [sys.executable, "train.py", "--config", str(path), "--data.shuffle=false", "--validation.enable=false"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore::UserWarning"}
    return subprocess.run(
        [*words, *overrides], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.nightly
def test_a_job_trains_on_what_is_left(folder: Path, tmp_path: Path) -> None:
    lines, good, _ = JOBS["conversations"]
    bad, row = lines(folder), json.dumps(good).encode()
    source = folder / "train.jsonl"
    source.write_bytes(b"\n".join(line for pair in bad.values() for line in (pair, row, row)) + b"\n")
    done = run_job(source, tmp_path, "--data.on_error=skip", "--data.too_long=skip")
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    config = load(tmp_path / "job.toml", ["data.on_error='skip'", "data.too_long='skip'", "data.shuffle=false"])
    with Loader(config, num_steps=len(steps)) as loader:
        expected = list(itertools.accumulate(meta.num_skipped for _, meta, _ in loader))
    found = [step["skipped_samples"] for step in steps]
    print(f"a job of {len(steps)} steps: left out so far {found}")
    assert found == expected
    assert found[-1] > 100


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["half a line", "half a character in an answer", "bytes of a list", "a PNG cut off"])
def test_a_job_that_raises_ends_with_one_line(folder: Path, tmp_path: Path, name: str) -> None:
    lines, good, _ = JOBS["conversations"]
    row = json.dumps(good).encode()
    source = folder / "train.jsonl"
    source.write_bytes(b"\n".join([row, row, lines(folder)[name], *[row] * 99]) + b"\n")
    done = run_job(source, tmp_path)
    assert done.returncode == 2, done.stderr[-3000:]
    *_, last = done.stderr.strip().splitlines()
    assert last.startswith("error: ")
    assert f"sample {BAD}" in last
    assert "Traceback" not in done.stderr
