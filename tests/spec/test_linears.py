"""Which layers of a block get an adapter, and what a config says wrongly about them."""

import pytest

from mmtrain.errors import ConfigError
from mmtrain.spec.builders import model_spec
from mmtrain.spec.linears import adapted_linears
from tests.lora import with_lora

DECODER = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def last_names(model, module):
    return [linear.last_name for linear in adapted_linears(model, module)]


def test_all_linear_layers_of_the_blocks_are_the_default(tiny):
    model = with_lora(tiny.model("qwen2_vl", "llama"))
    assert last_names(model, "language") == DECODER
    assert last_names(model, "vision") == ["qkv", "proj", "fc1", "fc2"]
    siglip = with_lora(tiny.model("siglip"), ["encoder"])
    assert last_names(siglip, "vision") == ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
    assert last_names(siglip, "language") == []


def test_targets_choose_layers(tiny):
    model = with_lora(tiny.model("siglip"), targets=["v_proj", "q_proj", "down_proj"])
    assert last_names(model, "vision") == ["q_proj", "v_proj"]
    assert last_names(model, "language") == ["q_proj", "v_proj", "down_proj"]


@pytest.mark.parametrize(
    ("modules", "targets", "message"),
    [
        (["language"], ["q_prj"], r"'q_prj' is no linear layer .* did you mean 'q_proj'\? the language blocks"),
        (["language"], ["fc1"], r"'fc1' is no linear layer .*; the language blocks have q_proj, k_proj"),
        (["encoder", "language"], ["q_proj"], r"\['q_proj'\] names no layer of the vision blocks.* have qkv, proj"),
        (["encoder", "language"], ["fc1"], r"\['fc1'\] names no layer of the language blocks, but model.language.tr"),
    ],
)
def test_names_that_no_block_has(tiny, modules, targets, message):
    with pytest.raises(ConfigError, match=message):
        model_spec(with_lora(tiny.model("qwen2_vl"), modules, targets))


def test_only_the_adapters_of_blocks_train(tiny):
    spec = model_spec(with_lora(tiny.model("siglip", projector={"hidden_size": 20}), ["language"]))
    assert [layer.trainable for layer in spec.module("language").layers] == [False, True, True, True, False]
    # q 24 -> 24, k and v 24 -> 12, o 24 -> 24; gate and up 24 -> 40, down 40 -> 24; rank 3.
    assert spec.module("language").num_trainable_params == 3 * 3 * (48 + 36 + 36 + 48 + 3 * 64)
    assert spec.grad_enters("language"), "the encoder trains"
    text = model_spec(with_lora(tiny.model(None), ["language"]))
    assert [text.has_backward("language", i) for i in range(5)] == [False, True, True, True, True]
