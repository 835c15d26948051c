"""What idle ranks start by a recipe: a policy of the engine.

Ranks that are idle at one time decide from the same state: what one of them starts is visible to the others after its
end (FlexPipe's local buffers, section 5.1). `kernel` has the same rules for numba.
"""

from bisect import insort
from collections.abc import Iterator, Sequence

from mmtrain.errors import RecipeError, shown
from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.engine import Policy
from mmtrain.schedule.plan import show_steps
from mmtrain.schedule.recipe.bound_recipe import Bound
from mmtrain.schedule.recipe.language import Moment, Traversal, traversal
from mmtrain.schedule.recipe.limits import call

F, B, W = 0, 1, 2
"""Slots of items; B stands for B and I. Registered instructions follow."""


class Ranks(Policy):
    """All ranks in one run of a recipe."""

    def __init__(self, bound: Bound, *, at_once: bool = False) -> None:
        """Args: at_once: whether an action without duration ends before the next rank decides."""
        recipe, items, ranks = bound.recipe, bound.items, range(bound.graph.num_ranks)
        self.all_decide, self.at_once = bool(recipe.check or recipe.step), at_once  # a function may look at the time
        self.seconds = bound.seconds()
        self._bound, self._recipe, self._items, self._age = bound, recipe, items, bound.shared.age
        self._memories = bound.memories()
        self._first = [rule.first for rule in bound.rules]
        """[rank] -> the kind that it prefers."""
        rules = list(zip(bound.rules, bound.shared.stages, strict=True))
        self._sides = [
            [_Side(traversal(rule.forward), rule.units[F], stages) for rule, stages in rules],
            [_Side(traversal(rule.backward), rule.units[B], stages) for rule, stages in rules],
        ]
        """The traversal of each slot and rank, [slot][rank]."""
        self._last: list[int | None] = [None for _ in ranks]
        """[rank] -> slot of its last F or B."""
        self._in_a_row = [0 for _ in ranks]
        """[rank] -> how many of that slot have run in a row."""
        self._weights: list[list[int]] = [[] for _ in ranks]
        """[rank] -> its ready Ws, in the order in which they became ready."""
        self._instructions: list[list[int]] = [[] for _ in ranks]
        """[rank] -> its ready registered instructions."""
        self._started: list[list[Action]] = [[] for _ in ranks]
        """[rank], if the recipe has functions."""
        self._sets: list[frozenset[Action]] = [frozenset() for _ in ranks]
        """[rank] -> what it has started."""
        self._now = 0.0
        if any(side.wait for sides in self._sides for side in sides):
            for item in sorted(range(2 * items.num_nodes), key=self._age.__getitem__):
                if self.seconds[item] is not None:
                    self._side(item).add(items.stage[item % items.num_nodes], item)

    # -------------------------------------------------------------------------------------------- events

    def arrive(self, item: int) -> None:
        slot, node = divmod(item, self._items.num_nodes)
        if slot < W:
            insort(self._side(item).queue(self._items.stage[node]), item, key=self._age.__getitem__)
        elif slot == W:
            self._weights[self._items.rank[node]].append(item)
        else:
            insort(self._instructions[self._items.rank_of[item]], item)

    def start(self, item: int, now: float, end: float) -> None:
        slot, node = divmod(item, self._items.num_nodes)
        rank = self._items.rank_of[item]
        if self.all_decide:
            self._started[rank].append(self._bound.action(item))
        if slot >= W:
            (self._weights if slot == W else self._instructions)[rank].remove(item)
            return
        self._side(item).start(self._items.stage[node], item)
        self._in_a_row[rank] = self._in_a_row[rank] + 1 if self._last[rank] == slot else 1
        self._last[rank] = slot
        if slot == F:
            for memory in self._memories:
                memory.start_forward(node)

    def end(self, item: int) -> None:
        slot, node = divmod(item, self._items.num_nodes)
        if slot in (B, W):
            for memory in self._memories:
                if slot == B and self._bound.split[node]:
                    memory.end_input(node)
                else:
                    memory.end_backward(node, split=slot == W)

    # ------------------------------------------------------------------------------------------- choices

    def turns(self, idle: list[int], now: float) -> list[int]:
        self._now = now
        return idle

    def choose(self, rank: int, now: float) -> int | None:
        return self._choose(rank, promise=True)

    def force(self, now: float) -> int | None:
        """What fits now, where nothing keeps the promise (a stage without a backward behind one that has one)."""
        chosen = (self._choose(rank, promise=False) for rank in range(len(self._first)))
        return next((item for item in chosen if item is not None), None)

    def _choose(self, rank: int, *, promise: bool) -> int | None:
        """What an idle rank starts now. Args: promise: whether a way to the end must remain for all components."""
        if self._recipe.step:
            return self._by_step(rank, promise)
        if self._instructions[rank]:
            return self._instructions[rank][0]
        slot, first = self._last[rank], self._first[rank]
        if slot is None or self._in_a_row[rank] >= self._sides[slot][rank].unit:
            slot = B if first == "backward" or (first == "alternate" and slot == F) else F
        item = self._head(slot, rank, promise)
        if item is None:
            item = self._head(1 - slot, rank, promise)
        return self._oldest(self._weights[rank], promise) if item is None else item

    def _head(self, slot: int, rank: int, promise: bool) -> int | None:
        """The F or B that the rank's traversal of stages selects."""
        side = self._sides[slot][rank]
        if side.wait:
            return self._head_of_group(side, promise)
        for queue in side.turns():
            if queue and (item := self._oldest(queue, promise)) is not None:
                return item
        return None

    def _head_of_group(self, side: "_Side", promise: bool) -> int | None:
        """The F or B of the stage whose turn it is, the first that has not run all of the oldest group of `every`
        microbatches; None: it waits."""

        def group(item: int) -> int:
            return self._bound.shared.microbatch[item % self._items.num_nodes] // side.every

        turns = [(group(remaining[0]), position) for position, remaining in enumerate(side.remaining) if remaining]
        if not turns:
            return None
        oldest, position = min(turns)
        item = self._oldest(side.ready[position], promise)
        return item if item is not None and group(item) == oldest else None

    def _oldest(self, queue: Sequence[int], promise: bool) -> int | None:
        """The first item of a queue that may start now."""
        for item in queue:
            if self._admits(item, promise) and (self._recipe.check is None or self._checked(item)):
                return item
        return None

    def _admits(self, item: int, promise: bool) -> bool:
        """Whether the limits admit an item."""
        if item < self._items.num_nodes:
            for memory in self._memories:
                if not (memory.fits(item) if promise else memory.fits_now(item)):
                    return False
        return True

    def _side(self, item: int) -> "_Side":
        """The side that an F or B belongs to."""
        return self._sides[item >= self._items.num_nodes][self._items.rank_of[item]]

    # ----------------------------------------------------------------------------------------- functions

    def _checked(self, item: int) -> bool:
        """Whether the recipe's check admits an item."""
        assert self._recipe.check is not None
        action = self._bound.action(item)
        answer = call("Recipe.check", self._recipe.check, self._moment(self._items.rank_of[item]), action)
        if not isinstance(answer, bool):
            raise RecipeError(f"Recipe.check returned {shown(answer)} for {action}; return True or False")
        return answer

    def _by_step(self, rank: int, promise: bool) -> int | None:
        """What the recipe's step function starts."""
        assert self._recipe.step is not None
        ready = {self._bound.action(item): item for item in self._ready(rank) if self._admits(item, promise)}
        if not ready:
            return None
        answer = call("Recipe.step", self._recipe.step, self._moment(rank, tuple(ready)))
        if answer is not None and (not isinstance(answer, Action) or answer not in ready):
            raise RecipeError(
                f"Recipe.step returned {shown(answer)} for rank {rank}, which could start "
                f"{', '.join(map(str, ready))}; return one of moment.ready, or None"
            )
        return None if answer is None else ready[answer]

    def _ready(self, rank: int) -> list[int]:
        """F, then B or I, the oldest first, then W in the order of their I, then registered instructions."""
        queued = [item for sides in self._sides for queue in sides[rank].ready for item in queue]
        return sorted(queued, key=self._age.__getitem__) + self._weights[rank] + self._instructions[rank]

    def _moment(self, rank: int, ready: tuple[Action, ...] = ()) -> Moment:
        """The moment that a function of the recipe sees."""
        started = self._started[rank]
        if len(self._sets[rank]) < len(started):
            self._sets[rank] = frozenset(started)
        return Moment(
            rank=rank,
            num_ranks=len(self._started),
            now=self._now,
            ready=ready,
            started=self._sets[rank],
            last=started[-1] if started else None,
        )

    # -------------------------------------------------------------------------------------------- errors

    def stuck(self, orders: Sequence[Sequence[Action]]) -> RecipeError:
        """The error of a run that has not started all actions. Args: orders: what it has started."""
        reasons = [self._reason(rank, slot) for rank in range(len(orders)) for slot in (F, B)]
        reasons += self._blocked(orders)
        steps = {rank: len(order) for rank, order in enumerate(orders)}
        started, count = sum(map(len, orders)), self._bound.num_actions
        return RecipeError(
            f"the recipe gets stuck after {started} of {count} actions: {max(reasons)[1]}\n{show_steps(orders, steps)}"
        )

    def _blocked(self, orders: Sequence[Sequence[Action]]) -> Iterator[tuple[int, str]]:
        """What instructions that have not started wait for, and how likely one is the cause of all."""
        graph, started = self._bound.graph, {action for order in orders for action in order}
        for key, given in graph.instruction.items():
            for kind, stage, work in given.after if graph.action(*key) not in started else ():
                whole = kind is Kind.W and self.seconds[self._items.item(kind, stage, work)] is None
                missing = graph.action(kind, stage, work)
                if whole or missing not in started:
                    why = "does not run where backwards are whole; wait for B in place of W" if whole else "waits too"
                    yield 3 * whole, f"the instruction {graph.action(*key)} waits for {missing}, which {why}"

    def _reason(self, rank: int, slot: int) -> tuple[int, str]:
        """What holds up a rank that has something of a slot ready, and how likely it is the cause of all."""
        side, recipe = self._sides[slot][rank], self._recipe
        if not any(side.ready):
            return 0, "nothing is ready"
        item = min(item for queue in side.ready for item in queue)
        waits = side.wait and not recipe.step
        reasons = []
        if not self._admits(item, promise=False):
            limits = zip(self._bound.limits.levels, self._memories, strict=True)
            pool = next(level.pool[item] for level, memory in limits if not memory.fits_now(item))
            reasons.append(f"{self._bound.limits.pools[pool].where} has no room; raise it")
        if waits:
            position = side.position
            behind = [
                s
                for s in self._bound.shared.stages[rank]
                if side.remaining[position[s]] and not side.ready[position[s]]
            ]
            on = f" for stage {behind[0]}" if behind else ""
            kind = "backward" if slot else "forward"
            reasons.append(f"its {kind} traversal waits{on}; leave out wait, or change every")
        if recipe.step:
            reasons.append("Recipe.step returns None")
        elif recipe.check:
            reasons.append("Recipe.check admits nothing")
        action = self._bound.action(item)
        return 2 * waits + bool(reasons), f"rank {rank} could start {action}, but " + ", and ".join(reasons)


class _Side:
    """The forwards or the backwards of one rank: what is ready, and which stage has its turn."""

    def __init__(self, given: Traversal, unit: int, stages: Sequence[int]) -> None:
        """Args: unit: how many run in a row before the rank chooses the slot anew. stages: front layers first."""
        self.every, self.wait, self.unit = given.every, given.wait, unit
        together = given.order == "oldest"
        visited = stages[::-1] if given.order == "depth" else stages
        self.position = {stage: 0 if together else position for position, stage in enumerate(visited)}
        """Stage -> position in the traversal; all at one where the oldest is first, whatever its stage."""
        self.ready: list[list[int]] = [[] for _ in set(self.position.values())]
        """[position] -> ready items, the oldest first."""
        self.remaining: list[list[int]] = [[] for _ in self.ready]
        """[position] -> items that have not started, the oldest first, where the traversal waits for them."""
        self._cursor = self._served = 0

    def add(self, stage: int, item: int) -> None:
        """An item that remains, the oldest first."""
        if self.wait:
            self.remaining[self.position[stage]].append(item)

    def queue(self, stage: int) -> list[int]:
        """The ready items of a stage, or those of all stages if they are at one position."""
        return self.ready[self.position[stage]]

    def turns(self) -> list[list[int]]:
        """The queues in the order of the traversal, from the stage whose turn it is."""
        if not self.every:
            return self.ready
        begin = self._cursor + (self._served >= self.every)
        return self.ready[begin:] + self.ready[:begin]

    def start(self, stage: int, item: int) -> None:
        """An item starts: it leaves its queue, and the traversal moves on."""
        position = self.position[stage]
        self.ready[position].remove(item)
        if self.wait:
            self.remaining[position].remove(item)
        if self.every:
            same = position == self._cursor and self._served < self.every
            self._served = self._served + 1 if same else 1
            self._cursor = position
