"""The samples of a job that reads conversations: packed documents of text, images and videos."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmtrain.config.config import Config
from mmtrain.data.conversation_records import CONVERSATIONS
from mmtrain.data.packing import Limit
from mmtrain.data.pixels import PixelRules, pixel_rules
from mmtrain.data.processor import Document, Processor
from mmtrain.data.sources import Sources
from mmtrain.data.tokenizer import job_tokenizer
from mmtrain.errors import ConfigError
from mmtrain.modality.geometry import ImageGeometry, check_readable, model_geometry
from mmtrain.modality.metadata import MicrobatchMeta
from mmtrain.modality.videos import video_rules
from mmtrain.models.batch import Batch, Microbatch
from mmtrain.spec.hub_files import processor_config
from mmtrain.spec.model_configs import encoder_config


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadDocument:
    """A document with the content of its images and videos."""

    document: Document
    pixels: Sequence[Tensor]


class Conversations:
    """`Samples` of documents; a microbatch holds `training.seq_len` tokens.

    Raises: ConfigError: source, split, tokenizer or image processor do not exist or do not fit the model.
    """

    text = "tokens"

    def __init__(self, config: Config, split: str) -> None:
        self.sources = Sources(config.data, split, CONVERSATIONS)
        self.processor = make_processor(config)
        most = config.training.seq_len
        self.limits: tuple[Limit, ...] = (Limit(most=most, unit="tokens", key=f"training.seq_len = {most} tokens"),)

    def measured(self, sample: int) -> Document | None:
        record = self.sources[sample]
        return None if record is None else self.processor.document(record)

    def num_text_tokens(self, measured: Document) -> int:
        """All tokens of the document, with those of images and videos."""
        return measured.meta.num_tokens

    def truncated(self, measured: Document, num_tokens: int) -> Document:
        return self.processor.truncated(measured, num_tokens)

    def size(self, measured: Document) -> tuple[int, ...]:
        """Its tokens."""
        return (measured.meta.num_tokens,)

    def read(self, measured: Document, occurrence: int) -> ReadDocument:
        return ReadDocument(document=measured, pixels=self.processor.pixels(measured))

    def emptied(self, measured: Document, occurrence: int) -> ReadDocument:
        """The text of the document, without images and targets."""
        return ReadDocument(document=self.processor.without_images(measured), pixels=())

    def batch(self, microbatches: Sequence[Sequence[ReadDocument]]) -> tuple[Batch, tuple[MicrobatchMeta, ...]]:
        metas = tuple(MicrobatchMeta(documents=tuple(read.document.meta for read in m)) for m in microbatches)
        return Batch(microbatches=[_microbatch(m) for m in microbatches]), metas


def make_processor(config: Config) -> Processor:
    """The processor of a job: its tokenizer, chat template, sizes of images and videos, and pixel rules.

    Raises: ConfigError: a part does not exist, or they do not fit together.
    """
    tokenizer = job_tokenizer(config)
    geometry, rules = image_rules(config)
    videos = video_rules(config.model, config.data)
    return Processor(tokenizer, config.tokenizer, geometry, rules, config.data, videos)


def image_rules(config: Config) -> tuple[ImageGeometry | None, PixelRules | None]:
    """The geometry and pixel rules of the encoder's images; None, None for a model without an encoder.

    Raises: ConfigError: encoder, projector, image processor and area limits do not fit together.
    """
    check_readable(config.model)
    if config.model.encoder is None:
        return None, None
    encoder = encoder_config(config.model.encoder)
    key, processor = image_processor(config)
    rules = pixel_rules(encoder["model_type"], processor, key)
    fixed = bool(encoder.get("image_size"))
    geometry = model_geometry(
        config.model,
        min_pixels=config.data.min_pixels or (0 if fixed else rules.min_pixels),
        max_pixels=config.data.max_pixels or (0 if fixed else rules.max_pixels),
    )
    if fixed and rules.image_size not in (0, geometry.image_size):
        raise ConfigError(
            f"{key} = {processor!r} makes images of side "
            f"{rules.image_size}, but the encoder's image_size is {geometry.image_size}; use its own one"
        )
    return geometry, rules


def image_processor(config: Config) -> tuple[str, str]:
    """(key of the config that names it, id or folder) of the image processor of a job: that of the whole model which
    the encoder is a part of, if it has one and data.image_processor names no other; empty: the encoder's default."""
    encoder, whole = config.model.encoder, config.model.pretrained
    if not config.data.image_processor and whole and encoder is not None and encoder.pretrained == whole:
        key = "model.pretrained"
        return key, whole if processor_config(key, whole) is not None else ""
    return "data.image_processor", config.data.image_processor


def _microbatch(read: Sequence[ReadDocument]) -> Microbatch:
    documents = [item.document for item in read]
    ids = np.concatenate([document.input_ids for document in documents])
    labels = np.concatenate([document.labels for document in documents])
    starts = np.cumsum([0, *(document.meta.num_tokens for document in documents)])
    slots = [
        np.arange(start + image.start, start + image.start + image.num_tokens)
        for start, document in zip(starts, documents, strict=False)
        for image in document.meta.images
    ]
    return Microbatch(
        input_ids=torch.from_numpy(ids),
        labels=torch.from_numpy(labels),
        image_slots=torch.from_numpy(np.concatenate([np.empty(0, np.int64), *slots])),
        pixel_values=[pixels for item in read for pixels in item.pixels],
        image_names=[image.key for d in documents for image in d.meta.images],
    )
