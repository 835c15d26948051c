"""Chunks that are filled instead of initialised: all but the values of parameters is as an initialised chunk has it."""

import pytest
import torch
from torch import Tensor

from mmtrain.config.model import ModelConfig
from mmtrain.models.build import build_chunk
from mmtrain.models.initialise import init_weights
from mmtrain.parallel.fill import fill_chunk
from mmtrain.spec.builders import model_spec
from tests.models.dits import VAES, t2v
from tests.reference import ENCODERS, LANGUAGES, model_config

CPU = torch.device("cpu")
LONG = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}  # fmt: skip
CASES = [
    *[pytest.param(model_config(name), "vision", id=name) for name in ENCODERS],
    *[pytest.param(model_config(language=name), "language", id=name) for name in LANGUAGES],
    pytest.param(t2v(text=LONG), "language", id="long context"),
    pytest.param(model_config(tied=True), "language", id="tied"),
    pytest.param(t2v(), "dit", id="dit"),
    *[pytest.param(t2v(vae=name), "vae", id=name) for name in VAES],
]


@pytest.mark.parametrize(("model", "module"), CASES)
def test_all_but_the_values_is_that_of_an_initialised_chunk(model: ModelConfig, module: str) -> None:
    spec = model_spec(model)
    layers = (0, len(spec.module(module).layers))
    made, filled = (build_chunk(model, spec, module, layers, device=device) for device in ("cpu", "meta"))
    init_weights(made, 3)
    asked: dict[str, torch.dtype] = {}

    def local(name: str, like: Tensor, dtype: torch.dtype, first: int) -> None:
        asked[name] = dtype

    fill_chunk(filled, local, {}, device=CPU, buffers=CPU)
    pairs = list(zip(made.named_parameters(), filled.named_parameters(), strict=True))
    for (name, one), (other_name, other) in pairs:
        assert (name, one.shape, one.dtype, one.device) == (other_name, other.shape, other.dtype, other.device)
        assert one.requires_grad == other.requires_grad
    buffers, others = dict(made.named_buffers()), dict(filled.named_buffers())
    assert buffers.keys() == others.keys()
    assert [n for n, b in buffers.items() if n not in made.state_dict() and not torch.equal(b, others[n])] == []
    assert asked.keys() == {f"model.{name}" for name in filled.state_dict()} - tied_names(filled)
    with torch.no_grad():
        for parameter in filled.parameters():
            parameter.zero_()
    assert all(not value.any() for name, value in filled.state_dict().items() if name not in others)


def tied_names(chunk: torch.nn.Module) -> set[str]:
    """Second names of parameters."""
    names = {name for name, _ in chunk.named_parameters()}
    return {f"model.{name}" for name, _ in chunk.named_parameters(remove_duplicate=False)} - {
        f"model.{n}" for n in names
    }
