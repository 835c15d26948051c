"""Nodes of threads that ask through real pipes: some fail, die, stop, go on and join at random."""

import random
import threading
import time
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path

import pytest

from mmtrain.errors import ConfigError, RankLostError
from mmtrain.launch.board import FolderBoard
from mmtrain.launch.hub import Hub, HubPipes, PipeSource
from mmtrain.launch.member import Member
from mmtrain.launch.membership import Membership, Node

SILENT_S = 0.6
STEPS = 20
RANKS = 2


class Ended(BaseException):
    """The process of this thread is dead."""


class HungUpError(Exception):
    """A peer has closed its connections."""


class World:
    """The connections of all ranks of one generation: whoever leaves hangs up, and then all leave."""

    def __init__(self, size: int) -> None:
        self._size, self._condition, self._came, self._is_up = size, threading.Condition(), {}, True

    def hang_up(self) -> None:
        with self._condition:
            self._is_up = False
            self._condition.notify_all()

    def exchange(self, what: object, value: int | None) -> list[int | None]:
        """A collective: the values of all ranks."""
        deadline = time.monotonic() + SILENT_S
        with self._condition:
            came = self._came.setdefault(what, [])
            came.append(value)
            self._condition.notify_all()
            while len(came) < self._size:
                if not self._is_up or not self._condition.wait(max(deadline - time.monotonic(), 0)):
                    self._is_up = False
                    self._condition.notify_all()
                    raise HungUpError
            return list(came)


class Machine:
    """The hub, and what nodes of threads share."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.nodes, self.lock = folder, {}, threading.Lock()
        self.worlds: dict[tuple, World] = {}
        self.taken: list[tuple[str, int, Membership]] = []
        self._pipes = HubPipes(Hub(SILENT_S), SILENT_S, time.monotonic())
        self._ends, self._new = False, []
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        while not self._ends:
            with self.lock:
                for name, pipe in self._new:
                    self._pipes.add(name, pipe, time.monotonic())
                self._new.clear()
            self._pipes.serve(time.monotonic())
            time.sleep(0.001)

    def start(self, *names: str) -> None:
        for name in names:
            ours, theirs = Pipe()
            self.nodes[name] = ThreadNode(self, name, theirs)
            with self.lock:
                self._new.append((name, ours))
        for name in names:
            self.nodes[name].start()

    def world(self, membership: Membership) -> World:
        with self.lock:
            key = (membership.generation, membership.names)
            return self.worlds.setdefault(key, World(membership.num_ranks))

    def __enter__(self) -> "Machine":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes.values():
            node.die()
        self._ends = True
        self._thread.join()


class NodeSource(PipeSource):
    """A pipe of a process that may be stopped or dead."""

    def __init__(self, pipe, node: "ThreadNode") -> None:
        super().__init__(pipe)
        self._node = node

    def ask(self, node: Node) -> tuple[Node, ...]:
        self._node.live(0)
        try:
            return super().ask(node)
        finally:
            self._node.live(0)

    def beat(self, name: str) -> None:
        self._node.runs[0].wait()
        super().beat(name)


class RankBoard(FolderBoard):
    """A board of a process that may be stopped or dead."""

    def __init__(self, folder: Path, node: "ThreadNode", rank: int) -> None:
        super().__init__(folder)
        self._node, self._rank = node, rank

    def set(self, key: str, value: str) -> None:
        self._node.live(self._rank)
        super().set(key, value)

    def check(self, keys: list[str]) -> bool:
        self._node.live(self._rank)
        return super().check(keys)


class ThreadNode:
    """Ranks that are threads, each of which trains as a trainer does."""

    def __init__(self, machine: Machine, name: str, pipe) -> None:
        self.machine, self.pipe = machine, pipe
        self.node = Node(name=name, ranks=RANKS, store="file:///tmp", digest="version=1")
        self.is_dead, self.states, self.errors = False, [None] * RANKS, []
        self.runs = [threading.Event() for _ in range(RANKS)]
        self.fails = [False] * RANKS
        self.members: list[Member] = []
        self._threads = [threading.Thread(target=self._run, args=(rank,), daemon=True) for rank in range(RANKS)]
        self.resume()

    def start(self) -> None:
        for rank in range(RANKS):
            board = RankBoard(self.machine.folder / self.node.name, self, rank)
            source = NodeSource(self.pipe, self) if rank == 0 else None
            self.members.append(Member(self.node, local_rank=rank, board=board, source=source, silent_s=SILENT_S))
        for thread in self._threads:
            thread.start()

    def live(self, rank: int) -> None:
        """Returns when the process of a rank runs."""
        self.runs[rank].wait()
        if self.is_dead:
            raise Ended

    def die(self) -> None:
        self.is_dead = True
        self.resume()
        with suppress(Ended):
            self.members[0].close()
        for key, world in list(self.machine.worlds.items()):
            if self.node.name in key[1]:
                world.hang_up()

    def stop(self, ranks: range) -> None:
        for rank in ranks:
            self.runs[rank].clear()

    def resume(self) -> None:
        for run in self.runs:
            run.set()

    def join(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, rank: int) -> None:
        try:
            self._train(rank)
            if rank == 0:
                self.members[rank].close()
        except Ended:
            pass
        except RankLostError as error:  # the whole node ends
            self.errors.append(str(error))
            self.die()

    def _train(self, rank: int) -> None:
        member = self.members[rank]
        membership: Membership | None = member.first()
        while membership is not None:
            self.live(rank)
            with self.machine.lock:
                self.machine.taken.append((self.node.name, rank, membership))
            world = self.machine.world(membership)
            try:
                membership = self._steps(rank, world)
            except HungUpError:
                world.hang_up()
                member.left(member.generation)
                member.left(member.generation)  # as a watch thread, again
                self.live(rank)
                membership = member.next()

    def _steps(self, rank: int, world: World) -> Membership | None:
        """Trains until the membership changes; None: to the end."""
        member = self.members[rank]
        states = world.exchange("meet", self.states[rank])
        state = self.states[rank] = max((one for one in states if one is not None), default=0)
        while state < STEPS:
            member.holds(state)
            member.begin_step(state + 1)
            self.live(rank)
            if self.fails[rank]:
                self.fails[rank] = False
                raise HungUpError
            world.exchange(("step", state + 1), None)
            time.sleep(0.01)
            self.live(rank)
            state = self.states[rank] = state + 1
            changed = member.end_step(state)
            if changed is not None:
                member.left(changed.generation - 1)  # a watch thread that comes late
                return changed
        return None


def check(machine: Machine) -> None:
    """Memberships grow on each rank, and are the same to all that are in them."""
    by_rank: dict[tuple[str, int], list[int]] = {}
    for name, rank, membership in machine.taken:
        assert name in membership.names
        by_rank.setdefault((name, rank), []).append(membership.generation)
    for generations in by_rank.values():
        assert generations == sorted(set(generations))
    different = {membership.to_json(): membership for *_, membership in machine.taken}.values()
    for one in different:
        for other in different:
            if one is not other and one.generation == other.generation:
                assert not set(one.names) & set(other.names)


def wait_until(holds, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.002)


def finish(machine: Machine, *, spared: set[str]) -> None:
    """All nodes end; those that nothing happened to reach the last step."""
    for node in machine.nodes.values():
        assert node.join(20.0), f"{node.node.name} hangs"
    check(machine)
    for name in spared:
        assert machine.nodes[name].states == [STEPS] * RANKS, machine.nodes[name].errors


def test_without_a_failure_there_is_one_membership(tmp_path):
    with Machine(tmp_path) as machine:
        machine.start("b", "a", "c")
        finish(machine, spared={"a", "b", "c"})
        assert {membership.to_json() for *_, membership in machine.taken} == {machine.taken[0][2].to_json()}
        assert machine.taken[0][2].names == ("a", "b", "c")


def test_a_joiner_comes_between_two_steps(tmp_path):
    with Machine(tmp_path) as machine:
        machine.start("b", "c")
        wait_until(lambda: machine.nodes["b"].states[0])
        machine.start("a")
        finish(machine, spared={"a", "b", "c"})
        assert [m.names for name, rank, m in machine.taken if (name, rank) == ("b", 1)] == [("b", "c"), ("a", "b", "c")]
        assert not any(node.errors for node in machine.nodes.values())


def test_a_node_with_a_rank_that_does_not_hang_up_ends(tmp_path):
    with Machine(tmp_path) as machine:
        machine.start("a", "b")
        wait_until(lambda: machine.nodes["a"].states[0])
        machine.nodes["a"].stop(range(1, 2))
        finish(machine, spared={"b"})
        (said,) = machine.nodes["a"].errors
        assert "node a has to end: of its 2 ranks the local ones 1 have not left generation 1 " in said


def test_a_mark_of_leaving_reaches_all_nodes_once(tmp_path):
    with Machine(tmp_path) as machine:
        machine.start("a", "b")
        wait_until(lambda: machine.nodes["a"].states[0])
        machine.nodes["a"].members[1].mark_leaving()
        finish(machine, spared={"a", "b"})
        seen = [[one.leaving for one in m.nodes] for name, rank, m in machine.taken if (name, rank) == ("b", 0)]
        assert seen == [[False, False], [True, False]]


def test_a_refused_newcomer_ends_alone(tmp_path):
    with Machine(tmp_path) as machine:
        machine.start("a", "b")
        wait_until(lambda: machine.nodes["a"].states[0])
        ours, theirs = Pipe()
        with machine.lock:
            machine._new.append(("c", ours))
        other = Node(name="c", ranks=RANKS, store="file:///tmp", digest="version=2")
        board = FolderBoard(tmp_path / "c")
        board.set("ready/1", "")  # its other rank
        member = Member(other, local_rank=0, board=board, source=PipeSource(theirs), silent_s=SILENT_S)
        with pytest.raises(ConfigError, match="the first has version=1, the second version=2"):
            member.first()
        member.close()
        finish(machine, spared={"a", "b"})
        assert {membership.generation for *_, membership in machine.taken} == {1}


def test_without_its_launcher_a_node_ends_at_the_next_change(tmp_path, caplog):
    ours, theirs = Pipe()
    node = Node(name="a", ranks=1, store="file:///tmp", digest="version=1")
    member = Member(node, local_rank=0, board=FolderBoard(tmp_path), source=PipeSource(theirs), silent_s=SILENT_S)
    pipes = HubPipes(Hub(SILENT_S), SILENT_S, time.monotonic())
    pipes.add("a", ours, time.monotonic())
    thread = threading.Thread(target=member.first)
    thread.start()
    while thread.is_alive():
        pipes.serve(time.monotonic())
    ours.close()
    for step in (1, 2):
        member.begin_step(step)
        assert member.end_step(step) is None
    assert caplog.text.count("training goes on until a node is lost, then it ends") == 1
    with pytest.raises(RankLostError, match="the launcher of this job has ended"):
        member.next()
    member.close()


def test_a_rank_does_not_wait_for_local_rank_0_after_its_end(tmp_path):
    _, theirs = Pipe()
    node, board = Node(name="a", ranks=2, store="file:///tmp", digest="version=1"), FolderBoard(tmp_path)
    first = Member(node, local_rank=0, board=board, source=PipeSource(theirs), silent_s=SILENT_S)
    other = Member(node, local_rank=1, board=board, source=None, silent_s=SILENT_S)
    threading.Timer(0.1, first.close).start()
    with pytest.raises(RankLostError, match="node a has to end: its local rank 0 has ended"):
        other.first()


@pytest.mark.parametrize("seed", range(8))
def test_random_failures_lead_all_that_live_to_the_end(tmp_path, seed):
    play(tmp_path, random.Random(seed))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(8, 200))
def test_many_random_failures_lead_all_that_live_to_the_end(tmp_path, seed):
    play(tmp_path, random.Random(seed))


def play(folder: Path, rng: random.Random) -> None:
    """Up to four events, at random moments, in a job of two to four nodes."""
    names = rng.sample("bcdefg", rng.randint(2, 4))
    touched: set[str] = set()
    with Machine(folder) as machine:
        machine.start(*names)
        for index in range(rng.randint(1, 4)):
            time.sleep(rng.random() * 0.15)
            kind = rng.choice(["die", "die", "stop", "stop a rank", "fail", "join"])
            name = rng.choice([*machine.nodes])
            node = machine.nodes[name]
            if kind == "join":
                machine.start(f"{rng.choice('ahz')}{index}")
            elif kind == "fail":
                node.fails[rng.randrange(RANKS)] = True
            elif kind == "die" and len(machine.nodes) - len(touched) > 1:
                node.die()
                touched.add(name)
            elif kind.startswith("stop"):
                first = rng.randrange(RANKS)
                node.stop(range(RANKS) if kind == "stop" else range(first, first + 1))
                touched.add(name)
                threading.Timer(rng.random() * 3 * SILENT_S, node.resume).start()
        finish(machine, spared=set(machine.nodes) - touched)
