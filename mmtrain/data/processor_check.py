"""Tokens of a conversation by a job's processor, compared with those of transformers' processor of the same folder."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmtrain.config.config import Config
from mmtrain.data.conversation_records import Record
from mmtrain.data.conversations import make_processor
from mmtrain.data.media import RawImage, RawMedium, raw_image
from mmtrain.data.record_parts import placeholder
from mmtrain.data.tokenizer_limits import time_limit
from mmtrain.errors import one_line
from mmtrain.spec.hub_files import local_path

_SIDES = ((56, 84), (70, 56))
"""Height and width of the drawn images, pixels."""
_TURNS = (
    ("user", "What is in this image?"),
    ("assistant", "A square."),
    ("user", "And now,\nwith two lines?"),
    ("assistant", "A circle of 12 pixels."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The tokens of one conversation by both processors."""

    theirs: str
    """The class of their processor; empty: the folder has none that transformers reads."""
    num_tokens: int
    """The number of our tokens."""
    difference: str
    """The difference of the two, or why they were not compared; empty: they are equal."""

    @property
    def is_equal(self) -> bool:
        """Whether they were compared, and are equal."""
        return bool(self.theirs) and not self.difference


def compare_processors(config: Config) -> Compared:
    """Compares the tokens of a drawn conversation, with images if the model sees.

    Raises: ConfigError: the job's tokenizer, template or image processor cannot be opened. DataError: they cannot
        make tokens of such a conversation.
    """
    processor = make_processor(config)
    num_images = len(_SIDES) if "image" in processor.readers.of_kind else 0
    images = [_drawn(index) for index in range(num_images)]
    marks = [placeholder("image") if index // 2 < num_images and not index % 2 else "" for index in range(len(_TURNS))]
    turns = zip(_TURNS, marks, strict=True)
    messages = tuple({"role": role, "content": mark + text} for (role, text), mark in turns)
    raw: list[RawMedium] = [_raw(image, index) for index, image in enumerate(images)]
    ours = processor.document(Record(sample=0, messages=messages, images=tuple(raw))).input_ids.tolist()
    theirs, reason = _their_processor(config)
    if theirs is None:
        return Compared(theirs="", num_tokens=len(ours), difference=reason)
    name = type(theirs).__name__
    try:
        tokens = _their_tokens(theirs, images)
    except Exception as error:  # a processor runs a template and code of any model
        reason = f"it refuses the conversation: {one_line(error, 200)}"
        return Compared(theirs=name, num_tokens=len(ours), difference=reason)
    return Compared(theirs=name, num_tokens=len(ours), difference=_difference(processor.tokenizer, ours, tokens))


def _their_processor(config: Config) -> tuple[Any, str]:
    """The processor of transformers of the folder of the tokenizer, or of a language model its tokenizer; or None, and
    why."""
    from transformers import AutoProcessor

    path = config.tokenizer.path
    folder = local_path("tokenizer.path", path) if path else None
    if folder is None:
        return None, "tokenizer.path names no local folder" if path else "the tokenizer is that of mmtrain"
    try:
        return AutoProcessor.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False), ""
    except Exception as error:  # the folder may hold anything
        return None, f"transformers reads no processor of {folder}: {one_line(error, 200)}"


def _their_tokens(processor: Any, images: list[Image.Image]) -> list[int]:
    content: list[Any] = []
    for index, (role, text) in enumerate(_TURNS):
        image = [{"type": "image"}] if index // 2 < len(images) and not index % 2 else []
        content.append({"role": role, "content": [*image, {"type": "text", "text": text}]})
    if not images:
        content = [{"role": role, "content": text} for role, text in _TURNS]
    with time_limit("its chat template"):
        text = processor.apply_chat_template(content, tokenize=False)
    if not images:
        tokenizer = getattr(processor, "tokenizer", processor)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return [int(token) for token in processor(text=[text], images=images)["input_ids"][0]]


def _difference(tokenizer: Any, ours: list[int], theirs: list[int]) -> str:
    """The first position where two lists of tokens differ, in words; empty: they are equal."""
    if ours == theirs:
        return ""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    shown = [tokenizer.decode(tokens[at : at + 8]) or "nothing" for tokens in (ours, theirs)]
    return (
        f"from token {at} of {len(ours)} on: {one_line(repr(shown[0]), 80)} here, {one_line(repr(shown[1]), 80)} "
        f"there, which has {len(theirs)} tokens"
    )


def _drawn(index: int) -> Image.Image:
    height, width = _SIDES[index]
    values = np.random.default_rng(index).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


def _raw(image: Image.Image, index: int) -> RawImage:
    file = io.BytesIO()
    image.save(file, "PNG")
    return raw_image(file.getvalue(), f"the drawn image {index}", str(Path()))
