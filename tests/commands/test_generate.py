"""`mmtrain generate` of runs that no class of transformers holds: their parts, joined by hand, say the same."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, SiglipVisionModel, WhisperFeatureExtractor
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from mmtrain.checkpoint.run_folder import open_run
from mmtrain.commands.cli import main
from mmtrain.config.data import TokenizerConfig
from mmtrain.config.model import EncoderConfig, ModelConfig, ProjectorConfig
from mmtrain.data.tokenizer import load_tokenizer
from mmtrain.errors import ConfigError
from mmtrain.export.folder import export
from mmtrain.inference import answering
from mmtrain.inference.answering import Answerer, Sampling, asked
from mmtrain.models.projector import make_projector
from tests import sounds
from tests.data.sound_files import WHISPER, noise, tone, wav
from tests.reference import model_config
from tests.stored_runs import save_checkpoint, save_run

NUM_TOKENS = 6


def speaking(encoder: str | None) -> ModelConfig:
    """A model whose vocabulary holds the tokenizer's."""
    model = model_config(encoder, "llama", projector="llava" if encoder else "mlp")
    text = model.language.config | {"vocab_size": 450, "max_position_embeddings": 512}
    return model.with_modules({"language": dataclasses.replace(model.language, config=text)})


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a run with images of 16 tokens and sounds of 50 a second; its projectors are LLaVA's."""
    folder = tmp_path_factory.mktemp("generate")
    tokenizer = load_tokenizer(TokenizerConfig())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<audio>"]})
    tokenizer.save_pretrained(folder / "tokenizer")
    sound = EncoderConfig(kind="audio", config=dict(WHISPER), projector=ProjectorConfig(kind="llava"))
    model = dataclasses.replace(speaking("siglip_vision_model"), modules={"audio": sound})
    chunks = save_run(folder / "run", model, tokenizer=TokenizerConfig(path=str(folder / "tokenizer")))
    with torch.no_grad():  # so that answers depend on features
        for name in ("vision", "audio"):
            chunks[name].projector.linear_2.weight.mul_(20)
    save_checkpoint(folder / "run/checkpoint/step-5", model, chunks)
    export(folder / "run", folder / "out")
    for seed, name in enumerate(("a", "b")):
        pixels = np.random.default_rng(seed).integers(0, 256, (20, 30, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.png")
        samples = 0.4 * tone(300 * (seed + 1), 1.0) + 0.3 * noise(16_000, seed)
        (folder / f"{name}.wav").write_bytes(wav(samples))
    return folder / "run"


@torch.no_grad()
def theirs(run: Path, image: Path, sound: Path, text: str) -> str:
    """The answer of transformers' classes to an image, a sound of a second, and a text."""
    import soundfile

    from mmtrain.config import config

    out, model = run.parent / "out", config.load(run / "config.toml").model
    processor = transformers.SiglipImageProcessorPil(size={"height": 16, "width": 16})
    samples, rate = soundfile.read(sound, dtype="float32")
    spectrogram = WhisperFeatureExtractor(chunk_length=1)(samples, sampling_rate=rate, return_tensors="pt")
    states = {
        "vision": SiglipVisionModel.from_pretrained(out / "vision").eval()(
            processor(images=[Image.open(image)], return_tensors="pt")["pixel_values"]
        ),
        "audio": WhisperEncoder.from_pretrained(out / "audio").eval()(spectrogram["input_features"]),
    }
    language = AutoModelForCausalLM.from_pretrained(out / "language").eval()
    tokenizer = AutoTokenizer.from_pretrained(out / "language")
    content = "<|vision_start|>" + 16 * "<|image_pad|>" + "<|vision_end|>" + 50 * "<audio>" + text
    messages = [{"role": "user", "content": content}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)[0]
    embeds = language.model.embed_tokens(ids)
    for name, token, folder in (
        ("vision", "<|image_pad|>", "projector"),
        ("audio", "<audio>", "audio_projector"),
    ):
        projector = make_projector(model, name)
        projector.load_state_dict(load_file(out / folder / "model.safetensors"))
        embeds[ids == tokenizer.convert_tokens_to_ids(token)] = projector(states[name].last_hidden_state[0])
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokens = language.generate(
        inputs_embeds=embeds[None], max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=stop, pad_token_id=stop
    )
    return tokenizer.decode(tokens[0], skip_special_tokens=True).strip()


def test_an_image_and_a_sound_are_answered_as_by_the_classes(run, capsys):
    folder, words = run.parent, ["generate", str(run), "--max-new-tokens", str(NUM_TOKENS)]
    found = []
    for image, sound in (("a", "a"), ("a", "b"), ("b", "b")):
        files = folder / f"{image}.png", folder / f"{sound}.wav"
        prompt = [*words, "--prompt", "what?", "--image", str(files[0]), "--audio", str(files[1])]
        assert main(prompt) == 0
        found.append(capsys.readouterr().out.strip())
        assert found[-1] == theirs(run, *files, "what?")
    assert len(set(found)) > 1
    assert main([*words, "--prompt", "what?", "--audio", str(folder / "none.wav")]) == 2
    assert "none.wav is no file; correct the path" in capsys.readouterr().err


def test_a_whole_model_that_hears_answers_by_its_class_and_by_our_forward_alike(tmp_path):
    sounds.save_whole(tmp_path / "whole")
    section = TokenizerConfig(path=str(tmp_path / "whole"))
    save_run(tmp_path / "run", sounds.named(tmp_path / "whole"), tokenizer=section)
    export(tmp_path / "run", tmp_path / "out")
    (tmp_path / "a.wav").write_bytes(wav(sounds.wave(0.7, 1)))
    record, sampling = asked("what?", [], sounds=[tmp_path / "a.wav"]), Sampling(max_new_tokens=NUM_TOKENS)
    by_class, by_folder = (Answerer.of(tmp_path / name) for name in ("run", "out"))
    ours = answering._Modules(open_run(tmp_path / "run"))
    answers = [one.answer(record, sampling) for one in (by_class, by_folder, ours)]
    assert hasattr(by_class, "model") and len(set(answers)) == 1
    assert by_class.blanked(images=False, audio=True).answer(record, sampling) != answers[0]


def test_drawn_tokens_follow_their_seed_and_the_most_likely_ones_are_drawn_at_a_low_temperature(run):
    answerer = Answerer.of(run)
    record = asked("what?", [run.parent / "a.png"], sounds=[run.parent / "a.wav"])
    greedy = answerer.answer(record, Sampling(max_new_tokens=NUM_TOKENS))
    assert answerer.answer(record, Sampling(max_new_tokens=NUM_TOKENS, temperature=1e-4)) == greedy
    assert answerer.answer(record, Sampling(max_new_tokens=NUM_TOKENS, temperature=9.0, top_p=1e-6)) == greedy
    drawn = [answerer.answer(record, Sampling(max_new_tokens=9, temperature=3.0, seed=seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_questions_have_both_controls_in_all_and_by_grade(run, capsys):
    folder = run.parent
    answerer = Answerer.of(run)
    record = asked("what?", [folder / "a.png"], sounds=[folder / "a.wav"])
    answer = answerer.answer(record, Sampling(max_new_tokens=NUM_TOKENS))
    silenced = answerer.blanked(images=False, audio=True).answer(record, Sampling(max_new_tokens=NUM_TOKENS))
    rows = [
        {"question": "<image><audio>what?", "answer": reference, "image": "a.png", "audio": "a.wav", "grade": grade}
        for reference, grade in ((answer, "easy"), (silenced, "easy"), ("x", "hard"))
    ]
    (folder / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["generate", str(run), "--max-new-tokens", str(NUM_TOKENS), "--questions", str(folder / "q.jsonl")]
    assert main([*words, "--blank-images", "--blank-audio"]) == 0
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(line["answer"], line["silenced"]) for line in lines] == [(answer, silenced)] * 3
    assert len({answer, silenced, lines[0]["blanked"]}) == 3
    assert err.splitlines() == [
        "1 of 3 answers equal the record's; with blanked images 0 of 3; with silent sounds 1 of 3",
        "  easy: 1 of 2; with blanked images 0 of 2; with silent sounds 1 of 2",
        "  hard: 0 of 1; with blanked images 0 of 1; with silent sounds 0 of 1",
    ]


def test_what_the_model_does_not_read_is_one_line(tmp_path, run, capsys):
    save_run(tmp_path / "run", speaking(None))
    words = ["generate", str(tmp_path / "run")]
    assert main([*words, "--prompt", "what?", "--max-new-tokens", "2"]) == 0, "text alone"
    for extra, message in (
        (["--prompt", "?", "--audio", str(run.parent / "a.wav")], "1 sounds, but the model has no encoder of sound"),
        (["--questions", "q.jsonl", "--blank-images"], "--blank-images has no effect: the model reads no image or"),
        (["--questions", "q.jsonl", "--blank-audio"], "--blank-audio has no effect: the model reads no audio"),
        (["--questions", "q.jsonl", "--audio", "a.wav"], "--audio goes with --prompt or --interactive"),
        (["--prompt", "?", "--blank-audio"], "--blank-audio goes with --questions"),
    ):
        capsys.readouterr()
        assert main([*words, *extra]) == 2
        assert message in capsys.readouterr().err


def test_logits_that_are_no_probabilities_are_refused():
    """A token may be impossible; all of them may not, and none may be NaN or infinitely likely."""
    nan, infinite = float("nan"), float("inf")
    answering._finite(torch.tensor([[0.0, -infinite, 3e38]]))
    for bad in ([0.0, nan, 1.0], [0.0, infinite, 1.0], [-infinite] * 3):
        with pytest.raises(ConfigError, match="the model's logits are not finite, so it has no answer"):
            answering._chosen(Sampling(), torch.tensor([bad]))
