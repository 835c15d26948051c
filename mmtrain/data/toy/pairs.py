"""The built-in data set of pairs: images of one coloured shape, with captions that say which, how large, where and on
what.

Made once by `mmtrain data pairs OUT --num-samples N --seed S`: parquet files that `datasets.load_dataset(OUT)` opens
with the splits `train` and `validation`, and a data set card.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from PIL import Image

from mmtrain.data.toy.data_set import COLOURS, DataSet, Summary, card_head, image_value
from mmtrain.data.toy.shape_clips import BACKGROUNDS, KINDS, SIZES, MovingShape, ShapeClip, ShapeKind, draw

SIDE = 32
"""Pixels along a side of an image."""
PLACES = {
    "in the middle": (0.5, 0.5),
    "on the left": (0.27, 0.5),
    "on the right": (0.73, 0.5),
    "at the top": (0.5, 0.27),
    "at the bottom": (0.5, 0.73),
}
"""Words -> x and y of the centre, as parts of the sides."""
_OFF = 0.05
"""The largest distance of a shape from its place."""
_FORMS = ("a {size} {colour} {kind} {place} on {ground}", "on {ground}, a {size} {colour} {kind} {place}")
_HELD_OUT = 7
"""One in this many combinations of colour, kind and place is in the validation split only."""
_FEATURES = {
    "image": {"_type": "Image"},
    "caption": {"dtype": "string", "_type": "Value"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionedImage:
    """One image, not drawn, and its caption."""

    clip: ShapeClip
    """A clip of one frame, with one shape."""

    @property
    def caption(self) -> str:
        """A description of what the image shows."""
        return self.clip.caption


def held_out(colour: str, kind: ShapeKind, place: str) -> bool:
    """Whether a combination belongs to the validation split, for every seed."""
    indices = list(COLOURS).index(colour), KINDS.index(kind), list(PLACES).index(place)
    return (2 * indices[0] + 3 * indices[1] + indices[2]) % _HELD_OUT == 0


def pairs(split: str, count: int, seed: int) -> Iterator[CaptionedImage]:
    """The pairs of a split, not drawn; the first ones of a longer split are the same. No caption comes again before
    all others have been there."""
    rng = random.Random(f"pairs/{split}/{seed}")
    seen = [
        found
        for found in itertools.product(COLOURS, KINDS, PLACES, SIZES, BACKGROUNDS)
        if held_out(*found[:3]) == (split == "validation")
    ]
    for number in range(count):
        if number % len(seen) == 0:
            rng.shuffle(seen)
        yield _pair(rng, *seen[number % len(seen)])


def _pair(rng: random.Random, colour: str, kind: ShapeKind, place: str, size: str, ground: str) -> CaptionedImage:
    x, y = (centre + rng.uniform(-_OFF, _OFF) for centre in PLACES[place])
    shape = MovingShape(kind=kind, colour=colour, size=size, motion="still", speed="", x=x, y=y, heading=1)
    caption = rng.choice(_FORMS).format(size=size, colour=colour, kind=kind, place=place, ground=ground)
    clip = ShapeClip(shapes=(shape,), background=ground, num_frames=1, height=SIDE, width=SIDE, caption=caption)
    return CaptionedImage(clip=clip)


def _row(pair: CaptionedImage) -> dict[str, Any]:
    return {"image": image_value(Image.fromarray(draw(pair.clip)[0])), "caption": pair.caption}


def _card(summary: Summary, num_samples: int, seed: int) -> str:
    return f"""{card_head("zero-shot-image-classification", "Shapes with captions")}
Images of one coloured shape on a plain background, with captions, made by
`mmtrain data pairs OUT --num-samples {num_samples} --seed {seed}`. The same command makes the same data.

{summary.num_train} training and {summary.num_validation} validation pairs, {summary.num_bytes / 1e6:.1f} MB.

| column | content |
|---|---|
| `image` | a PNG image of {SIDE} x {SIDE} pixels |
| `caption` | size, colour, kind and place of the shape, and the background |

Shapes are {", ".join(KINDS)}; colours {", ".join(COLOURS)}; places {", ".join(PLACES)}.

One in {_HELD_OUT} of the {len(COLOURS) * len(KINDS) * len(PLACES)} combinations of colour, shape and place is in the
validation split alone, and the validation split has no other. No caption of it comes again before all have been there.
"""


make_pairs = DataSet(kind="pairs", samples=pairs, row=_row, features=_FEATURES, images="image", card=_card).make
"""Writes the data set: see `DataSet.make`."""
