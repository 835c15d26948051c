"""Python files of the user's, which run with the rights of whoever names them, and errors that name their lines."""

import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from mmtrain.errors import ConfigError, MMTrainError, one_line


def run_program(path: str, text: str, name: str) -> dict[str, Any]:
    """The names that a file defines when it runs. Args: name: of its module, while it runs.

    Raises: ConfigError: it is not a Python file, or raises.
    """
    code = compiled(path, text)
    module = ModuleType(name)
    module.__file__, names = path, vars(module)
    sys.modules[name] = module  # dataclasses look for their module
    try:
        guarded(path, lambda: exec(code, names))
    finally:
        del sys.modules[name]
    return names


def compiled(path: str, text: str) -> Any:
    """The code of a file, which does not run. Raises: ConfigError: it is not a Python file."""
    try:
        return compile(text.removeprefix("\ufeff"), path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise ConfigError(f"{path}{line}: not a Python file: {one_line(error)}") from None


def function_of(path: str, names: dict[str, Any], function: str, form: str) -> Callable[..., Any]:
    """A function among the names of a file. Args: form: how it begins.

    Raises: ConfigError: there is none of this name; with those that there are.
    """
    made = names.get(function)
    if not callable(made):
        known = [key for key, value in names.items() if isinstance(value, FunctionType) and not key.startswith("_")]
        raise ConfigError(
            f"{path}: there is no function {function!r}; define `def {function}{form}`, or name another one as "
            f"{path}:FUNCTION{' (' + ', '.join(known) + ')' if known else ''}"
        )
    found: Callable[..., Any] = made
    return found


def guarded(path: str, run: Callable[[], Any]) -> Any:
    """What code of a file returns. Raises: ConfigError: it raises; with the file's line."""
    try:
        return run()
    except (Exception, SystemExit) as error:
        frame, line = error.__traceback__, 0
        while frame is not None:
            line = frame.tb_lineno if frame.tb_frame.f_code.co_filename == path else line
            frame = frame.tb_next
        what = one_line(error) if isinstance(error, MMTrainError) else f"{type(error).__name__}: {one_line(error)}"
        raise ConfigError(f"{path}{f':{line}' * bool(line)}: {what}") from None
