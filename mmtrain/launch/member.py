"""A rank's part in the membership of its job: which nodes there are, asked anew in each step. Pure.

Local rank 0 of a node asks for all of its ranks. It writes each membership that its node adopts into a log on the
node's board, and after each unchanged round the step. All ranks of the node read the log in order, so all adopt the
same memberships.

Why the rounds of all nodes match. A node has at most one ask outstanding, and takes its answer before it asks again: a
rank that fails in a step settles the ask of this step first. So a node that fails in a step which others have not
begun waits with them for this round, and its next ask, which is anew, meets their next one: theirs of the next step,
or theirs after they failed, too. Either makes a new generation for all of the round. A node that dies before the
answer is not in the round. One that dies after it is in a generation that cannot form, so the others ask anew. A node
that was stopped is left out of rounds while it is silent, but its ask stays; when it goes on, the ask is part of the
next round, where its old generation makes a new one. An answer that it got before it was stopped leads it to a
generation that others have left: it fails there, and asks anew, while nobody waits for it. A newcomer's first ask is
the same to all: it has no generation.

A node asks anew only when each of its ranks has hung up its connections of the old generation, so that its peers
cannot wait for it. If one has not in `silent_s`, it is stopped or hangs, and the node has to end.
"""

import json
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from mmtrain.errors import ConfigError, RankLostError, shown
from mmtrain.launch.board import Board
from mmtrain.launch.membership import (
    Membership,
    Node,
    check_admitted,
    members_digest,
    next_membership,
    read_object,
)

logger = logging.getLogger("mmtrain")

T = TypeVar("T")

_PAUSE_S = 0.0005, 0.02
"""The first and the longest pause between two reads of the board, seconds."""
_AGAIN_S = 0.1
"""The pause between two requests to a service that does not answer, seconds."""


def beat_s(silent_s: float) -> float:
    """Seconds between two signs of life of a node: at least four in its patience, and one a second for services that
    have another patience."""
    return min(silent_s / 4, 1.0)


class RoundSource(Protocol):
    """A service that nodes ask in rounds."""

    def ask(self, node: Node) -> tuple[Node, ...]:
        """What all nodes of this round said, this one included: the same to each. Blocks until every live node asked.

        Raises: RankLostError: the service is gone, or the source was closed. ConfigError: the answer is malformed.
        """

    def beat(self, name: str) -> None:
        """Says that a node lives. Raises: RankLostError: the service is gone."""

    def close(self) -> None:
        """Ends what this object holds, also a call of `ask` in another thread."""


class Member:
    """One rank of a node. All ranks of a node call the same methods in the same order, apart from failures.

    `first`, then for each step `begin_step` and `end_step`; `next` after a failure. Of these, one thread calls one at
    a time; `left` and `mark_leaving` may be called from anywhere.
    """

    def __init__(
        self, node: Node, *, local_rank: int, board: Board, source: RoundSource | None, silent_s: float
    ) -> None:
        """Args:
        node: the facts, the same on all of its ranks.
        board: of this start of the node alone.
        source: on local rank 0, and only there.
        silent_s: how long ranks of the node wait for each other before they ask anew.
        """
        assert (source is not None) == (local_rank == 0), "local rank 0 asks for its node"
        self.name, self.ranks, self.local_rank = node.name, node.ranks, local_rank
        self.membership: Membership | None = None
        """The membership that this rank adopted last."""
        self._board = board
        self._speaker = None if source is None else _Speaker(node, board, source, silent_s)
        self._index = 0
        self._hung_up: set[int] = set()
        self._hang_up_lock = threading.Lock()
        self._leaving, self._announced_leaving = False, False

    @property
    def generation(self) -> int:
        """The generation of the membership that this rank adopted last; 0: none."""
        return 0 if self.membership is None else self.membership.generation

    def first(self) -> Membership:
        """Joins the job; blocks until a round is complete.

        Raises: ConfigError: this node does not fit to the others. RankLostError: the service, or local rank 0, is gone.
        """
        self._board.set(_ready_key(self.local_rank), "")
        if self._speaker is not None:
            self._speaker.join()
        return self._adopted(self._wait_for(self._next_entry))

    def begin_step(self, step: int) -> None:
        """Asks for the membership after a step, in a thread. Args: step: its number."""
        self._announce_leaving()
        if self._speaker is not None:
            self._speaker.ask_during(step)

    def end_step(self, step: int) -> Membership | None:
        """The membership to adopt after a step; None: nothing has changed. Blocks until every live node has begun
        the step, or has failed.

        Raises: ConfigError: nodes do not fit, or the answer is malformed. RankLostError: local rank 0 has ended.
        """
        self._announce_leaving()
        if self._speaker is not None:
            self._speaker.settle()
        answer = self._wait_for(partial(self._answer_after, step))
        return None if answer.membership is None else self._adopted(answer.membership)

    def next(self) -> Membership:
        """The membership to adopt now, since this rank cannot go on in the present one, which it has left.

        Raises:
            RankLostError: other ranks of this node have not hung up, or local rank 0 has ended, so that the node has
                to end; or the service is gone.
            ConfigError: nodes do not fit, or the answer is malformed.
        """
        while True:
            self._announce_leaving()
            self.left()
            if self._speaker is not None:
                self._speaker.settle()
                if not self._board.check([_entry_key(self._index)]):
                    self._speaker.ask_anew(self.generation)
            self._adopt(self._wait_for(self._next_entry))
            if not self._is_over():
                assert self.membership is not None
                return self.membership

    def left(self, generation: int | None = None) -> None:
        """Says that this rank has hung up all connections of a generation: nobody can wait for it there any more.

        Args: generation: None: the one that this rank adopted last.
        """
        number = self.generation if generation is None else generation
        with self._hang_up_lock:
            if number in self._hung_up:
                return
            self._hung_up.add(number)
        self._board.set(_left_key(number, self.local_rank), "")
        self._board.set(_over_key(number), "")

    def mark_leaving(self) -> None:
        """Marks the node as one that was told to end; other nodes see it with the next step. For signal handlers."""
        self._leaving = True

    def holds(self, step: int | None) -> None:
        """Says what state this node holds. Args: step: number of its steps; None: none."""
        if self._speaker is not None:
            self._speaker.step = step

    def close(self) -> None:
        """Ends this rank's part; from that of local rank 0 on nobody waits for this node any more."""
        if self._speaker is not None:
            self._speaker.close()

    def _announce_leaving(self) -> None:
        if self._leaving and not self._announced_leaving:
            self._announced_leaving = True
            self._board.set(_LEAVING, "")

    def _adopted(self, membership: Membership) -> Membership:
        """The membership, or a later one if another rank of this node has left it already."""
        self._adopt(membership)
        return self.next() if self._is_over() else membership

    def _adopt(self, membership: Membership) -> None:
        self.membership = membership
        self._index += 1

    def _is_over(self) -> bool:
        return self._board.check([_over_key(self.generation)])

    def _wait_for(self, look: Callable[[], T | None]) -> T:
        """What a look at the board finds, once it finds something: local rank 0 writes it.

        Raises: RankLostError: local rank 0 has ended.
        """

        def checked() -> T | None:
            if (found := look()) is None and self._board.check([_ENDED]) and (found := look()) is None:
                raise RankLostError(f"node {self.name} has to end: its local rank 0 has ended, which asks for it")
            return found

        return _wait_for(checked)

    def _next_entry(self) -> Membership | None:
        """The next one of the log; None: it is not there yet."""
        key = _entry_key(self._index)
        return _read_entry(self._board.get(key))[1] if self._board.check([key]) else None

    def _answer_after(self, step: int) -> "_Answer | None":
        """What the board says about a step; None: nothing yet."""
        key = _entry_key(self._index)
        if self._board.check([key]):  # before the look at unchanged rounds, which are written earlier
            after, membership = _read_entry(self._board.get(key))
            return _Answer(membership if after is None or after <= step else None)
        index, answered = map(int, self._board.get(_UNCHANGED).split())
        return _Answer(None) if index == self._index and answered >= step else None


@dataclass(frozen=True, slots=True)
class _Answer:
    """The answer to a round."""

    membership: Membership | None
    """The next one; None: the present one stays."""


class _Speaker:
    """What local rank 0 does for its node: it asks, beats, and writes the board."""

    def __init__(self, node: Node, board: Board, source: RoundSource, silent_s: float) -> None:
        self.step: int | None = node.step
        self._node, self._board, self._source, self._silent_s = node, board, source, silent_s
        self._length = 0
        """The length of the log."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._closed, self._settles, self._has_warned = threading.Event(), threading.Event(), False

    def join(self) -> None:
        """Asks for the first membership, once all ranks of this node are ready: others would wait for them. Nor does
        it beat before: a lighthouse waits for nodes that beat."""
        self._board.set(_UNCHANGED, f"{self._length} -1")
        ready = [_ready_key(rank) for rank in range(self._node.ranks)]
        _wait_for(lambda: self._board.check(ready) or None)  # one that dies ends the node
        threading.Thread(target=self._beat, name="beats", daemon=True).start()
        self._ask(None)

    def ask_during(self, step: int) -> None:
        """Asks in a thread; `settle` waits for its end."""
        assert self._thread is None, "an ask is settled before the next one"
        self._settles.clear()
        thread = threading.Thread(target=self._ask_quietly, args=(step,), name="ask", daemon=True)
        thread.start()
        self._thread = thread

    def settle(self) -> None:
        """Waits until the board has the answer of the ask in a thread, if there is one. Raises: its error."""
        if self._thread is not None:
            self._settles.set()
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def ask_anew(self, generation: int) -> None:
        """Asks for another membership, once all ranks of this node have left a generation."""
        self._wait_until_left(generation)
        self._ask(None, anew=True)

    def close(self) -> None:
        self._closed.set()
        self._settles.set()
        self._source.close()
        if self._thread is not None:
            self._thread.join()
        with suppress(Exception):  # the store, which is torchrun's, may have ended before
            self._board.set(_ENDED, "")

    def _ask_quietly(self, step: int) -> None:
        """Asks, again and again until the step ends: a node that has reached the service in this step waits for this
        one. Without the service, the present membership stays."""
        try:
            while True:
                try:
                    return self._ask(step)
                except RankLostError as error:
                    if not self._has_warned and not self._closed.is_set():
                        logger.warning("%s; training goes on until a node is lost, then it ends", error)
                    self._has_warned = True
                    if self._settles.wait(_AGAIN_S):
                        return self._board.set(_UNCHANGED, f"{self._length} {step}")
        except BaseException as error:  # raised by `settle`
            self._error = error

    def _ask(self, step: int | None, *, anew: bool = False) -> None:
        """Asks once, and writes the answer on the board. Args: step: after which a change is adopted; None: now."""
        leaving = self._board.check([_LEAVING])
        node = replace(self._node, step=self.step, leaving=leaving, anew=anew)
        asked = self._source.ask(node)
        check_admitted(node.name, asked)
        membership = next_membership(asked)
        if membership.generation == node.generation:
            self._board.set(_UNCHANGED, f"{self._length} {step}")
            return
        self._node = replace(self._node, generation=membership.generation, members=members_digest(membership.nodes))
        self._board.set(_entry_key(self._length), _entry(step, membership))
        self._length += 1

    def _wait_until_left(self, generation: int) -> None:
        """Raises: RankLostError: naming the ranks that have not left."""
        deadline = time.monotonic() + self._silent_s
        pause_s, longest_s = _PAUSE_S
        absent = list(range(self._node.ranks))
        while absent := [rank for rank in absent if not self._board.check([_left_key(generation, rank)])]:
            if time.monotonic() >= deadline:
                raise RankLostError(
                    f"node {self._node.name} has to end: of its {self._node.ranks} ranks the local ones "
                    f"{', '.join(map(str, absent))} have not left generation {generation} within elastic.silent_s = "
                    f"{self._silent_s:g}; look whether their processes are stopped or hang"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def _beat(self) -> None:
        while True:
            try:
                self._source.beat(self._node.name)
            except RankLostError:  # which the next ask finds as well
                logger.debug("no beat", exc_info=True)
            if self._closed.wait(beat_s(self._silent_s)):
                return


_LEAVING, _ENDED = "leaving", "ended"
_UNCHANGED = "unchanged"
"""Length of the log, and the newest step whose round changed nothing."""


def _entry_key(index: int) -> str:
    return f"m/{index}"


def _ready_key(local_rank: int) -> str:
    return f"ready/{local_rank}"


def _left_key(generation: int, local_rank: int) -> str:
    return f"left/{generation}/{local_rank}"


def _over_key(generation: int) -> str:
    return f"over/{generation}"


def _entry(step: int | None, membership: Membership) -> str:
    return json.dumps({"after": step, "membership": membership.to_json()})


def _read_entry(text: bytes) -> tuple[int | None, Membership]:
    """The step after which an entry of the log is adopted (None: at once), and the membership. Raises: ConfigError."""
    where = "log of this node's memberships"
    values = read_object(text, where, {"after", "membership"})
    after, membership = values["after"], values["membership"]
    if not (after is None or type(after) is int) or not isinstance(membership, str):
        raise ConfigError(f"{where}: {shown(values)}; `after` is null or a whole number, `membership` a text")
    return after, Membership.from_json(membership, where)


def _wait_for(look: Callable[[], T | None]) -> T:
    """What a look finds, once it finds something."""
    pause_s, longest_s = _PAUSE_S
    while (found := look()) is None:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
    return found
