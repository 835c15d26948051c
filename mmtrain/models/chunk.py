"""A pipeline chunk: consecutive layers of one module, as the real Hugging Face class with fewer children.

Parameter names do not depend on how the model is cut: `vision.<Hugging Face name>`, `projector.<name>` (of a further
encoder `NAME.` and `NAME_projector.`) and `language.<Hugging Face name>`; for a DiT see `models/dit.py`, for a VAE
`models/vae.py`. Order of use: `build_chunk` (values undefined), then `init_weights`, then `load_pretrained` where
weights exist, then sharding. The chunk itself must be called, so that hooks on it run.

Activations that a later layer of the module needs travel with a chunk's output (`ModuleSpec.carried`): in one tensor,
their rows behind its rows.

Between two blocks a rank may hold a part of the rows: tensor-parallel ranks divide them (`RowSharding`), and
context-parallel ranks hold different rows to begin with. The defaults are those of one rank.

Shape legend: R rows of a vision stage; V image tokens; T packed tokens, all of this rank; r, v, t: its share
of them under sequence parallelism; D width; L labelled positions.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmtrain.config.model import EncoderConfig, LanguageConfig, ModelConfig, projector_name, section_of
from mmtrain.errors import ConfigError, DataError
from mmtrain.families.shapes import LanguageShape, VisionShape
from mmtrain.models.adapters import LanguageDecoder, VisionAdapter, check_grids
from mmtrain.models.attention.context import AttentionChoices, AttentionContext, Gather
from mmtrain.models.fused_qkv import reorder_output
from mmtrain.models.loss import LOSSES, CrossEntropy, LossOutput, VocabularySharding, WholeVocabulary
from mmtrain.models.loss_pieces import loss_in_pieces
from mmtrain.models.projector import Grid, Projector, make_projector
from mmtrain.models.scatter import scatter_tokens
from mmtrain.models.scores import TokenShards
from mmtrain.models.trainable import add_adapters, set_trainable
from mmtrain.models.vision_rows import VisionRows
from mmtrain.spec.linears import adapted_layers, trained_blocks
from mmtrain.spec.model_configs import encoder_config, language_config
from mmtrain.spec.rows import RowSharding, WholeRows
from mmtrain.spec.spec import ModelSpec, ModuleSpec, VocabularyRows
from mmtrain.spec.vocabulary import EMBED
from mmtrain.spec.work_size import WorkSize


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
        self.has_pool = "pool" in names
        self.block_indices = [int(n.partition(".")[2]) for n in names if "." in n]
        self.row_sharding: RowSharding = WholeRows()
        """Set by tensor parallelism, before the first forward."""

    @property
    def is_last(self) -> bool:
        """Whether the module ends with this chunk."""
        return self.hi == len(self.module_spec.layers)

    @property
    def where(self) -> str:
        """The module and layers of the chunk, for errors."""
        return f"{self.module_spec.name} layers {self.lo}..{self.hi - 1}"

    def output_shape(self, size: WorkSize) -> tuple[int, ...]:
        """Shape of this chunk's output for one work; () for the loss."""
        return self.module_spec.output_shape(self.hi - 1, size)

    def arriving(self, x: Tensor) -> list[Tensor]:
        """The activation of the chunk before, and those that travel with it."""
        carried = self.module_spec.num_carried(self.lo - 1)
        return list(x.unflatten(0, (1 + carried, len(x) // (1 + carried))).unbind()) if carried else [x]

    def blocks(self) -> list[nn.Module]:
        """The blocks of this chunk, in order."""
        raise NotImplementedError

    def tied_weight(self) -> nn.Parameter | None:
        """The copy of a tied matrix whose gradient must be summed with the copy in another chunk, or None."""
        return None

    @property
    def sums(self) -> frozenset[str]:
        """The modules whose outputs, added up, are this chunk's input."""
        return frozenset()

    @property
    def stored_rows(self) -> Mapping[str, VocabularyRows]:
        """Parameter -> its rows of a larger matrix of that name, of which other ranks hold the others."""
        return {}


class FeatureRows(NamedTuple):
    """The rows of the first activation of a language model that the features of one encoder fill."""

    slots: Tensor
    """[v] int64, in the order of the features."""
    exchange: Callable[[Tensor], Tensor] | None = None
    """This rank's features -> those that its rows need; None: it has just these."""


_NO_FILLS: Mapping[str, FeatureRows] = {}


class VisionChunk(Chunk):
    """Layers of an encoder, and the projector in the last one."""

    def __init__(
        self,
        model: ModelConfig,
        shape: VisionShape,
        adapter: VisionAdapter,
        spec: ModelSpec,
        layers: tuple[int, int],
        name: str = "vision",
    ) -> None:
        """Args: name: of the encoder among those of the model; its parameters' names begin with it."""
        section, projector = model.encoders[name], model.projector_of(name)
        super().__init__(spec.module(name), layers)
        self.shape, self.adapter = shape, adapter
        self.arrives_pooled = shape.pool > 1 and not (self.has_embed or self.block_indices or self.has_norm)
        self.projector_kind = projector.kind
        native = self.projector_kind == "native"
        # Under names that properties of this class may have, too.
        build = adapter.build_tower if shape.pooling else adapter.build
        self._modules[name] = build(encoder_config(section, section_of(name)))
        adapter.keep(
            self.vision,
            embed=self.has_embed,
            blocks=self.block_indices,
            norm=self.has_norm or (self.has_pool and shape.pooling == "token"),
            merger=native and self.has_projector,
            pool=self.has_pool,
        )
        self._modules[projector_name(name)] = None
        if self.has_projector and not native:
            with torch.device("meta"):
                self._modules[projector_name(name)] = make_projector(model, name)
        set_trainable(self.vision, section.trainable, blocks=adapter.blocks, trained=chosen_blocks(model, name))
        for part in (*adapter.own_merger(self.vision), self.projector):
            if part is not None:
                part.requires_grad_(projector.trainable is True)
        mergers = (f"{name}.{merger}" for merger in adapter.mergers)
        adapt(self, (f"{name}.{adapter.blocks}", *mergers, projector_name(name)), model, name)
        for block in self.blocks():
            for layer in adapter.fused_qkv:
                reorder_output(block, layer)

    @property
    def vision(self) -> Any:
        """The encoder's module of transformers."""
        return self._modules[self.module_spec.name]

    @property
    def projector(self) -> nn.Module | None:
        """The projector, if it is here and not the encoder's own."""
        return self._modules[projector_name(self.module_spec.name)]

    def own_name(self, name: str) -> str:
        """The name here of a submodule that the encoder `vision` calls `vision...` or `projector...`."""
        part, dot, rest = name.partition(".")
        own = {"vision": self.module_spec.name, "projector": projector_name(self.module_spec.name)}
        return f"{own[part]}{dot}{rest}"

    def blocks(self) -> list[nn.Module]:
        return list(self.vision.get_submodule(self.adapter.blocks).children())

    def forward(
        self,
        x: Tensor,
        *,
        grids: tuple[Grid, ...],
        part: tuple[int, int] | None = None,
        gather: Gather | None = None,
        attention: AttentionChoices = AttentionChoices(),  # noqa: B008  immutable
    ) -> Tensor:
        """The activation after this chunk's layers: `output_shape` of a whole work on one rank.

        Without images that is [0, width] and no layer is called.

        Args:
            x: the activation [r, D] of the chunk before; for the first chunk pixels: packed patches
                [patches, patch_dim], or images [N, channels, height, width] of an encoder of a fixed size.
            grids: patches (time, height, width) of each image, in their order.
            part: [lo, hi), of `ModuleSpec.feature_rows`, of the rows of a packed encoder in their order of travel,
                which this rank computes. Pixels are then those of `row_order(grids)[lo:hi]`, and features leave in
                that order, those of `feature_order(grids)`; of a whole work both have the order of the images.
            gather: of keys and values, as in `AttentionContext`; needed if other ranks have other parts.
            attention: how it is computed.
        Raises: DataError: images and rows disagree, or a size that the encoder cannot take.
        """
        check_grids(self.shape, grids)
        if not grids:
            return self._nothing(x)
        x, *taps = self.arriving(x)
        rows = self._rows(grids, part, gather, attention)
        rows.check(len(x), pixels=self.has_embed)
        if self.has_embed:
            x = rows.shard(self.adapter.call_embed(self.vision, rows.pixels(x), rows))
        else:
            x, *taps = (rows.arrived(t) for t in (x, *taps))
        if self.block_indices:
            context = self.adapter.context(self.vision, x, rows)
            for index, block in zip(self.block_indices, self.blocks(), strict=True):
                x = self.adapter.call_block(index, block, x, context)
                if index in self.shape.taps:
                    taps.append(x)
        if self.has_norm:
            if self.shape.pool > 1:
                x, rows = rows.pooled(x)
            x = self.vision.get_submodule(self.adapter.norm)(x)
        if self.has_pool:
            return _owned(self.adapter.pool(self.vision, x.unflatten(0, (len(grids), -1))))
        if self.has_projector:
            x, taps = rows.shard(self._features(rows, rows.whole(x), [rows.whole(tap) for tap in taps])), []
        return _owned(rows.leaving(torch.cat((x, *taps)) if taps else x))

    def _rows(
        self, grids: tuple[Grid, ...], part: tuple[int, int] | None, gather: Gather | None, attention: AttentionChoices
    ) -> VisionRows:
        rows = VisionRows.of(
            self.shape,
            grids,
            self.module_spec.feature_rows(grids),
            part,
            self.row_sharding,
            where=self.where,
            total=sum(self.adapter.rows(grid) for grid in grids),
            gather=gather,
            attention=attention,
        )
        return rows.after_pooling() if self.arrives_pooled else rows

    def _features(self, rows: VisionRows, x_RD: Tensor, taps: list[Tensor]) -> Tensor:
        """The tokens that the projector makes of all rows, [V, columns]. Args: taps: [R, D] outputs of blocks."""
        shape = self.shape
        if shape.one_row and shape.packed and shape.pool == 1:
            x_RD = rows.with_tokens(x_RD)
        if shape.class_token and not shape.keeps_class_token:
            x_RD = x_RD.unflatten(0, (len(rows.grids), -1))[:, 1:].flatten(0, 1)
        if isinstance(self.projector, Projector):
            return rows.in_order(self.projector(x_RD, rows.grids))
        if self.projector is not None:
            return rows.in_order(self.projector(x_RD))
        return rows.in_order(self.adapter.merge(self.vision, x_RD, taps))

    def _nothing(self, x: Tensor) -> Tensor:
        """[0, width] that autograd connects to x, a tensor without rows."""
        width = self.module_spec.layers[self.hi - 1].output_width
        dtype = next(self.parameters()).dtype
        return x.new_zeros(0, width, dtype=dtype) + x.sum().to(dtype)


def train_language(chunk: Chunk, language: nn.Module, model: ModelConfig, adapter: LanguageDecoder) -> None:
    """Sets which parameters of a chunk's part of the language model train, and adds adapters; on the meta device."""
    trained = chosen_blocks(model, "language")
    set_trainable(language, model.language.trainable, blocks=adapter.blocks, trained=trained)
    adapt(chunk, (f"language.{adapter.blocks}",), model, "language")


def chosen_blocks(model: ModelConfig, module: str) -> frozenset[int] | None:
    """The blocks of a module that train alone; None: the config chooses none."""
    section = model.sections[module]
    assert isinstance(section, EncoderConfig | LanguageConfig)
    return trained_blocks(model, module) if section.trainable_layers else None


def adapt(chunk: nn.Module, containers: Iterable[str], model: ModelConfig, module: str) -> None:
    """Adds the adapters of a module that lie in some of its submodules, of which a chunk may lack any."""
    layers = adapted_layers(model, module)
    for container in containers:
        names = [name.removeprefix(f"{container}.") for name in layers if name.startswith(f"{container}.")]
        owner, _, last = container.rpartition(".")
        if names and getattr(chunk.get_submodule(owner), last, None) is not None:
            add_adapters(chunk.get_submodule(container), names, model.lora)


TIED_NAMES = {"language.lm_head.weight": "language.model.embed_tokens.weight"}
"""Name of the head of a language chunk -> that of the embedding which is the same parameter in some models."""


class LanguageChunk(Chunk):
    """Layers of the language model; image features enter the first, the loss leaves the last.

    As a text encoder it has no head: its last layer is the norm, and its normed states leave; as a tower of texts only
    those of labelled positions, projected.
    """

    def __init__(
        self,
        model: ModelConfig,
        shape: LanguageShape,
        adapter: LanguageDecoder,
        spec: ModelSpec,
        layers: tuple[int, int],
    ) -> None:
        super().__init__(spec.module("language"), layers)
        self.shape, self.adapter = shape, adapter
        self.language = adapter.build(language_config(model.language))
        adapter.keep(self.language, embed=self.has_embed, blocks=self.block_indices, norm=self.has_norm)
        self.has_head = self.is_last and self.module_spec.layers[-1].name == "head"
        self.chooses_rows = self.is_last and self.module_spec.layers[-1].output_rows == "outputs"
        """Whether only labelled rows leave: heads are modules of their own."""
        if not self.has_head:
            self.language.lm_head = None
        train_language(self, self.language, model, adapter)
        self.loss = LOSSES[model.language.loss](model)
        self.loss_chunk_tokens = self.module_spec.layers[-1].loss_chunk_tokens
        if self.loss_chunk_tokens and type(self.loss) is not CrossEntropy:
            raise ConfigError(
                f"model.language.loss = {model.language.loss!r} with training.loss_chunk_tokens = "
                f"{self.loss_chunk_tokens}: only cross_entropy is computed in pieces; set 0, which makes all logits"
            )
        self.vocabulary: VocabularySharding = WholeVocabulary()
        """Set by tensor parallelism, which divides it."""
        self.shards = TokenShards()
        """The division of the head's tokens, set likewise."""

    def blocks(self) -> list[nn.Module]:
        return list(self.language.get_submodule(self.adapter.blocks).children())

    @property
    def sums(self) -> frozenset[str]:
        parts = (name for name in self.module_spec.after if name.startswith(f"{EMBED}."))
        return frozenset(parts) if self.lo == 0 else frozenset()

    def tied_weight(self) -> nn.Parameter | None:
        if not self.shape.tied or self.has_embed == self.has_head:
            return None  # both in this chunk: one parameter already; or neither
        return self.language.model.embed_tokens.weight if self.has_embed else self.language.lm_head.weight

    def forward(
        self,
        x: Tensor,
        *,
        attention: AttentionContext,
        position_ids: Tensor,
        features: Tensor | Mapping[str, Tensor] | None = None,
        fills: Mapping[str, FeatureRows] = _NO_FILLS,
        labelled: Tensor | None = None,
        targets: Tensor | None = None,
        want_predictions: bool = False,
        want_losses: bool = False,
    ) -> Any:
        """The activation [t, D] after this chunk's layers, or the `LossOutput` of the head (in pieces as of
        `loss_in_pieces`), or the normed rows [L, D] for heads that are modules of their own.

        T is a multiple of the degree of `row_sharding`; rows at the end may be padding, which no row sees and
        which has no label.

        Args:
            x: the activation [t, D] of the chunk before; for the first chunk token ids [T], or if the embedding is in
                modules of its own the embedded tokens [t, D].
            attention: which tokens each of the T tokens sees.
            position_ids: [T] int64, the position of each token in its document; [3, T] (time, height, width) of a
                model with positions on three axes.
            features: features of this rank for the first chunk by their encoders, [v, D] each, or those of the one
                encoder that has any; None without images. Of an encoder with taps [v, (1 + taps) * D]: those that fill
                slots, then those that are added behind layers 0, 1, ...
            fills: encoder -> what its features fill.
            labelled: [L] int64, ascending: which of the T tokens have a target, for the head, or if only these leave.
            targets: [L] int64, for the head.
            want_predictions: also return the most likely token of each labelled position.
            want_losses: also return the loss of each labelled position.
        Raises: DataError: rows, positions, features or targets that disagree.
        """
        x, *carried = self.arriving(x)
        self._check_rows(len(x), position_ids.shape[-1], len(attention.rows))
        if self.has_embed:
            x = self.adapter.call_embed(self.language, x, position_ids)
        if self.lo == 0:
            x, *carried = self._filled(x, features, fills)
        if self.block_indices:
            context = self.adapter.context(self.language, x, position_ids)
            hidden = x[None]
            for block in self.blocks():
                hidden = block(hidden, attention_mask=attention, **context)
                if carried:
                    hidden = hidden + carried.pop(0)
            x = hidden[0]
        if self.has_head:
            return self._head(x, labelled, targets, want_predictions, want_losses)
        if self.chooses_rows:
            assert labelled is not None
            x = self.row_sharding.gather(x).index_select(0, labelled)
        if self.has_norm:
            x = self.adapter.call_norm(self.language, x)
        num_leaving = self.module_spec.num_carried(self.hi - 1)
        carried += [torch.zeros_like(x)] * (num_leaving - len(carried))  # of encoders without items here
        return _owned(torch.cat((x, *carried)) if num_leaving else x)

    def _filled(
        self, x_tD: Tensor, features: Tensor | Mapping[str, Tensor] | None, fills: Mapping[str, FeatureRows]
    ) -> list[Tensor]:
        """The embedded tokens with the features in their slots, and what is added behind layers 0, 1, ..., [t, D]."""
        of_modules = {next(iter(fills), ""): features} if isinstance(features, Tensor) else features or {}
        carried: list[Tensor] = []
        for name, values in of_modules.items():
            if name not in fills:
                raise DataError(f"{len(values)} image features arrived without the slots they fill")
            slots, exchange = fills[name]
            values, *others = (exchange(values) if exchange else values).split(self.shape.width, dim=1)
            added = [scatter_tokens(torch.zeros_like(x_tD), other, slots) for other in others]
            both = min(len(carried), len(added))  # of several encoders with taps
            carried = [a + b for a, b in zip(carried, added, strict=False)] + carried[both:] + added[both:]
            x_tD = scatter_tokens(x_tD, values, slots)
        return [x_tD, *carried]

    def _head(
        self,
        x_tD: Tensor,
        labelled: Tensor | None,
        targets: Tensor | None,
        want_predictions: bool,
        want_losses: bool,
    ) -> LossOutput:
        if labelled is None or targets is None or len(labelled) != len(targets):
            have, number = ("no" if given is None else len(given) for given in (targets, labelled))
            raise DataError(f"the language model's head got {have} targets for {number} labelled tokens")
        x_LD = self.adapter.call_norm(self.language, self.row_sharding.gather(x_tD).index_select(0, labelled))
        if self.loss_chunk_tokens:
            x_LD, weight_vD = self.shards.operands(self.language.lm_head, x_LD)
            return loss_in_pieces(
                x_LD,
                weight_vD,
                targets,
                first=self.shards.rank * len(weight_vD),
                combine=self.shards.combine,
                chunk_tokens=self.loss_chunk_tokens,
                want_predictions=want_predictions,
                want_losses=want_losses,
            )
        logits_LV = self.language.lm_head(x_LD)
        losses = self.loss(logits_LV, targets, reduction="none" if want_losses else "sum", vocabulary=self.vocabulary)
        return LossOutput(
            loss_sum=losses.sum() if want_losses else losses,
            predictions=self.predict(logits_LV) if want_predictions else None,
            losses=losses.detach() if want_losses else None,
        )

    def predict(self, logits_LV: Tensor) -> Tensor:
        """[L] int64: the token of each labelled position; the most likely one, unless this is replaced."""
        return self.vocabulary.most_likely(logits_LV)

    def _check_rows(self, num_rows: int, count: int, num_attending: int) -> None:
        degree = self.row_sharding.degree
        if count % degree or num_rows != (count if self.has_embed else count // degree) or num_attending != count:
            raise DataError(
                f"{self.where}: {num_rows} rows arrived, there are {count} positions and "
                f"{num_attending} rows of attention, divided by {degree}; all must agree"
            )


def _owned(x: Tensor) -> Tensor:
    """x, copied if it is a view: FSDP hooks the output of a chunk, and a hook on a view may be lost."""
    return x.clone() if x._is_view() else x
