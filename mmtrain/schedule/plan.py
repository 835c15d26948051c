"""A plan: one order of compute actions for each rank, its check, and its text form."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mmtrain.errors import PlanError
from mmtrain.schedule.action import BACKWARD, COMPUTE, RESULT_OF, Action, Kind
from mmtrain.schedule.graph import Need, Result, WorkGraph
from mmtrain.schedule.problem import Option, PlanningProblem


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
            (action.stage, work)
            for order, works in zip(self.orders, self.works, strict=True)
            for action, work in zip(order, works, strict=True)
            if action.kind is Kind.I
        )

    def option(self, problem: PlanningProblem, stage: int, work: int) -> Option:
        """The chosen option of (stage, work)."""
        return problem.options(stage, work)[self.options.get((stage, work), 0)]

    def run_order(self) -> Iterator[tuple[int, Action, int, tuple[Need, ...]]]:
        """(rank, action, work, needs) of all actions, each after everything that it needs.

        Raises: PlanError: deadlock; with rank, step, the waiting action and the missing one, and the orders.
        """
        steps = [0] * len(self.orders)
        done: set[Result] = set()
        progress = True
        while progress:
            progress = False
            for rank, order in enumerate(self.orders):
                while steps[rank] < len(order):
                    action, work = order[steps[rank]], self.works[rank][steps[rank]]
                    needs = self.graph.needs(action.kind, action.stage, work)
                    if any(result not in done for result, _ in needs):
                        break
                    yield rank, action, work, needs
                    done.add((RESULT_OF[action.kind], action.stage, work))
                    steps[rank] += 1
                    progress = True
        if any(step < len(order) for step, order in zip(steps, self.orders, strict=True)):
            self._raise_deadlock(steps, done)

    def _raise_deadlock(self, steps: list[int], done: set[Result]) -> None:
        rank = next(r for r, order in enumerate(self.orders) if steps[r] < len(order))
        action, work = self.orders[rank][steps[rank]], self.works[rank][steps[rank]]
        needs = self.graph.needs(action.kind, action.stage, work)
        kind, stage, other = next(result for result, _ in needs if result not in done)
        missing = self.graph.action(Kind.I if (stage, other) in self.split and kind is Kind.B else kind, stage, other)
        holder = self.graph.stage_rank[stage]
        where = (
            f"is step {self.orders[holder].index(missing)} of rank {holder}, which never gets there"
            if missing in self.orders[holder]
            else "is in no rank's order"
        )
        raise PlanError(
            f"deadlock: rank {rank}, step {steps[rank]}: {action} waits for {missing}, which {where}; move "
            f"one of them\n{show_steps(self.orders, dict(enumerate(steps)))}"
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
        for step, action in enumerate(order):
            fault = _fault(plan, rank, action, seen)
            if fault:
                marked = show_steps(plan.orders, {rank: step})
                raise PlanError(f"rank {rank}, step {step}: {action} {fault}\n{marked}")
            seen.add(action)
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
    for _ in plan.run_order():
        pass
    if problem is not None:
        _check_memory(plan, problem)


def _fault(plan: Plan, rank: int, action: Action, seen: set[Action]) -> str:
    """What is wrong with one action of a rank's order, as the rest of a sentence; empty if nothing is."""
    if action.kind not in COMPUTE:
        return "is not compute; transfers come with lowering"
    work = plan.graph.work_of(action)
    holder = plan.graph.stage_rank[action.stage]
    if holder != rank:
        return f"belongs on rank {holder}, which holds its stage"
    if action.kind is not Kind.F and not plan.graph.has_backward(action.stage, work):
        return "has no place here: the stage has no backward for this work; remove it"
    return f"is already step {plan.orders[rank].index(action)} of this rank; keep one" if action in seen else ""


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
    places = {stage: place for stage, (_, place) in plan.graph.place.items()}
    costs, index, chosen = problem.costs, problem.cost_index, plan.options
    for order, works in zip(plan.orders, plan.works, strict=True):
        held, steps = 0.0, []
        for action, work in zip(order, works, strict=True):
            stage = action.stage
            option = costs[index[work][places[stage]]][chosen.get((stage, work), 0)]
            # A forward without a backward takes its bytes for as long as it runs.
            during = held + (option.activation_bytes if action.kind is Kind.F else 0.0)
            during += option.restored_bytes if action.kind in BACKWARD else 0.0
            held += option.growth_bytes(action.kind)
            steps.append((max(during, held), held))
        ranks.append(tuple(steps))
    return tuple(ranks)
