"""One run of the search: sweep, chains and the final choice of memory options, within a budget."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from mmtrain.costs.noise import EXACT, Factors
from mmtrain.planner.bound import lower_bound_s
from mmtrain.planner.search.chains import Chain, Start
from mmtrain.planner.search.evaluate import LAST_ITERATIONS, cost_of, evaluate, join
from mmtrain.planner.search.instance import NO_DRAWS, Searched
from mmtrain.planner.search.kernels.arrays import RANK, SPLITS, Decoder, Workspace
from mmtrain.planner.search.orders import GroupOrder, by_component, component_orders
from mmtrain.planner.search.polish import Polished
from mmtrain.planner.search.search_options import CHAINS, SearchOptions
from mmtrain.schedule.numba_start import load_numba
from mmtrain.schedule.passes.braid import braid
from mmtrain.schedule.plan import Plan, check
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.simulate import simulate

ITERATIONS = 20
"""Iterations of the memory choice in an evaluation."""
EVALUATIONS_PER_CHAIN = 2000
LEAST_PER_CHAIN = 500
"""The evaluations from which on a second chain is worth more than a longer first one, which may get stuck."""
MOST_CHAINS = 16
POLISH_SHARE = 0.5
"""Part of the budget, its last, in which plans are changed action by action, where nothing tells what that gains."""
PROBED = 0.05
"""Part of the budget in which plans are changed action by action, and then orders as long, to learn what each gains."""
MUCH, LEAST_SHARE = 0.001, 0.5
"""A gain, as a part of the makespan, by which memory is short: single actions then get at least this part of the rest,
more if orders gain little. Below they get less in proportion, since later they gain nothing either."""
RACED, RACES = 4, (0.15, 0.3)
"""Plans that are changed action by action at first, at most, and parts of that time after which half drop out."""
LEAST_POLISHED = 200
"""Evaluations from which on that is worth more than further orders."""
SWEEP_SHARE = 0.4
"""Largest part of the budget that the sweep may use."""
SEARCH_DRAWS, FINALISTS = 8, 8
"""The search compares plans by one in this many of the draws; so many of the best are compared by all."""
ROBUST_SHARE = 0.4
"""Part of the budget, its last, in which plans are compared by their mean makespan if there is noise."""
MEMORY_PARTS = (0.0, 0.5, 1.0, 0.25, 0.75)
"""What a decoder may assume about memory in the sweep, the most useful first."""
WAITS = (0.0, 0.5, 1.0)
"""How long forwards may wait for a backward in the sweep."""
VARIED = 2
"""How many of the best decoders the sweep varies in each round."""
FINER = (-1 / 32, 1 / 32, -1 / 16, 1 / 16)
"""The changes that it then makes to what they assume about memory."""
CHUNK = 72_000
"""Stages of works that a chain evaluates between two checks of clock and cancellation: about 30 ms."""

_Map = Callable[[Callable[[Any], None], Iterable[Any]], Iterable[None]]
"""Like `map`, with the calls in any order."""


class SearchRun:
    """One search."""

    def __init__(
        self,
        problem: PlanningProblem,
        options: SearchOptions,
        only: Mapping[tuple[int, int], int] | None,
        cancelled: Callable[[], bool],
        bound_s: float | None = None,
        *,
        polishes: bool = True,
    ) -> None:
        """Args:
        only: (stage, work) -> its option; None: they are chosen.
        bound_s: of all plans; None: computed.
        polishes: whether plans are also changed action by action, where there is no noise.
        """
        load_numba()
        self.problem, self.options, self._cancelled = problem, options, cancelled
        self.bound_s = lower_bound_s(problem) if bound_s is None else bound_s
        searched = Searched.of(problem, only)
        self.searched = replace(searched, factors=self._draw(searched, max(1, options.draws // SEARCH_DRAWS), 0))
        """The problem, with draws of seconds if there is noise."""
        self.evaluations = 0
        self._best: list[Start] = []
        """The best decoded plans, best first."""
        self._polished: Polished | None = None
        """The best of the plans that were changed action by action."""
        searches = options.reorder and options.strategy == "anneal" and options.noise == EXACT
        self._polishes = polishes and searches and not 0 < options.budget_evaluations < LEAST_POLISHED
        self._start_s = time.perf_counter()
        self._workspaces: list[Workspace] = []

    def run(self) -> str:
        """Searches until the budget is used up; returns why it ended."""
        # One thread is this one: a thread pool costs as much as a small search, more on a busy machine.
        several = self.options.threads > 1
        with ThreadPoolExecutor(self.options.threads) if several else nullcontext() as pool:
            run = pool.map if pool else map
            starts = self._sweep(run)
            return self._stop_reason() or self._run_strategy(run, starts)

    def plan(self) -> Plan | None:
        """The checked best plan; None if none fits."""
        if self.cost_s == math.inf:
            return None
        w, exact = self._workspace(0), self.options.noise == EXACT
        finalists = product(self._best[: 1 if exact else None], (ITERATIONS, LAST_ITERATIONS))
        judge = replace(self.searched, factors=self._draw(self.searched, self.options.draws, 1))

        def finish(start: Start, iterations: int) -> float:
            """The cost of a plan, which the workspace then holds; inf: its options do not fit."""
            if evaluate(self.searched, w, start.order, start.how, iterations) == math.inf:
                return math.inf
            join(self.searched, w)
            return cost_of(judge, w)

        cost, _, best, iterations = min((finish(*f), i, *f) for i, f in enumerate(finalists))
        if cost == math.inf:
            return None
        finish(best, iterations)
        self._best = [best._replace(cost=cost)]
        plans = [self.searched.plan(w)]
        if self._polished:
            polished = self._polished.best()
            join(self.searched, polished)
            plans.append(self.searched.plan(polished))
        if self._braids and exact:
            plans = [braid(plan, self.problem) for plan in plans]
        plan = min(plans, key=lambda plan: simulate(self.problem, plan).makespan_s) if len(plans) > 1 else plans[0]
        check(plan, self.problem)
        return plan

    def _draw(self, searched: Searched, draws: int, number: int) -> Factors:
        """Args: number: of the draws, for the seed."""
        options = self.options
        if options.noise == EXACT:
            return NO_DRAWS
        node_rank = searched.arrays.node[:, RANK].astype(np.int64)
        return options.noise.factors(node_rank, draws, 2 * options.seed + number)

    @property
    def _braids(self) -> bool:
        return self.options.braid and self.problem.runs_units

    @property
    def cost_s(self) -> float:
        """Makespan of the best plan, or its mean over draws; inf: there is none."""
        polished_s = self._polished.cost if self._polished else math.inf
        return min(polished_s, self._best[0].cost if self._best else math.inf)

    # ------------------------------------------------------------------------------------ budget

    def _stop_reason(self) -> str:
        """Why the search is over; empty: it is not."""
        if self.options.noise == EXACT and self.cost_s <= self.bound_s * (1 + 1e-9):
            return "no plan can be better"
        if self.options.budget_evaluations and self.evaluations >= self.options.budget_evaluations:
            return "budget of evaluations used up"
        if self.options.budget_s and self._elapsed_s >= self.options.budget_s:
            return "budget of time used up"
        return "stopped from outside" if self._cancelled() else ""

    @property
    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._start_s

    @property
    def _progress(self) -> float:
        """The part of the budget that is used up."""
        done = 0.0
        if self.options.budget_evaluations:
            done = self.evaluations / self.options.budget_evaluations
        if self.options.budget_s:
            done = max(done, self._elapsed_s / self.options.budget_s)
        return min(1.0, done)

    def _workspace(self, number: int) -> Workspace:
        while len(self._workspaces) <= number:
            self._workspaces.append(self.searched.workspace())
        return self._workspaces[number]

    # ------------------------------------------------------------------------------------ sweep

    def _sweep(self, run: _Map) -> list[Start]:
        """The best starts, best first."""
        orders = [by_component(self.searched, order) for order in component_orders(self.searched)]
        starts = self.arrive(run)
        for vary in (_varied, _varied, _refined):
            ranked = sorted(starts, key=lambda start: start.cost)
            tried = {start.how for start in starts}
            varied = dict.fromkeys(how for start in ranked[:VARIED] for how in vary(self.searched, start.how))
            starts += self._try(run, [(orders[0], how) for how in varied if how not in tried])
        if self.options.reorder:
            best = [start.how for start in sorted(starts, key=lambda start: start.cost)[:4]]
            starts += self._try(run, [(order, how) for order in orders[1:] for how in best])
        starts.sort(key=lambda start: start.cost)
        return starts

    def arrive(self, run: _Map) -> list[Start]:
        """Tries all decoders on the order of arrival."""
        decoders = _decoders(self.searched, split=self.options.split, braid=self._braids)
        order = by_component(self.searched, component_orders(self.searched)[0])
        return self._try(run, [(order, how) for how in decoders])

    def _try(self, run: _Map, candidates: Sequence[tuple[GroupOrder, Decoder]]) -> list[Start]:
        """Evaluates candidates within the budget, by their makespan."""
        threads = self.options.threads
        if self.options.budget_evaluations:
            most = max(1, int(SWEEP_SHARE * self.options.budget_evaluations)) - self.evaluations
            candidates = candidates[: max(0, most)]
        costs, exact = np.full(len(candidates), math.nan), replace(self.searched, factors=NO_DRAWS)

        def work(thread: int) -> None:
            w = self._workspaces[thread]
            for i in range(thread, len(candidates), threads):
                if self.options.budget_s and self._elapsed_s > self.options.budget_s and i >= threads:
                    return
                if i and self._cancelled():
                    return
                costs[i] = evaluate(exact, w, *candidates[i], ITERATIONS)

        self._workspace(threads - 1)
        list(run(work, range(threads)))
        starts = [Start(*c, float(cost)) for c, cost in zip(candidates, costs, strict=True) if cost == cost]
        self.evaluations += len(starts)
        for start in starts:
            self._note(start)
        return starts

    def _note(self, start: Start) -> None:
        if start.cost == math.inf or any(start.cost == known.cost for known in self._best):
            return
        self._best = sorted([*self._best, start], key=lambda known: known.cost)[:FINALISTS]

    # ------------------------------------------------------------------------------------ chains

    def _run_strategy(self, run: _Map, starts: Sequence[Start]) -> str:
        """Goes on from the sweep's plans until the search is over; returns why.

        With noise chains go by the makespan first, which finds good plans sooner, then on from these by the mean.
        """
        if self.options.noise == EXACT:
            return self._orders_and_actions(run, starts) if self._polishes else self._run_chains(run, starts)
        exact = replace(self.searched, factors=NO_DRAWS)
        self._in_rounds(run, self._chains(exact, starts), 1 - ROBUST_SHARE, self._note_best)
        self._best = sorted((self._by_mean(start) for start in self._best), key=lambda start: start.cost)
        # No order may have fitted yet: chains then go on from where they began.
        return self._stop_reason() or self._run_chains(run, self._best or starts)

    def _by_mean(self, start: Start) -> Start:
        cost = evaluate(self.searched, self._workspace(0), start.order, start.how, ITERATIONS)
        return start._replace(cost=cost)

    def _orders_and_actions(self, run: _Map, starts: Sequence[Start]) -> str:
        """Runs chains on orders, and then changes the best plans action by action, each for as long as it gains."""
        chains, first_s = self._chains(self.searched, starts), self.cost_s
        raced: list[Polished] = []
        if first_s == math.inf or self._braids:  # plans without blocks do not compare with those that have some
            why, until = "", 1 - POLISH_SHARE
        else:
            why, raced = self._polish(run, self._polished_of(starts, self._num_raced), self._progress + PROBED)
            by_actions = 1 - self.cost_s / first_s
            why = why or self._in_rounds(run, chains, self._progress + PROBED, self._note_best)
            by_orders = 1 - self._best[0].cost / first_s
            of_both = by_actions / (by_actions + by_orders) if by_actions > 0.0 else 0.0
            share = min(1.0, by_actions / MUCH) * (LEAST_SHARE + (1 - LEAST_SHARE) * of_both)
            until = 1 - share * (1 - self._progress)
        why = why or self._in_rounds(run, chains, until, self._note_best)
        if why:
            return why
        made = self._polished_of([*self._best, *starts], self._num_raced - len(raced))
        why, _ = self._polish(run, [*raced, *made], 1.0)
        return why or self._in_rounds(run, chains, 1.0, self._note_best)

    def _run_chains(self, run: _Map, starts: Sequence[Start]) -> str:
        """Runs chains until the search is over; returns why."""
        return self._in_rounds(run, self._chains(self.searched, starts), 1.0, self._note_best)

    def _chains(self, searched: Searched, starts: Sequence[Start]) -> list[Chain]:
        options = self.options
        return [
            CHAINS[options.strategy](
                searched, self._workspace(i), starts[i % len(starts)], (options.seed, i), options.reorder,
                any(start.how.split for start in starts), self._braids, ITERATIONS,
            )
            for i in range(self._num_chains)
        ]  # fmt: skip

    @property
    def _num_chains(self) -> int:
        evaluations = self.options.budget_evaluations
        return num_chains(evaluations) if evaluations else self.options.threads

    def _note_best(self, chain: Chain) -> None:
        self._note(chain.best)

    @property
    def _num_raced(self) -> int:
        """The number of plans of which the best ones are changed action by action for longer."""
        return max(self._num_chains, min(RACED, 4 * self._num_chains))

    def _polished_of(self, starts: Sequence[Start], count: int) -> list[Polished]:
        """Chains that change plans action by action, from different ones, the best first."""
        of_cost = {start.cost: start for start in reversed(starts) if start.cost < math.inf}
        ranked = [of_cost[cost] for cost in sorted(of_cost)]
        made = (
            Polished(self.searched, ranked[i:] + ranked[:i], ITERATIONS, self.options.seed + 1000 * i)
            for i in range(min(count, len(ranked)))
        )
        return [chain for chain in made if chain.cost < math.inf]

    def _polish(self, run: _Map, chains: Sequence[Polished], until: float) -> tuple[str, list[Polished]]:
        """Changes plans action by action until a part of the budget is used up, the best of them for longer: how far
        that goes is not told by their makespan, but soon by what it has gained.

        Returns: why the search is over, or empty; and the chains that were left, the best first.
        """
        begin, left, why = self._progress, list(chains), ""
        for chain in left:
            chain.span(begin, until, max(1.0, len(left) / self._num_chains))
        for part in (*RACES, 1.0):
            if left and not why:
                why = self._in_rounds(run, left, begin + part * (until - begin), self._keep)
                left.sort(key=lambda chain: chain.cost)
                left = left[: max(self._num_chains, -(-len(left) // 2))]
        return why, left

    def _keep(self, chain: Polished) -> None:
        if self._polished is None or chain.cost < self._polished.cost:
            self._polished = chain

    def _in_rounds(self, run: _Map, chains: Sequence[Any], until: float, note: Callable[[Any], None]) -> str:
        """Runs chains in rounds until a part of the budget is used up; why the search is over, or empty.

        Args: note: of each chain after a round.
        """
        options = self.options
        chunk = max(1, CHUNK // max(1, len(self.searched.nodes)) * self._num_chains // max(1, len(chains)))
        why = self._stop_reason()
        while not why and self._progress < until:
            each, running = chunk, chains
            if options.budget_evaluations:  # the last round may be shorter, without the last chains
                remaining = max(1, math.ceil(until * options.budget_evaluations) - self.evaluations)
                each, running = min(chunk, max(1, remaining // len(chains))), chains[:remaining]
            # Progress at the start and at the end of the round; only evaluations count where there is no time limit.
            before = self._progress
            self.evaluations += each * len(running)
            after = self._progress
            list(run(lambda chain: chain.run(each, before, after), running))  # noqa: B023
            for chain in running:
                note(chain)
            why = self._stop_reason()
        return why


def num_chains(evaluations: int) -> int:
    """The number of chains of a budget: 2 from 1,000 evaluations on, and 1 for each 2,000 from 6,000 on."""
    return min(MOST_CHAINS, max(1, min(2, evaluations // LEAST_PER_CHAIN), evaluations // EVALUATIONS_PER_CHAIN))


def _decoders(searched: Searched, *, split: bool, braid: bool = False) -> list[Decoder]:
    """The decoders of the sweep, those first that are good for nearly all problems."""
    p = searched.arrays
    memory, speed = (MEMORY_PARTS, (0.0, 0.5)) if _chooses_memory(searched) else ((0.0,), (0.0,))
    splits = bool(split and p.node[:, SPLITS].any())
    splits_and_gaps = [(True, 1.0), (True, 0.5), (True, 0.0)] if splits else []
    splits_and_gaps.append((False, 0.0))
    turns = (False,) if splits else (False, True)  # of so many decoders only the best are tried with the other turn
    return [
        searched.decoder(m, s, gap, backward_first, in_two, braids)
        for s, braids, (in_two, gap), backward_first, m in product(
            speed, (True, False) if braid else (False,), splits_and_gaps, turns, memory
        )
    ]


def _varied(searched: Searched, how: Decoder) -> list[Decoder]:
    """The decoders that differ from a given one in how long forwards wait, in whose turn it is, or in the memory
    reserved for one of several modules."""
    varied = [how._replace(wait=wait) for wait in WAITS if wait != how.wait]
    varied.append(how._replace(backward_first=not how.backward_first))
    if searched.num_modules > 1 and _chooses_memory(searched):
        varied += [
            how._replace(memory=(*how.memory[:module], part, *how.memory[module + 1 :]))
            for module, part in product(range(searched.num_modules), MEMORY_PARTS)
            if part != how.memory[module]
        ]
    return varied


def _refined(searched: Searched, how: Decoder) -> list[Decoder]:
    """The decoders that assume a little more or less memory, of all modules or of one."""
    if not _chooses_memory(searched):
        return []
    modules = range(searched.num_modules)
    changed = [set(modules), *({module} for module in modules if searched.num_modules > 1)]
    return [
        how._replace(memory=tuple(min(1.0, max(0.0, how.memory[m] + by * (m in some))) for m in modules))
        for some, by in product(changed, FINER)
    ]


def _chooses_memory(searched: Searched) -> bool:
    """Whether the assumption of memory matters: a rank has a limit, and a stage several options."""
    p = searched.arrays
    return bool(np.isfinite(p.limit).any()) and bool((np.diff(p.first) > 1).any())
