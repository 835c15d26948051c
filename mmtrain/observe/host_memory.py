"""Settings of the C library's allocator for training on a CPU."""

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt(3), as in its malloc.h."""
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
"""Maximum that 64-bit glibc accepts."""


def keep_freed_memory() -> bool:
    """Makes the C library keep the memory of freed tensors for the next ones. Returns whether it accepted the setting.

    glibc returns freed memory to the kernel as soon as 64 MiB or more of it are at the end of the heap. A step frees
    its activations and the next one allocates them again; each page then costs a fault and is cleared: 2 to 4 % of the
    step time of a small model where works have many images (benchmarks/host_memory.py). The process stays as large as
    its largest step.

    MALLOC_* or GLIBC_TUNABLES of the user take precedence; other C libraries are left unchanged.
    """
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Either call disables glibc's dynamic adjustment of both thresholds.
    return bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1)) and bool(mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD))
