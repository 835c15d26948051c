"""A plan: one order of compute actions for each rank, its check, and its text form."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import itemgetter

from mmtrain.errors import PlanError
from mmtrain.schedule.action import BRAID, COMPUTE, NOT_COMPUTE, Action, Kind
from mmtrain.schedule.engine import Engine, Run
from mmtrain.schedule.graph import Need, WorkGraph
from mmtrain.schedule.problem import EntryCost, Option, PlanningProblem


@dataclass(frozen=True)
class Plan:
    """The orders of all ranks, and the memory option chosen for each (stage, work)."""

    graph: WorkGraph
    orders: tuple[tuple[Action, ...], ...]
    """One order of compute actions a rank."""
    options: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """(stage, work) -> index into its option list; what is absent has option 0."""

    def __str__(self) -> str:
        """One line a rank: its actions separated by spaces; `parse` reads it back."""
        return "\n".join(" ".join(map(str, order)) for order in self.orders)

    @classmethod
    def parse(cls, graph: WorkGraph, text: str, options: Mapping[tuple[int, int], int] | None = None) -> "Plan":
        """The plan of a text that has one line a rank.

        Raises: PlanError: a word is not an action, or there are more or fewer lines than ranks.
        """
        lines = text.strip("\n").split("\n")
        if len(lines) != graph.num_ranks:
            raise PlanError(f"a plan for {graph.num_ranks} ranks has one line a rank, but there are {len(lines)}")
        return cls(graph, tuple(tuple(map(Action.parse, line.split())) for line in lines), options or {})

    @cached_property
    def works(self) -> tuple[tuple[int, ...], ...]:
        """[rank][step] -> the work of that action."""
        return tuple(tuple(map(self.graph.work_of, order)) for order in self.orders)

    @cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        """The (stage, work) whose backward is in two halves, I and W."""
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
        """How the ranks run their orders.

        Args:
            seconds: [rank][step]; None: actions take no time.
            message_s: [message] -> seconds of its transfer; None: no time.
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

    def run_order(self) -> Iterator[tuple[int, Action, int, tuple[Need, ...]]]:
        """(rank, action, work, needs) of all actions, each after everything that it needs.

        Raises: PlanError: deadlock; with rank, step, the waiting action and the missing one, and the orders.
        """
        steps = [groupby(parts, key=itemgetter(0)) for parts in self.parts]
        for rank in self.run().ranks:
            for _, action, work in next(steps[rank])[1]:
                yield rank, action, work, self.graph.needs(action.kind, action.stage, work)

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
        found = next((step for step, action, _ in self.parts[holder] if action == missing), None)
        where = (
            "is in no rank's order" if found is None else f"is step {found} of rank {holder}, which never gets there"
        )
        raise PlanError(
            f"deadlock: rank {rank}, step {steps[rank]}: {self.orders[rank][steps[rank]]} waits for {missing}, which "
            f"{where}; move one of them\n{show_steps(self.orders, dict(enumerate(steps)))}"
        )


def show_steps(orders: Sequence[Sequence[Action]], steps: Mapping[int, int], reach: int = 5) -> str:
    """The orders around one step of each rank, one line a rank, that step between `>>` and `<<`.

    Args: steps: rank -> step to mark; ranks that are absent are left out. reach: actions to each side.
    """
    lines = []
    for rank, step in sorted(steps.items()):
        order = orders[rank]
        low, high = max(0, step - reach), min(len(order), step + reach + 1)
        words = [f">>{order[i]}<<" if i == step else str(order[i]) for i in range(low, high)]
        words = ["..."] * (low > 0) + words + (["..."] if high < len(order) else ["(end)"] * (step >= len(order)))
        lines.append(f"  rank {rank}: {' '.join(words)}")
    return "\n".join(lines)


def check(plan: Plan, problem: PlanningProblem | None = None) -> None:
    """Refuses a plan that is not one: each action counted once, on its rank, without deadlock, within memory.

    Args: problem: also hold the plan against this problem's graph, options and memory limits.
    Raises: PlanError: the first rule that is broken, with rank, step and the orders around it.
    """
    graph = plan.graph
    if len(plan.orders) != graph.num_ranks:
        raise PlanError(f"the plan has {len(plan.orders)} orders for {graph.num_ranks} ranks")
    if problem is not None:
        _check_options(plan, problem)
    seen: set[Action] = set()
    for rank, order in enumerate(plan.orders):
        for step, action in ((step, part) for step, entry in enumerate(order) for part in entry.parts):
            fault = _fault(plan, rank, action, seen)
            if fault:
                marked = show_steps(plan.orders, {rank: step})
                raise PlanError(f"rank {rank}, step {step}: {action} {fault}\n{marked}")
            seen.add(action)
    for kind, stage, work in graph.instruction:
        if graph.action(kind, stage, work) not in seen:
            rank = graph.stage_rank[stage]
            raise PlanError(f"rank {rank}: {graph.action(kind, stage, work)} is missing; add it")
    for stage, work in graph.nodes():
        forward, whole, half, weight = (graph.action(k, stage, work) in seen for k in "FBIW" for k in [Kind(k)])
        name = graph.action(Kind.F, stage, work)
        rank = graph.stage_rank[stage]
        if not forward:
            raise PlanError(f"rank {rank}: {name} is missing; add it")
        if not graph.has_backward(stage, work):
            continue
        if not (whole and not half and not weight) and not (half and weight and not whole):
            found = ", ".join(k for k, there in zip("BIW", (whole, half, weight), strict=True) if there) or "none"
            raise PlanError(
                f"rank {rank}: the backward of {name} must be B, or I and W, but the plan has {found}; make it one"
            )
    plan.run()
    if problem is not None:
        _check_memory(plan, problem)


def _fault(plan: Plan, rank: int, action: Action, seen: set[Action]) -> str:
    """What is wrong with one action of a rank's order, as the rest of a sentence; empty if nothing is."""
    if action.kind in NOT_COMPUTE:
        return "is not compute; transfers come with lowering"
    work = plan.graph.work_of(action)
    holder = plan.graph.stage_rank[action.stage]
    if holder != rank:
        return f"belongs on rank {holder}, which holds its stage"
    if action.kind not in COMPUTE:
        known = (action.kind, action.stage, work) in plan.graph.instruction
        return "" if known else "is an instruction that the iteration does not have; remove it"
    if action.kind is not Kind.F and not plan.graph.has_backward(action.stage, work):
        return "has no place here: the stage has no backward for this work; remove it"
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
            raise PlanError(f"options[{stage}, {work}] names a stage and work that do not meet")
        count = len(problem.options(stage, work))
        if not 0 <= option < count:
            raise PlanError(f"options[{stage}, {work}] = {option} is outside of 0 .. {count - 1}")


def _check_memory(plan: Plan, problem: PlanningProblem) -> None:
    for rank, (limit, held) in enumerate(zip(problem.memory_limit_bytes, held_bytes(plan, problem), strict=True)):
        for step, (during, _) in enumerate(held):
            if limit is not None and exceeds(during, limit):
                raise PlanError(
                    f"rank {rank}, step {step}: {plan.orders[rank][step]} brings activations to {during:.4g} "
                    f"bytes, over the limit of {limit:.4g}; free some earlier or choose a smaller option\n"
                    + show_steps(plan.orders, {rank: step})
                )


def exceeds(amount: float, limit: float) -> bool:
    """Whether an amount is above a limit by more than the rounding of a long sum of floats."""
    return amount > limit * (1 + 1e-9)


def held_bytes(plan: Plan, problem: PlanningProblem) -> tuple[tuple[tuple[float, float], ...], ...]:
    """[rank][step] -> activation bytes while the action runs, and after it has ended."""
    ranks = []
    for costs in entry_costs(plan, problem):
        held, steps = 0.0, []
        for _, needed, growth in costs:
            during = held + needed
            held += growth
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
