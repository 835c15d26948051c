"""Tensor parallelism under FSDP2: gradients, their norm and an optimizer step equal one process's."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from mmtrain.config.optimizer import OptimizerConfig
from mmtrain.config.topology import JobLayout
from mmtrain.parallel.fsdp import apply_fsdp
from mmtrain.parallel.grads import squared_norm
from mmtrain.parallel.mesh import build_mesh
from mmtrain.parallel.optim import build_optimizers
from mmtrain.parallel.torch_private import keep_grads_local
from tests.parallel.tensor_cases import (
    build,
    full,
    gradients,
    language_inputs,
    largest_error,
    model_config,
    run_language,
    run_vision,
    vision_inputs,
)
from tests.ranks import run_ranks
from tests.reference import TRAINING

TOLERANCE = 1e-5
"""Of gradients in float32, see `largest_error`; measured: at most 7e-7."""
STEP_TOLERANCE = 5e-5
"""Of parameters after one step, which divides by the gradient's root mean square; measured: at most 1.2e-5."""
BFLOAT16_TOLERANCE = 0.03
"""L2 norm of the difference of all gradients, relative to the float32 gradients'. Measured: 0.012."""


def total(chunks, module, name, tp=1, tp_rank=0, dtype=torch.float32):
    """The loss of one microbatch; for an encoder a weighted sum of this rank's features."""
    if module == "language":
        inputs = language_inputs()
        return run_language(chunks, inputs, inputs[1].to(dtype), tp=tp, tp_rank=tp_rank).loss_sum
    features = run_vision(chunks, vision_inputs(name))
    rows = len(features) * tp
    weight = torch.randn(rows, features.shape[1], generator=torch.Generator().manual_seed(2))
    return (features.float() * weight.chunk(tp)[tp_rank]).sum()


def two_by_two(rank, module, name, dtype, implementation):
    mesh = build_mesh(JobLayout.grid(dp_shard=2, tp=2), torch.device("cpu"))
    training = dataclasses.replace(TRAINING, mixed_precision_param=dtype)
    model = model_config(None, name, tie_word_embeddings=True) if module == "language" else model_config(name)
    reference, chunks = build(model, module), build(model, module, (), mesh.tp)
    (chunk,) = chunks
    apply_fsdp(chunk, chunk.blocks(), mesh.fsdp(), training, reshard=False)

    keep_grads_local(chunk)
    for last in (False, True):  # two backwards, one reduction
        if last:
            chunk.set_is_last_backward(True)
            chunk.set_requires_gradient_sync(True)
            chunk.set_reshard_after_backward(True)
        total(chunks, module, name, 2, mesh.tp.get_local_rank(), getattr(torch, dtype)).backward()
        (2 * total(reference, module, name)).backward()  # both replicas have this microbatch

    ours, theirs = gradients(chunks), gradients(reference)
    squares = sum(float(g.double().pow(2).sum()) for g in theirs.values())
    difference = sum(float((ours[n] - g).double().pow(2).sum()) for n, g in theirs.items())
    own = squared_norm(chunk.parameters(), mesh)
    dist.all_reduce(own)
    norm = abs(float(own) ** 0.5 / squares**0.5 - 1)

    section = OptimizerConfig(implementation=implementation, lr=1.0, eps=1.0)  # so that small gradients weigh little
    for parts in (chunks, reference):
        build_optimizers(section, parts, ()).step()
    weights = largest_error(
        {n: full(p.detach()) for n, p in chunk.named_parameters()},
        {n: p.detach() for n, p in reference[0].named_parameters()},
    )
    return largest_error(ours, theirs), (difference / squares) ** 0.5, norm, weights


def float32_cases(rank):
    return {
        case: two_by_two(rank, *case)
        for case in (
            ("language", "qwen2", "float32", "foreach"),
            ("vision", "qwen2_vl", "float32", "fused"),
            ("vision", "whisper", "float32", "for-loop"),
        )
    }


@pytest.mark.ranks
def test_gradients_norm_and_step_equal_one_process():
    for found in run_ranks(float32_cases, 4):
        for case, (gradient, _, norm, weights) in found.items():
            assert gradient < TOLERANCE, (case, gradient)
            assert norm < 1e-6, (case, norm)
            assert weights < STEP_TOLERANCE, (case, weights)


@pytest.mark.ranks
@pytest.mark.parametrize("case", [("language", "qwen2"), ("vision", "siglip")], ids=lambda case: case[1])
def test_bfloat16_gradients_are_close_to_float32(case):
    for _, difference, norm, _ in run_ranks(two_by_two, 4, *case, "bfloat16", "foreach"):
        assert 0 < difference < BFLOAT16_TOLERANCE
        assert norm < BFLOAT16_TOLERANCE
