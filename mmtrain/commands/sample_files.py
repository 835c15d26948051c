"""Costs of samples: of a job's data, read up to their headers, or of a drawn workload."""

import itertools

from mmtrain.config.config import Config
from mmtrain.errors import DataError
from mmtrain.planner.assignment.sample_costs import (
    SampleCosts,
    SamplePricer,
    drawn_samples,
    drawn_source,
    priced,
    settings_of,
)


def read_costs(job: Config, most: int) -> SampleCosts:
    """The costs of the first samples of a job's training data, in the order of its seed; no pixel is decoded.

    Args: most: samples, at most.
    Raises: ConfigError: the data do not exist or do not fit the model. DataError: no sample is usable.
    """
    from mmtrain.data.packing import LoaderState
    from mmtrain.data.step_maker import StepMaker

    maker = StepMaker(job, split=job.data.split, shuffle=job.data.shuffle, dp_rank=0, dp_degree=1)
    samples, is_whole = maker.first_samples(LoaderState(seed=job.debug.seed), most)
    if not samples:
        raise DataError(f"{job.data.description} has no usable sample; change data.source or training.seq_len")
    return SampleCosts(
        job=settings_of(job),
        limits=tuple(limit.most for limit in maker.limits),
        is_whole=is_whole,
        samples=priced(SamplePricer.of(job), samples),
    )


def drawn_costs(job: Config, most: int, workload: str = "", seed: int = 0) -> SampleCosts:
    """The costs of samples of a drawn workload. Args: workload: empty: the usual one of the model.

    Raises: ConfigError: the workload does not exist, or is for another kind of model.
    """
    from mmtrain.modality.typical import TypicalSizes
    from mmtrain.simulator.typical_iterations import usual_workload
    from mmtrain.simulator.workloads import draw

    name = workload or usual_workload(job)
    bins = TypicalSizes.typical(job)
    metas = (draw(name, bins, seed=seed, iteration=i) for i in itertools.count())
    samples = drawn_samples(metas, most)
    limits: tuple[int, ...] = (job.training.seq_len,)
    if bins.clip is not None:
        limits = (max(size[0] for _, size in samples), job.data.max_clips)
    return SampleCosts(
        job=settings_of(job, drawn_source(name)),
        limits=limits,
        is_whole=False,
        samples=priced(SamplePricer.of(job), samples),
    )
