"""python benchmarks/peers.py [--models vlm_s,t2v_s] [--iterations 40] [--parts compare,rise,ablation] [--quick]

Peers side by side in our simulator: iterations of drawn workloads on the simulated H800s of DIP's models, every peer by
our own re-implementation of what it does to a pipeline (`peers_setups.py` says how), with the same costs, the same
memory limit and the same check of plans. An iteration is its pipeline and the optimizer's step; these jobs have one
replica, so that nothing is gathered or reduced.

compare    VLM-S, M, L (workload `mix`) and T2V-S, L (`video_captions`): each peer's iterations and ratio to the default
rise       VLM-S while images rise and fall (DIP, figure 8b), 40 iterations: a table, and a chart (--chart FILE)
ablation   VLM-S and T2V-S: the default with one feature off at a time, on a quarter of the iterations
chains     only if asked for: each model as one chain of all modules cut by time, on a quarter of the iterations

--quick: 2 iterations, 60 evaluations; figures mean nothing then. All but the seconds of planning is deterministic.
"""

import argparse
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from peers_setups import (
    ABLATIONS,
    CHAINS,
    CLUSTERS,
    DEFAULT,
    MIXED,
    PEERS,
    Outcome,
    Question,
    ablated,
    batches_of,
    chain_outcomes,
    chained,
    other_outcome,
    workload_of,
)

from mmtrain.planner.search.search import warm
from mmtrain.run_page.line_chart import png
from mmtrain.simulator.workloads import RISE_AND_FALL_PERIOD

PROCESSES = 2
ABLATED = ("vlm_s", "t2v_s")
Table = dict[str, Outcome]
"""Peer, or what is switched off -> what it came to."""


def main() -> None:
    given = _arguments()
    warm()
    with ProcessPoolExecutor(PROCESSES) as pool:
        if "compare" in given.parts:
            asked = [Question(model=name, **given.how) for name in given.models]
            tables = {}
            for question, tables[question] in _tables(pool, asked):
                _show(f"{question.model}, workload {workload_of(question)}", tables[question])
            _show_total(tables)
        if "rise" in given.parts:
            whole = {**given.how, "num_iterations": 2 if given.quick else 2 * RISE_AND_FALL_PERIOD}
            question = Question(model="vlm_s", workload="rise_and_fall", **whole)
            ((_, table),) = _tables(pool, [question])
            _show("vlm_s, workload rise_and_fall", table)
            if given.chart:
                given.chart.write_bytes(_chart(question, table))
        if "ablation" in given.parts:
            few = {**given.how, "num_iterations": max(2, given.how["num_iterations"] // 4)}
            asked = [Question(model=name, **few) for name in ABLATED if name in given.models]
            jobs = {(q, off): pool.submit(ablated, q, off) for q in asked for off in ABLATIONS}
            for question in asked:
                found = {off: jobs[question, off].result() for off in ABLATIONS}
                _show(f"{question.model}, one feature off", found, "")
        if "chains" in given.parts:
            few = {**given.how, "num_iterations": max(2, given.how["num_iterations"] // 4)}
            for question in [Question(model=name, **few) for name in given.models]:
                jobs = {chain: pool.submit(chained, question, chain) for chain in MIXED}
                found = {chain: outcome for chain, job in jobs.items() if (outcome := job.result())}
                _show(f"{question.model}, one chain of all modules (those that fit)", found, "")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CLUSTERS))
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--parts", default="compare,rise,ablation")
    parser.add_argument("--chart", type=Path, help="PNG file for the chart of `rise`")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    given.models, given.parts = given.models.split(","), given.parts.split(",")
    for name in given.models:
        if name not in CLUSTERS:
            parser.error(f"no model {name!r}; there are {', '.join(CLUSTERS)}")
    given.how = {"num_iterations": 2, "evaluations": 60} if given.quick else {"num_iterations": given.iterations}
    return given


def _tables(pool: ProcessPoolExecutor, asked: Sequence[Question]) -> Iterator[tuple[Question, Table]]:
    """What every peer comes to, in the order of `PEERS`; each table as soon as it is there."""
    jobs = {}
    for question in asked:
        others = {peer: pool.submit(other_outcome, question, peer) for peer in reversed(PEERS) if peer not in CHAINS}
        jobs[question] = pool.submit(chain_outcomes, question), others
    for question, (chains, others) in jobs.items():
        table = {**chains.result(), **{peer: job.result() for peer, job in others.items()}}
        yield question, {peer: table[peer] for peer in PEERS}


def ratio(outcome: Outcome, default: Outcome) -> float:
    """Mean seconds over those of the default, in the iterations that fit both; nan: there are none."""
    both = [pair for pair in zip(outcome.seconds, default.seconds, strict=True) if not any(map(math.isnan, pair))]
    return sum(a for a, _ in both) / sum(b for _, b in both) if both else math.nan


def _show(title: str, table: Mapping[str, Outcome], default: str = DEFAULT) -> None:
    print(f"\n{title}\n| | setting | iteration s | min to max | ratio | bubble % | peak GiB | fit | planning s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, outcome in table.items():
        fit = [value for value in outcome.seconds if not math.isnan(value)]
        count = f"{len(fit)} of {len(outcome.seconds)}"
        if not fit:
            print(f"| {name or 'all on'} | {outcome.setting} | - | - | - | - | - | {count} | - |")
            continue
        spread = f"{min(fit):.2f} to {max(fit):.2f}"
        print(
            f"| {name or 'all on'} | {outcome.setting} | {statistics.fmean(fit):.3f} | {spread} "
            f"| {ratio(outcome, table[default]):.3f} | {100 * outcome.bubble:.1f} | {outcome.peak_gib:.1f} | {count} "
            f"| {outcome.planning_s:.2f} |",
            flush=True,
        )


def _show_total(tables: Mapping[Question, Table]) -> None:
    """Of each peer: the geometric mean of its ratios, the least of them, and where it does not fit."""
    print("\nall workloads\n| | geometric mean of ratios | least | greatest | does not fit |\n|---|---|---|---|---|")
    for peer in PEERS:
        ratios = {q.model: ratio(table[peer], table[DEFAULT]) for q, table in tables.items()}
        there = {name: value for name, value in ratios.items() if not math.isnan(value)}
        absent = ", ".join(name for name in ratios if name not in there)
        if not there:
            print(f"| {peer} | - | - | - | {absent} |")
            continue
        low, high = (pick(there, key=there.__getitem__) for pick in (min, max))
        print(
            f"| {peer} | {statistics.geometric_mean(there.values()):.3f} | {there[low]:.3f} ({low}) "
            f"| {there[high]:.3f} ({high}) | {absent} |"
        )


def _chart(question: Question, table: Table) -> bytes:
    """Iteration time over iterations, and images of a microbatch."""
    images = [meta.num_images / len(meta.microbatches) for meta in batches_of(question)]
    shown = {
        peer: [0.0 if math.isnan(value) else value for value in outcome.seconds]
        for peer, outcome in table.items()
        if not any(map(math.isnan, outcome.seconds))
    }
    return png(shown, title="VLM-S, 64 microbatches: simulated iterations", unit="seconds", backdrop=("images", images))


if __name__ == "__main__":
    main()
