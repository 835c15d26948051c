import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmtrain.data.geometry import image_geometry, smart_resize
from mmtrain.data.pixels import blank, decode, header_size, pixel_rules, pixel_values
from mmtrain.errors import ConfigError, DataError
from tests.data.samples import png

SIZES = [(60, 100), (56, 168), (168, 167), (30, 31), (300, 20), (14, 14)]


def picture(width: int, height: int) -> Image.Image:
    noise = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(noise)


def their_processor(name: str, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    cls = getattr(transformers, f"{name}Pil", None)
    if cls is None:
        pytest.skip("this version of transformers needs torchvision for its image processors")
    return cls(**options)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl_vision"])
@pytest.mark.parametrize("merge", [1, 2, 3])
def test_packed_pixels_equal_the_reference(merge: int, model_type: str) -> None:
    low, high = 56 * 56, 112 * 112
    geometry = image_geometry({"model_type": model_type}, spatial_merge=merge, min_pixels=low, max_pixels=high)
    theirs = their_processor(
        "Qwen2VLImageProcessor", merge_size=merge, size={"shortest_edge": low, "longest_edge": high}
    )
    for width, height in SIZES:
        image = picture(width, height)
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
        image = picture(width, height)
        expected = theirs(image, return_tensors="np")["pixel_values"]
        np.testing.assert_array_equal(pixel_values(image, geometry, pixel_rules(model_type)).numpy(), expected)


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
    images = [blank(picture(60, 40)), blank(picture(60, 40).rotate(90))]
    assert images[0].size == (60, 40)
    assert images[0].tobytes() == images[1].tobytes()
    assert len(set(images[0].tobytes())) == 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_turned_upright_and_their_header_knows(orientation: int) -> None:
    from PIL import ImageOps

    image, exif, buffer = picture(40, 24), Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    image.save(buffer, "JPEG", exif=exif)
    upright = decode(buffer.getvalue())
    assert header_size(buffer.getvalue()) == (upright.height, upright.width)
    assert (upright.height, upright.width) == ((40, 24) if orientation >= 5 else (24, 40))
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(buffer.getvalue())))
    assert expected is not None
    assert upright.tobytes() == expected.convert("RGB").tobytes()


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "CMYK"])
def test_other_colour_modes_become_rgb(mode: str) -> None:
    buffer = io.BytesIO()
    picture(9, 7).convert(mode).save(buffer, "TIFF")
    assert decode(buffer.getvalue()).mode == "RGB"
    assert header_size(buffer.getvalue()) == (7, 9)


def test_corrupt_header_and_body() -> None:
    whole = png(200, 200)
    with pytest.raises(DataError, match="5 bytes are not a picture"):
        header_size(b"hello")
    with pytest.raises(DataError, match="not a picture"):
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
    with pytest.raises(ConfigError, match=r"preprocessor_config.json does not exist"):
        pixel_rules("siglip", str(tmp_path / "absent"))
