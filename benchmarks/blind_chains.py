"""Searches that learn nothing from the plans they have tried, beside which others are measured: `random`, `dfs`."""

from mmtrain.planner.search.chains import Chain
from mmtrain.planner.search.orders import by_component


class RandomChain(Chain):
    """Random orders of components."""

    def begin(self) -> None:
        self._components = list(range(int(self.searched.component_of.max(initial=-1)) + 1))

    def run(self, evaluations: int, before: float, after: float) -> None:
        for _ in range(evaluations):
            self.random.shuffle(self._components)
            self.evaluate(by_component(self.searched, self._components))


class DepthFirstChain(Chain):
    """Permutations of the components in lexicographic order, each chain from its own rotation of the first one."""

    def begin(self) -> None:
        count = int(self.searched.component_of.max(initial=-1)) + 1
        shift = self.seed[1] % max(1, count)
        self._names = [*range(shift, count), *range(shift)]
        self._current = list(range(count))

    def run(self, evaluations: int, before: float, after: float) -> None:
        for _ in range(evaluations):
            self.evaluate(by_component(self.searched, [self._names[i] for i in self._current]))
            self._advance()

    def _advance(self) -> None:
        """The next permutation; after the last the first one again."""
        p = self._current
        i = len(p) - 2
        while i >= 0 and p[i] > p[i + 1]:
            i -= 1
        if i >= 0:
            j = len(p) - 1
            while p[j] < p[i]:
                j -= 1
            p[i], p[j] = p[j], p[i]
        p[i + 1 :] = reversed(p[i + 1 :])


BLIND = {"random": RandomChain, "dfs": DepthFirstChain}
"""For `mmtrain.planner.search.search_options.CHAINS`."""
