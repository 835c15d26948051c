"""The built-in video data set: short clips of moving, coloured shapes with captions that describe them.

Made once by `mmtrain data shapes OUT --num-samples N --seed S [--level easy]`: parquet files that
`datasets.load_dataset(OUT)` opens with the splits `train` and `validation`, and a data set card.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from mmtrain.data.clip_images import enlarged, save_gif, sheet
from mmtrain.data.toy.data_set import COLOURS, DataSet, Summary, card_head, image_value
from mmtrain.data.toy.shape_clips import (
    EASY_BACKGROUNDS,
    EASY_COLOURS,
    EASY_FRAMES,
    EASY_SIDE,
    FPS,
    FRAME_SIZES,
    KINDS,
    MOTIONS,
    NUM_FRAMES,
    ClipMaker,
    EasyClipMaker,
    ShapeClip,
    draw,
)
from mmtrain.errors import ConfigError, DataError

_FEATURES = {
    "caption": {"dtype": "string", "_type": "Value"},
    "frames": {"feature": {"_type": "Image"}, "_type": "List"},
    "fps": {"dtype": "float64", "_type": "Value"},
}
"""Column types in the form that `datasets` keeps in a parquet file's metadata."""

ShapesLevel = Literal["full", "easy"]
"""full: up to three shapes of all kinds and motions; easy: one square, 12 captions."""

_ZOOM = 3
_EASY_NAME = "One moving square"


def shape_clips(split: str, count: int, seed: int, level: ShapesLevel = "full") -> Iterator[ShapeClip]:
    """The clips of a split, not drawn; the first ones of a longer split are the same."""
    if level == "easy":
        make: EasyClipMaker | ClipMaker = EasyClipMaker(f"shapes/easy/{split}/{seed}")
    else:
        make = ClipMaker(f"shapes/{split}/{seed}", validation=split == "validation")
    for _ in range(count):
        yield make()


def shape_captions(count: int, seed: int) -> Iterator[str]:
    """The captions of a train split, for training a tokenizer."""
    return (clip.caption for clip in shape_clips("train", count, seed))


def _row(clip: ShapeClip) -> dict[str, Any]:
    frames = [image_value(Image.fromarray(frame)) for frame in draw(clip)]
    return {"caption": clip.caption, "frames": frames, "fps": float(FPS)}


# ---------------------------------------------------------------------------------------------- preview


def check_preview(path: Path) -> None:
    """Checks the file of `write_preview`.

    Raises: ConfigError: its ending is neither .png nor .gif. DataError: its folder does not exist.
    """
    if path.suffix.lower() not in (".png", ".gif"):
        raise ConfigError(
            f"preview {str(path)!r}: name a file that ends in .png (frames side by side) or .gif (moving)"
        )
    if not path.parent.is_dir():
        raise DataError(f"preview {str(path)!r}: the folder {path.parent} does not exist; make it or name another")


def write_preview(path: Path, clips: Iterable[ShapeClip]) -> None:
    """Draws a few clips with their captions to a file: a row of frames each (.png), or each moving (.gif).

    Raises: as `check_preview`.
    """
    check_preview(path)
    rows = [(clip.caption, enlarged(draw(clip), _ZOOM)) for clip in clips]
    if path.suffix.lower() == ".png":
        sheet(rows).save(path)
        return
    longest = max(len(frames) for _, frames in rows)
    sheets = [sheet([(text, [frames[min(t, len(frames) - 1)]]) for text, frames in rows]) for t in range(longest)]
    save_gif(path, sheets, FPS)


def _card(summary: Summary, num_samples: int, seed: int) -> str:
    sizes = ", ".join(f"{width} x {height}" for height, width in FRAME_SIZES)
    return f"""{card_head("text-to-video", "Moving shapes")}
Short clips of one to three coloured shapes that move on a plain background, with captions, made by
`mmtrain data shapes OUT --num-samples {num_samples} --seed {seed}`. The same command makes the same data.

{summary.num_train} training and {summary.num_validation} validation clips, {summary.num_images} frames,
{summary.num_bytes / 1e6:.1f} MB.

| column | content |
|---|---|
| `caption` | what is seen: size, colour, kind, motion and speed of each shape, and the background |
| `frames` | list of PNG images: {", ".join(map(str, NUM_FRAMES))} of them, of {sizes} pixels (width x height) |
| `fps` | frames a second: {FPS} |

Shapes are {", ".join(KINDS)}; colours {", ".join(COLOURS)}. A shape moves in one of four directions, rests, or bounces
off two opposite edges. Durations and sizes say nothing about the caption.

One in seven of the {len(COLOURS) * len(KINDS) * len(MOTIONS)} combinations of colour, shape and motion is in the
validation split alone, and the validation split has no other: each word is known from training, the combination is not.
"""


def _easy_card(summary: Summary, num_samples: int, seed: int) -> str:
    return f"""{card_head("text-to-video", _EASY_NAME)}
Clips of one square that moves right or left, with captions, made by
`mmtrain data shapes OUT --level easy --num-samples {num_samples} --seed {seed}`. The same command makes the same data.

{summary.num_train} training and {summary.num_validation} validation clips, {summary.num_images} frames,
{summary.num_bytes / 1e6:.1f} MB.

| column | content |
|---|---|
| `caption` | what is seen: colour, direction and background, as in "a red square moves right on white" |
| `frames` | list of {EASY_FRAMES} PNG images of {EASY_SIDE} x {EASY_SIDE} pixels |
| `fps` | frames a second: {FPS} |

Colours are {", ".join(EASY_COLOURS)}; backgrounds {", ".join(EASY_BACKGROUNDS)}. Where the square starts is drawn for
each clip. Both splits have the same 12 captions.
"""


def is_easy(folder: Path) -> bool:
    """Whether a folder is a data set of the easy level, by its card."""
    card = folder / "README.md"
    return card.is_file() and f"pretty_name: {_EASY_NAME}\n" in card.read_text(encoding="utf-8")


make_shapes = DataSet(
    kind="shapes", samples=shape_clips, row=_row, features=_FEATURES, images="frames", card=_card
).make
"""Writes the data set: see `DataSet.make`."""

make_easy_shapes = DataSet(
    kind="shapes",
    samples=partial(shape_clips, level="easy"),
    row=_row,
    features=_FEATURES,
    images="frames",
    card=_easy_card,
).make
"""Writes the data set of the easy level: see `DataSet.make`."""
