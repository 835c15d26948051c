"""python benchmarks/braids.py [--rows divided] [--link 1.0] [--repetitions 9] [--emulated]

How much of what the simulator hides do blocks hide? Two tensor-parallel ranks run STP on one pipeline rank, with blocks
and with the two passes of each one after the other, in turn. Layers, autograd, weight gradients and collectives are
real; a link between processes of one machine is memory, so each exchange is made to take longer: it ends `--link` times
a unit's compute after it started, or after the one before it, and a rank that waits for it sleeps.

Printed: milliseconds of a step with either, without and with such a link; what the simulator gives for the compute of
actions that was measured without one; how long the rank waited for exchanges; and the part of the simulated gain that
was reached.

With `--emulated` layers are sleeps, and each rank's link is a second clock (`emulation.py`): two pipeline ranks, chains
with exchanges of half a unit's compute. Printed for each schedule: simulated and measured milliseconds, their ratio,
and the share of all exchanges that was hidden, simulated and measured.
"""

import argparse
import time
from dataclasses import replace
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from emulation import EmulatedRuntime, HostClock

from mmtrain.config import config
from mmtrain.config.config import Config
from mmtrain.config.sections import CommConfig
from mmtrain.config.topology import JobLayout
from mmtrain.local.ranks import run_on_ranks
from mmtrain.modality.metadata import DocumentMeta, IterationMeta, MicrobatchMeta
from mmtrain.models.batch import Batch, Microbatch
from mmtrain.parallel import passes
from mmtrain.parallel.bound_actions import BoundAction
from mmtrain.parallel.feed import StepFeed
from mmtrain.parallel.feeds.inputs import StepInputs
from mmtrain.parallel.local_model import build_local_model
from mmtrain.parallel.mesh import Mesh, build_mesh
from mmtrain.parallel.runtime import PipelineScheduleRuntime, StepOutcome
from mmtrain.planner.iteration import IterationPlan, IterationPlanner
from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.chain import plain_chain
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.passes.lower import lower
from mmtrain.schedule.passes.split import split_backwards
from mmtrain.schedule.plan import Plan, entry_costs
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.simulate import simulate
from mmtrain.simulator.make_job import make_job

EMULATED = ("Interleaved1F1B", "ZBV", "DualPipeV", "STP", "STP-lean")
TOKENS, MICROBATCHES, VOCABULARY = 384, 4, 512


class Link:
    """A link that exchanges use one after the other, for some seconds each."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.exposed_s = 0.0
        self.count = 0
        self._free_s = 0.0

    def install(self) -> None:
        """Makes every exchange of this process take the link."""
        exchange = passes.Pass.exchange

        def slow(one: passes.Pass, work: dist.Work, scatters: bool) -> None:
            exchange(one, _Slow(self, work), scatters)

        passes.Pass.exchange = slow  # type: ignore[method-assign, assignment]

    def start(self) -> float:
        """Starts an exchange; returns its end."""
        self.count += 1
        self._free_s = max(time.perf_counter(), self._free_s) + self.seconds
        return self._free_s


class _Slow(dist.Work):
    def __init__(self, link: Link, work: dist.Work) -> None:
        super().__init__()
        self._link, self._work, self._end_s = link, work, link.start()

    def wait(self, timeout: Any = None) -> bool:
        start = time.perf_counter()
        self._work.wait()
        time.sleep(max(0.0, self._end_s - time.perf_counter()))
        self._link.exposed_s += time.perf_counter() - start
        return True


def job(rows: str) -> Config:
    """A language model of two chunks of four blocks each."""
    model = (
        f"{{ model_type = 'qwen2', hidden_size = 512, intermediate_size = 2048, num_hidden_layers = 8, "
        f"num_attention_heads = 8, num_key_value_heads = 4, vocab_size = {VOCABULARY}, tie_word_embeddings = false }}"
    )
    return config.load(
        "debug_text.toml",
        [
            f"model.language.config={model}",
            "model.language.num_segments=2",
            f"training.seq_len={TOKENS}",
            f"training.global_batch_size={MICROBATCHES}",
            "parallelism.pipeline_parallel_degree=1",
            "parallelism.tensor_parallel_degree=2",
            "parallelism.pipeline_parallel_schedule=STP",
            "planner.enable=false",
            *([f"parallelism.tensor_parallel_rows={rows}"] if rows != "divided" else []),
        ],
    )


class CountingRuntime(PipelineScheduleRuntime):
    """The runtime, with the number of exchanges of each action, and the seconds for which it waited."""

    link: Link
    counts: dict[Action, int]
    waited_s: dict[Action, float]

    def _compute(self, bound: BoundAction) -> None:
        count, exposed_s = self.link.count, self.link.exposed_s
        super()._compute(bound)
        self.counts[bound.action] = self.link.count - count
        self.waited_s[bound.action] = self.link.exposed_s - exposed_s


def sequential(plan: Plan) -> Plan:
    """The plan with the passes of each block one after the other."""
    return Plan(plan.graph, tuple(tuple(part for entry in order for part in entry.parts) for order in plan.orders))


def inputs_of(planner: IterationPlanner, mesh: Mesh, meta: IterationMeta, plan: IterationPlan) -> StepInputs:
    ids = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(0))
    none = torch.zeros(0, dtype=torch.int64)
    microbatch = Microbatch(input_ids=ids, labels=ids, image_slots=none, pixel_values=[], image_names=[])
    batch = Batch(microbatches=[microbatch] * MICROBATCHES)
    return StepInputs(layout=plan.layout, meta=meta, mesh=mesh, batch=batch, labels=[ids] * MICROBATCHES)


def with_link(
    problem: PlanningProblem, actions: dict[tuple[int, Kind], float], exchanges: dict[tuple[int, Kind], float]
):
    """The problem with measured seconds of compute, and those of exchanges. Arguments: by stage and kind."""
    options = []
    for stage in range(len(problem.graph.stage_rank)):
        forward_s, input_s, weight_s = (actions[stage, kind] for kind in (Kind.F, Kind.I, Kind.W))
        options.append(
            replace(
                problem.options(stage, 0)[0],
                forward_s=forward_s + exchanges[stage, Kind.F],
                backward_input_s=input_s + exchanges[stage, Kind.I],
                backward_weight_s=weight_s,
                split_s=0.0,
                forward_exchange_s=exchanges[stage, Kind.F],
                backward_exchange_s=exchanges[stage, Kind.I],
                contention=0.0,
            )
        )
    costs = tuple((option,) for option in options)
    return replace(problem, costs=costs, cost_index=(tuple(range(len(options))),) * len(problem.graph.works))


def measure(device: torch.device, given: Config, factor: float, repetitions: int) -> dict[str, Any]:
    """What this rank measured."""
    planner = IterationPlanner(make_job(given))
    whole_rows = planner.job.submesh.whole_rows
    mesh = build_mesh(given.parallelism.layout, device, whole_rows=whole_rows)
    local = build_local_model(given.model, planner.job.spec, planner.job.partition, mesh, given.training, seed=0)
    runtime, link = CountingRuntime(local.stages), Link()
    runtime.link, runtime.counts, runtime.waited_s = link, {}, {}
    link.install()
    document = DocumentMeta(sample=0, num_tokens=TOKENS, num_targets=TOKENS, images=())
    meta = IterationMeta(microbatches=(MicrobatchMeta(documents=(document,)),) * MICROBATCHES)
    planned = planner.plan(meta)
    problem, plan = planned.problem, CATALOGUE["STP"].make(planned.problem)
    plans = {"blocks": plan, "one after the other": sequential(plan)}
    split = split_backwards(plans["one after the other"], problem, 0)  # its I and W are timed
    feed = StepFeed(planner.job.partition, inputs_of(planner, mesh, meta, planned))

    def step(name: str) -> StepOutcome:
        program = lower(plans.get(name, split), problem, sharded=False)
        runtime.load(
            program, lambda stage, work: planner.job.output_shape(planned.layout, stage, work, 0, mesh.place.tp)
        )
        dist.barrier()
        link.exposed_s = 0.0
        outcome = runtime.step(feed)
        for parameter in local.parameters:
            parameter.grad = None
        return outcome

    free: dict[str, list[float]] = {name: [] for name in plans}
    slow: dict[str, list[float]] = {name: [] for name in plans}
    exposed: dict[str, list[float]] = {name: [] for name in plans}
    seconds: dict[tuple[int, Kind], list[float]] = {}
    for repetition in range(repetitions + 1):
        for name in [*plans, "split"]:
            outcome = step(name)
            if repetition and name in plans:
                free[name].append(outcome.span[1] - outcome.span[0])
            for action, start, end in outcome.rows if repetition else ():
                seconds.setdefault((action.stage, action.kind), []).append(end - start - runtime.waited_s[action])
    typical = {key: median(values) for key, values in seconds.items()}
    counts = {(action.stage, action.kind): count for action, count in runtime.counts.items()}
    units = sum(typical[stage, Kind.F] for stage in (0, 1)) / sum(counts[stage, Kind.F] for stage in (0, 1))
    agreed = torch.tensor([factor * units], dtype=torch.float64)
    dist.broadcast(agreed, 0)
    link.seconds = float(agreed)
    for _ in range(repetitions):
        for name in plans:
            outcome = step(name)
            slow[name].append(outcome.span[1] - outcome.span[0])
            exposed[name].append(link.exposed_s)
    exchanges = {key: count * link.seconds for key, count in counts.items()}
    emulated = with_link(problem, typical, exchanges)
    return {
        "free": {name: median(values) for name, values in free.items()},
        "slow": {name: median(values) for name, values in slow.items()},
        "exposed": {name: median(values) for name, values in exposed.items()},
        "simulated": {name: simulate(emulated, plan).makespan_s for name, plan in plans.items()},
        "link_s": link.seconds,
        "exchanges": sum(counts[s, k] for s in (0, 1) for k in (Kind.F, Kind.I)) * MICROBATCHES,
    }


def emulate(device: torch.device, repetitions: int) -> dict[str, tuple[float, float]]:
    """Schedule -> seconds, and the share of exchanges that was hidden: medians, on this rank."""
    mesh = build_mesh(JobLayout.grid(pp=2), device)
    found = {}
    for name in EMULATED:
        problem, plan = chain(name)
        seconds, hidden = [], []
        for _ in range(1 + repetitions):
            runtime = EmulatedRuntime(problem, mesh, HostClock())
            seconds.append(runtime.timeline(runtime.run(plan)).makespan_s)
            hidden.append(1 - runtime.link.exposed_s / runtime.link.exchanged_s)
        found[name] = median(seconds[1:]), median(hidden[1:])
    return found


def chain(name: str) -> tuple[PlanningProblem, Plan]:
    seconds = (0.08, 0.08, 0.08)
    problem = plain_chain(2, 8, CATALOGUE[name], seconds=seconds, transfer_s=0.001, exchange_s=0.02)
    return problem, CATALOGUE[name].make(problem)


def print_emulated(repetitions: int, comm: CommConfig) -> None:
    ranks = run_on_ranks(emulate, 2, repetitions, comm=comm)
    head = ("simulated ms", "measured ms", "ratio", "hidden, simulated", "measured")
    print(f"{'emulated':16s} " + " ".join(f"{word:>17s}" for word in head))
    for name in EMULATED:
        problem, plan = chain(name)
        expected = simulate(problem, plan).makespan_s
        costs = [cost for costs in entry_costs(plan, problem) for cost in costs]
        total = 2 * 2 * len(problem.graph.works) * 2 * 0.02
        shares = 1 - sum(cost.exposed_s for cost in costs) / total, mean(rank[name][1] for rank in ranks)
        measured = ranks[0][name][0]
        print(
            f"{name:16s} {1e3 * expected:17.1f} {1e3 * measured:17.1f} {measured / expected:17.3f} "
            f"{shares[0]:17.3f} {shares[1]:17.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="divided", choices=("divided", "whole"))
    parser.add_argument("--link", type=float, default=1.0)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--emulated", action="store_true", help="of devices, without compute")
    args = parser.parse_args()
    if args.emulated:
        print_emulated(args.repetitions, CommConfig())
        return
    given = job(args.rows)
    found = run_on_ranks(measure, 2, given, args.link, args.repetitions, comm=given.comm)[0]
    print(f"{args.rows} rows, {found['exchanges']} exchanges of {1e3 * found['link_s']:.2f} ms a step")
    print(f"{'ms a step':24s} {'no link':>10s} {'link':>10s} {'simulated':>10s} {'exposed':>10s}")
    for name in found["free"]:
        row = [found[key][name] for key in ("free", "slow", "simulated", "exposed")]
        print(f"{name:24s} " + " ".join(f"{1e3 * value:10.1f}" for value in row))
    gains = {key: found[key]["one after the other"] - found[key]["blocks"] for key in ("slow", "simulated")}
    print(f"gain of blocks: measured / simulated {gains['slow'] / gains['simulated']:.2f}")


if __name__ == "__main__":
    main()
