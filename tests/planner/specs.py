"""Small model specs and iterations for tests of planning."""

from collections.abc import Sequence

from mmtrain.modality.metadata import DocumentMeta, ImageMeta, IterationMeta, MicrobatchMeta
from mmtrain.spec.layer import LayerSpec
from mmtrain.spec.spec import ModelSpec, ModuleSpec
from mmtrain.spec.work_size import Rates


def layers(count: int, *, flops: float = 1.0, trainable: bool = True, name: str = "layers") -> list[LayerSpec]:
    """Equal layers: FLOPs and bytes a row."""
    return [
        LayerSpec(
            name=f"{name}.{i}",
            num_params=10,
            trainable=trainable,
            matmul_flops=Rates(row=flops),
            activation_bytes=Rates(row=4.0),
            linear_bytes=Rates(row=3.0),
            output_bytes=Rates(row=2.0),
        )
        for i in range(count)
    ]


def vlm(
    num_vision: int = 4, num_language: int = 4, *, frozen_vision: bool = False, frozen_language: bool = False
) -> ModelSpec:
    """A vision encoder (merge 2) before a language model."""
    embed = LayerSpec(
        name="embed",
        num_params=10,
        trainable=not frozen_language,
        matmul_flops=Rates(),
        output_bytes=Rates(row=2.0),
    )
    return ModelSpec(
        modules=(
            ModuleSpec(
                name="vision", consumes="images", layers=tuple(layers(num_vision, trainable=not frozen_vision)), merge=2
            ),
            ModuleSpec(
                name="language",
                consumes="documents",
                layers=(embed, *layers(num_language - 1, flops=3.0, trainable=not frozen_language)),
                after=("vision",),
            ),
        )
    )


def microbatch(sample: int, grids: Sequence[tuple[int, int]], text_tokens: int = 10) -> MicrobatchMeta:
    """One document of some images (height, width in patches) and text after them, whose second half is labelled."""
    images: list[ImageMeta] = []
    tokens = 0
    for i, (h, w) in enumerate(grids):
        images.append(ImageMeta(sample=sample, index=i, grid=(1, h, w), num_tokens=h * w // 4, start=tokens))
        tokens += h * w // 4
    tokens += text_tokens
    num_targets = text_tokens // 2
    document = DocumentMeta(
        sample=sample,
        num_tokens=tokens,
        num_targets=num_targets,
        images=tuple(images),
        prefix=tokens - num_targets,
    )
    return MicrobatchMeta(documents=(document,))


META = IterationMeta(microbatches=(microbatch(3, [(4, 4), (2, 2), (4, 8)]), microbatch(5, []), microbatch(7, [(2, 4)])))
"""Three images, none, one."""
