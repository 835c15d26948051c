"""The state from which an elastic job continues: what all ranks of a new generation report, and what follows. Pure.

A state is named by its *mark*: the generation in which its last step was applied, and the step. The newest mark counts:
a node that was left out for a while may hold a step that the others have done again in another layout.

The last reduction of a step over the job proves that all gradients were complete. So if one rank has its result, every
rank that was there takes it and applies the step; if none has it, the step is done again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mmtrain.errors import TrainingError

Mark = tuple[int, int]
"""The generation that applied the last step, and the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What a rank reports to the others of its generation."""

    node: str
    mark: Mark | None = None
    """The mark of the state that the rank holds."""
    reached: Mark | None = None
    """The mark of a step whose gradients are complete on this rank, but which it has not applied."""
    has_totals: bool = False
    """Whether it knows the totals of the step that it reached, or else of the last one that it applied."""
    began: int = 0
    """The newest step that it began."""
    ended: int = 0
    """The newest step after which it has validated and saved, where that was due."""
    layers: tuple[tuple[str, int], ...] = ()
    """The layers (module, layer) of whose state it holds a part."""
    device_bytes: float = 0.0
    process_bytes: float = 0.0
    """See `DeviceMemory`: what the job agreed on, or of this process."""
    inputs: tuple[tuple[str, str], ...] = ()
    """The digests of what its process started from, by subject."""

    def to_dict(self) -> dict[str, Any]:
        """The report as a table for JSON."""
        return asdict(self)

    @classmethod
    def parse(cls, raw: Any) -> "RankReport":
        """The inverse of `to_dict`. Raises: TrainingError: it is none."""
        try:
            if set(raw) != set(cls.__slots__):
                raise ValueError(f"has the keys {sorted(raw)}")
            return cls(
                node=str(raw["node"]),
                mark=_mark(raw["mark"]),
                reached=_mark(raw["reached"]),
                has_totals=bool(raw["has_totals"]),
                began=int(raw["began"]),
                ended=int(raw["ended"]),
                layers=tuple((str(module), int(index)) for module, index in raw["layers"]),
                device_bytes=float(raw["device_bytes"]),
                process_bytes=float(raw["process_bytes"]),
                inputs=tuple((str(name), str(digest)) for name, digest in raw["inputs"]),
            )
        except (TypeError, ValueError, KeyError) as error:
            raise TrainingError(
                f"a rank of another version of mmtrain tells {raw!r:.200} ({error}); install one version on all nodes"
            ) from None


def _mark(raw: Any) -> Mark | None:
    if raw is None:
        return None
    generation, step = raw
    return int(generation), int(step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What the reports of all ranks say together."""

    source: int | None
    """The rank whose totals complete a step; None: there is no such step."""
    appliers: tuple[int, ...]
    """Ranks that apply it."""
    marks: tuple[tuple[Mark, tuple[int, ...]], ...]
    """Each state that there is then, the newest first, and the ranks that hold it. Empty: nobody has a state."""
    redone: int
    """Steps that are done again."""

    @property
    def holders(self) -> tuple[int, ...]:
        """Ranks with the newest state; the first one speaks for all."""
        return self.marks[0][1] if self.marks else ()


def agree(reports: Sequence[RankReport]) -> Agreement:
    """What the ranks of a generation do. Args: [rank] -> its report."""
    known = {_totals_of(one) for one in reports} - {None}
    proven = max((one.reached for one in reports if one.reached in known and one.reached is not None), default=None)
    source = next((rank for rank, one in enumerate(reports) if proven and _totals_of(one) == proven), None)
    appliers = tuple(rank for rank, one in enumerate(reports) if proven and one.reached == proven)
    of_marks: dict[Mark, list[int]] = {}
    for rank, one in enumerate(reports):
        mark = proven if rank in appliers else one.mark
        if mark is not None:
            of_marks.setdefault(mark, []).append(rank)
    marks = tuple((mark, tuple(ranks)) for mark, ranks in sorted(of_marks.items(), reverse=True))
    began = max((reports[rank].began for rank in marks[0][1]), default=0) if marks else 0
    return Agreement(
        source=source, appliers=appliers, marks=marks, redone=max(0, began - marks[0][0][1]) if marks else 0
    )


def _totals_of(one: RankReport) -> Mark | None:
    """The step of which a rank knows the totals."""
    return (one.reached or one.mark) if one.has_totals else None


def differing_inputs(reports: Sequence[RankReport], holders: Sequence[int]) -> Mapping[str, str]:
    """Node without the state -> a subject in which it differs from those with it: it cannot take part."""
    wanted = dict(subject for rank in holders for subject in reports[rank].inputs)
    return {
        one.node: name
        for rank, one in enumerate(reports)
        if rank not in holders
        for name, digest in one.inputs
        if wanted.get(name, digest) != digest
    }
