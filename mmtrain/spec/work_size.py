"""The size of a work, and linear functions of it, which costs are. Pure.

Linear functions of rows, attended pairs and output rows are exact for transformers whose attention is block-diagonal
over images or documents.
"""

import operator
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSize:
    """The size of one sub-microbatch for a module: the counts on which its costs depend."""

    rows: int
    """Rows through the layers: patches of a vision encoder, packed tokens of a language model, latent tokens of a
    DiT; for a VAE positions of a latent frame times frames of pixels."""
    pairs: int
    """Attended (query, key) pairs, summed over images or documents."""
    outputs: int
    """Output rows of the module's last layers: merged image tokens; labelled positions of the loss; states of a text
    encoder; latent tokens with a loss; latent positions."""
    window_pairs: int = 0
    """Attended pairs in the blocks whose attention stays inside of windows."""
    cross_pairs: int = 0
    """The (latent token, text token) pairs of cross-attention, summed over clips."""
    texts: int = 0
    """Text tokens in addition to the rows."""
    clips: int = 0
    """Video clips, each with its own timestep."""
    calls: int = 0
    """Groups of clips of one size whose prompts have as many tokens: a DiT's layers run once for each."""

    def __add__(self, other: "WorkSize") -> "WorkSize":
        return WorkSize(
            rows=self.rows + other.rows,
            pairs=self.pairs + other.pairs,
            outputs=self.outputs + other.outputs,
            window_pairs=self.window_pairs + other.window_pairs,
            cross_pairs=self.cross_pairs + other.cross_pairs,
            texts=self.texts + other.texts,
            clips=self.clips + other.clips,
            calls=self.calls + other.calls,
        )


TIME_ROWS = 7
"""Additional rows of a clip in a DiT's activations: six of the timestep's projection, one of its embedding."""

ZERO_WORK = WorkSize(rows=0, pairs=0, outputs=0)


class Rates(NamedTuple):
    """A linear function of a work's size: a constant, and a coefficient for each count of a `WorkSize` but `calls`."""

    fixed: float = 0.0
    row: float = 0.0
    pair: float = 0.0
    output: float = 0.0
    window_pair: float = 0.0
    cross_pair: float = 0.0
    text: float = 0.0
    clip: float = 0.0

    def __call__(self, size: WorkSize = ZERO_WORK) -> float:
        pairs = self.pair * size.pairs + self.window_pair * size.window_pairs
        total = self.fixed + self.row * size.rows + pairs + self.output * size.outputs
        return total + self.cross_pair * size.cross_pairs + self.text * size.texts + self.clip * size.clips

    def __add__(self, other: "Rates") -> "Rates":  # type: ignore[override]  # of each rate
        return Rates(*map(operator.add, self, other))

    def __sub__(self, other: "Rates") -> "Rates":
        return self + other * -1.0

    def __or__(self, other: "Rates") -> "Rates":
        """The maximum of each rate: the union of two sets of products, if for each rate one contains the other."""
        return Rates(*map(max, self, other))

    def __mul__(self, factor: float) -> "Rates":  # type: ignore[override]
        return Rates(*[rate * factor for rate in self])

    def __rmul__(self, factor: float) -> "Rates":  # type: ignore[override]
        return self * factor


ZERO_RATES = Rates()
