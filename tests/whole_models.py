"""Tiny whole vision-language models of transformers: saved, and as the truth of loss and gradients."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmtrain.config.model import ModelConfig
from mmtrain.config.toml_sections import build
from mmtrain.config.whole_model import with_parts
from mmtrain.modality.metadata import DocumentMeta, ImageMeta, IterationMeta, MicrobatchMeta
from mmtrain.models.adapters import vision_adapter
from mmtrain.models.batch import IGNORE_INDEX, Batch, Microbatch
from mmtrain.models.fused_qkv import from_head_major, is_fused, to_head_major

VOCAB = 96
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 3]},
}  # fmt: skip
TEXTS = {"qwen3_vl": TEXT | {"head_dim": 16, "rope_parameters": TEXT["rope_parameters"] | {"mrope_section": [4, 2, 2]}}}
"""Family -> its text config, where it is not `TEXT`."""
_VISION = {"depth": 3, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
VISION = {
    "qwen2_vl": _VISION | {"embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2},
    "qwen2_5_vl": _VISION
    | {
        "hidden_size": 32, "intermediate_size": 40, "out_hidden_size": 48, "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": _VISION
    | {
        "depth": 4, "hidden_size": 32, "intermediate_size": 40, "out_hidden_size": 48, "num_position_embeddings": 9,
        "deepstack_visual_indexes": [0, 2],
    },
}  # fmt: skip
FAMILIES = tuple(VISION)
OLDER = ("qwen2_vl", "qwen2_5_vl")
"""Those of which there are files with older names."""
POSITIONS_A_SECOND = {"qwen2_vl": 0, "qwen2_5_vl": 4, "qwen3_vl": 0}
"""`tokens_per_second` of their configs; 0: they have none."""
Part = int | tuple[int, int] | tuple[int, int, int]
DOCUMENTS: tuple[tuple[tuple[Part, ...], ...], ...] = (
    ((3, (4, 4), 2, (2, 6), 4), (5,), ((6, 10), 3)),
    ((6,), (2,)),
    ((1, (2, 2), 1, (8, 2), 1, (4, 6)), (4, (2, 4), 2)),
)
"""[microbatch][document]: numbers of text tokens, and patches (height, width) of images, (time, height, width) of
videos."""
VIDEO_DOCUMENTS: tuple[tuple[tuple[Part, ...], ...], ...] = (
    ((3, (3, 4, 6), 2, (2, 6), (2, 2, 10), 4), (5,), ((1, 6, 6), 3)),
    ((1, (8, 4), 1, (5, 4, 2), 2, (1, 2, 2), 3), (4, (2, 4), 2)),
)


def config_classes(family: str) -> tuple[Any, Any]:
    """The classes of the config and of the whole model."""
    import transformers

    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
    return getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}ForConditionalGeneration")


def whole_model(family: str, text: dict[str, Any], vision: dict[str, Any], *, tied: bool = False) -> Any:
    """A whole model with random weights, none of them so small that an error could hide behind it."""
    config_class, model_class = config_classes(family)
    ids = {"image_token_id": 0, "video_token_id": 1, "vision_start_token_id": 2, "vision_end_token_id": 3}
    torch.manual_seed(5)
    model = model_class(config_class(text_config=text, vision_config=vision, tie_word_embeddings=tied, **ids))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def tiny_text(family: str, **changes: Any) -> dict[str, Any]:
    """The text config of the tiny whole model of a family. Args: changes: other values of its keys."""
    return TEXTS.get(family, TEXT) | changes


def tiny_whole(family: str, *, tied: bool = False) -> Any:
    """The tiny whole model of a family."""
    return whole_model(family, tiny_text(family), VISION[family], tied=tied)


def named(folder: Path | str, **sections: Any) -> ModelConfig:
    """The [model] of a config that names a whole model. Args: sections: tables of [model]."""
    table = with_parts({"model": {"pretrained": str(folder), **sections}}, "a test")["model"]
    model: ModelConfig = build(ModelConfig, table, "model", "a test")
    return model


def make_batch(
    documents: Sequence[Sequence[Sequence[Part]]] = DOCUMENTS,
    seed: int = 1,
    *,
    tokens_per_second: int = 0,
    captioned: bool = False,
) -> tuple[Batch, IterationMeta]:
    """A batch of random documents.

    Args: documents: as `DOCUMENTS`. tokens_per_second: of the encoder's config; 0: it has none. captioned: whether text
        is before each patch in time of a video, as in Qwen3-VL.
    """
    generator = torch.Generator().manual_seed(seed)
    microbatches, metas, sample = [], [], 0
    for packed in documents:
        slots: list[int] = []
        labels, pixels, of_documents, begin = [], [], [], 0
        for parts in packed:
            images: list[ImageMeta] = []
            label: list[Tensor] = []
            length, sample = 0, sample + 1
            frames: list[tuple[Part, dict[str, int]]] = []
            for index, part in enumerate(parts):
                if captioned and isinstance(part, tuple) and len(part) == 3:
                    for frame in range(part[0]):
                        frames += [(1 + frame % 2, {}), ((1, *part[1:]), {"index": index, "frame": frame})]
                else:
                    frames.append((part, {"index": index}))
            for part, place in frames:
                if isinstance(part, int):
                    values = torch.randint(0, VOCAB, (part,), generator=generator)
                    label.append(values.where(torch.rand(part, generator=generator) < 0.6, IGNORE_INDEX))
                    length += part
                else:
                    t, h, w = (1, *part) if len(part) == 2 else part
                    rows, count, timing = t * h * w, t * h * w // 4, {}
                    if len(part) == 3:
                        seconds = 0.35 + 0.5 * place["index"]
                        timing = {"seconds": seconds, "time_step": seconds * tokens_per_second or 1.0}
                    at = {"sample": sample, "start": length}
                    images.append(ImageMeta(grid=(t, h, w), num_tokens=count, **at, **place, **timing))
                    pixels.append(torch.randn(rows, 96, generator=generator))
                    slots += range(begin + length, begin + length + count)
                    label.append(torch.full((count,), IGNORE_INDEX))
                    length += count
            begin += length
            labels.append(torch.cat(label))
            num_targets = int((labels[-1] != IGNORE_INDEX).sum())
            of_documents.append(
                DocumentMeta(sample=sample, num_tokens=length, num_targets=num_targets, images=tuple(images))
            )
        meta = MicrobatchMeta(documents=tuple(of_documents))
        metas.append(meta)
        microbatches.append(
            Microbatch(
                input_ids=torch.randint(0, VOCAB, (begin,), generator=generator), labels=torch.cat(labels),
                image_slots=torch.tensor(slots, dtype=torch.int64), pixel_values=pixels,
                image_names=[image.key for image in meta.images],
            )
        )  # fmt: skip
    return Batch(microbatches=microbatches), IterationMeta(microbatches=tuple(metas))


def truth(theirs: Any, batches: Iterable[tuple[Batch, IterationMeta]]) -> tuple[Tensor, list[Tensor]]:
    """(loss summed over all labelled positions, most likely tokens of each microbatch) by one call a document."""
    loss, predictions = torch.zeros(()), []
    for batch, meta in batches:
        for tensors, counts in zip(batch.microbatches, meta.microbatches, strict=True):
            pixels, found = iter(tensors.pixel_values), []
            of_documents = (tensors.input_ids.split(counts.lengths), tensors.labels.split(counts.lengths))
            for document, ids, labels in zip(counts.documents, *of_documents, strict=True):
                logits = _logits(theirs, document, ids, [next(pixels) for _ in document.images])
                loss = loss + nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE_INDEX)
                found.append(logits[labels != IGNORE_INDEX].argmax(-1))
            predictions.append(torch.cat(found))
    return loss, predictions


def _logits(theirs: Any, document: DocumentMeta, ids: Tensor, pixels: list[Tensor]) -> Tensor:
    types = torch.zeros_like(ids)
    for image in document.images:
        types[image.start : image.start + image.num_tokens] = 2 if image.is_video else 1
    # The whole model finds these tokens by their ids, which no other token of this document may have.
    text = set(ids[types == 0].tolist())
    theirs.config.image_token_id, theirs.config.video_token_id = [t for t in range(VOCAB) if t not in text][:2]
    images: dict[str, Tensor] = {}
    for end, is_video in (("", False), ("_videos", True)):
        own = [(i, values) for i, values in zip(document.images, pixels, strict=True) if i.is_video == is_video]
        if own:
            images[f"pixel_values{end}"] = torch.cat([values for _, values in own])
            grids: dict[int, list[int]] = {}
            for image, _ in own:  # the class has one grid for all patches in time of a video
                t, h, w = image.grid
                grids[image.index] = [grids.get(image.index, [0])[0] + t, h, w]
            images["video_grid_thw" if is_video else "image_grid_thw"] = torch.tensor(list(grids.values()))
            images["mm_token_type_ids"] = types[None]
        if own and is_video and theirs.config.model_type == "qwen2_5_vl":
            images["second_per_grid_ts"] = torch.tensor([i.seconds for i, _ in own])
    ids = ids.where(types != 1, theirs.config.image_token_id).where(types != 2, theirs.config.video_token_id)
    logits: Tensor = theirs(input_ids=ids[None], use_cache=False, **images).logits[0]
    return logits


def our_name(name: str) -> str:
    """The name of a whole model's parameter here."""
    name = name.replace("model.visual.", "vision.").replace("model.language_model.", "language.model.")
    return name.replace("lm_head.", "language.lm_head.")


def in_our_names(theirs: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters or gradients of a whole model under the names, and with the rows, that they have here."""
    return {our_name(name): _rows(theirs, name, tensor, to_head_major) for name, tensor in tensors.items()}


def their_gradients(theirs: Any) -> dict[str, Tensor]:
    """The gradients of a whole model, by our names."""
    return in_our_names(theirs, {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None})


@torch.no_grad()
def fill(theirs: Any, ours: Mapping[str, Tensor]) -> None:
    """Gives a whole model our weights."""
    for name, parameter in theirs.named_parameters():
        parameter.copy_(_rows(theirs, name, ours[our_name(name)], from_head_major))


def _rows(theirs: Any, name: str, tensor: Tensor, order: Callable[[Tensor, int], Tensor]) -> Tensor:
    fused = vision_adapter(f"{theirs.config.model_type}_vision").fused_qkv
    return order(tensor, theirs.config.vision_config.num_heads) if is_fused(name, fused) else tensor
