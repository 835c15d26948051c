"""The planning problem of an iteration: seconds from a cost model, bytes from the layers."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mmtrain.config.memory_amount import show_bytes
from mmtrain.config.planner import PlannerConfig
from mmtrain.costs.cost_model import CostModel
from mmtrain.costs.overheads import Overheads, charged
from mmtrain.errors import PlanError
from mmtrain.modality.submesh import Submesh
from mmtrain.planner.batching import Batching
from mmtrain.planner.memory.options import MemoryChoices
from mmtrain.planner.partition.partition import Partition
from mmtrain.planner.prices import Prices, StagePrice
from mmtrain.schedule.library.memory import choose_options, components
from mmtrain.schedule.problem import Option, PlanningProblem
from mmtrain.spec.memory_strategies import BlockMemory
from mmtrain.spec.spec import ModelSpec

_GIB = 2.0**30


def make_problem(
    spec: ModelSpec,
    partition: Partition,
    batching: Batching,
    costs: CostModel,
    planner_config: PlannerConfig,
    *,
    memory: MemoryChoices = MemoryChoices(),  # noqa: B008
    limits: Sequence[float | None] | None = None,
    submesh: Submesh = Submesh(),  # noqa: B008
    forward_only: bool = False,
) -> PlanningProblem:
    """The planning problem of one iteration.

    A stage has a backward for a work if something trainable lies at or before it *in this iteration*:
    a frozen language model needs none for a text-only microbatch.

    In a split backward, W computes the weight gradients of linear layers; I computes those of convolutions. Between I
    and W the inputs of the linear layers and the gradients of their outputs are held.

    The backward of a recomputed block repeats its forward; meanwhile all activations of that block are held. Offloaded
    blocks are restored three at a time; if the limits leave no room for that, no block is offloaded in this iteration.

    Args:
        costs: seconds of layers and transfers.
        memory: what blocks may do with their activations. If blocks may choose and any rank has a limit, each stage and
            work has several options.
        limits: [pp_rank] -> bytes that activations may take; None: those of planner_config.
        submesh: the ranks of a stage, which divide each work. Seconds and bytes are those of one rank; if whole images
            are divided, of the rank with the most patches.
        forward_only: there is no backward (validation); activations are freed at once.
    Raises: PlanError: the tensors that one backward restores or makes exceed the memory limit by themselves, or a
        time, size or number is outside of `mmtrain.schedule.number_ranges`.
    Source: DIP, arXiv:2504.14145, sections 4 and 5.3.
    """
    if limits is None and planner_config.search.activation_memory_gib:
        limits = [planner_config.search.activation_memory_gib * _GIB] * partition.num_ranks
    limited = limits is not None and any(limit is not None for limit in limits)

    def attempt(memory: MemoryChoices) -> tuple[PlanningProblem, Sequence[BlockMemory]]:
        prices = Prices(
            spec=spec,
            chains={name: partition.of_module(name) for name in batching.modules},
            costs=costs,
            memory=memory if limited else memory.fixed,
            submesh=submesh,
            forward_only=forward_only,
        )
        return _problem(prices, partition, batching, limits), prices.strategies

    problem, strategies = attempt(memory)
    fewer = tuple(how for how in strategies if how is not BlockMemory.OFFLOAD)
    if 0 < len(fewer) < len(strategies) and not _fits(problem):
        problem, _ = attempt(replace(memory, strategies=fewer))
    _check_restored(problem)
    return problem


def rank_seconds(
    spec: ModelSpec,
    partition: Partition,
    batching: Batching,
    costs: CostModel,
    *,
    memory: MemoryChoices = MemoryChoices(),  # noqa: B008
    submesh: Submesh = Submesh(),  # noqa: B008
) -> NDArray[np.float64]:
    """[microbatch, pp_rank] -> seconds of the works, forward and backward, with the overheads of their dispatch but
    not those of messages; without a planning problem, which takes several times as long to make.

    Arguments: see `make_problem`. Blocks choose no memory strategy.
    """
    chains = {name: partition.of_module(name) for name in batching.modules}
    prices = Prices(spec=spec, chains=chains, costs=costs, memory=memory.fixed, submesh=submesh, forward_only=False)
    stages = [
        (item.work, price, stage.pp_rank)
        for number, (item, prices_of) in enumerate(zip(batching.items, _chains(prices, batching), strict=True))
        for price, stage in zip(prices_of, chains[batching.module_of(number)], strict=True)
    ]
    of_options = np.array([_seconds(options[0], costs.overheads) for options in prices.table])
    num_microbatches = 1 + max(work.microbatch for work, _, _ in stages)
    cells = [work.microbatch * partition.num_ranks + rank for work, _, rank in stages]
    weights = of_options[[price.options for _, price, _ in stages]]
    summed = np.zeros(num_microbatches * partition.num_ranks)
    np.add.at(summed, cells, weights)
    return summed.reshape(num_microbatches, partition.num_ranks)


def _seconds(option: Option, overheads: Overheads) -> float:
    backward_s = option.backward_input_s + option.backward_weight_s
    return option.forward_s + overheads.forward_s + (backward_s + overheads.backward_s if backward_s else 0.0)


def _chains(prices: Prices, batching: Batching) -> list[list[StagePrice]]:
    """[work] -> the prices of the stages of its module."""
    prices_of: list[list[StagePrice]] = []
    sizes = batching.priced_sizes(prices.submesh)
    for number, item in enumerate(batching.items):
        grad = not prices.forward_only and any(prices_of[source][-1].grad for source in item.work.after)
        prices_of.append(prices.chain(batching.module_of(number), sizes[number], grad))
    return prices_of


def _problem(
    prices: "Prices", partition: Partition, batching: Batching, limits: Sequence[float | None] | None
) -> PlanningProblem:
    prices_of = _chains(prices, batching)
    try:
        problem = PlanningProblem.build(
            num_ranks=partition.num_ranks,
            modules=partition.modules,
            stage_rank=partition.stage_rank,
            works=batching.works,
            costs=list(prices.table),
            cost_index=[[price.options for price in chain] for chain in prices_of],
            output_bytes=[[price.output_bytes for price in chain] for chain in prices_of],
            p2p=prices.costs.p2p,
            memory_limit_bytes=limits,
        )
        return charged(problem, prices.costs.overheads)
    except PlanError as error:  # a number outside of `mmtrain.schedule.number_ranges`
        raise PlanError(
            f"this job cannot be planned: {error}; times follow from planner.device.flops_per_s, hardware or profile, "
            "sizes from training.global_batch_size, seq_len and the models"
        ) from error


def _check_restored(problem: PlanningProblem) -> None:
    """Checks that each rank has room for the tensors that one backward restores, or makes in addition."""
    for rank, limit in enumerate(problem.memory_limit_bytes):
        if limit is not None and problem.held_limit_bytes[rank] == 0.0:
            most_bytes = max(
                option.restored_bytes
                for node in problem.graph.nodes()
                if problem.graph.stage_rank[node[0]] == rank
                for option in problem.options(*node)
            )
            raise PlanError(
                f"pp_rank {rank}: the tensors that a backward computes again or copies back, or a head makes in pieces "
                f"take up to {show_bytes(most_bytes)}, over the memory limit of {show_bytes(limit)} for activations; "
                "raise planner.memory_limit (or activation_memory_gib), or lower training.seq_len, loss_chunk_tokens "
                "or model.encoder.sub_microbatch_size"
            )


def _fits(problem: PlanningProblem) -> bool:
    """Whether each microbatch fits by itself, in addition to the tensors that backwards restore."""
    try:
        choose_options(problem, components(problem.graph))
    except PlanError:
        return False
    return True
