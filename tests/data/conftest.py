"""A small charts data set, and a place of its own for the cache of `datasets`."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """`datasets` reads its cache's place when it is first imported, which happens inside of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="session")
def charts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A charts data set of 180 + 20 samples."""
    from mmtrain.data.charts import make_charts

    out = tmp_path_factory.mktemp("charts") / "set"
    make_charts(out, 200, seed=7)
    return out
