"""A pipeline chunk: consecutive layers of one module, as the real Hugging Face class with fewer children.

Parameter names do not depend on how the model is cut: `vision.<Hugging Face name>`, `projector.<name>`
and `language.<Hugging Face name>`. Order of use: `build_chunk` (values undefined), then `init_weights`,
then `load_pretrained` where weights exist, then sharding. The chunk itself must be called, so that hooks
on it run.

Shape legend: R rows of a vision stage; V image tokens; T packed tokens; D width; L labelled positions.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmtrain.config import ModelConfig
from mmtrain.data.batch import IGNORE_INDEX
from mmtrain.errors import ConfigError, DataError
from mmtrain.models.families import encoder_config, language_config
from mmtrain.models.hosts import DECODERS, VISION_HOSTS, Decoder, VisionHost, check_grids
from mmtrain.models.projector import Grid, Projector
from mmtrain.models.scatter import scatter_tokens
from mmtrain.models.shapes import LanguageShape, VisionShape, language_shape, vision_shape
from mmtrain.models.spec import ModelSpec, ModuleSpec, WorkSize


class LanguageOutput(NamedTuple):
    """What the last chunk of the language model returns; a tuple, so that FSDP finds its tensors."""

    loss_sum: Tensor
    """Float32 scalar: cross-entropy summed over the labelled positions; 0 with a graph if there is none."""
    predictions: Tensor | None
    """[L] int64: the most likely token of each labelled position, if asked for."""


class Chunk(nn.Module):
    """Consecutive layers [lo, hi) of one module."""

    def __init__(self, module: ModuleSpec, layers: tuple[int, int]) -> None:
        super().__init__()
        self.module_spec = module
        self.lo, self.hi = layers
        names = [layer.name for layer in module.layers[self.lo : self.hi]]
        self.has_embed = "embed" in names
        self.has_norm = "norm" in names or "head" in names
        self.has_projector = "projector" in names
        self.block_indices = [int(n.partition(".")[2]) for n in names if "." in n]

    @property
    def is_last(self) -> bool:
        """Whether the module ends with this chunk."""
        return self.hi == len(self.module_spec.layers)

    def output_shape(self, size: WorkSize) -> tuple[int, ...]:
        """Shape of this chunk's output for one work; () for the loss."""
        return self.module_spec.output_shape(self.hi - 1, size)

    def blocks(self) -> list[nn.Module]:
        """The blocks of this chunk, in order."""
        raise NotImplementedError

    def tied_weight(self) -> nn.Parameter | None:
        """The copy of a tied matrix whose gradient must be summed with the copy in another chunk, or None."""
        return None


class VisionChunk(Chunk):
    """Layers of the vision encoder, and the projector in the last one."""

    def __init__(
        self,
        model: ModelConfig,
        shape: VisionShape,
        host: VisionHost,
        spec: ModelSpec,
        layers: tuple[int, int],
    ) -> None:
        assert model.encoder is not None
        super().__init__(spec.module("vision"), layers)
        self.shape, self.host = shape, host
        native = model.projector.kind == "native"
        self.vision = host.build(encoder_config(model.encoder), model.encoder.attention)
        host.keep(self.vision, embed=self.has_embed, blocks=self.block_indices, norm=self.has_norm)
        merger = getattr(self.vision, "merger", None)
        if merger is not None and not (native and self.has_projector):
            self.vision.merger = merger = None
        self.projector = None
        if self.has_projector and not native:
            with torch.device("meta"):
                self.projector = Projector(
                    shape.width,
                    language_shape(model).width,
                    merge=shape.merge,
                    hidden_size=model.projector.hidden_size,
                    row_major=not shape.packed,
                )
        self.vision.requires_grad_(not model.encoder.frozen)
        for part in (merger, self.projector):
            if part is not None:
                part.requires_grad_(not model.projector.frozen)

    def blocks(self) -> list[nn.Module]:
        return list(self.vision.get_submodule(self.host.blocks).children())

    def forward(self, x: Tensor, *, grids: tuple[Grid, ...]) -> Tensor:
        """The activation after this chunk's layers, as `output_shape` says.

        Args:
            x: the activation [R, D] of the chunk before; for the first chunk pixels: packed patches
                [patches, patch_dim], or pictures [N, channels, height, width] of an encoder of a fixed size.
            grids: patches (time, height, width) of each picture, in the order of the rows.
        Raises: DataError: pictures and rows disagree, or a size that the encoder cannot take.
        """
        check_grids(self.shape, grids)
        rows = sum(self.host.rows(grid) for grid in grids)
        wanted = len(grids) if self.has_embed and not self.shape.packed else rows
        if len(x) != wanted:
            raise DataError(
                f"vision layers {self.lo}..{self.hi - 1}: {len(x)} rows arrived, but {len(grids)} pictures "
                f"have {wanted}"
            )
        if self.has_embed:
            x = self.host.call_embed(self.vision, x, grids)
        if self.block_indices:
            context = self.host.context(self.vision, x, grids, self.shape.merge)
            for block in self.blocks():
                x = self.host.call_block(block, x, context)
        if self.has_norm:
            x = self.vision.get_submodule(self.host.norm)(x)
        if self.has_projector:
            x = self.host.features(x, grids)
            x = self.vision.merger(x) if self.projector is None else self.projector(x, grids)
        return _owned(x)


class LanguageChunk(Chunk):
    """Layers of the language model; image features enter the first, the loss leaves the last."""

    def __init__(
        self,
        model: ModelConfig,
        shape: LanguageShape,
        host: Decoder,
        spec: ModelSpec,
        layers: tuple[int, int],
    ) -> None:
        super().__init__(spec.module("language"), layers)
        self.shape, self.host = shape, host
        self.language = host.build(language_config(model.language))
        host.keep(self.language, embed=self.has_embed, blocks=self.block_indices, norm=self.has_norm)
        self.language.requires_grad_(not model.language.frozen)

    def blocks(self) -> list[nn.Module]:
        return list(self.language.model.layers.children())

    def tied_weight(self) -> nn.Parameter | None:
        if not self.shape.tied or self.has_embed == self.has_norm:
            return None  # both in this chunk: one parameter already
        return self.language.model.embed_tokens.weight if self.has_embed else self.language.lm_head.weight

    def forward(
        self,
        x: Tensor,
        *,
        lengths: tuple[int, ...],
        position_ids: Tensor,
        features: Tensor | None = None,
        slots: Tensor | None = None,
        labels: Tensor | None = None,
        want_predictions: bool = False,
    ) -> Any:
        """The activation [T, D] after this chunk's layers, or the `LanguageOutput` of the last chunk.

        Args:
            x: the activation [T, D] of the chunk before; for the first chunk token ids [T].
            lengths: tokens of each document; attention stays inside of a document.
            position_ids: [T] int64, restarting with each document.
            features: [V, D] image features for the first chunk, in the order of slots; None without pictures.
            slots: [V] int64 rows that the features fill.
            labels: [T] int64 for the last chunk, already shifted; IGNORE_INDEX where there is no target.
            want_predictions: also return the most likely token of each labelled position.
        Raises: DataError: lengths, rows, features or labels that disagree.
        """
        if sum(lengths) != len(x) or len(position_ids) != len(x):
            raise DataError(
                f"language layers {self.lo}..{self.hi - 1}: {len(x)} rows arrived, the documents have "
                f"{sum(lengths)} tokens and there are {len(position_ids)} positions; all must be equal"
            )
        if self.has_embed:
            x = self.language.model.embed_tokens(x)
            if features is not None:
                if slots is None:
                    raise DataError(f"{len(features)} image features arrived without the slots they fill")
                x = scatter_tokens(x, features, slots)
        if self.block_indices:
            rotary = self.language.model.rotary_emb(x[None], position_ids[None])
            hidden = x[None]
            for block in self.blocks():
                hidden = block(hidden, attention_mask=None, position_embeddings=rotary, document_lengths=tuple(lengths))
            x = hidden[0]
        if not self.has_norm:
            return _owned(x)
        if labels is None or len(labels) != len(x):
            count = "no" if labels is None else len(labels)
            raise DataError(f"the language model's head got {count} labels for {len(x)} tokens")
        return self._loss(x, labels, want_predictions)

    def _loss(self, x_TD: Tensor, labels: Tensor, want_predictions: bool) -> LanguageOutput:
        rows = (labels != IGNORE_INDEX).nonzero().squeeze(1)
        targets = labels[rows]
        logits = self.language.lm_head(self.language.model.norm(x_TD.index_select(0, rows))).float()
        return LanguageOutput(
            loss_sum=nn.functional.cross_entropy(logits, targets, reduction="sum"),
            predictions=logits.detach().argmax(dim=-1) if want_predictions else None,
        )


def build_chunk(
    model: ModelConfig,
    spec: ModelSpec,
    module: str,
    layers: tuple[int, int],
    *,
    device: torch.device | str = "meta",
    dtype: torch.dtype = torch.float32,
) -> Chunk:
    """Layers [lo, hi) of a module, with real buffers and parameters whose values are not yet set.

    Layers of other chunks are dropped while they are still on the meta device.
    Args: module: `vision` or `language`. device: `meta` defers the parameters to `materialise`.
    Raises: ConfigError: a config that cannot be built, or layers that do not exist.
    """
    lo, hi = layers
    num_layers = len(spec.module(module).layers)
    if not 0 <= lo < hi <= num_layers:
        raise ConfigError(f"{module}: layers {lo}..{hi - 1} were asked for, but it has 0..{num_layers - 1}")
    chunk: Chunk
    try:
        if module == "vision":
            vision = vision_shape(model)
            chunk = VisionChunk(model, vision, VISION_HOSTS[vision.model_type], spec, layers)
        else:
            language = language_shape(model)
            chunk = LanguageChunk(model, language, DECODERS[language.model_type], spec, layers)
    except ConfigError as error:
        where = "model.encoder" if module == "vision" else "model.language"
        text = str(error)
        raise ConfigError(text if text.startswith("model.") else f"{where}: {text}") from error
    materialise(chunk, device, dtype)
    chunk.train()
    return chunk


def materialise(chunk: nn.Module, device: torch.device | str, dtype: torch.dtype) -> None:
    """Gives the parameters of a chunk memory on a device, with undefined values, and moves its buffers there.

    Buffers keep their dtype: rotary frequencies stay float32. A shared parameter stays shared.
    """
    done: dict[nn.Parameter, nn.Parameter] = {}
    for module in chunk.modules():
        for name, param in module._parameters.items():
            if param is not None:
                if param not in done:
                    empty = torch.empty_like(param, device=device, dtype=dtype)
                    done[param] = nn.Parameter(empty, requires_grad=param.requires_grad)
                module._parameters[name] = done[param]
        if torch.device(device).type != "meta":
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)


def _owned(x: Tensor) -> Tensor:
    """x, copied if it is a view: FSDP hooks the output of a chunk, and a hook on a view may be lost."""
    return x.clone() if x._is_view() else x


def fsdp_units(chunk: Chunk) -> list[nn.Module]:
    """The submodules to shard one by one before the chunk itself: its blocks, in order."""
    return chunk.blocks()
