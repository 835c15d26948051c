"""How kernels are compiled by numba, and kept on disk.

Nothing in a kernel allocates in a loop or needs the GIL, so that searches run on several threads. Indices are unsigned:
for a signed one numba checks whether it counts from the end. Each array of a tuple argument costs time to compile.
"""

import fcntl
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_FLAGS: dict[str, Any] = {
    "nogil": True,
    "no_cfunc_wrapper": True,
    "no_cpython_wrapper": True,
    "_nrt": False,  # no counting of references
    "error_model": "numpy",
}


def sources_digest(folder: Path = Path(__file__).parent) -> str:
    """SHA-256 of all kernel files, by which a kernel kept on disk is known to be current."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))).hexdigest()


_DIGEST = sources_digest()


def _kernel(*, inner: bool) -> Callable[[Any], Any]:
    """Compiles a function, and keeps the result on disk if numba finds a folder that can be written.

    numba takes a kept function as current if the file of that function is unchanged. But compiled code contains the
    functions that it calls, which may be in other files: so the digest of all kernel files replaces numba's stamp.

    Args: inner: called by kernels alone; wrappers for Python would take half of the time to compile.
    """

    def compiled(function: Any) -> Any:
        flags = {**_FLAGS, "no_cpython_wrapper": inner}
        try:
            kernel = njit(cache=True, **flags)(function)
        except RuntimeError:  # neither the folder of this file nor the user's cache folder can be written
            return njit(**flags)(function)
        kernel._cache._cache_file._source_stamp = _DIGEST
        if not inner:
            compile_or_read = kernel.compile

            def compile_alone(signature: Any) -> Any:
                with _alone(Path(kernel._cache.cache_path)):
                    return compile_or_read(signature)

            kernel.compile = compile_alone
        return kernel

    return compiled


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lets one process at a time compile what a folder keeps: ranks of one machine that start together read then what
    the first of them has compiled. Where the folder cannot have a lock, all go on."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "compiling.lock").open("a")
    except OSError:
        yield
        return
    with file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


entry, inner = _kernel(inner=False), _kernel(inner=True)
small = njit(forceinline=True, **_FLAGS)
"""Never a call: that would pass dozens of values for its arrays."""
part = njit(inline="always")
"""Compiled into the kernels that call it."""


@intrinsic
def trailing_zeros(typing: Any, bits: Any) -> Any:
    """Zeros below the lowest set bit of a 64-bit word that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate
