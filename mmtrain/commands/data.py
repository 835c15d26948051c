"""`mmtrain data`: the built-in data sets."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    data = commands.add_parser("data", help="make the built-in data sets")
    kinds = data.add_subparsers(dest="dataset", required=True, metavar="DATASET")
    charts = kinds.add_parser(
        "charts",
        help="bar, line and pie charts with questions",
        description="Draws charts and writes question-answer conversations about them, as parquet.",
    )
    charts.set_defaults(run=_charts)
    shapes = kinds.add_parser(
        "shapes",
        help="short clips of moving shapes with captions, for text-to-video",
        description="Draws clips of one to three moving, coloured shapes and writes them with captions that describe "
        "them, as parquet.",
    )
    shapes.set_defaults(run=_shapes)
    sounds = kinds.add_parser(
        "sounds",
        help="beeps and sweeps, some with an image, with questions",
        description="Makes sounds and images and writes question-answer conversations about them, as parquet: some "
        "questions need the sound, some the image, some both.",
    )
    sounds.set_defaults(run=_sounds)
    pairs = kinds.add_parser(
        "pairs",
        help="images of one shape with captions, for two towers",
        description="Draws images of one coloured shape and writes them with captions that say what is where, as "
        "parquet.",
    )
    pairs.set_defaults(run=_pairs)
    for parser, unit in ((charts, "samples"), (shapes, "clips"), (sounds, "samples"), (pairs, "pairs")):
        parser.add_argument("out", type=Path, metavar="OUT", help="folder to make")
        parser.add_argument("--num-samples", type=int, default=4000, metavar="N", help=f"{unit} (default 4000)")
        parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of all choices (default 0)")
    shapes.add_argument(
        "--level",
        choices=("full", "easy"),
        default="full",
        help="easy: one square of three colours goes right or left on black or white, so that a small model learns to "
        "draw it within minutes on a CPU (default full: up to three shapes of many kinds and motions)",
    )
    shapes.add_argument(
        "--preview",
        type=Path,
        metavar="FILE",
        help="also draw the first 12 training clips: .png, their frames side by side, or .gif, moving",
    )


def _shapes(args: argparse.Namespace) -> int:
    from mmtrain.data.toy.shapes import check_preview, make_easy_shapes, make_shapes, shape_clips, write_preview

    if args.preview:
        check_preview(args.preview)
    num_train = _make_data(args, make_easy_shapes if args.level == "easy" else make_shapes, "clip", "frames")
    if args.preview:
        write_preview(args.preview, shape_clips("train", min(12, num_train), args.seed, args.level))
        print(f"{args.preview}: the first clips")
    return 0


def _charts(args: argparse.Namespace) -> int:
    from mmtrain.data.toy.charts import make_charts

    _make_data(args, make_charts, "sample", "images")
    return 0


def _sounds(args: argparse.Namespace) -> int:
    from mmtrain.data.toy.sounds import make_sounds

    _make_data(args, make_sounds, "sample", "sounds")
    return 0


def _pairs(args: argparse.Namespace) -> int:
    from mmtrain.data.toy.pairs import make_pairs

    _make_data(args, make_pairs, "pair", "images")
    return 0


def _make_data(args: argparse.Namespace, make: Callable[..., Any], unit: str, images: str) -> int:
    """The number of training samples that were written. Args: unit: a sample. images: what it has."""
    from tqdm import tqdm

    with tqdm(total=args.num_samples, unit=unit, disable=not sys.stderr.isatty()) as bar:
        made = make(args.out, args.num_samples, args.seed, progress=lambda done, total: bar.update(done - bar.n))
    print(
        f"{args.out}: {made.num_train} training and {made.num_validation} validation {unit}s with "
        f"{made.num_images} {images}, {made.num_bytes / 1e6:.1f} MB"
    )
    return int(made.num_train)
