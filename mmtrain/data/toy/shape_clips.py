"""Clips of moving shapes as values, their drawing with numpy, and their captions."""

import itertools
import math
import random
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mmtrain.data.toy.data_set import COLOURS

ShapeKind = Literal["circle", "square", "triangle", "diamond", "cross"]
Motion = Literal["right", "left", "up", "down", "still", "sideways", "vertical"]
"""A direction; at rest; or bouncing off two opposite edges."""

KINDS: tuple[ShapeKind, ...] = ("circle", "square", "triangle", "diamond", "cross")
MOTIONS: tuple[Motion, ...] = ("right", "left", "up", "down", "still", "sideways", "vertical")
BACKGROUNDS = {"black": (0, 0, 0), "white": (255, 255, 255), "grey": (128, 128, 128)}
SIZES = {"small": 0.13, "large": 0.23}
"""Half of a shape's extent, as a part of the frame's shorter side."""

FPS = 8
"""Frames a second of every clip."""
NUM_FRAMES = (4, 8, 12, 16)
FRAME_SIZES = ((24, 24), (32, 32), (24, 32), (32, 24))
"""Height and width in pixels."""

SPEEDS = {"slowly": 0.16, "quickly": 0.34}
"""Frame sides a second of a shape that moves in one direction; a bouncing one is twice as fast."""

EASY_COLOURS = ("red", "green", "blue")
EASY_BACKGROUNDS = ("black", "white")
EASY_MOTIONS: tuple[Motion, ...] = ("right", "left")
EASY_FRAMES = 4
EASY_SIDE = 12
"""The easy level: one square of one size in one of three colours goes right or left on black or white, in clips of
`EASY_FRAMES` frames with `EASY_SIDE` x `EASY_SIDE` pixels."""

EASY_BUCKET = (EASY_FRAMES, EASY_SIDE, EASY_SIDE)
"""Frames, height and width of a clip of the easy level."""

_EASY_SIZE, _EASY_SPEED = "", "steadily"
"""Size and speed of the easy level, which captions do not name."""
_RADII = SIZES | {_EASY_SIZE: 0.237}
_RATES = SPEEDS | {"": 0.0, _EASY_SPEED: 7 / 6}

_HELD_OUT = 7
"""One in this many combinations of colour, kind and motion is in the validation split only."""

_WAYS = {
    "right": ("{} right", "{} to the right"),
    "left": ("{} left", "{} to the left"),
    "up": ("{} up", "{} upwards"),
    "down": ("{} down", "{} downwards"),
}
_VERBS = ("moves", "slides", "goes", "drifts")
_STILL = ("stays still", "does not move", "rests")
_BOUNCES = {
    "sideways": ("bounces left and right", "bounces from side to side"),
    "vertical": ("bounces up and down", "bounces between top and bottom"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MovingShape:
    """One shape and its path through the clip."""

    kind: ShapeKind
    colour: str
    size: str
    """A word of `SIZES`; empty at the easy level."""
    motion: Motion
    speed: str
    """A word of `SPEEDS`, or that of the easy level; empty for a shape at rest."""
    x: float
    """x of its centre in the first frame, as a part of the frame's width."""
    y: float
    """y of its centre, as a part of the frame's height."""
    heading: int
    """The first direction of a bouncing shape: -1 (left or up) or 1 (right or down)."""

    @property
    def combination(self) -> tuple[str, str, str]:
        """Values that differ between the splits."""
        return self.colour, self.kind, self.motion


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeClip:
    """One clip: up to three shapes on a plain background."""

    shapes: tuple[MovingShape, ...]
    """The shapes in the order of the caption."""
    background: str
    num_frames: int
    height: int
    width: int
    caption: str


def held_out(combination: tuple[str, str, str]) -> bool:
    """Whether a combination of colour, kind and motion belongs to the validation split, for every seed."""
    colour, kind, motion = combination
    indices = list(COLOURS).index(colour), KINDS.index(kind), MOTIONS.index(motion)  # type: ignore[arg-type]
    # A sum modulo 7 distributes them: each colour with each kind lacks one motion of seven in training.
    return (2 * indices[0] + 3 * indices[1] + indices[2]) % _HELD_OUT == 0


class ClipMaker:
    """Makes clips in order; the sequence depends only on the seed text."""

    def __init__(self, seed: str, *, validation: bool) -> None:
        self._random = random.Random(seed)
        self._combinations = [
            (colour, kind, motion)
            for colour in COLOURS
            for kind in KINDS
            for motion in MOTIONS
            if held_out((colour, kind, motion)) == validation
        ]

    def __call__(self) -> ShapeClip:
        """The next clip."""
        rng = self._random
        num_frames = rng.choice(NUM_FRAMES)
        height, width = rng.choice(FRAME_SIZES)
        background = rng.choice(tuple(BACKGROUNDS))
        shapes: list[MovingShape] = []
        for _ in range(rng.choice((1, 1, 2, 3))):
            used = {shape.colour for shape in shapes}
            free = [found for found in self._combinations if found[0] not in used]
            shapes.append(self._shape(rng.choice(free), num_frames, height, width))
        return ShapeClip(
            shapes=tuple(shapes),
            background=background,
            num_frames=num_frames,
            height=height,
            width=width,
            caption=self._caption(shapes, background),
        )

    def _shape(
        self, combination: tuple[str, ShapeKind, Motion], num_frames: int, height: int, width: int
    ) -> MovingShape:
        rng = self._random
        colour, kind, motion = combination
        size = rng.choice(tuple(SIZES))
        speed = "" if motion == "still" else rng.choice(tuple(SPEEDS))
        heading = rng.choice((-1, 1))
        travel = SPEEDS[speed] * (num_frames - 1) / FPS if speed else 0.0
        radius = SIZES[size] * min(height, width)
        low_x, low_y = radius / width, radius / height
        x, y = rng.uniform(low_x, 1 - low_x), rng.uniform(low_y, 1 - low_y)
        if motion in ("right", "left"):
            x = self._start(low_x / 2, travel, 1 if motion == "right" else -1)
        elif motion in ("up", "down"):
            y = self._start(low_y / 2, travel, 1 if motion == "down" else -1)
        elif motion == "sideways":
            x = _before_edge(low_x, travel, heading)
        elif motion == "vertical":
            y = _before_edge(low_y, travel, heading)
        return MovingShape(kind=kind, colour=colour, size=size, motion=motion, speed=speed, x=x, y=y, heading=heading)

    def _start(self, edge: float, travel: float, sign: int) -> float:
        """The start of a shape that moves in one direction and stays within the edges."""
        from_behind = self._random.uniform(edge, max(edge, 1 - edge - travel))
        return from_behind if sign > 0 else 1 - from_behind

    def _caption(self, shapes: list[MovingShape], background: str) -> str:
        parts = [self._phrase(shape) for shape in shapes]
        text = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
        form = self._random.choice(("{} on {}", "{} on a {} background", "on a {1} background {0}"))
        return form.format(text, background)

    def _phrase(self, shape: MovingShape) -> str:
        rng = self._random
        if shape.motion == "still":
            what = rng.choice(_STILL)
        else:
            if shape.motion in _BOUNCES:
                what = rng.choice(_BOUNCES[shape.motion])
            else:
                what = rng.choice(_WAYS[shape.motion]).format(rng.choice(_VERBS))
            verb, _, rest = what.partition(" ")
            what = rng.choice((f"{verb} {shape.speed} {rest}", f"{what} {shape.speed}"))
        return f"a {shape.size} {shape.colour} {shape.kind} {what}"


class EasyClipMaker:
    """Makes clips of the easy level in order; the sequence depends only on the seed text.

    Each clip draws one of the 12 captions and where the square starts. So the splits have the same captions, and differ
    in positions.
    """

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def __call__(self) -> ShapeClip:
        """The next clip."""
        rng = self._random
        colour, background, motion = rng.choice(EASY_COLOURS), rng.choice(EASY_BACKGROUNDS), rng.choice(EASY_MOTIONS)
        edge = 0.88 * _RADII[_EASY_SIZE]
        travel = _RATES[_EASY_SPEED] * (EASY_FRAMES - 1) / FPS
        from_behind = rng.uniform(edge, 1 - edge - travel)
        shape = MovingShape(
            kind="square",
            colour=colour,
            size=_EASY_SIZE,
            motion=motion,
            speed=_EASY_SPEED,
            x=from_behind if motion == "right" else 1 - from_behind,
            y=rng.uniform(edge, 1 - edge),
            heading=1,
        )
        return ShapeClip(
            shapes=(shape,),
            background=background,
            num_frames=EASY_FRAMES,
            height=EASY_SIDE,
            width=EASY_SIDE,
            caption=easy_caption(colour, motion, background),
        )


def easy_caption(colour: str, motion: Motion, background: str) -> str:
    """The caption of a clip of the easy level."""
    return f"a {colour} square moves {motion} on {background}"


def easy_captions() -> dict[str, tuple[str, Motion, str]]:
    """The colour, motion and background that each caption of the easy level names."""
    values = itertools.product(EASY_COLOURS, EASY_MOTIONS, EASY_BACKGROUNDS)
    return {easy_caption(*named): named for named in values}


def _before_edge(edge: float, travel: float, heading: int) -> float:
    """The start of a shape that reaches its edge in the middle of the clip."""
    from_edge = min(travel, 1 - 2 * edge)  # it is twice as fast as in one direction: half of 2 * travel
    return 1 - edge - from_edge if heading > 0 else edge + from_edge


# ---------------------------------------------------------------------------------------------- drawing


def draw(clip: ShapeClip) -> np.ndarray:
    """[F, H, W, 3] uint8: the frames of a clip, with soft edges; equal clips give equal pixels."""
    frames = np.empty((clip.num_frames, clip.height, clip.width, 3))
    frames[:] = BACKGROUNDS[clip.background]
    for shape in sorted(clip.shapes, key=lambda shape: -_RADII[shape.size]):  # small ones in front
        x_F, y_F = _path(shape, clip)
        radius = _RADII[shape.size] * min(clip.height, clip.width)
        dx_FHW = np.arange(clip.width) + 0.5 - x_F[:, None, None]
        dy_FHW = np.arange(clip.height)[:, None] + 0.5 - y_F[:, None, None]
        cover = np.clip(0.5 - _outside(shape.kind, dx_FHW, dy_FHW, radius), 0, 1)[..., None]
        frames += cover * (np.array(COLOURS[shape.colour]) - frames)
    return np.rint(frames).astype(np.uint8)


def _path(shape: MovingShape, clip: ShapeClip) -> tuple[np.ndarray, np.ndarray]:
    """Centre of a shape in each frame, in pixels."""
    time_s = np.arange(clip.num_frames) / FPS
    x, y = np.full(clip.num_frames, shape.x), np.full(clip.num_frames, shape.y)
    radius = _RADII[shape.size] * min(clip.height, clip.width)
    speed = _RATES[shape.speed]
    if shape.motion in ("right", "left"):
        x = x + (speed if shape.motion == "right" else -speed) * time_s
    elif shape.motion in ("up", "down"):
        y = y + (speed if shape.motion == "down" else -speed) * time_s
    elif shape.motion == "sideways":
        x = _reflected(x + 2 * speed * shape.heading * time_s, radius / clip.width)
    elif shape.motion == "vertical":
        y = _reflected(y + 2 * speed * shape.heading * time_s, radius / clip.height)
    return x * clip.width, y * clip.height


def _reflected(position: np.ndarray, edge: float) -> np.ndarray:
    """Positions of a shape that is reflected at `edge` and at 1 - `edge`."""
    room = 1 - 2 * edge
    phase = (position - edge) % (2 * room)
    return edge + np.minimum(phase, 2 * room - phase)


def _outside(kind: ShapeKind, dx: np.ndarray, dy: np.ndarray, radius: float) -> np.ndarray:
    """Approximate distance in pixels of a point from a shape; negative inside."""
    if kind == "circle":
        return np.asarray(np.hypot(dx, dy) - radius)
    across, along = np.abs(dx), np.abs(dy)
    if kind == "square":
        return np.asarray(np.maximum(across, along) - 0.88 * radius)
    if kind == "diamond":
        return np.asarray((across + along - 1.2 * radius) / math.sqrt(2))
    if kind == "cross":  # the nearer one of two bars, a third as wide as long
        level = np.maximum(across - radius, along - radius / 3)
        upright = np.maximum(across - radius / 3, along - radius)
        return np.asarray(np.minimum(level, upright))
    # The triangle points up: below its two slanted sides and above its base.
    slant = (across - (dy + radius) / 2) * 2 / math.sqrt(5)
    return np.asarray(np.maximum(slant, dy - radius))
