"""python benchmarks/simulator.py

What simulating one iteration of VLM-M (configs/vlm_m.toml: 64 microbatches, TP 8, PP 4, 1F1B) as operators of H800
costs: every operator of every rank of the pipeline, one after the other, against subgraphs that are simulated once
(layers in stages, stages in actions), and against a simulation that is resumed with one more dependency. All three
must agree to the last bit. Then what the planning problem of an iteration costs, with sizes seen for the first time
and again. CPU time, minimum over repetitions. Last, DIP's two published layer times (arXiv:2504.14145, section 2.2),
and the images of a sub-microbatch that reach 95 % of the best throughput of an encoder layer.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from subgraph_reuse.flat import flatten
from subgraph_reuse.nest import Call, Leaf, Nest, chain
from subgraph_reuse.reuse import Reuse

from mmtrain.config import config
from mmtrain.costs.cost_model import equal_layers
from mmtrain.costs.operator_costs import OperatorCosts
from mmtrain.costs.operators.execution import run
from mmtrain.costs.operators.hardware import load_hardware
from mmtrain.costs.operators.latency import Latencies
from mmtrain.costs.operators.operator_graph import Device, DeviceKind, Graph, Operator, OpKind, Phase
from mmtrain.modality.metadata import DocumentMeta, ImageMeta, IterationMeta, MicrobatchMeta
from mmtrain.planner.batching import Batching
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.make_plan import make_plan
from mmtrain.schedule.action import Kind
from mmtrain.schedule.plan import Plan
from mmtrain.simulator.make_job import make_job
from mmtrain.spec.spec import documents_work, images_work
from mmtrain.spec.work_size import Rates, WorkSize

REPETITIONS = 5
ROOT = Path(__file__).resolve().parent.parent
PHASES = {
    Kind.F: (Phase.FORWARD,),
    Kind.B: (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT),
    Kind.I: (Phase.BACKWARD_INPUT,),
    Kind.W: (Phase.BACKWARD_WEIGHT,),
}
SEND = Leaf(
    Graph(
        operators=(
            Operator(
                name="send", kind=OpKind.P2P, device=Device(DeviceKind.NETWORK), net_bytes=Rates(row=5120 * 2 / 8)
            ),
        )
    )
)
Result = TypeVar("Result")


def batch(seed: int) -> IterationMeta:
    """64 microbatches of 8,192 tokens: one document each, with 0 to 24 images of 52 x 52 patches, 169 tokens each."""
    microbatches = []
    for m in range(64):
        count = (7 * m + 11 * seed) % 25
        images = tuple(
            ImageMeta(sample=m, index=i, grid=(1, 52, 52), num_tokens=169, start=169 * i) for i in range(count)
        )
        tokens = 8192 - (13 * m + 17 * seed) % 64
        document = DocumentMeta(sample=m, num_tokens=tokens, num_targets=tokens - 169 * count, images=images)
        microbatches.append(MicrobatchMeta(documents=(document,)))
    return IterationMeta(microbatches=tuple(microbatches))


def nest_of(planner: IterationPlanner, batching: Batching, plan: Plan) -> Nest:
    """The iteration as calls: each action one of its stage's layers, each transfer one on the sender's network."""
    costs = planner.job.costs
    assert isinstance(costs, OperatorCosts)
    leaves: dict[tuple[str, int, Phase], Leaf] = {}
    runs: dict[tuple[str, int, int, Kind, WorkSize], Nest] = {}
    stages: dict[tuple[int, Kind, WorkSize], Nest] = {}
    equal = {module.name: equal_layers(module) for module in planner.job.spec.modules}

    def leaf(module: str, layer: int, phase: Phase) -> Leaf:
        key = (module, layer, phase)
        if key not in leaves:
            leaves[key] = Leaf(costs.graph(planner.job.spec.module(module), layer, input_grad=True).only(phase))
        return leaves[key]

    def run_of(module: str, layer: int, count: int, kind: Kind, size: WorkSize) -> Nest:
        """So many equal layers one after the other."""
        key = (module, layer, count, kind, size)
        if key not in runs:
            unit = Nest(tuple(Call(leaf(module, layer, phase), size=size) for phase in PHASES[kind]))
            runs[key] = chain(unit, count)
        return runs[key]

    def stage(index: int, kind: Kind, size: WorkSize) -> Nest:
        key = (index, kind, size)
        if key not in stages:
            place = planner.job.partition.stages[index]
            grouped = groupby(equal[place.module][slice(*place.layers)])
            found = [(layer, len(list(others))) for layer, others in grouped]
            in_order = found if kind is Kind.F else reversed(found)
            stages[key] = Nest(tuple(Call(run_of(place.module, *layers, kind, size)) for layers in in_order))
        return stages[key]

    calls: list[Call] = []
    ends: dict[tuple[Kind, int, int], int] = {}
    steps = [zip(order, works, strict=True) for order, works in zip(plan.orders, plan.works, strict=True)]
    for rank in plan.run().ranks:
        action, work = next(steps[rank])
        after = []
        for (kind, other, of), edge in plan.graph.needs(action.kind, action.stage, work):
            made = ends[kind, other, of]
            if edge:
                calls.append(Call(SEND, size=batching.sizes[of], rank=plan.graph.stage_rank[other], after=(made,)))
                made = len(calls) - 1
            after.append(made)
        ends[Kind.B if action.kind in (Kind.I, Kind.B) else action.kind, action.stage, work] = len(calls)
        body = stage(action.stage, action.kind, batching.sizes[work])
        calls.append(Call(body, rank=rank, after=tuple(after)))
    return Nest(tuple(calls))


def best_ms(function: Callable[[], Result], repetitions: int = REPETITIONS) -> tuple[float, Result]:
    """(least milliseconds of CPU time, the last result)."""
    times = []
    for _ in range(repetitions):
        start = time.process_time()
        result = function()
        times.append(time.process_time() - start)
    return 1e3 * min(times), result


def reuse(planner: IterationPlanner) -> None:
    batching, problem = planner.problem(batch(0))
    plan = make_plan(problem, "1F1B").plan
    assert plan is not None
    latencies = Latencies(load_hardware("h800"))
    nest = nest_of(planner, batching, plan)
    build_ms, (flat, seconds) = best_ms(lambda: flatten(nest, latencies), 1)
    given = seconds.tolist()
    run_ms, ends = best_ms(lambda: run(flat, given))
    full_ms = build_ms + run_ms
    first_ms, _ = best_ms(lambda: Reuse(latencies).simulate(nest), 2)
    known = Reuse(latencies)
    known_ms, found = best_ms(lambda: known.simulate(nest))
    middle = len(nest.calls) // 2
    more = nest.with_edges([(middle, middle + 40)])
    resume_ms, resumed = best_ms(lambda: known.resume(found, more))
    new_ms, new = best_ms(lambda: known.simulate(more))
    assert found.makespan_s == max(ends) and found.operators().end_s.tolist() == ends
    assert resumed.makespan_s == new.makespan_s
    print(f"{len(flat.operators)} operators, {len(nest.calls)} calls, makespan {found.makespan_s:.3f} s")
    print(f"  every operator: {build_ms:.0f} ms to build the graph, {run_ms:.1f} ms to walk through it")
    for what, ms in (("all new", first_ms), ("known", known_ms)):
        print(f"  subgraphs, {what}: {ms:.1f} ms ({full_ms / ms:.0f} x both, {run_ms / ms:.1f} x the walk alone)")
    print(f"  one more edge, known subgraphs: {new_ms:.1f} ms")
    print(f"  one more edge, resumed: {resume_ms:.1f} ms ({resumed.evaluated} of {len(nest.calls)} calls evaluated)")


def problems(name: str) -> None:
    job = config.load(ROOT / "configs" / f"{name}.toml", ["planner.hardware=h800"])
    planner = IterationPlanner(make_job(job))
    planner.problem(batch(0))
    new = []
    for seed in range(1, 1 + REPETITIONS):
        new.append(best_ms(lambda seed=seed: planner.problem(batch(seed)), 1)[0])  # type: ignore[misc]
    again = best_ms(lambda: planner.problem(batch(1)))[0]
    print(f"{name}: problem of 64 microbatches: new sizes {min(new):.1f} ms, sizes seen before {again:.1f} ms")


def anchors(planner: IterationPlanner) -> None:
    works = {
        "language": (documents_work([8192], 8192), 10.5, "Qwen2 32B, 8,192 tokens"),
        "vision": (images_work(planner.job.spec.module("vision"), [(1, 52, 52)] * 8), 6.75, "ViT 5B, 8 images"),
    }
    for name, (size, published, what) in works.items():
        times = planner.job.costs.layer(planner.job.spec.module(name), 1, size, input_grad=True)
        parts = [1e3 * x for x in dataclasses.astuple(times)]
        off = sum(parts) / published - 1
        shown = " + ".join(f"{x:.2f}" for x in parts)
        print(f"{what}: F + I + W = {shown} = {sum(parts):.2f} ms, published {published} ms ({off:+.1%})")


def sub_microbatch(name: str) -> None:
    job = config.load(ROOT / "configs" / f"{name}.toml", ["planner.hardware=h800"])
    made = make_job(job)
    vision, rate = made.spec.module("vision"), {}
    for images in range(1, 49):
        times = made.costs.layer(vision, 1, images_work(vision, [(1, 52, 52)] * images), input_grad=True)
        rate[images] = images / sum(dataclasses.astuple(times))
    peak = max(rate.values())
    least = next(images for images, found in rate.items() if found >= 0.95 * peak)
    shown = ", ".join(f"{images}: {rate[images] / peak:.2f}" for images in (1, 2, 4, 8, 12, 16, 32))
    print(f"{name}: part of the best throughput by images: {shown}; 95 % from {least} images on")


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    planner = IterationPlanner(make_job(config.load(ROOT / "configs" / "vlm_m.toml", ["planner.hardware=h800"])))
    reuse(planner)
    for name in ("vlm_s", "vlm_m"):
        problems(name)
    anchors(planner)
    for name in ("vlm_s", "vlm_m", "vlm_l"):
        sub_microbatch(name)


if __name__ == "__main__":
    main()
