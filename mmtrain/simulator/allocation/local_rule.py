"""How a composition survives lost nodes with the fewest changes: Oobleck's rule. Pure.

Source: Oobleck (Jang, dissertation, University of Michigan, 2026, section 2.5.1). It leaves open whose nodes are
borrowed and who is merged: here the pipeline with the most nodes lends, and that with the fewest is merged.
"""

from collections.abc import Sequence

from mmtrain.errors import ConfigError
from mmtrain.simulator.allocation.compositions import Composition, Templates


def local(templates: Templates, composition: Composition, num_lost: Sequence[int]) -> Composition:
    """The composition after some nodes were lost.

    Each pipeline that lost nodes takes the template of those that it has left; else it borrows nodes up to the smallest
    template; else it is merged with others. Pipelines keep their order; merged ones have the position of the first.

    Args: num_lost: [pipeline] -> number of its lost nodes.
    Raises: ConfigError: fewer than f + 1 pipelines are left, or a template is missing.
    """
    left = [nodes - gone for nodes, gone in zip(composition.nodes, num_lost, strict=True)]
    least = templates.templates[0].nodes
    while (short := next((i for i, nodes in enumerate(left) if nodes < least), None)) is not None:
        spare = [max(0, nodes - least) for nodes in left]
        if sum(spare) >= least - left[short]:
            while left[short] < least:
                lender = max(range(len(left)), key=lambda i: (left[i], -i))
                left[lender], left[short] = left[lender] - 1, left[short] + 1
            continue
        others = [i for i in range(len(left)) if i != short]
        if len(others) <= templates.max_failures:
            raise ConfigError(
                f"allocate: {sum(left)} nodes are left, fewer than {templates.max_failures + 1} pipelines of at least "
                f"{least} nodes; use more nodes"
            )
        other = min(others, key=lambda i: (left[i], i))
        first, second = min(short, other), max(short, other)
        left[first] += left.pop(second)
    chosen = [templates.of(nodes) for nodes in left]
    if any(one is None for one in chosen):
        missing = left[chosen.index(None)]
        raise ConfigError(f"allocate: there is no template of {missing} nodes to go on with; use `best`")
    return templates.composed([one for one in chosen if one is not None])
