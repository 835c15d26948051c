"""From a record to token ids, labels and image sizes.

Only an assistant's answers and the token that ends them are targets. They are located by rendering prefixes of the
conversation with the tokenizer's own chat template and comparing characters, so any template works whose rendering of a
turn does not depend on later turns.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from mmtrain.config.data import DataConfig
from mmtrain.data.conversation_records import PARTS, PLACEHOLDER, Record
from mmtrain.data.media import RawImage, check_text
from mmtrain.data.pixels import PixelRules, blank, decode, header_size, pixel_values
from mmtrain.errors import DataError, one_line, shown
from mmtrain.modality.geometry import ImageGeometry
from mmtrain.modality.metadata import DocumentMeta, ImageMeta, sample_name
from mmtrain.models.batch import IGNORE_INDEX

ROLES = ("system", "user", "assistant")
"""Roles of messages; also "tool", with a chat template that names it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Document:
    """One sample as tokens; its images still encoded."""

    meta: DocumentMeta
    input_ids: np.ndarray
    """[T] int64."""
    labels: np.ndarray
    """[T] int64: the token to predict at each position, or IGNORE_INDEX; always IGNORE_INDEX at the last one."""
    raw_images: tuple[RawImage, ...]


class Processor:
    """Converts records into documents, and images into encoder input.

    Args:
        tokenizer: a fast Hugging Face tokenizer with a chat template.
        image_token: the token of one image feature.
        geometry, rules: of the encoder's images; None for a model without an encoder.
        data: limits of what is read, and whether images are replaced by grey ones.
    """

    def __init__(
        self,
        tokenizer: Any,
        image_token: str,
        geometry: ImageGeometry | None,
        rules: PixelRules | None,
        data: DataConfig,
    ) -> None:
        self.tokenizer = tokenizer
        self.geometry = geometry
        self._rules = rules
        self._data = data
        vocabulary = tokenizer.get_vocab()
        self.image_token_id: int = vocabulary[image_token]
        frame = [token for token in ("<|vision_start|>", "<|vision_end|>") if token in vocabulary]
        self._image_text = image_token.join(frame) if len(frame) == 2 else image_token
        self._roles = (*ROLES, "tool") if re.search("""["']tool["']""", str(tokenizer.chat_template)) else ROLES

    def blanked(self) -> "Processor":
        """The same processor with every image replaced by grey of its size."""
        other = copy.copy(self)
        other._data = replace(self._data, blank_images=True)
        return other

    def document(self, record: Record) -> Document:
        """The tokens, labels and image sizes of a record; images are read only up to their header.

        Raises: DataError: naming the sample: placeholders and images disagree, an image's header is
            corrupt, no answer, or a conversation that the chat template refuses.
        """
        where = sample_name(record.sample, record.source)
        text, spans = self._render(where, record)
        return self._tokenized(where, record, text, spans)

    def prompt(self, record: Record) -> Document:
        """The tokens of a conversation up to the place where its next answer begins, without targets.

        Raises: DataError: as `document`, but it needs no answer.
        """
        where = sample_name(record.sample, record.source)
        messages = [self._message(where, m) for m in record.messages]
        return self._tokenized(where, record, self._template(where, messages, add_generation_prompt=True), [])

    def _tokenized(self, where: str, record: Record, text: str, spans: list[tuple[int, int]]) -> Document:
        """Args: spans: characters of each answer."""
        images = self._image_metas(where, record)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = np.array(encoded["input_ids"], np.int64)
        starts, ends = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
        turn = np.full(len(ids), -1, np.int64)  # index of the answer that a token belongs to
        for index, (begin, end) in enumerate(spans):
            turn[(ends > begin) & (starts < end)] = index

        at = np.flatnonzero(ids == self.image_token_id)
        if len(at) != len(images):
            raise DataError(
                f"{where}: {len(at)} `{PLACEHOLDER}` placeholders in its messages, but {len(images)} images; "
                f"write `{PLACEHOLDER}` in its text once for each image, at its position, or change the images; or set "
                'data.on_error = "skip"'
            )
        turn[at] = -1
        repeats = np.ones(len(ids), np.int64)
        repeats[at] = [image.num_tokens for image in images]
        first = np.cumsum(repeats)[at] - repeats[at]
        images = tuple(replace(image, start=int(start)) for image, start in zip(images, first, strict=True))
        return _make_document(record, np.repeat(ids, repeats), np.repeat(turn, repeats), images, tuple(record.images))

    def truncated(self, document: Document, num_tokens: int) -> Document:
        """The first num_tokens tokens of a document without images.

        Raises: DataError: it has images, or no answer would remain.
        """
        where = sample_name(document.meta.sample, document.meta.source)
        if document.meta.images:
            raise DataError(
                f"{where}: {document.meta.num_tokens} tokens do not fit training.seq_len = {num_tokens}, and "
                'a sample with images is not cut; set data.too_long = "skip" or a larger seq_len'
            )
        turns = np.repeat(np.arange(len(document.meta.answers)), document.meta.answers)
        turn = np.full(document.meta.num_tokens, -1, np.int64)
        turn[1:][document.labels[:-1] != IGNORE_INDEX] = turns
        ids, turn = document.input_ids[:num_tokens], turn[:num_tokens]
        if not (turn[1:] >= 0).any():
            raise DataError(
                f"{where}: cut to training.seq_len = {num_tokens} of its {document.meta.num_tokens} tokens "
                'it has no answer left; set data.too_long = "skip" or a larger seq_len'
            )
        record = _record_of(document.meta)
        return _make_document(record, ids, turn, (), ())

    def without_images(self, document: Document) -> Document:
        """The text of a document, without images and targets."""
        ids = document.input_ids[document.input_ids != self.image_token_id]
        record = _record_of(document.meta)
        return _make_document(record, ids, np.full(len(ids), -1, np.int64), (), ())

    def pixels(self, document: Document) -> list[Tensor]:
        """Encoder input of each image of a document. Raises: DataError: naming the image whose content is corrupt."""
        if not document.raw_images:
            return []
        assert self.geometry is not None
        assert self._rules is not None
        return [pixel_values(image, self.geometry, self._rules) for image in self.images(document)]

    def images(self, document: Document) -> Iterator[Image.Image]:
        """The images of a document in RGB, as a model sees them but for their size. Raises: as `pixels`."""
        for image, raw in zip(document.meta.images, document.raw_images, strict=True):
            try:
                decoded = decode(raw.read(self._data.max_media_bytes), self._data.max_decoded_pixels)
            except DataError as error:
                raise DataError(f"{image.name}: {error}") from None
            yield blank(decoded) if self._data.blank_images else decoded

    def _image_metas(self, where: str, record: Record) -> tuple[ImageMeta, ...]:
        if record.images and self.geometry is None:
            raise DataError(
                f"{where}: {len(record.images)} images, but the model has no encoder; add "
                "[model.encoder] or use samples without images"
            )
        out = []
        for index, raw in enumerate(record.images):
            assert self.geometry is not None
            try:
                data = raw.read(self._data.max_media_bytes)
                grid = self.geometry.grid(*header_size(data, self._data.max_decoded_pixels))
            except DataError as error:
                raise DataError(f"image {index} of {where}: {error}") from None
            num_tokens = self.geometry.num_tokens(grid)
            out.append(
                ImageMeta(sample=record.sample, source=record.source, index=index, grid=grid, num_tokens=num_tokens)
            )
        return tuple(out)

    def _render(self, where: str, record: Record) -> tuple[str, list[tuple[int, int]]]:
        """The whole conversation as text, and the characters of each answer."""
        messages = [self._message(where, m) for m in record.messages]
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        if not answers or answers[0] == 0:
            raise DataError(
                f"{where}: its roles are {[m['role'] for m in messages]}; a conversation needs an "
                "assistant's answer, after a question"
            )
        whole = self._template(where, messages)
        spans = []
        for index in answers:
            before = self._template(where, messages[:index], add_generation_prompt=True)
            after = self._template(where, messages[: index + 1]) if index + 1 < len(messages) else whole
            if not (whole.startswith(after) and after.startswith(before)):
                raise DataError(
                    f"{where}: the tokenizer's chat template renders turn {index} differently with the turns "
                    "around it, so its answer cannot be located; use another template or one answer a sample"
                )
            spans.append((len(before), len(before) + len(after[len(before) :].rstrip())))
        return whole, spans

    def _template(self, where: str, messages: list[dict[str, str]], add_generation_prompt: bool = False) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # templates are programs: jinja errors, and any error of their filters
            raise DataError(f"{where}: the chat template refuses it: {one_line(error)}") from None
        return text

    def _message(self, where: str, message: Mapping[str, Any]) -> dict[str, str]:
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in self._roles:
            raise DataError(f"{where}: a message has the role {shown(role)}; the roles are {', '.join(self._roles)}")
        if isinstance(content, list):
            content = "".join(self._part(where, part) for part in content)
        if not isinstance(content, str):
            raise DataError(
                f"{where}: a message's content is a {type(content).__name__}; write text or a list of parts"
            )
        content = check_text(content, f"{where}: the {role}'s text")
        return {"role": role, "content": content.replace(PLACEHOLDER, self._image_text)}

    def _part(self, where: str, part: Any) -> str:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind in PARTS[1:]:
            return PLACEHOLDER
        if kind == PARTS[0] and isinstance(part.get("text"), str):
            return str(part["text"])
        raise DataError(f"{where}: a part of its content is of type {shown(kind)}; supported are {', '.join(PARTS)}")


def _record_of(meta: DocumentMeta) -> Record:
    """The record of a document, without its content."""
    return Record(sample=meta.sample, source=meta.source, messages=(), images=(), grade=meta.grade)


def _make_document(
    record: Record,
    ids: np.ndarray,
    turn: np.ndarray,
    images: tuple[ImageMeta, ...],
    raw: tuple[RawImage, ...],
) -> Document:
    """The document in which a token with turn >= 0 is a target of the position before it."""
    labels = np.full(len(ids), IGNORE_INDEX, np.int64)
    is_target = turn[1:] >= 0
    labels[:-1][is_target] = ids[1:][is_target]
    counts = np.bincount(turn[1:][is_target])
    answer = np.flatnonzero(turn >= 0)
    meta = DocumentMeta(
        sample=record.sample,
        source=record.source,
        num_tokens=len(ids),
        num_targets=int(is_target.sum()),
        images=images,
        grade=record.grade,
        answers=tuple(int(c) for c in counts if c),
        prefix=int(answer[0]) if len(answer) else 0,
    )
    return Document(meta=meta, input_ids=ids, labels=labels, raw_images=raw)


def stop_token(tokenizer: Any) -> int:
    """The token that ends an answer in the tokenizer's chat template; its end of text, if the template adds none."""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    behind = tokenizer(text.rpartition("!")[2].strip(), add_special_tokens=False)["input_ids"]
    return int(behind[0] if behind else tokenizer.eos_token_id)
