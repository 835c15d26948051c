"""The steps that simulations read: the microbatches of all replicas, drawn from a workload or from samples. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from mmtrain.config.config import Config
from mmtrain.modality.metadata import ClipMeta, DocumentMeta, IterationMeta, MicrobatchMeta
from mmtrain.modality.typical import TypicalSizes
from mmtrain.planner.assignment.dealing import Dealer
from mmtrain.planner.assignment.sample_costs import SampleCosts
from mmtrain.simulator.workloads import draw

StepMicrobatches = tuple[MicrobatchMeta, ...]
"""The microbatches of one step, which the data-parallel replicas divide in their order."""


def drawn_steps(
    config: Config, workload: str, number: int, *, seed: int = 0, image_side: int = 0
) -> list[StepMicrobatches]:
    """Steps of a workload: equal ones whatever the degrees of parallelism.

    Args: number: of steps. seed: of the draws. image_side: as of `TypicalSizes.of`.
    Raises: ConfigError: the workload does not exist, or is for another kind of model; or an image does not fit.
    """
    bins = replace(TypicalSizes.of(config, image_side), num_microbatches=config.training.global_batch_size)
    return [draw(workload, bins, seed=seed, iteration=index).microbatches for index in range(number)]


def packed_step(config: Config, costs: SampleCosts, seed: tuple[int, ...]) -> StepMicrobatches:
    """A step of full microbatches of samples, which are drawn with replacement. Args: seed: of the draws."""
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
    microbatches: list[MicrobatchMeta] = []
    own: list[DocumentMeta | ClipMeta] = []
    room, drawn = list(costs.limits), 0
    while len(microbatches) < config.training.global_batch_size:
        sample = costs.samples[int(rng.integers(len(costs.samples)))]
        if own and any(size > free for size, free in zip(sample.size, room, strict=True)):
            microbatches.append(MicrobatchMeta.of(own))
            own, room = [], list(costs.limits)
        own.append(sample.meta.numbered(drawn))  # it may be drawn twice
        room = [free - size for size, free in zip(sample.size, room, strict=True)]
        drawn += 1
    return tuple(microbatches)


def divided(step: Sequence[MicrobatchMeta], dp: int, dealer: Dealer | None = None) -> list[IterationMeta]:
    """[replica] -> its part of a step.

    Args: dp: replicas, each of which takes as many microbatches in a row, the first ones one more. dealer: of pipelines
    of unequal depth, by which they are dealt as in training.
    """
    if dealer is not None:
        return [IterationMeta(microbatches=tuple(step[index] for index in own)) for own in dealer(step)]
    ends = list(accumulate(len(step) // dp + (replica < len(step) % dp) for replica in range(dp)))
    return [IterationMeta(microbatches=tuple(step[first:end])) for first, end in pairwise([0, *ends])]
