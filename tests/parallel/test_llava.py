"""LLaVA models on pipeline, tensor and context parallel ranks: loss and every gradient equal those of one process.

`tests/models/test_llava.py` compares one process with the whole class.
"""

import pytest

from mmtrain.config.model import ModelConfig
from mmtrain.config.topology import MeshShape
from tests.llava import job_model, save_llava
from tests.lora import with_lora
from tests.parallel.parity import Case, check, identify, run_layout, short
from tests.parallel.test_split_backward import fill_adapters_by_name
from tests.ranks import run_ranks

TOLERANCE = 3e-5
"""As in `test_parity.py`. Measured: at most X."""


def models(folder, segments: int = 1) -> dict[str, ModelConfig]:
    """Name -> the model of a job that starts from the folder of a LLaVA model."""
    found = {}
    for name in ("clip, llama", "siglip, qwen2"):
        path = folder / name
        save_llava(name, path)
        found[name] = job_model(path, segments=segments)
    return found


@pytest.mark.ranks
def test_two_pipeline_ranks_equal_one_process(tmp_path):
    cases = {name: short(Case(model=model), 2) for name, model in models(tmp_path).items()}
    check(run_ranks(run_layout, 2, MeshShape(pp=2), cases), TOLERANCE)


@pytest.mark.ranks
@pytest.mark.nightly
@pytest.mark.parametrize(
    "shape", [MeshShape(pp=2, tp=2), MeshShape(pp=2, cp=2), MeshShape(pp=4), MeshShape(dp_shard=2, tp=2)], ids=identify
)
def test_layouts_equal_one_process(tmp_path, shape):
    cases = {}
    for name, model in models(tmp_path).items():
        runs = (("1F1B", 1), ("interleave", 2))
        cases |= {
            name: Case(model=model, runs=runs),
            f"{name}, tower and language model frozen": Case(
                model=job_model(tmp_path / name, encoder=False, language=False), runs=runs
            ),
            f"{name}, adapters": Case(model=with_lora(model), runs=runs, prepare=fill_adapters_by_name),
        }
    full = tmp_path / "full"
    save_llava("clip, llama, full", full)
    cases["clip, llama, full"] = Case(model=job_model(full), runs=runs)
    check(run_ranks(run_layout, shape.world_size, shape, cases, timeout=900), TOLERANCE)
