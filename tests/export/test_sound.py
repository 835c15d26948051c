"""One folder of a trained Qwen2-Audio: what transformers reads from it, and what the next job does."""

import json

import numpy as np
import pytest
import torch
import transformers

from mmtrain.config.config import TokenizerConfig
from mmtrain.export.adapter_folders import ExportForm
from mmtrain.export.folder import export
from mmtrain.inference.answering import Answerer, Sampling, asked
from mmtrain.models.reference import ReferenceModel
from mmtrain.spec.builders import model_spec
from tests.data.sound_files import wav
from tests.export.test_folder import adapted, close
from tests.models.test_chunk import assert_equal_gradients
from tests.sounds import (
    RATE,
    extractor,
    make_batch,
    named,
    our_name,
    save_whole,
    their_gradients,
    truth,
    wave,
)
from tests.stored_runs import save_run


@pytest.fixture
def whole(tmp_path):
    """The folder of a whole model as one is published: weights, tokenizer, feature extractor, settings."""
    folder = tmp_path / "whole"
    save_whole(folder)
    (folder / "generation_config.json").write_text('{"top_k": 7}')
    return folder


def saved(folder, run, model, **sections):
    return save_run(run, model, tokenizer=TokenizerConfig(path=str(folder)), **sections)


def reader(folder):
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    assert name == "Qwen2AudioForConditionalGeneration"
    read = transformers.Qwen2AudioForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    model, info = read
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.train()


@pytest.mark.parametrize("extracts", [True, False], ids=["its extractor", "no extractor"])
def test_transformers_reads_the_trained_model_and_its_processor(tmp_path, whole, extracts):
    if not extracts:
        (whole / "preprocessor_config.json").unlink()
    chunks = saved(whole, tmp_path / "run", named(whole))
    made = export(tmp_path / "run", tmp_path / "out")
    assert (made.model, made.folders) == ("Qwen2AudioForConditionalGeneration", ())
    theirs = reader(tmp_path / "out")
    ours = {name: p for chunk in chunks.values() for name, p in chunk.named_parameters()}
    stored = {our_name(name): p for name, p in theirs.named_parameters()}
    assert ours.keys() == stored.keys() and all(torch.equal(ours[name], stored[name]) for name in ours)
    processor = transformers.Qwen2AudioProcessor.from_pretrained(tmp_path / "out")
    assert theirs.config.audio_token_id == processor.audio_token_id
    sound = wave(0.4, 1)
    inputs = processor(text="<|audio_bos|><|AUDIO|><|audio_eos|>what?", audio=sound, sampling_rate=RATE)
    assert inputs["input_ids"][0].count(processor.audio_token_id) == 10
    wanted = extractor()(sound, sampling_rate=RATE, return_tensors="pt")["input_features"]
    torch.testing.assert_close(torch.as_tensor(inputs["input_features"]), wanted)
    settings = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert settings == {"top_k": 7, "eos_token_id": 2}, "answers end with token 2, <|im_end|>"


def test_the_next_job_starts_where_the_folder_ends(tmp_path, whole):
    """Weights, loss and every gradient: of the job, and of the class that reads the folder."""
    chunks = saved(whole, tmp_path / "run", named(whole, language={"trainable": False}))
    export(tmp_path / "run", tmp_path / "out")
    model = named(tmp_path / "out")
    again, (batch, heard) = ReferenceModel(model, model_spec(model), seed=9), make_batch()
    weights = again.weights()
    for chunk in chunks.values():
        assert all(torch.equal(weights[name], parameter) for name, parameter in chunk.named_parameters())
    theirs = reader(tmp_path / "out")
    expected, _ = truth(theirs, [batch], heard)
    expected.backward()
    loss = again.loss_sum(*batch)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=2e-6, atol=0)
    found = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
    wanted = their_gradients(theirs)
    del wanted["audio.embed_positions.weight"]  # its class keeps them fixed, but `from_pretrained` forgets it
    assert_equal_gradients(found, wanted, tolerance=1e-5)  # measured: 5.1e-6, of weights of queries


def test_names_are_those_that_the_weights_were_loaded_with(tmp_path, whole):
    from safetensors.torch import load_file, save_file

    saved(whole, tmp_path / "run", named(whole))
    export(tmp_path / "run", tmp_path / "out")
    as_saved = load_file(whole / "model.safetensors").keys()
    assert load_file(tmp_path / "out/model.safetensors").keys() == as_saved
    of_class = dict(transformers.Qwen2AudioForConditionalGeneration.from_pretrained(whole).state_dict())
    save_file(of_class, whole / "model.safetensors", metadata={"format": "pt"})
    export(tmp_path / "run", tmp_path / "renamed")
    assert load_file(tmp_path / "renamed/model.safetensors").keys() == of_class.keys() != as_saved


def test_adapters_are_one_folder_for_peft_or_in_the_weights(tmp_path, whole):
    sections = {"modules": {"audio": {"kind": "audio", "trainable": "lora"}}, "language": {"trainable": "lora"}}
    model = named(whole, **sections, lora={"rank": 3, "alpha": 6.0})
    saved(whole, tmp_path / "run", model)
    export(tmp_path / "run", tmp_path / "out")
    export(tmp_path / "run", tmp_path / "merged", form=ExportForm(merge_adapters=True))
    batch, heard = make_batch()
    with torch.no_grad():
        plain, _ = truth(reader(tmp_path / "out"), [batch], heard)
        merged, _ = truth(reader(tmp_path / "merged"), [batch], heard)
        peft = adapted(reader(tmp_path / "out"), tmp_path / "out/adapter")
        found, _ = truth(peft, [batch], heard)
    close(found, merged)
    assert abs(plain - merged) > 0.1, "adapters that change nothing would pass"


def test_the_run_and_its_folder_answer_as_the_class_does(tmp_path, whole):
    saved(whole, tmp_path / "run", named(whole))
    export(tmp_path / "run", tmp_path / "out")
    samples = np.rint(wave(0.4, 1) * 32767) / 32768
    (tmp_path / "a.wav").write_bytes(wav(wave(0.4, 1)))
    record, sampling = asked("what?", [], [], [tmp_path / "a.wav"]), Sampling(max_new_tokens=6)
    run, folder = (Answerer.of(tmp_path / name) for name in ("run", "out"))
    theirs = reader(tmp_path / "out").eval()
    processor = transformers.Qwen2AudioProcessor.from_pretrained(tmp_path / "out")
    marks = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    text = folder.tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{marks}what?"}], tokenize=False, add_generation_prompt=True
    )
    inputs = processor(text=text, audio=samples, sampling_rate=RATE, return_tensors="pt")
    assert torch.equal(inputs["input_ids"], folder.inputs(record)["input_ids"])
    tokens = theirs.generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=folder._stop, top_k=None)
    wanted = processor.tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    assert run.answer(record, sampling) == folder.answer(record, sampling) == wanted
    silent = folder.blanked(images=False, audio=True).answer(record, sampling)
    assert silent != wanted, "the sound matters"
