"""The table of tensor parallelism: how each layer of a family is divided.

Module names are those of Hugging Face and diffusers, so a table is checked against the module that it is applied to:
every name in it must exist, and every parameter must be named by it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Style = Literal[
    "columns",
    "columns_whole",
    "columns_gather",
    "rows",
    "rows_whole",
    "gathered",
    "moved",
    "norm_gather",
    "norm",
    "norm_heads",
    "norm_columns",
    "vocabulary",
    "whole",
]
"""How one module is divided, with its input -> its output. The rows of a rank are those that it has between layers: its
part of them, or all (`parallelism.tensor_parallel_rows`); then "this rank's rows -> all rows" moves nothing.

- norm_gather: a norm, not divided. This rank's rows -> all rows, for the layers of style `columns` behind it, whose
  gradients are summed here.
- columns: a linear layer's outputs are divided. All rows -> all rows, this rank's columns.
- columns_whole: the same for an input that all ranks computed alike, so that its gradient is summed here.
- columns_gather: as columns_whole, but -> all columns.
- rows: a linear layer's inputs are divided. All rows, this rank's columns -> this rank's rows, summed over ranks.
- rows_whole: the same, but -> all rows.
- gathered: a module with layers of style `columns` behind its inputs. Of the first input this rank's rows -> all rows;
  the others were computed by all ranks alike. The gradients of all are summed here, once for all of these layers.
- moved: a table of shifts and scales that a block of a DiT holds itself, whole on every rank, which adds values to it
  that all ranks computed alike, and uses it for its own rows: the gradients of both are summed here.
- norm: a norm, not divided. This rank's rows -> the same.
- norm_heads: a norm of each head, not divided. This rank's heads of all rows -> the same.
- norm_columns: a root-mean-square norm's columns are divided. This rank's columns of all rows -> the same, where the
  mean square of a row is that of all columns.
- vocabulary: an embedding's tokens are divided. All ids -> this rank's rows.
- whole: every rank holds and computes all of it, from equal inputs, and so has the whole gradient. Also of a parameter
  that the model itself holds.
"""

Styles = Mapping[str, Style]


@dataclass(frozen=True, kw_only=True)
class TensorTable:
    """How one family is divided; names are relative to the chunk, those of `block` to a block."""

    blocks: str
    """Name of the list of blocks."""
    block: Styles
    """The styles of every block whose kind has no table of its own."""
    kinds: Mapping[str, Styles] = field(default_factory=dict)
    """Kind of a block, as of `block_kind` of a shape -> its table."""
    heads: tuple[str, ...] = ()
    """Attributes of a block that count attention heads and that its forward reads; a rank has its part of them."""
    embed: Styles
    norm: Styles = field(default_factory=dict)
    """What follows the last block: the final norm, and the head."""
    states: Styles = field(default_factory=dict)
    """What follows the last block of a text encoder, which has no head."""
    merger: Styles = field(default_factory=dict)
    """The family's own projector."""
    tap_merger: Styles = field(default_factory=dict)
    """The styles of the merger of one tap, whose number stands for {}."""

    def of_kind(self, kind: str) -> Styles:
        """The table of a block of some kind."""
        return self.kinds.get(kind, self.block)

    @property
    def mergers(self) -> tuple[str, ...]:
        """Names of the modules of the family's own projector; empty: it has none."""
        names = (name.split(".")[1] for name in (*self.merger, *self.tap_merger))  # after that of the chunk's module
        return tuple(dict.fromkeys(names))


def block_styles(norms: str, inputs: str, output: str, mlp_inputs: str, mlp_output: str) -> dict[str, Style]:
    """A block of a norm, attention, a norm and an MLP. Args: names of its modules, several divided by spaces."""
    before_attention, before_mlp = norms.split()
    return {
        before_attention: "norm_gather",
        **dict.fromkeys(inputs.split(), "columns"),
        output: "rows",
        before_mlp: "norm_gather",
        **dict.fromkeys(mlp_inputs.split(), "columns"),
        mlp_output: "rows",
    }


def two_linears(name: str, first: str = "linear_1", second: str = "linear_2") -> dict[str, Style]:
    """Two linear layers with an activation function between them, of a module that all ranks compute alike."""
    return {f"{name}.{first}": "columns_whole", f"{name}.{second}": "rows_whole"}


QKV = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"
GATED_MLP = ("mlp.gate_proj mlp.up_proj", "mlp.down_proj")
