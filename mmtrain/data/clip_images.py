"""Video clips as images: animated, or their frames side by side with captions. Pillow and numpy only."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

_GAP = 4
_LINE = 14
"""Height of a line of text in pixels."""
_LETTER = 7
"""Width of nearly every letter, at most."""
_LEAST_LETTERS = 60
"""Letters of one line above images that are narrower."""


_SHEET_FRAMES = 16
"""Most frames of one clip on the sheet."""
_LEAST_SIDE = 96
"""Least longer side of an image in pixels: smaller clips are enlarged."""


def shown_frames(frames_FHWC: np.ndarray) -> list[Image.Image]:
    """The frames (uint8) as images that are large enough to be looked at."""
    return enlarged(frames_FHWC, math.ceil(_LEAST_SIDE / max(frames_FHWC.shape[1:3])))


def some_of(images: Sequence[Image.Image]) -> list[Image.Image]:
    """Evenly spaced frames of a clip for a sheet, with the first and the last one."""
    indices = np.linspace(0, len(images) - 1, min(len(images), _SHEET_FRAMES)).round().astype(int)
    return [images[index] for index in indices]


def enlarged(frames_FHWC: np.ndarray, zoom: int) -> list[Image.Image]:
    """The frames (uint8) as images; each pixel becomes a square of zoom x zoom."""
    height, width = frames_FHWC.shape[1:3]
    size = (width * zoom, height * zoom)
    return [Image.fromarray(frame).resize(size, Image.Resampling.NEAREST) for frame in frames_FHWC]


def sheet(rows: Sequence[tuple[str, Sequence[Image.Image]]]) -> Image.Image:
    """Rows of images with their captions above, wrapped into lines."""
    wide = max(sum(p.width + _GAP for p in images) for _, images in rows)
    letters = max(_LEAST_LETTERS, wide // _LETTER)
    texts = [textwrap.wrap(caption, letters) or [""] for caption, _ in rows]
    width = max(wide, *(_LETTER * len(line) for lines in texts for line in lines)) + _GAP
    heights = [max(p.height for p in images) for _, images in rows]
    above = [_LINE * len(lines) for lines in texts]
    paper = Image.new("RGB", (width, sum(heights) + sum(above) + 2 * _GAP * len(rows) + _GAP), (235, 235, 240))
    pen = ImageDraw.Draw(paper)
    top = _GAP
    for lines, room, height, (_, images) in zip(texts, above, heights, rows, strict=True):
        for i, line in enumerate(lines):
            pen.text((_GAP, top + i * _LINE), line, fill=(0, 0, 0))
        x = _GAP
        for image in images:
            paper.paste(image, (x, top + room))
            x += image.width + _GAP
        top += room + height + 2 * _GAP
    return paper


def save_gif(path: Path, images: Sequence[Image.Image], fps: float) -> None:
    """Writes an endlessly looping GIF. GIF counts hundredths of a second, so the durations of frames are rounded
    such that their sum is right."""
    ends = [round(100 * i / fps) for i in range(len(images) + 1)]
    # Viewers show a frame of less than two hundredths of a second for ten.
    durations = [10 * max(2, ends[i + 1] - ends[i]) for i in range(len(images))]
    images[0].save(path, save_all=True, append_images=list(images[1:]), duration=durations, loop=0)
