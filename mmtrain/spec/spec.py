"""The model as planning sees it: a graph of modality modules, each a chain of layers (the smallest cut points).

Pure; no weights.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from mmtrain.errors import DataError
from mmtrain.families.windows import Grid, Indices, feature_order, row_order, window_pairs
from mmtrain.spec.layer import Flops, LayerSpec
from mmtrain.spec.work_size import TIME_ROWS, ZERO_WORK, WorkSize


class VocabularyRows(NamedTuple):
    """Consecutive rows of a matrix with one row for each token."""

    first: int
    last: int
    """The end of the rows, which is excluded."""
    total: int
    """Tokens of the vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSpec:
    """One modality module: a chain of layers with its own stream of rows."""

    name: str
    """The name of the module in works and stages."""
    layers: tuple[LayerSpec, ...]
    consumes: str = ""
    """The content of its works: a key of `modality.catalogue.MODALITIES`."""
    after: tuple[str, ...] = ()
    """Modules whose output enters this module's first layer."""
    merge: int = 1
    """Neighbouring patches along each side of an image that are merged to one token."""
    one_row: bool = False
    """Whether images have one row of patches (audio over time), which are merged only along it; those behind the last
    token of an image make none."""
    pool: int = 1
    """Rows whose mean is one feature, before the last norm."""
    extra_rows: int = 0
    """Rows that the first layer adds to each frame of an image: 1 for a class token."""
    extra_outputs: int = 0
    """The extra rows that become tokens."""
    pooled: bool = False
    """Whether an image leaves it as one row, by which a pair is found."""
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
    """For each layer, the activations of the shape of its output that travel with it to the next layer, for a later one
    (DeepStack); empty: none."""
    microbatches: int = 1
    """Consecutive microbatches whose content one of its works has; 0: all of the replica's."""
    pp_rank: int | None = None
    """The pipeline rank of a module that is one chunk, -1: the last one; None: it is cut over the ranks."""
    vocabulary: VocabularyRows | None = None
    """The rows of the matrices of the vocabulary that it has; None: whole ones, or none."""
    is_whole: bool = False
    """Each tensor-parallel rank holds and computes all of it."""
    shares_units: bool = False
    """Tensor-parallel ranks may each hold all of it and divide its units (parallelism.encoder_tensor_parallel)."""

    @property
    def section(self) -> str:
        """Name of the module of the config whose network it is a part of."""
        return "language" if self.consumes in ("token_ids", "labels") else self.name

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
        return next(m for m in self.modules if m.consumes in ("documents", "texts", "captions"))

    @property
    def text_modules(self) -> tuple[ModuleSpec, ...]:
        """The language model, and the parts of its vocabulary that are modules of their own."""
        return tuple(m for m in self.modules if m is self.text or m.section == self.text.name)

    @property
    def divides_vocabulary(self) -> bool:
        """Whether each pipeline rank has a part of the vocabulary."""
        return len(self.text_modules) > 1

    @property
    def ties(self) -> tuple[tuple[tuple[str, int], tuple[str, int]], ...]:
        """The (module, layer) of the token embedding and that of the head which are one parameter, for each of its
        parts; none if they are not tied."""
        if not self.tied_embeddings:
            return ()
        layers = [(m.name, index, layer) for m in self.text_modules for index, layer in enumerate(m.layers)]
        embeds, heads = ([(m, index) for m, index, x in layers if x.name == name] for name in ("embed", "head"))
        return tuple(zip(embeds, heads, strict=True))

    @property
    def reads_clips(self) -> bool:
        """Whether it is trained on video clips with captions."""
        return self.text.consumes == "captions"

    @property
    def reads_pairs(self) -> bool:
        """Whether it is trained on images with captions, by two towers."""
        return self.text.consumes == "texts"

    @property
    def counted(self) -> ModuleSpec | None:
        """The module whose works have `sub_microbatch_size` images or clips; None: the model reads text alone."""
        return next((m for m in self.modules if m.consumes in ("images", "latents")), None)

    @property
    def num_params(self) -> int:
        """Parameters of all modules; a tied matrix counts once."""
        layers = [layer for module in self.modules for layer in module.layers]
        return sum(layer.num_params - layer.num_shared_params for layer in layers)

    @property
    def num_trained_params(self) -> int:
        """Parameters that train, each once."""
        layers = (layer for module in self.modules for layer in module.layers if layer.num_trainable_params)
        return sum(layer.num_trainable_params - layer.num_shared_params for layer in layers)

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
        outputs = 1 if module.pooled else t * (h * w // module.patches_per_token + module.extra_outputs)
        total += WorkSize(
            rows=count * t * rows,
            pairs=count * t * rows * rows,
            outputs=count * outputs,
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


def clips_work(
    num_tokens: Sequence[int], text_lengths: Sequence[int], num_targets: int, buckets: Sequence[object] | None = None
) -> WorkSize:
    """The size of a work of clips for a DiT; attention stays inside of a clip and its own prompt.

    Args:
        num_tokens, text_lengths: latent and text tokens of each clip.
        num_targets: latent tokens with a loss.
        buckets: size of each clip; None: clips of as many tokens have one size.
    """
    total = ZERO_WORK
    for rows, texts in zip(num_tokens, text_lengths, strict=True):
        total += WorkSize(rows=rows, pairs=rows * rows, outputs=0, cross_pairs=rows * texts, texts=texts, clips=1)
    calls = len({*zip(num_tokens if buckets is None else buckets, text_lengths, strict=True)})
    return replace(total, outputs=num_targets, calls=calls)


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
