"""One instruction of a pipeline rank, as a value with an exact text form.

Text: `<stage><kind><microbatch>.<sub_microbatch>[>peer|<peer]`. `3F5.1` is the forward of stage 3 for sub-microbatch 1
of microbatch 5. `3SEND_F5.1>4` sends its output to stage 4, where `4RECV_F5.1<3` receives it; `4SEND_B5.1>3` sends the
gradient of that output back. A transfer names the work that *produced the activation*, also for its gradient.
`3UNSHARD`, `3RESHARD` and `3REDUCE` name only a stage. An entry of an order may be a *braid* of several compute actions
that run together: `3F5.0&3B2.0`.
"""

import re
from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from mmtrain.errors import PlanError


class Kind(str):
    """The kind of an action: one object for each name, so that kinds are compared with `is`.

    Thirteen kinds are built in; `Kind.register` adds the instructions of a policy.
    """

    __slots__ = ()
    _known: ClassVar[dict[str, "Kind"]] = {}

    F: ClassVar["Kind"]
    """Forward."""
    B: ClassVar["Kind"]
    """Backward: gradients of input and weights together."""
    I: ClassVar["Kind"]
    """Input-gradient pass of a split backward."""
    W: ClassVar["Kind"]
    """Weight-gradient pass of a split backward, after its I."""
    SEND_F: ClassVar["Kind"]
    RECV_F: ClassVar["Kind"]
    WAIT_F: ClassVar["Kind"]
    """The activation of RECV_F has arrived before the next action starts."""
    SEND_B: ClassVar["Kind"]
    RECV_B: ClassVar["Kind"]
    WAIT_B: ClassVar["Kind"]
    """The gradient of RECV_B has arrived before the next action starts."""
    UNSHARD: ClassVar["Kind"]
    """All-gather the stage's sharded parameters."""
    RESHARD: ClassVar["Kind"]
    """Free the gathered parameters."""
    REDUCE: ClassVar["Kind"]
    """Reduce the stage's gradients over its data-parallel ranks."""

    def __new__(cls, name: str) -> "Kind":
        """The kind of that name. Raises: ValueError: unknown name."""
        if name not in cls._known:
            raise ValueError(f"{name!r} is not a kind of action")
        return cls._known[name]

    def __repr__(self) -> str:
        return f"Kind.{self}"

    @property
    def value(self) -> str:
        """The name as a plain string."""
        return str(self)

    @classmethod
    def names(cls) -> Set[str]:
        """The names of all kinds."""
        return cls._known.keys()

    @classmethod
    def register(cls, name: str) -> "Kind":
        """The kind of that name, which is added if it is new. The graph's instructions define its dependencies.

        Raises: PlanError: the name is not a word of capital letters.
        """
        if not re.fullmatch(r"[A-Z]+(_[A-Z]+)*", name):
            raise PlanError(f"kind {name!r}: the name of an instruction is a word of capital letters, such as SYNC")
        return cls._known.setdefault(name, str.__new__(cls, name))


_NAMES = "F B I W SEND_F RECV_F WAIT_F SEND_B RECV_B WAIT_B UNSHARD RESHARD REDUCE"
KINDS = tuple(map(Kind.register, _NAMES.split()))
"""The built-in kinds."""
for _kind in KINDS:
    setattr(Kind, str(_kind), _kind)
BRAID = Kind.register("BRAID")
"""Several actions that run together as one entry of an order."""

RESULT_OF = {Kind.F: Kind.F, Kind.B: Kind.B, Kind.I: Kind.B, Kind.W: Kind.W}
"""Compute kind -> the kind of its result: B and I both produce the gradient of the stage's input."""
SLOTS = {Kind.F: 0, Kind.B: 1, Kind.I: 1, Kind.W: 2}
"""Compute kind -> index of its result among the three results of a (stage, work)."""


class Needs(NamedTuple):
    """The kinds of results that an action of one kind waits for."""

    own: Kind | None = None
    """The result of the same stage and work."""
    sources: Kind | None = None
    """The result of the sources of the edges that enter (stage, work)."""
    targets: Kind | None = None
    """The result of the targets of the edges that leave it and carry a gradient back."""


NEEDS = {
    Kind.F: Needs(sources=Kind.F),
    Kind.B: Needs(own=Kind.F, targets=Kind.B),
    Kind.I: Needs(own=Kind.F, targets=Kind.B),
    Kind.W: Needs(own=Kind.B),
}
"""The dependencies of all compute actions."""

COMPUTE = frozenset(NEEDS)
BACKWARD = frozenset({Kind.B, Kind.I})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
WAITS = frozenset({Kind.WAIT_F, Kind.WAIT_B})
TRANSFERS = SENDS | RECEIVES | WAITS
STAGE_WIDE = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE})
NOT_COMPUTE = TRANSFERS | STAGE_WIDE
"""The kinds that lowering adds. All others, also registered ones, occur in the orders of a plan."""

_TEXT = re.compile(
    r"(?P<stage>\d+)(?P<kind>[A-Z_]+)(?:(?P<microbatch>\d+)\.(?P<sub>\d+))?(?:(?P<direction>[<>])(?P<peer>\d+))?"
)


@dataclass(frozen=True, slots=True)
class Action:
    """One kind of operation on one stage for one work (and, for a transfer, with one peer stage)."""

    kind: Kind
    stage: int
    microbatch: int = -1
    """The microbatch; -1 for the stage-wide kinds."""
    sub_microbatch: int = -1
    peer: int = -1
    """The other stage of a transfer; -1 for the other kinds."""

    @property
    def parts(self) -> tuple["Action", ...]:
        """The actions of an entry of an order: the parts of a braid, else the action itself."""
        return (self,)

    def __str__(self) -> str:
        text = str(self.stage) + self.kind
        if self.microbatch >= 0:
            text += f"{self.microbatch}.{self.sub_microbatch}"
        if self.peer >= 0:
            text += f"{'>' if self.kind in SENDS else '<'}{self.peer}"
        return text

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The action of a text. Raises: PlanError: the text differs from what `str` writes."""
        if "&" in text:
            return Braid.of(*map(cls.parse, text.split("&")))
        match = _TEXT.fullmatch(text)
        if match and match["kind"] in Kind.names() - {BRAID}:
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


@dataclass(frozen=True, slots=True)
class Braid(Action):
    """Several compute actions of one rank that run as one entry; its stage and work are those of the first."""

    sub_actions: tuple[Action, ...] = ()

    @classmethod
    def of(cls, *actions: Action) -> "Braid":
        """The braid of some actions. Raises: PlanError: fewer than two, or one that is no compute action."""
        if len(actions) < 2 or any(action.kind in NOT_COMPUTE or action.kind is BRAID for action in actions):
            raise PlanError(f"{'&'.join(map(str, actions))} is not a braid; join two or more compute actions")
        first = actions[0]
        return cls(BRAID, first.stage, first.microbatch, first.sub_microbatch, sub_actions=actions)

    @property
    def parts(self) -> tuple[Action, ...]:
        """The actions that run together."""
        return self.sub_actions

    def __str__(self) -> str:
        return "&".join(map(str, self.sub_actions))
