"""Nothing inside of a chunk's forward and backward needs a value from the device, for which the host would wait.

On the meta device tensors have no values: `item`, `nonzero`, a boolean index or a copy to the host raises
there. Not covered: copies from the host, which pass.
"""

import pytest
import torch

from mmtrain.models.attention import varlen
from mmtrain.models.attention.varlen import LIMITS
from mmtrain.models.build import build_chunk
from mmtrain.parallel.weight_grads import WeightGrads
from mmtrain.spec.builders import model_spec
from mmtrain.spec.vocabulary import divided_vocabulary
from tests.lora import with_lora
from tests.models.attention.varlen import ANY
from tests.models.conftest import tiny_model
from tests.reference import in_chunks
from tests.spec.test_builders import FAMILIES, inputs


@pytest.mark.parametrize(
    ("backend", "adapters"), [("sdpa", False), ("varlen", False), ("varlen", True)], ids=["sdpa", "varlen", "LoRA"]
)
@pytest.mark.parametrize(("module", "choice"), FAMILIES)
def test_forward_and_backward_and_its_parts_wait_for_nothing(module, choice, backend, adapters, monkeypatch):
    """Of language models with a head that makes all logits, with predictions."""
    if backend == "varlen":  # what "auto" then chooses there
        monkeypatch.setitem(LIMITS, "meta", ANY)
    called = []
    attend = varlen.varlen_attn
    monkeypatch.setattr(varlen, "varlen_attn", lambda *args, **kwargs: called.append(1) or attend(*args, **kwargs))
    model = tiny_model(**choice)
    model = with_lora(model) if adapters else model
    spec = model_spec(model)
    chunk, x, kwargs = on_meta(model, spec, module, (0, len(spec.module(module).layers)))
    run_all(chunk, x, kwargs | ({"want_predictions": True, "want_losses": True} if module == "language" else {}))
    assert any(p.grad is not None for p in chunk.parameters())
    assert bool(called) == (backend == "varlen")


@pytest.mark.parametrize("parts", [0, 2])
def test_a_head_in_pieces_waits_for_nothing(parts):
    model = tiny_model()
    spec = model_spec(model)
    last = len(spec.text.layers) - 1
    if not parts:
        chunk, x, kwargs = on_meta(model, in_chunks(spec, model, 2), "language", (last, last + 1), first=last)
        assert chunk.loss_chunk_tokens == 2
        run_all(chunk, x, kwargs | {"want_predictions": True, "want_losses": True})
    else:
        _, x, kwargs = on_meta(model, spec, "language", (last, last + 1), first=last)
        divided = in_chunks(divided_vocabulary(spec, parts), model, 2)
        chunk = build_chunk(model, divided, "head.1", (0, 1), device="meta")
        assert chunk.loss_chunk_tokens == 2
        x = x.detach()[: len(kwargs["targets"])].requires_grad_()
        run_all(chunk, x, {"targets": kwargs["targets"], "want_predictions": True})
    assert all(p.grad is not None for p in chunk.parameters())


def on_meta(model, spec, module, layers, first=0):
    """A chunk, its input and its arguments without values. Args: first: layer of the input."""
    x, kwargs, _ = inputs(model, spec, module, first, torch.float32)
    kwargs = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    x = x.detach().to("meta").requires_grad_(x.is_floating_point())
    chunk = build_chunk(model, spec, module, layers, device="meta").to("meta")  # its buffers, too
    return chunk, x, kwargs


def run_all(chunk, x, kwargs):
    """Forward and backward, then forward, I and W."""

    def start():
        out = chunk(x, **kwargs)
        return out.sum() if isinstance(out, torch.Tensor) else out.loss_sum

    start().backward()
    grads = WeightGrads(chunk)
    with grads.deferred(0):
        loss = start()
    with grads.deferred(0):
        loss.backward()
    grads.run(0)
