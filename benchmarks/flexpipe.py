"""python benchmarks/flexpipe.py [--parts figure2,figure12,figure13,figure16,bidirectional,models] [--vocabularies 64]

FlexPipe's measurements in our simulator, with FlexPipe and published baselines as peers, all tuned over equal degrees.
`flexpipe_sides.py` and `flexpipe_clip.py` say what each side tries.

figure2        stages of the 5B model, cut evenly on 8 ranks with 4 samples a microbatch: slowest over fastest, in
               seconds of a microbatch and in bytes
figure12       5B with vocabularies of 64K to 1M on 32 A800s: seconds of a step, in brackets over mmtrain's; pp, dp, mbs
figure13       16.1B with 256K to 1.2M
figure16       CLIP of two towers on 40 A800s
bidirectional  two copies of a chain in opposite directions (Chimera; as V: BitPipe) over our plans on one copy, all
               searched: equal stages, F = I = W = 1; and 5B with all that two copies cost
models         VLM-S, M, L and T2V-S, L: FlexPipe's tuner over `mmtrain tune` (`tuning.py` says how), both on the first
               step; FlexPipe's types are no candidates of ours there

--vocabularies: of figures 2, 12 and 13, in thousands. --models: of figure16 and models. --evaluations: plans that a
search of `bidirectional` and `models` tries. --gpus: of figures 12 and 13. All figures are deterministic.
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import flexpipe_clip
from flexpipe_gpt import GPTS, Cut, Pipeline, Point, Result, both_ways, points
from flexpipe_sides import SIDES, best
from peers_setups import CLUSTERS
from tuning import OURS, best_flexpipe, show, tuned
from tuning_peers import Setup

from mmtrain.planner.make_plan import make_plan
from mmtrain.planner.search.search import warm
from mmtrain.planner.search.search_options import SearchOptions
from mmtrain.schedule.chain import plain_chain
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem

PARTS = ("figure2", "figure12", "figure13", "figure16", "bidirectional", "models")
FIGURE_2 = Point("5b", 0, 8, 4, 4)
SHAPES: Mapping[str, str] = {"1F1B": "one-to-one", "Interleaved1F1B": "circular", "ZBV": "v"}
"""Schedule, for its placement alone -> its name in the table."""
CHAINS = ((4, 4, 0.0), (8, 8, 0.0), (4, 16, 0.0), (8, 32, 0.0), (4, 4, 0.3), (8, 8, 0.3), (4, 16, 0.3), (8, 32, 0.3))
"""Ranks, microbatches, seconds of a transfer."""
BOTH_WAYS = (Point("5b", 256, 8, 4, 4), Point("5b", 256, 8, 4, 1), Point("5b", 256, 16, 2, 1))


def figure2(vocabularies: Sequence[int]) -> Iterator[str]:
    """Slowest over fastest stage."""
    yield "| vocabulary | seconds, slowest over fastest | bytes, most over least |\n|---|---|---|"
    for vocabulary in vocabularies:
        made = Pipeline(replace(FIGURE_2, vocabulary=vocabulary), Cut(False, is_even=True), "none")
        seconds = [0.0] * made.problem.graph.num_ranks
        for stage, rank in enumerate(made.problem.graph.stage_rank):
            option = made.problem.options(stage, 0)[0]
            seconds[rank] += option.forward_s + option.backward_input_s + option.backward_weight_s
        peaks = made.rank_bytes(CATALOGUE["1F1B"].make(made.problem))
        yield f"| {vocabulary}K | {max(seconds) / min(seconds):.2f} | {max(peaks) / min(peaks):.2f} |"


def of_gpt(model: str, vocabularies: Sequence[int], num_gpus: int) -> Iterator[str]:
    """Figure 12 or 13."""
    yield f"| {model} | {' | '.join(SIDES)} | FlexPipe's and our setting |\n|---|{'---|' * len(SIDES)}---|"
    for vocabulary in vocabularies:
        candidates = points(model, vocabulary, num_gpus)
        found = {side: best(side, candidates) for side in SIDES}
        yield _row(f"{vocabulary}K", found)


def figure16(models: Sequence[str]) -> Iterator[str]:
    """CLIP."""
    sides = flexpipe_clip.SIDES
    yield f"| CLIP | {' | '.join(sides)} | FlexPipe's and our setting |\n|---|{'---|' * len(sides)}---|"
    for model in models:
        yield _row(model, {side: flexpipe_clip.best(model, side) for side in sides})


def _row(name: str, found: Mapping[str, Result]) -> str:
    base = found["mmtrain"].seconds
    cells = [
        f"{r.seconds:.3f} ({r.seconds / base:.2f}; {r.point.name})" if r.seconds < math.inf else "X"
        for r in found.values()
    ]
    settings = "; ".join(f"{found[side].setting}, bubble {found[side].bubble:.3f}" for side in ("FlexPipe", "mmtrain"))
    return f"| {name} | {' | '.join(cells)} | {settings} |"


# --------------------------------------------------------------------------------------- both directions


def bidirectional(evaluations: int) -> Iterator[str]:
    """Both tables."""
    yield "| P, M, transfer | Chimera | BitPipe | one copy | 4 chunks | copies over one |\n|---|---|---|---|---|---|"
    for ranks, count, transfer_s in CHAINS:
        chains = {
            shape: plain_chain(ranks, count, CATALOGUE[schedule], transfer_s=transfer_s)
            for schedule, shape in SHAPES.items()
        }
        more = plain_chain(ranks, count, CATALOGUE["Interleaved1F1B"], num_segments=4, transfer_s=transfer_s)
        one = min(_searched_s(problem, evaluations) for problem in chains.values())
        four = _searched_s(more, evaluations)
        two = [_searched_s(both_ways(chains[shape]), evaluations) for shape in ("one-to-one", "v")]
        shown = " | ".join(f"{seconds:.2f}" for seconds in (*two, one, four))
        yield f"| {ranks}, {count}, {transfer_s} | {shown} | {min(two) / min(one, four):.3f} |"
    yield "\n| 5B, 256K | Chimera: step s, bubble, GiB | one copy: the same | copies over one |\n|---|---|---|---|"
    for point in BOTH_WAYS:
        of_one, of_two = _steps(point, evaluations)
        cells = [f"{r.seconds:.3f}, {r.bubble:.3f}, {r.peak_gib:.1f}" for r in (of_two, of_one)]
        yield f"| {point.name} | {' | '.join(cells)} | {of_two.seconds / of_one.seconds:.3f} |"


def _steps(point: Point, evaluations: int) -> tuple[Result, Result]:
    """The best steps on one copy, and on two."""
    pipelines = [Pipeline(point, Cut(True, chunks), "none") for chunks in (1, 2)]
    one = [made.result("one", "", _searched(made.problem, evaluations)) for made in pipelines]
    problem = both_ways(pipelines[0].problem)
    copies = pipelines[0].result("two", "", _searched(problem, evaluations), problem)
    return min(one, key=lambda r: r.seconds), copies


def _searched(problem: PlanningProblem, evaluations: int) -> Plan:
    unlimited = replace(problem, memory_limit_bytes=(None,) * problem.graph.num_ranks)
    return make_plan(unlimited, SearchOptions(budget_evaluations=evaluations)).plan


def _searched_s(problem: PlanningProblem, evaluations: int) -> float:
    return make_plan(problem, SearchOptions(budget_evaluations=evaluations)).makespan_s


# ------------------------------------------------------------------------------------------------ models


def models(names: Sequence[str], evaluations: int) -> None:
    """FlexPipe's tuner over ours."""
    with ThreadPoolExecutor(1) as pool:
        for name in names:
            setup = Setup(model=name, num_steps=1, evaluations=evaluations)
            show(name, {OURS: tuned(setup)[1], **best_flexpipe(pool, setup)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--vocabularies", default="", help="in thousands; default: those of each figure")
    parser.add_argument("--models", default="", help="of figure16 and models; default: all")
    parser.add_argument("--gpus", type=int, default=32)
    parser.add_argument("--evaluations", type=int, default=40)
    given = parser.parse_args()
    parts, asked = given.parts.split(","), [name for name in given.models.split(",") if name]
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if unknown := set(asked) - {*CLUSTERS, *flexpipe_clip.CLIPS}:
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join((*CLUSTERS, *flexpipe_clip.CLIPS))}")
    vocabularies = [int(word) for word in given.vocabularies.split(",") if word]
    warm()
    tables = {
        "figure2": lambda: figure2(vocabularies or GPTS["5b"].vocabularies),
        "figure12": lambda: of_gpt("5b", vocabularies or GPTS["5b"].vocabularies, given.gpus),
        "figure13": lambda: of_gpt("16.1b", vocabularies or GPTS["16.1b"].vocabularies, given.gpus),
        "figure16": lambda: figure16([name for name in flexpipe_clip.CLIPS if not asked or name in asked]),
        "bidirectional": lambda: bidirectional(given.evaluations),
    }
    for part, table in tables.items():
        if part in parts:
            print(f"\n{part}", flush=True)
            for line in table():
                print(line, flush=True)
    if "models" in parts:
        models([name for name in CLUSTERS if not asked or name in asked], given.evaluations)


if __name__ == "__main__":
    main()
