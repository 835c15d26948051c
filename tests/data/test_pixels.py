import functools
import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmtrain.data import pixels
from mmtrain.data.pixels import blank, pixel_rules, pixel_values
from mmtrain.errors import ConfigError, DataError
from mmtrain.modality.geometry import image_geometry, smart_resize
from tests.data.samples import png

decode = functools.partial(pixels.decode, max_pixels=10**6)
header_size = functools.partial(pixels.header_size, max_pixels=10**6)

SIZES = [(60, 100), (56, 168), (168, 167), (30, 31), (300, 20), (14, 14)]


def noisy_image(width: int, height: int) -> Image.Image:
    noise = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(noise)


def their_processor(name: str, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    cls = getattr(transformers, f"{name}Pil", None)
    if cls is None:
        pytest.skip("this version of transformers needs torchvision for its image processors")
    return cls(**options)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl_vision", "qwen3_vl"])
@pytest.mark.parametrize("merge", [1, 2, 3])
def test_packed_pixels_equal_the_reference(merge: int, model_type: str) -> None:
    low, high = 56 * 56, 112 * 112
    geometry = image_geometry({"model_type": model_type}, spatial_merge=merge, min_pixels=low, max_pixels=high)
    half = [0.5] * 3  # as in the folders of Qwen3-VL, which has this class, too
    options = {"patch_size": 16, "image_mean": half, "image_std": half} if model_type == "qwen3_vl" else {}
    theirs = their_processor(
        "Qwen2VLImageProcessor", merge_size=merge, size={"shortest_edge": low, "longest_edge": high}, **options
    )
    for width, height in SIZES:
        image = noisy_image(width, height)
        result = theirs(image, return_tensors="np")
        ours = pixel_values(image, geometry, pixel_rules(model_type))
        assert geometry.grid(height, width) == tuple(result["image_grid_thw"][0].tolist())
        np.testing.assert_array_equal(ours.numpy(), result["pixel_values"])


def test_smart_resize_equals_the_reference() -> None:
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    generator = np.random.default_rng(0)
    for _ in range(2000):
        height, width, factor = (int(generator.integers(*r)) for r in ((5, 900), (5, 900), (8, 60)))
        limits = {
            "min_pixels": int(generator.integers(1, 9000)),
            "max_pixels": int(generator.integers(9000, 90000)),
        }
        theirs = module.smart_resize(height, width, factor=factor, **limits)
        assert smart_resize(height, width, factor=factor, **limits) == theirs


@pytest.mark.parametrize(("model_type", "name"), [("siglip", "SiglipImageProcessor"), ("vit", "ViTImageProcessor")])
def test_fixed_pixels_equal_the_reference(model_type: str, name: str) -> None:
    geometry = image_geometry({"model_type": model_type, "image_size": 64, "patch_size": 16}, spatial_merge=2)
    theirs = their_processor(name, size={"height": 64, "width": 64})
    for width, height in SIZES:
        image = noisy_image(width, height)
        expected = theirs(image, return_tensors="np")["pixel_values"]
        np.testing.assert_array_equal(pixel_values(image, geometry, pixel_rules(model_type)).numpy(), expected)


ODD_SIZES = [*SIZES, (65, 64), (64, 65), (63, 129), (1000, 7)]


@pytest.mark.parametrize("edge", [64, 81, 45])
def test_cropped_pixels_equal_the_reference(edge: int, tmp_path: Path) -> None:
    """Bit for bit, also where the shorter side is longer or shorter than the square that is cut out."""
    geometry = image_geometry({"model_type": "clip_vision_model", "image_size": 64, "patch_size": 16}, spatial_merge=2)
    theirs = their_processor("CLIPImageProcessor", size={"shortest_edge": edge}, crop_size={"height": 64, "width": 64})
    theirs.save_pretrained(tmp_path)
    rules = pixel_rules("clip_vision_model", str(tmp_path))
    assert rules == pixel_rules("clip", str(tmp_path))
    assert (rules.crops, rules.shortest_edge, rules.image_size) == (True, edge, 64)
    for width, height in ODD_SIZES:
        image = noisy_image(width, height)
        expected = theirs(image, return_tensors="np")["pixel_values"]
        np.testing.assert_array_equal(pixel_values(image, geometry, rules).numpy(), expected)
        assert geometry.grid(height, width) == (1, 4, 4)
        if edge == 64:
            np.testing.assert_array_equal(pixel_values(image, geometry, pixel_rules("clip")).numpy(), expected)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"size": 336, "crop_size": 336}, None),  # as old folders say it
        ({"size": {"height": 336, "width": 336}, "do_center_crop": False}, None),
        ({"size": {"height": 336, "width": 336}}, "only the shorter side can be resized before a square is cut out"),
        ({"crop_size": {"height": 336, "width": 224}}, "crop_size = .*; a fixed size must be square"),
    ],
)
def test_what_a_processor_of_clip_may_say(config: dict[str, Any], message: str | None, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    if message:
        with pytest.raises(ConfigError, match=message):
            pixel_rules("clip", str(tmp_path))
        return
    rules = pixel_rules("clip", str(tmp_path))
    crops = config.get("do_center_crop", True)
    assert (rules.image_size, rules.crops, rules.shortest_edge) == (336, crops, 336 if crops else 0)


@pytest.mark.parametrize("num_patches", [256, 100])
def test_pixels_that_fill_a_number_of_patches_equal_the_reference(num_patches: int, tmp_path: Path) -> None:
    theirs = their_processor("Siglip2ImageProcessor", patch_size=8, max_num_patches=num_patches)
    theirs.save_pretrained(tmp_path)
    rules = pixel_rules("siglip2_vision_model", str(tmp_path))
    assert rules.max_pixels == num_patches * 64
    encoder = {"model_type": "siglip2_vision_model", "patch_size": 8}
    geometry, merged = (image_geometry(encoder, spatial_merge=merge, max_pixels=rules.max_pixels) for merge in (1, 2))
    for width, height in ODD_SIZES:
        image = noisy_image(width, height)
        expected = theirs(image, return_tensors="np")
        _, rows, columns = geometry.grid(height, width)
        assert (rows, columns) == tuple(expected["spatial_shapes"][0].tolist())
        ours = pixel_values(image, geometry, rules).numpy()
        np.testing.assert_array_equal(ours, expected["pixel_values"][0, : rows * columns])
        if rows % 2 == columns % 2 == 0 and merged.resized(height, width) == geometry.resized(height, width):
            squares = ours.reshape(rows // 2, 2, columns // 2, 2, -1).swapaxes(1, 2).reshape(rows * columns, -1)
            np.testing.assert_array_equal(pixel_values(image, merged, rules).numpy(), squares)
    assert merged.resized(64, 64) == geometry.resized(64, 64), "some image is compared"


def test_patches_lie_in_merge_blocks() -> None:
    geometry = image_geometry(
        {"model_type": "qwen2_vl", "patch_size": 2}, spatial_merge=2, min_pixels=1, max_pixels=999
    )
    colours = np.zeros((8, 8, 3), np.uint8)
    colours[..., 0] = np.arange(8)[:, None] // 2 * 4 + np.arange(8)[None] // 2  # patch number, row by row
    rows = pixel_values(Image.fromarray(colours), geometry, pixel_rules("qwen2_vl"))
    assert rows.shape == (16, 3 * 2 * 2 * 2)
    table = torch.from_numpy(pixel_rules("qwen2_vl").table()[:, 0])
    order = [int((table == row[0]).nonzero()) for row in rows]
    assert order == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]


def test_blank_keeps_the_size_and_drops_the_content() -> None:
    images = [blank(noisy_image(60, 40)), blank(noisy_image(60, 40).rotate(90))]
    assert images[0].size == (60, 40)
    assert images[0].tobytes() == images[1].tobytes()
    assert len(set(images[0].tobytes())) == 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_turned_upright_and_their_header_knows(orientation: int) -> None:
    from PIL import ImageOps

    image, exif, buffer = noisy_image(40, 24), Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    image.save(buffer, "JPEG", exif=exif)
    upright = decode(buffer.getvalue())
    assert header_size(buffer.getvalue()) == (upright.height, upright.width)
    assert (upright.height, upright.width) == ((40, 24) if orientation >= 5 else (24, 40))
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(buffer.getvalue())))
    assert expected is not None
    assert upright.tobytes() == expected.convert("RGB").tobytes()


XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="%d"/></x:xmpmeta>'


def turned(kind: str, orientation: int) -> bytes:
    """An image of 40 x 24 pixels whose orientation is told in one of the ways that files have."""
    from PIL import PngImagePlugin

    image, exif, buffer, info = noisy_image(40, 24), Image.Exif(), io.BytesIO(), PngImagePlugin.PngInfo()
    exif[0x0112] = orientation
    raw, xmp = exif.tobytes(), XMP % orientation
    if kind == "profile in a text of a PNG":  # as ImageMagick writes it
        info.add_text("Raw profile type exif", f"\nexif\n{len(raw):8}\n{raw.hex()}\n", zip=True)
    if kind == "XMP of a PNG":
        info.add_itxt("XML:com.adobe.xmp", xmp.decode())
    settings = {
        "EXIF of a PNG": {"exif": exif}, "EXIF behind the pixels of a PNG": {}, "EXIF of a WebP": {"exif": exif},
        "EXIF of a JPEG": {"exif": exif}, "XMP of a JPEG": {"xmp": xmp}, "XMP of a WebP": {"xmp": xmp},
        "tag of a TIFF": {"tiffinfo": {274: orientation}}, "XMP of a TIFF": {"tiffinfo": {700: xmp}},
    }.get(kind, {"pnginfo": info})  # fmt: skip
    image.save(buffer, kind.rpartition(" ")[2], **settings)
    data = buffer.getvalue()
    if kind == "EXIF behind the pixels of a PNG":
        chunk = b"eXIf" + raw.removeprefix(b"Exif\0\0")
        chunk = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
        data = data[:-12] + chunk + data[-12:]
    return data


@pytest.mark.parametrize("orientation", [1, 3, 6, 9])
@pytest.mark.parametrize(
    "kind",
    [
        "EXIF of a JPEG", "XMP of a JPEG", "EXIF of a PNG", "EXIF behind the pixels of a PNG", "XMP of a PNG",
        "profile in a text of a PNG", "EXIF of a WebP", "XMP of a WebP", "tag of a TIFF", "XMP of a TIFF",
    ],
)  # fmt: skip
def test_an_image_is_turned_wherever_pillow_finds_its_orientation(kind: str, orientation: int) -> None:
    from PIL import ImageOps

    data = turned(kind, orientation)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    upright = decode(data)
    assert (expected.width > expected.height) == (orientation != 6), "Pillow must find it"
    assert header_size(data) == (upright.height, upright.width) == (expected.height, expected.width)
    assert upright.tobytes() == expected.convert("RGB").tobytes()


def with_transparent_colour(width: int, depth: int, colour: int, row: bytes, transparent: bytes) -> bytes:
    """A PNG of one row. Args: colour: type of its pixels. transparent: its chunk `tRNS`."""
    header = struct.pack(">IIBBBBB", width, 1, depth, colour, 0, 0, 0)
    chunks = (b"IHDR" + header, b"tRNS" + transparent, b"IDAT" + zlib.compress(b"\0" + row), b"IEND")
    parts = (struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def see_through(kind: str) -> bytes:
    """An image with transparency in one of the ways that files have."""
    by_hand = {
        "a colour of RGB": with_transparent_colour(
            3, 8, 2, bytes([9, 8, 7, 9, 8, 6, 0, 0, 255]), struct.pack(">3H", 9, 8, 7)
        ),
        "a grey": with_transparent_colour(3, 8, 0, bytes([0, 100, 255]), struct.pack(">H", 100)),
        "one bit": with_transparent_colour(4, 1, 0, bytes([0b0110_0000]), struct.pack(">H", 0)),
    }
    if kind in by_hand:
        return by_hand[kind]
    image, buffer = noisy_image(24, 16), io.BytesIO()
    image.putalpha(Image.fromarray(np.arange(24, dtype=np.uint8)[None].repeat(16, 0) * 10))
    name = kind.rpartition(" ")[2]
    if "palette" in kind:
        image = image.convert("RGB").quantize(8)
        image.save(buffer, name, transparency=bytes(range(0, 256, 32)) if "alphas" in kind else 3)
    else:
        image.convert("LA" if "grey" in kind else "RGBA").save(
            buffer, name, **{"lossless": True} if "WebP" in kind else {}
        )
    return buffer.getvalue()


@pytest.mark.parametrize(
    "kind",
    [
        "a colour of RGB", "a grey", "one bit", "alpha of a PNG",
        "grey and alpha of a PNG", "alpha of a WebP", "alpha of a TIFF", "grey and alpha of a TIFF",
        "alpha of a JPEG2000", "palette of a PNG", "palette with alphas of a PNG", "palette of a GIF",
    ],
)  # fmt: skip
def test_what_is_transparent_lies_on_white_as_in_the_processors(kind: str) -> None:
    from transformers.image_transforms import convert_to_rgb

    data = see_through(kind)
    image = Image.open(io.BytesIO(data))
    expected = convert_to_rgb(image, return_numpy=True)
    assert np.array_equal(np.asarray(decode(data)), expected)
    assert np.asarray(image.convert("RGBA"))[..., 3].min() < 255, "nothing of it is transparent"


def test_a_transparent_grey_of_16_bits_is_white() -> None:
    data = with_transparent_colour(4, 16, 0, struct.pack(">4H", 0, 1000, 2570, 65535), struct.pack(">H", 1000))
    assert np.asarray(decode(data))[0, :, 1].tolist() == [0, 255, 10, 255]


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "CMYK"])
def test_other_colour_modes_become_rgb(mode: str) -> None:
    buffer = io.BytesIO()
    noisy_image(9, 7).convert(mode).save(buffer, "TIFF")
    assert decode(buffer.getvalue()).mode == "RGB"
    assert header_size(buffer.getvalue()) == (7, 9)


GREY_16 = np.array([[0, 256, 257, 385, 386, 128 * 257, 65534, 65535]], np.uint16)
GREY_8 = [0, 1, 1, 1, 2, 128, 255, 255]
"""The nearest of value / 257."""


def encoded(values: np.ndarray, kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, kind)
    return buffer.getvalue()


def tiff(bits: int, content: bytes, width: int = 4, signed: bool = False) -> bytes:
    """An uncompressed TIFF of one row."""
    tags = {256: width, 257: 1, 258: bits, 259: 1, 262: 1, 273: 8 + 2 + 10 * 12 + 4, 277: 1, 278: 1, 279: len(content)}
    entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in (tags | {339: 1 + signed}).items()]
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + b"".join(entries) + bytes(4) + content


@pytest.mark.parametrize(
    "data",
    [
        *(pytest.param(encoded(GREY_16, kind), id=kind) for kind in ("PNG", "TIFF", "PPM")),
        pytest.param(encoded(GREY_16.astype(">u2"), "TIFF"), id="big-endian TIFF"),
        pytest.param(tiff(16, GREY_16.tobytes(), 8), id="TIFF by hand"),
    ],
)
def test_grey_values_of_16_bits_are_rescaled(data: bytes) -> None:
    assert header_size(data) == (1, 8)
    for channel in range(3):
        assert np.asarray(decode(data))[0, :, channel].tolist() == GREY_8


def test_grey_values_of_10_and_12_bits_are_rescaled() -> None:
    ten = b"P5\n4 1\n1023\n" + np.array([0, 4, 512, 1023], ">u2").tobytes()
    assert np.asarray(decode(ten))[0, :, 0].tolist() == [0, 1, 128, 255]
    twelve = tiff(12, bytes([0x00, 0x00, 0x10, 0x80, 0x0F, 0xFF]))
    assert np.asarray(decode(twelve))[0, :, 0].tolist() == [0, 1, 128, 255]


def test_a_16_bit_photo_in_jpeg_2000_keeps_its_greys() -> None:
    ramp = np.tile(np.arange(64, dtype=np.uint16) * 1040, (64, 1))
    greys = np.asarray(decode(encoded(ramp, "JPEG2000")))[..., 1].astype(int)
    assert np.abs(greys - np.rint(ramp / 257)).max() <= 1


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (encoded(np.array([[0, 0.5, 1, 300]], np.float32), "TIFF"), "floats"),
        (b"Pf\n2 1\n-1.0\n" + np.array([0, 1], "<f4").tobytes(), "floats"),
        (encoded(GREY_16.astype(np.int32), "TIFF"), "integers of 32 bits"),
        (tiff(32, GREY_16.astype(np.uint32).tobytes(), 8), "integers of 32 bits"),
        (tiff(16, np.array([-5, 0, 100, 32767], "<i2").tobytes(), signed=True), "signed"),
    ],
)
def test_grey_values_without_a_known_white_are_refused(data: bytes, kind: str) -> None:
    for read in (header_size, decode):  # so that such a sample is left out while packing
        with pytest.raises(DataError, match=rf"^its grey values are .*{kind}.*; write it with 8 or 16 bits$"):
            read(data)


def test_images_of_too_many_pixels_are_refused_from_their_header() -> None:
    data = png(200, 100)
    assert pixels.header_size(data, 20_000) == (100, 200)
    for read in (pixels.header_size, pixels.decode):
        with pytest.raises(DataError, match=r"^it has 200 x 100 pixels; 1 to data.max_decoded_pixels = 19999 are dec"):
            read(data, 19_999)
    claim = b"P6 99999999 99999999 255\n"
    with pytest.raises(
        DataError, match=r"^it has more pixels than data.max_decoded_pixels = 1000000; make it smaller$"
    ):
        header_size(claim)


def test_a_program_is_no_image() -> None:
    program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 60 60\n%%EndComments\nshowpage\n"
    with pytest.raises(DataError, match="it is a PostScript program; write it as PNG"):
        decode(program)


def test_corrupt_header_and_body() -> None:
    whole = png(200, 200)
    with pytest.raises(DataError, match="5 bytes are not an image"):
        header_size(b"hello")
    with pytest.raises(DataError, match="not an image"):
        header_size(whole[:10])
    cut = whole[: len(whole) // 2]
    assert header_size(cut) == (200, 200)  # the header is whole
    with pytest.raises(DataError, match="its content is corrupt"):
        decode(cut)
    flipped = bytearray(whole)
    for at in range(60, 90):
        flipped[at] ^= 0xFF
    assert header_size(bytes(flipped)) == (200, 200)
    with pytest.raises(DataError, match="its content is corrupt"):
        decode(bytes(flipped))


def test_a_processor_folder_sets_the_rules(tmp_path: Path) -> None:
    config = {
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [1, 1, 1],
        "resample": 2,
        "size": {"height": 32, "width": 32},
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    rules = pixel_rules("siglip", str(tmp_path))
    assert rules.mean == (0.1, 0.2, 0.3)
    assert rules.resample == Image.Resampling.BILINEAR
    assert rules.image_size == 32
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"do_center_crop": True}))
    with pytest.raises(ConfigError, match="do_center_crop = true is not supported"):
        pixel_rules("siglip", str(tmp_path))
    with pytest.raises(ConfigError, match=r"absent' does not exist; .* has preprocessor_config.json"):
        pixel_rules("siglip", str(tmp_path / "absent"))


def test_a_processor_may_be_inside_of_another_file_which_comes_first(tmp_path: Path) -> None:
    values = {"image_mean": [0.1, 0.2, 0.3], "size": {"shortest_edge": 3136, "longest_edge": 50176}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3}))
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "X"}))
    assert pixel_rules("qwen2_vl", str(tmp_path)).mean == (0.5, 0.5, 0.5)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": values}))
    rules = pixel_rules("qwen2_vl", str(tmp_path))
    assert (rules.mean, rules.min_pixels, rules.max_pixels) == ((0.1, 0.2, 0.3), 3136, 50176)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {"do_resize": False}}))
    with pytest.raises(ConfigError, match=r"^model.pretrained = .*: do_resize = false is not supported"):
        pixel_rules("qwen2_vl", str(tmp_path), "model.pretrained")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(
            ("image_mean", value)
            for value in (0.5, [0.5], "abc", [0.5, "a", 0.5], [0.5, float("nan"), 0.5], [1e300] * 3)
        ),
        *(("image_std", value) for value in ([0.5, 0.0, 0.5], [0.5, -1, 0.5], {"a": 1})),
        *(("rescale_factor", value) for value in ("a", 0, -1, float("inf"), True)),
        *(("resample", value) for value in ("bicubic", 7, -1, [])),
        *(("size", value) for value in (0.5, "a", [2, 2], {"height": "a"}, {"height": 10**12, "width": 10**12})),
        *(("min_pixels", value) for value in (-1, 2.5, "a")),
    ],
)
def test_a_processor_of_other_values_is_one_sentence(tmp_path, key, value):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(ConfigError, match=rf"^data\.image_processor = .*: {key} = .*; it must be "):
        pixel_rules("siglip_vision_model", str(tmp_path))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({key: None}))
    assert pixel_rules("siglip_vision_model", str(tmp_path)) == pixel_rules("siglip_vision_model")
