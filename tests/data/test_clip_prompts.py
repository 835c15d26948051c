"""Prompts of the samples of validations."""

import dataclasses
from pathlib import Path

import pytest
import torch

from mmtrain.config import config
from mmtrain.data.clip_prompts import held_out_prompts
from mmtrain.data.toy.easy_judge import PROMPTS
from mmtrain.data.toy.shapes import shape_clips
from mmtrain.errors import ConfigError, DataError
from mmtrain.modality.buckets import check_video
from mmtrain.models.denoising import start_noise
from tests.jobs import video_config

SAMPLES = ("validation.enable=true", "validation.samples=24")


def job(folder: Path, data: Path, *changes: str) -> config.Config:
    return video_config(folder, *(f"--{word}" for word in (*SAMPLES, f"data.source={str(data)!r}", *changes)))


def test_each_caption_has_as_many_samples_as_there_is_room_for(tmp_path: Path, squares: Path) -> None:
    size = ("data.video_area=144", "data.video_aspects=['1:1']", "data.video_frames=[4]")
    asked = held_out_prompts(job(tmp_path, squares, *size))
    held_out = dict.fromkeys(clip.caption for clip in shape_clips("validation", 60, 0, "easy"))
    assert asked.prompts == tuple(caption for caption in held_out for _ in range(2))
    assert set(asked.prompts) == set(PROMPTS) and asked.judged
    for k in range(2):  # all prompts begin with the same noise
        assert all(torch.equal(noise, start_noise((3, 4, 12, 12), 0, k)) for noise in asked.noise[k::2])
    assert len(asked.text_ids) == 48 and asked.guidance == 2
    clips = [clip for microbatch in asked.meta.microbatches for clip in microbatch.clips]
    assert [clip.sample for clip in clips] == list(range(48))
    assert max(len(microbatch.clips) for microbatch in asked.meta.microbatches) == 4, "data.max_clips"
    batch = asked.batch(list(range(48)))
    assert [index for part in batch.clips for index in part.latents] == list(range(48))


def test_a_job_that_hid_no_captions_has_no_guidance(tmp_path: Path, shapes: Path) -> None:
    asked = held_out_prompts(job(tmp_path, shapes, "diffusion.caption_dropout=0.0", "validation.samples=3"))
    assert (len(asked.prompts), len(asked.text_ids), asked.guidance, asked.judged) == (3, 3, None, False)
    assert len(set(asked.prompts)) == 3


def test_captions_that_are_all_too_long_are_named(tmp_path: Path, squares: Path) -> None:
    long = job(tmp_path, squares, "training.seq_len=6")
    with pytest.raises(DataError, match=r"^validation.samples = 24, but split 'validation' of .* has no caption of at"):
        held_out_prompts(long)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["validation.enable=false"],
            "validation.samples = 24, but validation.enable = false, so there is no",
        ),
        (["validation.samples=-1"], "validation.samples = -1; it must be at least 0"),
    ],
)
def test_samples_that_no_validation_makes_are_refused(tmp_path: Path, changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job(tmp_path, tmp_path, *changes)


def test_only_pixels_of_a_text_to_video_job_are_sampled(tmp_path: Path) -> None:
    words = [f"--{word}" for word in SAMPLES]
    with pytest.raises(ConfigError, match=r"validation.samples = 24, but there is no \[model.dit\]"):
        config.load("debug_vlm.toml", words)
    with pytest.raises(ConfigError, match=r"validation.samples = 24, but the decoder of \[model.vae\]"):
        config.load("debug_t2v.toml", [*words, '--model.vae.config={model_type="autoencoder_kl_wan"}'])
    latents = video_config(tmp_path, *words, channels=4)
    with pytest.raises(ConfigError, match="the model's latents have 4 channels, so they are no pixels"):
        check_video(latents)
    check_video(dataclasses.replace(latents, validation=config.load("debug_t2v.toml").validation))
