"""Token ids, labels, and the sizes of images, videos and sounds, made from a record.

Only an assistant's answers and the token that ends them are targets. They are located by rendering prefixes of the
conversation with the tokenizer's own chat template and comparing characters, so any template works whose rendering of a
turn does not depend on later turns. Text and tokens are those that transformers' processor of the same model makes of
the same parts.
"""

import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from mmtrain.data.chat_renderer import ChatRenderer
from mmtrain.data.chat_templates import Placeholder
from mmtrain.data.conversation_records import Record
from mmtrain.data.media import RawImage, RawMedium
from mmtrain.data.media_readers import PlaceholderItems, Readers
from mmtrain.data.record_parts import num_placeholders, placeholder
from mmtrain.errors import DataError
from mmtrain.modality.metadata import DocumentMeta, ImageMeta, sample_name
from mmtrain.models.batch import IGNORE_INDEX

_NOTHING = "(?!)"
"""A pattern that is in no text."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Document:
    """One sample as tokens; its images, videos and sounds still encoded."""

    meta: DocumentMeta
    input_ids: np.ndarray
    """The token ids, [T] int64."""
    labels: np.ndarray
    """[T] int64: the token to predict at each position, or IGNORE_INDEX: the next one of `input_ids`, but at the end of
    an answer that the chat template does not end the token that does."""
    raw_images: tuple[RawMedium, ...]
    """The media of `meta.of_placeholders`."""


class Processor:
    """Converts records into documents, and images, videos and sounds into encoder input.

    Args:
        tokenizer: a fast Hugging Face tokenizer with a chat template.
        readers: of each kind of content that the model reads.
        max_text_bytes: of the text of a record; tokenizing takes some 200 times as much memory.
    """

    def __init__(self, tokenizer: Any, readers: Readers, max_text_bytes: int = 2**22) -> None:
        self.tokenizer = tokenizer
        self.readers = readers
        vocabulary = tokenizer.get_vocab()
        self.token_ids: Mapping[str, int] = {kind: vocabulary[r.token] for kind, r in readers.of_kind.items()}
        """Kind of content -> the id of the token of one of its features."""
        self._texts = {
            kind: reader.token.join(reader.markers) if vocabulary.keys() >= set(reader.markers) else reader.token
            for kind, reader in readers.of_kind.items()
        }
        placeholders = {kind: Placeholder(r.token, self._texts[kind]) for kind, r in readers.of_kind.items()}
        self.renderer = ChatRenderer(tokenizer, placeholders, readers.unread, max_text_bytes)
        self.ending = self.renderer.ending
        choices = ((k, {self._texts[k]: None, reader.token: None}) for k, reader in readers.of_kind.items())
        marks = "|".join(f"(?P<{kind}>{'|'.join(map(re.escape, texts))})" for kind, texts in choices)
        self._marks = re.compile(marks or _NOTHING)

    def blanked(self, *, images: bool = True, audio: bool = False) -> "Processor":
        """This processor with every image replaced by grey of its size, or each sound by silence of its length."""
        other = copy.copy(self)
        other.readers = self.readers.blanked(images=images, audio=audio)
        return other

    def document(self, record: Record) -> Document:
        """The tokens, labels and sizes of a record; images, videos and sounds are read only up to their header.

        Raises: DataError: naming the sample: placeholders and what they stand for disagree, a header is corrupt, no
            answer, or a conversation that the chat template refuses.
        """
        where = sample_name(record.sample, record.source)
        text, spans = self.renderer.conversation(where, record)
        return self._tokenized(where, record, text, spans)

    def prompt(self, record: Record) -> Document:
        """The tokens of a conversation up to the place where its next answer begins, without targets.

        Raises: DataError: as `document`, but it needs no answer.
        """
        where = sample_name(record.sample, record.source)
        return self._tokenized(where, record, self.renderer.prompt(where, record), [])

    def answer(self, tokens: Sequence[int]) -> str:
        """The text of the tokens that follow a prompt, without the one that ends the answer."""
        ended = len(tokens) > 0 and tokens[-1] == self.ending.token
        return str(self.tokenizer.decode(tokens[: len(tokens) - ended], skip_special_tokens=True)).strip()

    def _tokenized(self, where: str, record: Record, text: str, spans: list[tuple[int, int]]) -> Document:
        """Args: spans: characters of each answer."""
        self._check_kinds(where, record)
        marks = list(self._marks.finditer(text))
        order = self._order(where, record, [str(mark.lastgroup) for mark in marks])
        measured = [self._measured(where, record, index) for index in order]
        text, spans = self._expanded(text, spans, marks, measured)
        ids, starts, ends = self._encoded(where, text)
        turn = np.full(len(ids), -1, np.int64)  # index of the answer that a token belongs to
        for index, (begin, end) in enumerate(spans):
            turn[(ends > begin) & (starts < end)] = index
        last = [int(np.flatnonzero(starts < end)[-1]) for _, end in spans]

        at = np.flatnonzero(np.isin(ids, list(self.token_ids.values())))
        images = tuple(image for item in measured for image in item.images)
        if len(at) != len(images):
            raise DataError(
                f"{where}: the tokenizer finds {len(at)} of the {len(images)} tokens of images and videos in its text; "
                f"make {', '.join(r.token for r in self.readers.of_kind.values())} special tokens that are found "
                "everywhere"
            )
        turn[at] = -1
        repeats = np.ones(len(ids), np.int64)
        repeats[at] = [image.num_tokens for image in images]
        first = np.cumsum(repeats)[at] - repeats[at]
        images = tuple(replace(image, start=int(start)) for image, start in zip(images, first, strict=True))
        raw = tuple(record.images[index] for index in order)
        ids, labels, turns = _shifted(np.repeat(ids, repeats), np.repeat(turn, repeats))
        if not self.ending.learned and self.ending.token is not None:
            positions = np.cumsum(repeats)[last] - 1
            labels[positions], turns[positions] = self.ending.token, range(len(last))
        return _make_document(record, ids, labels, turns, images, raw)

    def _encoded(self, where: str, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[T] ids, and where in the text each token starts and ends, of 0 characters for one that is not of the text.

        As in processors of transformers, the tokenizer adds its special tokens unless the text begins with them. One at
        the end is left out: it would stand between a prompt and its answer.
        """
        begin = self.tokenizer.bos_token
        written = begin is not None and text.startswith(begin)
        written = written or not self.readers.of_kind  # a tokenizer adds none to its chat template
        options = {"return_offsets_mapping": True, "return_special_tokens_mask": True, "verbose": False}
        try:
            encoded = self.tokenizer(text, add_special_tokens=not written, **options)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        ids = np.array(encoded["input_ids"], np.int64)
        starts, ends = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
        of_text = np.flatnonzero(np.array(encoded["special_tokens_mask"]) == 0)
        count = 1 + int(of_text[-1]) if len(of_text) else len(ids)
        return ids[:count], starts[:count], ends[:count]

    def _expanded(
        self,
        text: str,
        spans: list[tuple[int, int]],
        marks: Sequence[re.Match[str]],
        measured: Sequence[PlaceholderItems],
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text in which each placeholder has a token for each of its items, and the spans.

        The items of a sound follow each other. Each item with a caption, of a video, stands after it; markers around
        the placeholder become those of each, as in training of such models; transformers 5.23 also leaves them there.
        """
        grown, added, end = "", list[tuple[int, int]](), 0
        for mark, item in zip(marks, measured, strict=True):
            kind = str(mark.lastgroup)
            token = self.readers.of_kind[kind].token
            apart = "".join(caption + self._texts[kind] for caption in item.captions)
            items = apart or mark[0].replace(token, token * len(item.images))
            grown += text[end : mark.start()] + items
            end = mark.end()
            added.append((end, len(items) - len(mark[0])))

        def moved(character: int) -> int:
            return character + sum(count for before, count in added if before <= character)

        return grown + text[end:], [(moved(begin), moved(stop)) for begin, stop in spans]

    def truncated(self, document: Document, num_tokens: int) -> Document:
        """The first num_tokens tokens of a document of text alone.

        Raises: DataError: it has images, videos or sounds, or no answer would remain.
        """
        where = sample_name(document.meta.sample, document.meta.source)
        if document.meta.images:
            raise DataError(
                f"{where}: {document.meta.num_tokens} tokens do not fit training.seq_len = {num_tokens}, and "
                f"a sample with images, videos or sounds is not cut; {self.shorter(document)}"
            )
        labels, turns = document.labels.copy(), np.full(document.meta.num_tokens, -1, np.int64)
        turns[labels != IGNORE_INDEX] = np.repeat(np.arange(len(document.meta.answers)), document.meta.answers)
        labels[num_tokens - 1 :], turns[num_tokens - 1 :] = IGNORE_INDEX, -1
        labels, turns = labels[:num_tokens], turns[:num_tokens]
        if not (turns >= 0).any():
            raise DataError(
                f"{where}: cut to training.seq_len = {num_tokens} of its {document.meta.num_tokens} tokens "
                'it has no answer left; set data.too_long = "skip" or a larger seq_len'
            )
        record = _record_of(document.meta)
        return _make_document(record, document.input_ids[:num_tokens], labels, turns, (), ())

    def shorter(self, document: Document) -> str:
        """What to change about a document that is too long."""
        if not document.meta.images:
            return 'set data.too_long = "skip" or "truncate", or a larger seq_len'
        kinds = dict.fromkeys(raw.kind for raw in document.raw_images)
        keys = dict.fromkeys(key for kind in kinds for key in self.readers.of_kind[kind].limits)
        lower = f"lower {' or '.join(keys)}, " if keys else ""
        count = sum(image.num_tokens for image in document.meta.images)
        items = " and ".join(f"{_item(kind)}s" for kind in kinds)
        return f'its {items} have {count} of them: {lower}set data.too_long = "skip", or a larger seq_len'

    def without_images(self, document: Document) -> Document:
        """The text of a document, without images, videos, sounds and targets."""
        ids = document.input_ids[~np.isin(document.input_ids, list(self.token_ids.values()))]
        nothing = np.full(len(ids), -1, np.int64)
        return _make_document(_record_of(document.meta), *_shifted(ids, nothing), (), ())

    def pixels(self, document: Document) -> list[Tensor]:
        """Encoder input of each of a document's `meta.images`.

        Raises: DataError: naming the image, video or sound whose content is corrupt.
        """
        return [tensor for images, raw in _placed(document) for tensor in self._values(images, raw)]

    def images(self, document: Document) -> Iterator[Image.Image]:
        """The images of a document in RGB, as a model sees them but for their size, and the first frame of its videos.

        Raises: as `pixels`.
        """
        for images, raw in _placed(document):
            with _naming(images, raw):
                image = self.readers.of_kind[raw.kind].image(raw)
            if image is not None:
                yield image

    def _values(self, images: tuple[ImageMeta, ...], raw: RawMedium) -> Sequence[Tensor]:
        with _naming(images, raw):
            return self.readers.of_kind[raw.kind].values(raw, len(images))

    def _check_kinds(self, where: str, record: Record) -> None:
        """Refuses kinds of content that the model does not read."""
        for kind, count in Counter(raw.kind for raw in record.images).items():
            if kind not in self.readers.of_kind:
                raise DataError(f"{where}: {count} {_item(kind)}s, but {self.readers.unread[kind]}; or leave them out")

    def _order(self, where: str, record: Record, kinds: Sequence[str]) -> list[int]:
        """Index of the item that each placeholder of a record stands for. Args: kinds: of the placeholders."""
        of_kinds = {}
        for kind in self.readers.of_kind:
            own = [index for index, raw in enumerate(record.images) if raw.kind == kind]
            if (count := kinds.count(kind)) != len(own):
                mark, item = placeholder(kind), _item(kind)
                if num_placeholders(record.messages, kind) == len(own):
                    raise DataError(
                        f"{where}: the chat template shows {count} of the {len(own)} {item}s of its messages; name "
                        "another template in tokenizer.chat_template, or move them into a turn whose content it shows"
                    )
                as_text = "" if self.readers.of_kind[kind].token == mark else f", `\\{mark}` where it is text"
                raise DataError(
                    f"{where}: {count} `{mark}` placeholders in its messages, but {len(own)} {item}s; "
                    f"write `{mark}` in its text once for each {item}, at its position{as_text}, or change the "
                    f'{item}s; or set data.on_error = "skip"'
                )
            of_kinds[kind] = iter(own)
        return [next(of_kinds[kind]) for kind in kinds]

    def _measured(self, where: str, record: Record, index: int) -> PlaceholderItems:
        """The sizes of an image, video or sound of a record, from its header."""
        raw = record.images[index]
        reader = self.readers.of_kind[raw.kind]
        meta = ImageMeta(
            module=reader.module, sample=record.sample, source=record.source, index=index, grid=(0, 0, 0), num_tokens=0
        )
        try:
            return reader.items(raw, meta)
        except DataError as error:
            raise DataError(f"{raw.kind} {index} of {where}{_file(raw)}: {error}") from None


def _item(kind: str) -> str:
    """What an item of a kind is called in errors."""
    return {"image": "image", "video": "video", "audio": "sound"}.get(kind, f"{kind} item")


def _placed(document: Document) -> Iterator[tuple[tuple[ImageMeta, ...], RawMedium]]:
    """The items of each placeholder of a document, and what it stands for."""
    return zip(document.meta.of_placeholders, document.raw_images, strict=True)


@contextmanager
def _naming(images: tuple[ImageMeta, ...], raw: RawMedium) -> Iterator[None]:
    """Names an image, video or sound in errors of its content."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{replace(images[0], frame=None).name}{_file(raw)}: {error}") from None


def _file(raw: RawMedium) -> str:
    """The file of a video or sound, for errors; that of an image is in them."""
    return f" ({raw.name})" if not isinstance(raw, RawImage) and raw.name else ""


def _record_of(meta: DocumentMeta) -> Record:
    """The record of a document, without its content."""
    return Record(sample=meta.sample, source=meta.source, messages=(), images=(), grade=meta.grade)


def _shifted(ids: np.ndarray, turn: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The ids, the label of each position, and the index of its answer, or -1: a token with turn >= 0 is the target of
    the position before it."""
    turns = np.append(turn[1:], -1)
    return ids, np.where(turns >= 0, np.append(ids[1:], 0), IGNORE_INDEX), turns


def _make_document(
    record: Record,
    ids: np.ndarray,
    labels: np.ndarray,
    turns: np.ndarray,
    images: tuple[ImageMeta, ...],
    raw: tuple[RawMedium, ...],
) -> Document:
    """Args: turns: [T] index of the answer that a label belongs to; -1: there is none."""
    labelled = np.flatnonzero(turns >= 0)
    counts = np.bincount(turns[labelled])
    meta = DocumentMeta(
        sample=record.sample,
        source=record.source,
        num_tokens=len(ids),
        num_targets=len(labelled),
        images=images,
        grade=record.grade,
        answers=tuple(int(c) for c in counts if c),
        prefix=int(labelled[0]) + 1 if len(labelled) else 0,
    )
    return Document(meta=meta, input_ids=ids, labels=labels, raw_images=raw)
