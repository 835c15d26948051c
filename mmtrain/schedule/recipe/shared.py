"""What all recipes of one problem share; made once."""

from mmtrain.schedule.action import Kind
from mmtrain.schedule.library.memory import components
from mmtrain.schedule.library.one_f_one_b import module_order
from mmtrain.schedule.problem import PlanningProblem


class Shared:
    """What does not depend on the recipe."""

    def __init__(self, problem: PlanningProblem) -> None:
        """Args: problem: with at least one work."""
        graph, items = problem.graph, problem.graph.items
        self.problem, self.graph, self.items = problem, graph, items
        self.component = components(graph)
        """[work]"""
        self.nodes = list(zip(items.stage, items.work, strict=True))
        """[node] -> (stage, work)."""
        depth = {module: position for position, module in enumerate(module_order(graph))}
        self.stages = [
            sorted(graph.stages_of_rank(rank), key=lambda s: (depth[graph.module_of[s]], graph.position[s]))
            for rank in range(graph.num_ranks)
        ]
        """[rank] -> its stages, front layers first."""
        number = {microbatch: i for i, microbatch in enumerate(sorted({work.microbatch for work in graph.works}))}
        self.microbatch = [number[graph.works[work].microbatch] for work in items.work]
        """[node] -> index of its microbatch among those of the iteration."""
        self.age = self._ages()
        """[item of F or B] -> position in its slot, oldest component first; B of the last stage first."""

    def _ages(self) -> list[int]:
        graph, items = self.graph, self.items
        keys: list[tuple[int, ...]] = [()] * (2 * items.num_nodes)
        for position, (stage, work) in enumerate(graph.nodes()):
            for slot, (kind, sign) in enumerate(((Kind.F, 1), (Kind.B, -1))):
                age = (slot, self.component[work], graph.works[work].microbatch, sign * position)
                keys[items.item(kind, stage, work)] = age
        ages = [0] * len(keys)
        for position, item in enumerate(sorted(range(len(keys)), key=keys.__getitem__)):
            ages[item] = position
        return ages
