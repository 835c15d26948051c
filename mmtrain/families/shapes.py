"""The sizes and flags of an encoder and of a language model, whatever their family. Pure; no weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmtrain.config.toml_sections import shown
from mmtrain.errors import ConfigError
from mmtrain.families.windows import Grid, Indices, feature_order, row_order

FULL, WINDOWED = "full", "windowed"
"""Kinds of blocks: those that attend to all of an image or document, and those that attend inside of windows."""

MOST = 2**24
"""Largest number of rows, columns, channels, tokens or positions: more needs terabytes, or is a mistake."""

ROW_FRAMES = 5
"""Log-mel frames that the two convolutions of an encoder of sound read for one row: from 2 r - 2 to 2 r + 2 for row r.
They are the patch of a row where sounds of any length are packed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionShape:
    """The sizes of a vision encoder with its projector."""

    model_type: str
    width: int
    """Columns of the activations between its blocks."""
    depth: int
    """Number of blocks that run: up to the one whose output the projector reads."""
    num_heads: int
    mlp_width: int
    patch_dim: int
    """Elements of one patch: channels x (time x) height x width; of sound mel bins x frames."""
    hidden_act: str
    qkv_bias: bool = True
    key_bias: bool = True
    """Whether the key has a bias if query and value have one."""
    gated_mlp: bool = False
    """Whether a third linear layer gates the inner columns."""
    joint_qkv: bool = False
    """Whether one linear layer makes query, key and value."""
    rotary: bool = False
    """Whether positions are rotary."""
    num_positions: int = 0
    """Learned positions in a square, which are resized to the grid of each image; 0: there are none."""
    positions_per_row: int = 1
    """The number of stored positions whose weighted sum is added to a row; 1: they are resized before."""
    rms_norm: bool = False
    """Whether norms are RMSNorms."""
    patch_size: int
    """Pixels along one side of a patch."""
    packed: bool
    """Whether the patches of images of any size are packed into one list, in merge-block order; otherwise all images
    have one size and their patches are in row-major order."""
    fills: bool = False
    """Whether each packed image is made as large as the limit allows (NaFlex)."""
    class_token: bool = False
    """Whether the encoder adds a row to each image."""
    keeps_class_token: bool = False
    """Whether that row is a feature, too, and so becomes a token of the language model."""
    embed_norm: bool = False
    """Whether a norm follows the embedding of patches and class token."""
    embed_bias: bool = True
    """Whether the embedding of patches has a bias."""
    final_norm: bool = False
    """Whether a norm follows the last block that runs."""
    fixed_grid: tuple[int, int, int] | None = None
    """Patches (1, height, width) of every image; None for packed encoders."""
    one_row: bool = False
    """Whether an image is one row of patches, which are merged only along it: audio over time."""
    max_rows: int = 0
    """The rows of the longest sound, each of which has a position of its own."""
    pool: int = 1
    """Rows whose mean is one feature, before the final norm; the rows behind the last feature of a clip make none."""
    window: int = 0
    """Side of the attention windows in merged tokens; 0: the encoder has none."""
    full_blocks: tuple[int, ...] = ()
    """The blocks whose attention covers the whole frame, where others have windows."""
    native_merge: int = 0
    """Spatial merge of the encoder's own merger; 0 if it has none."""
    native_width: int = 0
    """Output width of the encoder's own merger; 0 if it has none."""
    taps: tuple[int, ...] = ()
    """Blocks whose outputs the encoder's own merger reads, in addition to that of the last one; the j-th of them is
    added to the output of language layer j. Source: DeepStack, arXiv:2406.04334."""
    merge: int
    """Spatial merge of the projector that is used."""
    pooling: str = ""
    """How a tower makes one embedding of an image. token: by a norm and a projection of its class token. attention: by
    attention of one query over its rows, and an MLP. Empty: it is no tower."""
    embedding_width: int = 0
    """Columns of that embedding."""

    def block_kind(self, index: int) -> str:
        """The kind of a block: `FULL` or `WINDOWED`."""
        return WINDOWED if self.window and index not in self.full_blocks else FULL

    @property
    def head_dim(self) -> int:
        """Columns of a head of attention."""
        return self.width // self.num_heads

    @property
    def features_per_token(self) -> int:
        """Features that the projector joins to one token."""
        return self.merge if self.one_row else self.merge**2

    @property
    def patches_per_token(self) -> int:
        """Patches that become one token."""
        return self.pool * self.features_per_token

    @property
    def mel_bins(self) -> int:
        """The rows of a sound's spectrogram."""
        return self.patch_dim // (ROW_FRAMES if self.packed else 2)

    @property
    def first_convolutions(self) -> int:
        """The outputs of the first convolution that are computed for one row of a sound. Those of packed rows
        overlap."""
        return 3 if self.packed else 2

    @property
    def any_size(self) -> bool:
        """Whether it reads images of any size."""
        return self.packed and not self.one_row

    @property
    def full_grid(self) -> Grid:
        """Patches of every image of an encoder of one image size, or of the longest sound."""
        assert not self.any_size
        return self.fixed_grid or (1, 1, self.max_rows)

    @property
    def full_tokens(self) -> int:
        """Tokens of such an image or sound."""
        return math.prod(self.full_grid) // self.patches_per_token + self.keeps_class_token

    @property
    def patches_per_output(self) -> float:
        """Patches of an image for each of its tokens, one of which may be the class token, or for its embedding."""
        if self.pooling:
            return math.prod(self.full_grid)
        if not self.keeps_class_token:
            return self.patches_per_token
        return 1 - 1 / self.full_tokens

    def row_order(self, grids: Sequence[Grid]) -> Indices:
        """[R] int64: the packed patch of each row, see `windows.row_order`. Args: grids: patches of each image."""
        return row_order(grids, self.merge, self.window)

    def feature_order(self, grids: Sequence[Grid]) -> Indices:
        """[V] int64: the feature of each merged row, see `windows.feature_order`. Args: grids: as in `row_order`."""
        return feature_order(grids, self.merge, self.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageShape:
    """The sizes of a language model."""

    model_type: str
    width: int
    depth: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    vocab_size: int
    max_positions: int
    hidden_act: str
    qkv_bias: bool
    output_bias: bool
    """Whether the attention's output projection has a bias."""
    mlp_bias: bool
    tied: bool
    """Whether the head and the token embedding are one matrix; a text encoder has no head."""
    head_norms: bool = False
    """Whether norms follow on the queries and keys of each head."""
    axis_columns: tuple[int, ...] = ()
    """Rotated pairs of a head's columns for time, height and width; empty: positions are along the text alone."""
    sliding_window: int = 0
    """Tokens that a token sees, itself included; 0: all of its document."""
    rotary: bool = True
    """Whether positions are rotary; otherwise each has a row that is added to its token's."""
    gated_mlp: bool = True
    """Whether a third linear layer gates the inner columns."""
    rms_norm: bool = True
    """Whether norms are RMSNorms."""
    embedding_width: int = 0
    """Columns of the embedding that a tower makes of one token of each text; 0: it is no tower."""
    embedding_bias: bool = False
    """Whether the projection to that embedding has a bias."""
    padded: bool = False
    """Whether all texts have one length."""

    def block_kind(self, index: int) -> str:
        """The kind of a block: `FULL` of all, as packed documents attend in full."""
        return FULL

    @property
    def position_axes(self) -> int:
        """Axes of its positions."""
        return len(self.axis_columns) or 1


def single_size(where: str, key: str, value: Any) -> int:
    """The number in a size that may be given as a list of equal numbers.

    Raises: ConfigError: the numbers differ, or are no integers above 0.
    """
    size, *other_sizes = value if isinstance(value, list | tuple) and value else [value]
    if type(size) is not int or not 0 < size <= MOST or any(x != size for x in other_sizes):
        raise ConfigError(f"{where}: {key} = {shown(value)}; only square sizes are supported: give one integer")
    return size


def check_divides(where: str, divisor_name: str, divisor: int, name: str, number: int) -> None:
    """Checks that one size check_divides another one. Raises: ConfigError: it does not."""
    if number % divisor:
        raise ConfigError(f"{where}: {name} = {number} is not a multiple of {divisor_name} = {divisor}; change one")


def check_square(where: str, key: str, positions: int) -> None:
    if math.isqrt(positions) ** 2 != positions:
        raise ConfigError(f"{where}: {key} = {positions}; positions form a square, so it must be a square number")
