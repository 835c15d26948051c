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
from collections.abc import Callable
from dataclasses import replace

from mmtrain.costs.noise import EXACT
from mmtrain.errors import PlanError
from mmtrain.planner.bound import lower_bound_s
from mmtrain.planner.result import PlanResult
from mmtrain.planner.scheduled import scheduled
from mmtrain.planner.search.evaluate import fit_memory
from mmtrain.planner.search.search_options import SearchOptions
from mmtrain.planner.search.search_run import SearchRun
from mmtrain.schedule.graph import ModuleStages, Work
from mmtrain.schedule.library.catalogue import CATALOGUE, Schedule
from mmtrain.schedule.library.list_schedule import rank_footprints
from mmtrain.schedule.library.memory import choose_options, components
from mmtrain.schedule.library.v_shape import v_chunks
from mmtrain.schedule.passes.instruct import instruct, without_instructions
from mmtrain.schedule.plan import Plan, check
from mmtrain.schedule.problem import P2P, Option, PlanningProblem


def search(
    problem: PlanningProblem, options: SearchOptions, *, cancelled: Callable[[], bool] = lambda: False
) -> PlanResult:
    """The best checked plan of the search, with its timeline.

    An infeasible problem is a result with that status and a message, not an exception. Without numba the plan is that
    of `interleave`. With blocks, and works that are one V, STP's plan counts too.

    On each rank room is kept for the largest `restored_bytes` of any option, chosen or not. Where some options of a
    stage and work have less of these than others, half of the budget goes to plans with only those of the least, which
    can use more of the limit.

    Instructions are added to the plan that the search finds without them.

    Args: cancelled: polled; the search ends early once it returns True.
    Raises: PlanError: no budget.
    """
    if problem.graph.instructions:
        return _with_instructions(search(without_instructions(problem), options, cancelled=cancelled), problem)
    if options.strategy == "first" or not problem.graph.has_any_backward:
        return _unsearched(problem, options)
    _check_budget(options)
    found, stp = _search_twice(problem, options, cancelled), _stp(problem, options)
    if stp is None or found.cost_s <= stp.cost_s:
        return found
    return replace(stp, evaluations=found.evaluations + 1, seed=found.seed)


def _with_instructions(result: PlanResult, problem: PlanningProblem) -> PlanResult:
    """The result for a problem, from that for the problem without instructions."""
    if not result.has_plan:
        return replace(result, problem=problem)
    try:
        plan = instruct(result.plan, problem)
        check(plan, problem)
    except PlanError as error:
        return PlanResult(problem=problem, status="infeasible", message=str(error), seed=result.seed)
    status = "improved" if result.status == "optimal" else result.status  # the bound does not know them
    return replace(result, problem=problem, plan_or_none=plan, status=status)


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
    problem, message = without_instructions(made.problem), "the order of arrival, with memory options chosen for it"
    plans = [plan for plan in (_decoded(problem, braid), _lean(problem, braid)) if plan is not None]
    results = (PlanResult(problem=problem, status="first", message=message, plan_or_none=plan) for plan in plans)
    if made.problem.graph.instructions:
        results = (_with_instructions(result, made.problem) for result in results)
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
    run = SearchRun(problem, SearchOptions(budget_evaluations=0, split=False, braid=braid), None, lambda: False, 0.0)
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
            (stage, work): original[problem.cost_index[work][position[stage]]][first.plan.options.get((stage, work), 0)]
            for stage, work in problem.graph.nodes()
        }
        plan = Plan(problem.graph, first.plan.orders, {node: option for node, option in back.items() if option})
        check(plan, problem)
        first = replace(first, problem=problem, plan_or_none=plan)
    bound_s = lower_bound_s(problem)
    if first.has_plan and options.noise == EXACT and first.makespan_s <= bound_s * (1 + 1e-9):
        return first
    second = _search(problem, share, cancelled, bound_s)
    best = min((first, second), key=lambda result: result.cost_s)
    best = best if best.has_plan else second
    evaluations = first.evaluations + second.evaluations
    message = best.message.replace(f"best of {best.evaluations} ", f"best of {evaluations} ", 1)
    return replace(best, evaluations=evaluations, message=message)


def _without_restoring(problem: PlanningProblem) -> tuple[PlanningProblem, list[list[int]]] | None:
    """The problem with only those options that restore the least of their stage and work, and their indices. None: all
    options are such, or no rank has a limit."""
    if all(limit is None for limit in problem.memory_limit_bytes):
        return None
    least = [min(option.restored_bytes for option in options) for options in problem.costs]
    kept = [
        [i for i, option in enumerate(options) if option.restored_bytes == few]
        for few, options in zip(least, problem.costs, strict=True)
    ]
    if all(len(indices) == len(options) for indices, options in zip(kept, problem.costs, strict=True)):
        return None
    costs = tuple(tuple(options[i] for i in indices) for indices, options in zip(kept, problem.costs, strict=True))
    return replace(problem, costs=costs), kept


def shortest_s(problem: PlanningProblem, options: SearchOptions) -> float:
    """The makespan in seconds that a search of the problem comes to, its mean with noise; infinite: no plan fits.

    It is that of the best order during the search, without instructions, and without the plan itself, its check and its
    simulation, which take twice as long as 50 evaluations. No action is changed by itself, so that `search` comes to
    less where memory is short.

    Raises: PlanError: no budget.
    """
    problem = without_instructions(problem)
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
    run = SearchRun(problem, options, only, lambda: False, bound_s=0.0, polishes=False)
    run.run()
    return run.cost_s


def _check_budget(options: SearchOptions) -> None:
    if not options.budget_evaluations and not options.budget_s:
        raise PlanError("the search has no budget and would never end; give it evaluations or seconds")


def _search(
    problem: PlanningProblem, options: SearchOptions, cancelled: Callable[[], bool], bound_s: float | None = None
) -> PlanResult:
    """The best plan of one search. Args: bound_s: of all plans; None: computed."""
    try:
        only = None if options.memory else choose_options(problem, components(problem.graph))
    except PlanError as error:
        return PlanResult(problem=problem, status="infeasible", message=str(error), seed=options.seed)
    run = SearchRun(problem, options, only, cancelled, bound_s)
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
