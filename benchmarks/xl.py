"""python benchmarks/xl.py [MODEL ...] [--iterations N] [--evaluations N] [--chart FOLDER]
    [--section.key=value ...]

Where the rank-seconds of DIP's four largest models go, on simulated H100s (arXiv:2504.14145, table 6): one replica,
batches of the default workload. `Megatron-like`: one chain of four chunks a rank with equal parameters, Interleaved1F1B
(two chunks are slower); it, 1F1B and interleave recompute every block, as in the configs. `planned`: what the planner
makes of each batch, with memory options for each block; `planned, own cut`: with segments that it searched before. Then
which kernels are below the peak. DIP's simulator says an MFU of 0.36 for VLM-XL and 0.39 for T2V-XL (section 7.5, it
does not say for which of the two sizes of each).
"""

import argparse
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from mmtrain.config import config
from mmtrain.config.config import Config
from mmtrain.costs.operator_costs import OperatorCosts
from mmtrain.costs.operators.hardware import load_hardware
from mmtrain.costs.operators.operator_graph import OpKind
from mmtrain.modality.typical import TypicalSizes
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.run_page.breakdown_chart import drawing
from mmtrain.schedule.view.draw import painted
from mmtrain.simulator.breakdown import TimePart
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.study import ScheduleForecast, SimulationQuestion, simulate_job
from mmtrain.simulator.study_report import breakdown_rows
from mmtrain.simulator.typical_iterations import usual_workload
from mmtrain.simulator.workloads import draw

MODELS = {"vlm_xl_8k": 8192, "vlm_xl_16k": 16384, "t2v_xl_3k": 3072, "t2v_xl_6k": 6144}
SETUPS = {
    "Megatron-like": ("Interleaved1F1B", ["planner.partition=mixed-parameters", "{other}=0", "{language}=4"]),
    "1F1B": ("1F1B", []),
    "interleave": ("interleave", []),
    "planned": ("planned", ["activation_checkpoint.mode=none"]),
    "planned, own cut": ("planned", ["activation_checkpoint.mode=none", "{other}=0", "{language}=0"]),
}
"""Name -> schedule and overrides of the config; `{language}`, `{other}`: the numbers of segments of its modules."""
PRODUCTS = {OpKind.MATMUL, OpKind.CONVOLUTION, OpKind.ATTENTION}
EXCHANGES = {kind for kind in OpKind if kind.is_collective}
PEAK = load_hardware("h100").bf16_flops_per_s


def job(name: str, words: Sequence[str]) -> Config:
    other = "model.encoder.num_segments" if name.startswith("vlm") else "model.dit.num_segments"
    written = [word.format(language="model.language.num_segments", other=other) for word in words]
    return config.load(f"{name}.toml", [f"planner.hardware=h100x{MODELS[name]}", *written])


def answer(name: str, setup: str, iterations: int, evaluations: int, keys: Sequence[str]) -> ScheduleForecast:
    schedule, words = SETUPS[setup]
    asked = SimulationQuestion(
        config=job(name, [*words, *keys]),
        schedules=(schedule,),
        evaluations=evaluations,
        num_iterations=iterations,
        num_replicas=1,
    )
    return dataclasses.replace(simulate_job(asked).answers[0], schedule=setup)


def below_peak(name: str, keys: Sequence[str]) -> dict[tuple[str, str], float]:
    """(module, kernels) -> fraction of what the first batch computes above its FLOPs at the peak rate."""
    made = job(name, [*SETUPS["planned"][1], *keys])
    planner = IterationPlanner(make_job(made))
    batching, _ = planner.problem(draw(usual_workload(made), TypicalSizes.of(made), seed=0, iteration=0), searched=True)
    costs, flops = planner.job.costs, planner.job.flops(batching)
    assert isinstance(costs, OperatorCosts)
    products, others = costs.without(set(OpKind) - PRODUCTS), costs.without(PRODUCTS | EXCHANGES)
    above = {}
    for module in planner.job.spec.modules:
        sizes = [size for work, size in enumerate(batching.sizes) if batching.module_of(work) == module.name]
        seconds = [
            sum(
                sum(dataclasses.astuple(part.layer(module, index, size, input_grad=index > 0)))
                for size in sizes
                for index in range(len(module.layers))
            )
            for part in (products, others)
        ]
        at_peak = flops[module.name].total / (PEAK * planner.job.submesh.size)
        above[module.name, "products and attention"] = seconds[0] - at_peak
        above[module.name, "other kernels"] = seconds[1]
    return {key: value / sum(above.values()) for key, value in above.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--evaluations", type=int, default=1000)
    parser.add_argument("--chart", type=Path)
    args, keys = parser.parse_known_args()
    for name in args.models:
        answers = []
        for setup in SETUPS:
            start = time.perf_counter()
            found = answer(name, setup, args.iterations, args.evaluations, keys)
            took = time.perf_counter() - start
            said = (
                found.problem or f"{found.mean('iteration_s'):.2f} s, MFU {found.breakdown[TimePart.MODEL_FLOPS]:.3f}"
            )
            print(f"{name} {setup}: {said}; simulated in {took:.0f} s", flush=True)
            answers += [] if found.problem else [found]
        for row in breakdown_rows(answers):
            print("| " + " | ".join(row) + " |")
        shown = (f"{module} {kernels} {share:.2f}" for (module, kernels), share in below_peak(name, keys).items())
        print(f"below the peak, parts of it: {', '.join(shown)}", flush=True)
        if args.chart:
            bars = drawing({a.schedule: a.breakdown for a in answers}, title=job(name, keys).job.description)
            (args.chart / f"{name}.png").write_bytes(painted(bars))


if __name__ == "__main__":
    main()
