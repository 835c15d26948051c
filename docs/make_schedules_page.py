"""python docs/make_schedules_page.py

Writes docs/schedules.md and its images in docs/images/ from the catalogue of schedules: what each one's docstring
says, its formulas of bubble and memory, and what the simulator measures beside them.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mmtrain.schedule.chain import plain_chain
from mmtrain.schedule.graph import ModuleStages, Work
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.plan import check
from mmtrain.schedule.problem import P2P, Option, PlanningProblem
from mmtrain.schedule.simulate import simulate
from mmtrain.schedule.timeline import Timeline
from mmtrain.schedule.view import draw

DOCS = Path(__file__).resolve().parent
RANKS, MICROBATCHES = 4, 8
COSTS = ((1.0, 1.0, 1.0), (4.0, 5.0, 3.0))
"""F, I and W of the measured chains."""

INTRODUCTION = """\
# The named schedules

*Made by `python docs/make_schedules_page.py` from `mmtrain/schedule/library/`; do not edit it by hand.*

`parallelism.pipeline_parallel_schedule` takes one of these names. `mmtrain schedule list` prints them,
`mmtrain schedule show NAME` draws one, and `mmtrain schedule compare` compares them: on a plain chain, on a planning
problem in a file, or on a batch of a job's own data.

All of them work for any number of microbatches and any work graph: several modules, microbatches without images,
frozen stages. A microbatch of a formula below is then a *pair* of a microbatch and a stage, with any number of
sub-microbatches. A backward is split only where both `I` and `W` have something to do, so a frozen stage keeps `B`.

**V placement.** `ZBV`, `V-half`, `V-min`, `DualPipeV`, `STP` and `STP-lean` need 2 chunks of each module on a rank: the
first P chunks go down the ranks and the second P chunks back up, so that each module begins and ends on rank 0. A job
that names one of them is cut in this way, and any other `num_segments` than 2 (or 0) is refused. Their orders are made
for one such chain. For two modules in a row ranks do what can start, by the rules of `ZB-AutoSchedule`, and hold no
more than the schedule's number of microbatches of mean size (at least the largest one).

**Memory limits** are kept by `interleave` and `ZB-AutoSchedule`. The others limit the microbatches in flight by their
own rule; with `planner.search.activation_memory_gib` they are refused.

**Simulated only.** Chimera (arXiv:2107.06925), BitPipe (arXiv:2410.19367) and DualPipe send microbatches through a
module in both directions at once, with two copies of each stage's weights on two ranks. Here a stage is on one rank:
the orders of two copies are shorter than our searched plans on one, but not a step that also pays for twice the
parameters, gradients and moments and for the sum of the copies ([figures](benchmarks.md#flexpipes-models)).
`DualPipeV` is the same idea with one copy. Where nothing hides exchanges (`tensor_parallel_degree = 1`, or costs that
do not know them) it runs the two parts of a pair one after the other: the bubble is then smaller by `(P-1)I/2` than the
published `(P-1)(F&B+B-3W)` of a chunk.

**Blocks.** `STP` and `STP-lean` run forwards and backwards as [braided blocks](architecture.md#blocks), so that
exchanges of tensor parallelism lie under compute; so does `DualPipeV` where costs say that exchanges can be hidden.
`mmtrain schedule show STP --exchange AR` shows what blocks hide, and how long each rank waits for exchanges.
`planner.search.braid`, or `--braid` on a chain, makes blocks in the orders of every schedule where that shortens them
([planner](planner.md#blocks)).

## Bubble and memory on a plain chain

P ranks, M microbatches, V chunks a rank (2 where a schedule needs several); F, I and W are the seconds of all chunks
of one rank for one microbatch, and activations count whole microbatches. The bubble is the makespan without M(F+I+W);
for schedules marked *, the longest time that a rank idles between its own first and last action, since their ends
are staggered and an optimizer step needs no common end. Formulas with V need M to be a multiple of P (`LoopedBFS`: at
least P; `V-half`, `V-min`, `DualPipeV`: at least 2P), and those with W need W no longer than F and I
(`DualPipeV` also needs I no longer than F). Measured: simulated with P = %d and M = %d, for F, I, W =
%s. The tests compare the simulator with these formulas for other sizes too, and
1F1B, `ZB-H1`, `ZB-H2` and `ZB-AutoSchedule` with all rows of Table 5 of the zero-bubble paper (arXiv:2401.10241), from
the profiled times of its Table 9, with 4 digits.

| schedule | bubble | formula: measured | activations held | formula: measured |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Formula:
    """A closed form in words and as a function."""

    text: str
    value: Callable[[float, float, float, int, int], float]
    """(F, I, W, P, M) -> amount; nan: there is none."""
    most: bool = False
    """Whether it is an upper bound."""


@dataclass(frozen=True)
class Facts:
    """What is known of a schedule on a plain chain."""

    bubble: Formula
    held: Formula
    own_ends: bool = False
    """Whether the bubble is that between a rank's own first and last action."""
    equal_times_only: bool = False
    """Whether the bubble's formula asks for F = I = W."""


NONE = float("nan")
BY_COST = Formula("by cost", lambda f, i, w, p, m: NONE)
PLAIN = Formula("(P-1)(F+I+W)", lambda f, i, w, p, m: (p - 1) * (f + i + w))
HALVED = Formula("(P-1)(F+I+W)/V", lambda f, i, w, p, m: (p - 1) * (f + i + w) / 2)
ALL = Formula("M", lambda f, i, w, p, m: m)
P_MICROBATCHES = Formula("P", lambda f, i, w, p, m: p)
SPLIT_HALVED = Formula("(P-1)(F+I-W)/V", lambda f, i, w, p, m: (p - 1) * (f + i - w) / 2)

FACTS: dict[str, Facts] = {
    "GPipe": Facts(PLAIN, ALL),
    "1F1B": Facts(PLAIN, P_MICROBATCHES),
    "Interleaved1F1B": Facts(HALVED, Formula("P + (P-1)/V", lambda f, i, w, p, m: p + (p - 1) / 2)),
    "LoopedBFS": Facts(HALVED, ALL),
    "ZB-H1": Facts(Formula("(P-1)(F+I-W)", lambda f, i, w, p, m: (p - 1) * (f + i - w)), P_MICROBATCHES),
    "ZB-H2": Facts(
        Formula("(P-1)(F+I-2W)", lambda f, i, w, p, m: (p - 1) * (f + i - 2 * w)),
        Formula("2P-1", lambda f, i, w, p, m: 2 * p - 1),
        own_ends=True,
    ),
    "ZB-AutoSchedule": Facts(
        BY_COST, Formula("the limit, else 2P", lambda f, i, w, p, m: 2 * p, most=True), own_ends=True
    ),
    "InterleavedZeroBubble": Facts(SPLIT_HALVED, P_MICROBATCHES),
    "ZBV": Facts(Formula("0", lambda f, i, w, p, m: 0.0), P_MICROBATCHES, own_ends=True, equal_times_only=True),
    "V-half": Facts(
        Formula("3PF/2", lambda f, i, w, p, m: 1.5 * p * f, most=True),
        Formula("(P+2)//2", lambda f, i, w, p, m: (p + 2) // 2),
        own_ends=True,
        equal_times_only=True,
    ),
    "V-min": Facts(
        Formula("(4P-5)F/2", lambda f, i, w, p, m: (4 * p - 5) * f / 2),
        Formula("(P+4)//3", lambda f, i, w, p, m: (p + 4) // 3),
        own_ends=True,
        equal_times_only=True,
    ),
    "DualPipeV": Facts(SPLIT_HALVED, Formula("P + 1/2", lambda f, i, w, p, m: p + 0.5)),
    "STP": Facts(
        Formula("(P-1)F/V from M = 3P-1 on", lambda f, i, w, p, m: NONE),
        Formula("(4P-1)/2 from M = 3P-1 on", lambda f, i, w, p, m: NONE),
        equal_times_only=True,
    ),
    "STP-lean": Facts(
        Formula("3(P-1)F/V", lambda f, i, w, p, m: 3 * (p - 1) * f / 2),
        Formula("3P/2", lambda f, i, w, p, m: 1.5 * p),
        equal_times_only=True,
    ),
    "Optimus": Facts(PLAIN, P_MICROBATCHES),
    "interleave": Facts(BY_COST, Formula("the limit", lambda f, i, w, p, m: NONE)),
}

ON_TWO_MODULES = ("Optimus", "interleave")
"""Schedules that are drawn on an encoder and a language model, since one chain does not show their idea."""


def make_page() -> tuple[str, dict[str, str]]:
    """The page, and name -> SVG of its images."""
    costs = " and ".join(", ".join(f"{value:g}" for value in cost) for cost in COSTS)
    lines = [INTRODUCTION % (RANKS, MICROBATCHES, costs)]
    lines += [f"{_row(name)}\n" for name in CATALOGUE]
    images = {}
    for name in CATALOGUE:
        images[name] = draw.svg(_timeline(name, None), title=f"{name}: {CATALOGUE[name].idea}")
        lines.append(f"\n## {name}\n\n{_text(name)}\n\n![{name}](images/{name}.svg)\n")
    return "".join(lines), images


def _row(name: str) -> str:
    facts = FACTS[name]
    bubbles, held = [], ""
    for cost in COSTS:
        timeline = _timeline(name, cost)
        equal = len(set(cost)) == 1
        wanted = facts.bubble.value(*cost, RANKS, MICROBATCHES) if equal or not facts.equal_times_only else NONE
        span = max(timeline.span_s) if facts.own_ends else timeline.makespan_s
        bubbles.append(_pair(wanted, span - MICROBATCHES * sum(cost), facts.bubble))
        held = held or _pair(facts.held.value(*cost, RANKS, MICROBATCHES), max(timeline.peak_bytes), facts.held)
    star = "\\*" if facts.own_ends else ""
    words = f"`{facts.bubble.text}`" + (", F = I = W" if facts.equal_times_only else "")
    return f"| [`{name}`](#{name.lower()}){star} | {words} | {', '.join(bubbles)} | `{facts.held.text}` | {held} |"


def _pair(wanted: float, measured: float, formula: Formula) -> str:
    if wanted != wanted:  # no closed form
        return f"{measured:g}"
    same = measured <= wanted + 1e-9 if formula.most else abs(measured - wanted) < 1e-9
    assert same, (formula.text, wanted, measured)
    return f"{'at most ' if formula.most else ''}{wanted:g}: {measured:g}"


def _text(name: str) -> str:
    """The docstring without what it says of arguments and errors, and what the image shows."""
    lines, wanted = [], True
    for line in (inspect.getdoc(inspect.unwrap(CATALOGUE[name].make)) or "").splitlines():
        wanted = (wanted or line.startswith("Source:")) and not line.startswith(("Args:", "Raises:"))
        lines += [line] * wanted
    where = "an encoder before a language model" if name in ON_TWO_MODULES else "a plain chain"
    return "\n".join(lines) + f"\n\nOn {where}, {RANKS} ranks and {MICROBATCHES} microbatches:"


def _timeline(name: str, cost: tuple[float, float, float] | None) -> Timeline:
    schedule = CATALOGUE[name]
    if cost is None and name in ON_TWO_MODULES:
        problem = _two_modules()
    else:
        problem = plain_chain(RANKS, MICROBATCHES, schedule, seconds=cost or COSTS[0])
    plan = schedule.make(problem)
    check(plan, problem)
    return simulate(problem, plan)


def _two_modules() -> PlanningProblem:
    """Microbatches with 0 to 3 vision works before a language work."""
    works: list[Work] = []
    for microbatch, images in enumerate((1, 0, 2, 1, 3, 0, 1, 2)):
        first = len(works)
        works += [Work(module=0, microbatch=microbatch, sub_microbatch=i) for i in range(images)]
        works.append(Work(module=1, microbatch=microbatch, sub_microbatch=0, after=tuple(range(first, len(works)))))
    costs = [
        Option(name="keep", forward_s=s, backward_input_s=s, backward_weight_s=s, activation_bytes=s)
        for s in (0.5, 1.0)
    ]
    return PlanningProblem.build(
        num_ranks=RANKS,
        modules=[
            ModuleStages(name="vision", stages=tuple(range(RANKS))),
            ModuleStages(name="language", stages=tuple(range(RANKS, 2 * RANKS))),
        ],
        stage_rank=[*range(RANKS), *range(RANKS)],
        works=works,
        costs=[(option,) for option in costs],
        cost_index=[[work.module] * RANKS for work in works],
        output_bytes=[[0.0] * RANKS] * len(works),
        p2p=P2P(latency_s=0.0, bytes_per_s=1.0),
    )


def main() -> None:
    page, images = make_page()
    (DOCS / "schedules.md").write_text(page)
    (DOCS / "images").mkdir(exist_ok=True)
    for name, text in images.items():
        (DOCS / "images" / f"{name}.svg").write_text(text)


if __name__ == "__main__":
    main()
