"""Ranks that hang up, and the ring that notices silent ones: real processes, real sockets."""

import os
import signal
import socket
import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mmtrain.parallel import leave
from mmtrain.parallel.stores import FolderStore, open_store
from tests.ranks import _context, run_ranks

SILENT_S = 1.0


def pair(stack: ExitStack) -> tuple[socket.socket, socket.socket, int]:
    """Both ends of a connection, and the port that one of them connects to."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = stack.enter_context(socket.create_connection(server.getsockname()))
        return one, stack.enter_context(server.accept()[0]), server.getsockname()[1]


def test_only_connections_of_process_groups_are_shut_down() -> None:
    with ExitStack() as stack:
        before, _, _ = pair(stack)
        spared = frozenset(leave.connections())
        own, peer, _ = pair(stack)
        to_store, _, port = pair(stack)
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        assert leave.hang_up(spared, [port]) >= 2
        assert own.recv(1) == peer.recv(1) == b""
        assert before.send(b"x") == to_store.send(b"x") == 1
        stack.enter_context(socket.create_connection(listening.getsockname()))
        stack.enter_context(listening.accept()[0])


def watched(rank: int, folder: Path) -> tuple[float, str]:
    """When this rank left, and the error of a collective that released it."""
    size = dist.get_world_size()
    store, spared = FolderStore(folder), frozenset(leave.connections())
    group = dist.ProcessGroupGloo(dist.PrefixStore("work", store), rank, size, timedelta(seconds=60))
    beats = dist.ProcessGroupGloo(dist.PrefixStore("beats", store), rank, size, timedelta(seconds=SILENT_S))
    lost, said = threading.Event(), ""

    def leaves() -> None:
        lost.set()
        leave.hang_up(spared)

    ring, start = leave.Ring(beats, SILENT_S, leaves), time.monotonic()
    try:
        if rank % 2:
            group.recv([torch.zeros(1)], (rank + 2) % size, 0).wait()  # from a rank that lives and sends nothing
        else:
            assert lost.wait(30)
    except RuntimeError as error:
        said = str(error)
    left = time.monotonic() - start
    ring.end()
    leave.hang_up(spared)
    ring.join()
    return left, said


def stopped_for_a_while(rank: int, folder: Path) -> Any:
    """Rank 0 is stopped by rank 1, which lets it go on again when all have left."""
    if rank == 0:
        (folder / "pid").write_text(str(os.getpid()))
    if rank == 1:
        while not (folder / "pid").exists():
            time.sleep(0.01)
        pid = int((folder / "pid").read_text())
        threading.Timer(0.5, os.kill, (pid, signal.SIGSTOP)).start()
        threading.Timer(0.5 + 3 * SILENT_S, os.kill, (pid, signal.SIGCONT)).start()
    return watched(rank, folder / "store")


@pytest.mark.ranks
def test_a_stopped_rank_is_noticed_by_all_when_it_was_silent_for_long_enough(tmp_path: Path) -> None:
    found = run_ranks(stopped_for_a_while, 4, tmp_path)
    for left, _ in found[1:]:
        assert 0.5 + 0.7 * SILENT_S < left < 0.5 + 3 * SILENT_S  # less than one beat before it, at most
    assert found[1][1] and found[3][1], "ranks that waited for others got an error"


def alone(rank: int) -> bool:
    ring = leave.Ring(dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=1)), 1.0, lambda: None)
    ring.end()
    ring.join()
    return True


@pytest.mark.ranks
def test_one_rank_has_no_ring() -> None:
    assert run_ranks(alone, 1) == [True]


def test_a_store_of_files_has_no_lock(tmp_path: Path) -> None:
    store, other = FolderStore(tmp_path / "a"), open_store(f"file://{tmp_path / 'a'}", 1.0, SILENT_S)
    dist.PrefixStore("x/y", store).set("key", b"\x00value")
    assert dist.PrefixStore("x/y", other).get("key") == b"\x00value"
    assert not store.check(["x/y/key", "none"])
    with pytest.raises(dist.DistStoreError, match="none"):
        store.wait(["none"], timedelta(seconds=0.05))


def serve(folder: Path) -> None:
    """A store, until it is killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (folder / "pid").write_text(f"{os.getpid()}")
    (folder / "part").write_text(f"tcp://127.0.0.1:{store.port}")
    (folder / "part").rename(folder / "address")
    time.sleep(600)


@pytest.mark.ranks
def test_a_store_whose_machine_does_not_answer_is_left_in_time(tmp_path: Path) -> None:
    server = _context.Process(target=serve, args=(tmp_path,), daemon=True)
    server.start()
    try:
        while not (tmp_path / "address").exists():
            assert server.is_alive()
            time.sleep(0.01)
        store = open_store((tmp_path / "address").read_text(), 60.0, SILENT_S)
        store.set("key", "value")
        with pytest.raises(dist.DistStoreError):  # keys may take longer than answers
            store.wait(["none"], timedelta(seconds=leave.LEAST_ANSWER_S + 1))
        assert store.check(["key"])
        pid = int((tmp_path / "pid").read_text())
        os.kill(pid, signal.SIGSTOP)
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            store.check(["key"])
        assert leave.LEAST_ANSWER_S - 0.5 < time.monotonic() - began < leave.LEAST_ANSWER_S + 10
    finally:
        server.kill()
