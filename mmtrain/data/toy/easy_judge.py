"""What pixels of a clip of the easy level show: background, colour and motion of the square, without a model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmtrain.data.toy.data_set import COLOURS
from mmtrain.data.toy.shape_clips import BACKGROUNDS, EASY_BACKGROUNDS, EASY_COLOURS, easy_captions

PROMPTS = tuple(easy_captions())
"""The 12 captions of the easy level."""

_FAR = 90.0
"""Levels of 255 in one channel, from which a pixel is not of the background, and no colour is another."""
_AREAS = (10, 50)
"""Pixels of the square in one frame, at least and at most; it is drawn with 25."""
_LEAST_SHIFT = 2.5
"""Pixels that the centre moves in a clip; it is drawn with 5.25."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a clip shows; a value that none of the level comes near to is empty."""

    background: str
    colour: str
    motion: str

    def agrees(self, caption: str) -> tuple[bool, bool, bool]:
        """Whether background, colour and motion are those of a caption of the easy level."""
        colour, motion, background = easy_captions()[caption]
        return self.background == background, self.colour == colour, self.motion == motion


def see(frames_FHW3: npt.NDArray[np.uint8]) -> Seen:
    """What a clip shows.

    The background is the median of all pixels. The square is what differs from it: its colour is the median there,
    and its motion the way of its centre from the first frame to the last.
    """
    pixels = frames_FHW3.astype(np.float64)
    ground = np.median(pixels, axis=(0, 1, 2))
    covered_FHW = np.abs(pixels - ground).max(axis=-1) > _FAR
    areas = covered_FHW.sum(axis=(1, 2))
    if areas.min() < _AREAS[0] or areas.max() > _AREAS[1]:
        return Seen(background=_nearest(ground, BACKGROUNDS, EASY_BACKGROUNDS), colour="", motion="")
    centres = [np.argwhere(frame).mean(axis=0) for frame in covered_FHW]
    down, right = centres[-1] - centres[0]
    is_level = abs(right) >= max(_LEAST_SHIFT, 2 * abs(down))
    return Seen(
        background=_nearest(ground, BACKGROUNDS, EASY_BACKGROUNDS),
        colour=_nearest(np.median(pixels[covered_FHW], axis=0), COLOURS, EASY_COLOURS),
        motion=("right" if right > 0 else "left") if is_level else "",
    )


def _nearest(value: npt.NDArray[np.float64], table: dict[str, tuple[int, int, int]], names: Sequence[str]) -> str:
    """The name of the nearest colour, if it is near."""
    distances = {name: float(np.abs(value - np.array(table[name])).max()) for name in names}
    name = min(distances, key=lambda name: distances[name])
    return name if distances[name] < _FAR else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipVerdict:
    """How many of some clips show what their captions say."""

    num_clips: int
    right: int
    """The number that is right in background, colour and direction."""
    background: int
    colour: int
    direction: int

    def text(self) -> str:
        """A line of a log."""
        return (
            f"{self.right} of {self.num_clips} clips show what their prompts say (background: {self.background}, "
            f"colour: {self.colour}, direction: {self.direction})"
        )


def judge(clips: Iterable[npt.NDArray[np.uint8]], captions: Sequence[str]) -> ClipVerdict:
    """The verdict on clips, [F, H, W, 3] pixels each. Args: captions: of the easy level, one of each clip."""
    checks = [see(clip).agrees(caption) for clip, caption in zip(clips, captions, strict=True)]
    background, colour, direction = (sum(check[i] for check in checks) for i in range(3))
    return ClipVerdict(
        num_clips=len(checks), right=sum(map(all, checks)), background=background, colour=colour, direction=direction
    )
