"""Loads dealt to those who may carry them so that the largest load is the least possible, exactly: a maximum flow whose
capacity is raised by the cut that it runs into."""

from collections.abc import Mapping

Holders = tuple[int, ...]
"""Ranks, ascending."""


def least_load(groups: Mapping[Holders, int]) -> dict[Holders, dict[int, int]]:
    """How many units of each group each of its holders sends, such that the busiest sender has the fewest.

    Args: groups: holders -> units, each of which any one of them can carry.
    """
    deal = _Deal(groups)
    for group in sorted(groups):
        deal.add(group)
    return deal.flow


class _Deal:
    """Groups dealt so far, none of whose senders has more than a limit that is a lower bound for all groups."""

    def __init__(self, groups: Mapping[Holders, int]) -> None:
        self._groups = groups
        self.flow = {group: dict.fromkeys(group, 0) for group in groups}
        self._of: dict[int, list[Holders]] = {}
        """The groups that each sender holds."""
        for group in sorted(groups):
            for sender in group:
                self._of.setdefault(sender, []).append(group)
        self._loads = dict.fromkeys(self._of, 0)
        bounds = [_up(units, len(group)) for group, units in groups.items()]
        self._limit = max([*bounds, _up(sum(groups.values()), len(self._of) or 1)])

    def add(self, group: Holders) -> None:
        """Deals one group more, and moves others as far as it must."""
        remaining = self._groups[group]
        while remaining:
            path, reached = self._path(group)
            if not path:  # all that these senders carry can be carried by no others
                self._limit = _up(self._limit * reached + remaining, reached)
                continue
            amount = min(remaining, self._limit - self._loads[path[-1][1]])
            amount = min([amount, *(self.flow[g][s] for (g, _), (_, s) in zip(path[1:], path, strict=False))])
            for number, (g, sender) in enumerate(path):
                self.flow[g][sender] += amount
                if number:
                    self.flow[g][path[number - 1][1]] -= amount
            self._loads[path[-1][1]] += amount
            remaining -= amount

    def _path(self, group: Holders) -> tuple[list[tuple[Holders, int]], int]:
        """[(group, sender that takes some of it)], each sender of which gives up some of the next group, to one that
        is below the limit; or none, and how many senders were reached."""
        came_by: dict[int, tuple[Holders, int | None]] = {}
        """The group that a sender would take, and the sender that would give it up, by sender."""
        queue: list[tuple[Holders, int | None]] = [(group, None)]
        seen = {group}
        for current, giver in queue:
            for sender in current:
                if sender in came_by:
                    continue
                came_by[sender] = current, giver
                if self._loads[sender] < self._limit:
                    return _back(came_by, sender), 0
                for other in self._of[sender]:
                    if other not in seen and self.flow[other][sender]:
                        seen.add(other)
                        queue.append((other, sender))
        return [], len(came_by)


def _back(came_by: Mapping[int, tuple[Holders, int | None]], last: int) -> list[tuple[Holders, int]]:
    path: list[tuple[Holders, int]] = []
    sender: int | None = last
    while sender is not None:
        group, giver = came_by[sender]
        path.append((group, sender))
        sender = giver
    return path[::-1]


def _up(units: int, parts: int) -> int:
    return -(-units // parts)
