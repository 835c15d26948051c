"""Reads the files in a job's folder, leniently: the job may be running, or older than this version."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mmtrain.config.toml_sections import RUN_FILE
from mmtrain.errors import ConfigError

MOST_TIMELINES = 24
"""Timelines of one run on a page, evenly spaced."""

Line = Mapping[str, Any]
"""One line of metrics.jsonl."""


@dataclass(frozen=True, kw_only=True)
class RunContents:
    """The contents of a run's folder."""

    name: str
    """Name of the folder."""
    steps: tuple[Line, ...]
    """Metrics of each step, ascending; not empty."""
    validations: tuple[Line, ...]
    config_text: str
    """The resolved config; empty if there is none."""
    starts: tuple[Mapping[str, Any], ...]
    """The environment of each start of the job; empty for an older run."""
    timelines: tuple[Mapping[str, Any], ...]
    answers: Mapping[str, Any]
    """The answers of the last validation that asked questions, `step` and `answers`; empty if none has."""
    samples: Mapping[str, Any] = field(default_factory=dict)
    """The sheet of clips of the last validation that sampled some, `step` and `image`, base64 of a PNG file; empty if
    none has."""
    events: tuple[Line, ...] = ()
    """Changes of the nodes of an elastic job, in the order of the file."""

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The config's sections; empty if it cannot be read."""
        try:
            return tomllib.loads(self.config_text)
        except tomllib.TOMLDecodeError:
            return {}

    def setting(self, section: str, key: str) -> Any:
        """A value of the config; None if it is absent."""
        return self.config.get(section, {}).get(key)

    @property
    def last_step(self) -> int:
        """The last step that has metrics."""
        return int(self.steps[-1]["step"])

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Names of all metrics of the steps, in the order of the file."""
        keys = (key for line in self.steps for key, value in line.items() if isinstance(value, int | float))
        return tuple(dict.fromkeys(keys))

    @property
    def modules(self) -> tuple[str, ...]:
        """Modality modules in the metrics, in the order of the model."""
        parts = (key.removeprefix("bubble_") for key in self.keys if key.startswith("bubble_"))
        return tuple(part for part in parts if part != "other")

    def column(self, key: str) -> list[float | None]:
        """A metric of each step; None where it is not known."""
        return [value if isinstance(value := line.get(key), int | float) else None for line in self.steps]


def read_run(folder: Path) -> RunContents:
    """The run in a folder (`job.dump_folder` of its job).

    Raises: ConfigError: it is not the folder of a run, or no step has ended yet.
    """
    path = folder / "metrics.jsonl"
    if not folder.is_dir():
        raise ConfigError(f"report: {folder} is not a folder; name the job.dump_folder of a job")
    if not path.is_file():
        if (folder / RUN_FILE).is_file():
            raise ConfigError(f"report: {folder} has no metrics.jsonl yet; try again when the first step has ended")
        raise ConfigError(f"report: {folder} has no metrics.jsonl, so no job ran in it; name a job.dump_folder")
    steps: dict[int, Line] = {}
    validations: dict[int, Line] = {}
    events: list[Line] = []
    for line in map(_parsed, path.read_text(encoding="utf-8").splitlines()):
        if line is None:
            continue
        if "event" in line:
            events.append(line)
            continue
        kind = validations if "validation_loss" in line else steps
        if _generation(line) >= _generation(kind.get(line["step"], {})):
            kind[line["step"]] = line
    if not steps:
        raise ConfigError(f"report: {path} has no step yet; try again when the first one has ended")
    config_path = folder / RUN_FILE
    last = max(steps)
    return RunContents(
        name=folder.resolve().name,
        steps=tuple(steps[step] for step in sorted(steps)),
        validations=tuple(validations[step] for step in sorted(validations)),
        config_text=config_path.read_text(encoding="utf-8") if config_path.is_file() else "",
        starts=_starts(folder / "environment.json"),
        timelines=_timelines(folder / "timelines", last),
        answers=_answers(folder / "answers", last),
        samples=_samples(folder / "validation_samples", last),
        events=tuple(events),
    )


def _generation(line: Line) -> int:
    """The generation of an elastic job that wrote a line; 0: the job is not elastic."""
    number = line.get("generation")
    return number if isinstance(number, int) else 0


def _parsed(text: str) -> Line | None:
    """A line of metrics; None if it is being written, or of another kind."""
    try:
        line = json.loads(text)
    except json.JSONDecodeError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _starts(path: Path) -> tuple[Mapping[str, Any], ...]:
    record = _read_json(path)
    starts = record.get("starts") if isinstance(record, dict) else None
    return tuple(start for start in starts if isinstance(start, dict)) if isinstance(starts, list) else ()


def _timelines(folder: Path, last_step: int) -> tuple[Mapping[str, Any], ...]:
    numbered = _by_step(folder, last_step)
    steps = sorted(numbered)
    timelines = (_read_json(numbered[step]) for step in evenly(steps, MOST_TIMELINES))
    return tuple(timeline for timeline in timelines if _fits(timeline, _TIMELINE) and _has_stages(timeline))


def _has_stages(timeline: Mapping[str, Any]) -> bool:
    """Whether all actions of a timeline are of stages that it has."""
    return all(0 <= row[0] < len(timeline["stages"]) for row in timeline["actions"])


def _answers(folder: Path, last_step: int) -> Mapping[str, Any]:
    """The newest answers up to the last step."""
    numbered = _by_step(folder, last_step)
    record = _read_json(numbered[max(numbered)]) if numbered else None
    if record is None or not _fits(record, {"step": int, "answers": list}):
        return {}
    return {"step": record["step"], "answers": [row for row in record["answers"] if _fits(row, _ANSWER)]}


def _samples(folder: Path, last_step: int) -> Mapping[str, Any]:
    """The newest sheet of clips up to the last step."""
    numbered = _by_step(folder, last_step)
    record = _read_json(numbered[max(numbered)]) if numbered else None
    if record is None or not _fits(record, {"step": int, "image": str}):
        return {}
    return {"step": record["step"], "image": record["image"]}


_NUMBER = int | float
_ANSWER = {"question": str, "reference": str, "answer": str, "right": bool, "images": [str]}
_TIMELINE = {
    "step": int,
    "modules": [str],
    "num_ranks": int,
    "stages": [(int, int, int, int)],
    "actions": [(int, str, int, int, *[_NUMBER] * 6)],
    "waits": {"measured": [(int, _NUMBER, _NUMBER)], "planned": [(int, _NUMBER, _NUMBER)]},
}
"""What the page reads of these files: keys with their values, lists of equal items, and rows by their first items."""


def _fits(value: Any, form: Any) -> bool:
    """Whether a value of JSON has a form: whoever wrote it, the page must be able to show it."""
    if isinstance(form, dict):
        return isinstance(value, dict) and all(key in value and _fits(value[key], form[key]) for key in form)
    if isinstance(form, list):
        return isinstance(value, list) and all(_fits(item, form[0]) for item in value)
    if isinstance(form, tuple):
        return isinstance(value, list) and len(value) >= len(form) and all(map(_fits, value, form))
    return isinstance(value, form)


def _by_step(folder: Path, last_step: int) -> dict[int, Path]:
    """Step -> its file in a folder, up to the last step; later ones are of an earlier start and will be overwritten."""
    numbered = {}
    for path in folder.glob("step-*.json"):
        number = path.stem.removeprefix("step-")
        if number.isdecimal() and int(number) <= last_step:
            numbered[int(number)] = path
    return numbered


def evenly(items: Sequence[int], most: int) -> list[int]:
    """At most `most` of the items, evenly spaced, with the first and the last one."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
