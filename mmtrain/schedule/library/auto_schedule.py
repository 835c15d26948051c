"""The zero-bubble paper's automatic schedule, under the problem's memory limits and for its costs."""

from mmtrain.schedule.library.list_schedule import ListScheduler, rank_footprints
from mmtrain.schedule.library.memory import choose_options, components
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem


def auto_schedule(problem: PlanningProblem) -> Plan:
    """The best of a few list schedules: least makespan, then least span of any rank.

    The span of a rank is the time from its first start to its last end. It is the time of an iteration if the next one
    may begin on the first ranks while the last ranks still run (the paper's post-validation of the optimizer).

    Memory limits are kept. A rank without one gets room for 2P microbatches of mean size (the paper's ZB-2p), since Ws
    could be delayed forever otherwise. Each microbatch gets its fastest options where these fit alone, else those of
    least memory.

    Raises: PlanError: the activations of one microbatch alone exceed a rank's memory limit.
    Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 3.1 (heuristic).
    """
    chosen = choose_options(problem, components(problem.graph))
    room = rank_footprints(problem, 2.0 * problem.graph.num_ranks)
    limits = [own if given is None else given for own, given in zip(room, problem.held_limit_bytes, strict=True)]
    soft = [rank for rank, given in enumerate(problem.held_limit_bytes) if given is None]
    scheduler = ListScheduler(problem, limits, chosen, soft=soft)
    outcomes = [scheduler.run(eager=scheduler.several_stages)]
    if not scheduler.several_stages and not outcomes[0].perfect:
        outcomes += [scheduler.run(patient=True), scheduler.run(eager=True)]
    shortest = min(outcome.makespan_s for outcome in outcomes) * (1 + 1e-9)
    best = min((o for o in outcomes if o.makespan_s <= shortest), key=lambda outcome: outcome.longest_s)
    return best.plan
