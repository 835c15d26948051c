"""Two towers in one process against the whole classes of transformers: loss, and the gradient of every parameter."""

import pytest
import torch

from mmtrain.models.reference import ReferenceModel
from mmtrain.spec.builders import model_spec
from tests.models.towers import inputs_of, make_pairs, two_towers, whole_model, whole_name

TOLERANCE = 2e-5
"""Of gradients, relative to the largest of each parameter. Measured: at most 1.2e-5, of a bias of keys,
whose exact gradient is 0."""


@pytest.mark.parametrize("microbatches", [0, 1, 2])
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_loss_and_gradients_are_those_of_transformers(kind, microbatches):
    model = two_towers(kind, microbatches=microbatches)
    batch, meta = make_pairs(model, [3, 5, 1], seed=1)
    reference = ReferenceModel(model, model_spec(model), seed=5)
    loss = reference.loss_sum(batch, meta)
    loss.backward()

    whole = whole_model(kind, reference.weights())
    pairs = list(zip(batch.microbatches, meta.microbatches, strict=True))
    size = microbatches or len(pairs)
    groups = [pairs[start : start + size] for start in range(0, len(pairs), size)]
    sums = [whole(**inputs_of(g), return_loss=True).loss * sum(len(m.documents) for _, m in g) for g in groups]
    wanted = torch.stack(sums).sum()
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    theirs = dict(whole.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in theirs.values())
    for name, p in reference.weights().items():
        other = theirs[whole_name(name)].grad.reshape(p.shape)
        error = float((p.grad - other).abs().max() / (other.abs().max() + 1e-3 * largest))
        assert error < TOLERANCE, (name, error)
