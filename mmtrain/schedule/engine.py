"""The engine: when an action may start, and what its end gives to others.

An action may start once all results that it needs have been made and have arrived on its rank, and once its rank is
free. A result reaches its own rank at once and another rank after its transfer; transfers occupy no rank. That is
written here and nowhere else. Who chooses what starts next is a *policy*:

- `follow`: given orders (the simulator, the check for deadlocks, the global order of lowering);
- `library.one_f_one_b`: a table of queues, turns and in-flight limits, in unit time;
- `library.greedy`: the earliest start, within memory limits;
- `library.list_schedule`: rules in the order of time, within memory limits;
- `library.controllable_memory`: fixed sequences, with weight gradients where a rank would idle.

As soon as an action is started its end is known, and with it when its dependents can start. Policies that decide in the
order of time look at `arrival` when they get there, or keep a heap of what `start` returns.
"""

from collections.abc import Sequence

from mmtrain.schedule.items import Items


class Engine:
    """The state of one run: what has started, when it ends, and when what needs it may start."""

    def __init__(self, items: Items, message_s: Sequence[float] | None = None) -> None:
        """Nothing started. Args: message_s: [message] -> seconds of its transfer; None: transfers take no time."""
        self.waiting = items.num_needs.copy()
        """[item] -> how many of the results that it needs have not been started."""
        self.arrival: list[float] = [0.0] * items.num_items
        """[item] -> when those that have been started will all have arrived on its rank."""
        self.end: list[float | None] = [None] * items.num_items
        """[item] -> when its action ends; None: not started."""
        self._dependents = items.dependents
        # The last entry is that of `SAME_RANK`, which is -1.
        self._message_s = [*([0.0] * items.num_messages if message_s is None else message_s), 0.0]

    def start(self, item: int, end: float) -> list[int]:
        """Starts an action that ends at a given time; the items that wait for nothing more to be started."""
        if self.end[item] is not None:
            return []  # made twice: the first result counts
        self.end[item] = end
        ready = []
        waiting, arrival, message_s = self.waiting, self.arrival, self._message_s
        for dependent, message in self._dependents[item]:
            when = end + message_s[message]
            if when > arrival[dependent]:
                arrival[dependent] = when
            left = waiting[dependent] = waiting[dependent] - 1
            if not left:
                ready.append(dependent)
        return ready


class Run:
    """How ranks ran given orders, until all had ended or none could go on."""

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
            seconds: [rank][step] -> how long its action takes; None: no time.
            braids: [rank] step -> all items of an entry that has several; without any, empty.
        """
        self.engine, self.orders, self.braids = engine, orders, braids
        self.seconds = seconds or [[0.0] * len(order) for order in orders]
        self.starts: list[list[float]] = [[] for _ in orders]
        """[rank][step]"""
        self.ends: list[list[float]] = [[] for _ in orders]
        """[rank][step]"""
        self.ranks: list[int] = []
        """The ranks whose next step ran, in an order in which each step comes after what it needs."""
        while sum(map(self._advance, range(len(orders)))):
            pass
        self.complete = len(self.ranks) == sum(map(len, orders))

    def _advance(self, rank: int) -> int:
        """Runs a rank's order until it has to wait for another rank; the number of steps that ran."""
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
