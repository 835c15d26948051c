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
from tests.lora import with_lora
from tests.models.attention.varlen import ANY
from tests.models.conftest import tiny_model
from tests.spec.test_builders import FAMILIES, inputs


@pytest.mark.parametrize(
    ("backend", "adapters"), [("sdpa", False), ("varlen", False), ("varlen", True)], ids=["sdpa", "varlen", "LoRA"]
)
@pytest.mark.parametrize(("module", "choice"), FAMILIES)
def test_forward_and_backward_and_its_parts_wait_for_nothing(module, choice, backend, adapters, monkeypatch):
    """Of language models all but the head, which looks for its labelled rows on the device."""
    if backend == "varlen":  # what "auto" then chooses there
        monkeypatch.setitem(LIMITS, "meta", ANY)
    called = []
    attend = varlen.varlen_attn
    monkeypatch.setattr(varlen, "varlen_attn", lambda *args, **kwargs: called.append(1) or attend(*args, **kwargs))
    model = tiny_model(**choice)
    model = with_lora(model) if adapters else model
    spec = model_spec(model)
    count = len(spec.module(module).layers) - (module == "language")
    x, kwargs, _ = inputs(model, spec, module, 0, torch.float32)
    kwargs = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in kwargs.items() if k != "labels"}
    x = x.to("meta").requires_grad_(x.is_floating_point())
    chunk = build_chunk(model, spec, module, (0, count), device="meta").to("meta")  # its buffers, too
    chunk(x, **kwargs).sum().backward()
    grads = WeightGrads(chunk)
    with grads.deferred(0):
        loss = chunk(x, **kwargs).sum()
    with grads.deferred(0):
        loss.backward()
    grads.run(0)
    assert any(p.grad is not None for p in chunk.parameters())
    assert bool(called) == (backend == "varlen")
