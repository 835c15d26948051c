"""One layer as planning sees it: parameters, FLOPs and bytes as functions of a `WorkSize`, and a rank's part of them.

Pure; no weights.
"""

from dataclasses import dataclass, replace
from typing import Literal

from mmtrain.families.shapes import FULL
from mmtrain.spec.work_size import ZERO_RATES, Rates, WorkSize


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The division of a module over the ranks of a stage's submesh."""

    tp: int = 1
    """Ranks that divide the layers' columns."""
    whole_rows: bool = False
    """Whether these ranks each have all rows between layers, and do not divide them."""
    groups: int = 1
    """Groups of tp ranks that divide the rows."""
    key_groups: int = 1
    """Groups that share attention over their rows: each gathers the keys and values of all of them."""

    @property
    def ranks(self) -> int:
        """Number of ranks of the submesh."""
        return self.tp * self.groups

    @property
    def row_parts(self) -> int:
        """Number of the tp ranks that divide the rows between layers."""
        return 1 if self.whole_rows else self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeBytes:
    """The part of a layer's bytes (named as in `LayerSpec`) that tensor-parallel ranks do not divide.

    For example, the output of a norm is gathered for the linear layers after it.
    """

    activation: Rates = ZERO_RATES
    product: Rates = ZERO_RATES
    linear: Rates = ZERO_RATES
    output: Rates = ZERO_RATES


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """A part of a layer's activation_bytes that divided ranks do not keep (old), and its replacement (new)."""

    old: Rates = ZERO_RATES
    new: Rates = ZERO_RATES


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """Floating-point operations (a multiply-add counts 2) of one pass over one work."""

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(
            forward=self.forward + other.forward,
            backward_input=self.backward_input + other.backward_input,
            backward_weight=self.backward_weight + other.backward_weight,
        )

    @property
    def total(self) -> float:
        """The sum of the forward, input-gradient and weight-gradient passes."""
        return self.forward + self.backward_input + self.backward_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """LoRA adapters of a layer, whose other parameters are frozen."""

    num_params: int
    flops: Rates
    """Forward FLOPs of the adapters' products; dX and dW have the same number each."""
    inside_flops: Rates
    """FLOPs of the input-gradient pass if the layer's input needs no gradient. Attention counts in full, although an
    adapter on the values alone needs only a part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One cut point of a module."""

    name: str
    """Name of the torch submodule (or of the group of submodules) inside of the modality module."""
    kind: str = FULL
    """The kind of a block: as `block_kind` of its module's shape says."""
    num_params: int
    trainable: bool
    matmul_flops: Rates
    """Forward FLOPs of products with a weight; dX and dW have the same number each."""
    attention_flops: Rates = ZERO_RATES
    """Forward FLOPs of products of two activations (QK^T, PV); the backward has twice as many."""
    activation_bytes: Rates = ZERO_RATES
    """Bytes kept from forward to backward."""
    product_bytes: Rates = ZERO_RATES
    """Bytes of the results of a block's products with a weight, each once."""
    attention_bytes: Rates = ZERO_RATES
    """Bytes of the results of a block's attention (with the log-sum-exp)."""
    linear_bytes: Rates = ZERO_RATES
    """Bytes that its linear layers hold between I and W of a split backward: their inputs, each tensor once, and the
    gradients of their outputs. 0: I computes its weight gradients (a convolution)."""
    output_bytes: Rates = ZERO_RATES
    """Bytes of the activation for the next layer."""
    output_width: int = 0
    """Columns of the activation for the next layer; 0: the output is a scalar loss."""
    output_rows: Literal["rows", "outputs", "conditioned"] = "rows"
    """The count of a `WorkSize` that is the number of rows of that activation; conditioned: rows, then text tokens,
    then `TIME_ROWS` for each clip, in one tensor."""
    output_dtype: Literal["", "float32"] = ""
    """The dtype of the activation for the next layer; empty: the dtype of compute."""
    weight_before_products: bool = False
    """A parameter (the input norm) comes before its products: their dX is needed whenever it trains."""
    num_shared_params: int = 0
    """Parameters that are a copy of an earlier layer's parameter (tied embeddings); part of num_params."""
    num_fixed_params: int = 0
    """Parameters that never train (sinusoidal positions); part of num_params."""
    inner_flops: Rates = ZERO_RATES
    """FLOPs of products whose input is another product of this layer; part of matmul_flops. Without
    weight_before_products, only their dX is needed whenever the layer trains."""
    passing_flops: Rates | None = None
    """FLOPs of products through which the gradient of the layer's input passes; part of matmul_flops; None: all.
    Products that read data (latents, timesteps) are not among them."""
    whole_bytes: WholeBytes = WholeBytes()
    """The part of the bytes above that tensor-parallel ranks do not divide."""
    row_bytes: WholeBytes = WholeBytes()
    """The part of the bytes above that they divide by rows, and each has whole if it has all rows between layers; the
    output, which they always divide so, is not repeated here."""
    gathered_rows: Rates = ZERO_RATES
    """Activation bytes of each rank in addition, for gathered copies of rows that tensor-parallel ranks divide."""
    gathered_keys: Replaced = Replaced()
    """What changes if ranks divide the rows of one attention; new: keys and values of all rows."""
    divided_columns: Replaced = Replaced()
    """What changes if tensor-parallel ranks divide the columns: logits of a part of the vocabulary."""
    unread_bytes: Rates = ZERO_RATES
    """Bytes of the result of the last product, which no backward reads, and of which each tensor-parallel rank has all
    rows; part of product_bytes."""
    loss_chunk_tokens: int = 0
    """The most positions whose logits a head makes at one time; it keeps none, and I makes the weight gradient, too. 0:
    it makes all logits at one time, and keeps them."""
    temporary_bytes: Rates = ZERO_RATES
    """Bytes that its backward holds on each tensor-parallel rank in addition to what was kept. 0: not counted."""
    adapters: AdapterSpec | None = None
    """The adapters of a frozen layer, in addition to the amounts above; None: it has none."""

    @property
    def is_block(self) -> bool:
        """Whether it is one of the module's equal blocks, as `layers.3`, and not its first or last layer."""
        return "." in self.name

    @property
    def splits_backward(self) -> bool:
        """Whether W of a split backward computes its weight gradients."""
        return self.trainable and self.linear_bytes != Rates()

    @property
    def num_trainable_params(self) -> int:
        """Number of parameters that train."""
        if self.adapters is not None:
            return self.adapters.num_params
        return self.num_params - self.num_fixed_params if self.trainable else 0

    def flops(self, size: WorkSize, *, input_grad: bool = True) -> Flops:
        """FLOPs of this layer for one work. A frozen layer has no weight gradients.

        Args: input_grad: whether the gradient of the layer's input is needed, as something before it is trainable;
            without it a frozen layer has no backward.
        Source: frozen-aware accounting, Cornstarch, arXiv:2503.11367.
        """
        matmul, attention = self.matmul_flops(size), self.attention_flops(size)
        if self.adapters is not None:
            adapters = self.adapters.flops(size)
            return Flops(
                forward=matmul + adapters + attention,
                backward_input=matmul + adapters + 2 * attention if input_grad else self.adapters.inside_flops(size),
                backward_weight=adapters,
            )
        backward = input_grad or self.trainable
        inside = 0.0
        if input_grad or (self.trainable and self.weight_before_products):
            inside = matmul if self.passing_flops is None else self._passing(size)
        elif self.trainable:
            inside = self.inner_flops(size)
        return Flops(
            forward=matmul + attention,
            # A trainable layer needs the gradients inside of it even if that of its input is not needed.
            backward_input=inside + (2 * attention if backward else 0.0),
            backward_weight=matmul if self.trainable else 0.0,
        )

    def of_rank(self, division: Division) -> "LayerSpec":
        """The layer with the bytes of one rank, if ranks divide evenly; other amounts are unchanged."""
        if division.ranks == 1:
            return self
        undivided, activation, gathered = self.whole_bytes, self.activation_bytes, Rates()
        if division.tp > 1:
            activation = activation - self.divided_columns.old + self.divided_columns.new
        if division.row_parts > 1:
            gathered = self.gathered_rows * (1 / division.groups)
        if division.whole_rows:
            rows = self.row_bytes
            undivided = replace(
                undivided,
                activation=undivided.activation + rows.activation,
                linear=undivided.linear + rows.linear,
                output=self.output_bytes,
            )
        if division.key_groups > 1:
            activation -= self.gathered_keys.old
            gathered += self.gathered_keys.new * (division.key_groups / division.ranks)
        return replace(
            self,
            activation_bytes=_of_rank(activation, undivided.activation, division) + gathered,
            product_bytes=_of_rank(self.product_bytes, undivided.product, division),
            attention_bytes=_of_rank(self.attention_bytes, Rates(), division),
            linear_bytes=_of_rank(self.linear_bytes, undivided.linear, division),
            output_bytes=_of_rank(self.output_bytes, undivided.output, division),
            unread_bytes=self.unread_bytes * (1 / division.groups),
            temporary_bytes=(self.temporary_bytes * (1 / division.groups))._replace(fixed=self.temporary_bytes.fixed),
        )

    @property
    def defers_forward(self) -> bool:
        """Whether its backward, if it has one, makes what its forward would: of a loss, which no other layer reads."""
        return self.loss_chunk_tokens > 0 and not self.output_width

    def repeated_flops(self, size: WorkSize) -> float:
        """FLOPs of its forward that its backward repeats, whatever the memory strategy, for one work; those of `flops`
        do not have them."""
        return self.matmul_flops(size) if self.loss_chunk_tokens and self.output_width else 0.0

    def _passing(self, size: WorkSize) -> float:
        """FLOPs of dX if some products read data: of products on the path to the input, or needed by its parameters."""
        assert self.passing_flops is not None
        return (self.passing_flops | self.inner_flops if self.trainable else self.passing_flops)(size)


def _of_rank(total: Rates, undivided: Rates, division: Division) -> Rates:
    return total * (1 / division.ranks) + undivided * (1 / division.groups - 1 / division.ranks)
