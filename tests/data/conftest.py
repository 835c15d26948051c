from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def charts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A charts data set of 180 + 20 samples."""
    from mmtrain.data.toy.charts import make_charts

    out = tmp_path_factory.mktemp("charts") / "set"
    make_charts(out, 200, seed=7)
    return out
