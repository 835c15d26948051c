"""LLaVA models on pipeline, tensor and context parallel ranks: loss and every gradient equal those of one process.

`tests/models/test_llava.py` compares one process with the whole class.
"""

import dataclasses

import pytest

from mmtrain.config.model import ModelConfig
from mmtrain.config.topology import JobLayout
from tests.llava import job_model, save_llava
from tests.lora import with_lora
from tests.parallel.parity import Case, check, identify, run_layout, short
from tests.parallel.test_parity import TOLERANCE
from tests.parallel.test_split_backward import fill_adapters_by_name
from tests.ranks import run_ranks
from tests.reference import model_config

RUNS = (("1F1B", 1), ("interleave", 2))


def models(folder) -> dict[str, ModelConfig]:
    """Name -> the model of a job that starts from the folder of a LLaVA model."""
    found = {}
    for name in ("clip, llama", "siglip, qwen2"):
        path = folder / name
        save_llava(name, path)
        found[name] = job_model(path)
    return found


@pytest.mark.ranks
def test_two_pipeline_ranks_equal_one_process(tmp_path):
    cases = {name: short(Case(model=model), 2) for name, model in models(tmp_path).items()}
    check(run_ranks(run_layout, 2, JobLayout.grid(pp=2), cases), TOLERANCE)


@pytest.mark.ranks
@pytest.mark.nightly
@pytest.mark.parametrize(
    "shape",
    [JobLayout.grid(pp=2, tp=2), JobLayout.grid(pp=2, cp=2), JobLayout.grid(pp=4), JobLayout.grid(dp_shard=2, tp=2)],
    ids=identify,
)
def test_layouts_equal_one_process(tmp_path, shape):
    cases = {}
    for name, model in models(tmp_path).items():
        cases |= {
            name: Case(model=model, runs=RUNS),
            f"{name}, tower and language model frozen": Case(
                model=job_model(tmp_path / name, encoder=False, language=False), runs=RUNS
            ),
            f"{name}, adapters": Case(model=with_lora(model), runs=RUNS, prepare=fill_adapters_by_name),
        }
    full = tmp_path / "full"
    save_llava("clip, llama, full", full)
    cases["clip, llama, full"] = Case(model=job_model(full), runs=RUNS)
    check(run_ranks(run_layout, shape.world_size, shape, cases, timeout=900), TOLERANCE)


@pytest.mark.ranks
@pytest.mark.nightly
@pytest.mark.parametrize(
    "shape", [JobLayout.grid(pp=2, tp=2), JobLayout.grid(pp=2, cp=2), JobLayout.grid(cp=2, tp=2)], ids=identify
)
def test_resized_positions_equal_one_process(shape):
    """SigLIP 2 of any image size, where cp ranks also divide the patches of an image."""
    model = model_config("siglip2_vision_model")
    cases = {
        "images": Case(model=model, runs=RUNS),
        "patches": Case(model=model, runs=RUNS, share_patches=True),
        "frozen, another layer": Case(
            model=dataclasses.replace(
                model, encoder=dataclasses.replace(model.encoder, feature_layer=-2, trainable=False)
            ),
            runs=RUNS,
        ),
    }
    check(run_ranks(run_layout, shape.world_size, shape, cases, timeout=900), TOLERANCE)
