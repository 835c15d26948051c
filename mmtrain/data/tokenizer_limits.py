"""Limits of what a tokenizer from elsewhere may do: its chat template ends in time, and a failure of its library is an
error of ours."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mmtrain.errors import ConfigError, DataError, MMTrainError, one_line, shown

TEMPLATE_S = 10.0
"""Seconds of processor time in which a chat template must end: those in use take about a thousandth of one."""


def limited(tokenizer: Any) -> Any:
    """The tokenizer, whose templates and library are limited wherever they are called."""
    own = type(tokenizer)
    kind = type(own.__name__, (_Limited, own), {"__module__": own.__module__})  # the name is saved with the tokenizer
    object.__setattr__(tokenizer, "__class__", kind)
    return tokenizer


class _Limited:
    """Comes before the class of a tokenizer."""

    def apply_chat_template(self, *args: Any, **options: Any) -> Any:
        """Renders as the class does. Raises: ConfigError: the template does not end in time."""
        with time_limit(f"the chat template of {self.name_or_path!r}"):  # type: ignore[attr-defined]
            return super().apply_chat_template(*args, **options)  # type: ignore[misc]

    def __call__(self, text: Any, *args: Any, **options: Any) -> Any:
        """Tokenizes as the class does. Raises: DataError: the library gives up on the text."""
        with _converted(text):
            return super().__call__(text, *args, **options)  # type: ignore[misc]

    def decode(self, tokens: Any, *args: Any, **options: Any) -> Any:
        """Decodes as the class does. Raises: DataError: the library gives up on the tokens."""
        with _converted(tokens):
            return super().decode(tokens, *args, **options)  # type: ignore[misc]


@contextmanager
def time_limit(what: str) -> Iterator[None]:
    """Ends what runs in the main thread of a process, after `TEMPLATE_S`; signals reach no other thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise ConfigError(
            f"{what} does not end within {TEMPLATE_S:g} s; name a file with another one in tokenizer.chat_template, or "
            "take the tokenizer from the model's own authors"
        )

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, TEMPLATE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def _converted(given: Any) -> Iterator[None]:
    """Converts errors of the library: of settings that it did not check, and a panic, which is no `Exception`, say of a
    pattern that takes exponential time."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, MMTrainError) or not (isinstance(error, Exception) or _is_panic(error)):
            raise
        raise DataError(
            f"the tokenizer fails on {shown(given)}: {type(error).__name__}: {one_line(error, 200)}; take the "
            "tokenizer from the model's own authors"
        ) from None


def _is_panic(error: BaseException) -> bool:
    return type(error).__name__ == "PanicException"  # a class that no module has by name
