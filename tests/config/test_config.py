import dataclasses
import json
import tomllib
import typing

import pytest

from mmtrain.config import config
from mmtrain.config.model import GROUPS, ProjectorConfig
from mmtrain.config.toml_sections import build
from mmtrain.errors import ConfigError
from mmtrain.modality.bitfield import GROUP_BITS

BASE = """
[model.language]
config = {model_type = "llama", hidden_size = 32}
[data]
source = "somewhere"
[training]
steps = 10
seq_len = 64
global_batch_size = 4
"""


@pytest.fixture
def load(tmp_path):
    def build(text=BASE, *overrides):
        path = tmp_path / "job.toml"
        path.write_text(text)
        return config.load(path, overrides)

    return build


def test_defaults_and_values(load):
    c = load()
    assert c.training.steps == 10
    assert c.model.encoder is None
    assert c.model.language.config == {"model_type": "llama", "hidden_size": 32}
    assert c.optimizer.name == "AdamW"


def test_dump_reads_back_equal(load, tmp_path):
    c = load(
        BASE,
        '--job.description="a \\"quoted\\" \\\\ line"',
        "--model.encoder.config={model_type='vit', a=[1, 2.5], b={c=true}}",
    )
    path = tmp_path / "resolved.toml"
    path.write_text(config.dump(c))
    assert config.load(path) == c


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--training.stepz=1", r"unknown key training\.stepz; did you mean training\.steps\?"),
        ("--trainings.steps=1", r"unknown key trainings; did you mean training\?"),
        ("--training.steps=ten", r'training\.steps = "ten" is a string; it must be an integer'),
        ("--training.steps=2.5", r"training\.steps = 2\.5 is a float; it must be an integer"),
        ("--training.steps=true", r"training\.steps = true is a boolean"),
        ("--training.steps=0", r"training: steps and epochs are both 0, so the job has no length; set one"),
        ("--training.steps=-1", r"training\.steps = -1; it must be at least 0"),
        ("--training.epochs=-3", r"training\.epochs = -3\.0; it must be at least 0"),
        ("--lr_scheduler.warmup_ratio=1.5", r"warmup_ratio = 1\.5; it is a fraction, at most 1"),
        ("--validation.freq=0", r"validation\.freq = 0; it must be a whole number of steps from 1"),
        ("--validation.freq=2.5 steps", r'validation\.freq = "2\.5 steps"; it must be a whole number of steps'),
        ("--validation.freq=0 epochs", r'validation\.freq = "0 epochs"; it must be .* epochs above 0'),
        ("--checkpoint.interval=often", r'checkpoint\.interval = "often"; write a number of steps, as 50, or a number'),
        ("--checkpoint.interval=1.5", r"checkpoint\.interval = 1\.5 is a float; it must be an integer or a string"),
        ("--checkpoint.keep_best=exact match", r'keep_best = "exact match"; write loss, accuracy, exact_match or'),
        ("--parallelism.pipeline_parallel_degree=2.5", "is a float"),
        ("--parallelism.pipeline_parallel_degree=0", "a degree is at least 1"),
        ("--parallelism.pipeline_parallel_schedule=interleav", r"choose one of .*did you mean \"interleave\""),
        ("--parallelism.pipeline_parallel_schedule=1f1b", r'did you mean "1F1B"'),
        ("--parallelism.tensor_parallel_degree=0", "a degree is at least 1"),
        ("--parallelism.context_parallel_block_size=0", "must be at least 1"),
        ("--parallelism.context_parallel_split=even", r'choose one of "causal", "balanced"'),
        (
            "--parallelism.data_parallel_shard_degree=99",
            "fewer than the 99 data-parallel replicas.* make it at least 99",
        ),
        ("--parallelism.pipelines=[2,0]", r"parallelism.pipelines = \[2, 0\]; each pipeline has at least 1"),
        ("--data.streaming=true", r"set data\.shuffle = false"),
        ("--data.source=", "data.source: is empty"),
        ("--data.max_media_bytes=0", "data.max_media_bytes = 0; it must be at least 1"),
        ("--data.max_decoded_pixels=0", "data.max_decoded_pixels = 0; it must be at least 1"),
        ("--data.max_decoded_pixels=178956971", "it must be at most 178956970"),
        ("--optimizer.lr=-1", r"optimizer\.lr = -1\.0"),
        ("--optimizer.beta1=1", "must be below 1"),
        ("--lr_scheduler.warmup_steps=11", "is more than training.steps = 10"),
        ("--lr_scheduler.decay_ratio=2.0", "at most 1"),
        ("--model.language.trainable=false", "nothing to train"),
        ("--data.fps=0", r"data\.fps = 0.0; it must be from 0.001 to 1000"),
        ("--data.max_clips=0", r"data\.max_clips = 0; it must be at least 1"),
        ("--data.max_seconds=17", r"data\.max_seconds = 17.0 is above data\.max_total_seconds = 16.0"),
        ("--data.video_aspects=['16/9']", 'names "16/9"; write width:height'),
        ("--data.video_aspects=[]", "data.video_aspects is empty"),
        ("--data.video_frames=[8, 0]", "a number of frames is at least 1"),
        ("--data.video_frames=[8, 2.5]", "it must be an array of integers"),
        ("--data.video_frames=[true]", "it must be an array of integers"),
        ("--data.max_clips=4", r"data\.max_clips = 4 has no effect: a job without \[model.dit\] reads no clips; rem"),
        ("--data.video_frames=[8]", r"data\.video_frames = \[8\] has no effect"),
        ("--model.lora.rank=4", r'no module has trainable = "lora"'),
        ("--model.lora.rank=0", r"model\.lora\.rank = 0; it must be at least 1"),
        ("--model.lora.alpha=0", r"model\.lora\.alpha = 0.0; it must be above 0"),
        ("--model.projector={kind='native',pretrained='x'}", "pretrained = 'x' has no effect with kind = \"native\""),
        ("--model.language.pretrained=x", "now both are given"),
        ("--model.language.config={}", "now neither is given"),
        ("--model.language.config={a=1}", "`model_type` is missing"),
        ("--parallelism.context_parallel_degree=65", "training.seq_len = 64 tokens cannot be divided"),
        ("--parallelism.encoder_tensor_parallel=data", r"there is no \[model.encoder\]; remove the key"),
        ("--model=3", "names no section"),
        ("--model.language=3", "it is a section"),
        ("--checkpoint.keep_latest_k=1", "at least 2"),
        ("--planner.device.flops_per_s=0", "must be at least 1"),
        ("steps=3", "names no section"),
        ("--training.steps", "not of the form"),
        ("--training.steps.x=1", "is a value, not a section"),
    ],
)
def test_bad_values_name_path_value_and_rule(load, override, message):
    with pytest.raises(ConfigError, match=message):
        load(BASE, override)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("audio.sub_microbatch_size=-1", r"audio\.sub_microbatch_size = -1; it must be at least 0"),
        ("audio.projector.hidden_size=-1", r"audio\.projector\.hidden_size = -1; it must be at least 0"),
        (
            "audio.projector={kind='linear', spatial_merge=2}",
            r"audio\.projector\.spatial_merge = 2, but kind = \"linear\"",
        ),
    ],
)
def test_errors_of_further_encoders_name_their_own_sections(key, message):
    with pytest.raises(ConfigError, match=rf": model\.modules\.{message}"):
        config.load("debug_sound.toml", [f"model.modules.{key}"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["encoder_context_parallel=patches"], "there is no rank to share patches with"),
        (["encoder_tensor_parallel=data"], "there is no rank to divide the images with"),
        (["tensor_parallel_rows=whole"], 'rows = "whole" with tensor_parallel_degree = 1: nothing is divided; remove'),
        (["tensor_parallel_rows=half"], 'tensor_parallel_rows = "half".*"divided", "whole"'),
        (["fsdp_reshard_after_forward=always", "data_parallel_shard_degree=2"], "run different plans"),
    ],
)
def test_ways_to_divide_that_cannot_work_are_refused(load, overrides, message):
    encoder = '[model.encoder]\nconfig = { model_type = "qwen2_vl_vision" }\n'
    with pytest.raises(ConfigError, match=message):
        load(encoder + BASE, *(f"--parallelism.{override}" for override in overrides), "--training.global_batch_size=4")


def test_blocks_need_exchanges_and_parameters_that_stay(load):
    assert not load(BASE).planner.search.braid
    with pytest.raises(
        ConfigError, match=r"planner\.search\.braid = true with parallelism\.tensor_parallel_degree = 1: nothing"
    ):
        load(BASE, "--planner.search.braid=true")
    tp = "--parallelism.tensor_parallel_degree=2"
    assert load(BASE, tp, "--planner.search.braid=true").planner.search.braid
    with pytest.raises(
        ConfigError, match=r'planner\.search\.braid = true with .*fsdp_reshard_after_forward = "always"'
    ):
        load(BASE, tp, "--planner.search.braid=true", "--parallelism.fsdp_reshard_after_forward=always")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["planner.enable=false"], "with planner.enable = false: the search, which groups samples, is off"),
        (["planner.search.interleave=false"], "with planner.search.interleave = false: the search"),
        (['planner.search.strategy="first"'], 'with planner.search.strategy = "first": the search'),
        (
            ["planner.search.budget_evaluations=2599"],
            "2599: two groupings cannot be judged with fewer than 2600; raise it",
        ),
        (
            [
                "planner.search.budget_evaluations=2600",
                "planner.search.distributed=true",
                "parallelism.pipeline_parallel_degree=2",
            ],
            r"2600 for 2 ranks \(planner.search.distributed\): two groupings cannot be judged with fewer than 5200",
        ),
        (
            ["planner.search.budget_evaluations=2600", "model.language.trainable=lora", "model.lora.dropout=0.1"],
            "with model.lora.dropout = 0.1: masks are drawn for works",
        ),
    ],
)
def test_groups_of_samples_need_a_search_and_a_loss_that_knows_none(load, overrides, message):
    keys = ["--planner.enable=true", "--planner.search.regroup=true"]
    assert load(BASE, *keys, "--planner.search.budget_evaluations=2600").planner.search.regroup
    assert load(
        BASE, *keys, "--planner.search.budget_evaluations=0", "--planner.search.budget_s=1"
    ).planner.search.regroup
    with pytest.raises(ConfigError, match=f"planner.search.regroup = true .*{message}"):
        load(BASE, *keys, *(f"--{override}" for override in overrides))


def test_keys_of_clips_and_of_images_exclude_each_other(load):
    dit = "--model.dit.config={model_type='wan', in_channels=3, patch_size=[1, 2, 2]}"
    made = load(BASE, dit, "--data.video_frames=[8, 4]", "--data.fps=8", "--data.video_aspects=['1:1']")
    assert made.model.dit.config == {"model_type": "wan", "in_channels": 3, "patch_size": [1, 2, 2]}
    assert (made.data.video_frames, made.data.fps, made.data.video_aspects) == ([8, 4], 8.0, ["1:1"])
    with pytest.raises(ConfigError, match=r'chat_template = "a\.jinja" has no effect: captions are no conversations'):
        load(BASE, dit, "--tokenizer.chat_template=a.jinja")
    with pytest.raises(ConfigError, match=r"data.min_pixels = 9 has no effect: a job with \[model.dit\] reads"):
        load(BASE, dit, "--data.min_pixels=9")


DIT = '[model.dit]\nconfig = { model_type = "wan" }\n'


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.dit.trainable=lora", r'model\.dit\.trainable = "lora": the DiT has no adapters yet'),
        ("model.dit.trainable=maybe", r'choose one of true, false, "lora"'),
        ("model.dit.config={num_layers=3}", 'name it, as in model_type = "wan"'),
        ("model.dit.pretrained=x", "model.dit: .* now both are given"),
        ("model.dit.sub_microbatch_size=-1", r"model\.dit\.sub_microbatch_size = -1"),
        ("model.encoder.config={model_type='vit'}", r"\[model.dit\] and \[model.encoder\] are both set"),
        ("model.projector.spatial_merge=4", r"\[model.projector\] has no effect with \[model.dit\]"),
        ("model.language.attention_mask=prefix", 'attention_mask = "prefix" has no effect with'),
        ("parallelism.fsdp_reshard_after_forward=always", "a block of the DiT runs once for each size"),
        ("parallelism.encoder_tensor_parallel=data", r"there is no \[model.encoder\]; remove the key"),
    ],
)
def test_what_does_not_go_with_a_dit_is_refused(load, override, message):
    with pytest.raises(ConfigError, match=message):
        load(DIT + BASE, f"--{override}")


def test_a_frozen_dit_needs_a_trainable_text_encoder(load):
    assert load(DIT + BASE, "--model.dit.trainable=false").model.dit.trainable is False
    with pytest.raises(ConfigError, match="nothing to train"):
        load(DIT + BASE, "--model.dit.trainable=false", "--model.language.trainable=false")
    mixed = ("--planner.partition=mixed-latency", "--model.dit.num_segments=2")
    with pytest.raises(ConfigError, match=r"model\.dit\.num_segments = 2 cuts a module by itself"):
        load(DIT + BASE, *mixed)


def test_diffusion_belongs_to_a_dit(load):
    assert load(DIT + BASE, "--diffusion.prediction=v").diffusion.prediction == "v"
    with pytest.raises(ConfigError, match=r"\[diffusion\] is set, but there is no \[model\.dit\]"):
        load(BASE, "--diffusion.prediction=v")
    asked = "--validation.shuffled_captions=true"
    with pytest.raises(ConfigError, match=r"shuffled_captions = true, but there is no \[model\.dit\]"):
        load(BASE, asked)
    with pytest.raises(ConfigError, match="a replica has one clip a step"):
        load(DIT + BASE, asked, "--validation.enable=true", "--data.max_clips=1", "--training.global_batch_size=1")
    assert load(DIT + BASE, asked, "--validation.enable=true", "--training.global_batch_size=1")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("diffusion.caption_dropout=1.0", "caption_dropout = 1.0; it must be below 1"),
        ("diffusion.logit_std=0.0", "logit_std = 0.0; it must be above 0"),
        ("diffusion.logit_mean=nan", "logit_mean = nan; it must be finite"),
        ("diffusion.shift=inf", "shift = inf; it must be finite"),
        ("diffusion.prediction=x", "prediction"),
        ("diffusion.logit_std=20.0", "at most 10"),
    ],
)
def test_diffusion_settings_that_mean_nothing_are_refused(load, override, message):
    with pytest.raises(ConfigError, match=message):
        load(DIT + BASE, f"--{override}")
    with pytest.raises(ConfigError, match=r"logit_mean = 1\.0 has no effect with timestep_sampling"):
        load(DIT + BASE, "--diffusion.timestep_sampling=uniform", "--diffusion.logit_mean=1.0")
    with pytest.raises(ConfigError, match=r"shift = 2\.0 has no effect with prediction"):
        load(DIT + BASE, "--diffusion.prediction=epsilon", "--diffusion.shift=2.0")


def test_missing_key_and_section(load):
    with pytest.raises(ConfigError, match=r"the key training\.seq_len is missing"):
        load(BASE.replace("seq_len = 64", ""))
    with pytest.raises(ConfigError, match="the section data is missing"):
        load(BASE.replace('[data]\nsource = "somewhere"', ""))


def test_missing_file_names_a_near_one():
    with pytest.raises(ConfigError, match=r"did you mean debug_vlm\.toml"):
        config.load("debug_vml.toml")


def test_a_step_to_load_needs_checkpoints(load):
    with pytest.raises(ConfigError, match=r"checkpoint.load_step = 3, but checkpoint.enable = false; set it to true"):
        load(BASE, "checkpoint.load_step=3", "checkpoint.enable=false")


def test_invalid_toml_names_the_line(load):
    with pytest.raises(ConfigError, match=r"not valid TOML.*line 2"):
        load("[training]\nsteps = = 3")


def test_extends_merges_sections_and_replaces_model_configs(tmp_path):
    (tmp_path / "base.toml").write_text(BASE)
    (tmp_path / "job.toml").write_text(
        'extends = "base.toml"\n[training]\nsteps = 20\n[model.language]\nconfig = {model_type = "qwen2"}\n'
    )
    c = config.load(tmp_path / "job.toml", ["training.seq_len=32"])
    assert (c.training.steps, c.training.seq_len, c.training.global_batch_size) == (20, 32, 4)
    assert c.model.language.config == {"model_type": "qwen2"}


def test_extends_errors(tmp_path):
    (tmp_path / "a.toml").write_text('extends = "b.toml"\n')
    (tmp_path / "b.toml").write_text('extends = "a.toml"\n')
    with pytest.raises(ConfigError, match="goes in a circle"):
        config.load(tmp_path / "a.toml")
    (tmp_path / "a.toml").write_text('extends = "c.toml"\n')
    with pytest.raises(ConfigError, match=r"c\.toml\" does not exist"):
        config.load(tmp_path / "a.toml")
    (tmp_path / "a.toml").write_text("extends = 3\n")
    with pytest.raises(ConfigError, match="names one file"):
        config.load(tmp_path / "a.toml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr=1" + "0" * 400, r"optimizer\.lr = 0x.*\.\.\.0*; it must be an integer of 64 bits"),
        ("debug.seed=18446744073709551616", r"debug\.seed = 0x1000000000000000?0; it must be an integer of 64 bits"),
        ("training.steps=1" + "0" * 5000, r'training\.steps = "1000+\.\.\.0+"; it must be text of at most 4096'),
        ("training.steps=9223372036854775807", r"training\.steps = 9223372036854775807; it must be at most 2147483647"),
        ("training.steps=1979-05-27", "training.steps = 1979-05-27; a date has no meaning here"),
        ("planner.device.flops_per_s=nan", r"planner\.device\.flops_per_s = nan; it must be finite"),
        ("planner.device.flops_per_s=1e-299", "it must be at least 1"),
        ("planner.device.p2p_latency_s=1e308", r"p2p_latency_s = 1e\+308; it must be at most 3600"),
        ("optimizer.weight_decay=1e20", "it must be at most 1000000"),
        ("comm.timeout_seconds=9223372036854775807", r"comm\.timeout_seconds = \d+; it must be at most 10000000"),
        ("data.num_workers=100000", r"data\.num_workers = 100000; it must be at most 128"),
        ("data.fps=1e-300", "it must be from 0.001 to 1000"),
        ("data.video_aspects=['99999:1']", "of at most four digits"),
        ("data.split=", "data.split is empty"),
        ("job.dump_folder=", "job.dump_folder is empty"),
        ('checkpoint.folder="a\\u0000b"', r'checkpoint\.folder = "a\\u0000b"; .* without the character NUL'),
        ("data.source=\udcff", "it must be text in UTF-8"),
        ("planner.memory_limit=" + "9" * 400 + "GiB", "is not an amount of memory"),
        ("model.language.config={model_type='llama', x=1979-05-27}", r"config\.x = 1979-05-27; a date has no meaning"),
        ("model.language.config={model_type='llama', x=[1, nan]}", r"config\.x\[1\] = nan; it must be finite"),
        ("model.language.config.a" + ".b" * 40 + "=1", "is nested more than 32 deep"),
        ("model.language.config" + ".b" * 5000 + "=1", "nested"),
        ('training."a\\nb"=1', r'unknown key training\."'),
        ("training.steps=1\nseed=2", r'training\.steps = "1\\nseed=2" is a string'),
    ],
)  # fmt: skip
def test_values_that_would_end_a_job_later_are_refused(load, override, message):
    with pytest.raises(ConfigError, match=message) as found:
        load(BASE, override)
    assert "\n" not in str(found.value) and "\0" not in str(found.value) and len(str(found.value)) < 500


EXTREMES = (
    "-1", "0", "9223372036854775807", "18446744073709551616", "1" + "0" * 5000, "1e308", "-1e308", "5e-324", "nan",
    "inf", '""', '"x"', '"\\u0000"', '"\\u0001\\u007f\\\\"', "true", "[]", "[1]", '[""]', "[" * 3000, "{}",
    "{a={b=[1]}}", "y" * 300, "1979-05-27", "\udcff",
)  # fmt: skip
VIDEO = '[model.dit]\nconfig = { model_type = "wan" }\n[model.vae]\nconfig = { model_type = "autoencoder_kl" }\n'
ENCODER = '[model.encoder]\nconfig = { model_type = "qwen2_vl_vision" }\n'


def keys(cls, path=""):
    for name, hint in typing.get_type_hints(cls).items():
        yield path + name
        for section in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(section):
                yield from keys(section, f"{path}{name}.")


@pytest.mark.parametrize(("base", "about"), [(VIDEO, ""), (ENCODER, "model.")], ids=["video", "images"])
def test_any_value_of_any_key_is_refused_in_one_line_or_reads_back(tmp_path, base, about):
    path, counts = tmp_path / "job.toml", [0, 0]
    path.write_text(base + BASE)
    for key in keys(config.Config):
        for value in EXTREMES if key.startswith(about) else ():
            try:
                made = config.load(path, [f"{key}={value}"])
            except ConfigError as error:
                assert "\n" not in str(error) and len(str(error)) < 900, (key, value)
                counts[0] += 1
                continue
            assert build(config.Config, tomllib.loads(config.dump(made)), "", "dumped") == made, (key, value)
            counts[1] += 1
    assert min(counts) > 10


def test_names_of_files_that_cannot_exist(tmp_path):
    for name in ("x" * 300, "a\0b"):
        with pytest.raises(ConfigError, match="does not exist"):
            config.load(name)
        (tmp_path / "a.toml").write_text(f"extends = {json.dumps(name)}\n")
        with pytest.raises(ConfigError, match="does not exist"):
            config.load(tmp_path / "a.toml")
    (tmp_path / "a.toml").write_text("x = " + "[" * 3000)
    with pytest.raises(ConfigError, match="not valid TOML"):
        config.load(tmp_path / "a.toml")


def test_a_float_key_takes_an_integer(load):
    assert load(BASE, "--optimizer.lr=1").optimizer.lr == 1.0


MODULES = """
[model.modules.vision]
kind = "images"
feeds = "language"
config = {model_type = "vit"}
num_segments = 2
[model.modules.language]
kind = "text"
"""


def test_modules_by_name_are_the_short_forms(load):
    text = BASE.replace("[model.language]", MODULES)
    assert load(text) == load(BASE, "--model.encoder.config={model_type='vit'}", "--model.encoder.num_segments=2")
    assert load(text, "--model.modules.vision.num_segments=3").model.encoder.num_segments == 3
    assert list(load(text).model.sections) == ["vision", "language"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "--model.modules.vision.kind=sounds",
            "modules.vision.kind = \"sounds\"; choose one of 'images', 'audio', 'text'",
        ),
        ("--model.modules.vision.feeds=dit", 'modules.vision.feeds = "dit"; it must be "language"'),
        (
            "--model.modules.language.feeds=dit",
            'language.feeds = "dit"; its output enters no other module; leave it out',
        ),
        ("--model.modules.ear.kind=audio", r"model\.modules\.ear: give either `pretrained`"),
        ("--model.modules.ear={kind='audio',depth=1}", r"unknown key model\.modules\.ear\.depth"),
        (
            "--model.modules.maps={kind='text'}",
            'modules.maps: a model has one module of kind "text", which is called lang',
        ),
        (
            "--model.modules.Ear={kind='audio',config={model_type='whisper_encoder'}}",
            r"\[model\.modules\.Ear\]: an encoder is called by lower-case letters",
        ),
        ("--model.encoder.num_segments=1", "modules.vision and model.encoder are the same module; write all its keys"),
        ("--model.modules.vision=1", r"modules.vision = 1; it is a section, written \[model.modules.vision\]"),
        ("--model.modules=1", r"model.modules = 1; write one section \[model.modules.NAME\]"),
        ("--model.modules.vision.depth=1", "unknown key model.encoder.depth"),
    ],
)
def test_modules_that_the_model_does_not_have(load, override, message):
    with pytest.raises(ConfigError, match=message):
        load(BASE.replace("[model.language]", MODULES), override)


EARS = """
[model.modules.left]
kind = "audio"
config = {model_type = "whisper_encoder"}
[model.modules.right]
kind = "audio"
token = "<right ear>"
config = {model_type = "whisper_encoder"}
[model.modules.right.projector]
spatial_merge = 2
[model.language]
"""


def test_further_encoders_have_sections_of_their_own(load, tmp_path):
    text = BASE.replace("[model.language]", EARS)
    c = load(text, "--model.encoder.config={model_type='vit'}", "--model.modules.left.num_segments=2")
    assert list(c.model.encoders) == ["vision", "left", "right"]
    assert c.model.modules["left"].num_segments == 2
    assert c.model.projector_of("right").merge == 2
    assert c.model.projector_of("vision") is c.model.projector
    (tmp_path / "resolved.toml").write_text(config.dump(c))
    assert config.load(tmp_path / "resolved.toml") == c
    with pytest.raises(
        ConfigError, match=r'model\.modules\.right\.token = "<left>" is that of model\.modules\.left too'
    ):
        load(text, "--model.modules.right.token=<left>")
    many = "".join(f"[model.modules.a{i}]\nkind='audio'\nconfig={{model_type='whisper_encoder'}}\n" for i in range(12))
    with pytest.raises(ConfigError, match="12 encoders; an attention mask tells the tokens of at most 11 apart"):
        load(BASE.replace("[model.language]", many + "[model.language]"))
    assert GROUPS == GROUP_BITS


SEVERAL = """
[[data.sources]]
source = "data/charts"
weight = 3
[[data.sources]]
source = "owner/text"
weight = 0.5
name = "words"
split = "all"
"""


def test_several_sources_are_tables_and_read_back(load, tmp_path):
    c = load(BASE.replace('source = "somewhere"', "") + SEVERAL)
    assert [(s.label, s.weight, s.split) for s in c.data.sources] == [("charts", 3.0, ""), ("words", 0.5, "all")]
    assert c.data.description == "charts (85.7%) + words (14.3%)"
    (tmp_path / "resolved.toml").write_text(config.dump(c))
    assert config.load(tmp_path / "resolved.toml") == c
    (tmp_path / "base.toml").write_text(BASE)
    (tmp_path / "over.toml").write_text('extends = "base.toml"\n[data]\nsource = ""' + SEVERAL)
    assert config.load(tmp_path / "over.toml").data == c.data


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ("[]", r"data\.source: is empty; name a dataset id, .*, or several as tables \[\[data\.sources\]\]"),
        ('[{source="a"}]', r"the key data\.sources\[0\]\.weight is missing"),
        ('[{source="a", wieght=1}]', r"unknown key data\.sources\[0\]\.wieght; did you mean .*\.weight\?"),
        ('[{source="a", weight="x"}]', r'data\.sources\[0\]\.weight = "x" is a string; it must be a float'),
        ('[{source="a", weight=0}]', r'data\.sources: "a" has weight = 0\.0; it must be above 0 .* remove the source'),
        ('[{source="a", weight=-1}]', "has weight = -1.0; it must be above 0"),
        ('[{source="a", weight=0}, {source="b", weight=0}]', "has weight = 0.0; it must be above 0"),
        ('[{source="", weight=1}]', r"data\.sources\.source is empty"),
        ('[{source="x/a", weight=1}, {source="y/a", weight=1}]', r'data\.sources: two are named "a"; give each a name'),
        ('[{source="a b", weight=1}]', r'data\.sources: "a b" is named "a b" in metrics; set its name to letters'),
        ('[{source="a", weight=1, name="x/y"}]', r'is named "x/y" in metrics'),
        ('{source="a", weight=1}', r"data\.sources = .*; it is a list of sections, each written \[\[data\.sources\]\]"),
        ("[1]", r"data\.sources = \[1\]; it is a list of sections"),
    ],
)  # fmt: skip
def test_bad_sources_are_refused(load, sources, message):
    with pytest.raises(ConfigError, match=message):
        load(BASE, "data.source=", f"data.sources={sources}")


def test_one_source_and_several_exclude_each_other(load):
    with pytest.raises(ConfigError, match=r'data\.source = "somewhere" and data\.sources are both set; keep one'):
        load(BASE + SEVERAL)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "llava", "spatial_merge": 2}, r'spatial_merge = 2, but kind = "llava" merges no features; remove it'),
        ({"kind": "llava", "hidden_size": 9}, 'hidden_size = 9 has no effect with kind = "llava"; remove it'),
        ({"kind": "native", "hidden_size": 9}, 'hidden_size = 9 has no effect with kind = "native"; remove it'),
        ({"kind": "mlp", "hidden_act": "relu"}, 'hidden_act = "relu" has no effect with kind = "mlp"; remove it'),
        ({"kind": "native", "pretrained": "x"}, "whose weights come with the encoder"),
    ],
)
def test_keys_of_another_kind_of_projector_are_refused(options, message):
    with pytest.raises(ConfigError, match=f"^model.projector.{message}" if "weights" not in message else message):
        ProjectorConfig(**options)


@pytest.mark.parametrize(("kind", "merge"), [("mlp", 2), ("native", 2), ("llava", 1)])
def test_the_merge_of_a_projector(kind, merge):
    assert ProjectorConfig(kind=kind).merge == merge
    assert ProjectorConfig(kind="mlp", spatial_merge=3).merge == 3


def test_a_list_of_feature_layers_is_refused(load):
    encoder = "--model.encoder.config={model_type='clip'}"
    assert load(BASE, encoder, "--model.encoder.feature_layer=-2").model.encoder.feature_layer == -2
    with pytest.raises(
        ConfigError, match=r"model.encoder.feature_layer = \[-2, -3\] is an array; it must be an integer"
    ):
        load(BASE, encoder, "--model.encoder.feature_layer=[-2, -3]")


def test_forwards_ahead_need_a_schedule_with_a_rule_and_an_encoder(load):
    encoder = '[model.encoder]\nconfig = { model_type = "qwen2_vl_vision" }\n'
    warm = "--parallelism.pipeline_parallel_schedule=ZB-H1"
    assert load(encoder + BASE, warm, "--planner.search.eager_forwards=2").planner.search.eager_forwards == 2
    with pytest.raises(ConfigError, match=r"eager_forwards = 1, but the model has one module"):
        load(BASE, warm, "--planner.search.eager_forwards=1")
    for schedule in ("GPipe", "ZBV", "interleave", "recipe.py"):
        said = rf'eager_forwards = 1 with .*pipeline_parallel_schedule = "{schedule}", which has no number'
        with pytest.raises(ConfigError, match=said):
            load(
                encoder + BASE,
                "--planner.search.eager_forwards=1",
                f"--parallelism.pipeline_parallel_schedule={schedule}",
            )
