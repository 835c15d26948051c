"""Whether a layout computes the same as one process: loss, gradient norm and every gradient, on the user's data.

A small job of the layout runs a step on the Trainer's code path, loader to gradients, on processes of this machine
(gloo, CPU). The one-process model then gets the same batch, in this process; for the parts of a whole model it is
transformers' class of the whole one.
"""

import logging
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.config.config import Config
from mmtrain.config.data import DataConfig
from mmtrain.config.model import DitConfig
from mmtrain.data.noise_batches import noise_batch
from mmtrain.data.tokenizer import job_tokenizer
from mmtrain.local import driven_steps
from mmtrain.local.ranks import RankDiedError, run_on_ranks
from mmtrain.modality.buckets import latent_channels, video_geometry
from mmtrain.modality.metadata import IterationMeta
from mmtrain.modality.probes import mixed_iteration
from mmtrain.models.batch import Batch
from mmtrain.models.diffusion import ClipNoise, null_token
from mmtrain.models.reference import ReferenceModel
from mmtrain.models.whole_reference import WholeModel
from mmtrain.spec.builders import model_spec
from mmtrain.spec.module_sizes import families, whole_kind
from mmtrain.spec.spec import VocabularyRows
from mmtrain.training.trainer import Trainer

FLOAT32_TOLERANCE = 1e-4
"""Maximum of the largest difference in a gradient, relative to its largest element."""

LOW_PRECISION_TOLERANCE = 0.03
"""Maximum of the L2 norm of the difference of all gradients, relative to theirs, with bfloat16."""

_FLOOR = 1e-3
"""Least reference of a relative error, as a part of the largest gradient: zeros differ only by rounding."""

_NUM_WORST = 8
"""Parameters that a report names, those with the largest error."""
_SYNTHETIC_SAMPLES = 400
_SYNTHETIC_CLIPS = 100
_LATENT_SIZES = ((4, 4), (3, 5), (2, 3))
"""Rows and columns of patches of clips of noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterError:
    """Error of one gradient against the one-process model, the maximum over ranks and steps."""

    name: str
    error: float
    norm: float
    """The 2-norm of the one-process gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParity:
    """Loss and gradient norm of one batch: of the layout (loss, grad_norm) and of one process (wanted_*)."""

    loss: float
    wanted_loss: float
    grad_norm: float
    wanted_norm: float


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Result of a comparison."""

    low_precision: bool
    tolerance: float
    steps: tuple[StepParity, ...] = ()
    parameters: tuple[ParameterError, ...] = ()
    """Worst first."""
    missing: tuple[str, ...] = ()
    """Gradients that only the one-process model or only the ranks have."""
    total_error: float = 0.0
    """L2 norm of the difference of all gradients relative to theirs, the maximum over steps and ranks."""
    crash: str = ""
    """The error that stopped the layout's processes; empty: none."""

    @property
    def problems(self) -> list[str]:
        """The differences as text; empty if the layout is right."""
        if self.crash:
            return [self.crash]
        problems = [f"gradient of {name} is on one side alone" for name in self.missing]
        for number, step in enumerate(self.steps, 1):
            for what, ours, theirs in (
                ("loss", step.loss, step.wanted_loss),
                ("gradient norm", step.grad_norm, step.wanted_norm),
            ):
                if not relative(ours, theirs) <= self.tolerance:
                    problems.append(f"{what} of step {number} differs by {relative(ours, theirs):.2e}")
        if self.low_precision:
            if not self.total_error <= self.tolerance:
                problems.append(f"all gradients together differ by {self.total_error:.2e}")
        else:
            wrong = [p for p in self.parameters if not p.error <= self.tolerance]
            if wrong:
                problems.append(
                    f"{len(wrong)} of {len(self.parameters)} gradients differ, at most by {wrong[0].error:.2e}"
                )
        return problems


def relative(ours: float, theirs: float) -> float:
    """The difference relative to `theirs`; NaN or infinity where one is not finite."""
    return abs(ours - theirs) / (abs(theirs) + 1e-30)


def check_parity(
    config: Config,
    *,
    num_steps: int = 1,
    tolerance: float | None = None,
    noise: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Parity:
    """Compares loss and gradients of a layout with one process, over the first batches of its data.

    Starts `world_size` processes of this machine and waits for them.

    Args:
        config: a job as `shrink` makes it.
        num_steps: batches; weights are not changed between them.
        tolerance: None: by dtype.
        noise: batches of noise with items of all encoders, instead of the job's data.
        say: called with progress messages.
    Raises: MMTrainError: config or data cannot be used.
    """
    low = "bfloat16" in (config.training.param_dtype, config.training.mixed_precision_reduce)
    if tolerance is None:
        tolerance = LOW_PRECISION_TOLERANCE if low else FLOAT32_TOLERANCE
    with tempfile.TemporaryDirectory(prefix="mmtrain-parity-") as name:
        folder = Path(name)
        job = replace(config, job=replace(config.job, dump_folder=str(folder / "run")))
        world = job.parallelism.layout.world_size
        say(f"layout: starts {world} process{'es' if world > 1 else ''}")
        try:
            variables = {"CUDA_VISIBLE_DEVICES": ""}
            run_on_ranks(_save_gradients, world, job, num_steps, folder, noise, comm=job.comm, variables=variables)
        except RankDiedError as died:
            return Parity(low_precision=low, tolerance=tolerance, crash=f"{died}\n{died.text}".rstrip())
        return _compare(job, folder, low, tolerance, num_steps, say)


def synthetic_data(config: Config, folder: Path) -> DataConfig:
    """A data section of synthetic samples in a folder: charts, or text without an encoder; for a DiT clips of moving
    shapes, or latents of noise; for two towers captioned shapes."""
    section = replace(config.data, sources=[], source="synthetic", split="train", streaming=False, shuffle=True)
    if config.model.dit is not None:
        source = folder / "shapes"
        if latent_channels(config.model.dit) == 3 or config.model.vae is not None:
            from mmtrain.data.toy.shapes import make_shapes

            make_shapes(source, _SYNTHETIC_CLIPS, config.debug.seed)
        else:
            _write_latents(config, config.model.dit, source)
        return replace(section, source=str(source))
    if config.model.reads_pairs:
        from mmtrain.data.toy.pairs import make_pairs

        make_pairs(folder / "pairs", _SYNTHETIC_SAMPLES, config.debug.seed)
        return replace(section, source=str(folder / "pairs"))
    if config.model.encoder is not None:
        from mmtrain.data.toy.charts import make_charts

        make_charts(folder / "charts", _SYNTHETIC_SAMPLES, config.debug.seed)
        return replace(section, source=str(folder / "charts"))
    import json

    from mmtrain.data.toy.charts import conversations

    path = folder / "text.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for conversation in conversations("train", _SYNTHETIC_SAMPLES, config.debug.seed):
            messages = [{**m, "content": m["content"].replace("<image>", "")} for m in conversation.messages]
            file.write(json.dumps({"messages": messages}) + "\n")
    return replace(section, source=str(path))


def _write_latents(config: Config, dit: DitConfig, folder: Path) -> None:
    """Clips of noise as latents at the job's frame rate, about as long as its buckets, in three sizes, with
    captions."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from mmtrain.data.clip_processor import npy_bytes
    from mmtrain.data.toy.shapes import shape_captions

    geometry = video_geometry(dit, config.data)
    rng = np.random.default_rng(config.debug.seed)
    rows = []
    for caption in shape_captions(_SYNTHETIC_CLIPS, config.debug.seed):
        frames = rng.integers(geometry.frames[-1], geometry.frames[0], endpoint=True)
        patches = _LATENT_SIZES[rng.integers(len(_LATENT_SIZES))]
        sides = [count * side for count, side in zip(patches, geometry.patch[1:], strict=True)]
        values = rng.standard_normal((geometry.channels, frames, *sides), np.float32)
        rows.append({"caption": caption, "latents": npy_bytes(values), "fps": geometry.fps})
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")


# ------------------------------------------------------------------------------------- the layout's processes


def _save_gradients(device: torch.device, config: Config, num_steps: int, folder: Path, noise: bool) -> None:
    """Runs the steps on one rank of the layout, and writes the input of `_compare`. Args: noise: the data are noise."""
    warnings.simplefilter("ignore")  # the report is for users of a layout, not for developers of torch
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    trainer, rank = Trainer(config), dist.get_rank()
    batches = _noise_batches(trainer) if noise else None
    for step, (item, result) in enumerate(driven_steps.gradients(trainer, device, num_steps, batches)):
        gradients: dict[str, Tensor] = {}
        rows: dict[str, VocabularyRows] = {}
        for chunk in trainer.model.chunks:
            rows |= chunk.stored_rows
            for name, parameter in chunk.named_parameters():
                grad = parameter.grad
                if grad is not None:
                    full = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                    gradients[name] = full.detach().clone()
        batch = (item.batch, item.meta) if trainer.mesh.is_leader else None
        values = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "gradients": gradients,
            "aliases": trainer.model.aliases,
            "rows": rows,
            "batch": batch,
        }
        torch.save(values, folder / f"step-{step}-rank-{rank}")
        if rank == 0:
            print(f"layout: step {step + 1} of {num_steps} has run", file=sys.stderr, flush=True)


def _noise_batches(trainer: Trainer) -> Iterator[tuple[Batch, IterationMeta]]:
    """Noise for each step of the rank's replica."""
    config = trainer.config
    for step in count():
        seed = config.debug.seed + trainer.mesh.dp_rank + step * trainer.mesh.layout.dp
        meta = mixed_iteration(config, seed)
        yield noise_batch(config.model, meta, seed), meta


# ---------------------------------------------------------------------------------------------- comparison


def _compare(
    config: Config, folder: Path, low_precision: bool, tolerance: float, num_steps: int, say: Callable[[str], None]
) -> Parity:
    truth = WholeModel if whole_kind(config.model) else ReferenceModel
    model = truth(config.model, model_spec(config.model), seed=config.debug.seed)
    worst: dict[str, ParameterError] = {}
    seen: set[str] = set()
    steps, total_error = [], 0.0
    wanted: Mapping[str, Tensor] = {}
    for step in range(num_steps):
        ranks = range(config.parallelism.layout.world_size)
        paths = [folder / f"step-{step}-rank-{rank}" for rank in ranks]
        batches = [batch for path in paths if (batch := _load(path)["batch"]) is not None]
        noise = None
        if config.model.dit is not None:
            token = null_token(job_tokenizer(config))
            noise = ClipNoise(config.diffusion, config.debug.seed, step + 1, null_token=token)
        wanted_loss, wanted = _reference(model, batches, noise)
        say(f"one process: step {step + 1} of {num_steps} has run")
        wanted_norm = _norm(wanted.values())
        for path in paths:
            saved = _load(path)
            gradients = {saved["aliases"].get(name, name): grad for name, grad in saved["gradients"].items()}
            seen |= set(gradients)
            known = {name: grad for name, grad in gradients.items() if name in wanted}
            rows = saved["rows"]
            theirs = {n: wanted[n][slice(*rows[n][:2])] if n in rows else wanted[n] for n in known}
            for one in _errors(known, theirs, wanted, low_precision):
                # NaN is worse than any number, but compares as False.
                if one.name not in worst or not one.error <= worst[one.name].error:
                    worst[one.name] = one
            difference = _norm([grad - theirs[name] for name, grad in known.items()])
            total_error = max(total_error, difference / (_norm(theirs.values()) + _FLOOR * wanted_norm))
        steps.append(
            StepParity(
                loss=saved["loss"], wanted_loss=wanted_loss, grad_norm=saved["grad_norm"], wanted_norm=wanted_norm
            )
        )
    ordered = sorted(worst.values(), key=lambda p: (p.error == p.error, -p.error, p.name))
    return Parity(
        low_precision=low_precision,
        tolerance=tolerance,
        steps=tuple(steps),
        parameters=tuple(ordered),
        missing=tuple(sorted(seen ^ set(wanted))),
        total_error=total_error,
    )


def _load(path: Path) -> dict[str, Any]:
    return dict(torch.load(path, weights_only=False))


def _reference(
    model: ReferenceModel, batches: Sequence[tuple[Batch, IterationMeta]], noise: ClipNoise | None
) -> tuple[float, Mapping[str, Tensor]]:
    """The loss and the gradients by name of the one-process model; the loss is over all targets of all batches."""
    model.zero_grad()
    num_targets = sum(model.loss.num_values(meta) for _, meta in batches)
    loss = torch.stack([model.loss_sum(batch, meta, noise) for batch, meta in batches]).sum() / num_targets
    loss.backward()
    weights = {name: weight for name, weight in model.weights().items() if weight.requires_grad}
    return loss.item(), {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in weights.items()}


def _errors(
    gradients: Mapping[str, Tensor], theirs_of: Mapping[str, Tensor], wanted: Mapping[str, Tensor], low_precision: bool
) -> list[ParameterError]:
    """Args: gradients: of one rank. theirs_of: the same of one process. wanted: all of these."""
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    total = _norm(wanted.values())
    out = []
    for name, grad in gradients.items():
        theirs, norm = theirs_of[name], _norm([theirs_of[name]])
        if low_precision:
            error = _norm([grad - theirs]) / (norm + _FLOOR * total)
        else:
            error = float((grad - theirs).abs().max()) / (float(theirs.abs().max()) + _FLOOR * largest)
        out.append(ParameterError(name=name, error=error, norm=norm))
    return out


def _norm(tensors: Iterable[Tensor]) -> float:
    """The 2-norm of all tensors together."""
    return math.sqrt(sum(float(tensor.double().pow(2).sum()) for tensor in tensors))


# ------------------------------------------------------------------------------------------------- report


def describe(config: Config) -> str:
    """The layout and size of a job, and what is compared with it if that is no model of ours: a line each."""
    section, spec = config.parallelism, model_spec(config.model)
    shape = section.layout
    layout = " x ".join(f"{name} {degree}" for name, degree in shape.divided.items())
    running = families(config.model)
    modules = "; ".join(
        f"{m.name} {running[m.name]}, {m.num_params:,} parameters in {len(m.layers)} layers"
        for m in spec.modules
        if m.name in running
    )
    training = config.training
    size = f"{training.seq_len} tokens"
    if config.model.dit is not None:
        size = f"up to {config.data.max_clips} clips, captions of up to {size}"
    if config.model.reads_pairs:
        size = f"up to {config.data.max_pairs} pairs, captions of up to {size}"
    whole, call = whole_kind(config.model), "group of pairs" if config.model.reads_pairs else "document"
    return (
        f"layout  {layout or 'one rank'}: {shape.world_size} processes (gloo, CPU), "
        f"schedule {section.pipeline_parallel_schedule}, {training.param_dtype}\n"
        f"job     scaled down: {modules}; {training.global_batch_size} microbatches of {size}"
        + (f"\ntruth   the class of transformers for the whole {whole}, one call a {call}" if whole else "")
    )


def report(parity: Parity) -> str:
    """The comparison as text: losses, norms, the worst parameters and the verdict."""
    if parity.crash:
        return f"FAIL: {parity.crash}"
    lines = []
    for number, step in enumerate(parity.steps, 1):
        for what, ours, theirs in (
            ("loss", step.loss, step.wanted_loss),
            ("gradient norm", step.grad_norm, step.wanted_norm),
        ):
            difference = relative(ours, theirs)
            lines.append(
                f"step {number}  {what:<14} {ours:.7g}   one process {theirs:.7g}   differ by {difference:.1e}"
            )
    measure = "|ours - theirs| / |theirs|, 2-norms" if parity.low_precision else "max|ours - theirs| / max|theirs|"
    if parity.parameters:
        lines += [f"worst of {len(parity.parameters)} gradients, by {measure}:", "     error       norm  parameter"]
        lines += [f"  {one.error:8.1e}  {one.norm:9.3e}  {one.name}" for one in parity.parameters[:_NUM_WORST]]
    if parity.low_precision and parity.parameters:
        lines.append(f"all gradients together: {parity.total_error:.1e}")
    judged = "each gradient's largest difference" if not parity.low_precision else "all gradients' 2-norm difference"
    bound = f"relative tolerance {parity.tolerance:g} (loss, norm, {judged})"
    problems = parity.problems
    lines.append(f"FAIL: {'; '.join(problems)}; {bound}" if problems else f"PASS: {bound}")
    return "\n".join(lines)
