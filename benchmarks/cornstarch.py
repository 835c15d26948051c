"""python benchmarks/cornstarch.py [--models SSS MMM ...] [--pp 6] [--evaluations 50]

Cornstarch's nine models of its table 3.2 in simulation: a vision encoder, an audio encoder and a language model, all
frozen, with projectors that train; each sample has 1k tokens of text, a picture of 1280 x 720 pixels and two minutes of
sound; 12 microbatches of 4 samples on 24 A40s (tp 4, pp 6), blocks recomputed. The audio tower is Whisper's of the same
depth and width; the language models' other sizes are those of Llama 3 and Qwen2.5 with as many layers.

For each model, seconds of an iteration under 1F1B: modules on ranks of their own and encoders colocated, with numbers
of ranks and cuts by the seconds of frozen layers (`aware`), and as if all layers trained (`unaware`); what the
placement search takes; all modules on all ranks under our planner; every rank of the language model running all
encoders again (`replicated`, docs/parallelism.md); then the gain of being aware with colocated encoders, and the
published one.
"""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from replicated import replicated_partition, rerun

from mmtrain.config import config
from mmtrain.config.config import Config
from mmtrain.costs.job_costs import cost_model
from mmtrain.modality.metadata import DocumentMeta, ImageMeta, IterationMeta, MicrobatchMeta
from mmtrain.modality.submesh import Submesh
from mmtrain.planner.batching import make_batching
from mmtrain.planner.job_schedule import job_schedule
from mmtrain.planner.make_plan import make_plan
from mmtrain.planner.make_problem import make_problem
from mmtrain.planner.memory.limit import MemoryRule
from mmtrain.planner.memory.options import MemoryChoices
from mmtrain.planner.partition.partition import Partition, Placed, divide_ranks, mixed_partition, partition
from mmtrain.simulator.cut_search import Cut, best_cut
from mmtrain.simulator.typical_iterations import TypicalIterations
from mmtrain.spec.builders import DTYPE_BYTES, model_spec
from mmtrain.spec.spec import ModelSpec
from mmtrain.spec.work_size import WorkSize

PUBLISHED = {
    "SSS": 1.18, "MMS": 1.02, "LLS": 1.00, "SSM": 1.11, "MMM": 2.46, "LLM": 2.03, "SSL": 0.994, "MML": 1.30,
    "LLL": 1.72,
}  # fmt: skip
"""Sizes of vision encoder, audio encoder and language model -> iteration time unaware over aware."""
VISION = {"S": (32, 1280), "M": (48, 2560), "L": (64, 3840)}
AUDIO = {"S": (24, 1024), "M": (32, 3072), "L": (48, 5120)}
LANGUAGE = {"S": (16, 2048, 8192), "M": (32, 4096, 14336), "L": (64, 5120, 27648)}
PICTURE, TEXT, SOUND_S, SAMPLES, MICROBATCHES = (1, 52, 92), 1000, 120, 4, 12
KIND = {"modules.audio": "kind = 'audio'\n"}
REST = """
[model.modules.audio.projector]
spatial_merge = 2
[data]
source = "nowhere"
[training]
steps = 1
seq_len = 32768
loss_chunk_tokens = 0
global_batch_size = 1
mixed_precision_param = "bfloat16"
[activation_checkpoint]
mode = "full"
[parallelism]
tensor_parallel_degree = 4
pipeline_parallel_schedule = "1F1B"
[planner]
hardware = "a40"
"""
Weights = Mapping[str, Sequence[float]]


def job(name: str, folder: Path, *, pp: int, frozen: bool = True, overrides: Sequence[str] = ()) -> Config:
    """A model of table 3.2 as a job."""
    (depth, width), (audio_depth, audio_width) = VISION[name[0]], AUDIO[name[1]]
    layers, hidden, inner = LANGUAGE[name[2]]
    values = {
        "encoder": {
            "model_type": "qwen2_vl_vision", "depth": depth, "embed_dim": width, "num_heads": width // 80,
            "mlp_ratio": 4, "hidden_size": hidden,
        },
        "modules.audio": {
            "model_type": "whisper_encoder", "d_model": audio_width, "encoder_layers": audio_depth,
            "encoder_attention_heads": audio_width // 64, "encoder_ffn_dim": 4 * audio_width, "num_mel_bins": 80,
            "max_source_positions": 1500,
        },
        "language": {
            "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": hidden // 128, "num_key_value_heads": 8, "vocab_size": 128256,
        },
    }  # fmt: skip
    sections = []
    for section, of_class in values.items():
        inline = ", ".join(f"{key} = {value!r}" for key, value in of_class.items())
        trainable = str(not frozen).lower()
        sections.append(f"[model.{section}]\n{KIND.get(section, '')}trainable = {trainable}\nconfig = {{{inline}}}\n")
    path = folder / f"{name}.toml"
    path.write_text("".join(sections) + REST)
    degrees = [f"parallelism.pipeline_parallel_degree={pp}", f"training.global_batch_size={MICROBATCHES}"]
    return config.load(path, [*degrees, *overrides])


def batch() -> IterationMeta:
    """Twelve microbatches of four equal samples."""
    picture = PICTURE[1] * PICTURE[2] // 4
    documents = []
    for sample in range(SAMPLES):
        windows = [
            ImageMeta(
                sample=sample, index=i, module="audio", grid=(1, 1, 1500), num_tokens=750, start=picture + 750 * i
            )
            for i in range(SOUND_S // 30)
        ]
        images = (ImageMeta(sample=0, index=0, grid=PICTURE, num_tokens=picture), *windows)
        length = TEXT + picture + 750 * len(windows)
        documents.append(DocumentMeta(sample=sample, num_tokens=length, num_targets=TEXT // 2, images=images))
    return IterationMeta(microbatches=(MicrobatchMeta(documents=tuple(documents)),) * MICROBATCHES)


def iterations(job: Config, spec: ModelSpec) -> TypicalIterations:
    """The batch as the iteration of a job, with the job's costs and schedule."""
    submesh = Submesh.of(job)
    return TypicalIterations(
        spec=spec,
        costs=cost_model(job, spec),
        section=job.planner,
        schedule=job_schedule(job),
        num_ranks=job.parallelism.pipeline_parallel_degree,
        shortened=1.0,
        memory=MemoryChoices.planned(job.activation_checkpoint, job.planner),
        submesh=submesh,
        batchings=(make_batching(batch(), spec, 0, submesh.attention_mask),),
        memory_rule=replace(MemoryRule.of(job), limit_bytes=None),
    )


def placed(spec: ModelSpec, pp: int, placement: Placed, weights: Weights, ranks: Sequence[int]) -> Partition:
    """Modules on ranks of their own. Args: ranks: of each group of modules."""
    ends = [sum(ranks[:i]) for i in range(len(ranks) + 1)]
    of_module = {name: range(ends[i], ends[i + 1]) for i, group in enumerate(groups(placement)) for name in group}
    ones = dict.fromkeys(weights, 1)
    sizes = {name: WorkSize(rows=1, pairs=1, outputs=1) for name in weights}
    return partition(spec, pp, ones, sizes, placed=placement, ranks=of_module, weights=weights)


def groups(placement: Placed) -> list[list[str]]:
    """The modules that share ranks."""
    return [["vision"], ["audio"], ["language"]] if placement == "parallel" else [["vision", "audio"], ["language"]]


def replicated_s(typical: TypicalIterations, weights: Weights, pp: int) -> float:
    """Seconds of an iteration in which every rank of the language model runs all encoders again."""
    parts = replicated_partition(typical.spec, pp, 1, weights)
    problem = make_problem(
        typical.spec,
        parts,
        typical.batchings[0],
        typical.costs,
        typical.section,
        memory=typical.memory.fixed,
        submesh=typical.submesh,
    )
    timeline = make_plan(rerun(problem), typical.schedule).timeline
    return timeline.makespan_s


def compare(name: str, folder: Path, pp: int, evaluations: int) -> dict[str, float]:
    """What -> seconds of an iteration. Args: evaluations: of our planner; 0: it is left out."""
    aware_job = job(name, folder, pp=pp)
    dtype_bytes = DTYPE_BYTES["bfloat16"]
    spec = model_spec(aware_job.model, dtype_bytes=dtype_bytes)
    typical = iterations(aware_job, spec)
    all_train = job(name, folder, pp=pp, frozen=False)
    weights = {
        "aware": typical.layer_seconds(),
        "unaware": iterations(all_train, model_spec(all_train.model, dtype_bytes=dtype_bytes)).layer_seconds(),
    }
    ones = dict.fromkeys(weights["aware"], 1)
    found: dict[str, float] = {}
    parts: dict[Cut, Partition] = {}
    for placement in ("parallel", "colocated"):
        for how, costs in weights.items():
            best = divide_ranks(costs, groups(placement), ones, pp, {})
            assert best is not None
            found[f"{placement} {how}"] = typical.seconds(placed(spec, pp, placement, costs, best))
            if how == "aware":
                for source in range(len(best)):
                    for target in range(len(best)):
                        moved = [n - (i == source) + (i == target) for i, n in enumerate(best)]
                        if min(moved) > 0:
                            cut = Cut((1, 1, 1), placement=placement, ranks=tuple(moved))
                            parts[cut] = placed(spec, pp, placement, costs, moved)
    sizes = {name: WorkSize(rows=1, pairs=1, outputs=1) for name in ones}
    parts[Cut((1, 1, 1))] = spread = partition(spec, pp, ones, sizes, weights=weights["aware"])
    parts[Cut((1,), is_chain=True)] = mixed_partition(spec, pp, 1, weights["aware"])
    seconds = {cut: typical.seconds(part) for cut, part in parts.items()}
    result = best_cut(list(seconds), seconds.__getitem__, seconds.__getitem__, margin=0.0)
    assert result is not None
    found["search"] = seconds[result.best]
    found["replicated"] = replicated_s(typical, weights["aware"], pp)
    if evaluations:
        keys = ["planner.enable=true", f"planner.search.budget_evaluations={evaluations}"]
        planned = iterations(job(name, folder, pp=pp, overrides=keys), spec)
        found["spread, planned"] = planned.seconds(spread)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(PUBLISHED), choices=list(PUBLISHED))
    parser.add_argument("--pp", type=int, default=6)
    parser.add_argument("--evaluations", type=int, default=50)
    args = parser.parse_args()
    columns = [f"{placement} {how}" for placement in ("parallel", "colocated") for how in ("unaware", "aware")]
    columns += ["search", *(["spread, planned"] if args.evaluations else []), "replicated"]
    print(f"seconds of an iteration, 1F1B on {args.pp} pipeline ranks x tp 4 of A40s")
    print(f"{'':6}" + "".join(f"{name:>19}" for name in columns) + f"{'gain':>8}{'published':>11}")
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            found = compare(name, Path(folder), args.pp, args.evaluations)
            gain = found["colocated unaware"] / found["colocated aware"]
            figures = "".join(f"{found[column]:19.2f}" for column in columns)
            print(f"{name:6}{figures}{gain:8.2f}{PUBLISHED[name]:11.2f}", flush=True)


if __name__ == "__main__":
    main()
