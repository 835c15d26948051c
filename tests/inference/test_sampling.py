"""Clips sampled from a checkpoint: they are those of the whole classes and their scheduler, stepped by hand."""

import dataclasses
import json
from base64 import b64decode
from io import BytesIO
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from mmtrain.commands.cli import main
from mmtrain.config.data import DataConfig, DiffusionConfig
from mmtrain.config.model import ModelConfig
from mmtrain.data.toy.shapes import shape_clips
from mmtrain.errors import ConfigError, MMTrainError
from mmtrain.export.adapter_folders import ExportForm
from mmtrain.export.folder import export
from mmtrain.inference.sampling import Sampled, SamplingRequest, default_bucket, sample, to_pixels
from mmtrain.modality.buckets import video_geometry
from tests.jobs import layout, train, write_video_config
from tests.lora import with_lora
from tests.models.dits import t2v
from tests.ranks import run_ranks
from tests.reference import model_config
from tests.stored_runs import chunks_of, save_checkpoint, save_run

PROMPTS = ("a large red circle moves right", "two small squares")
SMALL = {"frames": 2, "height": 4, "width": 6, "num_steps": 4}
DATA = DataConfig(source="unused", fps=8.0, max_seconds=2.0, video_area=96, video_aspects=["3:2", "1:1"])
TOLERANCE = 5e-6
"""Float32, relative to the largest number. Measured: 5e-7."""


def model(channels: int = 3, **changes: Any) -> ModelConfig:
    """With the entries of the shipped tokenizer."""
    return t2v(text={"vocab_size": 416}, in_channels=channels, out_channels=channels, **changes)


def run_of(folder: Path, *, channels: int = 3, **sections: Any) -> Path:
    save_run(folder / "run", model(channels), **{"data": DATA, **sections})
    return folder / "run"


def wanted(**changes: Any) -> SamplingRequest:
    return SamplingRequest(**{"prompts": PROMPTS, **SMALL, **changes})


def latents(out: Path, made: Sampled) -> list[Tensor]:
    return [torch.from_numpy(np.load(out / name)) for name in made.files]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# ------------------------------------------------------------------------------------ what is sampled


@torch.no_grad()
def by_hand(folders: Path, noise: Tensor, prompt: str, negative: str | None, guidance: float, steps: int) -> Tensor:
    """One clip by the classes and the scheduler in exported folders, in two passes a step."""
    tokenizer = AutoTokenizer.from_pretrained(folders / "language")
    text = AutoModel.from_pretrained(folders / "language").eval()
    dit = diffusers.WanTransformer3DModel.from_pretrained(folders / "dit").eval()
    name = json.loads((folders / "scheduler/scheduler_config.json").read_text())["_class_name"]
    scheduler = getattr(diffusers, name).from_pretrained(folders / "scheduler")
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    other = torch.tensor([tokenizer(negative)["input_ids"]]) if negative else ids * 0 + tokenizer.pad_token_id
    states, others = (text(of).last_hidden_state for of in (ids, other))
    scheduler.set_timesteps(steps)
    x = noise[None]
    for time in scheduler.timesteps:
        found = dit(x, time[None], states, return_dict=False)[0]
        if guidance != 1:
            without = dit(x, time[None], others, return_dict=False)[0]
            found = without + guidance * (found - without)
        x = scheduler.step(found, time, x, return_dict=False)[0]
    return x[0]


@pytest.mark.parametrize(
    ("diffusion", "changes"),
    [
        (DiffusionConfig(), {"guidance": 3.0}),
        (DiffusionConfig(shift=3.0), {"guidance": 1.0}),
        (DiffusionConfig(), {"guidance": 2.0, "negative": "a green cross rests"}),
        (DiffusionConfig(prediction="epsilon"), {"guidance": 3.0, "num_steps": 10}),
        (DiffusionConfig(prediction="v"), {"guidance": 1.5, "num_steps": 10}),
    ],
    ids=["flow", "flow without guidance", "negative prompt", "epsilon", "v"],
)
def test_clips_are_those_of_the_whole_classes(
    tmp_path: Path, diffusion: DiffusionConfig, changes: dict[str, Any]
) -> None:
    run = run_of(tmp_path, channels=4, diffusion=diffusion)
    made = sample(run, tmp_path / "out", wanted(**changes))
    assert (made.step, made.shape, made.is_pixels) == (4, (4, 2, 4, 6), False)
    export(run, tmp_path / "hf")
    noise = noise_of(run, tmp_path)
    found = latents(tmp_path / "out", made)
    assert len(found) == 2
    for prompt, clip in zip(PROMPTS, found, strict=True):
        theirs = by_hand(
            tmp_path / "hf", noise, prompt, changes.get("negative"), changes["guidance"], changes.get("num_steps", 4)
        )
        torch.testing.assert_close(clip, theirs, rtol=0, atol=TOLERANCE * theirs.abs().max().item())
        assert (clip - noise).abs().max() > 0.1
    assert (found[0] - found[1]).abs().max() > 1000 * TOLERANCE, "the prompts matter"


def noise_of(run: Path, folder: Path) -> Tensor:
    """What sampling starts from, found without looking into it: a flow model that predicts zero changes nothing."""
    still = model(4)
    chunks = chunks_of(still)
    with torch.no_grad():
        for parameter in chunks["dit"].parameters():
            parameter.zero_()
    zero = folder / "zero"
    save_run(zero, still, steps=(), data=DATA)
    save_checkpoint(zero / "checkpoint" / "step-1", still, chunks)
    made = sample(zero, folder / "zero_out", wanted())
    first, second = latents(folder / "zero_out", made)
    torch.testing.assert_close(first, second)  # all prompts begin alike
    assert first.std().item() == pytest.approx(1, abs=0.15)
    return first


def test_adapters_of_the_text_encoder_count(tmp_path: Path) -> None:
    adapted = with_lora(model(4), ["language"])
    save_run(tmp_path / "run", adapted, data=DATA)
    made = sample(tmp_path / "run", tmp_path / "out", wanted(guidance=1.0))
    export(tmp_path / "run", tmp_path / "hf", form=ExportForm(merge_adapters=True))
    noise = noise_of(tmp_path / "run", tmp_path)
    theirs = by_hand(tmp_path / "hf", noise, PROMPTS[0], None, 1.0, 4)
    found = latents(tmp_path / "out", made)[0]
    torch.testing.assert_close(found, theirs, rtol=0, atol=TOLERANCE * theirs.abs().max().item())


@pytest.mark.ranks
def test_a_job_on_two_ranks_is_sampled_and_exported(tmp_path: Path, shapes: Path) -> None:
    """The checkpoint is one that training wrote, a part of it by each rank."""
    path = write_video_config(tmp_path, shapes)
    run_ranks(train, 2, path, [*layout(pp=2), "training.steps=2", "checkpoint.enable=true"])
    run = tmp_path / "run"
    made = sample(run, tmp_path / "out", SamplingRequest(prompts=PROMPTS, num_steps=2))
    assert (made.step, made.shape) == (2, (3, 4, 24, 24))
    export(run, tmp_path / "hf")
    noise = torch.randn(made.shape, generator=torch.Generator().manual_seed(0))
    clip = by_hand(tmp_path / "hf", noise, PROMPTS[0], None, 3.0, 2)
    assert clip.isfinite().all()
    with Image.open(tmp_path / "out" / made.files[0]) as moving:
        assert moving.n_frames > 1


# ----------------------------------------------------------------------------------- what is written


def test_images_a_sheet_and_how_they_were_made(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    made = sample(run, tmp_path / "out", wanted(frames=6, num_samples=2, seed=3))
    names = ["01-a-large-red-circle-moves-right-1", "01-a-large-red-circle-moves-right-2", "02-two-small-squares-1"]
    assert made.files == (*(f"{name}.gif" for name in (*names, "02-two-small-squares-2")), "sheet.png")
    assert (made.shape, made.guidance) == ((3, 6, 4, 6), 2.0)
    with Image.open(tmp_path / "out" / made.files[0]) as moving:
        assert moving.size == (96, 64)  # 6 x 4 pixels, enlarged
        shown_ms = sum(frame.info["duration"] for frame in ImageSequence.Iterator(moving))
    assert shown_ms == pytest.approx(6 * 1000 / 8, abs=10)
    with Image.open(tmp_path / "out/sheet.png") as page:
        assert page.width >= 6 * 96
        assert page.height >= 4 * 64
    record = json.loads((tmp_path / "out/samples.json").read_text())
    assert record["shape"] == [3, 6, 4, 6]
    assert (record["step"], record["seed"], record["num_steps"], record["guidance"]) == (4, 3, 4, 2.0)
    assert [clip["prompt"] for clip in record["clips"]] == [PROMPTS[0]] * 2 + [PROMPTS[1]] * 2
    assert all((tmp_path / "out" / clip["file"]).is_file() for clip in record["clips"])
    assert sorted(files(tmp_path / "out")) == sorted([*made.files, "samples.json"])


def test_equal_arguments_give_equal_bytes_and_other_ones_do_not(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    for name, changes in {"one": {}, "again": {}, "seed": {"seed": 1}, "guidance": {"guidance": 3.0}}.items():
        sample(run, tmp_path / name, wanted(**changes))
    clip = "01-a-large-red-circle-moves-right.gif"
    assert files(tmp_path / "one") == files(tmp_path / "again")
    for other in ("seed", "guidance"):
        assert (tmp_path / other / clip).read_bytes() != (tmp_path / "one" / clip).read_bytes()


def test_a_clip_does_not_depend_on_the_others(tmp_path: Path) -> None:
    run = run_of(tmp_path, channels=4)
    both = sample(run, tmp_path / "both", wanted(num_samples=2))
    alone = sample(run, tmp_path / "alone", wanted(prompts=PROMPTS[1:]))
    assert alone.files == ("01-two-small-squares.npy",)
    torch.testing.assert_close(latents(tmp_path / "both", both)[2], latents(tmp_path / "alone", alone)[0])
    first, second = latents(tmp_path / "both", both)[2:]
    assert (first - second).abs().max() > 0.1


def test_pixels_come_back_as_the_loader_read_them() -> None:
    levels = torch.arange(256, dtype=torch.uint8)
    clip = torch.stack([levels, levels.flip(0), levels]).reshape(3, 2, 8, 16)
    pixels = to_pixels(clip.float() / 127.5 - 1)
    assert pixels is not None
    assert pixels.shape == (2, 8, 16, 3)
    assert np.array_equal(pixels, clip.permute(1, 2, 3, 0).numpy())
    beyond = to_pixels(torch.tensor([-3.0, 1.5, 0.0]).reshape(3, 1, 1, 1))
    assert beyond is not None
    assert beyond.flatten().tolist() == [0, 255, 128]
    assert to_pixels(torch.zeros(4, 1, 2, 2)) is None


def test_a_long_clip_shows_some_of_its_frames_on_the_sheet(tmp_path: Path) -> None:
    sample(run_of(tmp_path), tmp_path / "out", wanted(prompts=("squares",), frames=16, height=2, width=2, num_steps=1))
    long = t2v(text={"vocab_size": 416}, in_channels=3, out_channels=3, rope_max_seq_len=32)
    save_run(tmp_path / "long", long, data=DATA)
    sample(
        tmp_path / "long",
        tmp_path / "out_long",
        wanted(prompts=("squares",), frames=32, height=2, width=2, num_steps=1),
    )
    with Image.open(tmp_path / "out/sheet.png") as page, Image.open(tmp_path / "out_long/sheet.png") as other:
        assert page.width == other.width


# ---------------------------------------------------------------------------------------- the command


def test_the_command_and_its_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path / "run", model(), steps=(2, 4), data=DATA)
    run = tmp_path / "run"
    words = ["sample", str(run), "--prompt", PROMPTS[0], "--num-steps", "2"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{run}/samples: step 4, 1 clip of 8 frames of 12 x 8, 2 steps, guidance 2\n")
    assert shown.count("\n") == 3
    assert (run / "samples/01-a-large-red-circle-moves-right.gif").read_bytes().startswith(b"GIF")
    assert main([*words, "--step", "2", "--guidance", "1", "--out", str(tmp_path / "two"), "--frames", "4"]) == 0
    assert ": step 2, 1 clip of 4 frames of 12 x 8, 2 steps, guidance 1\n" in capsys.readouterr().out
    assert main(words) == 2
    assert "samples exists already; remove it or name another folder" in capsys.readouterr().err


def test_a_dit_that_has_seen_few_clips_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    few = "the DiT has learned from 1,234 clips since its random weights, so samples will show little"
    for name, state, said in (("few", {"clips": 1234}, [few]), ("many", {"clips": 10**6}, []), ("old", {}, [])):
        caplog.clear()
        sample(run_of(tmp_path / name, state=state), tmp_path / name / "out", wanted(num_steps=1))
        assert [r.message.partition(":")[0] for r in caplog.records if r.name == "mmtrain"] == said


def test_latents_are_called_latents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path, channels=4)
    words = ["sample", str(run), "--prompt", "squares", "--num-steps", "1"]
    assert main(words) == 2
    assert "latents have 4 channels, so they are no pixels, and the job does not say" in capsys.readouterr().err
    assert not (run / "samples").exists()
    assert main([*words, "--height", "4", "--width", "4"]) == 0
    assert "these are latents [4 channels, frames, height, width], no images" in capsys.readouterr().out
    assert np.load(run / "samples/01-squares.npy").shape == (4, 8, 4, 4)


def test_a_job_that_hid_no_captions_has_no_guidance_by_itself(tmp_path: Path) -> None:
    run = run_of(tmp_path, diffusion=DiffusionConfig(caption_dropout=0.0))
    assert sample(run, tmp_path / "one", wanted()).guidance == 1
    assert sample(run, tmp_path / "two", wanted(negative="a cross")).guidance == 2
    assert sample(run, tmp_path / "three", wanted(guidance=3.0)).guidance == 3


@pytest.mark.parametrize(("given", "frames"), [([], 8), ([16], 16), ([4, 16], 4), ([2, 10, 12], 10)])
def test_the_default_bucket_is_about_half_as_long_as_the_longest(given: list[int], frames: int) -> None:
    geometry = video_geometry(model().dit, dataclasses.replace(DATA, video_frames=given))  # type: ignore[arg-type]
    assert default_bucket(geometry) == (frames, 8, 12)


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--prompt": "  "}, "sample: --prompt '  ' has no token; describe what the clip shows"),
        ({"--prompt": "red " * 200}, "tokens, but the job trained with captions of at most training.seq_len = 64"),
        ({"--negative": ""}, "sample: --negative '' has no token"),
        ({"--negative": "blue", "--guidance": "1"}, "--negative has no effect with --guidance 1"),
        ({"--guidance": "-1"}, "sample: --guidance -1.0; it is at least 0"),
        ({"--guidance": "nan"}, "sample: --guidance nan; it is at least 0"),
        ({"--num-steps": "0"}, "sample: --num-steps 0; it is at least 1 and at most 1000"),
        ({"--num-steps": "1001"}, "sample: --num-steps 1001; it is at least 1 and at most 1000"),
        ({"--num-samples": "0"}, "sample: --num-samples 0; it is at least 1"),
        ({"--frames": "0"}, "sample: --frames 0; it is at least 1"),
        ({"--seed": "-1"}, "sample: --seed -1; it is at least 0"),
        ({"--height": "5"}, "sample: --height 5; it is a multiple of the 2 of one patch (patch_size = [1, 2, 2]"),
        ({"--frames": "17"}, "and at most 16 (rope_max_seq_len = 16), such as 16"),
        ({"--step": "3"}, "has step-4; name one of these"),
        ({"--device": "abacus"}, "sample: --device abacus cannot be used: "),
        ({"--out": "{tmp}/there"}, "there exists already; remove it"),
        ({"--out": "{tmp}/file/out"}, "Not a directory"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str], message: str
) -> None:
    run = run_of(tmp_path)
    (tmp_path / "there" / "folder").mkdir(parents=True)
    (tmp_path / "file").write_text("mine")
    options = {"--prompt": "squares", "--num-steps": "1", **changes}
    words = [word.format(tmp=tmp_path) for pair in options.items() for word in pair]
    assert main(["sample", str(run), *words]) == 2
    captured = capsys.readouterr()
    assert len(captured.err.strip().splitlines()) == 1
    assert message in captured.err
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint", "config.toml"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run", "there"]


def test_folders_that_are_no_text_to_video_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing has no config.toml; name the job.dump_folder of a run"):
        sample(tmp_path / "nothing", tmp_path / "out", wanted())
    save_run(tmp_path / "chat", model_config(None))
    with pytest.raises(ConfigError, match=r"only a text-to-video model makes clips, and this run has no \[model.dit\]"):
        sample(tmp_path / "chat", tmp_path / "out", wanted())
    save_run(tmp_path / "new", model(), steps=())
    with pytest.raises(ConfigError, match="has no complete checkpoint"):
        sample(tmp_path / "new", tmp_path / "out", wanted())
    save_run(tmp_path / "other", t2v(text={"vocab_size": 416}))
    with pytest.raises(ConfigError, match="out_channels = 3, but in_channels = 4"):
        sample(tmp_path / "other", tmp_path / "out", wanted())
    with pytest.raises(ConfigError, match="there is no prompt"):
        wanted(prompts=())
    assert not (tmp_path / "out").exists()


def test_values_that_are_not_finite_are_told_and_nothing_is_left(tmp_path: Path) -> None:
    chunks = chunks_of(model())
    with torch.no_grad():
        next(chunks["dit"].parameters()).fill_(float("nan"))
    save_run(tmp_path / "run", model(), steps=(), data=DATA)
    save_checkpoint(tmp_path / "run/checkpoint/step-9", model(), chunks)
    with pytest.raises(MMTrainError, match=r"after step 9 the model makes values that are not finite for the pr"):
        sample(tmp_path / "run", tmp_path / "out", wanted())
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    save_run(tmp_path / "other", dataclasses.replace(model(num_layers=2)), steps=(), data=DATA)
    (run / "config.toml").write_text((tmp_path / "other/config.toml").read_text())
    with pytest.raises(ConfigError, match=r"is not of the model in config.toml: this one has no model.dit.blocks.2"):
        sample(run, tmp_path / "out", wanted())


@pytest.mark.parametrize("num_steps", [4, 9, 112, 600, 1000])
def test_numbers_of_steps_that_do_not_begin_with_noise_are_refused(tmp_path: Path, num_steps: int) -> None:
    run = run_of(tmp_path, diffusion=DiffusionConfig(prediction="v"))
    with pytest.raises(ConfigError, match=f"--num-steps {num_steps} with diffusion.prediction"):
        sample(run, tmp_path / "out", wanted(num_steps=num_steps))


# ------------------------------------------------------------------------------- samples of validations


@pytest.mark.ranks
def test_the_samples_of_a_validation_are_those_of_the_command(tmp_path: Path, squares: Path) -> None:
    """On two pipeline ranks, with averages of the weights; the largest number that differs is 2 of 255 levels."""
    path = write_video_config(tmp_path, squares)
    changes = ["training.steps=2", "checkpoint.enable=true", "optimizer.ema_decay=0.5", "metrics.log_freq=1"]
    changes += ["data.video_area=144", "data.video_aspects=['1:1']", "data.video_frames=[4]"]
    changes += ["data.max_clips=12", "data.max_total_seconds=6.0", "model.dit.sub_microbatch_size=12"]
    samples = ["validation.enable=true", "validation.samples=12", "validation.freq=2", "validation.weights='ema'"]
    run_ranks(train, 2, path, [*layout(pp=2), *changes, *samples])
    run = tmp_path / "run"
    record = json.loads((run / "validation_samples" / "step-2.json").read_text())
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    (line,) = (line for line in lines if line["step"] == 2 and "samples_judged" in line)
    captions = list(dict.fromkeys(clip.caption for clip in shape_clips("validation", 60, 0, "easy")))
    made = sample(run, tmp_path / "out", SamplingRequest(prompts=tuple(captions), judged=True))
    assert made.weights == "ema" and made.verdict is not None
    assert (line["samples_judged"], line["samples_right"]) == (12, made.verdict.right)
    with Image.open(tmp_path / "out" / "sheet.png") as theirs, Image.open(BytesIO(b64decode(record["image"]))) as ours:
        difference = np.abs(np.asarray(ours).astype(int) - np.asarray(theirs).astype(int))
    assert difference.max() <= 2 and difference.mean() < 0.01
    assert json.loads((tmp_path / "out" / "samples.json").read_text())["verdict"]["num_clips"] == 12


@pytest.mark.parametrize(
    ("data", "words", "message"),
    [
        ("nowhere", [], "sample: --judge knows the pixels of the easy level of moving shapes alone, and data.source"),
        ("easy", ["--prompt", "a dog"], "sample: --judge with --prompt 'a dog', which is no caption of the data"),
        (
            "easy",
            ["--frames", "4"],
            "--judge with clips of 4 frames of 12 x 8, but those of the data are 4 frames of 12",
        ),
    ],
)
def test_what_cannot_be_judged_is_refused(
    tmp_path: Path, squares: Path, capsys: pytest.CaptureFixture[str], data: str, words: list[str], message: str
) -> None:
    source = str(squares) if data == "easy" else "unused"
    run = run_of(tmp_path, data=dataclasses.replace(DATA, source=source))
    assert main(["sample", str(run), "--judge", *words]) == 2
    assert message in capsys.readouterr().err
    assert not (run / "samples").exists()
