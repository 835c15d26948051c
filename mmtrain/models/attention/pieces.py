"""The calls of scaled-dot-product attention that one rank's rows need, computed from the bits of their mask.

A run is neighbouring rows with neighbouring positions whose keys are one slice of the sequence. Three kinds are
enough: all rows see all keys of the slice; each row sees its keys up to itself; anything else. A piece is one call:
equal runs on the diagonal together, and a run that needs a mask in parts, so that no mask is large: the last kind, and
the second where keys come before the first row.

Shape legend: T rows of the whole packed sequence; Q rows of this rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from mmtrain.modality.bitfield import GROUP_SHIFT, OWN_GROUP_MASK, Bits, visible_keys

PieceKind = Literal["all", "causal", "mask"]
KINDS: tuple[PieceKind, ...] = get_args(PieceKind)
MASK_SIZE = 1 << 23
"""Most numbers in the mask of one piece: 32 MiB where a kernel wants it as float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One call of attention."""

    rows: tuple[int, int]
    """[lo, hi) among this rank's rows."""
    keys: tuple[int, int]
    """[lo, hi) among the rows of the sequence."""
    kind: PieceKind
    """Whether each row sees all keys, all up to itself, or those that the rule of `bits` names."""
    parts: int = 1
    """Equal parts in which rows and keys are cut; a row sees only the keys of its own part."""
    position: int
    """The position of the first row in the sequence."""
    bits: int
    """Mask of the first row; of the kind `mask`, all rows have this rule."""

    @property
    def is_plain_causal(self) -> bool:
        """Whether each row sees its keys up to itself, the first row being the first key: it needs no mask."""
        return self.kind == "causal" and self.position == self.keys[0]


def find_runs(bits: Bits, rows: Bits) -> tuple[Piece, ...]:
    """The runs of one rank's rows, in their order, each as one piece of one part; padding rows are in none of them.

    Args: bits: [T] masks. rows: [Q] positions of the rows, -1 for padding.
    """
    real = np.flatnonzero(rows >= 0)
    positions = rows[real]
    low, high, number = (x[positions] for x in visible_keys(bits))
    rules = bits[positions] & ~(OWN_GROUP_MASK << GROUP_SHIFT)
    whole = number == high - low  # the row sees a slice without holes

    neighbours = (np.diff(real) == 1) & (np.diff(positions) == 1) & (np.diff(low) == 0)
    both_whole = whole[1:] & whole[:-1]
    level = neighbours & both_whole & (np.diff(high) == 0)
    # The last row of a span sees what its span sees and also the keys up to itself: it stays with its span.
    free = ~(np.append(level, False) | np.insert(level, 0, False)) & (high == positions + 1)
    stairs = neighbours & both_whole & free[1:] & free[:-1]
    holes = neighbours & ~whole[1:] & ~whole[:-1] & (np.diff(rules) == 0)
    cuts = np.flatnonzero(~(level | stairs | holes)) + 1

    runs: list[Piece] = []
    for start, end in zip([0, *cuts], [*cuts, len(real)], strict=True) if len(real) else ():
        first, last, row = int(positions[start]), int(positions[end - 1]) + 1, int(real[start])
        keys = int(low[start]), int(high[start:end].max())
        kind: PieceKind
        if not whole[start]:
            kind = "mask"
        elif last - first == 1 or level[start]:
            kind = "all"
        else:
            kind = "causal"
        runs.append(Piece(rows=(row, row + last - first), keys=keys, kind=kind, position=first, bits=int(bits[first])))
    return tuple(runs)


def make_pieces(runs: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """The calls of scaled-dot-product attention that compute some runs, in their order."""
    pieces: list[Piece] = []
    for run in runs:
        if run.kind == "all" or run.is_plain_causal:
            _append(pieces, run)
        else:
            pieces += _tiles(run)
    return tuple(pieces)


def is_block_diagonal(runs: tuple[Piece, ...]) -> bool:
    """Whether each run's keys are its own rows and no mask is needed, if this rank's rows are the sequence."""
    return all(run.rows == run.keys and run.kind != "mask" for run in runs)


def _append(pieces: list[Piece], piece: Piece) -> None:
    """Adds a piece, as a further part of the last one where both are equal blocks on the diagonal."""
    size = piece.rows[1] - piece.rows[0]
    if pieces and piece.keys == (piece.position, piece.position + size):
        last = pieces[-1]
        start = last.position, last.position + last.rows[1] - last.rows[0]
        same = last.kind == piece.kind and (start[1] - start[0]) == size * last.parts
        if same and last.keys == start and last.rows[1] == piece.rows[0] and last.keys[1] == piece.keys[0]:
            rows, keys = (last.rows[0], piece.rows[1]), (last.keys[0], piece.keys[1])
            pieces[-1] = replace(last, rows=rows, keys=keys, parts=last.parts + 1)
            return
    pieces.append(piece)


def _tiles(piece: Piece) -> Iterator[Piece]:
    """A piece that needs a mask, cut along its rows."""
    (start, end), (low, high) = piece.rows, piece.keys
    step = max(1, MASK_SIZE // (high - low))
    for row in range(start, end, step):
        stop = min(row + step, end)
        position = piece.position + row - start
        keys_end = position + stop - row if piece.kind == "causal" else high
        yield replace(piece, rows=(row, stop), keys=(low, keys_end), position=position)
