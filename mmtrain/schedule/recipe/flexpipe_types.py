"""FlexPipe's schedule types as recipes: the candidates of its tuner for a chain of one module.

Source: FlexPipe, table 2 for the values; section 6 and 7.1 for which are combined: backward-first and alternate, no
interval but with circular placement and then P, units of 1, and V in both directions at once.
"""

import itertools
from collections.abc import Iterator, Mapping

from mmtrain.schedule.graph import ModuleStages, Work, WorkGraph
from mmtrain.schedule.recipe.language import First, Placement, Recipe, Shape, Traversal

CHUNKS = 2
"""The chunks on each rank of all placements but one-to-one."""
WAYS = ("down", "up")
"""The modules of placements in both directions: two copies of the model, the second one from the last rank to the
first, each with half of the microbatches."""


def flexpipe_types(num_ranks: int) -> Iterator[tuple[str, Recipe]]:
    """The 58 types with their names, those of one placement one after the other.

    42 are for problems of one module; the others, in both directions, for problems of two, named as in `WAYS`. At most
    2P microbatches are in flight in each stage of a rank.
    """
    orders = [Traversal("breadth"), Traversal("depth")]
    stepped = [*orders, *(Traversal(order.order, every=num_ranks) for order in orders)]
    one, circular, v = Placement("one-to-one"), Placement("circular", CHUNKS), Placement("v")
    groups: list[tuple[str, Placement, Placement | Mapping[str, Placement | Shape], list[Traversal]]] = [
        ("one-to-one", one, one, orders[:1]),
        ("circular", circular, circular, stepped),
        ("v", v, v, orders),
        ("both ways", one, _both_ways(one, num_ranks), orders),
        ("v, both ways", v, _both_ways(v, num_ranks), orders),
    ]
    firsts: tuple[First, ...] = ("backward", "alternate")
    for name, chain, placement, traversals in groups:
        for first, forward, backward in itertools.product(firsts, traversals, traversals):
            recipe = Recipe(
                placement=placement,
                first=first,
                forward=forward,
                backward=backward,
                in_flight=2 * num_ranks * chain.passes,
                clock="lockstep",
            )
            yield f"{name}, {first}, {_name(forward)}, {_name(backward)}", recipe


def graph_of(recipe: Recipe, num_ranks: int, num_microbatches: int) -> WorkGraph:
    """The chain of a type, or both chains, which take turns with the microbatches; every stage has a backward."""
    ways = WAYS if len(recipe.placements) > 1 else WAYS[:1]
    ranks = [recipe.placement_of(way).stage_ranks(num_ranks) for way in ways]
    count = len(ranks[0])
    modules = (ModuleStages(name=way, stages=tuple(range(i * count, (i + 1) * count))) for i, way in enumerate(ways))
    return WorkGraph(
        num_ranks=num_ranks,
        modules=tuple(modules),
        stage_rank=tuple(itertools.chain(*ranks)),
        works=tuple(Work(module=m % len(ways), microbatch=m, sub_microbatch=0) for m in range(num_microbatches)),
        backward=((True,) * count,) * num_microbatches,
    )


def _both_ways(down: Placement, num_ranks: int) -> Mapping[str, Placement | Shape]:
    up = Placement(down.shape, down.chunks, range(num_ranks)[::-1])
    return dict(zip(WAYS, (down, up), strict=True))


def _name(given: Traversal) -> str:
    return f"{given.order} every {given.every}" if given.every else given.order
