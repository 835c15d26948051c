"""python benchmarks/braid.py [--models vlm_s,vlm_m,vlm_l] [--evaluations 1000] [--parts models,rows,equal]

Blocks of a forward and a backward (`planner.search.braid`) in the simulator, seconds of an iteration.

models   DIP's vision-language models at TP 4 and 8 on H800s, one batch of 64 microbatches, under their memory limits
         (VLM-L does not fit with TP 4: without limits): the search without and with blocks at equal evaluations, 1F1B
         with memory options without and with them, and STP, which has its own rule of memory
rows     the language models of the STP paper as one V (`stp.py`), at a quarter of their microbatches: the same
equal    one V of equal F, I and W whose exchanges are all hidden, STP's own ground: STP by its closed form

Layers run as units, with the contention of STP's table 11. All but the seconds of planning is deterministic.
"""

import argparse
import time
from collections.abc import Iterator

from planner_problems import problem
from stp import CONTENTION, ROWS
from stp import problem as row_problem

from mmtrain.config.planner import PlannerConfig
from mmtrain.planner.make_plan import JobMethod, make_plan
from mmtrain.planner.search.search import search, warm
from mmtrain.planner.search.search_options import SearchOptions
from mmtrain.schedule.chain import plain_chain
from mmtrain.schedule.library.catalogue import CATALOGUE, Schedule
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.simulate import simulate

NOT_LIMITED = {("vlm_l", 4)}
EQUAL = ((2, 16), (4, 12), (4, 32), (8, 24), (8, 64))
"""Ranks and microbatches."""
EXCHANGES = (0.1, 0.3)
"""Seconds of a chunk, whose F, I and W take 1 s each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="vlm_s,vlm_m,vlm_l")
    parser.add_argument("--evaluations", type=int, default=1000)
    parser.add_argument("--parts", default="models,rows,equal")
    given = parser.parse_args()
    warm()
    if "models" in given.parts:
        _table(_models(given.models.split(",")), given.evaluations, ("1F1B",))
    if "rows" in given.parts:
        _table(_rows(), given.evaluations, ("ZBV", "DualPipeV"))
    if "equal" in given.parts:
        _table(_equal(), given.evaluations, ("ZBV", "DualPipeV"))


def _models(names: list[str]) -> Iterator[tuple[str, PlanningProblem]]:
    for name in names:
        for tp in (4, 8):
            limited = (name, tp) not in NOT_LIMITED
            yield f"{name} tp {tp}", problem(name, tp=tp, contention=CONTENTION, limited=limited)


def _rows() -> Iterator[tuple[str, PlanningProblem]]:
    for row in ROWS:
        few = row._replace(microbatches=row.microbatches // 4)
        name = f"{row.model} {row.sequences} x {row.seq_len} {row.hardware} tp {row.tp} pp {row.pp}"
        yield name, row_problem(few, "DualPipeV", CONTENTION)


def _equal() -> Iterator[tuple[str, PlanningProblem]]:
    for num_ranks, count in EQUAL:
        for exchange_s in EXCHANGES:
            seconds = (2.0, 2.0, 2.0)  # of both chunks of a rank
            made = plain_chain(num_ranks, count, CATALOGUE["STP"], seconds=seconds, exchange_s=exchange_s)
            stp_s = 2 * count * 3 + num_ranks - 1 + (4 * num_ranks - 1) * exchange_s
            yield f"P {num_ranks}, M {count}, AR {exchange_s} (STP: {stp_s:g})", made


def _table(given: Iterator[tuple[str, PlanningProblem]], evaluations: int, names: tuple[str, ...]) -> None:
    columns = ["search", "with blocks", "ratio", "planning s", *(f"{n}, with blocks" for n in names), "STP", "ratio"]
    print(f"\n| | {' | '.join(columns)} |\n{'|---' * (len(columns) + 1)}|")
    for title, made in given:
        options = [SearchOptions(budget_evaluations=evaluations, braid=braid) for braid in (False, True)]
        (apart, apart_s), (braided, braided_s) = (_searched(made, one) for one in options)
        cells = [f"{apart:.3f}", f"{braided:.3f}", f"{braided / apart:.3f}", f"{apart_s:.2f}, {braided_s:.2f}"]
        for name in names:
            schedule = CATALOGUE[name]
            cells.append(f"{_named(made, schedule):.3f}, {_named(made, schedule.braided()):.3f}")
        stp_s = simulate(made, CATALOGUE["STP"].make(made)).makespan_s
        over = "" if _fits(made) else " (over the memory limit)"
        print(f"| {title} | {' | '.join(cells)} | {stp_s:.3f}{over} | {braided / stp_s:.3f} |", flush=True)


def _searched(given: PlanningProblem, options: SearchOptions) -> tuple[float, float]:
    """(makespan, CPU seconds of the search)."""
    start = time.process_time()
    result = search(given, options)
    return result.timeline.makespan_s, time.process_time() - start


def _named(given: PlanningProblem, schedule: Schedule) -> float:
    """Makespan of a schedule, with memory options that fit; nan: none do."""
    result = make_plan(given, JobMethod(schedule, PlannerConfig()))
    return result.makespan_s if result.has_plan else float("nan")


def _fits(given: PlanningProblem) -> bool:
    """Whether STP keeps the memory limits, all options at their fastest."""
    peaks = simulate(given, CATALOGUE["STP"].make(given)).peak_bytes
    return all(limit is None or peak <= limit for peak, limit in zip(peaks, given.memory_limit_bytes, strict=True))


if __name__ == "__main__":
    main()
