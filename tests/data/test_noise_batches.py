from dataclasses import replace

import pytest
import torch

from mmtrain.config import config as config_module
from mmtrain.data.noise_batches import noise_batch
from mmtrain.modality.probes import work_curve
from mmtrain.models.batch import IGNORE_INDEX, check_batch
from mmtrain.models.reference import ReferenceModel
from mmtrain.spec.builders import model_spec
from mmtrain.spec.vae_shapes import latent_scale
from tests.models.dits import t2v
from tests.reference import ENCODERS, make_clips, model_config


@pytest.mark.parametrize("encoder", ENCODERS)
def test_noise_is_what_its_metadata_says_and_a_model_takes_it(encoder):
    config = config_module.load("debug_vlm.toml", ["--training.seq_len=64"])
    section = replace(config.model.encoder, config=ENCODERS[encoder])
    model = replace(config.model, encoder=section, projector=model_config(encoder).projector)
    config = replace(config, model=model)
    meta = work_curve(config)
    batch = noise_batch(model, meta, 1)
    check_batch(batch, meta)
    loss = ReferenceModel(model, model_spec(model), seed=0).loss_sum(batch, meta)
    assert torch.isfinite(loss)


def test_noise_follows_its_seed_and_labels_the_ends_of_documents():
    config = config_module.load("debug_text.toml", [])
    from mmtrain.modality.probes import probing_iteration

    meta = probing_iteration(config)
    one, same, other = (noise_batch(config.model, meta, seed) for seed in (1, 1, 2))
    assert torch.equal(one.microbatches[0].input_ids, same.microbatches[0].input_ids)
    assert not torch.equal(one.microbatches[0].input_ids, other.microbatches[0].input_ids)
    for tensors, counts in zip(one.microbatches, meta.microbatches, strict=True):
        end = 0
        for document in counts.documents:
            end += document.num_tokens
            labels = tensors.labels[end - document.num_tokens : end]
            assert (labels[: -document.num_targets] == IGNORE_INDEX).all()
            assert (labels[-document.num_targets :] >= 0).all()


def test_noise_of_clips_is_what_its_metadata_says():
    from mmtrain.modality.typical import TypicalSizes
    from mmtrain.simulator.workloads import draw
    from tests.data.videos import make_video_config

    config = make_video_config("x", dit={"in_channels": 5}, video_area=64)
    meta = draw("video_captions", TypicalSizes.of(config, image_side=32), seed=0, iteration=0)
    one, same, other = (noise_batch(config.model, meta, seed) for seed in (1, 1, 2))
    check_batch(one, meta)
    assert one.microbatches == []
    for tensors, counts in zip(one.clips, meta.microbatches, strict=True):
        assert [tuple(latents.shape) for latents in tensors.latents] == [(5, *clip.bucket) for clip in counts.clips]
        assert 0 <= tensors.text_ids.min() <= tensors.text_ids.max() < 416
    assert torch.equal(one.clips[0].latents[0], same.clips[0].latents[0])
    assert not torch.equal(one.clips[0].latents[0], other.clips[0].latents[0])


def test_clips_of_a_job_with_a_vae_are_noise_of_pixels() -> None:
    model = t2v(vae="wan")
    _, meta = make_clips(model, [2], 3)
    assert model.vae is not None
    check_batch(noise_batch(model, meta, 1), meta, latent_scale(model.vae))
