"""The built-in video data set: short clips of moving, coloured shapes with captions that describe them.

Made once by `mmtrain data shapes OUT --num-samples N --seed S`: parquet files that
`datasets.load_dataset(OUT)` opens with the splits `train` and `validation`, and a data set card.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from mmtrain.data.clip_images import enlarged, save_gif, sheet
from mmtrain.data.toy.folder import (
    COLOURS,
    Progress,
    card_head,
    image_value,
    new_folder,
    split_sizes,
    told,
    write_rows,
)
from mmtrain.data.toy.shape_clips import FPS, FRAME_SIZES, KINDS, MOTIONS, NUM_FRAMES, ClipMaker, ShapeClip, draw
from mmtrain.errors import ConfigError, DataError

_FEATURES = {
    "caption": {"dtype": "string", "_type": "Value"},
    "frames": {"feature": {"_type": "Image"}, "_type": "List"},
    "fps": {"dtype": "float64", "_type": "Value"},
}
"""Column types in the form that `datasets` keeps in a parquet file's metadata."""

_ZOOM = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapesSummary:
    """Size of a data set."""

    num_train: int
    num_validation: int
    num_frames: int
    """Of both splits."""
    num_bytes: int
    """Size of both parquet files."""


def make_shapes(
    out: str | Path,
    num_samples: int,
    seed: int = 0,
    *,
    validation_fraction: float = 0.1,
    progress: Progress | None = None,
) -> ShapesSummary:
    """A summary of the data set that was written to a new folder `out`.

    Equal arguments give equal bytes on one machine. The folder is either absent or complete.

    Args:
        num_samples: clips of both splits together.
        validation_fraction: share of them in the validation split, which has its own combinations of colour, shape
            and motion.
        progress: told about every clip.
    Raises: ConfigError: num_samples too small or the fraction outside of (0, 1). DataError: `out` exists.
    """
    out = Path(out)
    splits = split_sizes("shapes", num_samples, seed, validation_fraction)
    with new_folder("shapes", out) as aside:
        num_frames = num_bytes = made = 0
        for split, count in splits.items():
            path = aside / "data" / f"{split}-00000-of-00001.parquet"
            clips = told(shape_clips(split, count, seed), progress, made, num_samples)
            num_frames += write_rows(path, map(_row, clips), _FEATURES, "frames")
            num_bytes += path.stat().st_size
            made += count
        summary = ShapesSummary(
            num_train=splits["train"],
            num_validation=splits["validation"],
            num_frames=num_frames,
            num_bytes=num_bytes,
        )
        (aside / "README.md").write_text(_card(summary, num_samples, seed), encoding="utf-8")
    return summary


def shape_clips(split: str, count: int, seed: int) -> Iterator[ShapeClip]:
    """The clips of a split, not drawn; the first ones of a longer split are the same."""
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


def _card(summary: ShapesSummary, num_samples: int, seed: int) -> str:
    sizes = ", ".join(f"{width} x {height}" for height, width in FRAME_SIZES)
    return f"""{card_head("text-to-video", "Moving shapes")}
Short clips of one to three coloured shapes that move on a plain background, with captions, made by
`mmtrain data shapes OUT --num-samples {num_samples} --seed {seed}`. The same command makes the same data.

{summary.num_train} training and {summary.num_validation} validation clips, {summary.num_frames} frames,
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
