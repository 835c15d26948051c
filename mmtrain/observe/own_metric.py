"""The numbers of the answers of a validation: how many are exact, and a metric of the user's own.

The metric's file (`validation.metric`) is a program, which runs on rank 0 of a job, when the first answers are there.
"""

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from mmtrain.config.figures import LOWEST, metric_file
from mmtrain.data.questions import Answer
from mmtrain.errors import ConfigError, shown
from mmtrain.observe.answers import num_right
from mmtrain.schedule.recipe.program import compiled, function_of, guarded, run_program

MOST_BYTES = 2**22
"""Largest file of a metric."""
_FORM = "(answers, references)"


def check_metric(metric: str) -> None:
    """Refuses a `validation.metric` that is not there, without running it. Args: metric: empty: there is none.

    Raises: ConfigError: its file cannot be read, is no Python file, or does not define the function at its top level.
    """
    if not metric:
        return
    path, function = metric_file(metric)
    text = _read(path)
    compiled(path, text)
    names: dict[str, bool] = {}
    for node in ast.parse(text.removeprefix("\ufeff")).body:
        if isinstance(node, ast.FunctionDef):
            names[node.name] = True
        elif not isinstance(node, ast.Expr):  # an import, an assignment, an `if`: what it defines shows when it runs
            inner = ast.walk(node)
            names |= {name: False for part in inner for name in _defined(part)}
    if function not in names:
        known = [name for name, is_function in names.items() if is_function and not name.startswith("_")]
        raise ConfigError(
            f"validation.metric: {path} has no function {function!r}; define `def {function}{_FORM}`"
            + (f", or name one of {', '.join(known)}" if known else "")
        )


def _defined(node: ast.AST) -> list[str]:
    """Names that a part of a statement may define."""
    if isinstance(node, ast.alias):
        return [node.asname or node.name]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    return [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else []


def answer_numbers(answers: Sequence[Answer], metric: str) -> dict[str, float]:
    """The part of the answers that are exact, and the numbers of `validation.metric` by name.

    Args: metric: empty: there is none.
    Raises: ConfigError: the metric cannot be read, raises, or returns no number; with its file, function and sample.
    """
    numbers = {"exact_match": num_right(answers) / len(answers)}
    if not metric:
        return numbers
    path, function = metric_file(metric)
    result = _scored(path, function, _function(path, _read(path), function), answers)
    table = result if isinstance(result, Mapping) else {function: result}
    where = f"validation.metric: {path}, {function}"
    if not table:
        raise ConfigError(f"{where} returned no number: an empty table; return a number under a name")
    for name, value in table.items():
        if not isinstance(name, str) or not name or name in LOWEST:
            raise ConfigError(
                f"{where} returned a number named {shown(name)}; its names are texts other than {', '.join(LOWEST)}"
            )
        numbers[name] = _mean(where if len(table) == 1 else f"{where}, {shown(name)}", value, answers)
    return numbers


@lru_cache(maxsize=1)
def _function(path: str, text: str, function: str) -> Callable[..., Any]:
    """A function of a file, which runs once: it may load a model."""
    return function_of(path, run_program(path, text, "mmtrain_metric"), function, _FORM)


def _read(path: str) -> str:
    try:
        if Path(path).stat().st_size > MOST_BYTES:
            raise ConfigError(f"validation.metric: {path} has over {MOST_BYTES:,} bytes; name a file with a function")
        return Path(path).read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"validation.metric: {path} cannot be read: {error.strerror}; name a file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"validation.metric: {path} is no text in UTF-8; name a Python file") from None


def _scored(path: str, function: str, score: Callable[..., Any], answers: Sequence[Answer]) -> Any:
    """What the function returns. Raises: ConfigError: it raises; with the first sample for which it does alone."""

    def of(some: Sequence[Answer]) -> Any:
        texts, references = [one.answer for one in some], [one.reference for one in some]
        return guarded(path, lambda: score(texts, references))

    try:
        return of(answers)
    except ConfigError as error:
        raise ConfigError(
            f"validation.metric: {error} (in {function}, {_failing(of, answers)}); correct it, or remove the metric"
        ) from None


def _failing(of: Callable[[Sequence[Answer]], Any], answers: Sequence[Answer]) -> str:
    """The first sample for which the function raises alone."""
    for one in answers:
        try:
            of([one])
        except ConfigError:
            return f"{one.sample}: answer {shown(one.answer)}, reference {shown(one.reference)}"
    return f"of all {len(answers)} answers together, of none alone"


def _mean(where: str, value: Any, answers: Sequence[Answer]) -> float:
    """A number, or the mean of one for each answer. Raises: ConfigError: it is neither."""
    number = _number(value)
    if number is not None:
        return number
    if isinstance(value, str) or not hasattr(value, "__len__") or not hasattr(value, "__getitem__"):
        raise ConfigError(f"{where} returned no number: {shown(value)}; return a finite one, or one for each answer")
    if len(value) != len(answers):
        raise ConfigError(f"{where} returned {len(value)} numbers for {len(answers)} answers; return one for each")
    each = [_number(one) for one in value]
    for one, of_one, answer in zip(value, each, answers, strict=True):
        if of_one is None:
            raise ConfigError(
                f"{where} returned no number for {answer.sample}: {shown(one)}, of answer {shown(answer.answer)} and "
                f"reference {shown(answer.reference)}; return a finite one"
            )
    return math.fsum(one for one in each if one is not None) / len(each)


def _number(value: Any) -> float | None:
    """A finite number of any library as a float; None: it is none."""
    dimensions = getattr(value, "ndim", None)
    if isinstance(value, str | bytes) or dimensions or not hasattr(value, "__float__"):
        return None
    number = float(value)
    return number if math.isfinite(number) else None
