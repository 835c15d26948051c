"""The kinds of content by name, and those of a model."""

from collections.abc import Callable

from mmtrain.modality.base import Modality
from mmtrain.modality.bitfield import LanguageMask
from mmtrain.modality.clips import Captions, Frames, Latents
from mmtrain.modality.documents import Documents, Labels, Pairs, Texts, TokenIds
from mmtrain.modality.images import Images
from mmtrain.modality.submesh import Submesh
from mmtrain.spec.layer import Division
from mmtrain.spec.spec import ModelSpec, ModuleSpec

MODALITIES: dict[str, Callable[[LanguageMask, str], Modality]] = {
    "images": lambda mask, module: Images(module),
    "documents": lambda mask, module: Documents(mask),
    "texts": lambda mask, module: Texts(mask),
    "token_ids": lambda mask, module: TokenIds(mask),
    "labels": lambda mask, module: Labels(mask),
    "pairs": lambda mask, module: Pairs(mask),
    "captions": lambda mask, module: Captions(),
    "latents": lambda mask, module: Latents(),
    "frames": lambda mask, module: Frames(),
}
"""Name of a kind of content -> its constructor, from the mask of the job's language model and the name of the module
that consumes it; without a name it is all content of that kind."""


def modality_of(module: ModuleSpec, attention_mask: LanguageMask = "causal") -> Modality:
    """The kind of content that a module consumes."""
    return MODALITIES[module.consumes](attention_mask, module.name)


def modalities(spec: ModelSpec, attention_mask: LanguageMask = "causal") -> dict[str, Modality]:
    """Name of a module -> the kind of content that it consumes, in the order of the modules."""
    return {module.name: modality_of(module, attention_mask) for module in spec.modules}


def division_of(submesh: Submesh, module: ModuleSpec) -> Division:
    """The division of a module over the ranks of a submesh."""
    return modality_of(module, submesh.attention_mask).division(submesh, module)
