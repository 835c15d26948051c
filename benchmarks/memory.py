"""python benchmarks/memory.py [accuracy] [time] [head]

Memory strategies on this CPU, two pipeline ranks, the trainer's own loop on batches of noise.

accuracy: for 20 plans (random limits, strategies and batches) the bytes that activations hold after each action, as the
plan says and as counted: every storage that an operation made and that still lives, without parameters, gradients of
parameters and messages. The error of a rank is that of its largest amount.

time: seconds of an iteration where activations may take 100, 75, 50 and 35 % of what the plan without a limit takes:
every block recomputed, every block selectively recomputed, and planned. Orders are searched in all of them. Costs are
those of a profile that is measured first. The variants take turns; medians, as ratios to keeping all without a limit.

head: a text model of 152k tokens, 4,096 labelled tokens a microbatch, with all logits at one time and in pieces
(`training.loss_chunk_tokens`): the peak of the last of two ranks in a step, as the plan says, as counted (memory that
operations made and that lives, without parameters and their gradients) and by which the process grew; seconds of the
head's F and B in one process, in turns. Then the fastest plans of a model of 7B on 8 H800s by the memory of a rank:
simulated seconds of an iteration, and the blocks of each rank.
"""

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmtrain.config import config as config_module
from mmtrain.config.config import Config
from mmtrain.data.noise_batches import noise_batch
from mmtrain.local.driven_steps import timed_steps
from mmtrain.local.profiler import profile_job
from mmtrain.local.ranks import run_on_ranks
from mmtrain.modality.bitfield import language_bits
from mmtrain.modality.metadata import DocumentMeta, IterationMeta, MicrobatchMeta
from mmtrain.modality.typical import TypicalSizes
from mmtrain.models.attention.context import attention_context
from mmtrain.models.build import build_chunk
from mmtrain.models.initialise import init_weights
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.schedule.plan import held_bytes
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.typical_iterations import WORKLOAD
from mmtrain.simulator.workloads import draw
from mmtrain.training.trainer import Trainer

GIB = 2.0**30
NUM_PLANS = 20
SHARES = (1.0, 0.75, 0.5, 0.35)
STRATEGIES = (
    ["keep", "recompute"],
    ["keep", "selective", "recompute"],
    ["keep", "selective", "recompute", "offload"],
    ["selective", "recompute"],
)


def job(*more: str, folder: str = "", microbatches: int = 6) -> Config:
    language = (
        'model_type = "qwen2", hidden_size = 128, intermediate_size = 384, num_hidden_layers = 8, '
        "num_attention_heads = 4, num_key_value_heads = 2, vocab_size = 448, max_position_embeddings = 1024, "
        "tie_word_embeddings = true"
    )
    encoder = (
        'model_type = "qwen2_vl_vision", depth = 6, embed_dim = 128, hidden_size = 128, num_heads = 4, mlp_ratio = 2, '
        "patch_size = 14, temporal_patch_size = 1, in_channels = 3, spatial_merge_size = 2"
    )
    return config_module.load(
        "debug_vlm.toml",
        [
            f"--model.language.config={{ {language} }}",
            f"--model.encoder.config={{ {encoder} }}",
            "--training.seq_len=512",
            f"--training.global_batch_size={microbatches}",
            "--planner.enable=true",
            "--planner.search.budget_evaluations=400",
            f'--job.dump_folder="{folder}"',
            "--validation.enable=false",
            "--checkpoint.enable=false",
            "--metrics.enable_tensorboard=false",
            "--metrics.progress_bar=false",
            *more,
        ],
    )


def batch_of(config: Config, number: int) -> IterationMeta:
    """One iteration of images and text of many sizes."""
    return draw(WORKLOAD, TypicalSizes.typical(config), seed=0, iteration=number)


def peak_bytes(config: Config, meta: IterationMeta) -> float:
    """What activations of the schedule's plan take on the most loaded rank."""
    timeline = IterationPlanner(make_job(config)).plan(meta).result.timeline
    return max(timeline.peak_bytes)


# ------------------------------------------------------------------------------------------------ accuracy


class Live(TorchDispatchMode):
    """The storages that operations made and that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, list[tuple[StorageWeakRef, int]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._made.setdefault(storage.data_ptr(), []).append((StorageWeakRef(storage), storage.nbytes()))
        return out

    def num_bytes(self, without: set[int]) -> float:
        """Bytes of those at other addresses."""
        total = 0
        for place, made in list(self._made.items()):
            left = [(ref, size) for ref, size in made if not ref.expired()]
            if left:
                self._made[place] = left
                total += max(size for _, size in left) if place not in without else 0
            else:
                del self._made[place]
        return float(total)


class Watch:
    """A clock whose time is the number of samples so far: each start and end of an action takes one."""

    def __init__(self) -> None:
        self.samples: list[float] = []
        self.take: Callable[[], float] = lambda: 0.0

    def __call__(self) -> float:
        self.samples.append(self.take())
        return float(len(self.samples) - 1)


def addresses(tensors: Iterator[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def not_activations(trainer: Trainer) -> Iterator[torch.Tensor]:
    """Tensors that operations make and that are no activations: parameters, their gradients, messages, host copies."""
    for parameter in trainer.model.parameters:
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    for stage in trainer.model.stages:
        for box in (stage.inbox, stage.outbox, stage.grad_inbox, stage.grad_outbox):
            yield from box.values()
        offloader = stage.memory.offloader
        yield from offloader.buffers._free
        yield from (block._buffer for block in offloader.waiting if block._buffer is not None)
    for _, tensor in (*trainer.placement.runtime._pending.values(), *trainer.placement.runtime._sent.values()):
        yield tensor


def count(device: torch.device, cases: Sequence[tuple[Config, IterationMeta]]) -> list[tuple[float, float, str]]:
    """For each case (planned, counted) bytes at the peak between two actions, and the options in use."""
    found = []
    for config, meta in cases:
        trainer, watch = Trainer(config), Watch()
        timed = timed_steps(trainer, device, repeat((noise_batch(config.model, meta, 0), meta)), clock=watch)
        next(timed)
        live = Live()
        watch.take = lambda: live.num_bytes(addresses(not_activations(trainer)))  # noqa: B023
        with live:
            step = next(timed)
        plan, problem = step.plan.result.plan, step.plan.problem
        assert plan is not None
        planned = held_bytes(plan, problem)[trainer.mesh.pp_rank]
        begun = watch.samples[round(step.outcome.span[0])]
        counted = [watch.samples[round(end)] - begun for _, _, end in step.outcome.rows]
        names = {step.plan.program.memory.get(node, "keep") for node in problem.graph.nodes()}
        found.append((max(after for _, after in planned), max(counted), "; ".join(sorted(names))))
        timed.close()
    return found


def accuracy(folder: str) -> None:
    rng = random.Random(0)
    cases = []
    for number in range(NUM_PLANS):
        free = job(folder=f"{folder}/a", microbatches=rng.choice((4, 6, 8)))
        meta = batch_of(free, number)
        limit = rng.uniform(0.35, 1.0) * peak_bytes(free, meta)
        more = (
            f"--planner.search.activation_memory_gib={limit / GIB}",
            f"--planner.search.memory_strategies={rng.choice(STRATEGIES)!r}",
            f"--training.global_batch_size={len(meta.microbatches)}",
        )
        cases.append((job(*more, folder=f"{folder}/a"), meta))
    ranks = run_on_ranks(count, 2, cases, comm=cases[0][0].comm)
    errors = []
    print(f"{'plan':>4s} {'rank':>4s} {'planned':>10s} {'counted':>10s} {'error':>8s}  memory options")
    for number in range(NUM_PLANS):
        for rank in range(2):
            planned, counted, names = ranks[rank][number]
            errors.append(planned / counted - 1)
            sizes = f"{planned / 2**20:6.1f} MiB {counted / 2**20:6.1f} MiB"
            print(f"{number:4d} {rank:4d} {sizes} {100 * errors[-1]:+6.1f} %  {names[:100]}")
    off = np.abs(errors)
    print(f"{NUM_PLANS} plans, 2 ranks: mean error {100 * off.mean():.1f} %, largest {100 * off.max():.1f} %")


# ---------------------------------------------------------------------------------------------------- time


def run(
    device: torch.device, cases: Mapping[str, Config], metas: Sequence[IterationMeta], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """For each case (seconds, planned peak bytes) of its steps on this rank."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, config in cases.items():
            batches = [(noise_batch(config.model, meta, 0), meta) for meta in (metas[0], *metas)]
            with steps_of(Trainer(config), device, batches) as timed:
                next(timed)
                for step in timed:
                    timeline = step.plan.result.timeline
                    found[name].append((step.end_s - step.start_s, max(timeline.peak_bytes)))
    return found


@contextmanager
def steps_of(trainer: Trainer, device: torch.device, batches: Sequence[Any]) -> Iterator[Iterator[Any]]:
    timed = timed_steps(trainer, device, batches)
    try:
        yield timed
    finally:
        timed.close()


def iteration_time(folder: str, rounds: int, profile: str) -> None:
    if not profile:
        profile = f"{folder}/profile.json"
        profile_job(job("--planner.enable=false", folder=f"{folder}/p")).write(profile)
    given = f'--planner.profile="{profile}"'
    free = job(given, folder=f"{folder}/t")
    metas = [batch_of(free, number) for number in range(4)]
    peak = max(peak_bytes(free, meta) for meta in metas)
    cases = {"keep, no limit": free}
    for share in SHARES:
        limit = f"--planner.search.activation_memory_gib={share * peak / GIB}"
        for name, more in {
            "full recompute": '--activation_checkpoint.mode="full"',
            "static selective": '--activation_checkpoint.mode="selective"',
            "planned": '--planner.search.memory_strategies=["keep", "selective", "recompute"]',
        }.items():
            config = job(given, limit, more, folder=f"{folder}/t")
            planner = IterationPlanner(make_job(config))
            if all(planner.prepare(meta, searched=True).first.has_plan for meta in metas):
                cases[f"{round(100 * share):3d} %, {name}"] = config
            else:
                print(f"{round(100 * share):3d} %, {name}: no plan fits")
    ranks = run_on_ranks(run, 2, cases, metas, rounds, comm=free.comm)
    seconds = {
        name: np.array([max(one) for one in zip(*([s for s, _ in rank[name]] for rank in ranks), strict=True)])
        .reshape(rounds, len(metas))
        for name in cases
    }  # fmt: skip
    base = np.median(seconds["keep, no limit"], axis=0)
    print(f"{'memory limit':30s} {'time ratio':>10s} {'planned peak':>13s}")
    for name in cases:
        ratio = float(np.mean(np.median(seconds[name], axis=0) / base))
        top = max(bytes_ for rank in ranks for _, bytes_ in rank[name])
        print(f"{name:30s} {ratio:10.3f} {100 * top / peak:11.0f} %")


# ---------------------------------------------------------------------------------------------------- head

VOCABULARY = 151936
CHUNKS = {"all logits": 0, "pieces": -1}
"""Name -> training.loss_chunk_tokens."""
LIMITS, LONG = ("80GiB", "64GiB", "48GiB", "40GiB"), 32768
"""Memory of a rank, and labelled tokens of a microbatch, of the plans."""


class Highest(Live):
    """The most bytes at one time of the storages that operations made, without those of some tensors."""

    def __init__(self, others: Callable[[], Iterator[torch.Tensor]]) -> None:
        super().__init__()
        self._others, self.most = others, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.most = max(self.most, self.num_bytes(addresses(self._others())))
        return out


def all_labelled(tokens: int, microbatches: int) -> IterationMeta:
    """Microbatches of one document, each token of which has a label."""
    document = DocumentMeta(sample=0, num_tokens=tokens, num_targets=tokens, images=())
    of_microbatches = (MicrobatchMeta(documents=(document.numbered(number),)) for number in range(microbatches))
    return IterationMeta(microbatches=tuple(of_microbatches))


def head_job(chunk: int, tokens: int, folder: str, width: int = 64) -> Config:
    language = (
        f'model_type = "qwen2", hidden_size = {width}, intermediate_size = 512, num_hidden_layers = 4, '
        f"num_attention_heads = 4, num_key_value_heads = 2, vocab_size = {VOCABULARY}, "
        f"max_position_embeddings = {tokens}, tie_word_embeddings = false"
    )
    changes = {
        "model.language.config": f"{{ {language} }}",
        "training.seq_len": tokens,
        "training.global_batch_size": 2,
        "training.loss_chunk_tokens": chunk,
        "planner.enable": "false",
        "parallelism.pipeline_parallel_schedule": '"1F1B"',
        "validation.enable": "false",
        "checkpoint.enable": "false",
        "metrics.enable_tensorboard": "false",
        "metrics.progress_bar": "false",
        "job.dump_folder": f'"{folder}"',
    }
    return config_module.load("debug_text.toml", [f"--{key}={value}" for key, value in changes.items()])


def resident_bytes(key: str) -> int:
    """An entry of the memory that this process has."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def peaks(device: torch.device, config: Config, meta: IterationMeta) -> tuple[float, float, float, float]:
    """Bytes at the peak of a step on this rank: planned, counted, by which the process grew; and the step's loss."""
    trainer = Trainer(config)
    batches = repeat((noise_batch(config.model, meta, 0), meta))
    with steps_of(trainer, device, batches) as timed:
        next(timed)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        before = resident_bytes("VmRSS")
        live = Highest(lambda: not_activations(trainer))
        with live:
            step = next(timed)
        planned = step.plan.result.timeline.peak_bytes[trainer.mesh.pp_rank]
        loss = sum(float(loss) for loss in step.outcome.losses.values())
        return planned, live.most, resident_bytes("VmHWM") - before, loss


def head_seconds(tokens: int, rounds: int) -> dict[str, float]:
    """Median seconds of F and B of the last layer alone, of width 256."""
    works = {}
    for name, chunk in CHUNKS.items():
        config = head_job(chunk, tokens, "unused", width=256)
        spec = make_job(config).spec
        last = len(spec.text.layers) - 1
        made = build_chunk(config.model, spec, "language", (last, last + 1), device="cpu")
        init_weights(made, 0)
        works[name] = made
    (counts,) = all_labelled(tokens, 1).microbatches
    x = torch.randn(tokens, 256, requires_grad=True)
    given: dict[str, Any] = {
        "attention": attention_context(language_bits(counts)),
        "position_ids": torch.arange(tokens),
        "labelled": torch.arange(tokens),
        "targets": torch.randint(0, VOCABULARY, (tokens,)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, made in works.items():
            start = time.perf_counter()
            made(x, **given).loss_sum.backward()
            seconds[name].append(time.perf_counter() - start)
    return {name: float(np.median(of)) for name, of in seconds.items()}


def head(folder: str, tokens: int, rounds: int) -> None:
    meta = all_labelled(tokens, 2)
    print(f"last of two ranks, {tokens:,} labelled tokens a microbatch, {VOCABULARY:,} tokens, float32, in MiB")
    print(f"{'':12s} {'planned':>9s} {'counted':>9s} {'process':>9s}  loss of a step")
    for name, chunk in CHUNKS.items():
        config = head_job(chunk, tokens, f"{folder}/h")
        planned, counted, grown, loss = run_on_ranks(peaks, 2, config, meta, comm=config.comm)[1]
        sizes = "".join(f" {size / 2**20:9.0f}" for size in (planned, counted, grown))
        print(f"{name:12s}{sizes}  {loss:.6g}", flush=True)
    few = tokens // 4
    seconds = head_seconds(few, rounds)
    ratio = seconds["pieces"] / seconds["all logits"]
    print(f"seconds of F and B of the head, {few:,} tokens, width 256: pieces over all logits {ratio:.2f}")


def head_plans() -> Iterator[str]:
    """The fastest plans of 16 microbatches of 32,768 labelled tokens of a model of Qwen2-7B's shapes, on 8 pipeline
    ranks: of the cut that the search takes, and of those with fewer blocks on the last rank and more on others."""
    meta = all_labelled(LONG, 16)
    yield f"{'memory':8s} {'head':12s} {'seconds':>8s}  blocks of ranks"
    for limit in LIMITS:
        for name, chunk in CHUNKS.items():
            found = [plan for moved in range(4) if (plan := of_plan(chunk, limit, meta, moved))]
            seconds, blocks = min(found, default=(np.nan, ()))
            yield f"{limit:8s} {name:12s} {seconds:8.3f}  {' '.join(map(str, blocks))}"


def of_plan(chunk: int, limit: str, meta: IterationMeta, moved: int) -> tuple[float, tuple[int, ...]] | None:
    """Seconds of the plan of an iteration, and blocks of the ranks; None: there is none.

    Args: moved: blocks of the last rank that are on those behind the first one; 0: the cut is searched.
    """
    language = (
        'model_type = "qwen2", hidden_size = 3584, intermediate_size = 18944, num_hidden_layers = 28, '
        f"num_attention_heads = 28, num_key_value_heads = 4, vocab_size = 152064, max_position_embeddings = {LONG}, "
        "tie_word_embeddings = false"
    )
    changes: dict[str, Any] = {
        "model.language.config": f"{{ {language} }}",
        "training.seq_len": LONG,
        "training.global_batch_size": 16,
        "training.mixed_precision_param": '"bfloat16"',
        "training.loss_chunk_tokens": chunk,
        "parallelism.pipeline_parallel_degree": 8,
        "planner.hardware": '"h800x8"',
        "planner.memory_limit": f'"{limit}"',
    }
    counts = [3, *(3 + (rank < moved) for rank in range(2)), 4 + (moved > 2), 4, 4, 4, 3 - moved]
    layout = "|".join(f"t*{count}" if count else "" for count in counts)
    changes |= {"model.language.pipeline_layout": f'"E{layout}L"'} if moved else {"model.language.num_segments": 0}
    job = make_job(config_module.load("debug_text.toml", [f"--{key}={value}" for key, value in changes.items()]))
    plan = IterationPlanner(job).prepare(meta, searched=True).first
    if not plan.has_plan:
        return None
    parts, layers = job.partition, job.spec.text.layers
    blocks = (sum(layers[i].is_block for s in parts.of_rank(rank) for i in range(*s.layers)) for rank in range(8))
    return plan.timeline.makespan_s, tuple(blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=("accuracy", "time", "head", []), help="default: the first two")
    parser.add_argument("--rounds", type=int, default=5, help="over the variants of `time`, and of the head")
    parser.add_argument("--tokens", type=int, default=4096, help="of a microbatch, all labelled, of `head`")
    parser.add_argument("--profile", type=Path, help="for `time`; absent: it is measured")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parts = args.parts or ["accuracy", "time"]
    with tempfile.TemporaryDirectory(prefix="mmtrain-memory-") as folder:
        if "accuracy" in parts:
            accuracy(folder)
        if "time" in parts:
            iteration_time(folder, args.rounds, str(args.profile or ""))
        if "head" in parts:
            head(folder, args.tokens, args.rounds)
            for line in head_plans():
                print(line, flush=True)


if __name__ == "__main__":
    main()
