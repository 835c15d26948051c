"""The samples of a job that reads conversations: packed documents of text, images, videos and sounds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmtrain.config.config import Config
from mmtrain.data.conversation_records import kinds_of, record_kind
from mmtrain.data.media_readers import make_readers
from mmtrain.data.packing import BinLimit, LoaderState
from mmtrain.data.processor import Document, Processor
from mmtrain.data.sources import Sources
from mmtrain.data.tokenizer import job_tokenizer
from mmtrain.modality.metadata import MicrobatchMeta
from mmtrain.models.batch import Batch, Microbatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadDocument:
    """A document with the content of its images, videos and sounds."""

    document: Document
    pixels: Sequence[Tensor]


class Conversations:
    """`Samples` of documents; a microbatch holds `training.seq_len` tokens.

    Raises: ConfigError: source, split, tokenizer or image processor do not exist or do not fit the model.
    """

    text = "tokens"

    def __init__(self, config: Config, split: str) -> None:
        self.sources = Sources(config.data, split, record_kind(kinds_of(config.model)))
        self.processor = make_processor(config)
        most = config.training.seq_len
        self.limits: tuple[BinLimit, ...] = (
            BinLimit(most=most, unit="tokens", key=f"training.seq_len = {most} tokens"),
        )

    def notes(self) -> list[str]:
        return self.processor.renderer.unread.take()

    def measured(self, sample: int, state: LoaderState) -> Document | None:
        record = self.sources[sample]
        return None if record is None else self.processor.document(record)

    def num_text_tokens(self, measured: Document) -> int:
        """All tokens of the document, with those of images, videos and sounds."""
        return measured.meta.num_tokens

    def shorter(self, measured: Document) -> str:
        return self.processor.shorter(measured)

    def truncated(self, measured: Document, num_tokens: int) -> Document:
        return self.processor.truncated(measured, num_tokens)

    def size(self, measured: Document) -> tuple[int, ...]:
        """The number of its tokens."""
        return (measured.meta.num_tokens,)

    def read(self, measured: Document, occurrence: int) -> ReadDocument:
        return ReadDocument(document=measured, pixels=self.processor.pixels(measured))

    def emptied(self, measured: Document, occurrence: int) -> ReadDocument:
        """The text of the document, without images and targets."""
        return ReadDocument(document=self.processor.without_images(measured), pixels=())

    def batch(self, microbatches: Sequence[Sequence[ReadDocument]]) -> tuple[Batch, tuple[MicrobatchMeta, ...]]:
        metas = tuple(MicrobatchMeta(documents=tuple(read.document.meta for read in m)) for m in microbatches)
        return Batch(microbatches=[packed(m) for m in microbatches]), metas


def make_processor(config: Config) -> Processor:
    """The processor of a job: its tokenizer, chat template, and readers of images, videos and sounds.

    Raises: ConfigError: a part does not exist, or they do not fit together.
    """
    tokenizer = job_tokenizer(config)
    return Processor(tokenizer, make_readers(config, tokenizer.get_vocab()), config.data.max_text_bytes)


def packed(read: Sequence[ReadDocument]) -> Microbatch:
    """The tensors of one microbatch of documents."""
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
