"""Layouts whose attention goes through torch's variable-length attention equal the one-process model without it."""

import pytest

from mmtrain.config.topology import JobLayout
from tests.models.attention.varlen import ANY, on_cpu
from tests.parallel.parity import Case, check, identify, run_layout, shallow
from tests.parallel.test_parity import TOLERANCE
from tests.ranks import run_ranks
from tests.reference import model_config

CASES = {
    "qwen vision, qwen2, causal split": shallow(Case(model=model_config(), split="causal", head_groups=2)),
    "qwen2.5 vision, llama, patches": shallow(
        Case(model=model_config("qwen2_5_vl_vision", "llama"), split="causal", share_patches=True)
    ),
}


def run_both(rank, shape, cases):
    """The differences from the one-process model, which is run first and without the operator; forward calls of it."""
    run_layout(rank, shape, cases)
    with on_cpu(ANY) as calls:
        found = run_layout(rank, shape, cases)
    return found, sum(not call.backward for call in calls)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "shape", [JobLayout.grid(cp=2), JobLayout.grid(tp=2), JobLayout.grid(pp=2, cp=2)], ids=identify
)
def test_loss_and_gradients(shape):
    answers = run_ranks(run_both, shape.world_size, shape, CASES)
    check([found for found, _ in answers], TOLERANCE)
    assert all(calls for _, calls in answers)
