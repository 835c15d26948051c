"""Ends, or stops, ranks of elastic jobs where a test says."""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLACES = (
    "action", "reduction", "reduced", "forgotten", "meeting", "forming", "agreement", "build", "held", "placed",
    "taken up", "saving", "writing", "publishing", "validating", "reason", "asking", "narrow", "parting",
)  # fmt: skip
"""action: in the action of this number; reduction, reduced: before the last reduction, and when all ranks have its
result; forgotten: the result does not arrive, but all other ranks have it; held, placed: while the state moves, after
it is there; saving: after a step; writing: all parts of a checkpoint are there; publishing: rank 0 is to rename it;
reason: it asks why a generation ended. The others are those of a change."""


@dataclass(frozen=True)
class Fault:
    """What happens once to a rank of a node."""

    slot: int
    """Which of the nodes, from 0."""
    step: int
    """The newest one that the rank began; -1: any."""
    place: str
    action: int = 0
    number: int = signal.SIGKILL
    """Of the signal."""
    local_rank: int = 0
    again: bool = False
    """It is for a later start of the node, not for the first one."""


class _Armed:
    """The faults of this process."""

    def __init__(self, faults: Sequence[Fault], folder: Path) -> None:
        self._faults, self._folder = faults, folder
        self._step = self._actions = 0
        self.generation = 0

    def begin(self, step: int) -> None:
        self._step, self._actions = step, 0

    def act(self) -> None:
        self._actions += 1
        self.reach("action")

    def due(self, place: str) -> Fault | None:
        """The fault of this moment, each of which is there once in a job."""
        for index, fault in enumerate(self._faults):
            if fault.place == place and fault.step in (-1, self._step) and fault.action in (0, self._actions):
                try:
                    (self._folder / f"fault-{index}-{fault.slot}-{place}-{fault.step}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                return fault
        return None

    def has_totals(self, rank: int, size: int) -> None:
        """Tells that a rank has the result of the last reduction; one that ends there waits until all have it."""
        notes = [self._folder / f"totals-{self.generation}-{self._step}-{other}" for other in range(size)]
        notes[rank].touch()
        if any(fault.place in ("reduced", "forgotten") and fault.step in (-1, self._step) for fault in self._faults):
            deadline = time.monotonic() + 10.0  # one of them may have ended by a fault of its own
            while not all(note.exists() for note in notes) and time.monotonic() < deadline:
                time.sleep(0.002)

    def reach(self, place: str) -> None:
        if (fault := self.due(place)) is not None:
            os.kill(os.getpid(), fault.number)


def arm(name: str, local_rank: int, faults: Sequence[Fault], folder: Path) -> None:
    """Makes this process end where its faults say. Args: name: of the node. folder: notes what has happened."""
    _, slot, start = name.split("-")
    again = slot != start
    own = [one for one in faults if (one.slot, one.local_rank, one.again) == (int(slot), local_rank, again)]
    if own or any(one.place in ("reduced", "forgotten") for one in faults):
        _patch(_Armed(own, folder))


def _patch(armed: _Armed) -> None:
    import torch.distributed as dist

    from mmtrain.checkpoint import checkpoint, move
    from mmtrain.checkpoint.checkpoint import Checkpointer
    from mmtrain.launch.member import Member
    from mmtrain.observe.metrics import MetricReduction
    from mmtrain.parallel import leave
    from mmtrain.parallel.generation import Generation
    from mmtrain.parallel.runtime import PipelineScheduleRuntime
    from mmtrain.training.rank_state import RankState
    from mmtrain.training.trainer import Trainer

    come = Generation._come
    backward, total, compute, moved = (
        Trainer.backward,
        MetricReduction.total,
        PipelineScheduleRuntime._compute,
        move.move,
    )

    def counted(self: Trainer, step: int, *args: Any) -> Any:
        armed.begin(step)
        return backward(self, step, *args)

    def acting(self: PipelineScheduleRuntime, bound: Any) -> None:
        armed.act()
        compute(self, bound)

    def reducing(self: MetricReduction) -> Any:
        if "squares" not in self._others:
            return total(self)
        armed.reach("reduction")
        found = total(self)
        armed.has_totals(dist.get_rank(), dist.get_world_size())
        armed.reach("reduced")
        if armed.due("forgotten"):
            leave.hang_up(())
            raise RuntimeError("Connection closed by peer: this test forgets the result")
        return found

    def coming(self: Generation, *args: Any) -> None:
        armed.generation = self.number
        armed.reach("meeting")
        come(self, *args)

    def moving(*args: Any, **kwargs: Any) -> Any:
        armed.reach("held")
        found = moved(*args, **kwargs)
        armed.reach("placed")
        return found

    Trainer.backward, MetricReduction.total, PipelineScheduleRuntime._compute = counted, reducing, acting
    Generation._come = coming  # type: ignore[method-assign]
    for module in [module for name, module in sys.modules.items() if name.startswith("mmtrain.training")]:
        if getattr(module, "move", None) is moved:
            module.move = moving  # type: ignore[attr-defined]
    for place, owner, method in (
        ("publishing", checkpoint, "write_manifest"),
        ("forming", Generation, "_form"),
        ("agreement", RankState, "state_reports"),
        ("build", Trainer, "build"),
        ("taken up", Trainer, "resume_state"),
        ("saving", Trainer, "end_step"),
        ("writing", Checkpointer, "_publish"),
        ("validating", Trainer, "validate"),
        ("reason", Generation, "reported_error"),
        ("asking", Member, "next"),
        ("narrow", Generation, "narrow"),
        ("parting", Generation, "part"),
    ):
        setattr(owner, method, _before(getattr(owner, method), place, armed))


def _before(method: Callable[..., Any], place: str, armed: _Armed) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        armed.reach(place)
        return method(*args, **kwargs)

    return called
