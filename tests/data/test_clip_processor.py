"""Records of clips, and what becomes of them: caption tokens, buckets, latents."""

import io
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmtrain.config.data import TokenizerConfig
from mmtrain.config.model import DitConfig, VaeConfig
from mmtrain.data.clip_processor import ClipProcessor, npy_bytes
from mmtrain.data.frames import FileFrames
from mmtrain.data.media import RawImage
from mmtrain.data.sources import Source
from mmtrain.data.sources import open_source as open_any
from mmtrain.data.tokenizer import load_tokenizer
from mmtrain.data.video_records import CLIPS, VideoRecord, make_video_record
from mmtrain.errors import ConfigError, DataError
from mmtrain.modality.buckets import video_geometry
from tests.data.samples import png
from tests.data.videos import frame, make_video_config, save_latents, write_clip, write_videos
from tests.faults.bad_samples import LATENTS as LATENT_FILES
from tests.faults.bad_samples import npy
from tests.models.dits import VAES


def open_source(path: Path, split: str = "train", **data: Any) -> Source[VideoRecord]:
    return open_any(make_video_config(path, **data).data, split, CLIPS)


def processor(dit: dict[str, Any] | None = None, **data: Any) -> ClipProcessor:
    config = make_video_config("x", **data)
    section = DitConfig(config={"model_type": "wan", "in_channels": 3, "patch_size": [1, 2, 2], **(dit or {})})
    tokenizer = load_tokenizer(TokenizerConfig(), captions=True)
    return ClipProcessor(tokenizer, video_geometry(section, config.data), config.data)


def encoded(image: Image.Image) -> RawImage:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return RawImage(data=buffer.getvalue())


def record(*sizes: tuple[int, int], sample: int = 3, **columns: Any) -> VideoRecord:
    frames = tuple(encoded(frame(10 * i, h, w)) for i, (h, w) in enumerate(sizes))
    return VideoRecord(sample=sample, **{"caption": "a red square moves", "frames": frames, **columns})


# ---------------------------------------------------------------------------------------------- records


@pytest.mark.parametrize("streaming", [False, True])
def test_jsonl_with_a_folder_or_a_list_of_frames(tmp_path: Path, streaming: bool) -> None:
    listed = {"frames": ["clip1/004.png", "clip1/002.png"], "fps": None}
    path = write_videos(tmp_path, 4, {2: listed})
    (tmp_path / "clip0" / "notes.txt").write_text("no frame")
    source = open_source(path, streaming=streaming, shuffle=not streaming)
    one, two = source[0], source[2]
    assert one and two
    assert (one.caption, one.fps, len(one.frames)) == ("a red circle moves right on ", 8.0, 8)
    assert [f.read(10**6) for f in one.frames] == [p.read_bytes() for p in sorted((tmp_path / "clip0").glob("*.png"))]
    assert [f.read(10**6) for f in two.frames] == [(tmp_path / "clip1" / f"00{i}.png").read_bytes() for i in (4, 2)]
    assert two.fps is None
    if streaming:
        assert source[4] is None


@pytest.mark.parametrize("streaming", [False, True])
def test_parquet_with_images_and_with_latents(tmp_path: Path, streaming: bool) -> None:
    import datasets

    values = np.arange(4 * 2 * 2 * 2, dtype=np.float16).reshape(4, 2, 2, 2)
    features = datasets.Features(
        caption=datasets.Value("string"), frames=datasets.List(datasets.Image()), fps=datasets.Value("float32")
    )
    images = [frame(i) for i in range(3)]
    rows = {"caption": ["one", "two"], "frames": [images, images[:1]], "fps": [8.0, 12.5]}
    datasets.Dataset.from_dict(rows, features).to_parquet(tmp_path / "frames.parquet")
    rows = {"caption": ["one"], "latents": [npy_bytes(values)]}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "latents.parquet")

    found = open_source(tmp_path / "frames.parquet", streaming=streaming, shuffle=not streaming)[1]
    assert found
    assert (found.caption, found.fps, len(found.frames)) == ("two", 12.5, 1)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(found.frames[0].read(10**6)))), np.asarray(images[0]))
    found = open_source(tmp_path / "latents.parquet", streaming=streaming, shuffle=not streaming)[0]
    assert found and found.latents
    assert np.array_equal(np.load(io.BytesIO(found.latents.read(10**6))), values)


def test_missing_columns_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"captions": "x", "frames": "f"}\n')
    with pytest.raises(ConfigError, match=r"no column `caption`; it has captions, frames; did you mean 'captions'"):
        open_source(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text('{"caption": "x", "images": ["f"]}\n')
    with pytest.raises(ConfigError, match=r"none of the columns `frames`, `latents` and `video`; it has"):
        open_source(tmp_path / "b.jsonl")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (7, "a int; it must have a `caption`"),
        ({"frames": "clip"}, "no `caption`; it must be a text"),
        ({"caption": "  ", "frames": "clip"}, "`caption` = '  '; it must be a text that is not empty"),
        ({"caption": ["a"], "frames": "clip"}, r"`caption` = \['a'\]"),
        ({"caption": "a", "fps": 3}, "it has caption, fps; it must have one of"),
        ({"caption": "a", "frames": "clip", "latents": "x.npy"}, "it has `frames` and `latents`; it must have one of"),
        ({"caption": "a", "frames": "clip", "fps": 0}, "`fps` = 0; it must be a number above 0"),
        ({"caption": "a", "frames": "clip", "fps": "8"}, "`fps` = '8'"),
        ({"caption": "a", "frames": "clip", "fps": float("nan")}, "`fps` = nan"),
        ({"caption": "a", "frames": []}, "`frames` is an empty list"),
        ({"caption": "a", "frames": {"0": "x"}}, "`frames` is a dict"),
        ({"caption": "a", "frames": ["0.png", 3]}, "frame 1 of sample 5 of here: a int; it must be a path"),
        ({"caption": "a", "frames": "absent"}, "names .*absent', which is no folder; name a folder, or list"),
        ({"caption": "a", "frames": "empty"}, "its folder .*empty' has no image; its endings are .png"),
        ({"caption": "a", "latents": 3.5}, "`latents` of sample 5 of here: a float"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: Any, message: str) -> None:
    write_clip(tmp_path / "clip")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=f"sample 5 of here: .*{message}|{message}"):
        make_video_record(row, 5, "here", str(tmp_path))


# ---------------------------------------------------------------------------------------------- pixels


def test_frames_become_pixels_between_minus_one_and_one() -> None:
    made = processor()
    clip = made.clip(record(*[(24, 24)] * 6, fps=8.0))
    assert clip.meta.bucket == (6, 24, 24)
    assert (clip.meta.sample, clip.meta.index, clip.meta.num_tokens) == (3, 0, 6 * 12 * 12)
    assert clip.meta.num_text_tokens == len(clip.text_ids) == 4
    assert made.tokenizer.decode(clip.text_ids) == "a red square moves"
    latents = made.latents(clip)
    assert latents.shape == (3, 6, 24, 24)
    assert latents.dtype == torch.float32
    for index in range(6):  # red on the left, this frame's grey on the right
        assert latents[:, index, 5, 3].tolist() == [1.0, -1.0, -1.0]
        assert latents[:, index, 5, 20] == pytest.approx([10 * index / 127.5 - 1] * 3)


def test_clips_are_sampled_and_cut_to_the_longest_bucket_that_they_fill() -> None:
    made = processor(video_frames=[4, 8])
    greys = [10 * i / 127.5 - 1 for i in (0, 2, 4, 6)]
    clip = made.clip(record(*[(24, 24)] * 15, fps=16.0))  # 7 frames at 8 a second
    assert clip.frame_indices == (0, 2, 4, 6)
    assert made.latents(clip)[0, :, 5, 20].tolist() == pytest.approx(greys)
    slow = made.clip(record(*[(24, 24)] * 2, fps=4.0))
    assert slow.frame_indices == (0, 0, 1, 1)
    # A record without a rate: as data.source_fps says, else data.fps.
    assert processor(source_fps=4.0).clip(record(*[(24, 24)] * 4)).meta.frames == 8
    assert processor().clip(record(*[(24, 24)] * 4)).meta.frames == 4
    assert processor().clip(record(*[(24, 24)] * 99)).meta.frames == 16  # data.max_seconds
    with pytest.raises(DataError, match=r"sample 3: it has 3 frames at 8 a second, but the shortest bucket has 4"):
        made.clip(record(*[(24, 24)] * 3))


def test_frames_are_cropped_at_their_middle_and_resized_to_the_nearest_aspect() -> None:
    made = processor(video_aspects=["1:1", "2:1"], video_area=128)
    clip = made.clip(record((30, 50)))  # 5:3 is nearer to 2:1
    assert clip.meta.bucket == (1, 8, 16)
    latents = made.latents(clip)
    assert latents[:, 0, 4, 3].tolist() == [1.0, -1.0, -1.0]
    assert latents[:, 0, 4, 12].tolist() == [-1.0, -1.0, -1.0]
    # Of a wide frame with stripes at its outer edges, a square keeps the middle alone.
    wide = Image.new("RGB", (40, 24), "white")
    wide.paste("black", (8, 0, 32, 24))
    square = processor(video_aspects=["1:1"])
    middle = square.clip(record(frames=(encoded(wide),)))
    assert square.latents(middle)[:, 0, :, 1:-1].max() == -1


def test_corrupt_frames_are_named(tmp_path: Path) -> None:
    made = processor()
    good = encoded(frame(0, 99, 99))
    for data, stage in ((b"no picture", "are not an image"), (png(99, 99)[:120], "its content is corrupt")):
        first, second = (
            VideoRecord(sample=3, caption="a", frames=(RawImage(data=data), good)),
            VideoRecord(sample=3, caption="a", frames=(good, RawImage(data=data))),
        )
        with pytest.raises(DataError, match=rf"^sample 3: frame 0: .*{stage}"):
            made.latents(made.clip(first))
        with pytest.raises(DataError, match=rf"^sample 3: frame 1: .*{stage}"):
            made.latents(made.clip(second))
    clip = made.clip(record((24, 24), (24, 26)))
    with pytest.raises(DataError, match=r"^sample 3: frame 1 has \(26, 24\) pixels .* frame 0 has \(24, 24\)"):
        made.latents(clip)
    gone = made.clip(record(frames=(RawImage(data=None, path=str(write_clip(tmp_path / "c") / "000.png")),)))
    (tmp_path / "c" / "000.png").unlink()
    with pytest.raises(DataError, match=r"^sample 3: frame 0: its file .*000.png' cannot be read: No such file"):
        made.latents(gone)


def test_pixels_need_a_model_of_three_channels() -> None:
    with pytest.raises(DataError, match=r"^sample 3: it has pixels, but the model reads latents of 16 channels; give"):
        processor({"in_channels": 16}).clip(record((24, 24)))


def test_a_caption_is_cut_and_needs_a_token() -> None:
    made = processor()
    clip = made.clip(record((24, 24), caption="a small red circle moves right"))
    cut = made.truncated(clip, 3)
    assert (cut.meta.num_text_tokens, cut.text_ids.tolist()) == (3, clip.text_ids[:3].tolist())


# ---------------------------------------------------------------------------------------------- latents


LATENTS: dict[str, Any] = {"dit": {"in_channels": 4}}


def latent_record(path: Path, **columns: Any) -> VideoRecord:
    return VideoRecord(sample=7, caption="a", latents=RawImage(data=None, path=str(path)), **columns)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("form", ["npy", "npz", "compressed", "bytes", "fortran"])
def test_latents_of_all_forms(tmp_path: Path, form: str, dtype: Any) -> None:
    values = save_latents(tmp_path / "a.npy", dtype=dtype)
    found = latent_record(tmp_path / "a.npy")
    if form == "npz":
        np.savez(tmp_path / "a.npz", whatever=values)
        found = latent_record(tmp_path / "a.npz")
    elif form == "compressed":
        np.savez_compressed(tmp_path / "a.npz", latents=values, other=values[0])
        found = latent_record(tmp_path / "a.npz")
    elif form == "bytes":
        found = VideoRecord(sample=7, caption="a", latents=RawImage(data=npy_bytes(values)))
    elif form == "fortran":
        np.save(tmp_path / "a.npy", np.asfortranarray(values))
    made = processor(**LATENTS)
    clip = made.clip(found)
    assert (clip.meta.bucket, clip.meta.num_tokens) == ((8, 6, 10), 8 * 3 * 5)
    latents = made.latents(clip)
    assert latents.dtype == torch.float32
    assert latents.is_contiguous()
    assert np.array_equal(latents.numpy(), values.astype(np.float32))


def test_latents_are_cut_but_neither_sampled_nor_resized(tmp_path: Path) -> None:
    values = save_latents(tmp_path / "a.npy", (4, 15, 6, 10))
    made = processor(**LATENTS)
    clip = made.clip(latent_record(tmp_path / "a.npy", fps=8.0))
    assert clip.meta.bucket == (12, 6, 10)
    assert np.array_equal(made.latents(clip).numpy(), values[:, :12])
    with pytest.raises(DataError, match=r"its latents have 16 frames a second, but data.fps = 8, and latents"):
        made.clip(latent_record(tmp_path / "a.npy", fps=16.0))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros((4, 8, 6)), r"its latents are float64 of shape \(4, 8, 6\); they must be floats of shape \[channels"),
        (np.zeros((4, 8, 6, 10), np.int64), "its latents are int64"),
        (np.zeros((4, 0, 6, 10)), r"its latents are float64 of shape \(4, 0, 6, 10\)"),
        (np.zeros((3, 8, 6, 10)), "its latents have 3 channels, but in_channels of model.dit.config is 4"),
        (np.zeros((4, 8, 5, 10)), r"its latents have 5 rows, which is no multiple of the 2 of one patch"),
        (b"not an array", "its latents are no .npy or .npz file"),
        (b"PK\3\4 broken", "its latents are a damaged .npz file"),
        ({"a": np.zeros(3), "b": np.zeros(3)}, "its .npz file has the arrays a, b; name one of them `latents`"),
        ({}, "its .npz file has the arrays none"),
    ],
)
def test_bad_latents_are_named_from_their_header(tmp_path: Path, values: Any, message: str) -> None:
    path = tmp_path / "a.npy"
    if isinstance(values, bytes):
        path.write_bytes(values)
    elif isinstance(values, dict):
        with path.open("wb") as file:
            np.savez(file, **values)
    else:
        np.save(path, values)
    with pytest.raises(DataError, match=f"^sample 7: {message}"):
        processor(**LATENTS).clip(latent_record(path))


def test_bad_content_of_latents_is_named_when_it_is_read(tmp_path: Path) -> None:
    made, path = processor(**LATENTS), tmp_path / "a.npy"
    values = save_latents(path)
    clip = made.clip(latent_record(path))
    path.write_bytes(path.read_bytes()[:-10])
    assert made.clip(latent_record(path)).meta == clip.meta  # the header is whole
    with pytest.raises(DataError, match=r"^sample 7: the content of its latents is corrupt: "):
        made.latents(clip)
    values[1, 2, 3, 4] = np.nan
    np.save(path, values)
    with pytest.raises(DataError, match=r"^sample 7: its latents hold values that are not finite"):
        made.latents(clip)
    np.save(path, values[:, :2])
    with pytest.raises(DataError, match=r"changed to"):
        made.latents(clip)
    path.unlink()
    with pytest.raises(DataError, match=r"^sample 7: its file .*a.npy' cannot be read: No such file"):
        made.clip(latent_record(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            npy((4, 2**38 // 192, 6, 10), "<f8"),
            r"its latents say that they are float64 of shape .*: 27487\d+ bytes, more",
        ),
        (npy((4, 8, 10**19, 10**19)), "its latents say that they are"),
        (npy("(" * 5000), "its latents are no .npy or .npz file: .*EOF in multi-line"),
        (npy((4, 8, 6, 10), "|O"), "its latents are object of shape"),
        (LATENT_FILES["an archive with a password"](), "its .npz file cannot be read: .* password required"),
        (LATENT_FILES["an archive of unknown compression"](), "its .npz file cannot be read: .* not supported"),
        (LATENT_FILES["latents beyond float32"](), "its latents hold values that are not finite"),
    ],
)
def test_latents_that_claim_or_hide_too_much(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.npy").write_bytes(content)
    made = processor(**LATENTS)
    with pytest.raises(DataError, match=f"^sample 7: {message}"):
        made.latents(made.clip(latent_record(tmp_path / "a.npy")))


def test_a_large_file_of_latents_is_planned_from_its_header(tmp_path: Path) -> None:
    # Nothing of the content is there: the file claims 4 GB.
    whole = npy_bytes(np.zeros((4, 8, 2, 2), np.float32))
    header = whole[: whole.index(b"\n") + 1].replace(b"(4, 8, 2, 2)", b"(4, 64, 2000, 2000)"[:19])
    (tmp_path / "a.npy").write_bytes(header)
    clip = processor(**LATENTS, max_media_bytes=2**33).clip(latent_record(tmp_path / "a.npy"))
    assert clip.meta.bucket == (16, 2000, 2000)
    message = r"of shape \(4, 64, 2000, 2000\): 4096000000 bytes, more than data.max_media_bytes = 1073741824; raise"
    with pytest.raises(DataError, match=f"^sample 7: its latents say that they are float32 {message}"):
        processor(**LATENTS).clip(latent_record(tmp_path / "a.npy"))


# ---------------------------------------------------------------------------------------------- videos


class Decoder:
    """Has the interface of torchcodec's decoder; frame i is grey i."""

    def __init__(self, num_frames: int, height: int, width: int) -> None:
        self.metadata = SimpleNamespace(num_frames=num_frames, average_fps=8.0, height=height, width=width)
        self.asked: list[list[int]] = []

    def get_frames_at(self, indices: list[int]) -> Any:
        self.asked.append(indices)
        size = (3, self.metadata.height, self.metadata.width)
        return SimpleNamespace(data=torch.stack([torch.full(size, index, dtype=torch.uint8) for index in indices]))


def test_no_more_frames_of_a_video_are_decoded_at_once_than_allowed() -> None:
    decoder = Decoder(9, 10, 20)
    video = FileFrames(decoder, max_pixels=799)
    assert [np.asarray(image)[0, 0, 0] for image in video.read([0, 0, 2, 4, 5, 7, 8])] == [0, 0, 2, 4, 5, 7, 8]
    assert decoder.asked == [[0, 0, 2], [4, 5, 7], [8]]
    with pytest.raises(DataError, match=r"^its frames have 20 x 10 pixels; 1 to data.max_decoded_pixels = 199"):
        FileFrames(decoder, max_pixels=199)


def test_a_video_says_what_it_needs_where_it_cannot_be_decoded() -> None:
    try:
        import torchcodec.decoders  # noqa: F401
    except ModuleNotFoundError:
        pass
    else:
        pytest.skip("torchcodec is installed")
    video = VideoRecord(sample=2, caption="a", video=RawImage(data=b"mp4"))
    with pytest.raises(DataError, match=r"^sample 2: it has a `video`, which needs the package torchcodec .* `frames`"):
        processor().clip(video)


def test_a_video_may_be_an_array_of_frames(tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (8, 24, 24, 3), np.uint8)
    np.save(tmp_path / "a.npy", frames)
    images = [tmp_path / f"{index}.png" for index in range(8)]
    for path, values in zip(images, frames, strict=True):
        Image.fromarray(values).save(path)
    ours = processor()
    clips = [
        ours.clip(VideoRecord(sample=0, caption="a", **content))
        for content in (
            {"video": RawImage(data=None, path=str(tmp_path / "a.npy"))},
            {"frames": tuple(RawImage(data=None, path=str(path)) for path in images)},
        )
    ]
    assert clips[0].meta == clips[1].meta
    assert torch.equal(*(ours.latents(clip) for clip in clips))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_column_of_videos_stays_encoded(tmp_path: Path, streaming: bool) -> None:
    import datasets

    features = datasets.Features(caption=datasets.Value("string"), video=datasets.Video())
    rows = {"caption": ["one"], "video": [{"bytes": b"mp4", "path": None}]}
    datasets.Dataset.from_dict(rows, features).to_parquet(tmp_path / "a.parquet")
    found = open_source(tmp_path / "a.parquet", streaming=streaming, shuffle=not streaming)[0]
    assert found and found.video
    assert found.video.read(10**6) == b"mp4"


def test_zip_files_that_lie(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("latents.npy", b"not an array")
    with pytest.raises(DataError, match=r"its latents are no .npy or .npz file"):
        processor(**LATENTS).clip(latent_record(tmp_path / "a.npz"))


def behind_vae(name: str, **data: Any) -> ClipProcessor:
    config = make_video_config("x", **data)
    section = DitConfig(config={"model_type": "wan", "in_channels": 4, "patch_size": [1, 1, 1]})
    geometry = video_geometry(section, config.data, VaeConfig(config=VAES[name]))
    return ClipProcessor(load_tokenizer(TokenizerConfig(), captions=True), geometry, config.data)


def test_with_a_vae_pixels_are_read_and_the_metadata_counts_latents() -> None:
    made = behind_vae("wan", video_area=24 * 24, video_aspects=["1:1"])
    clip = made.clip(record(*[(24, 24)] * 8))
    assert (clip.meta.bucket, clip.meta.num_tokens, len(clip.frame_indices)) == ((2, 3, 3), 18, 5)
    pixels = made.latents(clip)
    assert pixels.shape == made.zeros(clip).shape == (3, 5, 24, 24)
    assert float(pixels.min()) >= -1 and float(pixels.max()) <= 1
    wanted = processor(video_frames=[5], video_aspects=["1:1"])
    assert torch.equal(pixels, wanted.latents(wanted.clip(record(*[(24, 24)] * 8))))


def test_with_a_vae_records_of_latents_are_refused(tmp_path: Path) -> None:
    save_latents(tmp_path / "x.npy")
    given = record(frames=(), latents=RawImage(data=None, path=str(tmp_path / "x.npy")))
    with pytest.raises(DataError, match=r"sample 3: it has `latents`, but \[model.vae\] encodes the frames of"):
        behind_vae("kl").clip(given)
