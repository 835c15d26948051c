"""Questions about held-out samples, and greedy decoding of their answers without a cache of keys and values.

Each pass gives the most likely next token of every question that is still open, so a pass is a batch like any other and
runs on any layout. Question q belongs to replica q % dp_degree. Each replica's leader reads all of them and gets all of
their tokens, so that all leaders end at the same pass.
"""

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

import numpy as np
import torch

from mmtrain.config.config import Config
from mmtrain.data.conversation_records import Record
from mmtrain.data.conversations import Conversations, ReadDocument
from mmtrain.data.loader import LoadedStep
from mmtrain.data.media import RawMedium
from mmtrain.data.packing import LoaderState
from mmtrain.data.record_keys import is_spoken
from mmtrain.data.record_parts import ChatMessage, kind_of, num_placeholders, placeholder, readable
from mmtrain.errors import DataError
from mmtrain.modality.metadata import DocumentMeta, IterationMeta, sample_name
from mmtrain.models.batch import IGNORE_INDEX

THUMBNAIL = 160
"""Longest side of an image in an `Answer`, pixels."""

QuestionKey = tuple[str, int]
"""A question: the name of its source, and the index of the sample in it."""


class Question(NamedTuple):
    """A question of a source, and what its record says."""

    record: Record
    """The conversation up to the question."""
    reference: str
    """The record's answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A question that a model has answered."""

    question: str
    """The last question of the conversation; each image is `<image>`."""
    reference: str
    answer: str
    right: bool
    images: tuple[bytes, ...]
    """PNG files of all images of the conversation, at most `THUMBNAIL` pixels long."""
    sample: str = ""
    """Name of its sample in messages."""


def question_before(record: Record, turn: int) -> Question:
    """The conversation of a record before one of its answers, and that answer. Args: turn: index of its message."""
    before, shown = record.messages[:turn], list[RawMedium]()
    for kind in dict.fromkeys(raw.kind for raw in record.images):
        own = [raw for raw in record.images if raw.kind == kind]
        if num_placeholders(record.messages, kind) == len(own):  # else the processor says what is wrong
            own = own[: num_placeholders(before, kind)]
        shown += own
    cut = replace(record, messages=before, images=tuple(shown))
    return Question(cut, text_of(record.messages[turn]).strip())


def text_of(message: ChatMessage) -> str:
    """The text of a message; each image is `<image>`, each video `<video>`, each sound `<audio>`."""
    content = message.get("content") or ""
    parts = content if isinstance(content, list) else [content]
    kinds = ((kind_of(part), part) for part in parts)
    return "".join(
        placeholder(kind) if kind else readable(str(part.get("text", "") if isinstance(part, Mapping) else part))
        for kind, part in kinds
    )


def is_right(answer: str, reference: str, tolerance: float | None) -> bool:
    """Whether an answer is that of the record, but for white space around it; or as near a number as its tolerance."""
    answer, reference = answer.strip(), reference.strip()
    if tolerance is None or answer == reference:
        return answer == reference
    try:
        return abs(float(answer) - float(reference)) <= tolerance
    except ValueError:
        return False


@dataclass(kw_only=True)
class _Asked:
    """A question while it is answered."""

    question: Question
    read: ReadDocument
    """The prompt."""
    tokens: list[int] = field(default_factory=list)
    """The tokens of the answer so far."""
    is_open: bool = True

    @property
    def key(self) -> QuestionKey:
        return self.question.record.source, self.question.record.sample


class Decoding:
    """An iterator over the batches of one replica in which the first held-out questions are answered: after each, give
    the next tokens of all replicas to `append`.

    Raises: ConfigError, DataError: the questions cannot be read, by the rules of the job's data; equal on all replicas.
    """

    def __init__(self, config: Config, *, dp_rank: int, dp_degree: int) -> None:
        self._config, self._dp_rank, self._dp_degree = config, dp_rank, dp_degree
        self._samples = Conversations(config, config.data.validation_split)
        self._processor = self._samples.processor
        self._stop = self._processor.ending.token
        self._asked = list(self._read())
        if not self._asked:
            raise DataError(
                f"validation.generate = {config.validation.generate}, but split {config.data.validation_split!r} of "
                f"{config.data.description} has no question that can be asked within training.seq_len = "
                f"{config.training.seq_len}; set it to 0, or change the split"
            )

    def __iter__(self) -> Iterator[LoadedStep]:
        while any(asked.is_open for asked in self._asked):
            yield self._batch()

    def append(self, tokens: Mapping[QuestionKey, int]) -> None:
        """Adds the next token of each open question to its answer."""
        for asked in self._asked:
            if asked.is_open:
                asked.tokens.append(tokens[asked.key])
                full = len(asked.tokens) == self._config.validation.generate_tokens
                asked.is_open = not full and asked.tokens[-1] != self._stop

    def answers(self) -> tuple[Answer, ...]:
        """All questions with their answers so far."""
        return tuple(map(self._answer, self._asked))

    def _answer(self, asked: _Asked) -> Answer:
        record, reference = asked.question
        text = self._processor.answer(asked.tokens)
        images = []
        for image in self._processor.images(asked.read.document):
            image.thumbnail((THUMBNAIL, THUMBNAIL))
            file = io.BytesIO()
            image.save(file, "PNG")
            images.append(file.getvalue())
        return Answer(
            question=text_of(record.messages[-1]),
            reference=reference,
            answer=text,
            right=is_right(text, reference, record.tolerance),
            images=tuple(images),
            sample=sample_name(record.sample, record.source),
        )

    def _read(self) -> Iterator[_Asked]:
        """The first questions that can be asked."""
        counts, wanted = self._samples.sources.num_samples, self._config.validation.generate
        ended: set[int] = set()
        for number in count():
            index, which = divmod(number, len(counts))
            if not wanted or len(ended) == len(counts):
                return
            most = counts[which]
            if which in ended or (most is not None and index >= most):
                ended.add(which)
                continue
            try:
                record = self._samples.sources[number]
                asked = None if record is None else self._ask(record)
            except DataError:
                if self._config.data.on_error == "raise":
                    raise
                continue
            if record is None:
                ended.add(which)
            if asked is not None:
                wanted -= 1
                yield asked

    def _ask(self, record: Record) -> _Asked | None:
        """The last question of a record; None: it has none, or it is too long. Raises: DataError: it cannot be read."""
        whole, most = self._processor.document(record), self._config.training.seq_len
        answers = [index for index, message in enumerate(record.messages) if is_spoken(message)]
        if not answers:
            return None
        question = question_before(record, answers[-1])
        document = self._processor.prompt(question.record)
        if document.meta.num_tokens > most:
            if self._config.data.too_long == "raise":
                name, has_media = sample_name(record.sample, record.source), document.meta.images
                advice = (
                    self._processor.shorter(document)
                    if has_media
                    else 'set data.too_long = "skip", or a larger seq_len'
                )
                raise DataError(
                    f"{name}: its question has {document.meta.num_tokens} tokens, which do not fit training.seq_len = "
                    f"{most}; {advice}"
                )
            return None
        prefix = min(whole.meta.prefix, document.meta.num_tokens)  # what an attention mask shows to all of it
        document = replace(document, meta=replace(document.meta, prefix=prefix))
        return _Asked(question=question, read=self._samples.read(document, 0))

    def _batch(self) -> LoadedStep:
        """The open questions of this replica, each with its answer so far. One that has none left runs the text of the
        first question without a target, since ranks of other replicas may wait for its exchanges."""
        local = [asked for asked in self._asked[self._dp_rank :: self._dp_degree] if asked.is_open]
        documents = [with_answer(asked.read, asked.tokens) for asked in local]
        packed = _packed(documents, self._config.training.seq_len)
        if not packed:
            packed = [[self._samples.emptied(self._asked[0].read.document, 0)]]
        batch, metas = self._samples.batch(packed)
        prompts = {asked.key: asked.read.document.meta for asked in local}
        for microbatch, meta in zip(batch.microbatches, metas, strict=True):
            lengths = [prompts.get((d.source, d.sample), d).num_tokens for d in meta.documents]
            microbatch.image_slots = _in_prompts(microbatch.image_slots, meta.documents, lengths)
        return batch, IterationMeta(microbatches=metas), LoaderState(seed=0)


def with_answer(read: ReadDocument, tokens: list[int]) -> ReadDocument:
    """A prompt followed by tokens of its answer; its last position is labelled, with any token, to be predicted."""
    prompt = read.document
    ids = np.concatenate([prompt.input_ids, np.array(tokens, np.int64)])
    labels = np.full(len(ids), IGNORE_INDEX, np.int64)
    labels[-1] = 0
    meta = replace(prompt.meta, num_tokens=len(ids), num_targets=1, answers=(1,))
    document = replace(prompt, meta=meta, input_ids=ids, labels=labels)
    return ReadDocument(document=document, pixels=read.pixels)


def _packed(documents: list[ReadDocument], most: int) -> list[list[ReadDocument]]:
    """The documents in microbatches of at most that many tokens; one that has grown beyond them is alone."""
    packed: list[list[ReadDocument]] = []
    room = 0
    for read in documents:
        length = read.document.meta.num_tokens
        if not packed or length > room:
            packed.append([])
            room = most
        packed[-1].append(read)
        room -= length
    return packed


def _in_prompts(slots: torch.Tensor, documents: tuple[DocumentMeta, ...], lengths: list[int]) -> torch.Tensor:
    """The rows among `slots` that are in the first tokens of their documents: a model may write an image token itself.

    Args: lengths: of the prompt of each document.
    """
    starts = np.cumsum([0, *(document.num_tokens for document in documents)])[:-1]
    rows = np.concatenate([start + np.arange(length) for start, length in zip(starts, lengths, strict=True)])
    return slots[torch.from_numpy(np.isin(slots.numpy(), rows))]
