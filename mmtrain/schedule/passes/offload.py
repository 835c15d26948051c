"""Offloading in any plan: activations of first chunks wait in host memory, as many as the memory limits need.

The first chunk of a module on a rank holds its activations longest: in a V until its microbatch has gone down the ranks
and up, twice. Later chunks are never offloaded, so that copies of one chunk have the link to the host for themselves.
How much of an activation is offloaded follows from the rate of the link: its copies take no longer than the entries of
the order in which they run. So a forward of the warm-up offloads less than one in a block with a backward. Copies back
run during the entry of their backward, and begin in the entry before (`parallel.runtime`).

Source: Qi et al., Synergistic Tensor and Pipeline Parallelism, section 4.4 and figure 6.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from mmtrain.schedule.action import BACKWARD, Kind
from mmtrain.schedule.plan import Plan, exceeds
from mmtrain.schedule.problem import EntryCost, PlanningProblem

EPSILON = 1e-9
"""Share of a time that is no difference."""

StageWork = tuple[int, int]
"""A stage and a work."""


def offload(plan: Plan, problem: PlanningProblem) -> Plan | None:
    """The plan with activations of first chunks offloaded until each rank keeps its memory limit; None: it cannot.

    Where a rank exceeds its limit, one of the activations that it holds goes to an option that offloads more: one whose
    copies take no longer than the two entries that they run in, and of those the one that is needed last. So the
    makespan stays as it is. If that is not enough, those are offloaded whose copies take least time beyond their
    entries for the bytes that they free.
    """
    if not any(option.host_s for options in problem.costs for option in options):
        return None
    options = dict(plan.options)
    for rank in range(plan.graph.num_ranks):
        if not _OffloadingRank(plan, problem, rank, options).offload():
            return None
    return replace(plan, options={node: option for node, option in options.items() if option})


class _HeldActivation(NamedTuple):
    """An activation of a first chunk."""

    forward: int
    """Step of its F."""
    backward: int
    """Step of its B, or I."""


class _OffloadingRank:
    """One rank of a plan."""

    def __init__(self, plan: Plan, problem: PlanningProblem, rank: int, options: dict[StageWork, int]) -> None:
        """Args: options: of all nodes; those of this rank change."""
        self._problem, self._options = problem, options
        self._entries = list(zip(plan.orders[rank], plan.works[rank], strict=True))
        self._limit_bytes = problem.memory_limit_bytes[rank]
        first_chunks = {stages[0] for stages in _stages_of_rank(problem, rank) if stages}
        steps: dict[StageWork, dict[bool, int]] = {}
        for step, action, work in plan.parts[rank]:
            if action.stage in first_chunks and action.kind in (Kind.F, *BACKWARD):
                steps.setdefault((action.stage, work), {})[action.kind in BACKWARD] = step
        self._held = {node: _HeldActivation(of[False], of[True]) for node, of in steps.items() if len(of) == 2}

    def offload(self) -> bool:
        """Offloads until the limit is kept; whether it is."""
        if self._limit_bytes is None:
            return True
        before = 0.0
        for step in range(len(self._entries)):
            while True:
                cost = self._cost(step)
                if not exceeds(before + max(cost.needed_bytes, cost.growth_bytes), self._limit_bytes):
                    break
                freed = self._offload_one(step)
                if freed is None:
                    return False
                before -= freed
            before += cost.growth_bytes
        return True

    def _offload_one(self, now: int) -> float | None:
        """Offloads more of one activation that is held during a step; the bytes that this frees before the step.

        None: there is none.
        """
        held = [(node, of) for node, of in self._held.items() if of.forward <= now < of.backward]
        choices = [(*more, node, of) for node, of in held if (more := self._more(node, of)) is not None]
        if not choices:
            return None
        _, option, node, of = min(choices, key=lambda choice: (choice[0], -choice[3].backward, choice[2]))
        listed = self._problem.options(*node)
        freed = listed[self._options.get(node, 0)].activation_bytes - listed[option].activation_bytes
        self._options[node] = option
        return freed if of.forward < now else 0.0

    def _more(self, node: StageWork, held: _HeldActivation) -> tuple[float, int] | None:
        """The option that offloads more at the least seconds for each byte, and these seconds; None: there is none.

        Of several such options it is the one that offloads least.
        """
        listed, steps = self._problem.options(*node), {held.forward, held.backward}
        current = self._options.get(node, 0)
        now_s = sum(self._cost(step).seconds for step in steps)
        choices: list[tuple[float, float, int]] = []
        for index, option in enumerate(listed):
            freed = listed[current].activation_bytes - option.activation_bytes
            if freed <= 0 or not option.host_s:
                continue
            self._options[node] = index
            more_s = sum(self._cost(step).seconds for step in steps) - now_s
            rate = more_s / freed if more_s > EPSILON * now_s else 0.0
            choices.append((rate, freed, index))
        self._options[node] = current
        rate, _, index = min(choices, default=(0.0, 0.0, -1))
        return None if index < 0 else (rate, index)

    def _cost(self, step: int) -> EntryCost:
        return self._problem.entry_cost(*self._entries[step], self._options)


def _stages_of_rank(problem: PlanningProblem, rank: int) -> Iterator[Sequence[int]]:
    """The stages of each module on a rank, in the order of its chain."""
    graph = problem.graph
    for module in graph.modules:
        yield [stage for stage in module.stages if graph.stage_rank[stage] == rank]
