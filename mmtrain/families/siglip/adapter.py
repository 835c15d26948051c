"""The classes of SigLIP in transformers."""

from functools import partial

import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, SiglipTextConfig, SiglipTextModel

from mmtrain.families.tensor_table import TensorTable
from mmtrain.models.adapters import MaskedVision, TextTower


class Siglip(MaskedVision):
    """The SigLIP vision transformer, of a language model without its pooling head."""

    pools = ("head",)

    def __init__(self, name: str, table: TensorTable) -> None:
        """Args: name: how the names of its classes begin. table: as of `Adapter`."""
        super().__init__(table)
        self.reader = f"{name}VisionModel"
        model = getattr(transformers, self.reader)

        def make(config: PreTrainedConfig, *, pooled: bool) -> PreTrainedModel:
            config.vision_use_head = pooled
            made: PreTrainedModel = model(config)
            return made

        config_class = getattr(transformers, f"{name}VisionConfig")
        self.classes = config_class, partial(make, pooled=False)
        self.tower_classes = config_class, partial(make, pooled=True)

    def pool(self, tower: PreTrainedModel, x_NRD: Tensor) -> Tensor:
        embeddings_ND: Tensor = tower.head(x_NRD)
        return embeddings_ND


ADAPTERS = {
    "siglip_vision_model": partial(Siglip, "Siglip"),
    "siglip_text_model": partial(TextTower, (SiglipTextConfig, SiglipTextModel), "SiglipTextModel", "head"),
}
