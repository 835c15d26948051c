"""One adapter a family: how a real Hugging Face module is built, cut into layers and called layer by layer.

An adapter holds no state. It makes the family's own class with parameters on the meta device, keeps the
children of the wanted layers (names unchanged: a `ModuleDict` keyed by the original index stands for the
list) and sets the others to None.

Shape legend: N images; R rows of all images; F frames of a spectrogram; B its mel bins; D encoder width.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from mmtrain.errors import ConfigError, DataError
from mmtrain.modality.bitfield import Bits, segment_bits
from mmtrain.models.attention.context import PACKED, AttentionContext
from mmtrain.models.projector import Grid
from mmtrain.spec.vision_shapes import ROW_FRAMES, VisionShape
from mmtrain.spec.windows import window_rows


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
    """How to build and prune one family."""

    blocks: str
    """Name of the list of blocks inside of the module."""
    embed: tuple[str, ...]
    """Names of the first layer's modules."""
    norm: str = ""
    """Name of the norm after the last block; empty: none."""
    fused_qkv: tuple[str, ...] = ()
    """Layers of a block that make query, key and value at once, with head-major rows: see `fused_qkv`."""

    @abstractmethod
    def classes(self) -> tuple[type[PreTrainedConfig], Any]:
        """The Hugging Face config class, and the function that builds the module from such a config."""

    def build(self, values: dict[str, Any], attention: str = PACKED) -> PreTrainedModel:
        """The whole module with parameters on the meta device and real buffers.

        Raises: ConfigError: the Hugging Face class refuses the config.
        """
        config_class, make = self.classes()
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

    def keep(self, module: PreTrainedModel, *, embed: bool, blocks: list[int], norm: bool) -> None:
        """Drops every layer of the module but the wanted ones."""
        _replace(module, self.blocks, keep_blocks(module.get_submodule(self.blocks), blocks))
        if not embed:
            for name in self.embed:
                _replace(module, name, None)
        if self.norm and not norm:
            _replace(module, self.norm, None)


class VisionAdapter(Adapter):
    """How to call one encoder family on two-dimensional activations [R, D]."""

    mergers: tuple[str, ...] = ()
    """Names of the modules of its own merger; empty: it has none."""

    def keep(
        self, module: PreTrainedModel, *, embed: bool, blocks: list[int], norm: bool, merger: bool = False
    ) -> None:
        """Drops every layer of the module but the wanted ones. Args: merger: its own merger is wanted."""
        super().keep(module, embed=embed, blocks=blocks, norm=norm)
        for name in () if merger else self.mergers:
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

    def init_weights(self, tower: PreTrainedModel, module: nn.Module) -> None:
        """Initialises the tower or a module of it, whose children are done, by its class's own rule."""
        tower._init_weights(module)


class Qwen2VLVision(VisionAdapter):
    """The Qwen2-VL vision transformer: images of any size, packed; its own merger is optional."""

    blocks, fused_qkv = "blocks", ("attn.qkv",)
    embed: tuple[str, ...] = ("patch_embed",)
    mergers: tuple[str, ...] = ("merger",)

    def classes(self) -> tuple[type[PreTrainedConfig], Any]:
        from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

        return Qwen2VLVisionConfig, Qwen2VisionTransformerPretrainedModel

    def rows(self, grid: Grid) -> int:
        return grid[0] * grid[1] * grid[2]

    def call_embed(self, tower: PreTrainedModel, pixels: Tensor, rows: RankRows) -> Tensor:
        return tower.patch_embed(pixels)

    def context(self, tower: PreTrainedModel, x_rD: Tensor, rows: RankRows) -> Any:
        positions = block_positions(rows.grids, rows.shape.merge)
        if rows.shape.window:
            positions = positions[rows.shape.row_order(rows.grids)]
        return {
            # One piece: `packed_attention` has the mask of the images. On the CPU, since the block reads its values.
            "cu_seqlens": torch.tensor([0, len(rows.indices)], dtype=torch.int32),
            "position_embeddings": tower.rotary_pos_emb(
                x_rD, positions[np.maximum(rows.indices, 0)].to(x_rD.device, non_blocking=True)
            ),
            "context": rows.attend(frame_bits(rows.grids)),
        }

    def call_block(self, index: int, block: nn.Module, x_RD: Tensor, context: Any) -> Tensor:
        return block(x_RD, **context)

    def merge(self, tower: PreTrainedModel, x_RD: Tensor, taps: list[Tensor]) -> Tensor:
        return tower.merger(x_RD)


class Qwen3VLVision(Qwen2VLVision):
    """The Qwen3-VL vision transformer: learned positions in addition, and a merger for the output of some blocks."""

    embed, mergers = ("patch_embed", "pos_embed"), ("merger", "deepstack_merger_list")

    def classes(self) -> tuple[type[PreTrainedConfig], Any]:
        from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

        return Qwen3VLVisionConfig, Qwen3VLVisionModel

    def call_embed(self, tower: PreTrainedModel, pixels: Tensor, rows: RankRows) -> Tensor:
        from transformers.vision_utils import get_vision_interpolation_indices_and_weights

        x_RD = tower.patch_embed(pixels)
        index, weight = get_vision_interpolation_indices_and_weights(
            torch.tensor(rows.grids),
            tower.num_grid_per_side,
            tower.interpolation_mode,
            tower.interpolation_align_corners,
            rows.shape.merge,
        )
        patches = np.maximum(rows.indices, 0)[: len(pixels)]
        index, weight = (t[patches].to(x_RD.device, non_blocking=True) for t in (index, weight))
        return x_RD + (tower.pos_embed(index) * weight[:, :, None]).sum(1).to(x_RD.dtype)

    def merge(self, tower: PreTrainedModel, x_RD: Tensor, taps: list[Tensor]) -> Tensor:
        pairs = zip(tower.deepstack_merger_list, taps, strict=True)
        return torch.cat([tower.merger(x_RD), *(merger(tap) for merger, tap in pairs)], dim=1)


class Qwen25VLVision(Qwen2VLVision):
    """The Qwen2.5-VL vision transformer: most blocks attend inside of windows, each of them one run of rows."""

    def classes(self) -> tuple[type[PreTrainedConfig], Any]:
        from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

        return Qwen2_5_VLVisionConfig, Qwen2_5_VisionTransformerPretrainedModel

    def context(self, tower: PreTrainedModel, x_rD: Tensor, rows: RankRows) -> Any:
        full, shape = super().context(tower, x_rD, rows), rows.shape
        windows = rows.attend(segment_bits(window_rows(rows.grids, shape.merge, shape.window)))
        return {"full": full, "window": {**full, "context": windows}, "full_blocks": shape.full_blocks}

    def call_block(self, index: int, block: nn.Module, x_RD: Tensor, context: Any) -> Tensor:
        return block(x_RD, **context["full" if index in context["full_blocks"] else "window"])


class MaskedVision(VisionAdapter):
    """Encoders whose blocks take rows and a mask: SigLIP, CLIP, ViT, Whisper (images of one size) and SigLIP 2."""

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


class Siglip(MaskedVision):
    """The SigLIP vision transformer without its pooling head."""

    blocks, embed, norm = "encoder.layers", ("embeddings",), "post_layernorm"
    name = "Siglip"

    def classes(self) -> tuple[type[PreTrainedConfig], Any]:
        import transformers

        model = getattr(transformers, f"{self.name}VisionModel")

        def make(config: PreTrainedConfig) -> PreTrainedModel:
            config.vision_use_head = False
            return model(config)

        return getattr(transformers, f"{self.name}VisionConfig"), make


class Siglip2(Siglip):
    """The SigLIP 2 vision transformer for images of any size (NaFlex), packed, without its pooling head."""

    name = "Siglip2"

    def call_embed(self, tower: PreTrainedModel, pixels: Tensor, rows: RankRows) -> Tensor:
        embeddings = tower.embeddings
        side, merge = embeddings.position_embedding_size, rows.shape.merge
        table = embeddings.position_embedding.weight.unflatten(0, (side, side))
        resized, patches, start = [], [], 0
        for grid in rows.grids:
            _, h, w = grid
            sides = torch.tensor([[h, w]])
            resized.append(embeddings.resize_positional_embeddings(table, sides, max_length=h * w)[0])
            down, across = block_positions((grid,), merge).unbind(1)
            patches.append(start + down * w + across)
            start += h * w
        order = torch.cat(patches)[np.maximum(rows.indices, 0)[: len(pixels)]]
        positions = torch.cat(resized).index_select(0, order.to(pixels.device, non_blocking=True))
        return embeddings.patch_embedding(pixels.to(embeddings.patch_embedding.weight.dtype)) + positions


class CLIP(MaskedVision):
    """The CLIP vision transformer, up to its last block: the norm after it is for the pooled class token alone."""

    blocks, embed, norm = "encoder.layers", ("embeddings", "pre_layrnorm"), "post_layernorm"
    extra_rows = 1

    def classes(self) -> tuple[type[PreTrainedConfig], Any]:
        from transformers import CLIPVisionConfig, CLIPVisionModel

        return CLIPVisionConfig, CLIPVisionModel


class ViT(MaskedVision):
    """The ViT without its pooler."""

    blocks, embed, norm = "layers", ("embeddings",), "layernorm"
    extra_rows = 1

    def classes(self) -> tuple[type[PreTrainedConfig], Any]:
        from transformers import ViTConfig, ViTModel

        return ViTConfig, lambda config: ViTModel(config, add_pooling_layer=False)


class WhisperEncoder(MaskedVision):
    """The Whisper encoder: a log-mel spectrogram [mel bins, 2 x frames] is an image of one row of frames. Where rows
    are packed, a patch is all that one row reads of it, see `models.spectrogram`."""

    blocks, embed, norm = "layers", ("conv1", "conv2", "embed_positions"), "layer_norm"

    def classes(self) -> tuple[type[PreTrainedConfig], Any]:
        from transformers import WhisperConfig
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        return WhisperConfig, WhisperEncoder

    def call_embed(self, tower: PreTrainedModel, pixels: Tensor, rows: RankRows) -> Tensor:
        if rows.shape.packed:
            return _embedded_rows(tower, pixels, rows)
        x_NDF = nn.functional.gelu(tower.conv1(pixels.to(tower.conv1.weight.dtype)))
        x_NDF = nn.functional.gelu(tower.conv2(x_NDF))
        frames = torch.arange(x_NDF.shape[-1], device=x_NDF.device)
        return (x_NDF.transpose(1, 2) + tower.embed_positions(frames)).flatten(0, 1)

    def init_weights(self, tower: PreTrainedModel, module: nn.Module) -> None:
        if module is not tower or tower.embed_positions is not None:  # the tower's own rule sets the positions
            super().init_weights(tower, module)


class Qwen2AudioEncoder(WhisperEncoder):
    """The Qwen2-Audio encoder, which is always packed."""

    def classes(self) -> tuple[type[PreTrainedConfig], Any]:
        from transformers import Qwen2AudioEncoder, Qwen2AudioEncoderConfig

        return Qwen2AudioEncoderConfig, Qwen2AudioEncoder


class Decoder(Adapter):
    """A decoder-only language model with its head: Qwen2, Qwen3, Llama, Mistral."""

    blocks, embed, norm = "model.layers", ("model.embed_tokens",), "model.norm"
    reader = "AutoModelForCausalLM"
    """The class of transformers that reads what its `save_pretrained` writes."""

    def __init__(self, name: str) -> None:
        self.name = name

    def classes(self) -> tuple[type[PreTrainedConfig], Any]:
        import transformers

        return getattr(transformers, f"{self.name}Config"), getattr(transformers, f"{self.name}ForCausalLM")

    def build(self, values: dict[str, Any], attention: str = PACKED) -> PreTrainedModel:
        return super().build({**values, "use_cache": False}, attention)

    def keep(self, module: PreTrainedModel, *, embed: bool, blocks: list[int], norm: bool) -> None:
        super().keep(module, embed=embed, blocks=blocks, norm=norm)
        if not norm:
            module.lm_head = None
        elif embed and module.config.tie_word_embeddings:
            module.lm_head.weight = module.model.embed_tokens.weight


class TextPart(Decoder):
    """The language model of a whole model, with the head that the whole one gives it: Qwen2-VL and its successors."""

    reader = "AutoModel"

    def classes(self) -> tuple[type[PreTrainedConfig], Any]:
        import transformers

        text_model = getattr(transformers, f"{self.name}TextModel")
        return text_model.config_class, lambda config: _with_head(text_model, config)


VISION_ADAPTERS: dict[str, VisionAdapter] = {
    "qwen2_vl_vision": Qwen2VLVision(),
    "qwen2_5_vl_vision": Qwen25VLVision(),
    "qwen3_vl_vision": Qwen3VLVision(),
    "siglip_vision_model": Siglip(),
    "siglip2_vision_model": Siglip2(),
    "clip_vision_model": CLIP(),
    "vit": ViT(),
    "whisper_encoder": WhisperEncoder(),
    "qwen2_audio_encoder": Qwen2AudioEncoder(),
}
DECODERS: dict[str, Decoder] = {
    "qwen2": Decoder("Qwen2"),
    "llama": Decoder("Llama"),
    "qwen3": Decoder("Qwen3"),
    "mistral": Decoder("Mistral"),
    "qwen2_vl_text": TextPart("Qwen2VL"),
    "qwen2_5_vl_text": TextPart("Qwen2_5_VL"),
    "qwen3_vl_text": TextPart("Qwen3VL"),
}


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


def _embedded_rows(tower: PreTrainedModel, patches: Tensor, rows: RankRows) -> Tensor:
    """[R, D]: the first activation of packed rows of sounds. Args: patches: [R, ROW_FRAMES * B]."""
    first, second = tower.conv1, tower.conv2
    own = np.maximum(rows.indices, 0)[: len(patches)]
    time_R = np.concatenate([np.arange(w) for _, _, w in rows.grids])[own]
    x_RBF = patches.to(first.weight.dtype).unflatten(1, (ROW_FRAMES, -1)).transpose(1, 2)
    x_RD3 = nn.functional.gelu(nn.functional.conv1d(x_RBF, first.weight, first.bias))
    # Before a sound's first frame the second convolution reads zeros, as its padding, and not what the first one
    # makes of zeros.
    begins_R = torch.from_numpy(time_R == 0).to(x_RD3.device, non_blocking=True)
    x_RD3[:, :, 0].masked_fill_(begins_R[:, None], 0)
    x_RD = nn.functional.gelu(nn.functional.conv1d(x_RD3, second.weight, second.bias)).squeeze(2)
    return x_RD + tower.embed_positions(torch.from_numpy(time_R).to(x_RD.device, non_blocking=True))


def block_positions(grids: tuple[Grid, ...], merge: int) -> Tensor:
    """Row and column of each patch when patches come in merge x merge squares, [R, 2] int64."""
    positions = []
    for t, h, w in grids:
        cells = torch.cartesian_prod(torch.arange(h), torch.arange(w))
        squares = cells.reshape(h // merge, merge, w // merge, merge, 2).transpose(1, 2).reshape(-1, 2)
        positions.append(squares.repeat(t, 1))
    return torch.cat(positions)


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
