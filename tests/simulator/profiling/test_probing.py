"""What is measured stands for the job: the same kinds of layers, on batches that a trainer accepts."""

from dataclasses import replace

import pytest

from mmtrain.config import config as config_module
from mmtrain.costs.profile.profile import role
from mmtrain.modality.buckets import most_frames, video_geometry
from mmtrain.modality.probes import probing_iteration, work_curve
from mmtrain.planner.batching import check_conservation, make_batching
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.profiling.probing import CUTS, probing_job, small_job
from mmtrain.spec.builders import model_spec
from tests.jobs import video_config
from tests.reference import ENCODERS, model_config

JOBS = ["debug_vlm.toml", "debug_lora.toml", "debug_siglip_llama.toml", "debug_text.toml", "debug_4d.toml"]


def with_encoder(encoder: str):
    config = config_module.load("debug_vlm.toml", [])
    section = replace(config.model.encoder, config=ENCODERS[encoder])
    return replace(config, model=replace(config.model, encoder=section, projector=model_config(encoder).projector))


def with_further():
    config = config_module.load("debug_vlm.toml", [])
    others = model_config(others={"audio": "whisper_encoder", "maps": "siglip2_vision_model"}).modules
    return replace(config, model=replace(config.model, modules=others))


CONFIGS = [config_module.load(name, []) for name in JOBS] + [with_encoder(name) for name in ENCODERS]
CONFIGS.append(with_further())
IDS = [*JOBS, *ENCODERS, "further encoders"]


def kinds(config):
    found = {}
    for module in model_spec(config.model).modules:
        for layer in module.layers:
            found[module.name, role(layer)] = replace(layer, name="")
    return found


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_the_small_job_has_the_layers_of_the_large_one(config):
    job = probing_job(config, num_blocks=2, cut=CUTS[0], folder="x")
    assert kinds(job) == kinds(config)
    for module in model_spec(job.model).modules:
        counts = [role(layer) for layer in module.layers if layer.is_block]
        assert all(counts.count(kind) <= 2 for kind in counts)


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_each_layer_or_module_is_a_stage(config, cut):
    job = probing_job(config, num_blocks=2, cut=cut, folder="x")
    made = make_job(job)
    assert made.partition.num_ranks == 1
    stages = len(made.partition.stages)
    assert stages == sum(len(m.layers) if cut.stages == "layers" else 1 for m in made.spec.modules)


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_batches_are_whole_and_fit_into_a_microbatch(config):
    spec = model_spec(config.model)
    for meta in (probing_iteration(config), work_curve(config)):
        check_conservation(meta, make_batching(meta, spec))
        one_image = max((image.num_tokens for m in meta.microbatches for image in m.images), default=0)
        for microbatch in meta.microbatches:
            assert microbatch.num_tokens <= max(config.training.seq_len, one_image + 4)
            assert microbatch.num_targets >= 1


def test_each_encoder_is_measured_by_itself_and_with_several_items():
    config = with_further()
    batching = make_batching(probing_iteration(config), model_spec(config.model))
    for index, name in enumerate(("vision", "audio", "maps")):
        items = [item for item in batching.items if item.work.module == index]
        assert {unit.module for item in items for unit in item.units} == {name}
        assert len({len(item.units) for item in items}) > 2
    works = [{batching.module_of(w) for w in item.work.after} for item in batching.items if item.work.after]
    assert all(len(feeding) == 1 for feeding in works)


def test_rows_pairs_outputs_and_labels_change_apart_from_each_other():
    import numpy as np

    config = config_module.load("debug_vlm.toml", [])
    batching = make_batching(probing_iteration(config), model_spec(config.model))
    for index in range(2):
        sizes = [s for w, s in zip(batching.works, batching.sizes, strict=True) if w.module == index]
        table = np.array([(s.rows, s.pairs, 1.0, *((s.outputs,) if index else ())) for s in sizes], dtype=float)
        scaled = table / np.linalg.norm(table, axis=0)
        assert np.linalg.cond(scaled) < 50


def test_the_curve_grows_by_one_image_of_one_size_at_first():
    config = config_module.load("debug_vlm.toml", ["--training.seq_len=1024"])
    metas = work_curve(config).microbatches
    numbers = [len(m.images) for m in metas]
    assert numbers[:4] == [1, 2, 3, 4]
    assert numbers == sorted(set(numbers))
    assert len({image.grid for m in metas for image in m.images}) == 1


def test_without_an_encoder_a_frozen_language_model_trains():
    config = config_module.load("debug_vlm.toml", ["--model.language.trainable=false"])
    text = small_job(config, folder="unused")
    assert [module.name for module in model_spec(text.model).modules] == ["language"]
    assert model_spec(text.model).module("language").trainable
    config_module.check(text)


# ------------------------------------------------------------------------------------------------ clips


LONGER = ["--data.max_seconds=4.0", "--data.max_total_seconds=8.0"]


@pytest.mark.parametrize("channels", [3, 4])
def test_layers_of_a_text_to_video_job_are_stages(tmp_path, channels):
    config = video_config(tmp_path, "--model.dit.config.num_layers=5", channels=channels)
    for cut in CUTS:
        job = probing_job(config, num_blocks=2, cut=cut, folder="x")
        assert kinds(job) == kinds(config)
        made = make_job(job)
        counts = {module.name: len(module.layers) for module in made.spec.modules}
        assert counts == {"language": 4, "dit": 4}
        assert len(made.partition.stages) == (8 if cut.stages == "layers" else 2)


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize(
    "override",
    ["data.max_clips=4", "data.max_clips=1", "data.video_frames=[4]", "training.seq_len=2", "data.fps=3.0"],
)
def test_clips_are_those_that_a_loader_could_give(tmp_path, channels, override):
    config = video_config(tmp_path, f"--{override}", channels=channels)
    geometry, spec = video_geometry(config.model.dit, config.data), model_spec(config.model)
    for meta in (probing_iteration(config), work_curve(config)):
        check_conservation(meta, make_batching(meta, spec))
        for microbatch in meta.microbatches:
            assert 1 <= len(microbatch.clips) <= config.data.max_clips
            assert microbatch.num_frames <= most_frames(config.data)
            assert len({clip.name for clip in microbatch.clips}) == len(microbatch.clips)
            for clip in microbatch.clips:
                assert clip.frames in geometry.frames
                assert clip.bucket[1:] in geometry.sizes
                assert clip.num_text_tokens <= config.training.seq_len


def test_latents_of_unknown_size_are_those_of_usual_clips():
    config = config_module.load("t2v_s.toml", [])
    sizes = {clip.bucket[1:] for m in probing_iteration(config).microbatches for clip in m.clips}
    assert max(height * width for height, width in sizes) <= 1.1 * 32 * 32


def test_tokens_pairs_texts_and_clips_change_apart_from_each_other(tmp_path):
    import numpy as np

    config = video_config(tmp_path, *LONGER)
    batching = make_batching(probing_iteration(config), model_spec(config.model))
    for module, columns in (
        ("language", ("rows", "pairs")),
        ("dit", ("rows", "pairs", "cross_pairs", "texts", "clips")),
    ):
        works = zip(batching.works, batching.sizes, strict=True)
        sizes = [size for work, size in works if batching.modules[work.module] == module]
        table = np.array([[*(getattr(size, name) for name in columns), 1.0] for size in sizes], dtype=float)
        scaled = table / np.linalg.norm(table, axis=0)
        assert np.linalg.cond(scaled) < 50, (module, np.linalg.cond(scaled))
        assert np.linalg.matrix_rank(scaled) == len(columns) + 1


def test_the_curve_grows_by_one_clip_of_one_bucket(tmp_path):
    metas = work_curve(video_config(tmp_path, *LONGER, "--data.max_clips=7")).microbatches
    assert [len(m.clips) for m in metas] == [1, 2, 3, 4, 6, 7]
    assert len({clip.bucket for m in metas for clip in m.clips}) == 1


@pytest.mark.parametrize("frozen", ["language", "dit"])
def test_the_small_text_to_video_job_has_few_parameters_and_trains(tmp_path, frozen):
    config = video_config(tmp_path, f"--model.{frozen}.trainable=false", "--parallelism.tensor_parallel_degree=2")
    small = small_job(config, folder="unused")
    config_module.check(small)
    spec = model_spec(small.model)
    assert (spec.module("language").trainable, spec.module("dit").trainable) == (False, True)
    assert [len(module.layers) for module in spec.modules] == [3, 3]
    probing = model_spec(probing_job(config, num_blocks=2, cut=CUTS[0], folder="unused").model)
    trained = sum(module.num_trainable_params for module in probing.modules)
    assert spec.module("dit").num_trainable_params < trained
    assert IterationPlanner(make_job(small)).plan(probing_iteration(small)).result.has_plan


def test_a_layout_by_hand_is_of_the_job_and_not_of_what_is_measured():
    config = config_module.load(
        "debug_vlm.toml", ["--model.language.pipeline_layout=E|t|t|tL", "--model.language.num_segments=0"]
    )
    make_job(config)
    for cut in CUTS:
        make_job(probing_job(config, num_blocks=2, cut=cut, folder="x"))
