import io

import pytest

from mmtrain.errors import ConfigError
from mmtrain.run_page.line_chart import png, round_step


@pytest.mark.parametrize(("rough", "step"), [(0.0, 1.0), (0.9, 1), (1.0, 1), (1.2, 2), (3, 5), (7, 10), (0.034, 0.05)])
def test_steps_are_round(rough: float, step: float) -> None:
    assert round_step(rough) == pytest.approx(step)


def painted(data: bytes, colour: tuple[int, int, int]) -> list[tuple[int, int]]:
    """The pixels below the legend that have a colour."""
    from PIL import Image

    image = Image.open(io.BytesIO(data)).convert("RGB")
    assert image.size == (2400, 1040)
    pixels = image.load()
    return [(x, y) for x in range(image.width) for y in range(120, image.height) if pixels[x, y] == colour]


def test_curves_are_painted_to_scale() -> None:
    data = png({"a": [1.0, 1.0, 1.0], "b": [2.0, 2.0]}, title="two", unit="s")
    a, b = painted(data, (0x2B, 0x6C, 0xA3)), painted(data, (0xC2, 0x50, 0x0A))
    bottom = 2 * (520 - 52)
    heights = [bottom - sum(y for _, y in pixels) / len(pixels) for pixels in (a, b)]
    assert heights[1] == pytest.approx(2 * heights[0], rel=0.02)
    assert max(x for x, _ in a) > max(x for x, _ in b)


def test_a_backdrop_has_an_axis_of_its_own() -> None:
    data = png({"a": [1.0, 1.0]}, title="one", unit="s", backdrop=("images", [50.0, 20.0]))
    dashed = painted(data, (0x8A, 0x94, 0x9E))
    columns = {x for x, y in dashed if x < 2200}
    assert 200 < len(columns) < max(columns) - min(columns)  # a line across, with gaps


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one curve"):
        png({}, title="", unit="s")
