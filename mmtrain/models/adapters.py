"""Adapters: how a real Hugging Face module is built, cut into layers and called layer by layer.

Those of a family are in its folder, `families/NAME/adapter.py`, and found here. An adapter holds no state. It makes the
family's own class with parameters on the meta device, keeps the children of the wanted layers (names unchanged: a
`ModuleDict` keyed by the original index stands for the list) and sets the others to None.

Shape legend: N images; R rows of all images; F frames of a spectrogram; B its mel bins; D encoder width.
"""

import copy
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from mmtrain.errors import ConfigError, DataError
from mmtrain.families.catalogue import FOLDERS, TABLES
from mmtrain.families.shapes import VisionShape
from mmtrain.families.tensor_table import TensorTable
from mmtrain.families.windows import Grid
from mmtrain.modality.bitfield import Bits, segment_bits
from mmtrain.models.attention.context import PACKED, AttentionContext
from mmtrain.models.transfer import to_device

Classes = tuple[type[PreTrainedConfig], Callable[[Any], PreTrainedModel]]
"""The Hugging Face config class, and the function that builds the module from such a config."""


@dataclass(frozen=True, kw_only=True)
class RankRows:
    """The rows of a vision stage on this rank."""

    shape: VisionShape
    grids: tuple[Grid, ...]
    """Patches (time, height, width) of each image."""
    indices: Bits
    """[R] int64: index of each row of this rank among the rows of all images, in the order in which rows travel; -1 for
    padding."""
    attend: Callable[[Bits], AttentionContext]
    """The mask of the rows of all images -> the context of attention on this rank."""


class Adapter(ABC):
    """How to build and prune one network of a family, whose table names its layers."""

    classes: Classes
    reader: str
    """The class of transformers that reads what an export of the module alone holds; of an encoder, of a tower."""
    fused_qkv: tuple[str, ...] = ()
    """Layers of a block that make query, key and value at once, with head-major rows: see `fused_qkv`."""

    def __init__(self, table: TensorTable) -> None:
        """Args: table: of its network; names in it begin with that of the module."""
        self.blocks = _inside(table.blocks)
        """Name of the list of blocks inside of the module."""
        self.embed = [_inside(name) for name in table.embed]
        """Names of the first layer's modules."""
        self.norm = _inside(next(iter(table.norm), ""))
        """Name of the norm after the last block; empty: none."""

    def build(self, values: dict[str, Any], attention: str = PACKED) -> PreTrainedModel:
        """The whole module with parameters on the meta device and real buffers.

        Raises: ConfigError: the Hugging Face class refuses the config.
        """
        return _build(self.classes, values, attention)

    def build_reader(self, values: dict[str, Any]) -> PreTrainedModel:
        """The class that reads an export of a tower, with parameters on the meta device."""
        return _build((self.classes[0], getattr(transformers, self.reader)), values, "sdpa")

    def keep(self, module: PreTrainedModel, *, embed: bool, blocks: list[int], norm: bool) -> None:
        """Drops every layer of the module but the wanted ones."""
        _replace(module, self.blocks, keep_blocks(module.get_submodule(self.blocks), blocks))
        if not embed:
            for name in self.embed:
                _replace(module, name, None)
        if self.norm and not norm:
            _replace(module, self.norm, None)


def _build(classes: Classes, values: dict[str, Any], attention: str) -> PreTrainedModel:
    """A module of some classes, see `Adapter.build`."""
    config_class, make = classes
    # Copied, since the classes change nested tables. Null is no window; of other keys it is the default.
    given = {k: v for k, v in values.items() if k != "model_type" and (v is not None or k == "sliding_window")}
    fields = copy.deepcopy(given)
    try:
        config = config_class(**fields)
        config._attn_implementation = attention
        with parameters_on_meta(), no_init_weights():
            return make(config)
    except Exception as error:  # the config classes have validators that raise types of their own
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{config_class.__name__} cannot be built from the config: {reason}") from error


class VisionAdapter(Adapter):
    """How to call one encoder family on two-dimensional activations [R, D]."""

    def __init__(self, table: TensorTable) -> None:
        super().__init__(table)
        self.mergers = table.mergers
        """See `TensorTable`."""

    pools: tuple[str, ...] = ()
    """The modules, of an encoder that may be a tower, that make the embedding, behind the norm."""
    tower_classes: Classes
    """The classes, of such an encoder, whose module has them."""

    def build_tower(self, values: dict[str, Any], attention: str = PACKED) -> PreTrainedModel:
        """Builds as `build` does, with what makes the embedding of an image, of an encoder that may be a tower."""
        return _build(self.tower_classes, values, attention)

    def keep(
        self,
        module: PreTrainedModel,
        *,
        embed: bool,
        blocks: list[int],
        norm: bool,
        merger: bool = False,
        pool: bool = False,
    ) -> None:
        """Drops every layer of the module but the wanted ones. Args: merger: its own merger is wanted. pool: what makes
        its embedding is."""
        super().keep(module, embed=embed, blocks=blocks, norm=norm)
        for name in () if merger else self.mergers:
            _replace(module, name, None)
        for name in () if pool else self.pools:
            _replace(module, name, None)

    def own_merger(self, tower: PreTrainedModel) -> list[nn.Module]:
        """The modules of its own merger that this part of the tower has."""
        modules = (getattr(tower, name, None) for name in self.mergers)
        return [module for module in modules if module is not None]

    def merge(self, tower: PreTrainedModel, x_RD: Tensor, taps: list[Tensor]) -> Tensor:
        """The features that its own merger makes of all rows, [V, columns].

        Only families with `mergers` have it; the config of others is refused (`projector.kind = "native"`).
        Args: taps: [R, D] outputs of blocks.
        """
        raise NotImplementedError

    @abstractmethod
    def rows(self, grid: Grid) -> int:
        """Rows of one image between the layers."""

    @abstractmethod
    def call_embed(self, tower: PreTrainedModel, pixels: Tensor, rows: RankRows) -> Tensor:
        """The first activation, [R, D], of this rank's rows without padding."""

    @abstractmethod
    def context(self, tower: PreTrainedModel, x_rD: Tensor, rows: RankRows) -> Any:
        """The arguments of all blocks in addition to the activation [r, D]; without a gradient.

        Args: x_rD: the activation, only its device and dtype are used.
        """

    @abstractmethod
    def call_block(self, index: int, block: nn.Module, x_RD: Tensor, context: Any) -> Tensor:
        """One block, [R, D]. Args: index: of the block in the whole module."""

    def pool(self, tower: PreTrainedModel, x_NRD: Tensor) -> Tensor:
        """The embeddings that a tower makes of the rows of N images of one size, [N, columns].

        Only families with `pools` have it; others are refused as towers (`spec.vision_shapes`).
        """
        raise NotImplementedError

    def init_weights(self, tower: PreTrainedModel, module: nn.Module) -> None:
        """Initialises the tower or a module of it, whose children are done, by its class's own rule."""
        tower._init_weights(module)


class OnePiece:
    """The edges of one piece, of which blocks take the differences as a list: `packed_attention` has the mask of the
    images. No tensor, since a compiled block cannot read the values of one."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __getitem__(self, index: slice) -> "OnePiece":
        return self

    def __sub__(self, other: "OnePiece") -> "OnePiece":
        return self

    def tolist(self) -> list[int]:
        """The number of rows of each piece."""
        return [self.rows]


class PackedVision(VisionAdapter):
    """Encoders of packed images of any size with rotary positions, whose own merger is optional."""

    fused_qkv = ("attn.qkv",)

    def rows(self, grid: Grid) -> int:
        return grid[0] * grid[1] * grid[2]

    def call_embed(self, tower: PreTrainedModel, pixels: Tensor, rows: RankRows) -> Tensor:
        return tower.patch_embed(pixels)

    def context(self, tower: PreTrainedModel, x_rD: Tensor, rows: RankRows) -> Any:
        positions = block_positions(rows.grids, rows.shape.merge)
        if rows.shape.window:
            positions = positions[rows.shape.row_order(rows.grids)]
        return {
            "cu_seqlens": OnePiece(len(rows.indices)),
            "position_embeddings": tower.rotary_pos_emb(
                x_rD, to_device(positions[np.maximum(rows.indices, 0)], x_rD.device)
            ),
            "context": rows.attend(frame_bits(rows.grids)),
        }

    def call_block(self, index: int, block: nn.Module, x_RD: Tensor, context: Any) -> Tensor:
        return block(x_RD, **context)

    def merge(self, tower: PreTrainedModel, x_RD: Tensor, taps: list[Tensor]) -> Tensor:
        return tower.merger(x_RD)


class MaskedVision(VisionAdapter):
    """Encoders whose blocks take rows and a mask."""

    extra_rows = 0

    def rows(self, grid: Grid) -> int:
        return grid[1] * grid[2] + self.extra_rows

    def call_embed(self, tower: PreTrainedModel, pixels: Tensor, rows: RankRows) -> Tensor:
        x = pixels.to(next(tower.get_submodule(self.embed[0]).parameters()).dtype)
        for name in self.embed:
            x = tower.get_submodule(name)(x)
        return x.flatten(0, 1)

    def context(self, tower: PreTrainedModel, x_rD: Tensor, rows: RankRows) -> Any:
        return rows.attend(segment_bits(self.rows(grid) for grid in rows.grids))

    def call_block(self, index: int, block: nn.Module, x_RD: Tensor, context: Any) -> Tensor:
        return block(x_RD[None], context)[0]


class LanguageDecoder(Adapter):
    """A decoder-only language model with its head."""

    reader = "AutoModelForCausalLM"

    def __init__(self, name: str, table: TensorTable) -> None:
        """Args: name: how the names of its classes begin. table: as of `Adapter`."""
        super().__init__(table)
        self.classes = self._classes(name)

    def _classes(self, name: str) -> Classes:
        return getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}ForCausalLM")

    def build(self, values: dict[str, Any], attention: str = PACKED) -> PreTrainedModel:
        return super().build({**values, "use_cache": False}, attention)

    def call_embed(self, language: PreTrainedModel, ids_T: Tensor, position_ids: Tensor) -> Tensor:
        """The first activation, [t, D]. Args: position_ids: of the tokens."""
        x_tD: Tensor = language.model.embed_tokens(ids_T)
        return x_tD

    def context(self, language: PreTrainedModel, x_tD: Tensor, position_ids: Tensor) -> dict[str, Any]:
        """The arguments of all blocks in addition to activation and attention. Args: x_tD: only its device and dtype
        are used."""
        return {"position_embeddings": language.model.rotary_emb(x_tD[None], position_ids.unsqueeze(-2))}

    def call_norm(self, language: PreTrainedModel, x_tD: Tensor) -> Tensor:
        """What follows the last block, before a head."""
        x_tD = language.model.norm(x_tD)
        return x_tD

    def keep(self, module: PreTrainedModel, *, embed: bool, blocks: list[int], norm: bool) -> None:
        super().keep(module, embed=embed, blocks=blocks, norm=norm)
        if not norm:
            module.lm_head = None
        elif embed and module.config.tie_word_embeddings:
            module.lm_head.weight = module.model.embed_tokens.weight


class TextTower(LanguageDecoder):
    """A tower of texts, with the projection of the embedding of each."""

    def __init__(self, classes: Classes, reader: str, projection: str, table: TensorTable) -> None:
        """Args: classes: whose module has a projection. reader, table: as of `Adapter`. projection: its name there."""
        Adapter.__init__(self, table)
        self.classes, self.reader, self._projection = classes, reader, projection

    def build(self, values: dict[str, Any], attention: str = PACKED) -> PreTrainedModel:
        return Adapter.build(self, values, attention)

    def keep(self, module: PreTrainedModel, *, embed: bool, blocks: list[int], norm: bool) -> None:
        Adapter.keep(self, module, embed=embed, blocks=blocks, norm=norm)
        if not norm:
            _replace(module, self._projection, None)

    def call_embed(self, language: PreTrainedModel, ids_T: Tensor, position_ids: Tensor) -> Tensor:
        embeddings = language.embeddings  # whose own forward takes no more tokens than one text may have
        x_tD: Tensor = embeddings.token_embedding(ids_T) + embeddings.position_embedding(position_ids)
        return x_tD

    def context(self, language: PreTrainedModel, x_tD: Tensor, position_ids: Tensor) -> dict[str, Any]:
        return {}

    def call_norm(self, language: PreTrainedModel, x_tD: Tensor) -> Tensor:
        x_tP: Tensor = language.get_submodule(self._projection)(language.final_layer_norm(x_tD))
        return x_tP


class TextPart(LanguageDecoder):
    """The language model of a whole model, with the head that the whole one gives it."""

    reader = "AutoModel"

    def _classes(self, name: str) -> Classes:
        text_model = getattr(transformers, f"{name}TextModel")
        return text_model.config_class, lambda config: _with_head(text_model, config)


@cache
def vision_adapter(model_type: str) -> VisionAdapter:
    """The adapter of an encoder."""
    adapter: VisionAdapter = adapters_of(model_type).ADAPTERS[model_type](TABLES[model_type])
    return adapter


@cache
def decoder(model_type: str) -> LanguageDecoder:
    """The adapter of a language model."""
    adapter: LanguageDecoder = adapters_of(model_type).ADAPTERS[model_type](TABLES[model_type])
    return adapter


def make_projector_of(kind: str, width: int, outputs: int, hidden_act: str) -> nn.Module:
    """A new projector of a family's own class, for the default device, which takes [.., D] and returns [.., L].

    Args: kind: of the projector. width: D. outputs: L. hidden_act: between its linear layers, if there are two.
    """
    projector: nn.Module = adapters_of(kind).projector(width, outputs, hidden_act)
    return projector


def _inside(name: str) -> str:
    """A name in a table without that of the module, with which it begins."""
    return name.partition(".")[2]


def adapters_of(name: str) -> Any:
    """The adapters of the family that has a network or a projector."""
    return importlib.import_module(f"mmtrain.families.{FOLDERS[name]}.adapter")


def _with_head(text_model: Any, config: PreTrainedConfig) -> PreTrainedModel:
    """A text model as `model`, with `lm_head`: the names and initial values are those of its whole model."""

    class TextModelWithHead(text_model.__base__):  # type: ignore[misc]
        config_class = text_model.config_class
        _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = text_model(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

    TextModelWithHead.__name__ = text_model.__name__.replace("TextModel", "TextForCausalLM")
    made: PreTrainedModel = TextModelWithHead(config)
    return made


def block_positions(grids: tuple[Grid, ...], merge: int) -> Tensor:
    """Row and column of each patch when patches come in merge x merge squares, [R, 2] int64."""
    counts = [t * h * w for t, h, w in grids]
    height, width = (np.repeat([grid[axis] for grid in grids], counts) for axis in (1, 2))
    patch = np.arange(sum(counts)) - np.repeat(np.cumsum(counts) - counts, counts)
    square, inner = np.divmod(patch % (height * width), merge**2)
    corners = np.stack(np.divmod(square, width // merge), axis=1) * merge
    return torch.from_numpy(corners + np.stack(np.divmod(inner, merge), axis=1))


def frame_bits(grids: tuple[Grid, ...]) -> Bits:
    """The mask of packed images: attention inside of each frame."""
    return segment_bits(h * w for t, h, w in grids for _ in range(t))


def check_grids(shape: VisionShape, grids: tuple[Grid, ...]) -> None:
    """Refuses images that the encoder cannot take.

    Raises: DataError: another size than the encoder's fixed one, sides that cannot be merged, or a sound that makes no
        token or has more rows than the encoder has positions.
    """
    for grid in grids:
        if shape.fixed_grid is not None and grid != shape.fixed_grid:
            raise DataError(f"an image has patches {grid}, but {shape.model_type} takes {shape.fixed_grid} alone")
        if shape.one_row and not (shape.patches_per_token <= grid[2] <= shape.max_rows and grid[:2] == (1, 1)):
            raise DataError(
                f"a sound has rows {grid}, but {shape.model_type} takes (1, 1, {shape.patches_per_token}) to "
                f"(1, 1, {shape.max_rows})"
            )
        if not shape.one_row and (grid[2] % shape.merge or grid[1] % shape.merge):
            raise DataError(
                f"an image has patches {grid}; height and width must be multiples of the spatial merge {shape.merge}"
            )


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, new parameters are put on the meta device while buffers stay real.

    A module built under `torch.device("meta")` would lose buffers that no checkpoint holds, such as
    rotary frequencies.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def build_diffusers(where: str, name: str, values: dict[str, Any]) -> Any:
    """A module of diffusers with parameters on the meta device and real buffers.

    Args: where: the section of the config. name: of the class.
    Raises: ConfigError: diffusers is not installed, or its class refuses the config.
    """
    try:
        import diffusers

        make: Any = getattr(diffusers, name)
    except ImportError as error:
        raise ConfigError(
            f"[{where}] needs the library diffusers, which cannot be imported ({error}); install mmtrain[video]"
        ) from error
    fields = {key: value for key, value in values.items() if key != "model_type"}
    try:
        with parameters_on_meta():
            return make(**fields)
    except Exception as error:  # whatever the class checks
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"{where}: {name} cannot be built from the config: {reason}; change that key or leave it out"
        ) from error


def keep_blocks(blocks: nn.Module, indices: list[int]) -> nn.ModuleDict:
    """Some of a list of blocks, under the names that they have in the list."""
    children = dict(blocks.named_children())
    return nn.ModuleDict({str(i): children[str(i)] for i in indices})


def _replace(module: nn.Module, path: str, child: nn.Module | None) -> None:
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, child)
