"""The tables of the pure part agree with the Hugging Face classes."""

import pytest
from torch import nn
from transformers.activations import ACT2FN

from mmtrain.families.catalogue import ENCODERS, LANGUAGES
from mmtrain.models.adapters import decoder, parameters_on_meta, vision_adapter
from mmtrain.spec.config_values import ACTIVATIONS

ADAPTERS = {name: vision_adapter(name) for name in ENCODERS} | {name: decoder(name) for name in LANGUAGES}
FAMILIES = {**ENCODERS, **LANGUAGES}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_are_those_of_hugging_face(model_type):
    config_class, _ = ADAPTERS[model_type].classes
    theirs = config_class()
    assert theirs.model_type in (model_type, *FAMILIES[model_type].parents)
    for key, default in FAMILIES[model_type].defaults.items():
        if key == "tie_word_embeddings" and FAMILIES[model_type].parents:
            continue  # the whole model's config has it
        expected = getattr(theirs, key)
        if default is None:  # Llama: as many key heads as query heads
            expected, default = theirs.num_key_value_heads, theirs.num_attention_heads
        if isinstance(default, tuple):
            expected = tuple(expected)
        assert (default, type(default)) == (expected, type(expected)), key
    for alias, key in FAMILIES[model_type].aliases.items():
        assert config_class.attribute_map.get(alias, key) == key, alias  # older versions know fewer


def test_the_activation_functions_are_those_of_hugging_face():
    assert set(ACTIVATIONS) <= set(ACT2FN)


def test_parameters_on_meta_keeps_buffers_and_restores_the_class():
    register = nn.Module.register_parameter
    with parameters_on_meta():
        norm = nn.BatchNorm1d(3)
    assert norm.weight.is_meta
    assert not norm.running_mean.is_meta
    assert nn.Module.register_parameter is register
    assert not nn.Linear(2, 2).weight.is_meta
