"""The engine: when an action may start, and which actions its end makes ready.

An action may start once all results that it needs have arrived on its rank, and once its rank is free. A result is
available on its own rank at once and on another rank after its transfer; transfers occupy no rank. This rule is
implemented here only. The code that chooses the next action is a *policy*:

- `follow`: given orders (the simulator, the check for deadlocks, the global order of lowering);
- `library.one_f_one_b`: a table of queues, turns and in-flight limits, in unit time;
- `library.greedy`: the earliest start, within memory limits;
- `library.list_schedule`: rules in the order of time, within memory limits;
- `library.controllable_memory`: fixed sequences, with weight gradients where a rank would idle.

The end of an action, and so the earliest start of its dependents, is known when it starts. Policies that decide in the
order of time read `arrival`, or keep a heap of the items that `start` returns.
"""

from collections.abc import Sequence

from mmtrain.schedule.items import Items


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
        self._dependents = items.dependents
        # Index -1, the last entry, is `SAME_RANK`.
        self._message_s = [*([0.0] * items.num_messages if message_s is None else message_s), 0.0]

    def start(self, item: int, end: float) -> list[int]:
        """Starts an action that ends at a given time; returns the items whose needed actions have now all started."""
        if self.end[item] is not None:
            return []  # the result exists already: the first one counts
        self.end[item] = end
        ready = []
        waiting, arrival, message_s = self.waiting, self.arrival, self._message_s
        for dependent, message in self._dependents[item]:
            when = end + message_s[message]
            if when > arrival[dependent]:
                arrival[dependent] = when
            waiting[dependent] -= 1
            if not waiting[dependent]:
                ready.append(dependent)
        return ready


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
        """[rank][step]"""
        self.ends: list[list[float]] = [[] for _ in orders]
        """[rank][step]"""
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
