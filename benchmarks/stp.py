"""python benchmarks/stp.py [--parts throughput,offload]

throughput  STP against Interleaved1F1B (the paper's 1F1B-I) and ZB-V on the paper's models: throughput relative
            to 1F1B-I, simulated and as the paper's tables 3, 6 and 8 have it, at their largest number of
            microbatches. Costs are those of our operators on A800s and H20s, whose exchanges the layers hide where they
            run as units, as the paper's do: blocks hide exchanges of each of their two passes, and whole backwards hide
            theirs under weight gradients, as 1F1B-I's do in Megatron. First all that can be hidden is, then as much as
            the paper's table 11 says
offload     STP with activations of first chunks in host memory, on H20s with whole rows between layers, as the paper's
            units have them: the least limit that costs no time, and what is then held on each rank. All that is not
            activations is what the paper's figure of 1F1B-I (figure 10, table 4) leaves beyond our activations of it

Source: Qi et al., Synergistic Tensor and Pipeline Parallelism.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import NamedTuple

from planner_problems import with_contention

from mmtrain.config import config
from mmtrain.costs.operators.hardware import load_hardware
from mmtrain.modality.metadata import DocumentMeta, ImageMeta, IterationMeta, MicrobatchMeta
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.partition.partition import mixed_partition
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.passes.offload import offload
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.simulate import simulate
from mmtrain.simulator.make_job import make_job
from mmtrain.spec.spec import ModelSpec

CONTENTION = load_hardware("a800").contention
"""Table 11."""
SCHEDULES = {"1F1B-I": "Interleaved1F1B", "ZB-V": "ZBV", "STP": "STP"}
"""Of the paper -> ours."""
MODELS = {
    "12.1B": {"num_hidden_layers": 30, "hidden_size": 5120, "num_attention_heads": 40},
    "26.3B": {"num_hidden_layers": 46, "hidden_size": 7168, "num_attention_heads": 56},
}


class Row(NamedTuple):
    """A row of the paper's tables."""

    model: str
    seq_len: int
    sequences: int
    """Of a microbatch."""
    hardware: str
    tp: int
    pp: int
    microbatches: int
    samples_per_s: tuple[float, float, float]
    """Of `SCHEDULES`."""
    patches: int = 0
    """Of the image in each microbatch; 0: there is no vision encoder."""
    layers: int = 0
    """Of the language model, unless `MODELS` says."""


ROWS = (
    Row("12.1B", 3072, 2, "a800", 4, 4, 192, (9.66, 9.31, 10.1)),
    Row("12.1B", 3072, 2, "a800", 8, 2, 192, (6.60, 6.46, 7.33)),
    Row("12.1B", 6144, 1, "a800", 4, 4, 192, (4.58, 4.49, 4.83)),
    Row("12.1B", 6144, 1, "a800", 8, 2, 192, (3.11, 3.13, 3.49)),
    Row("26.3B", 2048, 2, "a800", 4, 8, 256, (12.7, 12.8, 13.4)),
    Row("26.3B", 2048, 2, "a800", 8, 4, 256, (8.68, 8.79, 9.61)),
    Row("26.3B", 4096, 1, "a800", 4, 8, 256, (6.28, 6.31, 6.51)),
    Row("26.3B", 4096, 1, "a800", 8, 4, 256, (4.25, 4.29, 4.72)),
    Row("12.1B", 6144, 1, "h20", 2, 8, 192, (3.77, 3.63, 3.79)),
    Row("12.1B", 6144, 1, "h20", 4, 4, 192, (3.39, 3.30, 3.44)),
    Row("12.1B", 6144, 1, "h20", 8, 2, 192, (2.80, 2.80, 2.89)),
)
VISION_ROWS = (
    Row("14.9B", 5120, 1, "a800", 4, 4, 192, (4.46, 4.31, 4.65), 3136, 33),
    Row("14.9B", 5120, 1, "a800", 8, 2, 192, (2.46, 2.49, 2.87), 3136, 33),
    Row("28.8B+", 3072, 1, "a800", 4, 8, 256, (5.85, 6.01, 6.19), 1600, 43),
    Row("28.8B+", 5120, 1, "a800", 8, 4, 256, (3.40, 3.53, 3.80), 2304, 40),
)
"""Table 3."""
OFFLOAD = (
    (Row("12.1B", 6144, 1, "h20", 4, 4, 192, (3.39, 3.30, 3.44)), 40.0),
    (Row("12.1B", 8192, 1, "h20", 2, 8, 192, (2.72, 2.61, 2.74)), 76.0),
)
"""Figure 10, and the row of table 4 in which STP alone is out of memory: its throughput is that with offloading. Each
with the GB of 1F1B-I's most loaded rank."""
OFFLOADING = (
    'parallelism.tensor_parallel_rows="whole"',
    "planner.enable=true",
    "planner.search.interleave=false",
    'planner.search.memory_strategies=["keep", "offload"]',
    'planner.memory_limit="92GB"',
)
BISECTIONS = 9
MODELS |= {"14.9B": MODELS["12.1B"], "28.8B+": MODELS["26.3B"]}
ENCODERS = {"14.9B": {"depth": 32, "embed_dim": 2048}, "28.8B+": {"depth": 26, "embed_dim": 4096}}


def problem(row: Row, placement: str, contention: float, words: Sequence[str] = ()) -> PlanningProblem:
    """The iteration of a row, two chunks a rank; a vision encoder is the first chunk.

    Args: placement: a schedule of jobs with that placement of chunks. words: overrides of the job.
    """
    layers = {"num_hidden_layers": row.layers} if row.layers else {}
    language = {
        **MODELS[row.model], **layers, "model_type": "qwen2", "num_key_value_heads": 8, "intermediate_size": 18944,
        "vocab_size": 152064, "max_position_embeddings": 8192, "tie_word_embeddings": False,
    }  # fmt: skip
    more = [f"model.language.config={_table(language)}", "model.language.num_segments=2"]
    if row.patches:
        encoder = {
            **ENCODERS[row.model], "model_type": "qwen2_vl_vision", "hidden_size": language["hidden_size"],
            "num_heads": 16, "mlp_ratio": 4, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2,
        }  # fmt: skip
        more += [f"model.encoder.config={_table(encoder)}", 'model.projector.kind="native"']
        more += ["planner.partition=mixed-parameters", "planner.search.sub_microbatch=false"]
    job = config.load(
        "debug_text.toml",
        [
            *more,
            f"training.seq_len={row.seq_len * row.sequences}",
            "training.loss_chunk_tokens=0",
            f"training.global_batch_size={row.microbatches}",
            f"parallelism.pipeline_parallel_degree={row.pp}",
            f"parallelism.tensor_parallel_degree={row.tp}",
            f"parallelism.pipeline_parallel_schedule={placement}",
            "planner.enable=false",
            "activation_checkpoint.mode=none",
            "training.mixed_precision_param=bfloat16",
            f"planner.hardware={row.hardware}x{row.pp * row.tp}",
            *words,
        ],
    )
    made = make_job(job)
    images: tuple[ImageMeta, ...] = ()
    if row.patches:
        side = math.isqrt(row.patches)
        images = (ImageMeta(sample=0, index=0, grid=(1, side, side), num_tokens=row.patches // 4),)
        parts = mixed_partition(made.spec, row.pp, 2, _weights(made.spec, row), made.schedule.placement)
        made = replace(made, partition=parts)
    document = DocumentMeta(sample=0, num_tokens=row.seq_len, num_targets=row.seq_len, images=images)
    packed = MicrobatchMeta(documents=(document,) * row.sequences)
    meta = IterationMeta(microbatches=(packed,) * row.microbatches)
    return with_contention(IterationPlanner(made).problem(meta, searched=True)[1], contention)


def _table(values: Mapping[str, object]) -> str:
    """A table of TOML in one line."""
    return f"{{ {', '.join(f'{key} = {str(v).lower() if v is False else repr(v)}' for key, v in values.items())} }}"


def _weights(spec: ModelSpec, row: Row) -> dict[str, list[float]]:
    """Module -> [layer] -> a weight by which the encoder is one part, and the last part has two blocks less."""
    blocks = math.ceil((row.layers + 2) / (2 * row.pp - 1))
    vision, language = (spec.module(name).layers for name in ("vision", "language"))
    return {
        "vision": [(blocks + 0.5) / len(vision)] * len(vision),
        "language": [0.5, *[1.0] * (len(language) - 2), 2.0],
    }


def seconds(row: Row, name: str, contention: float) -> float:
    """Makespan of an iteration. Args: name: of the paper."""
    given = problem(row, "Interleaved1F1B" if name == "1F1B-I" else "DualPipeV", contention)
    return simulate(given, CATALOGUE[SCHEDULES[name]].make(given)).makespan_s


def least_offloaded(plan: Plan, problem: PlanningProblem) -> Plan:
    """The plan with offloaded activations under the least limit, equal on all ranks, that makes it no longer."""
    timeline = simulate(problem, plan)
    best, low, high = plan, 0.0, max(timeline.peak_bytes)
    for _ in range(BISECTIONS):
        limit = (low + high) / 2
        changed = offload(plan, replace(problem, memory_limit_bytes=(limit,) * problem.graph.num_ranks))
        if changed is not None and simulate(problem, changed).makespan_s <= timeline.makespan_s * (1 + 1e-9):
            best, high = changed, limit
        else:
            low = limit
    return best


def show_offloaded() -> None:
    """The table of `offload`."""
    for row, base_gb in OFFLOAD:
        base = problem(row, "Interleaved1F1B", CONTENTION, OFFLOADING[:1])
        base_plan = simulate(base, CATALOGUE["Interleaved1F1B"].make(base))
        limited = problem(row, "DualPipeV", CONTENTION, OFFLOADING)
        given = replace(limited, memory_limit_bytes=(None,) * row.pp)
        plan = CATALOGUE["STP"].make(given)
        kept, changed = simulate(given, plan), least_offloaded(plan, given)
        offloaded = simulate(given, changed)
        rest_gb = base_gb - max(base_plan.peak_bytes) / 1e9
        print(f"\n{row.model} {row.sequences} x {row.seq_len} {row.hardware} tp {row.tp} pp {row.pp}", end=": ")
        print(f"{rest_gb:.1f} GB of a rank are not activations")
        print(f"{'':16s} {'/ 1F1B-I':>9s}  GB of each rank")
        for name, timeline in (("1F1B-I", base_plan), ("STP", kept), ("STP, offloaded", offloaded)):
            cells = " ".join(f"{rest_gb + peak / 1e9:5.1f}" for peak in timeline.peak_bytes)
            print(f"{name:16s} {base_plan.makespan_s / timeline.makespan_s:9.3f}  {cells}")
        less = [
            1 - (rest_gb + b / 1e9) / (rest_gb + a / 1e9)
            for a, b in zip(kept.peak_bytes, offloaded.peak_bytes, strict=True)
        ]
        print(f"{'less':16s} {'':9s}  {' '.join(f'{part:5.3f}' for part in less)}")
        shares = [
            1 - given.options(*node)[option].activation_bytes / given.options(*node)[0].activation_bytes
            for node, option in changed.options.items()
        ]
        print(f"{len(shares)} of {row.microbatches * row.pp} activations of first chunks offloaded, ", end="")
        print(f"{mean(shares):.2f} of each on average")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="throughput,offload")
    parts = parser.parse_args().parts.split(",")
    if "throughput" in parts:
        show_throughput()
    if "offload" in parts:
        show_offloaded()


def show_throughput() -> None:
    """The table of `throughput`."""
    print(f"{'throughput / 1F1B-I':38s} {'paper':>14s} {'all hidden':>14s} {f'contention {CONTENTION}':>16s}")
    print(f"{'':38s} {'ZB-V    STP':>14s} {'ZB-V    STP':>14s} {'ZB-V    STP':>16s}")
    apart: list[list[float]] = [[], []]
    for row in (*ROWS, *VISION_ROWS):
        base, *theirs = row.samples_per_s
        cells = [" ".join(f"{value / base:6.3f}" for value in theirs)]
        for listed, contention in zip(apart, (0.0, CONTENTION), strict=True):
            ours = {name: seconds(row, name, contention) for name in SCHEDULES}
            ratios = [ours["1F1B-I"] / ours[name] for name in ("ZB-V", "STP")]
            if not row.patches:
                listed.append(ratios[1] - theirs[1] / base)
            cells.append(" ".join(f"{value:6.3f}" for value in ratios))
        name = f"{row.model} {row.sequences} x {row.seq_len} {row.hardware} tp {row.tp} pp {row.pp}"
        print(f"{name:38s} {cells[0]:>14s} {cells[1]:>14s} {cells[2]:>16s}", flush=True)
    for words, listed in zip(("all hidden", f"contention {CONTENTION}"), apart, strict=True):
        span = f"mean {mean(map(abs, listed)):.3f}, {min(listed):+.3f} to {max(listed):+.3f}"
        print(f"STP less the paper's without vision, {words}: {span}")


if __name__ == "__main__":
    main()
