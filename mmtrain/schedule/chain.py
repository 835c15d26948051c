"""The plain chain of the pipeline literature as a planning problem."""

from mmtrain.errors import PlanError
from mmtrain.schedule.graph import ModuleStages, Work
from mmtrain.schedule.library.catalogue import Schedule
from mmtrain.schedule.problem import P2P, Option, PlanningProblem


def plain_chain(
    num_ranks: int,
    num_microbatches: int,
    schedule: Schedule,
    *,
    seconds: tuple[float, float, float] = (1.0, 1.0, 1.0),
    activation_bytes: float = 1.0,
    transfer_s: float = 0.0,
) -> PlanningProblem:
    """One module on all ranks, cut and placed as a schedule wants, all microbatches alike.

    Args:
        seconds: F, I and W of all that one rank holds, for one microbatch.
        activation_bytes: what one rank holds of one microbatch.
        transfer_s: from one rank to the next.
    Raises: PlanError: no rank or no microbatch.
    """
    if num_ranks < 1 or num_microbatches < 1:
        raise PlanError(f"a chain of {num_ranks} ranks and {num_microbatches} microbatches; both are at least 1")
    passes = 2 if schedule.placement == "v" else schedule.least_passes
    down = list(range(num_ranks))
    num_stages = passes * num_ranks
    forward_s, input_s, weight_s = (value / passes for value in seconds)
    option = Option(
        name="keep",
        forward_s=forward_s,
        backward_input_s=input_s,
        backward_weight_s=weight_s,
        activation_bytes=activation_bytes / passes,
    )
    return PlanningProblem.build(
        num_ranks=num_ranks,
        modules=[ModuleStages(name="language", stages=tuple(range(num_stages)))],
        stage_rank=down + down[::-1] if schedule.placement == "v" else down * passes,
        works=[Work(module=0, microbatch=m, sub_microbatch=0) for m in range(num_microbatches)],
        costs=[(option,)],
        cost_index=[[0] * num_stages] * num_microbatches,
        output_bytes=[[0.0] * num_stages] * num_microbatches,
        p2p=P2P(latency_s=transfer_s, bytes_per_s=1.0),
    )
