"""Nodes that ask a real lighthouse over loopback."""

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from mmtrain.config.elastic import ElasticConfig
from mmtrain.errors import ConfigError, RankLostError
from mmtrain.launch.board import FolderBoard
from mmtrain.launch.launched import Launched
from mmtrain.launch.lighthouse import LighthouseSource, member, node_store
from mmtrain.launch.member import Member
from mmtrain.launch.membership import Membership, Node
from tests.lighthouse import Lighthouse, started

SILENT_S = 2.0


@pytest.fixture
def lighthouse() -> Iterator[Lighthouse]:
    with started(late_s=0.8) as made:
        yield made


class OneRank:
    """A node of one rank, which takes steps in a thread; each step waits until `go` allows it."""

    def __init__(
        self, name: str, lighthouse: Lighthouse, folder: Path, together: threading.Barrier | None, **facts: Any
    ) -> None:
        """Args: together: which nodes pass in each step; None: they do not wait for each other."""
        node = Node(name=name, ranks=1, store="tcp://127.0.0.1:1", **{"digest": "version=1", **facts})
        self.source = LighthouseSource(lighthouse.address, SILENT_S)
        self.member = Member(
            node,
            local_rank=0,
            board=FolderBoard(folder / name),
            source=self.source,
            silent_s=SILENT_S,
        )
        self.log: list[str] = []
        self.error: Exception | None = None
        self.step, self.done, self.until, self.fails = 0, 0, 0, False
        self._together = together
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with suppress(Ended, threading.BrokenBarrierError):
            try:
                self._take(self.member.first())
                while True:
                    self._wait()
                    self.step += 1
                    self.member.begin_step(self.step)
                    if self._together is not None:
                        self._together.wait()
                    if self.fails:
                        self.fails = False
                        self._take(self.member.next())
                    else:
                        self._take(self.member.end_step(self.step))
                    self.done = self.step
            except (ConfigError, RankLostError) as error:
                self.error = error
                self.member.close()  # as its process ends

    def _take(self, membership: Membership | None) -> None:
        if membership is not None:
            self.log.append(f"{membership.generation} {' '.join(membership.names)}")

    def _wait(self) -> None:
        while self.step >= self.until:
            if self.until < 0:
                raise Ended
            time.sleep(0.002)

    def end(self) -> None:
        self.until = -1
        if self._together is not None:
            self._together.abort()
        self.member.close()
        self._thread.join(10)


class Ended(BaseException):
    """The node is no longer needed."""


@contextmanager
def nodes(
    lighthouse: Lighthouse, folder: Path, names: str, together: threading.Barrier | None = None
) -> Iterator[Callable[..., OneRank]]:
    """Nodes that start together. Yields a function: the node of a name, which it starts if it is new."""
    made: dict[str, OneRank] = {}

    def node(name: str, **facts: Any) -> OneRank:
        if name not in made:
            made[name] = OneRank(name, lighthouse, folder, together, **facts)
        return made[name]

    for name in names:
        node(name)
    try:
        yield node
    finally:
        lighthouse.kill()
        for one in made.values():
            one.end()


def begin(count: int, *some: OneRank) -> None:
    """Lets all of these take so many further steps."""
    for one in some:
        one.until = one.step + count


def steps(count: int, *some: OneRank) -> None:
    """So many steps of all of these."""
    begin(count, *some)
    wait_for(lambda: all(one.done == one.until for one in some), *some)


def wait_for(holds: Callable[[], bool], *some: OneRank) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, [(one.member.name, one.step, one.log, one.error) for one in some]
        time.sleep(0.005)


def test_nodes_join_fail_and_end(lighthouse, tmp_path):
    with nodes(lighthouse, tmp_path, "abc") as node:
        a, b, c = map(node, "abc")
        wait_for(lambda: bool(a.log and b.log and c.log), a, b, c)
        steps(5, a, b, c)
        assert a.log == b.log == c.log == ["1 a b c"], "those that start together are one generation"
        b.fails = True
        begin(2, a, b, c)
        wait_for(lambda: a.log[1:] == b.log[1:] == c.log[1:] == ["2 a b c"], a, b, c)
        c.end()
        begin(2, a, b)
        wait_for(lambda: a.log[2:] == b.log[2:] == ["3 a b"], a, b)
        d = node("d")
        a.until = b.until = 10**6
        wait_for(lambda: bool(d.log), a, b, d)
        assert d.log == ["4 a b d"]
        d.until = 10**6
        wait_for(lambda: a.log[-1] == b.log[-1] == "4 a b d", a, b, d)


def test_a_job_goes_on_where_the_lighthouse_starts_again_and_ends_where_it_does_not(lighthouse, tmp_path, caplog):
    with nodes(lighthouse, tmp_path, "ab") as node:
        a, b = map(node, "ab")
        wait_for(lambda: bool(a.log and b.log), a, b)
        steps(1, a, b)
        lighthouse.kill()
        steps(5, a, b)
        assert caplog.text.count("does not answer") == 2, "each node says it once"
        lighthouse.start()
        b.fails = True
        begin(1, b)
        a.until = 10**6
        b.until = 10**6
        wait_for(lambda: a.log[-1] == b.log[-1] != "1 a b", a, b)
        assert a.log == b.log == ["1 a b", "2 a b"], "it knows all nodes before they ask"
        lighthouse.kill()
        a.fails = True
        wait_for(lambda: a.error is not None, a)
        assert isinstance(a.error, RankLostError)
        assert f"elastic.lighthouse = {lighthouse.address!r} does not answer this machine (" in str(a.error)
        assert "\n" not in str(a.error)
        step = b.step
        wait_for(lambda: b.step > step + 5, b)


def test_steps_that_need_all_nodes_go_on_while_a_lighthouse_starts_again(lighthouse, tmp_path):
    """Nodes hear it at different moments: one asks in a step, and waits for another that has ended its step."""
    with nodes(lighthouse, tmp_path, "ab", threading.Barrier(2, timeout=10)) as node:
        a, b = map(node, "ab")
        wait_for(lambda: bool(a.log and b.log), a, b)
        steps(5, a, b)
        for _ in range(3):
            lighthouse.kill()
            step = a.step
            a.until = b.until = 10**6
            wait_for(lambda step=step: a.step > step + 5, a, b)
            lighthouse.start()
            wait_for(lambda: a.source._is_known() and b.source._is_known(), a, b)  # both ask it again
            step = a.step
            wait_for(lambda step=step: a.step > step + 100, a, b)
        assert a.log == b.log == ["1 a b"]


def test_a_newcomer_of_another_version_and_another_program_are_refused(lighthouse, tmp_path, caplog):
    from datetime import timedelta

    from torchft.coordination import LighthouseClient

    with nodes(lighthouse, tmp_path, "a") as node:
        a = node("a")
        wait_for(lambda: bool(a.log), a)
        a.until = 10**6
        other = node("b", digest="version=2")
        wait_for(lambda: other.error is not None, a, other)
        assert "nodes a and b cannot be in one job: the first has version=1, the second version=2" in str(other.error)
        step = a.step
        wait_for(lambda: a.step > step + 1, a)  # the lighthouse has missed beats of the other
        client = LighthouseClient(lighthouse.address, timedelta(seconds=2))
        client.quorum("stranger", timeout=timedelta(seconds=10), data={"job": 1})
        wait_for(lambda: "member 'stranger' of the lighthouse: {'job': 1} is no node of an elastic job" in caplog.text)
        step = a.step
        wait_for(lambda: a.step > step + 5, a)
        assert (a.log, a.error) == (["1 a"], None)


def test_the_ranks_of_a_node_share_its_name(lighthouse, tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    section, board = ElasticConfig(enable=True, lighthouse=lighthouse.address), FolderBoard(tmp_path)
    ranks = [
        member(
            section,
            Launched(rank=rank, world_size=2, local_rank=rank, local_world_size=2),
            digest="version=1",
            board=board,
        )
        for rank in range(2)
    ]
    assert ranks[0].name == ranks[1].name
    for one in ranks:
        one.close()


def test_without_torchft_one_line_says_what_to_install(monkeypatch):
    for name in ("torchft", "torchft.coordination"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ConfigError, match=r"lighthouse = 'http://h:1' needs torchft .*pip install \"mmtrain\[elastic\]\""
    ):
        LighthouseSource("http://h:1", 1.0)


@pytest.mark.parametrize(
    ("master", "lighthouse", "store"),
    [
        ("node1", "http://node0:29510", "tcp://node1:29500"),
        ("10.0.0.2", "http://node0:29510", "tcp://10.0.0.2:29500"),
        ("fd00::2", "http://[fd00::1]:29510", "tcp://[fd00::2]:29500"),
        ("localhost", "http://127.0.0.1:29510", "tcp://localhost:29500"),
        ("127.0.0.1", "http://localhost:29510", "tcp://127.0.0.1:29500"),
    ],
)
def test_others_reach_the_store_of_a_node_where_torchrun_says(master, lighthouse, store):
    assert node_store(lighthouse, {"MASTER_ADDR": master, "MASTER_PORT": "29500"}) == store


def test_a_store_at_localhost_has_the_address_that_leads_to_the_lighthouse():
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))
        except OSError:
            with pytest.raises(ConfigError, match="does not reach it"):
                node_store("http://192.0.2.1:1", variables)
            return
        own = probe.getsockname()[0]
    assert node_store("http://192.0.2.1:1", variables) == f"tcp://{own}:29500"
    with pytest.raises(ConfigError, match=r"'http://no\.invalid:1': this machine .* does not reach it .*--master-addr"):
        node_store("http://no.invalid:1", variables)
