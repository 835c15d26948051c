"""python benchmarks/tuning.py [--models vlm_s,vlm_m,t2v_s] [--parts config,tuned,flexpipe,axes,grid] [--devices]

What tuning is worth: `mmtrain tune` against peers that are tuned, too, over the axes that they have, on the simulated
H800s of DIP's models at 92 % of their memory. All are judged on the same steps (workloads `mix` and `video_captions`),
ours with 200 evaluations a search, and by whole iterations: pipelines of all replicas, gathers, sums, the optimizer.
`tuning_peers.py` says what peers do and may choose in hindsight.

config     degrees of the config: ours with all other axes tuned, without and with blocks; torch; Megatron-like
tuned      all degrees: the same, but peers without context parallelism above 2
flexpipe   the best of FlexPipe's tuner: its types of schedules on its degrees, chosen by bubble
axes       ours, tuned with one axis off at a time, which then stays as the config has it
grid       ours on all degrees that fit (cp up to 2), with and without blocks, with the rule's cut and a searched one,
           by whole searches of one step; and how far `tune` is from the best of them, both judged alike
--devices  instead: the pipelines of the best five of `tune` on emulated devices, simulated over measured, and whether
           they come in the simulated order (one replica, scaled seconds; `emulate.py` says how)

Printed: mean seconds of an iteration, times ours tuned (or the first row, without `tuned`), degrees, bubble, GiB of the
most loaded rank, CPU seconds of all that was tried, what was chosen. All but CPU seconds is deterministic.
"""

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import combinations

from emulate import execute, scaled_cases, unit_factor
from overheads import measure
from peers_setups import CLUSTERS, job_of
from tuning_peers import (
    CHOICES,
    MEGATRON,
    MEGATRON_CHOICES,
    Row,
    Setup,
    chain_rows,
    flexpipe_row,
    tried_degrees,
)

from mmtrain.config.config import Config
from mmtrain.config.sections import CommConfig
from mmtrain.config.topology import JobLayout
from mmtrain.local.ranks import run_on_ranks
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.make_plan import JobMethod, make_plan
from mmtrain.planner.search.search import warm
from mmtrain.planner.search_settings import search_seed
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.simulator.allocation.candidate_judge import GIB, Effort, Judge, Judged
from mmtrain.simulator.allocation.degrees import values_of
from mmtrain.simulator.allocation.space import AXES, Space
from mmtrain.simulator.allocation.tune import Tuned, Tuner
from mmtrain.simulator.drawn_steps import divided
from mmtrain.simulator.make_job import make_job

PROCESSES = 2
OURS = "mmtrain, tuned"
TORCH = "torch's schedules"
FINALISTS = 4
"""Degrees and schedules of a peer that are judged on all steps, by the seconds of the first."""
GRID_FINALISTS = 3
BEST = 5
"""Candidates whose pipelines run on emulated devices."""


# --------------------------------------------------------------------------------------------------- ours


def our_job(setup: Setup) -> Config:
    """The job as a user has it, within the peers' memory: the files recompute everything."""
    return job_of(setup.question, 'activation_checkpoint.mode="full"')


def judge_of(setup: Setup) -> Judge:
    return Judge(config=our_job(setup), steps=setup.steps)


def effort_of(setup: Setup, num_steps: int) -> Effort:
    return Effort(num_steps=num_steps, evaluations=setup.evaluations)


def tuned(setup: Setup, off: Sequence[str] = (), keep: int = 3) -> tuple[Tuned, Row]:
    """What `tune` finds without some axes."""
    start_s = time.process_time()
    axes = tuple(axis for axis in AXES if axis not in off)
    space = Space(config=our_job(setup), num_gpus=setup.num_gpus, axes=axes).without_those_it_cannot_have(asked=False)
    tuner = Tuner(space=space, judge=judge_of(setup), keep=keep, effort=effort_of(setup, setup.num_steps))
    found = tuner.run()
    return found, row_of(setup, found.best, time.process_time() - start_s)


def row_of(setup: Setup, judged: Judged, cpu_s: float) -> Row:
    config = our_job(setup)
    degrees = judged.candidate.job(config).parallelism.layout
    values = judged.candidate.difference(config).items()
    return Row(
        degrees=degrees,
        setting=", ".join(f"{key} = {value}" for key, value in values if key not in values_of(degrees)) or "as it is",
        seconds=judged.seconds,
        bubble=judged.bubble,
        peak_gib=judged.peak_bytes / GIB,
        cpu_s=cpu_s,
    )


# --------------------------------------------------------------------------------------------------- grid


def grid_of(setup: Setup, degrees: JobLayout) -> tuple[list[Judged], float]:
    """Whole searches of one step for all candidates of these degrees, and their CPU seconds."""
    start_s, judge = time.process_time(), judge_of(setup)
    space = Space(config=judge.config, num_gpus=setup.num_gpus)
    looks = []
    for first in (one for one in space.first() if values_of(degrees).items() <= dict(one.values).items()):
        for candidate in (first, space.searched_cut(first, degrees)):
            looks.append(judge.judge(candidate, effort_of(setup, 1)))
            braided = space.braided(candidate, degrees) if looks[-1].seconds else None
            looks += [judge.judge(braided, effort_of(setup, 1))] if braided else []
    return [look for look in looks if look.seconds], time.process_time() - start_s


def judged_alike(setup: Setup, look: Judged, num_steps: int) -> Row:
    """A candidate, judged anew."""
    start_s = time.process_time()
    judged = judge_of(setup).judge(look.candidate, effort_of(setup, num_steps))
    return row_of(setup, judged, time.process_time() - start_s)


def show_grid(pool: ProcessPoolExecutor, setup: Setup, found: Tuned) -> None:
    parts = list(pool.map(grid_of, *zip(*((setup, degrees) for degrees in tried_degrees(setup)), strict=True)))
    looks = sorted((look for part, _ in parts for look in part), key=lambda look: look.mean_s)
    cpu_s = sum(seconds for _, seconds in parts)
    best = looks[:GRID_FINALISTS]
    rows = {
        f"grid, {place}. on step 0": judged_alike(setup, look, setup.num_steps) for place, look in enumerate(best, 1)
    }
    of_tune = judged_alike(setup, found.best, 1).mean_s
    on_all = found.best.mean_s / min(row.mean_s for row in rows.values())
    print(
        f"\n{setup.model}, grid: {len(looks)} candidates run, {cpu_s:.0f} s of CPU time; on one step tune's best takes "
        f"{of_tune:.3f} s, {of_tune / best[0].mean_s - 1:+.2%} of the grid's best ({best[0].mean_s:.3f} s); on all "
        f"steps {on_all - 1:+.2%}"
    )
    show(f"{setup.model}, best of the grid on all steps", {OURS: row_of(setup, found.best, 0.0), **rows})


# -------------------------------------------------------------------------------------------------- peers


def best_chains(pool: ProcessPoolExecutor, setup: Setup, tried: Sequence[JobLayout]) -> dict[str, Row]:
    """The best of torch's schedules and of Megatron-like on these degrees, on all steps."""
    found = {}
    looks = list(pool.map(chain_rows, [setup] * len(tried), tried))
    for peer, choices in ((TORCH, CHOICES), (MEGATRON, MEGATRON_CHOICES)):
        its = [row for rows in looks for row in rows if row.choice in choices]
        best = sorted((row for row in its if row.seconds), key=lambda row: row.mean_s)[:FINALISTS]
        jobs = [pool.submit(chain_rows, setup, row.degrees, [row.choice], setup.num_steps) for row in best]
        whole = [row for job in jobs for row in job.result()]
        cpu_s = sum(row.cpu_s for row in [*its, *whole])
        if any(row.seconds for row in whole):
            found[peer] = replace(min(whole, key=lambda row: row.mean_s), cpu_s=cpu_s)
    return found


def best_flexpipe(pool: ProcessPoolExecutor, setup: Setup) -> dict[str, Row]:
    """What FlexPipe's tuner chooses, and the fastest of what it ranks."""
    own = our_job(setup).parallelism.tensor_parallel_degree
    tried = [one for one in tried_degrees(setup) if one.cp == 1 and one.tp in (1, own) and one.pp > 1]
    rows = list(pool.map(flexpipe_row, [setup] * len(tried), tried))
    cpu_s = sum(row.cpu_s for row in rows)
    fit = [row for row in rows if row.seconds]
    if not fit:
        return {}
    chosen, fastest = min(fit, key=lambda row: row.bubble), min(fit, key=lambda row: row.mean_s)
    return {
        "FlexPipe's tuner, by bubble": replace(chosen, cpu_s=cpu_s),
        "FlexPipe's tuner, degrees by seconds": replace(fastest, cpu_s=cpu_s),
    }


# ------------------------------------------------------------------------------------------------ devices


def show_devices(setup: Setup, repetitions: int, unit_ms: float) -> None:
    """The best of `tune` on emulated devices: one replica of the first step each."""
    config, overheads = our_job(setup), measure()
    rows = tuned(setup, keep=BEST)[0].rows
    plans = {str(place): _planned(look.candidate.job(config), setup) for place, look in enumerate(rows, 1)}
    cases = scaled_cases(setup.model, plans, unit_ms / 1e3, 2.0**18, overheads, unit_factor(plans, unit_ms / 1e3))
    print(f"\n{setup.model}: pipelines of one replica on emulated devices")
    print("| | degrees | simulated s | measured s | ratio |\n|---|---|---|---|---|")
    simulated, measured = [], []
    for case, look in zip(cases, rows, strict=True):
        degrees = look.candidate.job(config).parallelism.layout
        answers = run_on_ranks(execute, degrees.pp, [case], repetitions, comm=CommConfig())
        ends = [timelines[0].end_s for timelines in answers[0][1][2:]]  # after virtual time and a run to warm up
        simulated.append(case.expected.end_s)
        measured.append(statistics.fmean(ends))
        spread = f"{measured[-1]:.3f} +- {statistics.pstdev(ends):.3f}"
        ratio = simulated[-1] / measured[-1]
        print(f"| {case.schedule} | {_short(degrees)} | {simulated[-1]:.3f} | {spread} | {ratio:.4f} |", flush=True)
    pairs = [
        (i, j)
        for i, j in combinations(range(len(cases)), 2)
        if not math.isclose(simulated[i], simulated[j], rel_tol=0.01)
    ]
    right = sum((simulated[i] < simulated[j]) == (measured[i] < measured[j]) for i, j in pairs)
    print(f"order: {right} of {len(pairs)} pairs that differ by 1 % or more come in the simulated order")
    print("not emulated: gathers and sums of shards, the optimizer, other replicas, exchanges inside of a stage")


def _planned(job: Config, setup: Setup) -> tuple[PlanningProblem, Plan]:
    planner = IterationPlanner(make_job(job))
    meta = divided(setup.steps(job)[0], job.parallelism.layout.dp)[0]
    problem = planner.problem(meta, searched=True)[1]
    section = planner.job.section.with_search(budget_evaluations=setup.evaluations)
    return problem, make_plan(problem, JobMethod.searching(planner.job.schedule, section, seed=search_seed(0, 0))).plan


# ------------------------------------------------------------------------------------------------- output


def show(title: str, rows: dict[str, Row]) -> None:
    """A table. Args: rows: name -> row; ratios are to ours tuned, or to the first."""
    base = rows.get(OURS, next(iter(rows.values()))).mean_s
    print(f"\n{title}\n| | iteration s | ratio | pp, dp, tp, cp | bubble % | peak GiB | CPU s | setting |")
    print("|---|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        print(
            f"| {name} | {row.mean_s:.2f} | {row.mean_s / base:.3f} | {_short(row.degrees)} | {100 * row.bubble:.1f} "
            f"| {row.peak_gib:.1f} | {row.cpu_s:.0f} | {row.setting} |",
            flush=True,
        )


def _short(degrees: JobLayout) -> str:
    return f"{degrees.pp}, {degrees.dp}, {degrees.tp}, {degrees.cp}"


def compare(pool: ProcessPoolExecutor, setup: Setup, parts: Sequence[str]) -> None:
    """All parts but devices, of one model."""
    off: dict[str, tuple[str, ...]] = {}
    if "config" in parts:
        off |= {"mmtrain, config's degrees": ("degrees", "braid"), "... with blocks": ("degrees",)}
    if "tuned" in parts or "grid" in parts:
        off[OURS] = ()
    if "axes" in parts:
        off |= {f"without {axis}": (axis,) for axis in AXES if axis != "degrees" or "config" not in parts}
    jobs = {name: pool.submit(tuned, setup, axes) for name, axes in off.items()}
    own = our_job(setup).parallelism.layout
    rows: dict[str, Row] = {}
    if "config" in parts:
        rows |= {f"{name}, config's degrees": row for name, row in best_chains(pool, setup, [own]).items()}
    if "tuned" in parts:
        rows |= {f"{name}, tuned": row for name, row in best_chains(pool, setup, tried_degrees(setup)).items()}
    if "flexpipe" in parts:
        rows |= best_flexpipe(pool, setup)
    found = {name: job.result() for name, job in jobs.items()}
    show(setup.model, {**{name: row for name, (_, row) in found.items()}, **rows})
    if "grid" in parts:
        show_grid(pool, setup, found[OURS][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="vlm_s,vlm_m,t2v_s")
    parser.add_argument("--parts", default="config,tuned,flexpipe,axes,grid")
    parser.add_argument("--iterations", type=int, default=3, help="steps on which all are judged")
    parser.add_argument("--evaluations", type=int, default=200, help="plans that a search tries")
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--devices", action="store_true")
    parser.add_argument("--repetitions", type=int, default=3, help="of --devices")
    parser.add_argument("--unit-ms", type=float, default=25.0, help="median action of --devices")
    given = parser.parse_args()
    parts = given.parts.split(",")
    if unknown := set(parts) - {"config", "tuned", "flexpipe", "axes", "grid"}:
        parser.error(f"no part {', '.join(sorted(unknown))}")
    warm()
    with ProcessPoolExecutor(PROCESSES) as pool:
        for model in given.models.split(","):
            if model not in CLUSTERS:
                parser.error(f"no model {model!r}; there are {', '.join(CLUSTERS)}")
            how = {"evaluations": given.evaluations, "microbatches": given.microbatches}
            setup = Setup(model=model, num_steps=given.iterations, **how)
            if given.devices:
                show_devices(setup, given.repetitions, given.unit_ms)
            else:
                compare(pool, setup, parts)


if __name__ == "__main__":
    main()
