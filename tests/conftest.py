from pathlib import Path

import pytest

from tests.ranks import start_server

start_server()  # it imports torch while the tests are collected


@pytest.fixture(scope="session")
def charts(tmp_path_factory) -> Path:
    """A small charts data set."""
    from mmtrain.data.charts import make_charts

    folder = tmp_path_factory.mktemp("charts")
    make_charts(folder, 400, 7)
    return folder
