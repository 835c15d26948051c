"""The plain chain of the pipeline literature as a planning problem."""

from collections import Counter

from mmtrain.errors import PlanError
from mmtrain.schedule.graph import ModuleStages, Work, WorkGraph
from mmtrain.schedule.library.catalogue import Schedule
from mmtrain.schedule.number_ranges import RANKS, STAGES, VISITS
from mmtrain.schedule.problem import P2P, Option, PlanningProblem


def plain_chain(
    num_ranks: int,
    num_microbatches: int,
    schedule: Schedule,
    *,
    num_segments: int = 0,
    seconds: tuple[float, float, float] = (1.0, 1.0, 1.0),
    activation_bytes: float = 1.0,
    transfer_s: float = 0.0,
    exchange_s: float | None = None,
) -> PlanningProblem:
    """One module on all ranks, cut and placed as a schedule expects it, with equal microbatches.

    Args:
        num_segments: chunks a rank; 0: as many as the schedule needs.
        seconds: F, I and W of all stages of one rank, for one microbatch.
        activation_bytes: held by one rank for one microbatch.
        transfer_s: from one rank to the next.
        exchange_s: of one stage in its forward, and again in its backward, in addition to `seconds`; layers then run as
            units, and blocks hide all that they can. None: there are none, and layers do not run as units.
    Raises: PlanError: no rank or no microbatch, too many, or a number of chunks that the schedule cannot have.
    """
    if num_ranks < 1 or num_microbatches < 1:
        raise PlanError(f"a chain of {num_ranks} ranks and {num_microbatches} microbatches; both are at least 1")
    if num_segments and schedule.chain_ranks:
        raise PlanError(
            f"{num_segments} chunks on each rank: the schedule's file places its chunks; leave the number out"
        )
    v = schedule.placement == "v"
    least = 2 if v else schedule.least_passes
    passes = num_segments or least
    if passes < least or (v and passes > 2):
        raise PlanError(f"{passes} chunks on each rank; this schedule needs {'' if v else 'at least '}{least}")
    RANKS.check("a chain's ranks", num_ranks)
    STAGES.check("a chain's stages", num_ranks * passes)
    VISITS.check("a chain's stages times microbatches", num_ranks * passes * num_microbatches)
    down = list(range(num_ranks))
    stage_rank = down + down[::-1] if v else down * passes
    stage_rank = list(schedule.chain_ranks) or stage_rank
    graph = WorkGraph(
        num_ranks=num_ranks,
        modules=(ModuleStages(name="language", stages=tuple(range(len(stage_rank)))),),
        stage_rank=tuple(stage_rank),
        works=tuple(Work(module=0, microbatch=m, sub_microbatch=0) for m in range(num_microbatches)),
        backward=((True,) * len(stage_rank),) * num_microbatches,
    )
    return chain_problem(
        graph, seconds=seconds, activation_bytes=activation_bytes, transfer_s=transfer_s, exchange_s=exchange_s
    )


def chain_problem(
    graph: WorkGraph,
    *,
    seconds: tuple[float, float, float] = (1.0, 1.0, 1.0),
    activation_bytes: float = 1.0,
    transfer_s: float = 0.0,
    exchange_s: float | None = None,
) -> PlanningProblem:
    """The problem of chains whose ranks have equal costs; arguments as in `plain_chain`.

    Raises: PlanError: negative or infinite times, or a backward without duration.
    """
    trains = graph.has_any_backward
    if trains and not seconds[1] + seconds[2] > 0:
        raise PlanError(
            f"I = {seconds[1]} and W = {seconds[2]} seconds; a backward takes time, make one of them longer"
        )
    forward_exchange_s = exchange_s or 0.0
    backward_exchange_s = forward_exchange_s if trains else 0.0
    shares = Counter(graph.stage_rank)
    counts = sorted(set(shares.values()))
    option = {
        count: Option(
            name="keep",
            forward_s=seconds[0] / count + forward_exchange_s,
            backward_input_s=seconds[1] / count + backward_exchange_s if trains else 0.0,
            backward_weight_s=seconds[2] / count if trains else 0.0,
            activation_bytes=activation_bytes / count,
            forward_exchange_s=forward_exchange_s,
            backward_exchange_s=backward_exchange_s,
            contention=1.0 if exchange_s is None else 0.0,
        )
        for count in counts
    }
    chains = [graph.stages(work) for work in range(len(graph.works))]
    return PlanningProblem.build(
        num_ranks=graph.num_ranks,
        modules=graph.modules,
        stage_rank=graph.stage_rank,
        works=graph.works,
        costs=[(option[count],) for count in counts],
        cost_index=[[counts.index(shares[graph.stage_rank[stage]]) for stage in chain] for chain in chains],
        output_bytes=[[0.0] * len(chain) for chain in chains],
        p2p=P2P(latency_s=transfer_s, bytes_per_s=1.0),
    )
