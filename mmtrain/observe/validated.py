"""What a job has learned from its validations so far: the best one, and how many came since. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mmtrain.config.figures import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Validated:
    """The validations up to a step."""

    step: int = -1
    """The step of the newest one; -1: none yet."""
    figure: str = ""
    """The figure by which they are compared, with its direction."""
    best: float | None = None
    """Best value of the figure; None: there is none."""
    best_step: int = 0
    """Step of the best one; 0: there is none."""
    since: int = 0
    """Validations after the best one."""

    @property
    def text(self) -> str:
        """The best value, in words; empty: there is none."""
        return "" if self.best is None else f"{self.figure} {self.best:.6g} (step {self.best_step})"

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "Validated":
        """The inverse of `dataclasses.asdict`. Raises: ValueError, TypeError: it is none."""
        made = cls(**raw)
        for name, kind in {"step": int, "figure": str, "best": float | None, "best_step": int, "since": int}.items():
            if not isinstance(getattr(made, name), kind):
                raise ValueError(f"{name} = {getattr(made, name)!r}")
        return made

    def after(self, step: int, figure: Figure, value: float) -> "Validated":
        """The validations with one more. With another figure than before, comparing begins anew."""
        before = self if self.figure == figure.text else Validated(figure=figure.text)
        if figure.better(value, before.best):
            return replace(before, step=step, best=value, best_step=step, since=0)
        return replace(before, step=step, since=before.since + 1)
