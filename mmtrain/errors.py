"""The errors that mmtrain raises on purpose.

Each message says where, the value, the rule and what to change. A caller that wants to tell a
user's mistake from a bug catches `MMTrainError`; everything else that escapes is a bug.
"""

import difflib
from collections.abc import Iterable, Sequence


class MMTrainError(Exception):
    """A mistake in what the user gave us, or a run that must not go on."""


class ConfigError(MMTrainError):
    """A configuration that cannot be run: unknown key, wrong type, values that do not fit together."""


class UnknownKeyError(ConfigError):
    """A key that no section has."""

    def __init__(self, message: str, key: str = "") -> None:
        """Args: message: what is wrong; what may have been meant. key: may have sections or dashes before it."""
        super().__init__(message)  # which a process that unpickles it calls again, with the message alone
        self.key = key


class MemoryLimitError(ConfigError):
    """A memory limit that leaves a pipeline rank nothing for activations."""

    def __init__(self, message: str, pp_rank: int = 0, missing_bytes: float = 0.0) -> None:
        """Args: pp_rank: the first such rank. missing_bytes: what it takes without activations beyond the limit."""
        super().__init__(message)  # which a process that unpickles it calls again, with the message alone
        self.pp_rank, self.missing_bytes = pp_rank, missing_bytes


class DataError(MMTrainError):
    """A sample, file or batch that breaks a rule: corrupt image, lost image, sample too long."""


class TooLongError(DataError):
    """A sample with so much text that it is not tokenized; `data.too_long` says what becomes of it."""


class PlanError(MMTrainError):
    """A schedule that is incomplete, doubled, deadlocked or over the memory limit."""


class RecipeError(PlanError):
    """A recipe that cannot be used: a wrong value, a function that fails, limits or traversals that get it stuck."""


class TrainingError(MMTrainError):
    """A step that must not be applied: a loss or gradient that is not finite, ranks that disagree."""


class CheckpointError(MMTrainError):
    """A checkpoint that must not be loaded: damaged, not verified where that is required, or a pickle that calls."""


class NoHolderError(MMTrainError):
    """Weights or moments that no rank of the job holds any more: only a checkpoint has them."""

    def __init__(self, message: str, names: Sequence[str] = ()) -> None:
        """Args: names: of the tensors."""
        super().__init__(message)
        self.names = tuple(names)

    @classmethod
    def of(cls, names: Sequence[str]) -> "NoHolderError":
        """The error that tells of these tensors."""
        others = f" and {len(names) - 3} more" if len(names) > 3 else ""
        listed = ", ".join(names[:3]) + others
        return cls(f"move: no rank holds all of {listed}: ranks with it were lost; go on from a checkpoint", names)


class RankLostError(TrainingError):
    """Another rank does not answer any more: it is stopped, dead or cut off, or failed for a reason of its own."""


def one_line(message: object, max_length: int = 600) -> str:
    """The text of a message or error as one line that can be printed anywhere; a longer one loses its middle."""
    line = " ".join(str(message).split()) or type(message).__name__
    printable = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return _shortened(printable, max_length)


def for_terminal(text: str) -> str:
    """A text of unknown origin as a terminal may get it: control characters are escaped, but line breaks and tabs are
    not. A terminal that obeys them hides text, or writes to the clipboard."""
    return text.translate(_CONTROLS)


_CONTROLS = {code: f"\\u{code:04x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def shown(value: object) -> str:
    """A value of the user's as it stands in a message: its `repr`, without the middle of a long one."""
    return _shortened(repr(value), 200)


def _shortened(text: str, max_length: int) -> str:
    return text if len(text) <= max_length else f"{text[: max_length // 2]} ... {text[-max_length // 2 :]}"


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """The known name that a word is most like, whatever the case of either; empty: it is like none.

    Args: cutoff: how like, from 0 to 1.
    """
    by_lower: dict[str, str] = {}
    for name in known:
        by_lower.setdefault(name.lower(), name)
    return [by_lower[near] for near in difflib.get_close_matches(word.lower(), by_lower, 1, cutoff)]
