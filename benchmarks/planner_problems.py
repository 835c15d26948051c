"""Planning problems of the paper's models, for benchmarks of the planner.

Costs, stages and works are those of the configs on simulated H800s (`mmtrain/costs/operators`), batches those of the
workload "mix". Memory options are not the trainer's own but assumed, a stage's layers one after the other: keep all;
or repeat the attention and MLP inner products (12 % of the forward, 55 % of the bytes left); or repeat all (all of the
forward, 5 % of the bytes left). In between some of the layers do, in eight steps. The limit is 92 % of the memory, less
parameters, gradients, optimizer state and 3 GB.
"""

import gzip
import json
from dataclasses import replace
from pathlib import Path

from mmtrain.config import config as config_module
from mmtrain.costs.machine import Machine
from mmtrain.modality.typical import TypicalSizes
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.memory.rank_bytes import Sharding
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.problem import Option, PlanningProblem
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.typical_iterations import usual_workload
from mmtrain.simulator.workloads import draw

CLUSTERS = {"vlm_s": "h800x16", "vlm_m": "h800x32", "vlm_l": "h800x64", "t2v_l": "h800x64"}
SEGMENTS = {"vlm_s": (2, 1), "vlm_m": (2, 2), "vlm_l": (2, 2), "t2v_l": (1, 3)}
"""Of vision and language, or of the text encoder and the DiT, where nothing else is asked for."""
STEPS = 8
"""Between the fastest and the smallest option."""


def problem(
    name: str,
    num_microbatches: int = 64,
    *,
    segments: tuple[int, int] | None = None,
    seed: int = 0,
    iteration: int = 0,
    options: bool = True,
    workload: str = "",
    partition: str = "dip",
    tp: int = 0,
    contention: float = 1.0,
    limited: bool = True,
) -> PlanningProblem:
    """The planning problem of one iteration.

    Args:
        segments: as in `SEGMENTS`; of a mixed partition the second is its passes.
        workload: empty: the usual one.
        options: with memory options and limits; else activations are recomputed as the config says, without a limit.
        tp: degree of tensor parallelism; 0: the config's.
        contention: of exchanges and compute; 1: nothing is hidden.
        limited: with limits of memory.
    """
    first, second = segments or SEGMENTS[name]
    modules = ("language", "dit") if name.startswith("t2v") else ("encoder", "language")
    words = [
        f"training.global_batch_size={num_microbatches}",
        f"model.{modules[0]}.num_segments={0 if partition.startswith('mixed') else first}",
        f'planner.partition="{partition}"',
        f"model.{modules[1]}.num_segments={second}",
        f'planner.hardware="{_cluster(name, tp)}"',
        *([f"parallelism.tensor_parallel_degree={tp}"] if tp else []),
        *(['activation_checkpoint.mode="none"'] if options else []),
        *([] if limited else ['planner.memory_limit=""']),
    ]
    job = config_module.load(f"{name}.toml", words)
    made = replace(make_job(job), schedule=CATALOGUE["ZB-AutoSchedule"])  # for the costs of I and W
    meta = draw(workload or usual_workload(job), TypicalSizes.of(job), seed=seed, iteration=iteration)
    found = with_contention(IterationPlanner(made).problem(meta)[1], contention)
    if not options or not limited:
        return found
    memory = Machine.of(job).memory_bytes
    assert memory is not None
    sharding = Sharding.of(job)
    ranks = range(made.partition.num_ranks)
    states = [sharding.rank_state(made.spec, made.partition, rank).peak_bytes(0.0) for rank in ranks]
    return replace(
        found,
        costs=tuple(tuple(_memory_options(listed[0])) for listed in found.costs),
        memory_limit_bytes=tuple(max(0.0, 0.92 * memory - state - 3e9) for state in states),
    )


def with_contention(given: PlanningProblem, contention: float) -> PlanningProblem:
    """The problem on hardware with another contention, in the layers that have exchanges."""
    costs = tuple(
        tuple(replace(option, contention=contention) if option.contention < 1 else option for option in options)
        for options in given.costs
    )
    return replace(given, costs=costs)


def _cluster(name: str, tp: int) -> str:
    if not tp:
        return CLUSTERS[name]
    return f"h800x{tp * config_module.load(f'{name}.toml', []).parallelism.pipeline_parallel_degree}"


def _memory_options(keep: Option) -> list[Option]:
    found = [keep]
    for step in range(1, STEPS + 1 if keep.has_backward else 1):
        part = 2 * step / STEPS
        selective, full = (part, 0.0) if part <= 1 else (2 - part, part - 1)
        left = (1 - selective - full) + 0.55 * selective + 0.05 * full
        found.append(
            replace(
                keep,
                name=f"recompute {part:g}",
                backward_input_s=keep.backward_input_s + keep.forward_s * (0.12 * selective + full),
                backward_exchange_s=keep.backward_exchange_s + keep.forward_exchange_s * full,
                activation_bytes=keep.activation_bytes * left,
                # Between I and W a recomputed layer holds as much as any other one.
            )
        )
    return found


def reference(name: str) -> PlanningProblem:
    """A problem of 64 microbatches in `problems/`, of VLM-S, M or L, independent of this package's cost model.

    Their seconds come from efficiencies of which two reproduce DIP's published layer times and the others are guesses;
    activations are 2 (5 h + kv + 2 to 3 ffn) bytes a token and layer over TP; limits 53 to 62 GB. Segments are
    (4, 1), (1, 1) and (3, 2). The files of M and L have 32 microbatches, which come twice.
    """
    path = next((Path(__file__).parent / "problems").glob(f"{name}_*.json.gz"))
    table = json.loads(gzip.decompress(path.read_bytes()))
    works = table["works"]
    count = 1 + max(work["microbatch"] for work in works)
    if count < 64:
        again = [
            {**w, "microbatch": w["microbatch"] + count, "after": [i + len(works) for i in w["after"]]} for w in works
        ]
        table["works"] = works + again
    return PlanningProblem.from_json(table)
