"""python benchmarks/tuning_flexpipe.py [--gpus 32] [--vocabulary 64000] [--best 5]

FlexPipe's tuning (section 6 and 7.1) of its language model of 5B: a grid of pipeline ranks, replicas and samples of a
microbatch, powers of two, times 58 schedule types, for a global batch of 128; ranked by bubble, as the paper does. Its
table 5 gives 535 s for 32 GPUs. Prints the seconds of CPU time, the number of actions and the best of the grid (without
one pipeline rank, which has no bubble). The first run on a machine compiles the kernel.

Layers are cut evenly by number, the embedding is with the first stage and the head with the last; their seconds are
those of the project's model of an A800. FlexPipe divides both over the pipeline ranks; nothing divides them here.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from mmtrain.config import config
from mmtrain.costs.cost_model import LayerTimes
from mmtrain.costs.job_costs import cost_model
from mmtrain.schedule.graph import WorkGraph
from mmtrain.schedule.problem import P2P, Option, PlanningProblem
from mmtrain.schedule.recipe import kernel
from mmtrain.schedule.recipe.flexpipe_types import flexpipe_types, graph_of
from mmtrain.schedule.recipe.grid import RecipeGrid, Score
from mmtrain.simulator.make_job import job_spec
from mmtrain.spec.work_size import WorkSize

BATCH, SEQ_LEN, WIDTH, LAYERS = 128, 512, 2560, 64
MODEL = """{ model_type = "qwen2", hidden_size = %d, intermediate_size = 6912, num_hidden_layers = %d,
num_attention_heads = 64, num_key_value_heads = 64, vocab_size = %d, max_position_embeddings = 512,
tie_word_embeddings = false }"""
BYTES = 2
"""Of a number of a message."""

Layers = Callable[[int], list[LayerTimes]]
"""Samples of a microbatch -> seconds of the embedding, of each layer and of the head."""


class Row(NamedTuple):
    """One point of the grid."""

    num_ranks: int
    num_replicas: int
    samples: int
    """Of a microbatch."""
    name: str
    """Of the schedule type."""
    score: Score


def layers_of(vocabulary: int) -> tuple[Layers, P2P]:
    """Seconds of the layers, and of messages between pipeline ranks."""
    model = " ".join((MODEL % (WIDTH, LAYERS, vocabulary)).split())
    changes = [
        f"model.language.config={model}",
        f"training.seq_len={SEQ_LEN}",
        "training.loss_chunk_tokens=0",
        "planner.hardware='a800'",
    ]
    changes.append("training.mixed_precision_param='bfloat16'")
    job = config.load(Path(__file__).resolve().parent.parent / "configs" / "debug_text.toml", changes)
    spec = job_spec(job)
    costs, (module,) = cost_model(job, spec), spec.modules

    def layers(samples: int) -> list[LayerTimes]:
        tokens = samples * SEQ_LEN
        size = WorkSize(rows=tokens, pairs=tokens * (SEQ_LEN + 1) // 2, outputs=tokens)
        ends = (0, 1, LAYERS + 1)
        first, block, last = (costs.layer(module, index, size, input_grad=index > 0) for index in ends)
        return [first, *[block] * LAYERS, last]

    return layers, costs.p2p


def problem_of(graph: WorkGraph, samples: int, layers: Layers, p2p: P2P) -> PlanningProblem:
    """Chains of the model. Args: samples: of each microbatch."""
    count, times = len(graph.modules[0].stages), layers(samples)
    cuts = [0, *(1 + LAYERS * stage // count for stage in range(1, count)), len(times)]
    options = []
    for low, high in itertools.pairwise(cuts):
        forward_s, input_s, weight_s = (
            sum(getattr(layer, name) for layer in times[low:high])
            for name in ("forward_s", "backward_input_s", "backward_weight_s")
        )
        option = Option(
            name="keep",
            forward_s=forward_s,
            backward_input_s=input_s,
            backward_weight_s=weight_s,
            activation_bytes=0.0,
        )
        options.append((option,))
    size = float(samples * SEQ_LEN * WIDTH * BYTES)
    return PlanningProblem(
        graph=graph,
        memory_limit_bytes=(None,) * graph.num_ranks,
        p2p=p2p,
        costs=tuple(options),
        cost_index=(tuple(range(count)),) * len(graph.works),
        output_bytes=((size,) * count,) * len(graph.works),
    )


def powers(most: int) -> Iterator[int]:
    """1, 2, 4 ... up to a number."""
    power = 1
    while power <= most:
        yield power
        power *= 2


def grid(num_gpus: int, layers: Layers, p2p: P2P) -> Iterator[Row]:
    """All points, in the order of their degrees."""
    for num_ranks in powers(num_gpus):
        num_replicas = num_gpus // num_ranks
        for samples in powers(BATCH // num_replicas):
            types = flexpipe_types(num_ranks)
            for _, group in itertools.groupby(types, lambda named: named[1].placement):
                recipes = list(group)
                graph = graph_of(recipes[0][1], num_ranks, BATCH // num_replicas // samples)
                problem = problem_of(graph, samples, layers, p2p)
                of_problem = RecipeGrid(problem)
                for name, recipe in recipes:
                    yield Row(num_ranks, num_replicas, samples, name, of_problem.score(recipe))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=64000)
    parser.add_argument("--best", type=int, default=5)
    given = parser.parse_args()
    if not kernel.is_cached():
        print("compiling the kernel: 11 s of CPU time, once on a machine")
    start = time.process_time()
    layers, p2p = layers_of(given.vocabulary)
    rows = list(grid(given.gpus, layers, p2p))
    seconds = time.process_time() - start
    actions, stuck = sum(row.score.num_started for row in rows), sum(row.score.stuck for row in rows)
    print(f"{len(rows)} points, {stuck} of them stuck, {actions:,} actions: {seconds:.1f} s of CPU time")
    ranked = sorted((row for row in rows if row.num_ranks > 1), key=lambda row: (row.score.stuck, row.score.bubble))
    show(ranked[: given.best])
    print("the best of each number of pipeline ranks")
    show([next(row for row in ranked if row.num_ranks == count) for count in powers(given.gpus) if count > 1])


def show(rows: list[Row]) -> None:
    """Prints a table."""
    print(f"{'pp':>4s} {'dp':>4s} {'samples':>7s} {'bubble':>7s} {'step s':>7s}  type")
    for row in rows:
        figures = f"{row.samples:7d} {row.score.bubble:7.3f} {row.score.makespan_s:7.3f}"
        print(f"{row.num_ranks:4d} {row.num_replicas:4d} {figures}  {row.name}")


if __name__ == "__main__":
    main()
