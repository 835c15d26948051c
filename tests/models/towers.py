"""Small two-tower models, their batches, and the whole models of transformers that say what they compute."""

from typing import Any

import torch
from transformers import CLIPConfig, CLIPModel, SiglipConfig, SiglipModel

from mmtrain.config.model import ContrastConfig, EncoderConfig, LanguageConfig, ModelConfig
from mmtrain.modality.metadata import DocumentMeta, ImageMeta, IterationMeta, MicrobatchMeta
from mmtrain.models.batch import IGNORE_INDEX, Batch, Microbatch

IMAGES: dict[str, dict[str, Any]] = {
    "clip": {
        "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "image_size": 16, "patch_size": 4, "projection_dim": 24,
    },
    "siglip": {
        "model_type": "siglip_vision_model", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4,
        "num_attention_heads": 4, "image_size": 16, "patch_size": 4,
    },
}  # fmt: skip
CAPTIONS: dict[str, dict[str, Any]] = {
    "clip": {
        "model_type": "clip_text_model", "hidden_size": 40, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "vocab_size": 96, "max_position_embeddings": 12, "projection_dim": 24,
        "eos_token_id": 95,
    },
    "siglip": {
        "model_type": "siglip_text_model", "hidden_size": 40, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "vocab_size": 96, "max_position_embeddings": 9, "projection_size": 24,
    },
}  # fmt: skip
WHOLE = {"clip": (CLIPConfig, CLIPModel), "siglip": (SiglipConfig, SiglipModel)}
PATCHES = (1, 4, 4)


def two_towers(kind: str, *, microbatches: int = 0, frozen: str = "", **language: Any) -> ModelConfig:
    """A tiny model. Args: frozen: name of a tower that does not train. language: further keys of its section."""
    return ModelConfig(
        encoder=EncoderConfig(config=IMAGES[kind], trainable=frozen != "vision"),
        language=LanguageConfig(config=CAPTIONS[kind], trainable=frozen != "language", **language),
        contrast=ContrastConfig(loss=kind, microbatches=microbatches),
    )


def make_pairs(model: ModelConfig, counts: list[int], seed: int) -> tuple[Batch, IterationMeta]:
    """A batch of random pairs. Args: counts: [microbatch] -> pairs; 0: it is blank, a caption alone."""
    generator = torch.Generator().manual_seed(seed)
    config = model.language.config
    longest, last = config["max_position_embeddings"], config["vocab_size"] - 1
    microbatches, metas, sample = [], [], 1000 * seed
    for count in counts:
        ids, labels, pixels, documents = [], [], [], []
        for number in range(max(1, count)):
            length = longest
            if "eos_token_id" in config:
                length = int(torch.randint(3, longest + 1, (), generator=generator))
            text = torch.randint(1, last, (length,), generator=generator)
            text[-1] = last
            label = torch.full_like(text, IGNORE_INDEX)
            if number < count:
                label[-1] = last
            image = ImageMeta(sample=sample, index=0, grid=PATCHES, num_tokens=0)
            ids.append(text)
            labels.append(label)
            images = (image,) if number < count else ()
            pixels += [torch.randn(1, 3, 16, 16, generator=generator) for _ in images]
            documents.append(DocumentMeta(sample=sample, num_tokens=length, num_targets=len(images), images=images))
            sample += 1
        meta = MicrobatchMeta(documents=tuple(documents))
        metas.append(meta)
        microbatches.append(
            Microbatch(
                input_ids=torch.cat(ids),
                labels=torch.cat(labels),
                image_slots=torch.empty(0, dtype=torch.int64),
                pixel_values=pixels,
                image_names=[image.key for image in meta.images],
            )
        )
    return Batch(microbatches=microbatches), IterationMeta(microbatches=tuple(metas))


def whole_name(name: str) -> str:
    """The name in a whole model of transformers of a parameter of ours."""
    module, _, rest = name.partition(".")
    if module == "contrast" or rest.startswith(("visual_projection.", "text_projection.")):
        return rest
    return {"vision": "vision_model", "language": "text_model"}[module] + f".{rest}"


def whole_model(kind: str, weights: dict[str, torch.nn.Parameter]) -> Any:
    """The class of transformers with our values. Args: weights: of all chunks, by our names."""
    make_config, make = WHOLE[kind]
    text, vision = ({k: v for k, v in of[kind].items() if k != "model_type"} for of in (CAPTIONS, IMAGES))
    whole = make(make_config(text_config=text, vision_config=vision, projection_dim=24)).train()
    own = dict(whole.named_parameters())
    assert {whole_name(name) for name in weights} == own.keys()
    with torch.no_grad():
        for name, value in weights.items():
            target = own[whole_name(name)]
            target.copy_(value.reshape(target.shape))
    return whole


def inputs_of(pairs: list[tuple[Microbatch, MicrobatchMeta]]) -> dict[str, torch.Tensor]:
    """The inputs of a whole model: captions padded to the longest."""
    captions = [
        text for tensors, meta in pairs for text in tensors.input_ids.split([d.num_tokens for d in meta.documents])
    ]
    pixels = [values for tensors, _ in pairs for values in tensors.pixel_values]
    ids = torch.nn.utils.rnn.pad_sequence(captions, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in captions], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": torch.cat(pixels)}
