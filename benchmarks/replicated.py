"""A baseline of Cornstarch's comparison, simulated: every rank of the language model runs all encoders again.

The language model is cut over all pipeline ranks, and each rank holds a copy of every encoder with its projector. For
each microbatch, the forward of each language stage first runs the forwards of the encoders' works of that microbatch,
and its backward ends with their backwards; so features never travel. What it costs beyond this is not counted: the sum
of the copies' gradients over the ranks.

Source: after a baseline of Cornstarch, arXiv:2503.11367; this definition is ours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce

from mmtrain.planner.partition.partition import Partition, partition
from mmtrain.schedule.graph import ModuleStages, Work
from mmtrain.schedule.problem import Option, PlanningProblem
from mmtrain.spec.spec import ModelSpec
from mmtrain.spec.work_size import ZERO_WORK


def replicated_partition(
    spec: ModelSpec, num_ranks: int, passes: int, weights: Mapping[str, Sequence[float]]
) -> Partition:
    """The language model over all ranks, cut by its own seconds; each encoder is one stage, of which every rank has a
    copy, on rank 0.

    Args: passes: chunks of the language model on each rank. weights: module -> [layer] -> seconds.
    Raises: ConfigError: the language model has fewer layers than chunks.
    """
    text = spec.text.name
    return partition(
        spec,
        num_ranks,
        {module.name: passes if module.name == text else 1 for module in spec.modules},
        {module.name: replace(ZERO_WORK, rows=1, pairs=1, outputs=1) for module in spec.modules},
        ranks={module.name: range(num_ranks if module.name == text else 1) for module in spec.modules},
        # Copies burden all ranks alike.
        weights={name: of if name == text else [0.0] * len(of) for name, of in weights.items()},
    )


def rerun(problem: PlanningProblem) -> PlanningProblem:
    """The problem of the baseline: the language model's works alone, each stage with the encoders' works before it.

    Args: problem: on the partition of `replicated_partition`, with one option for each stage and work.
    """
    graph = problem.graph
    text = len(graph.modules) - 1
    own = [number for number, work in enumerate(graph.works) if work.module == text]
    costs: dict[tuple[Option, ...], int] = {}
    rows, works = [], []
    for number in own:
        work = graph.works[number]
        others = [problem.options(graph.stages(i)[0], i)[0] for i in work.after]
        options = [problem.options(stage, number)[0] for stage in graph.stages(number)]
        merged = [(reduce(_together, others, option),) for option in options]
        rows.append([costs.setdefault(options, len(costs)) for options in merged])
        works.append(Work(module=0, microbatch=work.microbatch, sub_microbatch=work.sub_microbatch))
    stages = graph.modules[text].stages
    return PlanningProblem.build(
        num_ranks=graph.num_ranks,
        modules=[ModuleStages(name=graph.modules[text].name, stages=tuple(range(len(stages))))],
        stage_rank=[graph.stage_rank[stage] for stage in stages],
        works=works,
        costs=list(costs),
        cost_index=rows,
        output_bytes=[problem.output_bytes[number] for number in own],
        p2p=problem.p2p,
    )


def _together(stage: Option, other: Option) -> Option:
    """A stage that also runs another one. Without a backward that keeps nothing."""
    kept = other if other.has_backward else replace(other, activation_bytes=0.0, weight_bytes=0.0)
    waiting = [
        option.activation_bytes if option.weight_bytes is None else option.weight_bytes for option in (stage, kept)
    ]
    return replace(
        stage,
        forward_s=stage.forward_s + kept.forward_s,
        backward_input_s=stage.backward_input_s + kept.backward_input_s,
        backward_weight_s=stage.backward_weight_s + kept.backward_weight_s,
        activation_bytes=stage.activation_bytes + kept.activation_bytes,
        weight_bytes=None if stage.weight_bytes is None else sum(waiting),
        restored_bytes=max(stage.restored_bytes, kept.restored_bytes),
        split_s=stage.split_s + kept.split_s,
        forward_exchange_s=stage.forward_exchange_s + kept.forward_exchange_s,
        backward_exchange_s=stage.backward_exchange_s + kept.backward_exchange_s,
        host_s=stage.host_s + kept.host_s,
        contention=max(stage.contention, kept.contention),
    )
