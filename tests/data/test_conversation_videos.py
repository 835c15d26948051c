"""Videos in conversations, from the columns of a record to tokens, pixels and positions, against transformers' own
video processor."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import AddedToken
from transformers import Qwen3VLConfig

from mmtrain.config.config import Config
from mmtrain.config.data import DataConfig, TokenizerConfig
from mmtrain.data.conversation_records import CONVERSATIONS, Record
from mmtrain.data.loader import Loader, _Wire
from mmtrain.data.media import RawImage, RawVideo
from mmtrain.data.media_readers import vision_readers
from mmtrain.data.pixels import pixel_rules
from mmtrain.data.processor import Processor
from mmtrain.data.questions import question_before
from mmtrain.data.sources import open_source
from mmtrain.data.tokenizer import load_tokenizer
from mmtrain.errors import DataError
from mmtrain.modality.geometry import model_geometry
from mmtrain.modality.positions import token_positions
from mmtrain.modality.videos import video_rules
from mmtrain.models.batch import IGNORE_INDEX, check_batch
from mmtrain.models.whole import class_inputs
from tests.data.samples import make_config, png
from tests.modality.test_positions import IMAGE, VIDEO, rope_index
from tests.modality.test_videos import AREA, SIZES, THREE, array, model, rules, values_of
from tests.video_processor import video_processor_class


def processor(encoder: str = "qwen2_vl_vision", *, token: bool = True, **data: Any) -> Processor:
    tokenizer = load_tokenizer(TokenizerConfig())
    if token:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|video_pad|>"]})
    section = DataConfig(source="x", **(SIZES if encoder.startswith("qwen") else {}) | data)
    limit = 28 * 28 * 16 if encoder.startswith("qwen") else 0
    geometry = model_geometry(model(encoder), max_pixels=limit)
    videos = video_rules(model(encoder), section)
    return reading(tokenizer, geometry, pixel_rules("qwen2_vl"), section, videos)


def reading(tokenizer: Any, *options: Any) -> Processor:
    """The processor of a tokenizer. Args: options: of `vision_readers`."""
    return Processor(tokenizer, vision_readers(TokenizerConfig(), *options, vocabulary=tokenizer.get_vocab()))


# ---------------------------------------------------------------------------------------------- records


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The same video of four frames as a folder of images, and as arrays; and an image."""
    frames = array(4, 56, 56)
    (tmp_path / "walk").mkdir()
    for index, frame in enumerate(frames):
        Image.fromarray(frame).save(tmp_path / "walk" / f"{index}.png")
    np.save(tmp_path / "walk.npy", frames)
    np.savez_compressed(tmp_path / "walk.npz", other=frames[:1], frames=frames)
    (tmp_path / "0.png").write_bytes(png(56, 56))
    return tmp_path


def read(folder: Path, row: dict[str, Any]) -> Record:
    (folder / "train.jsonl").write_text(json.dumps(row) + "\n")
    record = open_source(DataConfig(source=str(folder)), "train", CONVERSATIONS)[0]
    assert record is not None
    return record


def said(text: Any, answer: str = "north") -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


PAD = "<|vision_start|>" + "<|video_pad|>" * 8 + "<|vision_end|>"
TURNS = [{"from": "human", "value": "<video>Where?"}, {"from": "gpt", "value": "north"}]
TEXT = {"type": "text", "text": "Where?"}
ROWS: dict[str, dict[str, Any]] = {
    "LLaVA": {"video": "walk", "conversations": TURNS},
    "a list of arrays": {"videos": ["walk.npy"], "messages": said("<video>Where?")},
    "a compressed array": {"videos": ["walk.npz"], "messages": said("<video>Where?")},
    "a list of frames": {"videos": [[f"walk/{i}.png" for i in range(4)]], "messages": said("<video>Where?")},
    "a part": {"messages": said([{"type": "video", "video": "walk"}, TEXT])},
    "a part with a URL": {"messages": said([{"type": "video_url", "video_url": {"url": "walk.npy"}}, TEXT])},
    "one turn": {"video": "walk", "question": "Where?", "answer": "north"},
}


@pytest.mark.parametrize("name", ROWS)
def test_each_form_gives_the_same_tokens_and_pixels(folder: Path, name: str) -> None:
    ours = processor()
    document = ours.document(read(folder, ROWS[name]))
    expected = f"<|im_start|>user\n{PAD}Where?<|im_end|>\n<|im_start|>assistant\nnorth<|im_end|>\n"
    assert ours.tokenizer.decode(document.input_ids) == expected
    frames = list(map(Image.fromarray, array(4, 56, 56)))
    assert torch.equal(ours.pixels(document)[0], values_of(frames, rules()))


def test_bytes_of_a_video_are_one(folder: Path) -> None:
    raw = RawVideo(file=RawImage(data=(folder / "walk.npy").read_bytes()))
    record = Record(sample=1, messages=tuple(said("<video>Where?")), images=(raw,))
    assert processor().document(record).meta.images[0].grid == (2, 4, 4)


def test_a_text_about_a_video_is_the_answer_to_it(folder: Path) -> None:
    document = processor().document(read(folder, {"video": "walk", "caption": "a walk"}))
    assert document.meta.images[0].is_video


def test_images_and_videos_keep_their_order_and_are_no_targets(folder: Path) -> None:
    text = "<video>first <image>then <video>and <image>?"
    row = {"images": ["0.png", "0.png"], "videos": ["walk", "walk.npy"], "messages": said(text), "fps": 4}
    ours = processor(video_fps=1.0)
    document = ours.document(read(folder, row))
    images = document.meta.images
    assert [(image.is_video, image.index) for image in images] == [(True, 2), (False, 0), (True, 3), (False, 1)]
    assert [image.seconds for image in images] == [0.5, 0, 0.5, 0]  # 4 frames, at least, of 1 s
    kinds = {token: kind for kind, token in ours.token_ids.items()}
    slots = np.flatnonzero(np.isin(document.input_ids, list(kinds)))
    expected = [image.start + i for image in images for i in range(image.num_tokens)]
    assert slots.tolist() == expected
    for image in images:
        assert kinds[document.input_ids[image.start]] == ("video" if image.is_video else "image")
    assert not set(kinds) & set(document.labels.tolist())
    assert (document.labels != IGNORE_INDEX).sum() == document.meta.num_targets > 0
    assert [len(pixels) for pixels in ours.pixels(document)] == [image.num_patches for image in images]


def test_only_sampled_frames_are_decoded(folder: Path) -> None:
    """Frame 1 and 3 are damaged, and not among the sampled ones."""
    for index in (1, 3):
        (folder / "walk" / f"{index}.png").write_bytes(b"damaged")
    ours = processor(video_max_frames=2, video_min_frames=2)
    document = ours.document(read(folder, {"video": "walk", "messages": said("<video>Where?")}))
    assert document.meta.images[0].grid[0] == 1
    expected = [Image.fromarray(frame) for frame in array(4, 56, 56)[::2]]
    assert torch.equal(ours.pixels(document)[0], values_of(expected, rules()))


@pytest.fixture
def qwen3_processor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' whole processor of Qwen3-VL, with our tokenizer."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    colours = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    images = Qwen2VLImageProcessorPil(patch_size=16, min_pixels=32**2, max_pixels=16 * 32**2, **colours)
    size = {"shortest_edge": AREA["video_min_pixels"], "longest_edge": AREA["video_max_pixels"]}
    videos = video_processor_class(monkeypatch, "qwen3_vl")(size=size, cap_pixels_per_frame=False)
    tokenizer = load_tokenizer(TokenizerConfig())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|video_pad|>"]})
    made = Qwen3VLProcessor.__new__(Qwen3VLProcessor)  # its base refuses classes that the library has not registered
    monkeypatch.setattr(type(made), "check_argument_for_proper_class", lambda self, name, value: type(value))
    made.__init__(image_processor=images, tokenizer=tokenizer, video_processor=videos)
    return made


def qwen3(tokenizer: Any) -> Processor:
    """Our processor of the same model."""
    geometry = model_geometry(model(THREE), min_pixels=32**2, max_pixels=16 * 32**2)
    section = DataConfig(source="x", **AREA)
    videos = video_rules(model(THREE), section)
    return reading(tokenizer, geometry, pixel_rules("qwen3_vl"), section, videos)


@pytest.mark.parametrize("marker", ["<video>", "<|video_pad|>"])
def test_text_and_tokens_of_qwen3_vl_are_those_of_its_processor(folder: Path, qwen3_processor: Any, marker) -> None:
    """Of a placeholder alone; markers around it become those of each patch, which 5.23 leaves there in addition."""
    ours, long = qwen3(qwen3_processor.tokenizer), array(13, 40, 56, seed=2)
    np.save(folder / "long.npy", long)
    text = f"{marker}first?\n{marker}, then <image>what"
    row = {"images": ["0.png"], "videos": ["walk", "long.npy"], "messages": said(text), "fps": 4.0}
    document = ours.document(read(folder, row))
    rendered = ours.tokenizer.apply_chat_template(said(text), tokenize=False)
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    metadata = [{"total_num_frames": n, "fps": 4.0} for n in (4, 13)]
    expected = qwen3_processor(
        text=[rendered.replace(marker, "<|video_pad|>").replace("<image>", image)], videos=[array(4, 56, 56), long],
        images=[Image.open(folder / "0.png")], video_metadata=metadata, return_tensors="pt",
    )  # fmt: skip
    assert ours.tokenizer.decode(document.input_ids) == ours.tokenizer.decode(expected["input_ids"][0])
    assert document.input_ids.tolist() == expected["input_ids"][0].tolist()
    found = class_inputs(document.meta, ours.pixels(document), Qwen3VLConfig())
    found.pop("pixel_values")  # Pillow's and torch's resizing differ in the last digits
    for key, values in found.items():
        torch.testing.assert_close(values, expected[key], rtol=0, atol=2e-6, msg=key)
    images = document.meta.images
    assert [image.key for image in images] == [(0, 1, 0), (0, 1, 1), *((0, 2, i) for i in range(3)), (0, 0)]
    types = expected["mm_token_type_ids"]
    grids = {IMAGE: found["image_grid_thw"].tolist(), VIDEO: found["video_grid_thw"].tolist()}
    wanted = rope_index("qwen3_vl", document.meta, types[0].tolist(), grids=grids)
    np.testing.assert_array_equal(token_positions([document.meta], 3), wanted)
    answer = document.labels[document.labels != IGNORE_INDEX]
    assert ours.tokenizer.decode(answer) == "north<|im_end|>"


@pytest.mark.parametrize("name", ["walk", "long.npy"])
def test_an_answer_right_behind_a_video_is_learnt_from_its_first_token(folder: Path, name: str) -> None:
    """The captions of its frames grow the text up to where the answer begins."""
    np.save(folder / "long.npy", array(13, 40, 56, seed=2))
    tokenizer = load_tokenizer(TokenizerConfig())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|video_pad|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    )
    ours = qwen3(tokenizer)
    record = read(folder, {"videos": [name], "messages": said("Where?<video>"), "fps": 4.0})
    document = ours.document(record)
    assert tokenizer.decode(document.labels[document.labels != IGNORE_INDEX]) == "north<|im_end|>"
    prompt = ours.prompt(question_before(record, 1).record)
    assert document.input_ids[: document.meta.prefix].tolist() == prompt.input_ids.tolist()


def test_a_token_that_the_tokenizer_overlooks_is_named(folder: Path) -> None:
    ours = processor(token=False)
    ours.tokenizer.add_tokens([AddedToken("<|video_pad|>", special=True, single_word=True)])
    geometry = model_geometry(model(), max_pixels=28 * 28 * 16)
    args = ours.tokenizer, geometry, pixel_rules("qwen2_vl"), DataConfig(source="x", **SIZES)
    record = read(folder, ONE | {"messages": said("a<|video_pad|>b")})
    with pytest.raises(DataError, match="the tokenizer finds 0 of the 1 tokens of images and videos in its text; make"):
        reading(*args, rules()).document(record)


def test_blank_videos_are_grey(folder: Path) -> None:
    ours = processor(blank_images=True)
    values = ours.pixels(ours.document(read(folder, {"video": "walk", "messages": said("<video>Where?")})))[0]
    assert all(len(channel.unique()) == 1 for channel in values.unflatten(1, (3, -1)).transpose(0, 1))


# ---------------------------------------------------------------------------------------------- bad input

ONE = {"videos": ["walk"], "messages": said("<video>Where?")}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "too few": ({"messages": said("<video><video>?")}, "2 `<video>` placeholders in its messages, but 1 videos; write"),
    "too many": ({"messages": said("Where?")}, "0 `<video>` placeholders in its messages, but 1 videos; write"),
    "none": ({"videos": []}, "1 `<video>` placeholders in its messages, but 0 videos"),
    "no such file": ({"videos": ["a.npy"]}, r"^video 0 of sample 0 \(.*/a.npy\): its file .*cannot be read: No such"),
    "a folder without frames": ({"videos": ["empty"]}, r"^video 0 of sample 0 .*: its folder .* has no image; its end"),
    "no frame": ({"videos": [[]]}, r"^video 0 of sample 0 .*: an empty list of frames; it needs at least one"),
    "a number": ({"videos": [3]}, r"^video 0 of sample 0 .*: a int; it must be a path"),
    "two columns": ({"video": "walk"}, "it has `videos` and `video`; keep its videos in one"),
    "a rate of zero": ({"fps": 0}, r"^sample 0 of .*: `fps` = 0; it must be a number above 0"),
    "a rate without meaning": ({"fps": 1e-300}, r"^video 0 of .*walk\): it has 1e-300 frames a second; give its `fps`"),
    "floats": ({"videos": ["floats.npy"]}, r"its frames are float32 of shape \(2, 4, 4, 3\); they must be uint8"),
    "no frames in it": ({"videos": ["none.npy"]}, r"of shape \(0, 4, 4, 3\); they must be .* at least one"),
    "the other order": ({"videos": ["fortran.npy"]}, "Fortran order; they must be"),
    "no array": ({"videos": ["damaged.npy"]}, "its frames are no .npy or .npz file"),
    "frames without a name": ({"videos": ["two.npz"]}, "has the arrays a, b; name one of them `frames`"),
    "too thin": ({"videos": ["thin.npy"]}, "one side is more than 200 times the other"),
    "a codec": ({"videos": ["film.mp4"]}, r"^video 0 of sample 0 \(.*film.mp4\): it"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_videos_are_one_line(folder: Path, name: str) -> None:
    (folder / "empty").mkdir()
    np.save(folder / "floats.npy", np.zeros((2, 4, 4, 3), np.float32))
    np.save(folder / "none.npy", np.zeros((0, 4, 4, 3), np.uint8))
    np.save(folder / "thin.npy", np.zeros((2, 2, 500, 3), np.uint8))
    np.save(folder / "fortran.npy", np.asfortranarray(array(2)))
    np.savez(folder / "two.npz", a=array(2), b=array(2))
    (folder / "damaged.npy").write_bytes(b"nothing")
    (folder / "film.mp4").write_bytes(b"nothing")
    row, message = BAD[name]
    with pytest.raises(DataError, match=message):
        processor().document(read(folder, ONE | row))


def test_damaged_content_names_the_file(folder: Path) -> None:
    content = (folder / "walk.npy").read_bytes()
    (folder / "walk.npy").write_bytes(content[: len(content) // 2])
    ours = processor()
    document = ours.document(read(folder, ONE | {"videos": ["walk.npy"]}))
    with pytest.raises(DataError, match=r"^video 0 of sample 0 \(.*walk.npy\): the array of its frames ends within fr"):
        ours.pixels(document)
    frame = folder / "walk" / "2.png"
    frame.write_bytes(frame.read_bytes()[:90])
    document = ours.document(read(folder, ONE))
    with pytest.raises(DataError, match=r"^video 0 of sample 0 \(.*walk\): frame 2: its content is corrupt"):
        ours.pixels(document)


def test_models_that_read_no_videos_say_so(folder: Path) -> None:
    record = read(folder, ONE)
    with pytest.raises(
        DataError, match=r"^sample 0: 1 videos, but the model's encoder reads images alone; use one of q"
    ):
        processor("siglip_vision_model").document(record)
    with pytest.raises(DataError, match=r"the tokenizer has no token ...video_pad... for them; name its own with"):
        processor(token=False).document(record)
    text = Record(sample=0, messages=tuple(said("What is <video> in HTML?")), images=())
    assert "<video>" in processor(token=False).tokenizer.decode(processor(token=False).document(text).input_ids)


# ---------------------------------------------------------------------------------------------- steps


def job(folder: Path, rows: list[dict[str, Any]], encoder: dict[str, Any] | None = None, **options: Any) -> Config:
    """A job on these records whose encoder is that of Qwen2.5-VL. Args: encoder: other keys of its config."""
    tokenizer = load_tokenizer(TokenizerConfig())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|video_pad|>"]})
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = {"model_type": "qwen2_5_vl_vision", "depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 16}
    encoder = small | (encoder or {})
    options = {"vocab_size": 449, "global_batch_size": 1, "shuffle": False, **SIZES, **options}
    config = make_config(folder, encoder=encoder, **options)
    return dataclasses.replace(config, tokenizer=TokenizerConfig(path=str(folder / "tokenizer")))


MIXED = {"images": ["0.png"], "videos": ["walk", "walk.npy"], "messages": said("<video><image>and <video>?"), "fps": 4}


def test_a_step_packs_videos_and_survives_the_way_from_a_worker(folder: Path) -> None:
    config = job(folder, [ONE, MIXED, {"messages": said("Where?")}])
    with Loader(config, num_steps=1) as loader:
        step = next(loader)
    batch, meta, _ = step
    (tensors,), (counts,) = batch.microbatches, meta.microbatches
    assert [image.is_video for image in counts.images] == [True, True, False, True]
    assert [image.time_step for image in counts.images] == [4.0, 2.0, 1.0, 2.0]
    assert meta.num_images == len(tensors.pixel_values) == 4
    assert counts.num_tokens == len(tensors.input_ids) and len(tensors.image_slots) == 3 * 8 + 4
    video, image = (load_tokenizer(config.tokenizer).convert_tokens_to_ids(f"<|{k}_pad|>") for k in ("video", "image"))
    assert tensors.input_ids[tensors.image_slots].tolist() == [video] * 16 + [image] * 4 + [video] * 8
    sent, sent_meta, _ = _Wire.pack(*step).unpack()
    assert sent_meta == meta
    for one, other in zip(tensors.pixel_values, sent.microbatches[0].pixel_values, strict=True):
        assert torch.equal(one, other)
    del tensors.pixel_values[3], tensors.image_names[3]
    with pytest.raises(DataError, match="microbatch 0: video 2 of sample 1 is lost"):
        check_batch(batch, meta)


def test_a_step_of_qwen3_vl_has_each_patch_in_time_as_an_item(folder: Path) -> None:
    encoder = {"model_type": THREE, "num_position_embeddings": 4, "deepstack_visual_indexes": []}
    bad = [ONE | {"videos": ["absent.npy"]}, ONE | {"messages": said("<video><video>?")}]
    options = {**AREA, "min_pixels": 1024, "max_pixels": 4096, "on_error": "skip"}
    config = job(folder, [ONE, *bad, MIXED], encoder, **options)
    with Loader(config, num_steps=1) as loader:
        batch, meta, state = next(loader)
    check_batch(batch, meta)
    (tensors,), (counts,) = batch.microbatches, meta.microbatches
    keys = [(0, 0, 0), (0, 0, 1), (3, 1, 0), (3, 1, 1), (3, 0), (3, 2, 0), (3, 2, 1)]
    assert [image.key for image in counts.images] == tensors.image_names == keys
    assert [len(pixels) for pixels in tensors.pixel_values] == [image.num_patches for image in counts.images]
    assert meta.num_images == 7 and meta.num_skipped == 2
    text = load_tokenizer(config.tokenizer).decode(tensors.input_ids)
    assert text.count("<0.2 seconds><|vision_start|><|video_pad|>") == 1, "of frames at 2 a second"
    assert text.count("<0.1 seconds><|vision_start|><|video_pad|>") == 2, "of frames at 4 a second"
    assert "<|vision_start|><|vision_start|>" not in text and "<|vision_start|><" + "0" not in text
    sent, sent_meta, _ = _Wire.pack(batch, meta, state).unpack()
    check_batch(sent, sent_meta)
    names = tensors.image_names
    names[2], names[3] = names[3], names[2]
    with pytest.raises(DataError, match="microbatch 0: its images are in another order"):
        check_batch(batch, meta)
    del tensors.pixel_values[3], names[3]
    with pytest.raises(DataError, match="microbatch 0: frame 0 of video 1 of sample 3 is lost"):
        check_batch(batch, meta)


def test_bad_videos_are_skipped_and_counted_as_bad_images_are(folder: Path) -> None:
    frame = (folder / "walk" / "2.png").read_bytes()[:90]
    (folder / "torn").mkdir()
    for index in range(4):
        (folder / "torn" / f"{index}.png").write_bytes(
            frame if index == 2 else (folder / "walk" / "0.png").read_bytes()
        )
    bad = [ONE | {"videos": ["absent.npy"]}, ONE | {"videos": ["torn"]}, ONE | {"messages": said("Where?")}]
    config = job(folder, [ONE, *bad, MIXED], on_error="skip")
    with Loader(config, num_steps=1) as loader:
        batch, meta, _ = next(loader)
    assert [document.sample for document in meta.microbatches[0].documents] == [0, 4]
    assert meta.num_skipped == 3
    check_batch(batch, meta)
    for row in bad[:2]:
        with pytest.raises(DataError, match=r"^video 0 of sample 0"), Loader(job(folder, [row]), num_steps=1) as loader:
            next(loader)


def test_a_video_too_long_for_a_microbatch_follows_too_long(folder: Path) -> None:
    for too_long, message in (
        ("raise", r"do not fit training.seq_len = 20; its videos have 8 of them: lower data.video_max_frames or data"),
        ("truncate", "not cut"),
    ):
        config = job(folder, [ONE], seq_len=20, too_long=too_long)
        with pytest.raises(DataError, match=message), Loader(config, num_steps=1) as loader:
            next(loader)
