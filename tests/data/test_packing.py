from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.data.packing import (
    BinLimit,
    Dropped,
    EpochOrder,
    LoaderState,
    MixedOrder,
    SampleOrder,
    SourcePosition,
    StepPlan,
    bins_of_replica,
    plan_step,
)
from mmtrain.errors import DataError


def one_step(state: LoaderState, order: SampleOrder, length: Callable, bins: int, tokens: int) -> StepPlan:
    """A step of bins that hold so many tokens. Args: length: tokens of a sample, or what `plan_step` takes instead."""

    def size(sample: int) -> tuple[int, ...] | Dropped | None:
        found = length(sample)
        return (found,) if isinstance(found, int) else found

    limit = BinLimit(most=tokens, unit="tokens", key=f"training.seq_len = {tokens} tokens")
    return plan_step(state, order, size, num_bins=bins, limits=(limit,))


def steps(num: int, order: SampleOrder, length: Callable, state: LoaderState, bins: int, tokens: int) -> list[StepPlan]:
    plans = []
    for _ in range(num):
        plans.append(one_step(state, order, length, bins, tokens))
        state = plans[-1].state
    return plans


def test_first_fit_closes_at_the_first_sample_without_room() -> None:
    lengths = [6, 5, 3, 4, 9, 2, 8, 10, 10, 10]
    order = EpochOrder(len(lengths), shuffle=False)
    first, second = steps(2, order, lengths.__getitem__, LoaderState(seed=0), bins=2, tokens=10)
    # 6 and 5 open the bins, 3 goes to the first one with room, 4 to the second, 9 fits neither.
    assert first.bins == ((0, 2), (1, 3))
    assert first.state.cursor == 4
    # 9 | 2, 8 in the second; 10 closes.
    assert second.bins == ((4,), (5, 6))
    assert second.state.cursor == 7


@given(
    lengths=st.lists(st.integers(1, 20), min_size=60, max_size=80),
    seed=st.integers(0, 5),
    bins=st.integers(1, 3),
)
def test_each_epoch_uses_each_sample_once_and_resume_is_exact(lengths: list[int], seed: int, bins: int) -> None:
    order = EpochOrder(len(lengths), shuffle=True)
    plans = steps(12, order, lengths.__getitem__, LoaderState(seed=seed), bins, 20)
    sequence = []
    for plan in plans:
        for samples in plan.bins:
            assert samples
            assert sum(lengths[s] for s in samples) <= 20
        step = [s for samples in plan.bins for s in samples]
        assert len(step) <= len(lengths)
        sequence.append(step)
    state = plans[-1].state
    used = [s for step in sequence for s in step]
    assert len(used) == state.epoch * len(lengths) + state.cursor
    # Inside of a step the bins reorder samples; its set is a stretch of the endless sequence.
    expected = [order.sample(LoaderState(seed=seed, epoch=e, cursor=c)) for e in range(9) for c in range(len(lengths))]
    at = 0
    for step in sequence:
        assert sorted(step) == sorted(expected[at : at + len(step)])
        at += len(step)
    resumed = steps(5, EpochOrder(len(lengths), shuffle=True), lengths.__getitem__, plans[6].state, bins, 20)
    assert resumed == plans[7:12]


def test_orders_differ_by_epoch_and_seed_and_are_permutations() -> None:
    order = EpochOrder(50, shuffle=True)

    def epoch(seed: int, number: int) -> tuple[int, ...]:
        return tuple(order.sample(LoaderState(seed=seed, epoch=number, cursor=c)) for c in range(50))

    orders = {epoch(seed, number) for seed in (0, 1) for number in (0, 1)}
    assert len(orders) == 4
    assert all(sorted(o) == list(range(50)) for o in orders)
    assert epoch(0, 0) == epoch(0, 0)


def test_dropped_samples_are_reported_once_and_do_not_move_the_others() -> None:
    lengths: dict[int, int | Dropped] = dict.fromkeys(range(40), 5)
    lengths[3] = Dropped(sample=3, reason="bad")
    order = EpochOrder(40, shuffle=False)
    first, second = steps(2, order, lengths.__getitem__, LoaderState(seed=0), bins=2, tokens=10)
    assert first.bins == ((0, 1), (2, 4))
    assert [d.sample for d in first.dropped] == [3]
    assert second.bins == ((5, 6), (7, 8))
    assert second.dropped == ()


def test_a_step_crosses_the_epoch_but_takes_no_more_than_an_epoch() -> None:
    order = EpochOrder(5, shuffle=False)
    plans = steps(3, order, lambda s: 4, LoaderState(seed=0), bins=2, tokens=8)
    assert [p.bins for p in plans] == [((0, 1), (2, 3)), ((4, 0), (1, 2)), ((3, 4), (0, 1))]
    # Six places for five samples: the sixth would be a second epoch in one step, so the step closes.
    (plan,) = steps(1, order, lambda s: 4, LoaderState(seed=0), bins=3, tokens=8)
    assert plan.bins == ((0, 1), (2, 3), (4,))
    assert plan.state == LoaderState(seed=0, epoch=1, cursor=0)


def test_a_short_rest_of_an_epoch_is_filled_up_from_the_next() -> None:
    """An epoch's last step is as full as any other, also where the next order begins with its samples."""
    order = EpochOrder(40, shuffle=True)
    for seed in range(20):
        (plan,) = steps(1, order, lambda s: 5, LoaderState(seed=seed, cursor=38), bins=3, tokens=10)
        assert [len(b) for b in plan.bins] == [2, 2, 2]


def test_a_stream_ends_where_its_length_says_so() -> None:
    order = EpochOrder(None, shuffle=False)
    plans = steps(2, order, lambda s: 4 if s < 5 else None, LoaderState(seed=0), bins=2, tokens=8)
    assert [p.bins for p in plans] == [((0, 1), (2, 3)), ((4, 0), (1, 2))]
    assert plans[-1].state == LoaderState(seed=0, epoch=1, cursor=3)


def test_too_few_samples_are_refused_with_the_numbers() -> None:
    order = EpochOrder(3, shuffle=False)
    with pytest.raises(DataError, match=r"3 usable ones have 6 tokens and fill 1 of .*= 4 microbatches"):
        one_step(LoaderState(seed=0), order, lambda s: 2, bins=4, tokens=100)
    bad = [Dropped(sample=s, reason=f"broken {s}") for s in range(3)]
    with pytest.raises(DataError, match=r"no usable sample: 3 were left out; for example broken 0"):
        one_step(LoaderState(seed=0), order, bad.__getitem__, bins=4, tokens=100)
    with pytest.raises(DataError, match=r"cursor 9 is behind the source's 3 samples"):
        one_step(LoaderState(seed=0, cursor=9), order, lambda s: 2, bins=1, tokens=9)


def test_a_step_that_may_be_short_has_blank_bins() -> None:
    limits = (BinLimit(most=100, unit="tokens", key="training.seq_len = 100 tokens"),)
    for sizes, bins, blank in (([60, 60, 30], ((0, 2), (1,), (0,), (0,)), {2, 3}), ([9], ((0,),) * 4, {1, 2, 3})):
        order, size = EpochOrder(len(sizes), shuffle=False), lambda s, sizes=sizes: (sizes[s],)
        plan = plan_step(LoaderState(seed=0), order, size, num_bins=4, limits=limits, may_be_short=True)
        assert (plan.bins, plan.blank) == (bins, blank)
    order = EpochOrder(1, shuffle=False)
    with pytest.raises(DataError, match=r"^the split 'v' has no usable sample: 1 were left out; for example broken"):
        plan_step(
            LoaderState(seed=0), order, lambda s: Dropped(sample=s, reason="broken"), num_bins=4, limits=limits,
            may_be_short=True, split="the split 'v'",
        )  # fmt: skip


def test_a_bin_is_full_when_any_of_its_limits_is_reached() -> None:
    limits = (BinLimit(most=16, unit="frames", key="16 frames"), BinLimit(most=3, unit="clips", key="3 clips"))
    frames = [4, 4, 4, 4, 12, 16, 8, 8]
    order = EpochOrder(len(frames), shuffle=False)
    first = plan_step(LoaderState(seed=0), order, lambda s: (frames[s], 1), num_bins=2, limits=limits)
    # Three clips of 4 frames leave 4 frames of room, but no fourth clip; 12 fill up the second bin; 16 fits nowhere.
    assert first.bins == ((0, 1, 2), (3, 4))
    second = plan_step(first.state, order, lambda s: (frames[s], 1), num_bins=2, limits=limits)
    assert second.bins == ((5,), (6, 7))
    with pytest.raises(DataError, match=r"24 frames and 2 clips and fill 2 of .*= 3 microbatches of 16 frames and 3 c"):
        plan_step(LoaderState(seed=0), EpochOrder(2, shuffle=False), lambda s: (12, 1), num_bins=3, limits=limits)


@given(num_bins=st.integers(1, 24), degree=st.integers(1, 8))
def test_replicas_share_the_bins(num_bins: int, degree: int) -> None:
    shared = [b for rank in range(degree) for b in bins_of_replica(num_bins, rank, degree)]
    assert sorted(shared) == list(range(num_bins))


def test_state_round_trip_and_refusals() -> None:
    state = LoaderState(seed=3, epoch=2, cursor=17)
    assert LoaderState.from_dict(state.to_dict()) == state
    for values in (
        {"seed": 1, "epoch": 0},
        {"seed": 1, "epoch": "x", "cursor": 0},
        {"seed": 1, "epoch": 0, "cursor": -1},
    ):
        with pytest.raises(DataError, match=r"loader state"):
            LoaderState.from_dict(values)


# --------------------------------------------------------------------------------------- several sources


def mixed(counts: list[int | None], weights: list[float] | None = None, *, shuffle: bool = True) -> MixedOrder:
    names = [f"source-{i}" for i in range(len(counts))]
    return MixedOrder(names, weights or [1.0] * len(counts), counts, shuffle=shuffle)


def walk(order: MixedOrder, state: LoaderState, num: int) -> tuple[list[int], LoaderState]:
    """The next samples in the order of the mixture, and the position behind them."""
    numbers = []
    while len(numbers) < num:
        if order.ends(state):
            state = order.next_epoch(state)
            continue
        numbers.append(order.sample(state))
        state = order.after(state)
    return numbers, state


@given(
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    seed=st.integers(0, 5),
    data=st.data(),
    num=st.integers(1, 200),
)
def test_each_source_of_a_mixture_has_epochs_of_its_own_without_a_loss(
    counts: list[int], seed: int, data: st.DataObject, num: int
) -> None:
    weights = data.draw(st.lists(st.floats(0.1, 10), min_size=len(counts), max_size=len(counts)))
    order = mixed([*counts], weights)
    numbers, state = walk(order, LoaderState(seed=seed), num)
    assert state.cursor == num
    for which, (count, at) in enumerate(zip(counts, state.sources, strict=True)):
        used = [number // len(counts) for number in numbers if number % len(counts) == which]
        assert len(used) == at.epoch * count + at.cursor
        for start in range(0, len(used), count):
            epoch = used[start : start + count]
            assert len(set(epoch)) == len(epoch)
            assert set(epoch) <= set(range(count))
    middle = data.draw(st.integers(0, num))
    first, between = walk(mixed([*counts], weights), LoaderState(seed=seed), middle)
    again, end = walk(mixed([*counts], weights), LoaderState.from_dict(between.to_dict()), num - middle)
    assert (first + again, end) == (numbers, state)


@given(lengths=st.lists(st.integers(1, 20), min_size=20, max_size=30), bins=st.integers(1, 3), seed=st.integers(0, 3))
def test_steps_of_a_mixture_follow_its_sequence_and_resume(lengths: list[int], bins: int, seed: int) -> None:
    counts, weights = [len(lengths), 7], [3.0, 1.0]

    def size(number: int) -> int:
        return lengths[number // 2] if number % 2 == 0 else 3

    plans = steps(8, mixed([*counts], weights), size, LoaderState(seed=seed), bins, 20)
    used = [sorted(number for samples in plan.bins for number in samples) for plan in plans]
    expected, _ = walk(mixed([*counts], weights), LoaderState(seed=seed), sum(map(len, used)))
    for step in used:
        assert step == sorted(expected[: len(step)])
        expected = expected[len(step) :]
    state = LoaderState.from_dict(plans[3].state.to_dict())
    assert steps(4, mixed([*counts], weights), size, state, bins, 20) == plans[4:]


def test_the_source_of_a_position_depends_on_seed_position_and_weights_alone() -> None:
    def sources(order: MixedOrder, seed: int = 0) -> list[int]:
        return [order.source(LoaderState(seed=seed, cursor=k)) for k in range(4000)]

    first = sources(mixed([10, 1000, 5], [1, 2, 7]))
    assert first == sources(mixed([3, 4, None], [0.5, 1, 3.5], shuffle=False))
    assert first[3000] == mixed([1, 1, 1], [1, 2, 7]).source(LoaderState(seed=0, cursor=3000))
    assert [first.count(i) / 4000 for i in range(3)] == pytest.approx([0.1, 0.2, 0.7], abs=0.02)
    assert first != sources(mixed([10, 1000, 5], [1, 2, 7]), seed=1)
    assert set(sources(mixed([4], [3.0]))) == {0}


def test_the_order_in_a_source_does_not_depend_on_the_other_sources() -> None:
    def order_of_one(weights: list[float], extra: list[int | None]) -> list[int]:
        order = mixed([40, *extra], weights)
        numbers, _ = walk(order, LoaderState(seed=2), 300)
        return [number // (1 + len(extra)) for number in numbers if number % (1 + len(extra)) == 0][:40]

    assert order_of_one([1.0, 1.0], [9]) == order_of_one([1.0, 2.0, 0.5], [9, 20]) != list(range(40))


def test_a_small_source_is_repeated_within_a_step() -> None:
    order = mixed([2, 50], [5.0, 1.0])
    (plan,) = steps(1, order, lambda number: 1, LoaderState(seed=0), bins=2, tokens=15)
    numbers = [number for samples in plan.bins for number in samples]
    assert len(numbers) == 30
    assert sum(number % 2 == 0 for number in numbers) > 15
    # As many samples as all sources have together, and no more.
    (plan,) = steps(1, order, lambda number: 1, LoaderState(seed=0), bins=2, tokens=50)
    assert sum(map(len, plan.bins)) == plan.state.cursor == 52


def test_a_source_without_a_usable_sample_ends_nothing_but_its_share() -> None:
    def size(number: int) -> int | Dropped:
        return Dropped(sample=number, reason="broken") if number % 2 else 1

    (plan,) = steps(1, mixed([40, 5]), size, LoaderState(seed=0), bins=1, tokens=10)
    assert len(plan.bins[0]) == 10
    assert 0 < len(plan.dropped) <= 5
    with pytest.raises(DataError, match="source 'source-1' has no sample; remove it"):
        mixed([40, 0])


def test_streams_of_a_mixture_end_where_their_lengths_say_so() -> None:
    order = mixed([None, None], shuffle=False)
    lengths = [5, 40]
    size = [lambda i: 4 if i < lengths[0] else None, lambda i: 4 if i < lengths[1] else None]
    plans = steps(8, order, lambda number: size[number % 2](number // 2), LoaderState(seed=0), 2, 8)
    for which, length in enumerate(lengths):
        used = [n // 2 for plan in plans for samples in plan.bins for n in sorted(samples) if n % 2 == which]
        assert sorted(used) == sorted(i % length for i in range(len(used)))


def test_states_of_one_and_of_several_sources() -> None:
    state = LoaderState(
        seed=3, cursor=9, sources=(SourcePosition(name="a", epoch=1, cursor=2), SourcePosition(name="b"))
    )
    assert state.to_dict()["sources"] == {"a": {"epoch": 1, "cursor": 2}, "b": {"epoch": 0, "cursor": 0}}
    assert LoaderState.from_dict(state.to_dict()) == state
    assert LoaderState(seed=3).to_dict() == {"seed": 3, "epoch": 0, "cursor": 0}, "as before there were several"
    one = EpochOrder(20, shuffle=True)
    with pytest.raises(DataError, match="a position in the sources a, b, but the job has one source; set"):
        one_step(state, one, lambda s: 2, bins=1, tokens=9)
    gone = LoaderState(seed=3, cursor=9, sources=(SourcePosition(name="source-0", cursor=9),))
    with pytest.raises(DataError, match="cursor 9 is behind the source's 3 samples"):
        one_step(gone, mixed([3, 4]), lambda s: 2, bins=1, tokens=9)  # type: ignore[arg-type]
    for bad in ({"a": 5}, {"a": {"epoch": 0}}, {"a": {"epoch": 0, "cursor": -1}}, [1]):
        with pytest.raises(DataError, match=r"loader state"):
            LoaderState.from_dict({"seed": 0, "epoch": 0, "cursor": 0, "sources": bad})


@given(
    lengths=st.lists(st.integers(1, 8), min_size=40, max_size=60),
    number=st.integers(4, 20),
    seed=st.integers(0, 5),
)
def test_a_number_of_samples_ends_a_step_and_spreads_it(lengths: list[int], number: int, seed: int) -> None:
    order, state = EpochOrder(len(lengths), shuffle=True), LoaderState(seed=seed)
    limit = BinLimit(most=20, unit="tokens", key="training.seq_len = 20 tokens")
    sequence = []
    for _ in range(6):
        step = plan_step(state, order, lambda s: (lengths[s],), num_bins=4, limits=(limit,), num_samples=number)
        assert all(step.bins)
        samples = [s for samples in step.bins for s in samples]
        most, least = (f(sum(lengths[s] for s in samples) for samples in step.bins) for f in (max, min))
        assert most <= 20
        assert most - least <= max(lengths)
        # It ends earlier only where the next sample has no room.
        assert len(samples) == number or least > 20 - max(lengths)
        sequence += samples
        state = step.state
    expected = [order.sample(LoaderState(seed=seed, epoch=e, cursor=c)) for e in range(4) for c in range(len(lengths))]
    assert sorted(sequence) == sorted(expected[: len(sequence)])
