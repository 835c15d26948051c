"""The names of the schedules, for configs, which do not load the schedules."""

from typing import Literal

ScheduleName = Literal[
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "ZB-H1",
    "ZB-H2",
    "ZB-AutoSchedule",
    "InterleavedZeroBubble",
    "ZBV",
    "V-half",
    "V-min",
    "DualPipeV",
    "Optimus",
    "interleave",
]
"""The keys of `catalogue.CATALOGUE`, in its order."""

MEMORY_BOUNDED_SCHEDULES: tuple[ScheduleName, ...] = ("ZB-AutoSchedule", "interleave")
"""Schedules whose plans keep the memory limits of a problem; the others bound their memory by their own rule."""
