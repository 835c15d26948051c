"""The log of a job names what runs, and the pages that show a log show that of today."""

import json
import re
from itertools import takewhile
from pathlib import Path

import pytest

from mmtrain.config import config
from mmtrain.config.config import each_pipeline
from mmtrain.config.device_choices import on_device
from mmtrain.config.sections import MetricsConfig
from mmtrain.data.questions import Answer
from mmtrain.observe.job_summary import FEW_CLIPS, few_clips, high_rate, start_lines
from mmtrain.observe.log_file import setup_logging
from mmtrain.observe.reporter import Reporter
from mmtrain.observe.validation import Validation
from mmtrain.simulator.make_job import make_job
from tests.observe.test_metrics import PLANNER, step_of

ROOT = Path(__file__).resolve().parents[2]
LOGGED = re.compile(r"^\d\d:\d\d:\d\d (.*)$", re.MULTILINE)
SIGLIP = "{model_type='siglip_vision_model', hidden_size=96, num_hidden_layers=2, num_attention_heads=4, image_size=112, patch_size=14}"  # noqa: E501
LLAMA = "{model_type='llama', hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=448}"


def lines(name: str, *overrides: str, device: str = "cpu") -> list[str]:
    job = config.load(name, overrides)
    return start_lines(job, each_pipeline(job, make_job), device=device, threads=1, cut_s=0.0)


def test_the_models_that_run_are_named_whatever_the_base_says():
    overrides = [
        f"--model.encoder.config={SIGLIP}",
        f"--model.language.config={LLAMA}",
        "--model.encoder.trainable=false",
    ]
    first, vision, language, *_ = lines("debug_vlm.toml", *overrides)
    assert first == "siglip_vision_model + llama on data/charts, into outputs/debug_vlm"
    assert vision.startswith("vision: siglip_vision_model, 2 blocks of width 96, projector mlp, random weights; ")
    assert re.search(r"; ([\d,]+) parameters \((?!\1)[\d,]+ train\), ", vision), "the projector trains"
    assert language.startswith("language: llama, 2 blocks of width 64, random weights; ")
    text, dit = lines("debug_t2v.toml")[1:3]
    assert text.startswith("language: qwen2, ") and dit.startswith("dit: wan, ")


def test_a_pretrained_model_is_named_by_its_source(tmp_path):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 448} | sizes))
    overrides = ["--model.language.config={}", f"--model.language.pretrained={tmp_path}"]
    first, _, language, *_ = lines("debug_vlm.toml", *overrides)
    assert first.startswith(f"qwen2_vl_vision + {tmp_path} on data/charts")
    assert language.startswith(f"language: {tmp_path} (qwen2), 4 blocks of width 64; ")


def test_the_sizes_of_images_are_those_of_the_models_own_processor_unless_data_says_otherwise(tmp_path):
    job = config.load("debug_qwen2_vl.toml").model
    values = {"model_type": "qwen2_vl", "vision_config": job.encoder.config, "text_config": job.language.config}
    (tmp_path / "config.json").write_text(json.dumps(values))
    whole = [f"--model.pretrained={tmp_path}", "--model.encoder.config={}", "--model.language.config={}"]
    sizes = {"size": {"shortest_edge": 1568, "longest_edge": 50176}}

    def images(*more: str) -> str:
        return next(line for line in lines("debug_qwen2_vl.toml", *more) if line.startswith("images: "))

    default = "images: 3,136 to 1,003,520 pixels each, 28 x 28 a token, default processor"
    assert images() == images(*whole) == default
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": sizes}))
    assert images(*whole) == f"images: 1,568 to 50,176 pixels each, 28 x 28 a token, processor of {tmp_path}"
    assert images(*whole, "--data.max_pixels=20000").startswith("images: 1,568 to 20,000 pixels each")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/preprocessor_config.json").write_text("{}")
    named = images(*whole, f"--data.image_processor={tmp_path}/other")
    assert named == default.replace("default processor", f"processor of {tmp_path}/other")
    assert images() == default, "an encoder from elsewhere keeps its own"


@pytest.mark.parametrize(
    ("device", "overrides", "said"),
    [
        ("cuda", [], True),
        ("cpu", [], False),
        ("cuda", ["--planner.enable=false"], False),
        ("cuda", ["--planner.memory_limit=90%"], False),
        ("cuda", ["--planner.search.activation_memory_gib=1"], False),
    ],
)
def test_a_search_without_a_limit_on_an_accelerator_is_named(device, overrides, said):
    found = lines("debug_vlm.toml", *overrides, device=device)
    assert ("no limit of memory" in found[-1] and 'set planner.memory_limit, such as "90%"' in found[-1]) == said


def test_configs_that_search_on_clusters_have_a_limit():
    for path in (ROOT / "configs").glob("*.toml"):
        section = config.load(path).planner
        if section.enable and not path.name.startswith("debug_"):
            assert section.memory_limit == "90%", path.name


def test_a_description_is_not_inherited(tmp_path):
    (tmp_path / "base.toml").write_text((ROOT / "configs" / "debug_text.toml").read_text())
    (tmp_path / "job.toml").write_text('extends = "base.toml"\n[job]\ndump_folder = "x"\n')
    assert config.load(tmp_path / "base.toml").job.description
    assert config.load(tmp_path / "job.toml").job.description == ""


def test_a_dit_that_has_seen_few_clips_since_random_weights_is_named():
    job = config.load("debug_t2v.toml")
    said = few_clips(job, 4_012)
    assert "learned from 4,012 clips since its random weights, so samples will show little" in said
    assert (
        "(debug_square.toml) takes 16,000" in said and "raise training.steps, or start from published weights" in said
    )
    assert "\n" not in said
    assert few_clips(job, FEW_CLIPS)
    assert not few_clips(job, FEW_CLIPS + 1)
    assert not few_clips(job, None), "a checkpoint that does not say"
    square = config.load("debug_square.toml")
    of_step = square.training.global_batch_size * square.data.max_clips
    assert not few_clips(square, square.training.steps * of_step), "the demo ends above it"
    assert not few_clips(config.load("debug_vlm.toml"), 100)
    published = ["--model.dit.config={}", "--model.dit.pretrained=models/wan"]
    assert not few_clips(config.load("debug_t2v.toml", published), 100)
    assert few_clips(config.load("debug_t2v.toml", [*published, "--model.dit.weights=random"]), 100)


def test_the_default_rate_is_named_where_published_weights_train_with_it():
    default = ["--optimizer.lr=8e-4"]
    published = ["--model.language.config={}", "--model.language.pretrained=models/qwen2"]
    said = high_rate(config.load("debug_vlm.toml", [*default, *published]))
    assert said.startswith("optimizer.lr = 0.0008 is the default, which is meant for random weights; published ones")
    assert "(language)" in said and "\n" not in said
    assert not high_rate(config.load("debug_vlm.toml", default)), "random weights"
    assert not high_rate(config.load("debug_vlm.toml", [*published, "--optimizer.lr=1e-5"]))
    assert not high_rate(config.load("debug_vlm.toml", [*default, *published, "--model.language.weights=random"]))
    assert not high_rate(config.load("debug_vlm.toml", [*default, *published, "--model.language.trainable=false"]))
    of_its_own = "--optimizer.groups=[{module='language', lr=1e-5}]"
    assert not high_rate(config.load("debug_vlm.toml", [*default, *published, of_its_own]))


def test_a_job_of_epochs_says_so():
    words = ["--training.steps=0", "--training.epochs=3"]
    assert any("; 3 epochs in steps of 4 microbatches x 256 tokens" in line for line in lines("debug_vlm.toml", *words))


@pytest.fixture
def printed(tmp_path, capsys) -> list[str]:
    """What a job of two pipeline ranks on a CPU prints: a validation and a step."""
    setup_logging(0)
    section = MetricsConfig(enable_tensorboard=False, progress_bar=False)
    reporter = Reporter(section, tmp_path, steps=10, start=0)
    grades = dict.fromkeys(("easy", "hard", "medium", "text"), (1, 2))
    answers = [
        Answer(question=f"<image>\n{question}?", reference="no", answer=answer, right=answer == "no", images=(b"",))
        for question, answer in (("A question", "yes"), ("Another", "no"))
    ]
    reporter.validation(0, Validation(loss=2.0, accuracy=grades, answers=tuple(answers)))
    reporter.step(step_of(**PLANNER, peak_flops=float("nan")))
    reporter.close()
    return LOGGED.findall(capsys.readouterr().out)


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_log_of_a_page_is_that_of_the_command(page, printed):
    """Its first lines to the letter, of which the README has some; of the others the form."""
    shown = LOGGED.findall((ROOT / page).read_text())
    start = lines("debug_qwen2_vl.toml")
    first = list(takewhile(lambda line: line.split()[0] not in ("step:", "validate"), shown))
    assert len(first) == len(start) or (page == "README.md" and first)
    assert len(shown) >= len(first) + 2
    left = iter(start)
    for theirs in first:
        known, dots, _ = theirs.partition(" ...")
        assert any(ours.startswith(known) and (dots or ours == known) for ours in left)
    for theirs in shown[len(first) :]:
        ours = next(line for line in printed if line.split()[0] == theirs.split()[0])
        if "<image>" in theirs:
            assert re.fullmatch(r"  <image> .+ -> .+ \((right|wrong: .+)\)", theirs)
            assert re.fullmatch(r"  <image> .+ -> .+ \((right|wrong: .+)\)", ours)
            continue
        for part in theirs.split("  ...  "):
            assert form(part.removesuffix(", ...")) in form(ours)


def form(text: str) -> str:
    """A line with one sign for each of its numbers."""
    return re.sub(r"[-+]?\d[\d.,]*", "#", re.sub(r" +", " ", text))


def test_the_cut_of_pipelines_of_each_depth_is_shown():
    words = ["parallelism.pipelines=[2,3,2]", "parallelism.pipeline_parallel_degree=1"]
    shown = lines("debug_vlm.toml", *words)
    assert sum("in 2 chunks: " in line and "; 3 chunks: " in line for line in shown) == 2
    assert any(line.startswith("mesh: pipelines [2, 3, 2], dp_shard ") for line in shown)


def test_a_line_says_how_an_accelerator_computes():
    def path(*overrides: str, allocator: str = "") -> str:
        job = on_device(config.load("debug_vlm.toml", overrides), "cuda")
        made = each_pipeline(job, make_job)
        found = start_lines(job, made, device="cuda", capability=(9, 0), allocator=allocator, threads=1, cut_s=0.0)
        (line,) = (line for line in found if line.startswith("device: "))
        return line

    assert path(allocator="expandable_segments:True") == (
        "device: cuda; bfloat16 with float32 masters, AdamW fused, float32 products in TF32, inputs up to 256 MiB "
        "ahead, allocator expandable_segments:True"
    )
    own = "--training.mixed_precision_param=float32", "--optimizer.implementation=foreach"
    assert path(*own, "--training.inputs_ahead_mib=0", "--debug.deterministic=true") == (
        "device: cuda; float32, AdamW foreach, float32 products without TF32, inputs when a forward begins, allocator "
        "as torch has it, deterministic kernels, which take longer (debug.deterministic)"
    )
    assert not any(line.startswith("device: ") for line in lines("debug_vlm.toml"))
