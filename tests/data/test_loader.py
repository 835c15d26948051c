import dataclasses
import functools
import importlib
import itertools
import multiprocessing
import operator
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from mmtrain.config.config import Config
from mmtrain.config.data import TokenizerConfig
from mmtrain.data.loader import IMPORTED, LoadedStep, Loader
from mmtrain.data.packing import LoaderState
from mmtrain.errors import ConfigError, DataError
from mmtrain.models.batch import IGNORE_INDEX, Batch
from tests.data.samples import QWEN, SIGLIP, make_config, png, text_row, write_jsonl


def steps(config: Config, num: int, **options: Any) -> list[LoadedStep]:
    with Loader(config, num_steps=num, **options) as loader:
        return list(loader)


def tensors(batch: Batch) -> list[Any]:
    out: list[Any] = []
    for m in batch.microbatches:
        out += [m.input_ids, m.labels, m.image_slots, *m.pixel_values]
    return out


def assert_same(left: list[LoadedStep], right: list[LoadedStep]) -> None:
    assert len(left) == len(right)
    for (batch, meta, state), (other_batch, other_meta, other_state) in zip(left, right, strict=True):
        assert meta == other_meta
        assert state == other_state
        for a, b in zip(tensors(batch), tensors(other_batch), strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
        assert [m.image_names for m in batch.microbatches] == [m.image_names for m in other_batch.microbatches]


def sample_sequence(found: list[LoadedStep]) -> list[list[list[int]]]:
    return [[[d.sample for d in m.documents] for m in meta.microbatches] for _, meta, _ in found]


def test_a_packed_microbatch(charts: Path) -> None:
    for batch, meta, _ in steps(make_config(charts), 4):
        assert len(batch.microbatches) == 2
        assert meta.num_skipped == 0
        for tensor, counts in zip(batch.microbatches, meta.microbatches, strict=True):
            assert tensor.input_ids.shape == tensor.labels.shape == (counts.num_tokens,)
            assert 100 < counts.num_tokens <= 256
            assert len(tensor.image_slots) == sum(i.num_tokens for i in counts.images)
            assert (tensor.input_ids[tensor.image_slots] == 5).all()
            assert (tensor.input_ids == 5).sum() == len(tensor.image_slots)
            ends = torch.tensor(counts.lengths).cumsum(0) - 1
            assert (tensor.labels[ends] == IGNORE_INDEX).all()
            assert int((tensor.labels != IGNORE_INDEX).sum()) == counts.num_targets > 0
            assert all(p.dtype == torch.float32 for p in tensor.pixel_values)
            for document in counts.documents:
                assert sum(document.answers) == document.num_targets
                assert document.grade


def test_an_epoch_uses_each_sample_once(charts: Path) -> None:
    used: list[int] = []
    for _, meta, state in Loader(make_config(charts)):
        used += [d.sample for m in meta.microbatches for d in m.documents]
        if state.epoch == 1:
            break
    assert sorted(used[:180]) != used[:180]
    assert len(set(used[: 180 - state.cursor])) == 180 - state.cursor
    assert set(used) == set(range(180))
    assert len(used) == 180 + state.cursor


def test_any_number_of_workers_gives_the_same_steps(charts: Path) -> None:
    config = make_config(charts)
    expected = steps(config, 5)
    before = torch.get_rng_state()
    for num_workers in (1, 2):
        assert_same(steps(config, 5, num_workers=num_workers), expected)
    assert torch.equal(torch.get_rng_state(), before)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("streaming", [False, True])
def test_resume_is_exact(charts: Path, streaming: bool) -> None:
    config = make_config(charts, streaming=streaming, shuffle=not streaming)
    whole = steps(config, 26)
    assert whole[-1][2].epoch >= 1  # the border of the epochs is crossed
    for at in (0, 3, 20):
        again = LoaderState.from_dict(whole[at][2].to_dict())
        assert_same(steps(config, 25 - at, state=again), whole[at + 1 :])


def test_streaming_reads_the_same_as_the_source_in_order(charts: Path) -> None:
    by_index = steps(make_config(charts, shuffle=False), 5)
    assert_same(steps(make_config(charts, shuffle=False, streaming=True), 5), by_index)


def test_the_global_sequence_does_not_depend_on_the_number_of_replicas(charts: Path) -> None:
    config = make_config(charts, global_batch_size=4)
    alone = sample_sequence(steps(config, 6))
    state = steps(config, 2)[-1][2]
    for degree in (2, 4):
        replicas = [sample_sequence(steps(config, 4, dp_rank=r, dp_degree=degree, state=state)) for r in range(degree)]
        joined = [[replicas[g % degree][step][g // degree] for g in range(4)] for step in range(4)]
        assert joined == alone[2:]


def test_validation_keeps_the_order_and_the_grades(charts: Path) -> None:
    config = make_config(charts, global_batch_size=1)
    found = steps(config, 2, split="validation")
    first = [sample for step in sample_sequence(found) for microbatch in step for sample in microbatch]
    assert sorted(first) == list(range(len(first)))
    grades = {d.grade for _, meta, _ in found for m in meta.microbatches for d in m.documents}
    assert grades <= {"easy", "medium", "hard", "text"}
    assert len(grades) >= 3
    assert sample_sequence(steps(config, 2, split="validation")) == sample_sequence(found)


def test_seeds_give_different_orders(charts: Path) -> None:
    orders = [sample_sequence(steps(make_config(charts), 1, state=LoaderState(seed=seed))) for seed in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]


def test_a_loader_starts_again_and_stays_at_its_end(charts: Path) -> None:
    loader = Loader(make_config(charts), num_steps=2)
    first = list(loader)
    assert next(loader, None) is None
    assert loader.state == first[-1][2]
    assert_same(list(loader), first)


def test_blank_images_change_the_pixels_alone(charts: Path) -> None:
    seen, hidden = steps(make_config(charts), 2), steps(make_config(charts, blank_images=True), 2)
    assert [(meta, state) for _, meta, state in seen] == [(meta, state) for _, meta, state in hidden]
    for (batch, _, _), (other, _, _) in zip(seen, hidden, strict=True):
        for m, n in zip(batch.microbatches, other.microbatches, strict=True):
            assert torch.equal(m.input_ids, n.input_ids)
            assert torch.equal(m.labels, n.labels)
            assert len({p.unique().numel() for p in n.pixel_values}) <= 1
            assert all(not torch.equal(p, q) for p, q in zip(m.pixel_values, n.pixel_values, strict=True))


def test_encoders_of_a_fixed_size(charts: Path) -> None:
    for batch, meta, _ in steps(make_config(charts, encoder=SIGLIP), 2):
        for tensor, counts in zip(batch.microbatches, meta.microbatches, strict=True):
            assert {tuple(p.shape) for p in tensor.pixel_values} <= {(1, 3, 56, 56)}
            assert {(i.grid, i.num_tokens) for i in counts.images} <= {((1, 4, 4), 4)}


# ------------------------------------------------------------------------------------------ bad samples


def damaged(folder: Path, header: bool) -> Path:
    path = write_jsonl(folder, 12)
    (folder / "4.png").write_bytes(b"no picture" if header else png(64, 70)[:100])
    return path


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("header", [True, False])
def test_a_corrupt_image_stops_with_its_name(tmp_path: Path, header: bool, num_workers: int) -> None:
    config = make_config(damaged(tmp_path, header), seq_len=128, shuffle=False)
    reason = "not an image" if header else "its content is corrupt"
    with pytest.raises(DataError, match=f"^image 0 of sample 4: .*{reason}") as failure:
        steps(config, 3, num_workers=num_workers)
    assert "\n" not in str(failure.value)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("header", [True, False])
def test_a_corrupt_image_is_skipped_and_counted_once(tmp_path: Path, header: bool) -> None:
    source = damaged(tmp_path, header)
    config = make_config(source, seq_len=128, shuffle=False, on_error="skip")
    found = steps(config, 3)
    skipped = [meta.num_skipped for _, meta, _ in found]
    assert skipped[0] == 1
    assert sum(skipped) >= 2
    assert all(4 not in samples for step in sample_sequence(found) for samples in step)
    replicas = [steps(config, 3, dp_rank=rank, dp_degree=2) for rank in range(2)]
    assert [sum(r[step][1].num_skipped for r in replicas) for step in range(3)] == skipped
    joined = [[sample_sequence(replicas[g])[step][0] for g in range(2)] for step in range(3)]
    assert joined == sample_sequence(found)
    if not header:  # found after planning: all others stay where they are
        (tmp_path / "4.png").write_bytes(png(64, 70))
        whole = steps(config, 3)
        without = [[[s for s in samples if s != 4] for samples in step] for step in sample_sequence(whole)]
        assert without == sample_sequence(found)
        assert [state for _, _, state in whole] == [state for _, _, state in found]


def test_whatever_a_library_raises_of_a_sample_is_named_and_follows_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize = PreTrainedTokenizerFast.__call__

    def fails(self: PreTrainedTokenizerFast, text: str, **options: object) -> object:
        if "a text that it cannot take" in text:
            raise ValueError("no such text")
        return tokenize(self, text, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", fails)
    turns = [{"role": "user", "content": "a text that it cannot take"}, {"role": "assistant", "content": "b"}]
    source = write_jsonl(tmp_path, 12, {3: {"messages": turns, "images": []}})
    with pytest.raises(DataError, match=r"^sample 3: the tokenizer fails on .*: ValueError: no such text"):
        steps(make_config(source, seq_len=128, shuffle=False), 1)
    found = steps(make_config(source, seq_len=128, shuffle=False, on_error="skip"), 1)
    assert found[0][1].num_skipped == 1
    assert 3 not in functools.reduce(operator.iadd, sample_sequence(found)[0], [])


def test_a_bug_of_ours_is_no_bad_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object) -> None:
        raise AssertionError("ours")

    monkeypatch.setattr("mmtrain.data.processor.Processor.document", wrong)
    config = make_config(write_jsonl(tmp_path, 3), shuffle=False, on_error="skip")
    with pytest.raises(AssertionError, match="ours"):
        steps(config, 1)


def test_an_emptied_microbatch_keeps_text_without_targets(tmp_path: Path) -> None:
    source = damaged(tmp_path, header=False)
    config = make_config(source, seq_len=40, global_batch_size=1, shuffle=False, on_error="skip")
    found = steps(config, 6)
    _, meta, _ = found[4]
    (document,) = meta.microbatches[0].documents
    assert (document.sample, document.num_targets, document.images) == (4, 0, ())
    assert document.num_tokens > 10
    assert [m.num_skipped for _, m, _ in found] == [0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("replica", [0, 1])
def test_a_split_with_fewer_samples_than_microbatches_fills_them_with_blank_ones(tmp_path: Path, replica: int) -> None:
    config = make_config(write_jsonl(tmp_path, 1), shuffle=False, global_batch_size=4)
    with pytest.raises(DataError, match=r"^the split 'train' \(data.split\) of the source has too few samples: its 1"):
        steps(config, 1)
    ((batch, meta, _),) = steps(config, 1, may_be_short=True, dp_rank=replica, dp_degree=2)
    assert [m.num_targets > 0 for m in meta.microbatches] == [replica == 0, False]
    assert [len(m.images) for m in meta.microbatches] == [1 - replica, 0]
    assert meta.num_skipped == 0
    assert [int((m.labels != IGNORE_INDEX).sum()) for m in batch.microbatches] == [
        m.num_targets for m in meta.microbatches
    ]


def test_placeholders_that_disagree_follow_the_policy(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path, 12, {3: {"images": ["3.png", "2.png"]}})
    with pytest.raises(DataError, match=r"^sample 3: 1 `<image>` placeholders .* 2 images"):
        steps(make_config(source, seq_len=128, shuffle=False), 1)
    found = steps(make_config(source, seq_len=128, shuffle=False, on_error="skip"), 1)
    assert found[0][1].num_skipped == 1
    assert 3 not in functools.reduce(operator.iadd, sample_sequence(found)[0], [])


def test_a_sample_that_is_too_long_follows_the_policy(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path, 12, {3: text_row(200)})
    options: dict[str, Any] = {"seq_len": 128, "shuffle": False}
    with pytest.raises(DataError, match=r"^sample 3: \d+ tokens do not fit training.seq_len = 128; set data.too_long"):
        steps(make_config(source, **options), 1)
    skipped = steps(make_config(source, too_long="skip", **options), 1)
    assert skipped[0][1].num_skipped == 1
    assert 3 not in functools.reduce(operator.iadd, sample_sequence(skipped)[0], [])
    cut = steps(make_config(source, too_long="truncate", **options), 1)
    (document,) = [d for m in cut[0][1].microbatches for d in m.documents if d.sample == 3]
    assert document.num_tokens == 128
    assert 100 < document.num_targets < 128
    assert cut[0][1].num_skipped == 0


def test_a_long_sample_with_images_is_never_cut(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "<image>" * 9}, {"role": "assistant", "content": "red"}]}
    source = write_jsonl(tmp_path, 12, {3: {**row, "images": ["1.png"] * 9}})
    config = make_config(source, seq_len=60, shuffle=False, too_long="truncate")
    with pytest.raises(DataError, match=r"sample 3: .* a sample with images, videos or sounds is not cut"):
        steps(config, 3)


@pytest.mark.parametrize("too_long", ["raise", "truncate"])
@pytest.mark.parametrize(
    ("encoder", "advice"),
    [(QWEN, "its images have 64 of them: lower data.max_pixels, set "), (SIGLIP, "its images have 4 of them: set ")],
)
def test_an_image_of_more_tokens_than_fit_names_what_limits_it(
    tmp_path: Path, encoder: dict[str, Any], advice: str, too_long: Any
) -> None:
    source = write_jsonl(tmp_path, 3)
    (tmp_path / "1.png").write_bytes(png(224, 224))
    seq_len = 60 if encoder is QWEN else 16
    said = rf"^sample [01]: \d+ tokens do not fit training.seq_len = {seq_len}.*; {advice}data.too_long = .skip., or"
    with pytest.raises(DataError, match=said):
        steps(make_config(source, encoder=encoder, seq_len=seq_len, shuffle=False, too_long=too_long), 1)
    if encoder is QWEN:  # which what it names makes fit
        assert steps(make_config(source, seq_len=seq_len, shuffle=False, max_pixels=20000), 1)[0][1].num_skipped == 0


@pytest.mark.parametrize(("on_error", "too_long"), [("raise", "skip"), ("skip", "raise"), ("raise", "raise")])
def test_text_of_too_many_bytes_is_not_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_error: Any, too_long: Any
) -> None:
    source = write_jsonl(tmp_path, 12, {3: text_row(500)})
    options: dict[str, Any] = {
        "seq_len": 4096,
        "global_batch_size": 1,
        "shuffle": False,
        "on_error": on_error,
        "too_long": too_long,
    }
    assert steps(make_config(source, **options), 1)[0][1].num_skipped == 0
    longest, tokenize = [0], PreTrainedTokenizerFast.__call__

    def measured(self: Any, text: str, **keywords: Any) -> Any:
        longest[0] = max(longest[0], len(text))
        return tokenize(self, text, **keywords)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", measured)
    config = make_config(source, max_text_bytes=1000, **options)
    if "skip" in (on_error, too_long):
        assert steps(config, 1)[0][1].num_skipped == 1
    else:
        with pytest.raises(
            DataError, match=r"^sample 3: its text has 2\d\d\d bytes, more than data.max_text_bytes = 1000"
        ):
            steps(config, 1)
    assert 0 < longest[0] <= 1000


def test_a_tiny_source_is_refused_with_the_numbers(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path, 2)
    with pytest.raises(DataError, match=r"2 usable ones have .* tokens and fill 1 of training.global_batch_size = 4"):
        steps(make_config(source, global_batch_size=4), 1)


# ------------------------------------------------------------------------------------------ set-up


def test_what_cannot_be_opened_is_named_by_the_worker_too(tmp_path: Path) -> None:
    config = make_config(tmp_path / "absent.jsonl", num_workers=1)
    with pytest.raises(ConfigError, match=r"absent.jsonl' does not exist"):
        next(iter(Loader(config)))
    with pytest.raises(ConfigError, match=r"absent.jsonl' does not exist"):
        Loader(config, num_workers=0)
    assert multiprocessing.active_children() == []


def test_parts_that_do_not_fit_are_refused(charts: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 448 entries, but the language model's vocab_size is 100"):
        Loader(make_config(charts, vocab_size=100))
    with pytest.raises(ConfigError, match="one fixed image size"):
        Loader(make_config(charts, encoder=SIGLIP, max_pixels=5000))
    (tmp_path / "preprocessor_config.json").write_text('{"size": {"height": 99, "width": 99}}')
    with pytest.raises(ConfigError, match="makes images of side 99, but the encoder's image_size is 56"):
        Loader(make_config(charts, encoder=SIGLIP, image_processor=str(tmp_path)))
    with pytest.raises(ConfigError, match="each replica needs a microbatch"):
        Loader(make_config(charts), dp_degree=3)
    with pytest.raises(ConfigError, match="image_token = 'x'"):
        Loader(dataclasses.replace(make_config(charts), tokenizer=TokenizerConfig(image_token="x")))


def test_workers_end_with_a_parent_that_was_killed(charts: Path, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        f"""
import multiprocessing, os, time
from mmtrain.data.loader import Loader
from tests.data.samples import make_config
if __name__ == "__main__":
    loader = Loader(make_config({str(charts)!r}, num_workers=1))
    next(loader)
    print(*[p.pid for p in multiprocessing.active_children()], flush=True)
    time.sleep(60)
"""
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(root)}
    ) as job:
        assert job.stdout is not None
        (worker,) = job.stdout.readline().split()
        assert Path(f"/proc/{int(worker)}").exists()
        job.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{int(worker)}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{int(worker)}").exists()


def test_a_killed_worker_ends_the_loader_with_a_sentence(charts: Path) -> None:
    loader = Loader(make_config(charts, num_workers=1, prefetch=1))
    next(loader)
    (worker,) = list(multiprocessing.active_children())
    assert worker.pid is not None
    os.kill(worker.pid, 9)
    with pytest.raises(DataError, match="a data worker died"):
        list(itertools.islice(iter(loader.__next__, None), 10))
    deadline = time.monotonic() + 10
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert multiprocessing.active_children() == []


def test_what_workers_are_forked_with_is_there() -> None:
    for name in IMPORTED:  # the server of forks ignores what it cannot import
        importlib.import_module(name)
