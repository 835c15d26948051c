"""Exports of jobs whose projector does not read the last block of the encoder."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file
from transformers import CLIPVisionModel, LlamaForCausalLM, SiglipVisionModel
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from mmtrain.export.adapter_folders import ExportForm
from mmtrain.export.folder import export
from mmtrain.models.initialise import init_weights
from mmtrain.models.projector import make_projector
from mmtrain.spec.builders import model_spec
from tests.export.test_folder import adapted, check_loaded, close, features_of, images
from tests.llava import job_model, save_llava
from tests.lora import with_lora
from tests.reference import model_config
from tests.stored_runs import chunks_of, save_run

PIXELS, GRIDS = images("clip_vision_model")


def is_unused(name: str) -> bool:
    return name.startswith(("post_layernorm.", "encoder.layers.3."))


@pytest.mark.parametrize("way", ["all", "adapter", "merged"])
def test_blocks_behind_the_features_are_those_of_the_source(tmp_path, way):
    source = save_llava("clip, llama", tmp_path / "llava").model.vision_tower
    model = job_model(tmp_path / "llava")
    chunk = save_run(tmp_path / "run", model if way == "all" else with_lora(model, ["encoder"]))["vision"]
    export(tmp_path / "run", tmp_path / "out", parts=True, form=ExportForm(merge_adapters=way == "merged"))
    stored = load_file(tmp_path / "out/vision/model.safetensors")
    assert stored.keys() == {name for name, _ in source.named_parameters()}
    for name, parameter in source.named_parameters():
        assert torch.equal(stored[name], parameter) == is_unused(name), name
    theirs = CLIPVisionModel.from_pretrained(tmp_path / "out/vision")
    theirs = adapted(theirs, tmp_path / "out/vision_adapter") if way == "adapter" else theirs
    with torch.no_grad():
        features = theirs.eval()(PIXELS, output_hidden_states=True).hidden_states[-2][:, 1:].flatten(0, 1)
    close(features_of(chunk, PIXELS, GRIDS), features)
    page = (tmp_path / "out/README.md").read_text()
    assert (
        f"What is behind it in the class was not trained: blocks and norms are those of `{tmp_path / 'llava'}`" in page
    )
    assert 'feature_layer = -2\nfeature_select = "default"\n[model.projector]\nkind = "llava"\n' in page


def test_without_a_source_they_are_as_they_would_start_a_job(tmp_path):
    model = model_config("siglip_vision_model", projector="llava")
    encoder = dataclasses.replace(model.encoder, feature_layer=-3)
    save_run(tmp_path / "run", dataclasses.replace(model, encoder=encoder))
    export(tmp_path / "run", tmp_path / "out", parts=True)
    theirs = dict(SiglipVisionModel.from_pretrained(tmp_path / "out/vision").named_parameters())
    (whole,) = (chunk for name, chunk in chunks_of(model).items() if name == "vision")
    init_weights(whole, seed=0)  # debug.seed
    unused = [n for n in theirs if n.startswith(("post_layernorm.", "encoder.layers.4.", "encoder.layers.5."))]
    assert len(unused) == 2 + 2 * 16
    for name, parameter in whole.vision.named_parameters():
        assert torch.equal(parameter, theirs[name]) == (name in unused) or not parameter.std() > 0, name
    assert "blocks and norms are random, as they would start a job" in (tmp_path / "out/README.md").read_text()


def test_a_job_goes_on_from_the_exported_folders(tmp_path):
    save_llava("clip, llama, full", tmp_path / "llava")
    model = job_model(tmp_path / "llava")
    saved = save_run(tmp_path / "run", model)
    out = tmp_path / "out"
    export(tmp_path / "run", out, parts=True)
    assert type(LlamaForCausalLM.from_pretrained(out / "language")).__name__ == "LlamaForCausalLM"
    again = dataclasses.replace(
        model,
        encoder=dataclasses.replace(
            model.encoder, pretrained=str(out / "vision"), feature_layer=2, feature_select="full"
        ),
        projector=dataclasses.replace(model.projector, pretrained=str(out / "projector")),
        language=dataclasses.replace(model.language, pretrained=str(out / "language")),
    )
    assert model_spec(again) == model_spec(model)
    projector = make_projector(again)
    assert isinstance(projector, LlavaMultiModalProjector)
    assert isinstance(projector.act, torch.nn.ReLU), "the activation function comes from the exported config.json"
    check_loaded(again, saved)
