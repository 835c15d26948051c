"""torchrun --nproc-per-node 2 benchmarks/runtime_overhead.py

What the runtime itself costs: microseconds an action of mmtrain's runtime against torch's own
`_PipelineScheduleRuntime`, on the same stages (a 16 x 16 linear layer, so that compute is next to
nothing), the same 1F1B order and the same process group, in turn in one run. mmtrain is timed with one
program that is loaded once, as torch's is, and with a program that is loaded anew in every step, as
in training. Prints minimum, median and maximum over the repetitions, and the ratios pair by pair.
"""

import argparse
import os
import statistics
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from mmtrain.config.topology import MeshShape
from mmtrain.parallel.mesh import build_mesh
from mmtrain.parallel.runtime import PipelineScheduleRuntime
from mmtrain.parallel.stage import ModalityStage
from mmtrain.planner.plan import make_plan
from mmtrain.schedule.chain import plain_chain
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.passes.lower import lower

WIDTH = 16


class Output(NamedTuple):
    loss_sum: Tensor
    predictions: None = None


class Layer(nn.Module):
    def __init__(self, with_loss: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.with_loss = with_loss

    def forward(self, x: Tensor):
        x = self.linear(x)
        return Output(x.sum()) if self.with_loss else x


def spread(values: list[float], form: str) -> str:
    return f"min {min(values):{form}}  median {statistics.median(values):{form}}  max {max(values):{form}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="steps in one repetition")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = build_mesh(MeshShape(pp=world), torch.device("cpu"))

    problem = plain_chain(world, args.microbatches, CATALOGUE["1F1B"])
    plan = make_plan(problem, "1F1B").plan
    program = lower(plan, problem, sharded=False)
    data = [torch.randn(1, WIDTH) for _ in range(args.microbatches)]

    stage = ModalityStage(
        Layer(rank == world - 1), rank, world, mesh.device, mesh.pp_group, mesh.channels, torch.float32
    )
    ours = PipelineScheduleRuntime([stage])

    def shape_of(stage: int, work: int) -> tuple[int, int]:
        return (1, WIDTH)

    def feed(stage: int, work: int):
        return ((data[work],), {}) if stage == 0 else ((), {})

    def run_loaded() -> None:
        ours.step(feed)

    def run_anew() -> None:
        ours.load(program, shape_of)
        ours.step(feed)

    ours.load(program, shape_of)
    theirs_stage = PipelineStage(Layer(False), rank, world, mesh.device, group=mesh.pp_group)
    theirs = _PipelineScheduleRuntime(
        [theirs_stage], n_microbatches=args.microbatches, loss_fn=lambda out, _: out.sum(), scale_grads=False
    )
    orders = {
        r: [_Action.from_str(f"{a.stage}{a.kind.value}{a.microbatch}") for a in order]
        for r, order in enumerate(plan.orders)
    }
    theirs._prepare_schedule_with_comms(orders)
    whole, target = torch.cat(data), torch.zeros(args.microbatches, 1)

    def run_theirs() -> None:
        if rank == 0:
            theirs.step(whole)
        elif rank == world - 1:
            theirs.step(target=target, losses=[])
        else:
            theirs.step()

    num_actions = len(program.actions[rank])
    num_theirs = len(theirs.pipeline_order_with_comms[rank])
    runs = {"torch": run_theirs, "mmtrain": run_loaded, "mmtrain, new program": run_anew}
    figures: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.repetitions + 1):
        for name, run in runs.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(args.steps):
                run()
            dist.barrier()
            figures[name].append((time.perf_counter() - start) / args.steps / num_theirs * 1e6)
    if rank == 0:
        print(
            f"{world} ranks, {args.microbatches} microbatches, torch {torch.__version__}, {os.cpu_count()} cores; "
            f"{num_theirs} actions on rank 0 (mmtrain's program has {num_actions - num_theirs} waits more)"
        )
        for name, values in figures.items():
            print(f"{name:22s} us an action: {spread(values[1:], '.1f')}")  # the first repetition warms up
        for name in list(runs)[1:]:
            ratios = [a / b for a, b in zip(figures[name][1:], figures["torch"][1:], strict=True)]
            print(f"{name + ' / torch':30s} {spread(ratios, '.3f')}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
