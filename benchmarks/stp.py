"""python benchmarks/stp.py

STP against Interleaved1F1B (the paper's 1F1B-I) and ZB-V on the paper's language models: throughput relative to 1F1B-I,
simulated and as the paper's tables 6 and 8 have it, at their largest number of microbatches. Costs are those of our
operators on A800s and H20s, whose exchanges the layers hide where they run as units, as the paper's do: blocks hide
exchanges of each of their two passes, and whole backwards hide theirs under weight gradients, as 1F1B-I's do in
Megatron. First all that can be hidden is, then as much as the paper's table 11 says.

Source: Qi et al., Synergistic Tensor and Pipeline Parallelism.
"""

from statistics import mean
from typing import NamedTuple

from planner_problems import with_contention

from mmtrain.config import config
from mmtrain.modality.metadata import DocumentMeta, IterationMeta, MicrobatchMeta
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.operators.hardware import load_hardware
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.simulate import simulate

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


def problem(row: Row, placement: str, contention: float) -> PlanningProblem:
    """The iteration of a row, two chunks a rank. Args: placement: a schedule of jobs with that placement of chunks."""
    language = {
        **MODELS[row.model], "model_type": "qwen2", "num_key_value_heads": 8, "intermediate_size": 18944,
        "vocab_size": 152064, "max_position_embeddings": 8192, "tie_word_embeddings": False,
    }  # fmt: skip
    text = ", ".join(
        f"{key} = {str(value).lower() if value is False else repr(value)}" for key, value in language.items()
    )
    job = config.load(
        "debug_text.toml",
        [
            f"model.language.config={{ {text} }}",
            "model.language.num_segments=2",
            f"training.seq_len={row.seq_len * row.sequences}",
            f"training.global_batch_size={row.microbatches}",
            f"parallelism.pipeline_parallel_degree={row.pp}",
            f"parallelism.tensor_parallel_degree={row.tp}",
            f"parallelism.pipeline_parallel_schedule={placement}",
            "planner.enable=false",
            "activation_checkpoint.mode=none",
            "training.mixed_precision_param=bfloat16",
            f"planner.hardware={row.hardware}x{row.pp * row.tp}",
        ],
    )
    planner = IterationPlanner.of(job)
    document = DocumentMeta(sample=0, num_tokens=row.seq_len, num_targets=row.seq_len, images=())
    packed = MicrobatchMeta(documents=(document,) * row.sequences)
    meta = IterationMeta(microbatches=(packed,) * row.microbatches)
    return with_contention(planner.problem(meta, searched=True)[1], contention)


def seconds(row: Row, name: str, contention: float) -> float:
    """Makespan of an iteration. Args: name: of the paper."""
    given = problem(row, "Interleaved1F1B" if name == "1F1B-I" else "DualPipeV", contention)
    return simulate(given, CATALOGUE[SCHEDULES[name]].make(given)).makespan_s


def main() -> None:
    print(f"{'throughput / 1F1B-I':38s} {'paper':>14s} {'all hidden':>14s} {f'contention {CONTENTION}':>16s}")
    print(f"{'':38s} {'ZB-V    STP':>14s} {'ZB-V    STP':>14s} {'ZB-V    STP':>16s}")
    apart: list[list[float]] = [[], []]
    for row in ROWS:
        base, *theirs = row.samples_per_s
        cells = [" ".join(f"{value / base:6.3f}" for value in theirs)]
        for listed, contention in zip(apart, (0.0, CONTENTION), strict=True):
            ours = {name: seconds(row, name, contention) for name in SCHEDULES}
            ratios = [ours["1F1B-I"] / ours[name] for name in ("ZB-V", "STP")]
            listed.append(ratios[1] - theirs[1] / base)
            cells.append(" ".join(f"{value:6.3f}" for value in ratios))
        name = f"{row.model} {row.sequences} x {row.seq_len} {row.hardware} tp {row.tp} pp {row.pp}"
        print(f"{name:38s} {cells[0]:>14s} {cells[1]:>14s} {cells[2]:>16s}", flush=True)
    for words, listed in zip(("all hidden", f"contention {CONTENTION}"), apart, strict=True):
        span = f"mean {mean(map(abs, listed)):.3f}, {min(listed):+.3f} to {max(listed):+.3f}"
        print(f"STP less the paper's, {words}: {span}")


if __name__ == "__main__":
    main()
