"""A tiny Qwen2-Audio of transformers, sounds for it, and what its class makes of them."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmtrain.config.model import ModelConfig
from mmtrain.config.toml_sections import build
from mmtrain.config.whole_model import with_parts
from mmtrain.data.tokenizer import SHIPPED
from mmtrain.modality.metadata import DocumentMeta, ImageMeta, IterationMeta, MicrobatchMeta
from mmtrain.models.batch import IGNORE_INDEX, Batch, Microbatch
from mmtrain.models.spectrogram import row_patches

VOCAB = 96
TEXT = {
    "model_type": "qwen2", "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
AUDIO = {
    "model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_layers": 3, "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48, "num_mel_bins": 16, "max_source_positions": 50,
}  # fmt: skip
RATE, FRAMES = 16000, 100
"""Samples in a second; frames of a window of `AUDIO`, which is one second."""
Part = int | float
DOCUMENTS: tuple[tuple[tuple[Part, ...], ...], ...] = (
    ((3, 0.31, 2, 0.655, 4), (5,), (1.0, 3)),
    ((6,), (2,)),
    ((1, 0.05, 0.4, 1, 0.025, 6), (4, 0.2, 2), (2, 0.025, 3)),
)
"""[microbatch][document]: numbers of text tokens, and seconds of sounds."""
Spectrograms = Mapping[tuple[int, ...], tuple[Tensor, int]]
"""`ImageMeta.key` of a sound -> its padded window [mel bins, frames], and frames of the sound itself."""


def tiny_whole(text: Mapping[str, Any] = TEXT, audio: Mapping[str, Any] = AUDIO) -> Any:
    """A whole model with random weights, none of them so small that an error could hide behind it."""
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    torch.manual_seed(5)
    config = Qwen2AudioConfig(text_config=dict(text), audio_config=dict(audio), audio_token_index=0)
    model = Qwen2AudioForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


MARKS = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")


def save_whole(folder: Path) -> None:
    """Saves a whole model as one is published: weights, tokenizer, feature extractor."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tiny_whole({**TEXT, "vocab_size": -(-len(tokenizer) // 8) * 8}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    extractor().save_pretrained(folder)


def extractor(audio: Mapping[str, Any] = AUDIO) -> Any:
    """The feature extractor of transformers for such a model."""
    from transformers import WhisperFeatureExtractor

    seconds = audio["max_source_positions"] * 2 * 160 // RATE
    return WhisperFeatureExtractor(feature_size=audio["num_mel_bins"], chunk_length=seconds, return_attention_mask=True)


def wave(seconds: float, seed: int) -> np.ndarray:
    """[samples] float32: two tones in noise."""
    rng = np.random.default_rng(seed)
    time = np.arange(round(seconds * RATE)) / RATE
    tones = sum(np.sin(2 * np.pi * pitch * time) for pitch in rng.uniform(100, 4000, 2))
    return (0.3 * tones + 0.05 * rng.standard_normal(len(time))).astype(np.float32)


def spectrograms(seconds: Sequence[float], seed: int = 0) -> tuple[Tensor, list[int]]:
    """[N, mel bins, frames] padded windows, and frames of each sound itself, by the class of transformers."""
    waves = [wave(s, seed + number) for number, s in enumerate(seconds)]
    found = extractor()(waves, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True)
    return found["input_features"], found["attention_mask"].sum(1).tolist()


def named(folder: Path | str, **sections: Any) -> ModelConfig:
    """The [model] of a config that names a whole model. Args: sections: tables of [model]."""
    table = with_parts({"model": {"pretrained": str(folder), **sections}}, "a test")["model"]
    model: ModelConfig = build(ModelConfig, table, "model", "a test")
    return model


def make_batch(
    documents: Sequence[Sequence[Sequence[Part]]] = DOCUMENTS, seed: int = 1
) -> tuple[tuple[Batch, IterationMeta], Spectrograms]:
    """A batch of random text and sounds, and their spectrograms. Args: documents: as `DOCUMENTS`."""
    generator = torch.Generator().manual_seed(seed)
    heard: dict[tuple[int, ...], tuple[Tensor, int]] = {}
    microbatches, metas, sample = [], [], 0
    for packed in documents:
        ids, labels, patches, slots, of_documents, begin = [], [], [], [], [], 0
        for parts in packed:
            sample += 1
            sounds, length, targets = [], 0, 0
            for index, part in enumerate(parts):
                if isinstance(part, int):
                    ids.append(torch.randint(0, VOCAB, (part,), generator=generator))
                    drawn = torch.randint(0, VOCAB, (part,), generator=generator)
                    labels.append(drawn.where(torch.rand(part, generator=generator) < 0.6, IGNORE_INDEX))
                    targets += int((labels[-1] != IGNORE_INDEX).sum())
                    length += part
                    continue
                (mel,), (frames,) = spectrograms([part], seed=100 * seed + 10 * sample + index)
                rows = (frames - 1) // 2 + 1
                count = (rows - 2) // 2 + 1
                sound = ImageMeta(
                    module="audio", sample=sample, index=index, grid=(1, 1, rows), num_tokens=count, start=length
                )
                sounds.append(sound)
                heard[sound.key] = mel, frames
                patches.append(row_patches(mel, rows))
                ids.append(torch.zeros(count, dtype=torch.int64))
                labels.append(torch.full((count,), IGNORE_INDEX))
                slots += range(begin + length, begin + length + count)
                length += count
            begin += length
            of_documents.append(
                DocumentMeta(sample=sample, num_tokens=length, num_targets=targets, images=tuple(sounds))
            )
        meta = MicrobatchMeta(documents=tuple(of_documents))
        metas.append(meta)
        microbatches.append(
            Microbatch(
                input_ids=torch.cat(ids), labels=torch.cat(labels), pixel_values=patches,
                image_slots=torch.tensor(slots, dtype=torch.int64), image_names=[s.key for s in meta.images],
            )
        )  # fmt: skip
    return (Batch(microbatches=microbatches), IterationMeta(microbatches=tuple(metas))), heard


def truth(
    theirs: Any, batches: Iterable[tuple[Batch, IterationMeta]], heard: Spectrograms
) -> tuple[Tensor, list[Tensor]]:
    """(loss summed over all labelled positions, most likely tokens of each microbatch) by one call a document."""
    loss, predictions = torch.zeros(()), []
    for batch, meta in batches:
        for tensors, counts in zip(batch.microbatches, meta.microbatches, strict=True):
            found, of_documents = [], (tensors.input_ids.split(counts.lengths), tensors.labels.split(counts.lengths))
            for document, ids, labels in zip(counts.documents, *of_documents, strict=True):
                sounds = {}
                if document.images:
                    mels, frames = zip(*(heard[sound.key] for sound in document.images), strict=True)
                    sounds["input_features"] = torch.stack(mels)
                    mask = torch.arange(mels[0].shape[1]) < torch.tensor(frames)[:, None]
                    sounds["feature_attention_mask"] = mask.long()
                # The class finds the tokens of sounds by their id, which no other token of this document may have.
                slots = [i for sound in document.images for i in range(sound.start, sound.start + sound.num_tokens)]
                text = {token for place, token in enumerate(ids.tolist()) if place not in slots}
                theirs.config.audio_token_id = next(token for token in range(VOCAB) if token not in text)
                ids = ids.index_fill(0, torch.tensor(slots, dtype=torch.int64), theirs.config.audio_token_id)[None]
                logits = theirs(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **sounds).logits[0]
                assert len(logits) == len(labels)
                loss = loss + nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE_INDEX)
                found.append(logits[labels != IGNORE_INDEX].argmax(-1))
            predictions.append(torch.cat(found))
    return loss, predictions


def our_name(name: str) -> str:
    """The name of a whole model's parameter here."""
    for theirs, ours in (
        ("model.audio_tower.", "audio."),
        ("model.multi_modal_projector.", "audio_projector."),
        ("model.language_model.", "language.model."),
        ("lm_head.", "language.lm_head."),
    ):
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    raise AssertionError(name)


def their_gradients(theirs: Any) -> dict[str, Tensor]:
    """The gradients of a whole model, by our names."""
    return {our_name(n): p.grad for n, p in theirs.named_parameters() if p.grad is not None}


@torch.no_grad()
def fill(theirs: Any, ours: Mapping[str, Tensor]) -> None:
    """Gives a whole model our weights."""
    for name, parameter in theirs.named_parameters():
        parameter.copy_(ours[our_name(name)])
