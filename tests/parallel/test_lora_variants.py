"""Adapters with rsLoRA, DoRA, dropout, chosen layers, projectors: every layout gives the gradients of one process."""

import dataclasses

import pytest

from mmtrain.config.model import ModelConfig
from mmtrain.config.sections import ActivationCheckpointConfig
from mmtrain.config.topology import JobLayout
from mmtrain.models.adapter_layers import AdapterDropout, DropoutKeys
from tests.lora import with_lora
from tests.parallel.parity import DROPOUT_KEY, Case, check, layouts, run_layout, shallow, small
from tests.parallel.test_parity import TOLERANCE
from tests.parallel.test_split_backward import check_equal, fill_adapters_by_name
from tests.ranks import run_ranks
from tests.reference import model_config

ALL = ("encoder", "projector", "language")


def prepare(chunk):
    """Values of adapters, and of a chunk that is no stage's the key of dropout."""
    fill_adapters_by_name(chunk)
    if all(module.keys is None for module in chunk.modules() if isinstance(module, AdapterDropout)):
        DropoutKeys(chunk).now = DROPOUT_KEY


def chosen(model: ModelConfig, layers: str) -> ModelConfig:
    """The model in which some blocks of each module train, or have adapters."""
    encoders = {name: dataclasses.replace(s, trainable_layers=layers) for name, s in model.encoders.items()}
    language = dataclasses.replace(model.language, trainable_layers=layers)
    return dataclasses.replace(model.with_modules(encoders), language=language)


def case(model: ModelConfig, **options) -> Case:
    runs = (("1F1B", 0, 0), ("interleave", 0, 10**6))  # one work of images, as in the model of one process
    return shallow(Case(model=model, runs=runs, prepare=prepare, **options))


CASES = {
    "DoRA": case(with_lora(model_config(), ALL, use_dora=True)),
    "DoRA with biases": case(with_lora(model_config("siglip_vision_model", "llama"), ALL, use_dora=True)),
    "rsLoRA, some layers": case(chosen(with_lora(model_config(), use_rslora=True), "1..")),
    "own merger": case(with_lora(model_config("qwen2_5_vl_vision", projector="native"), ALL, use_dora=True)),
    "one linear layer as projector": case(
        with_lora(model_config("qwen2_audio_encoder", projector="linear"), ALL, use_dora=True, dropout=0.4)
    ),
    "dropout": case(with_lora(model_config(), ALL, dropout=0.4)),
    "dropout, recomputed": case(
        with_lora(model_config(), ALL, dropout=0.4), recompute=ActivationCheckpointConfig(mode="full")
    ),
    "DoRA and dropout, recomputed in part": case(
        with_lora(model_config(), dropout=0.4, use_dora=True), recompute=ActivationCheckpointConfig(mode="selective")
    ),
    "blocks that train": case(chosen(model_config(frozen=("projector",)), "1..1")),
}
BOTH = with_lora(model_config(), ALL, dropout=0.4, use_dora=True)
DRAWN = {"memory drawn work by work": case(BOTH, memories=2)}
LAYOUTS = {
    JobLayout.grid(pp=2): CASES | DRAWN,
    JobLayout.grid(tp=2): CASES | {"passes in turns": case(BOTH, braids=2)},
    JobLayout.grid(dp_shard=2): CASES,
    JobLayout.grid(cp=2): {name: CASES[name] for name in ("DoRA", "rsLoRA, some layers", "blocks that train")},
}


DAILY = {
    JobLayout.grid(pp=2): ("own merger", "memory drawn work by work", "blocks that train"),
    JobLayout.grid(tp=2): ("DoRA with biases", "passes in turns"),
    JobLayout.grid(dp_shard=2): ("dropout, recomputed", "rsLoRA, some layers"),
}


@pytest.mark.ranks
@layouts({shape: {name: small(LAYOUTS[shape][name], 1) for name in names} for shape, names in DAILY.items()})
def test_gradients_are_those_of_one_process(shape, cases):
    check_layout(shape, cases)


@pytest.mark.ranks
@pytest.mark.nightly
@layouts(LAYOUTS)
def test_every_layout(shape, cases):
    check_layout(shape, cases)


def check_layout(shape, cases):
    found = run_ranks(run_layout, shape.world_size, shape, cases)
    check(found, TOLERANCE)
    check_equal(found)
