"""Whole vision-language models: what transformers saved, and what its whole class computes, one call a document."""

import json
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmtrain.config import config
from mmtrain.errors import ConfigError
from mmtrain.models.build import build_chunk
from mmtrain.models.initialise import init_weights
from mmtrain.models.pretrained import load_pretrained
from mmtrain.models.reference import ReferenceModel
from mmtrain.models.whole_reference import WholeModel
from mmtrain.simulator.make_job import make_job
from mmtrain.spec.builders import model_spec
from mmtrain.spec.model_shapes import language_shape
from mmtrain.spec.module_sizes import whole_kind
from tests.lora import ALPHA, RANK, fill_adapters, with_lora
from tests.models.test_chunk import assert_equal_gradients
from tests.whole_models import (
    DOCUMENTS,
    FAMILIES,
    OLDER,
    POSITIONS_A_SECOND,
    TEXT,
    VIDEO_DOCUMENTS,
    in_our_names,
    make_batch,
    named,
    their_gradients,
    tiny_whole,
    truth,
)


def reference_of(model) -> ReferenceModel:
    return ReferenceModel(model, model_spec(model), seed=0)


def gradients(reference: ReferenceModel) -> dict[str, torch.Tensor]:
    return {name: weight.grad for name, weight in reference.weights().items() if weight.grad is not None}


@pytest.mark.parametrize(
    ("family", "tied", "documents"),
    [
        *(pytest.param(f, tied, DOCUMENTS, id=f"{f}-{tied}") for f in FAMILIES for tied in (False, True)),
        *(pytest.param(f, False, VIDEO_DOCUMENTS, id=f"{f}-videos") for f in FAMILIES),
    ],
)
def test_loss_predictions_and_every_gradient_are_those_of_the_whole_class(tmp_path, family, tied, documents):
    theirs = tiny_whole(family, tied=tied)
    theirs.save_pretrained(tmp_path)
    reference, batch = (
        reference_of(named(tmp_path)),
        make_batch(documents, tokens_per_second=POSITIONS_A_SECOND[family], captioned=family not in OLDER),
    )
    expected, predictions = truth(theirs, [batch])
    expected.backward()
    outputs = reference(*batch, want_predictions=True)
    loss = sum(output.loss_sum for output in outputs)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=2e-6, atol=0)
    assert [output.predictions.tolist() for output in outputs] == [found.tolist() for found in predictions]
    wanted = their_gradients(theirs)
    assert set(reference.weights()) == set(wanted)
    assert_equal_gradients(gradients(reference), wanted)


def test_positions_along_the_text_would_be_another_model(tmp_path):
    """The comparison above can tell the two apart."""
    theirs = tiny_whole("qwen2_vl")
    theirs.save_pretrained(tmp_path)
    reference, batch = reference_of(named(tmp_path)), make_batch()
    expected, _ = truth(theirs, [batch])
    reference.position_axes = 1
    assert abs(reference.loss_sum(*batch) - expected) > 20 * 2e-6 * expected


def test_frozen_parts_leave_the_gradients_of_the_others(tmp_path):
    theirs = tiny_whole("qwen2_vl")
    theirs.save_pretrained(tmp_path)
    reference, batch = reference_of(named(tmp_path, encoder={"trainable": False})), make_batch()
    loss, _ = truth(theirs, [batch])
    loss.backward()
    reference.loss_sum(*batch).backward()
    wanted = {n: g for n, g in their_gradients(theirs).items() if not n.startswith("vision.") or ".merger." in n}
    assert_equal_gradients(gradients(reference), wanted)


def test_gradients_of_adapters_are_those_of_the_weights_that_they_change(tmp_path):
    """Of W + s B A, with dW by the whole class: dA = s B^T dW and dB = s dW A^T."""
    theirs, scale = tiny_whole("qwen2_vl"), ALPHA / RANK
    theirs.save_pretrained(tmp_path)
    reference, batch = reference_of(with_lora(named(tmp_path), ("language",))), make_batch()
    fill_adapters(reference)
    weights = reference.weights()
    merged = in_our_names(theirs, dict(theirs.named_parameters()))
    pairs = {
        name.replace(".lora_A.default", ""): (weights[name], weights[name.replace(".lora_A.", ".lora_B.")])
        for name in weights
        if ".lora_A." in name
    }
    assert len(pairs) == 7 * TEXT["num_hidden_layers"]
    with torch.no_grad():
        for name, (a, b) in pairs.items():
            merged[name].add_(scale * b @ a)
    loss, _ = truth(theirs, [batch])
    loss.backward()
    ours = reference.loss_sum(*batch)
    ours.backward()
    torch.testing.assert_close(ours, loss, rtol=2e-6, atol=0)
    wanted = their_gradients(theirs)
    expected = {f"A of {n}": scale * b.detach().T @ wanted[n] for n, (_, b) in pairs.items()}
    expected |= {f"B of {n}": scale * wanted[n] @ a.detach().T for n, (a, _) in pairs.items()}
    found = {f"A of {n}": a.grad for n, (a, _) in pairs.items()} | {f"B of {n}": b.grad for n, (_, b) in pairs.items()}
    assert_equal_gradients(found, expected)


def new_spelling(folder) -> None:
    """The names of today's classes in the file of weights."""
    tensors = load_file(folder / "model.safetensors")
    assert any(name.startswith("visual.") for name in tensors), "transformers writes the old names"
    for name in list(tensors):
        old, new = ("visual.", "model.visual.") if name.startswith("visual.") else ("model.", "model.language_model.")
        tensors[name.replace(old, new, 1)] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def flat_config(folder) -> None:
    """The config.json as it was before it had a `text_config`."""
    values = json.loads((folder / "config.json").read_text())
    text = values.pop("text_config")
    rope = text.pop("rope_parameters")
    section = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    values = {**text, **values, "rope_scaling": section, "rope_theta": rope["rope_theta"]}
    values["vision_config"]["model_type"] = values["model_type"]
    (folder / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("family", "change"),
    [
        *((family, []) for family in FAMILIES),
        *product(OLDER, ([new_spelling], [flat_config], [new_spelling, flat_config])),
    ],
)
def test_all_parts_load_from_old_and_new_files(tmp_path, family, change):
    theirs = tiny_whole(family)
    theirs.save_pretrained(tmp_path)
    for apply in change:
        apply(tmp_path)
    model = named(tmp_path)
    spec, found = model_spec(model), {}
    for module in ("vision", "language"):
        end = len(spec.module(module).layers)
        for layers in ((0, 2), (2, end)):
            chunk = build_chunk(model, spec, module, layers, device="cpu")
            init_weights(chunk, 0)
            assert load_pretrained(chunk, model) == len(list(chunk.parameters()))
            found |= dict(chunk.named_parameters())
            if module == "language":
                assert torch.equal(
                    chunk.language.model.rotary_emb.inv_freq, theirs.model.language_model.rotary_emb.inv_freq
                )
    wanted = in_our_names(theirs, dict(theirs.named_parameters()))
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("family", "outer", "inner", "tied"),
    [
        ("qwen2_vl", True, False, True),
        ("qwen2_vl", False, True, True),
        ("qwen2_vl", False, False, False),
        ("qwen3_vl", True, False, True),
        ("qwen3_vl", False, True, False),
    ],
)
def test_the_whole_model_says_whether_its_head_is_tied(tmp_path, family, outer, inner, tied):
    tiny_whole(family).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["tie_word_embeddings"], values["text_config"]["tie_word_embeddings"] = outer, inner
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert language_shape(named(tmp_path)).tied == tied


def test_missing_weights_say_where_they_were_looked_for(tmp_path):
    tiny_whole("qwen2_vl").save_pretrained(tmp_path)
    new_spelling(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.language_model.layers.1.mlp.up_proj.weight"], tensors["model.visual.merger.ln_q.bias"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = named(tmp_path)
    spec = model_spec(model)
    for module, message in {
        "language": r"model.language.pretrained = .*: the checkpoint misses model.layers.1.mlp.up_proj.weight "
        r"\(among the names that begin with 'model.language_model.'\); take config.json and weights from one folder",
        "vision": r"misses merger.ln_q.bias \(among the names that begin with 'model.visual.'\);",
    }.items():
        chunk = build_chunk(model, spec, module, (0, len(spec.module(module).layers)), device="cpu")
        with pytest.raises(ConfigError, match=message):
            load_pretrained(chunk, model)


def test_a_part_may_be_replaced(tmp_path):
    tiny_whole("qwen2_vl").save_pretrained(tmp_path)
    own = {"config": {**TEXT, "model_type": "qwen2_vl_text", "num_hidden_layers": 1}}
    model = named(tmp_path, language=own, projector={"trainable": False})
    assert (model.language.pretrained, model.encoder.pretrained) == ("", str(tmp_path))
    assert (model.projector.kind, model.projector.trainable) == ("native", False)
    assert reference_of(model).loss_sum(*make_batch()) > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("adapters", [False, True], ids=["all", "adapters"])
def test_the_truth_of_check_parity_is_the_whole_class(tmp_path, family, adapters):
    """On our weights, adapters included; also for images without text between them."""
    tiny_whole(family, tied=not adapters).save_pretrained(tmp_path)
    model = named(tmp_path)
    model = with_lora(model) if adapters else model
    documents = (*DOCUMENTS, *VIDEO_DOCUMENTS, ((1, (2, 4), (6, 4), (2, 2, 2), (3, 4, 2), 3),))
    captioned = family not in OLDER
    batch = make_batch(documents, tokens_per_second=POSITIONS_A_SECOND[family], captioned=captioned)
    spec = model_spec(model)
    assert whole_kind(model) == family
    ours, theirs = ReferenceModel(model, spec, seed=0), WholeModel(model, spec, seed=0)
    for one in (ours, theirs):
        for chunk in one.chunks.values():
            fill_adapters(chunk)
        loss = one.loss_sum(*batch)
        loss.backward()
    assert_equal_gradients(
        gradients(ours), gradients(theirs), tolerance=5e-6
    )  # measured: 2.1e-6, as W + B A is rounded
    found, wanted = (torch.cat([o.predictions for o in m(*batch, want_predictions=True)]) for m in (ours, theirs))
    assert torch.equal(found, wanted)


def test_only_parts_of_one_whole_model_have_a_class_of_their_own(tmp_path):
    tiny_whole("qwen2_vl").save_pretrained(tmp_path)
    text = {"config": {**TEXT, "model_type": "qwen2_5_vl_text"}}
    for sections in ({"projector": {"kind": "mlp"}}, {"language": text}, {"language": {"attention_mask": "prefix"}}):
        assert whole_kind(named(tmp_path, **sections)) == ""
    assert whole_kind(named(tmp_path)) == "qwen2_vl"


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(
            ["planner.partition=dip", "planner.placement=spread", "parallelism.vocabulary_parallel=tensor"], id="dip"
        ),
        pytest.param([], id="search", marks=pytest.mark.nightly),
    ],
)
def test_the_job_of_the_real_sizes_is_cut(tmp_path, cut):
    """`configs/qwen3_vl_8b.toml` with a config.json of the sizes of Qwen3-VL-8B; no weights."""
    rope = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]}
    text = {
        "model_type": "qwen3_vl_text", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "rope_scaling": rope, "rope_theta": 5000000, "max_position_embeddings": 262144,
    }  # fmt: skip
    vision = {"model_type": "qwen3_vl", "out_hidden_size": 4096, "depth": 27}
    values = {"model_type": "qwen3_vl", "text_config": text, "vision_config": vision, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(values))
    size = {"longest_edge": 16777216, "shortest_edge": 65536}
    processor = {"size": size, "patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "merge_size": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    sources = [f"model.pretrained={tmp_path}", f"data.image_processor={tmp_path}"]
    job = config.load("qwen3_vl_8b.toml", [*sources, "planner.memory_limit=72GiB", *cut])
    made = make_job(job)
    assert whole_kind(job.model) == "qwen3_vl"
    assert made.spec.num_params == pytest.approx(8.77e9, rel=1e-3), "as its card says"
    assert made.spec.module("vision").carried == (*[0] * 9, *[1] * 8, *[2] * 8, *[3] * 3, 0)
    assert {stage.pp_rank for stage in made.partition.stages if stage.module == "vision"} == {0, 1, 2, 3}
