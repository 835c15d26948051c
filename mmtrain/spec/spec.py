"""The model as planning sees it: modules, layers, parameters, FLOPs and bytes. Pure; no weights.

A model is a graph of modality modules, each a chain of layers (the smallest cut points). Costs are linear functions of
a `WorkSize`: of rows, attended pairs and output rows, which is exact for transformers whose attention is block-diagonal
over images or documents.
"""

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from mmtrain.errors import DataError
from mmtrain.families.shapes import FULL
from mmtrain.families.windows import Grid, Indices, feature_order, row_order, window_pairs


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
    """(latent token, text token) pairs of cross-attention, summed over clips."""
    texts: int = 0
    """Text tokens in addition to the rows."""
    clips: int = 0
    """Video clips, each with its own timestep."""

    def __add__(self, other: "WorkSize") -> "WorkSize":
        return WorkSize(
            rows=self.rows + other.rows,
            pairs=self.pairs + other.pairs,
            outputs=self.outputs + other.outputs,
            window_pairs=self.window_pairs + other.window_pairs,
            cross_pairs=self.cross_pairs + other.cross_pairs,
            texts=self.texts + other.texts,
            clips=self.clips + other.clips,
        )


TIME_ROWS = 7
"""Additional rows of a clip in a DiT's activations: six of the timestep's projection, one of its embedding."""

ZERO_WORK = WorkSize(rows=0, pairs=0, outputs=0)


class Rates(NamedTuple):
    """A linear function of a work's size: a constant, and a coefficient for each count of a `WorkSize`."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The division of a module over the ranks of a stage's submesh."""

    tp: int = 1
    """Ranks that divide the layers' columns."""
    whole_rows: bool = False
    """These ranks each have all rows between layers, and do not divide them."""
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
    """Of a block: as `block_kind` of its module's shape says."""
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
    """If ranks divide the rows of one attention; new: keys and values of all rows."""
    divided_columns: Replaced = Replaced()
    """If tensor-parallel ranks divide the columns: logits of a part of the vocabulary."""
    unread_bytes: Rates = ZERO_RATES
    """Bytes of the result of the last product, which no backward reads, and of which each tensor-parallel rank has all
    rows; part of product_bytes."""
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
        )

    def _passing(self, size: WorkSize) -> float:
        """FLOPs of dX if some products read data: of products on the path to the input, or needed by its parameters."""
        assert self.passing_flops is not None
        return (self.passing_flops | self.inner_flops if self.trainable else self.passing_flops)(size)


def _of_rank(total: Rates, undivided: Rates, division: Division) -> Rates:
    return total * (1 / division.ranks) + undivided * (1 / division.groups - 1 / division.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSpec:
    """One modality module: a chain of layers with its own stream of rows."""

    name: str
    """Its name in works and stages."""
    layers: tuple[LayerSpec, ...]
    consumes: str = ""
    """The content of its works: a key of `modality.catalogue.MODALITIES`."""
    after: tuple[str, ...] = ()
    """Modules whose output enters this module's first layer."""
    merge: int = 1
    """Neighbouring patches along each side of an image that are merged to one token."""
    one_row: bool = False
    """Its images have one row of patches (audio over time), which are merged only along it; those behind the last token
    of an image make none."""
    pool: int = 1
    """Rows whose mean is one feature, before the last norm."""
    extra_rows: int = 0
    """Rows that the first layer adds to each frame of an image: 1 for a class token."""
    extra_outputs: int = 0
    """Those of them that become tokens."""
    window: int = 0
    """Side of the attention windows of some blocks, in merged tokens; 0: there are none."""
    patch: tuple[int, int, int] = (1, 1, 1)
    """Latent frames, rows and columns of one token of a DiT."""
    position_axes: int = 1
    """Axes of a language model's positions: 1, or 3 for time, height and width of image tokens."""
    latents_arrive: bool = False
    """The latents of a DiT come from another module, and not with the batch."""
    frames_per_latent: int = 1
    """Frames after the first one that a VAE encodes to one latent frame."""
    carried: tuple[int, ...] = ()
    """By layer: activations of the shape of its output that travel with it to the next layer, for a later one
    (DeepStack); empty: none."""
    is_whole: bool = False
    """It is not cut, and each tensor-parallel rank holds and computes all of it."""
    shares_units: bool = False
    """Tensor-parallel ranks may each hold all of it and divide its units (parallelism.encoder_tensor_parallel)."""

    @property
    def patches_per_token(self) -> int:
        """Patches that become one token."""
        return self.pool * self.merge if self.one_row else self.merge**2

    def row_order(self, grids: Sequence[Grid]) -> Indices:
        """[R] int64: the packed patch of each row. Args: grids: patches of each image."""
        return np.arange(_row_starts(grids)[-1]) if self.one_row else row_order(grids, self.merge, self.window)

    def feature_order(self, grids: Sequence[Grid]) -> Indices:
        """[V] int64: the feature of each group of rows that becomes one. Args: grids: patches of each image."""
        if self.one_row:
            return np.arange(len(self.feature_rows(grids)) - 1)
        return feature_order(grids, self.merge, self.window)

    def feature_rows(self, grids: Sequence[Grid]) -> Indices:
        """[V + 1] int64: the first row of each feature in the order of the rows, then the number of all rows.

        Ranks that divide rows do it here.
        """
        unit = self.patches_per_token
        starts = _row_starts(grids)
        if not self.one_row:
            return np.arange(0, starts[-1] + 1, unit)
        of_images = [np.arange(w // unit) * unit + start for start, (_, _, w) in zip(starts, grids, strict=False)]
        return np.concatenate([*of_images, starts[-1:]])

    @property
    def num_params(self) -> int:
        """Parameters of all layers, each copy of a tied matrix included."""
        return sum(layer.num_params for layer in self.layers)

    @property
    def num_trainable_params(self) -> int:
        """Number of parameters that train."""
        return sum(layer.num_trainable_params for layer in self.layers)

    @property
    def trainable(self) -> bool:
        """Whether any layer has a trainable parameter."""
        return any(layer.trainable for layer in self.layers)

    def num_carried(self, layer: int) -> int:
        """Activations that travel with the output of a layer. Args: layer: -1: what enters the module, with which
        none travels."""
        return self.carried[layer] if self.carried and layer >= 0 else 0

    def output_shape(self, last_layer: int, size: WorkSize) -> tuple[int, ...]:
        """Shape of the output of a stage that ends with `last_layer`: [rows, width], or () for the loss.

        The rows of carried activations follow those of the output.
        """
        layer = self.layers[last_layer]
        if not layer.output_width:
            return ()
        rows = size.outputs if layer.output_rows == "outputs" else size.rows
        if layer.output_rows == "conditioned":
            rows += size.texts + TIME_ROWS * size.clips
        return ((1 + self.num_carried(last_layer)) * rows, layer.output_width)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The modules of a model, each after those that feed it."""

    modules: tuple[ModuleSpec, ...]
    tied_embeddings: bool = False
    """Whether the language model's head and token embedding are one parameter."""

    def module(self, name: str) -> ModuleSpec:
        """The module of that name."""
        return next(m for m in self.modules if m.name == name)

    @property
    def text(self) -> ModuleSpec:
        """The language model: the module that reads tokens."""
        return next(m for m in self.modules if m.consumes in ("documents", "captions"))

    @property
    def reads_clips(self) -> bool:
        """Whether it is trained on video clips with captions."""
        return self.text.consumes == "captions"

    @property
    def counted(self) -> ModuleSpec | None:
        """The module whose works have `sub_microbatch_size` images or clips; None: the model reads text alone."""
        return next((m for m in self.modules if m.consumes in ("images", "latents")), None)

    @property
    def num_params(self) -> int:
        """Parameters of all modules; a tied matrix counts once."""
        layers = [layer for module in self.modules for layer in module.layers]
        return sum(layer.num_params - layer.num_shared_params for layer in layers)

    def grad_enters(self, name: str) -> bool:
        """Whether a module that feeds this one is trainable, so that the gradient of its input is needed."""
        return any(self.module(a).trainable or self.grad_enters(a) for a in self.module(name).after)

    def flops(self, name: str, size: WorkSize, layers: Iterable[int] | None = None) -> Flops:
        """FLOPs of some layers (default: all) of a module for one work; frozen layers have no weight gradients."""
        chosen = set(range(len(self.module(name).layers)) if layers is None else layers)
        of_layers = enumerate(self._layers(name))
        return sum((layer.flops(size, input_grad=grad) for i, (layer, grad) in of_layers if i in chosen), Flops())

    def layer_flops(self, name: str, size: WorkSize) -> list[Flops]:
        """FLOPs of each layer of a module for one work."""
        return [layer.flops(size, input_grad=input_grad) for layer, input_grad in self._layers(name)]

    def _layers(self, name: str) -> Iterator[tuple[LayerSpec, bool]]:
        """The layers of a module, and whether each has a gradient of its input."""
        input_grad = self.grad_enters(name)
        for layer in self.module(name).layers:
            yield layer, input_grad
            input_grad = input_grad or layer.trainable

    def has_backward(self, name: str, last_layer: int) -> bool:
        """Whether the layers of a module up to and including `last_layer` have a backward."""
        layers = self.module(name).layers[: last_layer + 1]
        return self.grad_enters(name) or any(layer.trainable for layer in layers)

    def activation_bytes(self, name: str, size: WorkSize, layers: Iterable[int] | None = None) -> float:
        """Bytes that some layers (default: all) of a module keep from forward to backward of one work.

        Layers without a backward keep nothing. A frozen layer through which a gradient passes, or one with adapters,
        keeps less than a trainable layer, but is counted in full.
        """
        module = self.module(name)
        chosen = range(len(module.layers)) if layers is None else layers
        return sum(module.layers[i].activation_bytes(size) for i in chosen if self.has_backward(name, i))


def _row_starts(grids: Sequence[Grid]) -> Indices:
    """[N + 1] int64: the first patch of each of N packed images, then the number of all."""
    return np.cumsum([0, *(t * h * w for t, h, w in grids)], dtype=np.int64)


def images_work(module: ModuleSpec, grids: Iterable[tuple[int, int, int]]) -> WorkSize:
    """The size of a work of images for a vision module; attention stays inside of a frame.

    Args: grids: patches (time, height, width) of each image.
    Raises: DataError: a side is not a multiple of the spatial merge; of sound, it is too short for a token.
    """
    total = ZERO_WORK
    for (t, h, w), count in Counter(grids).items():
        if module.one_row and w < module.patches_per_token:
            raise DataError(
                f"a sound of {w} rows makes no token, which takes {module.patches_per_token}; leave out what is shorter"
            )
        if not module.one_row and (w % module.merge or h % module.merge):
            raise DataError(
                f"an image of {h} x {w} patches cannot be merged {module.merge} x {module.merge}; resize it "
                f"to multiples of {module.merge} patches"
            )
        rows = h * w + module.extra_rows
        total += WorkSize(
            rows=count * t * rows,
            pairs=count * t * rows * rows,
            outputs=count * t * (h * w // module.patches_per_token + module.extra_outputs),
            window_pairs=count * window_pairs((t, h, w), module.merge, module.window) if module.window else 0,
        )
    return total


def documents_work(lengths: Iterable[int], num_targets: int, extra_pairs: int = 0) -> WorkSize:
    """The size of a work of packed documents for a language module; causal attention stays inside of a document.

    Args:
        lengths: tokens of each document.
        num_targets: labelled tokens.
        extra_pairs: attended pairs beyond those of causal attention; negative if there are fewer.
    """
    rows, pairs = 0, extra_pairs
    for length in lengths:
        rows += length
        pairs += length * (length + 1) // 2
    return WorkSize(rows=rows, pairs=pairs, outputs=num_targets)


def clips_work(num_tokens: Iterable[int], text_lengths: Iterable[int], num_targets: int) -> WorkSize:
    """The size of a work of clips for a DiT; attention stays inside of a clip and its own prompt.

    Args: num_tokens, text_lengths: latent and text tokens of each clip. num_targets: latent tokens with a loss.
    """
    total = ZERO_WORK
    for rows, texts in zip(num_tokens, text_lengths, strict=True):
        total += WorkSize(rows=rows, pairs=rows * rows, outputs=0, cross_pairs=rows * texts, texts=texts, clips=1)
    return replace(total, outputs=num_targets)


def frames_work(module: ModuleSpec, latents: Iterable[tuple[int, int, int]]) -> WorkSize:
    """The size of a work of clips' frames for a VAE; attention stays inside of a latent frame.

    Args: latents: latent frames, rows and columns of each clip.
    """
    total = ZERO_WORK
    for (frames, rows, columns), count in Counter(latents).items():
        positions = rows * columns
        pixel_frames = 1 + module.frames_per_latent * (frames - 1)
        total += WorkSize(
            rows=count * pixel_frames * positions,
            pairs=count * frames * positions * positions,
            outputs=count * frames * positions,
        )
    return total
