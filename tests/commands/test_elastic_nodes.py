"""Launches of an elastic job that cannot work: each is refused with one line that says what to start instead."""

import os
import sys
from pathlib import Path

import pytest

from mmtrain.commands import elastic_nodes
from mmtrain.commands.cli import main, train_main
from tests.jobs import SHALLOW, write_config

NODE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
"""What torchrun sets for the only rank of a node."""


@pytest.fixture
def words(tmp_path: Path, charts: Path) -> list[str]:
    options = [*SHALLOW, "elastic.enable=true", "elastic.silent_s=1.0", "checkpoint.enable=true"]
    return ["--config", str(write_config(tmp_path, charts)), *(f"--{option}" for option in options)]


@pytest.fixture
def error(monkeypatch, capsys):
    """A function: what train.py says on a node that torchrun has started, after "error [rank 0]: "."""
    for name in ("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def said(words: list[str], run=train_main, **variables: str) -> str:
        for name, value in {**NODE, "MASTER_PORT": "29500", **variables}.items():
            monkeypatch.setenv(name, value)
        assert run(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line.partition(": ")[2]

    return said


LIGHTHOUSE = "--elastic.lighthouse=http://127.0.0.1:1"


def test_one_torchrun_over_all_nodes(error, words):
    assert error([*words, LIGHTHOUSE], GROUP_WORLD_SIZE="2", WORLD_SIZE="2") == (
        "elastic.enable = true, but one torchrun has 2 nodes, all of which it would restart when one is lost; start "
        '"torchrun --nnodes 1" on each node'
    )


def test_without_a_lighthouse(error, words):
    assert error(words).startswith('elastic.lighthouse = "", but the nodes of a job under torchrun find each other')


def test_without_torchft(error, words, monkeypatch):
    for name in ("torchft", "torchft.coordination"):
        monkeypatch.setitem(sys.modules, name, None)
    said = error([*words, LIGHTHOUSE])
    assert said.startswith("elastic.lighthouse = 'http://127.0.0.1:1' needs torchft (")
    assert 'pip install "mmtrain[elastic]", or use mmtrain train --nodes on one machine' in said


def test_a_node_of_one_rank_does_not_hide_its_sockets_from_other_machines(words, monkeypatch):
    pytest.importorskip("torchft")
    interfaces = []

    def train(*_: object) -> None:
        interfaces.append(os.environ.get("GLOO_SOCKET_IFNAME"))

    monkeypatch.setattr(elastic_nodes, "_train", train)
    for name, value in {**NODE, "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    for name in ("GLOO_SOCKET_IFNAME", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert train_main([*words, LIGHTHOUSE]) == 0
    assert interfaces == [None]


def test_without_a_launcher(words, monkeypatch, capsys):
    for name in (*NODE, "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert train_main([*words, LIGHTHOUSE]) == 2
    assert capsys.readouterr().err == (
        "error: elastic.enable = true, but no launcher has started this process; start torchrun --nnodes 1 "
        "--nproc-per-node M train.py on each node, or mmtrain train --nodes N on this machine\n"
    )


def test_options_of_the_local_launcher_on_a_node_of_torchrun(error, words):
    said = error(["train", *words, LIGHTHOUSE, "--nodes", "3"], run=main)
    assert said == (
        "train: --nodes 3, but torchrun has started this process, which is of one node; leave the option out, or "
        "start mmtrain train --nodes without torchrun"
    )
