"""What the rest of the package asks a model family. Pure; no weights.

A family is a folder of `families/`: its `FAMILY`, and `adapter.py`, the only file of it that loads torch. It has a
network for each `model_type` of a single module, and may have the whole model that its modules make together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from mmtrain.families.composite import Composite, Spelling
from mmtrain.families.projectors import ProjectorKind
from mmtrain.families.shapes import VisionShape
from mmtrain.families.tensor_table import TensorTable

Colours = tuple[float, float, float]
CLIP_MEAN: Colours = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Colours = (0.26862954, 0.26130258, 0.27577711)
HALF: Colours = (0.5, 0.5, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDefaults:
    """What the image processor of an encoder does by default."""

    layout: Literal["native", "filled", "fixed", "cropped"]
    """native: sides become multiples of a patch, within limits of the area. filled: as large as a number of patches
    allows. fixed: one size. cropped: the middle of that size is cut out."""
    processor: str = ""
    """The class of transformers that does the same; empty: none whose config we write."""
    mean: Colours = HALF
    std: Colours = HALF
    resample: Literal["BICUBIC", "BILINEAR"] = "BICUBIC"
    min_pixels: int = 0
    """Smallest area after resizing (native)."""
    max_pixels: int = 0
    """Largest area after resizing (native)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Videos:
    """What the video processor of an encoder does by default."""

    timed: bool = False
    """Whether text says the time of each patch in time, so that each is an item of its own."""
    min_pixels: int = 128 * 28**2
    """Smallest area after resizing."""
    max_pixels: int = 768 * 28**2
    """Largest area after resizing."""
    time_key: str = ""
    """Key of the encoder's config with the positions of one second; empty: each patch in time is one position, however
    long it lasts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """One `model_type`: the relevant keys of its config, with the defaults of its class, and its layers."""

    defaults: Mapping[str, Any]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of a key that the class accepts."""
    optional: Mapping[str, Any] = field(default_factory=dict)
    """Keys without a default that an inline config may hold -> a value of their type; None: the class checks it."""
    parents: tuple[str, ...] = ()
    """Other values of `model_type` that name this network, or a whole model that contains it."""
    dropout: tuple[str, ...] = ()
    """Keys that must be 0: see `config_values`."""
    spellings: tuple[Spelling, ...] = ()
    """The names of the network in stored weights where it is a part of a larger model; the first one that occurs
    counts. Where each module of a whole model takes its own part, see `Composite`."""
    embeds: str = ""
    """The part of a tower's class that makes the embedding, which stored weights may lack."""
    table: TensorTable | None = None
    """How tensor parallelism divides its layers; None: it is not divided."""

    def like(self, changes: Mapping[str, Any], optional: Mapping[str, Any] | None = None, **fields: Any) -> Self:
        """A network like this one.

        Args: changes: of its defaults, and further ones. optional: further keys without a default. fields: new values.
        """
        optional = {**self.optional, **(optional or {})}
        return replace(self, defaults={**self.defaults, **changes}, optional=optional, **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder(Network):
    """A network that makes features of images or sounds."""

    sizes: Mapping[str, str]
    """What its config calls its width, depth, heads; and, of those that have them, mlp, out (the width that its own
    merger makes), window and full (the side of its attention windows in pixels, and the blocks without), taps (blocks
    whose outputs its own merger reads in addition)."""
    shape: Callable[[Mapping[str, Any], str, int], VisionShape]
    """A function (complete config, name of the section in errors, spatial merge of the projector) -> sizes."""
    pooling: str = ""
    """How it makes one embedding of an image, as `VisionShape` has it; empty: it is no tower."""
    embedding: str = ""
    """The key of its config with the width of its embedding."""
    pools: str = ""
    """The key that says whether it has the modules that make the embedding; empty: it always has."""
    images: ImageDefaults | None = None
    """Defaults of the images that it reads; None: it reads sound."""
    videos: Videos | None = None
    """How it reads videos; None: it reads none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Language(Network):
    """A decoder-only language model."""

    axis_columns: tuple[int, ...] = ()
    """Default of `mrope_section` of one whose image tokens have time, height and width; empty: positions are along the
    text alone."""
    qkv_bias: bool = False
    """Whether its queries, keys and values have biases that no key turns off."""
    head_norms: bool = False
    """Whether norms follow on the queries and keys of each head."""
    sliding_window: int = 0
    """Default of the key `sliding_window` where a number alone turns windows on, in tokens."""
    embedding: str = ""
    """The key with the width of the embedding that a tower makes of each text; empty: it predicts tokens."""
    embedding_bias: bool = False
    """Whether the projection to the embedding has a bias."""
    bidirectional: bool = False
    """Whether the tokens of a tower see all of their text, and texts are padded to one length."""

    @property
    def position_axes(self) -> int:
        """Axes of its positions."""
        return len(self.axis_columns) or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Vae(Network):
    """A VAE, of which training runs the frozen encoder."""

    narrow: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Complete config -> its keys of width, for a tiny VAE whose latents have the same sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family; keys are values of `model_type`."""

    name: str
    """The name of its folder."""
    encoders: Mapping[str, Encoder] = field(default_factory=dict)
    languages: Mapping[str, Language] = field(default_factory=dict)
    dits: Mapping[str, Network] = field(default_factory=dict)
    vaes: Mapping[str, Vae] = field(default_factory=dict)
    composites: Mapping[str, Composite] = field(default_factory=dict)
    projectors: Mapping[str, ProjectorKind] = field(default_factory=dict)
    """Kind of a projector whose class is the family's -> what it is."""

    @property
    def networks(self) -> Mapping[str, Network]:
        """All of its networks."""
        return {**self.encoders, **self.languages, **self.dits, **self.vaes}


def named(networks: Mapping[str, Network]) -> dict[str, str]:
    """Value of `model_type` -> the network that it names."""
    return {name: key for key, network in networks.items() for name in (key, *network.parents)}
