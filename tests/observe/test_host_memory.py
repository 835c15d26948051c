"""Freed memory is kept, by page faults that are counted in processes of their own."""

import os
import platform
import subprocess
import sys

PROGRAM = """
import resource, torch
from mmtrain.observe.host_memory import keep_freed_memory
print(keep_freed_memory())
for round in range(7):
    if round == 3:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(2**21) for _ in range(30)]
    del held
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
GLIBC = platform.libc_ver()[0] == "glibc"
"""Other C libraries have another allocator, which is left alone."""
PAGES = 4 * 30 * 2048
"""Of four rounds over 30 tensors of 8 MiB."""


def run(**environment: str) -> tuple[bool, int]:
    """(whether the allocator took it, page faults of four rounds)"""
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=plain | environment, capture_output=True, text=True, check=True
    )
    taken, faults = done.stdout.split()
    return taken == "True", int(faults)


def test_freed_memory_is_kept() -> None:
    taken, faults = run()
    assert taken == GLIBC
    assert faults < PAGES / 10 or not GLIBC


def test_who_sets_the_allocator_decides() -> None:
    taken, faults = run(MALLOC_MMAP_THRESHOLD_="131072")
    assert not taken
    assert faults > PAGES * 0.9 or not GLIBC
