"""Costs of an iteration from the model's FLOPs on a nominal device, as a planning problem."""

from mmtrain.config import PlannerConfig
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
    forward_only: bool = False,
) -> PlanningProblem:
    """The planning problem of one iteration: seconds are FLOPs / flops_per_s, bytes come from the layers.

    A stage has a backward for a work if something trainable lies at or before it *in this iteration*:
    a frozen language model needs none for a text-only microbatch.

    Args: forward_only: no backward anywhere (validation); activations are then freed at once.
    """
    table: dict[Option, int] = {}
    cost_index: list[list[int]] = []
    output_bytes: list[list[float]] = []
    grad_leaves: list[bool] = []
    for work, size in zip(batching.works, batching.size_of, strict=True):
        module = spec.module(batching.modules[work.module])
        grad = not forward_only and any(grad_leaves[other] for other in work.after)
        rows: list[int] = []
        outputs: list[float] = []
        stages = partition.of_module(module.name)
        for stage in stages:
            option, grad = _option(module, stage, size, grad, planner_config.flops_per_s, forward_only)
            rows.append(table.setdefault(option, len(table)))
            feeds = not stage.last or any(module.name in m.after for m in spec.modules)
            outputs.append(module.layers[stage.layers[1] - 1].output_bytes(size) if feeds else 0.0)
        cost_index.append(rows)
        output_bytes.append(outputs)
        grad_leaves.append(grad)
    limit = planner_config.activation_memory_gib * _GIB
    return PlanningProblem.build(
        num_ranks=partition.num_ranks,
        modules=partition.modules,
        stage_rank=partition.stage_rank,
        works=batching.works,
        costs=[(option,) for option in table],
        cost_index=cost_index,
        output_bytes=output_bytes,
        p2p=P2P(latency_s=planner_config.p2p_latency_s, bytes_per_s=planner_config.p2p_bytes_per_s),
        memory_limit_bytes=[limit] * partition.num_ranks if limit else None,
    )


def _option(
    module: ModuleSpec, stage: StageSpec, size: WorkSize, grad: bool, flops_per_s: float, forward_only: bool
) -> tuple[Option, bool]:
    """The one option of a stage for a work, and whether a gradient leaves the stage's end backwards."""
    flops, kept, passing = Flops(), 0.0, 0.0
    for layer in module.layers[slice(*stage.layers)]:
        flops += layer.flops(size, input_grad=grad)
        grad = grad or (layer.trainable and not forward_only)
        if grad:
            kept += layer.activation_bytes(size)
        else:  # autograd keeps nothing: one layer's tensors at a time
            passing = max(passing, layer.activation_bytes(size))
    option = Option(
        name="keep",
        forward_s=flops.forward / flops_per_s,
        backward_input_s=flops.backward_input / flops_per_s if grad else 0.0,
        backward_weight_s=max(flops.backward_weight / flops_per_s, LEAST_BACKWARD_S) if grad else 0.0,
        activation_bytes=max(kept, passing),
    )
    return option, grad
