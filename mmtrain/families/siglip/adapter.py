"""The class of SigLIP in transformers."""

from functools import partial

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from mmtrain.families.tensor_table import TensorTable
from mmtrain.models.adapters import MaskedVision


class Siglip(MaskedVision):
    """The SigLIP vision transformer without its pooling head."""

    def __init__(self, name: str, table: TensorTable) -> None:
        """Args: name: how the names of its classes begin. table: as of `Adapter`."""
        super().__init__(table)
        model = getattr(transformers, f"{name}VisionModel")

        def make(config: PreTrainedConfig) -> PreTrainedModel:
            config.vision_use_head = False
            made: PreTrainedModel = model(config)
            return made

        self.classes = getattr(transformers, f"{name}VisionConfig"), make


ADAPTERS = {"siglip_vision_model": partial(Siglip, "Siglip")}
