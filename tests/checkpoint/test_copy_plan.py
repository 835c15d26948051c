"""Copy plans: complete, from holders, and with the least busy sender, against arrays and enumeration."""

import math
from collections import Counter
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.checkpoint.copy_plan import BoxCopy, Shard, copy_plan, cut
from mmtrain.checkpoint.least_load import least_load
from mmtrain.checkpoint.messages import BoxMessage, Round, rounds_of
from mmtrain.config.topology import JobLayout
from mmtrain.errors import NoHolderError

ROWS, COLUMNS, LAYERS = 12, 4, 5
SHAPES = {"rows": (ROWS, COLUMNS), "columns": (ROWS, COLUMNS), "bias": (ROWS,), "norm": (5,), "step": ()}
TP_DIM = {"rows": 0, "columns": 1, "bias": 0}


def divided(offsets: list[int], lengths: list[int], dim: int, parts: int, part: int) -> None:
    """As `torch.chunk` does, in place."""
    size = -(-lengths[dim] // parts)
    first = min(part * size, lengths[dim])
    offsets[dim] += first
    lengths[dim] = min(size, lengths[dim] - first)


def of_rank(layout: JobLayout, rank: int) -> list[Shard]:
    """What a rank of a layout has: its layers, over tp and then FSDP2; the last stage copies the first matrix."""
    place = layout.coordinates(rank)
    depth = layout.depths[place.pipeline]
    first, last = (round(LAYERS * stage / depth) for stage in (place.pp, place.pp + 1))
    names = [(f"{layer}.{kind}", kind) for layer in range(first, last) for kind in SHAPES]
    if place.pp == depth - 1 and first > 0:
        names.append(("0.rows", "rows"))
    shards = []
    for name, kind in names:
        offsets, lengths = [0] * len(SHAPES[kind]), list(SHAPES[kind])
        if kind in TP_DIM:
            divided(offsets, lengths, TP_DIM[kind], layout.tp, place.tp)
        if kind != "step":
            divided(offsets, lengths, 0, layout.dp_shard, place.dp_shard)
        shards.append(Shard(name, tuple(offsets), tuple(lengths), "float32"))
    return shards


def of_layout(layout: JobLayout) -> list[list[Shard]]:
    return [of_rank(layout, rank) for rank in range(layout.world_size)]


def box(shard: Shard) -> tuple[slice, ...]:
    return tuple(slice(first, first + n) for first, n in zip(shard.offsets, shard.lengths, strict=True))


def counted(shards: list[Shard]) -> dict[str, np.ndarray]:
    """Name -> how many of the shards have each element."""
    counts: dict[str, np.ndarray] = {}
    for shard in shards:
        counts.setdefault(shard.name, np.zeros(SHAPES[shard.name.partition(".")[2]], int))[box(shard)] += 1
    return counts


def masks(shards: list[Shard]) -> dict[str, np.ndarray]:
    return {name: count > 0 for name, count in counted(shards).items()}


def nothing(name: str) -> np.ndarray:
    return np.zeros(SHAPES[name.partition(".")[2]], bool)


def least_busiest(held: list[dict[str, np.ndarray]], wanted: list[dict[str, np.ndarray]]) -> int:
    """The least possible bytes of the busiest sender: over all sets of ranks, what only they hold, shared evenly."""
    elements: Counter[tuple[int, ...]] = Counter()
    for receiver, mask in enumerate(wanted):
        for name, needed in mask.items():
            lacks = needed & ~held[receiver].get(name, nothing(name))
            holds = np.stack([rank.get(name, nothing(name)) for rank in held])[:, lacks]
            elements.update(tuple(np.flatnonzero(column)) for column in holds.T)
    ranks = sorted({rank for holders in elements for rank in holders})
    sets = (set(some) for size in range(1, len(ranks) + 1) for some in combinations(ranks, size))
    return 4 * max(
        (math.ceil(sum(n for holders, n in elements.items() if some >= set(holders)) / len(some)) for some in sets),
        default=0,
    )


def check(held: list[list[Shard]], wanted: list[list[Shard]]) -> tuple[str, ...]:
    """The plan is right, or refuses just the names that are lost, which are returned."""
    has, needs = [masks(shards) for shards in held], [masks(shards) for shards in wanted]
    anywhere = masks([shard for shards in held for shard in shards])
    lost = {n for mask in needs for n, needed in mask.items() if (needed & ~anywhere.get(n, nothing(n))).any()}
    if lost:
        with pytest.raises(NoHolderError, match="go on from a checkpoint") as caught:
            copy_plan(held, wanted)
        assert caught.value.names == tuple(sorted(lost))
        return caught.value.names
    plan = copy_plan(held, wanted)
    for receiver, mask in enumerate(needs):
        arrives = counted([copy.shard for copy in plan if copy.receiver == receiver])
        assert arrives.keys() <= mask.keys()
        for name, needed in mask.items():
            lacks = needed & ~has[receiver].get(name, nothing(name))
            assert (arrives.get(name, nothing(name).astype(int)) == lacks).all()
    load: Counter[int] = Counter()
    for copy in plan:
        assert has[copy.sender][copy.shard.name][box(copy.shard)].all() and copy.shard.elements
        load[copy.sender] += copy.shard.num_bytes
    assert max(load.values(), default=0) == least_busiest(has, needs)
    assert copy_plan(held, wanted) == plan
    return ()


LAYOUTS = [
    JobLayout.grid(pp=2, dp_replicate=4),
    JobLayout.grid(pp=2, dp_shard=2, dp_replicate=2),
    JobLayout.grid(pp=2, tp=2, dp_replicate=2),
    JobLayout.grid(dp_shard=2, tp=2, dp_replicate=2),
    JobLayout(depths=(1, 2, 3)),
    JobLayout(depths=(2, 3)),
    JobLayout(depths=(1, 2), dp_shard=2),
    JobLayout(depths=(3,), tp=2),
    JobLayout(depths=(2,), dp_shard=3),
]
AFTER = [
    *LAYOUTS,
    JobLayout(depths=(2, 2, 3)),
    JobLayout(depths=(1, 1), dp_shard=3),
    JobLayout(depths=(3, 4)),
    JobLayout(depths=(1,), dp_shard=5),
    JobLayout(depths=(2, 2)),
    JobLayout(depths=(3,)),
    JobLayout(depths=(1,)),
]


@pytest.mark.parametrize("before", LAYOUTS, ids=str)
def test_after_every_loss_each_missing_piece_has_one_sender_and_none_is_needlessly_busy(before: JobLayout) -> None:
    whole, refused, moved = of_layout(before), 0, 0
    losses = [lost for count in (0, 1, 2) for lost in combinations(range(before.world_size), count)]
    for number, lost in enumerate(losses):
        held = [shards for rank, shards in enumerate(whole) if rank not in lost]
        after = [layout for layout in AFTER if layout.world_size <= len(held)]
        for layout in {after[(number + shift) % len(after)] for shift in (0, 3, 5)}:
            wanted = of_layout(layout)
            names = check(held, [*wanted, *[[]] * (len(held) - len(wanted))])
            refused, moved = refused + bool(names), moved + (not names)
    assert moved and bool(refused) == (before.dp_replicate <= 2)  # at most two ranks are lost


def test_newcomers_get_all_and_ranks_outside_of_the_layout_only_send() -> None:
    held = of_layout(JobLayout.grid(pp=2, dp_replicate=2))
    wanted = of_layout(JobLayout(depths=(2, 3)))
    assert check([*held, []], wanted) == ()
    assert check([[], *held], wanted) == ()
    assert check([*held, [], []], [[], *wanted]) == ()


def test_without_a_change_nothing_is_copied() -> None:
    held = of_layout(JobLayout(depths=(2, 3)))
    assert copy_plan(held, held) == ()
    assert copy_plan([[], []], [[], []]) == ()


def test_what_another_dtype_holds_is_not_held() -> None:
    one = Shard("0.norm", (0,), (5,), "float32")
    with pytest.raises(NoHolderError, match=r"no rank holds all of 0\.norm"):
        copy_plan([[one], []], [[], [one._replace(dtype="bfloat16")]])


def test_what_two_wanted_boxes_have_in_common_travels_once() -> None:
    whole, rows, columns = (Shard("0.rows", at, size, "float32") for at, size in (
        ((0, 0), (ROWS, COLUMNS)), ((0, 0), (6, COLUMNS)), ((3, 1), (ROWS - 3, 2)),
    ))  # fmt: skip
    for wanted in ([rows, columns], [columns, rows], [rows, columns, whole], [whole, rows], [rows, rows]):
        assert check([[], [whole]], [wanted, []]) == ()
        assert check([[], [rows], [columns], [whole]], [wanted, [], [], []]) == ()
        elements = sum(copy.shard.elements for copy in copy_plan([[], [whole]], [wanted, []]))
        assert elements == (48 if whole in wanted else 24 if columns not in wanted else 24 + 18 - 6)


boxes = st.tuples(*[st.tuples(st.integers(0, n), st.integers(0, n)) for n in (ROWS, COLUMNS)]).map(
    lambda ends: Shard("0.rows", tuple(min(e) for e in ends), tuple(abs(a - b) for a, b in ends), "float32")
)


@given(st.lists(st.tuples(st.lists(boxes, max_size=2), st.lists(boxes, max_size=2)), min_size=1, max_size=4))
def test_any_boxes(ranks: list[tuple[list[Shard], list[Shard]]]) -> None:
    check([held for held, _ in ranks], [wanted for _, wanted in ranks])


@given(
    st.lists(
        st.tuples(
            st.sets(st.integers(0, 3), min_size=1).map(lambda ranks: tuple(sorted(ranks))),
            st.integers(1, ROWS),
            st.sampled_from(["float32", "bfloat16", "uint8"]),
        ),
        max_size=6,
    )
)
def test_with_several_dtypes_a_sender_has_at_most_an_element_a_group_more(
    tensors: list[tuple[tuple[int, ...], int, str]],
) -> None:
    shards = [Shard(f"{n}.bias", (0,), (length,), dtype) for n, (_, length, dtype) in enumerate(tensors)]
    held = [[s for s, (holders, _, _) in zip(shards, tensors, strict=True) if rank in holders] for rank in range(4)]
    load: Counter[int] = Counter()
    for copy in copy_plan([*held, []], [[], [], [], [], shards]):
        load[copy.sender] += copy.shard.num_bytes
    assert sum(load.values()) == sum(shard.num_bytes for shard in shards)
    holders = [set(ranks) for ranks, _, _ in tensors]
    sets = [set(some) for size in range(1, 5) for some in combinations(range(4), size)]
    least = max(
        math.ceil(sum(s.num_bytes for s, own in zip(shards, holders, strict=True) if own <= some) / len(some))
        for some in sets
    )
    assert least <= max(load.values(), default=0) <= least + 4 * len({ranks for ranks, _, _ in tensors})


def by_enumeration(groups: dict[tuple[int, ...], int]) -> int:
    """The least largest load, from all ways to deal single units."""
    units = [group for group, count in groups.items() for _ in range(count)]
    return min(max(Counter(choice).values(), default=0) for choice in product(*units))


@given(
    st.dictionaries(
        st.sets(st.integers(0, 3), min_size=1, max_size=3).map(lambda ranks: tuple(sorted(ranks))),
        st.integers(0, 3),
        max_size=3,
    )
)
def test_loads_are_the_least_that_enumeration_finds(groups: dict[tuple[int, ...], int]) -> None:
    flow = least_load(groups)
    assert {group: sum(flow[group].values()) for group in groups} == groups
    assert all(flow[group].keys() <= set(group) and min(flow[group].values()) >= 0 for group in groups)
    loads: Counter[int] = Counter()
    for part in flow.values():
        loads.update(part)
    assert max(loads.values(), default=0) == by_enumeration(groups)


@given(st.lists(st.integers(0, 4), max_size=3), st.data())
def test_a_cut_box_keeps_its_elements_in_their_order(lengths: list[int], data: st.DataObject) -> None:
    shard = Shard("x", tuple(range(10, 10 + len(lengths))), tuple(lengths), "float32")
    numbers = np.arange(shard.elements).reshape(lengths)
    elements = data.draw(st.integers(0, shard.elements))
    first, rest = cut(shard, elements)
    read = [numbers[box(s._replace(offsets=tuple(a - b for a, b in zip(s.offsets, shard.offsets, strict=True))))]
            for s in (*first, *rest)]  # fmt: skip
    assert sum(part.elements for part in first) == elements
    assert np.concatenate([part.ravel() for part in read] or [np.arange(0)]).tolist() == list(range(shard.elements))


# ------------------------------------------------------------------------------------------------- messages

DTYPES = st.sampled_from(["float32", "bfloat16", "uint8"])
copies = st.builds(
    lambda pair, name, length, dtype: BoxCopy(*pair, Shard(f"{name}.bias", (0,), (length,), dtype)),
    st.tuples(st.integers(0, 4), st.integers(0, 4)).filter(lambda pair: pair[0] != pair[1]),
    st.integers(0, 3),
    st.integers(1, ROWS),
    DTYPES,
)


@given(st.lists(copies, max_size=12, unique=True), st.integers(4, 40))
def test_messages_carry_all_in_rounds_that_end(plan: list[BoxCopy], most: int) -> None:
    rounds = [rounds_of(rank, plan, most) for rank in range(5)]
    sent = [one.send for own in rounds for one in own if one.send]
    assert sorted(sent) == sorted(one.receive for own in rounds for one in own if one.receive)
    for copy in plan:
        parts = [s for m in sent if m[:2] == copy[:2] for s in m.shards if (s.name, s.dtype) == copy.shard[::3]]
        assert sum(part.num_bytes for part in parts) >= copy.shard.num_bytes
    assert sum(message.num_bytes for message in sent) == sum(copy.shard.num_bytes for copy in plan)
    for message in sent:
        assert 0 < message.num_bytes <= most
        sizes = [shard.num_bytes // shard.elements for shard in message.shards]
        assert sizes == sorted(sizes, reverse=True)  # so that each begins at a multiple of its element
    assert ended(rounds)


def ended(rounds: list[list[Round]]) -> bool:
    """Whether ranks that wait in each round for both of its messages come to their ends."""
    at = [0] * len(rounds)

    def now(rank: int) -> Round | None:
        return rounds[rank][at[rank]] if at[rank] < len(rounds[rank]) else None

    def met(message: BoxMessage | None, done: set[BoxMessage]) -> bool:
        if message is None or message in done:
            return True
        ends = now(message.sender), now(message.receiver)
        return ends[0] is not None and ends[1] is not None and ends[0].send == message == ends[1].receive

    done: set[BoxMessage] = set()
    while True:
        current = [one for rank in range(len(rounds)) if (one := now(rank))]
        done |= {m for one in current for m in one if m and met(m, done)}
        moved = False
        for rank in range(len(rounds)):
            one = now(rank)
            if one and all(m is None or m in done for m in one):
                at[rank] += 1
                moved = True
        if not moved:
            return all(at[rank] == len(own) for rank, own in enumerate(rounds))


def test_the_messages_of_many_pairs_travel_at_the_same_time() -> None:
    def shard(name: int) -> Shard:
        return Shard(str(name), (0,), (4,), "float32")

    plan = [BoxCopy(sender, receiver, shard(n)) for sender in (0, 1) for receiver in (2, 3) for n in range(4)]
    assert [len(rounds_of(rank, plan, 16)) for rank in range(4)] == [8] * 4
    assert len(rounds_of(0, plan, 64)) == 2
