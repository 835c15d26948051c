"""One instruction of a pipeline rank, as a value with an exact text form.

Text: `<stage><kind><microbatch>.<sub_microbatch>[>peer|<peer]`. `3F5.1` is the forward of stage 3 for
sub-microbatch 1 of microbatch 5; `3SEND_F5.1>4` sends its output to stage 4 and `4RECV_F5.1<3`
receives it there; `4SEND_B5.1>3` sends the gradient of that output back. The work named by a
communication is always the work that *produced the activation*, also for its gradient. `3UNSHARD`,
`3RESHARD` and `3REDUCE` name a stage alone.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from mmtrain.errors import PlanError


class Kind(StrEnum):
    """What an action does."""

    F = "F"
    """Forward."""
    B = "B"
    """Backward: gradients of input and weights together."""
    I = "I"
    """Backward, input half."""
    W = "W"
    """Backward, weight half; after its I."""
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    WAIT_F = "WAIT_F"
    """The activation of RECV_F has arrived before the next action starts."""
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    WAIT_B = "WAIT_B"
    """The gradient of RECV_B has arrived before the next action starts."""
    UNSHARD = "UNSHARD"
    """All-gather the stage's sharded parameters."""
    RESHARD = "RESHARD"
    """Free the gathered parameters."""
    REDUCE = "REDUCE"
    """Reduce the stage's gradients over its data-parallel ranks."""


RESULT_OF = {Kind.F: Kind.F, Kind.B: Kind.B, Kind.I: Kind.B, Kind.W: Kind.W}
"""Compute kind -> the kind of its result: B and I both give the gradient of the stage's input."""
COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
BACKWARD = frozenset({Kind.B, Kind.I})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
WAITS = frozenset({Kind.WAIT_F, Kind.WAIT_B})
TRANSFERS = SENDS | RECEIVES | WAITS
STAGE_WIDE = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE})

_TEXT = re.compile(
    r"(?P<stage>\d+)(?P<kind>"
    + "|".join(sorted((k.value for k in Kind), key=len, reverse=True))
    + r")(?:(?P<microbatch>\d+)\.(?P<sub>\d+))?(?:(?P<direction>[<>])(?P<peer>\d+))?"
)


@dataclass(frozen=True, slots=True)
class Action:
    """One kind of operation on one stage for one work (and, for a transfer, with one peer stage)."""

    kind: Kind
    stage: int
    microbatch: int = -1
    """-1 for the stage-wide kinds."""
    sub_microbatch: int = -1
    peer: int = -1
    """The other stage of a transfer; -1 for the other kinds."""

    def __str__(self) -> str:
        text = str(self.stage) + self.kind
        if self.microbatch >= 0:
            text += f"{self.microbatch}.{self.sub_microbatch}"
        if self.peer >= 0:
            text += f"{'>' if self.kind in SENDS else '<'}{self.peer}"
        return text

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The action that `str` wrote.

        Raises: PlanError: the text is not exactly of the form that `str` writes.
        """
        match = _TEXT.fullmatch(text)
        if match:
            kind = Kind(match["kind"])
            action = cls(
                kind,
                int(match["stage"]),
                int(match["microbatch"]) if match["microbatch"] else -1,
                int(match["sub"]) if match["sub"] else -1,
                int(match["peer"]) if match["peer"] else -1,
            )
            has_work, has_peer = action.microbatch >= 0, action.peer >= 0
            whole = has_work == (kind not in STAGE_WIDE) and has_peer == (kind in TRANSFERS)
            if whole and str(action) == text:  # no leading zeros, the right arrow
                return action
        raise PlanError(f"{text!r} is not an action; write for example 3F5.1, 3SEND_F5.1>4 or 3UNSHARD")
