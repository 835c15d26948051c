"""python benchmarks/one_gpu.py [--size large] [--rounds 3] [--steps 8]

Training without any parallelism: mmtrain at one rank, a plain torch loop, and Hugging Face's `Trainer`, on one model
(Hugging Face's ViT and Qwen2 with a projector between them), equal initial weights and equal batches. On a GPU compute
is in bfloat16 with float32 weights (FSDP2's mixed precision; autocast in the others), on a CPU all is float32.

The plain model is what a user would write: whole images through the ViT, packed sequences with the positions of each
document, for which Hugging Face makes its own masks (`--attention`: flash_attention_2 where it is there, else sdpa),
and its own loss. mmtrain computes the head on labelled positions alone, attends document by document, and casts weights
once a step instead of once a microbatch; MFU counts the same operations for all. Each contender runs in a process of
its own, in turns that rotate with the rounds. A step is timed from the end of the one before it to its own, with the
batch going to the device and the order of its actions being made (the search is off: one rank has no use for it); two
steps warm up.

Losses of the first step in float32 (on a GPU of a step of the tiny model before all others) must agree to rounding, or
the run ends: they would not train the same model. Printed: medians over all rounds of the milliseconds of a step,
tokens a second (of images too), MFU, peak memory, and the ratio to the plain loop.
"""

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainerCallback, TrainingArguments, ViTConfig, ViTModel
from transformers.utils import is_flash_attn_2_available

from mmtrain.config import config as config_module
from mmtrain.config.config import Config
from mmtrain.data.noise_batches import noise_batch
from mmtrain.local.driven_steps import timed_steps
from mmtrain.local.ranks import run_on_ranks
from mmtrain.modality.metadata import DocumentMeta, ImageMeta, IterationMeta, MicrobatchMeta
from mmtrain.models.batch import Batch, Microbatch, document_positions
from mmtrain.models.projector import Projector
from mmtrain.models.reference import ReferenceModel
from mmtrain.observe.reporter import peak_flops
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.simulator.make_job import make_job
from mmtrain.spec.builders import model_spec
from mmtrain.training import trainer as mmtrain_trainer

WARM = 2
"""Steps before those that are timed."""
BATCHES = 4
"""Different ones, in turns."""
SAME_LOSS = 1e-5
"""Relative difference of first losses that rounding makes in float32."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model and its batches."""

    encoder: str
    language: str
    seq_len: int
    microbatches: int
    sub_microbatch: int
    text: tuple[int, int]
    """Least and most text tokens of a document; 0 to 3 images come with them."""


SIZES = {
    "large": Size(
        encoder='{ model_type = "vit", hidden_size = 1024, intermediate_size = 4096, num_hidden_layers = 24, '
        "num_attention_heads = 16, image_size = 336, patch_size = 14, hidden_dropout_prob = 0.0, "
        "attention_probs_dropout_prob = 0.0 }",
        language='{ model_type = "qwen2", hidden_size = 1536, intermediate_size = 8960, num_hidden_layers = 28, '
        "num_attention_heads = 12, num_key_value_heads = 2, vocab_size = 32000, max_position_embeddings = 8192, "
        "tie_word_embeddings = false }",
        seq_len=4096,
        microbatches=4,
        sub_microbatch=16,
        text=(50, 600),
    ),
    "medium": Size(
        encoder='{ model_type = "vit", hidden_size = 512, intermediate_size = 2048, num_hidden_layers = 8, '
        "num_attention_heads = 8, image_size = 224, patch_size = 14, hidden_dropout_prob = 0.0, "
        "attention_probs_dropout_prob = 0.0 }",
        language='{ model_type = "qwen2", hidden_size = 1024, intermediate_size = 4096, num_hidden_layers = 8, '
        "num_attention_heads = 16, num_key_value_heads = 4, vocab_size = 8000, max_position_embeddings = 4096, "
        "tie_word_embeddings = false }",
        seq_len=2048,
        microbatches=4,
        sub_microbatch=8,
        text=(50, 400),
    ),
    "tiny": Size(
        encoder='{ model_type = "vit", hidden_size = 128, intermediate_size = 512, num_hidden_layers = 4, '
        "num_attention_heads = 4, image_size = 112, patch_size = 14, hidden_dropout_prob = 0.0, "
        "attention_probs_dropout_prob = 0.0 }",
        language='{ model_type = "qwen2", hidden_size = 256, intermediate_size = 1024, num_hidden_layers = 4, '
        "num_attention_heads = 4, num_key_value_heads = 2, vocab_size = 1000, max_position_embeddings = 1024, "
        "tie_word_embeddings = false }",
        seq_len=512,
        microbatches=4,
        sub_microbatch=8,
        text=(20, 120),
    ),
}  # fmt: skip


def job(size: Size, folder: str, *, bfloat16: bool) -> Config:
    return config_module.load(
        "debug_vlm.toml",
        [
            f"--model.encoder.config={size.encoder}",
            f"--model.language.config={size.language}",
            f"--model.encoder.sub_microbatch_size={size.sub_microbatch}",
            f"--training.seq_len={size.seq_len}",
            f"--training.global_batch_size={size.microbatches}",
            f'--training.mixed_precision_param="{"bfloat16" if bfloat16 else "float32"}"',
            "--training.max_norm=1.0",
            "--training.steps=100000",
            '--optimizer.implementation="fused"',
            "--optimizer.lr=1e-4",
            "--lr_scheduler.warmup_steps=0",
            "--parallelism.pipeline_parallel_degree=1",
            "--planner.enable=false",
            "--validation.enable=false",
            "--checkpoint.enable=false",
            "--metrics.enable_tensorboard=false",
            "--metrics.progress_bar=false",
            f'--job.dump_folder="{folder}"',
        ],
    )


# ---------------------------------------------------------------------------------------------- batches


def iteration(config: Config, size: Size, seed: int) -> IterationMeta:
    """Documents of 0 to 3 images and some text, as many as fit into each microbatch."""
    rng = random.Random(seed)
    side = config.model.encoder.config["image_size"] // config.model.encoder.config["patch_size"]
    tokens = (side // config.model.projector.merge) ** 2
    microbatches = []
    for index in range(size.microbatches):
        documents: list[DocumentMeta] = []
        left = size.seq_len
        while True:
            count, text = rng.randint(0, 3), rng.randint(*size.text)
            length = count * tokens + text
            if length > left and documents:
                break
            sample, targets = 1000 * index + len(documents), text // 2
            images = tuple(
                ImageMeta(sample=sample, index=i, grid=(1, side, side), num_tokens=tokens, start=i * tokens)
                for i in range(count)
            )
            documents.append(
                DocumentMeta(
                    sample=sample, num_tokens=length, num_targets=targets, images=images, answers=(targets,),
                    prefix=length - targets,
                )
            )  # fmt: skip
            left -= length
        microbatches.append(MicrobatchMeta(documents=tuple(documents)))
    return IterationMeta(microbatches=tuple(microbatches))


def batches(config: Config, size: Size) -> list[tuple[Batch, IterationMeta]]:
    metas = [iteration(config, size, seed) for seed in range(BATCHES)]
    return [(noise_batch(config.model, meta, seed), meta) for seed, meta in enumerate(metas)]


# -------------------------------------------------------------------------------------- the plain model


class VisionLanguage(nn.Module):
    """Hugging Face's ViT and Qwen2 as they are."""

    def __init__(self, config: Config, attention: str) -> None:
        super().__init__()
        model = config.model
        encoder, language = dict(model.encoder.config), dict(model.language.config)
        encoder.pop("model_type")
        language.pop("model_type")
        self.vision = ViTModel._from_config(
            ViTConfig(**encoder), add_pooling_layer=False, attn_implementation=attention
        )
        self.language = Qwen2ForCausalLM._from_config(
            Qwen2Config(**language, use_cache=False), attn_implementation=attention
        )
        merge = model.projector.merge
        self.projector = Projector(
            encoder["hidden_size"], language["hidden_size"], merge=merge, hidden_size=0, row_major=True
        )
        side = encoder["image_size"] // encoder["patch_size"]
        self.grid = (1, side, side)
        self.losses: list[Tensor] = []
        """Of all microbatches so far."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor,
        image_slots: Tensor,
        pixel_values: Tensor | None = None,
        **loss: Any,
    ) -> dict[str, Tensor]:
        """Args: one packed sequence: [T], [T], [T] already shifted, [V], [N, 3, H, W]. loss: as Hugging Face's loss."""
        x_TD = self.language.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            rows = self.vision(pixel_values).last_hidden_state[:, 1:].flatten(0, 1)
            tokens = self.projector(rows, (self.grid,) * len(pixel_values))
            x_TD = x_TD.index_put((image_slots,), tokens.to(x_TD.dtype))
        found = self.language(
            inputs_embeds=x_TD[None], position_ids=position_ids[None], labels=labels[None],
            shift_labels=labels[None], **loss,
        ).loss  # fmt: skip
        self.losses.append(found.detach())
        return {"loss": found}


def plain_model(config: Config, attention: str) -> VisionLanguage:
    """With the weights that mmtrain begins with."""
    model = VisionLanguage(config, attention)
    reference = ReferenceModel(config.model, model_spec(config.model), seed=config.debug.seed)
    missing, unknown = model.load_state_dict(reference.weights(), strict=False)
    if missing or unknown:
        sys.exit(f"the plain model's parameters are not mmtrain's: {missing} are missing, {unknown} are unknown")
    return model.train()


def inputs(tensors: Microbatch, counts: MicrobatchMeta) -> dict[str, Tensor]:
    """Of the plain model's call."""
    found = {
        "input_ids": tensors.input_ids,
        "position_ids": document_positions(counts.lengths),
        "labels": tensors.labels,
        "image_slots": tensors.image_slots,
    }
    return found | ({"pixel_values": torch.cat(tensors.pixel_values)} if tensors.pixel_values else {})


# ------------------------------------------------------------------------------------------- contenders


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one process measured."""

    first_loss: float
    seconds: tuple[float, ...]
    """Of the steps after those that warm up."""
    memory_bytes: int
    """Most that was allocated on a GPU; 0 on a CPU."""


def is_bfloat16(config: Config) -> bool:
    return config.training.mixed_precision_param == "bfloat16"


def now(device: torch.device) -> float:
    """Seconds on the host's clock, all work of the device done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def outcome(device: torch.device, first_loss: float, ends: Sequence[float]) -> Outcome:
    seconds = [after - before for before, after in pairwise(ends)]
    most = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return Outcome(first_loss=first_loss, seconds=tuple(seconds[WARM - 1 :]), memory_bytes=most)


def run_mmtrain(device: torch.device, config: Config, size: Size, steps: int, attention: str) -> Outcome:
    given = batches(config, size)
    ends, first_loss = [], 0.0
    for step in timed_steps(mmtrain_trainer.Trainer(config), device, islice(cycle(given), WARM + steps)):
        ends.append(now(device))
        if len(ends) == 1:
            first_loss = sum(float(loss) for loss in step.outcome.losses.values()) / given[0][1].num_targets
    return outcome(device, first_loss, ends)


def run_plain(device: torch.device, config: Config, size: Size, steps: int, attention: str) -> Outcome:
    model = plain_model(config, attention).to(device)
    section = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=section.lr, betas=(section.beta1, section.beta2), weight_decay=section.weight_decay,
        fused=True,
    )  # fmt: skip
    ends = []
    for batch, meta in islice(cycle(batches(config, size)), WARM + steps):
        for tensors, counts in zip(batch.microbatches, meta.microbatches, strict=True):
            on_device = {k: value.to(device, non_blocking=True) for k, value in inputs(tensors, counts).items()}
            with torch.autocast(device.type, torch.bfloat16, enabled=is_bfloat16(config)):
                loss = model(**on_device, num_items_in_batch=meta.num_targets)["loss"]
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        ends.append(now(device))
    return outcome(device, float(sum(model.losses[: size.microbatches])), ends)


class _Microbatches(IterableDataset):  # type: ignore[type-arg]
    """All microbatches of the batches in turns, for ever."""

    def __init__(self, given: Sequence[tuple[Batch, IterationMeta]]) -> None:
        self.given = given

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch, meta in cycle(self.given):
            yield from map(inputs, batch.microbatches, meta.microbatches)


class _Ends(TrainerCallback):
    """When each step was over."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(now(self.device))


def run_huggingface(device: torch.device, config: Config, size: Size, steps: int, attention: str) -> Outcome:
    model, ends, section = plain_model(config, attention), _Ends(device), config.optimizer
    with tempfile.TemporaryDirectory(prefix="mmtrain-trainer-") as folder:
        args = TrainingArguments(
            output_dir=folder, max_steps=WARM + steps, per_device_train_batch_size=1,
            gradient_accumulation_steps=size.microbatches, bf16=is_bfloat16(config), use_cpu=device.type == "cpu",
            optim="adamw_torch_fused", learning_rate=section.lr, lr_scheduler_type="constant",
            adam_beta1=section.beta1, adam_beta2=section.beta2, weight_decay=section.weight_decay,
            max_grad_norm=config.training.max_norm, save_strategy="no", logging_strategy="no", report_to=[],
            remove_unused_columns=False, disable_tqdm=True, seed=config.debug.seed,
            accelerator_config={"dispatch_batches": False},
        )  # fmt: skip
        trainer = Trainer(
            model=model, args=args, train_dataset=_Microbatches(batches(config, size)), callbacks=[ends],
            data_collator=lambda rows: rows[0],
        )  # fmt: skip
        trainer.train()
    return outcome(device, float(sum(model.losses[: size.microbatches])), ends.ends)


CONTENDERS: dict[str, Callable[[torch.device, Config, Size, int, str], Outcome]] = {
    "plain torch loop": run_plain,
    "Hugging Face Trainer": run_huggingface,
    "mmtrain": run_mmtrain,
}


def alone(run: Callable[..., Outcome], device: torch.device, config: Config, *args: Any) -> Outcome:
    """What a contender measures in a process of its own. Only mmtrain has a process group, as in training."""
    if run is run_mmtrain:
        return run_on_ranks(run, 1, config, *args, comm=config.comm)[0]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run, device, config, *args).result()


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="large" if cuda else "tiny")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="timed ones of each contender in each round")
    fast = "flash_attention_2" if cuda and is_flash_attn_2_available() else "sdpa"
    parser.add_argument("--attention", default=fast, help="of Hugging Face's modules in the plain model")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The Trainer would spread a batch over all devices that it sees.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    size, device = SIZES[args.size], torch.device("cuda" if cuda else "cpu")
    found: dict[str, list[Outcome]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory(prefix="mmtrain-one-gpu-") as folder:
        if cuda:
            tiny = job(SIZES["tiny"], folder, bfloat16=False)
            check_losses({
                name: alone(run, device, tiny, SIZES["tiny"], 0, "sdpa") for name, run in CONTENDERS.items()
            })  # fmt: skip
        config = job(size, folder, bfloat16=cuda)
        for number in range(args.rounds):
            names = list(CONTENDERS)
            for name in names[number % 3 :] + names[: number % 3]:
                found[name].append(alone(CONTENDERS[name], device, config, size, args.steps, args.attention))
        if not cuda:
            check_losses({name: outcomes[0] for name, outcomes in found.items()})
        report(config, size, device, found)
        print(f"attention of the plain model: {args.attention}")


def check_losses(found: Mapping[str, Outcome]) -> None:
    """Raises: SystemExit: the contenders do not train the same model."""
    losses = {name: outcome.first_loss for name, outcome in found.items()}
    print("loss of the first step, float32: " + ", ".join(f"{name} {loss:.6f}" for name, loss in losses.items()))
    if not max(losses.values()) / min(losses.values()) - 1 <= SAME_LOSS:
        sys.exit("the losses differ by more than rounding: the contenders do not train the same model")


def report(config: Config, size: Size, device: torch.device, found: dict[str, list[Outcome]]) -> None:
    metas = [iteration(config, size, seed) for seed in range(BATCHES)]
    planner = IterationPlanner(make_job(config))
    flops = np.mean([
        sum(of.total for of in planner.job.flops(planner.plan(meta).batching).values()) for meta in metas
    ])  # fmt: skip
    tokens, images = np.mean([(meta.num_tokens, meta.num_images) for meta in metas], axis=0)
    peak = peak_flops(config.metrics, device)
    print(
        f"{sum(module.num_params for module in planner.job.spec.modules):,} parameters; a step of {size.microbatches} "
        f"microbatches: {tokens:.0f} tokens, {images:.0f} images, {flops:.3g} model FLOPs; peak "
        f"{'not known' if np.isnan(peak) else f'{peak:.3g} FLOP/s'}"
    )
    medians = {name: float(np.median([s for o in outcomes for s in o.seconds])) for name, outcomes in found.items()}
    print(f"{'':22s} {'ms a step':>10s} {'tokens/s':>10s} {'MFU':>7s} {'GiB':>6s} {'speed':>7s}  (each round)")
    for name, seconds in medians.items():
        rounds = [
            np.median(found["plain torch loop"][i].seconds) / np.median(outcome.seconds)
            for i, outcome in enumerate(found[name])
        ]
        print(
            f"{name:22s} {1e3 * seconds:10.1f} {tokens / seconds:10.0f} "
            f"{'-' if np.isnan(peak) else f'{flops / seconds / peak:.1%}':>7s} "
            f"{max(o.memory_bytes for o in found[name]) / 2**30:6.1f} "
            f"{medians['plain torch loop'] / seconds:7.3f}  ({', '.join(f'{ratio:.3f}' for ratio in rounds)})"
        )


if __name__ == "__main__":
    main()
