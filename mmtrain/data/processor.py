"""From a record to token ids, labels, and the sizes of images and videos.

Only an assistant's answers and the token that ends them are targets. They are located by rendering prefixes of the
conversation with the tokenizer's own chat template and comparing characters, so any template works whose rendering of a
turn does not depend on later turns.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from mmtrain.config.data import DataConfig, TokenizerConfig
from mmtrain.data.conversation_records import PARTS, PLACEHOLDERS, Record, kind_of
from mmtrain.data.frames import open_frames
from mmtrain.data.media import RawImage, RawVideo, check_text
from mmtrain.data.pixels import PixelRules, blank, decode, header_size, pixel_values, video_values
from mmtrain.data.tokenizer import content_form
from mmtrain.errors import DataError, one_line, shown
from mmtrain.modality.geometry import ImageGeometry
from mmtrain.modality.metadata import DocumentMeta, ImageMeta, sample_name
from mmtrain.modality.videos import VIDEO_ENCODERS, VideoRules
from mmtrain.models.batch import IGNORE_INDEX

ROLES = ("system", "user", "assistant")
"""Roles of messages; also "tool", with a chat template that names it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Document:
    """One sample as tokens; its images and videos still encoded."""

    meta: DocumentMeta
    input_ids: np.ndarray
    """[T] int64."""
    labels: np.ndarray
    """[T] int64: the token to predict at each position, or IGNORE_INDEX; always IGNORE_INDEX at the last one."""
    raw_images: tuple[RawImage | RawVideo, ...]
    """Those of `meta.of_placeholders`."""


class _Measured(NamedTuple):
    """What one placeholder stands for."""

    images: tuple[ImageMeta, ...]
    """An image, a video, or each patch in time of a video with captions."""
    captions: tuple[str, ...] = ()
    """The text before each of these patches."""


class Processor:
    """Converts records into documents, and images and videos into encoder input.

    Args:
        tokenizer: a fast Hugging Face tokenizer with a chat template.
        section: the tokens of one feature of an image, and of a video.
        geometry, rules: of the encoder's images; None for a model without an encoder.
        videos: of its videos; None for a model that reads none.
        data: limits of what is read, and whether images are replaced by grey ones.
    """

    def __init__(
        self,
        tokenizer: Any,
        section: TokenizerConfig,
        geometry: ImageGeometry | None,
        rules: PixelRules | None,
        data: DataConfig,
        videos: VideoRules | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.geometry = geometry
        self._rules, self._videos = rules, videos
        self._data = data
        vocabulary = tokenizer.get_vocab()
        tokens = {"image": section.image_token, "video": section.video_token}
        if videos is None or section.video_token not in vocabulary:
            del tokens["video"]
        self._video_token = section.video_token
        self.token_ids: Mapping[str, int] = {kind: vocabulary[token] for kind, token in tokens.items()}
        """Kind of content -> the id of the token of one of its features."""
        frame = [token for token in ("<|vision_start|>", "<|vision_end|>") if token in vocabulary]
        self._texts = {kind: token.join(frame) if len(frame) == 2 else token for kind, token in tokens.items()}
        choices = ((kind, {self._texts[kind]: None, token: None}) for kind, token in tokens.items())
        self._marks = re.compile("|".join(f"(?P<{kind}>{'|'.join(map(re.escape, texts))})" for kind, texts in choices))
        self._content = content_form(tokenizer)
        self._roles = (*ROLES, "tool") if re.search("""["']tool["']""", str(tokenizer.chat_template)) else ROLES

    def blanked(self) -> "Processor":
        """The same processor with every image replaced by grey of its size."""
        other = copy.copy(self)
        other._data = replace(self._data, blank_images=True)
        return other

    def document(self, record: Record) -> Document:
        """The tokens, labels and sizes of a record; images and videos are read only up to their header.

        Raises: DataError: naming the sample: placeholders and images or videos disagree, a header is corrupt, no
            answer, or a conversation that the chat template refuses.
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
        self._check_kinds(where, record)
        marks = list(self._marks.finditer(text))
        order = _order(where, record, [str(mark.lastgroup) for mark in marks])
        measured = [self._measured(where, record, index) for index in order]
        text, spans = self._captioned(text, spans, marks, measured)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = np.array(encoded["input_ids"], np.int64)
        starts, ends = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
        turn = np.full(len(ids), -1, np.int64)  # index of the answer that a token belongs to
        for index, (begin, end) in enumerate(spans):
            turn[(ends > begin) & (starts < end)] = index

        at = np.flatnonzero(np.isin(ids, list(self.token_ids.values())))
        images = tuple(image for item in measured for image in item.images)
        if len(at) != len(images):
            raise DataError(
                f"{where}: the tokenizer finds {len(at)} of the {len(images)} tokens of images and videos in its text; "
                "make tokenizer.image_token and tokenizer.video_token special tokens that are found everywhere"
            )
        turn[at] = -1
        repeats = np.ones(len(ids), np.int64)
        repeats[at] = [image.num_tokens for image in images]
        first = np.cumsum(repeats)[at] - repeats[at]
        images = tuple(replace(image, start=int(start)) for image, start in zip(images, first, strict=True))
        raw = tuple(record.images[index] for index in order)
        return _make_document(record, np.repeat(ids, repeats), np.repeat(turn, repeats), images, raw)

    def _captioned(
        self, text: str, spans: list[tuple[int, int]], marks: Sequence[re.Match[str]], measured: Sequence[_Measured]
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text in which each video with captions is its patches in time, each after its caption; and the spans.

        Markers around a placeholder become those of each patch, as Qwen3-VL was trained; transformers 5.23 leaves them
        there in addition.
        """
        grown, added, end = "", list[tuple[int, int]](), 0
        for mark, item in zip(marks, measured, strict=True):
            patches = "".join(caption + self._texts["video"] for caption in item.captions) or mark[0]
            grown += text[end : mark.start()] + patches
            end = mark.end()
            added.append((end, len(patches) - len(mark[0])))

        def moved(character: int) -> int:
            return character + sum(count for before, count in added if before <= character)

        return grown + text[end:], [(moved(begin), moved(stop)) for begin, stop in spans]

    def truncated(self, document: Document, num_tokens: int) -> Document:
        """The first num_tokens tokens of a document of text alone.

        Raises: DataError: it has images or videos, or no answer would remain.
        """
        where = sample_name(document.meta.sample, document.meta.source)
        if document.meta.images:
            raise DataError(
                f"{where}: {document.meta.num_tokens} tokens do not fit training.seq_len = {num_tokens}, and "
                'a sample with images or videos is not cut; set data.too_long = "skip" or a larger seq_len'
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
        """The text of a document, without images, videos and targets."""
        ids = document.input_ids[~np.isin(document.input_ids, list(self.token_ids.values()))]
        record = _record_of(document.meta)
        return _make_document(record, ids, np.full(len(ids), -1, np.int64), (), ())

    def pixels(self, document: Document) -> list[Tensor]:
        """Encoder input of each of a document's `meta.images`.

        Raises: DataError: naming the image or video whose content is corrupt.
        """
        values = zip(document.meta.of_placeholders, map(self._values, self._frames_of(document)), strict=True)
        return [part for images, tensor in values for part in tensor.chunk(len(images))]

    def images(self, document: Document) -> Iterator[Image.Image]:
        """The images of a document in RGB, as a model sees them but for their size, and the first frame of its videos.

        Raises: as `pixels`.
        """
        return (next(frames) for _, frames in self._frames_of(document))

    def _frames_of(self, document: Document) -> Iterator[tuple[RawImage | RawVideo, Iterator[Image.Image]]]:
        """Each image and video of a document with its frames in RGB, which are read one by one."""
        for images, raw in zip(document.meta.of_placeholders, document.raw_images, strict=True):
            yield raw, self._frames(raw, f"{images[0].name}{_file(raw)}")

    def _frames(self, raw: RawImage | RawVideo, name: str) -> Iterator[Image.Image]:
        """The image, or the sampled frames. Raises: DataError: with the name."""
        try:
            frames = self._decoded(raw) if isinstance(raw, RawImage) else self._sampled(raw)
            yield from map(blank, frames) if self._data.blank_images else frames
        except DataError as error:
            raise DataError(f"{name}: {error}") from None

    def _decoded(self, raw: RawImage) -> Iterator[Image.Image]:
        yield decode(raw.read(self._data.max_media_bytes), self._data.max_decoded_pixels)

    def _sampled(self, raw: RawVideo) -> Iterator[Image.Image]:
        assert self._videos is not None
        frames = open_frames(raw, self._data)
        count = self._videos.num_sampled(frames.num_frames, self._fps(raw, frames.fps))
        yield from frames.read(self._videos.indices(frames.num_frames, count))

    def _values(self, item: tuple[RawImage | RawVideo, Iterator[Image.Image]]) -> Tensor:
        raw, frames = item
        assert self._rules is not None
        if isinstance(raw, RawVideo):
            assert self._videos is not None
            decoded = list(frames)
            size = self._videos.resized(len(decoded), decoded[0].height, decoded[0].width)
            return video_values(decoded, size, self._videos.patches, self._rules)
        assert self.geometry is not None
        return pixel_values(next(frames), self.geometry, self._rules)

    def _fps(self, raw: RawVideo, of_file: float | None) -> float:
        """Frames a second of a video. Raises: DataError: times of frames would have no meaning."""
        fps = raw.fps or of_file or self._data.source_fps or self._data.video_fps
        if not 0.001 <= fps <= 1000:
            raise DataError(f"it has {fps:g} frames a second; give its `fps`, from 0.001 to 1000")
        return fps

    def _check_kinds(self, where: str, record: Record) -> None:
        """Refuses images and videos that the model does not read."""
        if record.images and self.geometry is None:
            raise DataError(
                f"{where}: {len(record.images)} images, but the model has no encoder; add "
                "[model.encoder] or use samples without images"
            )
        num_videos = sum(isinstance(raw, RawVideo) for raw in record.images)
        if num_videos and "video" not in self.token_ids:
            if self._videos is None:
                raise DataError(
                    f"{where}: {num_videos} videos, but the model's encoder reads images alone; use one of "
                    f"{', '.join(VIDEO_ENCODERS)}, or leave them out"
                )
            raise DataError(
                f"{where}: {num_videos} videos, but the tokenizer has no token {shown(self._video_token)} for them; "
                "name its own with tokenizer.video_token, use a tokenizer that has one, or leave them out"
            )

    def _measured(self, where: str, record: Record, index: int) -> _Measured:
        """The size of an image or video of a record, from its header."""
        raw = record.images[index]
        kind = "image" if isinstance(raw, RawImage) else "video"
        try:
            return self._image(record, index, raw) if isinstance(raw, RawImage) else self._video(record, index, raw)
        except DataError as error:
            raise DataError(f"{kind} {index} of {where}{_file(raw)}: {error}") from None

    def _image(self, record: Record, index: int, raw: RawImage) -> _Measured:
        assert self.geometry is not None
        data = raw.read(self._data.max_media_bytes)
        grid = self.geometry.grid(*header_size(data, self._data.max_decoded_pixels))
        return _Measured((self._meta(record, index, grid),))

    def _video(self, record: Record, index: int, raw: RawVideo) -> _Measured:
        assert self._videos is not None
        frames, rules = open_frames(raw, self._data), self._videos
        fps = self._fps(raw, frames.fps)
        count = rules.num_sampled(frames.num_frames, fps)
        seconds, grid = rules.seconds(frames.num_frames, fps, count), rules.grid(count, *frames.size)
        captions = rules.captions(frames.num_frames, fps, count)
        grid = (1, *grid[1:]) if captions else grid
        meta = self._meta(record, index, grid, seconds, rules.time_step(seconds))
        patches = tuple(replace(meta, frame=frame) for frame in range(len(captions)))
        return _Measured(patches or (meta,), captions)

    def _meta(
        self, record: Record, index: int, grid: tuple[int, int, int], seconds: float = 0.0, step: float = 1.0
    ) -> ImageMeta:
        assert self.geometry is not None
        return ImageMeta(
            sample=record.sample,
            source=record.source,
            index=index,
            grid=grid,
            num_tokens=self.geometry.num_tokens(grid),
            seconds=seconds,
            time_step=step,
        )

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

    def _template(self, where: str, messages: list[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # templates are programs: jinja errors, and any error of their filters
            raise DataError(f"{where}: the chat template refuses it: {one_line(error)}") from None
        return text

    def _message(self, where: str, message: Mapping[str, Any]) -> dict[str, Any]:
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
        for kind, tokens in self._texts.items():
            content = content.replace(PLACEHOLDERS[kind], tokens)
        return {"role": role, "content": self._content(content)}

    def _part(self, where: str, part: Any) -> str:
        kind = kind_of(part)
        if kind is not None:
            return PLACEHOLDERS[kind]
        name = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if name == "text" and isinstance(part.get("text"), str):
            return str(part["text"])
        supported = ", ".join(("text", *PARTS))
        raise DataError(f"{where}: a part of its content is of type {shown(name)}; supported are {supported}")


def _order(where: str, record: Record, kinds: Sequence[str]) -> list[int]:
    """Index of the image or video that each placeholder of a record stands for. Args: kinds: of the placeholders."""
    of_kinds = {}
    for kind, raw in (("image", RawImage), ("video", RawVideo)):
        own = [index for index, item in enumerate(record.images) if isinstance(item, raw)]
        if (count := kinds.count(kind)) != len(own):
            mark = PLACEHOLDERS[kind]
            raise DataError(
                f"{where}: {count} `{mark}` placeholders in its messages, but {len(own)} {kind}s; "
                f"write `{mark}` in its text once for each {kind}, at its position, or change the {kind}s; or set "
                'data.on_error = "skip"'
            )
        of_kinds[kind] = iter(own)
    return [next(of_kinds[kind]) for kind in kinds]


def _file(raw: RawImage | RawVideo) -> str:
    """The file of a video, for errors."""
    return f" ({raw.name})" if isinstance(raw, RawVideo) and raw.name else ""


def _record_of(meta: DocumentMeta) -> Record:
    """The record of a document, without its content."""
    return Record(sample=meta.sample, source=meta.source, messages=(), images=(), grade=meta.grade)


def _make_document(
    record: Record,
    ids: np.ndarray,
    turn: np.ndarray,
    images: tuple[ImageMeta, ...],
    raw: tuple[RawImage | RawVideo, ...],
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
    content = content_form(tokenizer)
    messages = [{"role": "user", "content": content("?")}, {"role": "assistant", "content": content("!")}]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    behind = tokenizer(text.rpartition("!")[2].strip(), add_special_tokens=False)["input_ids"]
    return int(behind[0] if behind else tokenizer.eos_token_id)
