"""Costs of an iteration from the model's FLOPs on a nominal device, as a planning problem."""

from mmtrain.config import PlannerConfig
from mmtrain.errors import PlanError
from mmtrain.models.recomputation import KEEP_ALL, Recomputation
from mmtrain.models.spec import Flops, ModelSpec, ModuleSpec, WorkSize
from mmtrain.planner.batching import Batching
from mmtrain.planner.partition import Partition, StageSpec
from mmtrain.schedule.problem import P2P, Option, PlanningProblem

LEAST_BACKWARD_S = 1e-9
"""What a backward takes at least, even with no FLOP counted (an embedding): zero means that there is none."""

_GIB = 2.0**30


def make_problem(
    spec: ModelSpec,
    partition: Partition,
    batching: Batching,
    planner_config: PlannerConfig,
    *,
    recomputation: Recomputation = KEEP_ALL,
    shares: int = 1,
    forward_only: bool = False,
) -> PlanningProblem:
    """The planning problem of one iteration: seconds are FLOPs / flops_per_s, bytes come from the layers.

    A stage has a backward for a work if something trainable lies at or before it *in this iteration*:
    a frozen language model needs none for a text-only microbatch.

    Of a split backward, the second half makes the weight gradients of linear layers; convolutions have theirs in the
    first. Between the halves the inputs of the linear layers and the gradients of their outputs are held.

    The backward of a recomputed block repeats its forward. While it does, one block is there in full, which a
    rank's memory limit leaves room for, once.

    Args:
        shares: ranks of a stage's plane (context x tensor parallel), which divide each work; seconds and bytes are
            those of an even share.
        forward_only: no backward anywhere (validation); activations are then freed at once.
    Raises: PlanError: what a block needs to be recomputed alone is over the memory limit.
    """
    table: dict[Option, int] = {}
    cost_index: list[list[int]] = []
    output_bytes: list[list[float]] = []
    grad_leaves: list[bool] = []
    peaks = [0.0] * partition.num_ranks
    for work, size in zip(batching.works, batching.size_of, strict=True):
        module = spec.module(batching.modules[work.module])
        grad = not forward_only and any(grad_leaves[other] for other in work.after)
        rows: list[int] = []
        outputs: list[float] = []
        stages = partition.of_module(module.name)
        for stage in stages:
            option, grad, peak = _option(
                module, stage, size, grad, planner_config.flops_per_s, recomputation, shares, forward_only
            )
            peaks[stage.pp_rank] = max(peaks[stage.pp_rank], peak)
            rows.append(table.setdefault(option, len(table)))
            feeds = not stage.last or any(module.name in m.after for m in spec.modules)
            outputs.append(module.layers[stage.layers[1] - 1].output_bytes(size) / shares if feeds else 0.0)
        cost_index.append(rows)
        output_bytes.append(outputs)
        grad_leaves.append(grad)
    return PlanningProblem.build(
        num_ranks=partition.num_ranks,
        modules=partition.modules,
        stage_rank=partition.stage_rank,
        works=batching.works,
        costs=[(option,) for option in table],
        cost_index=cost_index,
        output_bytes=output_bytes,
        p2p=P2P(latency_s=planner_config.p2p_latency_s, bytes_per_s=planner_config.p2p_bytes_per_s),
        memory_limit_bytes=_limits(planner_config, peaks),
    )


def _limits(planner_config: PlannerConfig, peaks: list[float]) -> list[float] | None:
    """What activations may take on each rank from forward to backward; None: no limit."""
    if not planner_config.activation_memory_gib:
        return None
    limit = planner_config.activation_memory_gib * _GIB
    for rank, peak in enumerate(peaks):
        if peak >= limit:
            raise PlanError(
                f"planner.activation_memory_gib = {planner_config.activation_memory_gib}, but on pp_rank {rank} the "
                f"recomputation of one block takes {peak / _GIB:.3g} GiB; raise it, or lower training.seq_len or "
                "model.encoder.sub_microbatch_size"
            )
    return [limit - peak for peak in peaks]


def _option(
    module: ModuleSpec,
    stage: StageSpec,
    size: WorkSize,
    grad: bool,
    flops_per_s: float,
    recomputation: Recomputation,
    shares: int,
    forward_only: bool,
) -> tuple[Option, bool, float]:
    """The one option of a stage for a work, whether a gradient leaves the stage's end backwards, and the bytes
    that the backward needs on top of what was kept."""
    flops, kept, passing, repeated, peak, waiting, later = Flops(), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for layer in module.layers[slice(*stage.layers)]:
        of_layer = layer.flops(size, input_grad=grad)
        flops += of_layer
        grad = grad or (layer.trainable and not forward_only)
        if grad:
            kept += recomputation.kept_bytes(layer, size)
            repeated += recomputation.repeated_flops(layer, size)
            peak = max(peak, recomputation.peak_bytes(layer, size))
            if layer.splits_backward:
                waiting += layer.linear_bytes(size)
                later += of_layer.backward_weight
        else:  # autograd keeps nothing: one layer's tensors at a time
            passing = max(passing, layer.activation_bytes(size))
    flops_per_s *= shares
    option = Option(
        name="keep",
        forward_s=flops.forward / flops_per_s,
        backward_input_s=(flops.backward_input + repeated + flops.backward_weight - later) / flops_per_s
        if grad
        else 0.0,
        backward_weight_s=max(later / flops_per_s, LEAST_BACKWARD_S) if grad else 0.0,
        activation_bytes=max(kept, passing) / shares,
        weight_bytes=waiting / shares if grad else None,
    )
    return option, grad, peak / shares
