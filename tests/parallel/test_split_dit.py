"""A DiT's backward in two halves: equal gradients, and between the halves the bytes that its spec says."""

import pytest
import torch

from mmtrain.parallel.weight_grads import WeightGrads
from mmtrain.spec.builders import model_spec
from tests.models.dits import Clips, chunk, t2v


@pytest.mark.parametrize("layers", [(0, 2), (1, 2), (4, 5), (0, 5)], ids=["embed", "block", "head", "whole"])
def test_both_halves_together_give_the_gradients_of_the_whole_and_hold_what_the_spec_says(layers):
    model = t2v()
    spec, clips = model_spec(model), Clips.draw(model)
    found = []
    for halves in (False, True):
        made = chunk(model, "dit", layers)
        torch.manual_seed(0)
        states = torch.randn(clips.size.texts, 24).requires_grad_()
        x = torch.randn(clips.size.rows + clips.size.texts + 7 * clips.size.clips, 32).requires_grad_()
        first = {"features": states, "timesteps": clips.timesteps} if layers[0] == 0 else {}
        last = {"targets": clips.targets} if layers[1] == 5 else {}
        given = clips.latents if first else x

        def forward(made=made, given=given, first=first, last=last):
            out = made(given, **clips.common, **first, **last)
            return out.loss_sum if last else out.square().sum()

        if halves:
            weights = WeightGrads(made)
            with weights.deferred(0):
                forward().backward()
            held = sum(layer.linear_bytes(clips.size) for layer in spec.module("dit").layers[slice(*layers)])
            assert 0.95 * held <= weights.held_bytes() <= held
            weights.run(0)
        else:
            forward().backward()
        entering = states if first else x
        found.append({"input": entering.grad, **{name: p.grad for name, p in made.named_parameters()}})
    whole, split = found
    assert whole.keys() == split.keys()
    for name, grad in whole.items():
        torch.testing.assert_close(split[name], grad, rtol=1e-5, atol=1e-5 * grad.abs().max().item())
