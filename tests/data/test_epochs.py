"""Steps of a job of epochs: every sample once an epoch, whatever the number of replicas, and from any step on."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.data.loader import Loader
from mmtrain.data.packing import BinLimit, Dropped, EpochOrder, LoaderState, StepPlan, plan_step
from mmtrain.errors import DataError
from tests.data.samples import make_config

LIMITS = (BinLimit(most=20, unit="tokens", key="training.seq_len = 20 tokens"),)


def all_steps(order, size, state, epochs, *, bins, num_samples=0) -> list[StepPlan]:
    """The steps of a job from a state to its end."""
    plans = []
    while state.epochs < epochs:
        plans.append(
            plan_step(state, order, size, num_bins=bins, limits=LIMITS, num_samples=num_samples, epochs=epochs)
        )
        state = plans[-1].state
    return plans


def used(plan: StepPlan) -> list[int]:
    return [sample for index, samples in enumerate(plan.bins) if index not in plan.blank for sample in samples]


@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=40).filter(any),
    seed=st.integers(0, 5),
    bins=st.integers(1, 5),
    num_samples=st.sampled_from([0, 5, 9]),
    epochs=st.sampled_from([Fraction(1), Fraction(3), Fraction(1, 2), Fraction(23, 10)]),
)
def test_each_epoch_has_each_sample_once_and_ends_with_its_step(lengths, seed, bins, num_samples, epochs):
    """Samples of no tokens are those that are left out."""
    order, count = EpochOrder(len(lengths), shuffle=True), len(lengths)

    def size(sample):
        return (lengths[sample],) if lengths[sample] else Dropped(sample=sample, reason="broken")

    first = LoaderState(seed=seed)
    try:
        plans = all_steps(order, size, first, epochs, bins=bins, num_samples=num_samples)
    except DataError as error:  # of the part of an epoch nothing may be usable
        assert "no usable sample" in str(error) and epochs.denominator > 1
        return
    total = -(-(epochs.numerator * count) // epochs.denominator)
    expected = [order.sample(LoaderState(seed=seed, epoch=k // count, cursor=k % count)) for k in range(total)]
    found = [sample for plan in plans for sample in (*used(plan), *(one.sample for one in plan.dropped))]
    for epoch in range(-(-total // count)):
        part = slice(epoch * count, (epoch + 1) * count)
        assert Counter(found[part]) == Counter(expected[part])
    ends = [plan.state.epoch * count + plan.state.cursor for plan in plans]
    assert ends[-1] == total and {k * count for k in range(1, total // count + 1)} <= set(ends)
    assert all(used(plan) for plan in plans)
    for before in plans:  # the rest from any step on
        again = all_steps(order, size, before.state, epochs, bins=bins, num_samples=num_samples)
        assert again == plans[len(plans) - len(again) :]
    assert not num_samples or all(len(used(plan)) <= num_samples for plan in plans)
    if not num_samples:  # only the last step of an epoch, or of the job, has blank microbatches
        assert all(not plan.blank for plan, end in zip(plans, ends, strict=True) if end % count and end != total)


def test_the_rest_of_an_epoch_that_is_left_out_belongs_to_the_step_before():
    """Else the last step would have nothing."""
    size = [(8,), (8,), (8,), None, None].__getitem__
    order = EpochOrder(5, shuffle=False)

    def measured(sample):
        return size(sample) or Dropped(sample=sample, reason="broken")

    for num_samples in (0, 3):
        plans = all_steps(order, measured, LoaderState(seed=0), Fraction(2), bins=3, num_samples=num_samples)
        assert [used(plan) for plan in plans] == [[0, 1, 2], [0, 1, 2]]
        assert [len(plan.dropped) for plan in plans] == [2, 2]


def test_a_step_of_fewer_samples_than_microbatches_has_blank_ones_at_the_end_of_an_epoch_alone():
    order = EpochOrder(7, shuffle=False)
    first, second = all_steps(order, lambda sample: (20,), LoaderState(seed=0), Fraction(1), bins=4)
    assert first.bins == ((0,), (1,), (2,), (3,)) and not first.blank
    assert second.bins == ((4,), (5,), (6,), (4,)) and second.blank == {3}


def test_an_epoch_of_a_source_that_has_changed_is_refused():
    state = all_steps(EpochOrder(7, shuffle=False), lambda sample: (20,), LoaderState(seed=0), Fraction(1), bins=4)[
        0
    ].state
    order = EpochOrder(8, shuffle=False)
    with pytest.raises(
        DataError, match="had 7 samples when it was saved and has 8 now, so its epoch cannot be completed"
    ):
        plan_step(state, order, lambda sample: (20,), num_bins=4, limits=LIMITS, epochs=Fraction(1))
    assert plan_step(state, order, lambda sample: (20,), num_bins=4, limits=LIMITS).bins  # of a job of steps


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_replicas_and_workers_share_an_uneven_number_of_samples(charts, degree, num_workers):
    """180 samples, in steps that do not fill up: each once an epoch, and no replica counts a blank one."""
    config = make_config(charts, num_workers=num_workers, global_batch_size=3)
    epochs = Fraction(3, 2)
    read, counted = Counter(), 0
    for rank in range(degree):
        with Loader(config, dp_rank=rank, dp_degree=degree, epochs=epochs) as loader:
            for batch, meta, _ in loader:
                assert len(batch.microbatches) == len(meta.microbatches)
                read += Counter(d.sample for m in meta.microbatches for d in m.documents if d.num_targets)
                counted += meta.num_samples
            assert (loader.state.epoch, loader.state.cursor, loader.state.num_samples) == (1, 90, 180)
    assert counted == 270 and sorted(Counter(read.values()).items()) == [(1, 90), (2, 90)]
