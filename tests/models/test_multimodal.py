"""A model composed of modules of transformers in Python is a job, and trains as the modules themselves compute."""

from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
    WhisperConfig,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from mmtrain.config import config
from mmtrain.config.data import DataConfig
from mmtrain.config.model import ProjectorConfig
from mmtrain.config.optimizer import LRSchedulerConfig
from mmtrain.config.sections import ParallelismConfig, TrainingConfig
from mmtrain.data.noise_batches import noise_batch
from mmtrain.errors import ConfigError
from mmtrain.local import driven_steps
from mmtrain.modality.probes import mixed_iteration
from mmtrain.models.batch import IGNORE_INDEX
from mmtrain.models.multimodal import EncoderModule, MultimodalModule, ParallelSpec
from mmtrain.models.projector import make_projector
from mmtrain.training.trainer import Trainer
from tests.guides import DOCS, blocks
from tests.ranks import run_ranks

TOLERANCE = 2e-5
"""Float32, relative to the largest element of a gradient. Measured: 3e-6."""


def parts():
    """Small modules with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    sound = {"encoder_ffn_dim": 48, "encoder_layers": 3, "encoder_attention_heads": 4, "num_mel_bins": 10}
    return (
        SiglipVisionModel(SiglipVisionConfig(**sizes, image_size=16, patch_size=4, vision_use_head=False)),
        WhisperEncoder(WhisperConfig(d_model=32, max_source_positions=12, **sound)),
        LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=448, max_position_embeddings=256)),
    )


def module() -> MultimodalModule:
    vision, sound, language = parts()
    vision.requires_grad_(False)
    return MultimodalModule(
        encoders={
            "vision": EncoderModule(vision, "llava"),
            "audio": EncoderModule(sound, ProjectorConfig(spatial_merge=2)),
        },
        language_model=language,
    )


def written(folder: Path, job) -> Path:
    """The job's file."""
    path = folder / "job.toml"
    path.write_text(config.dump(job))
    return path


SECTIONS = {
    "data": DataConfig(source="nowhere"),
    "training": TrainingConfig(steps=4, seq_len=96, global_batch_size=4),
    "lr_scheduler": LRSchedulerConfig(warmup_steps=0),
}


def gradients(rank, path: Path):
    """Loss, gradients and weights of a batch of noise on one rank of a job."""
    job = config.load(path)
    meta = mixed_iteration(job, 1)
    trainer = Trainer(job)
    steps = driven_steps.gradients(trainer, torch.device("cpu"), 1, iter([(noise_batch(job.model, meta, 1), meta)]))
    _, result = next(steps)
    found = {
        name: parameter.grad.clone()
        for chunk in trainer.model.chunks
        for name, parameter in chunk.named_parameters()
        if parameter.grad is not None
    }
    weights = {n: p.detach().clone() for chunk in trainer.model.chunks for n, p in chunk.named_parameters()}
    steps.close()
    return result.loss, found, weights


def theirs(job, projectors):
    """The loss of the same batch by the modules of transformers, document by document, and the parts."""
    vision, sound, language = parts()
    vision.requires_grad_(False)
    meta = mixed_iteration(job, 1)
    batch = noise_batch(job.model, meta, 1)
    losses, count = [], 0
    for tensors, counts in zip(batch.microbatches, meta.microbatches, strict=True):
        start, images = 0, iter(tensors.pixel_values)
        for document in counts.documents:
            rows = slice(start, start + document.num_tokens)
            embeds = language.model.embed_tokens(tensors.input_ids[rows]).clone()
            for image in document.images:
                tower = vision if image.module == "vision" else sound
                states = tower(next(images)).last_hidden_state[0]
                projector = projectors[image.module]
                features = projector(states, (image.grid,)) if image.module == "audio" else projector(states)
                embeds[image.start : image.start + image.num_tokens] = features
            logits = language(inputs_embeds=embeds[None]).logits[0]
            labels = tensors.labels[rows]
            losses.append(torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum"))
            count += int((labels != IGNORE_INDEX).sum())
            start += document.num_tokens
    loss = torch.stack(losses).sum() / count
    loss.backward()
    named = {"vision": vision, "audio": sound, "language": language}
    named |= {"projector": projectors["vision"], "audio_projector": projectors["audio"]}
    return loss.item(), {f"{n}.{k}": p for n, m in named.items() for k, p in m.named_parameters() if p.requires_grad}


@pytest.mark.ranks
def test_modules_on_ranks_of_their_own_compute_what_the_classes_compute(tmp_path):
    specs = {"vision": ParallelSpec(), "audio": ParallelSpec()}
    job = module().job(tmp_path / "modules", ParallelSpec(pp=2), specs, **SECTIONS)
    assert job.parallelism.pipeline_parallel_degree == 4
    assert (job.planner.placement, job.model.language.ranks, job.model.modules["audio"].ranks) == ("parallel", 2, 1)
    assert (job.model.encoder.trainable, job.model.modules["audio"].trainable) == (False, True)
    path = written(tmp_path, job)
    assert config.load(path) == job
    found = run_ranks(gradients, 4, path)
    grads = {name: grad for _, of_rank, _ in found for name, grad in of_rank.items()}
    weights = {name: value for *_, of_rank in found for name, value in of_rank.items()}
    projectors = {}
    for name, prefix in {"vision": "projector.", "audio": "audio_projector."}.items():
        projectors[name] = make_projector(job.model, name)
        projectors[name].load_state_dict(
            {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
        )
    loss, wanted = theirs(job, projectors)
    assert found[0][0] == pytest.approx(loss, rel=1e-5)
    assert grads.keys() == wanted.keys()
    for name, parameter in wanted.items():
        assert torch.equal(weights[name], parameter), name
        error = (grads[name] - parameter.grad).abs().max()
        assert error <= TOLERANCE * parameter.grad.abs().max(), name


def test_configs_alone_make_a_job_with_random_weights(tmp_path):
    vision, sound, language = (source.config for source in parts())
    mllm = MultimodalModule(
        encoders={"vision": EncoderModule(vision), "audio": EncoderModule(sound, trainable=False)},
        language_model=language,
        others={"attention_mask": "modality"},
    )
    specs = {"vision": ParallelSpec(pp=2), "audio": ParallelSpec(pp=2)}
    job = mllm.job(
        tmp_path / "a", ParallelSpec(pp=2), specs, modality_parallelism="colocated",
        parallelism=ParallelismConfig(data_parallel_shard_degree=2), **SECTIONS,
    )  # fmt: skip
    assert job.parallelism.layout.world_size == 8
    assert {section.weights for section in job.model.cut_modules.values()} == {"random"}
    assert job.model.language.attention_mask == "modality"
    spread = mllm.job(tmp_path / "b", ParallelSpec(pp=2), specs, modality_parallelism="spread", **SECTIONS)
    assert (spread.parallelism.pipeline_parallel_degree, spread.model.language.ranks) == (2, 0)
    assert Trainer(spread).job.partition.num_ranks == 2


@pytest.mark.parametrize(
    ("language", "specs", "how", "message"),
    [
        (
            ParallelSpec(tp=2),
            {},
            "parallel",
            r"^ParallelSpec: vision tp = 1, audio tp = 1, language tp = 2; .* same tp$",
        ),
        (ParallelSpec(), {"audio": ParallelSpec(cp=2)}, "parallel", r"audio cp = 2, language cp = 1; .* the same cp"),
        (ParallelSpec(pp=2), {}, "spread", r'language pp = 2; with "spread" these modules share ranks'),
        (
            ParallelSpec(),
            {"audio": ParallelSpec(pp=2)},
            "colocated",
            r"vision pp = 1, audio pp = 2; with \"colocated\"",
        ),
        (ParallelSpec(), {"sound": ParallelSpec()}, "parallel", r"has 'sound', but the encoders are vision, audio"),
    ],
)
def test_specs_that_do_not_fit_together_are_one_line(tmp_path, language, specs, how, message):
    with pytest.raises(ConfigError, match=message):
        module().job(tmp_path / "modules", language, specs, modality_parallelism=how, **SECTIONS)
    assert not (tmp_path / "modules").exists()


@pytest.mark.parametrize("how", ["parallel", "colocated"])
def test_one_module_has_no_placement(tmp_path, how):
    alone = MultimodalModule(encoders={}, language_model=module().language_model)
    with pytest.raises(ConfigError, match=rf'^planner\.placement = "{how}", but the model has one module; set'):
        alone.job(tmp_path / "modules", modality_parallelism=how, **SECTIONS)


def test_the_example_of_the_guide_makes_a_job(tmp_path, monkeypatch):
    for name, source in zip(("siglip", "whisper", "llama"), parts(), strict=True):
        source.save_pretrained(tmp_path / name)
    (example,) = (body for body in blocks(DOCS / "models.md", "python") if "MultimodalModule" in body)
    monkeypatch.chdir(tmp_path)
    found = {}
    exec(example, found)
    assert config.load(written(tmp_path, found["job"])) == found["job"]
    ranks = {stage.module: stage.pp_rank for stage in Trainer(found["job"]).job.partition.stages}
    assert ranks == {"vision": 0, "audio": 1, "language": 3}
