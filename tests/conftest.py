import atexit
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from tests.ranks import start_server

settings.register_profile("mmtrain", deadline=None)  # a shared machine is slow at times
settings.load_profile("mmtrain")

# `datasets` reads its cache's place when it is first imported, here or in a rank: a place of the tests' own.
_cache = tempfile.TemporaryDirectory(prefix="mmtrain-datasets-")
atexit.register(_cache.cleanup)
os.environ.update(HF_DATASETS_CACHE=_cache.name, HF_HUB_OFFLINE="1")

# Two workers may start torchrun at one time, which listens at port 29500 unless told otherwise.
os.environ["PET_MASTER_PORT"] = str(29500 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Where tests will run, which is not the process that hands them to workers, torch is imported meanwhile."""
    if not session.config.getoption("numprocesses", None) or hasattr(session.config, "workerinput"):
        start_server()


@pytest.fixture(scope="session")
def charts(tmp_path_factory) -> Path:
    """A small charts data set."""
    from mmtrain.data.charts import make_charts

    folder = tmp_path_factory.mktemp("charts")
    make_charts(folder, 400, 7)
    return folder


@pytest.fixture(scope="session")
def shapes(tmp_path_factory) -> Path:
    """A small data set of moving shapes."""
    from mmtrain.data.shapes import make_shapes

    folder = tmp_path_factory.mktemp("shapes") / "shapes"
    make_shapes(folder, 150, 7)
    return folder
