"""Adapters against `peft` itself: logits, loss and every gradient of whole models, and single layers with one mask."""

import dataclasses

import pytest
import torch
from peft import LoraConfig, get_peft_model

from mmtrain.models.adapter_layers import AdapterDropout, DropoutKeys, combined_key, kept_inputs
from mmtrain.models.whole import in_class
from tests.llava import job_model, save_llava
from tests.lora import ALPHA, RANK, fill_adapters, with_lora
from tests.models.test_chunk import assert_equal_gradients
from tests.models.test_trainable import build
from tests.models.test_whole_models import gradients, reference_of
from tests.whole_models import make_batch, named, their_gradients, tiny_whole, truth

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

SETTINGS = {
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "DoRA with rsLoRA": {"use_dora": True, "use_rslora": True},
    "dropout, which evaluation leaves out": {"lora_dropout": 0.3},
}
TARGETS = r".*(blocks\.\d+\.(attn\.(qkv|proj)|mlp\.fc.)|merger\.mlp\.[02]|layers\.\d+\.(self_attn|mlp)\..*_proj)"
"""All linear layers of Qwen2-VL but the head."""


def tuned(folder, targets=TARGETS, **settings):
    """A whole model with adapters of `peft`, whose base and adapters are in the folder."""
    whole = tiny_whole("qwen2_vl")
    whole.save_pretrained(folder / "whole")
    theirs = get_peft_model(whole, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, **settings))
    with torch.no_grad():  # so that lengths are not those of the weights
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.1) if parameter.dim() == 1 else parameter.normal_(0, 0.1)
    theirs.save_pretrained(folder / "adapter")
    return theirs.base_model.model.eval()


def ours_of(folder, modules=("encoder", "projector", "language"), **settings):
    model = with_lora(named(folder / "whole"), modules, pretrained=str(folder / "adapter"), **settings)
    return reference_of(model)


def check(theirs, ours):
    batch = make_batch()
    loss, predictions = truth(theirs, [batch])
    loss.backward()
    outputs = ours(*batch, want_predictions=True)
    found = sum(output.loss_sum for output in outputs)
    found.backward()
    torch.testing.assert_close(found, loss, rtol=2e-6, atol=0)
    assert [output.predictions.tolist() for output in outputs] == [of.tolist() for of in predictions]
    wanted = their_gradients(theirs)
    assert set(wanted) == set(gradients(ours))
    assert_equal_gradients(gradients(ours), wanted, 1e-5)  # measured: 2.1e-6 of lengths (DoRA), 6e-7 of the others


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_loss_and_gradients_are_those_of_peft(tmp_path, settings):
    theirs = tuned(tmp_path, **settings)
    check(theirs, ours_of(tmp_path, **{key.replace("lora_dropout", "dropout"): v for key, v in settings.items()}))


def test_chosen_layers_are_those_of_peft(tmp_path):
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    theirs = tuned(tmp_path, targets, layers_to_transform=[0, 2], use_dora=True)
    frozen = {name: {"trainable": False} for name in ("encoder", "projector")}
    model = named(tmp_path / "whole", **frozen)
    model = with_lora(model, ["language"], pretrained=str(tmp_path / "adapter"), use_dora=True)
    language = dataclasses.replace(model.language, trainable_layers="0, -1..")
    ours = reference_of(dataclasses.replace(model, language=language))
    assert {n.split(".")[3] for n in ours.weights() if ".lora_A." in n} == {"0", "2"}
    check(theirs, ours)


@pytest.mark.parametrize("dora", [False, True])
def test_a_projector_of_llava_has_adapters(tmp_path, dora):
    whole, targets = save_llava("clip, llama", tmp_path / "whole"), r".*multi_modal_projector\.linear_[12]"
    theirs = get_peft_model(whole, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, use_dora=dora))
    fill_adapters(theirs)
    theirs.save_pretrained(tmp_path / "adapter")
    model = job_model(tmp_path / "whole", encoder=False, language=False, projector="lora")
    lora = dataclasses.replace(model.lora, rank=RANK, alpha=ALPHA, use_dora=dora, pretrained=str(tmp_path / "adapter"))
    chunk = reference_of(dataclasses.replace(model, lora=lora)).chunks["vision"]
    values = {n: p for n, p in theirs.base_model.model.named_parameters() if ".lora_" in n}
    ours = {in_class("llava", n): p for n, p in chunk.named_parameters() if ".lora_" in n}
    assert ours.keys() == values.keys()
    assert all(torch.equal(ours[name], value) for name, value in values.items())
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    out, expected = chunk.projector(x), theirs.base_model.model.model.multi_modal_projector(x)
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    assert_equal_gradients({n: p.grad for n, p in ours.items()}, {n: p.grad for n, p in values.items()})


# --------------------------------------------------------------------------------------------- dropout


class Masked(torch.nn.Module):
    """A dropout whose mask is given."""

    def __init__(self, mask, p) -> None:
        super().__init__()
        self.mask, self.p = mask, p

    def forward(self, x):
        return x * self.mask / (1 - self.p)


@pytest.mark.parametrize("dora", [False, True])
def test_with_one_mask_a_layer_is_that_of_peft(tiny, dora):
    p, key, name = 0.4, 17, "language.model.layers.1.mlp.up_proj"
    chunk = build(with_lora(tiny.model(None), ["language"], dropout=p, use_dora=dora), "language")
    fill_adapters(chunk)
    layer, keys = chunk.get_submodule(name), DropoutKeys(chunk)
    base = torch.nn.Sequential(torch.nn.Linear(24, 40, bias=False))
    base[0].weight = torch.nn.Parameter(layer.base_layer.weight.detach().clone())
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["0"], lora_dropout=p, use_dora=dora)
    theirs = get_peft_model(base, config).base_model.model[0].train()
    own = dict(layer.named_parameters())
    with torch.no_grad():
        for parameter_name, parameter in theirs.named_parameters():
            parameter.copy_(own[parameter_name])
    x = torch.randn(6, 24, generator=torch.Generator().manual_seed(3))
    dropout_key = combined_key(key, f"{name}.lora_dropout.default")
    theirs.lora_dropout["default"] = Masked(kept_inputs(dropout_key, x.shape, p, (0, 1), x.device), p)
    inputs, outputs = [x.clone().requires_grad_() for _ in range(2)], []
    with keys.of(key):
        outputs.append(layer(inputs[0]))
        outputs[0].square().sum().backward()
    outputs.append(theirs(inputs[1]))
    outputs[1].square().sum().backward()
    torch.testing.assert_close(*outputs)
    wanted = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None} | {"x": inputs[1].grad}
    assert_equal_gradients({n: own[n].grad for n in wanted if n != "x"} | {"x": inputs[0].grad}, wanted)
    # Without a key nothing is dropped.
    assert not torch.allclose(layer(x), outputs[0])
    theirs.lora_dropout["default"] = torch.nn.Dropout(p)
    theirs.eval()
    torch.testing.assert_close(layer(x), theirs(x))


def test_masks_keep_their_part_and_differ_by_layer_and_key():
    shape, device = torch.Size((500, 80)), torch.device("cpu")
    masks = [kept_inputs(combined_key(key, name), shape, 0.3, (0, 1), device) for key in (1, 2) for name in "ab"]
    for mask in masks:
        assert abs(float(mask.float().mean()) - 0.7) < 5 * (0.3 * 0.7 / mask.numel()) ** 0.5
    for one in range(4):
        for other in range(one):
            agree = float((masks[one] == masks[other]).float().mean())
            assert abs(agree - 0.58) < 0.01, "as two masks that know nothing of each other"


def test_masks_of_parts_of_the_columns_are_parts_of_the_mask():
    whole = kept_inputs(5, torch.Size((7, 12)), 0.5, (0, 1), torch.device("cpu"))
    parts = [kept_inputs(5, torch.Size((8, 4)), 0.5, (i, 3), torch.device("cpu")) for i in range(3)]
    assert torch.equal(torch.cat(parts, 1)[:7], whole), "padding comes behind all rows"


def test_no_dropout_is_no_layer(tiny):
    chunk = build(with_lora(tiny.model(None), ["language"], dropout=0.0), "language")
    assert not any(isinstance(module, AdapterDropout) for module in chunk.modules())
