"""Small training jobs for tests: a config, data, and rank functions that run a real Trainer."""

import json
import math
import os
import signal
from pathlib import Path

import pytest

from mmtrain.config import config
from mmtrain.config.config import Config
from tests.ranks import run_ranks
from tests.store import stored_folder

TEMPLATE = """
[job]
dump_folder = "{folder}/run"
[model.encoder]
config = {{ model_type = "qwen2_vl_vision", depth = 4, embed_dim = 32, hidden_size = 48, num_heads = 4, mlp_ratio = 2, patch_size = 14, temporal_patch_size = 1, in_channels = 3, spatial_merge_size = 2 }}
num_segments = 1
sub_microbatch_size = 3
[model.language]
config = {{ model_type = "qwen2", hidden_size = 48, intermediate_size = 64, num_hidden_layers = 4, num_attention_heads = 4, num_key_value_heads = 2, vocab_size = 768, max_position_embeddings = 512, tie_word_embeddings = true }}
num_segments = 1
[data]
source = "{data}"
num_workers = 0
[training]
steps = 6
seq_len = 256
global_batch_size = 4
[optimizer]
lr = 3e-3
[lr_scheduler]
warmup_steps = 2
[metrics]
enable_tensorboard = false
peak_flops = 1e11
[checkpoint]
enable = false
keep_latest_k = 0
[debug]
seed = 3
deterministic = true
check_plans = true
"""  # noqa: E501


def write_config(folder: Path, data: Path) -> Path:
    """A job in `folder` on the charts in `data`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.toml"
    path.write_text(TEMPLATE.format(folder=folder, data=data))
    return path


SOUND = """
[model.modules.audio]
kind = "audio"
config = { model_type = "whisper_encoder", d_model = 32, encoder_ffn_dim = 48, encoder_layers = 2, encoder_attention_heads = 4, num_mel_bins = 10, max_source_positions = 12 }
num_segments = 1
[model.modules.audio.projector]
spatial_merge = 2
[data]
"""  # noqa: E501


def write_sound_config(folder: Path, data: Path) -> Path:
    """The same with a second encoder, of sound of 6 tokens."""
    path = write_config(folder, data)
    path.write_text(path.read_text().replace("\n[data]\n", SOUND))
    return path


VIDEO_TEMPLATE = """
[job]
dump_folder = "{folder}/run"
[model.language]
config = {{ model_type = "llama", hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2, num_attention_heads = 4, num_key_value_heads = 2, vocab_size = 416, max_position_embeddings = 128 }}
num_segments = 1
[model.dit]
config = {{ model_type = "wan", patch_size = [2, 4, 4], num_layers = 2, num_attention_heads = 2, attention_head_dim = 16, ffn_dim = 48, in_channels = 3, out_channels = 3, text_dim = 32, freq_dim = 16, rope_max_seq_len = 32 }}
num_segments = 1
sub_microbatch_size = 2
[diffusion]
caption_dropout = 0.25
[data]
source = "{data}"
num_workers = 0
fps = 8.0
max_seconds = 1.0
max_total_seconds = 3.0
max_clips = 4
video_area = 576
[training]
steps = 6
seq_len = 96
global_batch_size = 4
[optimizer]
lr = 3e-3
[lr_scheduler]
warmup_steps = 2
[metrics]
enable_tensorboard = false
peak_flops = 1e11
[checkpoint]
enable = false
keep_latest_k = 0
[debug]
seed = 3
deterministic = true
check_plans = true
"""  # noqa: E501


def write_video_config(folder: Path, data: Path) -> Path:
    """A text-to-video job in `folder` on the clips in `data`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.toml"
    path.write_text(VIDEO_TEMPLATE.format(folder=folder, data=data))
    return path


def video_config(folder: Path, *overrides: str, channels: int = 3) -> Config:
    """The same job as a value, on data that do not exist: pixels, or latents of another number of channels."""
    kinds = [f"--model.dit.config.{key}={channels}" for key in ("in_channels", "out_channels")]
    return config.load(write_video_config(folder, folder / "nowhere"), [*kinds, *overrides])


VAE = """[model.vae]
config = { model_type = "autoencoder_kl", block_out_channels = [8, 8], down_block_types = ["DownEncoderBlock2D", "DownEncoderBlock2D"], up_block_types = ["UpDecoderBlock2D", "UpDecoderBlock2D"], norm_num_groups = 4 }
[diffusion]
"""  # noqa: E501


def write_vae_config(folder: Path, data: Path) -> Path:
    """The same with a VAE that makes latents of 4 channels, a quarter of the places."""
    path = write_video_config(folder, data)
    text = path.read_text().replace("in_channels = 3, out_channels = 3", "in_channels = 4, out_channels = 4")
    path.write_text(text.replace("[diffusion]\n", VAE))
    return path


def train(rank: int, path: Path, overrides: list[str]) -> None:
    """Runs one rank of a job inside of `run_ranks`."""
    from mmtrain.training.trainer import Trainer

    Trainer(config.load(path, overrides)).run()


def failing(rank: int, path: Path, overrides: list[str], error: type[Exception]) -> str:
    """What a job says that ends with an error."""
    with pytest.raises(error) as caught:
        train(rank, path, overrides)
    return str(caught.value)


def finished(data: Path, world: int, overrides: list[str]) -> Path:
    """The folder of a job that ran to its end undisturbed: to be read, not changed. Run once in a run of the tests."""

    def run(folder: Path) -> None:
        run_ranks(train, world, write_config(folder, data), overrides)

    return stored_folder(repr((TEMPLATE, data, world, overrides)), run)


def die_at(step: int) -> None:
    """This rank is killed without warning in the middle of a step."""
    from mmtrain.training.trainer import Trainer

    original = Trainer.backward

    def backward(self, number, item, plan):
        if number == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, number, item, plan)

    Trainer.backward = backward


def layout(pp: int = 1, shard: int = 1, replicate: int = 1, cp: int = 1, tp: int = 1) -> list[str]:
    """Overrides of the degrees."""
    return [
        f"parallelism.pipeline_parallel_degree={pp}",
        f"parallelism.data_parallel_shard_degree={shard}",
        f"parallelism.data_parallel_replicate_degree={replicate}",
        f"parallelism.context_parallel_degree={cp}",
        f"parallelism.tensor_parallel_degree={tp}",
    ]


def world_size(degrees: list[str]) -> int:
    """The number of ranks that overrides of `layout` ask for."""
    return math.prod(int(degree.split("=")[1]) for degree in degrees)


SHALLOW = ("model.encoder.config.depth=2", "model.language.config.num_hidden_layers=2")
"""For the sake of time: most of it goes into the collectives of tensor-parallel ranks in each block."""
SAVING = [*layout(pp=2), *SHALLOW, "checkpoint.enable=true", "checkpoint.interval=2"]
"""A job of two ranks that saves steps 2, 4 and 6."""


def metrics(folder: Path, key: str = "loss") -> dict[int, float]:
    """step -> value, as metrics.jsonl of the run in `folder` has it."""
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "event" not in line]
    steps = [line["step"] for line in lines if key in line]
    assert len(steps) == len(set(steps)), "a step was written twice"
    return {line["step"]: line[key] for line in lines if key in line}
