"""torchrun --nproc-per-node 2 benchmarks/runtime_overhead.py

What the runtime itself costs an action: wall time and CPU time of mmtrain's runtime against torch's own classes, on the
same stages (a 16 x 16 linear layer, so that compute is next to nothing), the same orders and the same process group, in
turn in one run: 1F1B with a stage a rank, and Interleaved1F1B with two. mmtrain is timed with one program that is
loaded once, as torch's is, and with a program that is loaded anew in every step, as in training. CPU time is that of a
whole rank, with the threads of gloo, and the mean over the ranks. Prints minimum, median and maximum over the
repetitions, and the ratios pair by pair.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from mmtrain.config.topology import JobLayout
from mmtrain.models.loss import LossOutput
from mmtrain.parallel.mesh import Mesh, build_mesh
from mmtrain.parallel.runtime import PipelineScheduleRuntime
from mmtrain.parallel.stage import ModalityStage
from mmtrain.planner.make_plan import make_plan
from mmtrain.schedule.action import WAITS
from mmtrain.schedule.chain import plain_chain
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.passes.lower import Program, lower
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem

WIDTH = 16
RUNTIME = "torch, runtime"
"""The run that the others are compared with: `_PipelineScheduleRuntime` with the orders of mmtrain's plan."""


class Layer(nn.Module):
    def __init__(self, with_loss: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.with_loss = with_loss

    def forward(self, x: Tensor):
        x = self.linear(x)
        return LossOutput(x.sum()) if self.with_loss else x


def our_runs(plan: Plan, program: Program, mesh: Mesh, data: Sequence[Tensor]) -> dict[str, Callable[[], Any]]:
    """Name -> a step of mmtrain's runtime."""
    num_stages = len(plan.graph.stage_rank)
    stages = [
        ModalityStage(
            Layer(s == num_stages - 1), s, num_stages, mesh.device, mesh.pp_group, mesh.channels, torch.float32
        )
        for s in plan.graph.stages_of_rank(mesh.rank)
    ]
    runtime = PipelineScheduleRuntime(stages)

    def shape_of(stage: int, work: int) -> tuple[int, int]:
        return (1, WIDTH)

    def feed(stage: int, work: int):
        return ((data[work],), {}) if stage == 0 else ((), {})

    def run_loaded() -> None:
        runtime.step(feed)

    def run_anew() -> None:  # the graph's derived tables are part of planning, as in training
        runtime.load(Program(program.graph, program.actions), shape_of)
        runtime.step(feed)

    runtime.load(program, shape_of)
    return {"mmtrain": run_loaded, "mmtrain, new program": run_anew}


def torch_runs(plan: Plan, mesh: Mesh, data: Sequence[Tensor]) -> dict[str, Callable[[], Any]]:
    """Name -> a step of torch's runtime and of its schedule of the plan's name."""
    num_stages, world = len(plan.graph.stage_rank), mesh.layout.pp
    whole, target = torch.cat(list(data)), torch.zeros(len(data), 1)
    options = {"n_microbatches": len(data), "loss_fn": lambda out, _: out.sum(), "scale_grads": False}

    def stages() -> list[PipelineStage]:
        return [
            PipelineStage(Layer(), s, num_stages, mesh.device, group=mesh.pp_group)
            for s in plan.graph.stages_of_rank(mesh.rank)
        ]

    runtime = _PipelineScheduleRuntime(stages(), **options)
    runtime._prepare_schedule_with_comms(
        {
            r: [_Action.from_str(f"{a.stage}{a.kind.value}{a.microbatch}") for a in order]
            for r, order in enumerate(plan.orders)
        }
    )
    own = ScheduleInterleaved1F1B(stages(), **options) if num_stages > world else Schedule1F1B(stages()[0], **options)

    def step(schedule: Any) -> Callable[[], Any]:
        inputs = (whole,) if mesh.rank == 0 else ()
        last = {"target": target, "losses": []} if mesh.rank == world - 1 else {}
        return lambda: schedule.step(*inputs, **last)

    return {RUNTIME: step(runtime), f"torch, {type(own).__name__}": step(own)}


def spread(values: list[float], form: str) -> str:
    return f"min {min(values):{form}}  median {statistics.median(values):{form}}  max {max(values):{form}}"


def compare(name: str, mesh: Mesh, args: argparse.Namespace) -> None:
    """Times the runs of one schedule, and prints them on rank 0."""
    problem: PlanningProblem = plain_chain(mesh.layout.pp, args.microbatches, CATALOGUE[name])
    plan = make_plan(problem, name).plan
    program = lower(plan, problem, sharded=False)
    data = [torch.randn(1, WIDTH) for _ in range(args.microbatches)]
    runs = torch_runs(plan, mesh, data) | our_runs(plan, program, mesh, data)
    num_waits = sum(action.kind in WAITS for action in program.actions[mesh.rank])
    num_actions = len(program.actions[mesh.rank]) - num_waits
    figures: dict[str, list[tuple[float, float]]] = {run: [] for run in runs}
    for repetition in range(args.repetitions + 1):
        for run in list(runs)[:: 1 if repetition % 2 else -1]:
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            for _ in range(args.steps):
                runs[run]()
            cpu_s = torch.tensor(time.process_time() - cpu_start, dtype=torch.float64)
            dist.all_reduce(cpu_s)  # waits for all ranks
            scale = 1e6 / args.steps / num_actions
            figures[run].append(((time.perf_counter() - start) * scale, float(cpu_s) / mesh.layout.pp * scale))
    if mesh.rank != 0:
        return
    print(
        f"{name}: {mesh.layout.pp} ranks, {args.microbatches} microbatches, torch {torch.__version__}, "
        f"{os.cpu_count()} cores; {num_actions} actions on rank 0 (mmtrain's program has {num_waits} waits more)"
    )
    for what, index in (("wall", 0), ("CPU", 1)):
        columns = {run: [pair[index] for pair in pairs[1:]] for run, pairs in figures.items()}  # the first warms up
        for run, values in columns.items():
            ratios = [a / b for a, b in zip(values, columns[RUNTIME], strict=True)]
            print(f"{run:32s} {what:4s} us an action: {spread(values, '6.1f')}  ratio: {spread(ratios, '.3f')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=60)
    parser.add_argument("--steps", type=int, default=3, help="in one repetition; few, so that a pair sees one load")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = build_mesh(JobLayout.grid(pp=dist.get_world_size()), torch.device("cpu"))
    for name in ("1F1B", "Interleaved1F1B"):
        compare(name, mesh, args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
