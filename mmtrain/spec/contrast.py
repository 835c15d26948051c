"""The module behind two towers: a loss that tells the pairs of a group of microbatches apart.

It is one work after those of both towers for all microbatches of the group, so orders, memory and the runtime need no
rule of their own. Source: FlexPipe, section 7, whose towers synchronize every few microbatches.

Legend: N pairs of a group; D width of an embedding.
"""

import math
from collections.abc import Mapping

from mmtrain.config.model import ContrastConfig
from mmtrain.spec.layer import LayerSpec, WholeBytes
from mmtrain.spec.spec import ModuleSpec
from mmtrain.spec.work_size import Rates

CONTRAST = "contrast"
"""Name of the module."""

_FLOAT32 = 4
_INT64 = 8
_KEPT = 3
"""Matrices [N, N] that autograd keeps, float32."""
_INDICES = {"clip": 3, "siglip": 1}
"""Loss -> indices of pairs that it keeps."""
SCALE, BIAS = "logit_scale", "logit_bias"
SCALARS: Mapping[str, Mapping[str, float]] = {
    "clip": {SCALE: math.log(1 / 0.07)},
    "siglip": {SCALE: math.log(10.0), BIAS: -10.0},
}
"""Loss -> its parameters, and the values with which they begin. Sources: CLIP, arXiv:2103.00020, section 2.5; SigLIP,
arXiv:2303.15343, section 3.2 (the classes of transformers start SigLIP's at 0)."""


def contrast_module(contrast: ContrastConfig, towers: tuple[str, str], width: int) -> ModuleSpec:
    """The module that makes the loss of pairs.

    Args: towers: names of that of images, and that of captions. width: D.
    """
    # Both embeddings of a pair, in float32: as they came, with their norms; normed.
    kept = Rates(output=2 * _FLOAT32 * (2 * width + 1) + _INT64 * _INDICES[contrast.loss], pair=_FLOAT32 * _KEPT)
    return ModuleSpec(
        name=CONTRAST,
        consumes="pairs",
        after=towers,
        microbatches=contrast.microbatches,
        pp_rank=-1,
        is_whole=True,
        layers=(
            LayerSpec(
                name=CONTRAST,
                num_params=len(SCALARS[contrast.loss]),
                trainable=bool(contrast.trainable),
                matmul_flops=Rates(),
                attention_flops=Rates(pair=2 * width),
                activation_bytes=kept,
                whole_bytes=WholeBytes(activation=kept),
            ),
        ),
    )
