"""python benchmarks/emulate_pipelines.py [--job vlm_s] [--pipelines "2,2 2,3"] [--repetitions 5]

Measured against simulated seconds of several pipelines and of the sums of their gradients, where devices are emulated
as in `benchmarks/emulate.py`. The sums are those of the runtime (`LayerSums`), of stand-ins for the gradients of each
layer. Their time on the links is that of the simulator, from the moments at which ranks started them.

A step's microbatches are dealt to pipelines in proportion to their depths. Each list of depths runs on processes of its
own, once in virtual time, where the end must be the simulated one, once to warm up, and then with sleeps. Printed for
each: simulated and measured milliseconds until the last gradient is complete (mean and standard deviation), their
ratio, the part of them in which only sums run, and the milliseconds of the devices that are emulated, simulated and
measured, by which layouts may be compared.

Run it on a machine that does nothing else: where ranks wait for a core, that counts as the runtime's time.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.distributed as dist
from emulate import Case, scaled_cases, unit_factor
from emulation import EmulatedClock, EmulatedRuntime, HostClock, VirtualClock
from overheads import measure
from torch import nn

from mmtrain.config import config as config_module
from mmtrain.config.config import Config, each_pipeline
from mmtrain.config.sections import CommConfig
from mmtrain.config.topology import JobLayout
from mmtrain.costs.machine import Machine
from mmtrain.costs.overheads import NO_OVERHEADS, Overheads
from mmtrain.local.ranks import run_on_ranks
from mmtrain.modality.metadata import IterationMeta
from mmtrain.parallel.layer_sums import LayerSums
from mmtrain.parallel.mesh import Mesh, build_mesh
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.make_plan import make_plan
from mmtrain.planner.memory.rank_bytes import Sharding
from mmtrain.planner.partition.partition import Partition
from mmtrain.schedule.simulate import simulate
from mmtrain.schedule.timeline import Timeline
from mmtrain.simulator.drawn_steps import drawn_steps
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.pipeline_sums import PipelineSums
from mmtrain.simulator.typical_iterations import usual_workload
from mmtrain.spec.spec import ModelSpec

ELEMENTS = 4096
"""Of the stand-in for a layer's gradients."""


@dataclass(frozen=True, kw_only=True)
class Pipelines:
    """A step of several pipelines."""

    cases: tuple[Case, ...]
    """[pipeline]"""
    partitions: tuple[Partition, ...]
    """[pipeline]"""
    spec: ModelSpec
    sums: PipelineSums
    """With the seconds that they take."""
    factor: float
    """Emulated over real seconds."""

    def end_s(self, timelines: Sequence[Timeline]) -> float:
        """When all gradients are complete. Args: timelines: [pipeline]."""
        return self.sums.end_s(
            [
                [max(row.end_s for row in timeline.of_rank(stage.pp_rank)) for stage in partition.stages]
                for timeline, partition in zip(timelines, self.partitions, strict=True)
            ]
        )


def make_pipelines(
    config: Config, *, unit_s: float, message_bytes: float, overheads: Overheads = NO_OVERHEADS, image_side: int = 0
) -> Pipelines:
    """A drawn step under the job's schedule, scaled as the cases of `emulate`."""
    jobs, depths = each_pipeline(config, make_job), config.parallelism.layout.depths
    (step,) = drawn_steps(config, usual_workload(config), 1, image_side=image_side)
    ends = [len(step) * sum(depths[: index + 1]) // sum(depths) for index in range(len(depths))]
    plans = {}
    for index, (job, first, end) in enumerate(zip(jobs, [0, *ends], ends, strict=False)):
        problem = IterationPlanner(job).problem(IterationMeta(microbatches=step[first:end]))[1]
        plans[str(index)] = problem, make_plan(problem, job.schedule).plan
    factor, partitions = unit_factor(plans, unit_s), tuple(job.partition for job in jobs)
    sums = PipelineSums.of(partitions, jobs[0].spec, Sharding.of(config), Machine.of(config).network)
    return Pipelines(
        cases=tuple(scaled_cases("step", plans, unit_s, message_bytes, overheads, factor)),
        partitions=partitions,
        spec=jobs[0].spec,
        sums=replace(sums, seconds=tuple(factor * seconds for seconds in sums.seconds)),
        factor=factor,
    )


class EmulatedSums:
    """The sums of one rank. Collective over the job."""

    def __init__(self, step: Pipelines, mesh: Mesh) -> None:
        partition, text = step.partitions[mesh.place.pipeline], step.spec.text
        layers = {stage.index: nn.ParameterDict() for stage in partition.of_rank(mesh.pp_rank)}
        for stage in partition.of_rank(mesh.pp_rank):
            for index in range(*stage.layers):
                if step.spec.module(stage.module).layers[index].num_trainable_params:
                    layers[stage.index][f"{stage.module}_{index}"] = nn.Parameter(torch.zeros(ELEMENTS))
            if step.spec.tied_embeddings and stage.module == text.name and stage.last:
                layers[stage.index]["head"] = nn.Parameter(torch.zeros(ELEMENTS))
        self.gradients = [parameter for stage in layers.values() for parameter in stage.parameters()]
        self._layer_sums = LayerSums.of(layers, {"head": f"{text.name}_0"}, mesh, torch.float32)
        self._step, self._mesh, self._stages = step, mesh, list(layers)

    def run(self, clock: EmulatedClock) -> None:
        """Adds up gradients of 1."""
        for parameter in self.gradients:
            parameter.grad = torch.ones(ELEMENTS)
        started_s = [clock.now()] * self._mesh.layout.world_size
        for stage in self._stages:
            self._layer_sums.stage_reduced(stage)
        dist.all_gather_object(started_s, clock.now())
        self._layer_sums.finish()
        firsts = accumulate(self._mesh.layout.depths, initial=0)
        of_stages = [
            [started_s[first + rank] for rank in partition.stage_rank]
            for first, partition in zip(firsts, self._step.partitions, strict=False)
        ]
        clock.wait_until(self._step.sums.end_s(of_stages))


def execute(device: torch.device, step: Pipelines, repetitions: int) -> list[tuple[float, float, list[float]]]:
    """[run] -> seconds to the end of this rank's part in the pipeline and of its sums, and the sum of each gradient: in
    virtual time, to warm up, and each repetition."""
    mesh = build_mesh(JobLayout(depths=tuple(p.num_ranks for p in step.partitions)), torch.device("cpu"))
    case, sums = step.cases[mesh.place.pipeline], EmulatedSums(step, mesh)
    found = []
    clocks: list[VirtualClock | HostClock] = [VirtualClock(), *(HostClock() for _ in range(1 + repetitions))]
    for clock in clocks:
        EmulatedRuntime(case.problem, mesh, clock, message_scale=case.message_scale).run(case.plan)
        pipeline_s = clock.now()
        sums.run(clock)
        found.append((pipeline_s, clock.now(), [float(p.grad.mean()) for p in sums.gradients if p.grad is not None]))
    return found


def report(depths: str, step: Pipelines, answers: Sequence[Sequence[tuple[float, float, list[float]]]]) -> None:
    """Args: answers: [rank], of `execute`."""
    pipelines, ends = ([max(run[part] for run in runs) for runs in zip(*answers, strict=True)] for part in (0, 1))
    expected = [case.expected for case in step.cases]
    wanted, slowest = step.end_s(expected), max(timeline.end_s for timeline in expected)
    spent = step.end_s([simulate(case.problem, case.plan) for case in step.cases])
    measured = ends[2:]
    ratios = [end / wanted for end in measured]
    exposed = [end - pipeline for end, pipeline in zip(measured, pipelines[2:], strict=True)]
    numbers = [
        f"{1e3 * wanted:9.1f} {1e3 * statistics.fmean(measured):9.1f} +-{1e3 * statistics.pstdev(measured):5.1f}",
        f"{statistics.fmean(ratios):7.4f} +-{statistics.pstdev(ratios):6.4f}",
        f"{1e3 * (wanted - slowest):9.1f} {1e3 * statistics.fmean(exposed):9.1f} {ends[0] - spent:12.1e}",
        f"{1e3 * wanted / step.factor:12.1f} {1e3 * statistics.fmean(measured) / step.factor:9.1f}",
    ]
    print(f"{depths:9s} {len(step.sums.messages):8d}", *numbers, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default="vlm_s", help="a config")
    parser.add_argument("--pipelines", default="2,2 2,3", help="lists of depths: ranks are processes of this machine")
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument("--schedule", default="interleave")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--unit-ms", type=float, default=25.0, help="median action")
    parser.add_argument("--message-kib", type=float, default=256.0, help="largest message")
    parser.add_argument("--free", action="store_true", help="do not count overheads, as if the runtime took no time")
    args = parser.parse_args()
    overheads = NO_OVERHEADS if args.free else measure()
    print(
        "pipelines messages simulated      measured ms           ratio  exposed: both, virtual s     devices: both ms"
    )
    for depths in args.pipelines.split():
        config = config_module.load(
            f"{args.job}.toml",
            [
                f"training.global_batch_size={args.microbatches}",
                "parallelism.pipeline_parallel_degree=1",
                f"parallelism.pipelines=[{depths}]",
                f"parallelism.pipeline_parallel_schedule={args.schedule}",
                "planner.enable=false",
                "planner.memory_limit=",
                'planner.hardware="h800"',
            ],
        )
        sizes = {"unit_s": args.unit_ms / 1e3, "message_bytes": args.message_kib * 1024.0}
        step = make_pipelines(config, **sizes, overheads=overheads)
        world = sum(config.parallelism.layout.depths)
        report(depths, step, run_on_ranks(execute, world, step, args.repetitions, comm=CommConfig()))


if __name__ == "__main__":
    main()
