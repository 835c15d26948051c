"""FlexPipe's CLIP models of two towers on 40 A800s (section 7.2, table 4): DistMM-Pipe, FlexPipe's schedule, ours.

The towers are on ranks of their own, in proportion to their seconds, with equal replicas and microbatches. Every
`GROUP` microbatches share one contrastive loss: a work on the last rank of the first tower after 2 `GROUP` works; its
gradients return to all of them. The paper names neither the ranks of a tower nor the microbatches of a loss.

DistMM-Pipe  1F1B in both towers, with as many more microbatches in flight as a loss needs
FlexPipe     32 types of two chunks a rank on the first tower, 1F1B on the second (section 7.2), by its clock; the one
             of least bubble, with its gradient separation
mmtrain      1 or 2 chunks on each rank of each tower, memory options, searched orders

Source: DistMM (NSDI 2024) as FlexPipe's figure 3 shows it.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from flexpipe_gpt import BATCH, MODES, Cut, Pipeline, Point, Result, pipeline, total_s
from flexpipe_separation import separated_to_the_letter

from mmtrain.errors import PlanError
from mmtrain.planner.make_plan import JobMethod, make_plan
from mmtrain.schedule.graph import ModuleStages, Work
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import Option, PlanningProblem
from mmtrain.schedule.recipe.grid import RecipeGrid
from mmtrain.schedule.recipe.language import Placement, Recipe, Rule, Traversal
from mmtrain.schedule.recipe.policy import plan_of
from mmtrain.schedule.simulate import simulate

CLIPS: Mapping[str, tuple[str, str]] = {
    "4.7b": ("4.7b audio", "4.7b text"),
    "8.2b": ("8.2b video", "8.2b text"),
    "9.7b": ("9.7b image", "9.7b text"),
}
NUM_GPUS = 40
GROUP = 4
"""Microbatches of one contrastive loss."""
JOIN_S = 1e-4
"""Of a loss, forward, and each part of its backward: a product of a few hundred rows, and launches."""


@dataclass(frozen=True)
class Towers:
    """Both towers on some degrees."""

    first: Pipeline
    second: Pipeline
    problem: PlanningProblem

    @property
    def num_first(self) -> int:
        """Ranks of the first tower."""
        return self.first.point.num_ranks

    def result(self, side: str, setting: str, plan: Plan) -> Result:
        """A step under a plan."""
        timeline = simulate(self.problem, plan)
        steps = [self.first.step(timeline), self.second.step(timeline, self.num_first)]
        seconds, peaks = zip(*steps, strict=True)
        ranks = f"{self.num_first} + {self.second.point.num_ranks} ranks, {setting}"
        return Result(side, self.first.point, ranks, max(seconds), timeline.bubble, max(peaks) / 2**30)


def joined(first: PlanningProblem, second: PlanningProblem, group: int = GROUP) -> PlanningProblem:
    """Two chains and a loss after every few microbatches of both. Raises: PlanError: their microbatches differ."""
    graphs = first.graph, second.graph
    count, offset, stages = len(first.graph.works), len(first.costs), len(first.graph.stage_rank)
    chains = [
        ModuleStages(name=name, stages=tuple(stage + shift for stage in graph.modules[0].stages))
        for name, graph, shift in zip(("first", "second"), graphs, (0, stages), strict=True)
    ]
    total = sum(len(graph.stage_rank) for graph in graphs)
    works = [replace(work, module=0) for work in first.graph.works]
    works += [replace(work, module=1) for work in second.graph.works]
    for start in range(0, count, group):
        own = range(start, min(start + group, count))
        works.append(Work(module=2, microbatch=own[-1], sub_microbatch=0, after=(*own, *(count + m for m in own))))
    losses = len(works) - 2 * count
    join = Option(name="", forward_s=JOIN_S, backward_input_s=JOIN_S, backward_weight_s=0.0, activation_bytes=0.0)
    return PlanningProblem.build(
        num_ranks=sum(graph.num_ranks for graph in graphs),
        modules=[*chains, ModuleStages(name="loss", stages=(total,))],
        stage_rank=[
            *graphs[0].stage_rank,
            *(graphs[0].num_ranks + rank for rank in graphs[1].stage_rank),
            graphs[0].stage_rank[-1],
        ],
        works=works,
        costs=[*first.costs, *second.costs, (join,)],
        cost_index=[
            *first.cost_index,
            *(tuple(offset + index for index in row) for row in second.cost_index),
            *[(offset + len(second.costs),)] * losses,
        ],
        output_bytes=[*first.output_bytes, *second.output_bytes, *[(0.0,)] * losses],
        p2p=first.p2p,
        memory_limit_bytes=[*first.memory_limit_bytes, *second.memory_limit_bytes],
    )


@lru_cache(maxsize=256)
def towers(model: str, replicas: int, samples: int, chunks: tuple[int, int], mode: str) -> Towers | None:
    """The towers on degrees; None: they cannot be cut so, or states do not fit."""
    total = NUM_GPUS // replicas
    seconds = [_seconds(name, replicas, samples) for name in CLIPS[model]]
    if math.inf in seconds:
        return None
    ranks = min(total - 1, max(1, round(total * seconds[0] / sum(seconds))))
    made = [
        pipeline(Point(name, 1, own, replicas, samples), Cut(False, own_chunks), mode)
        for name, own, own_chunks in zip(CLIPS[model], (ranks, total - ranks), chunks, strict=True)
    ]
    first, second = made
    if first is None or second is None:
        return None
    return Towers(first, second, joined(first.problem, second.problem))


def _seconds(tower: str, replicas: int, samples: int) -> float:
    """Of all actions of a tower; infinite: its states do not fit into half of the ranks."""
    made = pipeline(Point(tower, 1, NUM_GPUS // replicas // 2, replicas, samples), Cut(False), "full")
    return math.inf if made is None else total_s(made.problem)


def distmm(model: str, replicas: int, samples: int) -> Iterator[Result]:
    """DistMM-Pipe."""
    for mode in MODES:
        made = towers(model, replicas, samples, (1, 1), mode)
        if made is not None:
            limits = _one_f_one_b(made)
            rules: dict[str | int, Rule] = {name: Rule(in_flight=limits) for name in ("first", "second")}
            recipe = Recipe(overrides=rules)
            yield made.result("DistMM-Pipe", f"recompute {mode}", plan_of(recipe, made.problem, compiled=True))


def _one_f_one_b(made: Towers) -> list[int]:
    """[rank] -> microbatches in flight of 1F1B, and those that wait for a loss."""
    counts = made.num_first, made.second.point.num_ranks
    return [count - rank + GROUP - 1 for count in counts for rank in range(count)]


def flexpipe(model: str, replicas: int, samples: int) -> Iterator[Result]:
    """Interleaved on the first tower, 1F1B on the second."""
    for mode in MODES:
        made = towers(model, replicas, samples, (2, 1), mode)
        if made is None:
            continue
        grid, found = RecipeGrid(made.problem), []
        for name, recipe in _types(made):
            score = grid.score(recipe)
            if not score.stuck:
                found.append((score.bubble, name, recipe))
        if found:
            _, name, recipe = min(found, key=lambda one: one[:2])
            plan = grid.plan(recipe)
            for how, ordered in (("", plan), (", separated", separated_to_the_letter(plan, made.problem))):
                yield made.result("FlexPipe", f"{name}{how}, recompute {mode}", ordered)


def _types(made: Towers) -> Iterator[tuple[str, Recipe]]:
    count, limits = made.num_first, _one_f_one_b(made)
    orders = [Traversal(order, every) for order in ("breadth", "depth") for every in (0, count)]
    for first, forward, backward in itertools.product(("backward", "alternate"), orders, orders):
        own = Rule(first=first, forward=forward, backward=backward)
        rules: dict[str | int, Rule] = dict.fromkeys(range(count), own)
        rules |= {"first": Rule(in_flight=4 * count + GROUP), "second": Rule(in_flight=limits)}
        yield (
            f"{first}, {forward.order} {forward.every}, {backward.order} {backward.every}",
            Recipe(placement={"first": Placement("circular", 2)}, overrides=rules, clock="lockstep"),
        )


def ours(model: str, replicas: int, samples: int) -> Iterator[Result]:
    """Searched plans."""
    for chunks in itertools.product((1, 2), repeat=2):
        made = towers(model, replicas, samples, chunks, "")
        if made is not None:
            job = made.first.job
            found = make_plan(made.problem, JobMethod.searching(job.schedule, job.section, seed=0))
            if found.has_plan:
                yield made.result("mmtrain", f"{chunks[0]} and {chunks[1]} chunks", found.plan)


SIDES: Mapping[str, Callable[[str, int, int], Iterator[Result]]] = {
    "DistMM-Pipe": distmm,
    "FlexPipe": flexpipe,
    "mmtrain": ours,
}


def degrees() -> list[tuple[int, int]]:
    """(replicas, samples of a microbatch) that all sides try."""
    every = itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16))
    return [(r, s) for r, s in every if 2 * GROUP <= BATCH // r // s <= 64]


def ideal_s(model: str, replicas: int, samples: int) -> float:
    """Seconds of a step without a bubble; infinite: no states fit."""
    made = towers(model, replicas, samples, (1, 1), "full")
    if made is None:
        return math.inf
    return 0.75 * total_s(made.problem) / made.problem.graph.num_ranks  # a quarter is at most recomputed


def best(model: str, side: str) -> Result:
    """The best of a side."""
    found = Result(side, Point(CLIPS[model][0], 1, 1, 1, 1), "does not fit")
    for how in sorted(degrees(), key=lambda one: ideal_s(model, *one)):
        try:
            for result in SIDES[side](model, *how) if ideal_s(model, *how) < found.seconds else ():
                found = min(found, result, key=lambda one: one.seconds)
        except PlanError:
            continue
    return found
