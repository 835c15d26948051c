import atexit
import gc
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.cpu_time import CpuTime
from tests.examples import DAILY, NIGHTLY
from tests.ranks import start_server
from tests.store import stored_folder

# No deadline: a shared machine is slow at times.
settings.register_profile("daily", deadline=None, max_examples=DAILY)
settings.register_profile("nightly", deadline=None, max_examples=NIGHTLY)
settings.load_profile("daily")

# One folder for all processes of a run of the tests: the cache of `datasets`, which is read when it is first imported,
# and what `tests.reference.stored` computes once.
if "MMTRAIN_TEST_STORE" not in os.environ:
    _store = tempfile.TemporaryDirectory(prefix="mmtrain-tests-")
    atexit.register(_store.cleanup)
    os.environ.update(MMTRAIN_TEST_STORE=_store.name, HF_DATASETS_CACHE=f"{_store.name}/datasets", HF_HUB_OFFLINE="1")

# Workers of this run and of others may start torchrun at one time, which listens at port 29500 unless told otherwise.
# Ports from 32768 on are given to connections.
os.environ["PET_MASTER_PORT"] = str(20_000 + os.getpid() % 10_000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-durations", action="store_true", help="of these files into tests/durations.json")
    parser.addoption("--shard", default="1/1", help="K/N: of the selected tests every N-th, from the K-th on")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuTime(config))


@pytest.hookimpl(trylast=True)  # after tests were deselected by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests of one shard."""
    number, count = map(int, config.getoption("--shard").split("/"))
    chosen = items[number - 1 :: count]
    if len(chosen) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where ranks will be forked from, torch is imported meanwhile. And what this process has imported by now, its
    garbage collector, which tests of memory call often, does not look at again."""
    if any(item.get_closest_marker("ranks") for item in session.items):
        start_server()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def charts() -> Path:
    """A small charts data set, to be read."""
    from mmtrain.data.toy.charts import make_charts

    return stored_folder("charts", lambda folder: make_charts(folder / "charts", 400, 7)) / "charts"


@pytest.fixture(scope="session")
def shapes() -> Path:
    """A small data set of moving shapes, to be read."""
    from mmtrain.data.toy.shapes import make_shapes

    return stored_folder("shapes", lambda folder: make_shapes(folder / "shapes", 150, 7)) / "shapes"


@pytest.fixture(scope="session")
def squares() -> Path:
    """A small data set of the easy level of moving shapes, to be read."""
    from tests.guides import stored_squares

    return stored_squares()


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hosts whose address was asked for; none is told, as on a machine without network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    hosts: list[str] = []

    def refuse(host: str, *_: Any, **__: Any) -> Any:
        hosts.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return hosts
