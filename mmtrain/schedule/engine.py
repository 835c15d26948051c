"""The engine: when an action may start, and which actions its end makes ready.

An action may start once all results that it needs have arrived on its rank, and once its rank is free. A result is
available on its own rank at once and on another rank after its transfer; transfers occupy no rank.

`Run` executes given orders: the simulator, the check for deadlocks, the global order of lowering. `Engine.run` makes
orders in the order of time: a `Policy` says what an idle rank starts. Policies are

- `table`: queues, turns and in-flight limits, in unit time (1F1B and what follows from it);
- `library.list_schedule`: rules by cost, within memory limits;
- `recipe.ranks`: the words of a recipe, within limits of what is in flight or of memory; `interleave` is a recipe.

`library.memory` decides what limits admit. `library.controllable_memory` and `passes.separate` have loops of their own
around `Engine.start`. Two kernels repeat the rule for numba, on arrays, and are tested against the loops here:
`recipe.kernel` and `planner.search.kernels.decode`.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from mmtrain.schedule.items import Items


class Policy(ABC):
    """What the ranks start; `Engine.run` calls it."""

    seconds: Sequence[float | None]
    """[item] -> duration of its action; None: there is none."""
    all_decide = False
    """Whether all idle ranks decide whenever something happens; else those where it happens."""
    at_once = False
    """Whether an action without duration ends before the next rank decides; else what ranks start at one time is
    visible to others afterwards."""

    @abstractmethod
    def arrive(self, item: int) -> None:
        """All that an item needs has arrived on its rank."""

    @abstractmethod
    def end(self, item: int) -> None:
        """An action ends; its rank is idle."""

    def turns(self, idle: list[int], now: float) -> Iterable[int]:
        """The ranks in the order in which they decide."""
        return idle

    @abstractmethod
    def choose(self, rank: int, now: float) -> int | None:
        """The item that an idle rank starts now; None: it waits."""

    @abstractmethod
    def start(self, item: int, now: float, end: float) -> None:
        """An action starts."""

    @abstractmethod
    def force(self, now: float) -> int | None:
        """The item that starts now although nothing goes on by the rules; None: nothing remains, or nothing can."""


class Engine:
    """The state of one run: started actions, their ends, and the earliest start of their dependents."""

    def __init__(self, items: Items, message_s: Sequence[float] | None = None) -> None:
        """Args: message_s: [message] -> seconds of its transfer; None: transfers take no time."""
        self.waiting = items.num_needs.copy()
        """[item] -> number of the results it needs whose actions have not started."""
        self.arrival: list[float] = [0.0] * items.num_items
        """[item] -> when all other results it needs have arrived on its rank."""
        self.end: list[float | None] = [None] * items.num_items
        """[item] -> when its action ends; None: not started."""
        self.items, self._dependents = items, items.dependents
        self.message_s = [*([0.0] * items.num_messages if message_s is None else message_s), 0.0]
        """[message]; index -1, the last entry, is `SAME_RANK`."""
        self._events: list[tuple[float, int, int, int]] = []
        """Heap of (time, number, rank, item)."""
        self._count = 0

    def start(self, item: int, end: float) -> list[int]:
        """Starts an action that ends at a given time; returns the items whose needed actions have now all started."""
        if self.end[item] is not None:
            return []  # the result exists already: the first one counts
        self.end[item] = end
        ready = []
        waiting, arrival, message_s = self.waiting, self.arrival, self.message_s
        for dependent, message in self._dependents[item]:
            when = end + message_s[message]
            if when > arrival[dependent]:
                arrival[dependent] = when
            waiting[dependent] -= 1
            if not waiting[dependent]:
                ready.append(dependent)
        return ready

    def run(self, policy: Policy) -> list[int]:
        """The items in the order of their start, until a policy has nothing left to start.

        At each time, what arrives and ends comes first, then the idle ranks decide, the first rank first.
        """
        seconds, rank_of, waiting = policy.seconds, self.items.rank_of, self.waiting
        busy, awake, now = [False] * self.items.num_ranks, set[int](), 0.0
        started: list[int] = []

        def begin(item: int) -> None:
            end = now + seconds[item]  # type: ignore[operator]
            busy[rank_of[item]] = True
            started.append(item)
            policy.start(item, now, end)
            self._post(end, ~rank_of[item], item)
            for ready in self.start(item, end):
                if seconds[ready] is not None:
                    self._post(self.arrival[ready], rank_of[ready], ready)

        for item, duration in enumerate(seconds):
            if duration is not None and not waiting[item]:
                self._post(0.0, rank_of[item], item)
        while True:
            while self._events and self._events[0][0] <= now:
                _, _, rank, item = heapq.heappop(self._events)
                if rank < 0:
                    rank = ~rank
                    busy[rank] = False
                    policy.end(item)
                elif item >= 0:
                    policy.arrive(item)
                awake.add(rank)
            idle = [rank for rank in (range(len(busy)) if policy.all_decide else sorted(awake)) if not busy[rank]]
            awake.clear()
            for rank in policy.turns(idle, now):
                chosen = policy.choose(rank, now)
                if chosen is not None:
                    begin(chosen)
                    if policy.at_once and self._events[0][0] <= now:
                        awake.update(idle)
                        break
            if not self._events:
                chosen = policy.force(now)
                if chosen is None:
                    return started
                begin(chosen)
            now = self._events[0][0]

    def wake(self, rank: int, when: float) -> None:
        """Lets a rank decide at a time, if it is idle then."""
        self._post(when, rank, -1)

    def _post(self, when: float, rank: int, item: int) -> None:
        """Args: rank: ~rank for the end of an action. item: -1: nothing arrives."""
        self._count += 1
        heapq.heappush(self._events, (when, self._count, rank, item))


class Run:
    """The execution of given orders, until all have ended or none can proceed."""

    def __init__(
        self,
        engine: Engine,
        orders: Sequence[Sequence[int]],
        seconds: Sequence[Sequence[float]] | None = None,
        braids: Sequence[dict[int, tuple[int, ...]]] = (),
    ) -> None:
        """Runs the orders.

        Args:
            orders: [rank][step] -> item.
            seconds: [rank][step] -> duration; None: 0.
            braids: [rank] step -> all items of a braid; empty if there is none.
        """
        self.engine, self.orders, self.braids = engine, orders, braids
        self.seconds = seconds or [[0.0] * len(order) for order in orders]
        self.starts: list[list[float]] = [[] for _ in orders]
        """The start of each entry, [rank][step]."""
        self.ends: list[list[float]] = [[] for _ in orders]
        """The end of each entry, [rank][step]."""
        self.ranks: list[int] = []
        """The rank of each step that ran, in topological order."""
        while sum(map(self._advance, range(len(orders)))):
            pass
        self.complete = len(self.ranks) == sum(map(len, orders))

    def _advance(self, rank: int) -> int:
        """Runs a rank's order until it waits for another rank; returns the number of steps that ran."""
        order, seconds, starts, ends = self.orders[rank], self.seconds[rank], self.starts[rank], self.ends[rank]
        braids = self.braids[rank] if self.braids else {}
        waiting, arrival, start_item = self.engine.waiting, self.engine.arrival, self.engine.start
        first = step = len(starts)
        free = ends[-1] if ends else 0.0
        while step < len(order):
            item = order[step]
            together = braids.get(step, (item,)) if braids else None
            if waiting[item] if together is None else any(waiting[i] for i in together):
                break
            ready = arrival[item] if together is None else max(arrival[i] for i in together)
            start = ready if ready > free else free
            free = start + seconds[step]
            starts.append(start)
            ends.append(free)
            for one in together or (item,):
                start_item(one, free)
            step += 1
        self.ranks += [rank] * (step - first)
        return step - first
