"""What is measured stands for the job: the same kinds of layers, on batches that a trainer accepts."""

from dataclasses import replace

import pytest

from mmtrain import config as config_module
from mmtrain.config import ProjectorConfig
from mmtrain.models.spec_builders import model_spec
from mmtrain.planner.batching import check_conservation, make_batching
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.profile import role
from mmtrain.probing import CUTS, picture_curve, probing_iteration, probing_job, small_job
from tests.reference import ENCODERS

JOBS = ["debug_vlm.toml", "debug_lora.toml", "debug_siglip_llama.toml", "debug_text.toml", "debug_4d.toml"]


def with_encoder(encoder: str):
    config = config_module.load("debug_vlm.toml", [])
    section = replace(config.model.encoder, config=ENCODERS[encoder])
    return replace(config, model=replace(config.model, encoder=section, projector=ProjectorConfig()))


CONFIGS = [config_module.load(name, []) for name in JOBS] + [with_encoder(name) for name in ENCODERS]
IDS = [*JOBS, *ENCODERS]


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
    planner = IterationPlanner.of(job)
    assert planner.partition.num_ranks == 1
    stages = len(planner.partition.stages)
    assert stages == sum(len(m.layers) if cut.stages == "layers" else 1 for m in planner.spec.modules)


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_batches_are_whole_and_fit_into_a_microbatch(config):
    spec = model_spec(config.model)
    for meta in (probing_iteration(config), picture_curve(config)):
        check_conservation(meta, make_batching(meta, spec))
        one_picture = max((image.num_tokens for m in meta.microbatches for image in m.images), default=0)
        for microbatch in meta.microbatches:
            assert microbatch.num_tokens <= max(config.training.seq_len, one_picture + 4)
            assert microbatch.num_targets >= 1


def test_rows_pairs_outputs_and_labels_change_apart_from_each_other():
    import numpy as np

    config = config_module.load("debug_vlm.toml", [])
    batching = make_batching(probing_iteration(config), model_spec(config.model))
    for index in range(2):
        sizes = [s for w, s in zip(batching.works, batching.size_of, strict=True) if w.module == index]
        table = np.array([(s.rows, s.pairs, 1.0, *((s.outputs,) if index else ())) for s in sizes], dtype=float)
        scaled = table / np.linalg.norm(table, axis=0)
        assert np.linalg.cond(scaled) < 50


def test_the_curve_grows_by_one_picture_of_one_size_at_first():
    config = config_module.load("debug_vlm.toml", ["--training.seq_len=1024"])
    metas = picture_curve(config).microbatches
    numbers = [len(m.images) for m in metas]
    assert numbers[:4] == [1, 2, 3, 4]
    assert numbers == sorted(set(numbers))
    assert len({image.grid for m in metas for image in m.images}) == 1


def test_without_an_encoder_a_frozen_language_model_trains():
    config = config_module.load("debug_vlm.toml", ["--model.language.trainable=false"])
    text = small_job(config, folder="")
    assert [module.name for module in model_spec(text.model).modules] == ["language"]
    assert model_spec(text.model).module("language").trainable
    config_module.check(text)
