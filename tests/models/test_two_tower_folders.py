"""Two towers from folders that transformers saved, and back into such folders."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from mmtrain.config import config
from mmtrain.config.data import TokenizerConfig
from mmtrain.config.model import ContrastConfig, EncoderConfig, LanguageConfig, ModelConfig
from mmtrain.data.tokenizer import load_tokenizer
from mmtrain.errors import ConfigError
from mmtrain.export.adapter_folders import ExportForm
from mmtrain.export.folder import export
from mmtrain.inference.answering import Answerer
from mmtrain.models.batch import IGNORE_INDEX
from mmtrain.models.pretrained import load_pretrained
from mmtrain.models.reference import ReferenceModel
from mmtrain.models.whole_reference import WholeModel
from mmtrain.simulator.shrink import shrink
from mmtrain.spec.builders import model_spec
from mmtrain.spec.job_files import check_files
from mmtrain.spec.model_shapes import language_shape
from mmtrain.spec.module_sizes import whole_kind, why_not_whole
from mmtrain.spec.vision_shapes import vision_shape
from tests.export.test_folder import adapted
from tests.lora import with_lora
from tests.models.towers import CAPTIONS, IMAGES, WHOLE, inputs_of, make_pairs, two_towers, whole_name
from tests.stored_runs import chunks_of, save_checkpoint, save_run

KINDS = ("clip", "siglip")
TOLERANCE = 1e-4
"""Of gradients, relative to the largest of each parameter. Measured: at most 3.0e-5."""
TOWERS = {
    "clip": ("CLIPVisionModelWithProjection", "CLIPTextModelWithProjection"),
    "siglip": ("SiglipVisionModel", "SiglipTextModel"),
}


def drawn(model):
    """The model with weights none of which is so small or so uniform that an error could hide behind it."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def whole_folder(kind: str, folder: Path, **text):
    """A whole model, which is saved in the folder. Args: text: changes of its captions' config."""
    make_config, make = WHOLE[kind]
    vision = {k: v for k, v in IMAGES[kind].items() if k != "projection_dim"}
    captions = {k: v for k, v in (CAPTIONS[kind] | text).items() if k != "projection_dim"}
    torch.manual_seed(0)
    width = {"projection_dim": 24} if kind == "clip" else {}
    whole = drawn(make(make_config(text_config=captions, vision_config=vision, **width)))
    whole.save_pretrained(folder)
    return whole.train()


def tower_folders(kind: str, folder: Path) -> None:
    """Both towers of the whole model in `folder / "whole"`, as their own classes save them."""
    for name, reader in zip(("vision", "text"), TOWERS[kind], strict=True):
        whole = json.loads((folder / "whole/config.json").read_text())
        values = whole[f"{name}_config"] | ({"projection_dim": 24} if kind == "clip" else {})
        make = getattr(transformers, reader)
        tower, stored = make(make.config_class(**values)), load_file(folder / "whole/model.safetensors")
        own = tower.state_dict().keys()
        weights = {key if key in own else key.removeprefix(f"{name}_model."): value for key, value in stored.items()}
        tower.load_state_dict({key: value for key, value in weights.items() if key in own})
        tower.save_pretrained(folder / name)


def job_model(kind: str, encoder: Path, language: Path, contrast: Path | str = "", **fields) -> ModelConfig:
    return ModelConfig(
        encoder=EncoderConfig(pretrained=str(encoder)),
        language=LanguageConfig(pretrained=str(language)),
        contrast=ContrastConfig(loss=kind, pretrained=str(contrast)),
        **fields,
    )


def of_whole(tmp_path: Path, folder: Path, text: str = "") -> config.Config:
    """The job of a file that names a whole folder."""
    path = tmp_path / "job.toml"
    rest = '[data]\nsource = "none"\n[training]\nsteps = 1\nseq_len = 16\nglobal_batch_size = 1\n'
    path.write_text(f'[model]\npretrained = "{folder}"\n{text}{rest}')
    return config.load(path)


def reference_of(model: ModelConfig) -> ReferenceModel:
    return ReferenceModel(model, model_spec(model), seed=0)


def assert_same(reference: ReferenceModel, whole, model: ModelConfig) -> None:
    """Values, loss and every gradient."""
    theirs = dict(whole.named_parameters())
    weights = reference.weights()
    assert {whole_name(name) for name in weights} == theirs.keys()
    assert all(torch.equal(p.reshape(theirs[whole_name(n)].shape), theirs[whole_name(n)]) for n, p in weights.items())
    batch, meta = make_pairs(model_of_sizes(model), [3, 4], seed=1)
    loss = reference.loss_sum(batch, meta)
    loss.backward()
    groups = list(zip(batch.microbatches, meta.microbatches, strict=True))
    wanted = whole(**inputs_of(groups), return_loss=True).loss * 7
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert_close({name: p.grad for name, p in weights.items()}, {n: theirs[whole_name(n)].grad for n in weights})


def assert_close(gradients: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    for name, grad in gradients.items():
        other = wanted[name].reshape(grad.shape)
        error = float((grad - other).abs().max() / (other.abs().max() + 1e-3 * largest))
        assert error < TOLERANCE, (name, error)


def model_of_sizes(model: ModelConfig) -> ModelConfig:
    """A model of the same sizes with inline configs, for its batches."""
    return two_towers(model.contrast.loss)


@pytest.mark.parametrize("way", ["towers", "whole"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_the_class_from_the_same_folder(tmp_path, kind, way):
    whole_folder(kind, tmp_path / "whole")
    model = of_whole(tmp_path, tmp_path / "whole").model
    if way == "towers":
        tower_folders(kind, tmp_path)
        model = job_model(kind, tmp_path / "vision", tmp_path / "text", tmp_path / "whole")
    check_files(model, TokenizerConfig())
    theirs = WHOLE[kind][1].from_pretrained(tmp_path / "whole").train()
    assert_same(reference_of(model), theirs, model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_folder_gives_towers_loss_tokenizer_and_processor(tmp_path, kind):
    whole_folder(kind, tmp_path / "whole")
    job, source = of_whole(tmp_path, tmp_path / "whole"), str(tmp_path / "whole")
    model = job.model
    assert (model.encoder.pretrained, model.language.pretrained, job.tokenizer.path) == (source, source, source)
    assert model.contrast == ContrastConfig(loss=kind, pretrained=source)
    assert whole_kind(model) == kind
    written = tmp_path / "written.toml"
    written.write_text(config.dump(job))
    assert config.load(written) == job
    contrast = of_whole(tmp_path, tmp_path / "whole", "[model.contrast]\nmicrobatches = 1\n").model.contrast
    assert contrast == ContrastConfig(loss=kind, pretrained=source, microbatches=1)
    other = next(name for name in KINDS if name != kind)
    new = of_whole(tmp_path, tmp_path / "whole", f'[model.contrast]\nloss = "{other}"\n').model
    assert new.contrast == ContrastConfig(loss=other), "its parameters are new"
    assert whole_kind(new) == ""
    assert f"no class for {kind}_vision_model, loss {other}, {kind}_text_model" in why_not_whole(new)


@pytest.mark.parametrize("kind", KINDS)
def test_an_encoder_of_a_language_model_comes_from_a_whole_folder(tmp_path, kind):
    theirs = whole_folder(kind, tmp_path / "whole").vision_model
    text = '[model.language]\nconfig = {model_type = "qwen2"}\n[model.projector]\nkind = "mlp"\n'
    model = of_whole(tmp_path, tmp_path / "whole", text).model
    assert model.contrast is None
    small = dataclasses.replace(model, language=LanguageConfig(config={"model_type": "qwen2", "hidden_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 8,
        "vocab_size": 16}))  # fmt: skip
    chunk = chunks_of(small)["vision"]
    load_pretrained(chunk, small)
    wanted = dict(theirs.named_parameters())
    assert all(torch.equal(value, wanted[name]) for name, value in chunk.vision.named_parameters())


@pytest.mark.parametrize("section", ["encoder", "language"])
def test_a_tower_without_its_projection_is_refused(tmp_path, section):
    whole_folder("clip", tmp_path / "whole")
    tower_folders("clip", tmp_path)
    reader, name = {"encoder": ("CLIPVisionModel", "vision"), "language": ("CLIPTextModel", "text")}[section]
    getattr(transformers, reader).from_pretrained(tmp_path / name).save_pretrained(tmp_path / "plain")
    sources = {"encoder": tmp_path / "vision", "language": tmp_path / "text"} | {section: tmp_path / "plain"}
    model = job_model("clip", **sources)
    message = rf"model.{section}.pretrained = .* has no weights of {'visual' if name == 'vision' else name}_projection"
    with pytest.raises(ConfigError, match=message):
        check_files(model, TokenizerConfig())
    with pytest.raises(ConfigError, match=message):
        reference_of(model)


def test_parameters_of_another_loss_are_refused(tmp_path):
    whole_folder("clip", tmp_path / "whole")
    whole_folder("siglip", tmp_path / "other")
    model = job_model("clip", tmp_path / "whole", tmp_path / "whole", tmp_path / "other")
    with pytest.raises(ConfigError, match='has the parameters of the loss "siglip", not of "clip"'):
        check_files(model, TokenizerConfig())


def test_an_older_config_of_clip_counts_instead(tmp_path):
    """`text_config_dict`, as the class of transformers takes it."""
    whole_folder("clip", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["text_config_dict"] = values["text_config"] | {"max_position_embeddings": 11}
    (tmp_path / "config.json").write_text(json.dumps(values))
    theirs = transformers.CLIPConfig.from_pretrained(tmp_path).text_config
    shape = language_shape(job_model("clip", tmp_path, tmp_path))
    assert shape.max_positions == theirs.max_position_embeddings == 11
    assert shape.embedding_width == 24


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_the_class_of_transformers_with_the_trained_values(tmp_path, kind):
    model = two_towers(kind)
    saved = save_run(tmp_path / "run", model)
    exported = export(tmp_path / "run", tmp_path / "out")
    assert exported.model == WHOLE[kind][1].__name__
    whole, info = WHOLE[kind][1].from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    reference = ReferenceModel(model, model_spec(model), seed=0, stored=saved.__getitem__)
    assert_same(reference, whole.train(), model)
    again = of_whole(tmp_path, tmp_path / "out").model
    assert {n: p.tolist() for n, p in reference_of(again).weights().items()} == {
        n: p.tolist() for n, p in reference.weights().items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_step_an_export_is_the_folder_it_started_from(tmp_path, kind):
    whole_folder(kind, tmp_path / "whole")
    model = of_whole(tmp_path, tmp_path / "whole").model
    save_run(tmp_path / "run", model, steps=())
    chunks = dict(reference_of(model).chunks)
    save_checkpoint(tmp_path / "run/checkpoint/step-0", model, chunks)
    export(tmp_path / "run", tmp_path / "out")
    wanted, found = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert found.keys() == wanted.keys()
    assert all(found[k].dtype == v.dtype and torch.equal(found[k], v) for k, v in wanted.items())
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("whole", "out")]
    for values in configs:
        values.pop("dtype", None)
        for part in ("text_config", "vision_config"):
            values[part].pop("projection_dim", None)  # which the whole class does not read
    assert configs[0] == configs[1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_processor_of_an_export_reads_as_training_did(tmp_path, kind):
    end = {"eos_token_id": 0} if kind == "clip" else {}
    whole_folder(kind, tmp_path / "whole", vocab_size=416, **end)
    tokenizer = load_tokenizer(TokenizerConfig(), captions=True, model=two_towers(kind))
    tokenizer.save_pretrained(tmp_path / "whole")
    job = of_whole(tmp_path, tmp_path / "whole")
    save_run(tmp_path / "run", job.model, tokenizer=job.tokenizer)
    export(tmp_path / "run", tmp_path / "out")
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "out")
    text = "a red circle above a blue square"
    assert processor.tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert processor.tokenizer.model_max_length == CAPTIONS[kind]["max_position_embeddings"]
    assert type(processor.image_processor).__name__.startswith({"clip": "CLIP", "siglip": "Siglip"}[kind])
    size = processor.image_processor.crop_size if kind == "clip" else processor.image_processor.size
    assert (size["height"], size["width"]) == (16, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_towers_with_another_loss_are_exported_one_by_one(tmp_path, kind):
    other = next(name for name in KINDS if name != kind)
    model = dataclasses.replace(two_towers(kind), contrast=ContrastConfig(loss=other))
    saved = save_run(tmp_path / "run", model)
    exported = export(tmp_path / "run", tmp_path / "out")
    assert (exported.model, exported.folders) == ("", ("contrast", "language", "vision"))
    for reader, name in zip(TOWERS[kind], ("vision", "language"), strict=True):
        _, info = getattr(transformers, reader).from_pretrained(tmp_path / "out" / name, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    again = job_model(other, *(tmp_path / "out" / name for name in ("vision", "language", "contrast")))
    check_files(again, TokenizerConfig())
    found = reference_of(again).weights()
    for chunk in saved.values():
        for name, value in chunk.named_parameters():
            assert torch.equal(found.pop(name), value), name
    assert not found


@pytest.mark.parametrize("kind", KINDS)
def test_towers_answer_no_questions(tmp_path, kind):
    save_run(tmp_path / "run", two_towers(kind))
    export(tmp_path / "run", tmp_path / "out")
    for name in ("run", "out"):
        with pytest.raises(ConfigError, match=f"{name} has two towers, which embed images and captions; name a model"):
            Answerer.of(tmp_path / name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_job_of_a_folder_has_random_towers_of_one_width(tmp_path, kind):
    """That of `mmtrain check-parity`."""
    whole_folder(kind, tmp_path / "whole")
    small = shrink(of_whole(tmp_path, tmp_path / "whole")).config.model
    assert (small.encoder.pretrained, small.language.pretrained, small.contrast.pretrained) == ("", "", "")
    assert whole_kind(small) == kind
    assert vision_shape(small).embedding_width == language_shape(small).embedding_width


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_towers_are_those_of_peft(tmp_path, kind, merged):
    model = with_lora(two_towers(kind))
    saved = save_run(tmp_path / "run", model)
    export(tmp_path / "run", tmp_path / "out", form=ExportForm(merge_adapters=merged))
    whole = WHOLE[kind][1].from_pretrained(tmp_path / "out")
    whole = whole if merged else adapted(whole, tmp_path / "out/adapter")
    reference = ReferenceModel(model, model_spec(model), seed=0, stored=saved.__getitem__)
    batch, meta = make_pairs(model, [3], seed=1)
    wanted = reference.loss_sum(batch, meta).item()
    pairs = list(zip(batch.microbatches, meta.microbatches, strict=True))
    assert 3 * whole(**inputs_of(pairs), return_loss=True).loss.item() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("microbatches", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_the_truth_of_check_parity_is_the_whole_class(kind, microbatches):
    """Also of a microbatch without pairs."""
    model = two_towers(kind, microbatches=microbatches)
    batch, meta = make_pairs(model, [3, 2, 1], seed=2)
    blank = batch.microbatches[1]
    blank.labels.fill_(IGNORE_INDEX)
    blank.pixel_values.clear()
    blank.image_names.clear()
    documents = tuple(dataclasses.replace(one, num_targets=0, images=()) for one in meta.microbatches[1].documents)
    metas = list(meta.microbatches)
    metas[1] = dataclasses.replace(metas[1], documents=documents)
    meta = dataclasses.replace(meta, microbatches=tuple(metas))
    ours, theirs = (of(model, model_spec(model), seed=0) for of in (ReferenceModel, WholeModel))
    losses = []
    for one in (ours, theirs):
        losses.append(one.loss_sum(batch, meta))
        losses[-1].backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    assert_close(*({name: p.grad for name, p in one.weights().items()} for one in (ours, theirs)))
