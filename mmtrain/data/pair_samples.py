"""The samples of a job with two towers: images with their captions."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mmtrain.config.config import Config
from mmtrain.data.conversations import ReadDocument, packed
from mmtrain.data.media import check_length
from mmtrain.data.media_readers import ImageReader, image_rules
from mmtrain.data.packing import BinLimit, LoaderState
from mmtrain.data.pair_records import PAIRS, PairRecord
from mmtrain.data.processor import Document
from mmtrain.data.record_keys import UnreadKeys
from mmtrain.data.sources import Sources
from mmtrain.data.tokenizer import job_tokenizer
from mmtrain.errors import ConfigError, DataError, shown
from mmtrain.families.catalogue import LANGUAGES
from mmtrain.modality.metadata import DocumentMeta, ImageMeta, MicrobatchMeta, sample_name
from mmtrain.models.batch import IGNORE_INDEX, Batch
from mmtrain.spec.model_configs import language_config

_PROBE = "a caption"
_END = 49407
"""Default of `eos_token_id` in CLIP's class."""
_LEGACY_END = 2
"""Value of `eos_token_id` with which transformers takes the largest id of a caption for its end."""


class Caption(NamedTuple):
    """The tokens of a caption."""

    ids: np.ndarray
    """The token ids, [T] int64."""
    end: int
    """Index of the one at which the tower makes the embedding."""
    num_cut: int
    """Tokens after these, which were cut off."""


class CaptionTokens:
    """The tokens of captions, and which of them stands for its caption, as the tower's class of transformers has them.

    Raises: ConfigError: the tokenizer does not fit the tower.
    """

    def __init__(self, config: Config) -> None:
        values = language_config(config.model.language)
        self._tokenizer = job_tokenizer(config)
        self._most = values["max_position_embeddings"]
        self._padded = LANGUAGES[values["model_type"]].bidirectional
        self._end: int = values.get("eos_token_id", _END)
        where = f"tokenizer.path = {config.tokenizer.path!r}"
        limit = config.training.seq_len
        if self._padded and limit < self._most:
            raise ConfigError(
                f"training.seq_len = {limit}, but captions are padded to max_position_embeddings = "
                f"{self._most} tokens; raise it"
            )
        self._most = min(limit, self._most)
        if self._padded and self._tokenizer.pad_token_id is None:
            raise ConfigError(f"{where} has no padding token, with which captions are padded; name one that has")
        if not self._padded and self._end != _LEGACY_END and self._end not in self(_PROBE).ids:
            raise ConfigError(
                f"{where} does not end a caption with the token {self._end} (eos_token_id of model.language), at which "
                "the tower makes its embedding; name the tower's own tokenizer, or set eos_token_id"
            )

    def __call__(self, caption: str) -> Caption:
        """The tokens of a caption, cut to the tower's length."""
        padding = "max_length" if self._padded else False
        encoded = self._tokenizer(caption, truncation=True, max_length=self._most, padding=padding, verbose=False)
        ids = np.array(encoded["input_ids"], np.int64)
        rest = encoded.encodings[0].overflowing
        num_cut = sum(len(part.ids) - sum(part.special_tokens_mask) for part in rest)
        if self._padded or not len(ids):
            return Caption(ids, len(ids) - 1, num_cut)
        end = ids.argmax() if self._end == _LEGACY_END else (ids == self._end).argmax()
        return Caption(ids, int(end), num_cut)


class PairSamples:
    """`Samples` of pairs; a microbatch holds up to `data.max_pairs` of them.

    Raises: ConfigError: source, split, tokenizer or image processor do not exist or do not fit the model.
    """

    text = "tokens of its caption"

    def __init__(self, config: Config, split: str) -> None:
        self._data = config.data
        self.sources = Sources(config.data, split, PAIRS)
        self._unread = UnreadKeys()
        self._cut: list[str] = []
        self._has_cut = False
        self._tokens = CaptionTokens(config)
        geometry, rules = image_rules(config)
        self._reader = ImageReader(token="", geometry=geometry, rules=rules, data=config.data)
        most = config.data.max_pairs
        self.limits: tuple[BinLimit, ...] = (BinLimit(most=most, unit="pairs", key=f"data.max_pairs = {most} pairs"),)

    def notes(self) -> list[str]:
        cut, self._cut = self._cut, []
        return self._unread.take() + cut

    def measured(self, sample: int, state: LoaderState) -> Document | None:
        """The record with one of its captions, which is drawn for each epoch."""
        record = self.sources[sample]
        return None if record is None else self._document(record, state.seed, state.epoch_of(record.source))

    def num_text_tokens(self, measured: Document) -> int:
        """Tokens of its caption."""
        return measured.meta.num_tokens

    def shorter(self, measured: Document) -> str:
        return "shorten it"  # captions are cut to fit

    def truncated(self, measured: Document, num_tokens: int) -> Document:
        raise AssertionError("captions are cut to fit")

    def size(self, measured: Document) -> tuple[int, ...]:
        """One pair."""
        return (1,)

    def read(self, measured: Document, occurrence: int) -> ReadDocument:
        (raw,) = measured.raw_images
        try:
            return ReadDocument(document=measured, pixels=self._reader.values(raw, 1))  # type: ignore[arg-type]
        except DataError as error:
            raise DataError(f"{sample_name(measured.meta.sample, measured.meta.source)}: {error}") from None

    def emptied(self, measured: Document, occurrence: int) -> ReadDocument:
        """The caption without its image and its place among the pairs."""
        meta = replace(measured.meta, num_targets=0, images=())
        labels = np.full_like(measured.labels, IGNORE_INDEX)
        return ReadDocument(document=replace(measured, meta=meta, labels=labels, raw_images=()), pixels=())

    def batch(self, microbatches: Sequence[Sequence[ReadDocument]]) -> tuple[Batch, tuple[MicrobatchMeta, ...]]:
        metas = tuple(MicrobatchMeta(documents=tuple(read.document.meta for read in m)) for m in microbatches)
        return Batch(microbatches=[packed(m) for m in microbatches]), metas

    def _document(self, record: PairRecord, seed: int, epoch: int) -> Document:
        where = sample_name(record.sample, record.source)
        self._unread.add(where, record.source, record.unread)
        caption = _drawn(record, seed, epoch)
        check_length(caption, self._data.max_text_bytes, f"{where}: its caption")
        ids, end, num_cut = self._tokens(caption)
        if not len(ids):
            raise DataError(f"{where}: its caption {shown(caption)} has no token in this tokenizer")
        self._note_cut(where, len(ids), num_cut)
        labels = np.full(len(ids), IGNORE_INDEX, np.int64)
        labels[end] = ids[end]
        try:
            image: Any = ImageMeta(sample=record.sample, index=0, grid=(1, 1, 1), num_tokens=0, source=record.source)
            (image,) = self._reader.items(record.image, image).images
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        image = replace(image, num_tokens=0)
        meta = DocumentMeta(
            sample=record.sample, num_tokens=len(ids), num_targets=1, images=(image,), source=record.source
        )
        return Document(meta=meta, input_ids=ids, labels=labels, raw_images=(record.image,))

    def _note_cut(self, where: str, num_tokens: int, num_cut: int) -> None:
        """Says of the first caption that it is too long for the tower."""
        if num_cut and not self._has_cut:
            self._has_cut = True
            self._cut.append(
                f"data: captions are cut to {num_tokens} tokens (max_position_embeddings of model.language, or "
                f"training.seq_len); that of {where} is the first, of which {num_cut} tokens are not read"
            )


def _drawn(record: PairRecord, seed: int, epoch: int) -> str:
    """One of the captions of a record, drawn by (seed, epoch, record), so that every process reads the same."""
    if len(record.captions) == 1:
        return record.captions[0]
    key = f"{seed}/{epoch}/{record.source}/{record.sample}".encode()
    return record.captions[int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) % len(record.captions)]
