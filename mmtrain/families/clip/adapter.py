"""The classes of CLIP in transformers."""

from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPVisionConfig, CLIPVisionModel, PreTrainedModel

from mmtrain.models.adapters import MaskedVision, TextTower


class ImageTower(CLIPVisionModel):
    """The vision transformer with the projection that `CLIPModel` gives it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.visual_projection = nn.Linear(config.hidden_size, config.projection_dim, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and self.visual_projection is not None:
            _init_projection(self.visual_projection, self.config)


class CaptionTower(CLIPTextModel):
    """The text transformer with the projection that `CLIPModel` gives it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.text_projection = nn.Linear(config.hidden_size, config.projection_dim, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and self.text_projection is not None:
            _init_projection(self.text_projection, self.config)


def _init_projection(projection: nn.Module, config: Any) -> None:
    """Initialises a projection as `CLIPModel` does."""
    nn.init.normal_(projection.weight, std=config.hidden_size**-0.5 * config.initializer_factor)


class CLIP(MaskedVision):
    """The CLIP vision transformer: of a language model up to its last block, since the norm after it is for the pooled
    class token alone."""

    classes = CLIPVisionConfig, CLIPVisionModel
    tower_classes = CLIPVisionConfig, ImageTower
    reader = "CLIPVisionModelWithProjection"
    extra_rows = 1
    pools = ("visual_projection",)

    def pool(self, tower: PreTrainedModel, x_NRD: Tensor) -> Tensor:
        embeddings_NP: Tensor = tower.visual_projection(tower.post_layernorm(x_NRD[:, 0].clone()))
        return embeddings_NP


ADAPTERS = {
    "clip_vision_model": CLIP,
    "clip_text_model": partial(
        TextTower, (CLIPTextConfig, CaptionTower), "CLIPTextModelWithProjection", "text_projection"
    ),
}
