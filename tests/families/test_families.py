"""The catalogue of families, their adapters, and the kinds and linear layers of their blocks."""

import dataclasses
import importlib
from pathlib import Path

import pytest
from torch import nn
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

import mmtrain.families
from mmtrain.costs.profile.profile import role
from mmtrain.families.catalogue import FAMILIES, TABLES
from mmtrain.families.shapes import FULL, WINDOWED
from mmtrain.models.adapters import decoder, vision_adapter
from mmtrain.spec import linears
from mmtrain.spec.builders import model_spec
from mmtrain.spec.linears import block_linears
from mmtrain.spec.model_configs import encoder_config, language_config
from mmtrain.spec.model_shapes import language_shape
from mmtrain.spec.vision_shapes import vision_shape
from tests.counts import families as named_in
from tests.counts import sources
from tests.models.conftest import ENCODERS, LANGUAGES, tiny_model

FOLDER = Path(mmtrain.families.__file__).parent


def test_every_folder_is_a_family():
    folders = {path.parent.name for path in FOLDER.glob("*/__init__.py")}
    assert sorted(family.name for family in FAMILIES) == sorted(folders)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_network_has_an_adapter_in_the_folder(family):
    if family.dits:  # `models.dit` holds the class itself
        assert not (FOLDER / family.name / "adapter.py").exists()
        return
    adapters = importlib.import_module(f"mmtrain.families.{family.name}.adapter")
    assert set(getattr(adapters, "ADAPTERS", {})) == set(family.networks)
    assert hasattr(adapters, "projector") == bool(family.projectors)


OF_LOSSES = {f"mmtrain.{name}" for name in ("config.model", "models.contrast", "models.loss", "spec.contrast")}
"""Files that name losses, which may be called as the family for which they were found."""


def test_few_files_name_a_family_outside_of_its_folder():
    found = {family: {*files} - OF_LOSSES for family, files in named_in(sources()).items()}
    assert len(found) > 5
    assert {family: files for family, files in found.items() if len(files) > 3} == {}


def test_a_block_has_a_kind():
    theirs = Qwen2_5_VLVisionConfig().fullatt_block_indexes
    model = tiny_model("qwen2_5_vl")
    depth = {"depth": 32, "fullatt_block_indexes": list(theirs)}
    model = dataclasses.replace(
        model, encoder=dataclasses.replace(model.encoder, config={**model.encoder.config, **depth})
    )
    kinds = [vision_shape(model, "vision").block_kind(index) for index in range(32)]
    assert [index for index, kind in enumerate(kinds) if kind == FULL] == list(theirs)
    assert set(kinds) == {FULL, WINDOWED}
    blocks = [layer for layer in model_spec(model).module("vision").layers if layer.name.startswith("blocks")]
    assert [layer.kind for layer in blocks] == kinds
    assert [bool(layer.attention_flops.window_pair) for layer in blocks] == [kind == WINDOWED for kind in kinds]
    assert {role(layer) for layer in blocks} == {"blocks", "blocks, windowed"}


def test_a_kind_may_have_a_table_of_its_own(monkeypatch):
    table, shape = TABLES["qwen2_5_vl_vision"], vision_shape(tiny_model("qwen2_5_vl"), "vision")
    own = {name.replace("qkv", "joint"): style for name, style in table.block.items()}
    changed = {**TABLES, "qwen2_5_vl_vision": dataclasses.replace(table, kinds={WINDOWED: own})}
    monkeypatch.setattr(linears, "TABLES", changed)
    assert [block_linears(shape, kind)[0].name for kind in (FULL, WINDOWED)] == ["attn.qkv", "attn.joint"]


def of_class(module, blocks, index):
    """(name, inputs, outputs) of each linear layer of one block."""
    block = module.get_submodule(f"{blocks}.{index}")
    return sorted(
        (name, m.in_features, m.out_features) for name, m in block.named_modules() if isinstance(m, nn.Linear)
    )


def ours(shape):
    return sorted((x.name, x.inputs, x.outputs) for x in block_linears(shape))


@pytest.mark.parametrize("name", ENCODERS)
def test_linear_layers_of_an_encoder_are_those_of_its_class(name):
    model = tiny_model(name, projector={"spatial_merge": 1})
    shape = vision_shape(model, "vision")
    adapter = vision_adapter(shape.model_type)
    assert ours(shape) == of_class(adapter.build(encoder_config(model.encoder)), adapter.blocks, 0)


@pytest.mark.parametrize("name", LANGUAGES)
def test_linear_layers_of_a_language_model_are_those_of_its_class(name):
    model = tiny_model(None, name)
    shape = language_shape(model)
    adapter = decoder(shape.model_type)
    assert ours(shape) == of_class(adapter.build(language_config(model.language)), adapter.blocks, 0)
