"""Sounds, and images of further encoders, in conversations: from the columns of a record to tokens and encoder input,
against transformers' own feature extractor."""

import base64
import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import WhisperFeatureExtractor

from mmtrain.config.config import Config, check
from mmtrain.config.data import TokenizerConfig
from mmtrain.data.conversation_records import Record, kinds_of, record_kind
from mmtrain.data.conversations import make_processor
from mmtrain.data.loader import Loader
from mmtrain.data.processor import Document, Processor
from mmtrain.data.questions import question_before
from mmtrain.data.sources import open_source
from mmtrain.errors import ConfigError, DataError
from mmtrain.models.batch import IGNORE_INDEX, check_batch
from tests.data.samples import make_config, png
from tests.data.sound_files import chunk, form, hearing, noise, riff, tone, wav

LENGTHS = {"beep": 0.4, "long": 2.5}
"""Seconds of the sounds that records name."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, (name, seconds) in enumerate(LENGTHS.items()):
        samples = 0.5 * tone(440, seconds, 22_050) + 0.3 * noise(round(seconds * 22_050), seed)
        (tmp_path / f"{name}.wav").write_bytes(wav(samples, 22_050))
    (tmp_path / "0.png").write_bytes(png(56, 56))
    (tmp_path / "map.png").write_bytes(png(40, 30, "green"))
    return tmp_path


def job(folder: Path, *rows: dict[str, Any], vision: bool = True, **options: Any) -> Config:
    if rows:
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"vocab_size": 450, "global_batch_size": 1, "shuffle": False, **options}
    return hearing(make_config(folder, **options), folder, vision=vision)


def read(config: Config, index: int = 0) -> Record:
    record = open_source(config.data, "train", record_kind(kinds_of(config.model)))[index]
    assert record is not None
    return record


def made(config: Config, index: int = 0) -> tuple[Processor, Document]:
    processor = make_processor(config)
    return processor, processor.document(read(config, index))


def said(text: Any, answer: str = "a beep") -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


# ---------------------------------------------------------------------------------------------- records

BASE64 = base64.b64encode(wav(tone())).decode()
TEXT = {"type": "text", "text": "What?"}
TURNS = [{"from": "human", "value": "<audio>What?"}, {"from": "gpt", "value": "a beep"}]
ROWS: dict[str, dict[str, Any]] = {
    "a list": {"audios": ["beep.wav"], "messages": said("<audio>What?")},
    "one": {"audio": "beep.wav", "messages": said("<audio>What?")},
    "LLaVA's form": {"audio": "beep.wav", "conversations": TURNS},
    "by its ending": {"wav": "beep.wav", "messages": said("<audio>What?")},
    "a part": {"messages": said([{"type": "audio", "audio": "beep.wav"}, TEXT])},
    "a part with a path": {"messages": said([{"type": "audio", "path": "beep.wav"}, TEXT])},
    "a part without": {"audio": "beep.wav", "messages": said([{"type": "audio"}, TEXT])},
    "Qwen2-Audio's part": {"messages": said([{"type": "audio", "audio_url": "beep.wav"}, TEXT])},
    "a URL": {"messages": said([{"type": "audio_url", "audio_url": {"url": "beep.wav"}}, TEXT])},
    "OpenAI's part": {"messages": said([{"type": "input_audio", "input_audio": {"data": BASE64}}, TEXT])},
    "a data URL": {"audio": f"data:audio/wav;base64,{BASE64}", "messages": said("<audio>What?")},
    "decoded": {"audio": {"array": tone().tolist(), "sampling_rate": 16_000}, "messages": said("<audio>What?")},
    "one turn": {"audio": "beep.wav", "question": "What?", "answer": "a beep"},
    "the token itself": {"audio": "beep.wav", "messages": said("<audio>What?")},
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_each_form_gives_the_same_tokens(folder: Path, name: str) -> None:
    processor, document = made(job(folder, ROWS[name]))
    text = processor.tokenizer.decode(document.input_ids)
    assert text == f"<|im_start|>user\n{'<audio>' * 25}What?<|im_end|>\n<|im_start|>assistant\na beep<|im_end|>\n"
    (window,) = document.meta.images
    assert (window.module, window.grid, window.num_tokens, window.frame) == ("audio", (1, 1, 50), 25, 0)
    (values,) = processor.pixels(document)
    assert values.shape == (1, 80, 100)


@pytest.mark.parametrize("column", ["text", "caption"])
def test_a_transcript_is_the_answer_to_its_sound(folder: Path, column: str) -> None:
    processor, document = made(job(folder, {"audio": "beep.wav", column: "a beep"}))
    labels = document.labels[document.labels != IGNORE_INDEX]
    assert processor.tokenizer.decode(labels) == "a beep<|im_end|>"
    assert len(document.meta.images) == 1


@pytest.mark.parametrize("with_datasets", [True, False])
def test_the_audio_feature_stays_encoded(folder: Path, monkeypatch: pytest.MonkeyPatch, with_datasets: bool) -> None:
    audio = {"bytes": (folder / "beep.wav").read_bytes(), "path": None}
    rows = {"audio": [audio], "audios": [[audio, audio]], "text": ["a beep"]}
    features = datasets.Features(
        {"audio": datasets.Audio(), "audios": datasets.List(datasets.Audio()), "text": datasets.Value("string")}
    )
    table = pa.Table.from_pydict(rows, schema=features.arrow_schema)
    if not with_datasets:
        monkeypatch.setitem(sys.modules, "datasets", None)
    for column, count in (("audio", 1), ("audios", 2)):
        path = folder / f"{column}.parquet"
        pq.write_table(table.select([column, "text"]), path)
        config = job(folder)
        record = read(dataclasses.replace(config, data=dataclasses.replace(config.data, source=str(path))))
        assert [raw.kind for raw in record.images] == ["audio"] * count
        assert record.images[0].file.read(10**6) == audio["bytes"]  # type: ignore[union-attr]


# --------------------------------------------------------------------------------------- all in one text

MIXED = {
    "messages": said("<audio>and <image>, then <maps>, <audio><image>?"),
    "audios": ["long.wav", "beep.wav"],
    "images": ["0.png", "0.png"],
    "maps": "map.png",
}


def test_each_placeholder_is_a_run_of_its_items(folder: Path) -> None:
    processor, document = made(job(folder, MIXED, seq_len=512))
    images = document.meta.images
    assert [(i.module, i.index, i.frame) for i in images] == [
        ("audio", 2, 0), ("audio", 2, 1), ("audio", 2, 2), ("vision", 0, None), ("maps", 4, None), ("audio", 3, 0),
        ("vision", 1, None),
    ]  # fmt: skip
    assert [i.num_tokens for i in images] == [25, 25, 25, 4, 4, 25, 4]
    assert [i.sound_s for i in images if i.is_sound] == [1, 1, 0.5, 0.4]
    tokens = {kind: processor.token_ids[kind] for kind in ("audio", "image", "maps")}
    kinds = {"audio": "audio", "vision": "image", "maps": "maps"}
    for image in images:
        run = document.input_ids[image.start : image.start + image.num_tokens]
        assert set(run.tolist()) == {tokens[kinds[image.module]]}
    assert sum(np.isin(document.input_ids, list(tokens.values()))) == sum(i.num_tokens for i in images)
    windows = [i.start for i in images[:3]]
    assert windows == [windows[0], windows[0] + 25, windows[0] + 50]  # one run
    assert not set(tokens.values()) & set(document.labels.tolist())


def test_windows_are_those_of_the_extractor(folder: Path) -> None:
    """The whole way, with resampling by soundfile's reading and scipy; see `test_sounds` for the tolerance."""
    import soundfile
    from scipy.signal import resample_poly

    processor, document = made(job(folder, MIXED, seq_len=512))
    values = [v for v, i in zip(processor.pixels(document), document.meta.images, strict=True) if i.is_sound]
    extractor = WhisperFeatureExtractor(chunk_length=1)
    theirs = []
    for name in ("long", "beep"):
        samples, rate = soundfile.read(folder / f"{name}.wav", dtype="float32")
        samples = resample_poly(samples, 320, 441).astype(np.float32)
        assert rate == 22_050
        pieces = [samples[at : at + 16_000] for at in range(0, len(samples), 16_000)]
        theirs += [extractor(p, sampling_rate=16_000, return_tensors="pt")["input_features"] for p in pieces]
    assert len(values) == len(theirs) == 4
    for ours, other in zip(values, theirs, strict=True):
        torch.testing.assert_close(ours, other, rtol=0, atol=1e-3)


def test_markers_of_sound_frame_it_where_the_tokenizer_has_them(folder: Path) -> None:
    config = job(folder, {"audio": "long.wav", "messages": said("<audio>?")})
    processor = make_processor(config)
    processor.tokenizer.add_special_tokens({"additional_special_tokens": ["<|audio_bos|>", "<|audio_eos|>"]})
    framed = Processor(processor.tokenizer, processor.readers)
    document = framed.document(read(config))
    assert "<|audio_bos|>" + "<audio>" * 75 + "<|audio_eos|>?" in framed.tokenizer.decode(document.input_ids)


def test_silence_and_grey_hide_each_its_own(folder: Path) -> None:
    rows = job(folder, MIXED, seq_len=512), job(folder, MIXED, seq_len=512, blank_audio=True)
    (seen, document), (silent, _) = map(made, rows)
    images = document.meta.images
    for values, blanked, grey, image in zip(
        seen.pixels(document), silent.pixels(document), seen.blanked().pixels(document), images, strict=True
    ):  # fmt: skip
        assert torch.equal(values, blanked) != image.is_sound
        assert torch.equal(values, grey) == image.is_sound
        if image.is_sound:
            assert torch.equal(blanked, torch.full_like(values, -1.5))
            assert torch.equal(blanked, seen.blanked(images=False, audio=True).pixels(document)[0])


def test_a_question_keeps_the_sounds_before_it(folder: Path) -> None:
    turns = [*said("<audio>?"), *said("and <audio>?", "more")]
    config = job(folder, {"audios": ["beep.wav", "long.wav"], "messages": turns})
    record = read(config)
    assert [raw.file.path for raw in question_before(record, 1).record.images] == [str(folder / "beep.wav")]  # type: ignore[union-attr]
    assert len(question_before(record, 3).record.images) == 2


# --------------------------------------------------------------------------------------------- steps

ROWS_OF_STEPS = [
    MIXED,
    {"messages": said("Hi")},
    {"audio": "beep.wav", "messages": said("<audio>?")},
    {"audio": "long.wav", "messages": said("<audio>?")},
    {"maps": ["map.png"], "messages": said("<maps>?")},
    {"image": "0.png", "messages": said("<image>?")},
]


def test_no_sound_is_lost_and_a_resume_is_exact(folder: Path) -> None:
    config = job(folder, *ROWS_OF_STEPS, seq_len=256, global_batch_size=2, shuffle=True)
    with Loader(config, num_steps=6) as loader:
        steps = list(loader)
    seen = Counter(
        image.key for _, meta, _ in steps for m in meta.microbatches for image in m.images
    )  # fmt: skip
    epochs = min(seen.values())
    assert epochs >= 1
    assert set(seen.values()) <= {epochs, epochs + 1}
    assert len(seen) == 7 + 1 + 3 + 1 + 1
    state = steps[2][2]
    with Loader(config, state=state, num_steps=3, num_workers=2) as loader:
        continued = list(loader)
    for (batch, meta, after), (again, other, later) in zip(steps[3:], continued, strict=True):
        assert (meta, after) == (other, later)
        check_batch(again, other)
        for ours, theirs in zip(batch.microbatches, again.microbatches, strict=True):
            assert torch.equal(ours.input_ids, theirs.input_ids)
            assert torch.equal(ours.image_slots, theirs.image_slots)
            assert all(map(torch.equal, ours.pixel_values, theirs.pixel_values))


def test_a_step_counts_sounds_apart_from_images(folder: Path) -> None:
    with Loader(job(folder, MIXED, seq_len=512), num_steps=1) as loader:
        _, meta, _ = next(loader)
    assert (meta.num_images, meta.num_sounds) == (3, 2)
    assert meta.sound_s == pytest.approx(2.9)


def test_a_model_that_hears_alone(folder: Path) -> None:
    config = job(folder, {"audio": "beep.wav", "messages": said("<audio>?")}, vision=False)
    with Loader(config, num_steps=1) as loader:
        batch, meta, _ = next(loader)
    assert [image.module for image in meta.microbatches[0].images] == ["audio"]
    assert batch.microbatches[0].pixel_values[0].shape == (1, 80, 100)


# ------------------------------------------------------------------------------------------- bad input

ONE = {"audio": "beep.wav", "messages": said("<audio>?")}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no sound": ({"audio": None}, r"^sample 0: 1 `<audio>` placeholders in its messages, but 0 sounds; write"),
    "no placeholder": ({"messages": said("?")}, r"^sample 0: 0 `<audio>` placeholders in its messages, but 1 sounds"),
    "no file": ({"audio": "none.wav"}, r"^audio 0 of sample 0 \(.*none.wav\): its file .* cannot be read: No such"),
    "truncated": ({"audio": "cut.wav"}, r"^audio 0 of sample 0 \(.*cut.wav\): its samples have 17640 bytes"),
    "empty": ({"audio": "empty.wav"}, r"^audio 0 of sample 0 \(.*empty.wav\): its file .*: it is empty"),
    "a folder": ({"audio": "."}, r"^audio 0 of .*: it is no regular file, but a folder"),
    "two columns": ({"audios": ["beep.wav"]}, r"^sample 0 of .*: it has `audios` and `audio`; keep its audios in one"),
    "a number": ({"audio": 3}, r"^audio 0 of sample 0 of .*: a int; it must be a path"),
    "no rate": ({"audio": {"array": [0.0]}}, r"^audio 0 of sample 0 of .*: `sampling_rate` = None; write the samples"),
    "no map": ({"messages": said("<audio><maps>")}, r"^sample 0: 1 `<maps>` placeholders in its messages, but 0 maps"),
    "a map that is none": ({"messages": said("<audio><maps>"), "maps": "beep.wav"}, r"^maps 1 of sample 0: its .* b"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_sounds_are_one_line(folder: Path, name: str) -> None:
    content = (folder / "beep.wav").read_bytes()
    (folder / "cut.wav").write_bytes(content[:-100])
    (folder / "empty.wav").write_bytes(b"")
    row, message = BAD[name]
    with pytest.raises(DataError, match=message) as error:
        made(job(folder, ONE | row))
    assert "\n" not in str(error.value)


def test_a_sound_that_is_too_long_is_raised_or_skipped(folder: Path) -> None:
    rows = [ONE | {"audio": "long.wav"}, ONE]
    said = r"sample 0: \d+ tokens do not fit training.seq_len = 64; its sounds have 75 of them: set data.too_long"
    with pytest.raises(DataError, match=said):
        next(Loader(job(folder, *rows, seq_len=64)))
    for cut in ("skip", "truncate"):
        config = job(folder, *rows, seq_len=64, too_long=cut)
        if cut == "truncate":
            with pytest.raises(DataError, match="a sample with images, videos or sounds is not cut"):
                next(Loader(config))
            continue
        _, meta, _ = next(Loader(config))
        assert meta.num_skipped == 1
        assert [d.sample for m in meta.microbatches for d in m.documents] == [1]


def test_damaged_content_leaves_its_microbatch(folder: Path) -> None:
    values = np.full(1000, np.inf, "<f4").tobytes()
    (folder / "inf.wav").write_bytes(riff(form(codec=3, bits=32), chunk(b"data", values)))
    rows = [ONE | {"audio": "inf.wav"}, ONE]
    with pytest.raises(DataError, match=r"^audio 0 of sample 0 \(.*inf.wav\): its sample 0 is no finite number"):
        next(Loader(job(folder, *rows)))
    batch, meta, _ = next(Loader(job(folder, *rows, on_error="skip")))
    assert (meta.num_skipped, len(batch.microbatches[0].pixel_values)) == (1, 1)


def test_a_model_that_hears_nothing_says_so(folder: Path) -> None:
    config = job(folder, ONE)
    deaf = dataclasses.replace(config, model=dataclasses.replace(config.model, modules={}))
    with pytest.raises(DataError, match=r"^sample 0: 1 sounds, but the model has no encoder of sound; add \[model"):
        made(deaf)


def test_tokens_are_in_the_vocabulary_and_of_one_encoder(folder: Path) -> None:
    config = job(folder, ONE)

    def named(token: str) -> Config:
        audio = dataclasses.replace(config.model.modules["audio"], token=token)
        return dataclasses.replace(config, model=dataclasses.replace(config.model, modules={"audio": audio}))

    with pytest.raises(
        ConfigError, match=r"^model.modules.audio.token = '<sound>' is not in the tokenizer's vocabulary"
    ):
        make_processor(named("<sound>"))
    with pytest.raises(ConfigError, match=r"audio.token = .<\|image_pad\|>. is tokenizer.image_token, too; give each"):
        check(named("<|image_pad|>"))


def test_a_control_without_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.blank_audio = true has no effect: the model has no encoder of sound"):
        check(make_config("x", blank_audio=True))


def test_an_encoder_is_not_called_like_a_column(folder: Path) -> None:
    config = job(folder, ONE)
    modules = {"caption": config.model.modules["maps"]}
    with pytest.raises(
        ConfigError, match=r"\[model.modules.caption\]: 'caption' is another part or column of a record"
    ):
        kinds_of(dataclasses.replace(config.model, modules=modules))


def test_the_tokenizer_that_ships_gets_the_tokens_of_further_encoders(folder: Path) -> None:
    config = dataclasses.replace(job(folder, MIXED, seq_len=512), tokenizer=TokenizerConfig())
    (_, shipped), (_, given) = made(config), made(job(folder, MIXED, seq_len=512))
    assert shipped.input_ids.tolist() == given.input_ids.tolist()
    language = dataclasses.replace(config.model.language, config={**config.model.language.config, "vocab_size": 449})
    small = dataclasses.replace(config, model=dataclasses.replace(config.model, language=language))
    with pytest.raises(ConfigError, match="has 450 entries, but the language model's vocab_size is 449"):
        make_processor(small)
