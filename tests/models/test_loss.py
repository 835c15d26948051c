"""Losses by name, against torch's own functions."""

import dataclasses
import math
from typing import get_args, get_type_hints

import pytest
import torch
from torch import nn

from mmtrain.config import config
from mmtrain.config.model import ContrastConfig, DitConfig, LanguageConfig
from mmtrain.errors import ConfigError
from mmtrain.modality.bitfield import language_bits
from mmtrain.modality.metadata import DocumentMeta, IterationMeta, MicrobatchMeta
from mmtrain.modality.positions import token_positions
from mmtrain.models.attention.context import attention_context
from mmtrain.models.batch import IGNORE_INDEX, head_arguments
from mmtrain.models.build import build_chunk
from mmtrain.models.loss import LOSSES, CrossEntropy, loss_of
from mmtrain.models.reference import ReferenceModel
from mmtrain.spec.builders import model_spec
from tests.models.dits import WAN, t2v
from tests.reference import in_chunks, make_batch, model_config

TORCH = {
    "cross_entropy": (model_config, nn.functional.cross_entropy, lambda shape: torch.randint(0, shape[1], shape[:1])),
    "squared_error": (t2v, nn.functional.mse_loss, torch.randn),
}
"""Name -> a model with it, torch's function, and targets for predictions of a shape."""


PAIRS = ("clip", "siglip")
"""Losses of pairs, which `test_contrast.py` compares."""


def test_every_loss_is_compared():
    assert {*TORCH, *PAIRS} == set(LOSSES)


@pytest.mark.parametrize("rows", [5, 0])
@pytest.mark.parametrize("name", TORCH)
def test_a_loss_is_that_of_torch(name, rows):
    model, theirs, targets_of = TORCH[name]
    torch.manual_seed(0)
    predicted = torch.randn(rows, 7, requires_grad=True)
    targets, loss = targets_of((rows, 7)), loss_of(model())
    for reduction in ("sum", "none"):
        ours = loss(predicted, targets, reduction=reduction)
        expected = theirs(predicted, targets, reduction=reduction)
        assert ours.dtype == torch.float32
        assert torch.equal(ours, expected)
        grads = [torch.autograd.grad(each.sum(), predicted)[0] for each in (ours, expected)]
        assert torch.equal(*grads)
    half = loss(predicted.bfloat16(), targets)
    assert half.dtype == torch.float32


def test_losses_are_divided_by_the_numbers_that_are_predicted():
    document = DocumentMeta(sample=0, num_tokens=5, num_targets=3, images=())
    meta = IterationMeta(microbatches=(MicrobatchMeta(documents=(document,)),))
    assert loss_of(model_config()).num_values(meta) == 3
    assert loss_of(t2v()).num_values(meta) == 3 * WAN["out_channels"] * math.prod(WAN["patch_size"])


class ZLoss(CrossEntropy):
    """A loss that mmtrain does not have: that of PaLM, arXiv:2204.02311, section 5."""

    def __call__(self, logits_LV, targets_L, **division):
        return super().__call__(logits_LV, targets_L, **division) + 1e-4 * logits_LV.logsumexp(-1).square().sum()


def test_another_loss_is_one_entry(monkeypatch):
    model = model_config(None)
    batch = make_batch(model, [[0, 0], [0]], seed=1)
    spec = model_spec(model)
    chunk = ReferenceModel(model, spec, seed=0).chunks["language"]
    logits = []
    chunk.language.lm_head.register_forward_hook(lambda module, args, out: logits.append(out.detach()))
    expected = 0.0
    for tensors, counts in zip(batch[0].microbatches, batch[1].microbatches, strict=True):
        position_ids = torch.from_numpy(token_positions(counts.documents, 1))
        mask = attention_context(language_bits(counts))
        chunk(tensors.input_ids, attention=mask, position_ids=position_ids, **head_arguments(tensors.labels))
        targets = tensors.labels[tensors.labels != IGNORE_INDEX]
        expected += nn.functional.cross_entropy(logits[-1], targets, reduction="sum")
        expected += 1e-4 * logits[-1].exp().sum(-1).log().square().sum()
    monkeypatch.setitem(LOSSES, "z_loss", ZLoss)
    changed = dataclasses.replace(model, language=dataclasses.replace(model.language, loss="z_loss"))
    ours = ReferenceModel(changed, spec, seed=0).loss_sum(*batch)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    with pytest.raises(
        ConfigError, match=r"loss = 'z_loss' with training.loss_chunk_tokens = 2: only cross_entropy .* set 0"
    ):
        build_chunk(changed, in_chunks(spec, changed, 2), "language", (0, len(spec.text.layers)))


@pytest.mark.parametrize("key", ["model.language.loss", "model.dit.loss"])
def test_an_unknown_loss_is_refused(key):
    with pytest.raises(ConfigError, match=rf"{key}.*hinge.*(cross_entropy|squared_error)"):
        config.load("debug_t2v.toml", [f"--{key}=hinge"])


def test_the_keys_name_the_losses_of_the_table():
    named = {
        name
        for section in (LanguageConfig, DitConfig, ContrastConfig)
        for name in get_args(get_type_hints(section)["loss"])
    }
    assert named == set(LOSSES)
