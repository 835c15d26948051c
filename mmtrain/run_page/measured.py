"""Where the time of a measured step went."""

from mmtrain.planner.forecast.breakdown import Breakdown, Part, Parts, computing
from mmtrain.run_page.runs import Line

_KEYS = ("step_time_s", "data_time_s", "plan_time_s", "program_s", "bubble")


def breakdown(line: Line) -> Breakdown | None:
    """The rank-seconds of a step on replica 0; None: the line is of an older run, or its numbers contradict each other.

    What a measurement cannot tell apart is one part. Time without actions is bubble as far as ranks waited for a module
    (`schedule/view/waits.py`); the rest of it is transfers, gathers and reductions.
    """
    values = [line.get(key) for key in _KEYS]
    if not all(isinstance(value, int | float) for value in values):
        return None
    step_s, data_s, plan_s, program_s, bubble = values
    other = line.get("bubble_other")
    idle: dict[Parts, float] = {(Part.BUBBLE, Part.TRANSFERS, Part.REDUCTIONS): bubble * program_s}
    if isinstance(other, float):
        idle = {(Part.BUBBLE,): (bubble - other) * program_s, (Part.TRANSFERS, Part.REDUCTIONS): other * program_s}
    seconds = {
        **computing((1 - bubble) * program_s, {Part.MODEL_FLOPS: line.get("peak_s")}),
        **idle,
        (Part.OPTIMIZER,): step_s - data_s - plan_s - program_s,
        (Part.INPUT,): data_s + plan_s,
    }
    return Breakdown.of(step_s, seconds) if min(seconds.values()) >= -1e-6 * step_s else None
