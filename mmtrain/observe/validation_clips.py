"""Clips that a validation samples, through the pipeline of the job: a sheet, and what a judge says of them."""

import io
import json
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.data.clip_images import sheet, shown_frames, some_of
from mmtrain.data.clip_prompts import ClipPrompts
from mmtrain.data.toy.easy_judge import ClipVerdict, judge
from mmtrain.launch.atomic_files import write_whole
from mmtrain.modality.clips import ClipsLayout
from mmtrain.modality.metadata import IterationMeta
from mmtrain.models.denoising import NUM_STEPS, denoise, to_pixels
from mmtrain.models.diffusion import GivenNoise, make_scheduler
from mmtrain.parallel.batch_runner import BatchRunner
from mmtrain.planner.iteration import IterationPlan


@dataclass(frozen=True, kw_only=True)
class ClipSamples:
    """Sampled clips that are pixels."""

    prompts: tuple[str, ...]
    """The prompt of each clip."""
    clips: Tensor
    """[N, 3, F, H, W], numbers from -1 to 1."""
    verdict: ClipVerdict | None
    """What their pixels show, of a job that learns the easy level of moving shapes."""

    def png(self) -> bytes:
        """The sheet: the frames of each clip side by side under its prompt."""
        rows = [
            (prompt, some_of(shown_frames(pixels)))
            for prompt, pixels in zip(self.prompts, map(to_pixels, self.clips), strict=True)
            if pixels is not None
        ]
        file = io.BytesIO()
        sheet(rows).save(file, "PNG")
        return file.getvalue()

    def write(self, path: Path, step: int) -> None:
        """Writes the sheet as JSON, from which `mmtrain report` shows it: `image`, base64 of a PNG file."""
        write_whole(path, json.dumps({"step": step, "image": b64encode(self.png()).decode()}))


def sampled(asked: ClipPrompts, runner: BatchRunner, plan: Callable[[IterationMeta], IterationPlan]) -> ClipSamples:
    """The clips, equal on all ranks of a replica. Collective over the job, whose replicas all make the same ones.

    Args: plan: plans a batch, without gradients.
    """
    assert runner.denoising is not None
    made = plan(asked.meta)
    data = runner.placement.data

    def predict(clips: Sequence[Tensor], timestep: float) -> Tensor:
        item = data.item(asked.batch(clips), asked.meta)
        outcome, _ = runner.run(made, item, noise=GivenNoise(timestep)).on_host()
        return _gathered(made, outcome.predictions, runner)

    scheduler = make_scheduler(runner.denoising.section)
    latents = denoise(predict, scheduler, asked.noise, guidance=asked.guidance, num_steps=NUM_STEPS)
    verdict = None
    if asked.judged:
        pixels = [to_pixels(clip) for clip in latents]
        verdict = judge([clip for clip in pixels if clip is not None], asked.prompts)
    return ClipSamples(prompts=asked.prompts, clips=latents, verdict=verdict)


def _gathered(plan: IterationPlan, predictions: dict[int, Sequence[Tensor]], runner: BatchRunner) -> Tensor:
    """[N, C, F, H, W]: the predictions of all clips, from the rank where the DiT ends. Collective over the replica."""
    layout, mesh = plan.layout.of_module["dit"], runner.placement.mesh
    assert isinstance(layout, ClipsLayout)
    local = {
        clip.sample: values
        for work, of_clips in predictions.items()
        for clip, values in zip(layout.works[work].units, of_clips, strict=True)
    }
    parts = [local]
    if mesh.replica_group is not None:
        parts = [{} for _ in mesh.replica_ranks]
        dist.all_gather_object(parts, local if mesh.place.tp == 0 else {}, group=mesh.replica_group)
    of_all = {sample: values for part in parts for sample, values in part.items()}
    return torch.stack([of_all[sample] for sample in range(len(of_all))])
