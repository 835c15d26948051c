"""The parts of the time of a measured step."""

from typing import Any

from mmtrain.run_page.runs import Line
from mmtrain.simulator.breakdown import Breakdown, Parts, TimePart, computing

_KEYS = ("step_time_s", "data_time_s", "plan_time_s", "makespan_s", "program_s", "bubble")


def breakdown(line: Line) -> Breakdown | None:
    """The rank-seconds of a step on replica 0; None: the line is of an older run, or its numbers contradict each other.

    What a measurement cannot tell apart is one part. From the first start of an action to the last end, ranks without
    an action wait for a module (`schedule/view/waits.py`), which is bubble, or for a message or a start: transfers.
    """
    values: list[Any] = [line.get(key) for key in _KEYS]
    if not all(isinstance(value, int | float) for value in values):
        return None
    step_s, data_s, plan_s, makespan_s, program_s, bubble = values
    busy_s, outside_s = (1 - bubble) * program_s, step_s - makespan_s
    input_s = min(data_s + plan_s, outside_s)  # another rank may have begun while rank 0 still planned
    idle: dict[Parts, float] = {(TimePart.BUBBLE, TimePart.TRANSFERS): makespan_s - busy_s}
    if isinstance(other := line.get("bubble_other"), float):
        waited_s = (bubble - other) * program_s
        idle = {(TimePart.BUBBLE,): waited_s, (TimePart.TRANSFERS,): makespan_s - busy_s - waited_s}
    seconds = {
        **computing(busy_s, {TimePart.MODEL_FLOPS: line.get("peak_s")}),
        **idle,
        (TimePart.REDUCTIONS, TimePart.OPTIMIZER): outside_s - input_s,
        (TimePart.INPUT,): input_s,
    }
    return Breakdown.of(step_s, seconds) if min(seconds.values()) >= -1e-6 * step_s else None
