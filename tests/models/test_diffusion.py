"""Noise, timesteps and targets of clips: as diffusers' schedules have them, and the same wherever they are drawn."""

import dataclasses

import pytest
import torch

from mmtrain.config.data import DiffusionConfig, TokenizerConfig
from mmtrain.data.tokenizer import load_tokenizer
from mmtrain.modality.metadata import ClipMeta
from mmtrain.models.diffusion import ClipNoise, make_scheduler, null_token

CLIP = ClipMeta(sample=3, frames=2, height=4, width=6, num_tokens=12, num_text_tokens=5)
LATENTS = torch.randn(3, 2, 4, 6, generator=torch.Generator().manual_seed(0))


def noise_of(section=None, *, step=1, seed=0, null=0, **changes):
    return ClipNoise(section or DiffusionConfig(**changes), seed, step, null_token=null)


def others(count):
    return [dataclasses.replace(CLIP, sample=sample) for sample in range(count)]


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
def test_noise_and_targets_are_those_of_the_scheduler_that_samples(prediction):
    section = DiffusionConfig(prediction=prediction)
    drawn, scheduler = noise_of(section), make_scheduler(section)
    for clip in others(20):
        timestep = torch.tensor([int(drawn.timestep(clip))])
        noise = drawn._noise(clip, LATENTS)
        torch.testing.assert_close(drawn.noisy(clip, LATENTS), scheduler.add_noise(LATENTS, noise, timestep))
        wanted = noise if prediction == "epsilon" else scheduler.get_velocity(LATENTS, noise, timestep)
        torch.testing.assert_close(drawn.target(clip, LATENTS), wanted)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_a_right_velocity_leads_the_scheduler_to_the_data(shift):
    section = DiffusionConfig(shift=shift)
    scheduler = make_scheduler(section)
    scheduler.set_timesteps(4)
    noise = torch.randn(LATENTS.shape, generator=torch.Generator().manual_seed(1))
    x = noise
    for timestep in scheduler.timesteps:
        x = scheduler.step(noise - LATENTS, timestep, x).prev_sample
    torch.testing.assert_close(x, LATENTS, rtol=1e-5, atol=1e-5)
    drawn = noise_of(section)
    t = drawn.timestep(CLIP) / 1000
    noisy, target = drawn.noisy(CLIP, LATENTS), drawn.target(CLIP, LATENTS)
    torch.testing.assert_close(noisy - t * target, LATENTS, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_steps", [10, 30, 100, 250])
@pytest.mark.parametrize("prediction", ["epsilon", "v"])
def test_right_predictions_lead_to_the_data_in_allowed_numbers_of_steps(prediction, num_steps):
    """Data are normal numbers of mean 0.8 and deviation 0.2, of which the best prediction is known."""
    section = DiffusionConfig(prediction=prediction)
    scheduler = make_scheduler(section)
    scheduler.set_timesteps(num_steps)
    x = torch.randn(20000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for timestep in scheduler.timesteps:
        squared = float(scheduler.alphas_cumprod[timestep])
        a, s = squared**0.5, (1 - squared) ** 0.5
        data = 0.8 + a * 0.04 / (squared * 0.04 + s * s) * (x - a * 0.8)
        noise = (x - a * data) / s
        x = scheduler.step(noise if prediction == "epsilon" else a * noise - s * data, timestep, x).prev_sample
    assert float(x.mean()) == pytest.approx(0.8, abs=0.03)
    assert float(x.std()) == pytest.approx(0.2, abs=0.06)


def test_each_clip_and_step_has_choices_of_its_own_that_do_not_depend_on_who_asks():
    one, same = noise_of(), noise_of()
    assert torch.equal(one.noisy(CLIP, LATENTS), same.noisy(CLIP, LATENTS))
    assert one.timestep(CLIP) == same.timestep(CLIP)
    found = [one.timestep(CLIP)]
    found += [noise_of(step=step).timestep(CLIP) for step in (2, -1)]
    found += [noise_of(seed=1).timestep(CLIP)]
    found += [one.timestep(dataclasses.replace(CLIP, **change)) for change in ({"sample": 4}, {"index": 1})]
    assert len(set(found)) == len(found)
    assert one.target(dataclasses.replace(CLIP, blank=True), LATENTS) is None
    first, second = (one._noise(clip, LATENTS).flatten() for clip in others(2))
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.3


@pytest.mark.parametrize(
    ("changes", "mean", "deviation"),
    [
        ({"timestep_sampling": "uniform"}, 500, 289),
        ({"logit_mean": 0.0, "logit_std": 1.0}, 500, 208),
        ({"logit_mean": 1.0, "logit_std": 0.5}, 722, 98),
        ({"timestep_sampling": "uniform", "shift": 3.0}, 676, 267),
        ({"timestep_sampling": "uniform", "prediction": "v"}, 500, 289),
    ],
)
def test_timesteps_have_the_distribution_that_was_asked_for(changes, mean, deviation):
    """Moments by numeric integration of the densities."""
    drawn = noise_of(**changes)
    found = torch.tensor([drawn.timestep(clip) for clip in others(4000)])
    assert float(found.mean()) == pytest.approx(mean, abs=4 * deviation / 4000**0.5 + 1)
    assert float(found.std()) == pytest.approx(deviation, rel=0.05)
    assert float(found.min()) >= 0 and float(found.max()) <= 1000
    if "prediction" in changes:
        assert torch.equal(found, found.round()) and found.max() <= 999


def test_hidden_captions_keep_their_length():
    clips = others(400)
    ids = torch.arange(1, 5 * len(clips) + 1)
    drawn = noise_of(caption_dropout=0.25, null=0)
    prompts = drawn.prompts(clips, ids)
    hidden = [drawn.hides_caption(clip) for clip in clips]
    assert 0.17 < sum(hidden) / len(hidden) < 0.33
    for index, dropped in enumerate(hidden):
        part = prompts[5 * index : 5 * index + 5]
        assert torch.equal(part, torch.zeros_like(part) if dropped else ids[5 * index : 5 * index + 5])
    assert torch.equal(noise_of(caption_dropout=0.25, null=None).prompts(clips, ids), ids)


def test_the_null_token_is_padding_where_there_is_one():
    tokenizer = load_tokenizer(TokenizerConfig(), captions=True)
    padding, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    assert padding != end
    found = [null_token(tokenizer)]
    for token in ("pad_token", "eos_token"):
        setattr(tokenizer, token, None)
        found.append(null_token(tokenizer))
    assert found == [padding, end, 0]


@pytest.mark.parametrize("mean", [-100.0, 100.0])
def test_no_clip_is_without_noise_or_without_data(mean):
    assert 0 < noise_of(logit_mean=mean).timestep(CLIP) < 1000
