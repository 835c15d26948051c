"""The C library's allocator, as training on a CPU wants it."""

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt(3), as in its malloc.h."""
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
"""Of 64-bit glibc; above it mallopt refuses."""


def keep_freed_memory() -> bool:
    """Lets this process keep the memory of freed tensors for the next ones. Returns whether the allocator took it.

    glibc hands freed memory back to the kernel as soon as 64 MiB or more of it are at the end of the heap. A step frees
    its activations and asks for them again in the next, and each page then costs a fault and is cleared: 2 to 4 % of
    the steps of a small model where works have many images (benchmarks/host_memory.py). The process stays as large as
    its largest step.

    Who sets MALLOC_* or GLIBC_TUNABLES decides himself; other C libraries are left as they are.
    """
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Either call switches glibc's own adapting of both thresholds off.
    return bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1)) and bool(mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD))
