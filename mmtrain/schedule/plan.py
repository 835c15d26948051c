"""A plan: one order of compute actions for each rank, its check, and its text form."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from mmtrain.errors import PlanError
from mmtrain.schedule.action import BRAID, COMPUTE, NOT_COMPUTE, Action, Braid, Kind
from mmtrain.schedule.engine import Engine, Run
from mmtrain.schedule.graph import WorkGraph
from mmtrain.schedule.problem import EntryCost, Option, PlanningProblem

_REACH = 5
"""Actions that an error shows to each side of a step."""


@dataclass(frozen=True)
class Plan:
    """The orders of all ranks, and the memory option chosen for each (stage, work)."""

    graph: WorkGraph
    orders: tuple[tuple[Action, ...], ...]
    """One order of compute actions a rank."""
    options: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """The index of each (stage, work) into its option list; what is absent has option 0."""

    def __str__(self) -> str:
        """One line a rank: its actions separated by spaces; `parse` reads it back."""
        return orders_text(self.orders)

    @classmethod
    def parse(cls, graph: WorkGraph, text: str, options: Mapping[tuple[int, int], int] | None = None) -> "Plan":
        """The plan of a text that has one line a rank. Raises: PlanError: as `parse_orders`."""
        return cls(graph, parse_orders(text, graph.num_ranks), options or {})

    @cached_property
    def works(self) -> tuple[tuple[int, ...], ...]:
        """[rank][step] -> the work of that action."""
        return tuple(tuple(map(self.graph.work_of, order)) for order in self.orders)

    @cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        """The (stage, work) whose backward is split into I and W."""
        return frozenset(
            (action.stage, work) for parts in self.parts for _, action, work in parts if action.kind is Kind.I
        )

    def option(self, problem: PlanningProblem, stage: int, work: int) -> Option:
        """The chosen option of (stage, work)."""
        return problem.options(stage, work)[self.options.get((stage, work), 0)]

    @cached_property
    def parts(self) -> tuple[tuple[tuple[int, Action, int], ...], ...]:
        """[rank] -> (step, action, work) of all actions, those of a braid one by one."""
        return tuple(
            tuple(
                (step, part, self.graph.work_of(part) if action.kind is BRAID else work)
                for step, (action, work) in enumerate(zip(order, works, strict=True))
                for part in action.parts
            )
            for order, works in zip(self.orders, self.works, strict=True)
        )

    def run(self, seconds: Sequence[Sequence[float]] | None = None, message_s: Sequence[float] | None = None) -> Run:
        """The execution of the orders.

        Args:
            seconds: [rank][step] -> duration; None: 0.
            message_s: [message] -> seconds of its transfer; None: 0.
        Raises: PlanError: deadlock; with rank, step, the waiting action and the missing one, and the orders.
        """
        items = self.graph.items
        numbers = [items.of_order(order, works) for order, works in zip(self.orders, self.works, strict=True)]
        braids: list[dict[int, tuple[int, ...]]] = []
        if any(action.kind is BRAID for order in self.orders for action in order):
            for parts in self.parts:
                steps: dict[int, tuple[int, ...]] = {}
                for step, action, work in parts:
                    steps[step] = (*steps.get(step, ()), items.item(action.kind, action.stage, work))
                braids.append(steps)
        run = Run(Engine(items, message_s), numbers, seconds, braids)
        if not run.complete:
            self._raise_deadlock(run)
        return run

    def _raise_deadlock(self, run: Run) -> None:
        steps = list(map(len, run.starts))
        rank = next(r for r, order in enumerate(self.orders) if steps[r] < len(order))
        items, end = self.graph.items, run.engine.end
        waiting = [(a, w) for step, a, w in self.parts[rank] if step == steps[rank]]
        kind, stage, other = next(
            result
            for action, work in waiting
            for result, _ in self.graph.needs(action.kind, action.stage, work)
            if end[items.item(*result)] is None
        )
        missing = self.graph.action(Kind.I if (stage, other) in self.split and kind is Kind.B else kind, stage, other)
        holder = self.graph.stage_rank[stage]
        position = next((step for step, action, _ in self.parts[holder] if action == missing), None)
        where = (
            "is in no rank's order"
            if position is None
            else f"is step {position} of rank {holder}, which never gets there"
        )
        raise PlanError(
            f"deadlock: rank {rank}, step {steps[rank]}: {self.orders[rank][steps[rank]]} waits for {missing}, which "
            f"{where}; move one of them\n{show_steps(self.orders, dict(enumerate(steps)))}"
        )


def orders_text(orders: Sequence[Sequence[Action]]) -> str:
    """One line a rank: its actions separated by spaces."""
    return "\n".join(" ".join(map(str, order)) for order in orders)


def parse_orders(text: str, num_ranks: int) -> tuple[tuple[Action, ...], ...]:
    """The orders that `orders_text` wrote.

    Raises: PlanError: a word is not an action, or the number of lines differs from that of the ranks.
    """
    lines = text.split("\n")
    for end in (-1, 0):  # empty lines around the text; others are of ranks without any action
        while len(lines) > num_ranks and not lines[end]:
            lines.pop(end)
    if len(lines) != num_ranks:
        raise PlanError(f"the text of {num_ranks} ranks has one line a rank, but there are {len(lines)}")
    return tuple(tuple(map(Action.parse, line.split())) for line in lines)


def show_steps(orders: Sequence[Sequence[Action]], steps: Mapping[int, int]) -> str:
    """The orders around one step of each rank, one line a rank, that step between `>>` and `<<`.

    Args: steps: rank -> step to mark, of the ranks to show.
    """
    lines = []
    for rank, step in sorted(steps.items()):
        order = orders[rank]
        low, high = max(0, step - _REACH), min(len(order), step + _REACH + 1)
        shown = [f">>{order[i]}<<" if i == step else str(order[i]) for i in range(low, high)]
        shown = ["..."] * (low > 0) + shown + (["..."] if high < len(order) else ["(end)"] * (step >= len(order)))
        lines.append(f"  rank {rank}: {' '.join(shown)}")
    return "\n".join(lines)


WHOLE, SPLIT = {Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W}
"""The kinds of actions of a stage and work that has a backward."""


def check(plan: Plan, problem: PlanningProblem | None = None) -> None:
    """Checks a plan: each action occurs once and on its rank, no deadlock, memory within its limits.

    Args: problem: also check the plan against this problem's graph, options and memory limits.
    Raises: PlanError: the first broken rule, with rank, step and the orders around it.
    """
    graph = plan.graph
    if len(plan.orders) != graph.num_ranks:
        raise PlanError(f"the plan has {len(plan.orders)} orders for {graph.num_ranks} ranks")
    if problem is not None:
        _check_options(plan, problem)
    seen = check_actions(graph, plan.orders, partial(_fault, plan))
    for kind, stage, work in graph.instruction:
        if graph.action(kind, stage, work) not in seen:
            rank = graph.stage_rank[stage]
            raise PlanError(f"rank {rank}: {graph.action(kind, stage, work)} is missing; add it")
    kinds: dict[tuple[int, int], set[Kind]] = defaultdict(set)
    for parts in plan.parts:
        for _, action, work in parts:
            if action.kind in COMPUTE:
                kinds[action.stage, work].add(action.kind)
    for stage, work in graph.nodes():
        present = kinds[stage, work]
        if Kind.F in present and (present in (WHOLE, SPLIT) or not graph.has_backward(stage, work)):
            continue
        name, rank = graph.action(Kind.F, stage, work), graph.stage_rank[stage]
        if Kind.F not in present:
            raise PlanError(f"rank {rank}: {name} is missing; add it")
        backwards = ", ".join(kind for kind in (Kind.B, Kind.I, Kind.W) if kind in present) or "none"
        raise PlanError(
            f"rank {rank}: the backward of {name} must be B, or I and W, but the plan has {backwards}; make it one"
        )
    plan.run()
    if problem is not None:
        _check_memory(plan, problem)


def check_actions(
    graph: WorkGraph, orders: Sequence[Sequence[Action]], fault_of: Callable[[int, Action, set[Action]], str]
) -> set[Action]:
    """The actions of all ranks, those of a braid one by one. A braid is a forward and a backward of different works.

    Args: fault_of: (rank, action, the actions before it) -> its fault as the rest of a sentence; empty: none.
    Raises: PlanError: the first fault.
    """
    seen: set[Action] = set()
    for rank, order in enumerate(orders):
        for step, entry in enumerate(order):
            fault = _braid_fault(graph, entry) if entry.kind is BRAID else ""
            if fault:
                raise PlanError(f"rank {rank}, step {step}: {entry} {fault}\n{show_steps(orders, {rank: step})}")
            for action in entry.parts:
                if fault := fault_of(rank, action, seen):
                    raise PlanError(f"rank {rank}, step {step}: {action} {fault}\n{show_steps(orders, {rank: step})}")
                seen.add(action)
    return seen


def _braid_fault(graph: WorkGraph, braid: Action) -> str:
    """What is wrong with the parts of a braid, as the rest of a sentence; empty: nothing."""
    kinds = [part.kind for part in braid.parts]
    if len(kinds) != 2 or kinds[0] is not Kind.F or kinds[1] not in (Kind.B, Kind.I, Kind.W):
        return "is no braid of a forward and then one B, I or W; write its actions one after the other"
    if braid != Braid.of(*braid.parts):
        return f"has another stage, microbatch or sub-microbatch than its first action, {braid.parts[0]}; use Braid.of"
    if len(set(map(graph.work_of, braid.parts))) == 1:
        return "braids one work with itself; its backward waits for its forward, so take another microbatch for one"
    return ""


def _fault(plan: Plan, rank: int, action: Action, seen: set[Action]) -> str:
    """The fault of one action of a rank's order, as the rest of a sentence; empty if there is none."""
    if action.kind in NOT_COMPUTE:
        return "is not a compute action; lowering adds transfers"
    work = plan.graph.work_of(action)
    holder = plan.graph.stage_rank[action.stage]
    if holder != rank:
        return f"belongs on rank {holder}, which holds its stage"
    if action.kind not in COMPUTE:
        if (action.kind, action.stage, work) not in plan.graph.instruction:
            return "is an instruction that the iteration does not have; remove it"
    elif action.kind is not Kind.F and not plan.graph.has_backward(action.stage, work):
        return "cannot run: the stage has no backward for this work; remove it"
    if action not in seen:
        return ""
    step = next(step for step, entry in enumerate(plan.orders[rank]) if action in entry.parts)
    return f"is already step {step} of this rank; keep one"


def _check_options(plan: Plan, problem: PlanningProblem) -> None:
    if plan.graph != problem.graph:
        raise PlanError("the plan's work graph is not the problem's; plan this problem again")
    nodes = set(plan.graph.nodes())
    for (stage, work), option in plan.options.items():
        if (stage, work) not in nodes:
            raise PlanError(f"options[{stage}, {work}] names a stage that the work does not pass through")
        count = len(problem.options(stage, work))
        if not 0 <= option < count:
            raise PlanError(f"options[{stage}, {work}] = {option} is outside of 0 .. {count - 1}")


def _check_memory(plan: Plan, problem: PlanningProblem) -> None:
    for rank, (limit, held) in enumerate(zip(problem.memory_limit_bytes, held_bytes(plan, problem), strict=True)):
        for step, (during, _) in enumerate(held):
            if limit is not None and exceeds(during, limit):
                raise PlanError(
                    f"rank {rank}, step {step}: {plan.orders[rank][step]} raises activations to {during:.4g} "
                    f"bytes, over the limit of {limit:.4g}; free some earlier or choose a smaller option\n"
                    + show_steps(plan.orders, {rank: step})
                )


def exceeds(amount: float, limit: float) -> bool:
    """Whether an amount exceeds a limit by more than rounding errors."""
    return amount > limit * (1 + 1e-9)


def held_bytes(plan: Plan, problem: PlanningProblem) -> tuple[tuple[tuple[float, float], ...], ...]:
    """[rank][step] -> activation bytes while the action runs, and after it has ended."""
    return held_over(entry_costs(plan, problem))


def held_over(costs_of_ranks: Sequence[Sequence[EntryCost]]) -> tuple[tuple[tuple[float, float], ...], ...]:
    """The result of `held_bytes`. Args: costs_of_ranks: [rank][step]."""
    ranks = []
    for costs in costs_of_ranks:
        held, steps = 0.0, []
        for cost in costs:
            during = held + cost.needed_bytes
            held += cost.growth_bytes
            steps.append((max(during, held), held))
        ranks.append(tuple(steps))
    return tuple(ranks)


def entry_costs(plan: Plan, problem: PlanningProblem) -> list[list[EntryCost]]:
    """[rank][step] -> seconds and bytes."""
    cost, chosen = problem.entry_cost, plan.options
    return [
        [cost(action, work, chosen) for action, work in zip(order, works, strict=True)]
        for order, works in zip(plan.orders, plan.works, strict=True)
    ]
