"""Several sources in one job: what the loader yields of them, and what is refused."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mmtrain.config.config import Config
from mmtrain.config.data import SourceConfig
from mmtrain.data.loader import LoadedStep, Loader
from mmtrain.data.packing import LoaderState
from mmtrain.errors import ConfigError, DataError
from tests.data.samples import make_config, png
from tests.data.test_loader import assert_same, steps
from tests.data.videos import make_video_config


@pytest.fixture
def mixture(tmp_path: Path, charts: Path) -> list[SourceConfig]:
    """The charts, and a folder `squares` in another form with images of the same names as the charts' indices."""
    folder = tmp_path / "squares"
    folder.mkdir()
    write_llava(folder, 20)
    return [
        SourceConfig(source=str(charts), weight=3.0, name="charts"),
        SourceConfig(source=str(folder), weight=1.0),
    ]


def write_llava(folder: Path, count: int, name: str = "train") -> None:
    rows = []
    for index in range(count):
        (folder / f"{index}.png").write_bytes(png(60 + index, 70))
        turns = [{"from": "human", "value": "<image>What colour?"}, {"from": "gpt", "value": "red"}]
        rows.append({"image": f"{index}.png", "conversations": turns})
    (folder / f"{name}.json").write_text(json.dumps(rows))


def mixed_config(mixture: list[SourceConfig], **options: Any) -> Config:
    return make_config("", sources=mixture, **{"global_batch_size": 4, **options})


def documents(found: list[LoadedStep]) -> list[tuple[str, int]]:
    return [(d.source, d.sample) for _, meta, _ in found for m in meta.microbatches for d in m.documents]


def test_samples_come_from_all_sources_by_weight_each_once_in_an_epoch(mixture: list[SourceConfig]) -> None:
    found = steps(mixed_config(mixture), 12)
    used = documents(found)
    counts = {name: [index for source, index in used if source == name] for name in ("charts", "squares")}
    assert 2 < len(counts["charts"]) / len(counts["squares"]) < 4.5
    end = found[-1][2]
    assert [at.name for at in end.sources] == ["charts", "squares"]
    for at, length in zip(end.sources, (180, 20), strict=True):
        times = Counter(counts[at.name])
        assert sum(times.values()) == at.epoch * length + at.cursor
        assert [times[index] - at.epoch for index in range(length)].count(1) == at.cursor
        assert set(times.values()) <= {at.epoch, at.epoch + 1}
    assert end.sources[1].epoch >= 1
    (image, *_) = [i for _, meta, _ in found for m in meta.microbatches for i in m.images if i.source == "squares"]
    assert image.name == f"image 0 of sample {image.sample} of squares"


def test_a_mixture_is_the_same_for_any_workers_and_replicas_and_resumes(mixture: list[SourceConfig]) -> None:
    config = mixed_config(mixture)
    whole = steps(config, 6)
    assert_same(steps(config, 6, num_workers=2), whole)
    state = LoaderState.from_dict(json.loads(json.dumps(whole[2][2].to_dict())))
    assert_same(steps(config, 3, state=state), whole[3:])
    replicas = [steps(config, 3, dp_rank=rank, dp_degree=2, state=state) for rank in range(2)]
    for step, (_, meta, after) in enumerate(whole[3:]):
        parts = [replicas[g % 2][step][1].microbatches[g // 2] for g in range(4)]
        assert tuple(parts) == meta.microbatches
        assert replicas[0][step][2] == replicas[1][step][2] == after


def test_streams_are_mixed_as_the_same_sources_in_order(mixture: list[SourceConfig]) -> None:
    by_index = steps(mixed_config(mixture, shuffle=False), 4)
    assert_same(steps(mixed_config(mixture, shuffle=False, streaming=True), 4), by_index)


def test_the_held_out_splits_are_mixed_too(tmp_path: Path, mixture: list[SourceConfig]) -> None:
    config = mixed_config(mixture)
    with pytest.raises(ConfigError, match=r"split 'validation' of .*squares.* does not exist"):
        steps(config, 1, split="validation")
    write_llava(tmp_path / "squares", 9, "validation")
    found = steps(config, 2, split="validation")
    assert {source for source, _ in documents(found)} == {"charts", "squares"}
    assert documents(steps(config, 2, split="validation")) == documents(found)


def test_a_source_may_train_on_another_split(tmp_path: Path, mixture: list[SourceConfig]) -> None:
    write_llava(tmp_path / "squares", 6, "more")
    one = [mixture[0], SourceConfig(source=mixture[1].source, weight=1.0, split="more", name="squares")]
    indices = {index for source, index in documents(steps(mixed_config(one), 12)) if source == "squares"}
    assert indices == set(range(6))


def test_errors_name_the_source_of_the_sample(tmp_path: Path, mixture: list[SourceConfig]) -> None:
    for path in (tmp_path / "squares").glob("*.png"):
        path.write_bytes(b"no image")
    with pytest.raises(DataError, match=r"^image 0 of sample \d+ of squares: .*not an image"):
        steps(mixed_config(mixture), 4)
    found = steps(mixed_config(mixture, on_error="skip"), 4)
    assert {source for source, _ in documents(found)} == {"charts"}
    assert sum(meta.num_skipped for _, meta, _ in found) > 3
    with pytest.raises(DataError, match=r"^sample \d+ of (charts|squares): \d+ tokens do not fit training"):
        steps(mixed_config(mixture, seq_len=20, on_error="skip"), 1)


def test_sources_of_another_kind_are_refused(tmp_path: Path, mixture: list[SourceConfig], shapes: Path) -> None:
    clips = SourceConfig(source=str(shapes), weight=1.0, name="clips")
    with pytest.raises(ConfigError, match=r"shapes \(train\) has the columns .*; these are clips, which a job"):
        Loader(mixed_config([*mixture, clips]))
    with pytest.raises(ConfigError, match=r"set \(train\) has no column `caption`; it has .*messages"):
        Loader(make_video_config("", sources=[clips, mixture[0]]))


def test_clips_of_one_index_keep_names_of_their_own(shapes: Path) -> None:
    twice = [SourceConfig(source=str(shapes), weight=1.0, name=name) for name in "ab"]
    config = make_video_config("", sources=twice, shuffle=False)
    seen = set()
    for _, meta, _ in steps(config, 3):
        clips = [clip for m in meta.microbatches for clip in m.clips]
        names = [(clip.sample, clip.index) for clip in clips]
        assert len(set(names)) == len(names), "the noise of a clip is drawn by this name"
        seen |= {clip.source for clip in clips}
    assert seen == {"a", "b"}
