import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def images(tmp_path):
    """Files of two images of unequal sizes."""
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"{index}.png" for index in range(2)]
    for path, size in zip(paths, ((20, 33), (16, 16)), strict=True):
        Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(path)
    return paths
