"""The whole model in one process, without schedule or sharding: what a pipeline must agree with."""

import torch
from torch import Tensor, nn

from mmtrain.config import ModelConfig
from mmtrain.data.batch import Batch, Microbatch
from mmtrain.data.bitfield import language_bits
from mmtrain.data.metadata import IterationMeta, MicrobatchMeta
from mmtrain.models.attention.context import attention_context
from mmtrain.models.chunk import LanguageOutput, build_chunk
from mmtrain.models.initialise import init_weights
from mmtrain.models.pretrained import load_pretrained
from mmtrain.models.spec import ModelSpec


class ReferenceModel(nn.Module):
    """All layers of all modules as one chunk each, with weights set."""

    def __init__(
        self,
        model: ModelConfig,
        spec: ModelSpec,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.mask = model.language.attention_mask
        self.chunks = nn.ModuleDict()
        for module in spec.modules:
            whole = (0, len(module.layers))
            chunk = build_chunk(model, spec, module.name, whole, device=device, dtype=dtype)
            init_weights(chunk, seed)
            load_pretrained(chunk, model)
            self.chunks[module.name] = chunk

    def weights(self) -> dict[str, nn.Parameter]:
        """All parameters by the names that they have in any pipeline."""
        return {name: param for chunk in self.chunks.values() for name, param in chunk.named_parameters()}

    def forward(self, batch: Batch, meta: IterationMeta, *, want_predictions: bool = False) -> list[LanguageOutput]:
        """The output of each microbatch; a step's loss is their `loss_sum` over its number of targets."""
        pairs = zip(batch.microbatches, meta.microbatches, strict=True)
        return [self.microbatch(tensors, counts, want_predictions) for tensors, counts in pairs]

    def loss_sum(self, batch: Batch, meta: IterationMeta) -> Tensor:
        """Cross-entropy summed over all labelled positions of the batch."""
        return torch.stack([output.loss_sum for output in self(batch, meta)]).sum()

    def microbatch(self, tensors: Microbatch, counts: MicrobatchMeta, want_predictions: bool = False) -> LanguageOutput:
        """The output of one microbatch, its pictures in one sub-microbatch."""
        features = None
        if tensors.pixel_values:
            grids = tuple(image.grid for image in counts.images)
            features = self.chunks["vision"](torch.cat(tensors.pixel_values), grids=grids)
        output: LanguageOutput = self.chunks["language"](
            tensors.input_ids,
            attention=attention_context(language_bits(counts, self.mask)),
            position_ids=tensors.position_ids,
            features=features,
            slots=tensors.image_slots,
            labels=tensors.labels,
            want_predictions=want_predictions,
        )
        return output
