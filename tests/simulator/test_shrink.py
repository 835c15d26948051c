"""A shrunk job keeps the kind of the model and how it is divided."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mmtrain.config import config
from mmtrain.config.assignment import AssignmentConfig
from mmtrain.config.config import Config
from mmtrain.config.data import DataConfig, DiffusionConfig
from mmtrain.config.model import (
    DitConfig,
    EncoderConfig,
    LanguageConfig,
    LoRAConfig,
    ModelConfig,
    ProjectorConfig,
    VaeConfig,
)
from mmtrain.config.sections import ParallelismConfig, TrainingConfig
from mmtrain.errors import ConfigError
from mmtrain.modality.buckets import most_frames, video_geometry
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.shrink import MOST_RANKS, shrink
from mmtrain.spec.builders import model_spec
from mmtrain.spec.model_shapes import dit_shape, language_shape
from mmtrain.spec.small import fewer_blocks
from mmtrain.spec.vae_shapes import vae_shape
from mmtrain.spec.vision_shapes import vision_shape
from tests.llava import job_model, save_llava

ENCODERS: dict[str, dict[str, Any]] = {
    "qwen2_vl_vision": {"hidden_size": 3584},
    "qwen2_5_vl_vision": {"out_hidden_size": 3584, "hidden_size": 1280},
    "qwen3_vl_vision": {"out_hidden_size": 4096},
    "siglip_vision_model": {"image_size": 384, "patch_size": 16},
    "siglip2_vision_model": {},
    "clip_vision_model": {"image_size": 336, "patch_size": 14},
    "vit": {},
    "whisper_encoder": {"max_source_positions": 1500},
}
LANGUAGES: dict[str, dict[str, Any]] = {
    "qwen2": {
        "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944,
        "num_hidden_layers": 28, "vocab_size": 152064, "layer_types": ["full_attention"] * 28,
    },
    "llama": {
        "hidden_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 8, "intermediate_size": 8192,
        "num_hidden_layers": 28, "vocab_size": 128256, "head_dim": 128, "tie_word_embeddings": True,
    },
    "mistral": {"sliding_window": 8192, "head_dim": 128, "hidden_size": 5120, "vocab_size": 131072},
    "qwen2_vl_text": {
        "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944,
        "num_hidden_layers": 28, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    },
}  # fmt: skip


WAN: dict[str, Any] = {
    "num_layers": 28, "num_attention_heads": 28, "ffn_dim": 10240, "attention_head_dim": 128, "text_dim": 3072,
    "in_channels": 3, "out_channels": 3,
}  # fmt: skip


def job(encoder: str | None = "qwen2_vl_vision", language: str = "qwen2", **sections: Any) -> Config:
    model = ModelConfig(
        encoder=None if encoder is None else EncoderConfig(config={"model_type": encoder, **ENCODERS[encoder]}),
        language=LanguageConfig(config={"model_type": language, **LANGUAGES[language]}),
    )
    made = Config(
        model=sections.pop("model", model), data=DataConfig(source="somewhere", **sections.pop("data", {})),
        training=TrainingConfig(steps=10, seq_len=8192, global_batch_size=64), **sections,
    )  # fmt: skip
    config.check(made)
    return made


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("encoder", [None, *ENCODERS])
def test_every_family_becomes_small_and_can_be_cut_and_divided(encoder: str | None, language: str) -> None:
    parallelism = ParallelismConfig(pipeline_parallel_degree=2, tensor_parallel_degree=2)
    small = shrink(job(encoder, language, parallelism=parallelism)).config
    made = make_job(small)
    big = model_spec(job(encoder, language).model)
    assert made.spec.num_params < big.num_params / 10
    assert [m.name for m in made.spec.modules] == [m.name for m in big.modules]
    shape = language_shape(small.model)
    assert shape.num_heads % 2 == shape.num_kv_heads % 2 == shape.mlp_width % 2 == shape.vocab_size % 2 == 0
    assert shape.vocab_size == LANGUAGES[language].get("vocab_size", 152064), "the user's tokenizer must fit"
    assert shape.width <= 256
    if encoder:
        vision = vision_shape(small.model)
        assert vision.num_heads % 2 == vision.mlp_width % 2 == 0
        assert vision.width <= 64
        assert vision.patch_size == vision_shape(job(encoder, language).model).patch_size


def test_ratios_of_heads_ties_and_head_widths_stay() -> None:
    small = language_shape(shrink(job(None, "llama")).config.model)
    assert (small.num_heads, small.num_kv_heads, small.head_dim, small.width) == (6, 2, 16, 96)
    assert small.tied


def test_windows_and_whole_frames_both_stay() -> None:
    small = vision_shape(shrink(job("qwen2_5_vl_vision")).config.model)
    assert small.window == 2
    assert small.full_blocks == (small.depth - 1,)


def test_taps_keep_blocks_of_both_modules() -> None:
    base = job("qwen3_vl_vision").model
    rope = {"rope_type": "default", "mrope_section": [24, 20, 20]}
    text = {"model_type": "qwen3_vl_text", "num_attention_heads": 32, "num_key_value_heads": 8, "rope_parameters": rope}
    model = dataclasses.replace(
        base, projector=ProjectorConfig(kind="native"), language=LanguageConfig(config=text), encoder=base.encoder
    )
    assert vision_shape(model).taps == (8, 16, 24)
    shrunk = shrink(job(model=model, parallelism=ParallelismConfig(pipeline_parallel_degree=4))).config
    assert vision_shape(shrunk.model).taps == (0, 1, 2), "four blocks, one a rank"
    assert shrunk.data.min_pixels == 32 * 32 < shrunk.data.max_pixels == 16 * 32 * 32, "less than the family's least"
    few = fewer_blocks(model, 2)
    assert (vision_shape(few).taps, vision_shape(few).depth, language_shape(few).depth) == ((0, 1, 2), 3, 3)
    projectors = [model_spec(m).module("vision").layers[-1] for m in (model, few)]
    assert projectors[0] == projectors[1], "it is as large as that of the job"


def test_modules_are_cut_into_as_many_segments_as_before() -> None:
    model = job().model
    assert model.encoder is not None
    model = dataclasses.replace(model, language=dataclasses.replace(model.language, num_segments=3))
    big = job(model=model, parallelism=ParallelismConfig(pipeline_parallel_degree=2))
    parts, small = make_job(big).partition, make_job(shrink(big).config).partition
    assert len(small.stages) == len(parts.stages)
    assert [stage.module for stage in small.stages] == [stage.module for stage in parts.stages]


def test_a_chain_that_was_found_stays_one() -> None:
    keys = [
        "planner.hardware=h800x16",
        "planner.enable=false",
        'model.vae.config={ model_type = "autoencoder_kl_wan" }',
    ]
    big = config.load("t2v_s.toml", [*keys, "model.language.num_segments=0", "model.dit.num_segments=0"])
    assert big.planner.partition == "search"
    small = shrink(big).config
    assert (small.planner.partition, small.model.language.num_segments) == ("mixed-latency", 1)
    passes = [make_job(each).partition.passes for each in (big, small)]
    assert passes == [1, 1]
    assert shrink(small).config.planner == small.planner


def test_layouts_become_balanced_chunks() -> None:
    big = job()
    blocks = language_shape(big.model).depth
    language = dataclasses.replace(big.model.language, pipeline_layout=f"E|t*{blocks - 1}|t|L")
    big = job(
        model=dataclasses.replace(big.model, language=language),
        parallelism=ParallelismConfig(pipeline_parallel_degree=2),
    )
    assert len(make_job(shrink(big).config).partition.of_module("language")) == 4


def test_what_trains_and_what_is_masked_stays() -> None:
    model = dataclasses.replace(
        job().model,
        encoder=EncoderConfig(config={"model_type": "vit"}, trainable=False, sub_microbatch_size=16),
        projector=ProjectorConfig(trainable=False, hidden_size=4096),
        language=LanguageConfig(
            config={"model_type": "qwen2", **LANGUAGES["qwen2"]}, trainable="lora", attention_mask="prefix"
        ),
        lora=LoRAConfig(rank=64, alpha=128.0, target_modules=["q_proj"]),
    )
    small = shrink(job(model=model)).config.model
    assert small.encoder is not None
    assert (small.encoder.trainable, small.projector.trainable, small.language.trainable) == (False, False, "lora")
    assert small.language.attention_mask == "prefix"
    assert small.lora == LoRAConfig(rank=4, alpha=8.0, target_modules=["q_proj"])
    assert small.encoder.sub_microbatch_size == 2
    assert 0 < small.projector.hidden_size < 256


def test_degrees_are_lowered_only_where_there_would_be_too_many_processes() -> None:
    few = ParallelismConfig(context_parallel_degree=4, tensor_parallel_degree=2)
    assert shrink(job(parallelism=few)).notes == ()
    many = ParallelismConfig(
        data_parallel_shard_degree=8, tensor_parallel_degree=4, pipeline_parallel_degree=2
    )  # fmt: skip
    small = shrink(job(parallelism=many))
    assert small.config.parallelism.data_parallel_shard_degree == 2
    assert small.config.parallelism.tensor_parallel_degree == 2
    assert small.config.parallelism.layout.world_size == MOST_RANKS
    assert [note.split(":")[0] for note in small.notes] == [
        "parallelism.data_parallel_shard_degree 8 -> 2", "parallelism.tensor_parallel_degree 4 -> 2",
    ]  # fmt: skip
    assert small.config.training.global_batch_size % 2 == 0


def test_many_ranks_of_unequal_pipelines_become_two_shallow_ones() -> None:
    few = ParallelismConfig(pipelines=[2, 3])
    assert shrink(job(parallelism=few)).config.parallelism.pipelines == [2, 3]
    small = shrink(job(parallelism=ParallelismConfig(pipelines=[3, 4, 4])))
    assert small.config.parallelism.pipelines == [1, 2]
    assert small.notes == ("parallelism.pipelines [3, 4, 4] -> [1, 2]: the job has 11 ranks, more than 8",)


def test_microbatches_hold_two_images() -> None:
    fixed = shrink(job("siglip_vision_model")).config
    assert fixed.training.seq_len >= 2 * 24 * 24 // 4 + 256
    packed = shrink(job(data={"max_pixels": 10**6})).config
    assert packed.data.max_pixels == 16 * 28 * 28
    assert packed.data.too_long == "skip"
    assert shrink(job(None)).config.data.too_long == "truncate"
    assert shrink(job(), seq_len=64).config.training.seq_len == 64


def test_numbers_of_samples_that_small_steps_do_not_have_are_left_out() -> None:
    large = job()
    section = AssignmentConfig(policy="entrain", defer=True, samples_per_step=large.training.seq_len)
    assert shrink(dataclasses.replace(large, assignment=section)).config.assignment == AssignmentConfig(
        policy="entrain", defer=True
    )


def test_a_job_that_is_small_already_stays_as_it_is(tmp_path: Path) -> None:
    small = shrink(shrink(job()).config)
    assert small == shrink(small.config)
    path = tmp_path / "small.toml"
    path.write_text(config.dump(small.config))
    assert config.load(path) == small.config


def test_pretrained_models_keep_their_shape_alone(tmp_path: Path) -> None:
    import json

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **LANGUAGES["llama"], "torch_dtype": "x"}))
    model = ModelConfig(language=LanguageConfig(pretrained=str(tmp_path)))
    small = shrink(job(model=model)).config.model.language
    assert small.pretrained == ""
    assert small.config["num_attention_heads"] == 6
    assert "torch_dtype" not in small.config


def test_what_the_real_model_cannot_be_divided_by_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_degree = 8 does not divide"):  # 28 heads
        shrink(job(parallelism=ParallelismConfig(tensor_parallel_degree=8)))


# ------------------------------------------------------------------------------------------------ clips


def video_job(*, dit: dict[str, Any] | None = None, data: dict[str, Any] | None = None, **sections: Any) -> Config:
    model = ModelConfig(
        language=LanguageConfig(config={"model_type": "llama", **LANGUAGES["llama"]}, num_segments=1, trainable=False),
        dit=DitConfig(config={"model_type": "wan", **WAN, **(dit or {})}, num_segments=2, sub_microbatch_size=3),
    )
    return job(model=model, data=data or {}, **sections)


def test_a_dit_becomes_small_and_can_be_cut_and_divided() -> None:
    big = video_job(
        parallelism=ParallelismConfig(pipeline_parallel_degree=2, tensor_parallel_degree=4),
        diffusion=DiffusionConfig(prediction="v", caption_dropout=0.5),
        dit={"patch_size": [1, 4, 2], "cross_attn_norm": False, "eps": 1e-5, "rope_max_seq_len": 99},
    )
    small = shrink(big).config
    made = make_job(small)
    assert [module.name for module in made.spec.modules] == ["language", "dit"]
    assert made.spec.module("dit").num_params < 300_000
    assert len(made.partition.of_module("dit")) == 4
    assert len(made.partition.of_module("language")) == 2
    section, shape = small.model.dit, dit_shape(small.model)
    assert section is not None
    assert (shape.num_heads, shape.width, shape.depth) == (4, 64, 4)
    assert shape.mlp_width % 4 == 0
    assert shape.text_width == language_shape(small.model).width
    assert (shape.patch, shape.in_channels, shape.cross_norm, shape.max_positions) == ((1, 4, 2), 3, False, 99)
    assert section.config["eps"] == 1e-5
    assert section.sub_microbatch_size == 2
    assert (section.trainable, small.model.language.trainable) == (True, False)
    assert small.diffusion == big.diffusion


def test_a_dit_whose_heads_are_narrow_keeps_them() -> None:
    shape = dit_shape(shrink(video_job(dit={"attention_head_dim": 6})).config.model)
    assert shape.width // shape.num_heads == 6


def test_clips_are_few_short_and_small_and_still_of_several_buckets() -> None:
    small = shrink(video_job()).config
    assert small.model.dit is not None
    geometry = video_geometry(small.model.dit, small.data)
    assert (small.data.fps, small.data.max_clips, small.data.too_long) == (16.0, 4, "truncate")
    assert max(geometry.frames) == 64
    assert most_frames(small.data) == 128
    assert len(geometry.sizes) > 2
    most = max(geometry.num_tokens((frames, *size)) for frames in geometry.frames for size in geometry.sizes)
    assert most <= 64 * 20
    # A clip of half a second fills a shorter bucket than one of ten seconds.
    assert geometry.longest(geometry.sampled(4, 8.0)) < geometry.longest(geometry.sampled(80, 8.0))
    assert small.training.seq_len == 512, "tokens of a caption"


def test_latents_which_nobody_resizes_are_shorter() -> None:
    data = {"fps": 4.0, "max_clips": 1, "max_seconds": 10.0, "max_total_seconds": 10.0}
    small = shrink(video_job(dit={"in_channels": 16, "out_channels": 16, "patch_size": [2, 2, 2]}, data=data)).config
    assert small.model.dit is not None
    assert video_geometry(small.model.dit, small.data).frames == (8, 6, 4, 2)
    assert (small.data.fps, small.data.max_clips) == (4.0, 1)


@pytest.mark.parametrize("fps", [0.5, 1.7, 16.0, 23.976, 60.0])
def test_whatever_the_rate_there_is_a_bucket(fps: float) -> None:
    data = {"fps": fps, "max_seconds": 12.5, "video_frames": [4]}
    for channels in (3, 16):
        wide = {"patch_size": [4, 2, 2], "in_channels": channels, "out_channels": channels}
        small = shrink(video_job(dit=wide, data=data)).config
        assert small.model.dit is not None
        assert video_geometry(small.model.dit, small.data).frames[-1] == 4


def test_a_small_text_to_video_job_is_a_file_that_stays_as_it_is(tmp_path: Path) -> None:
    small = shrink(video_job()).config
    assert shrink(small).config == small
    path = tmp_path / "small.toml"
    path.write_text(config.dump(small))
    assert config.load(path) == small


@pytest.mark.parametrize("name", ["autoencoder_kl", "autoencoder_kl_wan"])
def test_a_vae_keeps_its_latents(name: str) -> None:
    vae: dict[str, Any] = {"model_type": name}
    if name == "autoencoder_kl":
        vae |= {
            "block_out_channels": [128, 256, 512, 512],
            "down_block_types": ["DownEncoderBlock2D"] * 4,
            "latent_channels": 16,
        }
    big = video_job(dit={"in_channels": 16, "out_channels": 16})
    big = dataclasses.replace(big, model=dataclasses.replace(big.model, vae=VaeConfig(config=vae)))
    small = shrink(big).config
    ours, theirs = vae_shape(small.model), vae_shape(big.model)
    assert (ours.channels, ours.scale, ours.shift, ours.factor) == (
        theirs.channels, theirs.scale, theirs.shift, theirs.factor
    )  # fmt: skip
    assert ours.num_params < theirs.num_params / 100
    assert small.model.dit and small.model.vae
    geometry = video_geometry(small.model.dit, small.data, small.model.vae)
    assert all(max(geometry.latents(frames, *size)) <= 64 for frames in geometry.frames for size in geometry.sizes)


def test_a_small_model_reads_the_same_features_without_its_source(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Of a LLaVA folder: the settings, and the activation function of its projector; the blocks behind are gone."""
    save_llava("clip, llama, full", tmp_path)
    model = job_model(tmp_path)
    big = job(model=model)
    small = shrink(big).config.model
    assert small.encoder is not None
    assert (small.encoder.pretrained, small.projector.pretrained, small.language.pretrained) == ("", "", "")
    assert (small.encoder.feature_layer, small.encoder.feature_select) == (-1, "full")
    assert small.projector.hidden_act == "relu"
    shapes = vision_shape(small), vision_shape(model)
    assert [(s.depth, s.final_norm, s.keeps_class_token) for s in shapes] == [(2, False, True)] * 2
    for few in (fewer_blocks(model, 1), fewer_blocks(small, 1)):
        assert vision_shape(few).depth == 1
        assert model_spec(few).module("vision").extra_outputs == 1


def test_a_job_whose_documents_may_be_longer_than_the_window_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sliding_window = 4096 tokens is below training.seq_len = 8192"):
        make_job(job(model=ModelConfig(language=LanguageConfig(config={"model_type": "mistral"}))))
