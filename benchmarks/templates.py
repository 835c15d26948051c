"""python benchmarks/templates.py [SECTION ...]

Templates and compositions of pipelines. Sections, all unless named:

planning      CPU seconds of Oobleck's mapping by our exact program, for the thesis's nodes, GPUs a node and layers, and
              the thesis's: equal layers and random ones, whose times fall with GPUs as g^-0.8
literal       the same mappings by the thesis's divide and conquer, memoised, where it ends soon: its T1 + T2 + T3 over
              ours, and how many times as long it takes in Python
compositions  CPU seconds of the best composition on every number of nodes up to 64, and of a single one by enumeration
line          how far the line between a template's points is from simulation, VLM-S on H800s: by the number of
              microbatches over those of its share
"""

import argparse
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from mmtrain.commands.sample_files import drawn_costs
from mmtrain.config import config
from mmtrain.config.topology import JobLayout
from mmtrain.simulator.allocation.candidate import Candidate
from mmtrain.simulator.allocation.candidate_judge import Effort, Judge
from mmtrain.simulator.allocation.compositions import Template, Templates
from mmtrain.simulator.allocation.degrees import values_of
from mmtrain.simulator.allocation.mapping import map_stages
from mmtrain.simulator.allocation.templates import TemplateMaker

LAYERS = (24, 32, 64, 96)
THESIS = {
    (8, 1): (0.28, 0.71, 9.65, 68.5),
    (8, 4): (0.41, 1.15, 11.58, 74.56),
    (8, 8): (0.54, 1.5, 20.98, 109.76),
    (16, 1): (3.37, 7.45, 66.35, 540.36),
    (16, 4): (4.56, 10.41, 108.1, 649.67),
    (16, 8): (4.9, 11.78, 176.04, 1213.63),
    (24, 1): (11.35, 30.11, 262.47, 1477.54),
    (24, 4): (14.78, 45.8, 472.53, 2153.84),
    (24, 8): (15.59, 49.25, 520.08, 3297.92),
}
"""(nodes, GPUs a node) -> [layers] -> seconds of one template (Jang, dissertation, 2026, chapter 2)."""


def layers_of(count: int, per_node: int, spread: float = 0.0) -> list[list[float]]:
    """[GPUs - 1][layer] -> seconds. Args: spread: of the layers, as a fraction."""
    rng = random.Random(count)
    base = [1 + rng.uniform(-spread, spread) for _ in range(count)]
    return [[one / gpus**0.8 for one in base] for gpus in range(1, per_node + 1)]


def planning() -> None:
    """Seconds of each cell of the thesis's table."""
    map_stages(layers_of(4, 1), 1)  # compiles
    print("nodes  GPUs  layers    thesis  equal layers  random layers")
    for (nodes, per_node), of_thesis in THESIS.items():
        for count, seconds in zip(LAYERS, of_thesis, strict=True):
            cells = []
            for spread in (0.0, 0.6):
                begin = time.process_time()
                map_stages(layers_of(count, per_node, spread), nodes)
                cells.append(time.process_time() - begin)
            print(f"{nodes:5d}  {per_node:4d}  {count:6d}  {seconds:8.2f}  {cells[0]:12.3f}  {cells[1]:13.3f}")


def divide_and_conquer(layers: Sequence[Sequence[float]], nodes: int) -> float:
    """T1 + T2 + T3 by the thesis's algorithm with half-open ranges, in which (2.1) to (2.3) keep layer k. A part's best
    solution is that with the least T1 + T2 + T3 of the part, with N_b = 4 S'.

    Args: layers: [GPUs - 1][layer] -> seconds.
    """
    per_node, num_layers = len(layers), len(layers[0])

    @lru_cache(None)
    def solve(count: int, low: int, high: int, gpus: int) -> tuple[float, float, float, int, float] | None:
        """(T1, T2, T3, k*, slowest), None if it is infinite."""
        if count == 1:
            if gpus > per_node:
                return None
            seconds = sum(layers[gpus - 1][low:high])
            return seconds, 2 * seconds, seconds, 0, seconds
        best = None
        step = per_node if gpus > per_node else 1
        for first in range(1, count):
            for cut in range(low + first, high - (count - first) + 1):
                for given in range(step, gpus, step):
                    one, two = solve(first, low, cut, given), solve(count - first, cut, high, gpus - given)
                    if one is None or two is None:
                        continue
                    if one[4] >= two[4]:
                        place, slowest, t3 = one[3], one[4], one[2] + two[0]
                    else:
                        place, slowest, t3 = first + two[3], two[4], two[2]
                    found = (one[0] + two[0], (3 * count + place - 1) * slowest, t3, place, slowest)
                    if best is None or sum(found[:3]) < sum(best[:3]):
                        best = found
        return best

    found = [solve(count, 0, num_layers, nodes * per_node) for count in range(nodes, num_layers + 1)]
    return min((sum(one[:3]) for one in found if one is not None), default=math.inf)


def literal() -> None:
    """The divide and conquer on small cases."""
    print("nodes  GPUs  layers  literal over ours  CPU s of it, times ours")
    for nodes, per_node, count in ((2, 1, 16), (2, 4, 12), (4, 2, 16), (4, 4, 14), (4, 1, 24), (6, 1, 24)):
        layers = layers_of(count, per_node, 0.6)
        begin = time.process_time()
        ours = map_stages(layers, nodes)
        between = time.process_time()
        theirs = divide_and_conquer(layers, nodes)
        spent, of_ours = time.process_time() - between, between - begin
        assert ours is not None
        ratio = theirs / ours.seconds(4 * len(ours.stages))
        print(f"{nodes:5d}  {per_node:4d}  {count:6d}  {ratio:17.6f}  {spent:11.1f}  {spent / of_ours:9.0f}")


def line_template(nodes: int) -> Template:
    """A pipeline of as many equal stages, each an equal part of 96 layers and 0.3 s of messages a microbatch."""
    points = tuple((count, (count + nodes - 1) * (96 / nodes + 0.3)) for count in (1, 2))
    return Template(nodes=nodes, depth=nodes, points=points)


def compositions() -> None:
    """All numbers of nodes by the knapsack, and by enumeration."""
    print("n_0  f  microbatches  numbers of nodes  CPU s  CPU s of 24 nodes by enumeration, compositions")
    for n_0, failures, microbatches in ((1, 2, 256), (2, 2, 512), (3, 1, 1024)):
        sizes = range(n_0, 64 - failures * n_0 + 1)
        made = Templates(
            templates=tuple(map(line_template, sizes)),
            max_failures=failures,
            microbatches=microbatches,
            max_nodes=64,
        )
        begin, before = time.process_time(), None
        numbers = range(64, (failures + 1) * n_0 - 1, -1)
        for nodes in numbers:
            before = made.best(nodes, before)
        spent, begin = time.process_time() - begin, time.process_time()
        steps = [made.composed([line_template(n) for n in one]).seconds for one in multisets(n_0, failures, 24)]
        enumerated = time.process_time() - begin
        assert abs(min(steps) / made.best(24).seconds - 1) < 1e-9
        row = f"{n_0:3d}  {failures}  {microbatches:12d}  {len(numbers):16d}  {spent:5.2f}"
        print(f"{row}  {enumerated:8.2f}  {len(steps)}")


def multisets(n_0: int, failures: int, nodes: int) -> Iterator[tuple[int, ...]]:
    """All multisets of at least f + 1 sizes from n_0 on that add up to some nodes."""
    for count in range(failures + 1, nodes // n_0 + 1):
        yield from _parts(nodes, count, n_0)


def _parts(total: int, count: int, least: int) -> Iterator[tuple[int, ...]]:
    if count == 1:
        yield (total,)
        return
    for first in range(least, total // count + 1):
        for rest in _parts(total - first, count - 1, first):
            yield (first, *rest)


def line() -> None:
    """Templates' lines against simulation."""
    job = config.load("vlm_s.toml", ["planner.hardware=h800"])
    maker = TemplateMaker(config=job, costs=drawn_costs(job, 4096), nodes=8, max_failures=1)
    judge = Judge(config=maker.config, steps=lambda of: [maker.typical[: of.training.global_batch_size]])
    errors: dict[str, list[float]] = {"below half": [], "half to twice": [], "above twice": []}
    for stage in (JobLayout.grid(cp=2), JobLayout.grid(tp=4), JobLayout.grid(dp_shard=2, cp=4)):
        for nodes in (2, 3, 4, 5):
            made = maker.template(stage, nodes)
            assert isinstance(made, Template)
            share, most = job.training.global_batch_size * nodes / 8 / stage.dp, made.points[-1][0]
            for count in sorted({2, 3, made.depth, most * 3 // 8, most * 5 // 8, most * 7 // 8}):
                values = values_of(replace(stage, depths=(made.depth,))) | {
                    "training.global_batch_size": count * stage.dp
                }
                if 1 < count <= most and count not in dict(made.points):
                    judged = judge.judge(Candidate().having(values), Effort(evaluations=20))
                    where = (
                        "below half" if count < share / 2 else "above twice" if count > 2 * share else "half to twice"
                    )
                    errors[where].append(abs(made.seconds(count * stage.dp) / judged.mean_s - 1))
    print("microbatches over its share  number  mean error  largest")
    for where, of in errors.items():
        if of:
            print(f"{where:27}  {len(of):6d}  {100 * statistics.fmean(of):8.1f} %  {100 * max(of):5.1f} %")


SECTIONS = {"planning": planning, "literal": literal, "compositions": compositions, "line": line}


def main() -> None:
    """Runs the sections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="default: all")
    for name in parser.parse_args().sections or SECTIONS:
        print(f"\n{name}")
        SECTIONS[name]()


if __name__ == "__main__":
    main()
