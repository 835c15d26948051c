"""Planning problems for tests: chains in closed form, a small two-module graph, and random work graphs."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from mmtrain.schedule.graph import ModuleStages, Work
from mmtrain.schedule.problem import P2P, Option, PlanningProblem

NO_P2P = P2P(latency_s=0.0, bytes_per_s=1e9)


def option(forward_s: float = 1.0, backward_s: float = 2.0, activation_bytes: float = 1.0) -> Option:
    """An option whose backward time is half input, half weight."""
    return halves(forward_s, backward_s / 2, backward_s / 2, activation_bytes)


def halves(
    forward_s: float, input_s: float, weight_s: float, activation_bytes: float = 1.0, weight_bytes: float | None = None
) -> Option:
    """An option with its seconds for F, I and W."""
    return Option(
        name="keep",
        forward_s=forward_s,
        backward_input_s=input_s,
        backward_weight_s=weight_s,
        activation_bytes=activation_bytes,
        weight_bytes=weight_bytes,
    )


def chain(
    num_ranks: int,
    num_microbatches: int,
    *,
    num_segments: int = 1,
    cost: Option | None = None,
    v: bool = False,
    p2p: P2P = NO_P2P,
    memory_limit_bytes: Sequence[float | None] | None = None,
) -> PlanningProblem:
    """One module on all ranks, every stage and microbatch with the same cost; `v`: down the ranks and back up."""
    num_stages = num_ranks * (2 if v else num_segments)
    down = list(range(num_ranks))
    return PlanningProblem.build(
        num_ranks=num_ranks,
        modules=[ModuleStages(name="language", stages=tuple(range(num_stages)))],
        stage_rank=down + down[::-1] if v else down * num_segments,
        works=[Work(module=0, microbatch=m, sub_microbatch=0) for m in range(num_microbatches)],
        costs=[[cost or option()]],
        cost_index=[[0] * num_stages] * num_microbatches,
        output_bytes=[[0.0] * num_stages] * num_microbatches,
        p2p=p2p,
        memory_limit_bytes=memory_limit_bytes,
    )


def two_modules(
    num_ranks: int,
    images: Sequence[int],
    *,
    vision: Option | None = None,
    language: Option | None = None,
    ranks: tuple[Sequence[int], Sequence[int]] | None = None,
    memory_limit_bytes: Sequence[float | None] | None = None,
) -> PlanningProblem:
    """Vision before language; microbatch m has `images[m]` vision works.

    Args: ranks: of the stages of each module; None: one segment each.
    """
    works: list[Work] = []
    for m, count in enumerate(images):
        first = len(works)
        works += [Work(module=0, microbatch=m, sub_microbatch=i) for i in range(count)]
        works.append(Work(module=1, microbatch=m, sub_microbatch=0, after=tuple(range(first, first + count))))
    stage_rank = ranks or (range(num_ranks), range(num_ranks))
    depth = [*map(len, stage_rank)]
    return PlanningProblem.build(
        num_ranks=num_ranks,
        modules=[
            ModuleStages(name="vision", stages=tuple(range(depth[0]))),
            ModuleStages(name="language", stages=tuple(range(depth[0], sum(depth)))),
        ],
        stage_rank=[*stage_rank[0], *stage_rank[1]],
        works=works,
        costs=[[vision or option()], [language or option()]],
        cost_index=[[w.module] * depth[w.module] for w in works],
        output_bytes=[[0.0] * depth[w.module] for w in works],
        p2p=NO_P2P,
        memory_limit_bytes=memory_limit_bytes,
    )


def in_pairs(
    ranks: tuple[int, int],
    num_microbatches: int,
    share: float = 0.5,
    *,
    uneven: float = 0.0,
    memory_limit_bytes: Sequence[float | None] | None = None,
) -> PlanningProblem:
    """Vision and language on ranks of their own, with equal work in each microbatch on each of them: F 1 s, B 2 s.

    Args:
        ranks: of vision and language.
        share: of the images of every other microbatch, which the next one reads.
        uneven: part of the language work that every other microbatch has more, and the others less.
    """
    works: list[Work] = []
    sizes = (1.0, 1 - share, share, 1 + uneven, 1 - uneven)
    costs = [[option(size, 2 * size, size)] for size in sizes]
    cost_index: list[list[int]] = []
    early: tuple[int, ...] = ()
    for m in range(num_microbatches):
        first, parts = len(works), [1, 2] if share and m % 2 == 0 else [0]
        for sub, cost in enumerate(parts):
            works.append(Work(module=0, microbatch=m, sub_microbatch=sub))
            cost_index.append([cost] * ranks[0])
        works.append(Work(module=1, microbatch=m, sub_microbatch=0, after=(*early, first)))
        cost_index.append([3 + m % 2] * ranks[1])
        early = (first + 1,) if len(parts) > 1 else ()
    total = sum(ranks)
    return PlanningProblem.build(
        num_ranks=total,
        modules=[
            ModuleStages(name="vision", stages=tuple(range(ranks[0]))),
            ModuleStages(name="language", stages=tuple(range(ranks[0], total))),
        ],
        stage_rank=range(total),
        works=works,
        costs=costs,
        cost_index=cost_index,
        output_bytes=[[0.0] * len(row) for row in cost_index],
        p2p=NO_P2P,
        memory_limit_bytes=memory_limit_bytes,
    )


def fan_out(num_ranks: int, num_microbatches: int, *, p2p: P2P = NO_P2P, size: float = 1.0) -> PlanningProblem:
    """A divided vocabulary: a part of embedding and head on each rank, one language chain, and a loss on the last rank.

    Args: size: bytes of every output.
    """
    P = num_ranks
    parts = [
        (f"{name}.{rank}", (first + rank,)) for name, first in (("embed", 0), ("head", 2 * P)) for rank in range(P)
    ]
    chains = [*parts[:P], ("language", tuple(range(P, 2 * P))), *parts[P:], ("loss", (3 * P,))]
    works: list[Work] = []
    for m in range(num_microbatches):
        base = len(works)
        embeds, heads = range(base, base + P), range(base + P + 1, base + 2 * P + 1)
        after = [*((),) * P, tuple(embeds), *((base + P,),) * P, tuple(heads)]
        works += [Work(module=i, microbatch=m, sub_microbatch=0, after=before) for i, before in enumerate(after)]
    depths = [len(chains[work.module][1]) for work in works]
    return PlanningProblem.build(
        num_ranks=P,
        modules=[ModuleStages(name=name, stages=stages) for name, stages in chains],
        stage_rank=[*range(P), *range(P), *range(P), P - 1],
        works=works,
        costs=[[halves(0.25, 0.25, 0.125)], [halves(1.0, 1.1, 0.7)]],
        cost_index=[[int(depth > 1)] * depth for depth in depths],
        output_bytes=[[size] * depth for depth in depths],
        p2p=p2p,
    )


def as_units(problem: PlanningProblem, *, share: float = 0.4, contention: float = 0.25) -> PlanningProblem:
    """The problem with a share of F and of I as exchanges of layers that run as units."""
    costs = (
        tuple(
            replace(
                o,
                forward_exchange_s=share * o.forward_s,
                backward_exchange_s=share * o.backward_input_s,
                contention=contention,
            )
            for o in options
        )
        for options in problem.costs
    )
    return replace(problem, costs=tuple(costs))


@st.composite
def one_v(draw: st.DrawFn, num_ranks: int, num_modules: int) -> list[list[int]]:
    """[module] -> the ranks of its stages, where all modules are one V; two of them may meet within a chunk."""
    down = list(range(num_ranks))
    ranks, end = down + down[::-1], -1
    placed = []
    for module in range(num_modules):
        begin = min(end + draw(st.integers(0 if module else 1, 1)), 2 * num_ranks - 1)
        end = 2 * num_ranks - 1 if module == num_modules - 1 else draw(st.integers(begin, 2 * num_ranks - 1))
        placed.append(ranks[begin : end + 1])
    return placed


@st.composite
def problems(
    draw: st.DrawFn, *, limits: bool = False, forward_only: bool = False, v: bool = False, joined: bool = False
) -> PlanningProblem:
    """A random iteration: up to two modules that feed a last one, absent modalities, several sub-microbatches, works
    that feed the next microbatch, frozen modules and first layers, bytes between I and W, uneven segments, unusual
    placements, random costs.

    Args:
        limits: give each rank memory for one to two of the largest microbatches.
        v: place each module down the ranks and back up; with one module in half of the cases.
        joined: place all modules as one V.
    """
    num_ranks = draw(st.integers(1, 4))
    num_modules = 1 if v and draw(st.booleans()) else draw(st.integers(1 + joined, 3))
    segments = [2 if v else draw(st.integers(1, 3)) for _ in range(num_modules)]
    frozen = [draw(st.booleans()) for _ in range(num_modules)]
    anywhere = not v and not joined and draw(st.integers(0, 3)) == 0
    modules: list[ModuleStages] = []
    stage_rank: list[int] = []
    v_ranks = draw(one_v(num_ranks, num_modules)) if joined else []
    for m, count in enumerate(segments):
        first = len(stage_rank)
        turns = [s % num_ranks for s in range(count * num_ranks)]
        if v:
            turns[num_ranks:] = reversed(turns[num_ranks:])
        if joined:
            turns = v_ranks[m]
        stage_rank += draw(st.permutations(turns)) if anywhere else turns
        modules.append(ModuleStages(name=f"m{m}", stages=tuple(range(first, len(stage_rank)))))
    works: list[Work] = []
    owner: list[int] = []
    num_microbatches, defers = draw(st.integers(1, 6)), draw(st.integers(0, 2)) == 0
    for microbatch in range(num_microbatches):
        for m in range(num_modules - 1):
            for i in range(draw(st.integers(0, 3))):
                works.append(Work(module=m, microbatch=microbatch, sub_microbatch=i))
                owner.append(microbatch + (defers and microbatch + 1 < num_microbatches and draw(st.booleans())))
        after = tuple(w for w, of in enumerate(owner) if of == microbatch and works[w].module < num_modules - 1)
        works.append(Work(module=num_modules - 1, microbatch=microbatch, sub_microbatch=0, after=after))
        owner.append(microbatch)
    seconds = st.sampled_from([0.0, 0.5, 1.0, 1.25, 3.0])
    costs: list[list[Option]] = []
    cost_index: list[list[int]] = []
    grad_leaves: list[bool] = []
    for work in works:
        # Where the module's own gradients begin: at its first stage, or after some frozen layers.
        depth = len(modules[work.module].stages)
        begin = depth if frozen[work.module] else draw(st.sampled_from([0, 0, 0, depth - 1]))
        grad = not forward_only and any(grad_leaves[w] for w in work.after)
        row = []
        for k in range(depth):
            grad = grad or (not forward_only and k >= begin)
            row.append(len(costs))
            weight = draw(seconds) if grad and not frozen[work.module] else 0.0
            costs.append(
                [
                    Option(
                        name=name,
                        forward_s=draw(seconds),
                        backward_input_s=draw(seconds) + 0.25 if grad else 0.0,
                        backward_weight_s=weight,
                        activation_bytes=draw(st.sampled_from([0.0, 1.0, 2.0, 5.0])) * share,
                        weight_bytes=draw(st.sampled_from([None, None, 0.0, 0.5, 3.0])) if grad else None,
                    )
                    for name, share in (("keep", 1.0), ("recompute", 0.5))[: draw(st.integers(1, 2))]
                ]
            )
        grad_leaves.append(grad)
        cost_index.append(row)
    memory = None
    if limits:
        most = [0.0] * num_ranks
        for microbatch in range(num_microbatches):
            sums = [0.0] * num_ranks
            for w, of, row in zip(works, owner, cost_index, strict=True):
                for k, stage in enumerate(modules[w.module].stages):
                    if of == microbatch:
                        sums[stage_rank[stage]] += max(o.activation_bytes for o in costs[row[k]])
            most = [max(a, b) for a, b in zip(most, sums, strict=True)]
        memory = [amount * draw(st.sampled_from([1.0, 1.3, 2.0])) for amount in most]
    return PlanningProblem.build(
        num_ranks=num_ranks,
        modules=modules,
        stage_rank=stage_rank,
        works=works,
        costs=costs,
        cost_index=cost_index,
        output_bytes=[[draw(st.sampled_from([0.0, 1e8]))] * len(row) for row in cost_index],
        p2p=P2P(latency_s=draw(st.sampled_from([0.0, 0.1])), bytes_per_s=1e9),
        memory_limit_bytes=memory,
    )
