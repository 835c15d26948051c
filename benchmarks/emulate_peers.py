"""python benchmarks/emulate_peers.py [--models vlm_s,t2v_s] [--ranks 4] [--batches 1] [--repetitions 4]

The peers of `benchmarks/peers.py` measured where devices are emulated, beside their simulated makespans: processes and
transfers are real, and a stage's compute is a sleep of the modelled seconds. torch's schedules run twice, by torch's
own classes (`emulate_torch.py`) and, the same orders of the same chain, by our runtime, which runs all the others too.

Settings are those of `peers_setups.py`, in hindsight of the batches that are drawn here; costs are those of simulated
H800s with tensor parallelism 4. All seconds of a batch are scaled by one factor, so that the median action of all peers
takes `--unit-ms`, and messages so that the largest has `--message-kib`. A peer that came to the plan of another is
named and not run again. All take turns on one set of ranks, repetition by repetition.

What the runtime adds to actions and messages on this machine is measured first, with as many ranks as cores
(`overheads.py`), is part of the simulated seconds of all peers, and known to mmtrain's searches, by a hardware profile.

First each runs in virtual time, where every action must end when simulated, those of torch's classes too: what
they measure beyond that is their runtime's, and not another schedule's. There and in every repetition, each stage must
ask for exactly its modelled seconds, and get them. Printed for each batch and peer: simulated and measured milliseconds
(mean and standard deviation over the repetitions), measured over simulated, both over those of mmtrain, the compute
actions of all ranks, and the microseconds of CPU time that one takes in virtual time, with its messages. A makespan is
from the common zero to the end of the last action. Last, whether the peers come in the simulated order.

Where torch waits for a send, gloo makes it wait for the receiver, as NCCL does with the sender's stream.

Run it on a machine that does nothing else: where ranks wait for a core, that counts as the runtime's time. With the
defaults it takes about 8 minutes.
"""

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from emulate import Case, print_order, scaled_cases, unit_factor
from emulate_torch import SCHEDULES, Meter, TorchPipeline, as_torch_splits
from emulation import EmulatedClock, EmulatedRuntime, HostClock, VirtualClock
from overheads import hardware_text, measure, scaled, uncharged
from peers_setups import BLOCKS, CLUSTERS, DEFAULT, PEERS, Outcome, Question, chain_outcomes, other_outcome

from mmtrain.config.sections import CommConfig
from mmtrain.config.topology import JobLayout
from mmtrain.costs.overheads import NO_OVERHEADS, Overheads
from mmtrain.errors import PlanError
from mmtrain.local.ranks import run_on_ranks
from mmtrain.parallel.mesh import Mesh, build_mesh
from mmtrain.planner.search.search import warm
from mmtrain.schedule.passes.lower import lower
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.simulate import simulate
from mmtrain.schedule.timeline import Row

OURS = ", our runtime"
"""After the name of a peer whose own classes run too."""
VIRTUAL = 3
"""Steps in virtual time. torch builds its stages in the first; the least CPU time of the others counts."""
COMPARED = f"times {DEFAULT}'s"
EXACT = 1e-9
"""Relative difference that the rounding of long sums of seconds makes."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a pipeline did in one step, on one rank or on all of them."""

    cpu_s: float
    stages: dict[int, Meter]
    """Stage -> what it spent."""


# -------------------------------------------------------------------------------------------------- cases


def make_cases(args: argparse.Namespace, overheads: Overheads) -> list[Case]:
    cases = []
    for model in args.models:
        question = Question(
            model=model,
            num_iterations=args.batches,
            evaluations=args.evaluations,
            overrides=(
                f"training.global_batch_size={args.microbatches}",
                f"parallelism.pipeline_parallel_degree={args.ranks}",
                f'planner.hardware="h800x{4 * args.ranks}"',
            ),
            keep_plans=True,
        )
        chains = chain_outcomes(question)
        outcomes = {peer: chains[peer] if peer in chains else other_outcome(question, peer) for peer in PEERS}
        for peer, outcome in outcomes.items():
            print(f"{model}, {peer}: {outcome.setting}", flush=True)
        for batch in range(args.batches):
            name = f"{model} {batch}"
            plans = different_plans(name, outcomes, batch)
            factor = unit_factor(plans, args.unit_ms / 1e3)
            if overheads != NO_OVERHEADS:
                for peer in (row for row in (DEFAULT, BLOCKS) if row in plans):
                    plans[peer] = knowing(question, peer, batch, scaled(overheads, 1 / factor))
            sizes = args.unit_ms / 1e3, args.message_kib * 1024.0
            cases += scaled_cases(name, plans, *sizes, overheads, factor)
    return cases


def knowing(question: Question, peer: str, batch: int, overheads: Overheads) -> tuple[PlanningProblem, Plan]:
    """What a row of mmtrain comes to with a hardware profile that has the overheads; the problem is without them."""
    *overrides, hardware = question.overrides
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "known.toml"
        file.write_text('extends = "h800"\n' + hardware_text(overheads))
        known = hardware.replace("h800x", f"{file}x")
        outcome = other_outcome(replace(question, overrides=(*overrides, known)), peer)
    print(f"{question.model}, {peer}, knowing overheads: {outcome.setting}", flush=True)
    pair = outcome.plans[batch]
    assert pair is not None
    problem = uncharged(pair[0], overheads)
    return problem, Plan(problem.graph, pair[1].orders, pair[1].options)


def different_plans(name: str, outcomes: Mapping[str, Outcome], batch: int) -> dict[str, tuple[PlanningProblem, Plan]]:
    """Row of the table -> its plan."""
    found: dict[str, tuple[PlanningProblem, Plan]] = {}
    for peer, outcome in outcomes.items():
        pair = outcome.plans[batch]
        if pair is None:
            print(f"{name}, {peer}: does not fit")
            continue
        if peer in SCHEDULES:
            found[peer] = (as_torch_splits(pair[0]), pair[1]) if pair[1].split else pair
        same = next((row for row, other in found.items() if row not in SCHEDULES and other == pair), None)
        if same and peer != DEFAULT:
            print(f"{name}, {peer}: the plan of {same}")
        else:
            found[peer + OURS if peer in SCHEDULES else peer] = pair
    if DEFAULT not in found:
        raise PlanError(f"{name}: {DEFAULT} has no plan that fits, to compare the others with; take more ranks")
    return found


# ------------------------------------------------------------------------------------------------ ranks


class OurPipeline:
    """One rank of a plan under our runtime."""

    def __init__(self, case: Case, mesh: Mesh) -> None:
        self._case, self._mesh = case, mesh
        self._program = lower(case.plan, case.problem, sharded=False)
        self._runtimes: dict[EmulatedClock, EmulatedRuntime] = {}

    def run(self, clock: EmulatedClock) -> dict[int, Meter]:
        """Stage -> what it spent in one step. Collective."""
        case = self._case
        if clock not in self._runtimes:
            runtime = EmulatedRuntime(case.problem, self._mesh, clock, message_scale=case.message_scale)
            self._runtimes[clock] = runtime
        runtime = self._runtimes[clock]
        meters = {stage.stage_index: Meter(clock) for stage in runtime.emulated}
        for stage in runtime.emulated:
            stage.clock = meters[stage.stage_index]
        runtime.run(case.plan, self._program)
        return meters


def execute(device: torch.device, cases: Sequence[Case], repetitions: int) -> list[list[Run]]:
    """[run][case] of this rank: `VIRTUAL` in virtual time, and each repetition."""
    mesh = build_mesh(JobLayout.grid(pp=cases[0].problem.graph.num_ranks), torch.device("cpu"))
    pipelines = [
        TorchPipeline(case.schedule, case.problem, case.plan, mesh, case.message_scale)
        if case.schedule in SCHEDULES
        else OurPipeline(case, mesh)
        for case in cases
    ]
    virtual, host = VirtualClock(), HostClock()
    clocks: list[EmulatedClock] = [*[virtual] * VIRTUAL, *[host] * repetitions]
    return [[_one(pipeline, clock) for pipeline in pipelines] for clock in clocks]


def _one(pipeline: TorchPipeline | OurPipeline, clock: EmulatedClock) -> Run:
    start_s = time.process_time()
    stages = pipeline.run(clock)
    return Run(cpu_s=time.process_time() - start_s, stages=stages)


# ----------------------------------------------------------------------------------------------- figures


def check_stages(case: Case, run: Run, *, virtual: bool) -> None:
    """Raises: PlanError: a stage asked for other seconds than modelled, got less, or ended before it does in the
    simulation; or, in virtual time, an action of it did not end when simulated.
    """
    modelled: dict[int, float] = dict.fromkeys(run.stages, 0.0)
    rows: dict[int, list[Row]] = {stage: [] for stage in run.stages}
    for row in simulate(case.problem, case.plan).rows:
        entry, options = row.action, case.plan.options
        # The first part of a block spends the seconds of all.
        modelled[entry.stage] += case.problem.entry_cost(entry, case.plan.graph.work_of(entry), options).seconds
        for part in entry.parts:
            rows[part.stage].append(row)
    for stage, found in run.stages.items():
        where, end_s = f"{case.batch}, {case.schedule}, stage {stage}", max(row.end_s for row in rows[stage])
        if not math.isclose(found.asked_s, modelled[stage], rel_tol=EXACT):
            raise PlanError(f"{where} asked for {found.asked_s} s, but its actions take {modelled[stage]} s")
        if found.taken_s < found.asked_s * (1 - EXACT) or found.ends_s[-1] < end_s * (1 - EXACT):
            raise PlanError(f"{where} was done after {found.taken_s} s of work at {found.ends_s[-1]} s, too soon")
        for row in rows[stage] if virtual else ():
            spent = row.end_s > row.start_s
            if spent and not any(math.isclose(end, row.end_s, rel_tol=EXACT) for end in found.ends_s):
                raise PlanError(f"{where}: {row.action} did not end at {row.end_s} s of virtual time, as simulated")


def report(cases: Sequence[Case], runs: Sequence[Sequence[Run]]) -> None:
    """Args: runs: [run][case] of all ranks, the first in virtual time."""
    for number, run in enumerate(runs):
        for case, found in zip(cases, run, strict=True):
            check_stages(case, found, virtual=number < VIRTUAL)
    print(f"virtual time: all actions of all {len(cases)} pipelines end as simulated")
    spans = [span for run in runs[VIRTUAL:] for found in run for span in found.stages.values()]
    late = sum(span.taken_s for span in spans) / sum(span.asked_s for span in spans) - 1
    print(f"sleeps: every stage asks for its modelled seconds in every run, and they take {late:.2%} longer")
    simulated = [case.expected for case in cases]
    simulated_s = [timeline.end_s for timeline in simulated]
    cpu_s = [min(run[i].cpu_s for run in runs[1:VIRTUAL]) for i in range(len(cases))]
    ends = [
        [max(span.ends_s[-1] for span in run[i].stages.values()) for run in runs[VIRTUAL:]] for i in range(len(cases))
    ]
    means = [statistics.fmean(found) for found in ends]
    for i, case in enumerate(cases):
        if i == 0 or case.batch != cases[i - 1].batch:
            head = f"{'simulated':>9s} {'measured ms':>17s} {'ratio':>7s}  {COMPARED:36s} actions CPU us"
            print(f"\n{case.batch:34s} {head}")
        base = next(k for k, c in enumerate(cases) if c.batch == case.batch and c.schedule == DEFAULT)
        print(
            f"{case.schedule:34s} {1e3 * simulated_s[i]:9.1f} "
            f"{1e3 * means[i]:9.1f} +-{1e3 * statistics.pstdev(ends[i]):6.1f} {means[i] / simulated_s[i]:7.4f}  "
            f"simulated {simulated_s[i] / simulated_s[base]:6.3f}, measured {means[i] / means[base]:6.3f} "
            f"{len(simulated[i].rows):7d} {1e6 * cpu_s[i] / len(simulated[i].rows):6.0f}"
        )
    print()
    print_order(cases, simulated_s, means)


def together(*runs: Run) -> Run:
    """One step of a pipeline. Args: runs: of its ranks."""
    return Run(cpu_s=sum(run.cpu_s for run in runs), stages={s: span for run in runs for s, span in run.stages.items()})


def main() -> None:
    args = arguments()
    warm()
    overheads = NO_OVERHEADS if args.free else measure()
    print(", ".join(f"{name} {1e6 * seconds:.0f} us" for name, seconds in asdict(overheads).items()), flush=True)
    cases = make_cases(args, overheads)
    seconds = args.repetitions * sum(case.expected.end_s for case in cases)
    print(f"{args.ranks} ranks, {len(cases)} pipelines, about {seconds:.0f} s", flush=True)
    ranks = run_on_ranks(execute, args.ranks, cases, args.repetitions, comm=CommConfig())
    report(cases, [list(map(together, *found)) for found in zip(*ranks, strict=True)])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="vlm_s,t2v_s", help="configs")
    parser.add_argument("--ranks", type=int, default=4, help="pipeline ranks: processes of this machine")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--batches", type=int, default=1, help="drawn iterations of each model")
    parser.add_argument("--repetitions", type=int, default=4)
    parser.add_argument("--evaluations", type=int, default=0, help="plans tried for a batch; 0: as many as a user gets")
    parser.add_argument("--unit-ms", type=float, default=25.0, help="median action")
    parser.add_argument("--message-kib", type=float, default=256.0, help="largest message")
    parser.add_argument("--free", action="store_true", help="do not count overheads, as if the runtime took no time")
    args = parser.parse_args()
    args.models = args.models.split(",")
    for name in args.models:
        if name not in CLUSTERS:
            parser.error(f"no model {name!r}; there are {', '.join(CLUSTERS)}")
    least = 2 * args.ranks - 1
    if args.microbatches < least:
        parser.error(
            f"--microbatches={args.microbatches}: with fewer than {least} (2 x ranks - 1) torch's ZBV has gaps"
        )
    return args


if __name__ == "__main__":
    main()
