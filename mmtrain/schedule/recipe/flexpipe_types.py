"""FlexPipe's schedule types as recipes: the candidates of its tuner for a chain of one module.

Source: FlexPipe, table 2 for the values; section 6 and 7.1 for which are combined: backward-first and alternate, no
interval but with circular placement and then P, units of 1, and V in both directions at once.
"""

import itertools
from collections.abc import Iterator, Mapping

from mmtrain.schedule.recipe.language import First, Placement, Recipe, Shape, Traversal

CHUNKS = 2
"""On each rank, of all placements but one-to-one."""
WAYS = ("down", "up")
"""The modules of placements in both directions: two copies of the model, the second one from the last rank to the
first, each with half of the microbatches."""


def flexpipe_types(num_ranks: int) -> Iterator[tuple[str, Recipe]]:
    """(name, recipe) of the 58 types, those of one placement one after the other.

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


def _both_ways(down: Placement, num_ranks: int) -> Mapping[str, Placement | Shape]:
    up = Placement(down.shape, down.chunks, range(num_ranks)[::-1])
    return dict(zip(WAYS, (down, up), strict=True))


def _name(given: Traversal) -> str:
    return f"{given.order} every {given.every}" if given.every else given.order
