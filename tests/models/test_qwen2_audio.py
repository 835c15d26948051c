"""Qwen2-Audio: rows of sounds of any length, packed, against the classes of transformers on padded windows."""

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmtrain.config import config
from mmtrain.errors import ConfigError, DataError
from mmtrain.models.build import build_chunk
from mmtrain.models.initialise import init_weights
from mmtrain.models.pretrained import load_pretrained
from mmtrain.models.reference import ReferenceModel
from mmtrain.models.spectrogram import row_patches, spectrogram_of
from mmtrain.models.whole_reference import WholeModel
from mmtrain.simulator.make_job import make_job
from mmtrain.spec.builders import model_spec
from mmtrain.spec.model_shapes import language_shape
from mmtrain.spec.module_sizes import whole_kind
from mmtrain.spec.spec import images_work
from tests.lora import fill_adapters
from tests.models.test_chunk import assert_equal_gradients
from tests.sounds import (
    FRAMES,
    TEXT,
    make_batch,
    named,
    our_name,
    spectrograms,
    their_gradients,
    tiny_whole,
    truth,
)

TOLERANCE = 2e-6
"""Float32, relative to the largest number of a tensor."""
SECONDS = (0.31, 1.0, 0.025, 0.655, 0.4)
"""Of sounds: one has an odd number of rows, one fills the window, one has the fewest rows that make a token."""


@pytest.fixture
def folder(tmp_path):
    """A saved whole model, and the model itself."""
    theirs = tiny_whole()
    theirs.save_pretrained(tmp_path)
    return tmp_path, theirs


def reference_of(model) -> ReferenceModel:
    return ReferenceModel(model, model_spec(model), seed=0)


def gradients(reference) -> dict[str, torch.Tensor]:
    return {name: weight.grad for name, weight in reference.weights().items() if weight.grad is not None}


def chunks_of(model, cuts=()):
    """The chunks of the encoder with the weights of the folder that the model names."""
    spec = model_spec(model)
    chunks = []
    for layers in itertools.pairwise([0, *cuts, len(spec.module("audio").layers)]):
        chunk = build_chunk(model, spec, "audio", layers, device="cpu")
        init_weights(chunk, 0)
        load_pretrained(chunk, model)
        chunks.append(chunk)
    return chunks


def test_patches_of_rows_are_what_the_convolutions_read():
    mel = torch.arange(1.0, 13).expand(2, 12)
    patches = row_patches(mel, 6)
    assert patches[:, ::2].tolist() == [
        [0, 0, 1, 2, 3],
        *([frame, frame + 1, frame + 2, frame + 3, frame + 4] for frame in (1, 3, 5, 7)),
        [9, 10, 11, 12, 0],
    ]
    assert torch.equal(spectrogram_of(patches, 12), mel)
    assert spectrogram_of(row_patches(mel, 4), 12)[0].tolist() == [*range(1, 10), 0, 0, 0], "what no row reads is zero"


@pytest.mark.parametrize("cuts", [(), (1, 3), (4, 5)], ids=str)
def test_packed_rows_have_the_features_and_gradients_of_the_class(folder, cuts):
    """Of real spectrograms, in which the frames behind a sound are not zero and the last row reads two of them."""
    path, theirs = folder
    mel, lengths = spectrograms(SECONDS)
    rows = [(length - 1) // 2 + 1 for length in lengths]
    assert rows == [16, 50, 2, 33, 20] and mel.shape == (5, 16, FRAMES)
    tower, projector = theirs.model.audio_tower, theirs.model.multi_modal_projector
    hidden = torch.arange(FRAMES // 2) >= torch.tensor(rows)[:, None]
    mask = torch.zeros(len(rows), 1, 1, FRAMES // 2).masked_fill(hidden[:, None, None], torch.finfo(mel.dtype).min)
    features = projector(tower(mel, attention_mask=mask).last_hidden_state)
    expected = torch.cat([found[: r // 2] for found, r in zip(features, rows, strict=True)])

    grids = tuple((1, 1, r) for r in rows)
    chunks = chunks_of(named(path), cuts)
    x = torch.cat([row_patches(*pair) for pair in zip(mel, rows, strict=True)])
    for chunk in chunks:
        x = chunk(x, grids=grids)
        assert x.shape == chunk.output_shape(images_work(chunk.module_spec, grids))
    torch.testing.assert_close(x, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())
    weight = torch.randn_like(expected)
    (x * weight).sum().backward()
    (expected * weight).sum().backward()
    found = {name: p.grad for chunk in chunks for name, p in chunk.named_parameters() if p.grad is not None}
    assert_equal_gradients(found, their_gradients(theirs), tolerance=5e-6)  # measured: 2.6e-6, of weights of keys
    assert "audio.embed_positions.weight" not in found, "they never train"


def test_loss_predictions_and_every_gradient_are_those_of_the_whole_class(folder):
    """Also of documents whose sounds follow each other, or have one token each."""
    path, theirs = folder
    reference, (batch, heard) = reference_of(named(path)), make_batch()
    expected, predictions = truth(theirs, [batch], heard)
    expected.backward()
    outputs = reference(*batch, want_predictions=True)
    loss = sum(output.loss_sum for output in outputs)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=2e-6, atol=0)
    assert [output.predictions.tolist() for output in outputs] == [found.tolist() for found in predictions]
    assert_equal_gradients(gradients(reference), their_gradients(theirs))
    ours, wanted = reference.weights(), {our_name(name): p for name, p in theirs.named_parameters()}
    assert ours.keys() == wanted.keys() and all(torch.equal(ours[name], wanted[name]) for name in wanted)


def test_frames_behind_a_sound_reach_its_last_row(folder):
    """The comparison above can tell: with zeros instead of them the loss is another one."""
    path, theirs = folder
    reference, ((batch, meta), heard) = reference_of(named(path)), make_batch()
    expected, _ = truth(theirs, [(batch, meta)], heard)
    for tensors in batch.microbatches:
        for patches in tensors.pixel_values:
            patches[-1, 4 * 16 :] = 0
    assert abs(reference.loss_sum(batch, meta) - expected) > 20 * 2e-6 * expected


def test_a_frozen_tower_leaves_the_gradients_of_the_others(folder):
    path, theirs = folder
    model = named(path, modules={"audio": {"kind": "audio", "trainable": False}})
    reference, (batch, heard) = reference_of(model), make_batch()
    loss, _ = truth(theirs, [batch], heard)
    loss.backward()
    reference.loss_sum(*batch).backward()
    wanted = {n: g for n, g in their_gradients(theirs).items() if not n.startswith("audio.")}
    assert_equal_gradients(gradients(reference), wanted)


@pytest.mark.parametrize("adapters", [False, True], ids=["all", "adapters"])
def test_the_truth_of_check_parity_is_the_whole_class(folder, adapters):
    """On our weights, adapters included."""
    path, _ = folder
    sections = {"modules": {"audio": {"kind": "audio", "trainable": "lora"}}, "language": {"trainable": "lora"}}
    model = named(path, **(sections | {"lora": {"rank": 3, "alpha": 6.0}} if adapters else {}))
    batch, _ = make_batch()
    spec = model_spec(model)
    assert whole_kind(model) == "qwen2_audio"
    ours, theirs = ReferenceModel(model, spec, seed=0), WholeModel(model, spec, seed=0)
    for one in (ours, theirs):
        for chunk in one.chunks.values():
            fill_adapters(chunk)
        one.loss_sum(*batch).backward()
    assert any(".lora_A." in name for name in gradients(ours)) == adapters
    assert_equal_gradients(gradients(ours), gradients(theirs), tolerance=5e-6)
    found, wanted = (torch.cat([o.predictions for o in m(*batch, want_predictions=True)]) for m in (ours, theirs))
    assert torch.equal(found, wanted)


def test_parts_load_from_files_with_the_names_of_todays_class(folder):
    path, theirs = folder
    tensors = load_file(path / "model.safetensors")
    assert {name.partition(".")[0] for name in tensors} == {"audio_tower", "multi_modal_projector", "language_model"}
    save_file(dict(theirs.state_dict()), path / "model.safetensors", metadata={"format": "pt"})
    ours = reference_of(named(path)).weights()
    assert all(torch.equal(ours[our_name(name)], p) for name, p in theirs.named_parameters())


def test_the_parts_of_a_whole_model_are_those_of_a_model_that_hears(folder):
    path, _ = folder
    model = named(path, modules={"ear": {"kind": "audio", "num_segments": 2}}, language={"trainable": False})
    ear = model.modules["ear"]
    assert (ear.kind, ear.token, ear.pretrained, ear.num_segments) == ("audio", "<|AUDIO|>", str(path), 2)
    assert (ear.projector.kind, ear.projector.pretrained) == ("linear", str(path))
    assert (model.encoder, model.language.pretrained) == (None, str(path))
    assert whole_kind(model) == "qwen2_audio"
    own = {"config": {**TEXT, "num_hidden_layers": 1}}
    assert named(path, language=own).language.pretrained == ""
    values = json.loads((path / "config.json").read_text())
    values["tie_word_embeddings"] = values["text_config"]["tie_word_embeddings"] = True
    (path / "config.json").write_text(json.dumps(values))
    assert not language_shape(named(path)).tied, "its class ties none"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"projector": {"kind": "mlp"}}, r"model.modules.audio.projector.spatial_merge = 2, but .* of two rows itself"),
        (
            {"projector": {"kind": "mlp", "spatial_merge": 1, "pretrained": "the folder"}},
            'qwen2_audio model, whose projector is not of kind "mlp"; set kind = "linear"',
        ),
        ({"projector": {"spatial_merge": 2}}, r'spatial_merge = 2, but kind = "linear" merges no features'),
        ({"projector": {"kind": "native", "spatial_merge": 1}}, r'kind = "native", but .* has no merger of its own'),
        ({"feature_layer": -1}, r"model.modules.audio.feature_layer = -1, but .* makes its features of rows behind"),
        ({"kind": "images", "token": ""}, r'kind = "images", but .* reads spectrograms of sound'),
    ],
)
def test_what_does_not_fit_is_refused(folder, section, message):
    path, _ = folder
    section = {"kind": "audio", "pretrained": str(path), **section}
    if "pretrained" in (projector := section.get("projector", {})):
        section["projector"] = projector | {"pretrained": str(path)}
    with pytest.raises(ConfigError, match=message):
        model_spec(named(path, modules={"audio": section}))


def test_sounds_without_a_token_or_too_long_are_refused(folder):
    path, _ = folder
    (chunk,) = chunks_of(named(path))
    for rows in (1, 51):
        with pytest.raises(DataError, match=rf"rows \(1, 1, {rows}\), but qwen2_audio_encoder takes \(1, 1, 2\) to"):
            chunk(torch.zeros(rows, 80), grids=((1, 1, rows),))
    with pytest.raises(DataError, match="a sound of 1 rows makes no token, which takes 2"):
        images_work(chunk.module_spec, [(1, 1, 1)])


def test_the_job_of_the_real_sizes_is_cut(tmp_path):
    """`configs/qwen2_audio_7b.toml` with a config.json of the sizes of Qwen2-Audio-7B; no weights."""
    text = {
        "model_type": "qwen2", "intermediate_size": 11008, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "vocab_size": 156032,
    }  # fmt: skip
    audio = {"model_type": "qwen2_audio_encoder", "encoder_layerdrop": 0.0, "scale_embedding": False}
    values = {"model_type": "qwen2_audio", "text_config": text, "audio_config": audio, "audio_token_index": 151646}
    (tmp_path / "config.json").write_text(json.dumps(values))
    job = config.load("qwen2_audio_7b.toml", [f"model.pretrained={tmp_path}", "planner.memory_limit=72GiB"])
    made = make_job(job)
    assert whole_kind(job.model) == "qwen2_audio"
    assert made.spec.num_params == pytest.approx(8.4e9, rel=2e-3), "as its card says"
    audio, norm = made.spec.module("audio"), made.spec.module("audio").layers[-2]
    ten, half = (images_work(audio, [(1, 1, rows)] * n) for rows, n in ((150, 10), (1500, 1)))
    assert (ten.outputs, ten.rows, ten.pairs) == (half.outputs, half.rows, half.pairs // 10)
    assert audio.output_shape(len(audio.layers) - 2, ten) == (750, 1280) and norm.name == "norm"
