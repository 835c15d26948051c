"""The answer of tuning as text. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any

from mmtrain.config.config import value_of
from mmtrain.config.toml_sections import apply_override
from mmtrain.simulator.allocation.candidate import toml_of
from mmtrain.simulator.allocation.candidate_judge import GIB, Judged
from mmtrain.simulator.allocation.tune import Tuned
from mmtrain.simulator.study_report import aligned

_COLUMNS = ("", "iteration s", "of the job's", "MFU", "bubble", "peak GiB")
SCHEDULE = "parallelism.pipeline_parallel_schedule"


def table(tuned: Tuned) -> str:
    """A line for each candidate that was judged last, then the settings in which each differs from the job."""
    rows = [(str(number), *_cells(one, tuned)) for number, one in enumerate(tuned.rows, 1)]
    if tuned.own is not None:
        rows.append(("job", *_cells(tuned.own, tuned)))
    lines = [*aligned([_COLUMNS, *rows]), ""]
    lines += [f"{number}: {_settings(one, tuned)}" for number, one in enumerate(tuned.rows, 1)]
    if tuned.own is not None and tuned.own.problem:
        lines.append(f"the job itself does not run: {tuned.own.problem}")
    if tuned.refused:
        lines += ["", *(f"{count} refused: {why}" for why, count in tuned.refused)]
    lines += [f"note: {note}" for note in _notes(tuned)]
    return "\n".join(lines) + "\n"


def toml(tuned: Tuned, overrides: Sequence[str], *, base: str = "", recipe: str = "") -> str:
    """The best candidate as a TOML file.

    Args: overrides: of the command line, which it repeats. base: the file that it extends; empty: only the sections.
        recipe: the path of a recipe that tuning wrote; empty: its schedule stays as it is.
    """
    table_of: dict[str, Any] = {}
    for override in overrides:
        apply_override(table_of, override)
    best = tuned.best
    lines = [f"# {best.mean_s:.3f} s an iteration, at most {best.peak_bytes / GIB:.1f} GiB a rank, simulated"]
    lines += [f'extends = "{base}"', ""] if base else []
    given = {key: value_of(tuned.config, key) if key.endswith(".config") else value for key, value in _flat(table_of)}
    values = given | best.candidate.difference(tuned.config)
    values |= {SCHEDULE: recipe} if recipe else {}
    return "\n".join(lines) + "\n" + toml_of(values)


def _flat(table: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The values of nested sections by dotted key; an inline model config is one value, which a file replaces whole."""
    for key, value in table.items():
        if isinstance(value, dict) and key != "config":
            yield from _flat(value, (*path, key))
        else:
            yield ".".join((*path, key)), value


def _notes(tuned: Tuned) -> Iterator[str]:
    """What is not the same for all rows, or not the whole."""
    training, key = tuned.config.training, "training.seq_len"
    if any(key in one.candidate.difference(tuned.config) for one in tuned.rows):
        yield f"rows with another {key} read other batches, with as many tokens a step (--tokens)"
    if training.global_batch_size > tuned.effort.num_microbatches:
        yield (
            f"{tuned.effort.num_microbatches} of {training.global_batch_size} microbatches of a step are simulated, "
            "those of the replicas with most work"
        )


def _cells(one: Judged, tuned: Tuned) -> tuple[str, ...]:
    if not one.seconds:
        return ("-",) * (len(_COLUMNS) - 1)
    own = tuned.own
    ratio = f"{one.mean_s / own.mean_s:.3f}" if own is not None and own.seconds else "-"
    mfu = "-" if one.mfu is None else f"{100 * one.mfu:.1f} %"
    peak = f"{one.peak_bytes / GIB:.1f} (pp_rank {one.peak_rank})"
    return f"{one.mean_s:.3f}", ratio, mfu, f"{100 * one.bubble:.1f} %", peak


def _settings(one: Judged, tuned: Tuned) -> str:
    return one.candidate.described(tuned.config) or "the settings of the job"
