import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.errors import ConfigError, DataError
from mmtrain.modality.geometry import image_geometry, smart_resize

QWEN = {"model_type": "qwen2_vl_vision", "patch_size": 14}


@given(
    height=st.integers(1, 3000),
    width=st.integers(1, 3000),
    factor=st.sampled_from([14, 28, 32, 56]),
)
def test_sides_are_multiples_and_the_area_is_inside_of_its_limits(height: int, width: int, factor: int) -> None:
    low, high = 3136, 1003520
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(DataError, match="200 times"):
            smart_resize(height, width, factor=factor, min_pixels=low, max_pixels=high)
        return
    new_height, new_width = smart_resize(height, width, factor=factor, min_pixels=low, max_pixels=high)
    assert new_height % factor == new_width % factor == 0
    assert min(new_height, new_width) >= factor
    assert new_height * new_width >= low
    thin = min(new_height, new_width) == factor
    assert new_height * new_width <= high or thin


def test_known_sizes() -> None:
    geometry = image_geometry(QWEN, spatial_merge=2, min_pixels=784, max_pixels=50176)
    table = {(56, 56): (1, 4, 4), (100, 60): (1, 8, 4), (168, 168): (1, 12, 12), (1000, 1000): (1, 16, 16)}
    assert {size: geometry.grid(*size) for size in table} == table
    # 10 x 10 is below the smallest area, 42 lies between two multiples and goes to the even one.
    assert geometry.resized(10, 10) == (28, 28)
    assert geometry.resized(42, 70) == (56, 56)
    assert [geometry.num_tokens(grid) for grid in table.values()] == [4, 8, 36, 64]


def test_the_limits_of_a_family() -> None:
    geometry = image_geometry({"model_type": "qwen3_vl"}, spatial_merge=2)
    assert (geometry.patch_size, geometry.min_pixels, geometry.max_pixels) == (16, 65536, 16777216)
    geometry = image_geometry({"model_type": "qwen2_5_vl"}, spatial_merge=2)
    assert (geometry.patch_size, geometry.min_pixels, geometry.max_pixels) == (14, 3136, 1003520)


@pytest.mark.parametrize("model_type", ["siglip_vision_model", "clip_vision_model", "vit"])
def test_a_fixed_size_ignores_the_image(model_type: str) -> None:
    encoder = {"model_type": model_type, "image_size": 56, "patch_size": 14}
    geometry = image_geometry(encoder, spatial_merge=2)
    assert geometry.grid(99, 1) == (1, 4, 4)
    assert geometry.resized(99, 1) == (56, 56)
    assert geometry.num_tokens((1, 4, 4)) == 4


@given(height=st.integers(1, 3000), width=st.integers(1, 3000), merge=st.sampled_from([1, 2]))
def test_a_number_of_patches_is_filled(height: int, width: int, merge: int) -> None:
    geometry = image_geometry({"model_type": "siglip2", "patch_size": 16, "num_patches": 256}, spatial_merge=merge)
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(DataError, match="200 times"):
            geometry.grid(height, width)
        return
    _, rows, columns = geometry.grid(height, width)
    assert rows % merge == columns % merge == 0
    assert rows * columns <= 256
    assert 2 * rows * columns > 256 or min(rows, columns) == merge or max(height, width) < 3


def test_an_image_whose_middle_is_cut_out_has_a_largest_aspect_ratio() -> None:
    """Resizing its shorter side would otherwise make a huge image."""
    geometry = image_geometry({"model_type": "clip", "image_size": 56, "patch_size": 14}, spatial_merge=1)
    assert geometry.grid(200, 1) == (1, 4, 4)
    with pytest.raises(DataError, match="image of 1 x 201 pixels: one side is more than 200 times the other"):
        geometry.grid(201, 1)


def test_a_class_token_is_one_token_more() -> None:
    encoder = {"model_type": "clip", "image_size": 56, "patch_size": 14}
    assert image_geometry(encoder, spatial_merge=1, extra_tokens=1).num_tokens((1, 4, 4)) == 17


@pytest.mark.parametrize(
    ("encoder", "options", "message"),
    [
        (
            {"model_type": "whisper_encoder"},
            {},
            r"reads sound, and this section images; write it as .model.modules.aud",
        ),
        ({"model_type": "clap"}, {}, "'clap' has no known image layout; known are qwen2_vl"),
        (
            {"model_type": "vit", "image_size": 60, "patch_size": 16},
            {},
            "image_size = 60 must be a multiple of",
        ),
        ({"model_type": "vit", "image_size": 48, "patch_size": 16}, {}, "must be a multiple of"),
        ({"model_type": "vit", "image_size": [32, 64]}, {}, r"image_size = \[32, 64\]; only square sizes"),
        ({"model_type": "vit"}, {"max_pixels": 5000}, "one fixed image size"),
        (QWEN, {"max_pixels": 700}, "data.max_pixels = 700 is below the smallest image"),
        ({**QWEN, "in_channels": 1}, {}, "1 colour channels"),
        ({"model_type": "siglip2"}, {"max_pixels": 80}, "= 80: an image has at most 0 patches, but one token covers 4"),
        ({"model_type": "siglip2"}, {"min_pixels": 9}, "data.min_pixels = 9: images of a siglip2 encoder always have"),
        (
            {"model_type": "siglip2"},
            {"max_pixels": 800},
            "= 800: an image has at most 3 patches, but one token covers 4; raise",
        ),
    ],
)
def test_refusals(encoder: dict, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        image_geometry(encoder, spatial_merge=2, **options)
