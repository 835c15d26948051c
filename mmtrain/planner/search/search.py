"""The search: from a planning problem to the best plan within a budget.

1. *Sweep*: decoders (how much memory is reserved, which durations are assumed, when Ws run) on the order of arrival,
then the best decoders on all deterministic orders. This finds most of the gain in some hundred evaluations.
2. A *strategy* continues from the best of them: simulated annealing by default, on the orders of groups and the decoder
together. The number of chains follows from the budget, not from the threads, and chains are independent, so a plan
depends only on problem, budget and seed.
3. The options of the best plan are chosen again with more iterations; then it is checked and simulated.

Each evaluation is complete: orders by interleaving, memory options of each rank, makespan (the three phases of DIP,
arXiv:2504.14145, section 5).
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from mmtrain.costs.noise import EXACT, Factors, Noise
from mmtrain.errors import PlanError
from mmtrain.planner.bound import lower_bound_s
from mmtrain.planner.result import PlanResult
from mmtrain.planner.scheduled import scheduled
from mmtrain.planner.search.chains import AnnealChain, Chain, DepthFirstChain, RandomChain, Start, TreeChain
from mmtrain.planner.search.evaluate import LAST_ITERATIONS, cost_of, evaluate, fit_memory, join
from mmtrain.planner.search.instance import NO_DRAWS, Searched
from mmtrain.planner.search.kernels.arrays import RANK, SPLITS, Decoder, Workspace
from mmtrain.planner.search.numba_start import load_numba
from mmtrain.planner.search.orders import Order, by_component, component_orders
from mmtrain.schedule.graph import ModuleStages, Work
from mmtrain.schedule.library.catalogue import CATALOGUE, Schedule
from mmtrain.schedule.library.list_schedule import rank_footprints
from mmtrain.schedule.library.memory import choose_options, components
from mmtrain.schedule.library.v_shape import v_chunks
from mmtrain.schedule.limits import THREADS
from mmtrain.schedule.passes.braid import braid
from mmtrain.schedule.plan import Plan, check
from mmtrain.schedule.problem import P2P, Option, PlanningProblem

if TYPE_CHECKING:  # a search needs no config, whose import takes as long as the rest of the planner
    from mmtrain.config.planner import Strategy

CHAINS: Mapping[str, type[Chain]] = {
    "anneal": AnnealChain,
    "mcts": TreeChain,
    "random": RandomChain,
    "dfs": DepthFirstChain,
}

ITERATIONS = 20
"""Iterations of the memory choice in an evaluation."""
EVALUATIONS_PER_CHAIN = 2000
LEAST_PER_CHAIN = 500
"""From here on a second chain is worth more than a longer first one, which may get stuck."""
MOST_CHAINS = 16
SWEEP_SHARE = 0.4
"""Largest part of the budget that the sweep may use."""
SEARCH_DRAWS = 8
"""The search compares plans by one in this many of the draws; finalists are compared by all."""
ROBUST_SHARE = 0.4
"""Part of the budget, its last, in which plans are compared by their mean makespan if there is noise."""
CHUNK = 72_000
"""Stages of works that a chain evaluates between two checks of clock and cancellation: about 30 ms."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Budget and search space of a search."""

    budget_evaluations: int = 1000
    """Plans tried; 0: no limit."""
    budget_s: float = 0.0
    """Seconds; 0: no limit. If it ends the search, the plan depends on the speed of the machine."""
    seed: int = 0
    threads: int = 1
    """The plan depends on it only if budget_s ends the search."""
    strategy: "Strategy" = "anneal"
    """mcts is DIP's (section 5.1); dfs and random are for comparison; first: no search."""
    reorder: bool = True
    """Search the order of microbatches."""
    split: bool = True
    """Backwards may be split into I and W."""
    braid: bool = False
    """Forwards and backwards may run as one block, where layers run as units."""
    memory: bool = True
    """Choose a memory option for each stage and work; else the fastest one that fits for all."""
    noise: Noise = EXACT
    """Of actual seconds. Plans are then compared by their mean makespan over drawn seconds."""
    draws: int = 64
    """Draws for the comparison of finalists; all plans are compared by an eighth of them."""
    finalists: int = 8
    """Plans that are compared by all draws, if there is noise."""

    def __post_init__(self) -> None:
        for name in ("budget_evaluations", "budget_s", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise PlanError(f"{name} = {getattr(self, name)}; it must be finite and at least 0")
        for name in ("draws", "finalists"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} = {getattr(self, name)}; it must be at least 1")
        THREADS.check("threads", self.threads)
        if self.strategy not in (*CHAINS, "first"):
            raise PlanError(f"strategy {self.strategy!r} does not exist; choose one of {', '.join(CHAINS)}, first")


def search(
    problem: PlanningProblem, options: SearchOptions, *, cancelled: Callable[[], bool] = lambda: False
) -> PlanResult:
    """The best checked plan of the search, with its timeline.

    An infeasible problem is a result with that status and a message, not an exception. Without numba the plan is that
    of `interleave`. With blocks, and works that are one V, STP's plan counts too.

    On each rank room is kept for the largest `restored_bytes` of any option, chosen or not. Where options without these
    exist for all stages and works, half of the budget goes to plans with only such options, which can use the whole
    limit.

    Args: cancelled: polled; the search ends early once it returns True.
    Raises: PlanError: no budget.
    """
    if options.strategy == "first" or not problem.graph.has_any_backward:
        return _unsearched(problem, options)
    _check_budget(options)
    found, stp = _search_twice(problem, options, cancelled), _stp(problem, options)
    if stp is None or found.cost_s <= stp.cost_s:
        return found
    return replace(stp, evaluations=found.evaluations + 1, seed=found.seed)


def _unsearched(problem: PlanningProblem, options: SearchOptions) -> PlanResult:
    """The plan of `interleave`, with memory options chosen if a limit may bind."""
    result = scheduled(problem, _greedy(options.braid))
    if options.memory:
        result = with_options_chosen(result, braid=options.braid)
    return replace(result, seed=options.seed)


def _greedy(braid: bool) -> Schedule:
    return CATALOGUE["interleave"].braided() if braid else CATALOGUE["interleave"]


def with_options_chosen(made: PlanResult, *, braid: bool = False) -> PlanResult:
    """The result of a schedule, or a shorter plan if a limit may bind: a few that take some tenths of a second.

    Two ways admit more microbatches than the fastest options let in: the sweep's decoders, with whole backwards on the
    order of arrival, reserve between the bytes of the fastest and of the smallest options; and `interleave` plans as if
    there were only the smallest. Options are then chosen for the orders.

    Args: made: the result of a schedule that keeps limits.
    """
    if not may_bind(made):
        return made
    problem, message = made.problem, "the order of arrival, with memory options chosen for it"
    plans = [plan for plan in (_decoded(problem, braid), _lean(problem, braid)) if plan is not None]
    results = (PlanResult(problem=problem, status="first", message=message, plan_or_none=plan) for plan in plans)
    return min([made, *results], key=lambda result: result.makespan_s)


def may_bind(made: PlanResult) -> bool:
    """Whether works have several memory options, and a limit forbids a schedule's plan or may have changed it.

    A limit with room for two microbatches more than the plan ever holds has delayed no forward.

    Args: made: the result of the schedule.
    """
    problem, limits = made.problem, made.problem.memory_limit_bytes
    if all(limit is None for limit in limits) or all(len(options) == 1 for options in problem.costs):
        return False
    if not made.has_plan:
        return True
    rows = zip(limits, made.timeline.peak_bytes, rank_footprints(problem, 0.0), strict=True)
    return any(limit is not None and peak + 2 * largest > limit for limit, peak, largest in rows)


def _decoded(problem: PlanningProblem, braid: bool) -> Plan | None:
    """The best checked plan of the sweep's decoders on the order of arrival; None: none fits."""
    run = _Search(problem, SearchOptions(budget_evaluations=0, split=False, braid=braid), None, lambda: False, 0.0)
    run.arrive(map)
    return run.plan()


def _lean(problem: PlanningProblem, braid: bool) -> Plan | None:
    """The checked plan of `interleave` for the options of least memory, with options chosen for it; None: none fits."""
    smallest = [min(range(len(o)), key=lambda i: (o[i].activation_bytes, i)) for o in problem.costs]
    costs = tuple((options[i],) for options, i in zip(problem.costs, smallest, strict=True))
    graph, index = problem.graph, problem.cost_index
    options = {(stage, work): smallest[index[work][graph.position[stage]]] for stage, work in graph.nodes()}
    try:
        plan = _greedy(braid).make(replace(problem, costs=costs))
        plan = replace(plan, options={node: option for node, option in options.items() if option})
        plan = fit_memory(problem, plan) or plan
        check(plan, problem)
    except PlanError:
        return None
    return plan


def _stp(problem: PlanningProblem, options: SearchOptions) -> PlanResult | None:
    """STP's plan, if it may be the plan of a search and fits."""
    if not options.braid or not options.split or options.noise != EXACT or v_chunks(problem.graph) is None:
        return None
    try:
        return scheduled(problem, "STP")
    except PlanError:
        return None


def _search_twice(problem: PlanningProblem, options: SearchOptions, cancelled: Callable[[], bool]) -> PlanResult:
    """The best plan of two searches with half of the budget each, the first one without options that restore; of one
    where there are no such options, or no others."""
    kept = _without_restoring(problem) if options.memory else None
    if kept is None:
        return _search(problem, options, cancelled)
    share = replace(options, budget_evaluations=-(-options.budget_evaluations // 2), budget_s=options.budget_s / 2)
    lean, original = kept
    first = _search(lean, share, cancelled)
    if first.has_plan:
        position = problem.graph.position
        back = {
            (stage, work): original[problem.cost_index[work][position[stage]]][option]
            for (stage, work), option in first.plan.options.items()
        }
        plan = Plan(problem.graph, first.plan.orders, {node: option for node, option in back.items() if option})
        check(plan, problem)
        first = replace(first, problem=problem, plan_or_none=plan)
        if options.noise == EXACT and first.makespan_s <= lower_bound_s(problem) * (1 + 1e-9):
            return first
    second = _search(problem, share, cancelled)
    best = min((first, second), key=lambda result: result.cost_s)
    best = best if best.has_plan else second
    evaluations = first.evaluations + second.evaluations
    message = best.message.replace(f"best of {best.evaluations} ", f"best of {evaluations} ", 1)
    return replace(best, evaluations=evaluations, message=message)


def _without_restoring(problem: PlanningProblem) -> tuple[PlanningProblem, list[list[int]]] | None:
    """The problem with only those options that restore nothing, and their indices. None: some stage has no such
    option, all options are such, or no rank has a limit."""
    if all(limit is None for limit in problem.memory_limit_bytes):
        return None
    kept = [[i for i, option in enumerate(options) if not option.restored_bytes] for options in problem.costs]
    if not all(kept) or all(len(indices) == len(options) for indices, options in zip(kept, problem.costs, strict=True)):
        return None
    costs = tuple(tuple(options[i] for i in indices) for indices, options in zip(kept, problem.costs, strict=True))
    return replace(problem, costs=costs), kept


def shortest_s(problem: PlanningProblem, options: SearchOptions) -> float:
    """The makespan in seconds that a search of the problem comes to, its mean with noise; infinite: no plan fits.

    It is that of the best order during the search, without the plan itself, its check and its simulation, which take
    twice as long as 50 evaluations. It is at most rounding, one choice of memory options, or some last blocks, from
    that of `search`.

    Raises: PlanError: no budget.
    """
    if options.strategy == "first" or not problem.graph.has_any_backward:
        return _unsearched(problem, options).cost_s
    _check_budget(options)
    kept = _without_restoring(problem) if options.memory else None
    if kept is not None:
        share = replace(options, budget_evaluations=-(-options.budget_evaluations // 2), budget_s=options.budget_s / 2)
        return min(_shortest_s(kept[0], share), _shortest_s(problem, share))
    return _shortest_s(problem, options)


def _shortest_s(problem: PlanningProblem, options: SearchOptions) -> float:
    try:
        only = None if options.memory else choose_options(problem, components(problem.graph))
    except PlanError:
        return math.inf
    run = _Search(problem, options, only, lambda: False, bound_s=0.0)
    run.run()
    return run.cost_s


def _check_budget(options: SearchOptions) -> None:
    if not options.budget_evaluations and not options.budget_s:
        raise PlanError("the search has no budget and would never end; give it evaluations or seconds")


def _search(problem: PlanningProblem, options: SearchOptions, cancelled: Callable[[], bool]) -> PlanResult:
    try:
        only = None if options.memory else choose_options(problem, components(problem.graph))
    except PlanError as error:
        return PlanResult(problem=problem, status="infeasible", message=str(error), seed=options.seed)
    run = _Search(problem, options, only, cancelled)
    why = run.run()
    plan = run.plan()
    if plan is None:
        return replace(_unsearched(problem, options), evaluations=run.evaluations + 1)
    result = PlanResult(
        problem=problem,
        status="improved",
        message=f"best of {run.evaluations} plans tried, {why}",
        plan_or_none=plan,
        expected_s=None if options.noise == EXACT else run.cost_s,
        evaluations=run.evaluations,
        seed=options.seed,
    )
    return replace(result, status="optimal") if result.makespan_s <= run.bound_s * (1 + 1e-9) else result


def warm() -> None:
    """Compiles the kernels, or loads them from numba's cache."""
    kinds = [Option(name="a", forward_s=1, backward_input_s=1, backward_weight_s=1, activation_bytes=2)]
    kinds.append(replace(kinds[0], name="b", backward_input_s=2, activation_bytes=1))
    problem = PlanningProblem.build(
        num_ranks=2,
        modules=[ModuleStages(name="m", stages=(0, 1))],
        stage_rank=(0, 1),
        works=[Work(module=0, microbatch=i, sub_microbatch=0) for i in range(4)],
        costs=[kinds],
        cost_index=[(0, 0)] * 4,
        output_bytes=[(1.0, 0.0)] * 4,
        p2p=P2P(latency_s=0.1, bytes_per_s=1.0),
        memory_limit_bytes=(4.0, None),
    )
    search(problem, SearchOptions(budget_evaluations=1))


_Map = Callable[[Callable[[Any], None], Iterable[Any]], Iterable[None]]
"""Like `map`, with the calls in any order."""


class _Search:
    """One search."""

    def __init__(
        self,
        problem: PlanningProblem,
        options: SearchOptions,
        only: Mapping[tuple[int, int], int] | None,
        cancelled: Callable[[], bool],
        bound_s: float | None = None,
    ) -> None:
        """Args: only: (stage, work) -> its option; None: they are chosen. bound_s: of all plans; None: computed."""
        load_numba()
        self.problem, self.options, self._cancelled = problem, options, cancelled
        self.bound_s = lower_bound_s(problem) if bound_s is None else bound_s
        searched = Searched.of(problem, only)
        self.searched = replace(searched, factors=self._draw(searched, max(1, options.draws // SEARCH_DRAWS), 0))
        """With draws of seconds, if there is noise."""
        self.evaluations = 0
        self._best: list[Start] = []
        """The best plans, best first."""
        self._start_s = time.perf_counter()
        self._workspaces: list[Workspace] = []

    def run(self) -> str:
        """Searches until the budget is used up; returns why it ended."""
        # One thread is this one: a thread pool costs as much as a small search, more on a busy machine.
        several = self.options.threads > 1
        with ThreadPoolExecutor(self.options.threads) if several else nullcontext() as pool:
            run = pool.map if pool else map
            starts = self._sweep(run)
            why = self._why_over()
            return why or self._go_on(run, starts)

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
        plan = self.searched.plan(w)
        if self._braids and exact:
            plan = braid(plan, self.problem)
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
        return self._best[0].cost if self._best else math.inf

    # ------------------------------------------------------------------------------------ budget

    def _why_over(self) -> str:
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

    def _try(self, run: _Map, candidates: Sequence[tuple[Order, Decoder]]) -> list[Start]:
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
        self._best = sorted([*self._best, start], key=lambda known: known.cost)[: self.options.finalists]

    # ------------------------------------------------------------------------------------ chains

    def _go_on(self, run: _Map, starts: Sequence[Start]) -> str:
        """Runs the chains of the strategy until the search is over; returns why.

        With noise they go by the makespan first, which finds good plans sooner, then on from these by the mean.
        """
        if self.options.noise == EXACT:
            return self._run_chains(run, self.searched, starts, 1.0)
        self._run_chains(run, replace(self.searched, factors=NO_DRAWS), starts, 1 - ROBUST_SHARE)
        self._best = sorted((self._by_mean(start) for start in self._best), key=lambda start: start.cost)
        return self._why_over() or self._run_chains(run, self.searched, self._best, 1.0)

    def _by_mean(self, start: Start) -> Start:
        cost = evaluate(self.searched, self._workspace(0), start.order, start.how, ITERATIONS)
        return start._replace(cost=cost)

    def _run_chains(self, run: _Map, searched: Searched, starts: Sequence[Start], until: float) -> str:
        """Runs chains in rounds until a part of the budget is used up; why the search is over, or empty."""
        options = self.options
        count = options.threads
        if options.budget_evaluations:
            count = num_chains(options.budget_evaluations)
        chains = [
            CHAINS[options.strategy](
                searched, self._workspace(i), starts[i % len(starts)], (options.seed, i), options.reorder,
                any(start.how.split for start in starts), self._braids, ITERATIONS,
            )
            for i in range(count)
        ]  # fmt: skip
        chunk = max(1, CHUNK // max(1, len(searched.nodes)))
        why = self._why_over()
        while not why and self._progress < until:
            each = chunk
            if options.budget_evaluations:  # the last round may be shorter, without the last chains
                remaining = math.ceil(until * options.budget_evaluations) - self.evaluations
                each = min(chunk, max(1, remaining // count))
                chains = chains[:remaining]
            # Progress at the start and at the end of the round; only evaluations count where there is no time limit.
            before = self._progress
            self.evaluations += each * len(chains)
            after = self._progress
            list(run(lambda chain: chain.run(each, before, after), chains))  # noqa: B023
            for chain in chains:
                self._note(chain.best)
            why = self._why_over()
        return why


def num_chains(evaluations: int) -> int:
    """The number of chains of a budget: 2 from 1,000 evaluations on, and 1 for each 2,000 from 6,000 on."""
    return min(MOST_CHAINS, max(1, min(2, evaluations // LEAST_PER_CHAIN), evaluations // EVALUATIONS_PER_CHAIN))


def _decoders(searched: Searched, *, split: bool, braid: bool = False) -> list[Decoder]:
    """The decoders of the sweep, those first that are good for nearly all problems."""
    p = searched.arrays
    limited = bool(np.isfinite(p.limit).any())
    several = bool((np.diff(p.first) > 1).any())
    memory = (0.0, 0.5, 1.0, 0.25, 0.75) if limited and several else (0.0,)
    speed = (0.0, 0.5) if limited and several else (0.0,)
    splits_and_gaps = [(True, 1.0), (True, 0.5), (True, 0.0)] if split and p.node[:, SPLITS].any() else []
    splits_and_gaps.append((False, 0.0))
    return [
        Decoder(m, s, gap, backward_first, splits, braids)
        for s, braids, (splits, gap), backward_first, m in product(
            speed, (True, False) if braid else (False,), splits_and_gaps, (False, True), memory
        )
    ]
