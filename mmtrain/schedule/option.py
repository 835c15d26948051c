"""The seconds and bytes of one stage for one work, and the rule by which exchanges lie under compute."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from mmtrain.schedule.action import BACKWARD, Kind


class Load(NamedTuple):
    """Seconds of compute and of exchanges of one action, or of several that run as one block.

    An exchange is a collective of the ranks that divide a layer. Layers that run as *units* end each unit with an
    exchange, and alternate with the units of another pass: an exchange then lies under compute that does not wait for
    it. Units are short, so what the first and the last one expose does not count.
    """

    forward_s: float = 0.0
    """Compute of F."""
    forward_exchange_s: float = 0.0
    input_s: float = 0.0
    """Compute of I, also as a part of B."""
    input_exchange_s: float = 0.0
    weight_s: float = 0.0
    """Compute of W, also as a part of B; it has no exchanges."""
    contention: float = 1.0
    """Seconds that compute and exchanges at one time take beyond the longer of both, as a share of the shorter: 0: all
    is hidden; 1: one runs after the other."""
    copy_out_s: float = 0.0
    """Copies of activations to host memory, during all of the action or block."""
    copy_in_s: float = 0.0
    """Copies back to the device, in the other direction of the same link."""

    def together(self, other: "Load") -> "Load":
        """The load of both as one block. It hides exchanges no better than either of them."""
        return Load(
            self.forward_s + other.forward_s,
            self.forward_exchange_s + other.forward_exchange_s,
            self.input_s + other.input_s,
            self.input_exchange_s + other.input_exchange_s,
            self.weight_s + other.weight_s,
            max(self.contention, other.contention),
            self.copy_out_s + other.copy_out_s,
            self.copy_in_s + other.copy_in_s,
        )

    @property
    def compute_s(self) -> float:
        """Seconds without any exchange."""
        return self.forward_s + (self.input_s + self.weight_s)

    @property
    def seconds(self) -> float:
        """Seconds of the action or block; copies cost time only if they take longer than all of it."""
        return max(self.without_copies_s, self.copy_out_s, self.copy_in_s)

    @property
    def without_copies_s(self) -> float:
        """Seconds of compute and exchanges: the exchanges of F lie under I, those of I under F, and both under W.

        So a whole B hides exchanges under its own weight gradients; F or I alone hides none.
        Source: STP, figure 3.
        """
        under_forward = min(max(self.forward_exchange_s - self.input_s, 0.0), self.weight_s)
        return self._overlapped_s(self.input_s + under_forward, self.forward_exchange_s) + self._overlapped_s(
            self.forward_s + (self.weight_s - under_forward), self.input_exchange_s
        )

    def _overlapped_s(self, compute_s: float, exchange_s: float) -> float:
        return max(compute_s, exchange_s) + self.contention * min(compute_s, exchange_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One memory strategy of one stage for one work. If both backward times are zero, it has no backward."""

    name: str
    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    activation_bytes: float
    """Held from the start of F to the end of B (or of I); without a backward, during F only."""
    weight_bytes: float | None = None
    """Held from the end of I to the end of W; None: all of `activation_bytes`."""
    restored_bytes: float = 0.0
    """Held additionally while B or I runs: recomputed activations, those copied back from the CPU, or temporary tensors
    that are counted."""
    split_s: float = 0.0
    """The seconds that I and W take longer together than B, as part of W: a second dispatch."""
    forward_exchange_s: float = 0.0
    """The part of `forward_s` that is exchanges between the ranks that divide the layers."""
    backward_exchange_s: float = 0.0
    """The part of `backward_input_s` that is exchanges."""
    host_s: float = 0.0
    """Seconds of the copies to host memory during F, and of those back during B or I, as in `Load`."""
    contention: float = 1.0
    """The contention, see `Load`. Below 1 layers run as units: blocks and whole backwards hide exchanges. 1: nothing is
    hidden."""

    @property
    def has_backward(self) -> bool:
        """Whether a stage with this option has a backward action."""
        return self.backward_input_s > 0 or self.backward_weight_s > 0

    @property
    def held_for_weight_bytes(self) -> float:
        """Bytes between I and W."""
        return self.activation_bytes if self.weight_bytes is None else self.weight_bytes

    def scaled(self, forward: float, backward_input: float, backward_weight: float) -> "Option":
        """This option with the seconds of F, I and W, exchanges included, times factors."""
        return replace(
            self,
            forward_s=forward * self.forward_s,
            forward_exchange_s=forward * self.forward_exchange_s,
            backward_input_s=backward_input * self.backward_input_s,
            backward_exchange_s=backward_input * self.backward_exchange_s,
            backward_weight_s=backward_weight * self.backward_weight_s,
            split_s=backward_weight * self.split_s,
        )

    def growth_bytes(self, kind: Kind) -> float:
        """Bytes that a compute action of this kind allocates, less those that it frees."""
        if kind is Kind.F:
            return self.activation_bytes if self.has_backward else 0.0
        if kind is Kind.I:
            return self.held_for_weight_bytes - self.activation_bytes
        return -(self.activation_bytes if kind is Kind.B else self.held_for_weight_bytes)

    def needed_bytes(self, kind: Kind) -> float:
        """Bytes that a compute action of this kind needs while it runs, in addition to what was held before it."""
        return self.activation_bytes if kind is Kind.F else self.restored_bytes if kind in BACKWARD else 0.0

    def load(self, kind: Kind) -> Load:
        """Seconds of compute and exchanges of a compute action of this kind."""
        if kind is Kind.F:
            seconds, exchange_s = self.forward_s, self.forward_exchange_s
            return Load(
                forward_s=seconds - exchange_s,
                forward_exchange_s=exchange_s,
                contention=self.contention,
                copy_out_s=self.host_s,
            )
        if kind is Kind.W:
            return Load(weight_s=self.backward_weight_s + self.split_s, contention=self.contention)
        return Load(
            input_s=self.backward_input_s - self.backward_exchange_s,
            input_exchange_s=self.backward_exchange_s,
            weight_s=self.backward_weight_s if kind is Kind.B else 0.0,
            contention=self.contention,
            copy_in_s=self.host_s,
        )

    def duration_s(self, kind: Kind) -> float:
        """Seconds that a compute action of this kind takes by itself."""
        return self.load(kind).seconds

    def busy_s(self, kind: Kind) -> float:
        """Seconds in which a compute action of this kind keeps its rank from others, at least."""
        load = self.load(kind)
        return load.compute_s if self.contention < 1 else load.without_copies_s
