"""The kinds of content by name, and those of a model."""

from collections.abc import Callable

from mmtrain.modality.base import Modality
from mmtrain.modality.bitfield import LanguageMask
from mmtrain.modality.clips import Captions, Frames, Latents
from mmtrain.modality.documents import Documents
from mmtrain.modality.images import Images
from mmtrain.modality.submesh import Submesh
from mmtrain.spec.spec import Division, ModelSpec, ModuleSpec

MODALITIES: dict[str, Callable[[LanguageMask], Modality]] = {
    "images": lambda mask: Images(),
    "documents": Documents,
    "captions": lambda mask: Captions(),
    "latents": lambda mask: Latents(),
    "frames": lambda mask: Frames(),
}
"""Name of a kind of content -> its constructor, from the mask of the job's language model."""


def modalities(spec: ModelSpec, attention_mask: LanguageMask = "causal") -> dict[str, Modality]:
    """Name of a module -> the kind of content that it consumes, in the order of the modules."""
    return {module.name: MODALITIES[module.consumes](attention_mask) for module in spec.modules}


def division_of(submesh: Submesh, module: ModuleSpec) -> Division:
    """The division of a module over the ranks of a submesh."""
    return MODALITIES[module.consumes](submesh.attention_mask).division(submesh, module)
