"""Exported folders: what Hugging Face's own classes make of them equals what our chunks make."""

import dataclasses
import json
import shutil
import tomllib
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mmtrain.checkpoint.checkpoint import Checkpointer
from mmtrain.checkpoint.run_folder import load_module, open_run
from mmtrain.commands.cli import main
from mmtrain.config import config
from mmtrain.config.config import Config
from mmtrain.config.data import DataConfig
from mmtrain.config.model import EncoderConfig, LoRAConfig, ModelConfig
from mmtrain.config.optimizer import LRSchedulerConfig
from mmtrain.config.sections import CheckpointConfig, JobConfig, ParallelismConfig, TrainingConfig
from mmtrain.data.noise_batches import noise_batch
from mmtrain.errors import CheckpointError, ConfigError
from mmtrain.export.adapter_folders import ExportForm
from mmtrain.export.folder import export
from mmtrain.local.driven_steps import timed_steps
from mmtrain.modality.bitfield import language_bits
from mmtrain.modality.metadata import DocumentMeta, MicrobatchMeta
from mmtrain.modality.probes import mixed_iteration
from mmtrain.models.adapter_weights import load_adapters
from mmtrain.models.attention.context import attention_context
from mmtrain.models.batch import head_arguments
from mmtrain.models.chunk import Chunk
from mmtrain.models.pretrained import load_pretrained
from mmtrain.spec.builders import model_spec
from mmtrain.training.trainer import Trainer
from tests.lora import with_lora
from tests.ranks import run_ranks
from tests.reference import VOCAB, model_config
from tests.stored_runs import chunks_of, save_run

TOLERANCE = 2e-6
"""Float32, relative to the largest number. Measured: 5e-7."""


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(theirs, ours, rtol=0, atol=TOLERANCE * ours.abs().max().item())


def check_loaded(model: ModelConfig, saved: Mapping[str, Chunk]) -> None:
    """A model that starts from files has exactly the parameters that were saved."""
    for name, chunk in chunks_of(model, seed=1).items():
        load_pretrained(chunk, model)
        expected = dict(saved[name].named_parameters())
        for key, parameter in chunk.named_parameters():
            assert torch.equal(parameter, expected.pop(key)), key
        assert not expected


@torch.no_grad()
def logits_of(chunk: Chunk, ids: torch.Tensor) -> torch.Tensor:
    found = []

    def predict(logits):
        found.append(logits)
        return logits.argmax(-1)

    chunk.predict = predict
    document = DocumentMeta(sample=0, num_tokens=len(ids), num_targets=0, images=())
    mask = attention_context(language_bits(MicrobatchMeta(documents=(document,))))
    given = head_arguments(torch.zeros_like(ids))
    chunk(ids, attention=mask, position_ids=torch.arange(len(ids)), **given, want_predictions=True)
    return found[0]


def language(folder: Path, adapter: Path | None = None):
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    return (theirs if adapter is None else adapted(theirs, adapter)).eval()


def adapted(theirs, adapter: Path):
    """Their module with adapters, as `peft` reads them."""
    from peft import PeftModel

    with warnings.catch_warnings():
        # peft asks a newer transformers by an old name; anything else, such as a missing key, is an error.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        return PeftModel.from_pretrained(theirs, adapter).base_model.model


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ["qwen2", "llama", "qwen3", "mistral"])
def test_a_language_model_has_the_same_logits(tmp_path, name, tied):
    chunks = save_run(tmp_path / "run", model_config(None, name, tied=tied))
    made = export(tmp_path / "run", tmp_path / "out")
    assert (made.step, made.folders) == (4, ("language",))
    ids = torch.randint(0, VOCAB, (19,), generator=torch.Generator().manual_seed(1))
    theirs = language(tmp_path / "out" / "language")
    assert type(theirs).__name__ == f"{name.capitalize()}ForCausalLM"
    close(logits_of(chunks["language"], ids), theirs(ids[None]).logits[0].detach())
    stored = load_file(tmp_path / "out" / "language" / "model.safetensors")
    assert ("lm_head.weight" in stored) == (not tied)
    settings = json.loads((tmp_path / "out" / "language" / "config.json").read_text())
    assert settings["use_cache"] is True
    assert settings["tie_word_embeddings"] is tied
    assert AutoTokenizer.from_pretrained(tmp_path / "out" / "language").encode("bars") != []


ENCODERS = [
    ("qwen2_vl_vision", "mlp"),
    ("qwen2_vl_vision", "native"),
    ("qwen2_5_vl_vision", "native"),
    ("qwen3_vl_vision", "mlp"),
    ("qwen3_vl_vision", "native"),
    ("siglip_vision_model", "mlp"),
    ("clip_vision_model", "llava"),
    ("vit", "mlp"),
    ("whisper_encoder", "mlp"),
]
_QWEN = {
    "depth": 3,
    "hidden_size": 32,
    "out_hidden_size": 48,
    "intermediate_size": 40,
    "num_heads": 4,
    "patch_size": 4,
    "temporal_patch_size": 1,
}
CONFIGS = {
    "qwen2_5_vl_vision": {
        "model_type": "qwen2_5_vl_vision",
        **_QWEN,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl_vision": {
        "model_type": "qwen3_vl_vision",
        **_QWEN,
        "num_position_embeddings": 9,
        "deepstack_visual_indexes": [0, 1],
    },
    "whisper_encoder": {
        "model_type": "whisper",
        "d_model": 32,
        "encoder_ffn_dim": 48,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "num_mel_bins": 10,
        "max_source_positions": 12,
    },
}


def encoder_model(encoder: str, projector: str, *, tied: bool = False) -> ModelConfig:
    if encoder not in CONFIGS:
        return model_config(encoder, projector=projector, tied=tied)
    section = EncoderConfig(config=CONFIGS[encoder])
    return dataclasses.replace(model_config(projector=projector, tied=tied), encoder=section)


def images(encoder: str) -> tuple[torch.Tensor, tuple[tuple[int, int, int], ...]]:
    torch.manual_seed(2)
    if encoder == "whisper_encoder":
        return torch.randn(2, 10, 24), ((1, 1, 12),) * 2
    if encoder.startswith("qwen"):
        return torch.randn(16 + 48, 48), ((1, 4, 4), (1, 6, 8))
    return torch.randn(2, 3, 16, 16), ((1, 4, 4),) * 2


@torch.no_grad()
def features_of(chunk: Chunk, pixels: torch.Tensor, grids) -> torch.Tensor:
    """What leaves the encoder before a projector of our own; tokens of a native merger."""
    found = []
    if chunk.projector is None:
        return chunk(pixels, grids=grids)
    hook = chunk.projector.register_forward_pre_hook(lambda module, args: found.append(args[0]))
    chunk(pixels, grids=grids)
    hook.remove()
    return found[0]


def vision(encoder: str, folder: Path, adapter: Path | None):
    """The encoder as Hugging Face's class reads it."""
    if encoder == "vit":
        from transformers import ViTModel

        theirs = ViTModel.from_pretrained(folder, add_pooling_layer=False)
    elif encoder == "clip_vision_model":
        from transformers import CLIPVisionModel

        theirs = CLIPVisionModel.from_pretrained(folder)
    elif encoder == "siglip_vision_model":
        from transformers import SiglipVisionModel

        theirs = SiglipVisionModel.from_pretrained(folder)
    elif encoder == "whisper_encoder":
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        theirs = WhisperEncoder.from_pretrained(folder)
    elif encoder == "qwen3_vl_vision":
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

        theirs = Qwen3VLVisionModel.from_pretrained(folder)
    elif encoder == "qwen2_5_vl_vision":
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

        theirs = Qwen2_5_VisionTransformerPretrainedModel.from_pretrained(folder)
    else:
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

        theirs = Qwen2VisionTransformerPretrainedModel.from_pretrained(folder)
    return (theirs if adapter is None else adapted(theirs, adapter)).eval()


@torch.no_grad()
def their_features(encoder: str, projector: str, theirs, pixels: torch.Tensor, grids) -> torch.Tensor:
    if encoder.startswith("qwen"):
        out = theirs(pixels, torch.tensor(grids))
        taps = out.get("deepstack_features") or []
        return torch.cat([out.pooler_output, *taps], dim=1) if projector == "native" else out.last_hidden_state
    skip = 1 if encoder in ("clip_vision_model", "vit") else 0
    return theirs(pixels).last_hidden_state[:, skip:].flatten(0, 1)


@pytest.mark.parametrize("way", ["all", "adapter", "merged"])
@pytest.mark.parametrize(("encoder", "projector"), ENCODERS)
def test_an_encoder_has_the_same_features(tmp_path, encoder, projector, way):
    model = encoder_model(encoder, projector)
    if way != "all":
        model = with_lora(model, ["encoder"])
    chunk = save_run(tmp_path / "run", model)["vision"]
    made = export(tmp_path / "run", tmp_path / "out", form=ExportForm(merge_adapters=way == "merged"), parts=True)
    folders = {"language", "vision"} | ({"projector"} if projector != "native" else set())
    assert set(made.folders) == folders | ({"vision_adapter"} if way == "adapter" else set())
    pixels, grids = images(encoder)
    adapter = tmp_path / "out/vision_adapter" if way == "adapter" else None
    theirs = vision(encoder, tmp_path / "out/vision", adapter)
    close(features_of(chunk, pixels, grids), their_features(encoder, projector, theirs, pixels, grids))


@pytest.mark.parametrize("projector", ["mlp", "native"])
def test_a_qwen_encoder_lacks_at_most_the_merger_and_its_page_says_so(tmp_path, projector):
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel as Theirs

    save_run(tmp_path / "run", model_config(projector=projector))
    export(tmp_path / "run", tmp_path / "out")
    _, found = Theirs.from_pretrained(tmp_path / "out/vision", output_loading_info=True)
    assert {name.partition(".")[0] for name in found["missing_keys"]} == ({"merger"} if projector == "mlp" else set())
    page = (tmp_path / "out/README.md").read_text()
    assert ("`from_pretrained` rightly reports its weights as missing" in page) == (projector == "mlp")


@pytest.mark.parametrize(("encoder", "projector"), ENCODERS)
def test_a_job_starts_from_an_exported_folder(tmp_path, encoder, projector):
    model = encoder_model(encoder, projector, tied=encoder == "vit")
    saved = save_run(tmp_path / "run", model)
    out = tmp_path / "out"
    export(tmp_path / "run", out, parts=True)
    again = dataclasses.replace(
        model,
        encoder=dataclasses.replace(model.encoder, config={}, pretrained=str(out / "vision")),
        language=dataclasses.replace(model.language, config={}, pretrained=str(out / "language")),
    )
    if projector != "native":
        section = dataclasses.replace(model.projector, pretrained=str(out / "projector"))
        again = dataclasses.replace(again, projector=section)
    assert model_spec(again) == model_spec(model)
    check_loaded(again, saved)


def with_sound(adapted=(), **others) -> ModelConfig:
    """A model with an encoder of images and one of sound. Args: adapted: names of encoders with adapters."""
    model = model_config("siglip_vision_model", others={"audio": "whisper_encoder"} | others)
    if adapted:
        sections = {name: dataclasses.replace(model.encoders[name], trainable="lora") for name in adapted}
        model = dataclasses.replace(model.with_modules(sections), lora=LoRAConfig(rank=3, alpha=6.0))
    return model


def exported(model: ModelConfig, out: Path) -> ModelConfig:
    """The model with all its parts from an exported folder."""
    sections = {
        name: dataclasses.replace(section, config={}, pretrained=str(out / name))
        for name, section in {**model.encoders, "language": model.language}.items()
    }
    for name in model.modules:
        projector = dataclasses.replace(model.projector_of(name), pretrained=str(out / f"{name}_projector"))
        sections[name] = dataclasses.replace(sections[name], projector=projector)
    projector = dataclasses.replace(model.projector, pretrained=str(out / "projector"))
    lora = dataclasses.replace(model.lora, pretrained=str(out) if model.lora != LoRAConfig() else "")
    return dataclasses.replace(model.with_modules(sections), projector=projector, lora=lora)


@pytest.mark.parametrize("way", ["all", "adapter", "merged"])
def test_further_encoders_have_folders_that_their_classes_and_other_jobs_read(tmp_path, way):
    model = with_sound(adapted=("audio",) if way != "all" else (), maps="vit")
    saved, out = save_run(tmp_path / "run", model), tmp_path / "out"
    made = export(tmp_path / "run", out, form=ExportForm(merge_adapters=way == "merged"))
    expected = {"language", "vision", "projector", "audio", "audio_projector", "maps", "maps_projector"}
    assert set(made.folders) == expected | ({"audio_adapter"} if way == "adapter" else set())
    adapter = out / "audio_adapter" if way == "adapter" else None
    for name, kind in {"vision": "siglip_vision_model", "audio": "whisper_encoder", "maps": "vit"}.items():
        theirs = vision(kind, out / name, adapter if name == "audio" else None)
        pixels, grids = images(kind)
        close(features_of(saved[name], pixels, grids), their_features(kind, "mlp", theirs, pixels, grids))
    if way == "merged":
        return
    again = exported(model, out)
    assert model_spec(again) == model_spec(model)
    page = tomllib.loads((out / "README.md").read_text().partition("```toml")[2].partition("```")[0])
    assert page["model"]["modules"]["audio"] == {
        "pretrained": str(out / "audio"),
        "kind": "audio",
        "projector": {
            "kind": "mlp",
            "spatial_merge": 2,
            "hidden_size": 0,
            "pretrained": str(out / "audio_projector"),
        },
    }
    for name, chunk in chunks_of(again, seed=1).items():
        load_pretrained(chunk, again)
        load_adapters(chunk, again)
        wanted = dict(saved[name].named_parameters())
        assert all(torch.equal(parameter, wanted.pop(key)) for key, parameter in chunk.named_parameters())
        assert not wanted


def step_on_noise(rank, path: Path) -> None:
    """A step of a job on noise, and its checkpoint."""
    trainer = Trainer(config.load(path))
    meta = mixed_iteration(trainer.config, 1)
    batch = noise_batch(trainer.config.model, meta, 1)
    steps = timed_steps(trainer, torch.device("cpu"), [(batch, meta)])
    next(steps)
    trainer.state = dataclasses.replace(trainer.state, step=1)
    Checkpointer(trainer.config.checkpoint, trainer.folder / "checkpoint").save(trainer.state, trainer.named())
    steps.close()


@pytest.mark.ranks
def test_a_step_between_an_import_and_an_export_is_all_that_changes(tmp_path):
    """Folders that the classes wrote -> a job of two pipeline ranks -> a step -> folders: what trained is what the
    checkpoint has, and what is frozen is to the bit what was read."""
    model = with_sound()
    save_run(tmp_path / "source", model)
    export(tmp_path / "source", tmp_path / "in")
    model = exported(model, tmp_path / "in")
    model = model.with_modules({"vision": dataclasses.replace(model.encoder, trainable=False)})
    run = tmp_path / "run"
    job = Config(
        model=model,
        data=DataConfig(source="unused"),
        job=JobConfig(dump_folder=str(run)),
        training=TrainingConfig(steps=4, seq_len=96, global_batch_size=4),
        lr_scheduler=LRSchedulerConfig(warmup_steps=0),
        parallelism=ParallelismConfig(pipeline_parallel_degree=2),
        checkpoint=CheckpointConfig(enable=True),
    )
    run.mkdir()
    (run / "config.toml").write_text(config.dump(job))
    run_ranks(step_on_noise, 2, run / "config.toml")
    export(run, tmp_path / "out")
    before, after = exported(model, tmp_path / "in"), exported(model, tmp_path / "out")
    for name in ("vision", "audio", "language"):
        old, new, stored = chunks_of(before)[name], chunks_of(after)[name], load_module(open_run(run), name)
        load_pretrained(old, before)
        load_pretrained(new, after)
        for key, parameter in new.named_parameters():
            assert torch.equal(parameter, stored.get_parameter(key)), key
            moves = old.get_parameter(key).requires_grad
            assert torch.equal(parameter, old.get_parameter(key)) != moves, key


def test_a_projector_of_other_sizes_is_refused(tmp_path):
    model = model_config()
    save_run(tmp_path / "run", model)
    export(tmp_path / "run", tmp_path / "out")
    section = dataclasses.replace(model.projector, pretrained=str(tmp_path / "out/projector"), hidden_size=20)
    model = dataclasses.replace(model, projector=section)
    chunk = chunks_of(model)["vision"]
    with pytest.raises(ConfigError, match=r"config.json says hidden_size = 128, but the config makes 20"):
        load_pretrained(chunk, model)
    (tmp_path / "out/projector/config.json").unlink()
    with pytest.raises(ConfigError, match=r"model.projector.pretrained = .*: the folder has no config.json"):
        load_pretrained(chunk, model)


def test_the_newest_or_a_named_checkpoint(tmp_path, capsys):
    run = tmp_path / "run"
    model = model_config(None)
    save_run(run, model, steps=(2, 4))
    (run / "checkpoint" / "step-9").mkdir()  # a save that was killed
    assert export(run, tmp_path / "a").step == 4
    assert main(["export", str(run), str(tmp_path / "b"), "--step", "2"]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'b'}: step 2 as language, 0.")
    for step, folder in ((4, "a"), (2, "b")):
        head = load_file(tmp_path / folder / "language" / "model.safetensors")["lm_head.weight"]
        assert torch.equal(head, chunks_of(model, seed=step)["language"].language.lm_head.weight)
        assert f"after step {step}," in (tmp_path / folder / "README.md").read_text()


@pytest.mark.parametrize(("stops", "exported"), [([7, 2], [7, 2]), (7, 2), (None, 2)])
def test_generation_settings_of_the_source_are_kept_but_for_another_stop(tmp_path, stops, exported):
    save_run(tmp_path / "first", model_config(None))
    export(tmp_path / "first", tmp_path / "source")
    settings = {"eos_token_id": stops, "temperature": 0.25, "do_sample": True}
    (tmp_path / "source/language/generation_config.json").write_text(json.dumps(settings))
    base = model_config(None)
    section = dataclasses.replace(base.language, config={}, pretrained=str(tmp_path / "source/language"))
    save_run(tmp_path / "second", dataclasses.replace(base, language=section))
    export(tmp_path / "second", tmp_path / "out")
    found = json.loads((tmp_path / "out/language/generation_config.json").read_text())
    assert found == settings | {"eos_token_id": exported}, "answers end with token 2, <|im_end|>"


def broken(run: Path, change) -> None:
    """Changes the model in a run's config."""
    job = config.load(run / "config.toml")
    (run / "config.toml").write_text(config.dump(dataclasses.replace(job, model=change(job.model))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: with_lora(m, ["language"]), "it has no model.language.model.layers.0.self_attn.q_proj.base_layer.w"),
        (lambda m: model_config("siglip_vision_model"), "is not of the model in config.toml: it has no model.vision"),
        (lambda m: model_config(None, "llama"), "this one has no model.language.model.layers.0.self_attn.k_proj.bias"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_left(tmp_path, change, message):
    save_run(tmp_path / "run", model_config(None))
    broken(tmp_path / "run", change)
    with pytest.raises(ConfigError, match=message):
        export(tmp_path / "run", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_cannot_be_exported_is_one_line(tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    save_run(run, model_config(None))
    (tmp_path / "there" / "folder").mkdir(parents=True)
    for words, message in [
        ([str(run), str(tmp_path / "there")], "there exists already"),
        ([str(tmp_path / "nothing"), str(out)], "nothing has no config.toml; name the job.dump_folder"),
        ([str(run), str(out), "--step", "3"], "--step 3: "),
        ([str(run), str(out), "--merge-adapters"], "there is nothing to merge"),
    ]:
        assert main(["export", *words]) == 2
        captured = capsys.readouterr()
        assert len(captured.err.strip().splitlines()) == 1
        assert message in captured.err
        assert not out.exists()
    (run / "checkpoint" / "step-4" / "train_state.json").unlink()
    with pytest.raises(CheckpointError, match=r"train_state\.json is missing; name another .* --step"):
        export(run, out)
    shutil.rmtree(run / "checkpoint" / "step-4")
    with pytest.raises(ConfigError, match="has no complete checkpoint"):
        export(run, out)


def test_large_weights_are_cut_into_files(tmp_path, monkeypatch):
    monkeypatch.setattr("mmtrain.export.folder.MAX_SHARD_SIZE", "40KB")
    chunks = save_run(tmp_path / "run", model_config(None))
    export(tmp_path / "run", tmp_path / "out")
    index = json.loads((tmp_path / "out/language/model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 3
    ids = torch.arange(12)
    close(logits_of(chunks["language"], ids), language(tmp_path / "out/language")(ids[None]).logits[0].detach())
