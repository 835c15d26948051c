import io
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageSequence

from mmtrain.data.toy.data_set import COLOURS
from mmtrain.data.toy.shape_clips import (
    BACKGROUNDS,
    FPS,
    FRAME_SIZES,
    KINDS,
    MOTIONS,
    NUM_FRAMES,
    SPEEDS,
    MovingShape,
    ShapeClip,
    draw,
    held_out,
)
from mmtrain.data.toy.shapes import make_shapes, shape_clips, write_preview
from mmtrain.errors import ConfigError, DataError


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def clip_of(shape: MovingShape, num_frames: int = 8, background: str = "white") -> ShapeClip:
    return ShapeClip(
        shapes=(shape,), background=background, num_frames=num_frames, height=24, width=32, caption="a shape"
    )


def shape(kind: str, motion: str = "still", x: float = 0.5, y: float = 0.5, **fields: object) -> MovingShape:
    return MovingShape(
        kind=kind,
        colour="red",
        size="large",
        motion=motion,
        speed="" if motion == "still" else "slowly",
        x=x,
        y=y,
        heading=1,
        **fields,
    )


def centres(clip: ShapeClip) -> np.ndarray:
    """[F, 2]: (x, y) of the middle of what is not background, as parts of the frame."""
    frames = draw(clip).astype(float)
    weight = np.abs(frames - np.array(BACKGROUNDS[clip.background])).sum(-1)
    total = weight.sum((1, 2))
    x = (weight.sum(1) * (np.arange(clip.width) + 0.5)).sum(1) / total / clip.width
    y = (weight.sum(2) * (np.arange(clip.height) + 0.5)).sum(1) / total / clip.height
    return np.stack([x, y], 1)


def test_bytes_depend_on_number_and_seed_alone(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    summary = make_shapes(tmp_path / "one", 60, 7, progress=lambda done, total: told.append((done, total)))
    assert told == [(i, 60) for i in range(1, 61)]
    assert (summary.num_train, summary.num_validation) == (54, 6)
    make_shapes(tmp_path / "again", 60, 7)
    assert files(tmp_path / "one") == files(tmp_path / "again")
    assert summary.num_bytes == sum(len(data) for name, data in files(tmp_path / "one").items() if "data" in name)
    make_shapes(tmp_path / "other", 60, 8)
    assert files(tmp_path / "other") != files(tmp_path / "one")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "one", "other"]


def test_datasets_opens_the_folder_with_its_splits_and_frames(tmp_path: Path) -> None:
    import datasets

    folder = tmp_path / "shapes_opened_directly"  # the cache of `datasets` knows a folder by its name
    summary = make_shapes(folder, 100, 5)
    both = datasets.load_dataset(str(folder))
    assert {split: len(rows) for split, rows in both.items()} == {"train": 90, "validation": 10}
    assert both["train"].features["frames"].feature == datasets.Image()
    num_frames = 0
    for split, rows in both.items():
        for row, clip in zip(rows, shape_clips(split, 90, 5), strict=False):
            assert row["caption"] == clip.caption
            assert row["fps"] == FPS
            assert np.array_equal(np.stack([np.asarray(frame) for frame in row["frames"]]), draw(clip))
            num_frames += len(row["frames"])
    assert num_frames == summary.num_images
    card = (folder / "README.md").read_text()
    assert "mmtrain data shapes OUT --num-samples 100 --seed 5" in card
    assert "One in seven of the 210 combinations" in card


def test_the_splits_share_words_but_no_combination() -> None:
    split = {name: list(shape_clips(name, 3000, 0)) for name in ("train", "validation")}
    seen = {name: {s.combination for clip in clips for s in clip.shapes} for name, clips in split.items()}
    assert not seen["train"] & seen["validation"]
    assert len(seen["train"]) == 180
    assert len(seen["validation"]) == 30
    words = {name: {w for clip in clips for w in clip.caption.split()} for name, clips in split.items()}
    assert words["validation"] <= words["train"]
    # Each colour, kind and motion is held out about equally often.
    for place, choices in enumerate((COLOURS, KINDS, MOTIONS)):
        counts = Counter(combination[place] for combination in seen["validation"])
        assert set(counts) == set(choices)
        assert max(counts.values()) - min(counts.values()) <= 1
    # Of each colour and kind, at most one motion is unknown.
    assert max(sum(held_out((c, k, m)) for m in MOTIONS) for c in COLOURS for k in KINDS) == 1


def test_durations_sizes_and_numbers_of_shapes_are_varied() -> None:
    clips = list(shape_clips("train", 2000, 1))
    for values, expected in (
        ([clip.num_frames for clip in clips], NUM_FRAMES),
        ([(clip.height, clip.width) for clip in clips], FRAME_SIZES),
        ([clip.background for clip in clips], BACKGROUNDS),
    ):
        counts = Counter(values)
        assert set(counts) == set(expected)
        assert max(counts.values()) < 1.3 * min(counts.values())
    assert {len(clip.shapes) for clip in clips} == {1, 2, 3}
    assert len({clip.caption for clip in clips}) > 1800
    assert all(len({s.colour for s in clip.shapes}) == len(clip.shapes) for clip in clips)


def test_captions_tell_what_is_there() -> None:
    for clip in shape_clips("train", 500, 2):
        at = -1
        for shape in clip.shapes:
            phrase = f"a {shape.size} {shape.colour} {shape.kind} "
            assert clip.caption.index(phrase) > at
            at = clip.caption.index(phrase)
            assert not shape.speed or shape.speed in clip.caption
        assert clip.background in clip.caption
    (one,) = shape_clips("train", 1, 0)
    assert one.caption == "on a black background a large red diamond does not move"


def test_shapes_move_as_their_captions_say() -> None:
    signs = {"right": (1, 0), "left": (-1, 0), "up": (0, -1), "down": (0, 1), "still": (0, 0)}
    checked: Counter[str] = Counter()
    for clip in shape_clips("train", 1500, 3):
        if len(clip.shapes) > 1 or clip.num_frames < 8:
            continue
        (shape,) = clip.shapes
        path = centres(clip)
        moved = path[-1] - path[0]
        if shape.motion in signs:
            sign = np.array(signs[shape.motion])
            travel = SPEEDS.get(shape.speed, 0.0) * (clip.num_frames - 1) / FPS
            # Half of a shape may lie outside of the frame where it starts or ends, so its middle seems to lag.
            assert np.abs(moved * (sign == 0)).max() < 0.02, clip
            assert travel * 0.5 - 0.01 <= (moved * sign).sum() <= travel + 0.02, clip
        else:
            axis = 0 if shape.motion == "sideways" else 1
            steps = np.diff(path[:, axis])
            assert np.abs(path[:, 1 - axis] - path[0, 1 - axis]).max() < 0.02
            assert steps.min() < -0.005, clip  # there and back
            assert steps.max() > 0.005, clip
        checked[shape.motion] += 1
    assert set(checked) == set(MOTIONS)
    assert min(checked.values()) > 20


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_its_outline(kind: str) -> None:
    red = (draw(clip_of(shape(kind)))[0] == COLOURS["red"]).all(-1)
    rows, columns = np.flatnonzero(red.any(1)), np.flatnonzero(red.any(0))
    inside = red[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    part = inside.mean()
    bounds = {"circle": (0.7, 0.9), "square": (0.99, 1), "triangle": (0.4, 0.65), "diamond": (0.4, 0.7)}
    low, high = bounds.get(kind, (0.3, 0.65))
    assert low <= part <= high
    assert np.array_equal(red, red[:, ::-1])  # all are symmetric about the upright axis
    if kind != "triangle":
        assert np.array_equal(red, red[::-1])
    else:
        assert inside[0].sum() < inside[-1].sum()  # it points up
    corners = [inside[0, 0], inside[0, -1], inside[-1, 0], inside[-1, -1]]
    assert corners == {"square": [True] * 4, "triangle": [False, False, True, True]}.get(kind, [False] * 4)
    assert inside[len(inside) // 2, 0] == (kind != "triangle")


def test_a_preview_shows_clips_and_captions(tmp_path: Path) -> None:
    clips = list(shape_clips("train", 4, 0))
    write_preview(tmp_path / "p.png", clips)
    sheet = np.asarray(Image.open(tmp_path / "p.png"))
    assert sheet.shape[1] > max(clip.num_frames * clip.width * 3 for clip in clips)
    first = draw(clips[0])[0].repeat(3, 0).repeat(3, 1)
    assert any(np.array_equal(sheet[top : top + len(first), 4 : 4 + first.shape[1]], first) for top in range(40)), (
        "the first frame of the first clip is not where it should be"
    )
    write_preview(tmp_path / "p.gif", clips)
    with Image.open(tmp_path / "p.gif") as moving:
        shown_ms = sum(frame.info["duration"] for frame in ImageSequence.Iterator(moving))  # equal ones are one frame
    assert shown_ms == pytest.approx(max(clip.num_frames for clip in clips) * 1000 / FPS, rel=0.05)
    with pytest.raises(ConfigError, match=r"p.jpg': name a file that ends in .png .* or .gif"):
        write_preview(tmp_path / "p.jpg", clips)
    with pytest.raises(DataError, match=r"the folder .*absent does not exist"):
        write_preview(tmp_path / "absent" / "p.png", clips)


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("mine")
    with pytest.raises(ConfigError, match=r"there exists already; remove it"):
        make_shapes(tmp_path / "there", 10, 0)
    with pytest.raises(ConfigError, match="shapes: num_samples = 1"):
        make_shapes(tmp_path / "new", 1, 0)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        make_shapes(tmp_path / "new", 10, 0, validation_fraction=0.0)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_shapes(tmp_path / "new", 10, 0, progress=stop)
    assert [p.name for p in tmp_path.iterdir()] == ["there"]


def test_frames_are_png(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    make_shapes(tmp_path / "set", 20, 0)
    rows = pq.read_table(tmp_path / "set" / "data" / "train-00000-of-00001.parquet").to_pylist()
    formats = {Image.open(io.BytesIO(frame["bytes"])).format for row in rows for frame in row["frames"]}
    assert formats == {"PNG"}
