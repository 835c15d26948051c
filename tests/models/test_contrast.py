"""The loss of pairs in one process, against transformers' own and plain torch in float64."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mmtrain.config.model import ContrastConfig, LanguageConfig, ModelConfig
from mmtrain.models.build import materialise
from mmtrain.models.contrast import ContrastChunk
from mmtrain.models.initialise import init_weights
from mmtrain.models.loss import ClipLoss, SigmoidLoss
from mmtrain.spec.contrast import contrast_module
from mmtrain.spec.spec import ModelSpec
from mmtrain.spec.work_size import WorkSize
from tests.reference import LANGUAGES

WIDTH = 24


def chunk_of(loss: str, dtype: torch.dtype = torch.float32) -> ContrastChunk:
    contrast = ContrastConfig(loss=loss)
    model = ModelConfig(language=LanguageConfig(config=LANGUAGES["llama"]), contrast=contrast)
    module = contrast_module(contrast, ("vision", "language"), WIDTH)
    chunk = ContrastChunk(model, ModelSpec(modules=(module,)))
    materialise(chunk, "cpu", dtype)
    init_weights(chunk, 0)
    return chunk


def embeddings(count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    made = torch.randn(2, count, WIDTH, generator=generator, dtype=torch.float64)
    return [rows.to(dtype).requires_grad_() for rows in made]


def expected(loss: str, images: Tensor, captions: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """By the formulas of transformers' classes, of means (its function for CLIP's is not public)."""
    images, captions = (x / x.norm(dim=-1, keepdim=True) for x in (images, captions))
    logits_per_text = captions @ images.T * scale.exp()
    if loss == "clip":
        of_texts, of_images = (x.log_softmax(dim=1).diagonal() for x in (logits_per_text, logits_per_text.T))
        return -(of_texts + of_images).mean() / 2
    assert bias is not None
    logits_per_text = logits_per_text + bias
    ones = 2 * torch.eye(len(images), dtype=images.dtype) - 1
    return -nn.functional.logsigmoid(ones * logits_per_text).sum(dim=-1).mean()


@pytest.mark.parametrize("count", [1, 2, 17])
@pytest.mark.parametrize("loss", ["clip", "siglip"])
def test_loss_and_gradients_are_those_of_transformers(loss, count):
    """In float64, of parts of any size; largest differences measured 4e-7 relative (float32 inside)."""
    chunk = chunk_of(loss)
    images, captions = embeddings(count)
    cut = max(1, count // 3)
    output = chunk(*images.split(cut), captions, want_losses=True, want_predictions=True)
    output.loss_sum.backward()
    exact = [x.detach().double().requires_grad_() for x in (images, captions)]
    scalars = {name: p.detach().double().requires_grad_() for name, p in chunk.contrast.named_parameters()}
    truth = expected(loss, *exact, scalars["logit_scale"], scalars.get("logit_bias")) * count
    truth.sum().backward()
    torch.testing.assert_close(output.loss_sum.double(), truth.sum(), rtol=2e-6, atol=1e-6)
    assert output.losses.sum().item() == pytest.approx(output.loss_sum.item(), rel=1e-6)
    for x, of in zip((images, captions), exact, strict=True):
        torch.testing.assert_close(x.grad.double(), of.grad, rtol=1e-4, atol=2e-6)
    for name, p in chunk.contrast.named_parameters():
        torch.testing.assert_close(p.grad.double(), scalars[name].grad, rtol=1e-4, atol=1e-5)
    normed = torch.stack([nn.functional.normalize(x.detach(), dim=-1) for x in (images, captions)])
    torch.testing.assert_close(output.predictions, normed)


@pytest.mark.parametrize("loss", [ClipLoss, SigmoidLoss])
def test_pairs_may_be_in_another_order(loss):
    """The loss of each image is the same wherever its caption stands."""
    model = ModelConfig(language=LanguageConfig(config=LANGUAGES["llama"]))
    logits = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    order = torch.tensor([3, 0, 4, 1, 2])
    plain = loss(model)(logits, torch.arange(5), reduction="none")
    moved = torch.empty_like(logits)
    moved[:, order] = logits
    torch.testing.assert_close(loss(model)(moved, order, reduction="none"), plain)
    assert loss(model)(logits, torch.arange(5)).item() == pytest.approx(plain.sum().item(), rel=1e-6)


@pytest.mark.parametrize(("loss", "start"), [("clip", [math.log(1 / 0.07)]), ("siglip", [math.log(10), -10.0])])
def test_parameters_begin_as_in_the_papers(loss, start):
    chunk = chunk_of(loss)
    assert [p.item() for p in chunk.parameters()] == pytest.approx(start)
    assert chunk.module_spec.num_params == sum(p.numel() for p in chunk.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", ["clip", "siglip"])
def test_bytes_and_flops_are_those_of_the_spec(loss, dtype):
    """Bytes but for scalars."""
    count, chunk = 64, chunk_of(loss, dtype)
    inputs = embeddings(count, dtype)
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), FlopCounterMode(display=False) as flops:
        chunk(*inputs)
    (layer,) = chunk.module_spec.layers
    size = WorkSize(rows=2 * count, pairs=count * count, outputs=count)
    found = sum(storage.nbytes() for storage in kept.values())
    assert found == pytest.approx(layer.activation_bytes(size), abs=16)
    assert flops.get_total_flops() == layer.flops(size, input_grad=True).forward
