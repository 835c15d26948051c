"""Exported text-to-video models: the whole classes of transformers and diffusers make of them what our chunks make."""

import dataclasses
import json
import re
import tomllib
import warnings
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaModel, Qwen2Config

from mmtrain.config.data import DiffusionConfig
from mmtrain.config.model import LanguageConfig, ModelConfig
from mmtrain.export.adapter_folders import ExportForm
from mmtrain.export.folder import export
from mmtrain.models.attention.context import attention_context
from mmtrain.models.chunk import Chunk
from mmtrain.models.pretrained import load_pretrained
from mmtrain.spec.builders import model_spec
from tests.lora import with_lora
from tests.models.dits import TEXT, Clips, t2v
from tests.models.test_dit import causal_bits
from tests.stored_runs import chunks_of, save_run

TOLERANCE = 2e-6
"""Float32, relative to the largest number. Measured: 6e-7."""


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(theirs, ours, rtol=0, atol=TOLERANCE * ours.abs().max().item())


@torch.no_grad()
def states_of(chunk: Chunk, ids: Tensor) -> Tensor:
    """What the text encoder makes of one prompt."""
    found: Tensor = chunk(
        ids, attention=attention_context(causal_bits((len(ids),))), position_ids=torch.arange(len(ids))
    )
    return found


@torch.no_grad()
def predictions_of(chunk: Chunk, clips: Clips, states: Tensor) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = chunk(
        clips.latents, **clips.common, features=states, timesteps=clips.timesteps, want_predictions=True
    ).predictions
    return found


def text_encoder(folder: Path, adapter: Path | None = None) -> Any:
    theirs = AutoModel.from_pretrained(folder)
    if adapter is not None:
        from peft import PeftModel

        with warnings.catch_warnings():
            # peft asks a newer transformers by an old name; anything else, such as a missing key, is an error.
            warnings.filterwarnings(
                "ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning
            )
            theirs = PeftModel.from_pretrained(theirs, adapter).base_model.model
    return theirs.eval()


def video_model(name: str = "qwen2", *, tied: bool = False) -> ModelConfig:
    return t2v(text={"model_type": name, "tie_word_embeddings": tied})


def from_folders(out: Path) -> ModelConfig:
    """The model whose weights are those of an exported folder, as its page says."""
    (text,) = re.findall(r"```toml\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)
    model = tomllib.loads(text)["model"]
    base = t2v()
    return dataclasses.replace(
        base,
        language=LanguageConfig(**model["language"]),
        dit=dataclasses.replace(base.dit, config={}, **model["dit"]),  # type: ignore[type-var]
    )


@pytest.mark.parametrize(("name", "tied"), [("qwen2", False), ("qwen2", True), ("llama", False)])
def test_the_whole_classes_make_of_it_what_the_chunks_make(tmp_path: Path, name: str, tied: bool) -> None:
    model = video_model(name, tied=tied)
    chunks = save_run(tmp_path / "run", model)
    made = export(tmp_path / "run", tmp_path / "out")
    assert (made.step, made.folders) == (4, ("dit", "language", "scheduler"))
    text = text_encoder(tmp_path / "out/language")
    assert type(text).__name__ == {"qwen2": "Qwen2Model", "llama": "LlamaModel"}[name]
    assert json.loads((tmp_path / "out/language/config.json").read_text())["architectures"] == [type(text).__name__]
    dit = diffusers.WanTransformer3DModel.from_pretrained(tmp_path / "out/dit").eval()
    clips = Clips.draw(model)
    with torch.no_grad():
        theirs = [text(ids[None]).last_hidden_state for ids in clips.ids.split(clips.text_lengths)]
        outputs = [
            dit(latents[None], torch.tensor([time]), state, return_dict=False)[0][0]
            for latents, time, state in zip(clips.latents, clips.timesteps, theirs, strict=True)
        ]
    states = torch.cat([states_of(chunks["language"], ids) for ids in clips.ids.split(clips.text_lengths)])
    close(states, torch.cat(theirs, 1)[0])
    for mine, other in zip(predictions_of(chunks["dit"], clips, states), outputs, strict=True):
        close(mine, other)
    assert AutoTokenizer.from_pretrained(tmp_path / "out/language").encode("a red circle") != []


@pytest.mark.parametrize(("name", "tied"), [("qwen2", False), ("llama", True)])
def test_a_job_starts_from_the_exported_folders(tmp_path: Path, name: str, tied: bool) -> None:
    model = video_model(name, tied=tied)
    saved = save_run(tmp_path / "run", model)
    export(tmp_path / "run", tmp_path / "out")
    again = from_folders(tmp_path / "out")
    assert model_spec(again) == model_spec(model)
    for module, chunk in chunks_of(again, seed=1).items():
        num_loaded = load_pretrained(chunk, again)
        expected = dict(saved[module].named_parameters())
        assert num_loaded == len(expected) > 10
        for key, parameter in chunk.named_parameters():
            assert torch.equal(parameter, expected.pop(key)), key
        assert not expected


def test_adapters_of_the_text_encoder_beside_the_weights_and_merged_into_them(tmp_path: Path) -> None:
    chunk = save_run(tmp_path / "run", with_lora(t2v(), ["language"]))["language"]
    ids = torch.arange(19)
    ours = states_of(chunk, ids)
    made = export(tmp_path / "run", tmp_path / "out")
    assert made.folders == ("dit", "language", "language_adapter", "scheduler")
    adapted = text_encoder(tmp_path / "out/language", tmp_path / "out/language_adapter")
    close(ours, adapted(ids[None]).last_hidden_state[0].detach())
    base = text_encoder(tmp_path / "out/language")(ids[None]).last_hidden_state[0].detach()
    assert (base - ours).abs().max() > 100 * TOLERANCE * ours.abs().max(), "the adapters matter"
    assert "language_adapter/" in (tmp_path / "out/README.md").read_text()
    made = export(tmp_path / "run", tmp_path / "merged", form=ExportForm(merge_adapters=True))
    assert made.folders == ("dit", "language", "scheduler")
    close(ours, text_encoder(tmp_path / "merged/language")(ids[None]).last_hidden_state[0].detach())


@pytest.mark.parametrize(
    ("section", "name", "values"),
    [
        (DiffusionConfig(shift=3.0), "FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
        (DiffusionConfig(prediction="epsilon"), "DDIMScheduler", {"prediction_type": "epsilon"}),
        (DiffusionConfig(prediction="v"), "DDIMScheduler", {"prediction_type": "v_prediction"}),
    ],
)
def test_the_scheduler_is_that_of_the_training(
    tmp_path: Path, section: DiffusionConfig, name: str, values: dict[str, Any]
) -> None:
    save_run(tmp_path / "run", t2v(in_channels=3), diffusion=section)
    export(tmp_path / "run", tmp_path / "out")
    found = getattr(diffusers, name).from_pretrained(tmp_path / "out/scheduler")
    for key, value in {**values, "num_train_timesteps": 1000}.items():
        assert found.config[key] == value
    page = (tmp_path / "out/README.md").read_text()
    assert f"`diffusers.{name}.from_pretrained` reads it" in page
    assert "Its latents are pixels from -1 to 1." in page
    assert "no caption is token 0, as often as the caption has tokens" in page


def test_large_weights_are_cut_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmtrain.export.folder.MAX_SHARD_SIZE", "40KB")
    saved = save_run(tmp_path / "run", t2v())
    export(tmp_path / "run", tmp_path / "out")
    for folder, stem in (("language", "model"), ("dit", "diffusion_pytorch_model")):
        index = json.loads((tmp_path / "out" / folder / f"{stem}.safetensors.index.json").read_text())["weight_map"]
        assert len(set(index.values())) > 1
    again = from_folders(tmp_path / "out")
    for module, chunk in chunks_of(again, seed=1).items():
        load_pretrained(chunk, again)
        for key, parameter in saved[module].named_parameters():
            assert torch.equal(parameter, chunk.get_parameter(key)), key


@pytest.mark.parametrize("headless", [True, False], ids=["without head", "with head"])
def test_a_text_encoder_is_read_from_either_class(tmp_path: Path, headless: bool) -> None:
    """Pipelines of diffusers hold text encoders of both kinds."""
    torch.manual_seed(0)
    values = {key: value for key, value in TEXT.items() if key != "model_type"}
    if headless:
        theirs: Any = LlamaModel(LlamaConfig(**values))
    else:
        theirs = AutoModelForCausalLM.from_config(Qwen2Config(**values))
    theirs.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert ("layers.0.mlp.up_proj.weight" in stored) == headless
    model = dataclasses.replace(t2v(), language=LanguageConfig(pretrained=str(tmp_path)))
    chunk = chunks_of(model)["language"]
    assert load_pretrained(chunk, model) == len(list(chunk.parameters()))
    for name, parameter in chunk.named_parameters():
        assert torch.equal(
            parameter, theirs.get_parameter(name.removeprefix("language.model." if headless else "language."))
        )
