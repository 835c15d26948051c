"""Whole LLaVA models against jobs that take their parts: loss and every gradient, and names in stored weights."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmtrain.errors import ConfigError
from mmtrain.models.build import build_chunk
from mmtrain.models.pretrained import load_pretrained
from mmtrain.models.reference import ReferenceModel
from mmtrain.models.whole_reference import WholeModel
from mmtrain.spec.builders import model_spec
from tests.llava import LLAVAS, SPELLINGS, job_model, our_name, save_llava, their_loss
from tests.models.test_chunk import assert_equal_gradients, grads
from tests.reference import make_batch

IMAGES = [[2, 0, 1], [0, 0], [3]]
"""Of each document of three microbatches."""


@pytest.mark.parametrize("name", LLAVAS)
def test_loss_and_every_gradient_are_those_of_the_whole_class(tmp_path, name):
    theirs = save_llava(name, tmp_path)
    model = job_model(tmp_path)
    reference = ReferenceModel(model, model_spec(model), seed=0)
    batch, meta = make_batch(model, IMAGES, seed=1)
    loss = reference.loss_sum(batch, meta)
    expected = torch.stack(
        [their_loss(theirs, *pair) for pair in zip(batch.microbatches, meta.microbatches, strict=True)]
    ).sum()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    loss.backward()
    expected.backward()
    ours = {n: weight.grad for n, weight in reference.weights().items()}
    if LLAVAS[name]["text_config"].get("tie_word_embeddings"):
        assert reference.chunks["language"].shape.tied
    assert_equal_gradients(ours, {our_name(n): grad for n, grad in grads(theirs).items()})


@pytest.mark.parametrize("name", ["clip, llama", "siglip, qwen2"])
def test_the_truth_of_check_parity_is_the_whole_class(tmp_path, name):
    save_llava(name, tmp_path)
    model = job_model(tmp_path)
    spec, batch = model_spec(model), make_batch(model, IMAGES, seed=1)
    ours, theirs = ReferenceModel(model, spec, seed=0), WholeModel(model, spec, seed=0)
    for one in (ours, theirs):
        one.loss_sum(*batch).backward()
    assert_equal_gradients(*({n: w.grad for n, w in one.weights().items()} for one in (ours, theirs)))


def parts(model):
    """Name -> parameter of all modules, as they are loaded."""
    spec, found = model_spec(model), {}
    for module in spec.modules:
        chunk = build_chunk(model, spec, module.name, (0, len(module.layers)), device="cpu")
        count = load_pretrained(chunk, model)
        parameters = dict(chunk.named_parameters(remove_duplicate=False))
        assert count == len(parameters)
        found |= parameters
    return found


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", ["clip, llama", "siglip, qwen2"])
def test_each_spelling_of_the_names_is_read(tmp_path, name, spelling):
    theirs = save_llava(name, tmp_path, spelling)
    found = parts(job_model(tmp_path))
    expected = {our_name(n): p for n, p in theirs.named_parameters(remove_duplicate=False)}
    assert expected.keys() - found.keys() == {
        n for n in expected if n.startswith(("vision.post_layernorm", "vision.encoder.layers.3")) and n not in found
    }, "only what is behind the features is not loaded"
    assert all(torch.equal(parameter, expected[key]) for key, parameter in found.items())


def test_the_settings_of_the_folder_hold_unless_the_job_has_its_own(tmp_path):
    save_llava("clip, llama, full", tmp_path)
    model = job_model(tmp_path)
    vision = model_spec(model).module("vision")
    assert [layer.name for layer in vision.layers] == ["embed", "blocks.0", "blocks.1", "projector"]
    assert vision.extra_outputs == 1
    encoder = dataclasses.replace(model.encoder, feature_layer=-1, feature_select="default")
    vision = model_spec(dataclasses.replace(model, encoder=encoder)).module("vision")
    assert [layer.name for layer in vision.layers][-2:] == ["blocks.3", "projector"]
    assert vision.extra_outputs == 0


def change(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_the_whole_model_decides_whether_embeddings_are_tied(tmp_path):
    save_llava("siglip, qwen2", tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    change(tmp_path, text_config=text | {"tie_word_embeddings": False})
    found = parts(job_model(tmp_path))
    assert found["language.lm_head.weight"] is found["language.model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_feature_layer": [-2, -3]}, r"vision_feature_layer = \[-2, -3\] joins the outputs of several blocks"),
        ({"vision_feature_select_strategy": "cls"}, 'vision_feature_select_strategy = "cls"; choose one with'),
        ({"vision_feature_layer": -9}, r"feature_layer = -9, but model.encoder \(.*\) has 4 blocks; choose 1 to 4"),
        ({"projector_hidden_act": "swiglu"}, 'hidden_act = "swiglu" is no activation function'),
        ({"multimodal_projector_bias": False}, "multimodal_projector_bias = false; only projectors with biases"),
        ({"vision_config": None}, "the config.json of this llava model has no vision_config"),
        ({"text_config": {"model_type": "mamba"}}, 'model.language: model_type = "mamba" is no supported language'),
    ],
)
def test_folders_that_are_refused(tmp_path, changes, message):
    save_llava("clip, llama", tmp_path)
    change(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        model_spec(job_model(tmp_path))


def test_a_tower_without_a_class_token_has_none_to_leave_out(tmp_path):
    save_llava("siglip, qwen2", tmp_path)
    change(tmp_path, vision_feature_select_strategy="default")
    with pytest.raises(ConfigError, match=r'feature_select = "default" .*siglip_vision_model\) has none; set .*"full"'):
        model_spec(job_model(tmp_path))


def test_a_projector_of_another_kind_is_refused(tmp_path):
    save_llava("clip, llama", tmp_path)
    model = job_model(tmp_path)
    projector = dataclasses.replace(model.projector, kind="mlp")
    with pytest.raises(ConfigError, match=r'a llava model, whose projector is not of kind "mlp"; set kind = "llava"'):
        model_spec(dataclasses.replace(model, projector=projector))


@pytest.mark.parametrize(
    ("beginning", "message"),
    [
        (
            "vision_tower.",
            r"misses .*embedding.* \(no name begins with 'vision_tower.vision_model.' or 'model.vision_tow",
        ),
        (
            "multi_modal_projector.",
            r"misses linear_1.bias, .* \(no name begins with 'multi_modal_projector.' or 'model.mu",
        ),
        ("language_model.", r"misses .* \(no name begins with 'language_model.' or 'model.language_model.'\); take"),
        (
            "vision_tower.embeddings.",
            r"misses embeddings.class_embedding, .* \(among the names that begin with 'vision_to",
        ),
    ],
)
def test_weights_that_are_missing_are_named_with_the_prefix(tmp_path, beginning, message):
    save_llava("clip, llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith(beginning)}
    assert len(rest) < len(tensors)
    save_file(rest, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        parts(job_model(tmp_path))
