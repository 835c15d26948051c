"""One folder of a whole model: what transformers reads from it, and the answers that it and the run give."""

import dataclasses
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

from mmtrain.checkpoint.run_folder import open_run
from mmtrain.commands.cli import main
from mmtrain.config.config import TokenizerConfig
from mmtrain.config.data import DataConfig
from mmtrain.config.model import ModelConfig
from mmtrain.data.media import RawVideo
from mmtrain.data.questions import text_of
from mmtrain.data.tokenizer import SHIPPED, load_tokenizer
from mmtrain.errors import DataError
from mmtrain.export.adapter_folders import ExportForm
from mmtrain.export.folder import export
from mmtrain.inference import answering
from mmtrain.inference.answering import Answerer, Sampling, asked, questions
from mmtrain.models.fused_qkv import is_fused, to_head_major
from mmtrain.models.whole import in_class
from mmtrain.spec.builders import model_spec
from mmtrain.spec.hub_files import PROCESSOR_FILES
from tests import llava, whole_models
from tests.lora import with_lora
from tests.reference import model_config
from tests.stored_runs import save_run
from tests.video_processor import video_processor_class

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "clip, llama", "siglip, qwen2")
VOCAB = 448
"""Of the tokenizer that ships with mmtrain."""


def whole_folder(name: str, folder: Path) -> ModelConfig:
    """The model of a job that starts from a whole model, which is saved in the folder with random weights."""
    if name in whole_models.FAMILIES:
        text = whole_models.tiny_text(name, vocab_size=VOCAB)
        whole_models.whole_model(name, text, whole_models.VISION[name]).save_pretrained(folder)
        return whole_models.named(folder)
    values = llava.LLAVAS[name]
    torch.manual_seed(3)
    config = {**values, "text_config": {**values["text_config"], "vocab_size": VOCAB}}
    transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(**config)).save_pretrained(folder)
    return llava.job_model(folder)


def reader(folder: Path):
    """The model that transformers reads from a folder by the class that its config names."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_reads_every_weight_from_it(tmp_path, name):
    model = whole_folder(name, tmp_path / "whole")
    chunks = save_run(tmp_path / "run", model)
    made = export(tmp_path / "run", tmp_path / "out")
    theirs = reader(tmp_path / "out")
    assert made.model == type(theirs).__name__ and made.folders == ()
    stored = dict(theirs.named_parameters(remove_duplicate=False))
    kind = theirs.config.model_type
    for chunk in chunks.values():
        for own, tensor in chunk.named_parameters(remove_duplicate=False):
            found = stored[in_class(kind, own)]
            if own.startswith("vision.") and is_fused(own, chunk.adapter.fused_qkv):
                found = to_head_major(found, chunk.shape.num_heads)
            assert torch.equal(found, tensor), own
    source = load_file(tmp_path / "whole/model.safetensors").keys()
    if kind == "llava":  # whose class of transformers 5 writes names that 4 does not read
        source = {re.sub(r"^vision_tower\.", "vision_tower.vision_model.", name) for name in source}
    assert load_file(tmp_path / "out/model.safetensors").keys() == source, "names are those that it came with"
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert {"text_config", "vision_config", "architectures"} <= config.keys()
    text = config["text_config"]  # with the keys of transformers 4
    assert text["rope_theta"] == text["rope_parameters"]["rope_theta"]
    assert ("rope_scaling" in text) == ("qwen" in kind)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "clip, llama"])
def test_a_run_and_its_folder_answer_as_transformers_does(tmp_path, images, name):
    model = whole_folder(name, tmp_path / "whole")
    limits = {"min_pixels": 256, "max_pixels": 4096} if name == "qwen3_vl" else {}  # its own are 256 x 256 at least
    save_run(tmp_path / "run", model, data=DataConfig(source="unused", **limits))
    export(tmp_path / "run", tmp_path / "out")
    record, sampling = asked("what is <image> and <image>?", images), Sampling(max_new_tokens=8)
    answers = {Answerer.of(tmp_path / source).answer(record, sampling) for source in ("run", "out")}
    theirs, tokenizer = reader(tmp_path / "out"), transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out")
    seen = processor(images=[Image.open(path) for path in images], return_tensors="pt")
    token = "<|image_pad|>"
    grids = seen.get("image_grid_thw")
    counts = [16, 16] if grids is None else [int(grid.prod()) // 4 for grid in grids]
    begin, end = ("", "") if "clip" in name else ("<|vision_start|>", "<|vision_end|>")
    marks = [begin + token * count + end for count in counts]
    messages = [{"role": "user", "content": f"what is {marks[0]} and {marks[1]}?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    types = {"mm_token_type_ids": (ids == theirs.config.image_token_id).long()} if grids is not None else {}
    tokens = theirs.generate(input_ids=ids, max_new_tokens=8, do_sample=False, **seen, **types)
    assert answers == {tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True).strip()}


@pytest.mark.parametrize("name", whole_models.FAMILIES)
def test_videos_are_answered_as_by_transformers(tmp_path, images, name, monkeypatch, capsys):
    """A folder of frames, an array and an image; by the run, by its folder, and by its video processor and class."""
    frames = np.random.default_rng(1).integers(0, 256, (2, 11, 20, 33, 3), np.uint8)
    np.save(tmp_path / "second.npy", frames[1])
    (tmp_path / "first").mkdir()
    for index, frame in enumerate(frames[0]):
        Image.fromarray(frame).save(tmp_path / "first" / f"{index:02}.png")
    tokenizer = load_tokenizer(TokenizerConfig())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|video_pad|>"]})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    text = whole_models.tiny_text(name, vocab_size=VOCAB + 1)
    whole_models.whole_model(name, text, whole_models.VISION[name]).save_pretrained(tmp_path / "whole")
    limits = {"source_fps": 4.0, "video_fps": 2.5, "video_min_pixels": 64, "video_max_pixels": 1024}
    timed = name not in whole_models.OLDER
    if timed:  # whose limits are of all six frames; of images its own are 256 x 256 at least
        limits |= {"video_max_pixels": 6 * 1024, "min_pixels": 256, "max_pixels": 1024}
    data, section = DataConfig(source="unused", **limits), TokenizerConfig(path=str(tmp_path / "tokenizer"))
    save_run(tmp_path / "run", whole_models.named(tmp_path / "whole"), data=data, tokenizer=section)
    export(tmp_path / "run", tmp_path / "out")

    prompt = "<video>then <image>or <video>?"
    record = asked(prompt, images[:1], [tmp_path / "first", tmp_path / "second.npy"])
    record = dataclasses.replace(record, images=tuple(
        dataclasses.replace(raw, fps=4.0) if isinstance(raw, RawVideo) else raw for raw in record.images
    ))  # fmt: skip
    run, folder = (Answerer.of(tmp_path / source) for source in ("run", "out"))
    answer = run.answer(record, Sampling(max_new_tokens=8))
    assert folder.answer(record, Sampling(max_new_tokens=8)) == answer

    theirs = reader(tmp_path / "out")
    seen = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out")(Image.open(images[0]), return_tensors="pt")
    family = name if timed else "qwen2_vl"
    of_videos = video_processor_class(monkeypatch, family).from_pretrained(tmp_path / "out")(
        videos=list(frames), video_metadata=[{"total_num_frames": 11, "fps": 4.0}] * 2, return_metadata=True,
        return_tensors="pt",
    )  # fmt: skip
    metadata = of_videos.pop("video_metadata")
    if name == "qwen2_5_vl":
        of_videos["second_per_grid_ts"] = torch.tensor([2 / video.sampled_fps for video in metadata])
    inputs = run.inputs(record)
    torch.testing.assert_close(inputs["pixel_values_videos"], of_videos["pixel_values_videos"], rtol=0, atol=2e-6)
    assert torch.equal(inputs["video_grid_thw"], of_videos["video_grid_thw"])
    marks = {
        "<image>": ("<|image_pad|>", seen["image_grid_thw"]),
        "<video>": ("<|video_pad|>", inputs["video_grid_thw"]),
    }
    content = prompt
    for mark, (token, grids) in marks.items():
        for grid in grids:
            times = [""]
            if timed and mark == "<video>":  # frames 0, 2, 4, 6, 8 and 10, a quarter of a second each
                times = ["<0.2 seconds>", "<1.2 seconds>", "<2.2 seconds>"]
            frame = f"<|vision_start|>{token * (int(grid.prod()) // 4 // len(times))}<|vision_end|>"
            content = content.replace(mark, "".join(time + frame for time in times), 1)
    messages = [{"role": "user", "content": content}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    assert torch.equal(inputs["input_ids"], ids)
    types = (ids == theirs.config.image_token_id).long() + 2 * (ids == theirs.config.video_token_id)
    tokens = theirs.generate(
        input_ids=ids, mm_token_type_ids=types, max_new_tokens=8, do_sample=False, **seen, **of_videos
    )
    assert answer == tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True).strip()

    words = ["generate", str(tmp_path / "run"), "--max-new-tokens", "4"]
    assert main([*words, "--prompt", "what?", "--video", str(tmp_path / "second.npy")]) == 0
    said = capsys.readouterr().out.strip()
    row = {"question": "what?", "answer": "x", "video": "second.npy"}
    (tmp_path / "q.jsonl").write_text(json.dumps(row))
    assert main([*words, "--questions", str(tmp_path / "q.jsonl")]) == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["question"], line["answer"]) == ("<video>what?", said)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_the_folder_reads_videos_as_the_job_did(tmp_path, name, stored):
    """A job that sets no limits has those of the video processor that the model came with, if it has them."""
    tokenizer = load_tokenizer(TokenizerConfig())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|video_pad|>"]})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    text = whole_models.tiny_text(name, vocab_size=VOCAB + 1)
    whole_models.whole_model(name, text, whole_models.VISION[name]).save_pretrained(tmp_path / "whole")
    other = {"size": {"shortest_edge": 4096, "longest_edge": 25165824}, "fps": 1, "cap_pixels_per_frame": True}
    if stored:
        (tmp_path / "whole" / PROCESSOR_FILES["video"]).write_text(json.dumps(other))
    data, section = DataConfig(source="unused"), TokenizerConfig(path=str(tmp_path / "tokenizer"))
    save_run(tmp_path / "run", whole_models.named(tmp_path / "whole"), data=data, tokenizer=section)
    export(tmp_path / "run", tmp_path / "out")
    values = json.loads((tmp_path / "out" / PROCESSOR_FILES["video"]).read_text())
    least, most = (100352, 602112) if name == "qwen2_vl" else (131072, 786432)
    if stored:
        least, most = 4096, 25165824
    assert values["size"] == {"shortest_edge": least, "longest_edge": most}
    assert (values["fps"], values["max_frames"], values["cap_pixels_per_frame"]) == (2.0, 768, False)
    kind = {"qwen2_vl": "Qwen2VLVideoProcessor", "qwen3_vl": "Qwen3VLVideoProcessor"}[name]
    assert values["video_processor_type"] == kind


@pytest.mark.parametrize("parts", [False, True])
def test_files_in_bfloat16_have_the_rounded_weights(tmp_path, parts):
    from safetensors.torch import load_file

    model = with_lora(whole_folder("qwen2_5_vl", tmp_path / "whole"), ["language"])
    save_run(tmp_path / "run", model)
    export(tmp_path / "run", tmp_path / "float32", parts=parts)
    export(tmp_path / "run", tmp_path / "out", parts=parts, form=ExportForm(dtype=torch.bfloat16))
    compared = 0
    for path in (tmp_path / "float32").rglob("*.safetensors"):
        wanted, found = load_file(path), load_file(tmp_path / "out" / path.relative_to(tmp_path / "float32"))
        assert wanted.keys() == found.keys()
        assert all(torch.equal(found[name], value.bfloat16()) for name, value in wanted.items())
        compared += len(wanted)
    assert compared > 50
    whole = tmp_path / "out" / ("language" if parts else "")
    assert json.loads((whole / "config.json").read_text())["dtype"] == "bfloat16"
    assert ", bfloat16." in (tmp_path / "out/README.md").read_text()
    if not parts:
        assert reader(tmp_path / "out").dtype is torch.bfloat16, "as from_pretrained reads it"


def test_an_exported_folder_starts_the_next_job(tmp_path):
    model = whole_folder("qwen2_vl", tmp_path / "whole")
    chunks = save_run(tmp_path / "run", model)
    export(tmp_path / "run", tmp_path / "out")
    from mmtrain.models.reference import ReferenceModel

    again = whole_models.named(tmp_path / "out")
    weights = ReferenceModel(again, model_spec(again), seed=9).weights()
    for chunk in chunks.values():
        for name, parameter in chunk.named_parameters():
            assert torch.equal(weights[name], parameter), name


def test_what_is_no_whole_model_has_a_folder_for_each_part_and_answers_by_its_own_forward(tmp_path, images):
    model = model_config("qwen2_vl_vision")
    save_run(tmp_path / "run", model)
    assert export(tmp_path / "run", tmp_path / "out").folders == ("language", "projector", "vision")
    whole = whole_folder("qwen2_vl", tmp_path / "whole")
    save_run(tmp_path / "other", whole)
    assert export(tmp_path / "other", tmp_path / "parts", parts=True).folders == ("language", "vision")
    language = dataclasses.replace(whole.language, attention_mask="prefix")
    save_run(tmp_path / "prefix", dataclasses.replace(whole, language=language))
    ours = Answerer.of(tmp_path / "prefix")
    assert not hasattr(ours, "model"), "whole models attend causally"
    record, sampling = asked("what is <image> and <image>?", images), Sampling(max_new_tokens=8)
    assert ours.answer(record, sampling) != Answerer.of(tmp_path / "other").answer(record, sampling)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "clip, llama"])
def test_our_forward_answers_as_the_class_of_transformers(tmp_path, images, name):
    """Of runs that have a class: positions on three axes, windows, DeepStack, the features of an inner block."""
    model = whole_folder(name, tmp_path / "whole")
    limits = {"min_pixels": 256, "max_pixels": 4096} if name == "qwen3_vl" else {}
    save_run(tmp_path / "run", model, data=DataConfig(source="unused", **limits))
    record, sampling = asked("what is <image> and <image>?", images), Sampling(max_new_tokens=8)
    ours = answering._Modules(open_run(tmp_path / "run")).answer(record, sampling)
    assert ours == Answerer.of(tmp_path / "run").answer(record, sampling)


def test_the_command_answers_questions_of_a_file(tmp_path, images, capsys, monkeypatch):
    save_run(tmp_path / "run", whole_folder("qwen2_vl", tmp_path / "whole"))
    rows = [
        {"question": "what is it?", "answer": "x", "image": images[0].name},
        {"question": "and this?", "answer": "y", "image": images[1].name},
    ]
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    listed = list(questions(str(path), "train", None))
    assert [question.reference for question in listed] == ["x", "y"]
    words = ["generate", str(tmp_path / "run"), "--max-new-tokens", "4"]
    assert main([*words, "--questions", str(path)]) == 0
    out, err = capsys.readouterr()
    answered = [json.loads(line) for line in out.splitlines()]
    assert [line["reference"] for line in answered] == ["x", "y"] and "of 2 answers equal" in err
    assert main([*words, "--questions", str(path), "--blank-images"]) == 0
    out, err = capsys.readouterr()
    both = [json.loads(line) for line in out.splitlines()]
    assert [line["answer"] for line in both] == [line["answer"] for line in answered]
    grey = tmp_path / "grey.png"
    with Image.open(images[0]) as image:
        Image.new("RGB", image.size, (128, 128, 128)).save(grey)
    assert main([*words, "--prompt", "what is it?", "--image", str(grey)]) == 0
    assert capsys.readouterr().out.strip() == both[0]["blanked"] != both[0]["answer"]
    assert "of 2 answers equal the record's; with blanked images 0 of 2" in err
    assert main([*words, "--prompt", "what is it?", "--image", str(images[0])]) == 0
    assert capsys.readouterr().out.strip() == answered[0]["answer"]
    assert main([*words, "--prompt", "<image>?"]) == 2
    assert "--prompt has 1 `<image>`, but there are 0 images" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("<image>?\nwhat is it?\n"))
    assert main([*words, "--interactive"]) == 0, "a wrong question is not the last one"
    out, err = capsys.readouterr()
    assert "but there are 0 images" in err and len(out) > len("> > ")


def test_options_alone_say_how_tokens_are_drawn(tmp_path, images):
    save_run(tmp_path / "run", whole_folder("qwen2_vl", tmp_path / "whole"))
    theirs = {"do_sample": True, "top_k": 1, "repetition_penalty": 9.0, "eos_token_id": 2}  # Qwen2-VL ships such a file
    (tmp_path / "whole/generation_config.json").write_text(json.dumps(theirs))
    export(tmp_path / "run", tmp_path / "out")
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == theirs
    record, run, folder = asked("what?", images), Answerer.of(tmp_path / "run"), Answerer.of(tmp_path / "out")
    settings = [Sampling(max_new_tokens=8, temperature=t, seed=seed) for t in (0.0, 2.0) for seed in (0, 1)]
    greedy, _, first, second = answers = [folder.answer(record, sampling) for sampling in settings]
    assert answers == [run.answer(record, sampling) for sampling in settings]
    assert len({greedy, first, second}) == 3, "top_k = 1 of the folder draws the most likely token each time"
    sure = Sampling(max_new_tokens=8, temperature=2.0, top_p=1e-6, seed=1)
    assert folder.answer(record, sure) == greedy


@pytest.mark.parametrize("named", [True, False], ids=["named", "of the model"])
@pytest.mark.parametrize("limits", [{}, {"max_pixels": 256}], ids=["its own limits", "those of the job"])
def test_the_folder_prepares_images_as_the_run_did(tmp_path, images, limits, named):
    data = DataConfig(source="unused", image_processor=str(tmp_path / "whole") if named else "", **limits)
    model = whole_folder("qwen2_vl", tmp_path / "whole")
    values = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 64, "max_pixels": 1024}
    values |= {"image_processor_type": "Qwen2VLImageProcessor", "image_mean": [0.25] * 3}
    (tmp_path / "whole/preprocessor_config.json").write_text(json.dumps(values))
    save_run(tmp_path / "run", model, data=data)
    export(tmp_path / "run", tmp_path / "out")
    run, folder = (Answerer.of(tmp_path / name).inputs(asked("what?", images)) for name in ("run", "out"))
    assert run.keys() == folder.keys() and all(torch.equal(run[key], folder[key]) for key in run)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out")
    seen = processor(images=[Image.open(path) for path in images], return_tensors="pt")
    assert torch.equal(seen["image_grid_thw"], run["image_grid_thw"])
    torch.testing.assert_close(seen["pixel_values"], run["pixel_values"], rtol=0, atol=0.05)
    kept = json.loads((tmp_path / "out/preprocessor_config.json").read_text()) == values
    assert kept != bool(limits), "the file stays as it came where the job follows it"


def test_a_processor_inside_of_another_file_prepares_images_as_the_run_did(tmp_path, images):
    model = whole_folder("qwen2_vl", tmp_path / "whole")
    theirs = transformers.Qwen2VLImageProcessor(patch_size=4, min_pixels=64, max_pixels=1024, image_mean=[0.25] * 3)
    nested = {"image_processor": json.loads(theirs.to_json_string()), "processor_class": "Qwen2VLProcessor"}
    (tmp_path / "whole/processor_config.json").write_text(json.dumps(nested))
    for name, limits in (("as_it_is", {}), ("smaller", {"max_pixels": 256})):
        save_run(tmp_path / name, model, data=DataConfig(source="unused", **limits))
        export(tmp_path / name, tmp_path / f"{name}_out")
        read = transformers.Qwen2VLImageProcessor.from_pretrained(tmp_path / f"{name}_out")
        assert read.size["longest_edge"] == limits.get("max_pixels", 1024) and list(read.image_mean) == [0.25] * 3
        sources = (tmp_path / name, tmp_path / f"{name}_out")
        run, folder = (Answerer.of(source).inputs(asked("what?", images)) for source in sources)
        assert all(torch.equal(run[key], folder[key]) for key in run)


def test_questions_have_the_images_that_stand_before_their_answer(tmp_path, images):
    first, second = (str(path) for path in images)
    image, text = {"type": "image", "image": first}, {"type": "text", "text": "what?"}
    reply = {"role": "assistant", "content": [{"type": "text", "text": "a bar"}]}
    later = [{"role": "user", "content": "<image>and?"}, {"role": "assistant", "content": "b"}]
    records = [
        {"messages": [{"role": "user", "content": [image, text]}, reply, *later], "images": [second]},
        {"messages": [{"role": "user", "content": "hi"}, reply, *later], "images": [second]},
    ]
    path = tmp_path / "q.jsonl"
    for record, shown, question in zip(records, ([first], []), ("<image>what?", "hi"), strict=True):
        path.write_text(json.dumps(record))
        (asks,) = questions(str(path), "train", None)
        assert [image.path for image in asks.record.images] == shown
        assert (text_of(asks.record.messages[-1]), asks.reference) == (question, "a bar")


@pytest.mark.parametrize(
    "words, message",
    [
        (["--prompt", "x", "--limit", "3"], "--limit goes with --questions; leave it out"),
        (["--prompt", "x", "--split", "test"], "--split goes with --questions; leave it out"),
        (["--prompt", "x", "--top-p", "0.5"], "--top-p 0.5 has no effect without --temperature above 0"),
        (["--prompt", "x", "--seed", str(2**64)], "it must be at least 0 and below 2"),
        (["--prompt", "x", "--blank-images"], "--blank-images goes with --questions, whose answers it compares"),
        (["--questions", "", "--image", "a.png"], "--image goes with --prompt or --interactive"),
        (["--questions", "", "--video", "a.mp4"], "--video goes with --prompt or --interactive; --questions have vid"),
    ],
)
def test_options_without_effect_are_refused(words, message, capsys):
    assert main(["generate", "absent", *words]) == 2
    assert message in capsys.readouterr().err


def test_an_image_that_is_no_file_is_named_by_its_option(tmp_path):
    with pytest.raises(DataError, match=r"--image .*absent.png is no file; correct the path"):
        asked("what?", [tmp_path / "absent.png"])
    with pytest.raises(DataError, match=r"--video .*absent is no file, nor a folder of frames; correct the path"):
        asked("what?", [], [tmp_path / "absent"])
    with pytest.raises(DataError, match="--prompt has 2 `<video>`, but there are 1 videos; write it once for each"):
        asked("<video><video>", [], [tmp_path])


def test_the_stop_token_ends_an_answer_in_the_template():
    from mmtrain.data.chat_templates import answer_ending

    tokenizer = load_tokenizer(TokenizerConfig(path=str(SHIPPED)))
    assert tokenizer.convert_ids_to_tokens(answer_ending(tokenizer).token) == "<|im_end|>"
