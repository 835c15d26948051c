"""Pairs of images and captions: records, tokens and pixels as transformers' processors make them, batches."""

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    CLIPImageProcessor,
    CLIPProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    PreTrainedTokenizerFast,
    SiglipImageProcessor,
    SiglipProcessor,
    SiglipTextConfig,
    SiglipTextModel,
)

from mmtrain.config.config import Config
from mmtrain.config.data import DataConfig, SourceConfig, TokenizerConfig
from mmtrain.config.sections import TrainingConfig
from mmtrain.data.loader import Loader
from mmtrain.data.packing import LoaderState
from mmtrain.data.pair_records import PAIRS
from mmtrain.data.pair_samples import CaptionTokens
from mmtrain.data.sources import open_source
from mmtrain.data.toy.pairs import make_pairs, pairs
from mmtrain.errors import ConfigError, DataError
from mmtrain.models.batch import IGNORE_INDEX
from tests.models.towers import CAPTIONS, two_towers

CAPTION_TEXTS = ["A red cat", "a very long caption about nothing at all that does not fit", "x"]


def clip_tokenizer(folder: Path) -> CLIPTokenizer:
    """A CLIP tokenizer of letters, whose end token is 95. It is saved to the folder."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = {token: number for number, token in enumerate(f"{c}{end}" for c in letters for end in ("", "</w>"))}
    vocabulary |= {f"unused{number}": number for number in range(len(vocabulary), 94)}
    vocabulary |= {"<|startoftext|>": 94, "<|endoftext|>": 95}
    tokenizer = CLIPTokenizer(vocab=vocabulary, merges=[])
    tokenizer.save_pretrained(folder)
    return tokenizer


def padding_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A tokenizer of words that ends a text with a token of its own, as SigLIP's. It is saved to the folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {token: n for n, token in enumerate(("<pad>", "</s>", "<unk>", "a", "red", "cat", "very", "long", "that"))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    made.save_pretrained(folder)
    return made


def job(source: Path, kind: str = "clip", *, tokenizer: Path | str = "", seq_len: int = 16, **data: Any) -> Config:
    return Config(
        model=two_towers(kind),
        data=DataConfig(source=str(source), split="train", num_workers=0, **data),
        tokenizer=TokenizerConfig(path=str(tokenizer)),
        training=TrainingConfig(steps=1, seq_len=seq_len, global_batch_size=2),
    )


def noise_image(seed: int, height: int = 20, width: int = 30) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """A jsonl file of rows, and the images 0.png, 1.png, ... beside it."""
    folder.mkdir(exist_ok=True)
    for number in range(6):
        noise_image(number).save(folder / f"{number}.png")
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


# ------------------------------------------------------------------------------------------- as transformers


@pytest.mark.parametrize("text", CAPTION_TEXTS)
def test_tokens_of_clip_are_those_of_its_tokenizer(tmp_path, text):
    tokenizer = clip_tokenizer(tmp_path / "tokenizer")
    ids, end, _ = CaptionTokens(job(tmp_path, tokenizer=tmp_path / "tokenizer"))(text)
    assert ids.tolist() == tokenizer(text, truncation=True, max_length=12)["input_ids"]
    assert end == len(ids) - 1 and ids[end] == 95


@pytest.mark.parametrize("text", CAPTION_TEXTS)
def test_tokens_of_siglip_are_padded(tmp_path, text):
    tokenizer = padding_tokenizer(tmp_path / "tokenizer")
    ids, end, _ = CaptionTokens(job(tmp_path, "siglip", tokenizer=tmp_path / "tokenizer"))(text)
    assert ids.tolist() == tokenizer(text, padding="max_length", truncation=True, max_length=9)["input_ids"]
    assert end == 8


def test_old_folders_of_clip_name_another_end(tmp_path, monkeypatch):
    """With `eos_token_id` = 2 the class takes the largest id."""
    clip_tokenizer(tmp_path / "tokenizer")
    monkeypatch.setitem(CAPTIONS["clip"], "eos_token_id", 2)
    ids, end, _ = CaptionTokens(job(tmp_path, tokenizer=tmp_path / "tokenizer"))("a cat")
    assert ids[end] == 95 == ids.max()


@pytest.mark.parametrize(("kind", "processor"), [
    ("clip", CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})),
    ("siglip", SiglipImageProcessor(size={"height": 16, "width": 16})),
])  # fmt: skip
def test_pixels_are_those_of_the_image_processor(tmp_path, kind, processor):
    make = clip_tokenizer if kind == "clip" else padding_tokenizer
    make(tmp_path / "tokenizer")
    source = write(tmp_path / "data", [{"image": f"{n}.png", "caption": "a red cat"} for n in range(4)])
    config = job(source, kind, tokenizer=tmp_path / "tokenizer", max_pairs=2, shuffle=False)
    with Loader(config) as loader:
        batch, meta, _ = next(iter(loader))
    found = torch.cat([pixels for m in batch.microbatches for pixels in m.pixel_values])
    wanted = processor(images=[Image.open(source / f"{n}.png") for n in range(4)], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
    assert [len(m.documents) for m in meta.microbatches] == [2, 2]


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_a_batch_is_that_of_the_whole_processor(tmp_path, kind):
    """Ids and pixels, and the label stands where the class makes the embedding: of CLIP at the first end token, which
    this tokenizer also has for an unknown letter."""
    tokenizer = (clip_tokenizer if kind == "clip" else padding_tokenizer)(tmp_path / "tokenizer")
    if kind == "clip":
        images = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
        theirs, lengths = CLIPProcessor(images, tokenizer), {"padding": True, "max_length": 12}
        tower = CLIPTextModel(CLIPTextConfig(**CAPTIONS[kind])).eval()
    else:
        images = SiglipImageProcessor(size={"height": 16, "width": 16})
        theirs, lengths = SiglipProcessor(images, tokenizer), {"padding": "max_length", "max_length": 9}
        tower = SiglipTextModel(SiglipTextConfig(**CAPTIONS[kind])).eval()
    texts = ["A red cat", CAPTION_TEXTS[1], " x\n", "a, b!"]
    rows = [{"image": f"{n}.png", "caption": text} for n, text in enumerate(texts)]
    source = write(tmp_path / "data", rows)
    with Loader(job(source, kind, tokenizer=tmp_path / "tokenizer", max_pairs=2, shuffle=False)) as loader:
        batch, meta, _ = next(iter(loader))
    images = [Image.open(source / f"{n}.png") for n in range(4)]
    wanted = theirs(text=texts, images=images, return_tensors="pt", truncation=True, **lengths)
    pixels = torch.cat([pixels for m in batch.microbatches for pixels in m.pixel_values])
    torch.testing.assert_close(pixels, wanted["pixel_values"], atol=1e-6, rtol=0)
    with torch.no_grad():
        states = tower(input_ids=wanted["input_ids"])
        pooled = states.pooler_output
        by_position = states.last_hidden_state if kind == "clip" else tower.head(states.last_hidden_state)
    captions = [
        (ids, labels)
        for m, of in zip(batch.microbatches, meta.microbatches, strict=True)
        for ids, labels in zip(m.input_ids.split(list(of.lengths)), m.labels.split(list(of.lengths)), strict=True)
    ]
    for number, (ids, labels) in enumerate(captions):
        row = wanted["input_ids"][number]
        assert ids.tolist() == (row[wanted["attention_mask"][number] == 1] if kind == "clip" else row).tolist()
        (end,) = (labels != IGNORE_INDEX).nonzero().flatten().tolist()
        assert labels[end] == ids[end]
        same = [n for n in range(len(row)) if torch.allclose(by_position[number, n], pooled[number], atol=1e-6)]
        assert same == [end]


# -------------------------------------------------------------------------------------------------- batches


def test_a_microbatch_has_its_pairs_in_order(tmp_path):
    clip_tokenizer(tmp_path / "tokenizer")
    texts = ["a", "bc", "def", "g", "hi"]
    source = write(tmp_path / "data", [{"jpg": f"{n}.png", "txt": text} for n, text in enumerate(texts)])
    with Loader(job(source, tokenizer=tmp_path / "tokenizer", max_pairs=3, shuffle=False)) as loader:
        batch, meta, _ = next(iter(loader))
    first = batch.microbatches[0]
    assert [document.num_tokens for document in meta.microbatches[0].documents] == [3, 4, 5]
    assert [i.num_tokens for i in meta.microbatches[0].images] == [0, 0, 0] and not len(first.image_slots)
    labelled = (first.labels != IGNORE_INDEX).nonzero().squeeze(1).tolist()
    assert labelled == [2, 6, 11] and first.input_ids[labelled].tolist() == [95] * 3
    assert meta.num_targets == sum(len(m.documents) for m in meta.microbatches)


def drawn(config: Config, epochs: int, **options: Any) -> list[dict[tuple[str, int], int]]:
    """[epoch] -> (source, sample) -> tokens of its caption. Args: epochs: of one step each."""
    with Loader(config, num_steps=epochs, **options) as loader:
        return [
            {(d.source, d.sample): d.num_tokens for m in meta.microbatches for d in m.documents}
            for _, meta, _ in loader
        ]


def test_of_several_captions_one_is_drawn_for_each_epoch(tmp_path):
    """By the seed: again the same in another process or from a saved state, another with another seed or epoch."""
    clip_tokenizer(tmp_path / "tokenizer")
    rows = [{"image": f"{n}.png", "captions": ["a", "bc", "def"]} for n in range(6)]
    config = job(write(tmp_path / "data", rows), tokenizer=tmp_path / "tokenizer", max_pairs=3)
    epochs = drawn(config, 12)
    assert all(len(epoch) == 6 for epoch in epochs)
    for sample in range(6):
        assert {epoch["", sample] for epoch in epochs} == {3, 4, 5}
    assert drawn(replace(config, data=replace(config.data, num_workers=2)), 4) == epochs[:4]
    assert drawn(config, 2, state=LoaderState(seed=config.debug.seed, epoch=3)) == epochs[3:5]
    assert drawn(config, 2, state=LoaderState(seed=config.debug.seed + 1)) != epochs[:2]


def test_captions_are_drawn_by_the_epoch_of_their_own_source(tmp_path):
    clip_tokenizer(tmp_path / "tokenizer")
    rows = [{"image": f"{n}.png", "captions": ["a", "bc", "def"]} for n in range(6)]
    sources = [SourceConfig(source=str(write(tmp_path / name, rows)), weight=1.0, name=name) for name in ("one", "two")]
    config = job(tmp_path / "one", tokenizer=tmp_path / "tokenizer", max_pairs=3)
    config = replace(config, data=replace(config.data, source="", sources=sources))
    found: dict[tuple[str, int], set[int]] = {}
    for step in drawn(config, 24):
        for key, length in step.items():
            found.setdefault(key, set()).add(length)
    assert set(found) == {(name, n) for name in ("one", "two") for n in range(6)}
    assert all(lengths == {3, 4, 5} for lengths in found.values())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("kind", "most"), [("clip", 12), ("siglip", 9)])
def test_captions_that_are_cut_are_named_once(tmp_path, caplog, kind, most, workers):
    (tokenizer := clip_tokenizer if kind == "clip" else padding_tokenizer)(tmp_path / "tokenizer")
    texts = ["a red cat", CAPTION_TEXTS[1], "x", CAPTION_TEXTS[1]]
    source = write(tmp_path / "data", [{"image": f"{n}.png", "caption": text} for n, text in enumerate(texts)])
    config = job(source, kind, tokenizer=tmp_path / "tokenizer", max_pairs=2, shuffle=False)
    config = replace(config, data=replace(config.data, num_workers=workers))
    with Loader(config, num_steps=3) as loader, caplog.at_level("INFO", "mmtrain"):
        assert len(list(loader)) == 3
    (message,) = [record.message for record in caplog.records if "are cut" in record.message]
    whole = tokenizer(tmp_path / "tokenizer")(texts[1])["input_ids"]
    assert f"cut to {most} tokens" in message
    assert f"of sample 1 is the first, of which {len(whole) - most} tokens" in message


# -------------------------------------------------------------------------------------------------- sources


def _parquet(folder: Path) -> None:
    import datasets

    images = [{"bytes": (folder / f"{n}.png").read_bytes(), "path": None} for n in range(4)]
    features = datasets.Features({"image": datasets.Image(), "captions": [datasets.Value("string")]})
    rows = {"image": images, "captions": [[f"a{n}", f"b{n}"] for n in range(4)]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / "train.parquet")
    for n in range(6):
        (folder / f"{n}.png").unlink()


def _image_folder(folder: Path) -> None:
    rows = [{"file_name": f"{n}.png", "text": f"a{n}"} for n in range(4)]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for n in (4, 5):
        (folder / f"{n}.png").unlink()


def _shard(folder: Path) -> None:
    with tarfile.open(folder / "train-000000.tar", "w") as tar:
        for n in range(4):
            for name, content in ((f"{n}.png", (folder / f"{n}.png").read_bytes()), (f"{n}.txt", f"a{n}".encode())):
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    for n in range(6):
        (folder / f"{n}.png").unlink()


@pytest.mark.parametrize(("make", "more"), [(_parquet, True), (_image_folder, False), (_shard, False)])
def test_pairs_of_tables_folders_and_shards(tmp_path, make, more):
    pytest.importorskip("datasets")
    folder = write(tmp_path, [])
    (folder / "train.jsonl").unlink()
    contents = [(folder / f"{n}.png").read_bytes() for n in range(4)]
    make(folder)
    source = open_source(DataConfig(source=str(folder), shuffle=False), "train", PAIRS)
    records = [source[n] for n in range(4)]
    assert [r.captions for r in records] == [(f"a{n}", f"b{n}") if more else (f"a{n}",) for n in range(4)]
    assert [r.image.read(10**6) for r in records] == contents
    assert all(r.unread == () for r in records)


@pytest.mark.parametrize(("row", "words"), [
    ({"image": "0.png", "caption": " "}, "must be a text that is not empty"),
    ({"image": "0.png", "captions": ["a", ""]}, "not empty, or a list of them"),
    ({"image": "0.png", "caption": ["a", 3], "text": "b"}, "it has `caption` and `text`"),
    ({"caption": "a", "image": None}, "it has no images; a pair has one"),
    ({"caption": "a", "image": ["0.png", "1.png"]}, "it has 2 images; a pair has one"),
    ({"caption": "a", "image": "none.png"}, "sample 0"),
    ({"caption": "a", "image": "0.png", "rejected": "b"}, "`rejected` is of training on preferences"),
])  # fmt: skip
def test_rows_that_are_no_pair_are_refused(tmp_path, row, words):
    clip_tokenizer(tmp_path / "tokenizer")
    source = write(tmp_path / "data", [row, {"image": "1.png", "caption": "a", "text": None}])
    with pytest.raises(DataError, match=words), Loader(job(source, tokenizer=tmp_path / "tokenizer")) as loader:
        next(iter(loader))


@pytest.mark.parametrize(("row", "words"), [
    ({"image": "0.png", "captoin": "a"}, "no column with captions .*did you mean 'captoin'"),
    ({"caption": "a", "photo": "0.png"}, "no column with images"),
])  # fmt: skip
def test_sources_without_pairs_are_refused(tmp_path, row, words):
    clip_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(ConfigError, match=words):
        Loader(job(write(tmp_path / "data", [row] * 4), tokenizer=tmp_path / "tokenizer"))


def test_tokenizers_that_do_not_fit_are_refused(tmp_path):
    source = write(tmp_path / "data", [{"image": "0.png", "caption": "a"}] * 4)
    padding_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(ConfigError, match=r"does not end a caption with the token 95 \(eos_token_id"):
        Loader(job(source, tokenizer=tmp_path / "tokenizer"))
    with pytest.raises(ConfigError, match=r"training.seq_len = 4, but captions are padded to .* = 9"):
        Loader(job(source, "siglip", tokenizer=tmp_path / "tokenizer", seq_len=4))


# ------------------------------------------------------------------------------------------------ toy data


def test_held_out_captions_differ_and_are_not_in_training():
    held_out = [pair.caption for pair in pairs("validation", 126, 0)]
    assert len(set(held_out)) == 126
    assert not set(held_out) & {pair.caption for pair in pairs("train", 5000, 0)}


def test_the_toy_data_set_is_made_again_and_read(tmp_path):
    for folder in ("one", "two"):
        make_pairs(tmp_path / folder, 40, seed=3)
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.parquet"))
    assert len(files) == 2
    assert all((tmp_path / "one" / f).read_bytes() == (tmp_path / "two" / f).read_bytes() for f in files)
    clip_tokenizer(tmp_path / "tokenizer")
    with Loader(job(tmp_path / "one", tokenizer=tmp_path / "tokenizer", max_pairs=8)) as loader:
        batch, _, _ = next(iter(loader))
    assert [len(m.pixel_values) for m in batch.microbatches] == [8, 8]


def test_a_microbatch_that_lost_its_pairs_has_none(tmp_path):
    """Its caption stays, without an image and without a place among the pairs."""
    clip_tokenizer(tmp_path / "tokenizer")
    rows = [{"image": f"{n}.png", "caption": "a"} for n in range(4)]
    source = write(tmp_path / "data", rows)
    for number in (0, 1):
        data = (source / f"{number}.png").read_bytes()
        (source / f"{number}.png").write_bytes(data[: len(data) // 2])
    settings = {"max_pairs": 2, "shuffle": False, "on_error": "skip"}
    with Loader(job(source, tokenizer=tmp_path / "tokenizer", **settings)) as loader:
        batch, meta, _ = next(iter(loader))
    assert [m.num_targets for m in meta.microbatches] == [0, 2]
    assert not batch.microbatches[0].pixel_values and not meta.microbatches[0].images
